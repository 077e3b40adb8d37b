"""Small designs in Icarus Verilog, which knows X."""

from __future__ import annotations

import itertools
import os

import pytest

from neuron_fabric.hw import AxiStreamReducer
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import ICARUS
from neuron_fabric.sim.stimulus import SCENARIOS

pytestmark = pytest.mark.rtl

MAIN = ReducerParams(lanes=64, lines_per_chunk=4, slots=2, workers=5, acc_bits=5, max_planes=3)
WIDE = ReducerParams(lanes=128, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3)
ONE_SLOT = ReducerParams(lanes=64, lines_per_chunk=5, slots=1, workers=4, acc_bits=4, max_planes=2)
LEAST = ReducerParams(lanes=64, lines_per_chunk=1, slots=1, workers=1, acc_bits=1, max_planes=1)
FULL = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=6, max_planes=4)

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SEEDS = int(os.environ.get("NEURON_FABRIC_SEEDS", "24"))

BENCH = {
    "blocked_output": {"source": "always", "sink": "last"},
    "dropped_results": {"source": "always", "sink": "half"},
}
OPTIONS = {"short_frames": {"chunks": 80}, "full_rate": {"chunks": 30}}


@pytest.mark.parametrize("seed", range(SEED, SEED + max(1, SEEDS // 2)))
def test_random(run_bench, seed: int) -> None:
    """Stalls on both ports, duplicates, reordering, every encoding: all drawn from the seed."""
    params = (MAIN, WIDE, ONE_SLOT, MAIN, WIDE, LEAST)[seed % 6]
    run_bench(Plan("random", params, seed), ICARUS)


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - {"random", "one_slot"}))
def test_directed(run_bench, name: str) -> None:
    bench = BENCH.get(name, {"source": "mostly", "sink": "mostly"})
    measured = run_bench(Plan(name, MAIN, SEED, OPTIONS.get(name, {}), bench), ICARUS).measured
    assert measured.results or name == "not_open"


# A majority over children that count negatives needs the number of leaves, which the gateware refuses by name.
@pytest.mark.parametrize(
    ("encoding", "result_format"),
    [
        *itertools.product(["binary", "ternary", "int-2", "int-3", "tally-ternary-2"], ["tally", "majority"]),
        ("tally-binary-3", "tally"),
    ],
)
def test_encoding(run_bench, encoding: str, result_format: str) -> None:
    world = 3 if encoding == "int-3" else 5
    options = {"encoding": encoding, "result_format": result_format, "world": world}
    run_bench(Plan("claims", MAIN, SEED, options, {"source": "mostly", "sink": "mostly"}), ICARUS)


@pytest.mark.parametrize("margin", [0, 1, 2, 3, 5])
def test_margin(run_bench, margin: int) -> None:
    """Full tallies at every margin that matters for five voters."""
    options = {"encoding": "binary", "result_format": "majority", "margin": margin, "chunks": 12}
    run_bench(Plan("full_rate", MAIN, SEED, options, {"source": "always", "sink": "always"}), ICARUS)


def test_thousand_chunks_on_one_slot(run_bench) -> None:
    options = {"chunks": 1000, "encoding": "binary", "world": 2}
    measured = run_bench(
        Plan("one_slot", ONE_SLOT, SEED, options, {"source": "always", "sink": "always"}), ICARUS
    ).measured
    assert measured.results == 1000


@pytest.mark.parametrize("lines", [1, 4])
@pytest.mark.parametrize("result_format", ["tally", "majority"])
def test_latency(run_bench, result_format: str, lines: int) -> None:
    """From the first line of the completing frame always the same; so never more than that from its last."""
    options = {"chunks": 6, "lines": lines, "encoding": "binary", "result_format": result_format}
    bench = {"source": "always", "sink": "always", "isolate": True}
    measured = run_bench(Plan("full_rate", MAIN, SEED, options, bench), ICARUS).measured
    assert measured.latency_first == [AxiStreamReducer.HEADER_LATENCY]
    assert measured.latency_last == [AxiStreamReducer.HEADER_LATENCY - (lines - 1)]
    assert max(measured.latency_last) <= 5, "DESIGN.md section 9"


@pytest.mark.parametrize("beats", [1, 4, 8, 9, 11])
def test_reset_after_beat(run_bench, beats: int) -> None:
    """A frame has 8 header beats and 4 lines here: early and late in both, and at the seam."""
    options = {"beats": beats, "encoding": "binary", "world": 3}
    run_bench(Plan("reset_in_frame", MAIN, SEED, options), ICARUS)


def test_full_size(run_bench) -> None:
    """A short run of the very text that Verilator takes."""
    run_bench(Plan("random", FULL, SEED, {"chunks": 3, "encoding": "ternary"}), ICARUS)
