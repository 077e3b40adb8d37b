"""What a person sees of a comparison: progress while it runs, then one table, one picture and the numbers as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import rich.progress
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from neuron_fabric.runtime.train import RunResult

__all__ = ["Progress", "summarise", "write_report"]


class Progress:
    """Live progress on a terminal; one line per finished run elsewhere, so that a log shows it too."""

    def __init__(self, runs: int, *, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet)
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._runs = self._bars.add_task("runs", total=runs)
        self._epochs = self._bars.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def epoch(self, result: RunResult, epoch: int, epochs: int) -> None:
        """An epoch of the running run is finished."""
        text = f"{result.label}, seed {result.seed}: {result.accuracy[-1]:.1f} %"
        self._bars.update(self._epochs, description=text, completed=epoch, total=epochs)

    def done(self, result: RunResult) -> None:
        """A run is finished."""
        self._bars.advance(self._runs)
        self._console.print(
            f"{result.label}, seed {result.seed}: accuracy {result.accuracy[-1]:.2f} %, loss {final_loss(result):.4f}, "
            f"{1e3 * result.step_seconds:.1f} ms a step",
            highlight=False,
        )


def final_loss(result: RunResult) -> float:
    """Training loss, mean over the last twentieth of the steps."""
    return statistics.fmean(result.loss[-max(1, len(result.loss) // 20) :]) if result.loss else float("nan")


def summarise(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """One dict per policy, in the order in which they first appear; accuracies and losses over its seeds."""
    rows = []
    for policy in dict.fromkeys(result.policy for result in results):
        runs = [result for result in results if result.policy == policy]

        def mean(value: Callable[[RunResult], float], runs: list[RunResult] = runs) -> float:
            return statistics.fmean(map(value, runs))

        accuracies = [run.accuracy[-1] for run in runs]
        loopback = [run.loopback_bytes for run in runs if run.loopback_bytes is not None]
        fallbacks: dict[str, int] = {}
        for run in runs:
            for reason, count in run.fallbacks.items():
                fallbacks[reason] = fallbacks.get(reason, 0) + count
        rows.append(
            {
                "policy": policy,
                "label": runs[0].label,
                "seeds": [run.seed for run in runs],
                "accuracy": statistics.fmean(accuracies),
                "accuracy_low": min(accuracies),
                "accuracy_high": max(accuracies),
                "loss": mean(final_loss),
                "bits_up": mean(lambda run: run.bits_up),
                "bits_down": mean(lambda run: run.bits_down),
                "envelope_bits": mean(lambda run: run.envelope_bits),
                "up_share_of_fp32": mean(lambda run: run.bits_up) / 32,
                "down_share_of_fp32": mean(lambda run: run.bits_down) / 32,
                "sent_bytes": mean(lambda run: run.sent_bytes),
                "ring_bytes": mean(lambda run: run.ring_bytes),
                "loopback_bytes": statistics.fmean(loopback) if loopback else None,
                "step_seconds": mean(lambda run: run.step_seconds),
                "fallbacks": fallbacks,
            }
        )
    return rows


def write_report(results: Sequence[RunResult], settings: dict[str, Any], out: Path) -> None:
    """Print the table; write ``report.json`` and ``training.png`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    rows = summarise(results)
    document = {"settings": settings, "summary": rows, "runs": [asdict(result) for result in results]}
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a log has no width of its own
    console.print(_table(rows, results[0]))
    _plot(results, out / "training.png")
    console.print(f"written: {out / 'report.json'}, {out / 'training.png'}", highlight=False)


def _table(rows: Sequence[dict[str, Any]], first: RunResult) -> Table:
    table = Table(
        title=f"digits, {first.world} ranks, transport {first.transport}, {len(rows[0]['seeds'])} seed(s) per policy",
        caption=(
            "bits: payload per gradient element between a worker and the reducer (envelopes apart); "
            "sent: bytes a rank puts on the wire per step, by the collectives' algorithms, and as a share of a ring "
            "all-reduce in FP32; lo: bytes per rank and step that crossed the loopback interface, headers included"
        ),
    )
    table.add_column("policy")
    for name in ("accuracy %", "loss", "bits up", "bits down", "up / FP32", "sent kB", "/ ring", "lo kB", "ms / step"):
        table.add_column(name, justify="right")
    table.add_column("fallbacks")
    for row in rows:
        ring = row["ring_bytes"]
        table.add_row(
            row["label"],
            f"{row['accuracy']:.2f} ({row['accuracy_low']:.1f}-{row['accuracy_high']:.1f})",
            f"{row['loss']:.3f}",
            f"{row['bits_up']:.2f}",
            f"{row['bits_down']:.2f}",
            f"{100 * row['up_share_of_fp32']:.1f} %",
            f"{row['sent_bytes'] / 1e3:.1f}",
            f"{100 * row['sent_bytes'] / ring:.1f} %" if ring else "-",
            "-" if row["loopback_bytes"] is None else f"{row['loopback_bytes'] / 1e3:.1f}",
            f"{1e3 * row['step_seconds']:.1f}",
            ", ".join(f"{reason} {count}" for reason, count in sorted(row["fallbacks"].items())) or "none",
        )
    return table


def _plot(results: Sequence[RunResult], path: Path) -> None:
    """Accuracy and loss over steps, one colour per policy, mean over seeds with the range shaded."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen is needed, nor asked for
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        runs = [result for result in results if result.policy == policy]
        colour = f"C{number}"
        steps = len(runs[0].loss)
        epochs = len(runs[0].accuracy)
        at = [steps * (epoch + 1) // epochs for epoch in range(epochs)]
        _band(left, at, [run.accuracy for run in runs], colour, runs[0].label)
        window = max(1, steps // 40)
        smooth = [[statistics.fmean(run.loss[max(0, k - window + 1) : k + 1]) for k in range(steps)] for run in runs]
        _band(right, list(range(1, steps + 1)), smooth, colour, runs[0].label)
    left.set(xlabel="step", ylabel="test accuracy, %", title="accuracy")
    right.set(xlabel="step", ylabel="training loss", yscale="log", title="loss (smoothed)")
    left.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _band(axes: Any, x: Sequence[int], series: Sequence[Sequence[float]], colour: str, label: str) -> None:
    columns = list(zip(*series, strict=True))
    axes.plot(x, [statistics.fmean(column) for column in columns], color=colour, label=label)
    axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15, linewidth=0)
