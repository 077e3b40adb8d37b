"""Phases of a run: in which steps the profile lets low-bit aggregation be used at all, and why not in the others.

A pure function of the step and of the last learning rates. Nothing here looks at how training goes; see ``health`` for
that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuron_fabric.runtime.reasons import Reason

__all__ = ["Phase", "PhasePolicy", "phase"]


@dataclass(frozen=True)
class PhasePolicy:
    """Where low-bit is admitted.

    Parameters
    ----------
    warmup_steps : int
        Steps in FP32 at the start.
    windows : sequence of (from, to)
        Steps in which low-bit is admitted, ``to`` exclusive or None for no end. None: all steps.
    recalibration_points : sequence of int
        Steps at which FP32 runs for ``recalibration_steps``.
    recalibration_steps : int
    learning_rate_factor : float
        A learning rate that changes by more than this factor, up or down, from one step to the next is a jump.
    learning_rate_steps : int
        Steps in FP32 after a jump; 0: jumps are ignored. A schedule that moves slowly does not jump. It should not be
        shorter than the health detectors take to settle, since they start anew at a jump.
    """

    warmup_steps: int = 100
    windows: Sequence[tuple[int, int | None]] | None = None
    recalibration_points: Sequence[int] = ()
    recalibration_steps: int = 20
    learning_rate_factor: float = 2.0
    learning_rate_steps: int = 50

    def __post_init__(self) -> None:
        if self.windows is not None:
            object.__setattr__(self, "windows", tuple((begin, end) for begin, end in self.windows))
        object.__setattr__(self, "recalibration_points", tuple(self.recalibration_points))
        for name in ("warmup_steps", "recalibration_steps", "learning_rate_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"phases: {name} must not be negative, but is {getattr(self, name)}")
        if not 1 < self.learning_rate_factor < math.inf:
            raise ValueError(f"phases: learning_rate_factor must be above 1, but is {self.learning_rate_factor}")
        for begin, end in self.windows or ():
            if begin < 0 or (end is not None and end <= begin):
                raise ValueError(f"phases: window {begin} to {end} must start at 0 or later and end after it starts")
        for point in self.recalibration_points:
            if point < 0:
                raise ValueError(f"phases: recalibration point {point} must not be negative")


@dataclass(frozen=True)
class Phase:
    """Whether low-bit is admitted in a step; the reason is PLAN if it is."""

    low_bit: bool
    reason: Reason


def phase(policy: PhasePolicy, step: int, learning_rates: Sequence[float] = ()) -> Phase:
    """The phase of ``step``.

    ``learning_rates`` are those of the steps before it, the newest last; of them the last ``learning_rate_steps + 1``
    count. So a jump that is first used in step t is FP32 in the steps t + 1 to t + ``learning_rate_steps``.
    Where several rules apply, the reason is the first of warm-up, window, recalibration and learning rate.
    """
    if step < policy.warmup_steps:
        return Phase(False, Reason.WARMUP)
    if policy.windows is not None and not any(
        begin <= step and (end is None or step < end) for begin, end in policy.windows
    ):
        return Phase(False, Reason.WINDOW)
    if any(point <= step < point + policy.recalibration_steps for point in policy.recalibration_points):
        return Phase(False, Reason.RECALIBRATION)
    if policy.learning_rate_steps and _jumped(policy, learning_rates):
        return Phase(False, Reason.LEARNING_RATE)
    return Phase(True, Reason.PLAN)


def _jumped(policy: PhasePolicy, learning_rates: Sequence[float]) -> bool:
    # One rate more than steps: the old rate must still be seen in the last of them.
    recent = learning_rates[-policy.learning_rate_steps - 1 :]
    return any(max(pair) > policy.learning_rate_factor * min(pair) for pair in itertools.pairwise(recent))
