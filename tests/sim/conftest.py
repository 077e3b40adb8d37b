from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from neuron_fabric.sim import build
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import Requirement, find
from neuron_fabric.sim.table import PROPERTY, size_of

RunBench = Callable[..., build.Outcome]


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
            row["figures"] = outcome.measured.figures
        except Exception as error:
            row["note"] = str(error).splitlines()[0]
            raise
        finally:
            if record:
                seconds = time.monotonic() - begun
                title = request.node.name.removeprefix("test_")
                row |= {"name": title, "simulator": requirement.title, "parameters": size_of(plan.params)}
                request.node.user_properties.append((PROPERTY, {**row, "seed": plan.seed, "seconds": seconds}))
        return outcome

    return run


def _note(outcome: build.Outcome) -> str:
    measured = outcome.measured
    note = f"{measured.frames} frames, {measured.results} results"
    if measured.latency_last:
        first, last = (", ".join(map(str, sorted(found))) for found in (measured.latency_first, measured.latency_last))
        note += f"; latency {first} from the first line, {last} from the last"
    note += "".join(f"; {name.replace('_', ' ')} {value:g}" for name, value in sorted(measured.figures.items()))
    return note + (f"; waves {outcome.waves}" if outcome.waves else "")
