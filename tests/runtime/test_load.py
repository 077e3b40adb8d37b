"""What transports say of their reducers, and that all ranks act on it alike."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import attach
from neuron_fabric.runtime.admission import Capability, Load
from neuron_fabric.runtime.cost import Endpoint
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.transports import TRANSPORTS, AllGather, Golden

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
DWELL = 12
HIGH, LOW, MEMORY = 0.9, 0.7, 0.5

PROFILE = f"""
schema_version: 1
name: load
regions:
  - {{name: one_dimensional, max_ndim: 1, encoding: fp32}}
  - {{name: body, result_format: FORMAT}}
phases: {{warmup_steps: 2}}
health: {{correlation_bound: 1.0, correlation_release: 1.0, threshold: 1000}}
admission:
  occupancy: {{high: {HIGH}, low: {LOW}}}
  latency_s: {{high: 0.010, low: 0.005}}
  dwell_steps: {DWELL}
  memory: {MEMORY}
"""


class Reporting(AllGather):
    """An all-gather that says of its reducer whatever the test wants."""

    name = "reporting"
    can: Capability | None = None
    costs: Endpoint | None = None
    loads = staticmethod(lambda step: Load())

    def __init__(self):
        self.asked = 0

    def capability(self, world):
        return self.can

    def endpoint(self, world):
        return self.costs

    def load(self):
        self.asked += 1
        return self.loads(self.asked - 1)


def run(rank, steps, loads_by_step=lambda step: Load(), can=None, costs=None, text=PROFILE, transport="reporting"):
    """Train a small net; gives back the reason of the region ``body`` in every step, and the state."""
    kind = type("Made", (Reporting,), {"can": can, "costs": costs, "loads": staticmethod(loads_by_step)})
    TRANSPORTS["reporting"] = kind
    try:
        torch.manual_seed(SEED)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 5)))
        state = attach(ddp, loads(text.replace("FORMAT", "tally")), transport)
        records = []
        state.telemetry = records.append
        generator = torch.Generator().manual_seed(1000 * SEED + rank)
        for _ in range(steps):
            wanted = torch.randn(8, 5, generator=generator)
            (ddp(torch.randn(8, 40, generator=generator)) * wanted).sum().backward()
        state.close()
    finally:
        del TRANSPORTS["reporting"]
    return [record["routes"]["body"] for record in records], state


def same_everywhere(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    assert all(other == everybody[0] for other in everybody), everybody


def stretches(reasons):
    """Runs of equal reasons: (reason, first step, steps)."""
    found = []
    for step, reason in enumerate(reasons):
        if found and found[-1][0] == reason:
            found[-1][2] += 1
        else:
            found.append([reason, step, 1])
    return [tuple(each) for each in found]


# ---- checks that run on every rank -----------------------------------------------------------------------------------


def check_a_busy_reducer_is_left_by_all(rank, world, measure):
    """The last rank alone sees the load; all leave at one step, stay away for the dwell, and come back once."""
    high = {"occupancy": 0.95, "latency_s": 0.020}[measure]
    busy = range(20, 40)

    def load(step):
        here = rank == world - 1 and step in busy
        value = high if here else 0.1 * high
        return Load(latency_s={0.99: value}) if measure == "latency_s" else Load(**{measure: value})

    routes, _state = run(rank, 80, load)
    reasons = [route["reason"] for route in routes]
    same_everywhere(routes)
    seen = stretches(reasons)
    assert [reason for reason, _, _ in seen] == ["warmup", "plan", "load", "plan"], seen
    (_, left, away) = seen[2]
    # The average of step t decides about step t + 2; how long it takes to get over the limit follows from its memory.
    limit = 0.9 if measure == "occupancy" else 0.010
    average, over = 0.1 * high, busy.start
    while (average := MEMORY * average + (1 - MEMORY) * high) <= limit:
        over += 1
    assert left == over + 2, seen
    assert left + away > busy.stop
    assert away >= DWELL
    assert measure in routes[left]["detail"]


def check_noise_around_the_limits_does_not_flap(rank, world):
    noise = torch.Generator().manual_seed(SEED + rank)
    routes, _state = run(rank, 200, lambda step: Load(occupancy=0.5 + 0.5 * torch.rand((), generator=noise).item()))
    reasons = [route["reason"] for route in routes]
    same_everywhere(reasons)
    seen = stretches(reasons)[1:]
    assert "load" in reasons
    # Between two changes of mind there are at least the steps of the dwell; the first need not wait.
    assert all(length >= DWELL for _, _, length in seen[1:-1]), seen


def check_without_a_report_nothing_changes(rank, world):
    routes, _state = run(rank, 10)
    assert [route["reason"] for route in routes] == ["warmup"] * 2 + ["plan"] * 8


def check_what_a_reducer_cannot_do(rank, world):
    for can, text in (
        (Capability(32, world - 1, 8), f"takes {world - 1} workers"),
        (Capability(32, 64, 0), "no slot"),
        (Capability(1, 64, 8), "the accumulator has 1"),
        (Capability(32, 64, 8, encodings=("ternary",)), "does not know binary"),
    ):
        routes, state = run(rank, 4, can=can)
        assert [route["reason"] for route in routes] == ["warmup"] * 2 + ["capability"] * 2
        assert text in routes[-1]["detail"], routes[-1]
        assert state.traffic.low_bit_elements == 0


def check_an_endpoint_that_does_not_pay(rank, world):
    slow, fast = Endpoint(1e9, 1e10), Endpoint(1e12, 1e10, ports=64)
    for endpoint, reason in ((slow, "cost"), (fast, "plan")):
        routes, _state = run(rank, 5, costs=endpoint)
        assert {route["reason"] for route in routes[2:]} == {reason}, routes


def check_reducers_that_differ(rank, world):
    with pytest.raises(ValueError, match="the ranks do not have the same reducer") as raised:
        run(rank, 1, can=Capability(32, 64, 8 + rank))
    assert "slots_granted=9" in str(raised.value)


def check_a_report_that_is_no_number_ends_all_ranks(rank, world):
    with pytest.raises(Exception, match="occupancy must be 0 or more and finite"):
        run(rank, 6, lambda step: Load(occupancy=math.nan if rank == 0 and step == 2 else 0.1))


def check_golden_reports_what_its_reducer_counts(rank, world):
    heard = []

    class Heard(Golden):
        def load(self):
            # At the end of a step nothing is in flight, and nothing was sent twice.
            before = dict(self.reducer.counters)
            heard.append((before, super().load()))
            return heard[-1][1]

    original = TRANSPORTS["golden"]
    TRANSPORTS["golden"] = Heard
    try:
        routes, state = run(rank, 6, transport="golden")
    finally:
        TRANSPORTS["golden"] = original
    assert [route["reason"] for route in routes] == ["warmup"] * 2 + ["plan"] * 4
    assert [load for _, load in heard[:2]] == [Load()] * 2
    slots = state._transport.params.slots
    for counters, load in heard[2:]:
        if not counters:
            assert load == Load()  # this rank's shard is empty
            continue
        assert load == Load(occupancy=counters["slot_high_water"] / slots, retransmission_share=0.0)
        assert 0 < load.occupancy < HIGH
    everybody = [None] * world
    dist.all_gather_object(everybody, any(load.occupancy for _, load in heard))
    assert any(everybody)


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("measure", ["occupancy", "latency_s"])
def test_a_busy_reducer_is_left_by_all_at_once(run_ranks, world, measure):
    run_ranks(__file__, "check_a_busy_reducer_is_left_by_all", world, measure=measure)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "check_noise_around_the_limits_does_not_flap",
        "check_without_a_report_nothing_changes",
        "check_what_a_reducer_cannot_do",
        "check_an_endpoint_that_does_not_pay",
        "check_reducers_that_differ",
        "check_a_report_that_is_no_number_ends_all_ranks",
        "check_golden_reports_what_its_reducer_counts",
    ],
)
def test_what_a_transport_says(run_ranks, check):
    run_ranks(__file__, check, 2)


def test_the_golden_reducer_says_what_it_is_built_for():
    for world in (1, 3, 64):
        can = Golden().capability(world)
        assert can.max_workers == world
        assert can.slots_granted > 0
        assert "binary" in can.encodings
        assert Golden().endpoint(world) is None
    for each in ("allgather", "collective"):
        transport = TRANSPORTS[each]()
        assert transport.capability(4) is None
        assert transport.endpoint(4) is None
        assert transport.load() == Load()
