"""Payloads of the control frames: what OPEN, GRANT, CLOSE and STATUS carry behind the header.

One table per payload makes packing, parsing and documentation, as for the header. Multi-byte fields are big-endian.
``docs/protocol.md`` says who sends what when; here is what it looks like, and what is out of range.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding
from neuron_fabric.model.registers import COUNTERS
from neuron_fabric.model.wire import Flags, FrameType, Header, Reason

__all__ = [
    "CLOSE_FIELDS",
    "CONTROL_VERSION",
    "ENCODINGS",
    "GRANT_FIELDS",
    "MAX_CONTROL_BYTES",
    "NO_FIELD",
    "OPEN_FIELDS",
    "RESULT_FORMATS",
    "STATUS_FIELDS",
    "STATUS_REPLY_FIELDS",
    "Close",
    "ControlError",
    "ControlField",
    "Grant",
    "JobState",
    "Open",
    "StatusReply",
    "StatusRequest",
    "control_frame",
    "control_table",
    "first_difference",
]

CONTROL_VERSION = 1
"""Version of all control payloads; their first byte."""

ENCODINGS: tuple[Encoding, ...] = (BINARY, TERNARY)
"""By the index that an OPEN carries; bit i of a GRANT's mask stands for entry i."""

RESULT_FORMATS = ("tally", "majority")
"""By the index that an OPEN carries."""

NO_FIELD = 0xFF
"""``detail`` of a GRANT that names no field."""

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


class ControlField(NamedTuple):
    """One field of a payload: name, offset and size in bytes, least and greatest value, what it means."""

    name: str
    offset: int
    size: int
    low: int
    high: int
    doc: str


class ControlError(ValueError):
    """A payload that cannot be read or written; :attr:`reason` is the code that goes with it.

    :attr:`field` is the index of the field in its table, or :data:`NO_FIELD`.
    """

    def __init__(self, reason: Reason, message: str, field: int = NO_FIELD) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field


def _fields(*rows: tuple[str, int, int, int, str]) -> tuple[ControlField, ...]:
    """Fields one behind the other, from (name, size, low, high, doc)."""
    result, offset = [], 0
    for name, size, low, high, doc in rows:
        result.append(ControlField(name, offset, size, low, high, doc))
        offset += size
    return tuple(result)


_VERSION_ROW = ("version", 1, CONTROL_VERSION, CONTROL_VERSION, f"of the payload: {CONTROL_VERSION}")

OPEN_FIELDS = _fields(
    _VERSION_ROW,
    ("encoding", 1, 0, len(ENCODINGS) - 1, ", ".join(f"{i} {e.name}" for i, e in enumerate(ENCODINGS))),
    ("result_format", 1, 0, len(RESULT_FORMATS) - 1, ", ".join(f"{i} {name}" for i, name in enumerate(RESULT_FORMATS))),
    ("lines_per_chunk", 1, 1, 255, "K wanted: the most lines of a chunk"),
    ("members", 2, 1, 0xFFFF, "world size N; the members are the workers 0 to N - 1"),
    ("margin", 2, 0, 0xFFFF, "of majority results; 0 for tallies"),
    ("slots", 4, 1, 1 << 16, "wanted; a power of two"),
    ("next_chunk", 4, 0, _U32, "first chunk number that this worker has never used"),
    ("nonce", 8, 0, _U64, "identifies this opening by this process; the same in every repetition"),
)

GRANT_FIELDS = _fields(
    _VERSION_ROW,
    ("detail", 1, 0, 0xFF, "of a refusal: index of the OPEN field that is at fault, or 255"),
    ("nonce", 8, 0, _U64, "that of the OPEN it answers"),
    ("slots", 4, 0, 1 << 16, "S granted, a power of two; 0 in a refusal"),
    ("first_chunk", 4, 0, _U32, "chunk number at which all members begin"),
    ("members", 2, 0, 0xFFFF, "of the job"),
    ("present", 2, 0, 0xFFFF, "members whose OPEN is there"),
    ("max_workers", 2, 1, 0xFFFF, "most members of a job at this reducer"),
    ("lines_per_chunk", 1, 0, 255, "K granted; 0 in a refusal"),
    ("result_planes", 1, 0, 255, "planes of a result; 0 in a refusal"),
    ("acc_bits", 1, 1, 32, "bits of a tally at this reducer"),
    ("encodings", 1, 0, 255, "bit i: the reducer has encoding i"),
)

CLOSE_FIELDS = _fields(
    _VERSION_ROW,
    ("nonce", 8, 0, _U64, "that of the OPEN"),
)

STATUS_FIELDS = _fields(
    _VERSION_ROW,
    ("cookie", 8, 0, _U64, "anything; it comes back, so that a round trip can be timed"),
)


class JobState(enum.IntEnum):
    """What a STATUS says of the job in its header."""

    NONE = 0
    """Not known here."""
    WAITING = 1
    """Some members have sent OPEN."""
    OPEN = 2
    """Served."""
    REOPENING = 3
    """Served, while some members have sent another OPEN."""


STATUS_REPLY_FIELDS = _fields(
    _VERSION_ROW,
    ("cookie", 8, 0, _U64, "that of the request"),
    ("uptime_nonce", 8, 0, _U64, "drawn when the controller started: another one tells of a restart"),
    ("state", 1, 0, len(JobState) - 1, ", ".join(f"{state.value} {state.name.lower()}" for state in JobState)),
    ("slots_used", 4, 0, 1 << 16, "of all jobs"),
    ("slots_total", 4, 1, 1 << 16, "of the reducer"),
    ("jobs_used", 2, 0, 0xFFFF, "jobs that are open"),
    ("jobs_total", 2, 1, 0xFFFF, "most jobs that can be"),
    ("counters", 2, 0, len(COUNTERS), "how many pairs follow: number of the counter (2 bytes), value (4 bytes)"),
)

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_PAIR = struct.Struct(">HI")


def _struct(fields: Sequence[ControlField]) -> struct.Struct:
    return struct.Struct(">" + "".join(_CODES[field.size] for field in fields))


def _check(kind: str, index: int, field: ControlField, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = field.low - 1
    if not field.low <= number <= field.high:
        raise ControlError(
            Reason.BAD_VERSION if field.name == "version" else Reason.BAD_VALUE,
            f"{kind}: {field.name} must be {field.low} to {field.high}, not {value!r}",
            index,
        )
    return number


class _Payload:
    """A dataclass whose attributes, and ``version``, are the fields of a table."""

    kind: ClassVar[str]
    fields: ClassVar[tuple[ControlField, ...]]
    _layout: ClassVar[struct.Struct]

    def __init_subclass__(cls, *, kind: str, fields: tuple[ControlField, ...]) -> None:
        cls.kind, cls.fields, cls._layout = kind, fields, _struct(fields)

    @classmethod
    def size(cls) -> int:
        """Bytes of the payload, without what a STATUS has behind its fields."""
        return cls._layout.size

    def pack(self) -> bytes:
        """The payload; :class:`ControlError` names a field that is out of range."""
        self._validate()
        values = [
            CONTROL_VERSION if field.name == "version" else _check(self.kind, index, field, self._value(field.name))
            for index, field in enumerate(self.fields)
        ]
        return self._layout.pack(*values)

    def _value(self, name: str) -> object:
        return getattr(self, name)

    def _validate(self) -> None:
        """Rules that a table cannot tell."""

    @classmethod
    def _parse(cls, payload: bytes | bytearray | memoryview) -> dict[str, int]:
        """Values by name, all in range. A newer version is told as such even where its length differs."""
        if not payload:
            raise ControlError(Reason.BAD_LENGTH, f"{cls.kind}: the payload is empty; it has {cls._layout.size} bytes")
        _check(cls.kind, 0, cls.fields[0], payload[0])
        if len(payload) < cls._layout.size:
            raise ControlError(
                Reason.BAD_LENGTH, f"{cls.kind}: the payload has {cls._layout.size} bytes, not {len(payload)}"
            )
        values = cls._layout.unpack_from(payload)
        for index, (field, value) in enumerate(zip(cls.fields, values, strict=True)):
            _check(cls.kind, index, field, value)
        return {field.name: value for field, value in zip(cls.fields[1:], values[1:], strict=True)}

    @classmethod
    def _parse_whole(cls, payload: bytes | bytearray | memoryview) -> Self:
        """The payload that is its fields and no more."""
        values = cls._parse(payload)
        if len(payload) != cls._layout.size:
            raise ControlError(
                Reason.BAD_LENGTH, f"{cls.kind}: the payload has {cls._layout.size} bytes, not {len(payload)}"
            )
        result = cls(**values)
        result._validate()
        return result

    @classmethod
    def unpack(cls, payload: bytes | bytearray | memoryview) -> Self:
        """Parse what follows the header.

        Raises
        ------
        ControlError
            With reason BAD_LENGTH, BAD_VERSION or BAD_VALUE, in the order of these checks except that the version
            counts before the length.
        """
        return cls._parse_whole(payload)


@dataclass(frozen=True)
class Open(_Payload, kind="OPEN", fields=OPEN_FIELDS):
    """What a worker wants: :data:`OPEN_FIELDS`. The header's epoch is the highest that it remembers for the job."""

    members: int
    nonce: int
    encoding: int = 0
    result_format: int = 0
    margin: int = 0
    lines_per_chunk: int = 16
    slots: int = 16
    next_chunk: int = 0

    def _validate(self) -> None:
        if self.slots & (self.slots - 1):
            raise ControlError(
                Reason.BAD_VALUE, f"OPEN: slots must be a power of two, not {self.slots}", _index("slots")
            )
        if self.margin and RESULT_FORMATS[self.result_format] != "majority":
            raise ControlError(
                Reason.BAD_VALUE, f"OPEN: tallies have no margin, so it must be 0, not {self.margin}", _index("margin")
            )


@dataclass(frozen=True)
class Grant(_Payload, kind="GRANT", fields=GRANT_FIELDS):
    """The controller's answer to an OPEN: :data:`GRANT_FIELDS`.

    The header's reason is 0 for a grant, its epoch is then the job's; else it says why not.
    """

    nonce: int
    max_workers: int
    acc_bits: int
    encodings: int
    slots: int = 0
    first_chunk: int = 0
    members: int = 0
    present: int = 0
    lines_per_chunk: int = 0
    result_planes: int = 0
    detail: int = NO_FIELD

    @property
    def field(self) -> str | None:
        """Name of the OPEN field that a refusal is about, if it is about one."""
        return OPEN_FIELDS[self.detail].name if self.detail < len(OPEN_FIELDS) else None


@dataclass(frozen=True)
class Close(_Payload, kind="CLOSE", fields=CLOSE_FIELDS):
    """A worker leaves: :data:`CLOSE_FIELDS`. The answer is the same frame."""

    nonce: int


@dataclass(frozen=True)
class StatusRequest(_Payload, kind="STATUS", fields=STATUS_FIELDS):
    """A question: :data:`STATUS_FIELDS`. The header's job says of which job the state is wanted."""

    cookie: int


@dataclass(frozen=True)
class StatusReply(_Payload, kind="STATUS", fields=STATUS_REPLY_FIELDS):
    """Its answer: :data:`STATUS_REPLY_FIELDS`, then the counters that are not 0.

    ``counters`` maps names of :data:`~neuron_fabric.model.registers.COUNTERS` to values, which stop at 2**32 - 1 as in
    the registers. Numbers of counters that are not known here are left out when a reply is read.
    """

    cookie: int
    uptime_nonce: int
    slots_total: int
    jobs_total: int
    slots_used: int = 0
    jobs_used: int = 0
    state: JobState = JobState.NONE
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def _value(self, name: str) -> object:
        return len(self._pairs()) if name == "counters" else getattr(self, name)

    def _pairs(self) -> list[tuple[int, int]]:
        unknown = self.counters.keys() - _COUNTER_NUMBERS.keys()
        if unknown:
            raise ControlError(Reason.BAD_VALUE, f"STATUS: no counter {min(unknown)!r} in the register table")
        return [(_COUNTER_NUMBERS[name], min(value, _U32)) for name, value in self.counters.items() if value > 0]

    def pack(self) -> bytes:
        """The payload; :class:`ControlError` names a field that is out of range, or an unknown counter."""
        return super().pack() + b"".join(_PAIR.pack(*pair) for pair in sorted(self._pairs()))

    @classmethod
    def unpack(cls, payload: bytes | bytearray | memoryview) -> Self:
        """Parse what follows the header; :class:`ControlError` as for the others."""
        values = cls._parse(payload)
        count = values.pop("counters")
        size = cls._layout.size + count * _PAIR.size
        if len(payload) != size:
            raise ControlError(
                Reason.BAD_LENGTH, f"STATUS: the payload has {size} bytes for {count} counters, not {len(payload)}"
            )
        pairs = [_PAIR.unpack_from(payload, cls._layout.size + k * _PAIR.size) for k in range(count)]
        state = JobState(values.pop("state"))
        known = {COUNTERS[number][0]: value for number, value in pairs if number < len(COUNTERS)}
        return cls(**values, state=state, counters=known)


_COUNTER_NUMBERS = {name: number for number, (name, _doc) in enumerate(COUNTERS)}

MAX_CONTROL_BYTES = STATUS_REPLY_FIELDS[-1].offset + 2 + len(COUNTERS) * _PAIR.size
"""The longest payload of a control frame."""

_TYPES = {
    Open: FrameType.OPEN,
    Grant: FrameType.GRANT,
    Close: FrameType.CLOSE,
    StatusRequest: FrameType.STATUS,
    StatusReply: FrameType.STATUS,
}

_TERMS = ("encoding", "result_format", "members", "margin", "lines_per_chunk", "slots")
"""Fields of an OPEN in which all members must agree."""


def _index(name: str) -> int:
    return next(index for index, field in enumerate(OPEN_FIELDS) if field.name == name)


def control_frame(
    payload: Open | Grant | Close | StatusRequest | StatusReply,
    *,
    job: int,
    worker: int,
    epoch: int = 0,
    reason: int = 0,
) -> bytes:
    """A whole control frame, a UDP payload. Header fields that a control frame does not use are 0.

    ``ValueError`` names a field that is out of range.
    """
    header = Header(
        _TYPES[type(payload)], job, worker, 0, planes=0, voters=0, lines=0, epoch=epoch, flags=Flags.NONE, reason=reason
    )
    return header.pack() + payload.pack()


def first_difference(one: Open, other: Open) -> int | None:
    """Index in :data:`OPEN_FIELDS` of the first field in which members must agree and these two do not."""
    for index, field in enumerate(OPEN_FIELDS):
        if field.name in _TERMS and getattr(one, field.name) != getattr(other, field.name):
            return index
    return None


def control_table(fields: Sequence[ControlField]) -> str:
    """A payload as a Markdown table, for the documentation page that is generated from it."""
    rows = ["| index | at | size | field | range | meaning |", "|---|---|---|---|---|---|"]
    for index, field in enumerate(fields):
        values = f"{field.low} to {_power(field.high)}" if field.low != field.high else f"{field.low}"
        rows.append(f"| {index} | {field.offset} | {field.size} | {field.name} | {values} | {field.doc} |")
    return "\n".join(rows) + "\n"


def _power(value: int) -> str:
    bits = (value + 1).bit_length() - 1
    return f"2^{bits} - 1" if value + 1 == 1 << bits and bits > 8 else str(value)
