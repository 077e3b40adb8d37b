"""Health detectors: quiet in healthy runs, loud in bad ones, the same everywhere, and restored to the bit."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.runtime import health
from neuron_fabric.runtime.health import HealthMonitor, HealthPolicy, StepSignals, coin_votes, log2, unanimity
from neuron_fabric.runtime.reasons import Reason
from neuron_fabric.runtime.rehearsal import (
    COLLAPSED,
    HEALTHY,
    Training,
    alarms,
    delays,
    false_alarms,
    main,
    simulate,
    vote_distribution,
)

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
POLICY = HealthPolicy()


def monitor(policy=POLICY, world=4, regions=("r0",)):
    return HealthMonitor(policy, world, regions)


def feed(watch, *, steps, loss=1.0, share=0.17, start=0, noise=0.05, seed=SEED):
    """Steady signals with a little noise; the alarms."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(start, start + steps):
        scatter = np.exp(noise * rng.standard_normal(2))
        found += watch.observe(StepSignals(step, loss * scatter[0], {"r0": share * scatter[1]}))
    return found


# ---- closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 11))
def test_coins_are_those_of_all_outcomes(world):
    sums = [abs(sum(votes)) for votes in itertools.product((-1, 1), repeat=world)]
    expected = (sums.count(world) / len(sums), sums.count(0) / len(sums), sum(sums) / world / len(sums))
    assert coin_votes(world) == pytest.approx(expected, abs=1e-15)
    assert unanimity(world, 0.0) == coin_votes(world)[0]


def test_coins_of_four_workers():
    assert coin_votes(4) == (0.125, 0.375, 0.375)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16, 64])
def test_unanimity_of_correlated_votes(world):
    assert unanimity(world, 1.0) == 1.0
    assert unanimity(world, 1 / 3) == pytest.approx(2 / (world + 1))  # all probabilities alike
    assert unanimity(world, 0.5) == pytest.approx(2 * math.comb(2 * world, world) / 4**world)  # the arcsine law
    shares = [unanimity(world, r / 20) for r in range(21)]
    assert all(a < b for a, b in itertools.pairwise(shares)) or world == 1
    for correlation in (HEALTHY, 0.3, COLLAPSED):
        p = vote_distribution(world, np.array(correlation))
        assert p.sum() == pytest.approx(1)
        assert p[0] + p[-1] == pytest.approx(unanimity(world, correlation))


def test_one_parameter_fits_what_was_measured_on_four_workers():
    """Unanimous, tie, margin of healthy training and of a sign-biased collapse, within 0.016."""
    for correlation, measured in ((HEALTHY, (0.17, 0.33, 0.42)), (COLLAPSED, (0.71, 0.10, 0.81))):
        p = vote_distribution(4, np.array(correlation))
        assert (p[0] + p[4], p[2], p @ [1, 0.5, 0, 0.5, 1]) == pytest.approx(measured, abs=0.016)


@pytest.mark.parametrize("arguments", [(0, 0.5), (4, -0.1), (4, 1.1), (4, math.nan)])
def test_unanimity_refuses(arguments):
    with pytest.raises(ValueError, match="must be"):
        unanimity(*arguments)


@given(st.floats(min_value=5e-324, max_value=1.7e308))
def test_logarithm(x):
    assert log2(x) == pytest.approx(math.log2(x), rel=1e-11, abs=1e-11)


def test_nothing_here_rounds_differently_on_another_host():
    """Only what IEEE 754 rounds exactly: of ``math``, no function of which hosts have their own."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(health)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math"
    }
    assert used == {"sqrt", "frexp", "comb", "isfinite", "inf"}


# ---- false alarms and delays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "most"), [(2, 0), (4, 0), (8, 1)])
def test_no_alarm_in_healthy_runs(world, most):
    """20,000 steps each: falling heavy-tailed loss, learning-rate drops, wandering votes.

    The rate is about one in 200,000, so another NEURON_FABRIC_SEED can meet one; seed 1 does at eight workers.
    """
    found = false_alarms(Training(world=world), range(SEED, SEED + 10), POLICY)
    assert len(found) <= most, found


@pytest.mark.parametrize(("world", "most"), [(2, 4), (4, 3), (8, 3), (16, 3), (64, 4)])
def test_a_sudden_collapse_is_seen_at_once(world, most):
    training = Training(steps=800, world=world, vote_onset=700)
    found = delays(training, range(SEED, SEED + 5), POLICY, Reason.HEALTH_UNANIMITY)
    assert all(delay is not None and delay <= most for delay in found), found


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_creeping_collapse_is_seen(world):
    training = Training(steps=1300, world=world, vote_onset=700, vote_steps=500)
    found = delays(training, range(SEED, SEED + 5), POLICY, Reason.HEALTH_UNANIMITY)
    assert all(delay is not None and delay <= 100 for delay in found), found


@pytest.mark.parametrize(("factor", "steps", "most"), [(2.0, 1, 6), (2.0, 20, 25), (4.0, 50, 40)])
def test_a_rising_loss_is_seen(factor, steps, most):
    training = Training(steps=900, drops=0, loss_onset=700, loss_steps=steps, loss_factor=factor)
    found = delays(training, range(SEED, SEED + 5), POLICY, Reason.HEALTH_LOSS)
    assert all(delay is not None and delay <= most for delay in found), found


def test_delay_needs_an_onset():
    with pytest.raises(ValueError, match="no onset"):
        delays(Training(), [1], POLICY, Reason.HEALTH_LOSS)


def test_simulation_repeats():
    training = Training(steps=50)
    assert list(simulate(training, 3)) == list(simulate(training, 3)) != list(simulate(training, 4))


def test_command_prints_the_tables(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--runs", "1", "--seed", str(SEED)])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for what in (f"seeds {SEED} to {SEED}", "false alarms in healthy runs", "votes collapse", "loss times 2"):
        assert what in printed
    print(printed)  # -rP shows it


# ---- what an alarm says ----------------------------------------------------------------------------------------


def test_collapse_alarms_by_trend_and_by_bound_and_names_the_region():
    watch = monitor(regions=("body", "stem"))
    for step in range(60):
        assert not watch.observe(StepSignals(step, 1.0, {"body": 0.17, "stem": 0.17}))
    found = []
    for step in range(60, 70):
        found += watch.observe(StepSignals(step, 1.0, {"stem": 0.17, "body": 0.71}))
    assert [(a.reason, a.signal, a.regions) for a in found] == [(Reason.HEALTH_UNANIMITY, "unanimity", ("body",))] * 2
    trend, bound = found
    assert trend.value > trend.threshold == POLICY.threshold
    assert (bound.value, bound.threshold) == (0.71, unanimity(4, POLICY.correlation_bound))
    assert bound.step == 60 + POLICY.bound_steps - 1
    assert "body" in str(bound)
    assert "0.71" in str(bound)


def test_the_bound_needs_no_warm_up():
    found = feed(monitor(), steps=POLICY.bound_steps, share=0.71, noise=0)
    assert [a.step for a in found] == [POLICY.bound_steps - 1]


def test_one_outlier_is_no_alarm():
    watch = monitor()
    assert not feed(watch, steps=100)
    assert not watch.observe(StepSignals(100, 1e6, {"r0": 0.9}))
    assert not feed(watch, steps=100, start=101)


def test_an_outlier_leaves_the_detector_as_sensitive_as_it_was():
    watch = monitor()
    assert not feed(watch, steps=100)
    watch.observe(StepSignals(100, 1e6, {"r0": 0.17}))
    assert not feed(watch, steps=20, start=101)
    assert [a.reason for a in feed(watch, steps=5, start=121, loss=2.0)] == [Reason.HEALTH_LOSS]


def test_below_the_bound_is_no_alarm_and_between_both_thresholds_it_stays_latched():
    watch = monitor(replace(POLICY, settle_steps=1000))
    between = (watch.bound + watch.release) / 2
    assert not feed(watch, steps=20, share=between, noise=0)
    assert feed(watch, steps=5, start=20, share=0.6, noise=0)
    feed(watch, steps=5, start=25, share=between, noise=0)
    assert not watch.clear
    feed(watch, steps=1, start=30, share=watch.release - 0.01, noise=0)
    assert watch.clear


def test_downwards_is_no_alarm():
    watch = monitor()
    assert not feed(watch, steps=100)
    assert not feed(watch, steps=100, start=100, loss=0.01, share=0.125)


def test_an_alarm_comes_once_and_is_quiet_after_release():
    watch = monitor(replace(POLICY, correlation_bound=1.0))
    assert not feed(watch, steps=100)
    assert watch.clear
    found = feed(watch, steps=10, start=100, loss=3.0)
    assert [a.reason for a in found] == [Reason.HEALTH_LOSS]
    assert not watch.clear
    assert not feed(watch, steps=40, start=110, loss=1.0)
    assert watch.clear


def test_what_is_not_seen_any_more_does_not_keep_the_monitor_busy():
    """Votes are not seen while everything is FP32, so their alarm may not last until they are quiet."""
    watch = monitor()
    assert not feed(watch, steps=100)
    assert feed(watch, steps=5, start=100, share=0.71)
    assert not watch.clear
    for step in range(105, 106 + POLICY.gap_steps):
        watch.observe(StepSignals(step, 1.0))
    assert watch.clear


def test_votes_that_come_back_start_anew():
    watch = monitor()
    assert not feed(watch, steps=100, share=0.13)
    for step in range(100, 100 + POLICY.gap_steps + 1):
        watch.observe(StepSignals(step, 1.0))
    assert not feed(watch, steps=100, start=101 + POLICY.gap_steps, share=0.3)


def test_a_fault_that_waits_out_the_cool_down_does_not_become_normal():
    """What raised the alarm is below the bound, and still there when the votes come back."""
    policy = replace(POLICY, correlation_bound=1.0)
    for share, ill in ((0.3, True), (0.13, False)):
        watch = monitor(policy)
        assert not feed(watch, steps=100, share=0.13)
        assert feed(watch, steps=6, start=100, share=0.3)
        for step in range(106, 106 + 3 * policy.gap_steps):
            watch.observe(StepSignals(step, 1.0))
        saved = watch.state_dict()
        found = feed(watch, steps=60, start=106 + 3 * policy.gap_steps, share=share)
        assert bool(found) == ill
        again = monitor(policy)
        again.load_state_dict(saved)
        assert feed(again, steps=60, start=106 + 3 * policy.gap_steps, share=share) == found


def test_signals_for_reports_never_alarm():
    watch = monitor()
    for step in range(300):
        wild = 10.0 ** (step % 7)
        values = {"tie_rate": {"r0": step % 2}, "margin": {"r0": step % 2}, "residual_ratio": {"r0": wild}}
        assert not watch.observe(StepSignals(step, 1.0, {"r0": 0.17}, **values, scale={"r0": wild}))


def test_one_worker_is_always_unanimous():
    assert not feed(monitor(world=1), steps=100, share=1.0, noise=0)


def test_a_loss_scaler_may_overflow_once_but_not_twice():
    watch = monitor()
    steps = {20: False, 35: False, 36: True, 80: False}
    for step in range(100):
        found = watch.observe(StepSignals(step, 1.0, not_finite=step in steps))
        assert bool(found) == steps.get(step, False), step
    assert {a.reason for a in found} <= {Reason.HEALTH_NOT_FINITE}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_alarms_at_once(loss):
    (alarm,) = monitor().observe(StepSignals(0, loss))
    assert (alarm.reason, alarm.signal, alarm.regions) == (Reason.HEALTH_NOT_FINITE, "loss", ("r0",))


def test_losses_without_logarithm():
    watch = monitor()
    for step in range(100):
        assert not watch.observe(StepSignals(step, -1.0))
    linear = monitor(HealthPolicy(linear_loss=True))
    rng = np.random.default_rng(SEED)
    for step in range(100):
        assert not linear.observe(StepSignals(step, -5.0 + 0.1 * rng.standard_normal()))
    assert any(linear.observe(StepSignals(step, -4.0)) for step in range(100, 105))


@pytest.mark.parametrize(("cosine", "alarmed"), [(0.71, False), (0.49, True), (-1.0, True), (None, False)])
def test_probes(cosine, alarmed):
    found = monitor().observe(StepSignals(0, probe_cosine={"r0": cosine}))
    assert [a.reason for a in found] == [Reason.HEALTH_PROBE] * alarmed


def test_readings_reach_one_at_the_alarm():
    watch = monitor()
    feed(watch, steps=100)
    assert all(0 <= value < 1 for value in watch.readings().values())
    feed(watch, steps=5, start=100, loss=10.0)
    assert watch.readings()["loss"] > 1


# ---- equal on all ranks, and after a restart -------------------------------------------------------------------


def bad_run():
    return Training(steps=260, world=4, loss_onset=120, loss_factor=4.0, vote_onset=180, vote_steps=30)


def test_order_of_mappings_does_not_matter():
    a, b = (monitor(regions=("r0", "r1", "r2")) for _ in range(2))
    for signals in simulate(bad_run(), SEED):
        turned = replace(signals, unanimity=dict(reversed(signals.unanimity.items())))
        assert a.observe(signals) == b.observe(turned)
    assert a.state_dict() == b.state_dict()


@given(cut=st.integers(0, 259), seed=st.integers(0, 20))
def test_restored_to_the_bit(cut, seed):
    signals = list(simulate(bad_run(), seed))
    whole, first, second = (monitor(regions=("r0", "r1", "r2")) for _ in range(3))
    expected = [whole.observe(each) for each in signals]
    assert any(expected)
    found = [first.observe(each) for each in signals[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.observe(each) for each in signals[cut:]]
    assert found == expected
    assert second.state_dict() == whole.state_dict()


def test_at_another_world_size_votes_start_anew_and_the_loss_goes_on():
    four, two = monitor(), monitor(world=2)
    feed(four, steps=100)
    two.load_state_dict(four.state_dict())
    assert two.state_dict()["loss"] == four.state_dict()["loss"]
    assert two.state_dict()["votes"]["r0"]["count"] == 0
    assert not feed(two, steps=100, start=100, share=0.53)


@pytest.mark.parametrize(
    ("change", "message"), [({"version": 2}, "version 2"), ({"votes": {"x": {}}}, "'r0' is not both")]
)
def test_a_strange_state_is_refused(change, message):
    watch = monitor()
    before = watch.state_dict()
    with pytest.raises(ValueError, match=message):
        watch.load_state_dict({**before, **change})
    assert watch.state_dict() == before


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        (StepSignals(5), "step 5 came after"),
        (StepSignals(6, 1.0, {"x": 0.1}), "unknown region 'x'"),
        (StepSignals(6, 1.0, {"r0": 1.5}), "unanimity of region 'r0' must be 0 to 1, but is 1.5"),
        (StepSignals(6, 1.0, {"r0": math.nan}), "but is nan"),
        (StepSignals(6, 1.0, probe_cosine={"r0": -2.0}), "must be -1 to 1"),
    ],
)
def test_bad_signals_are_refused(signals, message):
    watch = monitor()
    watch.observe(StepSignals(5, 1.0))
    before = watch.state_dict()
    with pytest.raises(ValueError, match=message):
        watch.observe(signals)
    assert watch.state_dict() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": 1.0},
        {"deviation_memory": 0.0},
        {"clip": 1.0},
        {"slack": -1.0},
        {"threshold": 0.0},
        {"release": 9.0},
        {"settle_steps": 1},
        {"min_deviation": 0.0},
        {"share_floor": 0.0},
        {"correlation_bound": 0.0},
        {"correlation_release": 0.6},
        {"bound_steps": 0},
        {"not_finite_limit": 0},
        {"not_finite_window": 0},
        {"probe_bound": 2.0},
        {"gap_steps": 0},
        {"threshold": math.nan},
    ],
)
def test_policy_refuses(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        HealthPolicy(**wrong)


def test_regions_have_names_of_their_own():
    with pytest.raises(ValueError, match="twice"):
        monitor(regions=("a", "a"))


def test_reasons_say_what_they_mean():
    assert all(reason.meaning and reason == reason.value for reason in Reason)
    assert len({reason.meaning for reason in Reason}) == len(Reason)


def test_alarms_of_a_bad_run_come_after_its_onsets():
    found = alarms(bad_run(), SEED, POLICY)
    assert min(a.step for a in found if a.reason is Reason.HEALTH_LOSS) >= 120
    assert min(a.step for a in found if a.reason is Reason.HEALTH_UNANIMITY) >= 180
