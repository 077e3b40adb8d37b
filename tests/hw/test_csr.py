"""The register slave against its model: every cycle of every port, in Amaranth's simulator."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from amaranth import ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import data
from amaranth.sim import Simulator

from neuron_fabric.hw.csr import AxiLiteRegisters, EventCounters, count_layout, job_layout, shared_layout
from neuron_fabric.model import TERNARY, JobConfig, Parent, ReducerParams
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.programming import open_job, set_addresses
from neuron_fabric.model.registerfile import COUNTER_MAX, RegisterFile, Response
from neuron_fabric.model.registers import (
    COUNTERS,
    MAXIMA,
    Access,
    Field,
    Word,
    address_bits,
    capability_values,
    encoding_values,
    words,
)

from .bench import pack, seeded

PARAMS = ReducerParams()
NAMES = [name for name, _ in COUNTERS]
AT = {word.name: word.address for word in words(8)}

Events = Callable[[int], dict[str, int]]
"""What is counted in a cycle."""

Hold = Callable[[int], bool]
"""Whether no write may be executed in a cycle."""


@dataclass(frozen=True)
class Write:
    address: int
    data: int
    strobe: int = 0b1111


@dataclass
class Traffic:
    """Transactions, the chance per cycle that a channel's waiting side moves, and what is counted meanwhile."""

    writes: list[Write] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    aw: float = 1
    w: float = 1
    b: float = 1
    ar: float = 1
    r: float = 1
    events: Events = lambda _cycle: {}
    hold: Hold = lambda _cycle: False
    cut: int | None = None
    """Reset after so many cycles, whatever is under way."""
    patient: bool = False
    """Read only when everything was written."""


class Bench:
    """The slave, driven cycle by cycle; :meth:`run` compares what came with the model."""

    def __init__(
        self, params: ReducerParams = PARAMS, jobs: int = 1, widths: dict[str, int] | None = None, seed: int = 0
    ) -> None:
        self.params, self.jobs = replace(params, jobs=jobs), jobs
        self.dut = AxiLiteRegisters(self.params, widths)
        self.counts = count_layout(params, widths)
        self.rng = random.Random(seed)
        self.b_at: list[int] = []  # cycles since the last reset: response valid
        self.r_at: list[int] = []
        self.aw_at: list[int] = []  # transferred
        self.w_at: list[int] = []
        self.ar_at: list[int] = []
        self.read: list[tuple[int, int]] = []
        self.responses: list[int] = []
        self.pulses: Counter[str] = Counter()
        self.final: Any = None
        """The job structs at the end."""
        self.shared: Any = None
        """The other registers at the end."""

    def run(self, *traffics: Traffic, limit: int = 40_000) -> None:
        rst = Signal()
        sim = Simulator(ResetInserter(rst)(self.dut))
        sim.add_clock(1e-6)

        async def main(ctx: Any) -> None:
            for number, traffic in enumerate(traffics):
                if number:
                    for name in ("awvalid", "wvalid", "arvalid"):
                        ctx.set(getattr(self.dut, f"s_axil_{name}"), 0)
                    ctx.set(rst, 1)
                    await ctx.tick()
                    ctx.set(rst, 0)
                await self._play(ctx, traffic, limit)

        sim.add_testbench(main)
        sim.run()

    async def _play(self, ctx: Any, traffic: Traffic, limit: int) -> None:
        dut, rng = self.dut, self.rng
        port = {name[7:]: getattr(dut, name) for name in dut.signature.members if name.startswith("s_axil_")}
        for log in (self.b_at, self.r_at, self.aw_at, self.w_at, self.ar_at, self.read, self.responses):
            log.clear()
        watched = ["awready", "wready", "arready", "bvalid", "bresp", "rvalid", "rdata", "rresp"]
        others = [Value.cast(dut.jobs), Value.cast(dut.shared), dut.opened, dut.closed]
        others += [dut.control_reset, dut.control_clear, dut.entry_write]
        sent = {"aw": 0, "w": 0, "ar": 0}
        offered = dict.fromkeys(sent, False)
        replay = Replay(self, traffic)
        for cycle in range(limit):
            for name, todo in (("aw", traffic.writes), ("w", traffic.writes), ("ar", traffic.reads)):
                early = name == "ar" and traffic.patient and len(self.responses) < len(traffic.writes)
                idle = not offered[name] and sent[name] < len(todo) and not early
                if idle and rng.random() < getattr(traffic, name):
                    offered[name] = True
                    item = todo[sent[name]]
                    if isinstance(item, int):
                        ctx.set(port["araddr"], item)
                    elif name == "aw":
                        ctx.set(port["awaddr"], item.address)
                    else:
                        ctx.set(port["wdata"], item.data)
                        ctx.set(port["wstrb"], item.strobe)
                ctx.set(port[f"{name}valid"], offered[name])
            ready = {channel: rng.random() < getattr(traffic, channel) for channel in ("b", "r")}
            for channel, value in ready.items():
                ctx.set(port[f"{channel}ready"], value)
            events = traffic.events(cycle)
            ctx.set(Value.cast(dut.count), pack(self.counts, events))
            hold = traffic.hold(cycle)
            ctx.set(dut.hold, hold)

            _clk, _rst, *values = await ctx.tick().sample(*(port[name] for name in watched), *others)
            seen = dict(zip(watched, values[: len(watched)], strict=True))
            replay.cycle(cycle, seen, ready, hold, events, *values[len(watched) :])
            for channel, log in (("aw", self.aw_at), ("w", self.w_at), ("ar", self.ar_at)):
                if offered[channel] and seen[f"{channel}ready"]:
                    offered[channel] = False
                    sent[channel] += 1
                    log.append(cycle)
            if traffic.cut == cycle:
                return
            done = len(self.responses) == len(traffic.writes) and len(self.read) == len(traffic.reads)
            if traffic.cut is None and done:
                self.final = data.ArrayLayout(job_layout(self.params), self.jobs).from_bits(values[len(watched)])
                self.shared = shared_layout(self.params).from_bits(values[len(watched) + 1])
                return
        raise AssertionError(f"not done after {limit} cycles: {sent}, {len(self.responses)} B, {len(self.read)} R")


class Replay:
    """The model, told cycle by cycle what happened, and asked whether that was right."""

    def __init__(self, bench: Bench, traffic: Traffic) -> None:
        self.bench, self.traffic = bench, traffic
        self.model = RegisterFile(bench.params)
        banks: dict[tuple[Any, ...], list[Word]] = {}
        others: dict[tuple[Any, ...], list[Word]] = {}
        for word in words(bench.jobs):
            if word.register.per_job:
                banks.setdefault((word.bank, word.register.key), []).append(word)
            else:
                others.setdefault((word.register.key,), []).append(word)
        self.jobs = Mirror(data.ArrayLayout(job_layout(bench.params), bench.jobs), banks, bench.params)
        self.shared = Mirror(shared_layout(bench.params), others, bench.params)
        self.before: dict[str, int] = {"bvalid": 0, "rvalid": 0}
        self.ready_before = {"b": False, "r": False}
        self.hold_before = True
        self.open = 0
        self.due: list[tuple[int, int, Response]] = []  # reads: cycle of RVALID, data, response

    def cycle(
        self,
        cycle: int,
        seen: dict[str, int],
        ready: dict[str, bool],
        hold: bool,
        events: dict[str, int],
        jobs: int,
        shared: int,
        opened: int,
        closed: int,
        reset: int,
        clear: int,
        entry: int,
    ) -> None:
        bench, model, before = self.bench, self.model, self.before
        appears = {}
        for channel, payload in (("b", ("bresp",)), ("r", ("rdata", "rresp"))):
            valid = f"{channel}valid"
            waits = before[valid] and not self.ready_before[channel]
            if waits:
                assert seen[valid], f"{valid} was taken back"
                assert all(seen[name] == before[name] for name in payload), f"{channel} changed while it waited"
            appears[channel] = bool(seen[valid]) and not waits

        for name, amount in events.items():
            model.count(name, amount)
        commands = Counter(model.commands)
        number = len(bench.b_at)
        asked = all(len(log) > number and log[number] <= cycle - 2 for log in (bench.aw_at, bench.w_at))
        assert appears["b"] == (asked and not before["bvalid"] and not self.hold_before), "B comes early or late"
        if appears["b"]:
            write = self.traffic.writes[len(bench.b_at)]
            assert model.write(write.address, write.data, write.strobe) == seen["bresp"], write
            bench.b_at.append(cycle)
        issued = model.commands - commands
        assert (reset, clear, entry) == (issued["reset"], issued["clear_counters"], issued["write"])
        if bench.ar_at and bench.ar_at[-1] == cycle - 1:
            address = self.traffic.reads[len(bench.ar_at) - 1]
            self.due.append((cycle - 1 + AxiLiteRegisters.READ_LATENCY, *model.read(address)))
        if appears["r"]:
            assert (cycle, seen["rdata"], seen["rresp"]) == self.due.pop(0)
            bench.r_at.append(cycle)
        assert not self.due or cycle < self.due[0][0], "R is late"

        is_open = sum(model.field(f"JOB{bank}_CONTROL", "open") << bank for bank in range(bench.jobs))
        assert (opened, closed) == (is_open & ~self.open, self.open & ~is_open)
        bench.pulses.update(opened=opened.bit_count(), closed=closed.bit_count(), reset=reset, clear=clear)
        bench.pulses.update(entry=entry)
        self.open = is_open
        if appears["b"]:
            self.jobs.update(model)
            self.shared.update(model)
        assert jobs == self.jobs.bits
        assert shared == self.shared.bits

        if seen["bvalid"] and ready["b"]:
            bench.responses.append(seen["bresp"])
        if seen["rvalid"] and ready["r"]:
            bench.read.append((seen["rdata"], seen["rresp"]))
        self.before, self.ready_before, self.hold_before = seen, ready, hold


class Mirror:
    """The bits of a struct of registers, from the model's words; ``table`` has those of each register by its path."""

    def __init__(self, layout: data.Layout, table: dict[tuple[Any, ...], list[Word]], params: ReducerParams) -> None:
        self.bits = 0
        self._places: list[tuple[int, int, Field]] = []  # of every leaf: its offset, its word's address, its bits there
        (depth,) = {len(path) for path in table}
        for path, offset in leaves(layout):
            found, rest = table[path[:depth]], path[depth:]
            register = found[0].register
            entry = rest[0] if register.entries else 0
            name = rest[-1] if len(register.fields) > 1 else register.fields[0].name
            word = found[entry // register.entries_per_word]
            (place,) = (field for number, field in word.fields(params) if (number, field.name) == (entry, name))
            self._places.append((offset, word.address, place))

    def update(self, model: RegisterFile) -> None:
        """Take what the model has now."""
        self.bits = sum(
            ((model.read(address)[0] & place.mask) >> place.lsb) << offset for offset, address, place in self._places
        )


def leaves(shape: Any, offset: int = 0, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Path and offset of everything in a layout that isn't a layout itself."""
    if not isinstance(shape, data.Layout):
        yield path, offset
        return
    for key, place in shape:
        yield from leaves(place.shape, offset + place.offset, (*path, key))


def some_address(rng: random.Random, jobs: int) -> int:
    """A register more often than not; the low bits are noise."""
    if rng.random() < 0.15:
        return rng.getrandbits(address_bits(jobs))
    return rng.choice(words(jobs)).address + rng.choice((0, 0, 0, 1, 2, 3))


def some_write(rng: random.Random, jobs: int) -> Write:
    banks = rng.randrange(jobs)
    often = (AT[f"JOB{banks}_CONTROL"], AT["CONTROL"], AT["ENTRY_WRITE"])
    address = rng.choice((some_address(rng, jobs), some_address(rng, jobs), *often))
    value = rng.choice((rng.getrandbits(32), rng.getrandbits(32), 0, COUNTER_MAX))
    if address == AT["CONTROL"] and rng.random() < 0.6:
        value &= ~0b11
    return Write(address, value, rng.choice((0b1111, 0b1111, rng.getrandbits(4))))


def some_events(rng: random.Random, layout: data.StructLayout, probability: float) -> Events:
    def events(_cycle: int) -> dict[str, int]:
        return {name: rng.getrandbits(place.width) for name, place in layout if rng.random() < probability}

    return events


@pytest.mark.parametrize(
    ("params", "jobs", "widths", "chance"),
    [
        (PARAMS, 1, {"results": 7, "lines": 2}, {}),
        (PARAMS, 1, {}, {"aw": 0.4, "w": 0.4, "b": 0.3, "ar": 0.5, "r": 0.3}),
        (ReducerParams(64, 4, 2, 40, 4, 9), 3, {"stall_in": 3}, {"aw": 0.2, "w": 0.8, "b": 0.7, "ar": 0.9, "r": 0.8}),
        (ReducerParams(8, 1, 1, 1, 1, 1), 2, {}, {"aw": 0.9, "w": 0.2, "b": 0.5, "ar": 0.2, "r": 0.5}),
        (ReducerParams(512, 255, 65536, 64, 32, 32), 4, {"slot_high_water": 32}, {"b": 0.6, "r": 0.6}),
        (PARAMS, 2, {}, {"aw": 0.7, "w": 0.7, "b": 0.7, "hold": 0.7}),
    ],
    ids=["free", "stalls", "three_jobs", "least", "greatest", "held"],
)
def test_random_transactions(
    params: ReducerParams, jobs: int, widths: dict[str, int], chance: dict[str, float]
) -> None:
    """Data, responses, every configuration bit and every pulse, in every cycle; and no write waits without a reason."""
    with seeded(jobs, chance) as rng:
        bench = Bench(params, jobs, widths, rng.getrandbits(32))
        held = chance.get("hold", 0)
        traffic = Traffic(
            [some_write(rng, jobs) for _ in range(400)],
            [some_address(rng, jobs) for _ in range(400)],
            events=some_events(rng, bench.counts, 0.3),
            hold=lambda _cycle: rng.random() < held,
            **{name: value for name, value in chance.items() if name != "hold"},
        )
        bench.run(traffic)
        assert {response for _data, response in bench.read} == {Response.OKAY, Response.SLVERR}
        assert set(bench.responses) == {Response.OKAY, Response.SLVERR}
        assert min(bench.pulses[name] for name in ("opened", "closed", "reset", "clear", "entry")) > 3


def test_every_register_keeps_exactly_its_bits() -> None:
    """All ones into everything, then zeros: what can be written is what the table says, and nothing else changes."""
    table = [word for word in words(2) if word.register.access is not Access.COMMAND]
    rw = [word.register.access is Access.RW for word in table]
    for value in (COUNTER_MAX, 0):
        bench = Bench(jobs=2)
        writes = [Write(word.address, value) for word in table]
        bench.run(Traffic(writes, [word.address for word in table], patient=True))
        assert bench.responses == [Response.OKAY if writable else Response.SLVERR for writable in rw]
        for word, writable, (read, response) in zip(table, rw, bench.read, strict=True):
            assert response == Response.OKAY
            if writable:
                assert read == word.writable(PARAMS) & value, word.name
    constants = [read for (read, _), word in zip(bench.read, table, strict=True) if word.register.access is Access.RO]
    assert constants == list(capability_values(bench.params).values())


def test_a_job_as_a_controller_opens_it() -> None:
    """The struct says what was written, by the names of the table."""
    bench = Bench(jobs=2)
    values = {"EPOCH": 7, "MEMBERS0": 0x8001, "RESULT": 0x00030402, "PARENT": 0x00020001, "CONTROL": 0x12340001}
    values |= {name[4:]: value for name, value in encoding_values(TERNARY).items()}
    bench.run(Traffic([Write(AT[f"JOB1_{name}"], value) for name, value in values.items()]))
    assert bench.pulses == Counter(opened=1)
    job = bench.final[1]
    assert (job.control.open, job.control.job, job.epoch) == (1, 0x1234, 7)
    assert [worker for worker in range(16) if job.members[worker]] == [0, 15]
    assert (job.encoding.planes, job.encoding.counts_negatives, job.encoding.leaves) == (2, 0, 1)
    assert [(job.weights[k].shift, job.weights[k].negative) for k in range(2)] == [(0, 0), (0, 1)]
    assert (job.result.majority, job.result.multicast, job.result.planes, job.result.margin) == (0, 1, 4, 3)
    assert (job.parent.job, job.parent.epoch) == (1, 2)
    assert Value.cast(bench.final[0]).value == 0


def test_an_address_as_a_controller_stores_it() -> None:
    """The strobe finds the whole entry, and it stays until the next write is executed."""
    bench = Bench()
    entry = {
        "MAC_LO": 0x33445566,
        "MAC_HI": 0x1122,
        "IP": 0x0A000001,
        "PORT": 0x5004E4D,
        "SELECT": 0x01030002,
        "WRITE": 1,
    }
    bench.run(Traffic([Write(AT[f"ENTRY_{name}"], value) for name, value in entry.items()]))
    assert bench.pulses == Counter(entry=1)
    shared = bench.shared
    assert (shared.entry_mac_hi, shared.entry_mac_lo) == (0x1122, 0x33445566)
    assert (shared.entry_ip, shared.entry_port) == (0x0A000001, 0x4E4D)
    assert (shared.entry_select.worker, shared.entry_select.bank, shared.entry_select.parent) == (2, 3, 1)
    groups = {"GROUP_PORT": 0x00014E4D, "LISTEN_PORT": 0x0002FFFF, "LOCAL_PORT": 7}
    bench.run(Traffic([Write(AT[name], value) for name, value in groups.items()]))
    shared = bench.shared
    assert (shared.group_port.port, shared.group_port.enable, shared.local_port) == (0x4E4D, 1, 7)
    assert (shared.listen_port.port, shared.listen_port.enable) == (0xFFFF, 0)


def test_the_writes_of_a_driver() -> None:
    """What :mod:`neuron_fabric.model.programming` makes arrives: addresses by strobes, the job when it is whole."""
    bench = Bench(jobs=2)
    at = [Endpoint(0x020000000000 | n, 0x0A000000 | n, 4000 + n) for n in range(4)]
    config = JobConfig(7, 3, {0: at[0], 9: at[1]}, TERNARY, base=4, slots=2, parent=Parent(at[2], 8, 1, 5, 2))
    writes = [*set_addresses(bench.params, at[3], listen=at[0]), *open_job(bench.params, config, 1)]
    bench.run(Traffic([Write(*write) for write in writes], b=0.5))
    assert set(bench.responses) == {Response.OKAY}
    assert bench.pulses == Counter(opened=1, entry=3)
    job, shared = bench.final[1], bench.shared
    assert (job.control.open, job.control.job, job.epoch) == (1, 7, 3)
    assert (job.slots.base, job.slots.log2_count) == (4, 1)
    assert (job.result.child, job.parent.job, job.parent.epoch, job.parent_worker) == (1, 8, 5, 1)
    assert (shared.local_ip, shared.listen_port.enable, shared.group_port.enable) == (at[3].ip, 1, 0)


def test_held_writes_wait_and_reads_do_not() -> None:
    """A write that opens a job can hold the next one from the cycle of ``opened`` on."""
    bench = Bench()
    writes = [Write(AT["JOB0_CONTROL"], 1), Write(AT["JOB0_CONTROL"], 0), Write(AT["JOB0_EPOCH"], 9)]
    opened = AxiLiteRegisters.WRITE_LATENCY
    bench.run(Traffic(writes, [AT["JOB0_CONTROL"]] * 4, hold=lambda cycle: opened <= cycle < 30))
    assert bench.b_at == [opened, 31, 33]
    assert bench.aw_at == bench.w_at == [0, opened, 31]
    assert bench.r_at == [3, 7, 11, 15]
    assert [value for value, _response in bench.read] == [0, 1, 1, 1]


def test_latencies() -> None:
    bench = Bench()
    bench.run(Traffic([Write(AT["JOB0_EPOCH"], 1)], [AT["JOB0_EPOCH"]]))
    assert (bench.aw_at, bench.w_at, bench.b_at) == ([0], [0], [AxiLiteRegisters.WRITE_LATENCY])
    assert (bench.ar_at, bench.r_at) == ([0], [AxiLiteRegisters.READ_LATENCY])


def test_throughput() -> None:
    """Nothing waits: a write every 2 cycles, a read every 4, at the same time."""
    bench = Bench()
    bench.run(Traffic([Write(AT["JOB0_EPOCH"], k) for k in range(20)], [AT["COUNT_CYCLES"]] * 10))
    assert {after - before for before, after in pairwise(bench.b_at)} == {2}
    assert {after - before for before, after in pairwise(bench.r_at)} == {4}


@pytest.mark.parametrize(("slow", "fast"), [("aw", "w"), ("w", "aw")])
def test_address_and_data_in_any_order(slow: str, fast: str) -> None:
    """The early one is taken at once and waits inside; nothing is written before the late one."""
    with seeded(slow) as rng:
        bench = Bench(seed=rng.getrandbits(32))
        bench.run(Traffic([Write(AT["JOB0_TIMEOUT"], rng.getrandbits(32)) for _ in range(30)], **{slow: 0.1}))
        late, early = getattr(bench, f"{slow}_at"), getattr(bench, f"{fast}_at")
        assert all(e <= la for e, la in zip(early, late, strict=True))
        assert max(la - e for e, la in zip(early, late, strict=True)) > 10
        assert bench.b_at == [at + AxiLiteRegisters.WRITE_LATENCY for at in late]


def test_valid_does_not_wait_for_ready() -> None:
    """With B and R never ready both responses come and stay; the next write is taken but not done."""
    bench = Bench()
    writes = [Write(AT["JOB0_EPOCH"], 5), Write(AT["JOB0_EPOCH"], 6)]
    bench.run(Traffic(writes, [AT["JOB0_EPOCH"]] * 2, b=0, r=0, cut=50))
    assert (bench.b_at, bench.r_at) == ([2], [3])
    assert (len(bench.aw_at), len(bench.w_at), len(bench.ar_at)) == (2, 2, 1)


def test_no_event_is_lost_under_full_load() -> None:
    """Every counter counts its most in every cycle, and reads take visits away as often as they can."""
    widths = {"frames": 5, "lines": 2, "cycles": 1}
    with seeded() as rng:
        bench = Bench(widths=widths, seed=rng.getrandbits(32))
        most = {name: (1 << place.width) - 1 for name, place in bench.counts}
        reads = [AT[f"COUNT_{rng.choice(NAMES).upper()}"] for _ in range(150)]
        reads += [AT[f"COUNT_{name.upper()}"] for name in NAMES]
        bench.run(Traffic([], reads, events=lambda _cycle: most))
        for name, at, (value, _response) in zip(NAMES, bench.ar_at[150:], bench.read[150:], strict=True):
            assert value == (most[name] if name in MAXIMA else most[name] * (at + 2)), name


@pytest.mark.parametrize("every", [2, 7, len(NAMES) - len(MAXIMA)])
def test_no_counter_starves(every: int) -> None:
    """Visits out of turn put off those in turn, and skip none, in whatever rhythm they come."""
    layout = count_layout(PARAMS)
    counters = [name for name in NAMES if name not in MAXIMA]
    dut = EventCounters(layout)
    sim = Simulator(dut)
    sim.add_clock(1e-6)

    async def main(ctx: Any) -> None:
        ctx.set(Value.cast(dut.count), pack(layout, dict.fromkeys(counters, 1)))
        ctx.set(dut.index, 5)
        for cycle in range(300):
            ctx.set(dut.visit, cycle % every == 0)
            await ctx.tick()
        ctx.set(Value.cast(dut.count), 0)
        for index in range(len(counters)):
            ctx.set(dut.index, index)
            ctx.set(dut.visit, 1)
            await ctx.tick()
            ctx.set(dut.visit, 0)
            assert ctx.get(dut.total) == 300, counters[index]
            await ctx.tick()

    sim.add_testbench(main)
    sim.run()


def test_counters_stop_at_their_greatest_value() -> None:
    """And stay there; just below they are exact; cleared they start again."""
    wide = dict.fromkeys(("frames", "stale", "slot_high_water", "late", "busy"), 32)
    bench = Bench(widths=wide)
    plan = {3: {"frames": COUNTER_MAX, "stale": COUNTER_MAX - 1, "slot_high_water": COUNTER_MAX}, 4: {"stale": 1}}
    plan |= {70: {"frames": 1, "stale": COUNTER_MAX}}
    # Three times in a row is more than 33 bits hold. At most one of the two is visited in between.
    plan |= {80 + k: {"late": COUNTER_MAX, "busy": COUNTER_MAX} for k in range(3)}
    reads = [0] * 40 + [AT[f"COUNT_{name.upper()}"] for name in wide]
    bench.run(Traffic([], reads, events=lambda cycle: plan.get(cycle, {})))
    assert [value for value, _ in bench.read[40:]] == [COUNTER_MAX] * 5

    plan[90] = {"frames": 3, "slot_high_water": 2}
    bench = Bench(widths=wide)
    clear = [Write(AT["JOB0_EPOCH"], 0)] * 40 + [Write(AT["CONTROL"], 0b10)]
    bench.run(Traffic(clear, reads, events=lambda cycle: plan.get(cycle, {})))
    assert bench.b_at[-1] < 90
    assert [value for value, _ in bench.read[40:]] == [3, 0, 2, 0, 0]


@pytest.mark.parametrize("strobe", [0b0000, 0b0001, 0b1110, 0b1111])
def test_commands_obey_strobes(strobe: int) -> None:
    bench = Bench(jobs=3)
    opens = [Write(AT[f"JOB{bank}_CONTROL"], 1) for bank in (0, 2)]
    bench.run(Traffic([*opens, Write(AT["CONTROL"], 0xFFFFFFFD, strobe)], [AT["CONTROL"]], patient=True))
    acted = strobe & 1
    assert bench.pulses == Counter(opened=2, closed=2 * acted, reset=acted, clear=0)
    assert bench.read[-1] == (0, Response.OKAY)


def test_reset_in_the_middle_leaves_nothing() -> None:
    """At any cycle: no response stays, no register, no counter, although the counters' memory isn't cleared."""
    with seeded() as rng:
        bench = Bench(jobs=2, seed=rng.getrandbits(32))
        chance = {"aw": 0.6, "w": 0.5, "b": 0.5, "ar": 0.8, "r": 0.6}

        def traffic(cut: int | None) -> Traffic:
            reads = [AT[f"COUNT_{name.upper()}"] for name in NAMES] + [some_address(rng, 2) for _ in range(20)]
            writes = [some_write(rng, 2) for _ in range(40)]
            return Traffic(writes, reads, events=some_events(rng, bench.counts, 0.5), cut=cut, **chance)

        bench.run(*(traffic(rng.randint(0, 120)) for _ in range(40)), traffic(None))


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
@pytest.mark.parametrize(
    ("params", "widths", "message"),
    [
        (ReducerParams(lanes=1 << 16), {}, "CAPABILITY0.lanes is 65536, which does not fit its 16 bits"),
        (PARAMS, {"poems": 1}, "there is no counter 'poems'"),
        (PARAMS, {"frames": 0}, "frames must have 1 to 32 bits, not 0"),
        (PARAMS, {"frames": 33}, "frames must have 1 to 32 bits, not 33"),
    ],
)
def test_what_cannot_be_is_refused(params: ReducerParams, widths: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AxiLiteRegisters(params, widths)
    gc.collect()  # what was not finished complains when it goes: here, not in another test


def test_the_struct_of_a_job_follows_the_sizes() -> None:
    layout = job_layout(ReducerParams(workers=5, max_planes=3))
    assert layout["members"].width == 5
    assert layout["weights"].width == 3 * 6
    assert layout["control"].width == 17
    assert layout["epoch"].width == 16
    assert not {key for key, _field in layout} & {key for key, _field in shared_layout(ReducerParams())}


def test_a_level_can_say_all_slot_versions() -> None:
    assert count_layout(ReducerParams(slots=8))["slot_high_water"].width == 5
