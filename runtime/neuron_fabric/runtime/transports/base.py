"""What a transport is: it brings every rank's envelope and the counts of all signs to every rank."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroup

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.runtime.envelope import Envelopes, envelope_bytes, write_envelope
from neuron_fabric.runtime.layout import BucketLayout
from neuron_fabric.runtime.plan import ResultFormat

__all__ = [
    "BucketVotes",
    "Exchange",
    "ReducerFailedError",
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
    """What the words of :class:`BucketVotes` are."""

    ROWS = "rows"
    """One row of sign bits per rank, not counted yet."""
    TALLY = "tally"
    """Tally planes, LSB first."""
    MAJORITY = "majority"
    """Two planes, negative and nonzero."""


def majority_is_sent(layout: BucketLayout, envelopes: Envelopes) -> bool:
    """Whether a bucket's result comes as a majority.

    A reducer decides a majority per chunk, where a segment's abstainers are not known; with any, the tally is sent and
    each rank decides for itself.
    """
    return layout.result_format is ResultFormat.MAJORITY and not envelopes.anybody_abstains


def result_planes(majority: bool, world: int) -> int:
    """Planes of a bucket's result."""
    return 2 if majority else BINARY.tally_bits(world)


@dataclass(frozen=True)
class BucketVotes:
    """All that is needed to decode a bucket: ``words`` is uint64 of shape (rows or planes, layout.words)."""

    envelopes: Envelopes
    kind: VotesKind
    words: U64

    def planes_back(self, layout: BucketLayout) -> int:
        """Planes of the result that an endpoint sends for this bucket, however the votes came here."""
        if self.kind is not VotesKind.ROWS:
            return len(self.words)
        return result_planes(majority_is_sent(layout, self.envelopes), len(self.words))


@dataclass
class Exchange:
    """One bucket on its way: filled in by the hook, then by the transport."""

    index: int
    step: int
    layout: BucketLayout
    entries: list[tuple[float, int, int]]
    own: U64
    """This rank's sign plane, shape (layout.words,)."""
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
    """One way to count signs.

    :meth:`start` runs in the thread of the communication hook, in bucket order, and launches the first collective;
    :meth:`finish` runs when that is complete. A transport with a second stage (``deferred``) launches it in
    :meth:`finish`, which then runs in one worker thread, in bucket order, on the transport's own process group. So the
    order of collectives within each group is the same on all ranks.
    """

    name: str
    deferred: bool
    may_fail = False
    """Whether a reducer can fail for a bucket on one rank, so that the ranks must agree on each step's outcome."""

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
