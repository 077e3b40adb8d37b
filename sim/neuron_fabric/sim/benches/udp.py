"""The bench of the in-network endpoint under cocotb: one plan, one test."""

from __future__ import annotations

import json
from typing import Any

import cocotb

from neuron_fabric.sim.benches import clocked
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.udp.scenarios import bench_of


@cocotb.test()
async def run(dut: Any) -> None:
    plan, _ports, report = Plan.read()
    bench = bench_of(plan.scenario, plan.params, plan.seed, plan.options, **plan.bench)
    try:
        await clocked.run(dut, bench, plan.limit)
    finally:
        report.write_text(json.dumps(bench.measured.as_dict()) + "\n", encoding="utf-8")
