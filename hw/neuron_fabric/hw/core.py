"""The reducer core: contributions in, results out, one line a cycle.

Pipeline, for a beat that is transferred in cycle 0:

| cycle | stage | what happens |
|---|---|---|
| 0 | input | look up the slot version's word (first beat of a frame) |
| 1 | judge | verdict and write-back of the word; tally read address; a result is reserved |
| 2 | add | tally of the line (read, forwarded or zero) plus the weighted bits; write back; copy to the result buffer |
| 3 | fetch | the result buffer reads the line |
| 4 | select | plane of the tally, or comparison with the thresholds |
| 5 | output | the line is at ``result`` |

Only the judge stage ever waits, and only for one thing: a frame that claims a slot version whose result is being
copied out of the tally memory waits until the copy has read its last line (at most K lines, and they are then read one
a cycle). The output never holds the input.

**Forwarded.** The memories show old data in the cycle of a write. A slot version's word is read in cycle 0 and written
in cycle 1, a tally is read in cycle 1 and written in cycle 2: for both the hazard has distance 1, and both are
forwarded from a register that holds the last word written. From distance 2 on the memory is up to date. So frames of
one line can follow each other on one slot and line in consecutive cycles.

**Latency.** The result is sent while it is summed: when buffer and copier are free, the first line of a result is valid
:attr:`ReducerCore.LATENCY` cycles after the *first* beat of the completing frame was transferred, so never later than
that after its last. An ABSTAIN that completes a chunk has the same latency.

**Two ways out.** If the result buffer is free when a frame completes its chunk, the finished lines go straight into
it. Otherwise, and for results that are sent again, the destination is noted in the slot version's word and a copier
reads the lines from the tally memory in cycles in which the judge stage does not read it: between frames, during frames
that are dropped, and during first contributions, which overwrite. A note is fetched in a cycle in which no frame
begins.

If the output stalls for long while the input never pauses, results stay owed: each later completion finds the copier at
work and is owed too, and the copier has only the cycles just named. Then results are later than :attr:`LATENCY` until
the input pauses, and with chunks of one line and an input that never pauses at all an owed result may be dropped when
its version is claimed; the workers' retransmissions ask for it again. Frames with a header leave a cycle each.
"""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from neuron_fabric.hw.lanes import PlaneAdder, TallyMemory, tally_layout
from neuron_fabric.hw.layout import (
    EVENTS,
    FrameKind,
    config_layout,
    contribution_layout,
    index_width,
    max_shift,
    result_layout,
    version_width,
)
from neuron_fabric.hw.results import ResultBuffer
from neuron_fabric.hw.slots import SlotTable
from neuron_fabric.model.params import ReducerParams

__all__ = ["ReducerCore"]


class ReducerCore(wiring.Component):
    """Exact sums of weighted bit planes from many workers, for one job.

    Parameters
    ----------
    params : ReducerParams

    Members
    -------
    config : :func:`~neuron_fabric.hw.layout.config_layout`, in
        The job; static while in use. Make it with :func:`~neuron_fabric.hw.layout.make_config`.
    contribution : stream of :func:`~neuron_fabric.hw.layout.contribution_layout`, in
        Frames that were validated (sender, plane and line count in range) and are whole: ``lines`` beats, or one for an
        ABSTAIN.
    result : stream of :func:`~neuron_fabric.hw.layout.result_layout`, out
    events : :data:`~neuron_fabric.hw.layout.EVENTS`, out
        Strobes, two cycles after the transfer they belong to (``result_sent``: one cycle).
    """

    LATENCY = 5
    """Cycles from the transfer of the completing frame's first beat to the result's first beat being valid."""

    def __init__(self, params: ReducerParams) -> None:
        self.params = params
        super().__init__(
            {
                "config": In(config_layout(params)),
                "contribution": In(stream.Signature(contribution_layout(params))),
                "result": Out(stream.Signature(result_layout(params))),
                "events": Out(EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """See the table at the top of this module."""
        m = Module()
        params = self.params
        version_bits = version_width(params)
        line_bits = int(ceil_log2(params.lines_per_chunk))
        planes_layout = tally_layout(params.lanes, params.acc_bits)

        m.submodules.slots = slots = SlotTable(params)
        m.submodules.results = results = ResultBuffer(params)
        m.submodules.adder = adder = PlaneAdder(params.lanes, params.acc_bits, max_shift(params) + 1)
        m.submodules.tallies = tallies = TallyMemory(params.lanes, params.acc_bits, 1 << (version_bits + line_bits))
        m.d.comb += [slots.config.eq(self.config), results.config.eq(self.config)]
        wiring.connect(m, results.result, wiring.flipped(self.result))

        # ---- input: take a beat, look its slot version up ----------------------------------------------------------
        beat = Signal(contribution_layout(params), reset_less=True)
        beat_valid = Signal()
        fetch_valid = Signal()
        wait = Signal()
        transfer = Signal()
        begins = Signal()
        copier_busy = Signal()
        copier_version = Signal(version_bits)
        straight = Signal()  # the frame in the judge stage copies its own lines to the result buffer
        completing = Signal()  # the frame in the judge stage completes its chunk, but not all its lines are there yet
        scan = Signal(version_bits)  # the slot version whose owed results are fetched next
        fetch = Signal()
        m.d.comb += [
            self.contribution.ready.eq(~wait),
            transfer.eq(self.contribution.valid & ~wait),
            begins.eq(transfer & self.contribution.payload.first),
            fetch.eq(~begins & ~wait & slots.waiting.bit_select(scan, 1) & ~copier_busy & ~completing & results.room),
            slots.look.eq(begins | fetch),
            slots.look_version.eq(Mux(begins, self.contribution.payload.chunk[:version_bits], scan)),
        ]
        with m.If(~wait):
            m.d.sync += [beat_valid.eq(transfer), fetch_valid.eq(fetch)]
        with m.If(transfer):
            m.d.sync += beat.eq(self.contribution.payload)
        with m.If(~slots.waiting.bit_select(scan, 1) | (fetch_valid & slots.launch)):
            m.d.sync += scan.eq(scan + 1)

        # ---- judge: what becomes of the beat -----------------------------------------------------------------------
        frame_accepted, frame_overwrite, frame_completes = Signal(), Signal(), Signal()  # judged at its first beat
        accepted, overwrite, completes = Signal(), Signal(), Signal()  # of the frame of this beat
        line = Signal(index_width(params.lines_per_chunk))
        this_line = Signal.like(line)
        version = Signal(version_bits)  # of the beat; slots.version may be that of a fetch
        first = Signal()
        go = Signal()
        contributes = Signal()
        m.d.comb += [
            first.eq(beat_valid & beat.first),
            version.eq(beat.chunk[:version_bits]),
            contributes.eq(beat.kind == FrameKind.CONTRIBUTE),
            slots.frame.eq(beat),
            slots.look_valid.eq(first),
            slots.fetch_valid.eq(fetch_valid),
            slots.free.eq(~copier_busy & ~completing & results.room),
            wait.eq(slots.claims & copier_busy & (copier_version == version)),
            slots.commit.eq(~wait),
            go.eq(beat_valid & ~wait),
            this_line.eq(Mux(beat.first, 0, line)),
            accepted.eq(Mux(first, slots.accepted, frame_accepted)),
            overwrite.eq(Mux(first, slots.overwrite, frame_overwrite)),
            completes.eq(Mux(first, slots.completes, frame_completes)),
        ]
        with m.If(go):
            m.d.sync += [
                frame_accepted.eq(accepted),
                frame_overwrite.eq(overwrite),
                frame_completes.eq(completes),
                line.eq(this_line + 1),
            ]

        # ---- judge: results that start -----------------------------------------------------------------------------
        launch = Signal()
        launch_straight = Signal()
        launch_copy = Signal()
        m.d.comb += [
            launch.eq(slots.launch & slots.commit),
            launch_straight.eq(launch & slots.completes & contributes),
            launch_copy.eq(launch & ~launch_straight),
            results.reserve.eq(launch),
            results.meta.eq(slots.meta),
        ]
        with m.If(go & beat.last):
            m.d.sync += [straight.eq(0), completing.eq(0)]
        with m.Elif(go & beat.first):
            m.d.sync += [straight.eq(launch_straight), completing.eq(completes)]

        # ---- judge: who reads the tally memory ---------------------------------------------------------------------
        # At a first beat this is not known yet, so the beat has the port. But on the slot version that the copier is at
        # no frame is accepted before the copier has finished: it is complete, and a claim waits.
        reads = Signal()
        copies = Signal()
        copier_line, copier_end, copier_blank = Signal.like(line), Signal.like(line), Signal()
        copy_version = Signal(version_bits)
        copy_line, copy_end, copy_blank = Signal.like(line), Signal.like(line), Signal()
        with m.If(beat.first):
            m.d.comb += reads.eq(beat_valid & contributes & ~(copier_busy & (copier_version == version)))
        with m.Else():
            m.d.comb += reads.eq(beat_valid & contributes & frame_accepted & ~frame_overwrite)
        m.d.comb += [
            copies.eq((copier_busy | launch_copy) & ~reads),
            copy_version.eq(Mux(copier_busy, copier_version, slots.version)),
            copy_line.eq(Mux(copier_busy, copier_line, 0)),
            copy_end.eq(Mux(copier_busy, copier_end, slots.meta.lines - 1)),
            copy_blank.eq(Mux(copier_busy, copier_blank, slots.blank)),
        ]
        with m.If(copier_busy | launch_copy):
            m.d.sync += [
                copier_busy.eq(~(copies & (copy_line == copy_end))),
                copier_version.eq(copy_version),
                copier_line.eq(copy_line + copies),
                copier_end.eq(copy_end),
                copier_blank.eq(copy_blank),
            ]
        with m.If(reads):
            m.d.comb += tallies.read_address.eq(Cat(this_line[:line_bits], version))
        with m.Else():
            m.d.comb += tallies.read_address.eq(Cat(copy_line[:line_bits], copy_version))

        # ---- add ---------------------------------------------------------------------------------------------------
        # Controls that go to all lanes come straight from registers.
        add = Signal()
        address = Signal(version_bits + line_bits)
        forward, blank, copied, summed = Signal(), Signal(), Signal(), Signal()
        adder_start = Signal.like(adder.start)
        adder_negative, adder_overwrite = Signal(), Signal()
        bits = Signal(params.lanes, reset_less=True)
        total = Signal(planes_layout, reset_less=True)  # the last one written
        tally = Signal(planes_layout)
        m.d.sync += [
            add.eq(go & contributes & accepted),
            address.eq(Cat(this_line[:line_bits], version)),
            forward.eq(add & (address == tallies.read_address)),
            blank.eq(copies & copy_blank),
            copied.eq(copies),
            summed.eq(go & (launch_straight | straight)),
            adder_overwrite.eq(overwrite),
            adder_negative.eq(self.config.negative.bit_select(beat.plane, 1)),
            adder_start.eq(1 << self.config.shift[beat.plane]),
            bits.eq(beat.data),
            total.eq(adder.total),
        ]
        m.d.comb += [
            tally.eq(Mux(blank, 0, Mux(forward, total, tallies.read_data))),
            adder.tally.eq(tally),
            adder.bits.eq(bits),
            adder.start.eq(adder_start),
            adder.negative.eq(adder_negative),
            adder.overwrite.eq(adder_overwrite),
            tallies.write_enable.eq(add),
            tallies.write_address.eq(address),
            tallies.write_data.eq(adder.total),
            results.write.eq(copied | summed),
            results.line.eq(Mux(summed, adder.total, tally)),
        ]

        m.d.sync += [
            self.events.accepted_line.eq(go & accepted & contributes),
            self.events.accepted_frame.eq(go & accepted & beat.last),
            self.events.duplicate.eq(go & slots.duplicate),
            self.events.stale.eq(go & slots.stale),
            self.events.abandoned.eq(go & slots.abandoned),
            self.events.refused.eq(go & slots.refused),
            self.events.completed.eq(go & accepted & completes & beat.last),
            self.events.result_sent.eq(results.sent),
        ]
        return m
