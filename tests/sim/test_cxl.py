"""The CXL endpoint's Verilog in both simulators, against the golden model."""

from __future__ import annotations

import os

import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import ICARUS, VERILATOR

pytestmark = [pytest.mark.rtl, pytest.mark.timeout(600)]

SMALL = ReducerParams(lines_per_chunk=3, slots=4, workers=5, acc_bits=5, max_planes=3, jobs=2)
ONE_SLOT = ReducerParams(lines_per_chunk=2, slots=1, workers=3, acc_bits=4, max_planes=2)
LEAST = ReducerParams(lines_per_chunk=1, slots=1, workers=1, acc_bits=1, max_planes=1)
FULL = ReducerParams(jobs=2)

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SEEDS = max(1, int(os.environ.get("NEURON_FABRIC_SEEDS", "24")) // 12)
FLOWING = {"stalls": "always", "in_order": True}


def plan(name: str, params: ReducerParams, seed: int = SEED, options: dict | None = None, bench: dict | None = None):
    return Plan(name, params, seed, options or {}, bench or {}, top="cxl")


@pytest.mark.parametrize("seed", range(SEED, SEED + 3 * max(1, SEEDS // 2)))
def test_random_in_icarus(run_bench, seed: int) -> None:
    """Four-state: nothing that leaves the endpoint after reset is X."""
    params = (SMALL, ONE_SLOT, LEAST)[seed % 3]
    run_bench(plan("random", params, seed, {"transactions": 4_000}), ICARUS)


def test_hosts_in_icarus(run_bench) -> None:
    run_bench(plan("hosts", SMALL, options={"encoding": "ternary", "background": 2}), ICARUS)


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_random(run_bench, seed: int) -> None:
    measured = run_bench(plan("random", FULL, seed, {"transactions": 10_000}), VERILATOR).measured
    assert measured.frames == 10_000


@pytest.mark.parametrize("encoding", ["binary", "ternary", "int-2"])
def test_hosts(run_bench, encoding: str) -> None:
    """Hosts whose lines are reordered, repeated and cut get exact sums, and plain memory beside them stays exact."""
    world = 16 if encoding == "binary" else 12
    options = {"encoding": encoding, "world": world, "chunks": 12, "background": 4, "majority": encoding == "int-2"}
    assert run_bench(plan("hosts", FULL, options=options), VERILATOR).measured.figures["completed"] == 12


def test_a_thousand_chunks_on_one_slot(run_bench) -> None:
    options = {"world": 2, "chunks": 1000, "slots": 1, "lines": 1, "first_chunk": (1 << 32) - 500}
    measured = run_bench(plan("hosts", FULL, options=options, bench={"stalls": "always"}), VERILATOR).measured
    assert measured.figures["completed"] == 1000


@pytest.mark.parametrize("mix", ["lines", "memory", "results", "both"])
def test_one_transaction_a_cycle(run_bench, mix: str) -> None:
    options = {"transactions": 4000, "mix": mix}
    measured = run_bench(plan("full_rate", FULL, options=options, bench=FLOWING), VERILATOR).measured
    assert measured.frames == measured.busy == 4000
