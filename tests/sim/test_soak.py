"""The long campaign: its plans can be made, it stops in time and at the first failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim import soak
from neuron_fabric.sim.build import BenchFailedError, Outcome
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import Simulator, SimulatorError
from neuron_fabric.sim.udp.fabric import Tree
from neuron_fabric.sim.udp.scenarios import bench_of


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """No simulator: every run passes, but that of seed 3 of ``tree``."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    done: list[tuple[str, int]] = []

    def run(name: str, plan: Plan, simulator: Simulator) -> Outcome:
        done.append((name, plan.seed))
        if name == "soak-tree-3":
            raise BenchFailedError("tree, seed 3: elements are wrong")
        return Outcome(Measured(cycles=1000, frames=10, results=5), 0.1, None)

    monkeypatch.setattr(soak, "find", lambda requirement: Simulator("verilator", "Verilator", "5", tmp_path))
    monkeypatch.setattr(soak.build, "run", run)
    return done


def test_all_pass(ran: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seeds", "2"]) == 0
    assert len(ran) == 2 * len(soak.CAMPAIGN)
    said = capsys.readouterr().out  # the table may be narrow, and then breaks its lines
    assert said.count("passed") >= len(ran)
    assert "failed" not in said
    assert len(json.loads(Path("build/sim/soak.json").read_text())) == len(ran)


def test_first_failure_ends_it(ran: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seeds", "9", "--only", "udp", "tree"]) == 1
    assert ran[-1] == ("soak-tree-3", 3)
    said = capsys.readouterr().out
    assert "elements are wrong" in said
    assert "repeat with: python -m neuron_fabric.sim.soak --only tree --first 3 --seeds 1" in said


def test_time_is_up(ran: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "-1"]) == 0
    assert not ran
    assert "time is up" in capsys.readouterr().out


def test_no_simulator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(_requirement: object) -> Simulator:
        raise SimulatorError("Verilator is missing")

    monkeypatch.setattr(soak, "find", missing)
    assert soak.main([]) == 2
    assert "Verilator is missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", soak.CAMPAIGN)
def test_plans_can_be_made(name: str) -> None:
    for seed in range(1, 9):
        plan = soak.CAMPAIGN[name](seed)
        assert isinstance(plan.params, ReducerParams)
        assert json.loads(json.dumps(plan.options)) == plan.options
        if plan.top == "tree":
            Tree(plan.params, seed, **{**plan.options, "workers": tuple(plan.options["workers"])})
        elif plan.top == "udp" and seed == 1:
            options = {key: min(value, 300) if key == "frames" else value for key, value in plan.options.items()}
            assert bench_of(plan.scenario, plan.params, seed, options).script.frames
