"""A UDP socket that moves many frames in one system call, where the kernel can.

With UDP_SEGMENT (Linux 4.18) one send becomes many datagrams, with UDP_GRO (Linux 5.0) many datagrams arrive in one
receive: without them every frame costs a call, and nothing else changes.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from urllib.parse import urlsplit

import numpy as np

from neuron_fabric.runtime.emulator.kernels import I64, Datagram

__all__ = ["DatagramSocket", "UdpAddress", "is_loopback"]

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # Linux; the socket module does not name them
_LARGEST = 65535
_BUFFER_BYTES = 8 << 20  # asked for; the kernel may give less
_RECEIVES = 32
_KNOWN = 4096  # addresses that are remembered as integers
_SPACE = socket.CMSG_SPACE(4)


@dataclass(frozen=True)
class UdpAddress:
    """An IPv4 address and a port; 0 lets the system choose one."""

    host: IPv4Address
    port: int

    @classmethod
    def parse(cls, url: str) -> UdpAddress:
        """From ``udp://127.0.0.1:20045`` or ``udp://localhost:20045``; ``ValueError`` says what is wrong."""
        form = "it must be udp://address:port, as udp://127.0.0.1:20045"
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}; {form}") from None
        if parts.scheme != "udp" or host is None or port is None or parts.path or parts.query:
            raise ValueError(f"{url!r}: {form}")
        try:
            return cls(IPv4Address("127.0.0.1" if host == "localhost" else host), port)
        except ValueError:
            raise ValueError(f"{url!r}: {host!r} is no IPv4 address; {form}") from None

    def __str__(self) -> str:
        return f"udp://{self.host}:{self.port}"


def is_loopback(peer: int) -> bool:
    """Whether an address as :class:`DatagramSocket` gives it is of this machine."""
    return peer >> 40 == 127


class DatagramSocket:
    """A bound, non-blocking UDP socket over preallocated buffers.

    An address is an integer, the IPv4 address and 16 bits of the port, so that tables can hold it.

    Parameters
    ----------
    listen : UdpAddress
    offload : bool
        Whether UDP_SEGMENT and UDP_GRO are tried.

    Attributes
    ----------
    address : UdpAddress
        Where it is bound.
    segments, groups : bool
        Whether it sends, and receives, many datagrams in one call.
    data : uint8 array
        What :meth:`receive` has read.

    Raises
    ------
    OSError
        The address cannot be bound.
    """

    def __init__(self, listen: UdpAddress, *, offload: bool = True) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.socket.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                self.socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            self.segments = offload and self._try(_UDP_SEGMENT, 0)
            self.groups = offload and self._try(_UDP_GRO, 1)
            self.socket.bind((str(listen.host), listen.port))
        except BaseException:
            self.socket.close()
            raise
        host, port = self.socket.getsockname()
        self.address = UdpAddress(IPv4Address(host), port)
        self.data = np.zeros(_RECEIVES * _LARGEST, np.uint8)
        self._view = self.data.data
        self._datagrams = np.zeros((_RECEIVES, len(Datagram)), np.int64)
        self._numbers: dict[tuple[str, int], int] = {}
        self._names: dict[int, tuple[str, int]] = {}

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _try(self, option: int, value: int) -> bool:
        try:
            self.socket.setsockopt(_SOL_UDP, option, value)
        except OSError:
            return False
        return True

    def receive(self) -> I64:
        """Read what has arrived, as much as there is room for, into :attr:`data`.

        Returns rows of :class:`~neuron_fabric.runtime.emulator.kernels.Datagram`; the array is used again.
        """
        table, at = self._datagrams, 0
        for row in range(_RECEIVES):
            room = self._view[at : at + _LARGEST]
            try:
                if self.groups:
                    size, ancillary, _flags, name = self.socket.recvmsg_into([room], _SPACE)
                    segment = _segment(ancillary)
                else:
                    size, name = self.socket.recvfrom_into(room)
                    segment = 0
            except (BlockingIOError, ConnectionError):  # nothing there, or news of an earlier send
                return table[:row]
            table[row] = at, size, segment, self._number(name)
            at += size
        return table

    def _number(self, name: tuple[str, int]) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) >= _KNOWN:
                self._numbers.clear()
            host, port = name
            number = self._numbers[name] = int(IPv4Address(host)) << 16 | port
        return number

    def _name(self, number: int) -> tuple[str, int]:
        name = self._names.get(number)
        if name is None:
            if len(self._names) >= _KNOWN:
                self._names.clear()
            name = self._names[number] = str(IPv4Address(number >> 16)), number & 0xFFFF
        return name

    def send(self, data: memoryview, messages: I64) -> tuple[int, int]:
        """Send rows of :class:`~neuron_fabric.runtime.emulator.kernels.Message` over ``data``, in their order.

        Returns how many rows are done, fewer than there are if the socket takes no more now; and how many of those went
        nowhere, since the system refused them. Both are for the caller to count: a frame that is lost is sent again
        when it is asked for.
        """
        failed = 0
        for row, (at, size, peer, segment) in enumerate(messages.tolist()):
            try:
                for part, cut in self._parts(data[at : at + size], segment):
                    self._send(part, cut, self._name(peer))
            except BlockingIOError:
                return row, failed
            except OSError:
                failed += 1
        return len(messages), failed

    def _parts(self, data: memoryview, segment: int) -> Iterator[tuple[memoryview, int]]:
        if self.segments or len(data) <= segment:
            yield data, segment
            return
        for at in range(0, len(data), segment):
            yield data[at : at + segment], segment

    def _send(self, data: memoryview, segment: int, name: tuple[str, int]) -> None:
        if len(data) <= segment:
            self.socket.sendto(data, name)
            return
        try:
            self.socket.sendmsg([data], [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", segment))], 0, name)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # The device on the way there cannot cut them: from now on, one by one.
            self.segments = False
            for part, cut in self._parts(data, segment):
                self._send(part, cut, name)


def _segment(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, value in ancillary:
        if level == _SOL_UDP and kind == _UDP_GRO and len(value) >= 4:
            return int.from_bytes(value[:4], "little" if struct.pack("=H", 1)[0] else "big")
    return 0
