"""The result buffer: finished lines go in while they are summed, result planes come out."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from neuron_fabric.hw.lanes import PlaneSelector, TallyMemory, tally_layout
from neuron_fabric.hw.layout import ResultFormat, config_layout, result_layout
from neuron_fabric.hw.slots import result_meta_layout
from neuron_fabric.model.params import ReducerParams

__all__ = ["ResultBuffer"]


class ResultBuffer(wiring.Component):
    """A ring of tally lines, with room for two chunks and at least eight lines, and the output stage.

    The writer first reserves a result, then writes its lines in order, with pauses as it likes, and does not reserve
    again before the last. The reader follows it: a line is read one cycle after it was written at the earliest, once
    per result plane, and is free again when the last plane has passed. So lines come out while later lines of the same
    result are still being summed.

    A line that is written in cycle t is at the output in cycle t + 3, if the output is free.

    Members
    -------
    config : the job
    room : a result of full length fits
    reserve, meta : a new result; only with ``room``
    write, line : its next line
    sent : the last beat of a result is being transferred
    result : stream of result beats
    """

    QUEUE = 8
    """Results that can be in the buffer at once."""

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        self.depth = max(8, 1 << int(ceil_log2(2 * params.lines_per_chunk)))
        super().__init__(
            {
                "config": In(config_layout(params)),
                "room": Out(1),
                "reserve": In(1),
                "meta": In(result_meta_layout(params)),
                "write": In(1),
                "line": In(tally_layout(params.lanes, params.acc_bits)),
                "sent": Out(1),
                "result": Out(stream.Signature(result_layout(params))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Three stages: read address, read data with its controls, output register."""
        m = Module()
        params, config = self._params, self.config
        depth = self.depth
        layout = result_layout(params)
        meta_layout = result_meta_layout(params)

        m.submodules.ring = ring = TallyMemory(params.lanes, params.acc_bits, depth)
        m.submodules.queue = queue = SyncFIFO(width=meta_layout.size, depth=self.QUEUE)
        m.submodules.selector = selector = PlaneSelector(params.lanes, params.acc_bits)

        # ---- what is in the ring -----------------------------------------------------------------------------------
        used = Signal(range(depth + 1))  # reserved and not yet read for the last time
        fresh = Signal(range(depth + 1))  # written and not yet read at all
        write_address = Signal(range(depth))
        takes_fresh = Signal()
        frees = Signal()
        m.d.comb += [
            self.room.eq((used <= depth - params.lines_per_chunk) & queue.w_rdy),
            queue.w_data.eq(self.meta),
            queue.w_en.eq(self.reserve),
            ring.write_enable.eq(self.write),
            ring.write_address.eq(write_address),
            ring.write_data.eq(self.line),
        ]
        m.d.sync += [
            used.eq(used + Mux(self.reserve, self.meta.lines, 0) - frees),
            fresh.eq(fresh + self.write - takes_fresh),
            write_address.eq(write_address + self.write),
        ]

        # ---- stage 1: which line of which plane --------------------------------------------------------------------
        active = Signal()
        meta = Signal(meta_layout)
        base = Signal(range(depth))
        line = Signal.like(meta.lines)
        plane = Signal(layout["plane"].shape)
        planes = Signal(layout["planes"].shape)
        majority = Signal()
        last_line = Signal()
        last_plane = Signal()
        issue = Signal()
        advance = Signal()
        finish = Signal()
        m.d.comb += [
            majority.eq(config.result_format == ResultFormat.MAJORITY),
            planes.eq(Mux(majority, 2, config.result_planes)),
            last_line.eq(line + 1 == meta.lines),
            last_plane.eq(plane + 1 == planes),
            issue.eq(active & advance & ((plane != 0) | (fresh != 0))),
            takes_fresh.eq(issue & (plane == 0)),
            frees.eq(issue & last_plane),
            finish.eq(issue & last_plane & last_line),
            ring.read_enable.eq(issue),
            ring.read_address.eq(base + line),
            queue.r_en.eq(~active | finish),
        ]
        with m.If(issue):
            m.d.sync += line.eq(line + 1)
            with m.If(last_line):
                m.d.sync += [line.eq(0), plane.eq(plane + 1)]
        with m.If(finish):
            m.d.sync += [plane.eq(0), base.eq(base + meta.lines)]
        with m.If(queue.r_en):
            m.d.sync += [active.eq(queue.r_rdy), meta.eq(queue.r_data)]

        # ---- stage 2: read data and the controls of its lanes ------------------------------------------------------
        beat = Signal(
            data.StructLayout({name: field.shape for name, field in layout if name != "data"}), reset_less=True
        )
        beat_valid = Signal()
        done = Signal(reset_less=True)
        load = Signal()
        m.d.comb += advance.eq(~beat_valid | load)
        with m.If(advance):
            m.d.sync += beat_valid.eq(issue)
        with m.If(issue):
            m.d.sync += [
                beat.first.eq(line == 0),
                beat.last.eq(last_line),
                beat.destination.eq(meta.destination),
                beat.chunk.eq(meta.chunk),
                beat.plane.eq(plane),
                beat.planes.eq(planes),
                beat.lines.eq(meta.lines),
                beat.voters.eq(meta.voters),
                beat.flags.majority.eq(majority),
                done.eq(last_plane & last_line),
            ]
        self._control_lanes(m, selector, majority, plane, meta.voters, issue)
        m.d.comb += selector.tally.eq(ring.read_data)

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
            m.d.sync += [out.eq(beat), out_data.eq(selector.result), out_done.eq(done)]
        for name, _field in beat.shape():
            m.d.comb += self.result.payload[name].eq(out[name])
        return m

    def _control_lanes(
        self, m: Module, selector: PlaneSelector, majority: Signal, plane: Signal, voters: Signal, issue: Signal
    ) -> None:
        """Registered controls of the selector: thresholds of a majority, or which plane of a tally.

        With S = voters - 2 tally (counts of negative votes), S < -m is tally > (v + m) / 2 rounded down, and S > m is
        tally < (v - m) / 2 rounded up; else S = tally. Two's complement is compared in offset binary.
        """
        params, config = self._params, self.config
        acc_bits = params.acc_bits
        wide = acc_bits + len(voters) + 2
        is_signed = Signal()
        high = Signal(signed(wide))  # upper = tally > high
        low = Signal(signed(wide))  # lower = tally >= low
        offset = Signal(signed(wide))
        greatest = Const((1 << acc_bits) - 1)
        used_planes = Signal(params.max_planes)
        m.d.comb += [
            used_planes.eq(Cat(config.planes > index for index in range(params.max_planes))),
            is_signed.eq((config.negative & used_planes).any()),
            offset.eq(Mux(is_signed, 1 << (acc_bits - 1), 0)),
        ]
        with m.If(config.counts_negatives):
            m.d.comb += [
                high.eq(((voters + config.margin) >> 1) + offset),
                low.eq(((voters - config.margin + 1) >> 1) + offset),
            ]
        with m.Else():
            m.d.comb += [high.eq(config.margin + offset), low.eq(offset - config.margin)]
        one_hot = Signal(acc_bits)
        m.d.comb += one_hot.eq(1 << plane)

        registered = {
            name: Signal.like(getattr(selector, name), name=f"lane_{name}", reset_less=True)
            for name in ("high", "high_equal", "low", "low_equal", "skip", "flip", "use_upper", "use_lower")
        }
        for name, signal in registered.items():
            m.d.comb += getattr(selector, name).eq(signal)
        with m.If(issue):
            m.d.sync += [
                registered["high_equal"].eq(0),
                registered["low"].eq(Mux(low < 0, 0, low)),
                registered["low_equal"].eq(1),
            ]
            with m.If(majority):
                m.d.sync += [
                    registered["high"].eq(Mux(high > greatest, greatest, high)),
                    registered["skip"].eq(0),
                    registered["flip"].eq(is_signed),
                    # Plane 0 is negative, plane 1 negative or positive.
                    registered["use_upper"].eq((plane != 0) | config.counts_negatives),
                    registered["use_lower"].eq((plane != 0) | ~config.counts_negatives),
                ]
            with m.Else():
                m.d.sync += [
                    registered["high"].eq(one_hot - 1),
                    registered["skip"].eq(~(one_hot | (one_hot - 1))),
                    registered["flip"].eq(0),
                    registered["use_upper"].eq(1),
                    registered["use_lower"].eq(0),
                ]
