"""The table of tests that ``make sim`` ends with, on the terminal and as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neuron_fabric.model.params import ReducerParams

__all__ = ["PROPERTY", "Row", "render", "size_of", "write_json"]

PROPERTY = "neuron-fabric-row"
"""Under this name a test's report carries the fields of its rows, from whichever process it ran in."""


@dataclass(frozen=True)
class Row:
    """One run of a bench.

    Attributes
    ----------
    name : str
        Of the test.
    simulator : str
    parameters : str
        As :func:`size_of` writes them.
    seed : int, optional
    cycles : int, optional
        Clock cycles simulated; None if the bench did not get that far.
    seconds : float
        Of the whole test, building included.
    result : str
        ``passed`` or ``failed``.
    note : str
        What was measured, in words.
    figures : dict
        And by name.
    """

    name: str
    simulator: str
    parameters: str
    seed: int | None
    cycles: int | None
    seconds: float
    result: str
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)


def size_of(params: ReducerParams) -> str:
    """Lanes x lines, slots, workers, accumulator bits, planes, and jobs if several: ``64x4 S2 N5 A5 P3``."""
    return (
        f"{params.lanes}x{params.lines_per_chunk} S{params.slots} N{params.workers} A{params.acc_bits} "
        f"P{params.max_planes}{f' J{params.jobs}' if params.jobs > 1 else ''}"
    )


def render(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the rows, and a line of sums."""
    # A pipe has no width; 80 columns would break every row.
    console = console or Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "150")))
    table = Table(title="RTL simulation", title_justify="left", show_footer=True, pad_edge=False)
    failed = sum(row.result != "passed" for row in rows)
    table.add_column("test", f"{len(rows)} tests", overflow="fold")
    table.add_column("simulator")
    table.add_column("parameters")
    table.add_column("seed", justify="right")
    table.add_column("cycles", f"{sum(row.cycles or 0 for row in rows):,}", justify="right")
    table.add_column("seconds", f"{sum(row.seconds for row in rows):.1f}", justify="right")
    table.add_column("result", f"{failed} failed" if failed else "all passed")
    table.add_column("note", overflow="fold")
    for row in rows:
        good = row.result == "passed"
        table.add_row(
            escape(row.name),
            row.simulator,
            row.parameters,
            "" if row.seed is None else str(row.seed),
            "" if row.cycles is None else f"{row.cycles:,}",
            f"{row.seconds:.1f}",
            f"[{'green' if good else 'bold red'}]{row.result}[/]",
            escape(row.note),
        )
    console.print(table)


def write_json(rows: Sequence[Row], path: Path) -> None:
    """The same for machines: a list of objects with the fields of :class:`Row`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
