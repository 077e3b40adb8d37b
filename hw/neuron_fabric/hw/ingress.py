"""The way in: datagrams from the receiver, of which those go on to the core, or to the relay, that rule 1 lets through.

Pipeline, for a header beat that is transferred in cycle 0:

| cycle | what happens |
|---|---|
| 0 | checks that need the header alone; which job it is of |
| 1 | that job's configuration is selected, the sender's address looked up |
| 2 | epoch, sender, plane and voters are compared |
| 3 | the first check that failed decides |
| 4 | the verdict is known: strobes; an ABSTAIN is at ``contribution``, or the first line is in the next cycle |

The lines of a frame wait for its verdict in the pipeline's registers, so frames follow each other without a pause.
"""

from __future__ import annotations

from typing import Any

from amaranth import Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.hw.addresses import lookup_signature
from neuron_fabric.hw.framing import ENDPOINT, HEADER, LANES, header_from_wire, version_type
from neuron_fabric.hw.layout import FrameKind, config_layout, contribution_layout, index_width, of_bank
from neuron_fabric.hw.nacks import REFUSED
from neuron_fabric.hw.udp_rx import received_layout
from neuron_fabric.model.params import LINE_BYTES, ReducerParams
from neuron_fabric.model.reducer import BITMAP_BYTES
from neuron_fabric.model.wire import (
    DESTINATION_ALL,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Flags,
    FrameType,
    Reason,
)

__all__ = ["CHECKS", "INGRESS_EVENTS", "Ingress", "relayed_layout"]

CHECKS: tuple[tuple[str, Reason], ...] = (
    ("short", Reason.BAD_LENGTH),
    ("magic", Reason.BAD_MAGIC),
    ("version", Reason.BAD_VERSION),
    ("undefined", Reason.BAD_TYPE),
    # Up to here the header cannot be parsed, and nobody is told.
    ("type", Reason.BAD_TYPE),
    ("length", Reason.BAD_LENGTH),
    ("job", Reason.JOB_NOT_OPEN),
    ("epoch", Reason.WRONG_EPOCH),
    ("sender", Reason.WRONG_SENDER),
    ("plane", Reason.BAD_PLANE),
    ("lines", Reason.BAD_LINES),
    ("voters", Reason.BAD_VOTERS),
)
"""What is checked, in this order, and the reason that is counted and told for the first check that fails."""
_UNPARSED = 4

_REASONS = tuple(dict.fromkeys(reason for _check, reason in CHECKS))
INGRESS_EVENTS = data.StructLayout({"frame": 1, **{f"refused_{reason.name.lower()}": 1 for reason in _REASONS}})
"""One-cycle strobes, by the names of the counters; at most one refusal a frame."""


def relayed_layout(params: ReducerParams) -> data.StructLayout:
    """A parent's RESULT for the members of ``bank``: a strobe for the beat with ``first``, and then for its ``lines``.

    ``header``, which is as the members are to see it, ``bank`` and ``lines`` count beside ``first``, ``data`` else.
    """
    return data.StructLayout(
        {
            "valid": unsigned(1),
            "first": unsigned(1),
            "last": unsigned(1),
            "header": HEADER,
            "bank": unsigned(index_width(params.jobs)),
            "lines": unsigned(bits_for(params.lines_per_chunk + 1)),
            "data": unsigned(LANES),
        }
    )


class Ingress(wiring.Component):
    """Validates frames as :class:`~neuron_fabric.model.reducer.SignCountReducer` does, at the receiver's rate.

    ``datagram`` waits only while ``contribution`` does, or for ``hold`` between two frames.

    A frame is judged by the registers as they are in the cycle in which its header is transferred, and what else it
    needs of an open job's registers is read in the two cycles after. While ``hold`` is 1 no header is transferred.

    Parameters
    ----------
    params : ReducerParams
        ``lanes`` must be 512.

    Members
    -------
    datagram : stream of :func:`~neuron_fabric.hw.udp_rx.received_layout`, in
    open : in, one bit per bank
    config : array of :func:`~neuron_fabric.hw.layout.config_layout`, in
    leaves : array of the most voters of a contribution, per bank, in
    hold : in
    quiet : out
        No frame is inside: what was transferred has left, and had its consequences, in earlier cycles.
    lookup : :func:`~neuron_fabric.hw.addresses.lookup_signature`
    contribution : stream of :func:`~neuron_fabric.hw.layout.contribution_layout`, out
    relayed : :func:`relayed_layout`, out
    refused : :data:`~neuron_fabric.hw.nacks.REFUSED`, out
    events : :data:`INGRESS_EVENTS`, out
    """

    LATENCY = 4
    """Cycles from the transfer of a header beat to its verdict, and of a line to its being valid at ``contribution``"""

    def __init__(self, params: ReducerParams) -> None:
        self.params = params
        super().__init__(
            {
                "datagram": In(stream.Signature(received_layout(params.lines_per_chunk + 1))),
                "open": In(params.jobs),
                "config": In(data.ArrayLayout(config_layout(params), params.jobs)),
                "leaves": In(data.ArrayLayout(unsigned(16), params.jobs)),
                "hold": In(1),
                "quiet": Out(1),
                "lookup": Out(lookup_signature(params)),
                "contribution": Out(stream.Signature(contribution_layout(params))),
                "relayed": Out(relayed_layout(params)),
                "refused": Out(REFUSED),
                "events": Out(INGRESS_EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One pipeline; a number at a name's end is the cycle in which the signal belongs to a beat."""
        m = Module()
        params = self.params
        received = received_layout(params.lines_per_chunk + 1)
        head = data.StructLayout(
            {"header": HEADER, "source": ENDPOINT, "count": received["lines"].shape, "failed": unsigned(len(CHECKS))}
        )
        check = {name: index for index, (name, _reason) in enumerate(CHECKS)}

        # The pipeline moves as a whole, unless what did not find the core ready still waits in the register behind it.
        move = Signal()

        # ---- 0: the port; which job is it? -------------------------------------------------------------------------
        beat = self.datagram.payload
        numbers0 = {name: self._bound(m, value, name) for name, value in header_from_wire(beat.header).items()}
        taken = Signal()
        kind0 = Signal(4)
        is_result0, is_abstain0, partial0 = Signal(), Signal(), Signal()
        length0 = Signal(received["length"].shape)
        full_length0 = Signal(range(HEADER_BYTES + BITMAP_BYTES + LINE_BYTES * 255 + 1))
        owners0 = Signal(params.jobs)  # of a RESULT the children that it is for
        children0 = Signal(params.jobs)
        failed0 = Signal(len(CHECKS))
        m.d.comb += [
            self.datagram.ready.eq(move & ~(beat.first & self.hold)),
            taken.eq(self.datagram.valid & self.datagram.ready),
            kind0.eq(numbers0["version_type"][:4]),
            is_result0.eq(kind0 == FrameType.RESULT),
            is_abstain0.eq(kind0 == FrameType.ABSTAIN),
            partial0.eq((numbers0["flags"] & Flags.PARTIAL.value) != 0),
            length0.eq(beat.length),
            full_length0.eq(
                numbers0["lines"] * LINE_BYTES + Mux(is_result0 & partial0, HEADER_BYTES + BITMAP_BYTES, HEADER_BYTES)
            ),
        ]
        for bank in range(params.jobs):
            config: Any = self.config[bank]
            worker0 = numbers0["worker"]
            to_child0 = (worker0 == config.parent_worker) | (worker0 == DESTINATION_ALL)
            m.d.comb += [
                children0[bank].eq(self.open[bank] & config.child),
                owners0[bank].eq(
                    Mux(
                        is_result0,
                        children0[bank] & (numbers0["job"] == config.parent_job) & to_child0,
                        self.open[bank] & (numbers0["job"] == config.job),
                    )
                ),
            ]
        m.d.comb += [
            failed0[check["short"]].eq(length0 < HEADER_BYTES),
            failed0[check["magic"]].eq(numbers0["magic"] != MAGIC),
            failed0[check["version"]].eq(numbers0["version_type"][4:] != VERSION),
            failed0[check["undefined"]].eq(kind0 > max(FrameType)),
            failed0[check["type"]].eq(
                Mux(is_result0, ~children0.any(), (kind0 != FrameType.CONTRIBUTE) & ~is_abstain0)
            ),
            failed0[check["length"]].eq(length0 != Mux(is_abstain0, HEADER_BYTES, full_length0)),
            failed0[check["job"]].eq(~owners0.any()),
            failed0[check["lines"]].eq(
                ~is_result0 & ((numbers0["lines"] == 0) | (numbers0["lines"] > params.lines_per_chunk))
            ),
        ]

        head1 = Signal(head, reset_less=True)
        owners1 = Signal(params.jobs, reset_less=True)
        with m.If(taken & beat.first):
            m.d.sync += [
                owners1.eq(owners0),
                head1.source.eq(beat.source),
                head1.count.eq(beat.lines),
                head1.failed.eq(failed0),
                *(head1.header[name].eq(numbers0[name]) for name, _field in HEADER),
            ]

        # ---- the beats on their way --------------------------------------------------------------------------------
        valid: Value = taken
        first, last, line = beat.first, beat.last, beat.data
        flow = []
        for stage in range(1, self.LATENCY + 1):
            stage_valid = Signal(name=f"valid{stage}")
            stage_first, stage_last = (Signal(name=f"{n}{stage}", reset_less=True) for n in ("first", "last"))
            stage_line = Signal(LANES, name=f"data{stage}", reset_less=True)
            with m.If(move):
                m.d.sync += [
                    stage_valid.eq(valid),
                    stage_first.eq(first),
                    stage_last.eq(last),
                    stage_line.eq(line),
                ]
            valid, first, last, line = stage_valid, stage_first, stage_last, stage_line
            flow.append((stage_valid, stage_first))
        (valid1, first1), (valid2, first2), (valid3, first3), (valid4, first4) = flow
        last4, data4 = last, line

        # ---- 1: the job's configuration, the sender's address ------------------------------------------------------
        is_result1 = Signal()
        bank1 = Signal(index_width(params.jobs))
        for bank in reversed(range(params.jobs)):
            with m.If(owners1[bank]):
                m.d.comb += bank1.eq(bank)
        m.d.comb += [
            is_result1.eq(head1.header.version_type[:4] == FrameType.RESULT),
            self.lookup.enable.eq(move & valid1 & first1),
            self.lookup.bank.eq(bank1),
            self.lookup.worker.eq(head1.header.worker),
            self.lookup.parent.eq(is_result1),
        ]

        def configured(name: str) -> Value:
            """A field of the configuration of the frame's job."""
            return of_bank(bank1, (Value.cast(self.config[bank][name]) for bank in range(params.jobs)))

        worker1 = head1.header.worker
        members1 = Signal(params.workers)
        m.d.comb += members1.eq(configured("members"))
        head2 = Signal(head, reset_less=True)
        is_result2, member2 = Signal(reset_less=True), Signal(reset_less=True)
        bank2 = Signal.like(bank1, reset_less=True)
        job2 = Signal(16, reset_less=True)
        epoch2 = Signal(16, reset_less=True)
        own_epoch2 = Signal(16, reset_less=True)
        planes2 = Signal(8, reset_less=True)
        leaves2 = Signal(16, reset_less=True)
        with m.If(move & valid1 & first1):
            m.d.sync += [
                head2.eq(head1),
                is_result2.eq(is_result1),
                bank2.eq(bank1),
                member2.eq(is_result1 | ((worker1 < params.workers) & members1.bit_select(worker1[:6], 1))),
                job2.eq(configured("job")),
                epoch2.eq(Mux(is_result1, configured("parent_epoch"), configured("epoch"))),
                own_epoch2.eq(configured("epoch")),
                planes2.eq(configured("planes")),
                leaves2.eq(of_bank(bank1, (self.leaves[bank] for bank in range(params.jobs)))),
            ]

        # ---- 2: comparisons ----------------------------------------------------------------------------------------
        header2 = head2.header
        sender2 = Signal()
        failed2 = Signal(len(CHECKS))
        m.d.comb += [
            sender2.eq(member2 & (Value.cast(self.lookup.endpoint) == Value.cast(head2.source))),
            failed2.eq(head2.failed),
            failed2[check["epoch"]].eq(header2.epoch != epoch2),
            failed2[check["sender"]].eq(~sender2),
            failed2[check["plane"]].eq(~is_result2 & ((header2.planes != planes2) | (header2.plane >= planes2))),
            failed2[check["voters"]].eq(
                (header2.version_type[:4] == FrameType.CONTRIBUTE)
                & ((header2.voters == 0) | (header2.voters > leaves2))
            ),
        ]
        head3 = Signal(head, reset_less=True)
        is_result3, pinned3 = Signal(reset_less=True), Signal(reset_less=True)
        bank3 = Signal.like(bank1, reset_less=True)
        job3, own_epoch3 = Signal(16, reset_less=True), Signal(16, reset_less=True)
        with m.If(move & valid2 & first2):
            m.d.sync += [
                head3.eq(head2),
                head3.failed.eq(failed2),
                is_result3.eq(is_result2),
                pinned3.eq(sender2 & ~is_result2 & ~head2.failed[check["job"]]),
                bank3.eq(bank2),
                job3.eq(job2),
                own_epoch3.eq(own_epoch2),
            ]

        # ---- 3: the verdict ----------------------------------------------------------------------------------------
        reason3 = Signal(8)
        abstains3 = Signal()
        for index, (_name, reason) in reversed(list(enumerate(CHECKS))):
            with m.If(head3.failed[index]):
                m.d.comb += reason3.eq(reason)
        m.d.comb += abstains3.eq(head3.header.version_type[:4] == FrameType.ABSTAIN)

        header4 = Signal(HEADER, reset_less=True)
        source4 = Signal(ENDPOINT, reset_less=True)
        count4 = Signal.like(head3.count, reset_less=True)
        bank4 = Signal.like(bank1, reset_less=True)
        job4, own_epoch4 = Signal(16, reset_less=True), Signal(16, reset_less=True)
        reason4 = Signal(8, reset_less=True)
        # These say what becomes of the frame in stage 4; the last is for a NACK.
        contributes4, abstains4, relayed4, told4 = (Signal(reset_less=True) for _ in range(4))
        with m.If(move & valid3 & first3):
            m.d.sync += [
                header4.eq(head3.header),
                source4.eq(head3.source),
                count4.eq(head3.count),
                bank4.eq(bank3),
                job4.eq(job3),
                own_epoch4.eq(own_epoch3),
                reason4.eq(reason3),
                contributes4.eq((reason3 == Reason.NONE) & ~is_result3 & ~abstains3),
                abstains4.eq((reason3 == Reason.NONE) & abstains3),
                relayed4.eq((reason3 == Reason.NONE) & is_result3),
                told4.eq((reason3 != Reason.NONE) & ~head3.failed[:_UNPARSED].any() & pinned3),
            ]

        # ---- 4: to the core, behind which what it does not take at once waits --------------------------------------
        layout = contribution_layout(params)
        beat4 = Signal(layout)
        gives4 = Signal()
        after_header4 = Signal(reset_less=True)
        waits = Signal()
        waiting = Signal(layout, reset_less=True)
        m.d.comb += [
            gives4.eq(valid4 & Mux(first4, abstains4, contributes4)),
            beat4.first.eq(first4 | after_header4),
            beat4.last.eq(last4),
            beat4.kind.eq(Mux(abstains4, FrameKind.ABSTAIN, FrameKind.CONTRIBUTE)),
            beat4.bank.eq(bank4),
            *(beat4[name].eq(header4[name]) for name in ("worker", "chunk", "plane", "lines", "voters")),
            beat4.data.eq(data4),
            move.eq(~waits),
            self.contribution.valid.eq(waits | gives4),
            Value.cast(self.contribution.payload).eq(Mux(waits, waiting, beat4)),
        ]
        with m.If(move & valid4):
            m.d.sync += after_header4.eq(first4)
        m.d.sync += waits.eq(self.contribution.valid & ~self.contribution.ready)
        with m.If(~waits):
            m.d.sync += waiting.eq(beat4)

        # ---- 4: what else it leads to ------------------------------------------------------------------------------
        judged4 = Signal()
        relayed = self.relayed
        m.d.comb += [
            judged4.eq(move & valid4 & first4),
            relayed.valid.eq(move & valid4 & relayed4),
            relayed.first.eq(first4),
            relayed.last.eq(last4),
            relayed.header.eq(header4),
            relayed.header.version_type.eq(version_type(FrameType.RESULT)),
            relayed.header.flags.eq(header4.flags & (Flags.MAJORITY | Flags.PARTIAL).value),
            relayed.header.job.eq(job4),
            relayed.header.worker.eq(DESTINATION_ALL),
            relayed.header.reason.eq(Reason.NONE),
            relayed.header.epoch.eq(own_epoch4),
            relayed.bank.eq(bank4),
            relayed.lines.eq(count4),
            relayed.data.eq(data4),
            self.refused.valid.eq(judged4 & told4),
            *(
                self.refused.echo[name].eq(header4[name])
                for name in ("job", "worker", "chunk", "plane", "planes", "lines", "epoch")
            ),
            self.refused.echo.reason.eq(reason4),
            self.refused.source.eq(source4),
            self.events.frame.eq(judged4),
            *(self.events[f"refused_{reason.name.lower()}"].eq(judged4 & (reason4 == reason)) for reason in _REASONS),
        ]

        inside = Signal()
        with m.If(taken):
            m.d.sync += inside.eq(~beat.last)
        m.d.comb += self.quiet.eq(~(inside | valid1 | valid2 | valid3 | valid4 | waits))
        return m

    @staticmethod
    def _bound(m: Module, value: Value, name: str) -> Signal:
        signal = Signal.like(value, name=f"{name}0")
        m.d.comb += signal.eq(value)
        return signal
