"""The reducer core: contributions in, results out, one line a cycle, for several jobs.

Pipeline, for a beat that is transferred in cycle 0:

| cycle | stage | what happens |
|---|---|---|
| 0 | input | look up the slot version's word and the job's configuration (first beat of a frame) |
| 1 | judge | verdict and write-back of the word; tally read address; a result is reserved |
| 2 | add | tally of the line (read, forwarded or zero) plus the weighted bits; write back; copy to the result buffer |
| 3 | fetch | the result buffer reads the line |
| 4 | select | plane of the tally, or comparison with the thresholds |
| 5 | output | the line is at ``result`` |

The output never holds the input. Two things do, and neither for long: a frame that claims a slot version whose result
is being copied out of the tally memory waits until the copy has read its last line (at most K lines, and they are then
read one a cycle); and an input that leaves no cycle to the work behind it is held for one cycle in
:attr:`ReducerCore.PATIENCE`.

**Forwarded.** The memories show old data in the cycle of a write. A slot version's word is read in cycle 0 and written
in cycle 1, a tally is read in cycle 1 and written in cycle 2: for both the hazard has distance 1, and both are
forwarded from a register that holds the last word written. From distance 2 on the memory is up to date. So frames of
one line can follow each other on one slot and line in consecutive cycles.

**Latency.** The result is sent while it is summed: when the result buffer has room and nothing else in it, the first
line of a result is valid :attr:`ReducerCore.LATENCY` cycles after the *first* beat of the completing frame was
transferred, so never later than that after its last. An ABSTAIN that completes a chunk has the same latency if the
copier is free.

**Two ways out.** If the result buffer has room when a frame completes its chunk, the finished lines go straight into
it. Otherwise, and for results that are sent again or that the straggler rule completes, the destination is noted in the
slot version's word, and a copier reads the lines from the tally memory in cycles in which the judge stage does not read
it: between frames, during frames that are dropped, and during first contributions, which overwrite. Both can go on at
once, so results that were owed while the output stood still do not hold up those that follow.

**Visits.** In cycles in which no frame begins, slot versions that are owed a result or may have timed out are visited
in turn. A visit changes nothing while lines of a frame are still being added to its slot version.

**Opening and closing** a job takes effect between frames: see ``hold``.
"""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from neuron_fabric.hw.lanes import PlaneAdder, TallyMemory, tally_layout
from neuron_fabric.hw.layout import (
    EVENTS,
    FrameKind,
    config_layout,
    contribution_layout,
    index_width,
    of_bank,
    refusal_layout,
    result_layout,
    version_width,
)
from neuron_fabric.hw.results import ResultBuffer
from neuron_fabric.hw.slots import SlotTable
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import Reason

__all__ = ["ReducerCore"]


class ReducerCore(wiring.Component):
    """Exact sums of weighted bit planes from many workers, for several jobs that share a pool of slots.

    Parameters
    ----------
    params : ReducerParams

    Members
    -------
    config : array of :func:`~neuron_fabric.hw.layout.config_layout`, in
        The jobs, by bank; each static from its opening until ``hold`` has fallen after its closing. Make one with
        :func:`~neuron_fabric.hw.layout.make_config`.
    group : in
        Results for all members of a job with ``multicast`` go to the multicast group, once; else to each in turn.
    contribution : stream of :func:`~neuron_fabric.hw.layout.contribution_layout`, in
        Frames that were validated (job open, sender, plane, line count and voters in range) and are whole: ``lines``
        beats, or one for an ABSTAIN.
    result : stream of :func:`~neuron_fabric.hw.layout.result_layout`, out
    events : :data:`~neuron_fabric.hw.layout.EVENTS`, out
        Strobes, two cycles after the transfer they belong to, or one more for each cycle that a claim waited
        (``result_sent``: one cycle).
    refusal : :func:`~neuron_fabric.hw.layout.refusal_layout`, out
        With the event ``stale`` or ``refused``: what a NACK needs.
    opened, closed : in, one bit per bank
        Strobes: the job's chunks are forgotten, and its results but for those that the output has taken up (three at
        most).
    quiet : in
        The stage in front has no frame whose header it has looked at and whose last beat is not here yet.
    hold : out
        From such a strobe on until it has taken effect. Meanwhile the stage in front looks at no new header, and no
        ``config`` changes. It takes effect when the stage in front is quiet and what it sent has been worked off, which
        takes about K cycles and no output can delay.
    level : out
        Slot versions that hold an incomplete chunk.
    """

    LATENCY = 5
    """Cycles from the transfer of the completing frame's first beat to the result's first beat being valid."""
    PATIENCE = 32
    """Cycles without progress after which visits or copies get one cycle of the input."""

    def __init__(self, params: ReducerParams) -> None:
        self.params = params
        super().__init__(
            {
                "config": In(data.ArrayLayout(config_layout(params), params.jobs)),
                "group": In(1),
                "contribution": In(stream.Signature(contribution_layout(params))),
                "result": Out(stream.Signature(result_layout(params))),
                "events": Out(EVENTS),
                "refusal": Out(refusal_layout(params)),
                "opened": In(params.jobs),
                "closed": In(params.jobs),
                "quiet": In(1),
                "hold": Out(1),
                "level": Out(bits_for(2 * params.slots)),
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
        m.submodules.adder = adder = PlaneAdder(params.lanes, params.acc_bits, params.max_shift + 1)
        m.submodules.tallies = tallies = TallyMemory(params.lanes, params.acc_bits, 1 << (version_bits + line_bits))
        m.d.comb += [results.config.eq(self.config), results.group.eq(self.group), self.level.eq(slots.level)]
        wiring.connect(m, results.result, wiring.flipped(self.result))

        # ---- input: take a beat, look its slot version up ----------------------------------------------------------
        beat = Signal(contribution_layout(params), reset_less=True)
        beat_valid = Signal()
        visit_valid = Signal()
        wait = Signal()
        yields = Signal()  # this cycle is for the work behind
        transfer = Signal()
        begins = Signal()
        scan = Signal(version_bits)  # the slot version that is visited next
        waiting, urgent = Signal(), Signal()
        some_armed = Signal()
        visit = Signal()
        bank = Signal(index_width(params.jobs))
        job = Signal(config_layout(params), reset_less=True)
        m.d.comb += [
            self.contribution.ready.eq(~wait & ~yields),
            transfer.eq(self.contribution.valid & self.contribution.ready),
            begins.eq(transfer & self.contribution.payload.first),
            slots.scan.eq(scan),
            waiting.eq(slots.waiting.bit_select(scan, 1)),
            urgent.eq(slots.armed.bit_select(scan, 1) | (waiting & slots.free)),
            visit.eq(~begins & ~wait & ~visit_valid & ~self.hold & urgent),
            bank.eq(Mux(begins, self.contribution.payload.bank, slots.scan_bank)),
            slots.look.eq(begins | visit),
        ]
        config = Signal(config_layout(params))
        m.d.comb += config.eq(of_bank(bank, [Value.cast(each) for each in self.config]))
        chunk = self.contribution.payload.chunk
        slot = Signal(index_width(params.slots))
        mask = Signal.like(slot)
        second = Signal()  # of the slot's two versions
        m.d.comb += [
            mask.eq((1 << config.log2_slots) - 1),
            slot.eq(config.base | (chunk & mask)),
            second.eq(chunk.bit_select(config.log2_slots, 1)),
            slots.look_version.eq(Mux(begins, Cat(slot[: version_bits - 1], second), scan)),
        ]
        with m.If(~wait):
            m.d.sync += [beat_valid.eq(transfer), visit_valid.eq(visit)]
        with m.If(transfer):
            m.d.sync += beat.eq(self.contribution.payload)
        with m.If(slots.look):
            m.d.sync += [job.eq(config), slots.bank.eq(bank)]
        # Waiting for room does not keep the straggler rule from the other slot versions.
        m.d.sync += some_armed.eq(slots.armed.any())
        with m.If(visit_valid | ~(urgent | (waiting & ~some_armed))):
            m.d.sync += scan.eq(scan + 1)

        # ---- judge: what becomes of the beat -----------------------------------------------------------------------
        frame_accepted, frame_overwrite, frame_completes = Signal(), Signal(), Signal()  # judged at its first beat
        accepted, overwrite, completes = Signal(), Signal(), Signal()  # of the frame of this beat
        line = Signal(index_width(params.lines_per_chunk))
        this_line = Signal.like(line)
        frame_version = Signal(version_bits)
        version = Signal(version_bits)  # of the beat; slots.version may be that of a visit
        in_frame = Signal()  # lines of the frame are still to come
        first = Signal()
        go = Signal()
        contributes = Signal()
        now = Signal(32)
        copier_busy = Signal()
        copier_version = Signal(version_bits)
        m.d.sync += now.eq(now + 1)
        m.d.comb += [
            first.eq(beat_valid & beat.first),
            version.eq(Mux(first, slots.version, frame_version)),
            contributes.eq(beat.kind == FrameKind.CONTRIBUTE),
            slots.job.eq(job),
            slots.frame.eq(beat),
            slots.now.eq(now),
            slots.look_valid.eq(first),
            slots.visit_valid.eq(visit_valid),
            slots.settled.eq(~in_frame | (frame_version != slots.version)),
            # The last room is for those that have waited.
            slots.room.eq(results.room & (results.room_for_two | copier_busy | ~slots.waiting.any())),
            slots.free.eq(results.room & ~copier_busy),
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
                frame_version.eq(version),
                in_frame.eq(accepted & ~beat.last),
                line.eq(this_line + 1),
            ]

        # ---- judge: results that start -----------------------------------------------------------------------------
        launch, launch_straight, launch_copy = Signal(), Signal(), Signal()
        straight = Signal()  # the frame copies its own lines to the result buffer
        frame_straight = Signal()
        m.d.comb += [
            launch.eq(slots.launch & slots.commit),
            launch_straight.eq(launch & slots.completes & contributes),
            launch_copy.eq(launch & ~launch_straight & ~slots.meta.empty),
            straight.eq(Mux(first, launch_straight, beat_valid & frame_straight)),
            results.reserve.eq(launch),
            results.straight.eq(launch_straight),
            results.meta.eq(slots.meta),
        ]
        with m.If(go):
            m.d.sync += frame_straight.eq(straight)

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
            # The result buffer takes one line a cycle, so the copier pauses during a frame that copies itself.
            m.d.comb += reads.eq(beat_valid & contributes & frame_accepted & (~frame_overwrite | frame_straight))
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
            summed.eq(go & straight),
            adder_overwrite.eq(overwrite),
            bits.eq(beat.data),
            total.eq(adder.total),
        ]
        with m.If(first):
            # Kept for the frame: a visit may look another job up meanwhile.
            m.d.sync += [
                adder_negative.eq(job.negative.bit_select(beat.plane, 1)),
                adder_start.eq(1 << job.shift[beat.plane]),
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
            results.write_straight.eq(summed),
            results.write_copy.eq(copied),
            results.line.eq(Mux(summed, adder.total, tally)),
        ]

        # ---- the work behind ---------------------------------------------------------------------------------------
        denied = Signal()
        patience = Signal(range(self.PATIENCE))
        m.d.comb += denied.eq((copier_busy & ~copies) | (urgent & ~visit & ~visit_valid & ~self.hold))
        m.d.sync += [
            patience.eq(Mux(denied & ~yields, patience + 1, 0)),
            yields.eq(denied & ~yields & (patience == self.PATIENCE - 1)),
        ]
        idle = Signal()
        m.d.comb += idle.eq(
            self.quiet & ~transfer & ~(beat_valid | visit_valid | in_frame | copier_busy | add | copied)
        )
        self._change_jobs(m, slots, results, idle)

        # ---- what happened -----------------------------------------------------------------------------------------
        m.d.sync += [
            self.events.accepted_line.eq(go & accepted & contributes),
            self.events.accepted_frame.eq(go & accepted & beat.last),
            self.events.duplicate.eq(go & slots.duplicate),
            self.events.late.eq(go & slots.late),
            self.events.stale.eq(go & slots.stale),
            self.events.abandoned.eq(go & slots.abandoned),
            self.events.refused.eq(go & (slots.lines_differ | slots.abstains_late)),
            self.events.completed.eq(go & accepted & completes & beat.last),
            self.events.partial.eq(slots.expires),
            self.events.result_sent.eq(results.sent),
            self.refusal.valid.eq(go & (slots.stale | slots.lines_differ | slots.abstains_late)),
            self.refusal.reason.eq(
                Mux(slots.stale, Reason.STALE, Mux(slots.lines_differ, Reason.LINES_DIFFER, Reason.ABSTAIN_AFTER_VOTE))
            ),
        ]
        m.d.sync += [self.refusal[name].eq(beat[name]) for name in ("bank", "worker", "chunk", "plane", "lines")]
        return m

    def _change_jobs(self, m: Module, slots: SlotTable, results: ResultBuffer, idle: Signal) -> None:
        """Forget the chunks of jobs that were opened or closed, one a cycle, when nothing is under way."""
        params = self.params
        strobes = Signal(params.jobs)
        pending = Signal(params.jobs)
        here = Signal(params.jobs)
        forget = Signal()
        bank = Signal(index_width(params.jobs))
        m.d.comb += [
            strobes.eq(self.opened | self.closed),
            self.hold.eq((strobes | pending).any()),
            forget.eq(idle & pending.any()),
            here.eq(pending & -pending),
            slots.forget.eq(forget),
            slots.forget_bank.eq(bank),
            results.forget.eq(forget),
            results.forget_bank.eq(bank),
        ]
        m.d.sync += pending.eq(strobes | Mux(forget, pending & ~here, pending))
        for index in range(params.jobs):
            with m.If(here[index]):
                m.d.comb += [
                    bank.eq(index),
                    slots.forget_base.eq(self.config[index].base),
                    slots.forget_log2.eq(self.config[index].log2_slots),
                ]
