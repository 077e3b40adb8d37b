"""Receiver and transmitter of UDP frames against the golden model, byte for byte and drop for drop."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from amaranth.hdl import Cat, Module, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.framing import ENDPOINT, OnesComplementSum, endpoint_fields
from neuron_fabric.hw.udp_rx import RECEIVER_EVENTS, UdpReceiver, received_layout
from neuron_fabric.hw.udp_tx import SENT_LAYOUT, UdpTransmitter
from neuron_fabric.model.net import (
    HEADERS_BYTES,
    Datagram,
    Drop,
    Endpoint,
    FrameError,
    build,
    internet_checksum,
    ones_complement_sum,
    parse,
)
from neuron_fabric.model.wire import HEADER_BYTES

from .bench import Ready, always, seeded, sometimes, tick_until, unpack
from .stream_bench import Bench, endpoint, frames_of, never, set_endpoint

ME = Endpoint.of("02:00:00:12:34:56", "10.1.2.3", 20045)
GROUP = Endpoint.multicast("239.1.2.3", 20046)
LINE = 64

Seen = tuple[Endpoint, bool, bytes]
"""Source, whether it was to the group, payload."""


class ReceiverBench:
    """Frames as bytes in, datagrams and events out."""

    def __init__(self, max_lines: int, rng: random.Random, group: Endpoint | None = GROUP) -> None:
        self.dut = UdpReceiver(max_lines)
        self.rng, self.group = rng, group
        self.bench = Bench(self.dut)
        dut = self.dut
        self.input = self.bench.watch(dut.s_axis_tvalid, dut.s_axis_tready, dut.s_axis_tlast)
        port = dut.datagram
        self.output = self.bench.watch(port.valid, port.ready, Value.cast(port.payload))
        self.events: list[str] = []
        self.event_cycles: list[int] = []

        async def record(ctx: Any) -> None:
            cycle = 0
            async for _clk, _rst, events in ctx.tick().sample(Value.cast(dut.events)):
                names = [name for name, value in unpack(RECEIVER_EVENTS, events).items() if value]
                assert len(names) <= 1, "one strobe a frame"
                self.events += names
                self.event_cycles += [cycle] * len(names)
                cycle += 1

        self.bench.sim.add_testbench(record, background=True)

    async def configure(self, ctx: Any) -> None:
        config = self.dut.config
        set_endpoint(ctx, config.me, ME)
        set_endpoint(ctx, config.group, self.group or GROUP)
        ctx.set(config.group_enable, self.group is not None)

    async def put(self, ctx: Any, frame: bytes, pause: Ready = never, beats: int | None = None) -> None:
        """Send a frame, or its first beats; what ``tkeep`` leaves out is noise."""
        dut = self.dut
        for at in range(0, len(frame), LINE)[:beats]:
            part = frame[at : at + LINE]
            while pause(self.bench.cycle):
                await ctx.tick()
            ctx.set(dut.s_axis_tdata, int.from_bytes(part + self.rng.randbytes(LINE - len(part)), "little"))
            ctx.set(dut.s_axis_tkeep, (1 << len(part)) - 1)
            ctx.set(dut.s_axis_tlast, at + LINE >= len(frame))
            ctx.set(dut.s_axis_tvalid, 1)
            await tick_until(ctx, dut.s_axis_tready, "s_axis_tready")
            ctx.set(dut.s_axis_tvalid, 0)

    def play(self, frames: Iterable[bytes], ready: Ready = always, pause: Ready = never) -> None:
        """Send frames and compare all that comes with the golden model."""
        frames = list(frames)

        async def main(ctx: Any) -> None:
            await self.configure(ctx)
            for frame in frames:
                await self.put(ctx, frame, pause)

        self.bench.sink(self.dut.datagram.ready, ready)
        self.bench.run(main)
        self.check(frames)

    def check(self, frames: Iterable[bytes]) -> None:
        verdicts = [self.verdict(frame) for frame in frames]
        names = [verdict.name.lower() if isinstance(verdict, Drop) else "accepted" for verdict in verdicts]
        assert self.events == names
        assert self.datagrams() == [
            (verdict.source, verdict.destination == self.group, verdict.payload)
            for verdict in verdicts
            if isinstance(verdict, Datagram)
        ]

    def verdict(self, frame: bytes) -> Datagram | Drop:
        try:
            return parse(frame, ME, self.group, self.dut.max_bytes)
        except FrameError as error:
            return error.kind

    def datagrams(self) -> list[Seen]:
        return together(self.output.beats, self.dut.max_lines)


def together(beats: Iterable[int], max_lines: int) -> list[Seen]:
    """Put a receiver's beats together; checks their framing."""
    layout = received_layout(max_lines)
    rest = (unpack(layout, beat) for beat in beats)
    seen: list[Seen] = []
    for head in rest:
        assert head["first"] == 1
        assert head["last"] == (head["lines"] == 0)
        content = head["header"].to_bytes(HEADER_BYTES, "little")
        for line in range(head["lines"]):
            beat = next(rest)
            assert beat["first"] == 0
            assert beat["last"] == (line + 1 == head["lines"])
            for name in ("header", "source", "multicast", "length", "lines"):
                assert beat[name] == head[name], name
            content += beat["data"].to_bytes(LINE, "little")
        assert head["lines"] == -(-max(0, head["length"] - HEADER_BYTES) // LINE)
        assert not any(content[head["length"] :]), "bytes beyond the payload"
        source = Endpoint(**unpack(ENDPOINT, head["source"]))
        seen.append((source, bool(head["multicast"]), content[: head["length"]]))
    return seen


def good(rng: random.Random, max_lines: int, lines: int | None = None) -> bytes:
    """A frame as this protocol sends it."""
    lines = rng.choice((0, 1, max_lines, rng.randint(0, max_lines))) if lines is None else lines
    destination = GROUP if rng.random() < 0.2 else ME
    payload = rng.randbytes(HEADER_BYTES + LINE * lines)
    return build(endpoint(rng), destination, payload, rng.randint(1, 255), rng.getrandbits(16))


def word(value: int) -> bytes:
    return (value & 0xFFFF).to_bytes(2, "big")


def repaired(frame: bytearray, ip: bool, udp: bool) -> bytes:
    """The frame with its checksums made to hold, as far as asked for and possible."""
    if ip:
        frame[24:26] = bytes(2)
        frame[24:26] = internet_checksum(frame[14:34]).to_bytes(2, "big")
    if udp:
        end = min(14 + int.from_bytes(frame[16:18], "big"), len(frame))
        frame[40:42] = bytes(2)
        pseudo = bytes(frame[26:34]) + b"\0\x11" + bytes(frame[38:40])
        frame[40:42] = (internet_checksum(pseudo + bytes(frame[34:end])) or 0xFFFF).to_bytes(2, "big")
    return bytes(frame)


def odd(rng: random.Random, max_lines: int) -> bytes:
    """A frame that is mostly right, changed in one or two ways."""
    frame = bytearray(build(endpoint(rng), rng.choice((ME, GROUP)), rng.randbytes(rng.randint(0, 64 * max_lines + 22))))
    for _ in range(rng.choice((1, 1, 1, 2))):
        if len(frame) < HEADERS_BYTES:
            break
        fix_ip, fix_udp = rng.random() < 0.7, rng.random() < 0.7
        total = int.from_bytes(frame[16:18], "big")
        match rng.randrange(14):
            case 0:  # any bit
                bit = rng.randrange(8 * len(frame))
                frame[bit // 8] ^= 1 << bit % 8
                continue
            case 1:  # a bit of the headers
                bit = rng.randrange(8 * HEADERS_BYTES)
                frame[bit // 8] ^= 1 << bit % 8
            case 2:  # cut
                del frame[rng.randint(1, len(frame)) :]
                continue
            case 3:  # padded
                frame += rng.randbytes(rng.choice((1, rng.randint(1, 130), 64 * max_lines + 200)))
                continue
            case 4:
                frame[16:18] = word(total + rng.choice((-64, -1, 1, rng.randint(-100, 100))))
            case 5:  # both lengths
                more = rng.choice((-64, -8, -1, 1, 64, -(total - 28)))
                frame[16:18], frame[38:40] = word(total + more), word(total - 20 + more)
            case 6:
                frame[38:40] = word(rng.choice((0, 7, 8, total - 21, rng.getrandbits(16))))
            case 7:
                frame[40:42] = bytes(2)
                continue
            case 8:
                frame[20] ^= rng.choice((0x20, 0x40, 0x80, 1))
            case 9:
                frame[14] = rng.choice((0x46, 0x55, 0x44, 0x4F))
            case 10:
                frame[12:14] = rng.choice((b"\x86\xdd", b"\x08\x06", b"\x81\x00"))
            case 11:
                frame[23] = rng.choice((1, 6, 16, 18))
            case 12:  # somebody else's
                at = rng.choice((0, 5, 30, 33, 36, 37))
                frame[at] ^= 1 << rng.randrange(8)
            case 13:  # sums: words exchanged, or all ones added, are not noticed by a ones' complement sum
                at = rng.randrange(14, len(frame) - 3) & ~1
                frame[at : at + 4] = frame[at + 2 : at + 4] + frame[at : at + 2]
                continue
        repaired(frame, fix_ip, fix_udp)
    return bytes(frame)


def frames(rng: random.Random, max_lines: int, count: int) -> list[bytes]:
    """Good ones and odd ones; what is too long for a test's time is rare."""
    made: list[bytes] = []
    while len(made) < count:
        choice = rng.random()
        if choice < 0.4:
            made.append(good(rng, max_lines))
        elif choice < 0.45:
            made.append(rng.randbytes(rng.randint(1, 200)))
        elif choice < 0.5:  # whole, however short or long
            made.append(build(endpoint(rng), ME, rng.randbytes(rng.randint(0, 64 * max_lines + 150))))
        else:
            made.append(odd(rng, max_lines))
    return made


@pytest.mark.parametrize(("max_lines", "count"), [(1, 500), (2, 300), (16, 150)])
def test_random_frames(max_lines: int, count: int) -> None:
    with seeded(max_lines) as rng:
        bench = ReceiverBench(max_lines, rng)
        sent = frames(rng, max_lines, count)
        bench.play(sent, sometimes(rng, 0.7), sometimes(rng, 0.2))
        if max_lines == 1:
            kinds = {bench.verdict(frame) for frame in sent}
            assert kinds.issuperset(Drop), f"not met: {set(Drop) - kinds}"


@pytest.mark.parametrize("ready", [0.15, 1.0])
def test_random_frames_back_to_back(ready: float) -> None:
    """Without a pause; with an eager sink the input never waits, whatever is dropped."""
    with seeded(ready) as rng:
        bench = ReceiverBench(3, rng, group=None)
        bench.play(frames(rng, 3, 250), sometimes(rng, ready))
        assert (bench.input.held > 1) == (ready < 1)


@pytest.mark.parametrize("max_lines", [1, 4, 16])
def test_receiver_takes_full_frames_without_a_pause(max_lines: int) -> None:
    with seeded(max_lines) as rng:
        bench = ReceiverBench(max_lines, rng)
        count = 160 // (max_lines + 1)
        bench.play(good(rng, max_lines, max_lines) for _ in range(count))
        cycles = bench.input.cycles
        assert cycles == list(range(cycles[0], cycles[0] + count * (max_lines + 1)))
        first_out = bench.output.cycles[0]
        assert bench.output.cycles == list(range(first_out, first_out + count * (max_lines + 1)))
        assert first_out == cycles[max_lines] + UdpReceiver.LATENCY
        assert bench.event_cycles == [cycle + UdpReceiver.EVENT_LATENCY for cycle in cycles[max_lines :: max_lines + 1]]


def test_receiver_takes_headers_without_a_pause() -> None:
    with seeded() as rng:
        bench = ReceiverBench(16, rng)
        bench.play(good(rng, 16, 0) for _ in range(60))
        assert bench.input.held <= 1  # the cycle after reset
        assert bench.output.cycles[-1] - bench.output.cycles[0] == 59


@pytest.mark.parametrize("max_lines", [1, 5, 16])
def test_receiver_fills_its_store_to_the_brim(max_lines: int) -> None:
    """The input waits in time, wherever in a frame the store is full."""
    for filling in range(6):
        with seeded(max_lines, filling) as rng:
            bench = ReceiverBench(max_lines, rng)
            lines = [filling % (max_lines + 1)] + [max_lines] * 4
            bench.play([good(rng, max_lines, count) for count in lines * 2], ready=lambda cycle: cycle >= 120)
            assert bench.input.held > 0


def test_receiver_waits_for_a_sink_that_sleeps() -> None:
    """What is in the store comes out in the end; what is foreign passes even while it is full of good lines."""
    with seeded() as rng:
        bench = ReceiverBench(2, rng)
        foreign = build(endpoint(rng), replace(ME, port=1), rng.randbytes(150))
        sent = [good(rng, 2, 2), *[foreign] * 60, *(good(rng, 2) for _ in range(30))]
        bench.play(sent, ready=lambda cycle: cycle >= 500)
        assert bench.events[:60] == ["accepted", *["not_ours"] * 59]
        assert bench.input.cycles[120] < 200
        assert bench.output.valid_since[0] < 50, "valid waited for ready"


@pytest.mark.parametrize("size", [1, 41, 42, 59, 60, 63, 64, 65, 127, 128, 191, 192, 193, 500])
def test_receiver_at_every_length(size: int) -> None:
    """Frames that end with, before and after their datagram, around the borders of beats."""
    with seeded(size) as rng:
        sent = []
        for length in {max(0, size - HEADERS_BYTES + more) for more in (-65, -64, -1, 0, 1, 64)}:
            whole = build(endpoint(rng), ME, rng.randbytes(length))
            sent.append(whole[:size].ljust(size, b"\xff"))
        ReceiverBench(2, rng).play(sent)


def test_receiver_when_the_datagram_is_shorter_than_its_headers() -> None:
    """Lengths that agree, and checksums that hold, as far as there is anything to sum."""
    with seeded() as rng:
        sent = []
        for total in (0, 8, 19, 20, 21, 26, 27, 28, 29, 49, 50, 51):
            frame = bytearray(build(endpoint(rng), ME, rng.randbytes(90)))
            frame[16:18], frame[38:40] = word(total), word(total - 20)
            sent.append(repaired(frame, True, True))
        ReceiverBench(2, rng).play(sent)


def test_receiver_knows_all_ones() -> None:
    """A sum that comes out as zero, sent as ones; an IPv4 checksum that is zero, and its other form."""
    with seeded() as rng:
        frame = build(endpoint(rng), ME, bytes(2) + rng.randbytes(100))
        ones = build(parse(frame, None).source, ME, frame[40:42] + parse(frame, None).payload[2:])
        assert ones[40:42] == b"\xff\xff"
        zero = next(
            frame
            for identification in range(1 << 16)
            if (frame := build(Endpoint(1, 2, 3), ME, b"x" * 22, identification=identification))[24:26] == bytes(2)
        )
        other = bytearray(zero)
        other[24:26] = b"\xff\xff"
        ReceiverBench(2, rng).play([ones, zero, bytes(other)])


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_receiver_reset_in_a_frame(cut: int) -> None:
    """Frames in every stage are forgotten; the next beat begins a frame, the rest of the one that was cut as well."""
    with seeded(cut) as rng:
        bench = ReceiverBench(2, rng)
        lost = [good(rng, 2) for _ in range(3)]
        broken = good(rng, 2, 2)
        after = [broken[LINE * cut :], *frames(rng, 2, 12)] if LINE * cut < len(broken) else frames(rng, 2, 12)

        async def main(ctx: Any) -> None:
            await bench.configure(ctx)
            for frame in lost:
                await bench.put(ctx, frame)
            await bench.put(ctx, broken, beats=cut)
            await bench.bench.pulse_reset(ctx, bench.dut.s_axis_tvalid)
            bench.output.beats.clear()
            bench.events.clear()
            for frame in after:
                await bench.put(ctx, frame)

        bench.bench.sink(bench.dut.datagram.ready, lambda cycle: cycle > 30)
        bench.bench.run(main)
        bench.check(after)


def sent_beats(datagrams: Iterable[tuple[Endpoint, bytes]], rng: random.Random) -> list[int]:
    """Datagrams as beats of the transmitter's input; what does not count is noise."""
    beats = []
    for destination, payload in datagrams:
        lines = (len(payload) - HEADER_BYTES) // LINE
        for line in range(1 + lines):
            at = HEADER_BYTES + LINE * (line - 1)
            values = {
                "first": int(line == 0),
                "last": int(line == lines),
                "header": int.from_bytes(payload[:HEADER_BYTES] if line == 0 else rng.randbytes(22), "little"),
                "data": int.from_bytes(rng.randbytes(64) if line == 0 else payload[at : at + LINE], "little"),
            }
            to = destination if line == 0 else endpoint(rng)
            to_bits = sum(value << ENDPOINT[name].offset for name, value in endpoint_fields(to).items())
            values["destination"] = to_bits
            beats.append(sum(value << SENT_LAYOUT[name].offset for name, value in values.items()))
    return beats


class TransmitterBench:
    """Datagrams in, frames as bytes out."""

    def __init__(self, max_lines: int, rng: random.Random) -> None:
        self.dut = dut = UdpTransmitter(max_lines)
        self.rng = rng
        self.bench = Bench(dut)
        self.input = self.bench.watch(dut.datagram.valid, dut.datagram.ready, dut.datagram.payload.last)
        out = Cat(dut.m_axis_tdata, dut.m_axis_tkeep, dut.m_axis_tlast)
        self.output = self.bench.watch(dut.m_axis_tvalid, dut.m_axis_tready, out)
        self.too_long = 0

        async def record(ctx: Any) -> None:
            async for _clk, _rst, too_long in ctx.tick().sample(dut.too_long):
                self.too_long += too_long

        self.bench.sim.add_testbench(record, background=True)

    async def put(self, ctx: Any, beats: Iterable[int], pause: Ready = never) -> None:
        port = self.dut.datagram
        for beat in beats:
            while pause(self.bench.cycle):
                await ctx.tick()
            ctx.set(Value.cast(port.payload), beat)
            ctx.set(port.valid, 1)
            await tick_until(ctx, port.ready, "datagram.ready")
            ctx.set(port.valid, 0)

    def play(self, datagrams: Iterable[tuple[Endpoint, bytes]], ready: Ready = always, pause: Ready = never) -> None:
        """Send datagrams and compare the frames with the golden model's."""
        datagrams = list(datagrams)

        async def main(ctx: Any) -> None:
            set_endpoint(ctx, self.dut.me, ME)
            await self.put(ctx, sent_beats(datagrams, self.rng), pause)

        self.bench.sink(self.dut.m_axis_tready, ready)
        self.bench.run(main)
        longest = HEADER_BYTES + LINE * self.dut.max_lines
        assert self.frames() == [build(ME, to, payload) for to, payload in datagrams if len(payload) <= longest]
        assert self.too_long == sum(len(payload) > longest for _to, payload in datagrams)

    def frames(self) -> list[bytes]:
        return frames_of(self.output.beats)


def datagram(rng: random.Random, lines: int) -> tuple[Endpoint, bytes]:
    """Random, or of all zeros or ones, where a sum of ones' complement has its corners."""
    size = HEADER_BYTES + LINE * lines
    return endpoint(rng), rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))


@pytest.mark.parametrize(("max_lines", "count"), [(1, 120), (3, 120), (16, 60)])
def test_transmitter_sends_what_the_model_builds(max_lines: int, count: int) -> None:
    with seeded(max_lines) as rng:
        bench = TransmitterBench(max_lines, rng)
        lines = (rng.choice((0, 1, max_lines, max_lines + 1, rng.randint(0, max_lines + 3))) for _ in range(count))
        bench.play([datagram(rng, count) for count in lines], sometimes(rng, 0.7), sometimes(rng, 0.2))
        assert bench.too_long > 0


@pytest.mark.parametrize("max_lines", [1, 4, 16])
def test_transmitter_sends_full_frames_without_a_pause(max_lines: int) -> None:
    with seeded(max_lines) as rng:
        bench = TransmitterBench(max_lines, rng)
        count = 160 // (max_lines + 1)
        bench.play(datagram(rng, max_lines) for _ in range(count))
        cycles = bench.input.cycles
        assert cycles == list(range(cycles[0], cycles[0] + count * (max_lines + 1)))
        first_out = bench.output.valid_since[0]
        assert bench.output.cycles == list(range(first_out, first_out + count * (max_lines + 1)))
        assert first_out == cycles[max_lines] + UdpTransmitter.LATENCY


def test_transmitter_sends_headers_without_a_pause() -> None:
    with seeded() as rng:
        bench = TransmitterBench(16, rng)
        bench.play(datagram(rng, 0) for _ in range(60))
        assert bench.input.held <= 1  # the cycle after reset
        assert bench.output.cycles[-1] - bench.output.cycles[0] == 59


def test_transmitter_waits_for_a_sink_that_sleeps() -> None:
    with seeded() as rng:
        bench = TransmitterBench(2, rng)
        bench.play([datagram(rng, rng.randint(0, 4)) for _ in range(80)], ready=lambda cycle: cycle >= 400)
        assert bench.input.held > 200
        assert bench.output.valid_since[0] < 50, "valid waited for ready"


def test_transmitter_sends_a_checksum_of_zero_as_ones() -> None:
    with seeded() as rng:
        to, payload = endpoint(rng), bytes(2) + rng.randbytes(84)
        payload = build(ME, to, payload)[40:42] + payload[2:]
        bench = TransmitterBench(1, rng)
        bench.play([(to, payload)])
        assert bench.frames()[0][40:42] == b"\xff\xff"


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_transmitter_reset_in_a_frame(cut: int) -> None:
    with seeded(cut) as rng:
        bench = TransmitterBench(2, rng)
        lost, after = ([datagram(rng, rng.randint(0, 2)) for _ in range(4)] for _ in range(2))

        async def main(ctx: Any) -> None:
            set_endpoint(ctx, bench.dut.me, ME)
            await bench.put(ctx, [*sent_beats(lost, rng), *sent_beats([datagram(rng, 2)], rng)[:cut]])
            await bench.bench.pulse_reset(ctx, bench.dut.datagram.valid)
            assert bench.output.beats == []
            await bench.put(ctx, sent_beats(after, rng))

        bench.bench.sink(bench.dut.m_axis_tready, lambda cycle: cycle > 30)
        bench.bench.run(main)
        assert bench.frames() == [build(ME, to, payload) for to, payload in after]


class Loop(wiring.Component):
    """A transmitter whose frames go straight to a receiver."""

    def __init__(self, max_lines: int) -> None:
        self.tx, self.rx = UdpTransmitter(max_lines), UdpReceiver(max_lines)
        super().__init__(
            {"sent": In(stream.Signature(SENT_LAYOUT)), "received": Out(stream.Signature(received_layout(max_lines)))}
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.tx, m.submodules.rx = self.tx, self.rx
        wiring.connect(m, self.tx.datagram, wiring.flipped(self.sent))
        wiring.connect(m, self.rx.datagram, wiring.flipped(self.received))
        for name in ("tdata", "tkeep", "tvalid", "tlast"):
            m.d.comb += getattr(self.rx, f"s_axis_{name}").eq(getattr(self.tx, f"m_axis_{name}"))
        m.d.comb += self.tx.m_axis_tready.eq(self.rx.s_axis_tready)
        return m


def test_what_is_sent_is_received() -> None:
    with seeded() as rng:
        loop = Loop(4)
        bench = Bench(loop)
        got = bench.watch(loop.received.valid, loop.received.ready, Value.cast(loop.received.payload))
        sent = [datagram(rng, rng.randint(0, 4))[1] for _ in range(120)]

        async def main(ctx: Any) -> None:
            set_endpoint(ctx, loop.tx.me, ME)
            set_endpoint(ctx, loop.rx.config.me, GROUP)
            for beat in sent_beats([(GROUP, payload) for payload in sent], rng):
                ctx.set(Value.cast(loop.sent.payload), beat)
                ctx.set(loop.sent.valid, 1)
                await tick_until(ctx, loop.sent.ready, "sent.ready")
                ctx.set(loop.sent.valid, 0)

        bench.sink(loop.received.ready, sometimes(rng, 0.6))
        bench.run(main)
        assert together(got.beats, 4) == [(ME, False, payload) for payload in sent]


@pytest.mark.parametrize(("words", "beats"), [(1, 1), (5, 1), (10, 3), (33, 17), (64, 257)])
def test_sum(words: int, beats: int) -> None:
    """Any words, of which long runs of ones and zeros, in sums of up to ``beats`` beats with pauses."""
    with seeded(words) as rng:
        dut = OnesComplementSum(words, beats)
        bench = Bench(dut)
        due: dict[int, int] = {}
        seen: dict[int, int] = {}

        async def record(ctx: Any) -> None:
            cycle = 0
            async for _clk, _rst, total in ctx.tick().sample(dut.sum):
                seen[cycle] = total
                cycle += 1

        async def main(ctx: Any) -> None:
            for _ in range(400 // beats + 4):
                content = b""
                for beat in range(rng.choice((1, beats, rng.randint(1, beats)))):
                    part = rng.choice((rng.randbytes(2 * words), bytes(2 * words), b"\xff" * 2 * words))
                    ctx.set(dut.valid, 0)
                    for _ in range(rng.choice((0, 0, 1, 3))):
                        await ctx.tick()
                    content += part
                    ctx.set(dut.valid, 1)
                    ctx.set(dut.first, beat == 0)
                    ctx.set(dut.words, int.from_bytes(part, "little"))
                    due[bench.cycle + dut.LATENCY] = ones_complement_sum(content)
                    await ctx.tick()
            ctx.set(dut.valid, 0)

        bench.sim.add_testbench(record, background=True)
        bench.run(main)
        assert len(due) > 0
        assert {cycle: int.from_bytes(seen[cycle].to_bytes(2, "little"), "big") for cycle in due} == due


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
@pytest.mark.parametrize("component", [UdpReceiver, UdpTransmitter])
def test_other_sizes_are_refused_by_name(component: Any) -> None:
    with pytest.raises(ValueError, match=r"lanes must be 512 for a UDP .*, not 64"):
        component(16, lanes=64)
    for max_lines in (0, 257):
        with pytest.raises(ValueError, match=f"max_lines must be 1 to 256 for a UDP .*, not {max_lines}"):
            component(max_lines)
    gc.collect()  # what was refused goes while the warning about it is off
