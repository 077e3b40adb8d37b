"""The parts of the CXL endpoint, each against its model."""

from __future__ import annotations

import itertools
import random

import pytest
from amaranth import Module, Signal, unsigned
from amaranth.hdl import Value
from amaranth.sim import Simulator

from neuron_fabric.hw.cxl_address import AddressDecoder
from neuron_fabric.hw.cxl_queue import ResponseQueue
from neuron_fabric.hw.cxl_status import StatusWriter
from neuron_fabric.hw.lanes import PlaneSelector
from neuron_fabric.hw.thresholds import PlaneControls
from neuron_fabric.model import ReducerParams
from neuron_fabric.model.cxl_map import CxlMap, Status, StatusFlags, Window
from neuron_fabric.model.params import LINE_BYTES

from .bench import seeded

MAPS = [
    CxlMap(ReducerParams()),
    CxlMap(ReducerParams(lines_per_chunk=1, slots=1, workers=1, acc_bits=1, max_planes=1), 64, 1),
    CxlMap(ReducerParams(lines_per_chunk=200, slots=4, workers=9, acc_bits=7, max_planes=3, jobs=3), 4096, 7, 9),
]


@pytest.mark.parametrize("address_map", MAPS)
def test_addresses_mean_what_the_map_says(address_map):
    dut = AddressDecoder(address_map)

    async def check(ctx):
        with seeded(address_map) as rng:
            for _ in range(600):
                window = rng.choice(list(Window)) << address_map.window_bits
                used = address_map.fields[Window(window >> address_map.window_bits)][0]
                inside = rng.getrandbits(rng.choice([used.lsb + used.width, address_map.window_bits]))
                address = rng.choice([window + inside, window + inside, rng.getrandbits(64)])
                ctx.set(dut.address, address)
                await ctx.delay(1e-9)
                target = address_map.decode(address - address % LINE_BYTES)
                assert ctx.get(dut.target.nothing) == (target is None)
                if target is None:
                    continue
                assert ctx.get(dut.target.window) == address >> address_map.window_bits
                for name, value in target._asdict().items():
                    assert ctx.get(dut.target[name]) == value, name

    sim = Simulator(dut)
    sim.add_testbench(check)
    sim.run()


@pytest.mark.parametrize(("counts_negatives", "signed"), [(True, False), (False, True), (False, False)])
def test_controls_select_what_a_majority_or_a_plane_is(counts_negatives, signed):
    """Every tally, margin and number of voters of four bits; a lane for each tally."""
    params = ReducerParams(lanes=16, acc_bits=4, workers=15)
    m = Module()
    m.submodules.controls = controls = PlaneControls(params)
    m.submodules.selector = selector = PlaneSelector(params.lanes, params.acc_bits)
    for name, _field in controls.controls.shape():
        m.d.comb += getattr(selector, name).eq(controls.controls[name])
    tallies = range(-8, 8) if signed else range(16)

    async def check(ctx):
        for plane in range(4):
            ctx.set(selector.tally[plane], sum((tally >> plane & 1) << lane for lane, tally in enumerate(tallies)))
        ctx.set(controls.counts_negatives, counts_negatives)
        ctx.set(controls.signed, signed)

        async def selects(bits, **inputs):
            for name, value in inputs.items():
                ctx.set(getattr(controls, name), value)
            await ctx.delay(1e-9)
            assert ctx.get(selector.result) == sum(bit << lane for lane, bit in enumerate(bits)), inputs

        for plane in range(4):
            await selects([tally >> plane & 1 for tally in tallies], majority=0, plane=plane)
        for voters, margin in itertools.product(range(16), range(16)):
            votes = [voters - 2 * tally if counts_negatives else tally for tally in tallies]
            common = {"majority": 1, "voters": voters, "margin": margin}
            await selects([vote < -margin for vote in votes], plane=0, **common)
            await selects([abs(vote) > margin for vote in votes], plane=1, **common)
        for majority, plane in itertools.product(range(2), range(2)):
            await selects([0] * 16, majority=majority, plane=plane, blank=1)

    sim = Simulator(m)
    sim.add_testbench(check)
    sim.run()


@pytest.mark.parametrize("depth", [1, 2, 16])
def test_a_promised_response_always_finds_a_place(depth):
    dut = ResponseQueue(unsigned(8), depth)
    cycles = 800

    async def check(ctx):
        with seeded(depth) as rng:
            promised, waiting, sent = 0, [], 0
            for cycle in range(cycles):
                busy = 0.2 if cycle // 100 % 2 else 0.9
                held = promised + len(waiting)
                room = ctx.get(dut.room)
                assert room == (held < depth)
                promise = room and rng.random() < busy
                push = promised > 0 and rng.random() < busy
                ready = rng.random() < 1.1 - busy
                ctx.set(dut.promise, promise)
                ctx.set(dut.push, push)
                ctx.set(dut.response, sent & 0xFF)
                ctx.set(dut.responses.ready, ready)
                valid = ctx.get(dut.responses.valid)
                assert valid == bool(waiting)
                if valid:
                    assert ctx.get(dut.responses.payload) == waiting[0]
                    if ready:
                        waiting.pop(0)
                if push:
                    waiting.append(sent & 0xFF)
                    sent += 1
                promised += promise - push
                await ctx.tick()
            assert sent > cycles // 10

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(check)
    sim.run()


@pytest.mark.parametrize("address_map", MAPS)
def test_a_status_line_is_packed_as_the_model_packs_it(address_map):
    dut = StatusWriter(address_map)
    params = address_map.params

    def some(rng: random.Random, value: Value | Signal) -> int:
        return rng.getrandbits(len(Value.cast(value)))

    async def check(ctx):
        with seeded(address_map) as rng:
            for _ in range(50):
                config = {name: some(rng, dut.config[name]) for name, _field in dut.config.shape()}
                state = {name: some(rng, dut.state[name]) for name, _field in dut.state.shape()}
                for name, value in config.items():
                    ctx.set(Value.cast(dut.config[name]), value)
                for name, value in state.items():
                    ctx.set(Value.cast(dut.state[name]), value)
                part = rng.randrange(address_map.parts)
                ctx.set(dut.part, part)
                await ctx.delay(1e-9)
                rows = range(params.max_planes)
                lines = params.lines_per_chunk
                seen = sum(
                    (state["seen"] >> plane * lines & ((1 << lines) - 1)) << address_map.seen_bit(plane, 0)
                    for plane in rows
                )
                majority = config["result_format"]
                flags = config["open"] | state["claimed"] << 1 | state["complete"] << 2 | majority << 3
                expected = Status(
                    chunk=state["chunk"],
                    epoch=config["epoch"],
                    job=config["job"],
                    flags=StatusFlags(flags),
                    lines=config["lines"],
                    planes=config["planes"],
                    result_planes=2 if majority else config["result_planes"],
                    voters=state["voters"],
                    done=state["done"],
                    abstained=state["abstained"],
                    seen=seen >> 256 * part & ((1 << 256) - 1),
                )
                assert ctx.get(dut.line).to_bytes(LINE_BYTES, "little") == expected.pack()

    sim = Simulator(dut)
    sim.add_testbench(check)
    sim.run()
