"""The bench of a tree of in-network endpoints under cocotb: one plan, one test."""

from __future__ import annotations

import json
from typing import Any

import cocotb

from neuron_fabric.sim.benches import clocked
from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.udp.fabric import Fabric, Tree


@cocotb.test()
async def run(dut: Any) -> None:
    plan, _ports, report = Plan.read()
    options = {**plan.options, "workers": tuple(plan.options.get("workers", Tree.workers))}
    fabric = Fabric(Tree(plan.params, plan.seed, **options), **plan.bench)
    try:
        await clocked.run(dut, fabric, plan.limit)
    finally:
        report.write_text(json.dumps(fabric.measured.as_dict()) + "\n", encoding="utf-8")
