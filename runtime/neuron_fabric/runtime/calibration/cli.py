"""``neuron-fabric calibrate``: find out where a workload may be trained with one bit, and write that down as a profile.

The command trains a built-in workload on local ranks over gloo: once in FP32 while it records, then in trials. For a
training script of one's own there are :func:`~neuron_fabric.runtime.calibration.attach_calibrator` and ``--records``.
"""

from __future__ import annotations

import datetime
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from neuron_fabric.runtime.calibration.building import ProfileOptions, build_profile
from neuron_fabric.runtime.calibration.proposals import Assessment, Kind, Proposal, assess, ladder
from neuron_fabric.runtime.calibration.recorder import Calibrator, attach_calibrator
from neuron_fabric.runtime.calibration.records import Records, RecordsError, load_records
from neuron_fabric.runtime.calibration.report import write_calibration
from neuron_fabric.runtime.calibration.search import Outcome, Rung, Search, halve
from neuron_fabric.runtime.hook import NeuronFabricState, attach
from neuron_fabric.runtime.launch import launch, launched, process_group
from neuron_fabric.runtime.loop import train_run
from neuron_fabric.runtime.transports import TRANSPORTS, check_name
from neuron_fabric.runtime.workloads import WORKLOADS, Workload, workload

__all__ = ["calibrate", "main"]

_INTERVALS = 12


def calibrate(
    task: Workload,
    *,
    seeds: Sequence[int],
    out: Path,
    epochs: int | None = None,
    tolerance: float = 0.5,
    transport: str = "auto",
    most: int = 8,
    console: Console | None = None,
) -> Search:
    """Record, propose, try, and write the profile and its report to ``out``. All ranks must call it.

    Parameters
    ----------
    task : Workload
    seeds : sequence of int
        Of the trials; the first one is recorded.
    out : Path
        Folder; only rank 0 writes.
    epochs : int, optional
        The workload's own number if None.
    tolerance : float
        Points that low-bit may be worse than FP32.
    transport : str
        Of the trials.
    most : int
        Proposals to try at most.
    console : Console, optional
        Where progress goes.
    """
    say = (console or Console(quiet=True)).print
    world = dist.get_world_size()
    steps = (epochs or task.epochs) * task.steps_per_epoch(world)
    say(f"{task.name}: recording {steps} steps in FP32, seed {seeds[0]}")
    records = _record(task, seeds[0], steps, epochs)
    assessment = assess(records)
    proposals = ladder(assessment, most=most)
    say(_kinds(assessment))
    options = ProfileOptions(
        name=f"{task.name}-{world}",
        metric=task.metric,
        tolerance=tolerance,
        seeds=tuple(seeds),
        workload=f"{task.name}, {world} workers, {steps} steps",
        date=datetime.datetime.now(datetime.UTC).date(),
        notes="Written by neuron-fabric calibrate.",
    )

    def run(proposal: Proposal | None, seed: int, length: int) -> Outcome:
        outcome = _trial(task, proposal, assessment, options, seed, length, epochs, transport)
        say(f"  {outcome.policy}, seed {seed}, {length} steps: {outcome.score:.2f}", highlight=False)
        return outcome

    search = halve(
        proposals, run, seeds=seeds, steps=steps, tolerance=tolerance, tell=lambda rung: say(_rung(rung, tolerance))
    )
    winner = search.winner
    chosen = None if winner is None else winner.proposal
    if dist.get_rank() == 0:
        profile = build_profile(chosen, assessment, options, search.outcomes)
        files = write_calibration(profile, assessment, search, chosen, out)
        say(f"written: {', '.join(map(str, files))}", highlight=False)
    if winner is None:
        say("nothing was found that stays within the tolerance: the profile keeps everything in FP32")
    else:
        say(f"chosen: {winner.proposal.name}, {-winner.deficit:+.2f} points against FP32", highlight=False)
    return search


def _record(task: Workload, seed: int, steps: int, epochs: int | None) -> Records:
    held: list[Calibrator] = []

    def attached(ddp: Any) -> Calibrator:
        held.append(attach_calibrator(ddp, interval_steps=max(10, steps // _INTERVALS)))
        return held[0]

    train_run(task, seed, attached, epochs=epochs)
    records = held[0].records(workload=task.name, seed=seed)
    # What is decided from them must be the same everywhere, and processors of different make may round differently.
    return Records.model_validate_json(_from_rank_0(records.model_dump_json()))


def _from_rank_0(text: str) -> str:
    length = torch.tensor([len(text.encode())])
    dist.broadcast(length, 0)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
    dist.broadcast(data, 0)
    return bytes(data.numpy()).decode()


class _Tally:
    """Adds up the telemetry of one run from some step on."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.elements = self.low_bit = self.alarms = 0

    def __call__(self, record: dict[str, Any]) -> None:
        self.alarms += len(record["alarms"])
        if record["step"] >= self._first:
            self.elements += record["elements"]
            self.low_bit += record["low_bit_elements"]

    @property
    def share(self) -> float:
        return self.low_bit / self.elements if self.elements else 0.0


def _trial(
    task: Workload,
    proposal: Proposal | None,
    assessment: Assessment,
    options: ProfileOptions,
    seed: int,
    steps: int,
    epochs: int | None,
    transport: str,
) -> Outcome:
    """One run of a proposal, under the profile that it would have; None is FP32 as plain DDP does it."""
    tally = _Tally(0)

    def attached(ddp: Any) -> NeuronFabricState | None:
        nonlocal tally
        if proposal is None:
            return None
        profile = build_profile(proposal, assessment, options)
        tally = _Tally(profile.phases.warmup_steps)
        state = attach(ddp, profile, transport)
        state.telemetry = tally
        return state

    run = train_run(task, seed, attached, epochs=epochs, steps=steps)
    tail = run.losses[-max(1, len(run.losses) // 20) :]
    return Outcome(
        "fp32" if proposal is None else proposal.name,
        seed,
        steps,
        math.nan if run.diverged else run.score,
        statistics.fmean(tail) if tail else math.nan,
        tally.share,
        tally.alarms,
    )


def _kinds(assessment: Assessment) -> Table:
    table = Table(title="what the records say")
    for name in ("kind", "parameters", "elements", "lowest cosine", "most zeros"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind in Kind:
        members = assessment.of_kind(kind)
        if members:
            table.add_row(
                kind.value,
                ", ".join(each.name for each in members) if len(members) <= 3 else str(len(members)),
                str(sum(each.elements for each in members)),
                f"{min(each.cosine('binary') for each in members):.2f}",
                f"{max(each.zeros for each in members):.3f}",
            )
    return table


def _rung(rung: Rung, tolerance: float) -> Table:
    table = Table(title=f"{rung.steps} steps, {len(rung.reference)} seed(s); tolerance {tolerance} points")
    for name in ("proposal", "bits", "low-bit", "against FP32", "alarms"):
        table.add_column(name, justify="left" if name == "proposal" else "right")
    for each in rung.candidates:
        table.add_row(
            each.proposal.name,
            f"{each.proposal.bits:.2f}",
            f"{statistics.fmean(outcome.low_bit_share for outcome in each.outcomes):.0%}",
            f"{-each.deficit:+.2f} ({each.spread:.2f})",
            str(sum(outcome.alarms for outcome in each.outcomes)),
        )
    return table


def _from_records(path: Path, out: Path) -> None:
    """Propose without trials."""
    records = load_records(path)
    assessment = assess(records)
    # Without trials nobody knows whether what looks sensitive matters, so it does not vote.
    chosen = next((each for each in ladder(assessment) if each.name == "dense-binary"), None)
    options = ProfileOptions(
        name=(records.workload or "model").replace(" ", "-")[:64],
        workload=f"{records.workload or 'a run'}, {records.world} workers, {records.steps} steps",
        seeds=() if records.seed is None else (records.seed,),
        date=datetime.datetime.now(datetime.UTC).date(),
        notes="Proposed from records alone; not confirmed by trials.",
    )
    console = Console()
    console.print(_kinds(assessment))
    files = write_calibration(build_profile(chosen, assessment, options), assessment, None, chosen, out)
    console.print(f"written: {', '.join(map(str, files))}", highlight=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    name: Annotated[str, typer.Argument(help=f"Workload: {', '.join(WORKLOADS)}.", metavar="WORKLOAD")] = "digits",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Local ranks to start.")] = 4,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the workload's own number.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Paired seeds of each trial.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first seed; this one is recorded.")] = 1,
    tolerance: Annotated[float, typer.Option(min=0, help="Points that low-bit may be worse than FP32.")] = 0.5,
    transport: Annotated[
        str, typer.Option(help=f"Of the trials: auto, {', '.join(TRANSPORTS)}, or a reducer's URL.")
    ] = "auto",
    most: Annotated[int, typer.Option(min=1, max=9, help="Proposals to try at most.")] = 8,
    records: Annotated[
        Path | None, typer.Option(help="Propose from this file alone, as a Calibrator saved it; nothing is trained.")
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default="build/calibrate/WORKLOAD", help="Folder.")] = None,
) -> None:
    """Record a run in FP32, propose where it may vote, try the proposals, and write a profile with its report."""
    folder = out or Path("build/calibrate") / name
    try:
        if records is not None:
            _from_records(records, folder)
            return
        check_name(transport)
        task = workload(name)
    except (ValueError, OSError, RecordsError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not launched():
        raise typer.Exit(launch("neuron_fabric.runtime.calibration.cli", sys.argv[1:], ranks))
    with process_group():
        calibrate(
            task,
            seeds=range(seed, seed + seeds),
            out=folder,
            epochs=epochs,
            tolerance=tolerance,
            transport=transport,
            most=most,
            console=Console(quiet=dist.get_rank() != 0, width=None if os.isatty(1) else 120),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``neuron-fabric calibrate``; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv[1:] = arguments  # what the ranks are started with
    result = app(args=arguments, prog_name="neuron-fabric calibrate", standalone_mode=False)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
