"""The host's side of the CXL endpoint: the reference that drivers are held against.

It keeps the ordering rules of ``docs/cxl.md``, and those numbered 9 to 11 in ``docs/protocol.md``. It has neither clock
nor memory: the caller gives it a port and calls :meth:`CxlHost.step` until it is done or loses patience.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from neuron_fabric.model.cxl import CxlJob, Read
from neuron_fabric.model.cxl_map import (
    SEEN_BITS,
    ContributeLine,
    CxlMap,
    ResultLine,
    Status,
    StatusFlags,
    StatusLine,
    Target,
)
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.wire import serial_newer
from neuron_fabric.model.worker import U8, BucketFailedError, Reduced

__all__ = ["CxlHost", "CxlPort"]

_CHUNKS = 1 << 32


class CxlPort(Protocol):
    """How a host reaches the device. Nothing but :meth:`fence` orders what goes to different addresses."""

    def store(self, address: int, data: bytes) -> None:
        """Store a full line, with MOVDIR64B, ST64B or write-combining stores; never through a cache."""

    def load(self, addresses: Sequence[int]) -> list[Read]:
        """Load lines in any order; each as the device has it at some time since the last fence."""

    def fence(self) -> None:
        """Wait for all stores and drop what was loaded ahead; flush lines that a cache may hold."""


@dataclass
class _Chunk:
    number: int
    first_line: int
    lines: int
    abstains: bool
    missing: int
    """Seen bits of lines that the device is not known to have."""
    planes: U8 | None = field(default=None, repr=False)
    voters: int = 0
    written: bool = False


class CxlHost:
    """One worker of one job at a CXL endpoint.

    Parameters
    ----------
    address_map : CxlMap
    job : CxlJob
        As opened at the device.
    worker : int
        This host's number.
    port : CxlPort
    """

    def __init__(self, address_map: CxlMap, job: CxlJob, worker: int, port: CxlPort) -> None:
        self.map = address_map
        self.job = job
        self.worker = worker
        self.counters: Counter[str] = Counter()
        self._port = port
        self._next = job.first_chunk
        self._planes: U8 | None = None
        self._chunks: dict[int, _Chunk] = {}
        self._everything = address_map.seen_mask(job.config.encoding.planes, job.lines)
        self._parts = -(-self._everything.bit_length() // SEEN_BITS)
        self._slots = job.config.slot_count(address_map.params)

    # ---- buckets -----------------------------------------------------------------------------------------------

    def submit(self, planes: U8 | None, lines: int, *, abstain: Sequence[bool] | None = None) -> None:
        """Begin a bucket of ``lines`` lines; every worker must submit as many.

        ``planes`` has shape (encoding planes, lines * 64), or is None to abstain from all of it; ``abstain`` says for
        each chunk whether to abstain from that one.
        """
        if not self.done:
            raise RuntimeError("the bucket before is not finished")
        expected = (self.job.config.encoding.planes, lines * LINE_BYTES)
        if planes is not None and planes.shape != expected:
            raise ValueError(f"planes must have shape {expected}, not {planes.shape}")
        firsts = range(0, lines, self.job.lines)
        if abstain is not None and len(abstain) != len(firsts):
            raise ValueError(f"abstain has {len(abstain)} entries for {len(firsts)} chunks")
        self._planes = planes
        self._chunks.clear()
        for index, first in enumerate(firsts):
            abstains = planes is None or (abstain is not None and abstain[index])
            count = min(self.job.lines, lines - first)
            self._chunks[self._next] = _Chunk(self._next, first, count, abstains, self._everything)
            self._next = (self._next + 1) % _CHUNKS

    @property
    def done(self) -> bool:
        """Whether every chunk of the bucket has its result."""
        return all(chunk.planes is not None for chunk in self._chunks.values())

    def result(self) -> Reduced:
        """The bucket's result; ``RuntimeError`` before it is :attr:`done`."""
        parts = [chunk.planes for chunk in self._chunks.values() if chunk.planes is not None]
        if len(parts) < len(self._chunks):
            raise RuntimeError("the bucket is not finished")
        return Reduced(
            np.concatenate([np.zeros((self.job.result_planes, 0), np.uint8), *parts], axis=1),
            np.array([chunk.voters for chunk in self._chunks.values()], np.int64),
            np.zeros(len(self._chunks), np.int64),
            (None,) * len(self._chunks),
        )

    # ---- one round ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Write what the device lacks, look at the status, read the results that are complete. Never waits.

        Raises
        ------
        BucketFailedError
            When the device will not complete a chunk of the bucket any more: the job was closed, reopened or opened
            with other settings, or a slot went on without this host. The job must then be reopened with a new epoch.
        """
        chunks = [chunk for chunk in self._chunks.values() if chunk.planes is None and self._may_start(chunk)]
        for chunk in chunks:
            self._write(chunk)
        self._port.fence()  # or the status would be that of before the writes
        complete = [chunk for chunk in chunks if self._poll(chunk)]
        self._port.fence()  # or a result could have been loaded before the status that allows it
        for chunk in complete:
            self._read(chunk)

    def _may_start(self, chunk: _Chunk) -> bool:
        """Rule 10: the slot is not free before chunk c - S is finished. Then its rewrites are finished, too."""
        before = self._chunks.get((chunk.number - self._slots) % _CHUNKS)
        return before is None or before.planes is not None

    def _write(self, chunk: _Chunk) -> None:
        config = self.job.config

        def store(plane: int, line: int, data: bytes) -> None:
            target = ContributeLine(self.job.bank, self.worker, config.epoch, chunk.number, plane, line)
            self._port.store(self.map.encode(target), data)
            self.counters["rewrites" if chunk.written else "writes"] += 1

        if chunk.abstains or self._planes is None:
            if chunk.missing:
                store(self.map.abstain_plane, 0, bytes(LINE_BYTES))
        else:
            for plane in range(config.encoding.planes):
                for line in range(self.job.lines):
                    if chunk.missing >> self.map.seen_bit(plane, line) & 1:
                        begin = (chunk.first_line + line) * LINE_BYTES
                        row = self._planes[plane, begin : begin + LINE_BYTES]
                        store(plane, line, row.tobytes() if line < chunk.lines else bytes(LINE_BYTES))
        chunk.written = True

    def _poll(self, chunk: _Chunk) -> bool:
        """Learn from the status what is missing, and whether the chunk is complete."""
        slot, version = chunk.number % self._slots, chunk.number // self._slots % 2
        reads = self._load([StatusLine(self.job.bank, slot, version, self.worker, k) for k in range(self._parts)])
        seen, complete = 0, True
        for part, read in enumerate(reads):
            status = Status.unpack(read.data)
            self._check(status, chunk)
            current = StatusFlags.CLAIMED in status.flags and status.chunk == chunk.number
            seen |= (status.seen if current else 0) << SEEN_BITS * part
            complete = complete and current and StatusFlags.COMPLETE in status.flags
            chunk.voters = status.voters
        chunk.missing = self._everything & ~seen
        return complete

    def _check(self, status: Status, chunk: _Chunk) -> None:
        config = self.job.config
        if StatusFlags.OPEN not in status.flags or (status.job, status.epoch) != (config.job, config.epoch):
            raise BucketFailedError(f"bank {self.job.bank} is not open with job {config.job}, epoch {config.epoch}")
        here = (self.job.lines, config.encoding.planes, self.job.result_planes, config.result_format == "majority")
        there = (status.lines, status.planes, status.result_planes, StatusFlags.MAJORITY in status.flags)
        if here != there:
            raise BucketFailedError(
                f"job {config.job}: (lines, planes, result planes, majority) are {there} in the device and {here} here"
            )
        if StatusFlags.CLAIMED in status.flags and serial_newer(status.chunk, chunk.number):
            raise BucketFailedError(f"job {config.job}: the device has gone past chunk {chunk.number}")

    def _read(self, chunk: _Chunk) -> None:
        epoch, planes = self.job.config.epoch, self.job.result_planes
        reads = self._load(
            [
                ResultLine(self.job.bank, epoch, chunk.number, plane, line)
                for plane in range(planes)
                for line in range(chunk.lines)
            ]
        )
        if any(read.poison for read in reads):
            # The status no longer holds. The next round reads it again, which says why; poison is never polled.
            self.counters["poisoned"] += 1
            return
        data = b"".join(read.data for read in reads)
        chunk.planes = np.frombuffer(data, np.uint8).reshape(planes, chunk.lines * LINE_BYTES)

    def _load(self, targets: Sequence[Target]) -> list[Read]:
        return self._port.load([self.map.encode(target) for target in targets])
