"""Command line of the Verilog export: ``python -m neuron_fabric.hw.cli``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from neuron_fabric.hw.configurations import CONFIGURATIONS, check_sizes, configuration, suits
from neuron_fabric.hw.fusesoc import write_core
from neuron_fabric.hw.verilog import TOPS, export_all
from neuron_fabric.model.params import ReducerParams

__all__ = ["main", "verilog"]


def _size(text: str, name: str) -> object:
    return typer.Option(help=text, show_default=f"{getattr(ReducerParams, name)}, or as in --config")


def verilog(
    config: Annotated[str | None, typer.Option(help="Sizes by name; see --list-configs.")] = None,
    list_configs: Annotated[bool, typer.Option("--list-configs", help="Say which there are, and stop.")] = False,
    top: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(TOPS)}.", show_default="those of --config, or all that can have so many lanes"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the .v, .json and .core files.")] = Path("build/verilog"),
    lanes: Annotated[int | None, _size("Elements in one datapath beat.", "lanes")] = None,
    lines_per_chunk: Annotated[int | None, _size("K, the most lines of a chunk.", "lines_per_chunk")] = None,
    slots: Annotated[int | None, _size("Chunks in flight, of all jobs together.", "slots")] = None,
    workers: Annotated[int | None, _size("The most workers of a job.", "workers")] = None,
    acc_bits: Annotated[int | None, _size("Bits of one tally.", "acc_bits")] = None,
    max_planes: Annotated[int | None, _size("The most planes of an encoding.", "max_planes")] = None,
    jobs: Annotated[int | None, _size("Job banks: the most jobs at once.", "jobs")] = None,
) -> None:
    """Write the reducer as Verilog, with a JSON manifest and a FuseSoC core description beside each file."""
    if list_configs:
        _list()
        return
    sizes = {
        "lanes": lanes,
        "lines_per_chunk": lines_per_chunk,
        "slots": slots,
        "workers": workers,
        "acc_bits": acc_bits,
        "max_planes": max_planes,
        "jobs": jobs,
    }
    try:
        chosen = None if config is None else configuration(config)
        params = ReducerParams() if chosen is None else chosen.params
        params = replace(params, **{name: value for name, value in sizes.items() if value is not None})
        if top is not None:
            tops: tuple[str, ...] = (top,)
        elif chosen is not None:
            tops = chosen.tops
        else:
            tops = tuple(name for name in TOPS if suits(name, params))
        check_sizes(params, tops)
        for path in export_all(tops, params, out):
            core = write_core(path, params)
            size = path.stat().st_size // 1024
            typer.echo(f"{path} ({size} KiB), {path.with_suffix('.json').name} and {core.name}")
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _list() -> None:
    for one in CONFIGURATIONS.values():
        sizes = ", ".join(f"{name}={value}" for name, value in asdict(one.params).items())
        typer.echo(f"{one.name}: {one.doc}")
        typer.echo(f"  {sizes}")
        typer.echo(f"  tops {', '.join(one.tops)}; {one.clock_mhz:g} MHz; {one.device}")
        typer.echo(f"  {one.reason}")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric verilog``; ends by ``SystemExit``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(verilog)
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric verilog")


if __name__ == "__main__":
    main()
