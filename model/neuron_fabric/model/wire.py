"""The wire header: one table from which packing, parsing, RTL offsets and documentation come.

A frame is UDP over IPv4 over Ethernet (14 + 20 + 8 bytes) and a header of 22 bytes, so that all headers together fill
one 64-byte beat and every payload line starts aligned. Multi-byte fields are big-endian (network order).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "CONTROL_REASONS",
    "DESTINATION_ALL",
    "HEADER_BYTES",
    "HEADER_FIELDS",
    "HEADER_OFFSET",
    "MAGIC",
    "SERIAL_HALF",
    "VERSION",
    "Flags",
    "FrameType",
    "Header",
    "HeaderError",
    "HeaderField",
    "Reason",
    "header_table",
    "serial_newer",
]

MAGIC = 0x4E46
VERSION = 1
HEADER_BYTES = 22
HEADER_OFFSET = 14 + 20 + 8
"""Where the header starts in an Ethernet frame."""
DESTINATION_ALL = 0xFFFF
"""``worker`` of a RESULT that is meant for every member."""
SERIAL_HALF = 1 << 31


class FrameType(enum.IntEnum):
    """Low nibble of byte 2. The first four are the fast path; the rest go to the controller."""

    CONTRIBUTE = 0
    ABSTAIN = 1
    RESULT = 2
    NACK = 3
    OPEN = 4
    GRANT = 5
    CLOSE = 6
    STATUS = 7


class Flags(enum.IntFlag):
    """Byte 3."""

    NONE = 0
    MAJORITY = 1
    """The result's planes are (negative, nonzero), not a tally."""
    PARTIAL = 2
    """Completed by the straggler rule; ``missing`` says how many members neither voted nor abstained."""
    RESEND = 4
    """A stored result, sent again to one worker."""


class Reason(enum.IntEnum):
    """Why a frame was refused (NACK) or a job was not granted (GRANT); each has its counter."""

    NONE = 0
    BAD_CHECKSUM = 1
    BAD_MAGIC = 2
    BAD_VERSION = 3
    BAD_TYPE = 4
    BAD_LENGTH = 5
    JOB_NOT_OPEN = 6
    WRONG_EPOCH = 7
    WRONG_SENDER = 8
    BAD_PLANE = 9
    BAD_LINES = 10
    STALE = 11
    LINES_DIFFER = 12
    ABSTAIN_AFTER_VOTE = 13
    BAD_VOTERS = 14
    NO_CAPACITY = 15
    OVERFLOW = 16
    NOT_READY = 17
    """Not all members have sent OPEN yet."""
    DISAGREES = 18
    """Members want different things."""
    BAD_VALUE = 19
    """A field of a control frame is out of range."""
    NO_EPOCH = 20
    """The epochs of a job are used up."""


CONTROL_REASONS = frozenset(
    {
        Reason.NO_CAPACITY,
        Reason.OVERFLOW,
        Reason.NOT_READY,
        Reason.DISAGREES,
        Reason.BAD_VALUE,
        Reason.NO_EPOCH,
    }
)
"""Those that only a controller gives; the reducer has no counters for them."""


class HeaderField(NamedTuple):
    """One field of the header: name, byte offset, size in bytes, what it means."""

    name: str
    offset: int
    size: int
    doc: str


HEADER_FIELDS: tuple[HeaderField, ...] = (
    HeaderField("magic", 0, 2, "0x4E46"),
    HeaderField("version_type", 2, 1, "version in the high nibble (1), frame type in the low nibble"),
    HeaderField("flags", 3, 1, "bit 0 majority, bit 1 partial, bit 2 resend"),
    HeaderField("job", 4, 2, "which training run"),
    HeaderField("worker", 6, 2, "sender; in a result the destination, 0xFFFF for all"),
    HeaderField("missing", 8, 2, "in a partial result: members that neither voted nor abstained; else 0"),
    HeaderField("chunk", 10, 4, "chunk number; slot and version follow from it"),
    HeaderField("plane", 14, 1, "contribution: index into the encoding table; result: result plane index"),
    HeaderField("planes", 15, 1, "planes in all"),
    HeaderField("voters", 16, 2, "contribution: 1, or a child reducer's voters; result: voters in the tally"),
    HeaderField("lines", 18, 1, "lines in this chunk"),
    HeaderField("reason", 19, 1, "reason code of a NACK or a refused GRANT; else 0"),
    HeaderField("epoch", 20, 2, "job epoch"),
)

_CODES = {1: "B", 2: "H", 4: "I"}
_STRUCT = struct.Struct(">" + "".join(_CODES[field.size] for field in HEADER_FIELDS))


class HeaderError(ValueError):
    """A header that cannot be parsed; :attr:`reason` is the code that is counted for it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. Field meanings and ranges are those of :data:`HEADER_FIELDS`."""

    type: FrameType
    job: int
    worker: int
    chunk: int
    plane: int = 0
    planes: int = 1
    voters: int = 1
    lines: int = 1
    epoch: int = 0
    flags: Flags = Flags.NONE
    missing: int = 0
    reason: int = 0

    def pack(self) -> bytes:
        """The 22 bytes; ``ValueError`` names a field that is out of its range."""
        try:
            return _STRUCT.pack(
                MAGIC,
                VERSION << 4 | self.type,
                self.flags,
                self.job,
                self.worker,
                self.missing,
                self.chunk,
                self.plane,
                self.planes,
                self.voters,
                self.lines,
                self.reason,
                self.epoch,
            )
        except struct.error:
            for field in HEADER_FIELDS[2:]:
                value = getattr(self, field.name)
                if not isinstance(value, int) or not 0 <= value < 1 << 8 * field.size:
                    raise ValueError(
                        f"header field {field.name!r} has {8 * field.size} bits; {value!r} does not fit"
                    ) from None
            raise

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Parse the first 22 bytes of ``data`` (a UDP payload).

        Raises
        ------
        HeaderError
            In the order of the protocol's checks: too short, magic, version, type. Unknown flag bits and reason
            codes are kept as they are: they are for later versions to define, and a receiver ignores them.
        """
        if len(data) < HEADER_BYTES:
            raise HeaderError(Reason.BAD_LENGTH, f"a header has {HEADER_BYTES} bytes, not {len(data)}")
        magic, version_type, flags, job, worker, missing, chunk, plane, planes, voters, lines, reason, epoch = (
            _STRUCT.unpack_from(data)
        )
        if magic != MAGIC:
            raise HeaderError(Reason.BAD_MAGIC, f"magic is {magic:#06x}, not {MAGIC:#06x}")
        if version_type >> 4 != VERSION:
            raise HeaderError(Reason.BAD_VERSION, f"protocol version is {version_type >> 4}, not {VERSION}")
        try:
            frame_type = FrameType(version_type & 0xF)
        except ValueError:
            raise HeaderError(Reason.BAD_TYPE, f"frame type {version_type & 0xF} is not defined") from None
        return cls(frame_type, job, worker, chunk, plane, planes, voters, lines, epoch, Flags(flags), missing, reason)


def serial_newer(new: int, old: int) -> bool:
    """Whether chunk number ``new`` is newer than ``old`` in 32-bit serial-number arithmetic (RFC 1982).

    Two numbers exactly half the range apart are not ordered by the RFC; here such a number is not newer.
    """
    return 0 < (new - old) & 0xFFFFFFFF < SERIAL_HALF


def header_table() -> str:
    """The header as a Markdown table, for the documentation page that is generated from it."""
    rows = ["| at | size | field | meaning |", "|---|---|---|---|"]
    rows += [f"| {f.offset} | {f.size} | {f.name} | {f.doc} |" for f in HEADER_FIELDS]
    return "\n".join(rows) + "\n"
