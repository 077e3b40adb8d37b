"""What a calibration writes down for people: ``report.md`` with its pictures, beside profile and records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_fabric.runtime.calibration.proposals import Assessment, Kind, Proposal
from neuron_fabric.runtime.calibration.records import save_records
from neuron_fabric.runtime.calibration.search import Rung, Search
from neuron_fabric.runtime.calibration.sensitivity import health_changes, threshold_changes
from neuron_fabric.runtime.profile import Profile, save

__all__ = ["write_calibration"]

_SHOWN = ("binary", "binary-majority", "binary-feedback", "ternary", "ternary-feedback")
_COLOURS = {Kind.SPARSE: "C3", Kind.SENSITIVE: "C1", Kind.SMALL: "0.6", Kind.DENSE: "C0", Kind.EXCLUDED: "0.8"}


def write_calibration(
    profile: Profile, assessment: Assessment, search: Search | None, chosen: Proposal | None, out: Path
) -> list[Path]:
    """Write ``profile.yaml``, ``records.json``, ``report.md`` and its pictures; the files written.

    ``OSError`` if the folder cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "profile.yaml", out / "records.json", out / "report.md"]
    save(profile, files[0])
    save_records(assessment.records, files[1])
    pictures = [_plot_cosines(assessment, out / "cosines.png"), _plot_timeline(assessment, out / "timeline.png")]
    if search is not None and search.rungs:
        pictures.append(_plot_trials(search, out / "trials.png"))
    text = [
        *_summary(profile, assessment, search, chosen),
        *_parameters(assessment),
        *(_trials(search) if search is not None and search.rungs else []),
        *_sensitivity(profile, assessment, chosen),
    ]
    files[2].write_text("\n".join(text) + "\n", encoding="utf-8")
    return [*files, *pictures]


def _summary(profile: Profile, assessment: Assessment, search: Search | None, chosen: Proposal | None) -> list[str]:
    records = assessment.records
    lines = [
        f"# Calibration of {profile.name}",
        "",
        f"{records.workload or 'A run'}: {records.steps} steps in FP32 with {records.world} workers were recorded, "
        f"{sum(records.elements.values())} elements in {len(records.elements)} parameters.",
        "",
    ]
    if chosen is None:
        lines += ["**Nothing was found that may vote: the profile keeps everything in FP32.**", ""]
    else:
        lines += [
            f"Chosen: **{chosen.name}**, {chosen.low_bit_share:.1%} of the elements low-bit after a warm-up of "
            f"{chosen.warmup_steps} steps, {chosen.bits:.2f} bits up and down per element where FP32 has 64.",
            "",
        ]
    winner = search.winner if search is not None else None
    if winner is not None:
        lines += [
            f"Against FP32 over {len(winner.deficits)} paired seeds: {-winner.deficit:+.2f} points "
            f"(standard error {winner.spread:.2f}; seed by seed "
            f"{', '.join(f'{-each:+.2f}' for each in winner.deficits)}); tolerance {profile.target.tolerance_points}.",
            "",
        ]
    elif search is None:
        lines += ["Not confirmed by trials: it was proposed from records alone.", ""]
    lines += ["| region | parameters | elements | how |", "|---|---|---|---|"]
    for region in profile.regions:
        statistics = profile.provenance.statistics.get(region.name, {})
        how: str = region.encoding
        if how != "fp32":
            how += f", {region.result_format}" + (", error feedback" if region.error_feedback else "")
        patterns = ", ".join(f"`{each}`" for each in region.patterns)
        lines.append(f"| {region.name} | {patterns} | {statistics.get('elements', 0):.0f} | {how} |")
    return [*lines, ""]


def _parameters(assessment: Assessment) -> list[str]:
    encodings = [name for name in _SHOWN if any(name in each.cosines for each in assessment.parameters)]
    lines = [
        "## Parameters",
        "",
        "Cosines are between running averages (memory 0.9) of the decoded and of the FP32 gradient, in the worst "
        "interval; a cosine of 1 would be FP32 itself. Density is the mean over the run of `|g|_1 / (sqrt(n) |g|_2)`, "
        "noise the variance between workers over the square of the mean gradient's norm, sign error the share of "
        "elements whose majority has the wrong sign.",
        "",
        "![cosines](cosines.png)",
        "",
        "| parameter | elements | kind | zeros | density | noise | margin | sign error | "
        + " | ".join(encodings)
        + " |",
        "|---" * (8 + len(encodings)) + "|",
    ]
    lines += [
        f"| {each.name} | {each.elements} | {each.kind.value} | {each.zeros:.3f} | {each.density:.2f} | "
        f"{each.noise:.1f} | {each.margin:.2f} | {each.sign_error:.2f} | "
        + " | ".join(f"{each.cosine(name):.2f}" for name in encodings)
        + " |"
        for each in assessment.parameters
    ]
    return [*lines, "", "![over the run](timeline.png)", ""]


def _trials(search: Search) -> list[str]:
    lines = [
        "## Trials",
        "",
        "Successive halving: each rung has the same seeds for FP32 and for every proposal. Points are the proposal's "
        "score minus FP32's at the same step, mean over the seeds with its standard error.",
        "",
        "![trials](trials.png)",
        "",
        "| steps | proposal | bits | low-bit | points against FP32 | alarms |",
        "|---|---|---|---|---|---|",
    ]
    for rung in search.rungs:
        scores = ", ".join(f"{each.score:.2f}" for each in rung.reference)
        lines.append(f"| {rung.steps} | fp32 | 64.00 | 0 % | {scores} | |")
        for each in rung.candidates:
            points = "diverged" if math.isinf(each.deficit) else f"{-each.deficit:+.2f} ({each.spread:.2f})"
            share = sum(outcome.low_bit_share for outcome in each.outcomes) / len(each.outcomes)
            alarms = sum(outcome.alarms for outcome in each.outcomes)
            what = f"{each.proposal.name} | {each.proposal.bits:.2f}"
            lines.append(f"| {rung.steps} | {what} | {share:.0%} | {points} | {alarms} |")
    return [*lines, ""]


def _sensitivity(profile: Profile, assessment: Assessment, chosen: Proposal | None) -> list[str]:
    lines = [
        "## Sensitivity",
        "",
        "Each threshold of the calibration alone, a fifth down and a fifth up:",
        "",
        "| threshold | value | judged otherwise | share of elements |",
        "|---|---|---|---|",
    ]
    for change in threshold_changes(assessment):
        moved = ", ".join(f"{name} ({before} to {after})" for name, before, after in change.moved) or "nothing"
        lines.append(f"| {change.threshold} | {change.value:.4g} | {moved} | {change.elements:.1%} |")
    if chosen is not None:
        lines += [
            "",
            "Each health threshold alone, and how often the recorded run, which was healthy, would have alarmed:",
            "",
            "| threshold | value | alarms |",
            "|---|---|---|",
        ]
        lines += [
            f"| {each.threshold} | {each.value:.4g} | {each.alarms} |"
            for each in health_changes(chosen, profile.health)
        ]
    return [*lines, ""]


# ---- pictures ----------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")  # no screen is needed, nor asked for
    from matplotlib import pyplot as plt

    return plt


def _plot_cosines(assessment: Assessment, path: Path) -> Path:
    plt = _pyplot()
    parameters = [each for each in assessment.parameters if each.cosines]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * len(parameters)), layout="constrained")
    rows = range(len(parameters))
    for number, encoding in enumerate(_SHOWN):
        values = [each.cosine(encoding) for each in parameters]
        axes.scatter(values, rows, s=18, marker="o^sDv"[number], label=encoding, color=f"C{number}", zorder=3)
    axes.axvline(assessment.thresholds.least_cosine, color="0.3", linestyle="--", linewidth=1)
    axes.set_yticks(list(rows), [f"{each.name} ({each.kind.value})" for each in parameters], fontsize=7)
    for label, each in zip(axes.get_yticklabels(), parameters, strict=True):
        label.set_color(_COLOURS[each.kind] if each.kind is not Kind.DENSE else "black")
    axes.invert_yaxis()
    axes.set(xlabel="cosine of the averaged decoded and FP32 gradients, worst interval", xlim=(-0.1, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=7)
    return _saved(figure, path)


def _plot_timeline(assessment: Assessment, path: Path) -> Path:
    plt = _pyplot()
    records = assessment.records
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    at = [(interval.first + interval.end) / 2 for interval in records.intervals]
    for kind in Kind:
        members = assessment.of_kind(kind)
        series = [
            _mean(
                [
                    (interval.parameters[each.name].encodings["binary"].averaged_cosine, each.elements)
                    for each in members
                    if each.name in interval.parameters and "binary" in interval.parameters[each.name].encodings
                ]
            )
            for interval in records.intervals
        ]
        if members and not all(map(math.isnan, series)):
            left.plot(at, series, marker="o", markersize=3, color=_COLOURS[kind], label=kind.value)
    left.axhline(assessment.thresholds.least_cosine, color="0.3", linestyle="--", linewidth=1)
    left.set(
        xlabel="step", ylabel="cosine, sign counts", title="averaged decoded against FP32 gradient", ylim=(-0.1, 1)
    )
    left.legend(fontsize=8)
    known = [(step, loss) for step, loss in enumerate(records.loss) if loss is not None]
    if known:
        right.plot([step for step, _ in known], [loss for _, loss in known], linewidth=0.8)
        right.set_yscale("log" if all(loss > 0 for _, loss in known) else "linear")
    right.set(xlabel="step", ylabel="greatest loss of the workers", title="FP32 run")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return _saved(figure, path)


def _mean(pairs: Sequence[tuple[float, int]]) -> float:
    weight = sum(elements for _, elements in pairs)
    return sum(value * elements for value, elements in pairs) / weight if weight else math.nan


def _plot_trials(search: Search, path: Path) -> Path:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(search.rungs), figsize=(5 * len(search.rungs), 4.4), layout="constrained")
    for rung, axis in zip(search.rungs, axes if len(search.rungs) > 1 else [axes], strict=True):
        _plot_rung(rung, axis, search.tolerance)
    return _saved(figure, path)


def _plot_rung(rung: Rung, axis: Any, tolerance: float) -> None:
    finite = [each for each in rung.candidates if math.isfinite(each.deficit)]
    rows = range(len(finite))
    axis.errorbar([-each.deficit for each in finite], rows, xerr=[each.spread for each in finite], fmt="o", capsize=3)
    axis.set_yticks(list(rows), [f"{each.proposal.name} ({each.proposal.bits:.1f})" for each in finite], fontsize=7)
    axis.invert_yaxis()
    axis.axvline(0, color="0.3", linewidth=1)
    axis.axvline(-tolerance, color="C3", linestyle="--", linewidth=1)
    axis.set(xlabel="points against FP32", title=f"{rung.steps} steps")
    axis.grid(alpha=0.3)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path
