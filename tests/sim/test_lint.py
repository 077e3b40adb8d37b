"""The exported Verilog is clean under Verilator's lint, but for what Amaranth's text cannot avoid."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from neuron_fabric.hw import export
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.simulators import VERILATOR, Simulator, find

pytestmark = pytest.mark.rtl

WAIVED = {
    "WIDTHEXPAND": "Amaranth extends operands as Python would; the text leaves the extension to Verilog's rules",
    "WIDTHTRUNC": "and so it does where an assignment cuts off the carry of a sum",
    "PROCASSINIT": "registers are initialised where they are declared, and assigned in always blocks",
    "UNUSEDSIGNAL": "each field of a struct gets a name, used or not",
}
"""Warnings that are off, with the reason."""


FULL = ReducerParams(512, 16, 8, 16, 6, 4, 3)
LEAST = ReducerParams(512, 1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("top", "params"),
    [
        *((top, ReducerParams(512, 16, 8, 16, 6, 4)) for top in ("axis", "core")),
        *((top, ReducerParams(64, 4, 2, 5, 5, 3)) for top in ("axis", "core")),
        *((top, ReducerParams(64, 1, 1, 1, 1, 1)) for top in ("axis", "core")),
        *((top, FULL) for top in ("udp", "cxl")),
        *((top, LEAST) for top in ("udp", "cxl")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.lanes}x{value.lines_per_chunk}",
)
def test_lint(top: str, params: ReducerParams, tmp_path: Path) -> None:
    verilator: Simulator = find(VERILATOR)
    path = export(top, params, tmp_path)
    waivers = [f"-Wno-{name}" for name in WAIVED]
    done = subprocess.run(
        [str(verilator.folder / "verilator"), "--lint-only", "-Wall", *waivers, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr.strip(), done.stderr[-3000:]
