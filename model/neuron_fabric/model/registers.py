"""The register table: every register of the reducer, declared once, as data.

Addresses are byte offsets in an AXI4-Lite space of 32-bit registers. Counters hold their greatest value instead of
wrapping. The golden models count under the names in :data:`COUNTERS`. Everything that can be written is 0 after reset.

The gateware's slave, the model of it, the C header, the JSON file and the documentation page are made from this table.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from neuron_fabric.model.cxl import CXL_COUNTERS
from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.net import Drop
from neuron_fabric.model.params import MAX_JOBS, ReducerParams
from neuron_fabric.model.wire import CONTROL_REASONS, VERSION, Reason

__all__ = [
    "COUNTERS",
    "COUNTER_BASE",
    "DEVICE_ID",
    "JOB_BASE",
    "JOB_OPEN",
    "JOB_STRIDE",
    "MAP_VERSION",
    "MAXIMA",
    "REGISTERS",
    "Access",
    "Field",
    "Register",
    "Word",
    "address_bits",
    "capability_values",
    "encoding_values",
    "expand",
    "pack",
    "register_table",
    "words",
]

COUNTER_BASE = 0x100
JOB_BASE = 0x400
JOB_STRIDE = 0x80
DEVICE_ID = 0x4E465231  # "NFR1"
MAP_VERSION = 1


class Access(enum.Enum):
    """What software may do. A write to what is read-only is an error and has no effect."""

    RO = "ro"
    """Built in: :func:`capability_values`."""
    RW = "rw"
    """Keeps what is written; 0 after reset."""
    COMMAND = "command"
    """Writing a 1 does something once; reads as 0."""
    COUNTER = "counter"
    """Read-only, saturates; cleared by CONTROL.clear_counters."""
    MAXIMUM = "maximum"
    """Read-only, the greatest level since it was cleared, which is as for a counter."""

    @property
    def writable(self) -> bool:
        """Whether a write is answered with OKAY."""
        return self in (Access.RW, Access.COMMAND)


class Field(NamedTuple):
    """Bits ``lsb .. lsb + width - 1`` of a register, or of each of its entries."""

    name: str
    lsb: int
    width: int
    doc: str

    @property
    def mask(self) -> int:
        """Its bits, in place."""
        return (1 << self.width) - 1 << self.lsb

    def place(self, value: int) -> int:
        """``value`` at its bits; ``ValueError`` if it has more."""
        if not 0 <= value < 1 << self.width:
            raise ValueError(f"{self.name} is {value}, which does not fit its {self.width} bits")
        return value << self.lsb


@dataclass(frozen=True)
class Register:
    """One 32-bit register, or ``count`` of them ``stride`` bytes apart.

    ``per_job`` registers are offsets inside the bank of each job, at ``JOB_BASE + JOB_STRIDE * job_index``.

    With ``entries`` the registers are an array: one entry of ``entry_bits`` bits for each of so many things as the
    field of :class:`~neuron_fabric.model.params.ReducerParams` of that name says, and ``fields`` are those of an
    entry. Bits of entries that a reducer hasn't read as 0.
    """

    name: str
    offset: int
    access: Access
    doc: str
    fields: tuple[Field, ...] = ()
    count: int = 1
    stride: int = 4
    per_job: bool = False
    entries: str = ""
    entry_bits: int = 32

    @property
    def key(self) -> str:
        """How it is called as a member of a struct: lower case, without the ``JOB_`` of its bank."""
        return (self.name[4:] if self.per_job else self.name).lower()

    @property
    def entries_per_word(self) -> int:
        """Entries in one register."""
        return 32 // self.entry_bits

    def pack(self, **values: int) -> int:
        """The word (or the entry) whose fields have these values, and 0 else.

        Raises
        ------
        ValueError
            A value doesn't fit.
        KeyError
            There is no such field.
        """
        fields = {field.name: field for field in self.fields}
        word = 0
        for name, value in values.items():
            try:
                word |= fields[name].place(value)
            except ValueError as error:
                raise ValueError(f"{self.name}.{error}") from None
        return word


@dataclass(frozen=True)
class Word:
    """A register at its address, when banks and arrays are unrolled."""

    name: str
    address: int
    register: Register
    bank: int
    """Which job's; 0 for registers that are not per job."""
    index: int
    """Which of the ``register.count``."""

    def fields(self, params: ReducerParams) -> Iterator[tuple[int, Field]]:
        """Number of the entry (0 if it has none) and place of every field that a reducer of these sizes has."""
        register = self.register
        first, have = register.entries_per_word * self.index, 1
        if register.entries:
            have = getattr(params, register.entries) - first
        for k in range(max(0, min(have, register.entries_per_word))):
            for field in register.fields:
                yield first + k, field._replace(lsb=field.lsb + register.entry_bits * k)

    def writable(self, params: ReducerParams) -> int:
        """Mask of the bits that a write has an effect on."""
        if not self.register.access.writable:
            return 0
        return sum(field.mask for _entry, field in self.fields(params))


def _word(name: str, doc: str) -> tuple[Field, ...]:
    return (Field(name, 0, 32, doc),)


_NETWORK_COUNTERS: tuple[tuple[str, str], ...] = (
    ("frames", "frames received"),
    ("lines", "payload lines added to a tally"),
    ("completed", "chunks completed"),
    ("results", "results sent, counted once per destination"),
    ("duplicates", "contributions already seen; nothing was added"),
    ("stale", "contributions to a chunk older than the one its slot version holds"),
    ("late", "contributions to a chunk that the straggler rule had completed"),
    ("partial", "chunks completed by the straggler rule"),
    ("abandoned", "incomplete chunks whose slot version was claimed by a newer one"),
    ("nacks", "NACKs sent"),
    ("nacks_dropped", "NACKs dropped because their queue was full"),
    ("relays_dropped", "a parent's results dropped because the relay queue was full"),
    *(
        (f"refused_{reason.name.lower()}", f"frames refused: {reason.name.lower().replace('_', ' ')}")
        for reason in Reason
        if reason not in {Reason.NONE, Reason.STALE, *CONTROL_REASONS}
    ),
    *(
        (f"dropped_{kind.name.lower()}", f"Ethernet frames dropped: {kind.name.lower().replace('_', ' ')}")
        for kind in Drop
    ),
    ("stall_in", "cycles in which an input beat was offered and not taken"),
    ("stall_out", "cycles in which an output beat was offered and not taken"),
    ("busy", "cycles in which a line was accumulated"),
    ("cycles", "clock cycles"),
    ("slot_high_water", "most slot versions that held an incomplete chunk at once"),
)

COUNTERS: tuple[tuple[str, str], ...] = (
    *_NETWORK_COUNTERS,
    *((name, f"CXL: {doc}") for name, doc in CXL_COUNTERS if name not in dict(_NETWORK_COUNTERS)),
)
"""(name, meaning) of every counter, in the order of their addresses."""

MAXIMA = frozenset({"slot_high_water"})
"""Those that hold the maximum of a level instead of a count."""

JOB_OPEN = Field("open", 0, 1, "1 while the job is open; writing 0 frees its slots")
"""Cleared by CONTROL.reset."""


def _endpoint(prefix: str, base: int, doc: str, *flags: Field) -> tuple[Register, ...]:
    """An Ethernet, IPv4 and UDP address in four registers; ``flags`` are further fields of the last one."""
    lo, hi = "MAC address, low 32 bits", "MAC address, high 16 bits; the first on the wire is the highest"
    return (
        Register(f"{prefix}_MAC_LO", base, Access.RW, f"{doc}: {lo}", _word("mac", lo)),
        Register(f"{prefix}_MAC_HI", base + 4, Access.RW, f"{doc}: {hi}", (Field("mac", 0, 16, hi),)),
        Register(f"{prefix}_IP", base + 8, Access.RW, f"{doc}: IPv4 address", _word("ip", "IPv4 address")),
        Register(f"{prefix}_PORT", base + 12, Access.RW, f"{doc}: UDP port", (Field("port", 0, 16, "port"), *flags)),
    )


REGISTERS: tuple[Register, ...] = (
    Register(
        "ID", 0x000, Access.RO, "constant that tells a reducer from anything else", _word("id", f"{DEVICE_ID:#010x}")
    ),
    Register(
        "VERSION",
        0x004,
        Access.RO,
        "version of the register map and of the wire protocol",
        (Field("map", 0, 16, "register map"), Field("protocol", 16, 16, "wire header version")),
    ),
    Register(
        "CAPABILITY0",
        0x008,
        Access.RO,
        "sizes of the datapath",
        (
            Field("lanes", 0, 16, "elements per beat"),
            Field("lines", 16, 8, "most lines per chunk"),
            Field("acc_bits", 24, 8, "bits of a tally"),
        ),
    ),
    Register(
        "CAPABILITY1",
        0x00C,
        Access.RO,
        "sizes of the pool",
        (Field("slots", 0, 20, "slots"), Field("workers", 20, 12, "most workers of a job")),
    ),
    Register(
        "CAPABILITY2",
        0x010,
        Access.RO,
        "encodings and result formats",
        (
            Field("max_planes", 0, 8, "most planes of an encoding"),
            Field("tally", 8, 1, "tally results"),
            Field("majority", 9, 1, "majority results"),
            Field("jobs", 16, 8, "job banks"),
        ),
    ),
    Register(
        "CONTROL",
        0x014,
        Access.COMMAND,
        "writing 1 acts once; reads as 0",
        (
            Field("reset", 0, 1, "close every job and forget every slot; counters stay"),
            Field("clear_counters", 1, 1, "set all counters to 0"),
        ),
    ),
    *_endpoint("LOCAL", 0x020, "this endpoint"),
    *_endpoint(
        "GROUP",
        0x030,
        "group to which results for all are sent",
        Field("enable", 16, 1, "there is a group; else such a result is sent to each member"),
    ),
    *_endpoint(
        "LISTEN",
        0x040,
        "group whose frames are taken, too",
        Field("enable", 16, 1, "there is one: for a child the group of its parent"),
    ),
    *_endpoint("ENTRY", 0x050, "next entry of the address table"),
    Register(
        "ENTRY_SELECT",
        0x060,
        Access.RW,
        "whose address that is",
        (
            Field("worker", 0, 16, "worker"),
            Field("bank", 16, 8, "job bank"),
            Field("parent", 24, 1, "the parent of the job instead of a worker"),
        ),
    ),
    Register(
        "ENTRY_WRITE",
        0x064,
        Access.COMMAND,
        "writing 1 stores the entry; one that this reducer hasn't is ignored",
        (Field("write", 0, 1, "store ENTRY_MAC, ENTRY_IP and ENTRY_PORT at ENTRY_SELECT"),),
    ),
    *(
        Register(
            f"COUNT_{name.upper()}",
            COUNTER_BASE + 4 * index,
            Access.MAXIMUM if name in MAXIMA else Access.COUNTER,
            doc,
            _word("count", doc),
        )
        for index, (name, doc) in enumerate(COUNTERS)
    ),
    Register(
        "JOB_CONTROL",
        0x00,
        Access.RW,
        "opens and closes the job",
        (JOB_OPEN, Field("job", 16, 16, "number")),
        per_job=True,
    ),
    Register("JOB_EPOCH", 0x04, Access.RW, "job epoch", (Field("epoch", 0, 16, "job epoch"),), per_job=True),
    Register(
        "JOB_SLOTS",
        0x08,
        Access.RW,
        "which slots the job has",
        (Field("base", 0, 16, "first slot"), Field("log2_count", 16, 5, "log2 of their number")),
        per_job=True,
    ),
    Register(
        "JOB_MEMBERS",
        0x10,
        Access.RW,
        "bit w is set where worker w is a member, 32 workers a register",
        (Field("member", 0, 1, "worker 32 i + k is a member"),),
        count=2,
        per_job=True,
        entries="workers",
        entry_bits=1,
    ),
    Register(
        "JOB_ENCODING",
        0x18,
        Access.RW,
        "the encoding's shape",
        (
            Field("planes", 0, 8, "planes"),
            Field("counts_negatives", 8, 1, "S = voters - 2 tally"),
            Field("leaves", 16, 16, "most voters of one contribution: 1, or those below a child reducer"),
        ),
        per_job=True,
    ),
    Register(
        "JOB_WEIGHTS",
        0x20,
        Access.RW,
        "one byte per plane, four planes a register: the weight is +-2**shift",
        (Field("shift", 0, 5, "shift of plane 4 i + k"), Field("negative", 7, 1, "plane 4 i + k is subtracted")),
        count=8,
        per_job=True,
        entries="max_planes",
        entry_bits=8,
    ),
    Register(
        "JOB_RESULT",
        0x40,
        Access.RW,
        "what results look like",
        (
            Field("majority", 0, 1, "0 tally, 1 majority"),
            Field("multicast", 1, 1, "one result to all, or one per member"),
            Field("child", 2, 1, "tallies go to the parent as contributions"),
            Field("planes", 8, 8, "tally planes to send"),
            Field("margin", 16, 16, "nonzero where |S| > margin"),
        ),
        per_job=True,
    ),
    Register(
        "JOB_TIMEOUT",
        0x44,
        Access.RW,
        "straggler timeout, cycles, at most 2^31; 0: off",
        _word("cycles", "0: off"),
        per_job=True,
    ),
    Register("JOB_QUORUM", 0x48, Access.RW, "straggler quorum", (Field("voters", 0, 16, "at least"),), per_job=True),
    Register(
        "JOB_PARENT",
        0x4C,
        Access.RW,
        "a child's job at its parent",
        (Field("job", 0, 16, "number"), Field("epoch", 16, 16, "job epoch")),
        per_job=True,
    ),
    Register(
        "JOB_PARENT_WORKER",
        0x50,
        Access.RW,
        "which worker a child is there",
        (Field("worker", 0, 16, "worker"),),
        per_job=True,
    ),
    Register("JOB_LINES", 0x54, Access.RW, "CXL: lines of a chunk", (Field("lines", 0, 8, "lines"),), per_job=True),
    Register(
        "JOB_FIRST_CHUNK",
        0x58,
        Access.RW,
        "CXL: the chunk number with which hosts begin",
        _word("chunk", "number"),
        per_job=True,
    ),
)
_BY_NAME = {register.name: register for register in REGISTERS}


def words(jobs: int = 1) -> list[Word]:
    """Every register at its address, banks and arrays unrolled. ``ValueError`` unless there are 1 to 255 jobs."""
    if not 1 <= operator.index(jobs) <= MAX_JOBS:
        raise ValueError(f"jobs must be 1 to {MAX_JOBS}, not {jobs}")
    result = []
    for register in REGISTERS:
        for bank in range(jobs if register.per_job else 1):
            base = JOB_BASE + JOB_STRIDE * bank if register.per_job else 0
            for index in range(register.count):
                name = f"JOB{bank}{register.name[3:]}" if register.per_job else register.name
                suffix = str(index) if register.count > 1 else ""
                address = base + register.offset + register.stride * index
                result.append(Word(name + suffix, address, register, bank, index))
    return result


def expand(jobs: int = 1) -> Iterator[tuple[str, int, Register]]:
    """(name, absolute byte address, declaration) of all :func:`words`."""
    return ((word.name, word.address, word.register) for word in words(jobs))


def address_bits(jobs: int = 1) -> int:
    """Address bits that a slave with so many job banks decodes."""
    return (JOB_BASE + JOB_STRIDE * jobs - 1).bit_length()


def capability_values(params: ReducerParams) -> dict[str, int]:
    """Values of the read-only registers of a reducer of these sizes. ``ValueError`` names a size that does not fit."""
    fields = {
        "ID": {"id": DEVICE_ID},
        "VERSION": {"map": MAP_VERSION, "protocol": VERSION},
        "CAPABILITY0": {"lanes": params.lanes, "lines": params.lines_per_chunk, "acc_bits": params.acc_bits},
        "CAPABILITY1": {"slots": params.slots, "workers": params.workers},
        "CAPABILITY2": {"max_planes": params.max_planes, "tally": 1, "majority": 1, "jobs": params.jobs},
    }
    return {name: pack(name, **values) for name, values in fields.items()}


def encoding_values(encoding: Encoding) -> dict[str, int]:
    """What a controller writes to a job's bank for an encoding: JOB_ENCODING and JOB_WEIGHTS0 to 7."""
    weights = _BY_NAME["JOB_WEIGHTS"]
    values = {
        "JOB_ENCODING": pack(
            "JOB_ENCODING",
            planes=encoding.planes,
            counts_negatives=int(encoding.counts_negatives),
            leaves=encoding.leaves,
        )
    }
    for index in range(weights.count):
        planes = range(encoding.planes)[weights.entries_per_word * index : weights.entries_per_word * (index + 1)]
        values[f"JOB_WEIGHTS{index}"] = sum(
            weights.pack(shift=encoding.shift(plane), negative=int(encoding.weights[plane] < 0))
            << weights.entry_bits * k
            for k, plane in enumerate(planes)
        )
    return values


def pack(name: str, **values: int) -> int:
    """:meth:`Register.pack` of the register of this name; ``KeyError`` if there is none."""
    return _BY_NAME[name].pack(**values)


def register_table() -> str:
    """The table as Markdown, for the documentation page that is generated from it."""
    rows = ["| register | at | access | bits | meaning |", "|---|---|---|---|---|"]
    for register in REGISTERS:
        at = f"job + {register.offset:#05x}" if register.per_job else f"{register.offset:#05x}"
        if register.count > 1:
            at += f", {register.count} times"
        step = f" + {register.entry_bits} k" if register.entries else ""
        bits = [f"{field.lsb + field.width - 1}:{field.lsb}{step}" for field in register.fields]
        alone = f" {bits[0]}" if len(bits) == 1 else ""
        rows.append(f"| {register.name} | {at} | {register.access.value} |{alone} | {register.doc} |")
        if not alone:
            rows += [
                f"| | | | {at} | {field.name}: {field.doc} |".replace("|S|", "abs(S)")
                for at, field in zip(bits, register.fields, strict=True)
            ]
    return "\n".join(rows) + "\n"
