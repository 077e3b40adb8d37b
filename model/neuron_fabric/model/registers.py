"""The register table: every register of the reducer, declared once, as data.

Addresses are byte offsets in an AXI4-Lite space of 32-bit registers. Counters hold their greatest value instead of
wrapping. The golden model counts under the names in :data:`COUNTERS`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import Reason

__all__ = [
    "COUNTERS",
    "COUNTER_BASE",
    "JOB_BASE",
    "JOB_STRIDE",
    "REGISTERS",
    "Access",
    "Field",
    "Register",
    "capability_values",
    "encoding_values",
    "expand",
    "register_table",
]

COUNTER_BASE = 0x100
JOB_BASE = 0x400
JOB_STRIDE = 0x80
DEVICE_ID = 0x4E465231  # "NFR1"


class Access(enum.Enum):
    """Who may write."""

    RO = "ro"
    RW = "rw"
    COUNTER = "counter"
    """Read-only, saturates; cleared by CONTROL.clear_counters."""


class Field(NamedTuple):
    """Bits ``lsb .. lsb + width - 1`` of a register."""

    name: str
    lsb: int
    width: int
    doc: str


@dataclass(frozen=True)
class Register:
    """One 32-bit register, or ``count`` of them ``stride`` bytes apart.

    ``per_job`` registers are offsets inside the bank of each job, at ``JOB_BASE + JOB_STRIDE * job_index``.
    """

    name: str
    offset: int
    access: Access
    doc: str
    fields: tuple[Field, ...] = ()
    reset: int = 0
    count: int = 1
    stride: int = 4
    per_job: bool = False


def _word(name: str, doc: str) -> tuple[Field, ...]:
    return (Field(name, 0, 32, doc),)


COUNTERS: tuple[tuple[str, str], ...] = (
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
        if reason not in (Reason.NONE, Reason.STALE, Reason.NO_CAPACITY, Reason.OVERFLOW)
    ),
    ("stall_in", "cycles in which an input beat was offered and not taken"),
    ("stall_out", "cycles in which an output beat was offered and not taken"),
    ("busy", "cycles in which a line was accumulated"),
    ("cycles", "clock cycles"),
    ("slot_high_water", "most slots that were in use at once"),
)
"""(name, meaning) of every counter, in the order of their addresses."""

REGISTERS: tuple[Register, ...] = (
    Register("ID", 0x000, Access.RO, "constant that tells a reducer from anything else", _word("id", "0x4E465231")),
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
        Access.RW,
        "self-clearing commands",
        (Field("reset", 0, 1, "forget every job and slot"), Field("clear_counters", 1, 1, "set all counters to 0")),
    ),
    *(
        Register(f"COUNT_{name.upper()}", COUNTER_BASE + 4 * index, Access.COUNTER, doc, _word("count", doc))
        for index, (name, doc) in enumerate(COUNTERS)
    ),
    Register(
        "JOB_CONTROL",
        0x00,
        Access.RW,
        "opens and closes the job",
        (Field("open", 0, 1, "1 while the job is open; writing 0 frees its slots"), Field("job", 16, 16, "number")),
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
        _word("mask", "members"),
        count=2,
        per_job=True,
    ),
    Register(
        "JOB_ENCODING",
        0x18,
        Access.RW,
        "the encoding's shape",
        (Field("planes", 0, 8, "planes"), Field("counts_negatives", 8, 1, "S = voters - 2 tally")),
        per_job=True,
    ),
    Register(
        "JOB_WEIGHTS",
        0x20,
        Access.RW,
        "one byte per plane, four planes a register: the weight is +-2**shift",
        tuple(
            field
            for k in range(4)
            for field in (
                Field(f"shift{k}", 8 * k, 5, f"shift of plane 4 i + {k}"),
                Field(f"negative{k}", 8 * k + 7, 1, f"plane 4 i + {k} is subtracted"),
            )
        ),
        count=8,
        per_job=True,
    ),
    Register(
        "JOB_RESULT",
        0x40,
        Access.RW,
        "what results look like",
        (
            Field("majority", 0, 1, "0 tally, 1 majority"),
            Field("multicast", 1, 1, "one result to all, or one per member"),
            Field("planes", 8, 8, "tally planes to send"),
            Field("margin", 16, 16, "nonzero where |S| > margin"),
        ),
        per_job=True,
    ),
    Register(
        "JOB_TIMEOUT", 0x44, Access.RW, "straggler timeout, cycles; 0: off", _word("cycles", "0: off"), per_job=True
    ),
    Register("JOB_QUORUM", 0x48, Access.RW, "straggler quorum", (Field("voters", 0, 16, "at least"),), per_job=True),
)


def expand(jobs: int = 1) -> Iterator[tuple[str, int, Register]]:
    """Every register's (name, absolute byte address, declaration), banks and arrays unrolled."""
    for register in REGISTERS:
        for bank in range(jobs if register.per_job else 1):
            base = JOB_BASE + JOB_STRIDE * bank if register.per_job else 0
            for index in range(register.count):
                name = f"JOB{bank}{register.name[3:]}" if register.per_job else register.name
                suffix = str(index) if register.count > 1 else ""
                yield name + suffix, base + register.offset + register.stride * index, register


def capability_values(params: ReducerParams, jobs: int = 1) -> dict[str, int]:
    """Reset values of the read-only registers for a reducer of these sizes."""
    return {
        "ID": DEVICE_ID,
        "VERSION": 1 | 1 << 16,
        "CAPABILITY0": params.lanes | params.lines_per_chunk << 16 | params.acc_bits << 24,
        "CAPABILITY1": params.slots | params.workers << 20,
        "CAPABILITY2": params.max_planes | 1 << 8 | 1 << 9 | jobs << 16,
    }


def encoding_values(encoding: Encoding) -> dict[str, int]:
    """What a controller writes to a job's bank for an encoding: JOB_ENCODING and JOB_WEIGHTS0 to 7."""
    values = {"JOB_ENCODING": encoding.planes | encoding.counts_negatives << 8}
    for index in range(8):
        word = 0
        for k in range(4):
            plane = 4 * index + k
            if plane < encoding.planes:
                word |= (encoding.shift(plane) | (encoding.weights[plane] < 0) << 7) << 8 * k
        values[f"JOB_WEIGHTS{index}"] = word
    return values


def register_table() -> str:
    """The table as Markdown, for the documentation page that is generated from it."""
    rows = ["| register | at | access | bits | meaning |", "|---|---|---|---|---|"]
    for register in REGISTERS:
        at = f"job + {register.offset:#05x}" if register.per_job else f"{register.offset:#05x}"
        if register.count > 1:
            at += f", {register.count} times"
        rows.append(f"| {register.name} | {at} | {register.access.value} | | {register.doc} |")
        if len(register.fields) > 1:
            rows += [
                f"| | | | {f.lsb + f.width - 1}:{f.lsb} | {f.name}: {f.doc} |".replace("|S|", "abs(S)")
                for f in register.fields
            ]
    return "\n".join(rows) + "\n"
