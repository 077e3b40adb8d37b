"""``neuron-fabric trust``: the evidence for a calibrated profile, by training with and without it.

Three questions, each answered by runs with paired seeds:

* Does the profile keep what FP32 reaches, where low-bit everywhere and always does not?
* When the votes go wrong, does the monitor leave low-bit in time, and does the run come back?
* How often does the monitor raise an alarm when nothing is wrong?
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.faults import bias_votes
from neuron_fabric.runtime.hook import NeuronFabricState, attach
from neuron_fabric.runtime.launch import launch, launched, process_group
from neuron_fabric.runtime.loop import train_run
from neuron_fabric.runtime.plan import Plan
from neuron_fabric.runtime.policies import static_policies
from neuron_fabric.runtime.profile import Profile, ProfileError, load
from neuron_fabric.runtime.transports import TRANSPORTS, check_name
from neuron_fabric.runtime.trust_report import write_evidence
from neuron_fabric.runtime.workloads import WORKLOADS, Workload, workload

__all__ = ["Evidence", "Fault", "TrustRun", "choose_fault", "gather", "main"]

_AFTER_WARMUP = 60
"""Steps that a fault leaves to the detectors, which need 40, before it begins."""
_LONGEST_FAULT = 40


@dataclass(frozen=True)
class Fault:
    """What is injected: a share of all lanes is stuck at +1, and so are zeros and ties, from one step to another."""

    first: int
    last: int
    stuck_share: float = 0.5


@dataclass
class TrustRun:
    """One run.

    Attributes
    ----------
    policy, label : str
    seed, steps : int
    score : float
        In points; NaN if the run diverged.
    loss : float
        Training loss, mean over the last twentieth of the steps.
    low_bit_share : float
        Share of gradient bytes that were low-bit, from the end of the profile's warm-up on.
    fallbacks : dict of str to int
    alarms : list of (step, text)
    changes : list of (step, whether something votes from there on)
    losses : list of float
        Of each step, mean over ranks.
    """

    policy: str
    label: str
    seed: int
    steps: int = 0
    score: float = math.nan
    loss: float = math.nan
    low_bit_share: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    alarms: list[tuple[int, str]] = field(default_factory=list)
    changes: list[tuple[int, bool]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list, repr=False)

    def left(self, fault: Fault) -> int | None:
        """First step from the beginning of a fault on in which nothing voted any more."""
        return next((step for step, votes in self.changes if not votes and step >= fault.first), None)

    def returned(self, fault: Fault) -> int | None:
        """First step after that in which something voted again."""
        left = self.left(fault)
        return None if left is None else next((step for step, votes in self.changes if votes and step > left), None)

    def loss_within(self, fault: Fault) -> float:
        """Mean training loss over the last ten steps of a fault."""
        part = self.losses[max(fault.first, fault.last - 9) : fault.last + 1]
        return statistics.fmean(part) if part else math.nan


@dataclass
class Evidence:
    """All runs of one workload."""

    workload: str
    metric: str
    profile: str
    profile_hash: str
    world: int
    tolerance: float
    warmup_steps: int = 0
    """Of the profile."""
    compared: list[TrustRun] = field(default_factory=list)
    """FP32, what is static, and the profile, a run a seed."""
    fault: Fault | None = None
    faulty: list[TrustRun] = field(default_factory=list)
    """With the fault: ``monitored`` under the profile and ``unmonitored`` under its regions alone."""
    healthy: list[TrustRun] = field(default_factory=list)
    """The profile without a fault, those of ``compared`` among them."""

    @property
    def runs(self) -> list[TrustRun]:
        """All of them, each once."""
        return list({id(run): run for run in (*self.compared, *self.faulty, *self.healthy)}.values())

    def of(self, policy: str) -> list[TrustRun]:
        """Runs of one policy, by seed."""
        return sorted((run for run in (*self.compared, *self.faulty) if run.policy == policy), key=lambda run: run.seed)


class _Log:
    """Takes the telemetry of one run."""

    def __init__(self, warmup: int) -> None:
        self._warmup, self._votes = warmup, False
        self.elements = self.low_bit = 0
        self.alarms: list[tuple[int, str]] = []
        self.changes: list[tuple[int, bool]] = []

    def __call__(self, record: dict[str, Any]) -> None:
        step = record["step"]
        votes = record["low_bit_elements"] > 0
        if record.get("probe"):
            votes = self._votes  # a probe is no change of mind
        if votes != self._votes:
            self.changes.append((step, votes))
        self._votes = votes
        self.alarms += [(step, text) for text in record["alarms"]]
        if step >= self._warmup:
            self.elements += record["elements"]
            self.low_bit += record["low_bit_elements"]


def choose_fault(profile: Profile, total_steps: int, stuck_share: float = 0.5) -> Fault:
    """When to inject: once detectors have settled, at a third of the run or later, for less than a cool-down.

    ``ValueError`` if a run of ``total_steps`` is too short for that and for a return.
    """
    first = max(profile.phases.warmup_steps + _AFTER_WARMUP, total_steps // 3)
    cool_down = profile.recovery.cool_down_steps
    last = first + min(_LONGEST_FAULT, cool_down) - 1
    if last + cool_down + 10 > total_steps:
        raise ValueError(
            f"a fault from step {first} to {last} and a cool-down of {cool_down} steps do not fit in {total_steps} "
            "steps: give the run more epochs"
        )
    return Fault(first, last, stuck_share)


def gather(
    task: Workload,
    profile: Profile,
    *,
    seeds: Sequence[int],
    healthy_steps: int = 2000,
    stuck_share: float = 0.5,
    epochs: int | None = None,
    transport: str = "auto",
    parts: Sequence[str] = ("static", "fault", "healthy"),
    tell: Callable[[TrustRun], None] = lambda run: None,
) -> Evidence:
    """Make the runs of one workload. All ranks must call it.

    Parameters
    ----------
    task : Workload
    profile : Profile
        For the task's model and this world size.
    seeds : sequence of int
        Of the pairs.
    healthy_steps : int
        So many steps at least under the profile without a fault; seeds go on behind the last one until then.
    stuck_share : float
        Share of the lanes that the fault holds at +1.
    epochs : int, optional
        The workload's own number if None.
    transport : str
    parts : sequence of str
        ``static``, ``fault``, ``healthy``: which questions; FP32 runs for the first two.
    tell : callable
        Told each run.

    Raises
    ------
    ValueError
        If the profile does not fit, or a fault does not fit into a run.
    """
    world = dist.get_world_size()
    total = (epochs or task.epochs) * task.steps_per_epoch(world)
    evidence = Evidence(
        task.name,
        task.metric,
        profile.name,
        profile.hash,
        world,
        profile.target.tolerance_points,
        profile.phases.warmup_steps,
    )
    fault = evidence.fault = choose_fault(profile, total, stuck_share) if "fault" in parts else None

    def run(key: str, label: str, plan: Plan | Profile | None, seed: int, inject: Fault | None = None) -> TrustRun:
        result = _train(task, TrustRun(key, label, seed), plan, profile.phases.warmup_steps, epochs, transport, inject)
        tell(result)
        return result

    for seed in seeds:
        if {"static", "fault"} & set(parts):
            evidence.compared.append(run("fp32", "FP32", None, seed))
        if "static" in parts:
            evidence.compared += [run(each.key, each.label, each.plan, seed) for each in static_policies()]
        if {"static", "healthy"} & set(parts):
            evidence.healthy.append(run("profile", f"profile {profile.name}", profile, seed))
        if fault is not None:
            evidence.faulty.append(run("unmonitored", "fault, regions alone", profile.plan(), seed, fault))
            evidence.faulty.append(run("monitored", "fault, profile", profile, seed, fault))
    evidence.compared += evidence.healthy
    seed = max(seeds)
    while "healthy" in parts and sum(each.steps for each in evidence.healthy) < healthy_steps:
        seed += 1
        evidence.healthy.append(run("profile", f"profile {profile.name}", profile, seed))
    return evidence


def _train(
    task: Workload,
    result: TrustRun,
    plan: Plan | Profile | None,
    warmup: int,
    epochs: int | None,
    transport: str,
    fault: Fault | None,
) -> TrustRun:
    log = _Log(warmup)

    def attached(ddp: DistributedDataParallel) -> NeuronFabricState | None:
        if plan is None:
            return None
        state = attach(ddp, plan, transport)
        state.telemetry = log
        if fault is not None:
            bias_votes(state, fault.first, fault.last, stuck_share=fault.stuck_share)
        return state

    run = train_run(task, result.seed, attached, epochs=epochs)
    result.steps = run.steps
    result.score = math.nan if run.diverged else run.score
    result.losses = run.losses
    result.loss = statistics.fmean(run.losses[-max(1, len(run.losses) // 20) :])
    result.fallbacks = run.fallbacks
    result.alarms, result.changes = log.alarms, log.changes
    if log.elements:
        result.low_bit_share = log.low_bit / log.elements
    elif run.traffic.get("elements"):  # a plan that has nothing to agree on has no telemetry, and no warm-up either
        result.low_bit_share = run.traffic["low_bit_elements"] / run.traffic["elements"]
    return result


def _profiles(given: Sequence[str], names: Sequence[str]) -> dict[str, Profile]:
    """By workload, from ``NAME=FILE`` or from where ``calibrate`` leaves them."""
    files: dict[str, Path] = {}
    for each in given:
        name, found, path = each.partition("=")
        if not found or name not in WORKLOADS:
            raise ValueError(f"--profile {each!r}: write WORKLOAD=FILE, with a workload of {', '.join(WORKLOADS)}")
        files[name] = Path(path)
    profiles = {}
    for name in dict.fromkeys(names or files or ("digits", "reviews")):
        file = files.get(name, Path("build/calibrate") / name / "profile.yaml")
        if not file.is_file():
            raise ValueError(f"no profile {file}: write one with neuron-fabric calibrate {name}, or give --profile")
        profiles[name] = load(file)
    return profiles


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    names: Annotated[list[str] | None, typer.Argument(help="Workloads.", metavar="[WORKLOAD]...")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="WORKLOAD=FILE; repeatable. Without: build/calibrate/WORKLOAD/profile.yaml."),
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="static, fault or healthy; repeatable. Without: all.")] = None,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Local ranks to start.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Paired seeds.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 101,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the workload's own number.")] = None,
    healthy_steps: Annotated[int, typer.Option(min=1, help="Steps without a fault, to count alarms in.")] = 2000,
    stuck_share: Annotated[float, typer.Option(min=0, max=1, help="Share of lanes that the fault holds at +1.")] = 0.5,
    transport: Annotated[str, typer.Option(help=f"auto, {', '.join(TRANSPORTS)}, or a reducer's URL.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the tables as JSON.")] = Path("build/trust"),
) -> None:
    """Train with and without a calibrated profile, with and without a fault, and print what came of it."""
    parts = part or ["static", "fault", "healthy"]
    try:
        for each in parts:
            if each not in ("static", "fault", "healthy"):
                raise ValueError(f"no part {each!r}; there are static, fault and healthy")
        check_name(transport)
        profiles = _profiles(profile or (), names or ())
        tasks = {name: workload(name) for name in profiles}
        for name, task in tasks.items():
            if "fault" in parts:
                choose_fault(profiles[name], (epochs or task.epochs) * task.steps_per_epoch(ranks))
    except (ValueError, OSError, ProfileError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not launched():
        raise typer.Exit(launch("neuron_fabric.runtime.trust", sys.argv[1:], ranks))
    with process_group():
        first = dist.get_rank() == 0
        console = Console(quiet=not first, width=None if os.isatty(1) else 140)

        def tell(run: TrustRun) -> None:
            console.print(
                f"  {run.label}, seed {run.seed}: {run.score:.2f}, {run.low_bit_share:.0%} low-bit, "
                f"{len(run.alarms)} alarm(s)",
                highlight=False,
            )

        found = []
        for name, task in tasks.items():
            console.print(f"{name}, {ranks} ranks, profile {profiles[name].name}", highlight=False)
            found.append(
                gather(
                    task,
                    profiles[name],
                    seeds=range(seed, seed + seeds),
                    healthy_steps=healthy_steps,
                    stuck_share=stuck_share,
                    epochs=epochs,
                    transport=transport,
                    parts=parts,
                    tell=tell,
                )
            )
            if first:
                write_evidence(found, out, console if len(found) == len(tasks) else Console(quiet=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``neuron-fabric trust``; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.argv[1:] = arguments  # what the ranks are started with
    result = app(args=arguments, prog_name="neuron-fabric trust", standalone_mode=False)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
