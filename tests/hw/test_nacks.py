"""The queue of NACKs: nothing is lost but by fullness, and what waits does not change."""

from __future__ import annotations

import random
from typing import Any

import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import wiring

from neuron_fabric.hw.addresses import AddressTable
from neuron_fabric.hw.framing import ENDPOINT, HEADER, endpoint_fields
from neuron_fabric.hw.layout import config_layout, refusal_layout
from neuron_fabric.hw.nacks import ECHO, NACK, REFUSED, NackQueue
from neuron_fabric.model import ReducerParams
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.wire import FrameType, Header, Reason

from .bench import Ready, always, pack, seeded, sometimes, unpack
from .stream_bench import Bench, endpoint, header_of

PARAMS = ReducerParams(lines_per_chunk=3, slots=2, workers=5, jobs=3)

Told = tuple[Header, Endpoint]


class Queue(wiring.Component):
    """The queue and the address table."""

    def __init__(self) -> None:
        self.queue, self.table = NackQueue(PARAMS), AddressTable(PARAMS, 1)
        super().__init__({})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.queue, m.submodules.table = self.queue, self.table
        wiring.connect(m, self.queue.lookup, self.table.lookups[0])
        return m


class NackBench:
    """Refusals of both kinds in, NACKs out."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.block = Queue()
        self.dut = dut = self.block.queue
        self.bench = Bench(self.block)
        self.output = self.bench.watch(dut.nack.valid, dut.nack.ready, Value.cast(dut.nack.payload), dut.flush)
        self.dropped = 0
        self.early: list[Told] = []
        self.late: list[Told] = []
        self.jobs = [
            {"job": rng.getrandbits(16), "epoch": rng.getrandbits(16), "planes": rng.randint(1, 2)} for _ in range(3)
        ]
        self.addresses = {(bank, worker): endpoint(rng) for bank in range(3) for worker in range(5)}

        async def record(ctx: Any) -> None:
            async for _clk, _rst, dropped in ctx.tick().sample(dut.dropped):
                self.dropped += dropped

        self.bench.sim.add_testbench(record, background=True)

    async def configure(self, ctx: Any) -> None:
        for bank, job in enumerate(self.jobs):
            layout = config_layout(PARAMS)
            ctx.set(self.dut.config[bank], layout.from_bits(pack(layout, job)))
        table = self.block.table
        ctx.set(table.write, 1)
        for (bank, worker), address in self.addresses.items():
            ctx.set(table.bank, bank)
            ctx.set(table.worker, worker)
            for name, value in endpoint_fields(address).items():
                ctx.set(table.endpoint[name], value)
            await ctx.tick()
        ctx.set(table.write, 0)

    def refuse_early(self, ctx: Any) -> None:
        rng = self.rng
        echo = {name: rng.getrandbits(HEADER[name].width) for name, _field in ECHO}
        echo["reason"] = rng.choice(list(Reason))
        source = endpoint(rng)
        values = {"valid": 1, "echo": pack(ECHO, echo), "source": pack(ENDPOINT, endpoint_fields(source))}
        ctx.set(Value.cast(self.dut.refused), pack(REFUSED, values))
        self.early.append((Header(FrameType.NACK, **{"voters": 0} | echo), source))

    def refuse_late(self, ctx: Any) -> None:
        rng = self.rng
        bank, worker = rng.choice(list(self.addresses))
        echo = {
            "worker": worker,
            "chunk": rng.getrandbits(32),
            "plane": rng.randrange(2),
            "lines": rng.randint(1, 3),
            "reason": rng.choice((Reason.STALE, Reason.LINES_DIFFER, Reason.ABSTAIN_AFTER_VOTE)),
        }
        ctx.set(Value.cast(self.dut.refusal), pack(refusal_layout(PARAMS), {"valid": 1, "bank": bank} | echo))
        self.late.append(
            (Header(FrameType.NACK, **{"voters": 0} | self.jobs[bank] | echo), self.addresses[bank, worker])
        )

    def settle(self, ctx: Any) -> None:
        ctx.set(Value.cast(self.dut.refused), 0)
        ctx.set(Value.cast(self.dut.refusal), 0)

    def play(self, cycles: int, probability: float, ready: Ready) -> list[Told]:
        async def main(ctx: Any) -> None:
            await self.configure(ctx)
            for _ in range(cycles):
                if self.rng.random() < probability:
                    self.refuse_early(ctx)
                if self.rng.random() < probability:
                    self.refuse_late(ctx)
                await ctx.tick()
                self.settle(ctx)

        self.bench.sink(self.dut.nack.ready, ready)
        self.bench.run(main)
        came = self.told()
        # Each queue keeps its order, and loses only what was counted.
        for queue in (self.early, self.late):
            rest = iter(queue)
            assert all(nack in rest for nack in came if nack in queue)
        assert len(came) + self.dropped == len(self.early) + len(self.late)
        return came

    def told(self) -> list[Told]:
        beats = [unpack(NACK, beat) for beat in self.output.beats]
        return [
            (header_of(unpack(HEADER, beat["header"])), Endpoint(**unpack(ENDPOINT, beat["destination"])))
            for beat in beats
        ]


def test_nothing_is_lost_while_there_is_room() -> None:
    with seeded() as rng:
        bench = NackBench(rng)
        came = bench.play(600, 0.3, always)
        assert bench.dropped == 0
        assert sorted(came, key=str) == sorted(bench.early + bench.late, key=str)


@pytest.mark.parametrize("ready", [0.1, 0.5])
def test_what_is_lost_is_counted(ready: float) -> None:
    with seeded(ready) as rng:
        bench = NackBench(rng)
        bench.play(500, 0.6, sometimes(rng, ready))
        assert bench.dropped > 50


def test_each_queue_holds_its_depth() -> None:
    with seeded() as rng:
        bench = NackBench(rng)
        came = bench.play(40, 1.0, lambda cycle: cycle > 100)
        assert bench.dropped == 2 * (40 - NackQueue.DEPTH)
        depth = NackQueue.DEPTH
        assert sorted(came, key=str) == sorted(bench.early[:depth] + bench.late[:depth], key=str)
        # Both have their turn.
        assert [nack in bench.early for nack in came[:6]] in ([True, False] * 3, [False, True] * 3)


def test_what_waits_does_not_change_when_jobs_do() -> None:
    with seeded() as rng:
        bench = NackBench(rng)

        async def main(ctx: Any) -> None:
            await bench.configure(ctx)
            for _ in range(8):
                bench.refuse_early(ctx)
                bench.refuse_late(ctx)
                await ctx.tick()
                bench.settle(ctx)
            for _ in range(2):
                await ctx.tick()
            bench.jobs = [{"job": 1, "epoch": 1, "planes": 1}] * 3
            bench.addresses = dict.fromkeys(bench.addresses, endpoint(rng))
            await bench.configure(ctx)

        bench.bench.sink(bench.dut.nack.ready, lambda cycle: cycle > 100)
        bench.bench.run(main)
        assert sorted(bench.told(), key=str) == sorted(bench.early + bench.late, key=str)


@pytest.mark.parametrize("after", range(4))
def test_flush(after: int) -> None:
    """Everything goes that came before, up to what is being stored; what comes afterwards stays."""
    with seeded(after) as rng:
        bench = NackBench(rng)

        async def main(ctx: Any) -> None:
            await bench.configure(ctx)
            for _ in range(5):
                bench.refuse_early(ctx)
                bench.refuse_late(ctx)
                await ctx.tick()
                bench.settle(ctx)
            for _ in range(1 + after):
                await ctx.tick()
            ctx.set(bench.dut.flush, 1)
            bench.refuse_early(ctx)
            await ctx.tick()
            bench.settle(ctx)
            ctx.set(bench.dut.flush, 0)
            bench.early.clear()
            bench.late.clear()
            bench.refuse_early(ctx)
            bench.refuse_late(ctx)
            await ctx.tick()
            bench.settle(ctx)

        bench.bench.sink(bench.dut.nack.ready, lambda cycle: cycle > 60)
        bench.bench.run(main)
        assert sorted(bench.told(), key=str) == sorted(bench.early + bench.late, key=str)
        assert bench.dropped == 0
