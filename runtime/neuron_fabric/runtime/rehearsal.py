"""Simulated training signals, and what the health detectors make of them.

``python -m neuron_fabric.runtime.rehearsal`` prints false alarms and detection delays.
Votes follow the beta-binomial model of :func:`neuron_fabric.runtime.health.unanimity`, whose one parameter, the
correlation of two workers' votes, fits what was measured on four workers: healthy training (unanimous 0.17, tie 0.33,
margin 0.42) at 1/17 and a sign-biased collapse (0.71, 0.10, 0.81) at 0.68.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from neuron_fabric.runtime.health import Alarm, HealthMonitor, HealthPolicy, StepSignals, coin_votes, unanimity
from neuron_fabric.runtime.reasons import Reason

__all__ = [
    "COLLAPSED",
    "HEALTHY",
    "Training",
    "alarms",
    "delays",
    "false_alarms",
    "main",
    "simulate",
    "vote_distribution",
]

F64 = npt.NDArray[np.float64]

HEALTHY, COLLAPSED = 1 / 17, 0.68
"""Correlation of two workers' votes in healthy training and in a sign-biased collapse, as measured."""


@dataclass(frozen=True)
class Training:
    """A simulated run.

    Parameters
    ----------
    steps, world : int
    region_elements : sequence of int
        Elements of each region; regions are called ``r0``, ``r1``, ...
    loss_noise : float
        Standard deviation of the logarithm of one batch's loss, in nats.
    persistence : float
        Correlation of that noise, and of the votes', from one step to the next. Batches drawn at random have next to
        none (-0.06 to 0.05 on the digits); the default is on the safe side.
    drops : int
        Drops of the learning rate by 10, evenly spread; each takes the loss down to 0.7 within some 15 steps.
    loss_onset, loss_steps, loss_factor
        From this step the loss is multiplied by the factor over so many steps, and stays there.
    vote_onset, vote_steps
        From this step the votes of all regions move to a collapse over so many steps, and stay there.
    """

    steps: int = 2000
    world: int = 4
    region_elements: Sequence[int] = (200_000, 20_000, 2_000)
    loss_noise: float = 0.1
    persistence: float = 0.2
    drops: int = 3
    loss_onset: int | None = None
    loss_steps: int = 50
    loss_factor: float = 2.0
    vote_onset: int | None = None
    vote_steps: int = 1


def vote_distribution(world: int, correlation: F64) -> F64:
    """P(c positive votes), shape (..., world + 1), of the beta-binomial model."""
    if world < 1:
        raise ValueError(f"world must be at least 1, but is {world}")
    a = (1 / np.asarray(correlation, np.float64)[..., None] - 1) / 2
    counts = np.arange(world + 1)
    # Rising factorials a (a + 1) ... of length c and N - c, over 2a (2a + 1) ... of length N.
    rising = np.cumprod(np.concatenate([np.ones_like(a), a + np.arange(world)], -1), -1)
    total = np.prod(2 * a + np.arange(world), -1, keepdims=True)
    ways = np.array([math.comb(world, c) for c in counts], np.float64)
    p: F64 = ways * rising * rising[..., ::-1] / total
    return p


def simulate(training: Training, seed: int) -> Iterator[StepSignals]:
    """The signals of one run, step by step; the same for the same seed.

    The loss falls by a power law and at drops of the learning rate; its noise is autocorrelated, with heavy tails
    (Student's t with 4 degrees of freedom) and a batch in 500 that is far off. Votes: each region has a correlation of
    its own that falls over the run, wanders and scatters; its shares are those of a finite number of elements.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(training.steps)
    log_loss = _loss_curve(training, t) + _loss_noise(training, rng)
    log_loss += np.log(training.loss_factor) * _ramp(t, training.loss_onset, training.loss_steps)
    collapse = _ramp(t, training.vote_onset, training.vote_steps)
    world = training.world
    sums = np.abs(2 * np.arange(world + 1) - world)
    columns = []
    for elements in training.region_elements:
        level = HEALTHY * rng.uniform(0.5, 1.6) * (1 + 1.5 * np.exp(-t / 150)) * 0.6 ** (t / training.steps)
        wander = np.exp(
            np.cumsum(0.004 * rng.standard_normal(t.size)) + _autocorrelated(rng, t.size, training.persistence, 0.12)
        )
        healthy = np.clip(level * wander, 1e-4, 0.4)
        correlation = healthy + (COLLAPSED - healthy) * collapse
        counts = rng.multinomial(elements, vote_distribution(world, correlation)) / elements
        columns.append((counts[:, sums == world].sum(1), counts[:, sums == 0].sum(1), counts @ (sums / world)))
    names = [f"r{index}" for index in range(len(columns))]
    for step in range(training.steps):
        unanimous, ties, margin = (
            {name: float(column[which][step]) for name, column in zip(names, columns, strict=True)}
            for which in range(3)
        )
        yield StepSignals(step, float(np.exp(log_loss[step])), unanimous, ties, margin)


def _loss_curve(training: Training, t: npt.NDArray[np.int64]) -> F64:
    """Logarithm of the expected loss: a power law, and a step down within some 15 steps at each drop."""
    curve: F64 = np.log(2.3) - 0.35 * np.log1p(t / 30)
    for drop in range(1, training.drops + 1):
        since = np.maximum(t - drop * training.steps // (training.drops + 1), 0)
        curve += np.log(0.7) * (1 - np.exp(-since / 15))
    return curve


def _loss_noise(training: Training, rng: np.random.Generator) -> F64:
    n, rho = training.steps, training.persistence
    heavy = rng.standard_t(4, n) / math.sqrt(2)  # of unit variance
    noise = training.loss_noise * _filter(heavy, rho)
    noise[rng.random(n) < 0.002] += 5 * training.loss_noise
    return noise


def _autocorrelated(rng: np.random.Generator, n: int, rho: float, deviation: float) -> F64:
    return deviation * _filter(rng.standard_normal(n), rho)


def _filter(white: F64, rho: float) -> F64:
    """First-order autoregression of the variance of its input."""
    out, previous, gain = np.empty_like(white), 0.0, math.sqrt(1 - rho * rho)
    for index, each in enumerate(white):
        previous = out[index] = rho * previous + (gain if index else 1.0) * each
    return out


def _ramp(t: npt.NDArray[np.int64], onset: int | None, steps: int) -> F64:
    """0 before ``onset``, then up to 1 over ``steps``."""
    if onset is None:
        return np.zeros(t.size)
    return np.clip((t - onset + 1) / steps, 0.0, 1.0)


def alarms(training: Training, seed: int, policy: HealthPolicy) -> list[Alarm]:
    """All alarms of one simulated run."""
    names = [f"r{index}" for index in range(len(training.region_elements))]
    monitor = HealthMonitor(policy, training.world, names)
    return [alarm for signals in simulate(training, seed) for alarm in monitor.observe(signals)]


def false_alarms(training: Training, seeds: Sequence[int], policy: HealthPolicy) -> list[Alarm]:
    """Alarms of runs in which nothing happens."""
    healthy = replace(training, loss_onset=None, vote_onset=None)
    return [alarm for seed in seeds for alarm in alarms(healthy, seed, policy)]


def delays(training: Training, seeds: Sequence[int], policy: HealthPolicy, reason: Reason) -> list[int | None]:
    """Per seed, steps from the onset to the first alarm of that reason, the first bad step being 0; None if none came.

    A false alarm before the onset does not count. ``ValueError`` if nothing happens in this training.
    """
    onsets = [onset for onset in (training.loss_onset, training.vote_onset) if onset is not None]
    if not onsets:
        raise ValueError("this training has no onset, so there is no delay to measure")
    begin = min(onsets)
    found = (
        next((a.step - begin for a in alarms(training, seed, policy) if a.reason is reason and a.step >= begin), None)
        for seed in seeds
    )
    return list(found)


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def rehearse(
    runs: Annotated[int, typer.Option(min=1, help="Healthy runs of 2,000 steps per row.")] = 20,
    seed: Annotated[int, typer.Option(help="The first seed.")] = int(os.environ.get("NEURON_FABRIC_SEED", "1")),
    threshold: Annotated[float, typer.Option(help="CUSUM threshold.")] = HealthPolicy.threshold,
) -> None:
    """Print closed forms, false alarms of healthy runs and detection delays."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    policy = HealthPolicy(threshold=threshold, release=min(HealthPolicy.release, threshold))
    seeds = range(seed, seed + runs)
    console.print(f"seeds {seed} to {seed + runs - 1}; {policy}", highlight=False)
    console.print(_closed_forms(policy))
    console.print(_false_alarm_table(seeds, policy))
    console.print(_delay_table(seeds[:10], policy))


def _closed_forms(policy: HealthPolicy) -> Table:
    table = Table(title="shares by number of workers", box=box.SIMPLE)
    for name in (
        "workers",
        "coin: unanimous",
        "tie",
        "margin",
        "healthy: unanimous",
        "collapsed",
        "bound",
        "quiet below",
    ):
        table.add_column(name, justify="right")
    for world in (2, 3, 4, 6, 8, 16, 32, 64):
        shares = [
            unanimity(world, r) for r in (HEALTHY, COLLAPSED, policy.correlation_bound, policy.correlation_release)
        ]
        table.add_row(str(world), *(f"{share:.3g}" for share in (*coin_votes(world), *shares)))
    return table


def _false_alarm_table(seeds: Sequence[int], policy: HealthPolicy) -> Table:
    table = Table(title="false alarms in healthy runs", box=box.SIMPLE)
    for name in (
        "workers",
        "loss noise",
        "its correlation",
        "steps",
        "alarms: loss",
        "unanimity",
        "95 % below, per 1,000",
    ):
        table.add_column(name, justify="right")
    cases = [Training(world=world) for world in (2, 3, 4, 8, 16, 64)]
    cases += [Training(persistence=persistence) for persistence in (0.0, 0.3, 0.5, 0.7)]
    cases += [Training(loss_noise=noise) for noise in (0.01, 0.5)]
    for case in cases:
        found = false_alarms(case, seeds, policy)
        steps = case.steps * len(seeds)
        table.add_row(
            str(case.world),
            f"{case.loss_noise:g}",
            f"{case.persistence:g}",
            f"{steps:,}",
            str(sum(alarm.reason is Reason.HEALTH_LOSS for alarm in found)),
            str(sum(alarm.reason is Reason.HEALTH_UNANIMITY for alarm in found)),
            f"{1000 * _poisson_bound(len(found)) / steps:.2f}",
        )
    return table


def _poisson_bound(count: int) -> float:
    """95 % upper bound of a Poisson mean of which ``count`` was seen."""
    low, high = 0.0, 10.0 + 3.0 * count
    for _ in range(60):
        mean = (low + high) / 2
        tail = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1))
        low, high = (mean, high) if tail > 0.05 else (low, mean)
    return high


def _delay_table(seeds: Sequence[int], policy: HealthPolicy) -> Table:
    table = Table(title="steps from onset to alarm, the first bad step being 0", box=box.SIMPLE)
    for name in ("what happens", "over steps", "workers", "found", "median", "most"):
        table.add_column(name, justify="left" if name == "what happens" else "right")
    votes = [
        ("votes collapse", Reason.HEALTH_UNANIMITY, Training(steps=1500, world=world, vote_onset=700, vote_steps=steps))
        for world in (2, 4, 8, 64)
        for steps in (1, 20, 100, 500)
    ]
    losses = [
        (
            f"loss times {factor:g}",
            Reason.HEALTH_LOSS,
            Training(steps=1500, drops=0, loss_onset=700, loss_steps=steps, loss_factor=factor),
        )
        for factor in (1.5, 2.0, 4.0)
        for steps in (1, 20, 50, 100, 200)
    ]
    for what, reason, training in votes + losses:
        every = delays(training, seeds, policy, reason)
        found = sorted(delay for delay in every if delay is not None)
        over = training.vote_steps if training.vote_onset is not None else training.loss_steps
        table.add_row(
            what,
            str(over),
            str(training.world),
            f"{len(found)} of {len(every)}",
            f"{statistics.median(found):g}" if found else "-",
            str(found[-1]) if found else "-",
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; ends by ``SystemExit``."""
    app(args=argv if argv is None else list(argv), prog_name="python -m neuron_fabric.runtime.rehearsal")


if __name__ == "__main__":
    main()
