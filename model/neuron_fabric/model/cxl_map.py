"""The CXL endpoint's address map and status line: where a contribution is written and what is read back.

The device is memory of 64-byte lines. The two top bits of an address choose a window, the bits below are fields whose
widths follow from the sizes of the reducer, so that decoding is wiring. Tables for ``docs/cxl.md`` are made from here.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from neuron_fabric.model.params import LINE_BYTES, ReducerParams

__all__ = [
    "ADDRESS_BITS",
    "SEEN_BITS",
    "STATUS_FIELDS",
    "AddressField",
    "ContributeLine",
    "CxlMap",
    "IdentityLine",
    "ResultLine",
    "Status",
    "StatusField",
    "StatusFlags",
    "StatusLine",
    "Target",
    "Window",
    "address_table",
    "status_table",
]

ADDRESS_BITS = 52
"""A host physical address of CXL.mem has no more."""

_ADDRESSES = 1 << 64
_CHUNKS = 1 << 32


class Window(enum.IntEnum):
    """The top two bits of an address."""

    IDENTITY = 0
    """Plain memory."""
    CONTRIBUTE = 1
    """A full-line write is a line of a plane; reads as zero."""
    RESULT = 2
    """A line of a result plane; poisoned while the chunk is not complete."""
    STATUS = 3
    """What a slot version holds; reading changes nothing."""


class IdentityLine(NamedTuple):
    """Line ``line`` of the identity window."""

    line: int


class ContributeLine(NamedTuple):
    """Where ``worker`` writes ``line`` of ``plane``; in plane :attr:`CxlMap.abstain_plane`, line 0, it abstains."""

    bank: int
    worker: int
    epoch: int
    chunk: int
    plane: int
    line: int


class ResultLine(NamedTuple):
    """Where ``line`` of result plane ``plane`` is read."""

    bank: int
    epoch: int
    chunk: int
    plane: int
    line: int


class StatusLine(NamedTuple):
    """Status of a slot version with part ``part`` of the seen bits of ``worker``; ``slot`` counts those of the job."""

    bank: int
    slot: int
    version: int
    worker: int
    part: int


Target = IdentityLine | ContributeLine | ResultLine | StatusLine
"""What an address means. ``epoch`` and ``chunk`` are low bits there."""

_TARGETS: dict[Window, type[Target]] = {
    Window.IDENTITY: IdentityLine,
    Window.CONTRIBUTE: ContributeLine,
    Window.RESULT: ResultLine,
    Window.STATUS: StatusLine,
}
_WINDOWS: dict[type[Target], Window] = {target: window for window, target in _TARGETS.items()}


class AddressField(NamedTuple):
    """Bits ``lsb .. lsb + width - 1`` of an address; a field of width 0 is always 0."""

    name: str
    lsb: int
    width: int


@dataclass(frozen=True)
class CxlMap:
    """The addresses of a CXL endpoint.

    Parameters
    ----------
    params : ReducerParams
        With 512 lanes: a memory line is a datapath beat. There is an address field for ``params.jobs`` job banks.
    identity_bytes : int
        Size of the plain memory; a power of two.
    epoch_bits : int
        Low bits of the epoch in an address: so many reopenings must go by before an old address means something again.
    chunk_bits : int
        Low bits of the chunk number in an address, at least ``log2(8 * params.slots)``, which 0 stands for. A number is
        told from older and newer ones within half of that range.
    """

    params: ReducerParams
    identity_bytes: int = 1 << 16
    epoch_bits: int = 4
    chunk_bits: int = 0

    def __post_init__(self) -> None:
        least = (8 * self.params.slots).bit_length() - 1
        if self.chunk_bits == 0:
            object.__setattr__(self, "chunk_bits", least)
        if self.params.lanes != 8 * LINE_BYTES:
            raise ValueError(f"a memory line has {LINE_BYTES} bytes: lanes must be 512, not {self.params.lanes}")
        size = operator.index(self.identity_bytes)
        if size < LINE_BYTES or size & (size - 1):
            raise ValueError(f"identity_bytes must be a power of two of at least {LINE_BYTES}, not {size}")
        for name, low, high in (("epoch_bits", 1, 16), ("chunk_bits", least, 32)):
            if not low <= operator.index(getattr(self, name)) <= high:
                raise ValueError(f"{name} must be {low} to {high}, not {getattr(self, name)}")
        if self.address_bits > ADDRESS_BITS:
            raise ValueError(
                f"these sizes take {self.address_bits} address bits and a CXL address has {ADDRESS_BITS}: use fewer "
                "jobs, slots, workers or lines per chunk, or fewer epoch and chunk bits"
            )

    # ---- addresses ---------------------------------------------------------------------------------------------

    @cached_property
    def fields(self) -> dict[Window, tuple[AddressField, ...]]:
        """The address fields of every window, from the top down, in the order of the window's line type."""
        params = self.params
        widths = {
            "bank": _bits(params.jobs),
            "worker": _bits(params.workers),
            "epoch": self.epoch_bits,
            "chunk": self.chunk_bits,
            "plane": 0,
            "line": _bits(params.lines_per_chunk),
            "slot": _bits(params.slots),
            "version": 1,
            "part": _bits(self.parts),
        }
        special = {
            (Window.IDENTITY, "line"): _bits(self.identity_bytes // LINE_BYTES),
            # One value more than there are planes, for the abstention.
            (Window.CONTRIBUTE, "plane"): params.max_planes.bit_length(),
            # A majority has two planes however narrow the tallies are.
            (Window.RESULT, "plane"): _bits(max(params.acc_bits, 2)),
        }
        fields = {}
        for window, target in _TARGETS.items():
            lsb, upwards = _bits(LINE_BYTES), []
            for name in reversed(target._fields):
                width = special.get((window, name), widths[name])
                upwards.append(AddressField(name, lsb, width))
                lsb += width
            fields[window] = tuple(reversed(upwards))
        return fields

    @cached_property
    def window_bits(self) -> int:
        """Address bits inside a window; every window has as many."""
        return max(fields[0].lsb + fields[0].width for fields in self.fields.values())

    @property
    def address_bits(self) -> int:
        """Address bits of the device."""
        return self.window_bits + 2

    @property
    def size(self) -> int:
        """Bytes of address space that the device takes; only the identity window has memory behind every line."""
        return 1 << self.address_bits

    @property
    def abstain_plane(self) -> int:
        """Plane index, all ones, whose line 0 is written to abstain."""
        return (1 << self.params.max_planes.bit_length()) - 1

    def encode(self, target: Target) -> int:
        """The byte address of a line. Of ``epoch`` and ``chunk`` the low bits are taken; the rest must fit."""
        window = _WINDOWS[type(target)]
        address = window << self.window_bits
        for field, value in zip(self.fields[window], target, strict=True):
            if field.name in ("epoch", "chunk"):
                value &= (1 << field.width) - 1
            if not 0 <= value < 1 << field.width:
                raise ValueError(
                    f"{window.name.lower()} window: {field.name} {value} does not fit its {field.width} address bits"
                )
            address |= value << field.lsb
        return address

    def decode(self, address: int) -> Target | None:
        """What a line's address means; None between the end of a window's fields and the next window.

        None above the device, too: the range that a host's decoder gives it may be larger. ``ValueError`` for an
        address that is not of a line, or has more than 64 bits.
        """
        if not 0 <= address < _ADDRESSES or address % LINE_BYTES:
            raise ValueError(f"address {address:#x} is not that of a {LINE_BYTES}-byte line, of 64 bits")
        if address >= self.size:
            return None
        window = Window(address >> self.window_bits)
        fields = self.fields[window]
        offset = address & ((1 << self.window_bits) - 1)
        if offset >> fields[0].lsb + fields[0].width:
            return None
        return _TARGETS[window](*(offset >> field.lsb & (1 << field.width) - 1 for field in fields))

    # ---- numbers -----------------------------------------------------------------------------------------------

    def low_epoch(self, epoch: int) -> int:
        """The bits of an epoch that are in an address."""
        return epoch & (1 << self.epoch_bits) - 1

    def low_chunk(self, chunk: int) -> int:
        """The bits of a chunk number that are in an address."""
        return chunk & (1 << self.chunk_bits) - 1

    def nearest(self, low: int, current: int) -> int:
        """The 32-bit chunk number with the low bits ``low`` nearest to ``current``.

        The window is ``current - M / 2`` to ``current + M / 2 - 1`` with ``M = 2**chunk_bits``: what is exactly half
        of it away is older, as in serial-number arithmetic it is not newer.
        """
        half = (1 << self.chunk_bits) // 2
        return (current + self.low_chunk(low - current + half) - half) % _CHUNKS

    # ---- seen bits ---------------------------------------------------------------------------------------------

    @property
    def seen_row(self) -> int:
        """Seen bits from one plane to the next; a power of two."""
        return 1 << _bits(self.params.lines_per_chunk)

    @property
    def parts(self) -> int:
        """Status lines that it takes to hold all seen bits of a worker; a power of two."""
        return 1 << _bits(-(-self.params.max_planes * self.seen_row // SEEN_BITS))

    def seen_bit(self, plane: int, line: int) -> int:
        """Index of the seen bit of a (plane, line); bit ``i`` is bit ``i mod 256`` of part ``i div 256``."""
        return plane * self.seen_row + line

    def seen_mask(self, planes: int, lines: int) -> int:
        """The seen bits of a worker that has sent everything."""
        return sum(((1 << lines) - 1) << self.seen_bit(plane, 0) for plane in range(planes))


def _bits(count: int) -> int:
    """Bits that tell ``count`` things apart."""
    return (count - 1).bit_length()


class StatusFlags(enum.IntFlag):
    """Byte 8 of a status line."""

    NONE = 0
    OPEN = 1
    """A job is open in this bank; all else is zero where it is not."""
    CLAIMED = 2
    """The version holds ``chunk``; else ``chunk`` is the number before the first that it takes."""
    COMPLETE = 4
    """The result can be read."""
    MAJORITY = 8
    """Results are (negative, nonzero), not a tally."""


class StatusField(NamedTuple):
    """One field of the status line: name, byte offset, size in bytes, what it means."""

    name: str
    offset: int
    size: int
    doc: str


SEEN_BITS = 256
"""Seen bits in one status line."""

STATUS_FIELDS: tuple[StatusField, ...] = (
    StatusField("chunk", 0, 4, "chunk number, in full"),
    StatusField("epoch", 4, 2, "job epoch, in full"),
    StatusField("job", 6, 2, "job number of the bank"),
    StatusField("flags", 8, 1, "bit 0 open, bit 1 claimed, bit 2 complete, bit 3 majority"),
    StatusField("lines", 9, 1, "lines of a chunk"),
    StatusField("planes", 10, 1, "planes of a contribution"),
    StatusField("result_planes", 11, 1, "planes of a result"),
    StatusField("voters", 12, 4, "workers with at least a line in the tally"),
    StatusField("done", 16, 8, "bit w: worker w has sent everything or abstained"),
    StatusField("abstained", 24, 8, "bit w: worker w has abstained"),
    StatusField("seen", 32, 32, "seen bits of the worker and part in the address; all ones after an abstention"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """A parsed status line. Field meanings and ranges are those of :data:`STATUS_FIELDS`."""

    chunk: int = 0
    epoch: int = 0
    job: int = 0
    flags: StatusFlags = StatusFlags.NONE
    lines: int = 0
    planes: int = 0
    result_planes: int = 0
    voters: int = 0
    done: int = 0
    abstained: int = 0
    seen: int = 0

    def pack(self) -> bytes:
        """The 64 bytes; every field is little-endian, as memory of the usual hosts is."""
        return b"".join(getattr(self, field.name).to_bytes(field.size, "little") for field in STATUS_FIELDS)

    @classmethod
    def unpack(cls, line: bytes) -> Status:
        """The inverse of :meth:`pack`."""
        if len(line) != LINE_BYTES:
            raise ValueError(f"a status line has {LINE_BYTES} bytes, not {len(line)}")
        values = {
            field.name: int.from_bytes(line[field.offset : field.offset + field.size], "little")
            for field in STATUS_FIELDS
        }
        flags = StatusFlags(values.pop("flags"))
        return cls(flags=flags, **values)


def address_table() -> str:
    """The address fields of the default sizes as Markdown, for the documentation page that is generated from it."""
    address_map = CxlMap(ReducerParams())
    rows = ["| window | base | bits, from the top |", "|---|---|---|"]
    for window, fields in address_map.fields.items():
        cells = [f"{f.name} {f.lsb + f.width - 1}:{f.lsb}" if f.width else f"{f.name} (no bits)" for f in fields]
        rows.append(f"| {window.name.lower()} | {window << address_map.window_bits:#011x} | {', '.join(cells)} |")
    return "\n".join(rows) + "\n"


def status_table() -> str:
    """The status line as a Markdown table, for the documentation page that is generated from it."""
    rows = ["| at | size | field | meaning |", "|---|---|---|---|"]
    rows += [f"| {f.offset} | {f.size} | {f.name} | {f.doc} |" for f in STATUS_FIELDS]
    return "\n".join(rows) + "\n"
