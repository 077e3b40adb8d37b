"""What the hook costs in memory: ``neuron-fabric bench memory``.

Every configuration trains for a few steps in fresh processes, several times. Beside the greatest resident memory of a
rank over that of plain DDP stand the bytes that the hook declares (``state.declared_bytes()``); it should take no more.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
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
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.hook import NeuronFabricState, attach
from neuron_fabric.runtime.launch import launch, process_group
from neuron_fabric.runtime.machine import machine
from neuron_fabric.runtime.plan import ErrorFeedback, Plan, Region

__all__ = ["CASES", "Settings", "memory"]

_MIB = 1 << 20
_PLAIN = "plain DDP"


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark."""

    steps: int = 10
    hidden: int = 1536
    """Width of the perceptron; its four layers have the square of that."""
    batch: int = 8
    bucket_mb: float = 8.0
    seed: int = 1


def _plan(feedback: ErrorFeedback | None) -> Plan:
    return Plan((Region("body", ("*",), error_feedback=feedback),))


_FIRST_FP32 = Plan.low_bit(keep_fp32=["0.*"])
CASES: dict[str, Callable[[DistributedDataParallel], NeuronFabricState | None]] = {
    _PLAIN: lambda ddp: None,
    "FP32 plan": lambda ddp: attach(ddp, Plan()),
    "low-bit, allgather": lambda ddp: attach(ddp, _plan(None), "allgather"),
    "low-bit, collective": lambda ddp: attach(ddp, _plan(None), "collective"),
    "first layer FP32": lambda ddp: attach(ddp, _FIRST_FP32, "allgather"),
    "error feedback, allgather": lambda ddp: attach(ddp, _plan(ErrorFeedback(1.0)), "allgather"),
    "error feedback, collective": lambda ddp: attach(ddp, _plan(ErrorFeedback(1.0)), "collective"),
}
"""The rows, and how each attaches to its DDP model."""


def memory(
    ranks: Annotated[int, typer.Option(min=1, help="Local ranks, over gloo.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes for each row.")] = 3,
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each.")] = Settings.steps,
    hidden: Annotated[int, typer.Option(min=8, help="Width of the perceptron.")] = Settings.hidden,
    case: Annotated[list[str] | None, typer.Option(help="Only this row, beside plain DDP; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model and the data.")] = Settings.seed,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/bench/memory.json"),
) -> None:
    """Peak memory of a training process with the hook over plain DDP's, beside what the hook declares."""
    unknown = sorted(set(case or []) - set(CASES))
    if unknown:
        raise typer.BadParameter(f"no row {unknown[0]!r}: there are {', '.join(CASES)}", param_hint="--case")
    settings = Settings(steps=steps, hidden=hidden, seed=seed)
    cases = [_PLAIN, *(name for name in case or CASES if name != _PLAIN)]
    # glibc keeps blocks of up to 32 MiB that were freed when and as it likes, which scatters peaks by several of them.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
    console = Console()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        for repeat in range(repeats):
            for name in cases:
                with console.status(f"{name}, {repeat + 1} of {repeats}"):
                    task = {"settings": asdict(settings), "case": name, "answer": str(answer)}
                    status = launch(__name__, [json.dumps(task)], ranks)
                if status:
                    raise typer.Exit(status)
                found[name].append(json.loads(answer.read_text()))
    rows = [_row(name, found[name], found[_PLAIN]) for name in cases]
    facts = machine()
    console.print(_table(rows, f"peak memory of {steps} steps on {ranks} ranks, MiB, over {repeats} processes"))
    report = {"benchmark": "memory", "machine": facts, "ranks": ranks, "settings": asdict(settings), "rows": rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{facts['cpu']}: written to {output}")


def _row(name: str, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Peaks of all processes, and by how much each exceeds plain DDP's median."""
    peaks = [each["peak"] for each in found]
    yardstick = sorted(each["peak"] for each in plain)[len(plain) // 2]
    return {
        "case": name,
        "peaks": peaks,
        "over_plain": sorted(peak - yardstick for peak in peaks),
        "declared": found[0]["declared"],
    }


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for column in ("peak", "over plain DDP", "declared", "of that"):
        table.add_column(column, justify="left" if column == "of that" else "right")
    for row in rows:
        low, high = row["over_plain"][0] / _MIB, row["over_plain"][-1] / _MIB
        parts = {part: size for part, size in row["declared"].items() if size}
        table.add_row(
            row["case"],
            f"{sorted(row['peaks'])[len(row['peaks']) // 2] / _MIB:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{sum(parts.values()) / _MIB:.1f}",
            ", ".join(f"{part} {size / _MIB:.1f}" for part, size in parts.items()),
        )
    return table


# ---- in a fresh process ----------------------------------------------------------------------------------------------


def _train(case: str, hidden: int, steps: int, settings: Settings) -> dict[str, int]:
    """Train a perceptron; what the hook declares at the end, by part."""
    torch.manual_seed(settings.seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(hidden, hidden), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=settings.bucket_mb)
    state = CASES[case](ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-4, momentum=0.9)
    generator = torch.Generator().manual_seed(settings.seed + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(settings.batch, hidden, generator=generator)
        optimizer.zero_grad()
        (ddp(x) - x).square().mean().backward()
        optimizer.step()
    if state is None:
        return {}
    declared = state.declared_bytes()
    state.close()
    return declared


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"/proc/self/status has no {field}: the benchmark of memory needs Linux")


def _give_back_free_memory() -> None:
    """So that what is measured begins at what is really in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _rank_main(argv: Sequence[str]) -> None:
    """What each rank runs."""
    task = json.loads(argv[0])
    settings, case = Settings(**task["settings"]), task["case"]
    with process_group():
        _train(case, 64, 3, settings)  # loads code and starts threads, which are no buffers
        _give_back_free_memory()
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        declared = _train(case, settings.hidden, settings.steps, settings)
        peak = torch.tensor([_status_bytes("VmHWM") - before])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            Path(task["answer"]).write_text(json.dumps({"peak": int(peak), "declared": declared}))


if __name__ == "__main__":
    _rank_main(sys.argv[1:])
