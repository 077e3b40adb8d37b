"""Ethernet frames in, verified datagrams out.

Pipeline, for a beat that is transferred in cycle 0:

| cycle | what happens |
|---|---|
| 1 | checks that need the headers alone; how much of the datagram is left |
| 2 | bytes that are not the datagram's become zeros |
| 3 | header or line goes to the store; the UDP sum begins |
| 9 | the sums are known; verdict |
| 10 | the verdict is in the store, a strobe tells of it |
| 11 | the header of a frame whose last beat this was is at ``datagram``, if nothing is in front of it |

The pipeline never waits: ``s_axis_tready`` says in good time when the store is nearly full.
"""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.hw.framing import (
    ENDPOINT,
    HEADER_BITS,
    LANES,
    FrameStore,
    OnesComplementSum,
    check_size,
    stored_layout,
    swapped,
)
from neuron_fabric.model.net import ETHERNET_BYTES, HEADERS_BYTES, IP_BYTES, UDP_BYTES, Drop
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.wire import HEADER_BYTES

__all__ = ["RECEIVER_CONFIG", "RECEIVER_EVENTS", "UdpReceiver", "received_layout"]

RECEIVER_CONFIG = data.StructLayout({"me": ENDPOINT, "group": ENDPOINT, "group_enable": unsigned(1)})
"""Whose frames are taken: this endpoint's and, if enabled, a multicast group's. Static while in use."""

RECEIVER_EVENTS = data.StructLayout({**{drop.name.lower(): 1 for drop in Drop}, "accepted": 1})
"""One strobe a frame: it was accepted, or why it was dropped."""

_SLACK = 5  # cycles from the room's fall to the last write: its register, and stages 0 to 3


def _opening(max_lines: int) -> dict[str, data.Layout | unsigned]:
    return {
        "header": unsigned(HEADER_BITS),
        "source": ENDPOINT,
        "multicast": unsigned(1),
        "length": unsigned(bits_for(HEADER_BYTES + LINE_BYTES * max_lines)),
    }


def received_layout(max_lines: int) -> data.StructLayout:
    """A datagram is a beat with ``first``, whose ``data`` means nothing, and then its lines, the last with ``last``.

    All fields but ``first``, ``last`` and ``data`` are beside every beat of a datagram: ``header`` is the first 22
    bytes of the UDP payload as they are on the wire; ``source`` is who sent it; ``multicast`` tells whether it was to
    the group; ``length`` counts the payload's bytes; ``lines`` the beats that follow, the payload after the header
    rounded up to lines. Bytes beyond ``length`` are zeros, in ``header`` as in ``data``.
    """
    return stored_layout(_opening(max_lines), {}, max_lines)


class UdpReceiver(wiring.Component):
    """Takes Ethernet frames apart and lets through what :func:`~neuron_fabric.model.net.parse` lets through.

    Nothing of a frame leaves before its checksums were verified. The store holds at least two full frames, so that
    frames are taken back to back: a full one of ``max_lines`` lines every ``max_lines + 1`` cycles, without a pause.

    **When the input waits.** ``s_axis_tready`` falls when fewer than five lines of the store are free or more than
    eleven frames are in it, which only happens while ``datagram`` is not taken. It never depends on the frame that is
    coming in, and every frame of up to :attr:`max_bytes` finds room once those before it have left. Frames that fail a
    check of their headers alone (up to NOT_OURS, but for the IPv4 checksum) take no room at all; one that fails later
    gives its room back when its turn comes. ``tready`` is a register, and low in the first cycle after reset.

    A beat with ``tlast`` has 1 to 64 bytes, those with the low bits of ``tkeep`` set; ``tkeep`` of other beats is not
    looked at, and neither are the bytes that it leaves out. After reset the next beat begins a frame.

    Parameters
    ----------
    max_lines : int
        The most lines of a datagram after the header (1 to 256). A longer frame is dropped as TOO_LONG.
    lanes : int
        512; another width is refused.

    Members
    -------
    s_axis_tdata, s_axis_tkeep, s_axis_tvalid, s_axis_tready, s_axis_tlast : AXI4-Stream, in
        Frames without preamble and frame check sequence.
    config : :data:`RECEIVER_CONFIG`, in
    datagram : stream of :func:`received_layout`
    events : :data:`RECEIVER_EVENTS`, out
        In the order of the frames, :attr:`EVENT_LATENCY` cycles after the last beat of each.
    """

    EVENT_LATENCY = 10
    LATENCY = 11
    """Cycles from the transfer of a frame's last beat to its header being valid at ``datagram``."""

    def __init__(self, max_lines: int, lanes: int = LANES) -> None:
        check_size("a UDP receiver", lanes, max_lines)
        self.max_lines = max_lines
        self.max_bytes = LINE_BYTES * (1 + max_lines)
        """The longest frame that is taken: ``max_bytes`` of :func:`~neuron_fabric.model.net.parse`."""
        super().__init__(
            {
                "s_axis_tdata": In(LANES),
                "s_axis_tkeep": In(LINE_BYTES),
                "s_axis_tvalid": In(1),
                "s_axis_tready": Out(1),
                "s_axis_tlast": In(1),
                "config": In(RECEIVER_CONFIG),
                "datagram": Out(stream.Signature(received_layout(max_lines))),
                "events": Out(RECEIVER_EVENTS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One pipeline; a number at a name's end is the stage in whose cycle the signal belongs to the beat."""
        m = Module()
        m.submodules.store = store = FrameStore(_opening(self.max_lines), {}, self.max_lines, _SLACK)
        wiring.connect(m, wiring.flipped(self.datagram), store.beat)
        m.submodules.udp_sum = udp_sum = OnesComplementSum(LANES // 16, 1 + self.max_lines)
        m.submodules.ip_sum = ip_sum = OnesComplementSum(IP_BYTES // 2, 1)

        # ---- 0: the port -------------------------------------------------------------------------------------------
        at_start = Signal(init=1)
        taken = Signal()
        valid1 = Signal()
        first1, last1 = Signal(reset_less=True), Signal(reset_less=True)
        data1 = Signal(LANES, reset_less=True)
        keep1 = Signal(LINE_BYTES, reset_less=True)
        m.d.comb += [self.s_axis_tready.eq(store.room), taken.eq(self.s_axis_tvalid & self.s_axis_tready)]
        m.d.sync += [
            valid1.eq(taken),
            first1.eq(at_start),
            last1.eq(self.s_axis_tlast),
            data1.eq(self.s_axis_tdata),
            keep1.eq(self.s_axis_tkeep),
        ]
        with m.If(taken):
            m.d.sync += at_start.eq(self.s_axis_tlast)

        # ---- 1: checks of the headers, and how many bytes of the frame are the datagram's, from here on ----------
        valid2 = Signal()
        first2, last2 = Signal(reset_less=True), Signal(reset_less=True)
        data2 = Signal(LANES, reset_less=True)
        left2 = Signal(17, reset_less=True)
        bytes2 = Signal(range(LINE_BYTES + 1), reset_less=True)
        beat2 = Signal(range(self.max_lines + 2), reset_less=True)  # in the frame; stays at the first that is too many
        head2 = {drop: Signal(name=f"head_{drop.name.lower()}", reset_less=True) for drop in Drop}
        multicast2 = Signal(reset_less=True)

        total1 = Signal(16)
        to1 = Signal(ENDPOINT)
        me1, group1 = Signal(), Signal()
        m.d.comb += [
            total1.eq(self._number(data1, 16, 2)),
            to1.mac.eq(self._number(data1, 0, 6)),
            to1.ip.eq(self._number(data1, 30, 4)),
            to1.port.eq(self._number(data1, 36, 2)),
            me1.eq(to1 == self.config.me),
            group1.eq(self.config.group_enable & (to1 == self.config.group)),
        ]
        m.d.sync += [
            valid2.eq(valid1),
            first2.eq(first1),
            last2.eq(last1),
            data2.eq(data1),
            bytes2.eq(Mux(last1, self._kept(m, keep1), LINE_BYTES)),
        ]
        with m.If(valid1 & first1):
            m.d.sync += [
                left2.eq(total1 + ETHERNET_BYTES),
                beat2.eq(0),
                multicast2.eq(~me1),
                head2[Drop.NOT_IPV4].eq(self._number(data1, 12, 2) != 0x0800),
                head2[Drop.IP_HEADER].eq(self._number(data1, 14, 1) != 0x45),
                head2[Drop.FRAGMENT].eq((self._number(data1, 20, 2) & 0x3FFF) != 0),
                head2[Drop.NOT_UDP].eq(self._number(data1, 23, 1) != 17),
                head2[Drop.NOT_OURS].eq(~me1 & ~group1),
                head2[Drop.IP_LENGTH].eq(total1 < IP_BYTES + UDP_BYTES),
                head2[Drop.UDP_LENGTH].eq(self._number(data1, 38, 2) + IP_BYTES != total1),
                head2[Drop.NO_CHECKSUM].eq(self._number(data1, 40, 2) == 0),
            ]
        with m.Elif(valid1):
            m.d.sync += [
                left2.eq(Mux(left2 > LINE_BYTES, left2 - LINE_BYTES, 0)),
                beat2.eq(Mux(beat2 > self.max_lines, beat2, beat2 + 1)),
            ]

        # ---- 2: padding becomes zeros; of the first beat, what UDP does not sum becomes what it does ---------------
        valid3 = Signal()
        first3, last3 = Signal(reset_less=True), Signal(reset_less=True)
        data3 = Signal(LANES, reset_less=True)
        source_mac3 = Signal(48, reset_less=True)
        multicast3 = Signal(reset_less=True)
        line3 = Signal()
        open3 = Signal()
        drops3 = Signal(len(Drop), reset_less=True)

        refused2 = Signal()  # takes no room
        too_long2 = Signal()
        mask2 = Signal(LINE_BYTES)
        masked2 = Signal(LANES)
        m.d.comb += [
            refused2.eq(
                head2[Drop.NOT_IPV4]
                | head2[Drop.IP_HEADER]
                | head2[Drop.FRAGMENT]
                | head2[Drop.NOT_UDP]
                | head2[Drop.NOT_OURS]
            ),
            too_long2.eq(beat2 > self.max_lines),
            mask2.eq(Cat(left2 > byte for byte in range(LINE_BYTES))),
            masked2.eq(Cat(Mux(mask2[byte], data2[8 * byte : 8 * byte + 8], 0) for byte in range(LINE_BYTES))),
        ]
        # The pseudo header: both addresses where they are, the protocol and the UDP length where others were.
        addresses = 8 * (ETHERNET_BYTES + 12)
        pseudo2 = Cat(swapped(Const(17, 16)), data2[8 * 38 : 8 * 40], Const(0, addresses - 32), masked2[addresses:])
        m.d.sync += [
            valid3.eq(valid2),
            first3.eq(first2),
            last3.eq(last2),
            data3.eq(Mux(first2, pseudo2, masked2)),
            source_mac3.eq(self._number(data2, 6, 6)),
            multicast3.eq(multicast2),
            line3.eq(valid2 & ~first2 & ~refused2 & ~too_long2 & (left2 != 0)),
            open3.eq(valid2 & first2 & ~refused2),
        ]
        for drop in Drop:
            failed: Value = head2[drop]
            if drop is Drop.TOO_SHORT:
                failed = first2 & (bytes2 < HEADERS_BYTES)
            elif drop is Drop.TOO_LONG:
                failed = too_long2
            elif drop is Drop.IP_LENGTH:
                failed = head2[drop] | (left2 > bytes2)
            m.d.sync += drops3[drop].eq(failed)

        # ---- 3: into the store -------------------------------------------------------------------------------------
        lines4 = Signal(range(self.max_lines + 1), reset_less=True)  # of the frame, in the store
        lines3 = Signal.like(lines4)
        opened4 = Signal(reset_less=True)
        opened3 = Signal()
        opening = store.opening
        m.d.comb += [
            store.open.eq(open3),
            opening.header.eq(data3[8 * HEADERS_BYTES :]),
            opening.source.mac.eq(source_mac3),
            opening.source.ip.eq(self._number(data3, 26, 4)),
            opening.source.port.eq(self._number(data3, 34, 2)),
            opening.multicast.eq(multicast3),
            opening.length.eq(self._number(data3, 38, 2) - UDP_BYTES),
            store.write.eq(line3),
            store.line.eq(data3),
            lines3.eq(Mux(first3, 0, lines4 + line3)),
            opened3.eq(Mux(first3, open3, opened4)),
        ]
        with m.If(valid3):
            m.d.sync += [lines4.eq(lines3), opened4.eq(opened3)]

        # ---- sums --------------------------------------------------------------------------------------------------
        m.d.comb += [
            ip_sum.valid.eq(valid2 & first2),
            ip_sum.first.eq(1),
            ip_sum.words.eq(data2[8 * ETHERNET_BYTES : 8 * (ETHERNET_BYTES + IP_BYTES)]),
            udp_sum.valid.eq(valid3),
            udp_sum.first.eq(first3),
            udp_sum.words.eq(data3),
        ]
        bad_ip9 = Signal(reset_less=True)  # the IP sum was begun a stage earlier
        m.d.sync += bad_ip9.eq(ip_sum.sum != 0xFFFF)

        # ---- 9: verdict --------------------------------------------------------------------------------------------
        ends9 = udp_sum.delayed(m, valid3 & last3, "ends", reset_less=False)
        opened9 = udp_sum.delayed(m, opened3, "opened")
        drops9 = udp_sum.delayed(m, drops3, "drops")
        lines9 = udp_sum.delayed(m, lines3, "lines")
        failed9 = Signal(len(Drop))
        keep9 = Signal()
        m.d.comb += [
            failed9.eq(drops9),
            failed9[Drop.IP_CHECKSUM].eq(bad_ip9),
            failed9[Drop.UDP_CHECKSUM].eq(udp_sum.sum != 0xFFFF),
            keep9.eq(~failed9.any()),
            store.close.eq(ends9 & opened9),
            store.closing.keep.eq(keep9),
            store.closing.lines.eq(lines9),
        ]
        m.d.sync += self.events.accepted.eq(ends9 & keep9)
        for drop in Drop:
            m.d.sync += self.events[drop.name.lower()].eq(ends9 & failed9[drop] & ~failed9[:drop].any())
        return m

    @staticmethod
    def _number(beat: Signal, at: int, size: int) -> Value:
        """The big-endian number in ``size`` bytes from byte ``at``."""
        return swapped(beat[8 * at : 8 * (at + size)])

    @staticmethod
    def _kept(m: Module, keep: Signal) -> Signal:
        """How many bytes a contiguous ``tkeep`` keeps: the place of its only edge, encoded."""
        edge = Signal(LINE_BYTES)
        count = Signal(range(LINE_BYTES + 1))
        m.d.comb += [
            edge.eq(keep & ~(keep >> 1)),
            count.eq(
                Cat(
                    Cat(edge[byte] for byte in range(LINE_BYTES) if byte + 1 >> bit & 1).any()
                    for bit in range(len(count))
                )
            ),
        ]
        return count
