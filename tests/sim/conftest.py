from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from neuron_fabric.sim import build
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import Requirement, find, project_root
from neuron_fabric.sim.table import Row, render, size_of, write_json

ROWS = pytest.StashKey[list[Row]]()

RunBench = Callable[..., build.Outcome]


def pytest_configure(config: pytest.Config) -> None:
    config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    path = project_root() / "build" / "sim" / "report.json"
    write_json(rows, path)
    terminalreporter.ensure_newline()
    # A pipe has no width; 80 columns would break every row.
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "150"))
    render(rows, Console(width=width))
    seed = os.environ.get("NEURON_FABRIC_SEED", "1")
    print(f"random seeds from {seed} (NEURON_FABRIC_SEED, NEURON_FABRIC_SEEDS); table as JSON: {path}")


@pytest.fixture
def run_bench(request: pytest.FixtureRequest) -> RunBench:
    """Runs a plan in a simulator, and puts a row into the table whatever comes of it."""
    name = request.node.nodeid.partition("tests/sim/")[2] or request.node.name
    count = 0

    def run(plan: Plan, requirement: Requirement, *, record: bool = True, **options: Any) -> build.Outcome:
        nonlocal count
        folder = "".join(c if c.isalnum() or c in "-_." else "-" for c in name) + (f"-{count}" if count else "")
        count += 1
        begun = time.monotonic()
        row: dict[str, Any] = {"cycles": None, "result": "failed", "note": ""}
        try:
            # The simulator is looked for here, so that a missing one fails each test that needs it, with its message.
            outcome = build.run(folder, plan, find(requirement), **options)
            row |= {"cycles": outcome.measured.cycles, "result": "passed", "note": _note(outcome)}
        except Exception as error:
            row["note"] = str(error).splitlines()[0]
            raise
        finally:
            if record:
                seconds = time.monotonic() - begun
                title = request.node.name.removeprefix("test_")
                rows = request.config.stash[ROWS]
                rows.append(Row(title, requirement.title, size_of(plan.params), plan.seed, seconds=seconds, **row))
        return outcome

    return run


def _note(outcome: build.Outcome) -> str:
    measured = outcome.measured
    note = f"{measured.frames} frames, {measured.results} results"
    if measured.latency_last:
        first, last = (", ".join(map(str, sorted(found))) for found in (measured.latency_first, measured.latency_last))
        note += f"; latency {first} from the first line, {last} from the last"
    return note + (f"; waves {outcome.waves}" if outcome.waves else "")
