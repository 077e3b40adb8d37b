"""Command line of the Verilog export: ``python -m neuron_fabric.hw.cli``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from neuron_fabric.hw.verilog import TOPS, export_all
from neuron_fabric.model.params import ReducerParams

__all__ = ["main", "verilog"]


def verilog(
    top: Annotated[str | None, typer.Option(help="core or axis; both if not given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the .v and .json files.")] = Path("build/verilog"),
    lanes: Annotated[int, typer.Option(help="Elements in one datapath beat.")] = ReducerParams.lanes,
    lines_per_chunk: Annotated[int, typer.Option(help="K, the most lines of a chunk.")] = ReducerParams.lines_per_chunk,
    slots: Annotated[int, typer.Option(help="S, chunks in flight.")] = ReducerParams.slots,
    workers: Annotated[int, typer.Option(help="The most workers of a job.")] = ReducerParams.workers,
    acc_bits: Annotated[int, typer.Option(help="Bits of one tally.")] = ReducerParams.acc_bits,
    max_planes: Annotated[int, typer.Option(help="The most planes of an encoding.")] = ReducerParams.max_planes,
) -> None:
    """Write the reducer as Verilog, with a JSON manifest beside each file."""
    try:
        params = ReducerParams(lanes, lines_per_chunk, slots, workers, acc_bits, max_planes)
        for path in export_all(TOPS if top is None else (top,), params, out):
            typer.echo(f"{path} ({path.stat().st_size // 1024} KiB) and {path.with_suffix('.json').name}")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric verilog``; ends by ``SystemExit``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(verilog)
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric verilog")


if __name__ == "__main__":
    main()
