"""Counting bits: what goes to a reducer and comes back, what is really sent, and what FP32 would have taken."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

__all__ = ["Traffic", "ring_bytes"]


def ring_bytes(payload: int, world: int) -> int:
    """Bytes that one rank sends in a ring all-reduce (reduce-scatter, all-gather) of ``payload`` bytes."""
    return 2 * (world - 1) * payload // world


@dataclass
class Traffic:
    """Totals over a run, for one rank; counted by the hook's thread and by the one that finishes buckets.

    Attributes
    ----------
    steps, buckets : int
    elements : int
        Gradient elements, FP32 ones included.
    low_bit_elements : int
        Those that were sent on a low-bit route.
    up_bits, down_bits : int
        Payload between a worker and an endpoint: whole lines of planes, one or two an element, and of the result planes
        that really came back, and 32 bits per element for what goes FP32, a bucket that had to be redone included.
    envelope_bits : int
        Headers and envelopes, in each direction.
    sent_bytes : int
        Payload bytes that this rank really put on the wire, by the algorithms of the collectives that ran, the step's
        outcome included.
    ring_bytes : int
        What a ring all-reduce of everything in FP32 would have put there.
    """

    steps: int = 0
    buckets: int = 0
    elements: int = 0
    low_bit_elements: int = 0
    up_bits: int = 0
    down_bits: int = 0
    envelope_bits: int = 0
    sent_bytes: int = 0
    ring_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Add to the totals by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def add_fp32(self, payload: int, world: int) -> None:
        """Add an all-reduce of ``payload`` bytes, sent as a ring and counted as going to an endpoint and back."""
        self.add(up_bits=8 * payload, down_bits=8 * payload, sent_bytes=ring_bytes(payload, world))

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> Traffic:
        """The inverse of :meth:`as_dict`; ``ValueError`` if a counter is missing or unknown."""
        made = cls()
        different = sorted(counts.keys() ^ made.as_dict().keys())
        if different:
            raise ValueError(f"traffic: counter {different[0]!r} is missing or unknown")
        made.add(**counts)
        return made

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by name."""
        with self._lock:
            return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "_lock"}
