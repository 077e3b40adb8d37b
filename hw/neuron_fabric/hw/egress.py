"""The way out: NACKs, relayed frames and results take turns at the transmitter, each with its header and address."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.addresses import lookup_signature
from neuron_fabric.hw.framing import ENDPOINT, HEADER, HEADER_BITS, LANES, header_to_wire, version_type
from neuron_fabric.hw.layout import result_layout
from neuron_fabric.hw.nacks import NACK
from neuron_fabric.hw.relay import relay_layout
from neuron_fabric.hw.udp_tx import SENT_LAYOUT
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import Flags, FrameType, Reason

__all__ = ["Egress"]


class _Source(enum.Enum, shape=2):  # type: ignore[call-arg]
    """Whose frame it is."""

    NACK = 0
    RELAY = 1
    RESULT = 2


class Egress(wiring.Component):
    """Puts headers before results, looks addresses up, and lets one frame after the other out.

    Those who have a frame when one ends are served in turn, so that each waits for at most one frame of each other. A
    header takes one cycle, then come the lines without a pause: a result of 16 lines leaves every 17 cycles.

    Parameters
    ----------
    params : ReducerParams
        ``lanes`` must be 512.

    Members
    -------
    nack : stream of :data:`~neuron_fabric.hw.nacks.NACK`, in
    relay : stream of :func:`~neuron_fabric.hw.relay.relay_layout`, in
    result : stream of :func:`~neuron_fabric.hw.layout.result_layout`, in
    group : :data:`~neuron_fabric.hw.framing.ENDPOINT`, in
        The multicast group.
    lookup : :func:`~neuron_fabric.hw.addresses.lookup_signature`
    datagram : stream of :data:`~neuron_fabric.hw.udp_tx.SENT_LAYOUT`, out
        Valid one cycle after the beat was there.
    nack_sent : out
        A strobe per NACK that went out.
    """

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        super().__init__(
            {
                "nack": In(stream.Signature(NACK)),
                "relay": In(stream.Signature(relay_layout(params))),
                "result": In(stream.Signature(result_layout(params))),
                "group": In(ENDPOINT),
                "lookup": Out(lookup_signature(params)),
                "datagram": Out(stream.Signature(SENT_LAYOUT)),
                "nack_sent": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One register at the output, beside which the address table answers."""
        m = Module()
        nack, relay, result = self.nack, self.relay, self.result
        out_valid = Signal()
        advance = Signal()
        m.d.comb += [self.datagram.valid.eq(out_valid), advance.eq(~out_valid | self.datagram.ready)]

        # ---- whose turn it is --------------------------------------------------------------------------------------
        inside = Signal()  # a frame has begun; the beat is one of its lines
        previous = Signal(_Source)  # whose frame it is, or was
        picked = Signal(_Source)
        waiting = {_Source.NACK: nack.valid, _Source.RELAY: relay.valid, _Source.RESULT: result.valid}
        order = list(_Source)
        m.d.comb += picked.eq(previous)
        for index, source in enumerate(order):
            with m.If(previous == source):
                turns = [order[(index + step) % len(order)] for step in range(1, len(order) + 1)]
                for turn in reversed(turns):
                    with m.If(waiting[turn]):
                        m.d.comb += picked.eq(turn)

        # ---- its header, and whom it goes to -----------------------------------------------------------------------
        said = result.payload
        answer = Signal(HEADER)
        m.d.comb += [
            answer.version_type.eq(
                Mux(
                    said.up,
                    Mux(said.empty, version_type(FrameType.ABSTAIN), version_type(FrameType.CONTRIBUTE)),
                    version_type(FrameType.RESULT),
                )
            ),
            answer.flags.eq(
                Mux(said.flags.majority, Flags.MAJORITY.value, 0)
                | Mux(said.flags.partial, Flags.PARTIAL.value, 0)
                | Mux(said.flags.resend, Flags.RESEND.value, 0)
            ),
            answer.worker.eq(said.destination),
            answer.reason.eq(Reason.NONE),
            *(
                answer[name].eq(said[name])
                for name in ("job", "missing", "chunk", "plane", "planes", "voters", "lines", "epoch")
            ),
        ]
        beat = Signal(
            data.StructLayout(
                {
                    "first": unsigned(1),
                    "last": unsigned(1),
                    "header": unsigned(HEADER_BITS),
                    "address": ENDPOINT,  # if it is known
                    "known": unsigned(1),
                    "group": unsigned(1),
                }
            )
        )
        takes = Signal()
        m.d.comb += beat.first.eq(~inside)
        with m.If(inside):
            with m.If(previous == _Source.RELAY):
                m.d.comb += [relay.ready.eq(advance), takes.eq(relay.valid), beat.last.eq(relay.payload.last)]
            with m.Else():
                m.d.comb += [result.ready.eq(advance), takes.eq(result.valid), beat.last.eq(said.last)]
        with m.Else():
            m.d.comb += takes.eq(nack.valid | relay.valid | result.valid)
            with m.If(picked == _Source.NACK):
                m.d.comb += [
                    nack.ready.eq(advance),
                    beat.last.eq(1),
                    beat.header.eq(header_to_wire(nack.payload.header)),
                    beat.address.eq(nack.payload.destination),
                    beat.known.eq(1),
                ]
            with m.Elif(picked == _Source.RELAY):
                m.d.comb += [
                    relay.ready.eq(advance),
                    beat.last.eq(relay.payload.last),
                    beat.header.eq(header_to_wire(relay.payload.header)),
                    beat.group.eq(relay.payload.group),
                    self.lookup.bank.eq(relay.payload.bank),
                    self.lookup.worker.eq(relay.payload.worker),
                ]
            with m.Else():
                m.d.comb += [
                    result.ready.eq(advance & said.up & said.empty),
                    beat.last.eq(said.up & said.empty),
                    beat.header.eq(header_to_wire(answer)),
                    beat.group.eq(said.group),
                    self.lookup.bank.eq(said.bank),
                    self.lookup.worker.eq(said.worker),
                    self.lookup.parent.eq(said.up),
                ]
        m.d.comb += [
            self.lookup.enable.eq(advance & ~inside),
            self.nack_sent.eq(nack.valid & nack.ready),
        ]
        with m.If(takes & advance):
            m.d.sync += inside.eq(~beat.last)
            with m.If(~inside):
                m.d.sync += previous.eq(picked)

        # ---- out ---------------------------------------------------------------------------------------------------
        held = Signal.like(beat, name="held", reset_less=True)
        line = Signal(LANES, reset_less=True)
        payload = self.datagram.payload
        with m.If(advance):
            # A header's line means nothing, so which line it is depends on a register alone.
            m.d.sync += [
                out_valid.eq(takes),
                held.eq(beat),
                line.eq(Mux(previous == _Source.RELAY, relay.payload.data, said.data)),
            ]
        m.d.comb += [
            *(payload[name].eq(held[name]) for name in ("first", "last", "header")),
            payload.data.eq(line),
            Value.cast(payload.destination).eq(
                Mux(held.known, held.address, Mux(held.group, self.group, self.lookup.endpoint))
            ),
        ]
        return m
