"""Training health: from the signals that all ranks agreed on, is low-bit aggregation still to be trusted?

Four things raise an alarm: loss or unanimity rising above its own trend (a detrended CUSUM, Page 1954, "Continuous
inspection schemes", Biometrika 41), unanimity above a bound for the world size, values that are not finite, and a probe
whose votes point away from the FP32 gradient.

Every rank must come to the same alarms, on any machine. So everything here is computed from agreed signals, in a fixed
order, with operations that IEEE 754 rounds in one way only: no library logarithm, no power, no clock, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from neuron_fabric.runtime.reasons import Reason

__all__ = [
    "Alarm",
    "HealthMonitor",
    "HealthPolicy",
    "StepSignals",
    "coin_votes",
    "log2",
    "unanimity",
]


@dataclass(frozen=True)
class StepSignals:
    """What all ranks know about one step; equal on all of them.

    Parameters
    ----------
    step : int
    loss : float, optional
        Maximum over the ranks that gave one; None if nobody did. NaN and Inf are allowed and mean what they say.
    unanimity, tie_rate, margin : mapping of region to float
        Shares of the region's elements with ``|S| = world`` (of a ternary region among those on which the worker that
        voted least did) and ``S = 0``, and the mean of ``|S| / world``, where every worker voted. A region without
        votes in this step is left out.
    residual_ratio, scale : mapping of region to float
        Residual norm over gradient norm, and the mean scale. For reports only: no alarm depends on them.
    not_finite : bool
        Whether some gradient was not finite on some rank.
    probe_cosine : mapping of region to float or None
        In a probe step: cosine between the decoded votes and the FP32 gradient; None where it does not exist.
    """

    step: int
    loss: float | None = None
    unanimity: Mapping[str, float] = field(default_factory=dict)
    tie_rate: Mapping[str, float] = field(default_factory=dict)
    margin: Mapping[str, float] = field(default_factory=dict)
    residual_ratio: Mapping[str, float] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    not_finite: bool = False
    probe_cosine: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class HealthPolicy:
    """Thresholds of the detectors; the defaults are measured choices (docs/health.md).

    Parameters
    ----------
    memory, deviation_memory : float
        Of the trend and of the running deviation, per step (0 to 1, exclusive). The deviation remembers longer, so that
        a rise is measured by the noise before it.
    clip : float
        Bound of one step's z, so that a single outlier is no alarm.
    slack, threshold : float
        CUSUM: what a step must exceed to count, and the sum that alarms, in deviations.
    release : float
        The sum below which the detector is quiet again, at most ``threshold``.
    settle_steps : int
        Observations before a CUSUM starts to sum.
    min_deviation : float
        Least deviation, in octaves (0.015 is about 1 %): what varies less is taken to vary this much.
    loss_min_deviation : float
        The same for the loss, which may lie still for a while and then begin to move: with the noise of the whole run
        here, it is not the stillness that is the measure.
    share_floor : float
        Added to shares before the logarithm, so that a few unanimous elements among many are no signal.
    linear_loss : bool
        Follow the loss itself instead of its logarithm; for losses that can be negative. With the logarithm, a loss
        that is not positive is not looked at.
    correlation_bound, correlation_release : float
        Correlation between two workers' votes above which unanimity alarms, and below which it is quiet again; 0 to 1.
        :func:`unanimity` turns it into a share for the world size.
    bound_steps : int
        Observations in a row above the bound that alarm.
    not_finite_limit, not_finite_window : int
        So many steps with non-finite gradients within so many steps alarm. One alone does not, since this is how a loss
        scaler finds its scale. A non-finite loss alarms at once.
    probe_bound : float
        A probe's cosine below this alarms.
    gap_steps : int
        A region without votes for longer than this starts anew when they come back; after an alarm of votes with the
        trend that it had, so that what raised the alarm does not become normal.
    """

    memory: float = 0.95
    deviation_memory: float = 0.98
    clip: float = 4.0
    slack: float = 1.0
    threshold: float = 8.0
    release: float = 4.0
    settle_steps: int = 40
    min_deviation: float = 0.015
    loss_min_deviation: float = 0.015
    share_floor: float = 1e-3
    linear_loss: bool = False
    correlation_bound: float = 0.5
    correlation_release: float = 0.35
    bound_steps: int = 3
    not_finite_limit: int = 2
    not_finite_window: int = 10
    probe_bound: float = 0.5
    gap_steps: int = 20

    def __post_init__(self) -> None:
        rules = {
            "memory": (0 < self.memory < 1, "between 0 and 1"),
            "deviation_memory": (0 < self.deviation_memory < 1, "between 0 and 1"),
            "clip": (self.slack < self.clip < math.inf, f"above slack ({self.slack})"),
            "slack": (self.slack >= 0, "at least 0"),
            "threshold": (0 < self.threshold < math.inf, "positive"),
            "release": (0 <= self.release <= self.threshold, f"0 to threshold ({self.threshold})"),
            "settle_steps": (self.settle_steps >= 2, "at least 2"),
            "min_deviation": (0 < self.min_deviation < math.inf, "positive"),
            "loss_min_deviation": (0 < self.loss_min_deviation < math.inf, "positive"),
            "share_floor": (0 < self.share_floor < 1, "between 0 and 1"),
            "correlation_bound": (0 < self.correlation_bound <= 1, "above 0 and at most 1"),
            "correlation_release": (
                0 <= self.correlation_release <= self.correlation_bound,
                f"0 to correlation_bound ({self.correlation_bound})",
            ),
            "bound_steps": (self.bound_steps >= 1, "at least 1"),
            "not_finite_limit": (self.not_finite_limit >= 1, "at least 1"),
            "not_finite_window": (self.not_finite_window >= 1, "at least 1"),
            "probe_bound": (-1 <= self.probe_bound <= 1, "-1 to 1"),
            "gap_steps": (self.gap_steps >= 1, "at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"health policy: {name} must be {rule}, but is {getattr(self, name)}")


@dataclass(frozen=True)
class Alarm:
    """One alarm.

    Attributes
    ----------
    step : int
        The step whose signals raised it.
    reason : Reason
    signal : str
        Field of :class:`StepSignals`.
    regions : tuple of str
        All of them for a signal of the whole model.
    value, threshold : float
        For a CUSUM the sum and its threshold, in deviations; else of the signal itself.
    """

    step: int
    reason: Reason
    signal: str
    regions: tuple[str, ...]
    value: float
    threshold: float

    def __str__(self) -> str:
        where = ", ".join(self.regions)
        return (
            f"step {self.step}: {self.signal} of {where}: {self.value:.4g} against {self.threshold:.4g} "
            f"({self.reason.meaning})"
        )


def unanimity(world: int, correlation: float) -> float:
    """Share of elements on which all of ``world`` workers vote alike, if any two votes correlate by ``correlation``.

    Each element has its own probability of a positive vote, Beta(a, a) distributed with ``a = (1/correlation - 1) / 2``
    (the beta-binomial model). Then P(unanimous) = 2 prod_{i < N} (a + i) / (2a + i). Written with the correlation r,
    each factor is ((1 - r)/2 + i r) / ((1 - r) + i r): 2**(1 - N) for r = 0 (coins), 2/(N + 1) for r = 1/3 (all
    probabilities alike) and 1 for r = 1.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, but is {world}")
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation must be 0 to 1, but is {correlation}")
    if correlation == 1:
        return 1.0
    share, free = 1.0, 1 - correlation  # the factor of i = 0 is 1/2 and cancels the 2
    for i in range(1, world):
        share *= (free / 2 + i * correlation) / (free + i * correlation)
    return share


def coin_votes(world: int) -> tuple[float, float, float]:
    """``(unanimity, tie rate, margin)`` of ``world`` fair coins: what votes without any signal look like.

    unanimity = 2**(1 - N); ties = C(N, N/2) / 2**N for even N, else 0;
    margin = E|S| / N = C(N - 1, (N - 1) div 2) / 2**(N - 1).
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, but is {world}")
    ties = 0.0 if world % 2 else math.comb(world, world // 2) / 2**world
    return 2.0 ** (1 - world), ties, math.comb(world - 1, (world - 1) // 2) / 2 ** (world - 1)


def log2(x: float) -> float:
    """Binary logarithm of a positive finite number, with the same bits on every machine.

    The logarithm of a C library may differ in its last bit from host to host. This one is a series in operations that
    IEEE 754 defines exactly; its error is below 1e-11.
    """
    mantissa, exponent = math.frexp(x)  # in [0.5, 1)
    # log(m) = 2 atanh((m - 1)/(m + 1)), around sqrt(1/2) so that the argument stays below 0.172.
    root = 0.70710678118654752
    s = (mantissa - root) / (mantissa + root)
    square, term, total = s * s, s, 0.0
    for odd in range(1, 17, 2):
        total += term / odd
        term *= square
    return exponent - 0.5 + total * 2.8853900817779268  # 2 / ln 2


@dataclass
class _Detector:
    """Detrended one-sided CUSUM of one signal, with its alarm's latch."""

    count: int = 0
    trend: float = 0.0
    variance: float = 0.0
    total: float = 0.0
    latched: bool = False
    seen: int = -1
    """The step of the last observation."""

    def observe(self, x: float, step: int, policy: HealthPolicy, min_deviation: float) -> bool:
        """Take one value; whether it raises an alarm (once, until the sum falls to ``release``)."""
        self.seen = step
        self.count += 1
        if self.count == 1:
            self.trend = x
            return False
        residual = x - self.trend
        raised = False
        if self.count > policy.settle_steps:
            deviation = max(math.sqrt(self.variance), min_deviation)
            z = min(max(residual / deviation, -policy.clip), policy.clip)
            residual = z * deviation  # an outlier must not move trend and deviation more than it counts
            # Bounded, so that the way back is as short as the way up was.
            self.total = min(max(0.0, self.total + z - policy.slack), policy.threshold + policy.clip)
            raised = self.total > policy.threshold and not self.latched
            self.latched = raised or (self.latched and self.total > policy.release)
        first = 1 / self.count  # plain means at first
        self.trend += max(1 - policy.memory, first) * residual
        self.variance += max(1 - policy.deviation_memory, first) * (residual * residual - self.variance)
        return raised


@dataclass
class _Bound:
    """A signal that must not stay above a bound."""

    above: int = 0
    latched: bool = False

    def observe(self, x: float, bound: float, release: float, steps: int) -> bool:
        """Take one value; whether it raises an alarm (once, until the value falls below ``release``)."""
        self.above = self.above + 1 if x > bound else 0
        raised = self.above >= steps and not self.latched
        self.latched = raised or (self.latched and x >= release)
        return raised


class HealthMonitor:
    """All detectors of one run.

    Parameters
    ----------
    policy : HealthPolicy
    world : int
        Workers that vote. With one worker every vote is unanimous, and unanimity is not looked at.
    regions : sequence of str
        Names of the regions that may vote.

    Raises
    ------
    ValueError
        If a region is named twice.
    """

    def __init__(self, policy: HealthPolicy, world: int, regions: Sequence[str]) -> None:
        if len(set(regions)) != len(regions):
            raise ValueError(f"health: a region is named twice in {list(regions)}")
        self.policy, self.world, self.regions = policy, world, tuple(regions)
        self.bound = unanimity(world, policy.correlation_bound)
        self.release = unanimity(world, policy.correlation_release)
        self._step = -1
        self._overflows: list[int] = []
        self._loss = _Detector()
        self._votes = {name: _Detector() for name in self.regions}
        self._bounds = {name: _Bound() for name in self.regions}
        self._alarmed = -1
        """The step of the last alarm that votes raised."""

    @property
    def step(self) -> int:
        """The last step that was observed, -1 before the first."""
        return self._step

    @property
    def clear(self) -> bool:
        """Whether no detector stands above its release threshold; one that sees nothing any more is not asked."""
        recent = self._step - self.policy.gap_steps
        return not (self._loss.latched and self._loss.seen >= recent) and not any(
            (self._votes[name].latched or self._bounds[name].latched) and self._votes[name].seen >= recent
            for name in self.regions
        )

    def observe(self, signals: StepSignals) -> tuple[Alarm, ...]:
        """Take the signals of one step; the alarms they raise.

        Raises
        ------
        ValueError
            If the step is not after the last one, a region is unknown, or a share or cosine is out of its range.
        """
        self.check(signals)
        self._step = signals.step
        alarms = [*self._not_finite(signals), *self._observe_loss(signals)]
        for name in self.regions:
            alarms += self._observe_votes(name, signals)
        for name in self.regions:
            cosine = signals.probe_cosine.get(name)
            if cosine is not None and cosine < self.policy.probe_bound:
                alarms.append(
                    Alarm(signals.step, Reason.HEALTH_PROBE, "probe_cosine", (name,), cosine, self.policy.probe_bound)
                )
        return tuple(alarms)

    def restart_loss(self) -> None:
        """Forget the loss's trend: it is about to move for a known reason."""
        self._loss = _Detector()

    def readings(self) -> dict[str, float]:
        """CUSUM of each signal as a share of its threshold, for a log: 1 is an alarm."""
        sums = {"loss": self._loss.total, **{f"unanimity/{name}": self._votes[name].total for name in self.regions}}
        return {name: total / self.policy.threshold for name, total in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`load_state_dict` goes on bit for bit."""
        return {
            "version": 1,
            "world": self.world,
            "step": self._step,
            "overflows": list(self._overflows),
            "loss": vars(self._loss).copy(),
            "votes": {name: vars(self._votes[name]).copy() for name in self.regions},
            "bounds": {name: vars(self._bounds[name]).copy() for name in self.regions},
            "alarmed": self._alarmed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over.

        At another world size the detectors of votes start anew, since all shares mean something else there.
        ``ValueError`` if the state is of another version or of other regions; nothing has changed then.
        """
        if state.get("version") != 1:
            raise ValueError(f"health state: version {state.get('version')!r} where 1 is known")
        for part in ("votes", "bounds"):
            different = sorted(set(state[part]) ^ set(self.regions))
            if different:
                raise ValueError(f"health state: region {different[0]!r} is not both in the state and in the plan")
        same = state["world"] == self.world
        loss = _Detector(**state["loss"])
        votes = {name: _Detector(**state["votes"][name]) if same else _Detector() for name in self.regions}
        bounds = {name: _Bound(**state["bounds"][name]) if same else _Bound() for name in self.regions}
        self._step, self._overflows = int(state["step"]), [int(step) for step in state["overflows"]]
        self._loss, self._votes, self._bounds = loss, votes, bounds
        self._alarmed = int(state["alarmed"])

    def check(self, signals: StepSignals) -> None:
        """Raise what :meth:`observe` would raise; changes nothing."""
        if signals.step <= self._step:
            raise ValueError(f"signals of step {signals.step} came after those of step {self._step}")
        known = set(self.regions)
        for each in fields(signals):
            values = getattr(signals, each.name)
            unknown = sorted(set(values) - known) if isinstance(values, Mapping) else []
            if unknown:
                raise ValueError(f"signal {each.name}: unknown region {unknown[0]!r}; known are {list(self.regions)}")
        for name, least in (("unanimity", 0.0), ("probe_cosine", -1.0)):
            for region, value in sorted(getattr(signals, name).items()):
                # A cosine is a quotient of rounded sums, so it may be a little beyond 1.
                if value is not None and not least - 1e-3 <= value <= 1 + 1e-3:
                    raise ValueError(f"signal {name} of region {region!r} must be {least:g} to 1, but is {value}")

    def _not_finite(self, signals: StepSignals) -> list[Alarm]:
        policy, step = self.policy, signals.step
        alarms = []
        if signals.loss is not None and not math.isfinite(signals.loss):
            # 0 above 1 as with the gradients below: one value is not finite, and one is enough.
            alarms.append(Alarm(step, Reason.HEALTH_NOT_FINITE, "loss", self.regions, 1.0, 1.0))
        self._overflows = [each for each in self._overflows if each > step - policy.not_finite_window]
        if signals.not_finite:
            self._overflows.append(step)
            if len(self._overflows) >= policy.not_finite_limit:
                count, limit = float(len(self._overflows)), float(policy.not_finite_limit)
                alarms.append(Alarm(step, Reason.HEALTH_NOT_FINITE, "not_finite", self.regions, count, limit))
        return alarms

    def _observe_loss(self, signals: StepSignals) -> list[Alarm]:
        loss, policy = signals.loss, self.policy
        if loss is None or not math.isfinite(loss) or (loss <= 0 and not policy.linear_loss):
            return []
        value = loss if policy.linear_loss else log2(loss)
        if not self._loss.observe(value, signals.step, policy, policy.loss_min_deviation):
            return []
        return [
            Alarm(signals.step, Reason.HEALTH_LOSS, "loss", self.regions, self._loss.total, policy.threshold),
        ]

    def _observe_votes(self, name: str, signals: StepSignals) -> list[Alarm]:
        share, policy, step = signals.unanimity.get(name), self.policy, signals.step
        if share is None or self.world < 2:
            return []
        detector = self._votes[name]
        if step - detector.seen > policy.gap_steps:
            # Votes that were left because they looked ill must not become the measure of health when they come back.
            left_ill = self._alarmed >= 0 and abs(detector.seen - self._alarmed) <= policy.gap_steps
            detector = _Detector(detector.count, detector.trend, detector.variance) if left_ill else _Detector()
            self._votes[name], self._bounds[name] = detector, _Bound()
        alarms = []
        if detector.observe(log2(max(share, 0.0) + policy.share_floor), step, policy, policy.min_deviation):
            alarms.append(Alarm(step, Reason.HEALTH_UNANIMITY, "unanimity", (name,), detector.total, policy.threshold))
        if self._bounds[name].observe(share, self.bound, self.release, policy.bound_steps):
            alarms.append(Alarm(step, Reason.HEALTH_UNANIMITY, "unanimity", (name,), share, self.bound))
        if alarms:
            self._alarmed = step
        return alarms
