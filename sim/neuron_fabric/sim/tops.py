"""The designs that are simulated: where the Verilog of each comes from, what is put around it, which bench drives it.

To simulate another top

1. :mod:`neuron_fabric.hw.verilog` must be able to export it;
2. add an entry to :data:`TOPS` here;
3. write ``benches/<name>.py`` with one ``@cocotb.test()``. It gets what it is to do from
   :meth:`~neuron_fabric.sim.plan.Plan.read`, moves the clock and checks for X with
   :mod:`neuron_fabric.sim.benches.clocked`, and writes what it measured to the path that ``Plan.read`` gives;
4. run it: ``build.run(name, Plan(scenario, params, seed, options, bench, top=...), find(VERILATOR))``, in tests by the
   fixture ``run_bench``, which also puts a row into the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuron_fabric.sim.plan import Plan
from neuron_fabric.sim.wrapper import wrap

__all__ = ["TOPS", "TREE", "Top", "top_of"]

TREE = ("root", "left", "right")
"""Instances of the endpoint in the top ``tree``: two children and their parent."""


def _nothing(_plan: Plan) -> dict[str, int]:
    return {}


def _configuration(plan: Plan) -> dict[str, int]:
    # Only this top has configuration ports, and only here is the gateware's package needed to make their values.
    from neuron_fabric.sim.configure import configuration
    from neuron_fabric.sim.stimulus import scenario

    return configuration(scenario(plan.scenario, plan.params, plan.seed, **plan.options))


@dataclass(frozen=True)
class Top:
    """One kind of simulation.

    Attributes
    ----------
    design : str
        The top's name in :mod:`neuron_fabric.hw.verilog`.
    module : str
        The module with the cocotb test.
    harness : callable
        From the manifest of the export to the text of the Verilog module around it, whose name is
        :data:`neuron_fabric.sim.wrapper.TOP`.
    ports : callable
        From a plan to values of inputs that never change; the bench gets them by :meth:`Plan.read`.
    """

    design: str
    module: str
    harness: Callable[[dict[str, Any]], str] = wrap
    ports: Callable[[Plan], dict[str, int]] = _nothing


TOPS: dict[str, Top] = {
    "axis": Top("axis", "neuron_fabric.sim.benches.axis", ports=_configuration),
    "udp": Top("udp", "neuron_fabric.sim.benches.udp"),
    "tree": Top("udp", "neuron_fabric.sim.benches.tree", partial(wrap, instances=TREE)),
    "cxl": Top("cxl", "neuron_fabric.sim.benches.cxl"),
}
"""By the name that a plan gives."""


def top_of(name: str) -> Top:
    """The top of that name; ``ValueError`` names what there is."""
    if name not in TOPS:
        raise ValueError(f"no top {name!r}: there are {', '.join(TOPS)}")
    return TOPS[name]
