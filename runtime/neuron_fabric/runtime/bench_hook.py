"""What the hook costs a training step: ``neuron-fabric bench hook``.

Two DDP models of one architecture live in the same processes, one plain, one with the hook, and take steps in pairs, in
a random order that is the same on all ranks. A pair gives one ratio of times; what slows the machine down for a while
slows both. The first row is plain DDP against plain DDP: what the method makes of no difference at all.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.hook import NeuronFabricState, attach
from neuron_fabric.runtime.launch import launch, process_group
from neuron_fabric.runtime.machine import machine
from neuron_fabric.runtime.plan import Plan
from neuron_fabric.runtime.profile import loads

__all__ = ["BAR", "CASES", "PairedTimes", "Settings", "hook", "measure", "median_interval"]

BAR = 1.03
"""What the upper end of the all-FP32 plan's interval is to stay below."""
_CLASSES = 10


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark."""

    pairs: int = 200
    warm_up: int = 20
    """Pairs that are not counted; DDP lays its buckets out anew after the first step."""
    batch: int = 160
    """Examples per rank and step."""
    hidden: int = 512
    """Width of the perceptron; its five inner layers have the square of that."""
    bucket_mb: float = 2.0
    """DDP's default of 25 would leave two buckets: hooks cost by the bucket."""
    seed: int = 1


@dataclass(frozen=True)
class PairedTimes:
    """What one row was measured to take, against plain DDP in the same pairs.

    Attributes
    ----------
    plain, ours : list of float
        Seconds of each step, by pair: from a barrier before it to the end of the optimizer's step, on the slowest rank.
    plain_processor, our_processor : list of float
        Processor time of the same, of all threads and ranks together. Waiting is not in it, and neither is most of what
        other work on the machine costs.
    plain_collectives, our_collectives : float
        A step, mean over the pairs, of the process groups themselves: DDP's and the hook's own.
    """

    plain: list[float]
    ours: list[float]
    plain_processor: list[float]
    our_processor: list[float]
    plain_collectives: float
    our_collectives: float


def _profile(warm_up: int) -> str:
    """A profile as one would write it by hand; it admits votes after ``warm_up`` steps, whatever training does."""
    return f"""
schema_version: 1
name: bench
regions:
  - {{name: head, patterns: ["head.*"], encoding: fp32}}
  - {{name: one_dimensional, max_ndim: 1, encoding: fp32}}
  - {{name: body, error_feedback: {{clip: 1.0}}}}
phases: {{warmup_steps: {warm_up}}}
health: {{threshold: 1000000, correlation_bound: 1, correlation_release: 1}}
"""


_LOW_BIT = Plan.low_bit(keep_fp32=["head.*"], one_d_fp32=True)
_NEVER = 1 << 40

Attach = Callable[[DistributedDataParallel], NeuronFabricState | None]


def _plain(ddp: DistributedDataParallel) -> None:
    """Nothing is attached."""


def _torch_hook(ddp: DistributedDataParallel) -> None:
    """The least that any hook in Python costs: PyTorch's own, which averages and nothing else."""
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


CASES: dict[str, Attach] = {
    "plain DDP": _plain,
    "PyTorch's allreduce_hook": _torch_hook,
    "FP32 plan": lambda ddp: attach(ddp, Plan()),
    "profile, FP32 warm-up": lambda ddp: attach(ddp, loads(_profile(_NEVER)), "allgather"),
    "low-bit, allgather": lambda ddp: attach(ddp, _LOW_BIT, "allgather"),
    "low-bit, collective": lambda ddp: attach(ddp, _LOW_BIT, "collective"),
    "profile, voting": lambda ddp: attach(ddp, loads(_profile(0)), "allgather"),
}
"""The rows, and how each attaches to its DDP model."""


def hook(
    ranks: Annotated[int, typer.Option(min=1, help="Local ranks, over gloo.")] = 2,
    pairs: Annotated[int, typer.Option(min=6, help="Timed pairs of steps a row.")] = Settings.pairs,
    warm_up: Annotated[int, typer.Option(min=2, help="Pairs before those.")] = Settings.warm_up,
    batch: Annotated[int, typer.Option(min=1, help="Examples per rank and step.")] = Settings.batch,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the perceptron.")] = Settings.hidden,
    bucket_mb: Annotated[float, typer.Option(help="DDP's bucket_cap_mb.")] = Settings.bucket_mb,
    case: Annotated[list[str] | None, typer.Option(help="Only this row; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model, the data and the order in a pair.")] = Settings.seed,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/bench/hook.json"),
) -> None:
    """Time of a training step with the hook over that of plain DDP, in randomised pairs."""
    unknown = sorted(set(case or []) - set(CASES))
    if unknown:
        raise typer.BadParameter(f"no row {unknown[0]!r}: there are {', '.join(CASES)}", param_hint="--case")
    settings = Settings(pairs, warm_up, batch, hidden, bucket_mb, seed)
    task = {"settings": asdict(settings), "cases": case or list(CASES), "output": str(output)}
    status = launch(__name__, [json.dumps(task)], ranks)
    if status:
        raise typer.Exit(status)


def measure(case: str, settings: Settings) -> PairedTimes:
    """One row. All ranks of the default process group must call it with the same arguments."""
    plain, ours = _Trainee(_plain, settings), _Trainee(CASES[case], settings)
    order = torch.Generator().manual_seed(settings.seed)
    seconds = torch.zeros(2, settings.pairs + settings.warm_up, dtype=torch.float64)
    processor = torch.zeros_like(seconds)
    collectives = [0, 0]
    for pair in range(settings.warm_up + settings.pairs):
        ours_first = bool(torch.randint(2, (), generator=order))
        for which in (1, 0) if ours_first else (0, 1):
            trainee = (plain, ours)[which]
            before = trainee.collectives()
            dist.barrier()
            begin, begin_processor = time.perf_counter(), time.process_time()
            trainee.step()
            seconds[which, pair] = time.perf_counter() - begin
            processor[which, pair] = time.process_time() - begin_processor
            if pair >= settings.warm_up:
                collectives[which] += trainee.collectives() - before - 1  # the barrier is one
    ours.close()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    gc.collect()  # what the models held, before the next row
    times = torch.cat([seconds, processor])[:, settings.warm_up :].tolist()
    return PairedTimes(*times, *(count / settings.pairs for count in collectives))


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Median, and an interval that covers the distribution's median in at least ``level`` of all samples.

    Its ends are order statistics: how many values lie below the median is binomial whatever the distribution is, so
    nothing is assumed but that the values are independent. ``ValueError`` if there are too few.
    """
    count = len(values)
    left, total = 0, 0.0
    # The greatest number that the lower tail may cut off.
    while left <= count // 2 and total + math.comb(count, left) / 2.0**count <= (1 - level) / 2:
        total += math.comb(count, left) / 2.0**count
        left += 1
    if not left:
        raise ValueError(f"{count} values have no interval for the median at level {level}: measure more")
    ordered = sorted(values)
    return statistics.median(ordered), ordered[left - 1], ordered[count - left]


class _Perceptron(nn.Module):
    """Five layers of equal width and a head, so that most buckets are ready while backward still computes.

    With tanh no unit is dead, and no weight leaves the binary route for its zeros.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(5)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x))
        return logits


class _Trainee:
    """A DDP model, its optimizer and its data."""

    def __init__(self, attach_to: Attach, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self._ddp = DistributedDataParallel(_Perceptron(settings.hidden), bucket_cap_mb=settings.bucket_mb)
        self._state = attach_to(self._ddp)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), 0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(settings.seed * dist.get_world_size() + dist.get_rank())
        self._x = torch.randn(settings.batch, settings.hidden, generator=generator)
        self._y = torch.randint(_CLASSES, (settings.batch,), generator=generator)

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._ddp(self._x), self._y)
        if self._state is not None and self._state.profile is not None:
            self._state.observe(loss.item(), 0.01)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def collectives(self) -> int:
        """How many have been launched on the process groups that this model's steps use."""
        groups = (self._ddp.process_group,) if self._state is None else self._state.process_groups
        return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._state is not None:
            self._state.close()


def _row(case: str, times: PairedTimes) -> dict[str, Any]:
    ratios = [ours / plain for plain, ours in zip(times.plain, times.ours, strict=True)]
    median, low, high = median_interval(ratios)
    processor = [ours / plain for plain, ours in zip(times.plain_processor, times.our_processor, strict=True)]
    return {
        "case": case,
        "ratio": median,
        "ratio_low": low,
        "ratio_high": high,
        "processor_ratio": statistics.median(processor),
        "plain_seconds": statistics.median(times.plain),
        "seconds": statistics.median(times.ours),
        "plain_collectives": times.plain_collectives,
        "collectives": times.our_collectives,
        "ratios": ratios,
    }


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("over plain DDP")
    for name in ("time", "95 %", "CPU", "ms (plain)", "collectives"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            "plain DDP again" if row["case"] == "plain DDP" else row["case"],
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
            f"{row['processor_ratio']:.3f}",
            f"{1e3 * row['seconds']:.1f} ({1e3 * row['plain_seconds']:.1f})",
            f"{row['collectives']:g} ({row['plain_collectives']:g})",
        )
    return table


def _rank_main(argv: Sequence[str]) -> None:
    """What each rank runs."""
    task = json.loads(argv[0])
    settings = Settings(**task["settings"])
    with process_group():
        first = dist.get_rank() == 0
        console = Console(quiet=not first)
        rows = []
        for case in task["cases"]:
            with console.status(case):
                rows.append(_row(case, measure(case, settings)))
        if first:
            world = dist.get_world_size()
            facts = machine()
            report = {"benchmark": "hook", "machine": facts, "ranks": world, "bar": BAR, "settings": asdict(settings)}
            console.print(_table(rows, f"a training step on {world} ranks, {settings.pairs} pairs"))
            for row in rows:
                if row["case"] == "FP32 plan":
                    verdict = "below" if row["ratio_high"] < BAR else "not below"
                    console.print(f"FP32 plan: the interval's upper end is {verdict} {BAR}")
            output = Path(task["output"])
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report | {"rows": rows}, indent=2) + "\n")
            console.print(f"{facts['cpu']}: written to {output}")


if __name__ == "__main__":
    _rank_main(sys.argv[1:])
