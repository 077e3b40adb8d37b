"""The controller: what must never happen, what must happen in time, and the same on every rank."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neuron_fabric.runtime.admission import AdmissionPolicy, Capability, Load, RegionPolicy
from neuron_fabric.runtime.controller import (
    ControllerPolicy,
    Mode,
    PlanController,
    RecoveryPolicy,
)
from neuron_fabric.runtime.cost import Endpoint
from neuron_fabric.runtime.health import HealthPolicy, StepSignals
from neuron_fabric.runtime.phases import PhasePolicy
from neuron_fabric.runtime.reasons import Reason
from neuron_fabric.runtime.rehearsal import Training, simulate

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
REGIONS = (
    RegionPolicy("head", "fp32"),
    RegionPolicy("late", sensitivity=7),
    RegionPolicy("body", sensitivity=1),
    RegionPolicy("stem", sensitivity=3),
)
VOTING = ("late", "body", "stem")
POLICY = ControllerPolicy(
    phases=PhasePolicy(warmup_steps=5, learning_rate_steps=4),
    recovery=RecoveryPolicy(cool_down_steps=6, trial_steps=4, relapse_budget=2, forgive_steps=0),
)


def controller(policy=POLICY, **more):
    return PlanController(policy, 4, REGIONS, **more)


def healthy(decision, loss=1.0, **more):
    """Steady signals: votes of the regions that vote."""
    votes = {name: 0.17 for name, route in decision.routes.items() if route.low_bit}
    return StepSignals(decision.step, loss, votes, **more)


def step(control, *, bad=False, load=None, rate=None, **more):
    """One step, with a loss that is not finite if ``bad``; the decision that was taken for it."""
    decision = control.decide(control.next_step)
    control.observe(healthy(decision, math.nan if bad else 1.0), load, rate, **more)
    return decision


def low_bit(decision):
    return {name for name, route in decision.routes.items() if route.low_bit}


def reasons(decision):
    return {name: route.reason for name, route in decision.routes.items()}


def voting_reasons(decision):
    return {decision.routes[name].reason for name in VOTING}


def run_until(control, mode, limit=1000):
    """Healthy steps until the mode is reached; how many."""
    for count in range(limit):
        if control.mode is mode:
            return count
        step(control)
    raise AssertionError(f"not {mode} within {limit} steps, but {control.mode}")


def test_warm_up_then_the_plan():
    control = controller()
    for _ in range(5):
        decision = step(control)
        assert (decision.mode, low_bit(decision)) == (Mode.WARMUP, set())
        assert voting_reasons(decision) == {Reason.WARMUP}
    decision = step(control)
    assert (decision.mode, low_bit(decision)) == (Mode.LOW_BIT, set(VOTING))
    assert set(reasons(decision).values()) == {Reason.PLAN}


def test_alarm_cool_down_and_return_class_by_class():
    control = controller()
    run_until(control, Mode.LOW_BIT)
    step(control, bad=True)
    history = []
    for _ in range(40):
        decision = step(control)
        history.append((decision.mode, tuple(sorted(low_bit(decision)))))
        if decision.mode is Mode.LOW_BIT:
            break
    assert history == (
        [(Mode.ALARMED, ())] * 6
        + [(Mode.RECOVERING, ("body",))] * 4
        + [(Mode.RECOVERING, ("body", "stem"))] * 4
        + [(Mode.RECOVERING, ("body", "late", "stem"))] * 4
        + [(Mode.LOW_BIT, ("body", "late", "stem"))]
    )


def test_an_alarm_in_a_trial_sends_all_classes_back():
    control = controller()
    run_until(control, Mode.LOW_BIT)
    step(control, bad=True)
    run_until(control, Mode.RECOVERING)
    for _ in range(POLICY.recovery.trial_steps + 2):
        last = step(control)
    assert low_bit(last) == {"body", "stem"}
    step(control, bad=True)
    assert run_until(control, Mode.RECOVERING) == POLICY.recovery.cool_down_steps
    for _ in range(POLICY.recovery.trial_steps):
        assert low_bit(step(control)) == {"body"}
    assert low_bit(step(control)) == {"body", "stem"}


def test_reasons_after_an_alarm():
    control = controller()
    run_until(control, Mode.LOW_BIT)
    step(control, bad=True)
    first, second = step(control), step(control)
    assert voting_reasons(first) == {Reason.HEALTH_NOT_FINITE}
    assert "loss" in first.routes["body"].detail
    assert voting_reasons(second) == {Reason.COOL_DOWN}
    run_until(control, Mode.RECOVERING)
    assert reasons(step(control))["late"] is Reason.RECOVERY


def test_the_budget_freezes_for_good():
    control = controller()
    for _ in range(POLICY.recovery.relapse_budget):
        run_until(control, Mode.LOW_BIT)
        step(control, bad=True)
        assert control.mode is Mode.ALARMED
    run_until(control, Mode.RECOVERING)
    step(control, bad=True)
    for _ in range(100):
        decision = step(control)
        assert (decision.mode, low_bit(decision)) == (Mode.FROZEN, set())
        assert reasons(decision)["body"] is Reason.RELAPSES


def test_alarms_without_votes_cost_time_but_no_budget():
    control = controller()
    for _ in range(50):
        step(control, bad=True)
    assert run_until(control, Mode.LOW_BIT) == 6 + 3 * 4
    assert control.state_dict()["spent"] == 0


def test_good_conduct_gives_the_budget_back():
    control = controller(replace(POLICY, recovery=replace(POLICY.recovery, relapse_budget=1, forgive_steps=30)))
    for _ in range(5):
        run_until(control, Mode.LOW_BIT)
        for _ in range(30):
            step(control)
        step(control, bad=True)
        assert control.mode is Mode.ALARMED


def test_cool_down_lasts_until_the_detectors_are_quiet():
    policy = replace(POLICY, health=HealthPolicy(settle_steps=10))
    control = controller(policy)
    run_until(control, Mode.LOW_BIT)
    for _ in range(30):
        step(control)

    def with_loss(loss):
        decision = control.decide(control.next_step)
        return control.observe(healthy(decision, loss))

    loss = 1.0
    while not with_loss(loss):
        loss *= 1.3
    cooling = 0
    while control.mode is Mode.ALARMED and cooling < 25:
        loss *= 1.3
        with_loss(loss)
        cooling += 1
    assert cooling > POLICY.recovery.cool_down_steps
    run_until(control, Mode.RECOVERING)


def test_a_jump_of_the_learning_rate_is_fp32_and_restarts_the_loss():
    control = controller()
    for _ in range(60):
        step(control, rate=0.1)
    assert control.health.state_dict()["loss"]["count"] == 60
    assert low_bit(step(control, rate=0.01)) == set(VOTING)
    assert control.health.state_dict()["loss"]["count"] == 0
    for _ in range(4):
        assert voting_reasons(step(control, rate=0.01)) == {Reason.LEARNING_RATE}
    assert low_bit(step(control, rate=0.01)) == set(VOTING)


def test_probes():
    control = controller(replace(POLICY, recovery=replace(POLICY.recovery, probe_interval=10)))
    probes = []
    for _ in range(40):
        decision = step(control)
        if decision.is_probe:
            probes.append(decision.step)
            assert reasons(decision) == {"head": Reason.PLAN, **dict.fromkeys(VOTING, Reason.PROBE)}
    assert probes == [9, 19, 29, 39]
    decision = control.decide(40)
    assert control.observe(replace(healthy(decision), probe_cosine={"body": 0.1}))[0].reason is Reason.HEALTH_PROBE
    assert low_bit(control.decide(41)) == set()


def test_withdrawn_regions_stay_out_and_hold_nobody_up():
    control = controller()
    run_until(control, Mode.LOW_BIT)
    step(control, withdraw={"body": Reason.SPARSE})
    assert reasons(step(control))["body"] is Reason.SPARSE
    step(control, bad=True)
    assert run_until(control, Mode.LOW_BIT) == 6 + 3 * 4
    assert low_bit(step(control)) == {"late", "stem"}


def test_a_class_that_cannot_be_tried_for_a_while_waits_for_its_trial():
    control = controller()
    run_until(control, Mode.LOW_BIT)
    step(control, bad=True)
    run_until(control, Mode.RECOVERING)
    step(control, load=Load(failures=1))
    for _ in range(50):
        decision = step(control)
        assert reasons(decision)["body"] is Reason.REDUCER_FAILED
        assert reasons(decision)["late"] is Reason.RECOVERY
    assert low_bit(step(control)) == {"body"}


def test_admission_has_a_say():
    small = Capability(accumulator_bits=2, max_workers=16, slots_granted=1)
    control = controller(capability=small)
    run_until(control, Mode.LOW_BIT)
    route = step(control).routes["body"]
    assert (route.low_bit, route.reason) == (False, Reason.CAPABILITY)
    assert "2" in route.detail
    slow = controller(endpoint=Endpoint(1e9, 1e9, slots=1, network_round_trip_s=1.0))
    run_until(slow, Mode.LOW_BIT)
    assert voting_reasons(step(slow)) == {Reason.COST}


def test_nothing_but_fp32_regions():
    control = PlanController(POLICY, 4, [RegionPolicy("all", "fp32")])
    for bad in (False,) * 10 + (True,) * 5 + (False,) * 30:
        assert step(control, bad=bad).routes["all"].reason is Reason.PLAN
    assert control.mode is Mode.LOW_BIT


def test_digests_have_62_bits_and_name_step_routes_and_reasons():
    control, seen = controller(), set()
    for _ in range(300):
        decision = control.decide(control.next_step)
        assert 0 <= decision.digest < 1 << 62
        seen.add(decision.digest)
        step(control, bad=control.next_step == 100)
    assert len(seen) == 300
    assert max(seen) > 1 << 60
    a, b = controller(), controller()
    for each in (a, b):
        run_until(each, Mode.LOW_BIT)
    step(a)
    step(b, withdraw={"body": Reason.SPARSE})
    assert a.decide(6).digest != b.decide(6).digest


def test_a_collapse_is_left_within_three_steps_and_healthy_training_is_not():
    """The whole chain on simulated training: nothing happens until step 700, then votes collapse."""
    regions = [RegionPolicy("r0"), RegionPolicy("r1", sensitivity=1), RegionPolicy("r2", sensitivity=2)]
    control = PlanController(ControllerPolicy(), 4, regions)
    left = []
    for signals in simulate(Training(steps=760, vote_onset=700), SEED):
        decision = control.decide(signals.step)
        votes = {name: share for name, share in signals.unanimity.items() if decision.routes[name].low_bit}
        control.observe(replace(signals, unanimity=votes, tie_rate={}, margin={}))
        if signals.step >= 100 and not votes:
            left.append(signals.step)
    assert 700 < left[0] <= 703


def test_steps_are_decided_and_observed_once_and_in_order():
    control = controller()
    assert control.decide(0) == control.decide(0)
    for wrong in (1, -1):
        with pytest.raises(ValueError, match="the next is 0"):
            control.decide(wrong)
    with pytest.raises(ValueError, match="the next is 0"):
        control.observe(StepSignals(3, 1.0))
    resumed = controller(first_step=17)
    assert resumed.decide(17).mode is Mode.LOW_BIT


def test_a_rate_that_is_told_only_when_it_changes_holds_until_the_next():
    control = controller()
    step(control, rate=0.1)
    for _ in range(60):
        step(control)
    step(control, rate=0.01)
    seen = [voting_reasons(step(control)) for _ in range(6)]
    assert seen == [{Reason.LEARNING_RATE}] * 4 + [{Reason.PLAN}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": StepSignals(0, 1.0, {"x": 0.1})}, "unknown region 'x'"),
        ({"signals": StepSignals(0), "learning_rate": math.nan}, "learning rate must be 0 or more"),
        ({"signals": StepSignals(0), "withdraw": {"x": Reason.SPARSE}}, "'x' cannot be withdrawn"),
        ({"signals": StepSignals(0), "load": Load(occupancy=-1.0)}, "occupancy"),
    ],
)
def test_bad_observations_change_nothing(arguments, message):
    control = controller()
    before = control.state_dict()
    with pytest.raises(ValueError, match=message):
        control.observe(**arguments)
    assert control.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 0}, "version 0"), ({"regions": ["a"]}, r"regions are \['a'\]"), ({"classes": [1]}, "classes are")],
)
def test_a_strange_state_is_refused(change, message):
    control = controller()
    before = control.state_dict()
    with pytest.raises(ValueError, match=message):
        control.load_state_dict({**before, **change})
    assert control.state_dict() == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cool_down_steps": 0}, "cool_down_steps must be at least 1"),
        ({"relapse_budget": -1}, "relapse_budget"),
        ({"probe_interval": 1}, "every step is a probe"),
    ],
)
def test_recovery_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        RecoveryPolicy(**wrong)


# ---- any history -----------------------------------------------------------------------------------------------

QUICK = ControllerPolicy(
    health=HealthPolicy(settle_steps=4, gap_steps=4),
    phases=PhasePolicy(
        warmup_steps=6,
        windows=((0, 60), (70, None)),
        recalibration_points=(40,),
        recalibration_steps=3,
        learning_rate_steps=4,
    ),
    admission=AdmissionPolicy(dwell_steps=8),
    recovery=RecoveryPolicy(cool_down_steps=5, trial_steps=3, relapse_budget=2, forgive_steps=25, probe_interval=9),
)
BOUND = 5 + 15 + 3 * (3 + 1) + 10 + 3 + 4 + 8
"""Healthy steps after which all regions must be back: cool-down, detectors getting quiet, three trials with a probe in
each, a closed window, a recalibration, a learning rate that jumped, and the dwell of a busy reducer. What a reducer
that failed is left alone for comes on top."""


class AnyHistory(RuleBasedStateMachine):
    """Two ranks, one of which is restored from its checkpoint now and then, and a count of what the rules allow."""

    def __init__(self):
        super().__init__()
        self.ranks = [controller(QUICK), controller(QUICK)]
        self.alarm_at = None
        self.relapses = 0
        self.ended = False

    def advance(self, loss=1.0, share=0.17, load=None, rate=None, not_finite=False, cosine=None):
        ours, theirs = (rank.decide(rank.next_step) for rank in self.ranks)
        assert ours == theirs
        assert ours.digest == theirs.digest
        votes = dict.fromkeys(sorted(low_bit(ours)), share)
        probes = dict.fromkeys(VOTING, cosine) if ours.is_probe else {}
        signals = StepSignals(ours.step, loss, votes, not_finite=not_finite, probe_cosine=probes)
        turned = replace(signals, unanimity=dict(reversed(votes.items())))
        found, again = self.ranks[0].observe(signals, load, rate), self.ranks[1].observe(turned, load, rate)
        assert found == again
        if found:
            self.alarm_at = ours.step
            self.ended |= self.ranks[0].mode is Mode.FROZEN
        return ours

    @rule(count=st.integers(1, 20))
    def steady(self, count):
        for _ in range(count):
            self.advance()

    @rule(loss=st.sampled_from([0.1, 0.5, 3.0, 100.0, math.nan, math.inf, None, 0.0]))
    def loss(self, loss):
        self.advance(loss=loss)

    @rule(share=st.sampled_from([0.0, 0.125, 0.4, 0.71, 1.0]), count=st.integers(1, 6))
    def votes(self, share, count):
        for _ in range(count):
            self.advance(share=share)

    @rule(rate=st.sampled_from([0.0, 0.1, 0.15, 1.0]))
    def learning_rate(self, rate):
        self.advance(rate=rate)

    @rule(cosine=st.sampled_from([0.7, 0.2, None]), not_finite=st.booleans())
    def probe(self, cosine, not_finite):
        self.advance(cosine=cosine, not_finite=not_finite)

    @rule(load=st.builds(Load, occupancy=st.none() | st.floats(0, 1), failures=st.sampled_from([0, 0, 0, 1])))
    def busy(self, load):
        self.advance(load=load)

    @rule()
    def restore(self):
        state = json.loads(json.dumps(self.ranks[1].state_dict()))
        self.ranks[1] = controller(QUICK)
        self.ranks[1].load_state_dict(state)
        assert self.ranks[1].state_dict() == self.ranks[0].state_dict()

    @precondition(lambda self: not self.ended)
    @rule()
    def everything_comes_back(self):
        """Checked on a copy, so that the history goes on from here.

        After what was before, steady signals can be a rise that alarms; then the time starts again.
        """
        copy = controller(QUICK)
        copy.load_state_dict(self.ranks[0].state_dict())
        left = BOUND + copy.admission.state_dict()["wait"]
        while low_bit(copy.decide(copy.next_step)) != set(VOTING) or copy.mode is not Mode.LOW_BIT:
            assert left, f"still {copy.mode}: {copy.decide(copy.next_step)}"
            step(copy, load=Load(occupancy=0.0, stall_share=0.0, retransmission_share=0.0))
            left = BOUND + copy.admission.state_dict()["wait"] if copy.alarms else left - 1
            if copy.mode is Mode.FROZEN:
                return

    @invariant()
    def never_low_bit_when_it_must_not_be(self):
        control = self.ranks[0]
        decision = control.decide(control.next_step)
        voting = low_bit(decision)
        assert "head" not in voting
        assert all(
            route.low_bit == (route.reason is Reason.PLAN) for n, route in decision.routes.items() if n != "head"
        )
        if decision.step < QUICK.phases.warmup_steps or 60 <= decision.step < 70 or 40 <= decision.step < 43:
            assert not voting
        if self.alarm_at is not None and decision.step <= self.alarm_at + QUICK.recovery.cool_down_steps:
            assert not voting
        if self.ended:
            assert decision.mode is Mode.FROZEN
            assert not voting
        if decision.mode in (Mode.WARMUP, Mode.ALARMED, Mode.FROZEN):
            assert not voting
        if decision.is_probe:
            assert not voting
        if decision.mode is Mode.RECOVERING and voting:  # no class before a more robust one
            assert voting in ({"body"}, {"body", "stem"}, set(VOTING))
        assert control.state_dict()["spent"] <= QUICK.recovery.relapse_budget + 1


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
