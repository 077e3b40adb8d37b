"""One version of one slot: what a reducer keeps of a chunk in flight, whatever brings the contributions.

The numbers in comments are those of the rules in ``docs/protocol.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import bitplane
from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.params import ReducerParams

__all__ = ["SlotVersion"]


@dataclass
class SlotVersion:
    """State of a slot version.

    Attributes
    ----------
    tally : Words, shape (acc_bits, lines_per_chunk, words of a line)
        Means something only in lines that are ``written``, until :meth:`finish`.
    written : bool, shape (lines_per_chunk,)
    seen : dict
        Worker to a mask of what it has sent; what a bit stands for is the endpoint's choice.
    """

    tally: bitplane.Words
    written: npt.NDArray[np.bool_]
    valid: bool = False
    chunk: int = 0
    lines: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    abstained: set[int] = field(default_factory=set)
    voters: int = 0
    complete: bool = False

    @classmethod
    def empty(cls, params: ReducerParams) -> Self:
        """A version that was never claimed."""
        words = -(-params.lanes // 64)
        return cls(
            np.zeros((params.acc_bits, params.lines_per_chunk, words), np.uint64),
            np.zeros(params.lines_per_chunk, bool),
        )

    def claim(self, chunk: int, lines: int) -> None:
        """Rule 3: take the version over, whatever it holds."""
        self.valid, self.chunk, self.lines = True, chunk, lines
        self.written[:] = False
        self.seen.clear()
        self.abstained.clear()
        self.voters = 0
        self.complete = False

    def add(self, first_line: int, plane: bitplane.Words, encoding: Encoding, index: int) -> None:
        """Add lines of plane ``index``, shape (lines, words), from ``first_line`` on."""
        lines = slice(first_line, first_line + len(plane))
        tally = self.tally[:, lines]
        tally[:, ~self.written[lines]] = 0  # a line's first write overwrites
        bitplane.accumulate(tally, plane, encoding.shift(index), encoding.weights[index] < 0)
        self.written[lines] = True

    def finish(self) -> None:
        """Rule 4: from now on this is a result."""
        self.complete = True
        self.tally[:, : self.lines][:, ~self.written[: self.lines]] = 0  # an unwritten line reads as zero

    def tally_planes(self, planes: int) -> bitplane.Words:
        """A ``tally`` result: shape (planes, lines, words), LSB first."""
        return self.tally[:planes, : self.lines]

    def majority_planes(self, encoding: Encoding, margin: int) -> tuple[bitplane.Words, bitplane.Words]:
        """A ``majority`` result: negative and nonzero, each of shape (lines, words)."""
        return bitplane.majority_planes(
            self.tally[:, : self.lines],
            self.voters,
            margin,
            counts_negatives=encoding.counts_negatives,
            signed=encoding.signed,
        )
