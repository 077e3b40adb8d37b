"""What a reducer saves on a link: ``neuron-fabric bench link``.

One tensor, three ways to its average: FP32 all-reduce over gloo; votes over the collective transport; votes over the
UDP driver and the emulator. Votes are encoded, counted and decoded, as in a training step, and both ways to count them
must give the same bits. All take turns in a random order that is the same on all ranks; each round gives one ratio.

On a machine's own loopback interface a byte costs only processor time, of which FP32 needs little. So the same is
measured over links of a capped rate, between network namespaces, where they can be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from neuron_fabric.runtime.codec import codec_backend, count_table
from neuron_fabric.runtime.launch import process_group
from neuron_fabric.runtime.layout import BucketLayout, sections_of
from neuron_fabric.runtime.machine import machine
from neuron_fabric.runtime.namespaces import Hosts, NotPermittedError, capped_star, lone_loopback
from neuron_fabric.runtime.plan import Region
from neuron_fabric.runtime.transports import Exchange, Transport, make

__all__ = ["CASES", "FP32", "Network", "Settings", "link"]

FP32, COLLECTIVE, REDUCER = CASES = ("FP32", "collective", "driver, emulator")
"""The ways; ratios are to the first."""

_REDUCER_HOST = "reducer"
_START_LIMIT = 60.0
_RUN_LIMIT = 600.0
_STOP_LIMIT = 5.0


class Network(StrEnum):
    """Where to measure."""

    ALL = "all"
    LOOPBACK = "loopback"
    CAPPED = "capped"


@dataclass(frozen=True)
class Settings:
    """One run of the benchmark."""

    elements: int = 8 << 20
    bucket: int = 1 << 20
    """Elements of a bucket; all buckets of a tensor are under way at once, as in a backward pass."""
    rounds: int = 9
    slots: int = 64
    lines: int = 16
    seed: int = 1


def link(
    elements: Annotated[int, typer.Option(min=512, help="Elements of the tensor.")] = Settings.elements,
    bucket: Annotated[int, typer.Option(min=512, help="Elements of a bucket.")] = Settings.bucket,
    rounds: Annotated[int, typer.Option(min=1, help="In each of which all take a turn.")] = Settings.rounds,
    ranks: Annotated[int, typer.Option(min=2, max=32, help="Workers.")] = 2,
    network: Annotated[Network, typer.Option(help="Loopback interface, capped links, or both.")] = Network.ALL,
    rate: Annotated[int, typer.Option(min=1, help="Of a capped link, in Mb/s each way.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Chunks in flight; a power of two.")] = Settings.slots,
    lines: Annotated[int, typer.Option(min=1, max=22, help="Of a chunk: 22 fit an MTU of 1,500.")] = Settings.lines,
    seed: Annotated[int, typer.Option(help="Of the data and of the order in a round.")] = Settings.seed,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("build/bench/link.json"),
) -> None:
    """Votes over driver and emulator against FP32 all-reduce of the same tensor, on loopback and on capped links."""
    if slots & (slots - 1):
        raise typer.BadParameter(f"it must be a power of two, not {slots}", param_hint="--slots")
    settings = Settings(elements, bucket, rounds, slots, lines, seed)
    console = Console()
    # Compiled once here, and not by every process at the same time.
    codec_backend()
    with _ended_by_sigterm():
        networks = _networks(network, ranks, rate, settings, console)
    facts = machine()
    report = {"benchmark": "link", "machine": facts, "ranks": ranks, "rate_mbit": rate, "settings": asdict(settings)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report | {"networks": networks}, indent=2) + "\n")
    console.print(f"{facts['cpu']}, load {facts['load']}: written to {output}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that what was set up is taken down."""
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _networks(network: Network, ranks: int, rate: int, settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Measure on each network, and print its table; where one is not permitted, say why."""
    networks: list[dict[str, Any]] = []
    wanted = [Network.LOOPBACK, Network.CAPPED] if network is Network.ALL else [network]
    hosts = [*map(_rank_host, range(ranks)), _REDUCER_HOST]
    for each in wanted:
        name = "loopback" if each is Network.LOOPBACK else f"links of {rate} Mb/s"
        try:
            with contextlib.ExitStack() as stack:
                if each is Network.LOOPBACK:
                    found = stack.enter_context(_loopback(hosts, console))
                else:
                    found = stack.enter_context(capped_star(hosts, rate))
                rows = _measure(found, ranks, settings)
        except NotPermittedError as error:
            console.print(f"{name}: not measured: {error}", highlight=False, soft_wrap=True)
            networks.append({"network": name, "not_measured": str(error)})
            continue
        except _BrokenError as error:
            typer.echo(f"error: {name}: {error}", err=True)
            raise typer.Exit(1) from None
        console.print(
            _table(rows, f"{settings.elements:,} elements on {ranks} ranks, {settings.rounds} rounds, {name}")
        )
        networks.append({"network": name, "private": bool(found.namespaces), "rows": rows})
    return networks


@contextlib.contextmanager
def _loopback(hosts: Sequence[str], console: Console) -> Iterator[Hosts]:
    """A loopback interface of its own, else the machine's, whose counters count everybody's bytes."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(lone_loopback(hosts))
        except NotPermittedError as error:
            console.print(f"loopback: what others send counts, too: {error}", highlight=False, soft_wrap=True)
            found = Hosts(dict.fromkeys(hosts, "127.0.0.1"), "lo", {})
        yield found


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("way", no_wrap=True)
    for name in ("M/s", "x FP32", "quartiles", "Gb/s", "CPU of each", "resent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shares = [*row["cpu_ranks"], *([row["cpu_reducer"]] if row["case"] == REDUCER else [])]
        table.add_row(
            row["case"],
            f"{row['elements_per_s'] / 1e6:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}",
            f"{max(row['bits_per_s'].values()) / 1e9:.3f}",
            " ".join(f"{share:.2f}" for share in shares),
            f"{row['resent']:.1%}" if row["case"] == REDUCER else "",
        )
    return table


# ---- processes -------------------------------------------------------------------------------------------------------


class _BrokenError(RuntimeError):
    """A process ended as it should not."""


def _rank_host(rank: int) -> str:
    return f"rank{rank}"


def _measure(hosts: Hosts, ranks: int, settings: Settings) -> list[dict[str, Any]]:
    """Start the emulator and the ranks; what rank 0 found. No process of these is left afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neuron-fabric-link-")))
        emulator, url = _start_emulator(hosts, settings, folder, stack)
        answer, master = folder / "answer.json", _rank_host(0)
        task = {"settings": asdict(settings), "url": url, "emulator": emulator.pid, "interface": hosts.interface}
        # In a namespace every port is free, and another's would say nothing about it.
        port = 29500 if hosts.namespaces else _free_port()
        shared = {
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": hosts.addresses[master],
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": hosts.interface,
        }
        workers = []
        for rank in range(ranks):
            command = [sys.executable, "-m", __name__, json.dumps(task | {"answer": str(answer)})]
            environment = os.environ | shared | {"RANK": str(rank)}
            command = [*hosts.enter(_rank_host(rank)), *command]
            workers.append(_start(command, folder / f"{rank}.log", environment, stack))
        end = time.monotonic() + _RUN_LIMIT
        waiting = dict(enumerate(workers))
        while waiting:
            for rank, worker in list(waiting.items()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = worker.wait(0.1)
                    del waiting[rank]
                    if status:
                        raise _BrokenError(f"rank {rank} ended with {status}: {_last_words(folder / f'{rank}.log')}")
            if emulator.poll() is not None:
                raise _BrokenError(f"the emulator ended: {_last_words(folder / 'emulator.log')}")
            if time.monotonic() > end:
                raise _BrokenError(f"not done after {_RUN_LIMIT:g} s")
        rows: list[dict[str, Any]] = json.loads(answer.read_text())
        return rows


def _start(
    command: Sequence[str], log: Path, environment: dict[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _start_emulator(
    hosts: Hosts, settings: Settings, folder: Path, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], str]:
    """The process and its URL, with the options that the ranks shall ask for."""
    address, log = hosts.addresses[_REDUCER_HOST], folder / "emulator.log"
    sizes = ["--jobs", "1", "--slots", str(settings.slots), "--lines", str(settings.lines)]
    command = [sys.executable, "-m", "neuron_fabric.runtime.emulator.cli", "--listen", f"udp://{address}:0", *sizes]
    if not address.startswith("127."):
        command.append("--allow-remote")
    process = _start([*hosts.enter(_REDUCER_HOST), *command], log, dict(os.environ), stack)
    assert process.stdout is not None  # a pipe, as asked for
    ready, _, _ = select.select([process.stdout], [], [], _START_LIMIT)
    line = process.stdout.readline().decode() if ready else ""
    url = line.removeprefix("listening on ").partition(": ")[0]
    if not url.startswith("udp://"):
        raise _BrokenError(f"the emulator does not start: {_last_words(log) or f'silent for {_START_LIMIT:g} s'}")
    return process, f"{url}?slots={settings.slots}&lines={settings.lines}&timeout=60"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


# ---- in a rank -------------------------------------------------------------------------------------------------------


class _Votes:
    """One way to the average by votes: encode, count over a transport, decode."""

    def __init__(self, transport: Transport, gradient: torch.Tensor, settings: Settings) -> None:
        self.transport, self.gradient = transport, gradient.numpy()
        self.out = np.zeros_like(self.gradient)
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._own_group = dist.new_group(backend="gloo")
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("there is no process group")
        transport.attach(world, self._own_group)
        self._kernels = codec_backend()
        self._step = 0
        self._buckets: list[tuple[slice, Exchange]] = []
        region = Region("all")
        for index, start in enumerate(range(0, len(self.gradient), settings.bucket)):
            part = slice(start, min(start + settings.bucket, len(self.gradient)))
            numel = part.stop - part.start
            segments, sections = sections_of([("tensor", 0, numel, region)])
            layout = BucketLayout(numel, segments, (), sections, numel)
            words = np.zeros(layout.words, np.uint64)
            self._buckets.append((part, Exchange(index, 0, layout, [], words)))

    def prepare(self) -> None:
        """What is not timed: nothing."""

    def run(self) -> None:
        """Once; the decoded average is in ``out``."""
        futures = []
        for part, exchange in self._buckets:
            exchange.step = self._step
            segment = exchange.layout.segments[0]
            own = exchange.layout.sections[0].planes(exchange.own)[0, segment.words]
            l1, zeros = self._kernels.encode_binary(self.gradient[part], self._rank + self._step, own)
            exchange.entries = [(l1, segment.numel, zeros)]
            futures.append(self.transport.start(exchange))
        for (part, exchange), future in zip(self._buckets, futures, strict=True):
            future.wait()
            votes = self.transport.finish(exchange)
            segment = exchange.layout.segments[0]
            voters = int(votes.envelopes.voters[0])
            table = count_table(self._world, voters, votes.envelopes.scale(0), self._world)
            self._kernels.decode_planes(votes.sections[0].words[:, segment.words], table, self.out[part])
        if self.transport.may_fail:  # as the hook does once a step
            told = torch.tensor(self.transport.told())
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._own_group)
            reasons = self.transport.concluded(told.tolist())
            if reasons:
                raise RuntimeError(f"the reducer failed: {', '.join(reasons)}")
        self._step += 1

    def close(self) -> None:
        self.transport.close()


class _Fp32:
    """All-reduce of all buckets, under way at once."""

    def __init__(self, gradient: torch.Tensor, settings: Settings) -> None:
        self._gradient, self._out = gradient, gradient.clone()
        self._parts = torch.split(self._out, settings.bucket)

    def prepare(self) -> None:
        self._out.copy_(self._gradient)  # else its sums would grow

    def run(self) -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in self._parts]:
            work.wait()


class _Meter:
    """Clocks and counters: processor seconds of this process and the emulator, bytes on its and the reducer's link."""

    def __init__(self, interface: str, emulator: int) -> None:
        self._interface, self._emulator = interface, emulator
        self._clock = _processor_clock(emulator)

    def read(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Wall, processor, the emulator's processor; bytes sent and received here, and by the reducer's host."""
        here, there = (_bytes(which, self._interface) for which in ("self", str(self._emulator)))
        reducer = time.clock_gettime(self._clock)
        return np.array([time.perf_counter(), time.process_time(), reducer, *here, *there], np.float64)


def _processor_clock(process: int) -> int:
    """The clock of another process's processor time, user and system, of all its threads."""
    clock = ctypes.c_int()
    status = ctypes.CDLL(None).clock_getcpuclockid(process, ctypes.byref(clock))
    if status:
        raise OSError(status, os.strerror(status), f"processor time of process {process}")
    return clock.value


def _bytes(process: str, interface: str) -> tuple[int, int]:
    """Bytes that an interface has sent and received, in that process's network namespace.

    A packet that is handed over whole and cut later counts once with its headers.
    """
    for line in Path(f"/proc/{process}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            fields = values.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"process {process} has no network interface {interface!r}")


def _rounds(ways: dict[str, _Votes | _Fp32], meter: _Meter, settings: Settings) -> dict[str, list[Any]]:
    """What each way's turns took, as differences of :meth:`_Meter.read`."""
    order = np.random.default_rng(settings.seed)
    taken: dict[str, list[Any]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(settings.rounds):
        for number in order.permutation(len(names)):
            way = ways[names[number]]
            way.prepare()
            dist.barrier()
            begin = meter.read()
            way.run()
            taken[names[number]].append(meter.read() - begin)
    return taken


def _rows(taken: dict[str, list[Any]], resent: float, settings: Settings) -> list[dict[str, Any]]:
    """One row a way; the slowest rank's time counts. A collective of all ranks."""
    seconds, rows = {}, []
    for name, turns in taken.items():
        mine = torch.from_numpy(np.stack(turns))
        walls = mine[:, 0].clone()
        dist.all_reduce(walls, dist.ReduceOp.MAX)
        seconds[name] = walls.numpy()
        share = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        share[dist.get_rank()] = mine[:, 1].sum() / mine[:, 0].sum()
        dist.all_reduce(share)
        ratios = seconds[FP32] / seconds[name]
        low, median, high = np.percentile(ratios, [25, 50, 75])
        per_second = mine[:, 2:].sum(0) / mine[:, 0].sum()
        ways = ("rank_sends", "rank_receives", "reducer_sends", "reducer_receives")
        rows.append(
            {
                "case": name,
                "seconds": statistics.median(seconds[name]),
                "elements_per_s": settings.elements / statistics.median(seconds[name]),
                "ratio": median,
                "ratio_q1": low,
                "ratio_q3": high,
                "bits_per_s": dict(zip(ways, (8 * per_second[1:]).tolist(), strict=True)),
                "bytes_a_round": dict(zip(ways, mine[:, 3:].mean(0).tolist(), strict=True)),
                "cpu_ranks": share.tolist(),
                "cpu_reducer": float(per_second[0]),
                "resent": resent if name == REDUCER else 0.0,
                "all_seconds": seconds[name].tolist(),
            }
        )
    return rows


def _rank_main(argv: Sequence[str]) -> None:
    """What each rank runs."""
    task = json.loads(argv[0])
    settings = Settings(**task["settings"])
    with process_group():
        world, rank = dist.get_world_size(), dist.get_rank()
        gradient = torch.randn(settings.elements, generator=torch.Generator().manual_seed(settings.seed * world + rank))
        collective = _Votes(make("collective", world), gradient, settings)
        reducer = _Votes(make(task["url"], world), gradient, settings)
        ways: dict[str, _Votes | _Fp32] = {FP32: _Fp32(gradient, settings), COLLECTIVE: collective, REDUCER: reducer}
        try:
            for _ in range(2):  # connections, memory, the job; and the step's parity is the same for both
                for way in ways.values():
                    way.run()
            if not np.array_equal(collective.out, reducer.out):
                raise RuntimeError("driver and emulator have counted otherwise than the collective transport")
            reducer.transport.load()
            taken = _rounds(ways, _Meter(task["interface"], task["emulator"]), settings)
            rows = _rows(taken, reducer.transport.load().retransmission_share or 0.0, settings)
        finally:
            reducer.close()
        if rank == 0:
            Path(task["answer"]).write_text(json.dumps(rows))


if __name__ == "__main__":
    _rank_main(sys.argv[1:])
