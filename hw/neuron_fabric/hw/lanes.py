"""Bit-sliced tallies: one small circuit per lane, the same for all lanes, controls broadcast to all.

A tally is ``acc_bits`` planes of ``lanes`` bits; bit ``i`` of every plane belongs to element ``i``. The arithmetic is
combinational. Its controls come from registers, so that the fan-out to all lanes starts at a flip-flop.
"""

from __future__ import annotations

from amaranth import Const, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

__all__ = ["COLLISIONS_DO_NOT_MATTER", "PlaneAdder", "PlaneSelector", "TallyMemory", "tally_layout"]

COLLISIONS_DO_NOT_MATTER = {"no_rw_check": 1}
"""Attribute of a memory that is never read in the cycle of a write to the same word, or whose reader ignores what it
gets then: without it Yosys surrounds block memories that cannot show old data with a register and a bypass a bit."""


def tally_layout(lanes: int, acc_bits: int) -> data.ArrayLayout:
    """The planes of one line of tallies, LSB plane first."""
    return data.ArrayLayout(unsigned(lanes), acc_bits)


class PlaneAdder(wiring.Component):
    """``total = (0 if overwrite else tally) +- (bits << shift)`` in every lane, modulo ``2**acc_bits``.

    Parameters
    ----------
    lanes, acc_bits : int
    shifts : int
        Shifts 0 to ``shifts - 1`` are possible.

    Members
    -------
    tally, total : planes
    bits : one bit a lane
    start : one-hot shift: the plane where the bit enters
    negative : subtract instead of add
    overwrite : take the tally as zero
    """

    def __init__(self, lanes: int, acc_bits: int, shifts: int) -> None:
        self._lanes = lanes
        self._acc_bits = acc_bits
        planes = tally_layout(lanes, acc_bits)
        super().__init__(
            {
                "tally": In(planes),
                "bits": In(lanes),
                "start": In(shifts),
                "negative": In(1),
                "overwrite": In(1),
                "total": Out(planes),
            }
        )

    def model(self, tally: int, bit: int, shift: int, negative: bool, overwrite: bool) -> int:
        """What one lane does."""
        value = -(bit << shift) if negative else bit << shift
        return ((0 if overwrite else tally) + value) % (1 << self._acc_bits)

    def elaborate(self, platform: object) -> Module:
        """A ripple of carries: where the bit enters, and above it where it was carried (or borrowed) into."""
        m = Module()
        above = None
        for plane in range(self._acc_bits):
            base = Signal(self._lanes, name=f"base{plane}")
            carry = Signal(self._lanes, name=f"carry{plane}")
            m.d.comb += base.eq(Mux(self.overwrite, 0, self.tally[plane]))
            enters = Mux(self.start[plane], self.bits, 0) if plane < len(self.start) else None
            if above is None:
                m.d.comb += carry.eq(enters)
            elif enters is None:
                m.d.comb += carry.eq(above)
            else:
                m.d.comb += carry.eq(above | enters)
            m.d.comb += self.total[plane].eq(base ^ carry)
            # A sum carries where both bits are set, a difference borrows where only the subtrahend is.
            above = Signal(self._lanes, name=f"above{plane}")
            m.d.comb += above.eq(Mux(self.negative, ~base, base) & carry)
        return m


class PlaneSelector(wiring.Component):
    """One plane of a tally, or a comparison of every lane with thresholds.

    Two comparators ripple over the planes, LSB first: ``upper = tally > high`` and
    ``lower = tally >= low``. A step leaves the outcome alone where ``skip`` is set: with ``high`` all ones
    below plane ``p``, zero at ``p``, and everything above skipped, ``upper`` is plane ``p``.
    The result is ``(upper and use_upper) or (not lower and use_lower)``.

    Members
    -------
    tally : planes
    high, low : thresholds (offset binary where ``flip``)
    skip : planes that ``upper`` passes over
    flip : invert the top plane, which orders two's complement as unsigned
    use_upper, use_lower : what the result is made of
    result : one bit a lane
    """

    def __init__(self, lanes: int, acc_bits: int) -> None:
        self._lanes = lanes
        self._acc_bits = acc_bits
        super().__init__(
            {
                "tally": In(tally_layout(lanes, acc_bits)),
                "high": In(acc_bits),
                "low": In(acc_bits),
                "skip": In(acc_bits),
                "flip": In(1),
                "use_upper": In(1),
                "use_lower": In(1),
                "result": Out(lanes),
            }
        )

    @staticmethod
    def model(tally: int, high: int, low: int) -> tuple[bool, bool]:
        """``upper`` and ``lower`` of one lane with nothing skipped, for integers of either sign."""
        return tally > high, tally >= low

    def elaborate(self, platform: object) -> Module:
        """Seen from the top, the first plane that differs decides; so going up, a higher plane overrides."""
        m = Module()
        # What a tally that equals a threshold comes to.
        upper: Value = Const(0, self._lanes)
        lower: Value = Const((1 << self._lanes) - 1, self._lanes)  # -1 would be written out as that many sign bits
        for plane in range(self._acc_bits):
            bits = Signal(self._lanes, name=f"bits{plane}")
            top = plane == self._acc_bits - 1
            m.d.comb += bits.eq(Mux(self.flip, ~self.tally[plane], self.tally[plane]) if top else self.tally[plane])
            next_upper = Signal(self._lanes, name=f"upper{plane}")
            next_lower = Signal(self._lanes, name=f"lower{plane}")
            step = Mux(self.high[plane], upper & bits, upper | bits)
            m.d.comb += next_upper.eq(Mux(self.skip[plane], upper, step))
            m.d.comb += next_lower.eq(Mux(self.low[plane], lower & bits, lower | bits))
            upper, lower = next_upper, next_lower
        m.d.comb += self.result.eq(Mux(self.use_upper, upper, 0) | Mux(self.use_lower, ~lower, 0))
        return m


class TallyMemory(wiring.Component):
    """Lines of tallies in block memory: one memory a plane, one write and one synchronous read a cycle.

    ``read_data`` follows ``read_address`` by one cycle and holds while ``read_enable`` is 0. A read of a line in the
    cycle in which it is written gives what was there before in simulation, and nothing one may use in hardware.
    """

    def __init__(self, lanes: int, acc_bits: int, depth: int) -> None:
        self._lanes = lanes
        self._acc_bits = acc_bits
        self._depth = depth
        planes = tally_layout(lanes, acc_bits)
        super().__init__(
            {
                "read_enable": In(1, init=1),
                "read_address": In(range(depth)),
                "read_data": Out(planes),
                "write_enable": In(1),
                "write_address": In(range(depth)),
                "write_data": In(planes),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The planes share address and enable."""
        m = Module()
        for plane in range(self._acc_bits):
            memory = Memory(shape=unsigned(self._lanes), depth=self._depth, init=[], attrs=COLLISIONS_DO_NOT_MATTER)
            m.submodules[f"plane{plane}"] = memory
            write = memory.write_port()
            read = memory.read_port()
            m.d.comb += [
                read.en.eq(self.read_enable),
                read.addr.eq(self.read_address),
                self.read_data[plane].eq(read.data),
                write.en.eq(self.write_enable),
                write.addr.eq(self.write_address),
                write.data.eq(self.write_data[plane]),
            ]
        return m
