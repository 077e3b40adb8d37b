"""Ethernet, IPv4 and UDP around the protocol's header: what an endpoint sends, and what it takes.

The golden model of the gateware's receiver and transmitter. Sources: IEEE 802.3 (frame), RFC 791 (IPv4), RFC 768 (UDP),
RFC 1071 (the checksum of both), RFC 1112 (multicast addresses). Frames are without preamble and frame check sequence:
those are the MAC's.

Every check of :func:`parse` has its :class:`Drop`, and the first that fails is the one that is counted. A frame is
**foreign** if the network may well have delivered it though nothing is wrong with it: it is not IPv4, not UDP, or its
destination is neither this endpoint nor its multicast group. Everything else that is dropped is **bad**: damaged, or
sent in a way that this protocol does not use. Options and fragments count as bad whoever they are for, since without a
plain header nothing that follows can be told.

What is not looked at, and may thus be anything: the source MAC address (the frame check sequence alone protects it),
type of service, identification, the two IPv4 flags that say nothing about fragments, time to live, and what follows
the datagram in its frame.
"""

from __future__ import annotations

import enum
import ipaddress
import operator
import struct
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ETHERNET_BYTES",
    "HEADERS_BYTES",
    "IP_BYTES",
    "MIN_FRAME_BYTES",
    "UDP_BYTES",
    "Datagram",
    "Drop",
    "Endpoint",
    "FrameError",
    "build",
    "internet_checksum",
    "ones_complement_sum",
    "parse",
]

ETHERNET_BYTES = 14
IP_BYTES = 20
UDP_BYTES = 8
HEADERS_BYTES = ETHERNET_BYTES + IP_BYTES + UDP_BYTES
MIN_FRAME_BYTES = 60
"""The least that Ethernet carries, without the frame check sequence."""

_IPV4 = 0x0800
_UDP = 17
_VERSION_IHL = 0x45
_DONT_FRAGMENT = 0x4000
_FRAGMENT = 0x3FFF  # "more fragments" and the offset
_MAX_PAYLOAD = 0xFFFF - IP_BYTES - UDP_BYTES

_ETHERNET = struct.Struct(">6s6sH")
_IP = struct.Struct(">BBHHHBBHII")
_UDP_HEADER = struct.Struct(">HHHH")
_PSEUDO = struct.Struct(">IIHH")


class Drop(enum.IntEnum):
    """Why a frame was dropped, in the order of the checks."""

    TOO_SHORT = 0
    """Fewer bytes than the three headers have."""
    NOT_IPV4 = 1
    """Another ethertype (VLAN tags included)."""
    IP_HEADER = 2
    """IP version is not 4, or the header is not 20 bytes: options are not taken."""
    FRAGMENT = 3
    """"More fragments" is set, or the offset is not 0."""
    IP_CHECKSUM = 4
    """The IPv4 header's checksum does not hold."""
    NOT_UDP = 5
    """Another protocol over IPv4."""
    NOT_OURS = 6
    """Destination MAC, IP and port are neither all three this endpoint's nor all three its multicast group's."""
    TOO_LONG = 7
    """The frame, padding included, is longer than the receiver's buffer."""
    IP_LENGTH = 8
    """The IPv4 total length leaves no room for a UDP header, or the frame ends before the datagram."""
    UDP_LENGTH = 9
    """The UDP length is not what IPv4 carries."""
    NO_CHECKSUM = 10
    """The UDP checksum is 0: the sender computed none."""
    UDP_CHECKSUM = 11
    """The UDP checksum does not hold."""

    @property
    def foreign(self) -> bool:
        """Whether the frame is somebody else's, not bad."""
        return self in (Drop.NOT_IPV4, Drop.NOT_UDP, Drop.NOT_OURS)


class FrameError(ValueError):
    """A frame that is not taken; :attr:`kind` is the first check that failed."""

    def __init__(self, kind: Drop, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where a datagram comes from or goes to.

    Parameters
    ----------
    mac : int
        48 bits; the byte that is sent first is the most significant.
    ip : int
        IPv4 address, 32 bits.
    port : int
        UDP port, 16 bits.
    """

    mac: int
    ip: int
    port: int

    def __post_init__(self) -> None:
        for name, bits in (("mac", 48), ("ip", 32), ("port", 16)):
            value = getattr(self, name)
            try:
                operator.index(value)
            except TypeError:
                raise TypeError(f"{name} must be an integer, not {value!r}: see Endpoint.of for text") from None
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} has {bits} bits; {value!r} does not fit")

    @classmethod
    def of(cls, mac: str, ip: str, port: int) -> Endpoint:
        """From text: ``Endpoint.of("02:00:00:00:00:01", "10.0.0.1", 20045)``; ``ValueError`` for what is no address."""
        digits = mac.replace("-", ":").split(":")
        try:
            if len(digits) != 6 or any(len(pair) != 2 for pair in digits):
                raise ValueError
            number = int("".join(digits), 16)
        except ValueError:
            raise ValueError(f"mac must be six pairs of hexadecimal digits, not {mac!r}") from None
        return cls(number, int(ipaddress.IPv4Address(ip)), port)

    @classmethod
    def multicast(cls, ip: str, port: int) -> Endpoint:
        """A multicast group; its MAC address follows from the IP address (RFC 1112)."""
        address = ipaddress.IPv4Address(ip)
        if not address.is_multicast:
            raise ValueError(f"ip must be a multicast address, 224.0.0.0 to 239.255.255.255, not {ip!r}")
        return cls(0x0100_5E00_0000 | int(address) & 0x7F_FFFF, int(address), port)

    def __str__(self) -> str:
        mac = ":".join(f"{byte:02x}" for byte in self.mac.to_bytes(6, "big"))
        return f"{ipaddress.IPv4Address(self.ip)}:{self.port} at {mac}"


@dataclass(frozen=True, slots=True)
class Datagram:
    """What a frame carries."""

    source: Endpoint
    destination: Endpoint
    payload: bytes


def ones_complement_sum(data: bytes | bytearray | memoryview) -> int:
    """The 16-bit ones' complement sum of the big-endian 16-bit words of ``data`` (RFC 1071).

    An odd last byte is the high half of a word. Nonzero data never gives 0: the sum's zero is then 0xFFFF.
    """
    even = len(data) & ~1
    total = int(np.frombuffer(data, dtype=">u2", count=even // 2).sum(dtype=np.uint64))
    if len(data) > even:
        total += data[even] << 8
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def internet_checksum(data: bytes | bytearray | memoryview) -> int:
    """The checksum to send for ``data``, in which the checksum field is 0."""
    return ones_complement_sum(data) ^ 0xFFFF


def build(
    source: Endpoint,
    destination: Endpoint,
    payload: bytes | bytearray | memoryview,
    ttl: int = 64,
    identification: int = 0,
) -> bytes:
    """The Ethernet frame of one UDP datagram: "don't fragment" set, no options, checksums in both headers.

    A UDP checksum that comes out as 0 is sent as 0xFFFF, which is the same number (RFC 768). A frame shorter than
    Ethernet's 60 bytes is padded with zeros; one with the protocol's header in it has at least 64.

    Raises
    ------
    ValueError
        Names what does not fit: payload (at most 65,507 bytes), ttl (8 bits) or identification (16 bits).
    """
    if len(payload) > _MAX_PAYLOAD:
        raise ValueError(f"payload: a UDP datagram carries at most {_MAX_PAYLOAD} bytes, not {len(payload)}")
    for name, value, bits in (("ttl", ttl, 8), ("identification", identification, 16)):
        if not 0 <= operator.index(value) < 1 << bits:
            raise ValueError(f"{name} has {bits} bits; {value!r} does not fit")
    length = UDP_BYTES + len(payload)

    def ip_header(checksum: int) -> bytes:
        return _IP.pack(
            _VERSION_IHL, 0, IP_BYTES + length, identification, _DONT_FRAGMENT, ttl, _UDP, checksum,
            source.ip, destination.ip,
        )  # fmt: skip

    pseudo = _PSEUDO.pack(source.ip, destination.ip, _UDP, length)
    unsummed = _UDP_HEADER.pack(source.port, destination.port, length, 0)
    checksum = internet_checksum(b"".join((pseudo, unsummed, payload))) or 0xFFFF
    frame = b"".join(
        (
            _ETHERNET.pack(destination.mac.to_bytes(6, "big"), source.mac.to_bytes(6, "big"), _IPV4),
            ip_header(internet_checksum(ip_header(0))),
            _UDP_HEADER.pack(source.port, destination.port, length, checksum),
            payload,
        )
    )
    return frame.ljust(MIN_FRAME_BYTES, b"\0")


def parse(
    frame: bytes | bytearray | memoryview,
    me: Endpoint | None,
    group: Endpoint | None = None,
    max_bytes: int | None = None,
) -> Datagram:
    """Take an Ethernet frame apart, or say why not.

    Parameters
    ----------
    frame : bytes
        From the destination MAC address to the last byte of padding.
    me : Endpoint or None
        Whose frames to take; ``None`` takes everybody's.
    group : Endpoint, optional
        A multicast group whose frames are taken, too.
    max_bytes : int, optional
        The receiver's buffer.

    Raises
    ------
    FrameError
        The first check that fails, in the order of :class:`Drop`.
    """
    frame = bytes(frame)
    if len(frame) < HEADERS_BYTES:
        raise FrameError(Drop.TOO_SHORT, f"{len(frame)} bytes cannot hold {HEADERS_BYTES} bytes of headers")
    destination_mac, source_mac, ethertype = _ETHERNET.unpack_from(frame)
    if ethertype != _IPV4:
        raise FrameError(Drop.NOT_IPV4, f"ethertype is {ethertype:#06x}, not {_IPV4:#06x}")
    version_ihl, _tos, total, _id, fragment, _ttl, protocol, _checksum, source_ip, destination_ip = _IP.unpack_from(
        frame, ETHERNET_BYTES
    )
    if version_ihl != _VERSION_IHL:
        raise FrameError(Drop.IP_HEADER, f"IP version and header length are {version_ihl:#04x}, not {_VERSION_IHL:#x}")
    if fragment & _FRAGMENT:
        raise FrameError(Drop.FRAGMENT, f"a fragment: flags and offset are {fragment:#06x}")
    if ones_complement_sum(frame[ETHERNET_BYTES : ETHERNET_BYTES + IP_BYTES]) != 0xFFFF:
        raise FrameError(Drop.IP_CHECKSUM, "the IPv4 header's checksum does not hold")
    if protocol != _UDP:
        raise FrameError(Drop.NOT_UDP, f"IPv4 carries protocol {protocol}, not {_UDP}")
    source_port, destination_port, length, checksum = _UDP_HEADER.unpack_from(frame, ETHERNET_BYTES + IP_BYTES)
    source = Endpoint(int.from_bytes(source_mac, "big"), source_ip, source_port)
    destination = Endpoint(int.from_bytes(destination_mac, "big"), destination_ip, destination_port)
    if me is not None and destination not in (me, group):
        raise FrameError(Drop.NOT_OURS, f"for {destination}, not for {me}")
    if max_bytes is not None and len(frame) > max_bytes:
        raise FrameError(Drop.TOO_LONG, f"{len(frame)} bytes exceed the buffer of {max_bytes}")
    if not IP_BYTES + UDP_BYTES <= total <= len(frame) - ETHERNET_BYTES:
        raise FrameError(Drop.IP_LENGTH, f"IPv4 claims {total} bytes; the frame has {len(frame) - ETHERNET_BYTES}")
    if length != total - IP_BYTES:
        raise FrameError(Drop.UDP_LENGTH, f"UDP claims {length} bytes; IPv4 carries {total - IP_BYTES}")
    if checksum == 0:
        raise FrameError(Drop.NO_CHECKSUM, "the UDP checksum is 0: none was computed")
    datagram = frame[ETHERNET_BYTES + IP_BYTES : ETHERNET_BYTES + total]
    if ones_complement_sum(_PSEUDO.pack(source_ip, destination_ip, _UDP, length) + datagram) != 0xFFFF:
        raise FrameError(Drop.UDP_CHECKSUM, "the UDP checksum does not hold")
    return Datagram(source, destination, datagram[UDP_BYTES:])
