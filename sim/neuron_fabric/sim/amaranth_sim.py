"""The benches in Amaranth's own simulator: no Verilog, no compiler, the same stimulus and the same checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from amaranth import ClockDomain, Module
from amaranth.sim import Simulator

from neuron_fabric.hw import AxiStreamReducer
from neuron_fabric.sim.bench import Bench, BenchTimeoutError
from neuron_fabric.sim.configure import configuration
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.stimulus import Scenario

__all__ = ["run"]

_PERIOD = 1e-8


class _Pins:
    """Reads the ports of the component."""

    def __init__(self, dut: AxiStreamReducer, context: Any) -> None:
        self._dut = dut
        self._get = context.get

    def s_ready(self) -> bool:
        return bool(self._get(self._dut.s_axis_tready))

    def m_valid(self) -> bool:
        return bool(self._get(self._dut.m_axis_tvalid))

    def m_beat(self) -> tuple[int, bool, int]:
        dut, get = self._dut, self._get
        return get(dut.m_axis_tdata), bool(get(dut.m_axis_tlast)), get(dut.m_axis_tkeep)


def run(scenario: Scenario, *, limit: int = 100_000, **options: Any) -> Measured:
    """Run a scenario to its end; ``options`` are those of :class:`~neuron_fabric.sim.bench.Bench`.

    Raises
    ------
    AssertionError
        What the bench found, or that ``limit`` cycles were not enough.
    """
    bench = Bench(scenario, **options)
    dut = AxiStreamReducer(scenario.params)
    top = Module()
    top.domains.sync = domain = ClockDomain("sync")
    reset = domain.rst
    top.submodules.dut = dut
    ports = [name for name in dut.signature.members if name.startswith("event_")]

    async def process(context: Any) -> None:
        pins = _Pins(dut, context)
        events: Counter[str] = Counter()
        for name, value in configuration(scenario).items():
            context.set(getattr(dut, name), value)
        context.set(dut.s_axis_tkeep, -1)
        while not bench.done:
            if bench.cycle >= limit:
                raise BenchTimeoutError(f"{scenario.name}, seed {scenario.seed}: not finished after {limit} cycles")
            drive = bench.drive()
            context.set(dut.s_axis_tvalid, drive.valid)
            context.set(dut.s_axis_tdata, drive.data)
            context.set(dut.s_axis_tlast, drive.last)
            context.set(dut.m_axis_tready, drive.ready)
            context.set(reset, drive.reset)
            bench.observe(pins)
            if drive.reset:
                events.clear()
            else:
                events.update({name: 1 for name in ports if context.get(getattr(dut, name))})
            await context.tick()
        bench.check_events({name.removeprefix("event_"): events[name] for name in ports})

    simulator = Simulator(top)
    simulator.add_clock(_PERIOD)
    simulator.add_testbench(process)
    simulator.run()
    return bench.measured
