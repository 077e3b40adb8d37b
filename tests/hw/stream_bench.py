"""A bench for blocks with streams in Amaranth's simulator: sources, sinks, recorders that keep the streams' rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from amaranth.hdl import ClockDomain, Module, Value
from amaranth.lib import data
from amaranth.sim import Simulator

from neuron_fabric.hw.framing import ENDPOINT, LANES, endpoint_fields
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.wire import HEADER_BYTES, Flags, FrameType, Header

from .bench import Ready, pack, tick_until

LINE = 64


def frames_of(beats: Iterable[int]) -> list[bytes]:
    """Whole frames of beats of tdata, tkeep (all ones) and tlast."""
    frames, frame = [], b""
    for beat in beats:
        assert beat >> LANES & (1 << LINE) - 1 == (1 << LINE) - 1, "tkeep"
        frame += (beat & (1 << LANES) - 1).to_bytes(LINE, "little")
        if beat >> LANES + LINE:
            frames.append(frame)
            frame = b""
    assert frame == b""
    return frames


def never(_cycle: int) -> bool:
    return False


@dataclass
class Port:
    """What a port did: transfers with their cycles, and the longest wait."""

    cycles: list[int] = field(default_factory=list)
    beats: list[int] = field(default_factory=list)
    valid_since: list[int] = field(default_factory=list)
    held: int = 0


class Bench:
    """A clock, and on every stream a source or a sink with a recorder that keeps the stream's rules."""

    IDLE = 40

    def __init__(self, dut: Any) -> None:
        m = Module()
        m.domains.sync = domain = ClockDomain()
        m.submodules.dut = dut
        self.reset = domain.rst
        self.sim = Simulator(m)
        self.sim.add_clock(1e-6)
        self.cycle = 0
        self.idle = 0

        async def count(ctx: Any) -> None:
            async for _ in ctx.tick():
                self.cycle += 1
                self.idle += 1

        self.sim.add_testbench(count, background=True)

    def watch(self, valid: Any, ready: Any, payload: Any, flush: Any = 0) -> Port:
        """Record a stream; valid must hold with its payload until it is taken, or a reset or ``flush`` comes."""
        port = Port()

        async def record(ctx: Any) -> None:
            waiting: int | None = None
            since = held = cycle = 0
            signals = (valid, ready, payload, Value.cast(flush))
            async for _clk, rst, now_valid, now_ready, beat, flushed in ctx.tick().sample(*signals):
                if rst:
                    waiting = None
                else:
                    if waiting is not None:
                        assert now_valid, "valid was taken back"
                        assert beat == waiting, "the payload changed while it waited"
                    elif now_valid:
                        since = cycle
                    held = held + 1 if now_valid and not now_ready else 0
                    port.held = max(port.held, held)
                    waiting = beat if now_valid and not now_ready and not flushed else None
                    if now_valid:
                        self.idle = 0
                    if now_valid and now_ready:
                        port.cycles.append(cycle)
                        port.beats.append(beat)
                        port.valid_since.append(since)
                cycle += 1

        self.sim.add_testbench(record, background=True)
        return port

    def sink(self, port: Any, ready: Ready) -> None:
        async def drive(ctx: Any) -> None:
            while True:
                ctx.set(port, ready(self.cycle))
                await ctx.tick()

        self.sim.add_testbench(drive, background=True)

    async def pulse_reset(self, ctx: Any, valid: Any) -> None:
        """Reset for one cycle, in which a beat is offered that must not count."""
        ctx.set(self.reset, 1)
        ctx.set(valid, 1)
        await ctx.tick()
        ctx.set(self.reset, 0)
        ctx.set(valid, 0)

    def run(self, main: Callable[[Any], Any]) -> None:
        """Run until ``main`` is through and nothing has moved for a while."""

        async def driver(ctx: Any) -> None:
            await main(ctx)
            self.idle = 0
            while self.idle < self.IDLE:
                await ctx.tick()

        self.sim.add_testbench(driver)
        self.sim.run()


def set_endpoint(ctx: Any, signal: Any, endpoint: Endpoint) -> None:
    for name, value in endpoint_fields(endpoint).items():
        ctx.set(signal[name], value)


def endpoint(rng: random.Random) -> Endpoint:
    return Endpoint(rng.getrandbits(48), rng.getrandbits(32), rng.getrandbits(16))


def datagram_beats(layout: data.StructLayout, source: Endpoint, payload: bytes, noise: int = 0) -> list[int]:
    """A UDP payload as the receiver gives it; ``noise`` is what stands in the line of the header's beat."""
    at = {name: layout[name].offset for name, _field in layout}
    body = payload[HEADER_BYTES:]
    lines = [body[k : k + LINE] for k in range(0, len(body), LINE)]
    common = (
        int.from_bytes(payload[:HEADER_BYTES], "little") << at["header"]
        | pack(ENDPOINT, endpoint_fields(source)) << at["source"]
        | len(payload) << at["length"]
        | len(lines) << at["lines"]
    )
    beats = [common | 1 << at["first"] | noise << at["data"]]
    beats += [common | int.from_bytes(line, "little") << at["data"] for line in lines]
    beats[-1] |= 1 << at["last"]
    return beats


async def put_beats(ctx: Any, bench: Bench, port: Any, beats: Iterable[int], pause: Ready = never) -> None:
    """Send beats into a stream, with pauses as ``pause`` says."""
    for beat in beats:
        while pause(bench.cycle):
            await ctx.tick()
        ctx.set(Value.cast(port.payload), beat)
        ctx.set(port.valid, 1)
        await tick_until(ctx, port.ready, "ready")
        ctx.set(port.valid, 0)


def header_of(values: dict[str, int]) -> Header:
    """The protocol's header from the fields of :data:`HEADER`."""
    rest = {name: values[name] for name in values if name not in ("version_type", "flags")}
    return Header(FrameType(values["version_type"] & 0xF), **rest, flags=Flags(values["flags"]))
