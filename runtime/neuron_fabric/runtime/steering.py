"""What ties a plan controller to a training run: which regions vote in a step, and what the step told.

The ranks agree once a step, in one MAX all-reduce (:mod:`neuron_fabric.runtime.agreement`). It carries the digest of
the *next* step's decision, so that no rank launches a collective that another does not, and the signals of this step.
So a decision knows the signals of all steps but the last one before it, and an alarm takes effect at the second step
after the one that raised it, on all ranks at once.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from neuron_fabric.runtime.admission import Load
from neuron_fabric.runtime.checkpoint import read_steering
from neuron_fabric.runtime.controller import Decision, PlanController, RouteDecision
from neuron_fabric.runtime.health import StepSignals
from neuron_fabric.runtime.reasons import Reason
from neuron_fabric.runtime.votes import VoteStatistics

__all__ = ["Steering", "ordered_float", "ordered_key"]

_NOTHING = -(1 << 63)


def ordered_key(value: float | None) -> int:
    """A float as an integer of 64 bits whose order is that of the floats, for a MAX all-reduce of integers.

    NaN is above everything, since a maximum must not lose it; None is below everything.
    """
    if value is None:
        return _NOTHING
    if math.isnan(value):
        return (1 << 63) - 1
    bits = int.from_bytes(struct.pack("<d", value), "little", signed=True)
    return bits if bits >= 0 else -(bits & (1 << 63) - 1)


def ordered_float(key: int) -> float | None:
    """What :func:`ordered_key` made; -0.0 comes back as 0.0."""
    if key == _NOTHING:
        return None
    if key == (1 << 63) - 1:
        return math.nan
    sign, magnitude = (1, key) if key >= 0 else (-1, -key)
    (value,) = struct.unpack("<d", struct.pack("<q", magnitude))
    return sign * float(value)


class Steering:
    """Which regions of a plan vote, step by step, as a controller decides from what all ranks agreed on.

    Parameters
    ----------
    controller : PlanController
        Not yet asked for anything; the same on every rank.
    world : int

    Attributes
    ----------
    decision : Decision
        Of the step that runs.
    """

    def __init__(self, controller: PlanController, world: int) -> None:
        self.controller = controller
        self.votes = VoteStatistics(world)
        first = controller.next_step
        self.decision: Decision = controller.decide(first)
        controller.observe(StepSignals(first))  # nothing is known before the first step
        self.next: Decision = controller.decide(first + 1)
        self._quantile = controller.policy.admission.latency_quantile
        self._loss: float | None = None
        self._learning_rate: float | None = None
        self._cosines: dict[str, float | None] = {}

    # ---- what the user tells -----------------------------------------------------------------------------------

    def observe(self, loss: float | None, learning_rate: float | None) -> None:
        """Take this rank's loss and learning rate of the step that runs; the last one before the step's end counts."""
        if loss is not None:
            self._loss = float(loss)
        if learning_rate is not None:
            if not 0 <= learning_rate < math.inf:
                raise ValueError(f"learning rate must be 0 or more and finite, but is {learning_rate}")
            self._learning_rate = float(learning_rate)

    # ---- the step ----------------------------------------------------------------------------------------------

    def low_bit(self, region: str) -> bool:
        """Whether a region votes in the step that runs."""
        return self.decision.routes[region].low_bit

    def probes(self, region: str) -> bool:
        """Whether a region's votes are to be compared with its FP32 gradient in the step that runs."""
        return self.decision.is_probe and self.decision.routes[region].reason is Reason.PROBE

    def note_cosine(self, region: str, cosine: float | None) -> None:
        """What a probe measured on this rank."""
        self._cosines[region] = cosine

    def told(self, load: Load | None = None) -> list[int]:
        """What this rank adds to the step's agreement, as ordered keys.

        Loss, learning rate, the measures of ``load`` (of which ``failures`` is none: the agreement has those anyway),
        and a cosine a region. Of a cosine the least counts over the ranks, of all others the greatest.
        """
        cosines = (self._cosines.get(region.name) for region in self.controller.regions)
        load = load or Load()
        return [
            ordered_key(self._loss),
            ordered_key(self._learning_rate),
            ordered_key(load.occupancy),
            ordered_key(load.stall_share),
            ordered_key(load.retransmission_share),
            ordered_key(load.latency_s.get(self._quantile)),
            *(ordered_key(None if cosine is None else -cosine) for cosine in cosines),
        ]

    def conclude(
        self, agreed: Sequence[int], not_finite: bool, withdraw: Mapping[str, Reason], failures: int = 0
    ) -> Decision:
        """End the step with what the ranks agreed on; gives back the decision that was in force.

        ``failures`` counts buckets that were redone in FP32.
        """
        loss, rate, occupancy, stalls, again, latency, *cosines = (ordered_float(key) for key in agreed)
        latencies = {} if latency is None else {self._quantile: latency}
        unanimity, tie_rate, margin = self.votes.shares()
        probed = {
            region.name: None if key is None else -key
            for region, key in zip(self.controller.regions, cosines, strict=True)
            if self.probes(region.name)
        }
        self.controller.observe(
            StepSignals(
                self.controller.next_step,
                loss=loss,
                unanimity=unanimity,
                tie_rate=tie_rate,
                margin=margin,
                scale=self.votes.scales(),
                not_finite=not_finite,
                probe_cosine=probed,
            ),
            load=Load(occupancy, stalls, again, latencies, failures),
            learning_rate=rate,
            withdraw=withdraw,
        )
        done, self.decision = self.decision, self.next
        self.next = self.controller.decide(self.controller.next_step)
        self.votes.clear()
        self._loss = self._learning_rate = None
        self._cosines = {}
        return done

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values; between two steps."""
        return {"controller": self.controller.state_dict(), "current": _plain(self.decision)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        ``ValueError`` if it is damaged, or as the controller's; nothing has changed then.
        """
        current = read_steering(state).current
        trial = copy.deepcopy(self.controller)  # health and admission can each refuse after another has taken over
        trial.load_state_dict(state["controller"])
        trial.decide(trial.next_step)
        self.controller.load_state_dict(state["controller"])
        self.decision = Decision(
            current.step,
            current.mode,
            {name: RouteDecision(*route) for name, route in current.routes.items()},
            current.is_probe,
            current.digest,
        )
        self.next = self.controller.decide(self.controller.next_step)


def _plain(decision: Decision) -> dict[str, Any]:
    return {
        "step": decision.step,
        "mode": decision.mode.value,
        "routes": {name: [r.low_bit, r.reason.value, r.detail] for name, r in decision.routes.items()},
        "is_probe": decision.is_probe,
        "digest": decision.digest,
    }
