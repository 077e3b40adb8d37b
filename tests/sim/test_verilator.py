"""The full-size design in Verilator: one build, many transactions, and the line rate."""

from __future__ import annotations

import os

import pytest

from neuron_fabric.hw import AxiStreamReducer
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import VERILATOR
from neuron_fabric.sim.stimulus import SCENARIOS

pytestmark = [pytest.mark.rtl, pytest.mark.timeout(600)]  # whoever comes first builds, some 40 s on two idle cores

FULL = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=6, max_planes=4)

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SEEDS = max(1, int(os.environ.get("NEURON_FABRIC_SEEDS", "24")) // 3)

BENCH = {
    "blocked_output": {"source": "always", "sink": "last"},
    "dropped_results": {"source": "always", "sink": "half"},
    "short_frames": {"source": "always", "sink": "always"},
}
OPTIONS = {
    "wrap_around": {"world": 3, "encoding": "binary"},
    "bad_frames": {"world": 8, "encoding": "binary", "rounds": 2},
    "full_rate": {"chunks": 16},
    "short_frames": {"chunks": 100},
    "one_slot": {"chunks": 1000, "world": 2, "encoding": "binary"},
    "reset_in_frame": {"world": 4},
    "dropped_results": {"world": 4},
    "claims": {"world": 8},
}
FLOWING = {"source": "always", "sink": "always"}


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_random(run_bench, seed: int) -> None:
    options = {"chunks": 50, "world": 8 + seed % 9}
    run_bench(Plan("random", FULL, seed, options), VERILATOR)


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - {"random"}))
def test_directed(run_bench, name: str) -> None:
    bench = BENCH.get(name, {"source": "mostly", "sink": "mostly"})
    measured = run_bench(Plan(name, FULL, SEED, OPTIONS.get(name, {}), bench), VERILATOR).measured
    assert measured.results or name == "not_open"


@pytest.mark.parametrize(
    ("world", "result_format", "encoding"),
    [(2, "majority", "binary"), (4, "majority", "binary"), (4, "tally", "binary"), (16, "tally", "ternary")],
)
def test_line_rate(run_bench, world: int, result_format: str, encoding: str) -> None:
    """One line every cycle but for the header beat of each frame, with results going out at the same time."""
    options = {"chunks": 96 // world + 32, "world": world, "result_format": result_format, "encoding": encoding}
    measured = run_bench(Plan("full_rate", FULL, SEED, options, FLOWING), VERILATOR).measured
    lines = FULL.lines_per_chunk
    assert measured.rate == pytest.approx(lines / (lines + 1), abs=1e-9)


@pytest.mark.parametrize("lines", [1, 16])
def test_latency(run_bench, lines: int) -> None:
    options = {"chunks": 4, "lines": lines, "encoding": "binary", "world": 4}
    measured = run_bench(Plan("full_rate", FULL, SEED, options, FLOWING | {"isolate": True}), VERILATOR).measured
    assert measured.latency_first == [AxiStreamReducer.HEADER_LATENCY]
    assert measured.latency_last == [AxiStreamReducer.HEADER_LATENCY - (lines - 1)]
