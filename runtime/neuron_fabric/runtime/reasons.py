"""Why a gradient took the route it took: one vocabulary for decisions, counters and reports."""

from __future__ import annotations

import enum

__all__ = ["Reason"]


class Reason(enum.StrEnum):
    """A reason code. The value is what is stored and counted; ``meaning`` is its one-line explanation."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Reason:
        """A member of that value and meaning; ``Reason("plan")`` looks one up."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    PLAN = "plan", "as the plan says"

    WARMUP = "warmup", "FP32 while training starts"
    WINDOW = "window", "the step is outside the windows that the profile admits"
    RECALIBRATION = "recalibration", "FP32 while the profile's statistics are looked at again"
    LEARNING_RATE = "learning_rate", "FP32 while training settles after a jump of the learning rate"
    PROBE = "probe", "one FP32 step, beside which the votes are checked"

    HEALTH_LOSS = "health_loss", "the loss rose above its own trend"
    HEALTH_UNANIMITY = "health_unanimity", "workers agree more than healthy training lets them"
    HEALTH_NOT_FINITE = "health_not_finite", "loss or gradients were not finite"
    HEALTH_PROBE = "health_probe", "a probe found votes that point away from the FP32 gradient"
    COOL_DOWN = "cool_down", "FP32 for some steps after an alarm"
    RECOVERY = "recovery", "more robust regions return to low-bit first"
    RELAPSES = "relapses", "the budget of returns after alarms is spent: FP32 for the rest of the run"

    SPARSE = "sparse", "too many exact zeros, which would vote noise"
    CAPABILITY = "capability", "the reducer cannot do what the region asks for"
    LOAD = "load", "the reducer is too busy"
    COST = "cost", "low-bit would not be faster than FP32 here"
    REDUCER_FAILED = "reducer_failed", "the reducer could not answer"
