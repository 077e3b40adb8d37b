"""Bit-sliced tallies: counters as planes of uint64 words, 64 elements to a word.

Plane ``j`` holds bit ``j`` of every tally, two's complement where signed. Adding a contribution is a ripple of carries
over the planes; no element is ever handled alone. All arrays are little-endian words, so that byte ``k`` of a line is
byte ``k`` of its words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Words", "accumulate", "from_lines", "greater_than", "majority_planes", "to_lines", "unpack_tally"]

Words = npt.NDArray[np.uint64]


def from_lines(payload: bytes | bytearray | memoryview, lines: int, line_bytes: int) -> Words:
    """Packed bytes of ``lines`` lines as words of shape (lines, ceil(line_bytes / 8)); short lines are zero-padded."""
    raw = np.frombuffer(payload, np.uint8, lines * line_bytes).reshape(lines, line_bytes)
    padding = -line_bytes % 8
    if padding:
        raw = np.pad(raw, ((0, 0), (0, padding)))
    return np.ascontiguousarray(raw).view("<u8")


def to_lines(words: Words, line_bytes: int) -> bytes:
    """The inverse of :func:`from_lines` for words of shape (lines, n)."""
    return np.ascontiguousarray(words).view(np.uint8)[:, :line_bytes].tobytes()


def accumulate(tally: Words, plane: Words, shift: int, negative: bool) -> None:
    """``tally += +-(plane << shift)`` in place, modulo ``2**A``.

    ``tally`` has shape (A, ...), ``plane`` the shape of one of its planes.
    """
    carry = plane.copy()
    for bits in tally[shift:]:
        # A sum carries where both bits are set, a difference borrows where only the subtrahend is.
        following = (~bits if negative else bits) & carry
        bits ^= carry
        carry = following


def greater_than(tally: Words, threshold: int, signed: bool) -> Words:
    """One bit per element: ``tally > threshold``, for any integer ``threshold``."""
    width = len(tally)
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    if threshold < low:
        return np.full(tally.shape[1:], ~np.uint64(0))
    result = np.zeros(tally.shape[1:], np.uint64)
    if threshold >= high:
        return result
    for j, bits in enumerate(tally):
        wanted = threshold >> j & 1
        if signed and j == width - 1:
            bits, wanted = ~bits, 1 - wanted
        # Seen from the top, the first plane that differs decides; so going up, a higher plane overrides.
        result = result & bits if wanted else result | bits
    return result


def majority_planes(
    tally: Words, voters: int, margin: int, *, counts_negatives: bool, signed: bool
) -> tuple[Words, Words]:
    """The two planes of a ``majority`` result: negative (``S < -margin``) and nonzero (``|S| > margin``).

    S is ``voters - 2 * tally`` where the encoding counts negatives, else the tally. A tie is in neither plane.
    """
    if counts_negatives:
        # S < -m  <=>  2 c > v + m;   S > m  <=>  2 c < v - m  <=>  not c > ceil((v - m) / 2) - 1
        negative = greater_than(tally, (voters + margin) // 2, signed)
        positive = ~greater_than(tally, -((margin - voters) // 2) - 1, signed)
    else:
        negative = ~greater_than(tally, -margin - 1, signed)
        positive = greater_than(tally, margin, signed)
    return negative, negative | positive


def unpack_tally(planes: Words, signed: bool) -> npt.NDArray[np.int64]:
    """Integers of shape (..., 64 * n) from planes of shape (A, ..., n): for tests and for people."""
    raw = np.ascontiguousarray(planes).view(np.uint8)
    bits = np.unpackbits(raw, axis=-1, bitorder="little").astype(np.int64)
    weights = 1 << np.arange(len(planes), dtype=np.int64)
    if signed:
        weights[-1] = -weights[-1]
    return np.tensordot(weights, bits, axes=1)
