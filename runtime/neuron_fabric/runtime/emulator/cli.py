"""``neuron-fabric emulate``: a reducer in software, behind the socket that hardware would have."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from neuron_fabric.runtime.emulator.controller import ControllerLimits
from neuron_fabric.runtime.emulator.datagrams import UdpAddress
from neuron_fabric.runtime.emulator.engine import engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan
from neuron_fabric.runtime.emulator.server import EmulatorServer

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def emulate(
    listen: Annotated[str, typer.Option(help="Address; port 0 takes any.", metavar="URL")] = "udp://127.0.0.1:20045",
    workers: Annotated[int, typer.Option(min=1, max=64, help="The most members of a job.")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Chunks in flight, of all jobs; a power of two.")] = 256,
    lines: Annotated[int, typer.Option(min=1, max=255, help="The most lines of a chunk, 64 bytes each.")] = 16,
    jobs: Annotated[int, typer.Option(min=1, max=255, help="Jobs that can be open at once.")] = 8,
    quota: Annotated[
        int | None, typer.Option(help="The most slots of one job; a power of two.", show_default="slots / jobs")
    ] = None,
    idle: Annotated[float, typer.Option(help="Seconds until a job that nobody uses is closed.")] = 300.0,
    fault: Annotated[
        str,
        typer.Option(
            help="Faults on purpose: loss=, duplicate=, reorder=, corrupt= (probabilities), delay= (seconds), crash= "
            "(frames).",
            metavar="NAME=VALUE,...",
        ),
    ] = "",
    fault_seed: Annotated[int, typer.Option(min=0, help="Of the faults.")] = 1,
    metrics: Annotated[Path | None, typer.Option(help="A file for counters, in the text format of Prometheus.")] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Listen on an address that other machines can reach.")
    ] = False,
    offload: Annotated[bool, typer.Option(help="Use UDP_SEGMENT and UDP_GRO where the kernel has them.")] = True,
) -> None:
    try:
        server = EmulatorServer(
            UdpAddress.parse(listen),
            engine_params(workers=workers, slots=slots, lines=lines, jobs=jobs),
            limits=ControllerLimits(quota=quota, idle=idle),
            faults=FaultPlan.parse(fault),
            fault_seed=fault_seed,
            metrics=metrics,
            allow_remote=allow_remote,
            offload=offload,
        )
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"error: {error.strerror or error}, for {error.filename or listen}", err=True)
        raise typer.Exit(1) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.stop())
    helped = ", ".join(name for name, has in server.offload.items() if has) or "neither UDP_SEGMENT nor UDP_GRO"
    sizes = f"{workers} workers, {slots} slots, {lines} lines, {jobs} jobs, {server.engine.bytes / 2**20:.0f} MiB"
    wrong = f"; faults on purpose: {fault}, seed {fault_seed}" if fault else ""
    typer.echo(f"listening on {server.url}: {sizes}; {helped}{wrong}")
    server.serve()
    taken = server.engine.counters()
    typer.echo(f"stopped after {taken['frames']} frames, {taken['completed']} chunks, {taken['results']} results")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric emulate``; ends by ``SystemExit``."""
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric emulate")


if __name__ == "__main__":
    main()
