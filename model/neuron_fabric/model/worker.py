"""The worker's side of the protocol: the reference that drivers are held against.

It keeps the rules 9 to 11 of ``docs/protocol.md`` and has neither clock nor socket: the caller moves frames and decides
when to retransmit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import BITMAP_BYTES, JobConfig
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES, Flags, FrameType, Header, HeaderError, Reason

__all__ = ["BucketFailedError", "GoldenWorker", "Reduced"]

U8 = npt.NDArray[np.uint8]
_CHUNKS = 1 << 32


class BucketFailedError(RuntimeError):
    """The reducer has gone past a chunk that is not finished here; the bucket must be redone without it."""


@dataclass(frozen=True)
class Reduced:
    """The result of one bucket.

    Attributes
    ----------
    planes : uint8, shape (result planes, lines * line_bytes)
        Tally planes (LSB first) or (negative, nonzero).
    voters, missing : int arrays, shape (chunks,)
        Per chunk.
    counted : tuple of int or None, one per chunk
        For a PARTIAL chunk the mask of the workers in its tally, else None.
    """

    planes: U8
    voters: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int64]
    counted: tuple[int | None, ...]


@dataclass
class _Chunk:
    number: int
    first_line: int
    lines: int
    abstains: bool
    planes: dict[int, bytes] = field(default_factory=dict)
    voters: int = 0
    missing: int = 0
    flags: Flags = Flags.NONE
    counted: int | None = None
    sent: bool = False
    done: bool = False


class GoldenWorker:
    """One worker of one job.

    Parameters
    ----------
    params : ReducerParams
    config : JobConfig
        As opened at the reducer.
    worker : int
        This worker's number.
    result_planes : int
        Planes of a result at the root (2 for ``majority``).
    first_chunk : int
        A chunk number on which all workers of the job agree.
    reducer : address, optional
        Frames from elsewhere are ignored.
    """

    def __init__(
        self,
        params: ReducerParams,
        config: JobConfig,
        worker: int,
        result_planes: int,
        *,
        first_chunk: int = 0,
        reducer: Hashable | None = None,
    ) -> None:
        self.params = params
        self.config = config
        self.worker = worker
        self.counters: Counter[str] = Counter()
        self._result_planes = result_planes
        self._reducer = reducer
        self._next = first_chunk
        self._chunks: dict[int, _Chunk] = {}
        self._planes: U8 | None = None

    @property
    def next_chunk(self) -> int:
        """The first chunk number that was never used."""
        return self._next

    def resume(self, chunk: int) -> None:
        """Give the bucket up and go on at ``chunk``, agreed by all workers and never used (rule 10)."""
        self._chunks.clear()
        self._next = chunk % _CHUNKS

    def submit(self, planes: U8 | None, lines: int, *, abstain: Sequence[bool] | None = None) -> None:
        """Begin a bucket of ``lines`` lines.

        ``planes`` has shape (encoding planes, lines * line_bytes), or is None to abstain from all of it; ``abstain``
        says for each chunk whether to abstain from that one.
        """
        if any(not chunk.done for chunk in self._chunks.values()):
            raise RuntimeError("the bucket before is not finished")
        expected = (self.config.encoding.planes, lines * self.params.line_bytes)
        if planes is not None and planes.shape != expected:
            raise ValueError(f"planes must have shape {expected}, not {planes.shape}")
        firsts = range(0, lines, self.params.lines_per_chunk)
        if abstain is not None and len(abstain) != len(firsts):
            raise ValueError(f"abstain has {len(abstain)} entries for {len(firsts)} chunks")
        self._planes = planes
        self._chunks.clear()
        for index, first in enumerate(firsts):
            count = min(self.params.lines_per_chunk, lines - first)
            abstains = planes is None or (abstain is not None and abstain[index])
            self._chunks[self._next] = _Chunk(self._next, first, count, abstains)
            self._next = (self._next + 1) % _CHUNKS

    def outgoing(self, *, again: bool = False) -> list[bytes]:
        """Frames that may be sent now; with ``again`` also those that were sent before and are not answered."""
        frames: list[bytes] = []
        for chunk in self._chunks.values():
            if chunk.done or (chunk.sent and not again):
                continue
            before = self._chunks.get((chunk.number - self.config.slot_count(self.params)) % _CHUNKS)
            if before is not None and not before.done:
                continue  # rule 10: the slot is not free before c - S is finished
            chunk.sent = True
            frames += self._frames(chunk)
        return frames

    def _frames(self, chunk: _Chunk) -> list[bytes]:
        config, planes = self.config, self.config.encoding.planes
        if chunk.abstains or self._planes is None:
            header = Header(
                FrameType.ABSTAIN,
                config.job,
                self.worker,
                chunk.number,
                planes=planes,
                voters=0,
                lines=chunk.lines,
                epoch=config.epoch,
            )
            return [header.pack()]
        begin = chunk.first_line * self.params.line_bytes
        end = begin + chunk.lines * self.params.line_bytes
        return [
            Header(
                FrameType.CONTRIBUTE,
                config.job,
                self.worker,
                chunk.number,
                plane,
                planes,
                lines=chunk.lines,
                epoch=config.epoch,
            ).pack()
            + self._planes[plane, begin:end].tobytes()
            for plane in range(planes)
        ]

    def receive(self, payload: bytes, sender: Hashable | None = None) -> None:
        """Take a frame from the reducer.

        Raises
        ------
        BucketFailedError
            On a NACK with reason STALE for an unfinished chunk.
        """
        try:
            header = Header.unpack(payload)
        except HeaderError:
            self.counters["ignored"] += 1
            return
        config = self.config
        chunk = self._chunks.get(header.chunk)
        if sender != self._reducer or header.job != config.job or header.epoch != config.epoch or chunk is None:
            self.counters["ignored"] += 1
        elif header.type is FrameType.NACK and header.worker == self.worker:
            self._nacked(chunk, header)
        elif header.type is FrameType.RESULT and header.worker in (self.worker, DESTINATION_ALL):
            self._result(chunk, header, payload[HEADER_BYTES:])
        else:
            self.counters["ignored"] += 1

    def _nacked(self, chunk: _Chunk, header: Header) -> None:
        if chunk.done or not chunk.sent:
            return
        self.counters["nacks"] += 1
        if header.reason == Reason.STALE:
            raise BucketFailedError(f"job {self.config.job}: the reducer has gone past chunk {chunk.number}")

    def _result(self, chunk: _Chunk, header: Header, body: bytes) -> None:
        """Rule 9."""
        if chunk.done:
            self.counters["duplicates"] += 1
            return
        majority = self.config.result_format == "majority"
        size = chunk.lines * self.params.line_bytes
        flags = header.flags & ~Flags.RESEND
        partial = bool(flags & Flags.PARTIAL)
        fits = (
            chunk.sent
            and bool(flags & Flags.MAJORITY) == majority
            and header.planes == self._result_planes
            and header.plane < header.planes
            and header.lines == chunk.lines
            and len(body) == size + (BITMAP_BYTES if partial else 0)
        )
        if fits and chunk.planes:
            fits = (header.voters, header.missing, flags) == (chunk.voters, chunk.missing, chunk.flags)
        if not fits:
            self.counters["ignored"] += 1
            return
        chunk.voters, chunk.missing, chunk.flags = header.voters, header.missing, flags
        if partial:
            chunk.counted = int.from_bytes(body[size:], "little")
        chunk.planes[header.plane] = body[:size]
        chunk.done = len(chunk.planes) == header.planes

    @property
    def done(self) -> bool:
        """Whether every chunk of the bucket has its result."""
        return all(chunk.done for chunk in self._chunks.values())

    def result(self) -> Reduced:
        """The bucket's result; ``RuntimeError`` before it is :attr:`done`."""
        if not self.done:
            raise RuntimeError("the bucket is not finished")
        chunks = list(self._chunks.values())
        planes = [
            np.concatenate([np.frombuffer(chunk.planes[j], np.uint8) for chunk in chunks])
            if chunks
            else np.zeros(0, np.uint8)
            for j in range(self._result_planes)
        ]
        return Reduced(
            np.stack(planes),
            np.array([chunk.voters for chunk in chunks], np.int64),
            np.array([chunk.missing for chunk in chunks], np.int64),
            tuple(chunk.counted for chunk in chunks),
        )
