"""The command ``neuron-fabric profile``: look at profiles, check them, tell their hashes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from neuron_fabric.runtime.binding import BindingError, check_world
from neuron_fabric.runtime.profile import (
    Profile,
    ProfileError,
    RegionSpec,
    dumps,
    key_table,
    load,
)

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
_File = Annotated[Path, typer.Argument(help="A profile; JSON if it ends in .json, else YAML.", show_default=False)]


@app.command()
def show(
    file: _File,
    full: Annotated[bool, typer.Option("--full", help="The canonical text, with all defaults and the hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Say what a profile says."""
    profile = _load(file)
    if full or as_json:
        typer.echo(dumps(profile, "json" if as_json else "yaml"), nl=False)
        return
    console = Console(highlight=False)
    model, phases, target = profile.model, profile.phases, profile.target
    facts = {
        "name": profile.name,
        "hash": profile.hash,
        "model": "any" if model is None else f"{len(model.parameters)} parameter names, {model.digest}",
        "workers": str(profile.world),
        "phases": f"FP32 for {phases.warmup_steps} steps, then low-bit in {_windows(profile)} steps",
        "target": f"{target.metric} within {target.tolerance_points:g} points of {target.reference}, "
        f"{target.paired_seeds} paired seeds",
        "workload": profile.provenance.workload or "not said",
    }
    for key, value in facts.items():
        console.print(f"{key:<10}{value}", markup=False, soft_wrap=True)
    table = Table("region", "parameters", "encoding", "result", "error feedback", "sensitivity")
    for region in profile.regions:
        table.add_row(region.name, _selected(region), *_encoded(region), str(region.sensitivity))
    table.add_row("(the rest)", "", "fp32", "", "", "")
    console.print(table, markup=False)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Profiles.", show_default=False)],
    world: Annotated[int | None, typer.Option(help="Also check that they hold for so many workers.")] = None,
) -> None:
    """Say of each file whether it is a profile that can be used; status 1 if one is not."""
    wrong = False
    for file in files:
        try:
            profile = load(file)
            if world is not None:
                check_world(profile, world)
        except (ProfileError, BindingError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            wrong = True
        else:
            typer.echo(f"{file}: good, {profile.name}, {profile.hash}")
    if wrong:
        raise typer.Exit(1)


@app.command("hash")
def hash_(file: _File) -> None:
    """Print the hash of a profile's content, as its line in the file would be."""
    typer.echo(f"hash: {_load(file).hash}")


@app.command()
def keys() -> None:
    """Print all keys of the schema with defaults and meaning, as Markdown."""
    typer.echo(key_table(), nl=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric profile``; ends by ``SystemExit``."""
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric profile")


def _load(file: Path) -> Profile:
    try:
        return load(file)
    except (ProfileError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _windows(profile: Profile) -> str:
    windows = profile.phases.windows
    if windows is None:
        return "all"
    return ", ".join(f"{begin} to {'the end' if end is None else end}" for begin, end in windows) or "no"


def _selected(region: RegionSpec) -> str:
    parts = [", ".join(region.patterns)]
    if region.module_types:
        parts.append("of " + ", ".join(region.module_types))
    if region.max_ndim is not None:
        parts.append(f"up to {region.max_ndim}-D")
    return " ".join(parts)


def _encoded(region: RegionSpec) -> tuple[str, str, str]:
    if region.encoding == "fp32":
        return "fp32", "", ""
    encoding = region.encoding if region.gate is None else f"{region.encoding}, gate {region.gate:g}"
    result = region.result_format + (f", margin {region.margin}" if region.margin else "")
    feedback = region.error_feedback
    kept = "none" if feedback is None else f"clip {json.dumps(feedback.clip)}, decay {feedback.decay:g}"
    return encoding, result, kept


if __name__ == "__main__":
    main()
