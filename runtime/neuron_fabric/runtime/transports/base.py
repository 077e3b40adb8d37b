"""What a transport is: it brings every rank's envelope and the counts of all votes to every rank."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroup

from neuron_fabric.runtime.admission import Capability, Load
from neuron_fabric.runtime.cost import Endpoint
from neuron_fabric.runtime.envelope import Envelopes, envelope_bytes, write_envelope
from neuron_fabric.runtime.layout import BucketLayout, Section
from neuron_fabric.runtime.plan import ResultFormat

__all__ = [
    "BucketVotes",
    "Exchange",
    "ReducerFailedError",
    "SectionVotes",
    "Transport",
    "VotesKind",
    "majority_is_sent",
    "result_planes",
]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class ReducerFailedError(RuntimeError):
    """A reducer could not answer for a bucket; every rank learns of it and redoes the bucket in FP32."""


class VotesKind(enum.Enum):
    """What the words of :class:`SectionVotes` are."""

    ROWS = "rows"
    """The planes that each rank sent, not counted yet."""
    TALLY = "tally"
    """Tally planes, LSB first, in two's complement where the encoding is signed."""
    MAJORITY = "majority"
    """Two planes, negative and nonzero."""


def majority_is_sent(section: Section, envelopes: Envelopes) -> bool:
    """Whether a section's result comes as a majority.

    A reducer decides a majority per chunk, where a segment's abstainers are not known. Where it counts negative votes
    it would take them for positive ones; so with any, the tally is sent and each rank decides for itself.
    """
    if section.result_format is not ResultFormat.MAJORITY:
        return False
    return not section.encoding.counts_negatives or not envelopes.anybody_abstains(section.segments)


def result_planes(section: Section, majority: bool, world: int) -> int:
    """Planes of a section's result."""
    return 2 if majority else section.encoding.tally_bits(world)


@dataclass(frozen=True)
class SectionVotes:
    """The votes of one section.

    ``words`` is uint64 of shape (world, planes of the encoding, section.words) for rows, else
    (planes of the result, section.words).
    """

    kind: VotesKind
    words: U64


@dataclass(frozen=True)
class BucketVotes:
    """All that is needed to decode a bucket: ``sections`` are the votes of the layout's sections."""

    envelopes: Envelopes
    sections: tuple[SectionVotes, ...]

    def words_back(self, layout: BucketLayout) -> int:
        """uint64 words of the result that an endpoint sends for this bucket, however the votes came here."""
        words = 0
        for section, votes in zip(layout.sections, self.sections, strict=True):
            if votes.kind is VotesKind.ROWS:
                majority = majority_is_sent(section, self.envelopes)
                words += section.words * result_planes(section, majority, len(votes.words))
            else:
                words += votes.words.size
        return words


@dataclass
class Exchange:
    """One bucket on its way: filled in by the hook, then by the transport."""

    index: int
    step: int
    layout: BucketLayout
    entries: list[tuple[float, int, int]]
    own: U64
    """This rank's planes, section by section, shape (layout.words,)."""
    sent_bytes: int = 0
    """Payload bytes this rank puts on the wire, by the collectives' algorithms."""
    scratch: dict[str, Any] = field(default_factory=dict)

    def write_envelope(self, message: U8) -> None:
        """Write this rank's envelope to the head of a message."""
        write_envelope(message, self.layout, self.index, self.step, self.entries)

    @property
    def envelope_bytes(self) -> int:
        """Bytes of the envelope."""
        return envelope_bytes(self.layout)


class Transport(ABC):
    """One way to count votes: a bucket's sections with one collective a stage, all of them together.

    :meth:`start` runs in the thread of the communication hook, in bucket order, and launches the first collective;
    :meth:`finish` runs when that is complete. A transport with a second stage (``deferred``) launches it in
    :meth:`finish`, which then runs in one worker thread, in bucket order, on the transport's own process group. So the
    order of collectives within each group is the same on all ranks.
    """

    name: str
    deferred: bool
    may_fail = False
    """Whether a reducer can fail for a bucket on one rank, so that the ranks must agree on each step's outcome."""

    def capability(self, world: int) -> Capability | None:
        """What a reducer for ``world`` workers can do; None where there is none that could refuse.

        Asked before :meth:`attach`, and the same on all ranks.
        """
        return None

    def endpoint(self, world: int) -> Endpoint | None:
        """The endpoint's figures for the cost law; None where the law does not apply, as with collectives.

        Asked before :meth:`attach`, and the same on all ranks.
        """
        return None

    def load(self) -> Load:
        """What this rank's reducer has counted since this was last asked; nothing where it counts nothing.

        Asked once a step, when all its buckets are finished, by the thread that finishes them. It must not raise, since
        the other ranks are waiting then. Of each measure the greatest over the ranks counts, so that all decide alike.
        """
        return Load()

    def told(self) -> list[int]:
        """What this rank adds to the agreement at the end of a step, of which the greatest over the ranks counts.

        Asked when all buckets of a step are finished, by the thread that finishes them, if the ranks agree at all (as
        they do where a transport ``may_fail``). As many numbers on all ranks. It must neither raise nor wait.
        """
        return []

    def concluded(self, told: Sequence[int]) -> Sequence[str]:
        """What all ranks told, in the same thread; gives back why buckets failed, the same on all ranks."""
        return ()

    def close(self) -> None:  # noqa: B027 most have nothing to leave
        """The state is done with; a second call does nothing."""

    def buffer_bytes(self) -> int:
        """Bytes of the message buffers that the transport keeps from step to step."""
        return sum(self._sizes())

    def scratch_bytes(self) -> int:
        """The most bytes beside those that are taken for a while in a step."""
        return 0

    def _sizes(self, *uses: str) -> list[int]:
        """Bytes of the buffers of these uses, or of all."""
        return [buffer.nbytes for (use, _), buffer in list(self._buffers.items()) if not uses or use in uses]

    def attach(self, group: ProcessGroup, own_group: ProcessGroup | None) -> None:
        """Bind to the process group of DDP, and to the transport's own where it is ``deferred``."""
        self.group = group
        self._own_group = own_group
        self.rank = group.rank()
        self.world = group.size()
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def own_group(self) -> ProcessGroup:
        """The process group of second stages."""
        if self._own_group is None:
            raise RuntimeError(f"transport {self.name!r} has no process group of its own")
        return self._own_group

    @abstractmethod
    def start(self, exchange: Exchange) -> torch.futures.Future[Any]:
        """Launch the first collective of a bucket."""

    @abstractmethod
    def finish(self, exchange: Exchange) -> BucketVotes:
        """Bring the votes home once the first collective is complete."""

    def _buffer(self, use: str, index: int, size: int) -> torch.Tensor:
        """A uint8 buffer of ``size`` bytes that lasts until this bucket of the next step."""
        buffer = self._buffers.get((use, index))
        if buffer is None or buffer.numel() != size:
            buffer = self._buffers[use, index] = torch.zeros(size, dtype=torch.uint8)
        return buffer
