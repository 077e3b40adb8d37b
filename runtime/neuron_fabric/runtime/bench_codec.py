"""The codec's kernels against copying the same buffer: ``neuron-fabric bench codec``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from neuron_fabric.model.encoding import TERNARY
from neuron_fabric.runtime.codec import BACKENDS, codec_backend, count_table, words_for
from neuron_fabric.runtime.machine import machine

__all__ = ["codec", "measure_codec"]

MEBI = 1 << 20
WORLD = 4
YARDSTICK = "memcpy"


def codec(
    elements: Annotated[list[int] | None, typer.Option(help="Elements of a buffer; repeatable.")] = None,
    repetitions: Annotated[int, typer.Option(min=3, help="Timed rounds; all cases take turns in each.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the data and of the order in a round.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/bench/codec.json"),
) -> None:
    """The codec's kernels on one thread, as ratios to copying the same FP32 buffer; GB/s are of that buffer."""
    console = Console()
    sizes = elements or [16 * MEBI, MEBI]
    report: dict[str, Any] = {"benchmark": "codec", "machine": machine(), "seed": seed, "world": WORLD, "sizes": {}}
    report["repetitions"] = repetitions
    for size in sizes:
        report["sizes"][str(size)] = rows = measure_codec(size, repetitions, seed)
        console.print(_table(size, rows))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{report['machine']['cpu']}: written to {output}")


def measure_codec(elements: int, repetitions: int, seed: int) -> list[dict[str, Any]]:
    """Time every kernel of every back end on buffers of ``elements`` float32.

    In each of ``repetitions`` rounds all cases take turns in a random order, and each is divided by the copy of its own
    round, so that a machine that slows down for a while slows both. The clock is the thread's processor time: a kernel
    never waits, and time given to other processes is not its own. Returns one row per case: its name, back end, median
    seconds, and the ratio's median with its quartiles.
    """
    rng = np.random.default_rng(seed)
    cases = _codec_cases(elements, rng)
    # Small buffers are timed over several calls: a clock reading and a cold cache would be most of one.
    calls = max(1, 8 * MEBI // max(1, elements))
    for case in cases.values():
        case()  # touches all memory, compiles what is to be compiled
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    keys = list(cases)
    for _ in range(repetitions):
        for index in rng.permutation(len(keys)):
            key = keys[index]
            # The numpy back end is some 20 times slower; one call is enough to see that.
            count = calls if key[1] != "numpy" else 1
            case = cases[key]
            started = time.thread_time()
            for _ in range(count):
                case()
            seconds[key].append((time.thread_time() - started) / count)
    copy = np.array(seconds[YARDSTICK, ""])
    rows = []
    for (name, backend), times in seconds.items():
        ratios = np.array(times) / copy
        low, median, high = np.percentile(ratios, [25, 50, 75])
        row = {"case": name, "backend": backend, "seconds": float(np.median(times))}
        rows.append(row | {"ratio": float(median), "ratio_q1": float(low), "ratio_q3": float(high)})
    # The spread of a ratio to itself says nothing: the yardstick's row has that of its own times instead.
    rows[0] |= {f"ratio_q{q}": float(np.percentile(copy, 25 * q) / np.median(copy)) for q in (1, 3)}
    return rows


def _codec_cases(elements: int, rng: np.random.Generator) -> dict[tuple[str, str], Callable[[], object]]:
    """The timed calls, by case and back end; the yardstick comes first."""
    words = words_for(elements)
    gradient = rng.standard_normal(elements).astype(np.float32)
    residual = 0.1 * gradient[::-1].copy()
    kept, out, fused = residual.copy(), np.zeros_like(gradient), gradient.copy()
    votes = rng.integers(0, 2**64, (WORLD, words), np.uint64)
    depth = WORLD.bit_length()
    planes, encoded = np.zeros((depth, words), np.uint64), np.zeros(words, np.uint64)
    codec_backend("numpy").count_planes(votes, planes)
    own, tally = votes[0].copy(), planes.copy()
    scale, clip, decay = np.float32(0.8), np.float32(1), np.float32(0.5)
    table = count_table(WORLD, WORLD, scale, WORLD)
    kept_by = scale, clip, decay
    commit = (own, *kept_by)
    positive, gate = encoded.copy(), 0.7
    rows = votes, ~votes & rng.integers(0, 2**64, votes.shape, np.uint64)
    signed, signed_table = np.zeros((depth + 1, words), np.uint64), count_table(WORLD, WORLD, scale, WORLD, TERNARY)

    cases: dict[tuple[str, str], Callable[[], object]] = {(YARDSTICK, ""): partial(np.copyto, out, gradient)}
    for backend in reversed(BACKENDS):
        k = codec_backend(backend)
        named: dict[str, Callable[[], object]] = {
            "encode + L1": partial(k.encode_binary, gradient, 1, encoded),
            "encode + L1, residual": partial(k.encode_binary_residual, gradient, residual, 1, encoded),
            f"count {WORLD} rows": partial(k.count_planes, votes, planes),
            f"decode {WORLD} rows": partial(k.decode_rows, votes, table, out),
            f"decode {depth} planes": partial(k.decode_planes, tally, table, out),
            "commit": partial(k.commit_residual, gradient, kept, *commit),
            f"commit, decode {WORLD} rows": partial(k.commit_and_decode_rows, fused, kept, *commit, votes, table),
            f"commit, decode {depth} planes": partial(k.commit_and_decode_planes, fused, kept, *commit, tally, table),
            "ternary: encode + L1": partial(k.encode_ternary, gradient, gate, positive, encoded),
            f"ternary: count {WORLD} rows": partial(k.count_ternary, *rows, signed),
            f"ternary: decode {WORLD} rows": partial(k.decode_ternary_rows, *rows, signed_table, out),
            f"ternary: decode {depth + 1} planes": partial(k.decode_planes, signed, signed_table, out),
            "ternary: commit": partial(k.commit_ternary_residual, gradient, kept, own, votes[1], *kept_by),
        }
        cases |= {(name, backend): call for name, call in named.items()}
    return cases


def _table(elements: int, rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title=f"codec, {elements:,} elements ({elements * 4 / MEBI:g} MiB), one thread",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("case")
    table.add_column("kernels")
    for name in ("ms", "GB/s", "x memcpy", "quartiles"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["case"],
            row["backend"],
            f"{1e3 * row['seconds']:.3f}",
            f"{4e-9 * elements / row['seconds']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_q1']:.2f} - {row['ratio_q3']:.2f}",
        )
    return table
