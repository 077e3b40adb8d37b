"""Words of the reducer core: the configuration, the beats of both streams, the events.

All are packed LSB first, in the order in which the fields stand here; the Verilog manifest lists their offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amaranth.hdl import Array, Value, unsigned
from amaranth.lib import data, enum
from amaranth.utils import bits_for, ceil_log2, exact_log2

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, check_job

__all__ = [
    "EVENTS",
    "FrameKind",
    "ResultFormat",
    "config_fields",
    "config_layout",
    "contribution_layout",
    "index_width",
    "make_config",
    "of_bank",
    "refusal_layout",
    "result_layout",
    "version_width",
    "voters_width",
]


class FrameKind(enum.Enum, shape=1):  # type: ignore[call-arg]
    """What a worker says about a chunk."""

    CONTRIBUTE = 0
    """One plane of the chunk, line by line."""
    ABSTAIN = 1
    """"I send nothing for this chunk": one beat, whose data is ignored."""


class ResultFormat(enum.Enum, shape=1):  # type: ignore[call-arg]
    """How a result comes back."""

    TALLY = 0
    """The tally's planes, LSB first."""
    MAJORITY = 1
    """Two planes: negative, and nonzero."""


EVENTS = data.StructLayout(
    {
        "accepted_line": 1,
        "accepted_frame": 1,  # at the last beat of a frame that counted, ABSTAIN included
        "duplicate": 1,
        "late": 1,  # a duplicate of one who was not there when the straggler rule completed the chunk
        "stale": 1,
        "abandoned": 1,  # an incomplete chunk was claimed by a newer one
        "refused": 1,  # another line count than the chunk's, or an ABSTAIN after some planes
        "completed": 1,  # by a frame, at its last beat
        "partial": 1,  # by the straggler rule; also in a cycle in which a frame completes another chunk
        "result_sent": 1,  # the last beat of a result was transferred; once per destination in the result's header
    }
)
"""One-cycle strobes, for counters."""


def index_width(count: int) -> int:
    """Bits of an index into ``count`` things: at least 1, so that a field never vanishes."""
    return max(1, int(ceil_log2(count)))


def of_bank(bank: Value, values: Iterable[Value]) -> Value:
    """Which of the banks' values it is; that of the last one for numbers that no bank has."""
    choices = list(values)
    return Array(choices + choices[-1:] * ((1 << len(bank)) - len(choices)))[bank]


def version_width(params: ReducerParams) -> int:
    """Bits of a slot version's number: the low bits of the chunk number, slot first, then version."""
    return int(ceil_log2(params.slots)) + 1


def voters_width(params: ReducerParams) -> int:
    """Bits of a number of voters: every voter moves some tally by at least 1, so it fits where tallies fit."""
    return max(params.acc_bits, int(bits_for(params.workers)))


def config_layout(params: ReducerParams) -> data.StructLayout:
    """The configuration of one job; static while the job is open."""
    return data.StructLayout(
        {
            "job": unsigned(16),
            "epoch": unsigned(16),
            "base": unsigned(index_width(params.slots)),
            "log2_slots": unsigned(bits_for(int(ceil_log2(params.slots)))),
            "members": unsigned(params.workers),
            "planes": unsigned(bits_for(params.max_planes)),
            "negative": unsigned(params.max_planes),
            "shift": data.ArrayLayout(unsigned(index_width(params.max_shift + 1)), params.max_planes),
            "counts_negatives": unsigned(1),
            "result_format": ResultFormat,
            "result_planes": unsigned(bits_for(params.acc_bits)),
            "margin": unsigned(params.acc_bits),
            "multicast": unsigned(1),
            "timeout": unsigned(32),  # cycles; 0: no straggler rule
            "quorum": unsigned(voters_width(params)),
            "child": unsigned(1),  # results go up, as contributions of worker parent_worker to parent_job
            "parent_job": unsigned(16),
            "parent_epoch": unsigned(16),
            "parent_worker": unsigned(16),
        }
    )


def contribution_layout(params: ReducerParams) -> data.StructLayout:
    """One line of one plane of one worker. All fields but ``first``, ``last`` and ``data`` hold for a whole frame.

    ``bank`` names the job's configuration; ``voters`` is 1, or how many are below a child reducer.
    """
    return data.StructLayout(
        {
            "first": unsigned(1),
            "last": unsigned(1),
            "kind": FrameKind,
            "bank": unsigned(index_width(params.jobs)),
            "worker": unsigned(index_width(params.workers)),
            "chunk": unsigned(32),
            "plane": unsigned(index_width(params.max_planes)),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "voters": unsigned(voters_width(params)),
            "data": unsigned(params.lanes),
        }
    )


def result_layout(params: ReducerParams) -> data.StructLayout:
    """One line of one result plane. ``first`` and ``last`` frame a plane; all planes of a result are contiguous.

    What the frame's header needs is in ``flags``, ``job`` to ``voters`` and ``epoch`` (``destination`` is its field
    ``worker``). It goes to the multicast group if ``group``, to the parent if ``up``, and else to ``worker`` of job
    bank ``bank``. With ``up`` the frame is a contribution; with ``empty``, too, an ABSTAIN: one beat without a line.
    A ``partial`` plane ends with one beat more than it has ``lines``: bit w is set where worker w is counted.
    """
    most_planes = max(params.acc_bits, 2)
    return data.StructLayout(
        {
            "first": unsigned(1),
            "last": unsigned(1),
            "bank": unsigned(index_width(params.jobs)),
            "worker": unsigned(index_width(params.workers)),
            "group": unsigned(1),
            "up": unsigned(1),
            "empty": unsigned(1),
            "flags": data.StructLayout({"majority": unsigned(1), "partial": unsigned(1), "resend": unsigned(1)}),
            "job": unsigned(16),
            "destination": unsigned(16),
            "missing": unsigned(bits_for(params.workers)),
            "chunk": unsigned(32),
            "plane": unsigned(index_width(most_planes)),
            "planes": unsigned(bits_for(most_planes)),
            "voters": unsigned(voters_width(params)),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "epoch": unsigned(16),
            "data": unsigned(params.lanes),
        }
    )


def refusal_layout(params: ReducerParams) -> data.StructLayout:
    """A frame that the core refused, for a NACK: a strobe, the reason, and the fields to echo."""
    return data.StructLayout(
        {
            "valid": unsigned(1),
            "reason": unsigned(8),
            "bank": unsigned(index_width(params.jobs)),
            "worker": unsigned(index_width(params.workers)),
            "chunk": unsigned(32),
            "plane": unsigned(index_width(params.max_planes)),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
        }
    )


def config_fields(job: JobConfig, params: ReducerParams) -> dict[str, int]:
    """The fields of :func:`config_layout` as plain integers, e.g. for the ``cfg_*`` ports of the Verilog top.

    Raises
    ------
    ValueError
        What :func:`~neuron_fabric.model.reducer.check_job` refuses.
    """
    check_job(job, params)
    encoding, parent, straggler = job.encoding, job.parent, job.straggler
    shift_width = index_width(params.max_shift + 1)
    return {
        "job": job.job,
        "epoch": job.epoch,
        "base": job.base,
        "log2_slots": int(exact_log2(job.slot_count(params))),
        "members": sum(1 << worker for worker in job.members),
        "planes": encoding.planes,
        "negative": sum(1 << plane for plane, weight in enumerate(encoding.weights) if weight < 0),
        "shift": sum(encoding.shift(plane) << plane * shift_width for plane in range(encoding.planes)),
        "counts_negatives": int(encoding.counts_negatives),
        "result_format": int(job.result_format == "majority"),
        "result_planes": 0 if job.result_format == "majority" else job.result_planes,
        "margin": job.margin,
        "multicast": int(job.multicast),
        "timeout": 0 if straggler is None else straggler.timeout,
        "quorum": 0 if straggler is None else straggler.quorum,
        "child": int(parent is not None),
        "parent_job": 0 if parent is None else parent.job,
        "parent_epoch": 0 if parent is None else parent.epoch,
        "parent_worker": 0 if parent is None else parent.worker,
    }


def make_config(job: JobConfig, params: ReducerParams) -> Any:
    """The same as :func:`config_fields`, as a constant of :func:`config_layout`."""
    layout = config_layout(params)
    bits = sum(value << layout[name].offset for name, value in config_fields(job, params).items())
    return layout.from_bits(bits)
