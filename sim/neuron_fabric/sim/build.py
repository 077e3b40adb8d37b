"""Export, build and run: from parameters to the measured result of a bench in a simulator.

Builds are kept under ``build/sim/<simulator>/<key>``, where the key is a hash of everything that goes in: Verilog text,
simulator and version, options. An unchanged design is never built twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cocotb_tools.runner import get_runner

from neuron_fabric.hw import export
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.plan import PLAN_VARIABLE, Plan
from neuron_fabric.sim.simulators import Simulator, project_root
from neuron_fabric.sim.tops import top_of
from neuron_fabric.sim.wrapper import TOP

__all__ = ["BenchFailedError", "BuildFailedError", "Outcome", "build", "run", "verilog", "waves_wanted"]

_TIMESCALE = ("1ns", "1ps")
_BUILD_ARGS = {
    # Under SystemVerilog's rules (cocotb's default) Icarus initialises declarations before any process starts, and then
    # does not evaluate an `always @*` whose inputs never change; such signals would stay X.
    "icarus": ["-g2005"],
    # The bench around the design compares with X, which Verilator has not got.
    "verilator": ["-Wno-fatal", "-Wno-lint", "-O3", "--x-assign", "fast", "--x-initial", "fast", "--no-timing"],
}
_KEPT = {"icarus": 60, "verilator": 12}
_LEFTOVERS = (".o", ".a", ".gch")  # of the compiler: 140 MB a build


class BuildFailedError(RuntimeError):
    """The simulator did not accept the design; the message has the end of its log."""


class BenchFailedError(AssertionError):
    """A bench failed, or did not run at all; the message says why and where its log is."""


@dataclass(frozen=True)
class Outcome:
    """A run that passed."""

    measured: Measured
    seconds: float
    waves: Path | None


def waves_wanted() -> bool:
    """Whether the environment asks for wave forms: ``WAVES=1``."""
    return os.environ.get("WAVES", "0").strip().lower() not in ("", "0", "false", "no", "off")


def _folder() -> Path:
    return project_root() / "build" / "sim"


@functools.cache
def verilog(params: ReducerParams, design: str = "axis") -> tuple[str, str]:
    """Verilog text and JSON manifest of a design of :mod:`neuron_fabric.hw.verilog`."""
    with tempfile.TemporaryDirectory() as folder:
        path = export(design, params, folder)
        return path.read_text(encoding="utf-8"), path.with_suffix(".json").read_text(encoding="utf-8")


@contextlib.contextmanager
def _runner_environment(simulator: Simulator) -> Iterator[None]:
    """What cocotb's runner reads from this process's environment: ``PATH``, and not ``WAVES``, which is for us."""
    before = dict(os.environ)
    os.environ["PATH"] = simulator.environment()["PATH"]
    os.environ.pop("WAVES", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(params: ReducerParams, simulator: Simulator, *, top: str = "axis", text: str | None = None) -> Path:
    """The folder of the built simulation of a top, built now or before.

    Parameters
    ----------
    params : ReducerParams
        Of the design.
    simulator : Simulator
        As :func:`~neuron_fabric.sim.simulators.find` found it.
    top : str
        Name in :data:`~neuron_fabric.sim.tops.TOPS`.
    text : str, optional
        Verilog to take instead of what the gateware exports.
    """
    kind = top_of(top)
    exported, manifest = verilog(params, kind.design)
    sources = {"design.v": exported if text is None else text, "bench.v": kind.harness(json.loads(manifest))}
    # Icarus can always dump; Verilator must be built for it.
    waves = waves_wanted() and simulator.name == "verilator"
    arguments = _BUILD_ARGS[simulator.name]
    ingredients = [
        *sources.values(),
        simulator.name,
        simulator.version,
        str(simulator.folder),
        importlib.metadata.version("cocotb"),
        repr((arguments, _TIMESCALE, waves)),
    ]
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    target = _folder() / simulator.name / key
    with _locked(target.with_suffix(".lock")):
        if target.is_dir():
            os.utime(target)
            return target
        # What a build that was cut short leaves must never look like a whole one.
        begun = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=target.parent))
        paths = []
        for name, content in sources.items():
            paths.append(begun / name)
            paths[-1].write_text(content, encoding="utf-8")
        log = begun / "build.log"
        with _runner_environment(simulator):
            try:
                get_runner(simulator.name).build(
                    sources=paths,
                    hdl_toplevel=TOP,
                    build_dir=begun,
                    build_args=arguments,
                    timescale=_TIMESCALE,
                    waves=waves,
                    log_file=log,
                )
            except RuntimeError as error:
                failed = target.with_suffix(".failed")
                shutil.rmtree(failed, ignore_errors=True)
                begun.rename(failed)
                raise BuildFailedError(
                    f"{simulator.title} {simulator.version}: {error}\n{_tail(failed / log.name)}\nin {failed}"
                ) from None
        for path in begun.iterdir():
            if path.suffix in _LEFTOVERS:
                path.unlink()
        begun.rename(target)
    _prune(target.parent, _KEPT[simulator.name])
    return target


def _prune(folder: Path, kept: int) -> None:
    """Remove all builds but the ones used last: an evolving design would fill the disk."""
    builds = [path for path in folder.iterdir() if path.is_dir()]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)[kept:]:
        shutil.rmtree(old, ignore_errors=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def run(
    name: str,
    plan: Plan,
    simulator: Simulator,
    *,
    text: str | None = None,
) -> Outcome:
    """Build if need be, run one plan, and check that it ran and passed.

    ``name`` names the folder for the run's files, ``build/sim/runs/<name>``.

    Raises
    ------
    BenchFailedError
        With the bench's own message.
    """
    kind = top_of(plan.top)
    built = build(plan.params, simulator, top=plan.top, text=text)
    folder = _folder() / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results, report, log = folder / "results.xml", folder / "measured.json", folder / "sim.log"
    plan.write(folder / "plan.json", kind.ports(plan), report)
    waves = folder / ("dump.fst" if simulator.name == "icarus" else "dump.vcd") if waves_wanted() else None
    begun = time.monotonic()
    problem = ""
    with _runner_environment(simulator):
        try:
            runner = get_runner(simulator.name)
            runner.test(
                test_module=kind.module,
                hdl_toplevel=TOP,
                hdl_toplevel_lang="verilog",
                build_dir=built,
                test_dir=folder,
                results_xml=str(results),
                log_file=log,
                waves=waves is not None,
                plusargs=[f"+dump={waves}"] if waves and simulator.name == "icarus" else [],
                extra_env={PLAN_VARIABLE: str(folder / "plan.json"), "COCOTB_ANSI_OUTPUT": "0"},
            )
        except (RuntimeError, SystemExit) as error:
            # Under pytest the runner exits when a test failed, otherwise it returns as if nothing were the matter. So
            # neither is relied upon: the results say what happened.
            problem = str(error)
    seconds = time.monotonic() - begun
    failure = _failure(results)
    if failure is not None:
        what = failure or problem or "the simulator ended without results"
        raise BenchFailedError(
            f"{plan.scenario}, seed {plan.seed}, {simulator.title}: {what}\nlog: {log}\nplan: {folder / 'plan.json'}"
            + (f"\nwaves: {waves}" if waves else "")
            + ("" if failure else f"\n{_tail(log)}")
        )
    if waves:
        print(f"waves: {waves}")
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return Outcome(Measured.from_dict(content), seconds, waves)


def _failure(results: Path) -> str | None:
    """None if the one test ran and passed, else its message ("" where there is none)."""
    try:
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return ""
    if len(cases) != 1:
        return f"{len(cases)} tests ran instead of 1"
    for case in cases:
        for kind in ("failure", "error", "skipped"):
            element = case.find(kind)
            if element is not None:
                return f"{element.get('error_type', kind)}: {element.get('error_msg') or element.get('message') or ''}"
    return None


def _tail(log: Path, lines: int = 30) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
