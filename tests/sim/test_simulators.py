from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from neuron_fabric.sim import simulators
from neuron_fabric.sim.simulators import ICARUS, VERILATOR, Requirement, SimulatorError, find, project_root


def fake(folder: Path, name: str, says: str, code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without any simulator."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for requirement in (ICARUS, VERILATOR):
        monkeypatch.delenv(requirement.variable, raising=False)
    monkeypatch.setattr(simulators.importlib.util, "find_spec", lambda name: None)
    return tmp_path


@pytest.mark.parametrize("requirement", [ICARUS, VERILATOR], ids=lambda r: r.name)
def test_missing(nowhere: Path, requirement: Requirement) -> None:
    with pytest.raises(SimulatorError) as caught:
        find(requirement)
    message = str(caught.value)
    assert requirement.title in message
    assert requirement.minimum in message
    assert requirement.remedy in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("requirement", "says", "found"),
    [
        (ICARUS, "Icarus Verilog version 10.3 (stable) ()", "10.3"),
        (VERILATOR, "Verilator 5.006 2023-01-22 rev (Debian 5.006-3)", "5.006"),
        (VERILATOR, "Verilator 4.228 2022-10-01", "4.228"),
    ],
)
def test_too_old(nowhere: Path, requirement: Requirement, says: str, found: str) -> None:
    for name in requirement.executables:
        path = fake(nowhere / "bin", name, says)
    with pytest.raises(SimulatorError) as caught:
        find(requirement)
    for part in (requirement.title, found, requirement.minimum, requirement.remedy, str(path.parent)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("requirement", "says", "version"),
    [
        (ICARUS, "Icarus Verilog version 11.0 (stable) ()", "11.0"),
        (ICARUS, "Icarus Verilog version 13.0 (devel) (s20221226)", "13.0"),
        (VERILATOR, "Verilator 5.036 2025-04-27 rev v5.036", "5.036"),
        (VERILATOR, "Verilator 5.052 2026-09-05 rev v5.052", "5.052"),
    ],
)
def test_new_enough(nowhere: Path, requirement: Requirement, says: str, version: str) -> None:
    for name in requirement.executables:
        fake(nowhere / "bin", name, says)
    found = find(requirement)
    assert (found.name, found.version, found.folder) == (requirement.name, version, nowhere / "bin")
    assert found.environment({"PATH": "/usr/bin"})["PATH"] == f"{nowhere / 'bin'}{os.pathsep}/usr/bin"


def test_icarus_in_the_project_helps_where_the_one_on_path_is_too_old(nowhere: Path) -> None:
    for name in ICARUS.executables:
        fake(nowhere / "bin", name, "Icarus Verilog version 10.1 (stable)")
        fake(nowhere / ".tools/iverilog/bin", name, "Icarus Verilog version 12.0 (stable)")
    inner = nowhere / "a" / "b"
    inner.mkdir(parents=True)
    os.chdir(inner)
    assert project_root() == nowhere
    assert find(ICARUS).folder == nowhere / ".tools/iverilog/bin"


def test_override_wins_and_is_checked(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ICARUS.executables:
        fake(nowhere / "bin", name, "Icarus Verilog version 12.0 (stable)")
        fake(nowhere / "mine", name, "Icarus Verilog version 9.0")
    monkeypatch.setenv(ICARUS.variable, str(nowhere / "mine" / "iverilog"))
    with pytest.raises(SimulatorError, match=r"9\.0 .* too old"):
        find(ICARUS)
    monkeypatch.setenv(ICARUS.variable, str(nowhere / "gone"))
    with pytest.raises(SimulatorError, match=r"NEURON_FABRIC_IVERILOG names .*gone, which does not exist"):
        find(ICARUS)


def test_half_an_installation(nowhere: Path) -> None:
    fake(nowhere / "bin", "iverilog", "Icarus Verilog version 12.0 (stable)")
    with pytest.raises(SimulatorError, match="vvp is not beside"):
        find(ICARUS)


def test_an_answer_that_is_no_version(nowhere: Path) -> None:
    fake(nowhere / "bin", "verilator", "cannot find perl", 1)
    with pytest.raises(SimulatorError, match=r"Verilator: .* does not tell its version"):
        find(VERILATOR)


@pytest.mark.parametrize("requirement", [ICARUS, VERILATOR], ids=lambda r: r.name)
def test_installed(requirement: Requirement) -> None:
    found = find(requirement)
    assert found.title == requirement.title


def test_script_says_what_to_install_where_it_cannot_help(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("sed", "head"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    script = project_root() / "scripts" / "get_iverilog.sh"
    done = subprocess.run(
        ["/bin/sh", script, tmp_path / "iverilog"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "install the package 'iverilog'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
