"""The bench of the CXL endpoint under cocotb: one plan, one test."""

from __future__ import annotations

import json
from typing import Any

import cocotb

from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.sim.benches import clocked
from neuron_fabric.sim.cxl_bench import CxlBench
from neuron_fabric.sim.cxl_stimulus import scenario
from neuron_fabric.sim.plan import Plan


@cocotb.test()
async def run(dut: Any) -> None:
    plan, _ports, report = Plan.read()
    bench = CxlBench(CxlMap(plan.params), scenario(plan.scenario, **plan.options), plan.seed, **plan.bench)
    try:
        await clocked.run(dut, bench, plan.limit)
    finally:
        report.write_text(json.dumps(bench.measured.as_dict()) + "\n", encoding="utf-8")
