"""Words of the CXL endpoint: a job's configuration, what an address means, the events."""

from __future__ import annotations

from amaranth import unsigned
from amaranth.lib import data
from amaranth.utils import bits_for

from neuron_fabric.hw.layout import config_layout, index_width, version_width, voters_width
from neuron_fabric.model.cxl import CXL_COUNTERS
from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.model.params import LINE_BYTES, ReducerParams

__all__ = [
    "COMMON_FIELDS",
    "CXL_EVENTS",
    "OUTCOMES",
    "READ",
    "REFUSALS",
    "RESPONSE",
    "WRITE",
    "checked_layout",
    "cxl_config_layout",
    "question_layout",
    "seen_layout",
    "state_layout",
    "target_layout",
]

WRITE = data.StructLayout({"address": 64, "tag": 16, "enable": LINE_BYTES, "data": 8 * LINE_BYTES})
"""MemWr: a byte address, 64 bytes, and which of them are written."""

READ = data.StructLayout({"address": 64, "tag": 16})
"""MemRd."""

RESPONSE = data.StructLayout({"tag": 16, "poison": 1, "data": 8 * LINE_BYTES})
"""The data of a read: zeros where it is poison."""

COMMON_FIELDS = (
    "job",
    "epoch",
    "base",
    "log2_slots",
    "members",
    "planes",
    "negative",
    "shift",
    "counts_negatives",
    "result_format",
    "result_planes",
    "margin",
)
"""What a job's configuration has at either endpoint."""

REFUSALS = (
    "refused_partial_write",
    "refused_job_not_open",
    "refused_wrong_epoch",
    "refused_wrong_sender",
    "refused_bad_plane",
    "refused_bad_lines",
)
"""Of a contribution, whatever the state is, in the order in which they are checked: the first one counts."""

OUTCOMES = ("stores", "read_only", "refused", "loads", "result", "status", "poison")
"""Of any other transaction, as far as it does not depend on the state."""

CXL_EVENTS = data.StructLayout({name: 1 for name, _meaning in CXL_COUNTERS})
"""One-cycle strobes, by the names of the counters."""


def cxl_config_layout(params: ReducerParams) -> data.StructLayout:
    """The configuration of one job bank; all but ``open`` is static while the job is open.

    It is what either endpoint has of :func:`~neuron_fabric.hw.layout.config_layout`, and a little more.
    """
    common = config_layout(params)
    return data.StructLayout(
        {
            "open": unsigned(1),
            **{name: common[name].shape for name in COMMON_FIELDS},
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "first_chunk": unsigned(32),
        }
    )


def target_layout(address_map: CxlMap) -> data.StructLayout:
    """What an address means; which fields do follows from ``window``, and none does where ``nothing`` is set.

    ``window`` is one of :class:`~neuron_fabric.model.cxl_map.Window`. Every other field has the bits of the address
    field, and at least one; ``plane`` is that of a contribution, or of a result.
    """
    widths: dict[str, int] = {}
    for fields in address_map.fields.values():
        for field in fields:
            widths[field.name] = max(1, field.width, widths.get(field.name, 0))
    return data.StructLayout(
        {"nothing": unsigned(1), "window": unsigned(2), **{name: unsigned(width) for name, width in widths.items()}}
    )


def seen_layout(params: ReducerParams) -> data.ArrayLayout:
    """What a worker has sent of a chunk: a bit a line, for each plane."""
    return data.ArrayLayout(unsigned(params.lines_per_chunk), params.max_planes)


def question_layout(address_map: CxlMap) -> data.StructLayout:
    """A transaction as the version table sees it.

    ``contributes`` says that it is a contribution that passed every check but those that need the state. ``before`` is
    the chunk number that the version begins with, ``chunk`` the low bits of the one in the address. ``worker``,
    ``line`` and ``sent`` are one-hot, but for an abstention, which sends ``everything``.
    """
    params = address_map.params
    return data.StructLayout(
        {
            "contributes": unsigned(1),
            "abstains": unsigned(1),
            "before": unsigned(32),
            "chunk": unsigned(address_map.chunk_bits),
            "worker": unsigned(params.workers),
            "members": unsigned(params.workers),
            "line": unsigned(params.lines_per_chunk),
            "sent": seen_layout(params),
            "everything": seen_layout(params),
        }
    )


def state_layout(address_map: CxlMap) -> data.StructLayout:
    """What a version holds, as it was before the transaction. All but ``chunk`` is 0 where it is not ``claimed``.

    ``current`` says that the address names the chunk that the version holds; ``written``, that the line in question is;
    ``seen`` is the worker's.
    """
    params = address_map.params
    return data.StructLayout(
        {
            "claimed": unsigned(1),
            "complete": unsigned(1),
            "current": unsigned(1),
            "written": unsigned(1),
            "chunk": unsigned(32),
            "voters": unsigned(voters_width(params)),
            "done": unsigned(params.workers),
            "abstained": unsigned(params.workers),
            "seen": seen_layout(params),
        }
    )


def checked_layout(address_map: CxlMap) -> data.StructLayout:
    """What is known of a transaction before the state is: the outcome, or what it depends on.

    Of the :data:`OUTCOMES` one is set, or ``question.contributes``, or none: a read of the contribute window, or no
    transaction at all.
    """
    params = address_map.params
    return data.StructLayout(
        {
            "stores": unsigned(1),  # a write to plain memory
            "read_only": unsigned(1),  # a write to what cannot be written
            "refused": unsigned(len(REFUSALS)),  # a contribution; one-hot
            "loads": unsigned(1),  # a read of plain memory
            "result": unsigned(1),  # a read of a result line that is there if its chunk is complete
            "status": unsigned(1),  # a read of the status of a slot version that there is
            "poison": unsigned(1),  # a read of a result line that is not there, or of no line at all
            "question": question_layout(address_map),
            "version": unsigned(version_width(params)),
            "line": unsigned(index_width(max(params.lines_per_chunk, address_map.identity_bytes // LINE_BYTES))),
            "plane": unsigned(index_width(max(params.acc_bits, 2))),  # of a result
            "part": unsigned(index_width(address_map.parts)),
            "start": unsigned(params.max_shift + 1),  # where the contribution's plane enters the tally; one-hot
            "negative": unsigned(1),
            "signed": unsigned(1),
            "config": cxl_config_layout(params),
        }
    )
