"""What a result plane is made of: the controls that turn a line of tallies into one bit a lane."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.layout import index_width, voters_width
from neuron_fabric.model.params import ReducerParams

__all__ = ["PlaneControls", "controls_layout", "is_signed"]


def controls_layout(acc_bits: int) -> data.StructLayout:
    """The controls of :class:`~neuron_fabric.hw.lanes.PlaneSelector`, by the names of its members."""
    return data.StructLayout(
        {
            "high": unsigned(acc_bits),
            "low": unsigned(acc_bits),
            "skip": unsigned(acc_bits),
            "flip": unsigned(1),
            "use_upper": unsigned(1),
            "use_lower": unsigned(1),
        }
    )


def is_signed(negative: Value, planes: Value) -> Value:
    """Whether tallies of an encoding can be negative: one of its ``planes`` has a negative weight."""
    return (negative & Cat(planes > index for index in range(len(negative)))).any()


class PlaneControls(wiring.Component):
    """One plane of a tally, or of a majority: the controls of a :class:`~neuron_fabric.hw.lanes.PlaneSelector`.

    With S = voters - 2 tally (counts of negative votes), S < -m is tally > (v + m) / 2 rounded down, and S > m is
    tally < (v - m) / 2 rounded up; else S = tally. Two's complement is compared in offset binary. Combinational; the
    fan-out to all lanes should start at a register.

    Members
    -------
    majority : plane 0 is "negative" and plane 1 "nonzero", instead of planes of the tally
    plane : which one
    voters, margin : of the chunk, of the job
    counts_negatives, signed : of the encoding
    blank : select nothing; the result is 0 whatever the tally is
    controls : :func:`controls_layout`
    """

    def __init__(self, params: ReducerParams) -> None:
        self._acc_bits = params.acc_bits
        super().__init__(
            {
                "majority": In(1),
                "plane": In(index_width(max(params.acc_bits, 2))),
                "voters": In(voters_width(params)),
                "margin": In(params.acc_bits),
                "counts_negatives": In(1),
                "signed": In(1),
                "blank": In(1),
                "controls": Out(controls_layout(params.acc_bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Two thresholds, clipped to what a tally can be."""
        m = Module()
        acc_bits = self._acc_bits
        wide = acc_bits + len(self.voters) + 2
        high = Signal(signed(wide))  # upper = tally > high
        low = Signal(signed(wide))  # lower = tally >= low
        offset = Signal(signed(wide))
        greatest = Const((1 << acc_bits) - 1)
        m.d.comb += offset.eq(Mux(self.signed, 1 << (acc_bits - 1), 0))
        with m.If(self.counts_negatives):
            m.d.comb += [
                high.eq(((self.voters + self.margin) >> 1) + offset),
                low.eq(((self.voters - self.margin + 1) >> 1) + offset),
            ]
        with m.Else():
            m.d.comb += [high.eq(self.margin + offset), low.eq(offset - self.margin)]
        one_hot = Signal(acc_bits)
        # Plane 0 of a majority is negative, plane 1 negative or positive.
        above = Signal()  # an element that is above the upper threshold is meant
        below = Signal()
        # No If: a part of a struct that is constant beside parts that are not would stay X in simulation.
        m.d.comb += [
            one_hot.eq(1 << self.plane),
            above.eq((self.plane != 0) | self.counts_negatives),
            below.eq((self.plane != 0) | ~self.counts_negatives),
            self.controls.low.eq(Mux(low < 0, 0, low)),
            self.controls.high.eq(Mux(self.majority, Mux(high > greatest, greatest, high), one_hot - 1)),
            self.controls.skip.eq(Mux(self.majority, 0, ~(one_hot | (one_hot - 1)))),
            self.controls.flip.eq(self.majority & self.signed),
            self.controls.use_upper.eq(~self.blank & (~self.majority | above)),
            self.controls.use_lower.eq(~self.blank & self.majority & below),
        ]
        return m
