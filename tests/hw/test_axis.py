"""The AXI4-Stream wrapper: frames as bytes in, frames as bytes out, in Amaranth's simulator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from amaranth.sim import Simulator

from neuron_fabric.hw import AxiStreamReducer, ReducerCore, config_fields
from neuron_fabric.hw.axis import CONFIGURED, CORE_EVENTS, HEADER_EVENTS
from neuron_fabric.model import BINARY, TERNARY, Encoding, Flags, FrameType, Header, ReducerParams
from neuron_fabric.model.reducer import JobConfig
from neuron_fabric.model.wire import HEADER_BYTES, HEADER_OFFSET

from .bench import LIMIT, Ready, always, seeded, sometimes, tick_until, tick_while
from .reference import ALL, Frame, NaiveReducer, Result

JOB, EPOCH = 0x1234, 0xA5C3
NAMES = [*CORE_EVENTS, *HEADER_EVENTS, "length"]


class AxisBench:
    """The wrapper for one job; frames are bytes."""

    def __init__(
        self,
        params: ReducerParams,
        encoding: Encoding,
        members: int,
        majority: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.params, self.encoding, self.majority = params, encoding, majority
        self.rng = rng or random.Random(0)
        self.dut = AxiStreamReducer(params)
        job = JobConfig(JOB, EPOCH, range(members), encoding, "majority" if majority else "tally")
        fields = config_fields(job, params)
        self.config = {"enable": 1, **{name: fields[name] for name in CONFIGURED}}
        self.model = NaiveReducer(params, encoding, list(range(members)), majority)
        self.events: Counter[str] = Counter()
        self.frames: list[bytes] = []
        self.sent: list[int] = []
        self.came: list[int] = []
        self.valid_since: list[int] = []
        self.cycle = 0
        self.idle = 0
        self.limit = LIMIT

    def header(self, frame: Frame) -> Header:
        kind = FrameType.ABSTAIN if frame.abstain else FrameType.CONTRIBUTE
        planes = self.encoding.planes
        return Header(kind, JOB, frame.worker, frame.chunk, frame.plane, planes, 1, frame.lines, EPOCH)

    def pack(self, frame: Frame, header: Header | None = None) -> bytes:
        """A frame's bytes; what is not the protocol's is noise."""
        head = self.rng.randbytes(HEADER_OFFSET) + (header or self.header(frame)).pack()
        return head + b"".join(line.to_bytes(self.params.line_bytes, "little") for line in frame.data)

    def frame(self, worker: int, chunk: int, lines: int, plane: int = 0) -> Frame:
        return Frame(worker, chunk, lines, plane, tuple(self.rng.getrandbits(self.params.lanes) for _ in range(lines)))

    def run(
        self, packets: list[bytes], ready: Ready = always, pause: Ready | None = None, null_bytes: bool = False
    ) -> None:
        dut, size = self.dut, self.params.line_bytes
        full = (1 << size) - 1
        beats = [
            (int.from_bytes(packet[at : at + size], "little"), at + size >= len(packet))
            for packet in packets
            for at in range(0, len(packet), size)
        ]

        async def drive(ctx: Any) -> None:
            for name, value in self.config.items():
                ctx.set(getattr(dut, f"cfg_{name}"), value)
            for index, (tdata, tlast) in enumerate(beats):
                if pause is not None:
                    await tick_while(ctx, lambda: pause(self.cycle), "the end of a pause of the source", self.limit)
                ctx.set(dut.s_axis_tdata, tdata)
                ctx.set(dut.s_axis_tlast, tlast)
                ctx.set(dut.s_axis_tkeep, full >> 1 if null_bytes and tlast else full)
                ctx.set(dut.s_axis_tvalid, 1)
                await tick_until(ctx, dut.s_axis_tready, f"s_axis_tready, with beat {index}", self.limit)
                ctx.set(dut.s_axis_tvalid, 0)
            self.idle = 0
            await tick_while(ctx, lambda: self.idle < 80, "80 cycles without m_axis_tvalid", self.limit)

        async def record(ctx: Any) -> None:
            packet = b""
            waiting: tuple[int, int] | None = None
            out = (dut.m_axis_tvalid, dut.m_axis_tready, dut.m_axis_tdata, dut.m_axis_tkeep, dut.m_axis_tlast)
            events = [getattr(dut, f"event_{name}") for name in NAMES]
            ticks = ctx.tick().sample(dut.s_axis_tvalid, dut.s_axis_tready, *out, *events)
            async for _clk, _rst, in_valid, in_ready, valid, taken, tdata, tkeep, tlast, *strobes in ticks:
                if in_valid and in_ready:
                    self.sent.append(self.cycle)
                if waiting is not None:
                    assert valid, "tvalid was taken back"
                    assert (tdata, tlast) == waiting, "the beat changed while it waited"
                elif valid:
                    self.valid_since.append(self.cycle)
                waiting = (tdata, tlast) if valid and not taken else None
                self.idle = 0 if valid else self.idle + 1
                if valid and taken:
                    assert tkeep == full
                    self.came.append(self.cycle)
                    packet += tdata.to_bytes(size, "little")
                    if tlast:
                        self.frames.append(packet)
                        packet = b""
                self.events.update(name for name, strobe in zip(NAMES, strobes, strict=True) if strobe)
                self.cycle += 1
            assert not packet

        async def sink(ctx: Any) -> None:
            while True:
                ctx.set(dut.m_axis_tready, ready(self.cycle))
                await ctx.tick()

        sim = Simulator(dut)
        sim.add_clock(1e-6)
        sim.add_testbench(drive)
        sim.add_testbench(record, background=True)
        sim.add_testbench(sink, background=True)
        sim.run()

    def results(self) -> list[Result]:
        """The frames put together, each header checked in full."""
        results = []
        frames = iter(self.frames)
        for first in frames:
            planes: list[tuple[int, ...]] = []
            head = Header.unpack(first[HEADER_OFFSET:])
            for plane in range(head.planes):
                packet = next(frames) if plane else first
                assert packet[:HEADER_OFFSET] == bytes(HEADER_OFFSET)
                flags = Flags.MAJORITY if self.majority else Flags.NONE
                if head.worker != ALL:
                    flags |= Flags.RESEND
                assert Header.unpack(packet[HEADER_OFFSET:]) == Header(
                    FrameType.RESULT,
                    JOB,
                    head.worker,
                    head.chunk,
                    plane,
                    head.planes,
                    head.voters,
                    head.lines,
                    EPOCH,
                    flags,
                )
                body, size = packet[HEADER_OFFSET + HEADER_BYTES :], self.params.line_bytes
                assert len(body) == head.lines * size
                planes.append(tuple(int.from_bytes(body[at : at + size], "little") for at in range(0, len(body), size)))
            results.append(Result(head.worker, head.chunk, head.lines, head.voters, tuple(planes)))
        return results

    def due(self, frames: list[Frame]) -> list[Result]:
        return [result for frame in frames if (result := self.model.receive(frame)) is not None]

    def check_events(self, **others: int) -> None:
        seen = {name: count for name, count in self.events.items() if name != "result_sent"}
        assert seen == {name: count for name, count in self.model.events.items() if count} | others


@pytest.mark.parametrize("lanes", [8, 64, 128, 256, 512])
def test_every_width(lanes: int) -> None:
    """The header takes 512 / lanes beats; with 256 and 512 lanes it is inside one."""
    params = ReducerParams(lanes, 2, 2, 3, 4, 2)
    with seeded(lanes) as rng:
        bench = AxisBench(params, TERNARY, 3, rng=rng)
        frames = []
        for chunk in range(2**32 - 2, 2**32 + 1):
            lines = rng.randint(1, 2)
            frames += [bench.frame(w, chunk % 2**32, lines, p) for w in (0, 2) for p in (1, 0)]
            frames.append(Frame(1, chunk % 2**32, lines, abstain=True))
        frames.append(frames[-2])
        bench.run([bench.pack(frame) for frame in frames])
        assert bench.results() == bench.due(frames)
        bench.check_events()


SMALL = ReducerParams(64, 3, 2, 3, 4, 2)


@pytest.mark.parametrize("abstain", [False, True], ids=["contribute", "abstain"])
@pytest.mark.parametrize(
    ("change", "event"),
    [
        ({"job": JOB ^ 1}, "bad_job"),
        ({"epoch": EPOCH ^ 0x100}, "bad_epoch"),
        ({"worker": 2}, "bad_worker"),
        ({"worker": 0x100}, "bad_worker"),
        ({"worker": 0xFFFF}, "bad_worker"),
        ({"plane": 2}, "bad_plane"),
        ({"plane": 0x80}, "bad_plane"),
        ({"planes": 1}, "bad_plane"),
        ({"lines": 0}, "bad_lines"),
        ({"lines": 4}, "bad_lines"),
        ({"lines": 131}, "bad_lines"),
        ({"voters": 0}, "bad_voters"),
        ({"voters": 2}, "bad_voters"),
        ({"voters": 0x101}, "bad_voters"),
        ({"type": FrameType.RESULT}, "bad_type"),
        ({"type": FrameType.STATUS}, "bad_type"),
        ({"job": 0, "epoch": 0, "worker": 9, "plane": 7, "lines": 9}, "bad_job"),
        ({"plane": 7, "lines": 9, "voters": 9}, "bad_plane"),
    ],
)
def test_refused_headers(change: dict[str, int], event: str, abstain: bool) -> None:
    """The first failing check strobes, the frame leaves no trace, and the next one is taken."""
    if abstain and event == "bad_voters":
        pytest.skip("an ABSTAIN carries no voters")
    with seeded(str(change)) as rng:
        bench = AxisBench(SMALL, TERNARY, 2, rng=rng)
        frame = Frame(0, 0, 2, abstain=True) if abstain else bench.frame(0, 0, 2)
        bad = bench.pack(frame, replace(bench.header(frame), **change))  # type: ignore[arg-type]
        good = [bench.frame(w, 0, 3, p) for w in range(2) for p in range(2)]
        bench.run([bad, *(bench.pack(frame) for frame in good), bad])
        assert bench.results() == bench.due(good)
        bench.check_events(**{event: 2})


@pytest.mark.parametrize(("at", "event"), [(0, "bad_magic"), (1, "bad_magic"), (2, "bad_version")])
def test_refused_bytes(at: int, event: str) -> None:
    with seeded(at) as rng:
        bench = AxisBench(SMALL, BINARY, 1, rng=rng)
        good = bench.frame(0, 0, 3)
        bad = bytearray(bench.pack(good))
        bad[HEADER_OFFSET + at] ^= 0x10
        bench.run([bytes(bad), bench.pack(good)])
        assert bench.results() == bench.due([good])
        bench.check_events(**{event: 1})


def test_not_enabled() -> None:
    bench = AxisBench(SMALL, BINARY, 1)
    bench.config["enable"] = 0
    bench.run([bench.pack(bench.frame(0, 0, 3))])
    assert bench.frames == []
    bench.check_events(bad_job=1)


def test_wrong_lengths() -> None:
    """Each does what the class says, and the frame after it is taken as if nothing had been."""
    with seeded() as rng:
        bench = AxisBench(SMALL, BINARY, 1, rng=rng)
        size = SMALL.line_bytes
        packets, meant, wrong = [], [], 0
        for chunk in range(0, 40, 2):
            frame = bench.frame(0, chunk, 3)
            packet = bench.pack(frame)
            case = chunk // 2 % 10
            taken: Frame | None = frame
            if case == 0:  # too long
                packet += bytes(3 * size)
            elif case in (1, 2):  # one or two lines too short
                packet = packet[: -case * size]
                taken = replace(frame, data=(*frame.data[:-case], *[0] * case))
            elif case == 3:  # no line at all
                packet, taken = packet[:64], None
            elif case == 4:  # no complete header
                packet, taken = packet[: 64 - size], None
            elif case == 5:  # one beat
                packet, taken = packet[:size], None
            elif case == 6:  # an ABSTAIN with lines
                taken = Frame(0, chunk, 3, abstain=True)
                packet = bench.pack(taken) + packet[64:]
            else:
                wrong -= 1
            wrong += 1
            packets.append(packet)
            good = bench.frame(0, chunk + 1, 2)
            packets.append(bench.pack(good))
            meant += [taken, good] if taken is not None else [good]
        bench.run(packets)
        assert bench.results() == bench.due(meant)
        bench.check_events(length=wrong)


def test_null_bytes_are_reported() -> None:
    bench = AxisBench(SMALL, BINARY, 1)
    frames = [bench.frame(0, chunk, 2) for chunk in range(3)]
    bench.run([bench.pack(frame) for frame in frames], null_bytes=True)
    assert bench.results() == bench.due(frames)
    bench.check_events(length=3)


@pytest.mark.parametrize("abstain", [False, True], ids=["contribute", "abstain"])
def test_latency(abstain: bool) -> None:
    """From the first line of the completing frame to the result's header beat."""
    params = ReducerParams(512, 2, 1, 2, 2, 1)
    bench = AxisBench(params, BINARY, 2)
    frames = [bench.frame(0, 0, 2), Frame(1, 0, 2, abstain=True) if abstain else bench.frame(1, 0, 2)]
    bench.run([bench.pack(frame) for frame in frames])
    assert bench.results() == bench.due(frames)
    # Behind an ABSTAIN's header comes no line: the core has it in the next cycle.
    first = bench.sent[-1] + 1 if abstain else bench.sent[-2]
    assert bench.valid_since[0] - first == AxiStreamReducer.HEADER_LATENCY == ReducerCore.LATENCY


def test_abstains_wait_for_a_copy() -> None:
    """An ABSTAIN that the core cannot take yet must not be lost under the next header."""
    params = ReducerParams(512, 8, 1, 2, 2, 1)
    with seeded() as rng:
        bench = AxisBench(params, BINARY, 2, rng=rng)
        frames = []
        for chunk in range(0, 8, 4):
            frames += [bench.frame(0, chunk, 8), Frame(1, chunk, 8, abstain=True)]  # copied out for 8 cycles
            frames += [Frame(worker, chunk + 2, 8, abstain=True) for worker in (0, 1)]  # claims the same version
        bench.run([bench.pack(frame) for frame in frames])
        assert bench.sent[-1] - bench.sent[0] >= len(bench.sent)  # it did wait
        assert bench.results() == bench.due(frames)
        bench.check_events()


@pytest.mark.parametrize(("members", "majority"), [(2, True), (4, False)])
def test_sustained_rate(members: int, majority: bool) -> None:
    """A beat in every cycle; results leave as fast as they are made."""
    params = ReducerParams(128, 4, 2, 4, 3, 1)
    with seeded(members) as rng:
        bench = AxisBench(params, BINARY, members, majority, rng)
        chunks = 160 // members
        frames = [bench.frame(w, chunk, 4) for chunk in range(chunks) for w in range(members)]
        bench.run([bench.pack(frame) for frame in frames])
        assert bench.results() == bench.due(frames)
        assert bench.sent == list(range(bench.sent[0], bench.sent[0] + 160 * (4 + 4)))
        planes = 2 if majority else 3
        assert bench.came[-1] - bench.sent[-4] == 5 + planes * 8 - 1


@pytest.mark.parametrize("case", range(8))
def test_random_frames(case: int) -> None:
    """Good, repeated and bad frames of all kinds, stalls on both ports."""
    with seeded("axis", case) as rng:
        encoding = rng.choice([BINARY, TERNARY])
        members = rng.randint(1, 3)
        params = ReducerParams(rng.choice([32, 64, 512]), 3, rng.choice([1, 2]), 3, 4, 2)
        bench = AxisBench(params, encoding, members, rng.random() < 0.5, rng)
        packets: list[bytes] = []
        meant: list[Frame] = []
        others: Counter[str] = Counter()
        for chunk in range(12):
            lines = rng.randint(1, 3)
            frames = [bench.frame(w, chunk, lines, p) for w in range(members) for p in range(encoding.planes)]
            rng.shuffle(frames)
            for frame in frames:
                if rng.random() < 0.2:
                    header = bench.header(frame)
                    change, event = rng.choice(
                        [({"job": 1}, "bad_job"), ({"epoch": 2}, "bad_epoch"), ({"lines": 77}, "bad_lines")]
                    )
                    packets.append(bench.pack(frame, replace(header, **change)))  # type: ignore[arg-type]
                    others[event] += 1
                copies = 2 if rng.random() < 0.2 else 1
                packets += [bench.pack(frame)] * copies
                meant += [frame] * copies
        ready = rng.choice([always, sometimes(rng, 0.5), sometimes(rng, 0.8)])
        bench.run(packets, ready, rng.choice([None, sometimes(rng, 0.4)]))
        due, came = Counter(bench.due(meant)), Counter(bench.results())
        assert came <= due
        last = {result for result in due if result.destination == ALL and result.chunk >= 12 - 2 * params.slots}
        assert last <= set(came)
        bench.check_events(**others)
