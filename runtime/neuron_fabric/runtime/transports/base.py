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

from neuron_fabric.runtime.envelope import Envelopes, envelope_bytes, write_envelope
from neuron_fabric.runtime.layout import BucketLayout

__all__ = ["BucketVotes", "Exchange", "ReducerFailedError", "Transport", "VotesKind"]

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


@dataclass(frozen=True)
class BucketVotes:
    """All that is needed to decode a bucket: ``words`` is uint64 of shape (rows or planes, layout.words)."""

    envelopes: Envelopes
    kind: VotesKind
    words: U64


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
