"""Paired comparisons: the same seeds under two policies, and how sure one can be of the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

__all__ = ["Difference", "paired_difference"]


@dataclass(frozen=True)
class Difference:
    """Mean of a paired difference with its interval, in the unit of what was compared.

    Attributes
    ----------
    mean : float
    low, high : float
        Ends of the interval, infinite for a single pair.
    pairs : int
    """

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def paired_difference(mine: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Difference:
    """``mine - theirs`` pair by pair, with Student's interval for its mean.

    Raises
    ------
    ValueError
        If there is no pair, the two are not of one length, or a value is not finite.
    """
    if not mine or len(mine) != len(theirs):
        raise ValueError(f"a paired difference needs as many values here as there, not {len(mine)} and {len(theirs)}")
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("a paired difference needs finite values")
    mean, pairs = statistics.fmean(differences), len(differences)
    if pairs < 2:
        return Difference(mean, -math.inf, math.inf, pairs)
    half = float(student.ppf((1 + confidence) / 2, pairs - 1)) * statistics.stdev(differences) / math.sqrt(pairs)
    return Difference(mean, mean - half, mean + half, pairs)
