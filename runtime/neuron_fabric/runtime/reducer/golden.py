"""The golden model in this process: what every other reducer is held against.

All members are in one process and meet in a hub by its name (``golden:name``). A job is a
:class:`~neuron_fabric.model.reducer.SignCountReducer` and a :class:`~neuron_fabric.model.worker.GoldenWorker` a member,
between which real frames are carried by whoever calls. It is slow, and it is the definition.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, SignCountReducer
from neuron_fabric.model.wire import Reason
from neuron_fabric.model.worker import BucketFailedError, GoldenWorker
from neuron_fabric.runtime.reducer.base import (
    U64,
    WORDS_PER_LINE,
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

__all__ = ["GoldenReducer"]

_MAX_WORKERS = 64
_ACC_BITS = 8
_SLOTS = 64
_CHUNKS = 1 << 32
_ENCODINGS = ("binary", "ternary")


@dataclass(eq=False)
class _Bucket:
    planes: U64 | None
    words: int
    abstain: npt.NDArray[np.uint8]
    result: Reduced | None = None
    error: FailedError | None = None


@dataclass(eq=False)
class _Member:
    """One worker of an open job: its side of the protocol and what waits for it."""

    worker: GoldenWorker
    waiting: deque[_Bucket] = field(default_factory=deque)
    running: _Bucket | None = None
    broken: FailedError | None = None


class _Job:
    """An open job; all calls under the hub's lock."""

    def __init__(self, specs: dict[int, JobSpec], epoch: int) -> None:
        spec = specs[0]
        self.params = ReducerParams(
            lines_per_chunk=spec.lines_per_chunk,
            slots=min(spec.slots, _SLOTS),
            workers=_MAX_WORKERS,
            acc_bits=_ACC_BITS,
        )
        self.config = JobConfig(
            spec.job,
            epoch,
            {worker: worker for worker in range(spec.members)},
            spec.table,
            "majority" if spec.majority else "tally",
            spec.margin,
        )
        self.reducer = SignCountReducer(self.params)
        self.reducer.open(self.config)
        self.first = max(each.next_chunk for each in specs.values())
        self.members = {
            worker: _Member(
                GoldenWorker(
                    self.params,
                    self.config,
                    worker,
                    self.config.result_planes,
                    first_chunk=self.first,
                    reducer="golden",
                )
            )
            for worker in specs
        }

    def pump(self) -> None:
        """Carry frames until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for number, member in self.members.items():
                self._begin(member)
                for frame in member.worker.outgoing():
                    moved = True
                    self.reducer.receive(frame, number)
            for answer in self.reducer.poll():
                moved = True
                for number, member in self.members.items():
                    if answer.address in (None, number):
                        self._deliver(member, answer.payload)

    def _begin(self, member: _Member) -> None:
        if member.running is None and member.waiting and member.broken is None:
            member.running = bucket = member.waiting.popleft()
            planes = None if bucket.planes is None else np.ascontiguousarray(bucket.planes).view(np.uint8)
            member.worker.submit(planes, bucket.words // WORDS_PER_LINE, abstain=bucket.abstain.astype(bool).tolist())

    def _deliver(self, member: _Member, payload: bytes) -> None:
        if member.running is None:
            return
        try:
            member.worker.receive(payload, "golden")
        except BucketFailedError as error:
            self.fail(member, FailedError(f"golden: {error}", "nack_stale"))
            return
        if member.worker.done:
            found = member.worker.result()
            member.running.result = Reduced(
                found.planes.view(np.uint64),
                found.voters,
                found.missing,
                np.array([each or 0 for each in found.counted], np.uint64),
            )
            member.running = None

    def fail(self, member: _Member, error: FailedError) -> None:
        """All that a member has in flight fails."""
        for bucket in (*([] if member.running is None else [member.running]), *member.waiting):
            bucket.error = error
        member.running = None
        member.waiting.clear()
        member.broken = error


class _Hub:
    """Where the members of all jobs of one name meet."""

    _all: ClassVar[weakref.WeakValueDictionary[str, _Hub]] = weakref.WeakValueDictionary()
    _making = threading.Lock()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.asked: dict[int, dict[int, JobSpec]] = {}
        self.open: dict[int, _Job] = {}
        self.epochs: dict[int, int] = {}

    @classmethod
    def of(cls, name: str) -> _Hub:
        with cls._making:
            hub = cls._all.get(name)
            if hub is None:
                hub = cls._all[name] = cls()
            return hub

    def ask(self, spec: JobSpec) -> None:
        """A member wants a job; it opens when all do. Under the lock."""
        asked = self.asked.setdefault(spec.job, {})
        asked[spec.worker] = spec
        if len(asked) < spec.members or {_terms(each) for each in asked.values()} != {_terms(spec)}:
            return
        epoch = 1 + max(self.epochs.get(spec.job, 0), *(each.epoch for each in asked.values()), 0)
        before = self.open.get(spec.job)
        if before is not None:
            for member in before.members.values():
                before.fail(member, FailedError("golden: the job was opened again", "reopened", lost=True))
        self.open[spec.job] = _Job(asked, epoch)
        self.epochs[spec.job] = epoch
        del self.asked[spec.job]
        self.changed.notify_all()


class GoldenReducer(Reducer):
    """A member's way to a hub. Buckets are carried in the calling threads; nothing runs in the background."""

    def __init__(self, name: str = "") -> None:
        self.url = f"golden:{name}"
        self._hub = _Hub.of(name)
        self._spec: JobSpec | None = None
        self._before: _Job | None = None
        self._job: _Job | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._tickets = 0
        self._next = 0
        self._closed = False
        self._counters: Counter[str] = Counter()

    def request(self, spec: JobSpec) -> None:
        """See :class:`Reducer`."""
        if spec.encoding not in _ENCODINGS:
            raise ValueError(f"encoding {spec.encoding!r} is none of {', '.join(_ENCODINGS)}")
        with self._hub.changed:
            self._refuse_if_closed()
            if self._job is not None:
                self._job.fail(self._job.members[spec.worker], FailedError("the job was asked for again", "reopened"))
            self._spec, self._before, self._job = spec, self._hub.open.get(spec.job), None
            self._hub.ask(spec)

    def grant(self, timeout: float = 0.0) -> Grant:
        """See :class:`Reducer`."""
        end = time.monotonic() + timeout
        with self._hub.changed:
            spec = self._spec
            if spec is None:
                raise RuntimeError("no job was asked for")
            while self._job is None:
                self._refuse_if_closed()
                opened = self._hub.open.get(spec.job)
                if opened is not None and opened is not self._before:
                    self._job, self._next = opened, opened.first
                    break
                others = self._hub.asked.get(spec.job, {})
                if any(_terms(each) != _terms(spec) for each in others.values()):
                    raise RefusedError(Reason.DISAGREES, f"{self.url}: the members of job {spec.job} differ")
                left = end - time.monotonic()
                if left <= 0:
                    raise TimedOutError(f"{self.url}: {len(others)} of {spec.members} members are there")
                self._hub.changed.wait(left)
            job = self._job
        return Grant(
            job.config.epoch,
            job.params.slots,
            job.params.lines_per_chunk,
            job.first % _CHUNKS,
            job.config.result_planes,
            _ACC_BITS,
            _MAX_WORKERS,
            _ENCODINGS,
        )

    def submit(self, planes: U64 | None, abstain: npt.NDArray[np.bool_] | None = None, *, words: int = 0) -> Ticket:
        """See :class:`Reducer`."""
        with self._hub.changed:
            job, member = self._mine()
            if member.broken is not None:
                raise member.broken.again()
            words = checked_planes(planes, words, job.config.encoding.planes)
            chunks = -(-words // (job.params.lines_per_chunk * WORDS_PER_LINE))
            bucket = _Bucket(planes, words, checked_abstain(abstain, chunks))
            ticket = Ticket(self._tickets, chunks, words)
            self._tickets += 1
            self._next = (self._next + chunks) % _CHUNKS
            self._buckets[ticket.number] = bucket
            member.waiting.append(bucket)
            self._counters["chunks"] += chunks
            job.pump()
            self._hub.changed.notify_all()
        return ticket

    def collect(self, ticket: Ticket, timeout: float) -> Reduced:
        """See :class:`Reducer`."""
        end = time.monotonic() + timeout
        with self._hub.changed:
            bucket = self._buckets.get(ticket.number)
            if bucket is None:
                raise FailedError(f"ticket {ticket.number} was given up or is collected already", "given_up")
            while bucket.result is None and bucket.error is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimedOutError(f"{self.url}: no result of bucket {ticket.number} after {timeout:g} s")
                self._hub.changed.wait(left)
            self._buckets.pop(ticket.number, None)
        if bucket.error is not None:
            raise bucket.error.again()
        if bucket.result is None:
            raise RuntimeError("a bucket has neither a result nor an error")
        return bucket.result

    def resume(self, chunk: int) -> None:
        """See :class:`Reducer`."""
        with self._hub.changed:
            job, member = self._mine()
            if member.broken is not None and member.broken.lost:
                raise member.broken.again()
            job.fail(member, FailedError("the bucket was given up", "given_up"))
            member.broken = None
            member.worker.resume(chunk)
            self._next = chunk
            self._hub.changed.notify_all()

    @property
    def next_chunk(self) -> int:
        """See :class:`Reducer`."""
        return self._next

    @property
    def failure(self) -> FailedError | None:
        """See :class:`Reducer`."""
        with self._hub.changed:
            if self._job is None or self._spec is None:
                return None
            return self._job.members[self._spec.worker].broken

    def status(self, timeout: float = 1.0) -> Status:
        """See :class:`Reducer`; there is no time in it."""
        with self._hub.changed:
            remote = {} if self._job is None else dict(self._job.reducer.counters)
            used = sum(job.params.slots for job in self._hub.open.values())
            return Status(dict(self._counters), remote, min(1.0, used / _SLOTS), 0.0)

    def close(self) -> None:
        """See :class:`Reducer`."""
        with self._hub.changed:
            if self._closed:
                return
            if self._job is not None and self._spec is not None:
                member = self._job.members[self._spec.worker]
                self._job.fail(member, FailedError(f"{self.url}: it was closed", "closed"))
            self._closed = True
            self._hub.changed.notify_all()

    def _mine(self) -> tuple[_Job, _Member]:
        self._refuse_if_closed()
        if self._job is None or self._spec is None:
            raise FailedError(f"{self.url}: the job is not granted yet", "not_ready")
        return self._job, self._job.members[self._spec.worker]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise FailedError(f"{self.url}: it was closed", "closed")


def _terms(spec: JobSpec) -> tuple[object, ...]:
    """What all members must agree in."""
    return (
        spec.members,
        spec.encoding,
        spec.result_format,
        spec.margin,
        spec.slots,
        spec.lines_per_chunk,
    )
