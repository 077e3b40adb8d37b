"""Bit-sliced blocks against their models, lane by lane."""

from __future__ import annotations

from typing import Any

import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator

from neuron_fabric.hw import PlaneAdder, PlaneSelector
from neuron_fabric.hw.lanes import TallyMemory

from .bench import seeded


def planes(values: list[int], acc_bits: int) -> int:
    """Lanes' integers as planes, plane 0 in the low bits."""
    lanes = len(values)
    return sum((value >> j & 1) << (j * lanes + lane) for lane, value in enumerate(values) for j in range(acc_bits))


def values(bits: int, lanes: int, acc_bits: int) -> list[int]:
    return [sum((bits >> (j * lanes + lane) & 1) << j for j in range(acc_bits)) for lane in range(lanes)]


@pytest.mark.parametrize(("acc_bits", "shifts"), [(1, 1), (2, 1), (4, 2), (4, 4), (6, 2)])
def test_plane_adder(acc_bits: int, shifts: int) -> None:
    """Every tally, in every lane, with every weight."""
    lanes = 1 << acc_bits
    dut = PlaneAdder(lanes, acc_bits, shifts)

    async def main(ctx: Any) -> None:
        tallies = list(range(lanes))
        ctx.set(Value.cast(dut.tally), planes(tallies, acc_bits))
        for shift in range(shifts):
            for control in range(8):
                negative, overwrite, odd = control & 1, control >> 1 & 1, control >> 2
                bits = [lane >> 1 & 1 ^ odd for lane in tallies]
                ctx.set(dut.start, 1 << shift)
                ctx.set(dut.negative, negative)
                ctx.set(dut.overwrite, overwrite)
                ctx.set(dut.bits, sum(bit << lane for lane, bit in enumerate(bits)))
                await ctx.delay(1e-9)
                assert values(ctx.get(Value.cast(dut.total)), lanes, acc_bits) == [
                    dut.model(tally, bit, shift, bool(negative), bool(overwrite))
                    for tally, bit in zip(tallies, bits, strict=True)
                ]

    sim = Simulator(dut)
    sim.add_testbench(main)
    sim.run()


@pytest.mark.parametrize("acc_bits", [1, 3, 5])
def test_plane_selector_selects(acc_bits: int) -> None:
    lanes = 16
    dut = PlaneSelector(lanes, acc_bits)
    with seeded(acc_bits) as rng:
        tallies = [rng.getrandbits(acc_bits) for _ in range(lanes)]

        async def main(ctx: Any) -> None:
            ctx.set(Value.cast(dut.tally), planes(tallies, acc_bits))
            ctx.set(dut.use_upper, 1)
            for plane in range(acc_bits):
                ctx.set(dut.high, (1 << plane) - 1)
                ctx.set(dut.skip, (1 << acc_bits) - (2 << plane))
                await ctx.delay(1e-9)
                assert ctx.get(dut.result) == sum((tally >> plane & 1) << lane for lane, tally in enumerate(tallies))

        sim = Simulator(dut)
        sim.add_testbench(main)
        sim.run()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("acc_bits", [1, 3, 4])
def test_plane_selector_compares(acc_bits: int, signed: bool) -> None:
    """Every tally with every pair of thresholds."""
    lanes = 1 << acc_bits
    offset = lanes // 2 if signed else 0
    dut = PlaneSelector(lanes, acc_bits)
    numbers = [tally - lanes if signed and tally >= offset else tally for tally in range(lanes)]

    async def main(ctx: Any) -> None:
        ctx.set(Value.cast(dut.tally), planes(list(range(lanes)), acc_bits))
        ctx.set(dut.flip, signed)
        for high in range(lanes):
            for low in range(lanes):
                control = (3 * high + low) % 4
                use_upper, use_lower = control & 1, control >> 1
                ctx.set(dut.high, high)
                ctx.set(dut.low, low)
                ctx.set(dut.use_upper, use_upper)
                ctx.set(dut.use_lower, use_lower)
                await ctx.delay(1e-9)
                wanted = 0
                for lane, number in enumerate(numbers):
                    upper, lower = dut.model(number, high - offset, low - offset)
                    wanted |= ((upper and use_upper) or (not lower and use_lower)) << lane
                assert ctx.get(dut.result) == wanted

    sim = Simulator(dut)
    sim.add_testbench(main)
    sim.run()


def test_tally_memory_shows_old_data_and_holds() -> None:
    lanes, acc_bits, depth = 8, 3, 4
    dut = TallyMemory(lanes, acc_bits, depth)
    with seeded() as rng:

        async def main(ctx: Any) -> None:
            model = [0] * depth
            shown = 0
            for _ in range(300):
                write, read = rng.randrange(2), rng.randrange(2)
                at, where = rng.randrange(depth), rng.randrange(depth)
                line = rng.getrandbits(lanes * acc_bits)
                ctx.set(dut.write_enable, write)
                ctx.set(dut.write_address, at)
                ctx.set(Value.cast(dut.write_data), line)
                ctx.set(dut.read_enable, read)
                ctx.set(dut.read_address, where)
                await ctx.tick()
                shown = model[where] if read else shown
                if write:
                    model[at] = line
                assert ctx.get(Value.cast(dut.read_data)) == shown

        sim = Simulator(dut)
        sim.add_clock(1e-6)
        sim.add_testbench(main)
        sim.run()
