"""What receiver and transmitter of UDP frames have in common: words, checksum, and the store of frames.

Byte ``k`` of a 64-byte beat is bits ``8k`` to ``8k + 7``. Addresses and ports are numbers (the byte that is sent first
is the most significant); the protocol's header stays as it is on the wire, byte 0 in bits 0 to 7.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from amaranth import Cat, Const, Module, Mux, ShapeLike, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import LINE_BYTES, MAX_LINES
from neuron_fabric.model.wire import HEADER_BYTES, HEADER_FIELDS, MAGIC, VERSION, FrameType

__all__ = [
    "ENDPOINT",
    "HEADER",
    "HEADER_BITS",
    "LANES",
    "FrameStore",
    "OnesComplementSum",
    "check_size",
    "endpoint_fields",
    "header_from_wire",
    "header_to_wire",
    "stored_layout",
    "swapped",
    "version_type",
]

LANES = 8 * LINE_BYTES
"""Bits of a beat."""
HEADER_BITS = 8 * HEADER_BYTES

ENDPOINT = data.StructLayout({"mac": unsigned(48), "ip": unsigned(32), "port": unsigned(16)})
"""An :class:`~neuron_fabric.model.net.Endpoint`."""


def endpoint_fields(endpoint: Endpoint) -> dict[str, int]:
    """The fields of :data:`ENDPOINT`."""
    return {"mac": endpoint.mac, "ip": endpoint.ip, "port": endpoint.port}


HEADER = data.StructLayout({field.name: unsigned(8 * field.size) for field in HEADER_FIELDS if field.name != "magic"})
"""The protocol's header as numbers, without the one that is the same in every frame."""


def header_from_wire(wire: Value) -> dict[str, Value]:
    """The number in every field of a header, ``magic`` included, from its bytes as they are on the wire."""
    return {field.name: swapped(wire[8 * field.offset : 8 * (field.offset + field.size)]) for field in HEADER_FIELDS}


def header_to_wire(header: data.View) -> Value:
    """The bytes of a :data:`HEADER` as they are on the wire."""
    fields = (Const(MAGIC, 16) if field.name == "magic" else header[field.name] for field in HEADER_FIELDS)
    return Cat(*map(swapped, fields))


def version_type(frame_type: FrameType) -> int:
    """The header's byte that says so."""
    return VERSION << 4 | frame_type


def check_size(name: str, lanes: int, max_lines: int) -> None:
    """Refuse, by name, a size in which UDP frames cannot be handled."""
    if operator.index(lanes) != LANES:
        raise ValueError(
            f"lanes must be {LANES} for {name}, not {lanes}: the 64 bytes of headers are one beat; put a width "
            "converter in front of a narrower datapath"
        )
    if not 1 <= operator.index(max_lines) <= MAX_LINES + 1:
        raise ValueError(f"max_lines must be 1 to {MAX_LINES + 1} for {name}, not {max_lines}")


def swapped(value: Value) -> Value:
    """The same bytes in the opposite order: between a number and its place in a beat."""
    return Cat(value[at : at + 8] for at in reversed(range(0, len(value), 8)))


class OnesComplementSum(wiring.Component):
    """Ones' complement sum of the 16-bit words of many beats, one beat a cycle (RFC 1071).

    Words are added as they lie in a beat, low byte first. The ones' complement sum commutes with swapping the bytes of
    every word, so the result is the sum with its bytes swapped.

    ``sum`` belongs to the beat that was given :attr:`LATENCY` cycles before, and covers all beats from the last with
    ``first`` up to it. It is 0 only if all words were.

    Parameters
    ----------
    words : int
        Words of a beat, 1 to 64.
    beats : int
        The most beats to add up; of more the sum means nothing.

    Members
    -------
    valid : the words count
    first : they begin a new sum
    words : the words, the first in the low bits
    sum
    """

    LATENCY = 6
    """Three levels of an adder tree with four inputs each, accumulation, and two steps that fold the carries in."""

    def __init__(self, words: int, beats: int) -> None:
        if not 1 <= words <= 64:
            raise ValueError(f"words must be 1 to 64, not {words}")
        self._width = 16 + bits_for(words * beats)
        super().__init__({"valid": In(1), "first": In(1), "words": In(16 * words), "sum": Out(16)})

    @classmethod
    def delayed(cls, m: Module, value: Value, name: str, reset_less: bool = True) -> Value:
        """What is known of a beat when it is given, in the cycle in which its sum is known."""
        for stage in range(1, cls.LATENCY + 1):
            later = Signal.like(value, name=f"{name}_after{stage}", reset_less=reset_less)
            m.d.sync += later.eq(value)
            value = later
        return value

    def elaborate(self, platform: object) -> Module:
        """Every level ends in registers; the accumulator is wide enough to fold only once, after it."""
        m = Module()
        operands: list[Value] = [self.words[at : at + 16] for at in range(0, len(self.words), 16)]
        valid, first = self.valid, self.first
        for level in range(3):
            sums: list[Value] = []
            for at in range(0, len(operands), 4):
                group = operands[at : at + 4]
                width = min(16 + 2 * (level + 1), self._width)
                total = Signal(width, name=f"sum{level}_{at // 4}", reset_less=True)
                m.d.sync += total.eq(sum(group[1:], group[0]))
                sums.append(total)
            operands = sums
            now_valid, now_first = Signal(name=f"valid{level}"), Signal(name=f"first{level}", reset_less=True)
            m.d.sync += [now_valid.eq(valid), now_first.eq(first)]
            valid, first = now_valid, now_first
        total = Signal(self._width, reset_less=True)
        folded = Signal(17, reset_less=True)
        with m.If(valid):
            m.d.sync += total.eq(Mux(first, 0, total) + operands[0])
        # Twice: the first fold may carry, the second cannot (RFC 1071, section 2).
        m.d.sync += [folded.eq(total[:16] + total[16:]), self.sum.eq(folded[:16] + folded[16])]
        return m


def stored_layout(
    opening: Mapping[str, ShapeLike], closing: Mapping[str, ShapeLike], max_lines: int
) -> data.StructLayout:
    """A beat from a :class:`FrameStore`. All fields but ``first``, ``last`` and ``data`` are the whole frame's."""
    return data.StructLayout(
        {"first": 1, "last": 1, **opening, "lines": unsigned(bits_for(max_lines)), **closing, "data": unsigned(LANES)}
    )


class FrameStore(wiring.Component):
    """Whole frames on the way through: what is known at a frame's start, its lines, what is known at its end.

    The writer opens a frame, writes its lines, and closes it, later if it likes, when it knows whether the frame is to
    be kept; meanwhile it may open the next. Frames are closed in the order in which they were opened. A kept frame
    comes out as one beat without a line and then its lines, at one beat a cycle, from the second cycle after it was
    closed. Of a frame that is not kept nothing comes out; giving its lines back takes one cycle.

    Parameters
    ----------
    opening, closing : mapping of name to shape
        What is known at the start and at the end; beside every beat of the frame.
    max_lines : int
        The most lines of a frame.
    slack : int
        Cycles in which the writer may still open or write after ``room`` has fallen, the one in which it falls
        included.

    Members
    -------
    room : a register: the writer may go on
    open, opening : begin a frame
    write, line : add a line
    close, closing : end the earliest open frame; ``closing`` also says whether to ``keep`` it and its ``lines``
    beat : stream of :func:`stored_layout`
    """

    FRAMES = 16
    """Frames that can be inside at once."""
    HEADROOM = 16
    """Lines beyond a whole frame, so that the next one comes in at full rate while this one is judged and read."""

    def __init__(
        self, opening: Mapping[str, ShapeLike], closing: Mapping[str, ShapeLike], max_lines: int, slack: int
    ) -> None:
        self._max_lines = max_lines
        self._slack = slack
        self._opening = data.StructLayout(dict(opening))
        self._closing = data.StructLayout({"keep": unsigned(1), "lines": unsigned(bits_for(max_lines)), **closing})
        self.depth = 1 << int(ceil_log2(max(2 * max_lines, max_lines + self.HEADROOM)))
        self._beat = stored_layout(opening, closing, max_lines)
        super().__init__(
            {
                "room": Out(1),
                "open": In(1),
                "opening": In(self._opening),
                "write": In(1),
                "line": In(LANES),
                "close": In(1),
                "closing": In(self._closing),
                "beat": Out(stream.Signature(self._beat)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A ring of lines, a queue for either end of a frame, and an output register (for lines: the ring's own)."""
        m = Module()
        depth = self.depth
        m.submodules.ring = ring = Memory(shape=unsigned(LANES), depth=depth, init=[], attrs=COLLISIONS_DO_NOT_MATTER)
        m.submodules.starts = starts = SyncFIFO(width=self._opening.size, depth=self.FRAMES)
        m.submodules.ends = ends = SyncFIFO(width=self._closing.size, depth=self.FRAMES)
        read, write = ring.read_port(), ring.write_port()
        used = Signal(range(depth + 1))
        freed = Signal.like(self.closing.lines)
        m.d.comb += [
            write.en.eq(self.write),
            write.data.eq(self.line),
            starts.w_en.eq(self.open),
            starts.w_data.eq(self.opening),
            ends.w_en.eq(self.close),
            ends.w_data.eq(self.closing),
        ]
        m.d.sync += [
            write.addr.eq(write.addr + self.write),
            used.eq(used + self.write - freed),
            self.room.eq((used <= depth - self._slack) & (starts.level <= self.FRAMES - self._slack)),
        ]

        # The frame in front: a cycle for its beginning and one for each line, or one to throw it away.
        end = Signal(self._closing)
        position = Signal(range(self._max_lines + 1))
        last = Signal()
        advance = Signal()
        issue = Signal()
        throw = Signal()
        m.d.comb += [
            end.eq(ends.r_data),
            last.eq(position == end.lines),
            advance.eq(~self.beat.valid | self.beat.ready),
            issue.eq(ends.r_rdy & end.keep & advance),
            throw.eq(ends.r_rdy & ~end.keep),
            freed.eq(Mux(throw, end.lines, issue & (position != 0))),
            ends.r_en.eq(throw | (issue & last)),
            starts.r_en.eq(ends.r_en),
            read.en.eq(issue & (position != 0)),
        ]
        address = Signal(range(depth))  # of the oldest line
        m.d.comb += read.addr.eq(address)
        m.d.sync += address.eq(address + freed)
        with m.If(issue):
            m.d.sync += position.eq(Mux(last, 0, position + 1))

        beat = Signal(
            data.StructLayout({name: field.shape for name, field in self._beat if name != "data"}),
            reset_less=True,
        )
        start = Signal(self._opening)
        m.d.comb += [start.eq(starts.r_data), self.beat.payload.data.eq(read.data)]
        with m.If(advance):
            m.d.sync += self.beat.valid.eq(issue)
        with m.If(issue):
            m.d.sync += [beat.first.eq(position == 0), beat.last.eq(last), beat.lines.eq(end.lines)]
            m.d.sync += [beat[name].eq(start[name]) for name, _field in self._opening]
            m.d.sync += [beat[name].eq(end[name]) for name, _field in self._closing if name not in ("keep", "lines")]
        for name, _field in beat.shape():
            m.d.comb += self.beat.payload[name].eq(beat[name])
        return m
