"""Datagrams in, Ethernet frames with their checksums out.

Pipeline, for a beat that is transferred in cycle 0:

| cycle | what happens |
|---|---|
| 1 | header or line goes to the store; the sums begin |
| 7 | both checksums are known, and in the store |
| 9 | the frame whose last beat this was leaves the store, if nothing is in front of it |
| 10 | its headers are at ``m_axis`` |

The pipeline never waits: ``datagram.ready`` says in good time when the store is nearly full.
"""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.framing import (
    ENDPOINT,
    HEADER_BITS,
    LANES,
    FrameStore,
    OnesComplementSum,
    check_size,
    swapped,
)
from neuron_fabric.model.net import IP_BYTES, UDP_BYTES
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.wire import HEADER_BYTES

__all__ = ["SENT_LAYOUT", "UdpTransmitter"]

SENT_LAYOUT = data.StructLayout(
    {
        "first": unsigned(1),
        "last": unsigned(1),
        "header": unsigned(HEADER_BITS),
        "destination": ENDPOINT,
        "data": unsigned(LANES),
    }
)
"""A datagram is a beat with ``first``, of which ``header`` (the first 22 bytes of the UDP payload, as they are on the
wire) and ``destination`` count, and then its lines, of which ``data`` counts; the last beat has ``last``."""

_SLACK = 3  # cycles from the room's fall to the last write: its register, and stages 0 and 1
_UDP_LENGTH = UDP_BYTES + HEADER_BYTES  # without lines
_IP_LENGTH = IP_BYTES + _UDP_LENGTH
_IP_START = (0x4500, 0x0000, 0x4000, 0x4011)  # no options; identification 0; don't fragment; time to live 64, UDP


def _wire(word: int) -> int:
    """A 16-bit word as it lies in a beat, and in a :class:`~neuron_fabric.hw.framing.OnesComplementSum`."""
    return word >> 8 | (word & 0xFF) << 8


class UdpTransmitter(wiring.Component):
    """Sends what :func:`~neuron_fabric.model.net.build` builds, with its default time to live and identification.

    Store and forward: a frame leaves when its last line is in, since checksums stand in front. The store holds at least
    two full frames, so that datagrams of ``max_lines`` lines are taken and sent every ``max_lines + 1`` cycles.

    All headers together are 64 bytes, so a datagram without lines is one whole beat and longer than Ethernet's minimum,
    and ``tkeep`` is all ones always.

    ``datagram.ready`` falls when fewer than three lines of the store are free or more than thirteen frames are in it,
    which only happens while ``m_axis`` is not taken. It is a register, and low in the first cycle after reset.

    A datagram of more than ``max_lines`` lines is its producer's mistake. It is dropped with a strobe of ``too_long``
    and does no other harm.

    Parameters
    ----------
    max_lines : int
        The most lines of a datagram after the header (1 to 256).
    lanes : int
        512; another width is refused.

    Members
    -------
    me : :data:`~neuron_fabric.hw.framing.ENDPOINT`, in
        The source of every frame. Static while in use.
    datagram : stream of :data:`SENT_LAYOUT`, in
    m_axis_tdata, m_axis_tkeep, m_axis_tvalid, m_axis_tready, m_axis_tlast : AXI4-Stream, out
        Frames without preamble and frame check sequence.
    too_long : out
    """

    LATENCY = 10
    """Cycles from the transfer of a datagram's last beat to its frame's first beat being valid."""

    def __init__(self, max_lines: int, lanes: int = LANES) -> None:
        check_size("a UDP transmitter", lanes, max_lines)
        self.max_lines = max_lines
        super().__init__(
            {
                "me": In(ENDPOINT),
                "datagram": In(stream.Signature(SENT_LAYOUT)),
                "m_axis_tdata": Out(LANES),
                "m_axis_tkeep": Out(LINE_BYTES),
                "m_axis_tvalid": Out(1),
                "m_axis_tready": In(1),
                "m_axis_tlast": Out(1),
                "too_long": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One pipeline; a number at a name's end is the stage in whose cycle the signal belongs to the beat."""
        m = Module()
        m.submodules.store = store = FrameStore(
            {"header": unsigned(HEADER_BITS), "destination": ENDPOINT},
            {"ip_checksum": unsigned(16), "udp_checksum": unsigned(16)},
            self.max_lines,
            _SLACK,
        )
        m.submodules.udp_sum = udp_sum = OnesComplementSum(1 + LANES // 16, 1 + self.max_lines)
        m.submodules.ip_sum = ip_sum = OnesComplementSum(5, 1 + self.max_lines)

        # ---- 0: the port; of a first beat, the words that UDP sums stand where a line's data would -----------------
        beat = self.datagram.payload
        valid1 = Signal()
        first1, last1 = Signal(reset_less=True), Signal(reset_less=True)
        words1 = Signal(LANES, reset_less=True)
        mac1 = Signal(48, reset_less=True)
        summed = data.StructLayout(
            {"source_ip": 32, "ip": 32, "source_port": 16, "port": 16, "header": unsigned(HEADER_BITS)}
        )
        start0 = Signal(summed)
        m.d.comb += [
            self.datagram.ready.eq(store.room),
            start0.source_ip.eq(swapped(self.me.ip)),
            start0.ip.eq(swapped(beat.destination.ip)),
            start0.source_port.eq(swapped(self.me.port)),
            start0.port.eq(swapped(beat.destination.port)),
            start0.header.eq(beat.header),
        ]
        m.d.sync += [
            valid1.eq(self.datagram.valid & self.datagram.ready),
            first1.eq(beat.first),
            last1.eq(beat.last),
            words1.eq(Mux(beat.first, Value.cast(start0), beat.data)),
            mac1.eq(beat.destination.mac),
        ]

        # ---- 1: into the store, and into the sums ------------------------------------------------------------------
        # Both lengths grow by a line's bytes with every line, and so do the sums that they are in.
        lines2 = Signal(range(self.max_lines + 2), reset_less=True)  # of the frame; stays at the first that is too many
        lines1 = Signal.like(lines2)
        start1 = Signal(summed)
        udp_start = Const(_wire(17) + 2 * _wire(_UDP_LENGTH), 16)  # the UDP length stands in the pseudo header, too
        ip_start = Const(sum(map(_wire, _IP_START)) + _wire(_IP_LENGTH), 16)
        ip_words = Cat(start1.source_ip, start1.ip, ip_start)
        m.d.comb += [
            start1.eq(words1),
            lines1.eq(Mux(first1, 0, Mux(lines2 > self.max_lines, lines2, lines2 + 1))),
            store.open.eq(valid1 & first1),
            store.opening.header.eq(start1.header),
            store.opening.destination.mac.eq(mac1),
            store.opening.destination.ip.eq(swapped(start1.ip)),
            store.opening.destination.port.eq(swapped(start1.port)),
            store.write.eq(valid1 & ~first1 & (lines1 <= self.max_lines)),
            store.line.eq(words1),
            udp_sum.valid.eq(valid1),
            udp_sum.first.eq(first1),
            udp_sum.words.eq(Cat(words1, Mux(first1, udp_start, _wire(2 * LINE_BYTES)))),
            ip_sum.valid.eq(valid1),
            ip_sum.first.eq(first1),
            ip_sum.words.eq(Mux(first1, ip_words, _wire(LINE_BYTES))),
        ]
        with m.If(valid1):
            m.d.sync += lines2.eq(lines1)

        # ---- 7: the frame is whole ---------------------------------------------------------------------------------
        ends7 = udp_sum.delayed(m, valid1 & last1, "ends", reset_less=False)
        lines7 = udp_sum.delayed(m, lines1, "lines")
        too_long7 = Signal()
        udp_checksum7 = Signal(16)
        m.d.comb += [
            too_long7.eq(lines7 > self.max_lines),
            udp_checksum7.eq(~udp_sum.sum),
            store.close.eq(ends7),
            store.closing.keep.eq(~too_long7),
            store.closing.lines.eq(Mux(too_long7, self.max_lines, lines7)),
            store.closing.ip_checksum.eq(swapped(~ip_sum.sum)),
            store.closing.udp_checksum.eq(swapped(Mux(udp_checksum7 == 0, 0xFFFF, udp_checksum7))),
        ]
        m.d.sync += self.too_long.eq(ends7 & too_long7)

        # ---- out ---------------------------------------------------------------------------------------------------
        out = store.beat.payload
        line_bytes = Signal(16)
        tdata = Signal(LANES, reset_less=True)
        tlast = Signal(reset_less=True)
        m.d.comb += [
            line_bytes.eq(out.lines * LINE_BYTES),
            store.beat.ready.eq(~self.m_axis_tvalid | self.m_axis_tready),
            self.m_axis_tdata.eq(tdata),
            self.m_axis_tkeep.eq(-1),
            self.m_axis_tlast.eq(tlast),
        ]
        # Every number of the headers in the order in which they are sent, with its size in bytes.
        numbers: tuple[tuple[Value | int, int], ...] = (
            (out.destination.mac, 6),
            (self.me.mac, 6),
            (0x0800, 2),
            (_IP_START[0], 2),
            (line_bytes + _IP_LENGTH, 2),
            *((word, 2) for word in _IP_START[1:]),
            (out.ip_checksum, 2),
            (self.me.ip, 4),
            (out.destination.ip, 4),
            (self.me.port, 2),
            (out.destination.port, 2),
            (line_bytes + _UDP_LENGTH, 2),
            (out.udp_checksum, 2),
        )
        fields = []
        for index, (number, size) in enumerate(numbers):
            field = Signal(8 * size, name=f"header_field{index}")
            m.d.comb += field.eq(number)
            fields.append(swapped(field))
        with m.If(store.beat.ready):
            m.d.sync += self.m_axis_tvalid.eq(store.beat.valid)
        with m.If(store.beat.ready & store.beat.valid):
            m.d.sync += [tdata.eq(Mux(out.first, Cat(*fields, out.header), out.data)), tlast.eq(out.last)]
        return m
