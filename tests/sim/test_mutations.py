"""The benches can fail: faults in the golden model and in the design are found."""

from __future__ import annotations

import re

import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim import build
from neuron_fabric.sim.build import BenchFailedError
from neuron_fabric.sim.mutate import mutants
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import ICARUS

pytestmark = pytest.mark.rtl

UDP = ReducerParams(lanes=512, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3, jobs=2)
MAIN = ReducerParams(lanes=64, lines_per_chunk=4, slots=2, workers=5, acc_bits=5, max_planes=3)

VOTES = {"encoding": "binary", "world": 4}
SHOWS = {
    "ties-vote": ("full_rate", {**VOTES, "chunks": 3, "result_format": "majority", "margin": 0}, "plane 1 of 2"),
    "shift-off-by-one": ("full_rate", {**VOTES, "chunks": 3, "result_format": "tally"}, "elements differ"),
    "seen-ignored": ("duplicates", {**VOTES, "chunks": 3}, "elements differ"),
    "lines-carried-over": ("claims", VOTES, "elements differ"),
    "abstainers-counted": ("claims", VOTES, "header field voters"),
    "last-bit-lost": ("full_rate", {**VOTES, "chunks": 3, "result_format": "tally"}, "; [1-9] elements? differ"),
    "no-resend": ("duplicates", {**VOTES, "chunks": 3}, "asked for 0 times, answered 1 times"),
    "stale-taken": ("wrap_around", {**VOTES, "world": 2}, "results: chunk|elements differ|events|not complete"),
    "lanes-turned": ("full_rate", {**VOTES, "chunks": 3, "result_format": "tally"}, "elements differ"),
}


@pytest.mark.parametrize("name", SHOWS)
def test_fault_in_the_golden_model(run_bench, name: str) -> None:
    scenario, options, message = SHOWS[name]
    plan = Plan(scenario, MAIN, 1, options, {"source": "always", "sink": "always"})
    with pytest.raises(BenchFailedError) as caught:
        run_bench(Plan(**{**vars(plan), "bench": {**plan.bench, "mutation": name}}), ICARUS, record=False)
    assert re.search(message, str(caught.value).splitlines()[0])


HUNT = (
    Plan("random", MAIN, 3, {"chunks": 16, "encoding": "ternary", "result_format": "majority", "margin": 1, "world": 5},
         {"source": "half", "sink": "mostly", "patience": 800}),
    Plan("random", MAIN, 4, {"chunks": 16, "encoding": "int-3", "result_format": "tally", "world": 3},
         {"source": "mostly", "sink": "rarely", "patience": 800}),
    Plan("random", MAIN, 5, {"chunks": 16, "encoding": "binary", "result_format": "majority", "margin": 1, "world": 5},
         {"source": "half", "sink": "half", "patience": 800}),
    Plan("bad_frames", MAIN, 1, {"rounds": 1, "encoding": "binary", "world": 2}, {"source": "always", "patience": 800}),
    Plan("dropped_results", MAIN, 1, {"rounds": 8, "encoding": "binary", "world": 2},
         {"source": "always", "sink": "half", "patience": 800}),
)  # fmt: skip


IN_THE_CORE = r"reducer_axis(\s|\.core\.(adder|tallies|results|slots))"


def hunt(run_bench, plans, faulty):
    """At most a third of the faulty designs pass all plans."""
    survivors = []
    for text, change in faulty:
        for plan in plans:
            try:
                run_bench(plan, ICARUS, text=text, record=False)
            except BenchFailedError:
                break
        else:
            survivors.append(change)
    print(f"{len(faulty) - len(survivors)} of {len(faulty)} faulty designs found; not: {survivors}")
    assert len(survivors) <= len(faulty) // 3, survivors


def test_faults_in_the_design(run_bench) -> None:
    """Of designs with one operator exchanged most are found.

    Some exchanges change nothing, or nothing that this top shows: it has one job that is never closed, no stragglers.
    """
    text, _ = build.verilog(MAIN)
    hunt(run_bench, HUNT, mutants(text, 6, seed=3, modules=IN_THE_CORE))


def test_the_hunting_plans_pass_without_a_fault(run_bench) -> None:
    for plan in HUNT:
        run_bench(plan, ICARUS, record=False)


AROUND_THE_CORE = r"udp\.(ingress|egress|relay|nacks|addresses)"
UDP_BENCH = {"source": "mostly", "sink": "mostly", "bus": "mostly", "patience": 1500}
UDP_MIX = {"frames": 180, "events": 30, "timeout": 2500}
UDP_HUNT = (
    Plan("random", UDP, 1, {**UDP_MIX, "kinds": ["child", "plain"], "group": False}, UDP_BENCH, top="udp"),
    Plan("strikes", UDP, 2, {"rounds": 5, "chunks": 4}, UDP_BENCH, top="udp"),
    Plan("random", UDP, 2, {**UDP_MIX, "kinds": ["plain"], "group": True}, UDP_BENCH, top="udp"),
)


def test_faults_around_the_core(run_bench) -> None:
    """The same for what makes an in-network endpoint of the core."""
    text, _ = build.verilog(UDP, "udp")
    hunt(run_bench, UDP_HUNT, mutants(text, 4, seed=1, modules=AROUND_THE_CORE))
