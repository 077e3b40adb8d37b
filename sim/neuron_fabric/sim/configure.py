"""The gateware's configuration ports for a scenario."""

from __future__ import annotations

from neuron_fabric.hw import ResultFormat, config_fields
from neuron_fabric.sim.stimulus import Scenario

__all__ = ["configuration"]


def configuration(scenario: Scenario) -> dict[str, int]:
    """Values of the ports ``cfg_*``, by port name."""
    job = scenario.job
    fields = config_fields(
        job.encoding,
        tuple(job.members),
        ResultFormat(ResultFormat.MAJORITY if job.result_format == "majority" else ResultFormat.TALLY),
        job.margin,
        scenario.params,
    )
    fields |= {"enable": int(scenario.enabled), "job": job.job, "epoch": job.epoch}
    return {f"cfg_{name}": value for name, value in fields.items()}
