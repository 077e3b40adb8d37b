"""Building, running and reporting: nothing passes that did not run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim import build
from neuron_fabric.sim.build import BenchFailedError, BuildFailedError
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.simulators import ICARUS, find
from neuron_fabric.sim.table import Row, render, size_of, write_json

LEAST = ReducerParams(lanes=64, lines_per_chunk=2, slots=1, workers=2, acc_bits=2, max_planes=1)
PLAN = Plan("full_rate", LEAST, 1, {"chunks": 2, "encoding": "binary"}, {"source": "always", "sink": "always"})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds go to an empty folder, with the simulator of this project."""
    monkeypatch.setenv(ICARUS.variable, str(find(ICARUS).folder / "iverilog"))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WAVES", raising=False)
    return tmp_path


@pytest.mark.rtl
def test_an_unchanged_design_is_built_once(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = find(ICARUS)
    first = build.build(LEAST, simulator)
    assert first.is_relative_to(elsewhere / "build" / "sim" / "icarus")
    with monkeypatch.context() as patch:
        patch.setattr(build, "get_runner", lambda name: pytest.fail("built again"))
        assert build.build(LEAST, simulator) == first
    text, _ = build.verilog(LEAST)
    assert build.build(LEAST, simulator, text=text + "// changed\n") != first


@pytest.mark.rtl
def test_a_design_that_does_not_compile(elsewhere: Path) -> None:
    with pytest.raises(BuildFailedError, match=r"(?s)Icarus Verilog 1.*syntax error"):
        build.build(LEAST, find(ICARUS), text="nonsense")
    with pytest.raises(BuildFailedError):  # and it stays so
        build.build(LEAST, find(ICARUS), text="nonsense")


@pytest.mark.rtl
def test_waves(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WAVES", "1")
    outcome = build.run("waves", PLAN, find(ICARUS))
    assert outcome.waves is not None
    assert outcome.waves.stat().st_size > 1000
    assert str(outcome.waves) in capsys.readouterr().out
    assert outcome.measured.results == 2


@pytest.mark.rtl
def test_a_limit_of_cycles(elsewhere: Path) -> None:
    with pytest.raises(BenchFailedError, match="not finished after 20 cycles"):
        build.run("limit", Plan(**{**vars(PLAN), "limit": 20}), find(ICARUS))


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ("<testsuites><testsuite name='all'/></testsuites>", "0 tests ran instead of 1"),
        ("<testsuites><testsuite><testcase/><testcase/></testsuite></testsuites>", "2 tests ran instead of 1"),
        ("<testsuites><testsuite><testcase><skipped/></testcase></testsuite></testsuites>", "skipped: "),
        ("<testsuites", ""),
        (None, ""),
        ("<testsuites><testsuite><testcase/></testsuite></testsuites>", None),
    ],
)
def test_only_one_test_that_ran_and_passed_is_a_pass(tmp_path: Path, xml: str | None, message: str | None) -> None:
    path = tmp_path / "results.xml"
    if xml is not None:
        path.write_text(xml)
    assert build._failure(path) == message


def test_table(tmp_path: Path) -> None:
    rows = [
        Row("random[1]", "Icarus Verilog", size_of(LEAST), 1, 12345, 1.5, "passed", "note"),
        Row("directed[x]", "Verilator", size_of(LEAST), None, None, 0.25, "failed"),
    ]
    text = io.StringIO()
    render(rows, Console(file=text, width=140))
    for part in ("random[1]", "directed[x]", "12,345", "64x2 S1 N2 A2 P1", "1 failed", "2 tests"):
        assert part in text.getvalue()
    write_json(rows, tmp_path / "a" / "report.json")
    assert json.loads((tmp_path / "a" / "report.json").read_text())[0]["cycles"] == 12345
