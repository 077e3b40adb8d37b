"""The relay buffer: frames go to the group once or to each member in turn, unless it is full or the job closes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from amaranth.hdl import Value

from neuron_fabric.hw.framing import HEADER
from neuron_fabric.hw.ingress import relayed_layout
from neuron_fabric.hw.layout import config_layout
from neuron_fabric.hw.relay import RelayBuffer, relay_layout
from neuron_fabric.model import ReducerParams
from neuron_fabric.model.wire import HEADER_FIELDS

from .bench import Ready, always, pack, seeded, sometimes, unpack
from .stream_bench import LINE, Bench, never

PARAMS = ReducerParams(lines_per_chunk=3, slots=2, workers=5, jobs=3)
MEMBERS = (0b10011, 0b00100, 0b11111)

Emission = tuple[int, int, int, int, bytes]
"""Bank, worker (-1: the group), header, lines, data."""


@dataclass(frozen=True)
class Kept:
    bank: int
    header: int
    body: bytes

    @property
    def lines(self) -> int:
        return len(self.body) // LINE

    def emissions(self, group: bool, members: int) -> list[Emission]:
        workers = [-1] if group else [worker for worker in range(PARAMS.workers) if members >> worker & 1]
        return [(self.bank, worker, self.header, self.lines, self.body) for worker in workers]


def frame(rng: random.Random, lines: int | None = None, bank: int | None = None) -> Kept:
    lines = rng.randint(0, PARAMS.lines_per_chunk + 1) if lines is None else lines
    header = {field.name: rng.getrandbits(8 * field.size) for field in HEADER_FIELDS if field.name != "magic"}
    return Kept(rng.randrange(3) if bank is None else bank, pack(HEADER, header), rng.randbytes(LINE * lines))


class RelayBench:
    def __init__(self, frames: int = 4, group: bool = False) -> None:
        self.dut = dut = RelayBuffer(PARAMS, frames)
        self.group = group
        self.bench = Bench(dut)
        self.output = self.bench.watch(dut.relay.valid, dut.relay.ready, Value.cast(dut.relay.payload))
        self.dropped: list[int] = []
        self.begun: list[int] = []  # cycles of first beats
        self.ended: list[int] = []

        async def record(ctx: Any) -> None:
            cycle = 0
            signals = (dut.dropped, dut.relayed.valid, dut.relayed.first, dut.relayed.last)
            async for _clk, _rst, dropped, valid, first, last in ctx.tick().sample(*signals):
                if valid and first:
                    if dropped:
                        self.dropped.append(len(self.begun))
                    self.begun.append(cycle)
                else:
                    assert not dropped
                if valid and last:
                    self.ended.append(cycle)
                cycle += 1

        self.bench.sim.add_testbench(record, background=True)

    async def configure(self, ctx: Any, is_open: int = 0b111) -> None:
        ctx.set(self.dut.open, is_open)
        ctx.set(self.dut.group, self.group)
        for bank, members in enumerate(MEMBERS):
            ctx.set(
                self.dut.config[bank],
                config_layout(PARAMS).from_bits(members << config_layout(PARAMS)["members"].offset),
            )

    async def put(self, ctx: Any, kept: Kept, pause: Ready = never) -> None:
        layout = relayed_layout(PARAMS)
        port = Value.cast(self.dut.relayed)
        rest = random.Random(kept.header)
        for position in range(kept.lines + 1):
            while pause(self.bench.cycle):
                await ctx.tick()
            values = {"valid": 1, "first": int(position == 0), "last": int(position == kept.lines)}
            if position == 0:
                values |= {"header": kept.header, "bank": kept.bank, "lines": kept.lines, "data": rest.getrandbits(512)}
            else:
                line = kept.body[LINE * (position - 1) : LINE * position]
                values |= {"header": rest.getrandbits(100), "data": int.from_bytes(line, "little")}
            ctx.set(port, pack(layout, values))
            await ctx.tick()
            ctx.set(port, 0)

    def run(self, main: Callable[[Any], Any], ready: Ready = always) -> None:
        async def driver(ctx: Any) -> None:
            await self.configure(ctx)
            await main(ctx)

        self.bench.sink(self.dut.relay.ready, ready)
        self.bench.run(driver)

    def play(self, frames: Iterable[Kept], ready: Ready = always, pause: Ready = never) -> list[Emission]:
        """Send frames; those that were not dropped must come, in order."""
        frames = list(frames)

        async def main(ctx: Any) -> None:
            for kept in frames:
                await self.put(ctx, kept, pause)

        self.run(main, ready)
        wanted = [
            emission
            for index, kept in enumerate(frames)
            if index not in self.dropped
            for emission in kept.emissions(self.group, MEMBERS[kept.bank])
        ]
        came = self.emissions()
        assert came == wanted
        return came

    def emissions(self) -> list[Emission]:
        rest = iter(unpack(relay_layout(PARAMS), beat) for beat in self.output.beats)
        came = []
        for head in rest:
            assert head["first"]
            body, beat = b"", head
            while not beat["last"]:
                beat = next(rest)
                assert not beat["first"]
                for name in ("header", "bank", "worker", "group"):
                    assert beat[name] == head[name], name
                body += beat["data"].to_bytes(LINE, "little")
            worker = -1 if head["group"] else head["worker"]
            came.append((head["bank"], worker, head["header"], len(body) // LINE, body))
        return came


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("ready", "pause"), [(1.0, 0.9), (0.7, 0.3), (0.3, 0.0)])
def test_random_frames(group: bool, ready: float, pause: float) -> None:
    with seeded(group, ready, pause) as rng:
        bench = RelayBench(group=group)
        bench.play([frame(rng) for _ in range(150)], sometimes(rng, ready), sometimes(rng, pause))
        assert bool(bench.dropped) == (pause < 0.5), bench.dropped


@pytest.mark.parametrize("places", [2, 8])
def test_as_many_as_there_are_places(places: int) -> None:
    with seeded(places) as rng:
        bench = RelayBench(places)
        bench.play([frame(rng, 4) for _ in range(places + 5)], ready=lambda cycle: cycle > 200)
        assert bench.dropped == list(range(places, places + 5))
        assert bench.output.valid_since[0] < 20, "valid waited for ready"


def test_the_group_keeps_up_with_the_input() -> None:
    """Whole frames back to back, of any length: none is dropped, and they leave back to back."""
    with seeded() as rng:
        bench = RelayBench(group=True)
        frames = [frame(rng, 4) for _ in range(40)]
        bench.play(frames)
        assert bench.dropped == []
        cycles = bench.output.cycles
        assert cycles == list(range(cycles[0], cycles[0] + 5 * 40))
        assert cycles[0] == bench.ended[0] + 3


def test_members_in_turn_without_a_pause() -> None:
    with seeded() as rng:
        bench = RelayBench()
        bench.play(
            [frame(rng, 2, bank=2), frame(rng, 0, bank=0), frame(rng, 3, bank=1)], ready=lambda cycle: cycle > 60
        )
        cycles = bench.output.cycles
        assert cycles == list(range(cycles[0], cycles[0] + 5 * 3 + 3 * 1 + 1 * 4))


@pytest.mark.parametrize("moment", range(0, 40, 3))
@pytest.mark.parametrize("group", [False, True])
def test_frames_of_a_closed_job_are_forgotten(moment: int, group: bool) -> None:
    """But for the one that is being sent; other jobs' frames are not touched."""
    with seeded(moment, group) as rng:
        bench = RelayBench(8, group=group)
        frames = [frame(rng, 2, bank) for bank in (2, 1, 2, 0, 2, 2)]
        later = [frame(rng, 1, bank) for bank in (2, 0)]
        closed_at = [0]

        async def main(ctx: Any) -> None:
            for kept in frames:
                await bench.put(ctx, kept)
            for _ in range(moment):
                await ctx.tick()
            ctx.set(bench.dut.open, 0b011)
            closed_at[0] = bench.bench.cycle
            await ctx.tick()
            ctx.set(bench.dut.open, 0b111)
            for kept in later:
                await bench.put(ctx, kept)

        bench.run(main, lambda cycle: cycle > 30 and cycle % 4 == 0)
        came = bench.emissions()
        others = [kept for kept in (*frames, *later) if kept.bank != 2 or kept in later]
        wanted = [emission for kept in others for emission in kept.emissions(group, MEMBERS[kept.bank])]
        assert [emission for emission in came if emission[2] in {kept.header for kept in others}] == wanted
        # What came of the closed job had begun: it was at the output at the latest one cycle after.
        mine = {kept.header for kept in frames if kept.bank == 2}
        starts = [
            since
            for beat, since in zip(bench.output.beats, bench.output.valid_since, strict=True)
            if beat & 1 and unpack(relay_layout(PARAMS), beat)["header"] in mine
        ]
        assert all(since <= closed_at[0] + 1 for since in starts), (starts, closed_at)
        assert len(came) < sum(len(kept.emissions(group, MEMBERS[kept.bank])) for kept in (*frames, *later))


@pytest.mark.parametrize("cut", range(5))
def test_reset_in_a_frame(cut: int) -> None:
    with seeded(cut) as rng:
        bench = RelayBench()
        after = [frame(rng) for _ in range(3)]

        async def main(ctx: Any) -> None:
            await bench.put(ctx, frame(rng, 2))
            layout = relayed_layout(PARAMS)
            for position in range(cut):
                values = {"valid": 1, "first": int(position == 0), "lines": 4}
                ctx.set(Value.cast(bench.dut.relayed), pack(layout, values))
                await ctx.tick()
            await bench.bench.pulse_reset(ctx, bench.dut.relayed.valid)
            bench.output.beats.clear()
            for kept in after:
                await bench.put(ctx, kept)

        bench.run(main, lambda cycle: cycle > 30)
        assert bench.emissions() == [e for kept in after for e in kept.emissions(False, MEMBERS[kept.bank])]


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
@pytest.mark.parametrize("frames", [0, 1, 3, 12])
def test_other_numbers_of_places_are_refused_by_name(frames: int) -> None:
    with pytest.raises(ValueError, match=f"frames must be a power of two from 2 on, not {frames}"):
        RelayBuffer(PARAMS, frames)
    gc.collect()  # what was refused goes while the warning about it is off
