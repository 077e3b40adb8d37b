"""Validation of frames against the golden model: every check, its order, what goes on and who is told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import wiring

from neuron_fabric.hw.addresses import AddressTable
from neuron_fabric.hw.framing import ENDPOINT, HEADER, endpoint_fields
from neuron_fabric.hw.ingress import INGRESS_EVENTS, Ingress, relayed_layout
from neuron_fabric.hw.layout import FrameKind, contribution_layout, make_config
from neuron_fabric.hw.nacks import ECHO, REFUSED
from neuron_fabric.hw.udp_rx import received_layout
from neuron_fabric.model import BINARY, TERNARY, JobConfig, Parent, ReducerParams, tally_encoding
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.reducer import SignCountReducer
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES, Flags, FrameType, Header, Reason

from .bench import Ready, always, pack, seeded, sometimes, tick_until, unpack
from .stream_bench import LINE, Bench, datagram_beats, endpoint, header_of, never, put_beats

PARAMS = ReducerParams(lines_per_chunk=3, slots=8, workers=5, acc_bits=5, max_planes=2, jobs=4)


def at(number: int) -> Endpoint:
    return Endpoint(0x0200_0000_0000 + number, 0x0A00_0000 + number, 4000 + number)


PARENT = Parent(at(99), job=9, worker=1, epoch=40, leaves=5)
JOBS = (
    JobConfig(5, 1, {0: at(0), 1: at(1), 4: at(4)}, BINARY, base=0, slots=2),
    JobConfig(6, 2, {1: at(11), 2: at(12), 3: at(13)}, TERNARY, base=2, slots=2, multicast=False),
    JobConfig(7, 3, {0: at(20), 3: at(23)}, BINARY, parent=PARENT, base=4, slots=2),
    JobConfig(8, 4, {2: at(32), 4: at(34)}, tally_encoding(BINARY, 3), base=6, slots=2),
)


@dataclass(frozen=True)
class Sent:
    """A datagram; ``jobs`` are the banks that are open when it comes."""

    source: Endpoint
    payload: bytes


class Front(wiring.Component):
    """Ingress and the address table."""

    def __init__(self, params: ReducerParams) -> None:
        self.ingress, self.table = Ingress(params), AddressTable(params, 1)
        super().__init__({})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ingress, m.submodules.table = self.ingress, self.table
        wiring.connect(m, self.ingress.lookup, self.table.lookups[0])
        return m


class IngressBench:
    """Datagrams in; what comes out is recorded."""

    def __init__(self, params: ReducerParams = PARAMS, jobs: Iterable[JobConfig] = JOBS) -> None:
        self.params, self.jobs = params, tuple(jobs)
        self.front = Front(params)
        self.dut = dut = self.front.ingress
        self.bench = Bench(self.front)
        self.input = self.bench.watch(dut.datagram.valid, dut.datagram.ready, Value.cast(dut.datagram.payload))
        port = dut.contribution
        self.output = self.bench.watch(port.valid, port.ready, Value.cast(port.payload))
        self.events: Counter[str] = Counter()
        self.refused: list[dict[str, int]] = []
        self.relayed: list[dict[str, int]] = []
        self.quiet: list[int] = []

        async def record(ctx: Any) -> None:
            strobes = (dut.events, dut.refused, dut.relayed, dut.quiet)
            async for _clk, _rst, *values in ctx.tick().sample(*map(Value.cast, strobes)):
                events, refused, relayed, quiet = values
                self.events.update(name for name, value in unpack(INGRESS_EVENTS, events).items() if value)
                for layout, bits, into in (
                    (REFUSED, refused, self.refused),
                    (relayed_layout(params), relayed, self.relayed),
                ):
                    fields = unpack(layout, bits)
                    if fields["valid"]:
                        into.append(fields)
                self.quiet.append(quiet)

        self.bench.sim.add_testbench(record, background=True)

    async def configure(self, ctx: Any, banks: int = -1) -> None:
        """Fill the address table and the banks, and open those of the mask ``banks``."""
        table = self.front.table
        for bank, job in enumerate(self.jobs):
            entries: list[tuple[int, int, Any]] = [(worker, 0, address) for worker, address in job.members.items()]  # type: ignore[union-attr]
            if job.parent is not None:
                entries.append((0, 1, job.parent.address))
            for worker, parent, address in entries:
                for name, value in endpoint_fields(address).items():
                    ctx.set(table.endpoint[name], value)
                ctx.set(table.bank, bank)
                ctx.set(table.worker, worker)
                ctx.set(table.parent, parent)
                ctx.set(table.write, 1)
                await ctx.tick()
            ctx.set(self.dut.config[bank], make_config(job, self.params))
            ctx.set(self.dut.leaves[bank], job.encoding.leaves)
        ctx.set(table.write, 0)
        ctx.set(self.dut.open, banks & (1 << len(self.jobs)) - 1)

    async def put(self, ctx: Any, sent: Sent, pause: Ready = never) -> None:
        layout = received_layout(self.params.lines_per_chunk + 1)
        beats = datagram_beats(layout, sent.source, sent.payload, random.Random(1).getrandbits(512))
        await put_beats(ctx, self.bench, self.dut.datagram, beats, pause)

    def play(self, sent: Iterable[Sent], ready: Ready = always, pause: Ready = never) -> None:
        sent = list(sent)

        async def main(ctx: Any) -> None:
            await self.configure(ctx)
            for frame in sent:
                await self.put(ctx, frame, pause)

        self.bench.sink(self.dut.contribution.ready, ready)
        self.bench.run(main)
        self.check((frame, self.jobs) for frame in sent)

    def check(self, sent: Iterable[tuple[Sent, Iterable[JobConfig]]]) -> None:
        """Compare with the model, of which each frame meets a new one, with these jobs open."""
        counters: Counter[str] = Counter()
        contributions: list[tuple[dict[str, int], bytes]] = []
        relays: list[tuple[int, Header, bytes]] = []
        nacks: list[tuple[Header, Endpoint]] = []
        for frame, jobs in sent:
            model = SignCountReducer(self.params)
            for job in jobs:
                model.open(job)
            reason = model.receive(frame.payload, frame.source)
            counters["frames"] += 1
            for outgoing in model.poll():
                if outgoing.header.type is FrameType.NACK:
                    nacks.append((outgoing.header, outgoing.address))  # type: ignore[arg-type]
                else:
                    bank = [job.job for job in self.jobs].index(outgoing.header.job)
                    relays.append((bank, outgoing.header, outgoing.body))
            if reason is not Reason.NONE:
                counters[f"refused_{reason.name.lower()}"] += 1
                continue
            header = Header.unpack(frame.payload)
            if header.type is not FrameType.RESULT:
                fields = {name: getattr(header, name) for name in ("worker", "chunk", "plane", "lines")}
                fields["bank"] = [job.job for job in self.jobs].index(header.job)
                fields["kind"] = int(header.type)
                if header.type is FrameType.CONTRIBUTE:
                    fields["voters"] = header.voters
                contributions.append((fields, frame.payload[HEADER_BYTES:]))
        self.events["frames"] = self.events.pop("frame", 0)
        assert +self.events == counters
        assert self.contributions() == contributions
        assert self.relays() == relays
        told = [(unpack(ECHO, entry["echo"]), unpack(ENDPOINT, entry["source"])) for entry in self.refused]
        wanted = [
            ({name: getattr(header, name) for name, _field in ECHO}, endpoint_fields(address))
            for header, address in nacks
        ]
        assert told == wanted

    def contributions(self) -> list[tuple[dict[str, int], bytes]]:
        rest = iter(unpack(contribution_layout(self.params), beat) for beat in self.output.beats)
        frames = []
        for head in rest:
            assert head["first"]
            abstains = head["kind"] == FrameKind.ABSTAIN.value
            kept = ("worker", "chunk", "plane", "lines", "bank", "kind") + (() if abstains else ("voters",))
            fields = {name: head[name] for name in kept}
            body = b"" if abstains else head["data"].to_bytes(LINE, "little")
            beat = head
            while not beat["last"]:
                beat = next(rest)
                assert not beat["first"]
                assert {name: beat[name] for name in kept} == fields
                body += beat["data"].to_bytes(LINE, "little")
            frames.append((fields, body))
        return frames

    def relays(self) -> list[tuple[int, Header, bytes]]:
        rest = iter(self.relayed)
        frames = []
        for head in rest:
            assert head["first"]
            assert head["last"] == (head["lines"] == 0)
            body = b""
            for line in range(head["lines"]):
                beat = next(rest)
                assert not beat["first"]
                assert beat["last"] == (line + 1 == head["lines"])
                body += beat["data"].to_bytes(LINE, "little")
            frames.append((head["bank"], header_of(unpack(HEADER, head["header"])), body))
        return frames


def body(rng: random.Random, lines: int) -> bytes:
    return rng.randbytes(LINE * lines)


def right(rng: random.Random, params: ReducerParams = PARAMS, jobs: tuple[JobConfig, ...] = JOBS) -> Sent:
    """A frame that is let through."""
    lines = rng.choice((1, params.lines_per_chunk, rng.randint(1, params.lines_per_chunk)))
    job = rng.choice(jobs)
    chunk = rng.getrandbits(32)
    if job.parent is not None and rng.random() < 0.5:
        flags = Flags(rng.choice((0, 1, 2, 4, 6, 7)))
        to = rng.choice((job.parent.worker, DESTINATION_ALL))
        plane, planes, voters, missing = rng.randrange(3), 3, rng.randrange(6), rng.randrange(3)
        header = Header(
            FrameType.RESULT, job.parent.job, to, chunk, plane, planes, voters, lines, job.parent.epoch, flags, missing
        )
        tail = body(rng, 1) if flags & Flags.PARTIAL else b""
        return Sent(job.parent.address, header.pack() + body(rng, lines) + tail)  # type: ignore[arg-type]
    worker, address = rng.choice(list(job.members.items()))  # type: ignore[union-attr]
    planes = job.encoding.planes
    if rng.random() < 0.3:
        header = Header(FrameType.ABSTAIN, job.job, worker, chunk, 0, planes, 0, lines, job.epoch)
        return Sent(address, header.pack())
    voters = rng.randint(1, job.encoding.leaves)
    header = Header(
        FrameType.CONTRIBUTE, job.job, worker, chunk, rng.randrange(planes), planes, voters, lines, job.epoch
    )
    return Sent(address, header.pack() + body(rng, lines))


def wrong(rng: random.Random) -> Sent:
    """The same, changed in one to three ways, each of which some check may notice."""
    sent = right(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        source, payload = sent.source, bytearray(sent.payload)
        match rng.randrange(16):
            case 0:
                del payload[rng.randrange(len(payload)) :]
            case 1:
                payload += rng.randbytes(rng.choice((1, LINE, rng.randint(1, 2 * LINE))))
            case 2:
                payload[0:2] = rng.randbytes(2)
            case 3:
                payload[2:3] = rng.choice((b"\x00", b"\x20", bytes([rng.getrandbits(8)])))
            case 4:
                payload[2:3] = bytes([0x10 | rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 15))])
            case 5:
                payload[3:4] = rng.choice((b"\x02", rng.randbytes(1)))
            case 6:
                payload[4:6] = rng.choice((0, 4, 5, 6, 7, 8, 9, 10, 0x105)).to_bytes(2, "big")
            case 7:
                payload[6:8] = rng.choice((0, 1, 2, 3, 4, 5, 8, 0x100, 0xFFFF)).to_bytes(2, "big")
            case 8:
                payload[14:15] = bytes([rng.choice((1, 2, 3, 255))])
            case 9:
                payload[15:16] = bytes([rng.choice((0, 1, 2, 3, 255))])
            case 10:
                payload[16:18] = rng.choice((0, 1, 2, 3, 4, 0x101, 0xFFFF)).to_bytes(2, "big")
            case 11:  # and as long as it says
                lines = rng.choice((0, 1, 2, 3, 4, 4))
                payload[18:19] = bytes([lines])
                payload = payload[:HEADER_BYTES] + rng.randbytes(LINE * lines)
            case 12:
                payload[18:19] = rng.randbytes(1)
            case 13:
                payload[20:22] = rng.choice((1, 2, 3, 4, 40, 41, 0x101)).to_bytes(2, "big")
            case 14:
                source = rng.choice((at(0), at(1), at(11), at(13), at(20), at(99), endpoint(rng)))
            case 15:
                name = rng.choice(("mac", "ip", "port"))
                value = getattr(source, name) ^ 1 << rng.randrange({"mac": 48, "ip": 32, "port": 16}[name])
                source = replace(source, **{name: value})
            case _:
                pass
        longest = HEADER_BYTES + LINE * (PARAMS.lines_per_chunk + 1)
        sent = Sent(source, bytes(payload[:longest]))
    return sent


ALL_EVENTS = {"frame"} | {name for name, _field in INGRESS_EVENTS}


@pytest.mark.parametrize(("ready", "pause"), [(1.0, 0.0), (0.6, 0.3), (0.2, 0.0)])
def test_random_frames(ready: float, pause: float) -> None:
    with seeded(ready, pause) as rng:
        bench = IngressBench()
        sent = [rng.choice((right, wrong, wrong))(rng) for _ in range(900)]
        bench.play(sent, sometimes(rng, ready), sometimes(rng, pause))
        met = {name for name, count in bench.events.items() if count} - {"frames"}
        assert met == ALL_EVENTS - {"frame"}, "not every reason was met"
        assert min(len(bench.relayed), len(bench.refused), len(bench.output.beats)) > 50


@pytest.mark.parametrize("kind", list(FrameType))
@pytest.mark.parametrize("child", [True, False])
def test_every_type(kind: FrameType, child: bool) -> None:
    """Types that are not for the fast path are told to a pinned sender; a RESULT never is."""
    with seeded(kind, child) as rng:
        jobs = JOBS if child else JOBS[:2]
        bench = IngressBench(jobs=jobs)
        header = Header(kind, 5, 1, 0, lines=2, epoch=1)
        tail = body(rng, 0 if kind is FrameType.ABSTAIN else 2)
        bench.play([Sent(at(1), header.pack() + tail), Sent(at(2), header.pack() + tail)])


@pytest.mark.parametrize("lines", [1, 3, 16])
def test_full_frames_without_a_pause(lines: int) -> None:
    """The receiver's rate: every cycle a beat, a header for each frame."""
    with seeded(lines) as rng:
        params = replace(PARAMS, lines_per_chunk=lines)
        bench = IngressBench(params)
        count = 8 + 120 // (lines + 1)
        sent = []
        for chunk in range(count):
            header = Header(FrameType.CONTRIBUTE, 5, 1, chunk, lines=lines, epoch=1)
            sent.append(Sent(at(1), header.pack() + body(rng, lines)))
        bench.play(sent)
        cycles = bench.input.cycles
        assert cycles == list(range(cycles[0], cycles[0] + count * (lines + 1)))
        line_cycles = [cycle for k, cycle in enumerate(cycles) if k % (lines + 1)]
        assert bench.output.cycles == [cycle + Ingress.LATENCY for cycle in line_cycles]


def test_abstentions_without_a_pause() -> None:
    with seeded() as rng:
        bench = IngressBench()
        sent = [s for s in (right(rng) for _ in range(600)) if len(s.payload) == HEADER_BYTES]
        bench.play(sent)
        assert bench.input.held == 0
        assert bench.output.cycles == [cycle + Ingress.LATENCY for cycle in bench.input.cycles]


@pytest.mark.parametrize("ready", [1.0, 0.3])
def test_jobs_change_between_frames(ready: float) -> None:
    """While ``hold`` is 1 frames end but none begins; each meets the jobs that were open when its header was taken."""
    with seeded(ready) as rng:
        bench = IngressBench()
        dut = bench.dut
        met: list[tuple[Sent, list[JobConfig]]] = []
        sent = [rng.choice((right, right, wrong))(rng) for _ in range(300)]
        open_now = [(1 << len(JOBS)) - 1]
        done = [False]

        async def feed(ctx: Any) -> None:
            await bench.configure(ctx)
            for frame in sent:
                layout = received_layout(bench.params.lines_per_chunk + 1)
                for beat in datagram_beats(layout, frame.source, frame.payload):
                    first = beat & 1
                    ctx.set(Value.cast(dut.datagram.payload), beat)
                    ctx.set(dut.datagram.valid, 1)
                    await tick_until(ctx, dut.datagram.ready, "ready")
                    if first:
                        met.append((frame, [job for k, job in enumerate(JOBS) if open_now[0] >> k & 1]))
                    ctx.set(dut.datagram.valid, 0)
            done[0] = True

        async def change(ctx: Any) -> None:
            while not done[0]:
                for _ in range(rng.randint(1, 60)):
                    await ctx.tick()
                # A change shows in the first cycle of hold.
                ctx.set(dut.hold, 1)
                ctx.set(dut.open, rng.getrandbits(len(JOBS)))
                new = ctx.get(dut.open)
                await tick_until(ctx, dut.quiet, "quiet")
                taken = len(bench.input.beats)
                for _ in range(rng.randint(0, 5)):
                    await ctx.tick()
                    assert len(bench.input.beats) == taken
                open_now[0] = new
                ctx.set(dut.hold, 0)

        bench.bench.sink(dut.contribution.ready, sometimes(rng, ready))
        bench.bench.sim.add_testbench(change)
        bench.bench.run(feed)
        bench.check(met)


@pytest.mark.parametrize("pause", [0, 20])
def test_quiet(pause: int) -> None:
    """From a header's transfer until its last beat has left: not quiet, also while the source pauses in the frame."""
    with seeded(pause) as rng:
        bench = IngressBench()
        header = Header(FrameType.CONTRIBUTE, 5, 1, 7, lines=3, epoch=1)
        sent = Sent(at(1), header.pack() + body(rng, 3))
        waits_until = [0]

        def pauses(cycle: int) -> bool:
            if len(bench.input.cycles) == 1 and not waits_until[0]:
                waits_until[0] = cycle + pause
            return cycle < waits_until[0]

        bench.play([sent], lambda cycle: cycle > 80, pauses)
        start, end = bench.input.cycles[0], bench.output.cycles[-1]
        assert bench.input.cycles[1] >= start + pause
        assert end > 80
        assert [cycle for cycle, quiet in enumerate(bench.quiet) if not quiet] == list(range(start + 1, end + 1))


@pytest.mark.parametrize("cut", range(8))
def test_reset_in_a_frame(cut: int) -> None:
    with seeded(cut) as rng:
        bench = IngressBench()
        after = [right(rng) for _ in range(5)]
        layout = received_layout(PARAMS.lines_per_chunk + 1)
        header = Header(FrameType.CONTRIBUTE, 5, 1, 7, lines=3, epoch=1)
        lost = datagram_beats(layout, at(1), header.pack() + body(rng, 3)) * 2

        async def main(ctx: Any) -> None:
            await bench.configure(ctx)
            await put_beats(ctx, bench.bench, bench.dut.datagram, lost[:cut])
            await bench.bench.pulse_reset(ctx, bench.dut.datagram.valid)
            bench.output.beats.clear()
            bench.events.clear()
            for frame in after:
                await bench.put(ctx, frame)

        bench.bench.sink(bench.dut.contribution.ready, lambda cycle: cycle > 60)
        bench.bench.run(main)
        bench.check((frame, JOBS) for frame in after)


def test_beats_are_framed() -> None:
    """The bench's own beats are as the receiver's layout has them."""
    layout = received_layout(PARAMS.lines_per_chunk + 1)
    beats = [unpack(layout, beat) for beat in datagram_beats(layout, at(1), bytes(range(90)))]
    assert [(beat["first"], beat["last"], beat["lines"], beat["length"]) for beat in beats] == [
        (1, 0, 2, 90),
        (0, 0, 2, 90),
        (0, 1, 2, 90),
    ]
    assert beats[0]["source"] == pack(ENDPOINT, endpoint_fields(at(1)))
