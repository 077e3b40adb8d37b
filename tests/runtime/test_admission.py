"""Cost law and admission: the law's figures, every refusal with its reason, and no flapping."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.runtime.admission import (
    Admission,
    AdmissionPolicy,
    Capability,
    Limit,
    Load,
    RegionPolicy,
)
from neuron_fabric.runtime.cost import Bound, Endpoint, judge, ring_elements_per_s
from neuron_fabric.runtime.reasons import Reason

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
GIGABIT = 1e9
FAST = Endpoint(100 * GIGABIT, 100 * GIGABIT, slots=4096, clock_hz=4e9)
"""So fast a core, so many slots that the links bind."""
ETA = 1024 / 1112
BODY = RegionPolicy("body")
CAPABLE = Capability(accumulator_bits=6, max_workers=16, slots_granted=8)


def speed_up(world, **changes):
    """Over a ring with the same share of payload on its wires, as the design's figures are."""
    return judge(replace(FAST, **changes), world, "binary", ring_wire_share=ETA).speed_up


# ---- the law ---------------------------------------------------------------------------------------------------


def test_figures_of_the_design():
    assert speed_up(8) == pytest.approx(1.75)
    assert speed_up(8, multicast=True) == pytest.approx(7)
    assert speed_up(8, ports=8) == pytest.approx(14)
    assert speed_up(14) > 1 > speed_up(15) > 0.99
    assert speed_up(16) < 0.8


def test_core_of_512_lanes_at_250_mhz_counts_15_gelements_of_8_workers():
    verdict = judge(Endpoint(1e12, 1e12, ports=8, multicast=True), 8, "binary")
    assert verdict.bounds_elements_per_s[Bound.CORE_IN] == pytest.approx(16 / 17 * 16e9)


@pytest.mark.parametrize(
    ("binding", "changes", "world", "encoding", "result_format"),
    [
        (Bound.ENDPOINT_IN, {"multicast": True}, 8, "binary", "tally"),
        (Bound.ENDPOINT_OUT, {}, 8, "binary", "tally"),
        (Bound.WORKER_UP, {"ports": 8, "worker_bits_per_s": 1e9}, 4, "int-4", "majority"),
        (Bound.WORKER_DOWN, {"ports": 8, "worker_bits_per_s": 1e9}, 4, "binary", "tally"),
        (Bound.CORE_IN, {"ports": 8, "multicast": True, "clock_hz": 1e8}, 8, "binary", "majority"),
        (Bound.CORE_OUT, {"ports": 8, "clock_hz": 1e8}, 8, "binary", "tally"),
        (Bound.SLOTS, {"slots": 1, "network_round_trip_s": 1e-3}, 4, "binary", "tally"),
        (Bound.MEMORY, {"memory_bits_per_s": 1e9}, 4, "binary", "tally"),
    ],
)
def test_each_term_can_bind(binding, changes, world, encoding, result_format):
    verdict = judge(replace(FAST, **changes), world, encoding, result_format)
    assert verdict.binding is binding
    assert (
        verdict.elements_per_s == verdict.bounds_elements_per_s[binding] == min(verdict.bounds_elements_per_s.values())
    )


@pytest.mark.parametrize(("encoding", "up", "down"), [("binary", 1, 3), ("ternary", 2, 4), ("int-4", 4, 6)])
def test_terms_by_hand(encoding, up, down):
    """Four workers on two ports, unicast; numbers put into the design's formula."""
    endpoint = Endpoint(
        10e9, 25e9, ports=2, lanes=64, clock_hz=1e8, lines_per_frame=8, slots=4, accumulator_bits=7,
        memory_bits_per_s=5e9, network_round_trip_s=20e-6, skew_s=5e-6,
    )  # fmt: skip
    eta, framing = 512 / 600, 8 / 9
    wanted = {
        Bound.ENDPOINT_IN: eta * 20e9 / (4 * up),
        Bound.ENDPOINT_OUT: eta * 20e9 / (4 * down),
        Bound.WORKER_UP: eta * 25e9 / up,
        Bound.WORKER_DOWN: eta * 25e9 / down,
        Bound.CORE_IN: framing * 1e8 * 64 / (4 * up),
        Bound.CORE_OUT: framing * 1e8 * 64 / (4 * down),
        Bound.MEMORY: 5e9 / (2 * 7 * 4 * up + 7),
    }
    verdict = judge(endpoint, 4, encoding, retransmission_share=0.25)
    slots = verdict.bounds_elements_per_s.pop(Bound.SLOTS)
    assert verdict.bounds_elements_per_s == pytest.approx(wanted)
    into, out = wanted[Bound.CORE_IN], wanted[Bound.CORE_OUT]  # the slowest on each way
    assert slots == pytest.approx(4 * 4096 / (25e-6 + 4096 / into + 4096 / out))
    assert verdict.elements_per_s == pytest.approx(min(slots, *wanted.values()) / 1.25)


@given(
    st.integers(1, 64), st.sampled_from(["binary", "ternary"]), st.sampled_from(["tally", "majority"]), st.booleans()
)
def test_more_of_anything_is_never_slower(world, encoding, result_format, multicast):
    small = Endpoint(1e10, 1e10, multicast=multicast, memory_bits_per_s=1e11)
    base = judge(small, world, encoding, result_format)
    for change in (
        {"port_bits_per_s": 2e10},
        {"worker_bits_per_s": 2e10},
        {"ports": 2},
        {"clock_hz": 5e8},
        {"lanes": 1024},
        {"slots": 128},
        {"memory_bits_per_s": 2e11},
        {"network_round_trip_s": 0.0},
        {"multicast": True},
    ):
        assert judge(replace(small, **change), world, encoding, result_format).elements_per_s >= base.elements_per_s


def test_one_worker_needs_no_ring():
    assert ring_elements_per_s(1e9, 1) == math.inf
    assert judge(FAST, 1, "binary").speed_up == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Endpoint(0, 1e9), "port_bits_per_s must be positive, but is 0"),
        (lambda: Endpoint(1e9, 1e9, skew_s=-1), "skew_s must be 0 or more"),
        (lambda: Endpoint(1e9, math.nan), "worker_bits_per_s"),
        (lambda: judge(FAST, 0, "binary"), "world must be at least 1"),
        (lambda: judge(FAST, 4, "binary", "sum"), "unknown result format 'sum'"),
        (lambda: judge(FAST, 4, "fp8"), "unknown encoding 'fp8'"),
        (lambda: judge(FAST, 4, "binary", retransmission_share=-0.1), "retransmission_share must be 0 or more"),
    ],
)
def test_the_law_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- yes or no -------------------------------------------------------------------------------------------------


def admission(regions=(BODY,), world=8, policy=AdmissionPolicy(), **of_reducer):  # noqa: B008, a frozen default
    return Admission(policy, world, regions, **of_reducer)


def test_without_a_reducer_nothing_refuses():
    assert admission().answer("body").admitted
    fp32 = admission([RegionPolicy("head", "fp32")]).answer("head")
    assert (fp32.admitted, fp32.reason) == (False, Reason.PLAN)


@pytest.mark.parametrize(
    ("capability", "region", "message"),
    [
        (CAPABLE, BODY, None),
        (replace(CAPABLE, max_workers=4), BODY, "takes 4 workers, not 8"),
        (replace(CAPABLE, slots_granted=0), BODY, "granted no slot"),
        (CAPABLE, RegionPolicy("body", "ternary"), "does not know ternary, but binary"),
        (replace(CAPABLE, result_formats=("tally",)), RegionPolicy("body", "binary", "majority"), "sends no majority"),
        (replace(CAPABLE, accumulator_bits=3), BODY, "takes 4 bits; the accumulator has 3"),
    ],
)
def test_capability(capability, region, message):
    answer = admission([region], capability=capability).answer("body")
    assert answer.admitted == (message is None)
    if message is not None:
        assert answer.reason is Reason.CAPABILITY
        assert message in answer.detail


def test_where_low_bit_does_not_pay_it_is_declined_region_by_region():
    regions = [BODY, RegionPolicy("wide", "int-4"), RegionPolicy("small", "binary", "majority")]
    asked = admission(regions, endpoint=FAST)
    answers = {region.name: asked.answer(region.name) for region in regions}
    assert [answers[name].admitted for name in ("body", "wide", "small")] == [True, False, True]
    assert answers["wide"].reason is Reason.COST
    assert "bound by endpoint_out" in answers["wide"].detail
    assert not admission(world=16, endpoint=FAST).answer("body").admitted
    assert admission(world=16, endpoint=replace(FAST, multicast=True)).answer("body").admitted


@pytest.mark.parametrize("measure", ["occupancy", "stall_share", "retransmission_share", "latency_s"])
def test_each_measure_refuses_and_takes_again(measure):
    policy = AdmissionPolicy(latency_s=Limit(1e-3, 5e-4), dwell_steps=10)
    limit = getattr(policy, measure)

    def load(value):
        return Load(latency_s={0.99: value, 0.5: 99.0}) if measure == "latency_s" else Load(**{measure: value})

    asked = admission(policy=policy)
    asked.observe(load(2 * limit.high), used=True)
    answer = asked.answer("body")
    assert (answer.admitted, answer.reason) == (False, Reason.LOAD)
    assert measure in answer.detail
    between = 0
    while not asked.answer("body").admitted:
        asked.observe(load(limit.low / 2), used=False)
        between += 1
    assert policy.dwell_steps <= between <= 2 * policy.dwell_steps


def switches(asked, loads):
    """Changes of mind about one region, and the steps at which they came."""
    found, last = [], asked.answer("body").admitted
    for step, load in enumerate(loads):
        asked.observe(load, used=last)
        if asked.answer("body").admitted != last:
            last = not last
            found.append(step)
    return found


def test_noise_around_the_threshold_does_not_flap():
    """5,000 steps of occupancy that scatters around the upper threshold: 1 switch, and never a way back."""
    rng = np.random.default_rng(SEED)
    loads = [Load(occupancy=abs(x)) for x in 0.9 + 0.05 * rng.standard_normal(5000)]
    naive = sum(a.occupancy > 0.9 and b.occupancy <= 0.9 for a, b in itertools.pairwise(loads))
    assert naive > 1000
    assert len(switches(admission(), loads)) <= 1


def test_the_dwell_bounds_the_switches_of_any_load():
    """Load that jumps over both thresholds at random: at most one switch in ``dwell_steps``."""
    policy = AdmissionPolicy(dwell_steps=40, memory=0.0)
    rng = np.random.default_rng(SEED)
    found = switches(admission(policy=policy), [Load(occupancy=x) for x in rng.choice([0.1, 1.0], 4000)])
    assert 20 < len(found) <= 4000 / policy.dwell_steps + 1
    assert min(np.diff(found)) >= policy.dwell_steps


def test_retransmissions_that_make_low_bit_too_slow_do_not_flap():
    endpoint, world = FAST, 12  # about 1.2 times the ring, unicast
    policy = AdmissionPolicy(retransmission_share=Limit(9, 9), speed_up=1.0, speed_up_again=1.1)
    start = judge(endpoint, world, "binary").speed_up
    around = start / policy.speed_up - 1  # where the law says 1.0
    rng = np.random.default_rng(SEED)
    loads = [Load(retransmission_share=abs(x)) for x in around + 0.02 * rng.standard_normal(5000)]
    assert 1.1 < start < 1.3
    assert len(switches(admission(world=world, policy=policy, endpoint=endpoint), loads)) <= 1


def test_a_busy_reducer_that_is_left_is_tried_again_though_nobody_measures_it():
    asked = admission()
    asked.observe(Load(occupancy=1.0), used=True)
    assert not asked.answer("body").admitted
    for _ in range(AdmissionPolicy.dwell_steps):
        asked.observe(None, used=False)
    assert asked.answer("body").admitted


def test_nothing_heard_while_in_use_changes_nothing():
    asked = admission()
    asked.observe(Load(occupancy=0.85), used=True)
    before = asked.state_dict()["averages"]
    for _ in range(10):
        asked.observe(None, used=True)
    assert asked.state_dict()["averages"] == before


def test_a_reducer_that_fails_is_left_longer_each_time():
    asked, waits = admission(policy=AdmissionPolicy(dwell_steps=5)), []
    for _ in range(9):
        asked.observe(Load(failures=1), used=True)
        waited = 0
        while not asked.answer("body").admitted:
            assert asked.answer("body").reason is Reason.REDUCER_FAILED
            asked.observe(None, used=False)
            waited += 1
        waits.append(waited)
    assert waits == [5, 10, 20, 40, 80, 160, 320, 320, 320]
    for _ in range(5):
        asked.observe(Load(), used=True)
    asked.observe(Load(failures=2), used=True)
    assert asked.state_dict()["wait"] == 5


@given(
    st.lists(
        st.builds(
            Load,
            occupancy=st.none() | st.floats(0, 1),
            retransmission_share=st.none() | st.floats(0, 0.5),
            failures=st.sampled_from([0, 0, 0, 1]),
        ),
        min_size=1,
        max_size=60,
    ),
    st.data(),
)
def test_restored_it_goes_on_alike(loads, data):
    policy = AdmissionPolicy(dwell_steps=4)
    cut = data.draw(st.integers(0, len(loads)))
    whole, first, second = (admission(policy=policy, endpoint=FAST) for _ in range(3))
    for load in loads[:cut]:
        whole.observe(load, used=True)
        first.observe(load, used=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for load in loads[cut:]:
        whole.observe(load, used=True)
        second.observe(load, used=True)
        assert whole.answer("body") == second.answer("body")
    assert whole.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Limit(0.5, 0.6), "low must be 0 to high"),
        (lambda: AdmissionPolicy(dwell_steps=0), "dwell_steps must be at least 1"),
        (lambda: AdmissionPolicy(memory=1.0), "memory must be 0 to 1"),
        (lambda: AdmissionPolicy(speed_up=2.0), "speed_up must be 0 to speed_up_again"),
        (lambda: AdmissionPolicy(latency_quantile=99), "latency_quantile"),
        (lambda: RegionPolicy("r", "fp8"), "unknown encoding"),
        (lambda: RegionPolicy("r", "binary", "sum"), "unknown result format 'sum'"),
        (lambda: admission().observe(Load(occupancy=-1), used=True), "occupancy must be 0 or more"),
        (lambda: admission().observe(Load(stall_share=math.nan), used=True), "stall_share"),
        (lambda: admission().observe(Load(failures=-1), used=True), "failures"),
        (lambda: admission().load_state_dict(admission([RegionPolicy("x")]).state_dict()), "'body' is not both"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
