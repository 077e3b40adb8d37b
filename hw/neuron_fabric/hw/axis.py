"""AXI4-Stream wrapper of the core: frames with the 22-byte header in, frames out."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import enum, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from neuron_fabric.hw.core import ReducerCore
from neuron_fabric.hw.layout import EVENTS, FrameKind, config_layout, index_width
from neuron_fabric.model.params import LINE_BYTES, ReducerParams
from neuron_fabric.model.wire import (
    HEADER_BYTES,
    HEADER_FIELDS,
    HEADER_OFFSET,
    MAGIC,
    VERSION,
    Flags,
    FrameType,
)

__all__ = ["CONFIGURED", "CORE_EVENTS", "HEADER_EVENTS", "AxiStreamReducer"]

HEADER_EVENTS = (
    "bad_magic",
    "bad_version",
    "bad_type",
    "bad_job",
    "bad_epoch",
    "bad_worker",
    "bad_plane",
    "bad_lines",
    "bad_voters",
)
"""Reasons to drop a frame for its header, in the order in which they are checked; the first that holds is strobed."""

CONFIGURED = (
    "job",
    "epoch",
    "members",
    "planes",
    "negative",
    "shift",
    "counts_negatives",
    "result_format",
    "result_planes",
    "margin",
)
"""What of the core's configuration is a port; the rest is constant: all slots, multicast, no stragglers, no parent."""

CORE_EVENTS = tuple(name for name in EVENTS.members if name not in ("late", "partial"))
"""Strobes of the core that are ports."""

_HEADER_BITS = 8 * HEADER_BYTES
_BLOCK_BITS = 8 * LINE_BYTES  # all headers of a frame together


class _State(enum.Enum, shape=2):  # type: ignore[call-arg]
    """Where in a frame the receiver is."""

    HEADER = 0
    PAYLOAD = 1
    FILL = 2
    """The frame has ended too early: the core gets lines of zeros."""
    DROP = 3


class AxiStreamReducer(wiring.Component):
    """:class:`~neuron_fabric.hw.core.ReducerCore` behind AXI4-Stream ports, configuration and events as plain ports.

    A frame is 64 bytes of headers, of which the last 22 are this protocol's and the others are ignored (zero in
    results), then the payload lines, if it has any. Byte ``k`` of a beat is ``tdata[8k+7:8k]``. Frames that are not for
    this job are dropped with a strobe. Configuration ports are static while in use.

    The stage in front promises whole frames. A frame of another length does not stop the stream: what is too much is
    dropped; what is missing of a contribution that has begun counts as zeros, which are wrong votes; a contribution
    without any line is dropped. Each strobes ``event_length``, as does a beat with null bytes (``tkeep``), which is
    else taken as it is.

    Parameters
    ----------
    params : ReducerParams
        ``lanes`` must divide 512, so that the headers fill whole beats.
    """

    HEADER_LATENCY = ReducerCore.LATENCY
    """Cycles from the transfer of the completing frame's first payload line to the result's header beat being valid."""

    def __init__(self, params: ReducerParams) -> None:
        if _BLOCK_BITS % params.lanes:
            raise ValueError(f"lanes must divide {_BLOCK_BITS} for an AXI4-Stream reducer, but is {params.lanes}")
        self.params = params
        ports = {
            "s_axis_tdata": In(params.lanes),
            "s_axis_tkeep": In(params.line_bytes),
            "s_axis_tvalid": In(1),
            "s_axis_tready": Out(1),
            "s_axis_tlast": In(1),
            "m_axis_tdata": Out(params.lanes),
            "m_axis_tkeep": Out(params.line_bytes),
            "m_axis_tvalid": Out(1),
            "m_axis_tready": In(1),
            "m_axis_tlast": Out(1),
            "cfg_enable": In(1),
        }
        for name in CONFIGURED:
            ports[f"cfg_{name}"] = In(config_layout(params)[name].width)
        for name in (*CORE_EVENTS, *HEADER_EVENTS, "length"):
            ports[f"event_{name}"] = Out(1)
        super().__init__(ports)

    def elaborate(self, platform: object) -> Module:
        """Parse and drop on the way in, put headers on the way out."""
        m = Module()
        m.submodules.core = core = ReducerCore(self.params)
        config = core.config[0]
        for name in CONFIGURED:
            m.d.comb += Value.cast(config[name]).eq(getattr(self, f"cfg_{name}"))
        m.d.comb += [
            config.log2_slots.eq(exact_log2(self.params.slots)),
            config.multicast.eq(1),
            core.group.eq(1),
            core.quiet.eq(1),
        ]
        for name in CORE_EVENTS:
            m.d.comb += getattr(self, f"event_{name}").eq(core.events[name])
        self._receive(m, core)
        self._send(m, core)
        return m

    def _receive(self, m: Module, core: ReducerCore) -> None:
        lanes = self.params.lanes
        header_beats = _BLOCK_BITS // lanes
        beat = core.contribution.payload

        # The header is the end of the 64 bytes: complete in their last beat.
        header = Signal(_HEADER_BITS)
        if lanes >= _HEADER_BITS:
            m.d.comb += header.eq(self.s_axis_tdata[lanes - _HEADER_BITS :])
            passed: Signal | Const = Const(0, 0)
        else:
            passed = Signal(_HEADER_BITS - lanes, reset_less=True)
            m.d.comb += header.eq(Cat(passed, self.s_axis_tdata))
        fields = {
            field.name: Cat(header.word_select(field.offset + field.size - 1 - k, 8) for k in range(field.size))
            for field in HEADER_FIELDS
        }
        abstain = Signal()
        refusals = Signal(len(HEADER_EVENTS))
        kind = fields["version_type"][:4]
        member = Signal()
        m.d.comb += [
            abstain.eq(kind == FrameType.ABSTAIN),
            member.eq(Cat(self.cfg_members[w] & (fields["worker"] == w) for w in range(self.params.workers)).any()),
            refusals.eq(
                Cat(
                    fields["magic"] != MAGIC,
                    fields["version_type"][4:] != VERSION,
                    (kind != FrameType.CONTRIBUTE) & (kind != FrameType.ABSTAIN),
                    ~self.cfg_enable | (fields["job"] != self.cfg_job),
                    fields["epoch"] != self.cfg_epoch,
                    ~member,
                    (fields["planes"] != self.cfg_planes) | (fields["plane"] >= self.cfg_planes),
                    (fields["lines"] == 0) | (fields["lines"] > self.params.lines_per_chunk),
                    ~abstain & (fields["voters"] != 1),
                )
            ),
        ]

        taken = Signal()
        payload = Signal()  # the beat at the port is a line for the core
        filling = Signal()
        abstain_waits = Signal()
        line = Signal.like(beat.lines)
        header_beat = Signal(index_width(header_beats))
        wrong_length = Signal()
        refused = Signal()
        m.d.comb += [
            taken.eq(self.s_axis_tvalid & self.s_axis_tready),
            core.contribution.valid.eq(abstain_waits | filling | (payload & self.s_axis_tvalid)),
            beat.first.eq(abstain_waits | (line == 0)),
            beat.last.eq(abstain_waits | (line + 1 == beat.lines)),
            beat.data.eq(Mux(filling, 0, self.s_axis_tdata)),
        ]
        frame = {name: Signal.like(beat[name], name=f"frame_{name}") for name in ("worker", "chunk", "plane", "lines")}
        for name, signal in frame.items():
            m.d.comb += beat[name].eq(signal)
        m.d.comb += [beat.bank.eq(0), beat.voters.eq(1)]
        m.d.comb += beat.kind.eq(Mux(abstain_waits, FrameKind.ABSTAIN, FrameKind.CONTRIBUTE))
        with m.If(abstain_waits & core.contribution.ready):
            m.d.sync += abstain_waits.eq(0)

        state = Signal(_State)
        with m.If(state == _State.HEADER):
            m.d.comb += self.s_axis_tready.eq(~abstain_waits | core.contribution.ready)
            with m.If(taken):
                m.d.sync += header_beat.eq(header_beat + 1)
                if lanes < _HEADER_BITS:
                    m.d.sync += passed.eq(header[lanes:])
                with m.If(header_beat == header_beats - 1):
                    m.d.sync += [header_beat.eq(0), line.eq(0)]
                    m.d.sync += [signal.eq(fields[name]) for name, signal in frame.items()]
                    with m.If(refusals.any()):
                        m.d.comb += refused.eq(1)
                        with m.If(~self.s_axis_tlast):
                            m.d.sync += state.eq(_State.DROP)
                    with m.Else():
                        m.d.comb += wrong_length.eq(abstain != self.s_axis_tlast)
                        m.d.sync += abstain_waits.eq(abstain)
                        with m.If(~self.s_axis_tlast):
                            m.d.sync += state.eq(_State.PAYLOAD)
                            with m.If(abstain):
                                m.d.sync += state.eq(_State.DROP)
                with m.Elif(self.s_axis_tlast):
                    m.d.comb += wrong_length.eq(1)
                    m.d.sync += header_beat.eq(0)
        with m.Elif(state == _State.PAYLOAD):
            m.d.comb += [payload.eq(1), self.s_axis_tready.eq(core.contribution.ready)]
            with m.If(taken):
                m.d.sync += line.eq(line + 1)
                m.d.comb += wrong_length.eq(beat.last != self.s_axis_tlast)
                with m.If(beat.last & self.s_axis_tlast):
                    m.d.sync += state.eq(_State.HEADER)
                with m.Elif(beat.last):
                    m.d.sync += state.eq(_State.DROP)
                with m.Elif(self.s_axis_tlast):
                    m.d.sync += state.eq(_State.FILL)
        with m.Elif(state == _State.FILL):
            m.d.comb += filling.eq(1)
            with m.If(core.contribution.ready):
                m.d.sync += line.eq(line + 1)
                with m.If(beat.last):
                    m.d.sync += state.eq(_State.HEADER)
        with m.Else():
            m.d.comb += self.s_axis_tready.eq(1)
            with m.If(taken & self.s_axis_tlast):
                m.d.sync += state.eq(_State.HEADER)

        null_bytes = Signal()
        m.d.comb += null_bytes.eq(taken & ~self.s_axis_tkeep.all())
        m.d.sync += self.event_length.eq(wrong_length | null_bytes)
        for index, name in enumerate(HEADER_EVENTS):
            m.d.sync += getattr(self, f"event_{name}").eq(refused & refusals[index] & ~refusals[:index].any())

    def _send(self, m: Module, core: ReducerCore) -> None:
        lanes = self.params.lanes
        header_beats = _BLOCK_BITS // lanes
        beat = core.result.payload
        flags = Signal(8)
        m.d.comb += flags.eq(
            Mux(beat.flags.majority, Flags.MAJORITY.value, 0) | Mux(beat.flags.resend, Flags.RESEND.value, 0)
        )
        values: dict[str, Value | int] = {
            "magic": MAGIC,
            "version_type": VERSION << 4 | FrameType.RESULT,
            "flags": flags,
            "job": self.cfg_job,
            "worker": beat.destination,
            "missing": 0,
            "chunk": beat.chunk,
            "plane": beat.plane,
            "planes": beat.planes,
            "voters": beat.voters,
            "lines": beat.lines,
            "reason": 0,
            "epoch": self.cfg_epoch,
        }
        block = Signal(_BLOCK_BITS)
        for field in HEADER_FIELDS:
            value = Signal(8 * field.size, name=f"send_{field.name}")
            m.d.comb += value.eq(values[field.name])
            at = HEADER_OFFSET + field.offset
            m.d.comb += block[8 * at : 8 * (at + field.size)].eq(
                Cat(value.word_select(field.size - 1 - k, 8) for k in range(field.size))
            )

        header_beat = Signal(index_width(header_beats))
        header_done = Signal()
        heading = Signal()
        m.d.comb += [
            heading.eq(beat.first & ~header_done),
            self.m_axis_tvalid.eq(core.result.valid),
            self.m_axis_tkeep.eq(-1),
            self.m_axis_tlast.eq(beat.last & ~heading),
            self.m_axis_tdata.eq(Mux(heading, block.word_select(header_beat, lanes), beat.data)),
            core.result.ready.eq(self.m_axis_tready & ~heading),
        ]
        with m.If(self.m_axis_tvalid & self.m_axis_tready):
            m.d.sync += [header_done.eq(0), header_beat.eq(0)]
            with m.If(heading):
                with m.If(header_beat == header_beats - 1):
                    m.d.sync += header_done.eq(1)
                with m.Else():
                    m.d.sync += header_beat.eq(header_beat + 1)
