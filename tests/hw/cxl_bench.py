"""The CXL endpoint's bench in Amaranth's own simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from amaranth import ClockDomain, Module
from amaranth.sim import Simulator

from neuron_fabric.hw.cxl_endpoint import CxlEndpoint
from neuron_fabric.model import ReducerParams
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.cxl_bench import Actor, CxlBench

from .bench import SEED

LIMIT = 200_000
"""Cycles after which a run has failed."""


class _Wires:
    """The ports by name."""

    def __init__(self, dut: CxlEndpoint, reset: Any, context: Any) -> None:
        self._dut, self._reset, self._context = dut, reset, context

    def __setitem__(self, name: str, value: int) -> None:
        self._context.set(self._reset if name == "rst" else getattr(self._dut, name), value)

    def __getitem__(self, name: str) -> int:
        return int(self._context.get(getattr(self._dut, name)))


def run(
    params: ReducerParams,
    actors: Callable[[CxlBench], Iterable[Actor]],
    *,
    sizes: dict[str, int] | None = None,
    seed: int = SEED,
    **options: Any,
) -> CxlBench:
    """Run actors to their end and give the bench back; ``sizes`` are the endpoint's, ``options`` the bench's."""
    dut = CxlEndpoint(params, **({"identity_bytes": 4096} | (sizes or {})))
    bench = CxlBench(dut.map, actors, seed, **options)
    top = Module()
    top.domains.sync = domain = ClockDomain("sync")
    top.submodules.dut = dut

    async def process(context: Any) -> None:
        wires = _Wires(dut, domain.rst, context)
        while not bench.done:
            if bench.cycle >= LIMIT:
                raise BenchTimeoutError(f"not finished after {LIMIT} cycles")
            bench.drive(wires)
            bench.observe(wires)
            await context.tick()

    simulator = Simulator(top)
    simulator.add_clock(1e-6)
    simulator.add_testbench(process)
    try:
        simulator.run()
    except BaseException as error:
        error.add_note(f"cycle {bench.cycle}; repeat with NEURON_FABRIC_SEED={SEED}")
        raise
    return bench
