"""Encodings: which bit planes a worker sends, and the weight of each.

A contribution is a plane, one bit per element, with a weight ``w`` in ``{+2**k, -2**k}``; for every element the
reducer does ``tally += w * bit``. An encoding is the table of those weights, and everything a reducer must know about
it (how wide a tally gets, whether it is signed, whether a world fits the accumulator) follows from the table.

:data:`BINARY` is the sign vote of signSGD (Bernstein et al. 2018, arXiv 1802.04434) counted instead of decided.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

__all__ = ["BINARY", "TERNARY", "Encoding", "encoding_by_name", "int_encoding", "tally_encoding"]


@dataclass(frozen=True)
class Encoding:
    """A named table of plane weights.

    Parameters
    ----------
    name : str
        How plans, profiles and error messages call it.
    weights : tuple of int
        One weight per plane, each ``+2**k`` or ``-2**k``; the index is the ``plane`` field of the wire header.
    counts_negatives : bool
        True where a tally counts *negative votes* (``binary``), so that the vote sum is ``voters - 2 * tally``;
        False where the tally is the sum itself.
    leaves : int
        The most workers whose votes are in one contribution: 1, or those below a child reducer.
    leaf_range : tuple of int, optional
        Least and greatest contribution of one leaf; by default what the weights allow.
    """

    name: str
    weights: tuple[int, ...]
    counts_negatives: bool = False
    leaves: int = 1
    leaf_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.weights) <= 32:
            raise ValueError(f"encoding {self.name!r}: 1 to 32 planes are possible, not {len(self.weights)}")
        for plane, weight in enumerate(self.weights):
            magnitude = abs(operator.index(weight))
            if magnitude == 0 or magnitude & (magnitude - 1):
                raise ValueError(f"encoding {self.name!r}: weight {weight} of plane {plane} is not +-2**k")
        if self.counts_negatives and self.signed:
            raise ValueError(f"encoding {self.name!r}: a count of negative votes cannot have a negative weight")

    @property
    def planes(self) -> int:
        """Planes per element, which is also bits sent per element."""
        return len(self.weights)

    @property
    def signed(self) -> bool:
        """Whether a tally can be negative (it is then two's complement)."""
        return any(weight < 0 for weight in self.weights)

    def shift(self, plane: int) -> int:
        """The ``k`` of ``+-2**k``."""
        return abs(self.weights[plane]).bit_length() - 1

    @property
    def leaf_bounds(self) -> tuple[int, int]:
        """Least and greatest contribution of one leaf."""
        return self.leaf_range or (
            sum(weight for weight in self.weights if weight < 0),
            sum(weight for weight in self.weights if weight > 0),
        )

    def bounds(self, world: int) -> tuple[int, int]:
        """Least and greatest tally that ``world`` members can produce (all leaves of children counted)."""
        low, high = self.leaf_bounds
        leaves = operator.index(world) * self.leaves
        return leaves * low, leaves * high

    def tally_bits(self, world: int) -> int:
        """Planes of a ``tally`` result for ``world`` workers, the sign plane included."""
        low, high = self.bounds(world)
        if not self.signed:
            return high.bit_length()
        return 1 + max(high.bit_length(), (-low - 1).bit_length())

    def check_fits(self, world: int, acc_bits: int) -> None:
        """Raise ``ValueError`` unless the exact tally of ``world`` workers fits ``acc_bits`` bits."""
        need = self.tally_bits(world)
        if need > acc_bits:
            low, high = self.bounds(world)
            raise ValueError(
                f"encoding {self.name!r} with {world} members makes tallies from {low} to {high}, which takes {need} "
                f"bits; the accumulator has {acc_bits}: use fewer members, a narrower encoding or a wider accumulator"
            )


BINARY = Encoding("binary", (1,), counts_negatives=True)
"""One plane, "negative": the tally is the number of negative votes."""

TERNARY = Encoding("ternary", (1, -1))
"""Two planes, "positive" and "negative": the tally is the vote sum; an element may send neither."""


def int_encoding(bits: int) -> Encoding:
    """``int-b``: the bits of a two's complement integer as planes, LSB first; the tally is the integer sum."""
    bits = operator.index(bits)
    if not 2 <= bits <= 16:
        raise ValueError(f"int-b encodings have 2 to 16 bits, not {bits}")
    return Encoding(f"int-{bits}", (*(1 << k for k in range(bits - 1)), -(1 << (bits - 1))))


def tally_encoding(child: Encoding, leaves: int) -> Encoding:
    """The planes of a child reducer's own result, as its parent sees them.

    ``leaves`` is the most members of any child of that parent, so that all children use the same table.
    """
    bits = child.tally_bits(leaves)
    weights = [1 << k for k in range(bits)]
    if child.signed:
        weights[-1] = -weights[-1]
    return Encoding(
        f"tally({child.name},{leaves})",
        tuple(weights),
        child.counts_negatives,
        leaves * child.leaves,
        child.leaf_bounds,
    )


def encoding_by_name(name: str) -> Encoding:
    """``binary``, ``ternary`` or ``int-b``; ``ValueError`` for anything else."""
    if name == BINARY.name:
        return BINARY
    if name == TERNARY.name:
        return TERNARY
    if name.startswith("int-") and name[4:].isdecimal():
        return int_encoding(int(name[4:]))
    raise ValueError(f"unknown encoding {name!r}: use binary, ternary or int-2 to int-16")
