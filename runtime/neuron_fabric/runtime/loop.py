"""The one training loop of the built-in workloads: plain DDP, a plan, a profile or a calibrator, all train alike.

    run = train_run(workload("digits"), seed=1, attach=lambda ddp: attach(ddp, plan))

Two runs with the same workload, seed and world start from the same parameters and see the same batches, so that they
can be compared in pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.workloads.base import Workload

__all__ = ["Run", "State", "train_run"]


class State(Protocol):
    """What a loop must know of the state behind a communication hook."""

    def observe(self, loss: float | None = None, learning_rate: float | None = None) -> None:
        """Take this rank's loss and learning rate of the step; called before ``backward``."""

    def close(self) -> None:
        """The run is over."""


@dataclass
class Run:
    """One run as all ranks saw it; of times and bytes as this rank did.

    Attributes
    ----------
    workload : str
    seed, world : int
    scores : list of float
        After each epoch, and at the end if that is within one; in points.
    losses : list of float
        Training loss of each step, mean over ranks; filled at the end of the run.
    steps : int
        Steps done so far.
    step_seconds : float
        Median time of a step.
    diverged : bool
        Whether the loss was not finite on some rank; the run ends with the epoch in which that happens.
    traffic : dict of str to int
        Totals of the state's :class:`~neuron_fabric.runtime.traffic.Traffic`; empty if the state counts none.
    fallbacks : dict of str to int
        What went FP32 instead of low-bit, by reason.
    loopback_bytes : float or None
        Bytes per step and rank that crossed the loopback interface, headers and everything; None if unknown.
    """

    workload: str
    seed: int
    world: int
    scores: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    step_seconds: float = math.nan
    diverged: bool = False
    traffic: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    loopback_bytes: float | None = None

    @property
    def score(self) -> float:
        """At the end of the run; NaN before the first one."""
        return self.scores[-1] if self.scores else math.nan


def train_run(
    workload: Workload,
    seed: int,
    attach: Callable[[DistributedDataParallel], State | None],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    on_epoch: Callable[[Run, int, int], None] | None = None,
    on_step: Callable[[int, float, State | None], None] | None = None,
) -> Run:
    """Train once; a collective of the default process group.

    Parameters
    ----------
    workload : Workload
    seed : int
        Of parameters, batches and whatever else is random.
    attach : callable
        Gets the DDP model and registers a hook; returns its state, or None for plain DDP. The state is closed at the
        end.
    epochs : int, optional
        The workload's own number if None. The learning rate's schedule is for so many.
    steps : int, optional
        Stop after so many steps; the schedule is the one of the whole run all the same.
    on_epoch : callable, optional
        Told the run so far, how many epochs are done, and of how many, after each score.
    on_step : callable, optional
        Told the step from 0 on, this rank's loss and the state, after each step of the optimizer.

    Raises
    ------
    ValueError
        If ``epochs`` or ``steps`` is less than 1.
    """
    for name, asked in (("epochs", epochs), ("steps", steps)):
        if asked is not None and asked < 1:
            raise ValueError(f"{name} must be at least 1, but is {asked}")
    rank, world = dist.get_rank(), dist.get_world_size()
    epochs = workload.epochs if epochs is None else epochs
    per_epoch = workload.steps_per_epoch(world)
    last = epochs * per_epoch if steps is None else min(steps, epochs * per_epoch)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(workload.model())
    torch.manual_seed(seed * world + rank)  # ranks start alike, but their dropout is their own
    run = Run(workload.name, seed, world)
    times: list[float] = []
    losses: list[torch.Tensor] = []
    state = attach(ddp)
    try:
        optimizer, schedule = workload.optimizer(ddp, epochs * per_epoch)
        dist.barrier()
        before = _loopback_bytes()
        for epoch in range(epochs):
            ddp.train()  # type: ignore[no-untyped-call]
            batches = workload.batches(epoch, seed, rank, world)
            finite = True
            for _ in range(min(per_epoch, last - run.steps)):
                begin = time.perf_counter()
                batch = next(batches)
                optimizer.zero_grad(set_to_none=True)
                loss = workload.loss(ddp, batch)
                value = float(loss.item())
                if state is not None:
                    state.observe(value, optimizer.param_groups[0]["lr"])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                times.append(time.perf_counter() - begin)
                losses.append(loss.detach())
                finite = finite and math.isfinite(value)
                run.steps += 1
                if on_step is not None:
                    on_step(run.steps - 1, value, state)
            run.diverged = not _everywhere(finite)
            run.scores.append(_score(workload, ddp))
            if on_epoch is not None:
                on_epoch(run, epoch + 1, epochs)
            if run.diverged or run.steps == last:
                break
        dist.barrier()
        after = _loopback_bytes()
        total = torch.stack(losses)
        dist.all_reduce(total)
        run.losses = (total / world).tolist()
        run.step_seconds = statistics.median(times)
        if before is not None and after is not None:
            run.loopback_bytes = (after - before) / run.steps / world
        traffic = getattr(state, "traffic", None)
        run.traffic = {} if traffic is None else traffic.as_dict()
        run.fallbacks = dict(getattr(state, "fallbacks", {}))
    finally:
        if state is not None:
            state.close()
    return run


def _everywhere(truth: bool) -> bool:
    """Whether it holds on all ranks."""
    flag = torch.tensor([int(truth)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _score(workload: Workload, ddp: DistributedDataParallel) -> float:
    """Rank 0's score, for all ranks; all have the same model but for the running statistics of batch norms."""
    score = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        score[0] = workload.score(ddp.module)
    dist.broadcast(score, 0)
    return score.item()


def _loopback_bytes() -> int | None:
    """Bytes that the loopback interface has sent since the machine started."""
    try:
        text = Path("/proc/net/dev").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None
