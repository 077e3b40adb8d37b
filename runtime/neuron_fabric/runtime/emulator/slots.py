"""Ranges of a reducer's slots: lengths are powers of two, and a range begins at a multiple of its length.

The buddy system (Knowlton 1965): a free range is halved until it has the size that is wanted, and joins its other half
when both are free.
"""

from __future__ import annotations

import operator

__all__ = ["SlotRanges"]


class SlotRanges:
    """Free slots.

    Parameters
    ----------
    total : int
        Slots of the reducer, a power of two.
    """

    def __init__(self, total: int) -> None:
        if operator.index(total) < 1 or total & (total - 1):
            raise ValueError(f"total must be a power of two, not {total}")
        self.total = total
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(total.bit_length())}
        self._free[total].add(0)
        self._taken: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return sum(self._taken.values())

    def largest(self) -> int:
        """The length of the longest range that can be taken now; 0 if there is none."""
        return max((length for length, bases in self._free.items() if bases), default=0)

    def take(self, length: int) -> int | None:
        """Take a range and return where it begins, as low as possible; None if there is none so long.

        ``ValueError`` if the length is not a power of two.
        """
        if operator.index(length) < 1 or length & (length - 1):
            raise ValueError(f"the length of a range must be a power of two, not {length}")
        size = min((size for size, bases in self._free.items() if size >= length and bases), default=None)
        if size is None:
            return None
        base = min(self._free[size])
        self._free[size].remove(base)
        while size > length:
            size //= 2
            self._free[size].add(base + size)
        self._taken[base] = length
        return base

    def give_back(self, base: int) -> None:
        """Free the range that begins there; ``KeyError`` if none does."""
        length = self._taken.pop(base)
        while length < self.total and (base ^ length) in self._free[length]:
            self._free[length].remove(base ^ length)
            base &= ~length
            length *= 2
        self._free[length].add(base)
