"""What a parent answers, on its way down to the members of a child's job."""

from __future__ import annotations

from amaranth import Array, Cat, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.framing import HEADER, LANES
from neuron_fabric.hw.ingress import relayed_layout
from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.hw.layout import config_layout, index_width, of_bank
from neuron_fabric.model.params import ReducerParams

__all__ = ["RelayBuffer", "relay_layout"]


def relay_layout(params: ReducerParams) -> data.StructLayout:
    """A frame to send is a beat with ``first``, of which ``data`` means nothing, and then its lines.

    Beside all beats are ``header`` and whom it goes to: the multicast group if ``group``, else ``worker`` of ``bank``.
    """
    return data.StructLayout(
        {
            "first": unsigned(1),
            "last": unsigned(1),
            "header": HEADER,
            "bank": unsigned(index_width(params.jobs)),
            "worker": unsigned(index_width(params.workers)),
            "group": unsigned(1),
            "data": unsigned(LANES),
        }
    )


class RelayBuffer(wiring.Component):
    """Keeps whole RESULT frames until they are sent, to the group once, or to each member in turn.

    A frame for which there is no place is dropped: the input never waits, and the workers ask for it again. Frames of a
    job that is not open (any more) are forgotten, unless they are just being sent. Frames leave without a pause
    between them, at one beat a cycle, from the third cycle after the last beat has come.

    Parameters
    ----------
    params : ReducerParams
    frames : int
        Places for frames, of whatever length; a power of two.

    Members
    -------
    relayed : :func:`~neuron_fabric.hw.ingress.relayed_layout`, in
    open : in, one bit per bank
    config : array of :func:`~neuron_fabric.hw.layout.config_layout`, in
    group : in
        There is a multicast group.
    relay : stream of :func:`relay_layout`, out
    dropped : out
        A strobe per frame that found no place.
    """

    def __init__(self, params: ReducerParams, frames: int = 8) -> None:
        if frames < 2 or frames & (frames - 1):
            raise ValueError(f"frames must be a power of two from 2 on, not {frames}")
        self._params = params
        self._frames = frames
        super().__init__(
            {
                "relayed": In(relayed_layout(params)),
                "open": In(params.jobs),
                "config": In(data.ArrayLayout(config_layout(params), params.jobs)),
                "group": In(1),
                "relay": Out(stream.Signature(relay_layout(params))),
                "dropped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A writer, a stage that says whom to send what next, and one that reads the lines."""
        m = Module()
        params, frames = self._params, self._frames
        lines = relayed_layout(params)["lines"].shape
        line_bits = index_width(params.lines_per_chunk + 1)
        kept = data.StructLayout({"header": HEADER, "lines": lines})
        m.submodules.ring = ring = Memory(
            shape=unsigned(LANES), depth=frames << line_bits, init=[], attrs=COLLISIONS_DO_NOT_MATTER
        )
        m.submodules.heads = heads = Memory(shape=kept, depth=frames, init=[])
        write, read = ring.write_port(), ring.read_port()
        write_head, read_head = heads.write_port(), heads.read_port(domain="comb")

        # ---- a frame comes -----------------------------------------------------------------------------------------
        tail = Signal(range(frames))  # the place that is being filled
        used = Signal(range(frames + 1))
        freed = Signal()
        taking = Signal()
        takes = Signal()
        line = Signal(line_bits, reset_less=True)
        alive = Signal(frames)  # not to be forgotten
        bank_of = Array(
            Signal(index_width(params.jobs), name=f"bank_of{number}", reset_less=True) for number in range(frames)
        )
        relayed = self.relayed
        with m.If(relayed.first):
            m.d.comb += takes.eq(relayed.valid & (used != frames))
        with m.Else():
            m.d.comb += takes.eq(relayed.valid & taking)
        m.d.comb += [
            self.dropped.eq(relayed.valid & relayed.first & ~takes),
            write_head.en.eq(takes & relayed.first),
            write_head.addr.eq(tail),
            write_head.data.header.eq(relayed.header),
            write_head.data.lines.eq(relayed.lines),
            write.en.eq(takes & ~relayed.first),
            write.addr.eq(Cat(line, tail)),
            write.data.eq(relayed.data),
        ]
        with m.If(relayed.valid):
            m.d.sync += [taking.eq(takes & ~relayed.last), line.eq(Mux(relayed.first, 0, line + 1))]
        comes = Signal()
        m.d.comb += comes.eq(takes & relayed.last)
        m.d.sync += used.eq(used + comes - freed)
        with m.If(comes):
            m.d.sync += tail.eq(tail + 1)
        for number in range(frames):
            with m.If(takes & relayed.first & (tail == number)):
                m.d.sync += bank_of[number].eq(relayed.bank)
            with m.If(comes & (tail == number)):
                m.d.sync += alive[number].eq(1)
            with m.Elif(~self.open.bit_select(bank_of[number], 1)):
                m.d.sync += alive[number].eq(0)

        # ---- whom to send what next --------------------------------------------------------------------------------
        place = Signal(range(frames))
        unplanned = Signal(range(frames + 1))  # frames whose last sending is not planned yet
        some = Signal()  # of their members, some have had their turn
        rest = Signal(params.workers, reset_less=True)  # those who have not
        members = Signal(params.workers)
        others = Signal(params.workers)
        worker = Signal(index_width(params.workers))
        final = Signal()
        plan = Signal()
        planned_valid = Signal()
        planned = Signal(
            data.StructLayout(
                {
                    "kept": kept,
                    "place": unsigned(len(place)),
                    "bank": unsigned(index_width(params.jobs)),
                    "worker": unsigned(len(worker)),
                    "group": unsigned(1),
                    "final": unsigned(1),
                }
            ),
            reset_less=True,
        )
        sent = Signal()  # what is planned is through with this cycle
        bank = Signal(index_width(params.jobs))
        m.d.comb += [
            bank.eq(bank_of[place]),
            members.eq(Mux(some, rest, of_bank(bank, (self.config[b].members for b in range(params.jobs))))),
            others.eq(members & (members - 1)),
            final.eq(~some & self.group | (others == 0) | ~alive.bit_select(place, 1)),
            plan.eq((unplanned != 0) & (~planned_valid | sent)),
            read_head.addr.eq(place),
        ]
        for number in reversed(range(params.workers)):
            with m.If(members[number]):
                m.d.comb += worker.eq(number)
        m.d.sync += unplanned.eq(unplanned + comes - (plan & final))
        with m.If(~planned_valid | sent):
            m.d.sync += planned_valid.eq(plan)
        with m.If(plan):
            m.d.sync += [
                planned.kept.eq(read_head.data),
                planned.place.eq(place),
                planned.bank.eq(bank),
                planned.worker.eq(worker),
                planned.group.eq(~some & self.group),
                planned.final.eq(final),
                place.eq(place + final),
                some.eq(~final),
                rest.eq(others),
            ]

        # ---- it is sent: a cycle for the header and one for each line ----------------------------------------------
        position = Signal(lines)
        advance, issue, skip, last = Signal(), Signal(), Signal(), Signal()
        out = Signal(
            data.StructLayout({name: field.shape for name, field in relay_layout(params) if name != "data"}),
            reset_less=True,
        )
        m.d.comb += [
            advance.eq(~self.relay.valid | self.relay.ready),
            skip.eq(planned_valid & (position == 0) & ~alive.bit_select(planned.place, 1)),
            issue.eq(planned_valid & ~skip & advance),
            last.eq(position == planned.kept.lines),
            sent.eq(skip | (issue & last)),
            freed.eq(sent & planned.final),
            read.en.eq(issue & (position != 0)),
            read.addr.eq(Cat((position - 1)[:line_bits], planned.place)),
        ]
        with m.If(issue):
            m.d.sync += position.eq(Mux(last, 0, position + 1))
        with m.If(advance):
            m.d.sync += self.relay.valid.eq(issue)
        with m.If(issue):
            m.d.sync += [
                out.first.eq(position == 0),
                out.last.eq(last),
                out.header.eq(planned.kept.header),
                *(out[name].eq(planned[name]) for name in ("bank", "worker", "group")),
            ]
        for name, _field in out.shape():
            m.d.comb += self.relay.payload[name].eq(out[name])
        m.d.comb += self.relay.payload.data.eq(Value.cast(read.data))
        return m
