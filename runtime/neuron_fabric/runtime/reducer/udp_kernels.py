"""The UDP driver's fast path: from planes to frames and from frames to results, a batch a call, compiled by numba.

The state of a job is a handful of integer arrays that the driver's thread owns and these kernels work on:

* ``job``: one row of facts, ``J_...``;
* ``slots``, shape (S, 10): per slot the chunk that is in flight there, or the next one to be sent, ``S_...``;
* ``buckets``, shape (Q, 10): a ring of the unfinished buckets, ``B_...``, with the addresses of their arrays;
* ``timing``: the retransmission timer of RFC 6298, in nanoseconds, ``T_...``;
* ``counters``, by the names of :data:`COUNTERS`, and a ``histogram`` of latencies.

Chunks are counted here without end; the 32 bits of the wire are the lower ones. The rules in comments are those of
``docs/protocol.md``. Kernels release the GIL and are kept on disk once compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.extending import intrinsic

from neuron_fabric.model.params import LINE_BYTES as _LINE_BYTES
from neuron_fabric.model.reducer import BITMAP_BYTES as _BITMAP_BYTES
from neuron_fabric.model.wire import DESTINATION_ALL as _ALL
from neuron_fabric.model.wire import HEADER_BYTES as _HEADER_BYTES
from neuron_fabric.model.wire import MAGIC as _MAGIC
from neuron_fabric.model.wire import VERSION as _VERSION
from neuron_fabric.model.wire import Flags, FrameType
from neuron_fabric.runtime.reducer.latency import BINS as _BINS

__all__ = [
    "BATCH_BYTES",
    "BATCH_FRAMES",
    "COUNTERS",
    "fill",
    "start_timer",
    "take",
]

I64 = npt.NDArray[np.int64]

# Plain integers, so that they are constants in compiled code.
LINE, HEAD, BITMAP, ALL = int(_LINE_BYTES), int(_HEADER_BYTES), int(_BITMAP_BYTES), int(_ALL)
LAST_BIN = int(_BINS) - 1
MAGIC_HIGH, MAGIC_LOW, VERSION = int(_MAGIC) >> 8, int(_MAGIC) & 0xFF, int(_VERSION)
CONTRIBUTE, ABSTAIN = int(FrameType.CONTRIBUTE), int(FrameType.ABSTAIN)
RESULT, NACK = int(FrameType.RESULT), int(FrameType.NACK)
MAJORITY, PARTIAL = int(Flags.MAJORITY), int(Flags.PARTIAL)

BATCH_FRAMES = 60
"""Frames that one system call hands over; Linux takes 64 segments, and 65,507 bytes."""
BATCH_BYTES = 64_000

J_JOB, J_WORKER, J_EPOCH, J_PLANES, J_RESULT, J_MAJORITY = range(6)
J_LINES, J_SLOTS = 6, 7
J_END = 8
"""The first chunk of no bucket."""
J_HEAD, J_TAIL = 9, 10
"""The buckets that are not finished are those from J_HEAD to J_TAIL, modulo the length of the ring."""
J_CURSOR = 11
"""The slot at which sending goes on."""
J_NACKED, J_NACK_CHUNK = 12, 13
"""Why a chunk in flight was refused, or 0; and which."""
JOB_FIELDS = 14

S_CHUNK, S_IN_FLIGHT, S_FIRST_NS, S_SENT_NS, S_TRIES, S_GOT, S_VOTERS, S_MISSING, S_FLAGS, S_BUCKET = range(10)
SLOT_FIELDS = 10

B_FIRST, B_CHUNKS, B_LINES, B_LEFT, B_PLANES, B_STRIDE, B_RESULT, B_RESULT_STRIDE, B_ABSTAIN, B_FACTS = range(10)
BUCKET_FIELDS = 10

T_SRTT, T_RTTVAR, T_RTO, T_LEAST, T_MOST = range(5)
T_NEXT_BACKOFF = 5
TIMING_FIELDS = 6

COUNTERS = (
    "frames_sent",
    "bytes_sent",
    "contributions",
    "abstentions",
    "resent",
    "frames_received",
    "bytes_received",
    "chunks",
    "duplicates",
    "foreign",
    "malformed",
    "mismatched",
    "nacks",
)
"""What a driver counts: ``contributions`` and ``abstentions`` the first time that they are sent, ``resent`` after that
(frames); ``chunks`` whose result is complete; of what came, ``duplicates`` (also what is late), ``foreign`` (of another
job, epoch or worker), ``malformed``, and ``mismatched`` results that do not fit their chunk."""
(
    C_FRAMES_SENT,
    C_BYTES_SENT,
    C_CONTRIBUTIONS,
    C_ABSTENTIONS,
    C_RESENT,
    C_FRAMES_RECEIVED,
    C_BYTES_RECEIVED,
    C_CHUNKS,
    C_DUPLICATES,
    C_FOREIGN,
    C_MALFORMED,
    C_MISMATCHED,
    C_NACKS,
) = range(13)

_NEVER = (1 << 63) - 1
_VECTOR = types.Array(types.int64, 1, "C")
_TABLE = types.Array(types.int64, 2, "C")
_FLOATS = types.Array(types.float64, 1, "C")
_BYTES = types.Array(types.uint8, 1, "C")

_helper = njit(nogil=True)


def _kernel(signature: Any) -> Callable[[Any], Any]:
    def compile_kernel(function: Any) -> Any:
        try:
            return njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to keep compiled code in: a read-only image without a home
            return njit(signature, nogil=True)(function)

    return compile_kernel


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer to bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.int64), generate


@_helper
def _put(out: Any, at: int, size: int, value: int) -> None:
    for k in range(size):
        out[at + k] = (value >> (8 * (size - 1 - k))) & 0xFF


@_helper
def _get(data: Any, at: int, size: int) -> Any:
    value: Any = 0
    for k in range(size):
        value = value << 8 | np.int64(data[at + k])
    return value


# ---------------------------------------------------------------------------------------------------------------- send


@_helper
def _batch(batches: Any, count: int, at: int, size: int) -> int:
    """Add a frame of ``size`` bytes at ``at`` to the batches; how many there are now.

    The frames of a batch have one size, but for the last one, which may be shorter: that is what UDP_SEGMENT can cut.
    """
    if count:
        length, segment = batches[count - 1, 1], batches[count - 1, 2]
        whole = length % segment == 0
        if whole and size <= segment and length + size <= BATCH_BYTES and length < BATCH_FRAMES * segment:
            batches[count - 1, 1] = length + size
            return count
    batches[count, 0], batches[count, 1], batches[count, 2] = at, size, size
    return count + 1


@_helper
def _find(job: Any, buckets: Any, chunk: int) -> int:
    """The place in the ring of the bucket that has a chunk, or -1."""
    ring = len(buckets)
    for number in range(job[J_HEAD], job[J_TAIL]):
        place = number % ring
        if buckets[place, B_FIRST] <= chunk < buckets[place, B_FIRST] + buckets[place, B_CHUNKS]:
            return place
    return -1


@_helper
def _send(job: Any, slot: Any, bucket: Any, out: Any, at: int, batches: Any, count: int, counters: Any) -> Any:
    """Write the frames of a slot's chunk; where the next frame goes, and how many batches there are now."""
    index = slot[S_CHUNK] - bucket[B_FIRST]
    first_line = index * job[J_LINES]
    lines = min(job[J_LINES], bucket[B_LINES] - first_line)
    abstains = carray(_pointer(bucket[B_ABSTAIN]), bucket[B_CHUNKS])[index] != 0
    planes = 1 if abstains else job[J_PLANES]
    body = 0 if abstains else lines * LINE
    for plane in range(planes):
        out[at], out[at + 1] = MAGIC_HIGH, MAGIC_LOW
        out[at + 2] = VERSION << 4 | (ABSTAIN if abstains else CONTRIBUTE)
        out[at + 3] = 0
        _put(out, at + 4, 2, job[J_JOB])
        _put(out, at + 6, 2, job[J_WORKER])
        _put(out, at + 8, 2, 0)
        _put(out, at + 10, 4, slot[S_CHUNK])
        out[at + 14], out[at + 15] = plane, job[J_PLANES]
        _put(out, at + 16, 2, 0 if abstains else 1)
        out[at + 18], out[at + 19] = lines, 0
        _put(out, at + 20, 2, job[J_EPOCH])
        if body:
            source = carray(_pointer(bucket[B_PLANES] + plane * bucket[B_STRIDE] + first_line * LINE), body)
            for k in range(body):
                out[at + HEAD + k] = source[k]
        count = _batch(batches, count, at, HEAD + body)
        at += HEAD + body
    counters[C_FRAMES_SENT] += planes
    counters[C_BYTES_SENT] += planes * (HEAD + body)
    if slot[S_IN_FLIGHT]:
        counters[C_RESENT] += planes
    elif abstains:
        counters[C_ABSTENTIONS] += 1
    else:
        counters[C_CONTRIBUTIONS] += planes
    return at, count


@_helper
def _back_off(now: int, timing: Any) -> None:
    """Twice the time, until a measurement says better (RFC 6298, 5.5): once, however many chunks run out together."""
    if now >= timing[T_NEXT_BACKOFF]:
        timing[T_RTO] = min(2 * timing[T_RTO], timing[T_MOST])
        timing[T_NEXT_BACKOFF] = now + timing[T_RTO]


@_kernel(
    types.Tuple((types.int64, types.int64))(types.int64, _VECTOR, _FLOATS, _TABLE, _TABLE, _BYTES, _TABLE, _VECTOR)
)
def fill(now: int, job: Any, timing: Any, slots: Any, buckets: Any, out: Any, batches: Any, counters: Any) -> Any:
    """Write all frames that are due at ``now``, as far as ``out`` and ``batches`` have room.

    New chunks go as soon as their slot is free (rule 10), chunks in flight when their time has run out. Row k of
    ``batches`` becomes (first byte, bytes, bytes of a frame). Returns how many batches there are and when this is to be
    called again, if nothing comes before.
    """
    room = job[J_PLANES] * (HEAD + job[J_LINES] * LINE)
    count = job[J_SLOTS]
    begin = job[J_CURSOR]
    at, batch = 0, 0
    due: Any = _NEVER
    wait = np.int64(timing[T_RTO])  # before it is doubled: what was lost together goes again together
    for k in range(count):
        place = (begin + k) % count
        slot = slots[place]
        again = slot[S_IN_FLIGHT] != 0
        if again:
            time = slot[S_SENT_NS] + wait
            if time > now:
                due = min(due, time)
                continue
        else:
            if slot[S_CHUNK] >= job[J_END]:
                continue
            slot[S_BUCKET] = _find(job, buckets, slot[S_CHUNK])
            if slot[S_BUCKET] < 0:
                continue
        if at + room > len(out) or batch + job[J_PLANES] > len(batches):
            job[J_CURSOR] = place
            return batch, now
        at, batch = _send(job, slot, buckets[slot[S_BUCKET]], out, at, batches, batch, counters)
        slot[S_SENT_NS] = now
        if again:
            slot[S_TRIES] += 1
            _back_off(now, timing)
        else:
            slot[S_IN_FLIGHT], slot[S_FIRST_NS], slot[S_TRIES], slot[S_GOT] = 1, now, 0, 0
        due = min(due, now + np.int64(timing[T_RTO]))
    return batch, due


# ------------------------------------------------------------------------------------------------------------- receive


@_helper
def _sample(timing: Any, seconds: float) -> None:
    """RFC 6298, section 2, with bounds; the clock's granularity is lost in the lower one."""
    if timing[T_SRTT] < 0:
        timing[T_SRTT], timing[T_RTTVAR] = seconds, seconds / 2
    else:
        timing[T_RTTVAR] += (abs(timing[T_SRTT] - seconds) - timing[T_RTTVAR]) / 4
        timing[T_SRTT] += (seconds - timing[T_SRTT]) / 8
    timing[T_RTO] = min(max(timing[T_SRTT] + 4 * timing[T_RTTVAR], timing[T_LEAST]), timing[T_MOST])


@_helper
def _bin(nanoseconds: int) -> int:
    """The place in a histogram: :mod:`neuron_fabric.runtime.reducer.latency`."""
    octave, value = 0, max(nanoseconds, 1)
    while value >= 8:
        value >>= 1
        octave += 1
    return min(4 * octave + value, LAST_BIN)


@_helper
def _accept(
    now: int,
    job: Any,
    timing: Any,
    slot: Any,
    bucket: Any,
    data: Any,
    at: int,
    size: int,
    counters: Any,
    histogram: Any,
) -> None:
    """Rule 9 for a result of the chunk that is in flight in ``slot``."""
    index = slot[S_CHUNK] - bucket[B_FIRST]
    first_line = index * job[J_LINES]
    lines = min(job[J_LINES], bucket[B_LINES] - first_line)
    flags = np.int64(data[at + 3]) & (MAJORITY | PARTIAL)
    missing, voters = _get(data, at + 8, 2), _get(data, at + 16, 2)
    plane, partial = np.int64(data[at + 14]), (flags & PARTIAL) != 0
    body = lines * LINE
    fits = (
        (flags & MAJORITY != 0) == (job[J_MAJORITY] != 0)
        and np.int64(data[at + 15]) == job[J_RESULT]
        and plane < job[J_RESULT]
        and np.int64(data[at + 18]) == lines
        and size == HEAD + body + (BITMAP if partial else 0)
    )
    if fits and slot[S_GOT]:
        fits = voters == slot[S_VOTERS] and missing == slot[S_MISSING] and flags == slot[S_FLAGS]
    if not fits:
        counters[C_MISMATCHED] += 1
        return
    if slot[S_GOT] >> plane & 1:
        counters[C_DUPLICATES] += 1
        return
    slot[S_GOT] |= 1 << plane
    slot[S_VOTERS], slot[S_MISSING], slot[S_FLAGS] = voters, missing, flags
    target = carray(_pointer(bucket[B_RESULT] + plane * bucket[B_RESULT_STRIDE] + first_line * LINE), body)
    for k in range(body):
        target[k] = data[at + HEAD + k]
    if slot[S_GOT] != (1 << job[J_RESULT]) - 1:
        return
    chunks = bucket[B_CHUNKS]
    facts = carray(_pointer(bucket[B_FACTS]), 24 * chunks).view(np.int64)
    facts[index], facts[chunks + index] = voters, missing
    if partial:
        counted: Any = 0
        for k in range(8):
            counted |= np.int64(data[at + HEAD + body + k]) << (8 * k)
        facts[2 * chunks + index] = counted
    # Nobody knows which try was answered, so only chunks that were sent once tell the time (Karn's rule).
    if slot[S_TRIES] == 0:
        _sample(timing, np.float64(now - slot[S_SENT_NS]))
    histogram[_bin(now - slot[S_FIRST_NS])] += 1
    counters[C_CHUNKS] += 1
    slot[S_CHUNK] += job[J_SLOTS]
    slot[S_IN_FLIGHT] = 0
    bucket[B_LEFT] -= 1


@_helper
def _take_one(
    now: int,
    job: Any,
    timing: Any,
    slots: Any,
    buckets: Any,
    data: Any,
    at: int,
    size: int,
    counters: Any,
    histogram: Any,
) -> bool:
    """One frame; whether it is a control frame, which is not for this."""
    counters[C_FRAMES_RECEIVED] += 1
    counters[C_BYTES_RECEIVED] += size
    if size < HEAD or data[at] != MAGIC_HIGH or data[at + 1] != MAGIC_LOW or data[at + 2] >> 4 != VERSION:
        counters[C_MALFORMED] += 1
        return False
    kind = np.int64(data[at + 2]) & 15
    if kind > NACK:
        return True
    worker = _get(data, at + 6, 2)
    known = kind in (RESULT, NACK) and (worker == job[J_WORKER] or (kind == RESULT and worker == ALL))
    # Before there is a job there are no slots.
    if not known or not job[J_SLOTS] or _get(data, at + 4, 2) != job[J_JOB] or _get(data, at + 20, 2) != job[J_EPOCH]:
        counters[C_FOREIGN] += 1
        return False
    chunk = _get(data, at + 10, 4)
    slot = slots[chunk % job[J_SLOTS]]
    if not slot[S_IN_FLIGHT] or slot[S_CHUNK] & 0xFFFFFFFF != chunk:
        counters[C_DUPLICATES] += 1  # of a chunk that is done, or was given up
        return False
    if kind == NACK:
        counters[C_NACKS] += 1
        job[J_NACKED], job[J_NACK_CHUNK] = np.int64(data[at + 19]), chunk
        return False
    _accept(now, job, timing, slot, buckets[slot[S_BUCKET]], data, at, size, counters, histogram)
    return False


@_kernel(
    types.int64(types.int64, _VECTOR, _FLOATS, _TABLE, _TABLE, _BYTES, _TABLE, types.int64, _VECTOR, _VECTOR, _TABLE)
)
def take(
    now: int,
    job: Any,
    timing: Any,
    slots: Any,
    buckets: Any,
    data: Any,
    pieces: Any,
    count: int,
    counters: Any,
    histogram: Any,
    controls: Any,
) -> int:
    """Take what the socket gave: row k of ``pieces`` is (first byte, bytes, bytes of a frame), as UDP_GRO joins frames.

    Results go where their bucket wants them. A NACK is left in ``job``. Rows of ``controls`` become (first byte, bytes)
    of control frames; returns how many there are, at most as many as there are rows.
    """
    found = 0
    for k in range(count):
        at, end, step = pieces[k, 0], pieces[k, 0] + pieces[k, 1], pieces[k, 2]
        while at < end:
            size = min(step, end - at)
            if _take_one(now, job, timing, slots, buckets, data, at, size, counters, histogram) and found < len(
                controls
            ):
                controls[found, 0], controls[found, 1] = at, size
                found += 1
            at += size
    return found


def start_timer(timing: npt.NDArray[np.float64], initial_s: float, least_s: float, most_s: float) -> None:
    """A timer that has measured nothing yet."""
    timing[:] = (-1.0, 0.0, initial_s * 1e9, least_s * 1e9, most_s * 1e9, 0.0)
