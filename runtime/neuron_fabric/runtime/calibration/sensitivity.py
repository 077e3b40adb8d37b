"""What would have come out with other thresholds: each of them alone, a fifth down and a fifth up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neuron_fabric.runtime.calibration.building import replay
from neuron_fabric.runtime.calibration.proposals import Assessment, Proposal, assess
from neuron_fabric.runtime.health import HealthPolicy

__all__ = ["HEALTH_THRESHOLDS", "HealthChange", "ThresholdChange", "health_changes", "threshold_changes"]

SHARE = 0.2
HEALTH_THRESHOLDS = ("slack", "threshold", "clip", "min_deviation", "share_floor", "settle_steps", "correlation_bound")
"""Of the health monitor; those that a healthy run can come near to."""


@dataclass(frozen=True)
class ThresholdChange:
    """A calibration threshold that was moved, and which parameters are judged otherwise."""

    threshold: str
    value: float
    moved: tuple[tuple[str, str, str], ...]
    """Parameter, what it was, and what it would be."""
    elements: float
    """Their share of all elements."""


@dataclass(frozen=True)
class HealthChange:
    """A health threshold that was moved, and how often the recorded run would have alarmed."""

    threshold: str
    value: float
    alarms: int


def threshold_changes(assessment: Assessment, share: float = SHARE) -> tuple[ThresholdChange, ...]:
    """Judge the records again with each calibration threshold moved."""
    total = max(1, sum(each.elements for each in assessment.parameters))
    changes = []
    for label, thresholds in assessment.thresholds.varied(share):
        other = assess(assessment.records, thresholds)
        pairs = list(zip(assessment.parameters, other.parameters, strict=True))
        moved = tuple((a.name, a.kind.value, b.kind.value) for a, b in pairs if a.kind != b.kind)
        elements = sum(a.elements for a, b in pairs if a.kind != b.kind) / total
        changes.append(ThresholdChange(label, getattr(thresholds, label.split()[0]), moved, elements))
    return tuple(changes)


def health_changes(proposal: Proposal, policy: HealthPolicy, share: float = SHARE) -> tuple[HealthChange, ...]:
    """Replay the recorded run with each health threshold moved; one that its own rules forbid is left out."""
    records = proposal.assessment.records
    changes = [HealthChange("as calibrated", policy.threshold, len(replay(policy, proposal, records)))]
    for name in HEALTH_THRESHOLDS:
        value = getattr(policy, name)
        for sign in (-share, share):
            moved = type(value)(round(value * (1 + sign), 6))
            try:
                other = replace(policy, **{name: moved}, release=min(policy.release, policy.threshold * (1 - share)))
            except ValueError:
                continue
            label = f"{name} {100 * sign:+.0f} %"
            changes.append(HealthChange(label, float(moved), len(replay(other, proposal, records))))
    return tuple(changes)
