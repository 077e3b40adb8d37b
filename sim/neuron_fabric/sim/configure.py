"""The gateware's configuration ports for a scenario."""

from __future__ import annotations

from neuron_fabric.hw import config_fields
from neuron_fabric.hw.axis import CONFIGURED
from neuron_fabric.sim.stimulus import Scenario

__all__ = ["configuration"]


def configuration(scenario: Scenario) -> dict[str, int]:
    """Values of the ports ``cfg_*``, by port name."""
    fields = config_fields(scenario.job, scenario.params)
    return {"cfg_enable": int(scenario.enabled), **{f"cfg_{name}": fields[name] for name in CONFIGURED}}
