"""Benchmarks of the runtime: ``neuron-fabric bench NAME``.

Every benchmark compares with a yardstick that is measured in the same run, prints a table and writes a JSON file, so
that figures of different machines and days can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from neuron_fabric.runtime.bench_codec import codec
from neuron_fabric.runtime.bench_hook import hook
from neuron_fabric.runtime.bench_link import link
from neuron_fabric.runtime.bench_memory import memory

__all__ = ["main"]

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)
for command in (codec, hook, link, memory):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric bench``; ends by ``SystemExit``."""
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric bench")


if __name__ == "__main__":
    main()
