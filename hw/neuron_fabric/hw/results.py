"""The result buffer: finished lines go in while they are summed, result planes come out."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from neuron_fabric.hw.lanes import PlaneSelector, TallyMemory, tally_layout
from neuron_fabric.hw.layout import ResultFormat, config_layout, index_width, of_bank, result_layout
from neuron_fabric.hw.slots import result_meta_layout
from neuron_fabric.hw.thresholds import PlaneControls, is_signed
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import DESTINATION_ALL

__all__ = ["ResultBuffer"]


class ResultBuffer(wiring.Component):
    """A ring of tally lines, with room for four chunks, and the output stage.

    There are two writers: the frame that completes a chunk (``straight``), and the copier. Each first reserves a
    result, then writes its lines in order, with pauses as it likes, and does not reserve again before the last. The
    reader takes results in the order in which they were reserved and follows the writer: a line is read one cycle after
    it was written at the earliest, once per result plane and destination, and is free again when it has passed for the
    last time. So lines come out while later lines of the same result are still being summed.

    A line that is written in cycle t is at the output in cycle t + 3, if the output is free.

    Whom a result for everybody goes to follows from its job: a child's goes up to the parent, as a contribution;
    else it goes to the multicast group if there is one, or to each member in turn.

    Members
    -------
    config : the jobs
    group : there is a multicast group
    room, room_for_two : a result of full length fits, or two
    reserve, meta, straight : a new result, and who writes it; only with ``room``
    write_straight, write_copy, line : its next line; one writer a cycle
    forget, forget_bank : drop the results of a job that the output has not taken up; all their lines are written
    sent : a result has left to one destination, or to everybody where that is one in the header
    result : stream of result beats
    """

    QUEUE = 8
    """Results that can wait in the buffer at once."""

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        self.depth = max(8, 1 << int(ceil_log2(4 * params.lines_per_chunk)))
        super().__init__(
            {
                "config": In(data.ArrayLayout(config_layout(params), params.jobs)),
                "group": In(1),
                "room": Out(1),
                "room_for_two": Out(1),
                "reserve": In(1),
                "straight": In(1),
                "meta": In(result_meta_layout(params)),
                "write_straight": In(1),
                "write_copy": In(1),
                "line": In(tally_layout(params.lanes, params.acc_bits)),
                "forget": In(1),
                "forget_bank": In(index_width(params.jobs)),
                "sent": Out(1),
                "result": Out(stream.Signature(result_layout(params))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Three stages: read address, read data with its controls, output register."""
        m = Module()
        params = self._params
        depth = self.depth
        layout = result_layout(params)

        m.submodules.ring = ring = TallyMemory(params.lanes, params.acc_bits, depth)
        m.submodules.selector = selector = PlaneSelector(params.lanes, params.acc_bits)

        # ---- results that wait -------------------------------------------------------------------------------------
        job = Signal(config_layout(params))  # of the result that leaves, as it was when that was taken up
        meta = Signal(result_meta_layout(params))
        active = Signal()
        straight = Signal()
        next_meta, next_straight, next_dead = Signal(meta.shape()), Signal(), Signal()
        has_next = Signal()
        take = Signal()
        queued = self._queue(m, next_meta, next_straight, next_dead, has_next, take)
        next_job = Signal(config_layout(params))
        m.d.comb += next_job.eq(of_bank(next_meta.bank, [Value.cast(each) for each in self.config]))

        # ---- what is in the ring -----------------------------------------------------------------------------------
        lines = Signal.like(meta.lines)  # that a result takes there
        used = Signal(range(depth + 1))  # reserved and not yet read for the last time
        fresh_straight = Signal(range(depth + 1))  # written and not yet read at all
        fresh_copy = Signal(range(depth + 1))
        end = Signal(range(depth))  # of what is reserved
        straight_address, copy_address = Signal.like(end), Signal.like(end)
        takes_fresh = Signal()
        drops = Signal.like(lines)  # lines of a result that is dropped
        frees = Signal()
        m.d.comb += [
            lines.eq(Mux(self.meta.empty, 0, self.meta.lines)),
            self.room.eq((used <= depth - params.lines_per_chunk) & (queued <= self.QUEUE - 1)),
            self.room_for_two.eq((used <= depth - 2 * params.lines_per_chunk) & (queued <= self.QUEUE - 2)),
            ring.write_enable.eq(self.write_straight | self.write_copy),
            ring.write_address.eq(Mux(self.write_straight, straight_address, copy_address)),
            ring.write_data.eq(self.line),
        ]
        m.d.sync += [
            used.eq(used + Mux(self.reserve, lines, 0) - frees - drops),
            fresh_straight.eq(
                fresh_straight + self.write_straight - (takes_fresh & straight) - Mux(next_straight, drops, 0)
            ),
            fresh_copy.eq(fresh_copy + self.write_copy - (takes_fresh & ~straight) - Mux(next_straight, 0, drops)),
        ]
        with m.If(self.write_straight):
            m.d.sync += straight_address.eq(straight_address + 1)
        with m.If(self.write_copy):
            m.d.sync += copy_address.eq(copy_address + 1)
        with m.If(self.reserve):
            m.d.sync += end.eq(end + lines)
            with m.If(self.straight):
                m.d.sync += straight_address.eq(end)
            with m.Else():
                m.d.sync += copy_address.eq(end)

        # ---- stage 1: which line of which plane, for whom ----------------------------------------------------------
        majority, grouped, in_turn, bitmap = Signal(), Signal(), Signal(), Signal()
        base = Signal(range(depth))
        line = Signal.like(meta.lines)
        plane = Signal(layout["plane"].shape)
        planes = Signal(layout["planes"].shape)
        repeated = Signal()  # some destination has it already
        turn = Signal(index_width(params.workers))
        remaining = Signal(params.workers)  # members whose turn it is or will be
        rest = Signal(params.workers)
        first_line, last_line, last_plane, last_target = Signal(), Signal(), Signal(), Signal()
        issue, advance, finish = Signal(), Signal(), Signal()
        fresh = Signal()
        m.d.comb += [
            majority.eq(job.result_format == ResultFormat.MAJORITY),
            grouped.eq(meta.everybody & ~job.child & job.multicast & self.group),
            in_turn.eq(meta.everybody & ~job.child & ~grouped),
            planes.eq(Mux(majority, 2, job.result_planes)),
            bitmap.eq(line == meta.lines),
            first_line.eq(line == 0),
            last_line.eq((line + ~meta.partial == meta.lines) | meta.empty),
            last_plane.eq((plane + 1 == planes) | meta.empty),
            rest.eq(remaining & (remaining - 1)),
            last_target.eq(~in_turn | (rest == 0)),
            fresh.eq(
                repeated | (plane != 0) | bitmap | meta.empty | Mux(straight, fresh_straight != 0, fresh_copy != 0)
            ),
            issue.eq(active & advance & fresh),
            takes_fresh.eq(issue & (plane == 0) & ~repeated & ~bitmap & ~meta.empty),
            frees.eq(issue & last_plane & last_target & ~bitmap & ~meta.empty),
            finish.eq(issue & last_target & last_plane & last_line),
            ring.read_enable.eq(issue),
            ring.read_address.eq(base + line),
            take.eq((~active | finish) & has_next),
            drops.eq(Mux(take & next_dead & ~next_meta.empty, next_meta.lines, 0)),
        ]
        for worker in reversed(range(params.workers)):
            with m.If(remaining[worker]):
                m.d.comb += turn.eq(worker)
        with m.If(issue):
            m.d.sync += line.eq(line + 1)
            with m.If(last_line):
                m.d.sync += [line.eq(0), plane.eq(plane + 1)]
                with m.If(last_plane):
                    m.d.sync += [plane.eq(0), repeated.eq(1), remaining.eq(rest)]
        with m.If(finish):
            m.d.sync += [active.eq(0), base.eq(base + Mux(meta.empty, 0, meta.lines))]
        with m.If(take):
            m.d.sync += [
                active.eq(~next_dead),
                meta.eq(next_meta),
                straight.eq(next_straight),
                job.eq(next_job),
                remaining.eq(next_job.members),
                repeated.eq(0),
            ]
            with m.If(next_dead):
                m.d.sync += base.eq(base + Mux(finish & ~meta.empty, meta.lines, 0) + drops)

        # ---- stage 2: read data and the controls of its lanes ------------------------------------------------------
        beat = Signal(
            data.StructLayout({name: field.shape for name, field in layout if name != "data"}), reset_less=True
        )
        beat_valid = Signal()
        done = Signal(reset_less=True)
        counted = Signal(params.workers, reset_less=True)
        load = Signal()
        to_all = Signal()
        to_worker = Signal(16)
        m.d.comb += [
            advance.eq(~beat_valid | load),
            to_all.eq(meta.everybody & job.multicast),
            to_worker.eq(Mux(in_turn, turn, meta.worker)),
        ]
        with m.If(advance):
            m.d.sync += beat_valid.eq(issue)
        with m.If(issue):
            m.d.sync += [
                beat.first.eq(first_line),
                beat.last.eq(last_line),
                beat.bank.eq(meta.bank),
                beat.worker.eq(to_worker),
                beat.group.eq(grouped),
                beat.up.eq(job.child),
                beat.empty.eq(meta.empty),
                beat.flags.majority.eq(majority),
                beat.flags.partial.eq(meta.partial),
                beat.flags.resend.eq(~meta.everybody & job.multicast & ~job.child),
                beat.job.eq(Mux(job.child, job.parent_job, job.job)),
                beat.destination.eq(Mux(job.child, job.parent_worker, Mux(to_all, DESTINATION_ALL, to_worker))),
                beat.missing.eq(meta.missing),
                beat.chunk.eq(meta.chunk),
                beat.plane.eq(plane),
                beat.planes.eq(planes),
                beat.voters.eq(meta.voters),
                beat.lines.eq(meta.lines),
                beat.epoch.eq(Mux(job.child, job.parent_epoch, job.epoch)),
                # Each destination is one result, but those that share a header are one together.
                done.eq(last_plane & last_line & (last_target | ~job.multicast)),
                counted.eq(Mux(bitmap, meta.counted, 0)),
            ]
        m.submodules.controls = controls = PlaneControls(params)
        lanes_controls = Signal.like(controls.controls, reset_less=True)
        m.d.comb += [
            controls.majority.eq(majority),
            controls.plane.eq(plane),
            controls.voters.eq(meta.voters),
            controls.margin.eq(job.margin),
            controls.counts_negatives.eq(job.counts_negatives),
            controls.signed.eq(is_signed(job.negative, job.planes)),
            controls.blank.eq(bitmap),
            selector.tally.eq(ring.read_data),
        ]
        m.d.comb += [getattr(selector, name).eq(lanes_controls[name]) for name in controls.controls.shape().members]
        with m.If(issue):
            m.d.sync += lanes_controls.eq(controls.controls)

        # ---- stage 3: output ---------------------------------------------------------------------------------------
        out_done = Signal(reset_less=True)
        out = Signal.like(beat, reset_less=True)
        out_data = Signal(params.lanes, reset_less=True)
        m.d.comb += [
            load.eq(~self.result.valid | self.result.ready),
            self.result.payload.data.eq(out_data),
            self.sent.eq(self.result.valid & self.result.ready & out_done),
        ]
        with m.If(load):
            m.d.sync += self.result.valid.eq(beat_valid)
        with m.If(load & beat_valid):
            m.d.sync += [out.eq(beat), out_data.eq(selector.result | counted), out_done.eq(done)]
        for name, _field in beat.shape():
            m.d.comb += self.result.payload[name].eq(out[name])
        return m

    def _queue(self, m: Module, meta: data.View, straight: Signal, dead: Signal, valid: Signal, take: Signal) -> Value:
        """A queue whose entries can be marked as dead, by job; gives back how many there are."""
        params = self._params
        entry = data.StructLayout({"meta": result_meta_layout(params), "straight": 1})
        m.submodules.queue = queue = Memory(shape=entry, depth=self.QUEUE, init=[])
        write, read = queue.write_port(), queue.read_port(domain="comb")
        level = Signal(range(self.QUEUE + 1))
        deads = Signal(self.QUEUE)
        m.d.comb += [
            write.en.eq(self.reserve),
            write.data.meta.eq(self.meta),
            write.data.straight.eq(self.straight),
            meta.eq(read.data.meta),
            straight.eq(read.data.straight),
            dead.eq(deads.bit_select(read.addr, 1)),
            valid.eq(level != 0),
        ]
        write_at, read_at = Signal(range(self.QUEUE)), Signal(range(self.QUEUE))
        m.d.comb += [write.addr.eq(write_at), read.addr.eq(read_at)]
        m.d.sync += [
            level.eq(level + self.reserve - take),
            write_at.eq(write_at + self.reserve),
            read_at.eq(read_at + take),
        ]
        for index in range(self.QUEUE):
            bank = Signal(index_width(params.jobs), name=f"queued_bank{index}", reset_less=True)
            with m.If(self.reserve & (write_at == index)):
                m.d.sync += [bank.eq(self.meta.bank), deads[index].eq(0)]
            with m.If(self.forget & (bank == self.forget_bank)):
                m.d.sync += deads[index].eq(1)
        return level
