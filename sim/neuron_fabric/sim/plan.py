"""What one simulator process is to do, and what it reports: plain data that passes through two JSON files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neuron_fabric.model.params import ReducerParams

__all__ = ["PLAN_VARIABLE", "Plan"]

PLAN_VARIABLE = "NEURON_FABRIC_PLAN"
"""Environment variable that tells the simulator's process where its plan is."""


@dataclass(frozen=True)
class Plan:
    """One run of a bench. Everything in it must survive JSON.

    Attributes
    ----------
    scenario : str
        Name of a stimulus that the top's bench knows.
    params : ReducerParams
        Of the design.
    seed : int
    options : dict
        Of the scenario's generator.
    bench : dict
        Options of the bench.
    limit : int
        Cycles after which the run has failed.
    top : str
        Name in :data:`~neuron_fabric.sim.tops.TOPS`.
    """

    scenario: str
    params: ReducerParams
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    limit: int = 200_000
    top: str = "axis"

    def write(self, path: Path, ports: dict[str, int], report: Path) -> None:
        """Leave the plan for the simulator's process.

        ``ports`` are values of inputs that never change; what was measured will be written to ``report``.
        """
        content = {"plan": asdict(self), "ports": ports, "report": str(report)}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls) -> tuple[Plan, dict[str, int], Path]:
        """What :meth:`write` left for this process: the plan, the values of constant inputs, the report's path."""
        content = json.loads(Path(os.environ[PLAN_VARIABLE]).read_text(encoding="utf-8"))
        plan = content["plan"]
        plan["params"] = ReducerParams(**plan["params"])
        return cls(**plan), content["ports"], Path(content["report"])
