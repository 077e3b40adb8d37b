"""Evidence as tables for people and JSON for programs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from neuron_fabric.runtime.paired import Difference, paired_difference

if TYPE_CHECKING:
    from neuron_fabric.runtime.trust import Evidence, TrustRun

__all__ = ["compared_rows", "fault_rows", "healthy_row", "write_evidence"]


def compared_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """One row a policy: score, difference to FP32 with its interval, share of low-bit bytes, reasons.

    ``keeps`` says whether the mean is within the profile's tolerance, ``fails`` whether the whole interval is below.
    """
    return [
        _against_fp32(evidence, evidence.of(policy))
        for policy in dict.fromkeys(run.policy for run in evidence.compared)
    ]


def fault_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """Two rows: with the profile's monitor and without; steps are medians over seeds, None where it did not happen."""
    fault = evidence.fault
    if fault is None:
        return []
    rows = []
    for policy in ("unmonitored", "monitored"):
        runs = evidence.of(policy)
        if runs:
            left = [step - fault.first for run in runs if (step := run.left(fault)) is not None]
            back = [step - fault.last for run in runs if (step := run.returned(fault)) is not None]
            rows.append(
                _against_fp32(evidence, runs)
                | {
                    "loss_within": statistics.fmean(run.loss_within(fault) for run in runs),
                    "left": len(left),
                    "delay": statistics.median(left) if left else None,
                    "delay_most": max(left, default=None),
                    "returned": len(back),
                    "back_after": statistics.median(back) if back else None,
                }
            )
    return rows


def healthy_row(evidence: Evidence) -> dict[str, Any]:
    """Steps and alarms without a fault; those of the warm-up, where nothing votes yet, are counted apart too."""
    runs = evidence.healthy
    alarmed = [step for run in runs for step in {step for step, _ in run.alarms}]
    return {
        "runs": len(runs),
        "seeds": [run.seed for run in runs],
        "steps": sum(run.steps for run in runs),
        "alarmed_steps": len(alarmed),
        "alarmed_in_warmup": sum(step < evidence.warmup_steps for step in alarmed),
        "alarms": [f"seed {run.seed}, {text}" for run in runs for _, text in run.alarms],
    }


def write_evidence(found: Sequence[Evidence], out: Path, console: Console) -> None:
    """Print the tables; write ``trust.json`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    document = [
        {
            "workload": each.workload,
            "metric": each.metric,
            "profile": each.profile,
            "profile_hash": each.profile_hash,
            "world": each.world,
            "tolerance_points": each.tolerance,
            "compared": compared_rows(each),
            "fault": None if each.fault is None else asdict(each.fault),
            "faulty": fault_rows(each),
            "healthy": healthy_row(each),
            "runs": [asdict(run) for run in each.runs],
        }
        for each in found
    ]
    path = out / "trust.json"
    path.write_text(json.dumps(_plain(document), indent=1) + "\n", encoding="utf-8")
    if any(each.compared for each in found):
        console.print(_compared_table(found))
    if any(each.faulty for each in found):
        console.print(_fault_table(found))
    if any(each.healthy for each in found):
        console.print(_healthy_table(found))
    console.print(f"written: {path}", highlight=False)


def _against_fp32(evidence: Evidence, runs: Sequence[TrustRun]) -> dict[str, Any]:
    fp32 = {run.seed: run.score for run in evidence.of("fp32")}
    pairs = [(run.score, fp32[run.seed]) for run in runs if run.seed in fp32]
    diverged = sum(not math.isfinite(run.score) for run in runs)
    difference: Difference | None = None
    if pairs and not diverged and runs[0].policy != "fp32":
        difference = paired_difference([mine for mine, _ in pairs], [theirs for _, theirs in pairs])
    scores = [run.score for run in runs if math.isfinite(run.score)]
    reasons: Counter[str] = Counter()
    for run in runs:
        reasons.update(run.fallbacks)
    return {
        "policy": runs[0].policy,
        "label": runs[0].label,
        "seeds": [run.seed for run in runs],
        "score": statistics.fmean(scores) if scores else math.nan,
        "score_low": min(scores, default=math.nan),
        "score_high": max(scores, default=math.nan),
        "diverged": diverged,
        "difference": None if difference is None else asdict(difference),
        "difference_text": ("" if difference is None else str(difference)) if not diverged else "diverged",
        "keeps": None if difference is None else difference.mean >= -evidence.tolerance,
        "fails": bool(diverged) or (difference is not None and difference.high < -evidence.tolerance),
        "loss": statistics.fmean(run.loss for run in runs),
        "low_bit_share": statistics.fmean(run.low_bit_share for run in runs),
        "reasons": dict(sorted(reasons.items())),
    }


def _compared_table(found: Sequence[Evidence]) -> Table:
    table = Table(
        title="against FP32, paired seeds",
        caption="difference: mean and 95 % interval, in points; low-bit: share of gradient bytes after the warm-up; "
        "reasons: regions and steps, or parameters, that went FP32",
    )
    for name in ("workload", "policy", "score", "difference", "verdict", "loss", "low-bit", "reasons"):
        table.add_column(name, justify="left" if name in ("workload", "policy", "verdict", "reasons") else "right")
    for each in found:
        for row in compared_rows(each):
            verdict = "" if row["keeps"] is None else f"within {each.tolerance:g}" if row["keeps"] else "worse"
            table.add_row(
                each.workload,
                row["label"],
                _range(row),
                row["difference_text"],
                "fails" if row["fails"] else verdict,
                f"{row['loss']:.3f}",
                f"{row['low_bit_share']:.0%}",
                _reasons(row["reasons"]),
            )
    return table


def _fault_table(found: Sequence[Evidence]) -> Table:
    table = Table(
        title="an injected fault: a share of all lanes, zeros and ties stuck at +1",
        caption="loss: training loss over the last ten steps of the fault, and at the end of the run; left: runs, and "
        "steps after the beginning, median and most; back: runs, and steps after the end, median",
    )
    for name in ("workload", "fault", "", "loss", "at the end", "score", "difference", "left", "back"):
        table.add_column(name, justify="left" if name in ("workload", "fault", "") else "right")
    for each in found:
        fault = each.fault
        for row in fault_rows(each):
            runs = len(row["seeds"])
            left = "never" if row["delay"] is None else f"{row['delay']:g}, most {row['delay_most']}"
            back = "-" if row["back_after"] is None else f"{row['back_after']:g}"
            table.add_row(
                each.workload,
                "" if fault is None else f"{fault.stuck_share:.0%}, {fault.first} to {fault.last}",
                row["policy"],
                f"{row['loss_within']:.3f}",
                f"{row['loss']:.3f}",
                _range(row),
                row["difference_text"],
                f"{row['left']}/{runs}: {left}",
                f"{row['returned']}/{runs}: {back}",
            )
    return table


def _healthy_table(found: Sequence[Evidence]) -> Table:
    table = Table(title="without a fault", caption="steps with alarms; while warming up nothing votes yet")
    for name in ("workload", "runs", "steps", "with alarms", "in the warm-up", "alarms"):
        table.add_column(name, justify="left" if name in ("workload", "alarms") else "right")
    for each in found:
        row = healthy_row(each)
        alarms = "; ".join(row["alarms"]) or "none"
        counts = [str(row[name]) for name in ("runs", "steps", "alarmed_steps", "alarmed_in_warmup")]
        table.add_row(each.workload, *counts, alarms)
    return table


def _range(row: dict[str, Any]) -> str:
    return f"{row['score']:.2f} ({row['score_low']:.1f}-{row['score_high']:.1f})"


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"


def _plain(value: Any) -> Any:
    """JSON has no number for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
