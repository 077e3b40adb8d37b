"""Words of the reducer core: the configuration, the beats of both streams, the events.

All are packed LSB first, in the order in which the fields stand here; the Verilog manifest lists their offsets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from amaranth import unsigned
from amaranth.lib import data, enum
from amaranth.utils import bits_for, ceil_log2

from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.params import ReducerParams

__all__ = [
    "EVENTS",
    "FrameKind",
    "ResultFormat",
    "config_fields",
    "config_layout",
    "contribution_layout",
    "index_width",
    "make_config",
    "max_shift",
    "result_layout",
    "version_width",
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
        "stale": 1,
        "abandoned": 1,  # an incomplete chunk was claimed by a newer one
        "refused": 1,  # another line count than the chunk's, or an ABSTAIN after some planes
        "completed": 1,  # at the last beat of the completing frame
        "result_sent": 1,  # the last beat of a result's last plane was transferred
    }
)
"""One-cycle strobes, for counters."""


def index_width(count: int) -> int:
    """Bits of an index into ``count`` things: at least 1, so that a field never vanishes."""
    return max(1, int(ceil_log2(count)))


def version_width(params: ReducerParams) -> int:
    """Bits of a slot version's number: the low bits of the chunk number, slot first, then version."""
    return int(ceil_log2(params.slots)) + 1


def max_shift(params: ReducerParams) -> int:
    """The greatest ``k`` of a weight ``+-2**k``: no encoding of ``max_planes`` planes needs more."""
    return min(params.max_planes, params.acc_bits) - 1


def config_layout(params: ReducerParams) -> data.StructLayout:
    """The configuration of the one job; static while in use (change it under reset)."""
    return data.StructLayout(
        {
            "members": unsigned(params.workers),
            "planes": unsigned(bits_for(params.max_planes)),
            "negative": unsigned(params.max_planes),
            "shift": data.ArrayLayout(unsigned(index_width(max_shift(params) + 1)), params.max_planes),
            "counts_negatives": unsigned(1),
            "result_format": ResultFormat,
            "result_planes": unsigned(bits_for(params.acc_bits)),
            "margin": unsigned(params.acc_bits),
        }
    )


def contribution_layout(params: ReducerParams) -> data.StructLayout:
    """One line of one plane of one worker. All fields but ``first``, ``last`` and ``data`` hold for a whole frame."""
    return data.StructLayout(
        {
            "first": unsigned(1),
            "last": unsigned(1),
            "kind": FrameKind,
            "worker": unsigned(index_width(params.workers)),
            "chunk": unsigned(32),
            "plane": unsigned(index_width(params.max_planes)),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "data": unsigned(params.lanes),
        }
    )


def result_layout(params: ReducerParams) -> data.StructLayout:
    """One line of one result plane. ``first`` and ``last`` frame a plane; all planes of a result are contiguous."""
    most_planes = max(params.acc_bits, 2)
    return data.StructLayout(
        {
            "first": unsigned(1),
            "last": unsigned(1),
            "destination": unsigned(16),
            "chunk": unsigned(32),
            "plane": unsigned(index_width(most_planes)),
            "planes": unsigned(bits_for(most_planes)),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "voters": unsigned(bits_for(params.workers)),
            "flags": data.StructLayout({"majority": unsigned(1)}),
            "data": unsigned(params.lanes),
        }
    )


def config_fields(
    encoding: Encoding,
    members: Iterable[int],
    result_format: ResultFormat,
    margin: int,
    params: ReducerParams,
) -> dict[str, int]:
    """The fields of :func:`config_layout` as plain integers, e.g. for the ``cfg_*`` ports of the Verilog top.

    Raises
    ------
    ValueError
        Names what does not fit this reducer: a member, the encoding's planes, a weight, the tally, the margin, or a
        majority over contributions that hold the votes of several leaves (the core counts one voter a worker).
    """
    workers = sorted(operator.index(member) for member in members)
    if not workers:
        raise ValueError("members: a job needs at least one member")
    if len(set(workers)) != len(workers):
        raise ValueError(f"members: a worker is listed twice in {workers}")
    for worker in workers:
        if not 0 <= worker < params.workers:
            raise ValueError(f"members: worker {worker} is out of range; this reducer has {params.workers} workers")
    if encoding.planes > params.max_planes:
        raise ValueError(
            f"encoding {encoding.name!r} has {encoding.planes} planes; this reducer takes {params.max_planes}"
        )
    for plane, weight in enumerate(encoding.weights):
        if encoding.shift(plane) > max_shift(params):
            raise ValueError(
                f"encoding {encoding.name!r}: weight {weight} of plane {plane} is more than "
                f"{1 << max_shift(params)}, the greatest this reducer takes (max_planes {params.max_planes})"
            )
    encoding.check_fits(len(workers), params.acc_bits)
    if not 0 <= operator.index(margin) < 1 << params.acc_bits:
        raise ValueError(f"margin must be 0 to {(1 << params.acc_bits) - 1}, not {margin}")
    if ResultFormat(result_format) is ResultFormat.MAJORITY and encoding.counts_negatives and encoding.leaves != 1:
        raise ValueError(
            f"encoding {encoding.name!r}: a majority needs the number of leaves that voted; this core counts one "
            "voter a worker: use the tally format"
        )
    shift_width = index_width(max_shift(params) + 1)
    return {
        "members": sum(1 << worker for worker in workers),
        "planes": encoding.planes,
        "negative": sum(1 << plane for plane, weight in enumerate(encoding.weights) if weight < 0),
        "shift": sum(encoding.shift(plane) << plane * shift_width for plane in range(encoding.planes)),
        "counts_negatives": int(encoding.counts_negatives),
        "result_format": ResultFormat(result_format).value,
        "result_planes": encoding.tally_bits(len(workers)),
        "margin": operator.index(margin),
    }


def make_config(
    encoding: Encoding,
    members: Iterable[int],
    result_format: ResultFormat,
    margin: int,
    params: ReducerParams,
) -> Any:
    """The same as :func:`config_fields`, as a constant of :func:`config_layout`."""
    layout = config_layout(params)
    fields = config_fields(encoding, members, result_format, margin, params)
    bits = sum(value << layout[name].offset for name, value in fields.items())
    return layout.from_bits(bits)
