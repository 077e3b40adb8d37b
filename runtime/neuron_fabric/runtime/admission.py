"""Admission: may a region use the reducer? It must be able to, have time for it, and be faster than FP32.

Being able to is decided once, from what the reducer said when the job was opened. Load and cost move, so each goes
through a gate with two thresholds and a least time, which keeps a busy reducer from being taken and left in turns.
All inputs are the same on all ranks, and so are the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from neuron_fabric.model.encoding import encoding_by_name
from neuron_fabric.runtime.cost import Endpoint, Verdict, judge
from neuron_fabric.runtime.reasons import Reason

__all__ = ["Admission", "AdmissionPolicy", "Answer", "Capability", "Gate", "Limit", "Load", "RegionPolicy"]


@dataclass(frozen=True)
class RegionPolicy:
    """A region as the decisions see it.

    Parameters
    ----------
    name : str
    encoding : str
        ``binary``, ``ternary``, ``int-b``, or ``fp32`` for a region that never votes.
    result_format : str
        ``tally`` or ``majority``.
    sensitivity : int
        Class of the region: the lower, the earlier it comes back after an alarm.
    """

    name: str
    encoding: str = "binary"
    result_format: str = "tally"
    sensitivity: int = 0

    def __post_init__(self) -> None:
        if self.encoding != "fp32":
            encoding_by_name(self.encoding)
        if self.result_format not in ("tally", "majority"):
            raise ValueError(
                f"region {self.name!r}: unknown result format {self.result_format!r}: use tally or majority"
            )


@dataclass(frozen=True)
class Capability:
    """What a reducer said when the job was opened.

    Parameters
    ----------
    accumulator_bits, max_workers : int
    slots_granted : int
        0: the job was not granted any.
    encodings, result_formats : sequence of str
    """

    accumulator_bits: int
    max_workers: int
    slots_granted: int
    encodings: Sequence[str] = ("binary",)
    result_formats: Sequence[str] = ("tally", "majority")

    def refuses(self, region: RegionPolicy, world: int) -> str | None:
        """Why the reducer cannot serve a region, in words; None if it can."""
        if world > self.max_workers:
            return f"the reducer takes {self.max_workers} workers, not {world}"
        if self.slots_granted < 1:
            return "the reducer granted no slot"
        if region.encoding not in self.encodings:
            return f"the reducer does not know {region.encoding}, but {', '.join(self.encodings) or 'nothing'}"
        if region.result_format not in self.result_formats:
            return f"the reducer sends no {region.result_format}, but {', '.join(self.result_formats) or 'nothing'}"
        try:
            encoding_by_name(region.encoding).check_fits(world, self.accumulator_bits)
        except ValueError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Load:
    """What the reducer's counters said over the last step or steps; None where they said nothing.

    Parameters
    ----------
    occupancy : float, optional
        Slots in use, of all jobs, over those that the reducer has, at the high-water mark (0 to 1). A job keeps the
        slots it was granted full by itself, so these alone would say nothing.
    stall_share : float, optional
        Stall cycles over cycles of the busiest port (0 to 1).
    retransmission_share : float, optional
        Frames sent again over frames sent.
    latency_s : mapping of float to float
        Quantile (0 to 1) to seconds from the last contribution to the result.
    failures : int
        Buckets that had to be redone in FP32.
    """

    occupancy: float | None = None
    stall_share: float | None = None
    retransmission_share: float | None = None
    latency_s: Mapping[float, float] = field(default_factory=dict)
    failures: int = 0


@dataclass(frozen=True)
class Limit:
    """Two thresholds of one measure: refused above ``high``, taken again below ``low``."""

    high: float
    low: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"limit: low must be 0 to high ({self.high}), but is {self.low}")


@dataclass(frozen=True)
class AdmissionPolicy:
    """Limits of load and cost.

    Parameters
    ----------
    occupancy, stall_share, retransmission_share : Limit
    latency_quantile : float
        Which quantile is looked at (0 to 1).
    latency_s : Limit, optional
        None: latency is not looked at.
    speed_up, speed_up_again : float
        Refused when the law's speed-up over an FP32 ring falls below the first, taken again at the second.
    dwell_steps : int
        Least steps between two changes of mind. A reducer that failed is left at once, after the k-th failure in a row
        for ``dwell_steps * 2**(k - 1)`` steps, at most 64 times ``dwell_steps``; failures are in a row until the
        reducer was used for ``dwell_steps`` steps without one.
    memory : float
        Of the average that a measure goes through before it meets its limit, per step (0 to 1, 1 exclusive).
    """

    occupancy: Limit = Limit(0.9, 0.7)
    stall_share: Limit = Limit(0.5, 0.3)
    retransmission_share: Limit = Limit(0.05, 0.02)
    latency_quantile: float = 0.99
    latency_s: Limit | None = None
    speed_up: float = 1.1
    speed_up_again: float = 1.25
    dwell_steps: int = 50
    memory: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.latency_quantile <= 1:
            raise ValueError(f"admission: latency_quantile must be 0 to 1, but is {self.latency_quantile}")
        if not 0 <= self.speed_up <= self.speed_up_again:
            raise ValueError(
                f"admission: speed_up must be 0 to speed_up_again ({self.speed_up_again}), but is {self.speed_up}"
            )
        if self.dwell_steps < 1:
            raise ValueError(f"admission: dwell_steps must be at least 1, but is {self.dwell_steps}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"admission: memory must be 0 to 1, 1 exclusive, but is {self.memory}")


@dataclass(frozen=True)
class Answer:
    """Yes or no, with the reason (PLAN for yes) and the figures in words."""

    admitted: bool
    reason: Reason
    detail: str = ""


@dataclass
class Gate:
    """A switch with two thresholds and a least time in each position."""

    is_open: bool = True
    since: int = 0
    """Steps in this position."""

    def observe(self, closes: bool, opens: bool, dwell_steps: int) -> None:
        """One step: ``closes`` or ``opens`` says what the thresholds would like."""
        self.since += 1
        if (closes if self.is_open else opens) and self.since >= dwell_steps:
            self.is_open, self.since = not self.is_open, 0


_MEASURES = ("occupancy", "stall_share", "retransmission_share", "latency_s")
_MOST_DOUBLINGS = 6


class Admission:
    """The answers for all regions of one run.

    Parameters
    ----------
    policy : AdmissionPolicy
    world : int
    regions : sequence of RegionPolicy
    capability : Capability, optional
        None where there is no reducer that could refuse anything, as with the collectives.
    endpoint : Endpoint, optional
        For the cost law; None where it does not apply.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        world: int,
        regions: Sequence[RegionPolicy],
        capability: Capability | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.policy, self.world, self.endpoint = policy, world, endpoint
        self.regions = {region.name: region for region in regions}
        self._refused = {
            name: None if capability is None or region.encoding == "fp32" else capability.refuses(region, world)
            for name, region in self.regions.items()
        }
        self._averages: dict[str, float] = {}
        self._load = Gate(since=policy.dwell_steps)  # the first refusal need not wait
        self._busy = ""
        self._failures = self._wait = self._well = 0
        self._verdicts = self._judge()
        self._cost = {
            name: Gate(
                name not in self._verdicts or self._verdicts[name].speed_up >= policy.speed_up, policy.dwell_steps
            )
            for name in self.regions
        }

    def _judge(self) -> dict[str, Verdict]:
        if self.endpoint is None:
            return {}
        share = self._averages.get("retransmission_share", 0.0)
        asked = {
            name: (region.encoding, region.result_format)
            for name, region in self.regions.items()
            if region.encoding != "fp32"
        }
        # Many regions ask for the same.
        verdicts = {
            each: judge(self.endpoint, self.world, *each, retransmission_share=share) for each in asked.values()
        }
        return {name: verdicts[each] for name, each in asked.items()}

    def answer(self, name: str) -> Answer:
        """Whether a region may go low-bit in the next step. ``KeyError`` for an unknown region."""
        region = self.regions[name]
        if region.encoding == "fp32":
            return Answer(False, Reason.PLAN, "the plan keeps it on FP32")
        refused = self._refused[name]
        if refused is not None:
            return Answer(False, Reason.CAPABILITY, refused)
        if self._wait:
            return Answer(False, Reason.REDUCER_FAILED, f"failure {self._failures} in a row, {self._wait} steps to go")
        if not self._load.is_open:
            return Answer(False, Reason.LOAD, self._busy)
        verdict = self._verdicts.get(name)  # none where a run that had an endpoint goes on without
        if verdict is not None and not self._cost[name].is_open:
            return Answer(False, Reason.COST, f"{verdict.speed_up:.2f} times FP32, bound by {verdict.binding}")
        return Answer(True, Reason.PLAN)

    def observe(self, load: Load | None, *, used: bool) -> None:
        """Take what one step's counters said (None: nothing), and whether any region used the reducer in it.

        A measure that is not heard of keeps its average while the reducer is used, and fades while it is not: else a
        busy reducer that was left would never be tried again. ``ValueError`` if a measure is negative or not finite.
        """
        policy = self.policy
        load = load or Load()
        heard = self._measures(load)  # raises before anything has changed
        before = self._averages.get("retransmission_share")
        for name in _MEASURES:
            value = heard.get(name, None if used else 0.0)
            if value is not None and (name in heard or name in self._averages):
                average = self._averages.get(name, value)
                self._averages[name] = policy.memory * average + (1 - policy.memory) * value
        self._observe_failures(load.failures, used)
        limits = {name: limit for name in _MEASURES if (limit := getattr(policy, name)) is not None}
        over = [name for name, limit in limits.items() if self._averages.get(name, 0.0) > limit.high]
        quiet = all(self._averages.get(name, 0.0) < limit.low for name, limit in limits.items())
        if over:
            self._busy = f"{over[0]} {self._averages[over[0]]:.3g}, limit {limits[over[0]].high:g}"
        self._load.observe(bool(over), quiet, policy.dwell_steps)
        if self._averages.get("retransmission_share") != before:
            self._verdicts = self._judge()
        for name, verdict in self._verdicts.items():
            closes, opens = verdict.speed_up < policy.speed_up, verdict.speed_up >= policy.speed_up_again
            self._cost[name].observe(closes, opens, policy.dwell_steps)

    def _observe_failures(self, failures: int, used: bool) -> None:
        self._wait = max(0, self._wait - 1)
        if failures:
            self._failures, self._well = self._failures + 1, 0
            self._wait = self.policy.dwell_steps << min(self._failures - 1, _MOST_DOUBLINGS)
        elif used:
            self._well += 1
            if self._well >= self.policy.dwell_steps:
                self._failures = 0

    def _measures(self, load: Load) -> dict[str, float]:
        """What was heard, by name."""
        heard = {each.name: getattr(load, each.name) for each in fields(load) if each.name in _MEASURES}
        heard["latency_s"] = load.latency_s.get(self.policy.latency_quantile)
        values = {name: value for name, value in heard.items() if value is not None}
        for name, value in values.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"load: {name} must be 0 or more and finite, but is {value}")
        if load.failures < 0:
            raise ValueError(f"load: failures must be 0 or more, but is {load.failures}")
        return values

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`load_state_dict` goes on bit for bit."""
        return {
            "averages": dict(self._averages),
            "load": vars(self._load).copy(),
            "busy": self._busy,
            "failures": self._failures,
            "wait": self._wait,
            "well": self._well,
            "cost": {name: vars(gate).copy() for name, gate in self._cost.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over. ``ValueError`` if it is of other regions; nothing has changed then."""
        different = sorted(set(state["cost"]) ^ set(self.regions))
        if different:
            raise ValueError(f"admission state: region {different[0]!r} is not both in the state and in the plan")
        self._averages = {name: float(value) for name, value in state["averages"].items()}
        self._load = Gate(**state["load"])
        self._busy = str(state["busy"])
        self._failures, self._wait, self._well = (int(state[name]) for name in ("failures", "wait", "well"))
        self._cost = {name: Gate(**state["cost"][name]) for name in self.regions}
        self._verdicts = self._judge()
