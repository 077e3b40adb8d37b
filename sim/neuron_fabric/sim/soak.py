"""``python -m neuron_fabric.sim.soak``: the random benches for as long as one likes, each with seed after seed.

The same plans as in the tests, in Verilator at full size. It ends at the first failure, and says how to repeat it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim import build
from neuron_fabric.sim.build import BenchFailedError, BuildFailedError
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import VERILATOR, Simulator, SimulatorError, find, project_root
from neuron_fabric.sim.table import Row, render, size_of, write_json

__all__ = ["CAMPAIGN", "main"]

_AXIS = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=6, max_planes=4)
_UDP = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=7, max_planes=3, jobs=3)
_TREE = ReducerParams(lanes=512, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3, jobs=2)
_CXL = ReducerParams(jobs=2)
_LIMIT = 20_000_000


def _udp(scenario: str, **options: object) -> Callable[[int], Plan]:
    return lambda seed: Plan(scenario, _UDP, seed, dict(options), {}, _LIMIT, "udp")


def _tree(seed: int) -> Plan:
    options = {
        "workers": [1 + seed % 3, 1 + seed // 3 % 3],
        "result_format": ("tally", "majority")[seed % 2],
        "groups": seed % 4 < 2,
        "trouble": (0.0, 0.03, 0.0)[seed % 3],
        "depth": (0, 0, 1)[seed % 3],
        "stalls": ("mostly", "half", "rarely", "bursts")[seed // 2 % 4],
        "buckets": 4,
    }
    return Plan("tree", _TREE, seed, options, {"patience": 20_000}, _LIMIT, "tree")


CAMPAIGN: dict[str, Callable[[int], Plan]] = {
    "udp": _udp("random", frames=10_000, restarts=True),
    "udp-busy": _udp("random", frames=10_000, polite=False, events=150),
    "udp-live": _udp("live", chunks=400),
    "udp-strikes": _udp("strikes", rounds=100),
    "udp-stragglers": _udp("stragglers", rounds=20, timeout=8000),
    "udp-stall": _udp("long_stall", cycles=20_000, frames=3000),
    "tree": _tree,
    "cxl": lambda seed: Plan("random", _CXL, seed, {"transactions": 20_000}, {}, _LIMIT, "cxl"),
    "axis": lambda seed: Plan("random", _AXIS, seed, {"chunks": 200, "world": 8 + seed % 9}, {}, _LIMIT),
}
"""What is run with each seed, by name."""


def _runs(names: Sequence[str], first: int, seeds: int) -> Iterator[tuple[str, int]]:
    for seed in range(first, first + seeds):
        for name in names:
            yield name, seed


def _run(name: str, plan: Plan, simulator: Simulator) -> Row:
    begun = time.monotonic()
    cycles, result, note = None, "passed", ""
    try:
        measured = build.run(f"soak-{name}-{plan.seed}", plan, simulator).measured
        cycles, note = measured.cycles, f"{measured.frames} frames, {measured.results} results"
    except (BenchFailedError, BuildFailedError) as error:
        result, note = "failed", str(error)
    seconds = time.monotonic() - begun
    return Row(name, simulator.title, size_of(plan.params), plan.seed, cycles, seconds, result, note)


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; 0 if all passed, 1 at the first failure, 2 if there is no simulator."""
    parser = argparse.ArgumentParser(prog="neuron_fabric.sim.soak", description="Random benches at full size.")
    parser.add_argument("--seeds", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing after so long (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGN), default=list(CAMPAIGN), help="default: all")
    given = parser.parse_args(arguments)
    try:
        simulator = find(VERILATOR)
    except SimulatorError as error:
        print(f"neuron_fabric.sim.soak: {error}")
        return 2
    rows: list[Row] = []
    begun = time.monotonic()
    for name, seed in _runs(given.only, given.first, given.seeds):
        if time.monotonic() - begun > 60 * given.minutes:
            print(f"time is up after {given.minutes:g} minutes; the next one would be {name}, seed {seed}")
            break
        row = _run(name, CAMPAIGN[name](seed), simulator)
        print(
            f"{row.name:15} seed {seed:5} {row.cycles or 0:10,} cycles {row.seconds:6.1f} s  {row.result}", flush=True
        )
        rows.append(row)
        if row.result != "passed":
            break
    render(rows)
    write_json(rows, project_root() / "build" / "sim" / "soak.json")
    failed = [row for row in rows if row.result != "passed"]
    for row in failed:
        print(
            f"{row.note}\nrepeat with: python -m neuron_fabric.sim.soak --only {row.name} --first {row.seed} --seeds 1"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
