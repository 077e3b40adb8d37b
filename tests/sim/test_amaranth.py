"""The same stimulus in Amaranth's own simulator."""

from __future__ import annotations

import pytest

from neuron_fabric.hw import AxiStreamReducer
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim import amaranth_sim
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.stimulus import SCENARIOS, scenario

SMALL = ReducerParams(lanes=64, lines_per_chunk=3, slots=2, workers=3, acc_bits=5, max_planes=3)

# Small enough for a simulator in Python.
OPTIONS = {
    "random": {"chunks": 8},
    "full_rate": {"chunks": 8},
    "one_slot": {"chunks": 12, "encoding": "binary"},
    "short_frames": {"chunks": 15, "encoding": "ternary", "world": 2},
    "wrap_around": {"encoding": "binary", "world": 2},
    "claims": {"encoding": "int-2", "world": 2},
    "duplicates": {"chunks": 4, "encoding": "int-3", "world": 2},
    "bad_frames": {"rounds": 1, "encoding": "binary", "world": 2},
    "not_open": {"world": 2},
}
BENCH = {
    "blocked_output": {"source": "always", "sink": "last"},
    "dropped_results": {"source": "always", "sink": "last"},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    made = scenario(name, SMALL, 1, **OPTIONS.get(name, {}))
    measured = amaranth_sim.run(made, **BENCH.get(name, {"source": "mostly", "sink": "mostly"}))
    assert measured.results or name == "not_open"


def test_a_fault_in_the_golden_model_is_found() -> None:
    made = scenario("duplicates", SMALL, 1, chunks=3, encoding="binary", world=3)
    with pytest.raises(Mismatch):
        amaranth_sim.run(made, mutation="seen-ignored")


def test_latency() -> None:
    made = scenario("full_rate", SMALL, 1, chunks=3, lines=1, encoding="binary", world=2)
    measured = amaranth_sim.run(made, source="always", sink="always", isolate=True)
    assert measured.latency_last == [AxiStreamReducer.HEADER_LATENCY]
