"""The bench of the AXI4-Stream reducer under cocotb: one plan, one test."""

from __future__ import annotations

import json
from typing import Any

import cocotb
from cocotb.triggers import Timer

from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.scoreboard import Mismatch

HALF_PERIOD_NS = 2  # 250 MHz


class UnknownValueError(AssertionError):
    """An output of the gateware is X or Z after reset."""


class Pins:
    """Reads the outputs through cocotb."""

    def __init__(self, dut: Any) -> None:
        self._ready = dut.s_axis_tready
        self._valid = dut.m_axis_tvalid
        self._data = dut.m_axis_tdata
        self._last = dut.m_axis_tlast
        self._keep = dut.m_axis_tkeep

    def s_ready(self) -> bool:
        """``s_axis_tready``."""
        return _number(self._ready) == 1

    def m_valid(self) -> bool:
        """``m_axis_tvalid``."""
        return _number(self._valid) == 1

    def m_beat(self) -> tuple[int, bool, int]:
        """``m_axis_tdata``, ``m_axis_tlast`` and ``m_axis_tkeep``."""
        return _number(self._data), _number(self._last) == 1, _number(self._keep)


def _number(handle: Any) -> int:
    value = handle.value
    try:
        return int(value)
    except ValueError:
        raise UnknownValueError(f"{handle._name} is {value}") from None


@cocotb.test()
async def scenario(dut: Any) -> None:
    plan, ports, report = Plan.read()
    bench = plan.make()
    pins = Pins(dut)
    half = Timer(HALF_PERIOD_NS, "ns")
    for name, value in ports.items():
        getattr(dut, name).value = value
    dut.s_axis_tkeep.value = (1 << plan.params.line_bytes) - 1
    wires = {
        "reset": dut.rst,
        "valid": dut.s_axis_tvalid,
        "data": dut.s_axis_tdata,
        "last": dut.s_axis_tlast,
        "ready": dut.m_axis_tready,
    }
    driven: dict[str, Any] = {}
    try:
        while not bench.done:
            if bench.cycle >= plan.limit:
                raise BenchTimeoutError(f"not finished after {plan.limit} cycles")
            drive = vars(bench.drive())
            for name, wire in wires.items():
                # Writing is slow: only what changes.
                if driven.get(name) != drive[name]:
                    driven[name] = drive[name]
                    wire.value = drive[name]
            dut.clk.value = 0
            # Inputs change with the falling edge and settle before the rising one, so no race is possible.
            await half
            bench.observe(pins)
            dut.clk.value = 1
            await half
        _check(dut, bench)
    finally:
        report.write_text(json.dumps(bench.measured.as_dict()) + "\n", encoding="utf-8")


def _check(dut: Any, bench: Any) -> None:
    """What the module around the gateware has noted."""
    registers = {handle._name: handle for handle in dut}
    unknown = [name.removeprefix("unknown_") for name, h in registers.items() if name[:8] == "unknown_" and _number(h)]
    if unknown:
        raise UnknownValueError(f"X after reset on {', '.join(unknown)}")
    counts = {name.removeprefix("count_"): _number(h) for name, h in registers.items() if name[:6] == "count_"}
    if not counts:
        raise Mismatch("no event counter was found in the simulation")
    bench.check_events(counts)
