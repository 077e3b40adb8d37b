"""The bench of the AXI4-Stream reducer under cocotb: one plan, one test."""

from __future__ import annotations

import json
from typing import Any

import cocotb
from cocotb.triggers import Timer

from neuron_fabric.sim.bench import Bench, BenchTimeoutError
from neuron_fabric.sim.benches.clocked import HALF_PERIOD_NS, check_unknown, noted, number
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.stimulus import scenario


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
        return number(self._ready) == 1

    def m_valid(self) -> bool:
        """``m_axis_tvalid``."""
        return number(self._valid) == 1

    def m_beat(self) -> tuple[int, bool, int]:
        """``m_axis_tdata``, ``m_axis_tlast`` and ``m_axis_tkeep``."""
        return number(self._data), number(self._last) == 1, number(self._keep)


@cocotb.test()
async def run(dut: Any) -> None:
    plan, ports, report = Plan.read()
    bench = Bench(scenario(plan.scenario, plan.params, plan.seed, **plan.options), **plan.bench)
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


def _check(dut: Any, bench: Bench) -> None:
    """What the module around the gateware has noted."""
    check_unknown(dut)
    counts = noted(dut, "count_")
    if not counts:
        raise Mismatch("no event counter was found in the simulation")
    bench.check_events(counts)
