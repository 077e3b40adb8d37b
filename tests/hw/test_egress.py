"""The way out: headers as the golden model packs them, addresses from the table, frames whole and in turn."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import wiring

from neuron_fabric.hw.addresses import AddressTable
from neuron_fabric.hw.egress import Egress
from neuron_fabric.hw.framing import ENDPOINT, HEADER, endpoint_fields
from neuron_fabric.hw.layout import result_layout
from neuron_fabric.hw.nacks import NACK
from neuron_fabric.hw.relay import relay_layout
from neuron_fabric.hw.udp_tx import SENT_LAYOUT
from neuron_fabric.model import ReducerParams
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.wire import HEADER_BYTES, VERSION, Flags, FrameType, Header

from .bench import Ready, always, pack, seeded, sometimes, unpack
from .stream_bench import LINE, Bench, endpoint, never, put_beats, set_endpoint

PARAMS = ReducerParams(lines_per_chunk=4, slots=2, workers=5, jobs=3, acc_bits=4)
GROUP = Endpoint.multicast("239.1.2.3", 20046)
PARENT = PARAMS.workers

Frame = tuple[Endpoint, bytes]
"""Destination, UDP payload."""


class Exit(wiring.Component):
    """Egress and the address table."""

    def __init__(self) -> None:
        self.egress, self.table = Egress(PARAMS), AddressTable(PARAMS, 1)
        super().__init__({})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.egress, m.submodules.table = self.egress, self.table
        wiring.connect(m, self.egress.lookup, self.table.lookups[0])
        return m


def numbers(header: Header) -> dict[str, int]:
    """The fields of :data:`HEADER`."""
    values = {name: int(getattr(header, name)) for name, _field in HEADER if name != "version_type"}
    return values | {"version_type": VERSION << 4 | header.type}


def words(body: bytes) -> list[int]:
    return [int.from_bytes(body[k : k + LINE], "little") for k in range(0, len(body), LINE)]


class EgressBench:
    """Frames of three sources in, datagrams out."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.block = Exit()
        self.dut = dut = self.block.egress
        self.bench = Bench(self.block)
        port = dut.datagram
        self.output = self.bench.watch(port.valid, port.ready, Value.cast(port.payload))
        self.inputs = {
            name: self.bench.watch(
                getattr(dut, name).valid, getattr(dut, name).ready, Value.cast(getattr(dut, name).payload)
            )
            for name in ("nack", "relay", "result")
        }
        self.addresses = {(bank, who): endpoint(rng) for bank in range(3) for who in range(PARENT + 1)}
        self.nacks_sent = 0

        async def record(ctx: Any) -> None:
            async for _clk, _rst, sent in ctx.tick().sample(dut.nack_sent):
                self.nacks_sent += sent

        self.bench.sim.add_testbench(record, background=True)

    async def configure(self, ctx: Any) -> None:
        table = self.block.table
        set_endpoint(ctx, self.dut.group, GROUP)
        ctx.set(table.write, 1)
        for (bank, who), address in self.addresses.items():
            ctx.set(table.bank, bank)
            ctx.set(table.parent, who == PARENT)
            ctx.set(table.worker, 0 if who == PARENT else who)
            set_endpoint(ctx, table.endpoint, address)
            await ctx.tick()
        # None of these is an entry.
        for bank, worker in ((3, 0), (0, PARENT), (1, 8), (0, 16), (4, 1), (0x80, 0)):
            ctx.set(table.bank, bank)
            ctx.set(table.parent, 0)
            ctx.set(table.worker, worker)
            set_endpoint(ctx, table.endpoint, endpoint(self.rng))
            await ctx.tick()
        ctx.set(table.write, 0)

    def nack(self) -> tuple[Frame, list[int]]:
        rng = self.rng
        to = endpoint(rng)
        header = Header(
            FrameType.NACK, rng.getrandbits(16), rng.getrandbits(16), rng.getrandbits(32), rng.getrandbits(8),
            rng.getrandbits(8), 0, rng.getrandbits(8), rng.getrandbits(16), reason=rng.getrandbits(8),
        )  # fmt: skip
        values = {"header": pack(HEADER, numbers(header)), "destination": pack(ENDPOINT, endpoint_fields(to))}
        return (to, header.pack()), [pack(NACK, values)]

    def relay(self, lines: int | None = None) -> tuple[Frame, list[int]]:
        rng = self.rng
        lines = rng.randint(0, PARAMS.lines_per_chunk + 1) if lines is None else lines
        bank, worker = rng.randrange(3), rng.randrange(PARAMS.workers)
        group = rng.getrandbits(1)
        to = GROUP if group else self.addresses[bank, worker]
        header = Header(
            FrameType.RESULT, rng.getrandbits(16), 0xFFFF, rng.getrandbits(32), rng.getrandbits(8), rng.getrandbits(8),
            rng.getrandbits(16), rng.getrandbits(8), rng.getrandbits(16), Flags(rng.randrange(4)), rng.getrandbits(16),
        )  # fmt: skip
        body = rng.randbytes(LINE * lines)
        common = {"header": pack(HEADER, numbers(header)), "bank": bank, "worker": worker, "group": group}
        beats = [
            common | {"first": 1, "data": rng.getrandbits(512)},
            *(common | {"data": line} for line in words(body)),
        ]
        beats[-1]["last"] = 1
        return (to, header.pack() + body), [pack(relay_layout(PARAMS), beat) for beat in beats]

    def result(self, lines: int | None = None, group: bool | None = None) -> tuple[Frame, list[int]]:
        """A plane: for the group, for a worker, or for the parent."""
        rng = self.rng
        lines = rng.randint(1, PARAMS.lines_per_chunk) if lines is None else lines
        up = group is None and rng.random() < 0.4
        group = not up and (rng.random() < 0.5 if group is None else group)
        empty = up and rng.random() < 0.5
        bank, worker = rng.randrange(3), rng.randrange(PARAMS.workers)
        flags = Flags.NONE if up else Flags(rng.getrandbits(3))
        values = {
            "job": rng.getrandbits(16),
            "chunk": rng.getrandbits(32),
            "plane": rng.randrange(4),
            "planes": rng.randint(1, 4),
            "voters": rng.randrange(16),
            "lines": lines,
            "missing": rng.randrange(6),
            "epoch": rng.getrandbits(16),
        }
        destination = rng.getrandbits(16)
        kind = (FrameType.ABSTAIN if empty else FrameType.CONTRIBUTE) if up else FrameType.RESULT
        header = Header(kind, worker=destination, flags=flags, **values)
        body = b"" if empty else rng.randbytes(LINE * (lines + bool(flags & Flags.PARTIAL)))
        common = values | {
            "bank": bank,
            "worker": worker,
            "group": int(group),
            "up": int(up),
            "empty": int(empty),
            "flags": int(flags),
            "destination": destination,
        }
        beats = [common | {"data": line} for line in words(body)] or [common | {"data": rng.getrandbits(512)}]
        beats[0] |= {"first": 1}
        beats[-1] |= {"last": 1}
        to = self.addresses[bank, PARENT] if up else GROUP if group else self.addresses[bank, worker]
        return (to, header.pack() + body), [pack(result_layout(PARAMS), beat) for beat in beats]

    def play(
        self,
        traffic: dict[str, Iterable[tuple[Frame, list[int]]]],
        ready: Ready = always,
        pause: Ready = never,
    ) -> list[Frame]:
        """Every source sends its frames, and each comes out once, in its source's order."""
        sent = {name: list(frames) for name, frames in traffic.items()}
        waits = [True]

        async def main(ctx: Any) -> None:
            await self.configure(ctx)
            waits[0] = False

        def feed(name: str) -> Any:
            async def drive(ctx: Any) -> None:
                while waits[0]:
                    await ctx.tick()
                for _frame, beats in sent[name]:
                    await put_beats(ctx, self.bench, getattr(self.dut, name), beats, pause)

            return drive

        for name in sent:
            self.bench.sim.add_testbench(feed(name))
        self.bench.sink(self.dut.datagram.ready, ready)
        self.bench.run(main)
        came = self.frames()
        for frames in sent.values():
            wanted = [frame for frame, _beats in frames]
            assert [frame for frame in came if frame in wanted] == wanted
        assert len(came) == sum(map(len, sent.values()))
        assert self.nacks_sent == len(sent.get("nack", ()))
        return came

    def frames(self) -> list[Frame]:
        rest = iter(unpack(SENT_LAYOUT, beat) for beat in self.output.beats)
        came = []
        for head in rest:
            assert head["first"]
            payload, beat = head["header"].to_bytes(HEADER_BYTES, "little"), head
            while not beat["last"]:
                beat = next(rest)
                assert not beat["first"]
                payload += beat["data"].to_bytes(LINE, "little")
            came.append((Endpoint(**unpack(ENDPOINT, head["destination"])), payload))
        return came


@pytest.mark.parametrize(("ready", "pause"), [(1.0, 0.0), (1.0, 0.7), (0.5, 0.3), (0.3, 0.0)])
def test_random_frames(ready: float, pause: float) -> None:
    with seeded(ready, pause) as rng:
        bench = EgressBench(rng)
        traffic = {
            "nack": [bench.nack() for _ in range(120)],
            "relay": [bench.relay() for _ in range(60)],
            "result": [bench.result() for _ in range(100)],
        }
        bench.play(traffic, sometimes(rng, ready), sometimes(rng, pause))


@pytest.mark.parametrize("source", ["nack", "relay", "result"])
def test_each_without_a_pause(source: str) -> None:
    """A cycle for a header and one for each line; valid one cycle after the source's."""
    with seeded(source) as rng:
        bench = EgressBench(rng)
        frames = {
            "nack": [bench.nack() for _ in range(20)],
            "relay": [bench.relay(4) for _ in range(20)],
            "result": [bench.result(4, group) for group in [True, False] * 10],
        }
        bench.play({source: frames[source]})
        beats = sum(1 + len(payload[HEADER_BYTES:]) // LINE for (_to, payload), _beats in frames[source])
        cycles = bench.output.cycles
        assert cycles == list(range(cycles[0], cycles[0] + beats))
        assert cycles[0] == bench.inputs[source].valid_since[0] + 1


def test_they_take_turns() -> None:
    with seeded() as rng:
        bench = EgressBench(rng)
        traffic = {
            "nack": [bench.nack() for _ in range(10)],
            "relay": [bench.relay(2) for _ in range(10)],
            "result": [bench.result(2, True) for _ in range(10)],
        }
        whose = {frame: name for name, frames in traffic.items() for frame, _beats in frames}
        came = [whose[frame] for frame in bench.play(traffic)]
        for at in range(0, 30, 3):
            assert sorted(came[at : at + 3]) == sorted(traffic), came


def test_reset_in_a_frame() -> None:
    with seeded() as rng:
        bench = EgressBench(rng)
        lost, after = bench.result(3, True), [bench.result() for _ in range(4)]

        async def main(ctx: Any) -> None:
            await bench.configure(ctx)
            await put_beats(ctx, bench.bench, bench.dut.result, lost[1][:2])
            await bench.bench.pulse_reset(ctx, bench.dut.result.valid)
            bench.output.beats.clear()
            for _frame, beats in after:
                await put_beats(ctx, bench.bench, bench.dut.result, beats)

        bench.bench.sink(bench.dut.datagram.ready, always)
        bench.bench.run(main)
        assert bench.frames() == [frame for frame, _beats in after]
