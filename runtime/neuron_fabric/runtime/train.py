"""The main job: train the digits workload under every policy and show what each costs and gives.

``neuron-fabric train`` starts this module under torchrun with local ranks over gloo on the loopback interface.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from neuron_fabric.runtime.hook import attach
from neuron_fabric.runtime.launch import launch, launched, process_group
from neuron_fabric.runtime.loop import Run, train_run
from neuron_fabric.runtime.policies import Policy, policies
from neuron_fabric.runtime.report import Progress, write_report
from neuron_fabric.runtime.transports import TRANSPORTS, check_name
from neuron_fabric.runtime.workloads.digits import HEAD_PATTERNS, Digits, DigitsWorkload

__all__ = ["RunResult", "Settings", "main", "run_policy"]


@dataclass(frozen=True)
class Settings:
    """What is the same for all runs of a comparison."""

    epochs: int = 6
    batch: int = 8
    """Images per rank and step."""
    width: int = 16
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    transport: str = "golden"
    seeds: int = 3
    seed: int = 1
    policies: tuple[str, ...] = ()
    """Keys of the policies to run; empty for all."""


@dataclass
class RunResult:
    """One policy with one seed, as rank 0 saw it."""

    policy: str
    label: str
    seed: int
    world: int
    transport: str
    accuracy: list[float] = field(default_factory=list)
    """Test accuracy after each epoch, per cent."""
    loss: list[float] = field(default_factory=list)
    """Training loss of each step, mean over ranks."""
    step_seconds: float = 0.0
    """Median time of a step."""
    bits_up: float = 32.0
    """Payload bits per gradient element from a worker to the endpoint."""
    bits_down: float = 32.0
    envelope_bits: float = 0.0
    """Header and envelope bits per element, each way, not in the above."""
    sent_bytes: float = 0.0
    """Payload bytes per step that a rank puts on the wire, by the collectives' algorithms."""
    ring_bytes: float = 0.0
    """The same for a ring all-reduce of everything in FP32."""
    loopback_bytes: float | None = None
    """Bytes per step and rank that crossed the loopback interface, headers and everything; None if unknown."""
    fallbacks: dict[str, int] = field(default_factory=dict)


def run_policy(
    policy: Policy, seed: int, settings: Settings, data: Digits, report: Callable[[RunResult, int, int], None]
) -> RunResult:
    """Train once. All ranks of the default process group must call it; ``report`` is told after every epoch."""
    world = dist.get_world_size()
    result = RunResult(policy.key, policy.label, seed, world, settings.transport)

    def told(run: Run, epoch: int, epochs: int) -> None:
        result.accuracy = list(run.scores)
        report(result, epoch, epochs)

    workload = DigitsWorkload(
        width=settings.width,
        batch=settings.batch,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        data=data,
    )
    run = train_run(workload, seed, lambda ddp: attach(ddp, policy.plan, settings.transport), on_epoch=told)
    traffic = run.traffic
    result.loss = run.losses
    result.step_seconds = run.step_seconds
    result.bits_up = traffic["up_bits"] / traffic["elements"]
    result.bits_down = traffic["down_bits"] / traffic["elements"]
    result.envelope_bits = traffic["envelope_bits"] / traffic["elements"]
    result.sent_bytes = traffic["sent_bytes"] / traffic["steps"]
    result.ring_bytes = traffic["ring_bytes"] / traffic["steps"]
    result.loopback_bytes = run.loopback_bytes
    result.fallbacks = run.fallbacks
    return result


def compare(settings: Settings, out: Path) -> list[RunResult]:
    """Every policy with every seed, in one process group; rank 0 writes the report to ``out``."""
    chosen = [p for p in policies(HEAD_PATTERNS) if not settings.policies or p.key in settings.policies]
    data = Digits.load()
    results: list[RunResult] = []
    with Progress(len(chosen) * settings.seeds, quiet=dist.get_rank() != 0) as progress:
        for seed in range(settings.seed, settings.seed + settings.seeds):
            for policy in chosen:
                results.append(run_policy(policy, seed, settings, data, progress.epoch))
                progress.done(results[-1])
    if dist.get_rank() == 0:
        write_report(results, asdict(settings), out)
    return results


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = Settings()
    keys = [policy.key for policy in policies(HEAD_PATTERNS)]
    parser = argparse.ArgumentParser(prog="neuron-fabric train", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="local ranks to start (default: 4)")
    parser.add_argument(
        "--transport",
        default=defaults.transport,
        help=f"auto, {', '.join(TRANSPORTS)}, or the URL of a reducer as udp://127.0.0.1:20045",
    )
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch", type=int, default=defaults.batch, help="images per rank and step")
    parser.add_argument("--width", type=int, default=defaults.width, help="channels of the first stage")
    parser.add_argument("--lr", type=float, default=defaults.learning_rate)
    parser.add_argument("--seeds", type=int, default=defaults.seeds, help="seeds per policy")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="the first seed")
    parser.add_argument("--policy", action="append", choices=keys, default=[], help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("build/train"))
    options = parser.parse_args(argv)
    for name in ("ranks", "epochs", "batch", "width", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    try:
        check_name(options.transport)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``neuron-fabric train``; the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _arguments(argv)
    if not launched():
        return launch("neuron_fabric.runtime.train", argv, options.ranks)
    settings = Settings(
        epochs=options.epochs,
        batch=options.batch,
        width=options.width,
        learning_rate=options.lr,
        transport=options.transport,
        seeds=options.seeds,
        seed=options.seed,
        policies=tuple(options.policy),
    )
    with process_group():
        compare(settings, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
