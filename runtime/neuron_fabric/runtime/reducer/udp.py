"""The UDP driver: one worker's frames to an in-network endpoint or to a daemon that stands for one, and back.

One background thread owns the socket and the job's state. What costs time per frame is compiled
(:mod:`~neuron_fabric.runtime.reducer.udp_kernels`); where the kernel joins and cuts datagrams itself (UDP_GRO,
UDP_SEGMENT) a system call moves about sixty of them.

How long an answer is waited for follows RFC 6298: a chunk that is late goes again, and the time is doubled until an
answer to something that was sent once tells better. A chunk is answered only when all members have sent
it, so the timer measures them, too, and a slow member makes everybody patient. Whether the reducer is there at all is
asked beside that: while it should be at work and says nothing it is sent a STATUS, and if those stay unanswered, or the
answer is that the job is not open, the job is lost and must be opened again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import control
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, HeaderError, Reason
from neuron_fabric.runtime.reducer import udp_kernels as kernels
from neuron_fabric.runtime.reducer.base import (
    U64,
    WORDS_PER_LINE,
    AbsentError,
    FailedError,
    Grant,
    JobSpec,
    Reduced,
    Reducer,
    RefusedError,
    Status,
    Ticket,
    TimedOutError,
    checked_abstain,
    checked_planes,
)
from neuron_fabric.runtime.reducer.latency import BINS

__all__ = ["UdpReducer", "UdpSettings", "resolve"]

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # Linux; the socket module does not name them
_NO_SEGMENTS = (errno.EINVAL, errno.EMSGSIZE, errno.EIO, errno.EOPNOTSUPP)
"""What a kernel says that cannot cut this: frames longer than the route's MTU, or a device without checksums."""
_RECEIVE_ROOM = 1 << 16
_RECEIVES = 16
_SEND_BYTES = 4 * 65536
_SEND_BATCHES = 64
_CONTROLS = 64
_CHUNKS = 1 << 32


@dataclass(frozen=True)
class UdpSettings:
    """Limits and periods, in seconds.

    Parameters
    ----------
    initial_wait, least_wait, most_wait
        Of the retransmission timer: before anything was measured, and its bounds.
    bucket_timeout
        A bucket that takes longer from when it was submitted fails.
    dead_after
        Silence after which the reducer is taken for gone, if it was asked meanwhile.
    probe_every
        Between questions to a silent reducer.
    idle_probe_every
        Between questions while there is nothing to do.
    ask_every, refused_every
        Between two OPENs, and after a refusal that will not change at once.
    close_timeout
        How long :meth:`UdpReducer.close` waits to hear that its CLOSE came.
    buckets : int
        That may wait or be in flight; more make ``submit`` wait.
    socket_bytes : int
        Of the socket's buffers, each way.
    offload : bool
        Whether to use UDP_SEGMENT and UDP_GRO where the kernel has them.
    """

    initial_wait: float = 0.05
    least_wait: float = 0.003
    most_wait: float = 1.0
    bucket_timeout: float = 60.0
    dead_after: float = 2.0
    probe_every: float = 0.25
    idle_probe_every: float = 1.0
    ask_every: float = 0.1
    refused_every: float = 2.0
    close_timeout: float = 0.5
    buckets: int = 64
    socket_bytes: int = 4 << 20
    offload: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "offload" and not value > 0:
                raise ValueError(f"udp: {name} must be positive, not {value}")
        if not self.least_wait <= self.initial_wait <= self.most_wait:
            raise ValueError("udp: initial_wait must be between least_wait and most_wait")


class _State(enum.Enum):
    IDLE = "no job was asked for"
    ASKING = "the job is not granted yet"
    READY = "granted"
    BROKEN = "a bucket failed"
    CLOSED = "closed"


@dataclass(eq=False)
class _Bucket:
    """A bucket from submit to collect. It keeps the arrays alive whose addresses the kernels have."""

    ticket: Ticket
    first: int
    deadline: float
    planes: U64
    abstain: npt.NDArray[np.uint8]
    result: U64
    facts: npt.NDArray[np.int64]
    done: bool = False
    error: FailedError | None = None

    @property
    def finished(self) -> bool:
        return self.done or self.error is not None


class UdpReducer(Reducer):
    """A reducer behind ``udp://host:port``.

    Parameters
    ----------
    host : str
    port : int
    settings : UdpSettings, optional

    Raises
    ------
    AbsentError
        If the host's name is not known.
    """

    def __init__(self, host: str, port: int, settings: UdpSettings | None = None) -> None:
        self.settings = settings or UdpSettings()
        self.url = f"udp://{host}:{port}"
        self._socket = _connect(host, port, self.settings)
        self._gro = self.settings.offload and _try(lambda: self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1))
        self._gso = self.settings.offload and _try(lambda: self._socket.setsockopt(_SOL_UDP, _UDP_SEGMENT, 0))
        self._wake_in, self._wake_out = socket.socketpair()
        for each in (self._wake_in, self._wake_out):
            each.setblocking(False)

        # Shared, under the condition's lock.
        self._changed = threading.Condition()
        self._state = _State.IDLE
        self._spec: JobSpec | None = None
        self._grant: Grant | None = None
        self._refusal: RefusedError | None = None
        self._waits_for = ""
        self._error: FailedError | None = None
        self._records: dict[int, _Bucket] = {}
        self._arrived: list[_Bucket] = []
        self._unfinished = 0
        self._tickets = 0
        self._next = 0
        self._first = 0  # where the slots begin, whatever was submitted since
        self._epoch = 0
        self._generation = 0
        self._told: control.StatusReply | None = None
        self._told_count = 0
        self._round_trip: float | None = None
        self._asked_for_status = False
        self._closing = False
        self._close_heard = False
        self._counted: Counter[str] = Counter()

        # The thread's own.
        self._job = np.zeros(kernels.JOB_FIELDS, np.int64)
        self._timing = np.zeros(kernels.TIMING_FIELDS)
        self._restart_timer()
        self._slots = np.zeros((1, kernels.SLOT_FIELDS), np.int64)
        self._ring = np.zeros((self.settings.buckets, kernels.BUCKET_FIELDS), np.int64)
        self._active: list[_Bucket] = []
        self._counters = np.zeros(len(kernels.COUNTERS), np.int64)
        self._histogram = np.zeros(BINS, np.int64)
        self._out = np.zeros(_SEND_BYTES, np.uint8)
        self._out_view = memoryview(self._out)  # type: ignore[arg-type]
        self._batches = np.zeros((_SEND_BATCHES, 3), np.int64)
        self._data = np.zeros(_RECEIVES * _RECEIVE_ROOM, np.uint8)
        self._data_view = memoryview(self._data)  # type: ignore[arg-type]
        self._pieces = np.zeros((_RECEIVES, 3), np.int64)
        self._controls = np.zeros((_CONTROLS, 2), np.int64)
        self._current = -1  # the generation that the thread works for
        self._nonce = 0
        self._ask_at = self._probe_at = 0.0
        self._heard_at = time.monotonic()
        self._probes = 0
        self._cookies: dict[int, tuple[float, int]] = {}
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)
        # A daemon, so that a process that forgot to close can end.
        self._thread = threading.Thread(target=self._run, name="neuron-fabric-udp", daemon=True)
        self._thread.start()

    # ---- the worker's threads ----------------------------------------------------------------------------------

    def request(self, spec: JobSpec) -> None:
        """See :class:`Reducer`."""
        _encoding_index(spec)
        with self._changed:
            self._refuse_if_closed()
            self._give_up(FailedError("the job was asked for again", "reopened"))
            if self._spec is not None and self._spec.job != spec.job:
                self._epoch = self._next = 0  # what is remembered is another job's
            self._spec, self._state = spec, _State.ASKING
            self._grant = self._refusal = self._error = None
            self._waits_for = ""
            self._generation += 1
            self._changed.notify_all()
        self._wake()

    def grant(self, timeout: float = 0.0) -> Grant:
        """See :class:`Reducer`."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                self._refuse_if_closed()
                if self._spec is None:
                    raise RuntimeError("no job was asked for")
                if self._grant is not None:
                    return self._grant
                if self._refusal is not None:
                    raise self._refusal
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            job = f"job {self._spec.job} at {self.url}"
            if self._waits_for:
                raise TimedOutError(f"{job}: {self._waits_for} after {timeout:g} s")
            raise AbsentError(f"{job}: no answer in {timeout:g} s; is a reducer running there?")

    def submit(self, planes: U64 | None, abstain: npt.NDArray[np.bool_] | None = None, *, words: int = 0) -> Ticket:
        """See :class:`Reducer`."""
        end = time.monotonic() + self.settings.bucket_timeout
        with self._changed:
            while True:
                spec, grant = self._ready()
                if self._unfinished < self.settings.buckets:
                    break
                left = end - time.monotonic()
                if left <= 0:
                    raise TimedOutError(f"{self._unfinished} buckets are waiting, and none gets done")
                self._changed.wait(left)
            words = checked_planes(planes, words, spec.table.planes)
            chunks = -(-words // (grant.lines_per_chunk * WORDS_PER_LINE))
            flags = checked_abstain(abstain, chunks)
            if planes is None:
                planes = np.zeros((spec.table.planes, 0), np.uint64)
                flags[:] = 1
            ticket = Ticket(self._tickets, chunks, words)
            bucket = _Bucket(
                ticket,
                self._next,
                time.monotonic() + self.settings.bucket_timeout,
                planes,
                flags,
                np.empty((grant.result_planes, words), np.uint64),
                np.zeros((3, chunks), np.int64),
            )
            self._tickets += 1
            self._next += chunks
            self._unfinished += 1
            self._records[ticket.number] = bucket
            self._arrived.append(bucket)
        self._wake()
        return ticket

    def collect(self, ticket: Ticket, timeout: float) -> Reduced:
        """See :class:`Reducer`."""
        end = time.monotonic() + timeout
        with self._changed:
            bucket = self._records.get(ticket.number)
            if bucket is None:
                raise FailedError(f"ticket {ticket.number} was given up or is collected already", "given_up")
            while not bucket.finished:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimedOutError(f"{self.url}: no result of bucket {ticket.number} after {timeout:g} s")
                self._changed.wait(left)
            self._records.pop(ticket.number, None)
        if bucket.error is not None:
            raise bucket.error.again()
        voters, missing, counted = bucket.facts
        return Reduced(bucket.result, voters, missing, counted.view(np.uint64))

    def resume(self, chunk: int) -> None:
        """See :class:`Reducer`. ``FailedError`` if the reducer has lost the job, which must be opened again then."""
        if not 0 <= chunk < _CHUNKS:
            raise ValueError(f"chunk must be 0 to {_CHUNKS - 1}, not {chunk}")
        with self._changed:
            if self._state not in (_State.READY, _State.BROKEN) or (self._error is not None and self._error.lost):
                raise FailedError(f"{self.url}: {self._state.value}", "not_ready", lost=True) from self._error
            self._give_up(FailedError("the bucket was given up", "given_up"))
            self._state, self._error = _State.READY, None
            # Counted without end: the next number with these 32 bits.
            self._next += (chunk - self._next) % _CHUNKS
            self._first = self._next
            self._generation += 1
        self._wake()

    @property
    def next_chunk(self) -> int:
        """See :class:`Reducer`."""
        with self._changed:
            return self._next % _CHUNKS

    @property
    def epoch(self) -> int:
        """The highest epoch of its job that this worker remembers."""
        with self._changed:
            return self._epoch

    @property
    def failure(self) -> FailedError | None:
        """See :class:`Reducer`."""
        with self._changed:
            return self._error

    def status(self, timeout: float = 1.0) -> Status:
        """See :class:`Reducer`."""
        end = time.monotonic() + timeout
        with self._changed:
            before = self._told_count
            if timeout > 0 and not self._closing:
                self._asked_for_status = True
                self._wake()
                while self._told_count == before and not self._closing:
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            answered = self._told_count != before or timeout <= 0
            told = self._told if answered else None
            counters = dict(zip(kernels.COUNTERS, self._counters.tolist(), strict=True)) | dict(self._counted)
            histogram = self._histogram.copy()
            round_trip = self._round_trip if answered else None
        return Status(
            counters,
            {} if told is None else dict(told.counters),
            None if told is None else told.slots_used / told.slots_total,
            round_trip,
            histogram,
        )

    def buffer_bytes(self) -> int:
        """See :class:`Reducer`."""
        held = (self._out, self._data, self._slots, self._ring, self._histogram)
        return sum(array.nbytes for array in held)

    def close(self) -> None:
        """See :class:`Reducer`."""
        with self._changed:
            if self._state is _State.CLOSED:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join(self.settings.close_timeout + 5.0)
        for each in (self._socket, self._wake_in, self._wake_out):
            each.close()

    def _refuse_if_closed(self) -> None:
        if self._closing or self._state is _State.CLOSED:
            raise FailedError(f"{self.url}: it was closed", "closed")

    def _ready(self) -> tuple[JobSpec, Grant]:
        self._refuse_if_closed()
        if self._error is not None:
            raise self._error.again()
        if self._state is not _State.READY or self._spec is None or self._grant is None:
            raise FailedError(f"{self.url}: {self._state.value}", "not_ready")
        return self._spec, self._grant

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: nobody is to be woken
            self._wake_in.send(b"\0")

    def _give_up(self, error: FailedError) -> None:
        """Fail everything that is unfinished. The lock is held."""
        for bucket in self._records.values():
            if not bucket.finished:
                bucket.error = error
        self._arrived.clear()
        self._unfinished = 0
        self._changed.notify_all()

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._leave()
        except Exception as error:  # whoever waits must hear of it
            self._break(FailedError(f"{self.url}: the driver failed: {error!r}", "driver", lost=True))
            raise
        finally:
            with self._changed:
                self._state = _State.CLOSED
                self._give_up(FailedError(f"{self.url}: it was closed", "closed"))

    def _turn(self) -> None:
        """One round: take what was submitted, send what is due, wait, receive."""
        self._take_commands()
        if self._closing:
            return  # what woke this up is taken, and nothing else would
        now = time.monotonic()
        wait = self._ask(now) if self._state is _State.ASKING else self._probe(now)
        if self._active:
            due = self._send()
            wait = min(wait, due, self._check_deadlines(now))
        if self._asked_for_status:
            self._asked_for_status = False
            self._send_status()
        self._poll.poll(max(0, int(1000 * wait) + 1) if wait > 0 else 0)
        self._receive()

    def _take_commands(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with self._changed:
            if self._current != self._generation:
                self._current = self._generation
                self._reset()
            # Buckets that are done stay in the ring behind one that is not.
            room = len(self._ring) - len(self._active)
            for bucket in self._arrived[:room]:
                self._enlist(bucket)
            del self._arrived[:room]

    def _reset(self) -> None:
        """Begin anew: another request, or go on behind a bucket that was given up. The lock is held."""
        self._active.clear()
        job = self._job
        job[kernels.J_HEAD] = job[kernels.J_TAIL] = 0
        job[kernels.J_NACKED] = 0
        if self._state is _State.ASKING:
            job[kernels.J_SLOTS] = 0
            self._nonce = int.from_bytes(os.urandom(8), "big")
            self._ask_at = 0.0
            self._probes = 0
            return
        self._place_slots()

    def _place_slots(self) -> None:
        """Every slot waits for its first chunk from the next one on."""
        count = len(self._slots)
        self._slots[:] = 0
        first = self._first
        for slot in range(count):
            self._slots[slot, kernels.S_CHUNK] = first + (slot - first) % count
        self._job[kernels.J_END] = first
        self._job[kernels.J_CURSOR] = first % count

    def _enlist(self, bucket: _Bucket) -> None:
        job, ticket = self._job, bucket.ticket
        place = int(job[kernels.J_TAIL]) % len(self._ring)
        self._ring[place] = (
            bucket.first,
            ticket.chunks,
            ticket.words // WORDS_PER_LINE,
            ticket.chunks,
            bucket.planes.ctypes.data,
            bucket.planes.strides[0],
            bucket.result.ctypes.data,
            bucket.result.strides[0],
            bucket.abstain.ctypes.data,
            bucket.facts.ctypes.data,
        )
        if not self._active:
            self._heard_at, self._probes = time.monotonic(), 0
        self._active.append(bucket)
        job[kernels.J_TAIL] += 1
        job[kernels.J_END] = bucket.first + ticket.chunks

    # ---- sending

    def _send(self) -> float:
        """Send what is due; seconds until this is to be done again."""
        while True:
            now = time.monotonic_ns()
            count, due = kernels.fill(
                now, self._job, self._timing, self._slots, self._ring, self._out, self._batches, self._counters
            )
            for at, size, segment in self._batches[:count].tolist():
                self._hand_over(self._out_view[at : at + size], segment)
            if count == 0 or due > now:
                return float(min((due - now) / 1e9, self.settings.most_wait))

    def _hand_over(self, data: memoryview, segment: int) -> None:
        """One batch to the kernel. What it has no room for is lost, as on the way, and sent again in its time."""
        if self._gso and len(data) > segment:
            try:
                self._socket.sendmsg([data], [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", segment))])
                return
            except BlockingIOError:
                self._wait_for_room()
            except ConnectionRefusedError:
                self._note_refused()
                return
            except OSError as error:
                if error.errno not in _NO_SEGMENTS:
                    self._counted["unsent"] += 1
                    return
                self._gso = False
        for at in range(0, len(data), segment):
            self._send_frame(data[at : at + segment])

    def _send_frame(self, frame: bytes | memoryview) -> None:
        for attempt in range(2):
            try:
                self._socket.send(frame)
                return
            except BlockingIOError:
                if attempt == 0:
                    self._wait_for_room()
            except ConnectionRefusedError:
                self._note_refused()
                return
            except OSError:
                break
        self._counted["unsent"] += 1

    def _wait_for_room(self) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        writable.poll(20)

    def _note_refused(self) -> None:
        """The host is there and nobody listens: a job that was open is gone."""
        self._counted["port_unreachable"] += 1
        if self._state is _State.READY:
            self._break(FailedError(f"{self.url}: nobody listens there any more", "absent", lost=True))

    # ---- receiving

    def _receive(self) -> None:
        count = 0
        while count < _RECEIVES:
            at = count * _RECEIVE_ROOM
            room = self._data_view[at : at + _RECEIVE_ROOM]
            try:
                if self._gro:
                    size, ancillary, _flags, _address = self._socket.recvmsg_into([room], 64)
                    segment = _segment(ancillary) or size
                else:
                    size = segment = self._socket.recv_into(room)
            except BlockingIOError:
                break
            except ConnectionRefusedError:
                self._note_refused()
                continue
            except OSError:  # a route that is gone; whether the reducer is, silence will tell
                self._counted["unreachable"] += 1
                break
            if size:
                self._pieces[count] = (at, size, segment)
                count += 1
        if not count:
            return
        now = time.monotonic_ns()
        controls = kernels.take(
            now,
            self._job,
            self._timing,
            self._slots,
            self._ring,
            self._data,
            self._pieces,
            count,
            self._counters,
            self._histogram,
            self._controls,
        )
        self._heard_at, self._probes = now / 1e9, 0
        for at, size in self._controls[:controls].tolist():
            self._take_control(bytes(self._data_view[at : at + size]))
        self._note_done()
        if self._job[kernels.J_NACKED] and self._state is _State.READY:
            self._take_nack()

    def _note_done(self) -> None:
        """Tell who waits for buckets that are done."""
        left = self._ring[:, kernels.B_LEFT]
        head = int(self._job[kernels.J_HEAD])
        done = [bucket for k, bucket in enumerate(self._active) if not left[(head + k) % len(left)]]
        done = [bucket for bucket in done if not bucket.done]
        if not done:
            return
        with self._changed:
            for bucket in done:
                if not bucket.finished:
                    bucket.done = True
                    self._unfinished -= 1
            while self._active and self._active[0].finished:
                self._active.pop(0)
                self._job[kernels.J_HEAD] += 1
            self._changed.notify_all()

    def _take_nack(self) -> None:
        reason, chunk = int(self._job[kernels.J_NACKED]), int(self._job[kernels.J_NACK_CHUNK])
        try:
            name = Reason(reason).name.lower()
        except ValueError:
            name = str(reason)
        lost = reason in (Reason.WRONG_EPOCH, Reason.JOB_NOT_OPEN, Reason.WRONG_SENDER)
        self._break(FailedError(f"{self.url}: chunk {chunk} was refused: {name}", f"nack_{name}", lost=lost))

    def _check_deadlines(self, now: float) -> float:
        """Seconds until the next bucket has taken too long; fails the job if one has."""
        deadline = self._active[0].deadline if self._active else now + 1.0
        if deadline <= now:
            limit = self.settings.bucket_timeout
            self._break(FailedError(f"{self.url}: a bucket was not done after {limit:g} s", "timed_out"))
        return deadline - now

    def _break(self, error: FailedError) -> None:
        """Everything in flight fails, and what comes after, until the job is resumed or opened again."""
        with self._changed:
            if self._current != self._generation:
                return  # it is about what was given up
            self._state, self._error = _State.BROKEN, error
            self._counted[f"failed_{error.kind}"] += 1
            self._give_up(error)
        self._active.clear()
        self._job[kernels.J_HEAD] = self._job[kernels.J_TAIL]
        self._slots[:, kernels.S_IN_FLIGHT] = 0
        self._job[kernels.J_END] = 0

    # ---- control frames

    def _ask(self, now: float) -> float:
        """Send OPEN when it is time; seconds until it is time again."""
        if now >= self._ask_at:
            spec = self._spec
            if spec is None:
                return self.settings.ask_every
            payload = control.Open(
                members=spec.members,
                nonce=self._nonce,
                encoding=_encoding_index(spec),
                result_format=control.RESULT_FORMATS.index(spec.result_format),
                margin=spec.margin if spec.majority else 0,
                lines_per_chunk=spec.lines_per_chunk,
                slots=spec.slots,
                next_chunk=max(spec.next_chunk, self._next % _CHUNKS),
            )
            epoch = max(spec.epoch, self._epoch)
            self._send_frame(control.control_frame(payload, job=spec.job, worker=spec.worker, epoch=epoch))
            refused = self._refusal is not None
            self._ask_at = now + (self.settings.refused_every if refused else self.settings.ask_every)
        return self._ask_at - now

    def _probe(self, now: float) -> float:
        """Ask a silent reducer whether it is there; seconds until that is to be done again."""
        settings = self.settings
        if self._state is not _State.READY:
            return settings.idle_probe_every
        period = settings.probe_every if self._active else settings.idle_probe_every
        quiet = now - self._heard_at
        if self._probes >= 2 and quiet > settings.dead_after:
            self._break(FailedError(f"{self.url}: no sign of life for {quiet:.1f} s", "absent", lost=True))
            return period
        at = max(self._probe_at, self._heard_at) + period
        if now < at:
            return at - now
        self._probe_at = now
        self._probes += 1
        self._send_status()
        return period

    def _send_status(self) -> None:
        spec = self._spec
        cookie = int.from_bytes(os.urandom(8), "big")
        while len(self._cookies) >= 16:
            self._cookies.pop(next(iter(self._cookies)))
        # Only an answer to a question of this incarnation says something about it.
        generation = self._current if self._state is _State.READY else -1
        self._cookies[cookie] = (time.monotonic(), generation)
        job, worker = (0, 0) if spec is None else (spec.job, spec.worker)
        self._send_frame(control.control_frame(control.StatusRequest(cookie), job=job, worker=worker))

    def _take_control(self, frame: bytes) -> None:
        try:
            header = Header.unpack(frame)
            body = frame[HEADER_BYTES:]
            if header.type is FrameType.GRANT:
                self._take_grant(header, control.Grant.unpack(body))
            elif header.type is FrameType.STATUS:
                self._take_status(header, control.StatusReply.unpack(body))
            elif header.type is FrameType.CLOSE:
                self._close_heard = self._close_heard or control.Close.unpack(body).nonce == self._nonce
        except (HeaderError, control.ControlError):
            self._counters[kernels.C_MALFORMED] += 1

    def _take_grant(self, header: Header, given: control.Grant) -> None:
        with self._changed:
            spec = self._spec
            mine = self._state is _State.ASKING and self._current == self._generation and given.nonce == self._nonce
            if not mine or spec is None or (header.job, header.worker) != (spec.job, spec.worker):
                self._counters[kernels.C_FOREIGN] += 1
                return
            if header.reason == Reason.NOT_READY:
                self._refusal = None
                self._waits_for = f"{given.present} of {spec.members} members are there"
                return
            if header.reason:
                self._refusal = self._refused(spec, header.reason, given)
                self._changed.notify_all()
                return
            if not _usable(spec, given):
                self._refusal = RefusedError(Reason.BAD_VALUE, f"{self.url}: a grant of what nobody asked for: {given}")
                return
            self._accept_grant(spec, header.epoch, given)
            self._changed.notify_all()

    def _refused(self, spec: JobSpec, reason: int, given: control.Grant) -> RefusedError:
        try:
            name = Reason(reason).name
        except ValueError:
            name = f"reason {reason}"
        about = f" ({given.field})" if given.field else ""
        return RefusedError(
            reason,
            f"{self.url} refuses job {spec.job}: {name}{about}; it takes {given.max_workers} workers and tallies of "
            f"{given.acc_bits} bits",
        )

    def _accept_grant(self, spec: JobSpec, epoch: int, given: control.Grant) -> None:
        """Set the job up. The lock is held."""
        self._refusal, self._waits_for, self._error = None, "", None
        self._grant = Grant(
            epoch,
            given.slots,
            given.lines_per_chunk,
            given.first_chunk,
            given.result_planes,
            given.acc_bits,
            given.max_workers,
            tuple(e.name for k, e in enumerate(control.ENCODINGS) if given.encodings >> k & 1),
        )
        self._epoch = epoch
        self._next = self._first = given.first_chunk
        job = self._job
        job[kernels.J_JOB], job[kernels.J_WORKER], job[kernels.J_EPOCH] = spec.job, spec.worker, epoch
        job[kernels.J_PLANES], job[kernels.J_RESULT] = spec.table.planes, given.result_planes
        job[kernels.J_MAJORITY] = spec.majority
        job[kernels.J_LINES], job[kernels.J_SLOTS] = given.lines_per_chunk, given.slots
        job[kernels.J_HEAD] = job[kernels.J_TAIL] = job[kernels.J_NACKED] = 0
        self._slots = np.zeros((given.slots, kernels.SLOT_FIELDS), np.int64)
        self._place_slots()
        self._restart_timer()
        self._probes = 0
        self._state = _State.READY

    def _restart_timer(self) -> None:
        settings = self.settings
        kernels.start_timer(self._timing, settings.initial_wait, settings.least_wait, settings.most_wait)

    def _take_status(self, header: Header, told: control.StatusReply) -> None:
        asked = self._cookies.pop(told.cookie, None)
        if asked is None:
            self._counters[kernels.C_FOREIGN] += 1
            return
        begun, generation = asked
        with self._changed:
            self._told, self._round_trip = told, time.monotonic() - begun
            self._told_count += 1
            self._changed.notify_all()
        if generation != self._current or self._state is not _State.READY:
            return
        if told.state not in (control.JobState.OPEN, control.JobState.REOPENING):
            self._break(FailedError(f"{self.url}: it does not know the job any more", "restarted", lost=True))
        elif header.epoch not in (0, self._epoch):
            self._break(FailedError(f"{self.url}: the job is at epoch {header.epoch}", "reopened", lost=True))

    def _leave(self) -> None:
        """Send CLOSE until it is confirmed, for a while."""
        spec = self._spec
        if spec is None or self._state not in (_State.READY, _State.BROKEN, _State.ASKING):
            return
        lost = self._error is not None and self._error.lost
        if lost or (self._grant is None and not self._waits_for):
            return  # there is nobody to tell
        end = time.monotonic() + self.settings.close_timeout
        frame = control.control_frame(control.Close(self._nonce), job=spec.job, worker=spec.worker, epoch=self._epoch)
        while not self._close_heard and time.monotonic() < end:
            self._send_frame(frame)
            self._poll.poll(50)
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
            self._receive()


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Address family and address of a host; :class:`AbsentError` if its name is not known."""
    try:
        family, _kind, _protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise AbsentError(f"udp://{host}:{port}: {error}") from error
    return family, (str(address[0]), int(address[1]))


def _connect(host: str, port: int, settings: UdpSettings) -> socket.socket:
    family, address = resolve(host, port)
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, settings.socket_bytes)
    # Connected, so that the kernel drops what comes from elsewhere and tells if nobody listens.
    made.connect(address)
    return made


def _try(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _segment(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The size of the frames that were joined, or 0."""
    for level, kind, data in ancillary:
        if level == _SOL_UDP and kind == _UDP_GRO:
            return int(struct.unpack_from("=i" if len(data) >= 4 else "=H", data)[0])
    return 0


def _encoding_index(spec: JobSpec) -> int:
    for index, encoding in enumerate(control.ENCODINGS):
        if encoding.name == spec.encoding:
            return index
    names = ", ".join(encoding.name for encoding in control.ENCODINGS)
    raise ValueError(f"encoding {spec.encoding!r} cannot be asked for over UDP: use {names}")


def _usable(spec: JobSpec, given: control.Grant) -> bool:
    return (
        1 <= given.slots <= spec.slots
        and given.slots & (given.slots - 1) == 0
        and 1 <= given.lines_per_chunk <= spec.lines_per_chunk
        and 1 <= given.result_planes <= 32
    )
