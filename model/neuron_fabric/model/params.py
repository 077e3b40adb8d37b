"""The size of a reducer: one object that makes both the golden model and the gateware."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

__all__ = ["LINE_BYTES", "MAX_JOBS", "MAX_LINES", "ReducerParams"]

LINE_BYTES = 64
"""Bytes of a line on the wire and in CXL memory, whatever the datapath's width."""

MAX_LINES = 255
"""The wire header gives a chunk's line count one byte."""

MAX_JOBS = 255
"""CAPABILITY2 gives the number of job banks one byte."""


@dataclass(frozen=True)
class ReducerParams:
    """What is fixed when a reducer is built.

    Parameters
    ----------
    lanes : int
        Elements in one datapath beat; a multiple of 8. 512 is one 64-byte line; narrower cores serve small FPGAs
        and proofs.
    lines_per_chunk : int
        K, the most lines a chunk may have, per plane (1 to 255).
    slots : int
        Chunks in flight, those of all jobs together; a power of two. Each has two versions. A job has a range of them
        whose length S is a power of two, so that ``slot = chunk mod S`` is a bit field.
    workers : int
        N, the most members of a job (1 to 64; the seen bits are one word).
    acc_bits : int
        A, bits of one exact tally (two's complement where the encoding is signed).
    max_planes : int
        The most planes of an encoding.
    jobs : int
        Job banks: the most jobs that are open at once (1 to 255).
    """

    lanes: int = 512
    lines_per_chunk: int = 16
    slots: int = 8
    workers: int = 16
    acc_bits: int = 6
    max_planes: int = 2
    jobs: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            try:
                operator.index(getattr(self, field.name))
            except TypeError:
                raise TypeError(f"{field.name} must be an integer, not {getattr(self, field.name)!r}") from None
        self._check(self.lanes >= 8 and self.lanes % 8 == 0, "lanes", "a positive multiple of 8")
        self._check(1 <= self.lines_per_chunk <= MAX_LINES, "lines_per_chunk", f"1 to {MAX_LINES}")
        self._check(
            1 <= self.slots <= 1 << 16 and self.slots & (self.slots - 1) == 0, "slots", "a power of two up to 65536"
        )
        self._check(1 <= self.workers <= 64, "workers", "1 to 64")
        self._check(1 <= self.acc_bits <= 32, "acc_bits", "1 to 32")
        self._check(1 <= self.max_planes <= 32, "max_planes", "1 to 32")
        self._check(1 <= self.jobs <= MAX_JOBS, "jobs", f"1 to {MAX_JOBS}")

    def _check(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {rule}, not {getattr(self, name)}")

    @property
    def line_bytes(self) -> int:
        """Bytes of one datapath beat."""
        return self.lanes // 8

    @property
    def chunk_elements(self) -> int:
        """Elements of a full chunk."""
        return self.lanes * self.lines_per_chunk

    @property
    def max_shift(self) -> int:
        """The greatest shift of a weight: as many planes as an encoding may have are enough to reach it."""
        return min(self.max_planes, self.acc_bits) - 1
