"""The reducer's rules for many frames at a time, compiled by numba.

Frames are rows of a table (:class:`Frame`) over a buffer of bytes; no Python object is made for one. All state is in
the arrays of :class:`State`, which :mod:`neuron_fabric.runtime.emulator.engine` makes once. A tally is bit-sliced:
plane j of a chunk is a run of bytes in the order of the wire, so that adding a contribution is AND and XOR of bytes,
which LLVM turns into vectors. The numbers in comments are those of the rules in ``docs/protocol.md``; the definition is
:class:`neuron_fabric.model.reducer.SignCountReducer`.

All kernels release the GIL and are compiled when this module is first imported (kept on disk after that).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types

from neuron_fabric.model import registers
from neuron_fabric.model.control import MAX_CONTROL_BYTES
from neuron_fabric.model.wire import (
    HEADER_BYTES,
    HEADER_FIELDS,
    MAGIC,
    SERIAL_HALF,
    VERSION,
    Flags,
    FrameType,
    Reason,
)

__all__ = [
    "ANYWHERE",
    "COUNTER_NAMES",
    "MAX_SEGMENTS",
    "Datagram",
    "Frame",
    "Job",
    "Message",
    "Nack",
    "Scalar",
    "State",
    "Version",
    "coalesce",
    "emit",
    "receive",
    "split",
]

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

ANYWHERE = -1
"""Address of a member that is not pinned."""

MAX_SEGMENTS = 64
"""Frames in one system call; the kernel's own limit since UDP_SEGMENT came (Linux 4.18)."""

_MAX_MESSAGE = 65507  # what UDP carries

COUNTER_NAMES = tuple(name for name, _doc in registers.COUNTERS)


class Frame(IntEnum):
    """Columns of a table of frames."""

    OFFSET = 0
    LENGTH = 1
    PEER = 2
    """Address it came from or goes to, as an integer."""
    GOOD = 3
    """0 where the checksum does not hold."""


class Datagram(IntEnum):
    """Columns of a table of received buffers, each of them frames of one sender."""

    OFFSET = 0
    LENGTH = 1
    SEGMENT = 2
    """Bytes of every frame but the last; 0: there is one."""
    PEER = 3


class Message(IntEnum):
    """Columns of a table of what one system call sends."""

    OFFSET = 0
    LENGTH = 1
    PEER = 2
    SEGMENT = 3


class Job(IntEnum):
    """Columns of the banks."""

    NUMBER = 0
    EPOCH = 1
    PLANES = 2
    LEAVES = 3
    BASE = 4
    SLOTS = 5
    DEPTH = 6
    """Planes of a tally."""
    RESULT_PLANES = 7
    MAJORITY = 8
    MARGIN = 9
    COUNTS_NEGATIVES = 10
    SIGNED = 11
    MEMBERS = 12
    """How many."""
    ACTIVITY = 13
    """Frames that were taken."""


class Version(IntEnum):
    """Columns of the slot versions."""

    VALID = 0
    CHUNK = 1
    LINES = 2
    VOTERS = 3
    COMPLETE = 4
    LEFT = 5
    """(worker, plane) pairs that have not come."""
    WRITTEN = 6
    QUEUED = 7
    BANK = 8


class Nack(IntEnum):
    """Columns of the queue of NACKs."""

    PEER = 0
    JOB = 1
    WORKER = 2
    CHUNK = 3
    PLANE = 4
    PLANES = 5
    LINES = 6
    EPOCH = 7
    REASON = 8


class Scalar(IntEnum):
    """Single numbers of the state."""

    LEVEL = 0
    """Slot versions that hold an incomplete chunk."""
    HEAD = 1
    """First entry of the queue of results."""
    QUEUED = 2
    NACKS = 3
    CONTROL_DROPPED = 4


class State(NamedTuple):
    """All that an engine keeps, for J banks, V slot versions, P planes up and A down, and B bytes of a plane."""

    jobs: I64
    """(J, columns of Job)"""
    weights: I64
    """(J, P, 2): shift, and 1 if it is negative"""
    members: U64
    """(J,) mask of workers"""
    addresses: I64
    """(J, 64)"""
    bank_of: I64
    """(65536,) by job number; -1 if not open"""
    versions: I64
    """(V, columns of Version)"""
    seen: U64
    """(V, P) mask of workers for each plane"""
    pending: U64
    """(V,) mask of the workers to whom the result is due"""
    tally: Bytes
    """(V, A, B); after a chunk is complete, its result"""
    queue: I64
    """(V,) ring of the versions with pending results; V is a power of two"""
    nacks: I64
    """(their number, columns of Nack)"""
    counters: I64
    """in the order of COUNTER_NAMES"""
    scalars: I64
    scratch: Bytes
    """(2, B)"""
    line_bytes: int


_TABLE = types.Array(types.int64, 2, "C")
_COLUMN = types.Array(types.int64, 1, "C")
_MASKS = types.Array(types.uint64, 1, "C")
_BUFFER = types.Array(types.uint8, 1, "C")
_STATE = types.NamedTuple(
    (
        _TABLE,
        types.Array(types.int64, 3, "C"),
        _MASKS,
        _TABLE,
        _COLUMN,
        _TABLE,
        types.Array(types.uint64, 2, "C"),
        _MASKS,
        types.Array(types.uint8, 3, "C"),
        _COLUMN,
        _TABLE,
        _COLUMN,
        _COLUMN,
        types.Array(types.uint8, 2, "C"),
        types.int64,
    ),
    State,
)

_helper = njit(nogil=True)
_inlined = njit(nogil=True, inline="always")
"""For what is done with the state for every frame: a call would count references to all of its arrays."""


def _kernel(signature: Any) -> Callable[[Any], Any]:
    def compile_kernel(function: Any) -> Any:
        try:
            return njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to keep compiled code in: a read-only image without a home
            return njit(signature, nogil=True)(function)

    return compile_kernel


# Plain integers for the kernels: numba freezes module constants, and a member of an IntEnum would bring its type along.
_AT = {field.name: field.offset for field in HEADER_FIELDS}
_AT_MAGIC, _AT_TYPE, _AT_FLAGS, _AT_JOB = _AT["magic"], _AT["version_type"], _AT["flags"], _AT["job"]
_AT_WORKER, _AT_MISSING, _AT_CHUNK, _AT_PLANE = _AT["worker"], _AT["missing"], _AT["chunk"], _AT["plane"]
_AT_PLANES, _AT_VOTERS, _AT_LINES = _AT["planes"], _AT["voters"], _AT["lines"]
_AT_REASON, _AT_EPOCH = _AT["reason"], _AT["epoch"]

_CONTRIBUTE, _ABSTAIN, _RESULT, _NACK = (
    int(kind) for kind in (FrameType.CONTRIBUTE, FrameType.ABSTAIN, FrameType.RESULT, FrameType.NACK)
)
_OPEN, _CLOSE, _STATUS = int(FrameType.OPEN), int(FrameType.CLOSE), int(FrameType.STATUS)
_LAST_TYPE = max(int(kind) for kind in FrameType)
_MAJORITY = int(Flags.MAJORITY)
_MAX_CONTROL = HEADER_BYTES + MAX_CONTROL_BYTES

_OFFSET, _LENGTH, _PEER, _GOOD = (int(column) for column in Frame)
_D_OFFSET, _D_LENGTH, _D_SEGMENT, _D_PEER = (int(column) for column in Datagram)
_M_OFFSET, _M_LENGTH, _M_PEER, _M_SEGMENT = (int(column) for column in Message)
(
    _J_NUMBER,
    _J_EPOCH,
    _J_PLANES,
    _J_LEAVES,
    _J_BASE,
    _J_SLOTS,
    _J_DEPTH,
    _J_RESULT_PLANES,
    _J_MAJORITY,
    _J_MARGIN,
    _J_COUNTS_NEGATIVES,
    _J_SIGNED,
    _J_MEMBERS,
    _J_ACTIVITY,
) = (int(column) for column in Job)
_V_VALID, _V_CHUNK, _V_LINES, _V_VOTERS, _V_COMPLETE, _V_LEFT, _V_WRITTEN, _V_QUEUED, _V_BANK = (
    int(column) for column in Version
)
_N_PEER, _N_JOB, _N_WORKER, _N_CHUNK, _N_PLANE, _N_PLANES, _N_LINES, _N_EPOCH, _N_REASON = (
    int(column) for column in Nack
)
_S_LEVEL, _S_HEAD, _S_QUEUED, _S_NACKS, _S_CONTROL_DROPPED = (int(scalar) for scalar in Scalar)

_C = {name: number for number, name in enumerate(COUNTER_NAMES)}
_C_FRAMES, _C_LINES, _C_COMPLETED, _C_RESULTS = _C["frames"], _C["lines"], _C["completed"], _C["results"]
_C_DUPLICATES, _C_ABANDONED, _C_NACKS = _C["duplicates"], _C["abandoned"], _C["nacks"]
_C_NACKS_DROPPED, _C_HIGH_WATER = _C["nacks_dropped"], _C["slot_high_water"]
_C_OF_REASON = np.array(
    [_C.get("stale" if reason is Reason.STALE else f"refused_{reason.name.lower()}", -1) for reason in Reason], np.int64
)

_OK = int(Reason.NONE)
_BAD_CHECKSUM, _BAD_MAGIC, _BAD_VERSION = int(Reason.BAD_CHECKSUM), int(Reason.BAD_MAGIC), int(Reason.BAD_VERSION)
_BAD_TYPE, _BAD_LENGTH, _JOB_NOT_OPEN = int(Reason.BAD_TYPE), int(Reason.BAD_LENGTH), int(Reason.JOB_NOT_OPEN)
_WRONG_EPOCH, _WRONG_SENDER, _BAD_PLANE = int(Reason.WRONG_EPOCH), int(Reason.WRONG_SENDER), int(Reason.BAD_PLANE)
_BAD_LINES, _BAD_VOTERS, _STALE = int(Reason.BAD_LINES), int(Reason.BAD_VOTERS), int(Reason.STALE)
_LINES_DIFFER, _ABSTAIN_AFTER_VOTE = int(Reason.LINES_DIFFER), int(Reason.ABSTAIN_AFTER_VOTE)


# ------------------------------------------------------------------------------------------------------------- helpers


@_helper
def _get16(data: Bytes, at: int) -> int:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])  # type: ignore[return-value]


@_helper
def _get32(data: Bytes, at: int) -> int:
    return _get16(data, at) << 16 | _get16(data, at + 2)  # type: ignore[no-any-return]


@_helper
def _put16(data: Bytes, at: int, value: int) -> None:
    data[at] = value >> 8 & 0xFF
    data[at + 1] = value & 0xFF


# A loop over views from 0 on: numba assigns a slice through its general indexing, and looks whether an index with an
# offset is negative. Either keeps LLVM from moving vectors, which makes it 18 times as slow.
@_helper
def _copy(source: Bytes, begin: int, size: int, target: Bytes, at: int) -> None:
    inside, out = source[begin : begin + size], target[at : at + size]
    for i in range(size):
        out[i] = inside[i]


@_helper
def _clear(tally: Bytes, depth: int, size: int) -> None:
    for k in range(depth):
        row = tally[k]
        for i in range(size):
            row[i] = 0


@_helper
def _bit(worker: int) -> np.uint64:
    return np.uint64(1) << np.uint64(worker)


@_helper
def _has(mask: np.uint64, worker: int) -> bool:
    return (mask >> np.uint64(worker)) & np.uint64(1) != np.uint64(0)  # type: ignore[no-any-return]


@_helper
def _put_header(
    out: Bytes, at: int, kind: int, flags: int, job: int, worker: int, chunk: int, plane: int, planes: int
) -> None:
    """All of a header but voters, lines, reason and epoch, which are set to 0."""
    _put16(out, at + _AT_MAGIC, MAGIC)
    out[at + _AT_TYPE] = VERSION << 4 | kind
    out[at + _AT_FLAGS] = flags
    _put16(out, at + _AT_JOB, job)
    _put16(out, at + _AT_WORKER, worker)
    _put16(out, at + _AT_MISSING, 0)
    _put16(out, at + _AT_CHUNK, chunk >> 16)
    _put16(out, at + _AT_CHUNK + 2, chunk & 0xFFFF)
    out[at + _AT_PLANE] = plane
    out[at + _AT_PLANES] = planes
    _put16(out, at + _AT_VOTERS, 0)
    out[at + _AT_LINES] = 0
    out[at + _AT_REASON] = 0
    _put16(out, at + _AT_EPOCH, 0)


# --------------------------------------------------------------------------------------------------------------- input


@_inlined
def _pinned(state: State, bank: int, worker: int, peer: int) -> bool:
    if worker >= state.addresses.shape[1] or not _has(state.members[bank], worker):
        return False
    address = state.addresses[bank, worker]
    return address in (ANYWHERE, peer)  # type: ignore[no-any-return]


@_helper
def _refuse(state: State, data: Bytes, at: int, peer: int, reason: int) -> None:
    """Count a frame that has a header, and tell its sender if it is pinned."""
    state.counters[_C_OF_REASON[reason]] += 1
    bank = state.bank_of[_get16(data, at + _AT_JOB)]
    worker = _get16(data, at + _AT_WORKER)
    if bank < 0 or data[at + _AT_TYPE] & 0xF == _RESULT or not _pinned(state, bank, worker, peer):
        return
    number = state.scalars[_S_NACKS]
    if number >= state.nacks.shape[0]:
        state.counters[_C_NACKS_DROPPED] += 1
        return
    nack = state.nacks[number]
    nack[_N_PEER] = peer
    nack[_N_JOB] = state.jobs[bank, _J_NUMBER]
    nack[_N_WORKER] = worker
    nack[_N_CHUNK] = _get32(data, at + _AT_CHUNK)
    nack[_N_PLANE] = data[at + _AT_PLANE]
    nack[_N_PLANES] = data[at + _AT_PLANES]
    nack[_N_LINES] = data[at + _AT_LINES]
    nack[_N_EPOCH] = _get16(data, at + _AT_EPOCH)
    nack[_N_REASON] = reason
    state.scalars[_S_NACKS] = number + 1


@_helper
def _unreadable(data: Bytes, at: int, size: int, good: int) -> int:
    """The checks before the header can be read: rule 1 up to the type."""
    if good == 0:
        return _BAD_CHECKSUM
    if size < HEADER_BYTES:
        return _BAD_LENGTH
    if _get16(data, at + _AT_MAGIC) != MAGIC:
        return _BAD_MAGIC
    if data[at + _AT_TYPE] >> 4 != VERSION:
        return _BAD_VERSION
    if data[at + _AT_TYPE] & 0xF > _LAST_TYPE:
        return _BAD_TYPE
    return _OK


@_inlined
def _invalid(state: State, data: Bytes, at: int, size: int, peer: int) -> int:
    """The rest of rule 1; the first failing check counts."""
    kind = data[at + _AT_TYPE] & 0xF
    if kind not in (_CONTRIBUTE, _ABSTAIN):
        return _BAD_TYPE
    lines = np.int64(data[at + _AT_LINES])
    if size - HEADER_BYTES != (0 if kind == _ABSTAIN else lines * state.line_bytes):
        return _BAD_LENGTH
    bank = state.bank_of[_get16(data, at + _AT_JOB)]
    if bank < 0:
        return _JOB_NOT_OPEN
    job = state.jobs[bank]
    if _get16(data, at + _AT_EPOCH) != job[_J_EPOCH]:
        return _WRONG_EPOCH
    if not _pinned(state, bank, _get16(data, at + _AT_WORKER), peer):
        return _WRONG_SENDER
    if data[at + _AT_PLANES] != job[_J_PLANES] or data[at + _AT_PLANE] >= job[_J_PLANES]:
        return _BAD_PLANE
    if not 1 <= lines * state.line_bytes <= state.tally.shape[2]:
        return _BAD_LINES
    if kind == _CONTRIBUTE and not 1 <= _get16(data, at + _AT_VOTERS) <= job[_J_LEAVES]:
        return _BAD_VOTERS
    return _OK


@_helper
def _accumulate(tally: Bytes, carry: Bytes, depth: int, shift: int, negative: int) -> None:
    """``tally += +-(plane << shift)``; the plane is in ``carry``, which is used up."""
    size = carry.size
    for k in range(shift, depth):
        row = tally[k]
        if negative:
            for i in range(size):
                bits = row[i]
                add = carry[i]
                row[i] = bits ^ add
                carry[i] = ~bits & add
        else:
            for i in range(size):
                bits = row[i]
                add = carry[i]
                row[i] = bits ^ add
                carry[i] = bits & add


@_helper
def _greater(tally: Bytes, threshold: int, signed: int, size: int, out: Bytes) -> None:
    """One bit per element: ``tally > threshold``, as :func:`neuron_fabric.model.bitplane.greater_than`."""
    width = tally.shape[0]
    low = -(1 << (width - 1)) if signed else 0
    high = (1 << (width - 1)) - 1 if signed else (1 << width) - 1
    for i in range(size):
        out[i] = 0xFF if threshold < low else 0
    if threshold < low or threshold >= high:
        return
    for k in range(width):
        flip = np.uint8(0xFF) if signed and k == width - 1 else np.uint8(0)
        wanted = threshold >> k & 1
        if signed and k == width - 1:
            wanted = 1 - wanted
        for i in range(size):
            bits = tally[k, i] ^ flip
            out[i] = out[i] & bits if wanted else out[i] | bits


@_helper
def _decide(state: State, bank: int, version: int, size: int) -> None:
    """Replace a tally by the planes of its majority: negative and nonzero."""
    job = state.jobs[bank]
    tally = state.tally[version, : job[_J_DEPTH]]
    negative, positive = state.scratch[0], state.scratch[1]
    margin, signed = job[_J_MARGIN], job[_J_SIGNED]
    if job[_J_COUNTS_NEGATIVES]:
        # As in bitplane.majority_planes: c > (v + m) // 2, and not c > ceil((v - m) / 2) - 1.
        voters = state.versions[version, _V_VOTERS]
        _greater(tally, (voters + margin) // 2, signed, size, negative)
        _greater(tally, -((margin - voters) // 2) - 1, signed, size, positive)
        for i in range(size):
            positive[i] = ~positive[i]
    else:
        _greater(tally, -margin - 1, signed, size, negative)
        for i in range(size):
            negative[i] = ~negative[i]
        _greater(tally, margin, signed, size, positive)
    planes = state.tally[version]
    for i in range(size):
        planes[0, i] = negative[i]
        planes[1, i] = negative[i] | positive[i]


@_inlined
def _due(state: State, version: int, mask: np.uint64) -> None:
    """Rule 8: one bit per (version, destination)."""
    state.pending[version] |= mask
    if not state.versions[version, _V_QUEUED]:
        state.versions[version, _V_QUEUED] = 1
        end = state.scalars[_S_HEAD] + state.scalars[_S_QUEUED]
        state.queue[end & state.queue.size - 1] = version
        state.scalars[_S_QUEUED] += 1


@_inlined
def _contribute(state: State, data: Bytes, at: int, peer: int) -> None:
    bank = state.bank_of[_get16(data, at + _AT_JOB)]
    job = state.jobs[bank]
    chunk = _get32(data, at + _AT_CHUNK)
    slots = job[_J_SLOTS]
    # Powers of two: chunk mod S, and the lowest bit of chunk div S.
    version = 2 * (job[_J_BASE] + (chunk & slots - 1)) + (chunk & slots != 0)
    held = state.versions[version]
    worker = _get16(data, at + _AT_WORKER)
    lines = np.int64(data[at + _AT_LINES])
    abstain = data[at + _AT_TYPE] & 0xF == _ABSTAIN
    planes, plane = job[_J_PLANES], np.int64(data[at + _AT_PLANE])
    mask = _bit(worker)

    if held[_V_VALID] and held[_V_CHUNK] != chunk:
        if not 0 < chunk - held[_V_CHUNK] & 0xFFFFFFFF < SERIAL_HALF:
            _refuse(state, data, at, peer, _STALE)
            return
        if not held[_V_COMPLETE]:
            state.counters[_C_ABANDONED] += 1
    if not held[_V_VALID] or held[_V_CHUNK] != chunk:
        # Rule 3: a claim, whatever it holds.
        if not held[_V_VALID] or held[_V_COMPLETE]:
            state.scalars[_S_LEVEL] += 1
        held[_V_VALID] = 1
        held[_V_CHUNK] = chunk
        held[_V_LINES] = lines
        held[_V_VOTERS] = 0
        held[_V_COMPLETE] = 0
        held[_V_LEFT] = job[_J_MEMBERS] * planes
        held[_V_WRITTEN] = 0
        held[_V_BANK] = bank
        state.seen[version] = 0
        state.pending[version] = 0

    state.jobs[bank, _J_ACTIVITY] += 1
    if lines != held[_V_LINES]:
        _refuse(state, data, at, peer, _LINES_DIFFER)
        return
    had = 0  # planes of this worker that are there
    for p in range(planes):
        had += _has(state.seen[version, p], worker)
    if had == planes or (not abstain and _has(state.seen[version, plane], worker)):
        state.counters[_C_DUPLICATES] += 1  # rule 2; of a chunk that is complete every frame is one
        if held[_V_COMPLETE]:
            _due(state, version, mask)
        return
    if abstain and had:
        _refuse(state, data, at, peer, _ABSTAIN_AFTER_VOTE)
        return

    size = lines * state.line_bytes
    depth = job[_J_DEPTH]
    if abstain:
        for p in range(planes):
            state.seen[version, p] |= mask
        held[_V_LEFT] -= planes
    else:
        if had == 0:
            held[_V_VOTERS] += _get16(data, at + _AT_VOTERS)
        if not held[_V_WRITTEN]:
            _clear(state.tally[version], depth, size)
            held[_V_WRITTEN] = 1
        carry = state.scratch[0, :size]
        _copy(data, at + HEADER_BYTES, size, carry, 0)
        shift, negative = state.weights[bank, plane, 0], state.weights[bank, plane, 1]
        _accumulate(state.tally[version], carry, depth, shift, negative)
        state.counters[_C_LINES] += lines
        state.seen[version, plane] |= mask
        held[_V_LEFT] -= 1
    if held[_V_LEFT] == 0:
        # Rule 4.
        if not held[_V_WRITTEN]:
            _clear(state.tally[version], depth, size)  # an unwritten line reads as zero
        if job[_J_MAJORITY]:
            _decide(state, bank, version, size)
        held[_V_COMPLETE] = 1
        state.counters[_C_COMPLETED] += 1
        state.scalars[_S_LEVEL] -= 1
        _due(state, version, state.members[bank])
    state.counters[_C_HIGH_WATER] = max(state.counters[_C_HIGH_WATER], state.scalars[_S_LEVEL])


@_kernel(types.int64(_BUFFER, _TABLE, _STATE, _COLUMN))
def receive(data: Bytes, frames: I64, state: State, control: I64) -> int:
    """Take frames, each by rules 1 to 4.

    Rows of frames that are for the controller (OPEN, CLOSE, STATUS) go to ``control``, and their number is returned;
    those that do not fit it are dropped. They are not counted as frames of the reducer. ``ValueError``, before any is
    taken, if a row is not within ``data``.
    """
    for row in range(frames.shape[0]):
        at, size = frames[row, _OFFSET], frames[row, _LENGTH]
        if at < 0 or size < 0 or at > data.size - size:
            raise ValueError("a frame is not within the buffer")
    found = 0
    for row in range(frames.shape[0]):
        at, size, peer = frames[row, _OFFSET], frames[row, _LENGTH], frames[row, _PEER]
        reason = _unreadable(data, at, size, frames[row, _GOOD])
        if reason != _OK:
            state.counters[_C_FRAMES] += 1
            state.counters[_C_OF_REASON[reason]] += 1
            continue
        if data[at + _AT_TYPE] & 0xF in (_OPEN, _CLOSE, _STATUS):
            if found < control.size and size <= _MAX_CONTROL:
                control[found] = row
                found += 1
            else:
                state.scalars[_S_CONTROL_DROPPED] += 1
            continue
        state.counters[_C_FRAMES] += 1
        reason = _invalid(state, data, at, size, peer)
        if reason != _OK:
            _refuse(state, data, at, peer, reason)
        else:
            _contribute(state, data, at, peer)
    return found


# -------------------------------------------------------------------------------------------------------------- output


@_helper
def _count(mask: np.uint64) -> int:
    number = 0
    while mask:
        mask &= mask - np.uint64(1)
        number += 1
    return number


@_helper
def _row(table: I64, row: int, at: int, size: int, peer: int) -> None:
    table[row, _OFFSET] = at
    table[row, _LENGTH] = size
    table[row, _PEER] = peer
    table[row, _GOOD] = 1


@_inlined
def _put_result(state: State, version: int, worker: int, out: Bytes, at: int, frames: I64, row: int) -> int:
    """Write a result's frames for one worker; the offset behind them."""
    held = state.versions[version]
    bank = held[_V_BANK]
    job = state.jobs[bank]
    planes, size = job[_J_RESULT_PLANES], held[_V_LINES] * state.line_bytes
    for plane in range(planes):
        flags = _MAJORITY if job[_J_MAJORITY] else 0
        _put_header(out, at, _RESULT, flags, job[_J_NUMBER], worker, held[_V_CHUNK], plane, planes)
        _put16(out, at + _AT_VOTERS, held[_V_VOTERS])
        out[at + _AT_LINES] = held[_V_LINES]
        _put16(out, at + _AT_EPOCH, job[_J_EPOCH])
        _copy(state.tally[version, plane], 0, size, out, at + HEADER_BYTES)
        _row(frames, row + plane, at, HEADER_BYTES + size, state.addresses[bank, worker])
        at += HEADER_BYTES + size
    return at


@_kernel(types.int64(_STATE, _BUFFER, _TABLE))
def emit(state: State, out: Bytes, frames: I64) -> int:
    """Write frames that are due to ``out`` and ``frames``, as many as fit; how many.

    NACKs first, then results grouped by destination, so that :func:`coalesce` finds long runs. What does not fit stays
    due. A buffer that cannot take the results of one chunk would never send any: the engine sizes it.
    """
    at, row = 0, 0
    sent = min(state.scalars[_S_NACKS], out.size // HEADER_BYTES, frames.shape[0])
    for number in range(sent):
        nack = state.nacks[number]
        _put_header(out, at, _NACK, 0, nack[_N_JOB], nack[_N_WORKER], nack[_N_CHUNK], nack[_N_PLANE], nack[_N_PLANES])
        out[at + _AT_LINES] = nack[_N_LINES]
        out[at + _AT_REASON] = nack[_N_REASON]
        _put16(out, at + _AT_EPOCH, nack[_N_EPOCH])
        _row(frames, row, at, HEADER_BYTES, nack[_N_PEER])
        at += HEADER_BYTES
        row += 1
    for number in range(sent, state.scalars[_S_NACKS]):
        state.nacks[number - sent] = state.nacks[number]
    state.scalars[_S_NACKS] -= sent
    state.counters[_C_NACKS] += sent

    # What fits of the queue: its first `taken` entries.
    head, taken = state.scalars[_S_HEAD], 0
    bytes_left, rows_left = out.size - at, frames.shape[0] - row
    workers = np.uint64(0)
    while taken < state.scalars[_S_QUEUED]:
        version = state.queue[head + taken & state.queue.size - 1]
        if state.pending[version]:
            held = state.versions[version]
            rows = _count(state.pending[version]) * state.jobs[held[_V_BANK], _J_RESULT_PLANES]
            size = rows * (HEADER_BYTES + held[_V_LINES] * state.line_bytes)
            if size > bytes_left or rows > rows_left:
                break
            bytes_left -= size
            rows_left -= rows
            workers |= state.pending[version]
        taken += 1
    for worker in range(state.addresses.shape[1]):
        if not _has(workers, worker):
            continue
        for bank in range(state.jobs.shape[0]):
            for entry in range(taken):
                version = state.queue[head + entry & state.queue.size - 1]
                if state.versions[version, _V_BANK] == bank and _has(state.pending[version], worker):
                    at = _put_result(state, version, worker, out, at, frames, row)
                    row += state.jobs[bank, _J_RESULT_PLANES]
                    state.counters[_C_RESULTS] += 1
    for entry in range(taken):
        version = state.queue[head + entry & state.queue.size - 1]
        state.pending[version] = 0
        state.versions[version, _V_QUEUED] = 0
    state.scalars[_S_HEAD] = head + taken & state.queue.size - 1
    state.scalars[_S_QUEUED] -= taken
    return row


# -------------------------------------------------------------------------------------------------------------- tables


@_kernel(types.UniTuple(types.int64, 2)(_TABLE, _TABLE))
def split(datagrams: I64, frames: I64) -> tuple[int, int]:
    """Make the table of frames of received buffers; how many, and how many did not fit the table."""
    row, lost = 0, 0
    for number in range(datagrams.shape[0]):
        at, left = datagrams[number, _D_OFFSET], datagrams[number, _D_LENGTH]
        segment = datagrams[number, _D_SEGMENT]
        if segment <= 0:
            segment = max(left, 1)
        while True:
            size = min(segment, left)
            if row < frames.shape[0]:
                _row(frames, row, at, size, datagrams[number, _D_PEER])
                row += 1
            else:
                lost += 1
            at += size
            left -= size
            if left <= 0:
                break
    return row, lost


@_kernel(types.int64(_TABLE, _TABLE))
def coalesce(frames: I64, messages: I64) -> int:
    """Make runs of frames that one system call can send: to one address, side by side, of one size; how many.

    The last frame of a run may be shorter, as UDP_SEGMENT allows. ``messages`` must have as many rows as ``frames``.
    """
    number, count = 0, 0
    for row in range(frames.shape[0]):
        at, size, peer = frames[row, _OFFSET], frames[row, _LENGTH], frames[row, _PEER]
        if number:
            last = messages[number - 1]
            if (
                count < MAX_SEGMENTS
                and last[_M_PEER] == peer
                and last[_M_OFFSET] + last[_M_LENGTH] == at
                and last[_M_LENGTH] == count * last[_M_SEGMENT]  # no shorter one has ended it
                and 0 < size <= last[_M_SEGMENT]
                and last[_M_LENGTH] + size <= _MAX_MESSAGE
            ):
                last[_M_LENGTH] += size
                count += 1
                continue
        messages[number, _M_OFFSET] = at
        messages[number, _M_LENGTH] = size
        messages[number, _M_PEER] = peer
        messages[number, _M_SEGMENT] = size
        number, count = number + 1, 1
    return number
