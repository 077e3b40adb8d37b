"""The controller: from what all ranks agreed on up to step t - 1 to the routes of step t, with reasons.

Every rank has one, gives it the same signals, and so gets the same decisions; their digests are compared on the way.

    decision = controller.decide(step)          # before the step; the same however often it is asked
    controller.observe(signals, load, lr)       # after it

Phases, health and admission each have a say; a region goes low-bit only if none objects.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_fabric.runtime.admission import Admission, AdmissionPolicy, Capability, Load, RegionPolicy
from neuron_fabric.runtime.cost import Endpoint
from neuron_fabric.runtime.health import Alarm, HealthMonitor, HealthPolicy, StepSignals
from neuron_fabric.runtime.phases import Phase, PhasePolicy, phase
from neuron_fabric.runtime.reasons import Reason

__all__ = ["ControllerPolicy", "Decision", "Mode", "PlanController", "RecoveryPolicy", "RouteDecision"]


class Mode(enum.StrEnum):
    """Where the controller stands."""

    WARMUP = "warmup"
    """FP32 until the phases allow low-bit for the first time."""
    LOW_BIT = "low_bit"
    """Regions vote."""
    ALARMED = "alarmed"
    """FP32, cooling down after an alarm."""
    RECOVERING = "recovering"
    """Regions come back, one class at a time."""
    FROZEN = "frozen"
    """FP32 for the rest of the run: the relapse budget is spent."""


@dataclass(frozen=True)
class RecoveryPolicy:
    """What follows an alarm.

    Parameters
    ----------
    cool_down_steps : int
        Steps in FP32 after the last alarm; the detectors must be quiet at their end.
    trial_steps : int
        Steps that a class must vote without alarm before the next one comes back.
    relapse_budget : int
        Alarms raised by votes that are forgiven; the next one freezes the run on FP32.
    forgive_steps : int
        After so many steps of LOW_BIT in a row one spent alarm is given back. 0: never.
    probe_interval : int
        Every so many steps one runs in FP32, beside which votes are checked. 0: never.
    """

    cool_down_steps: int = 50
    trial_steps: int = 50
    relapse_budget: int = 3
    forgive_steps: int = 5000
    probe_interval: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("cool_down_steps", 1),
            ("trial_steps", 1),
            ("relapse_budget", 0),
            ("forgive_steps", 0),
            ("probe_interval", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"recovery: {name} must be at least {least}, but is {getattr(self, name)}")
        if self.probe_interval == 1:
            raise ValueError("recovery: probe_interval must be 0 or at least 2, else every step is a probe")


@dataclass(frozen=True)
class ControllerPolicy:
    """Everything a profile says about when to trust low-bit."""

    health: HealthPolicy = field(default_factory=HealthPolicy)
    phases: PhasePolicy = field(default_factory=PhasePolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)


@dataclass(frozen=True)
class RouteDecision:
    """One region in one step: low-bit by the plan's encoding, or FP32 and why."""

    low_bit: bool
    reason: Reason
    detail: str = ""


@dataclass(frozen=True)
class Decision:
    """The routes of one step.

    Attributes
    ----------
    step : int
    mode : Mode
    routes : dict of region to RouteDecision
        In the controller's order of regions.
    is_probe : bool
        Whether the regions with reason PROBE are to be encoded beside their FP32 gradient and compared with it.
    digest : int
        62 bits of step, mode, routes and reasons: two ranks with the same digest do the same.
    """

    step: int
    mode: Mode
    routes: dict[str, RouteDecision]
    is_probe: bool
    digest: int


class PlanController:
    """Decides the routes of every step of one run, on every rank alike.

    Parameters
    ----------
    policy : ControllerPolicy
    world : int
    regions : sequence of RegionPolicy
    capability : Capability, optional
        Of the reducer, the same on all ranks. None where nothing can refuse.
    endpoint : Endpoint, optional
        For the cost law.
    first_step : int
        The first step that will be decided.

    Raises
    ------
    ValueError
        If two regions have one name.
    """

    def __init__(
        self,
        policy: ControllerPolicy,
        world: int,
        regions: Sequence[RegionPolicy],
        capability: Capability | None = None,
        endpoint: Endpoint | None = None,
        first_step: int = 0,
    ) -> None:
        self.policy, self.world, self.regions = policy, world, tuple(regions)
        voting = [region for region in self.regions if region.encoding != "fp32"]
        self.health = HealthMonitor(policy.health, world, [region.name for region in self.regions])
        self.admission = Admission(policy.admission, world, self.regions, capability, endpoint)
        self.classes = sorted({region.sensitivity for region in voting})
        """Sensitivities that can come back, the most robust first."""
        self.alarms: tuple[Alarm, ...] = ()
        """Those that the last observed step raised."""
        self._step = first_step
        self._mode = Mode.WARMUP
        self._cooling = 0
        self._stage = 0
        self._trial = 0
        self._spent = 0
        self._steady = 0
        self._learning_rates: list[float] = []
        self._withdrawn: dict[str, Reason] = {}

    # ---- before a step -----------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """Where the controller stands before the next step."""
        if self._mode is Mode.WARMUP and self._phase().reason is not Reason.WARMUP:
            return Mode.LOW_BIT
        return self._mode

    @property
    def next_step(self) -> int:
        """The only step that can be decided now."""
        return self._step

    def decide(self, step: int) -> Decision:
        """The routes of ``step``. Changes nothing.

        ``ValueError`` unless it is :attr:`next_step`.
        """
        if step != self._step:
            raise ValueError(
                f"step {step} cannot be decided: the next is {self._step}; observe every step once, in order, and "
                "restore the controller's state together with the step counter"
            )
        mode = self.mode
        now = self._phase()
        routes = {region.name: self._route(region, mode, now) for region in self.regions}
        interval = self.policy.recovery.probe_interval
        is_probe = bool(interval) and step % interval == interval - 1 and any(r.low_bit for r in routes.values())
        if is_probe:
            probe = RouteDecision(False, Reason.PROBE)
            routes = {name: probe if route.low_bit else route for name, route in routes.items()}
        return Decision(step, mode, routes, is_probe, _digest(step, mode, routes))

    def _phase(self) -> Phase:
        return phase(self.policy.phases, self._step, self._learning_rates)

    def _route(self, region: RegionPolicy, mode: Mode, now: Phase) -> RouteDecision:
        """The first objection to a region's low-bit route."""
        if region.encoding == "fp32":
            return RouteDecision(False, Reason.PLAN)
        if now.reason is Reason.WARMUP:
            return RouteDecision(False, now.reason)
        if mode is Mode.FROZEN:
            return RouteDecision(False, Reason.RELAPSES)
        if mode is Mode.ALARMED:
            if self.alarms:
                return RouteDecision(False, self.alarms[0].reason, str(self.alarms[0]))
            return RouteDecision(False, Reason.COOL_DOWN)
        if not now.low_bit:
            return RouteDecision(False, now.reason)
        if mode is Mode.RECOVERING and region.sensitivity > self.classes[self._stage]:
            return RouteDecision(False, Reason.RECOVERY)
        if region.name in self._withdrawn:
            return RouteDecision(False, self._withdrawn[region.name])
        answer = self.admission.answer(region.name)
        return RouteDecision(answer.admitted, answer.reason, answer.detail)

    # ---- after a step ------------------------------------------------------------------------------------------

    def observe(
        self,
        signals: StepSignals,
        load: Load | None = None,
        learning_rate: float | None = None,
        withdraw: Mapping[str, Reason] | None = None,
    ) -> tuple[Alarm, ...]:
        """Take what became known in the step that was decided last; the alarms it raised.

        Parameters
        ----------
        signals : StepSignals
        load : Load, optional
        learning_rate : float, optional
            The one that the step used; None: the one before.
        withdraw : mapping of region to Reason, optional
            Regions that leave the low-bit route for the rest of the run, as sparse ones do.

        Raises
        ------
        ValueError
            If the signals are of another step than :attr:`next_step`, or something is out of its range.
        """
        decision = self.decide(signals.step)
        if learning_rate is not None and not 0 <= learning_rate < math.inf:
            raise ValueError(f"learning rate must be 0 or more and finite, but is {learning_rate}")
        unknown = sorted(set(withdraw or {}) - {region.name for region in self.regions})
        if unknown:
            raise ValueError(f"region {unknown[0]!r} cannot be withdrawn: it is not in the plan")
        self.health.check(signals)
        voted = any(route.low_bit for route in decision.routes.values())
        before = self._phase()
        self.admission.observe(load, used=voted)
        self.alarms = self.health.observe(signals)
        if learning_rate is None and self._learning_rates:
            learning_rate = self._learning_rates[-1]
        if learning_rate is not None:
            keep = self.policy.phases.learning_rate_steps + 1
            self._learning_rates = [*self._learning_rates, float(learning_rate)][-keep:]
        self._withdrawn.update(withdraw or {})
        self._step += 1
        self._mode = decision.mode
        after = self._phase()
        if after.reason is Reason.LEARNING_RATE and before.reason is not Reason.LEARNING_RATE:
            self.health.restart_loss()
        if self._mode is Mode.FROZEN:
            pass
        elif self.alarms:
            self._alarmed(voted)
        elif self._mode is Mode.ALARMED:
            self._cool_down()
        elif self._mode is Mode.RECOVERING:
            self._try(decision)
        elif self._mode is Mode.LOW_BIT:
            self._steady += 1
            forgive = self.policy.recovery.forgive_steps
            if forgive and self._steady >= forgive:
                self._steady, self._spent = 0, max(0, self._spent - 1)
        return self.alarms

    def _alarmed(self, voted: bool) -> None:
        # An alarm in a step without votes is none of theirs: it costs time, but nothing of the budget.
        self._spent += voted
        self._mode = Mode.FROZEN if self._spent > self.policy.recovery.relapse_budget else Mode.ALARMED
        self._cooling, self._stage, self._trial, self._steady = self.policy.recovery.cool_down_steps, 0, 0, 0

    def _cool_down(self) -> None:
        self._cooling = max(0, self._cooling - 1)
        if not self._cooling and self.health.clear:
            self._mode = Mode.RECOVERING if self.classes else Mode.LOW_BIT

    def _try(self, decision: Decision) -> None:
        """Count the trial of the newest class, unless none of it could be tried for a reason that passes."""
        newest = [r.name for r in self.regions if r.encoding != "fp32" and r.sensitivity == self.classes[self._stage]]
        if all(decision.routes[name].reason in _PASSING for name in newest):
            return
        self._trial += 1
        if self._trial >= self.policy.recovery.trial_steps:
            self._trial, self._stage = 0, self._stage + 1
            if self._stage == len(self.classes):
                self._mode, self._stage = Mode.LOW_BIT, 0

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`load_state_dict` goes on with the same decisions."""
        return {
            "version": 1,
            "step": self._step,
            "mode": self._mode.value,
            "cooling": self._cooling,
            "stage": self._stage,
            "trial": self._trial,
            "spent": self._spent,
            "steady": self._steady,
            "learning_rates": list(self._learning_rates),
            "withdrawn": {name: reason.value for name, reason in sorted(self._withdrawn.items())},
            "regions": [region.name for region in self.regions],
            "classes": list(self.classes),
            "alarms": [[a.step, a.reason.value, a.signal, list(a.regions), a.value, a.threshold] for a in self.alarms],
            "health": self.health.state_dict(),
            "admission": self.admission.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over, of this or another world size.

        ``ValueError`` if it is of another version or of other regions or classes; nothing has changed then.
        """
        if state.get("version") != 1:
            raise ValueError(f"controller state: version {state.get('version')!r} where 1 is known")
        for name, ours in (("regions", [region.name for region in self.regions]), ("classes", self.classes)):
            if list(state[name]) != ours:
                raise ValueError(
                    f"controller state: {name} are {list(state[name])} there and {ours} here: resume with the profile "
                    "that the run began with, or start the controller anew"
                )
        self.health.load_state_dict(state["health"])
        self.admission.load_state_dict(state["admission"])
        self._step, self._mode = int(state["step"]), Mode(state["mode"])
        self._cooling, self._stage = int(state["cooling"]), int(state["stage"])
        self._trial, self._spent, self._steady = (int(state[name]) for name in ("trial", "spent", "steady"))
        self._learning_rates = [float(rate) for rate in state["learning_rates"]]
        self._withdrawn = {name: Reason(value) for name, value in state["withdrawn"].items()}
        self.alarms = tuple(
            Alarm(step, Reason(reason), signal, tuple(regions), value, threshold)
            for step, reason, signal, regions, value, threshold in state["alarms"]
        )


_PASSING = frozenset(
    (
        Reason.PROBE,
        Reason.LOAD,
        Reason.REDUCER_FAILED,
        Reason.WARMUP,
        Reason.WINDOW,
        Reason.RECALIBRATION,
        Reason.LEARNING_RATE,
    )
)
"""Reasons that pass by themselves, so that a class waits for its trial; the others last, and a class is let by."""


def _digest(step: int, mode: Mode, routes: Mapping[str, RouteDecision]) -> int:
    lines = [f"{step}", mode.value, *(f"{name}\0{int(r.low_bit)}\0{r.reason.value}" for name, r in routes.items())]
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "little") >> 2
