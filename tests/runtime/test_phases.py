"""Phases are a pure function of step and learning rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.runtime.phases import Phase, PhasePolicy, phase
from neuron_fabric.runtime.reasons import Reason


def reasons(policy, steps, rate=lambda step: 0.1):
    """The reason of each step, as the controller would ask."""
    return [phase(policy, step, [rate(s) for s in range(step)]).reason for step in range(steps)]


def test_warm_up_then_low_bit():
    assert reasons(PhasePolicy(warmup_steps=3), 5) == [Reason.WARMUP] * 3 + [Reason.PLAN] * 2
    assert phase(PhasePolicy(warmup_steps=0), 0) == Phase(True, Reason.PLAN)


def test_windows():
    policy = PhasePolicy(warmup_steps=2, windows=((0, 4), (6, None)))
    wanted = [Reason.WARMUP] * 2 + [Reason.PLAN] * 2 + [Reason.WINDOW] * 2 + [Reason.PLAN] * 2
    assert reasons(policy, 8) == wanted
    assert reasons(PhasePolicy(warmup_steps=0, windows=()), 2) == [Reason.WINDOW] * 2


def test_recalibration_points():
    policy = PhasePolicy(warmup_steps=0, recalibration_points=(2, 6), recalibration_steps=2)
    off = [step for step, reason in enumerate(reasons(policy, 10)) if reason is Reason.RECALIBRATION]
    assert off == [2, 3, 6, 7]


@pytest.mark.parametrize("after", [0.01, 1.0])
def test_a_jump_of_the_learning_rate_is_fp32_for_so_many_steps(after):
    policy = PhasePolicy(warmup_steps=0, learning_rate_steps=5)
    seen = reasons(policy, 30, lambda step: 0.1 if step < 10 else after)
    off = [step for step, reason in enumerate(seen) if reason is Reason.LEARNING_RATE]
    assert off == [11, 12, 13, 14, 15]  # step 10 used the new rate first


def test_a_slow_schedule_and_small_steps_never_jump():
    policy = PhasePolicy(warmup_steps=0, learning_rate_steps=50)
    assert set(reasons(policy, 600, lambda step: 0.1 * 0.995**step)) == {Reason.PLAN}
    assert set(reasons(policy, 100, lambda step: 0.1 if step < 50 else 0.05)) == {Reason.PLAN}
    # The end of a cosine falls by more than the factor within the window, but only its last steps do so at once.
    cosine = reasons(policy, 100, lambda step: 1 + math.cos(math.pi * step / 100))
    assert set(cosine[:98]) == {Reason.PLAN}


def test_a_rate_that_leaves_zero_jumps():
    policy = PhasePolicy(warmup_steps=0, learning_rate_steps=5)
    assert phase(policy, 2, [0.0, 0.1]).reason is Reason.LEARNING_RATE
    assert phase(policy, 2, [0.0, 0.0]).reason is Reason.PLAN


def test_jumps_can_be_ignored_and_rates_can_be_unknown():
    assert phase(PhasePolicy(warmup_steps=0, learning_rate_steps=0), 2, [0.1, 9.0]).low_bit
    assert phase(PhasePolicy(warmup_steps=0), 2, []).low_bit


@given(
    warmup=st.integers(0, 30),
    step=st.integers(0, 60),
    points=st.lists(st.integers(0, 60), max_size=3),
    rates=st.lists(st.floats(0, 10), max_size=80),
)
def test_only_the_recent_past_counts_and_never_low_bit_in_warm_up(warmup, step, points, rates):
    policy = PhasePolicy(warmup_steps=warmup, recalibration_points=points, learning_rate_steps=7)
    now = phase(policy, step, rates)
    assert now == phase(policy, step, rates[-8:])
    assert now.low_bit == (now.reason is Reason.PLAN)
    assert (now.reason is Reason.WARMUP) == (step < warmup)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"learning_rate_factor": 1.0}, "learning_rate_factor must be above 1"),
        ({"windows": ((5, 5),)}, "window 5 to 5"),
        ({"recalibration_points": (-3,)}, "recalibration point -3"),
    ],
)
def test_policy_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        PhasePolicy(**wrong)
