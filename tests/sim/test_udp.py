"""The in-network endpoint as a whole, in Icarus Verilog and in Verilator."""

from __future__ import annotations

import os
from typing import Any

import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import ICARUS, VERILATOR

pytestmark = [pytest.mark.rtl, pytest.mark.timeout(900)]  # whoever comes first builds, 80 s of one idle core

SMALL = ReducerParams(lanes=512, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3, jobs=2)
FULL = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=7, max_planes=3, jobs=3)

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SEEDS = int(os.environ.get("NEURON_FABRIC_SEEDS", "24"))
LIMIT = 4_000_000

FLOWING = {"source": "always", "sink": "always", "bus": "always"}
QUICK = {"source": "mostly", "sink": "mostly", "bus": "mostly"}


def plan(name: str, params: ReducerParams, seed: int, options: dict[str, Any], bench: dict[str, Any]) -> Plan:
    return Plan(name, params, seed, options, bench, LIMIT, "udp")


# ---- four states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + max(1, SEEDS // 12)))
def test_random_in_icarus(run_bench, seed: int) -> None:
    """Everything at once, hardware resets too; no output is X after reset, and nothing that is read."""
    options = {"frames": 160, "events": 25, "restarts": True, "timeout": 2500}
    run_bench(plan("random", SMALL, seed, options, QUICK), ICARUS)


# ---- full size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + max(1, SEEDS // 24)))
def test_random(run_bench, seed: int) -> None:
    measured = run_bench(
        plan("random", FULL, seed, {"frames": 10_000, "restarts": True}, {"bus": "mostly"}), VERILATOR
    ).measured
    assert measured.frames >= 9_990  # a hardware reset cuts one


DIRECTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "thousand chunks on one slot": (
        "one_slot",
        {"chunks": 1000, "lines": 2, "multicast": True, "encoding": "binary"},
        FLOWING,
    ),
    "one slot": ("slot_counts", {"slots": 1, "world": 3, "chunks": 30}, {}),
    "two slots": ("slot_counts", {"slots": 2, "world": 3, "chunks": 30}, {}),
    "all slots": ("slot_counts", {"slots": FULL.slots, "world": 3, "chunks": 60}, {}),
    "every encoding": ("every_encoding", {"chunks": 3}, QUICK),
    "worlds": ("worlds", {}, QUICK),
    "stragglers": ("stragglers", {"rounds": 5, "timeout": 6000}, QUICK),
    "long stall": ("long_stall", {"cycles": 10_000}, {"source": "always", "sink": "always"}),
}


@pytest.mark.parametrize("what", DIRECTED)
def test_directed(run_bench, what: str) -> None:
    name, options, bench = DIRECTED[what]
    measured = run_bench(plan(name, FULL, SEED, options, bench), VERILATOR).measured
    assert measured.results


@pytest.mark.parametrize("seed", range(SEED, SEED + max(1, SEEDS // 24)))
def test_live_stragglers(run_bench, seed: int) -> None:
    """Chunks whose time is up while votes come in count who was there, and nobody else."""
    measured = run_bench(plan("live", FULL, seed, {}, {"source": "mostly", "sink": "mostly"}), VERILATOR).measured
    assert measured.figures["partial"]


def test_strikes(run_bench) -> None:
    """Jobs are closed while their own frames come in: between two frames, and nothing by halves."""
    run_bench(plan("strikes", FULL, SEED, {"rounds": 15}, {}), VERILATOR)


# ---- rates -----------------------------------------------------------------------------------------------------------

FRAME = FULL.lines_per_chunk / (FULL.lines_per_chunk + 1)
"""Payload lines per cycle of a stream of full frames."""

RATES: dict[str, tuple[dict[str, Any], str, float]] = {
    "multicast tally": ({"result_format": "tally"}, "input", 0.94),
    "majority": ({"result_format": "majority"}, "input", 0.94),
    "with a closed output": ({"blocked": 10_000}, "input", 0.94),
    "unicast majority, 8 workers": ({"result_format": "majority", "multicast": False, "world": 8}, "output", 0.95),
    "unicast tally, 4 workers": ({"result_format": "tally", "multicast": False, "world": 4}, "output", 0.95),
    "unicast tally, 16 workers": ({"result_format": "tally", "multicast": False}, "output", 0.95),
    "tally without a group": ({"result_format": "tally", "group": False, "world": 8}, "output", 0.95),
}
"""What is asked for, which port is the limit, and the least share: of all cycles, or of the lines that fit them."""


@pytest.mark.parametrize("what", RATES)
def test_rate(run_bench, what: str) -> None:
    """Payload lines per cycle: of the input where that is the limit, else of the output.

    With N workers, u planes up and d planes down, the output has d / u times as many lines to carry as the input if
    each worker gets its own, so it is the limit wherever d is more than u.
    """
    options, limit, least = RATES[what]
    chunks = 720 // options.get("world", FULL.workers) if limit == "input" else 16
    measured = run_bench(plan("full_rate", FULL, SEED, {"chunks": chunks, **options}, FLOWING), VERILATOR).measured
    if limit == "input":
        assert measured.rate >= least
    else:
        assert measured.figures["output_rate"] >= least * FRAME


# ---- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": 1, "lines": 14, "workers": [3, 2]},
        # A switch that holds one frame per port: who sends waits for who receives, in both directions.
        {"buckets": 1, "lines": 24, "workers": [2, 2], "groups": False, "depth": 1, "stalls": "half"},
    ],
    ids=["any", "coupled"],
)
def test_tree(run_bench, options: dict[str, Any]) -> None:
    """Two children and their parent: everybody gets the sum over everybody."""
    run_bench(Plan("tree", SMALL, SEED, options, {}, LIMIT, "tree"), ICARUS)
