"""From a proposal to a profile: regions, phases, health thresholds that fit the records, and where it comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from neuron_fabric.runtime.calibration.proposals import Assessment, Proposal
from neuron_fabric.runtime.calibration.records import Records
from neuron_fabric.runtime.calibration.search import Outcome
from neuron_fabric.runtime.controller import RecoveryPolicy
from neuron_fabric.runtime.health import Alarm, HealthMonitor, HealthPolicy, StepSignals
from neuron_fabric.runtime.phases import PhasePolicy
from neuron_fabric.runtime.profile import CalibrationTarget, Profile, Provenance, RegionSpec, Run, WorldSizes

__all__ = ["ProfileOptions", "build_profile", "health_for", "replay"]

_PACKAGES = ("neuron-fabric", "torch", "numpy")
_RAISED = 1.25
_HIGHEST_THRESHOLD = 64.0


@dataclass(frozen=True)
class ProfileOptions:
    """What a profile says beside what was measured."""

    name: str
    metric: str = "accuracy"
    tolerance: float = 0.5
    """Points."""
    seeds: tuple[int, ...] = ()
    workload: str = ""
    notes: str = ""
    date: datetime.date | None = None
    cool_down_steps: int = 50
    trial_steps: int = 50
    probe_interval: int = 0


def build_profile(
    proposal: Proposal | None, assessment: Assessment, options: ProfileOptions, outcomes: Sequence[Outcome] = ()
) -> Profile:
    """The profile of a proposal, or one in which everything is FP32 if ``proposal`` is None."""
    records = assessment.records
    regions = proposal.regions() if proposal is not None else ()
    runs = tuple(
        Run(policy=f"{each.policy}, {each.steps} steps", seed=each.seed, metric=each.score)
        for each in outcomes
        if math.isfinite(each.score)
    )
    warmup = records.intervals[0].end if proposal is None else proposal.warmup_steps
    return Profile(
        schema_version=1,
        name=options.name,
        model=records.model,
        world=WorldSizes(sizes=(records.world,)),
        regions=regions,
        phases=PhasePolicy(warmup_steps=warmup),
        health=health_for(proposal, records),
        recovery=RecoveryPolicy(
            cool_down_steps=options.cool_down_steps,
            trial_steps=options.trial_steps,
            probe_interval=options.probe_interval,
        ),
        target=CalibrationTarget(
            metric=options.metric, tolerance_points=options.tolerance, paired_seeds=max(1, len(options.seeds))
        ),
        provenance=Provenance(
            workload=options.workload,
            date=options.date,
            seeds=options.seeds,
            runs=runs,
            statistics=_statistics(proposal, assessment, regions),
            versions={name: _version(name) for name in _PACKAGES},
            notes=options.notes,
        ),
    )


def health_for(proposal: Proposal | None, records: Records) -> HealthPolicy:
    """Thresholds under which the recorded run, healthy by definition, raises no alarm.

    The loss's least deviation is that of the recorded loss about its trend, so that a run that lies still and then
    begins to learn is no alarm. The CUSUM threshold is raised from its default in steps of a quarter until a replay is
    quiet. A probe alarms below half the least mean cosine of a voting parameter.
    """
    policy = HealthPolicy()
    if proposal is None:
        return policy
    noise = _loss_noise(records, policy)
    policy = replace(policy, loss_min_deviation=round(max(policy.loss_min_deviation, noise), 4))
    cosines = [
        interval.parameters[name].encodings[how.name].cosine
        for interval in records.intervals
        for name, how in proposal.voting.items()
        if name in interval.parameters and how.name in interval.parameters[name].encodings
    ]
    if cosines:
        policy = replace(policy, probe_bound=round(min(policy.probe_bound, max(0.0, min(cosines)) / 2), 3))
    while policy.threshold < _HIGHEST_THRESHOLD and replay(policy, proposal, records):
        policy = replace(policy, threshold=round(policy.threshold * _RAISED, 3))
    return policy


def _loss_noise(records: Records, policy: HealthPolicy) -> float:
    """Median distance of the logarithm of the recorded loss from its trend, as a standard deviation in octaves."""
    trend: float | None = None
    distances = []
    for loss in records.loss:
        if loss is None or loss <= 0:
            continue
        value = math.log2(loss)
        trend = value if trend is None else trend
        distances.append(abs(value - trend))
        trend += (1 - policy.memory) * (value - trend)
    return 1.4826 * statistics.median(distances) if distances else 0.0


def replay(policy: HealthPolicy, proposal: Proposal, records: Records) -> tuple[Alarm, ...]:
    """The alarms that a recorded run would have raised, had the proposal's regions voted after the warm-up."""
    members: dict[str, list[str]] = {}
    for name in proposal.voting:
        members.setdefault(proposal.region_name(name), []).append(name)
    monitor = HealthMonitor(policy, records.world, list(members))
    alarms: list[Alarm] = []
    for step in range(records.steps):
        unanimity: dict[str, float] = {}
        for region, names in members.items() if step >= proposal.warmup_steps else ():
            lines = [(records.unanimity.get(name, ()), records.elements[name]) for name in names]
            known = [(line[step], n) for line, n in lines if step < len(line) and line[step] is not None]
            if known:
                total = sum(n for _, n in known)
                unanimity[region] = sum(share * n for share, n in known if share is not None) / total
        loss = records.loss[step] if step < len(records.loss) else None
        alarms += monitor.observe(StepSignals(step, loss=loss, unanimity=unanimity))
    return tuple(alarms)


def _statistics(
    proposal: Proposal | None, assessment: Assessment, regions: Sequence[RegionSpec]
) -> dict[str, dict[str, float]]:
    """Of each region: elements, and means over its parameters weighted by elements."""
    if proposal is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for region in regions:
        members = [each for each in assessment.parameters if proposal.region_name(each.name) == region.name]
        weights = [each.elements for each in members]
        if not sum(weights):
            continue
        numbers: dict[str, float] = {"elements": float(sum(weights))}
        for field in ("zeros", "density", "noise", "margin", "sign_error"):
            values = [float(getattr(each, field)) for each in members]
            numbers[field] = round(statistics.fmean(values, weights), 4)
        for encoding in sorted({key for each in members for key in each.cosines}):
            numbers[f"cosine-{encoding}"] = round(
                statistics.fmean([each.cosine(encoding) for each in members], weights), 4
            )
        found[region.name] = numbers
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
