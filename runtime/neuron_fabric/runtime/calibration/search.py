"""Trials: which proposal keeps the FP32 result, by short runs that are made longer for those that do well.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): all proposals run for a part of the training, the
better half for twice as long, until the last ones run all of it. A proposal is compared with FP32 at the same step
and with the same seeds, in pairs. Among those that are within the tolerance by a standard error the cheapest in bits
is the best; of the others the nearest. The most cautious proposal stays to the end, so that there is something to fall
back on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neuron_fabric.runtime.calibration.proposals import Proposal

__all__ = ["Candidate", "Outcome", "Rung", "Search", "halve", "rungs_for"]


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    policy: str
    seed: int
    steps: int
    score: float
    """In points, higher is better; NaN if the run diverged."""
    loss: float
    """Training loss at the end."""
    low_bit_share: float
    """Share of gradient elements that went low-bit after the warm-up."""
    alarms: int = 0
    """Of the health monitor."""


@dataclass(frozen=True)
class Candidate:
    """A proposal in one rung: its runs and how they compare with FP32."""

    proposal: Proposal
    outcomes: tuple[Outcome, ...]
    deficits: tuple[float, ...]
    """FP32's score minus its own, seed by seed; infinite for a run that diverged."""

    @property
    def deficit(self) -> float:
        """Mean over seeds, in points; below 0 where it is better than FP32."""
        return math.inf if math.inf in self.deficits else statistics.fmean(self.deficits)

    @property
    def spread(self) -> float:
        """Standard error of that mean; 0 for one seed."""
        if len(self.deficits) < 2 or not math.isfinite(self.deficit):
            return 0.0
        return statistics.stdev(self.deficits) / math.sqrt(len(self.deficits))

    def excess(self, tolerance: float) -> float:
        """By how much the deficit and its standard error exceed the tolerance; 0 if they do not."""
        return max(0.0, self.deficit + self.spread - tolerance)


@dataclass(frozen=True)
class Rung:
    """All candidates at one length of run, the best first."""

    steps: int
    reference: tuple[Outcome, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Search:
    """How a search went."""

    tolerance: float
    rungs: tuple[Rung, ...]

    @property
    def winner(self) -> Candidate | None:
        """The first of the last rung, if it is within the tolerance; else FP32 is what was found."""
        last = self.rungs[-1].candidates if self.rungs else ()
        return last[0] if last and last[0].deficit <= self.tolerance else None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All runs, in the order in which they were made."""
        return tuple(
            outcome
            for rung in self.rungs
            for outcome in (*rung.reference, *(each for one in rung.candidates for each in one.outcomes))
        )


def rungs_for(candidates: int, steps: int) -> list[int]:
    """Lengths of run: all of it last, half of it before, and so on, as many as it takes to halve to two."""
    count = 1 if candidates <= 2 else 2 if candidates <= 4 else 3
    return [max(1, steps >> (count - 1 - index)) for index in range(count)]


def halve(
    proposals: Sequence[Proposal],
    run: Callable[[Proposal | None, int, int], Outcome],
    *,
    seeds: Sequence[int],
    steps: int,
    tolerance: float,
    tell: Callable[[Rung], None] = lambda rung: None,
) -> Search:
    """Search by trials.

    Parameters
    ----------
    proposals : sequence of Proposal
        The cheapest first; the one with the fewest elements that vote is the most cautious.
    run : function of (proposal or None for FP32, seed, steps)
        Trains for the first ``steps`` steps of the whole training. Every rank must come to the same outcome.
    seeds : sequence of int
    steps : int
        Of the whole training.
    tolerance : float
        Points that a proposal may be worse than FP32, mean over the seeds.
    tell : function of Rung, optional
        Called after each rung.
    """
    if not seeds:
        raise ValueError("trials need at least one seed")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0 points, but is {tolerance}")
    left = list(proposals)
    rungs: list[Rung] = []
    for length in rungs_for(len(left), steps) if left else []:
        reference = tuple(run(None, seed, length) for seed in seeds)
        tried = [_tried(proposal, reference, run, length) for proposal in left]
        tried.sort(key=lambda each: (each.excess(tolerance), each.proposal.cost))
        rungs.append(Rung(length, reference, tuple(tried)))
        tell(rungs[-1])
        best = [each.proposal for each in tried[: max(2, math.ceil(len(tried) / 2))]]
        cautious = min(left, key=lambda proposal: proposal.low_bit_share)
        left = best if cautious in best else [*best, cautious]
    return Search(tolerance, tuple(rungs))


def _tried(
    proposal: Proposal, reference: Sequence[Outcome], run: Callable[[Proposal | None, int, int], Outcome], steps: int
) -> Candidate:
    outcomes = tuple(run(proposal, pair.seed, steps) for pair in reference)
    deficits = tuple(
        pair.score - outcome.score if math.isfinite(outcome.score) else math.inf
        for pair, outcome in zip(reference, outcomes, strict=True)
    )
    return Candidate(proposal, outcomes, deficits)
