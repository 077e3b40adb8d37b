"""Votes counted by a reducer behind a driver: an FPGA, a daemon, the golden model; whatever a URL names.

Envelopes go round by one small all-gather, since every rank needs them all. The planes go to the reducer meanwhile, one
job for each (encoding, result format, margin) that occurs, and their counts come back in the background.

A reducer can be absent, refuse, die or be slow, and each rank sees that for itself. So at the end of each step the
ranks tell each other, in the agreement that the hook makes anyway, of each job: the epoch that they were granted,
whether something went wrong, and how many chunks they have used. From that all conclude the same:

* Somebody's reducer has lost the job: all ask for it again, in the background, and it rests meanwhile.
* Somebody has no grant, or another epoch: the job rests. Its buckets fail at once, nobody waits.
* All have the same epoch: the job is at work, from the highest chunk number on if anything went wrong before.

A bucket that fails is redone by the hook in FP32 from the gradient that is still there, on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from neuron_fabric.runtime.admission import Load
from neuron_fabric.runtime.collectives import all_gather_single
from neuron_fabric.runtime.envelope import read_envelopes
from neuron_fabric.runtime.layout import WORDS_PER_LINE, Section
from neuron_fabric.runtime.plan import ResultFormat
from neuron_fabric.runtime.reducer import (
    FailedError,
    JobSpec,
    Reduced,
    Reducer,
    ReducerError,
    ReducerUrl,
    Status,
    Ticket,
    TimedOutError,
    connect,
)
from neuron_fabric.runtime.transports.alarm import Alarm
from neuron_fabric.runtime.transports.base import (
    BucketVotes,
    Exchange,
    ReducerFailedError,
    SectionVotes,
    Transport,
    VotesKind,
    majority_is_sent,
)

__all__ = ["REASONS", "ReducerEndpoint"]

_MOST_JOBS = 16
_LISTEN = 0.1
"""Seconds between two looks whether another rank has given up."""
_FINE, _BUCKET_FAILED, _LOST = 0, 1, 2
_TOLD = 5
_CHUNKS = 1 << 32

REASONS = (
    "",
    "failed",
    "not_ready",
    "timed_out",
    "partial",
    "another_rank",
    "nack_stale",
    "reopened",
    "restarted",
    "absent",
    "refused",
    "refused_no_capacity",
    "refused_overflow",
    "refused_disagrees",
)
"""Why a bucket was not counted, by the number that is told; of several ranks' reasons the last in this order counts."""

_Key = tuple[str, ResultFormat, bool, int]


@dataclass(eq=False)
class _Job:
    """One job and what this rank knows of it."""

    reducer: Reducer
    spec: JobSpec
    active: bool = False
    resting: bool = False
    """Whether all ranks know that it is not at work."""
    epoch: int = 0
    """Granted; 0: not yet."""
    base: int = 0
    """The chunk number that all ranks had agreed on last."""
    lines_per_chunk: int = 16
    trouble: int = _FINE
    reason: str = ""
    """Why something failed in this step, or the job rests."""
    seen: Status = field(default_factory=Status)

    def look(self) -> None:
        """Take up what has happened in the background."""
        if not self.epoch:
            try:
                grant = self.reducer.grant(0)
            except ReducerError as error:
                self.reason = "not_ready" if isinstance(error, TimedOutError) else error.kind
                return
            self.epoch, self.base, self.lines_per_chunk = grant.epoch, grant.first_chunk, grant.lines_per_chunk

    def note(self, error: ReducerError) -> None:
        """Something went wrong with a bucket while the job was at work."""
        self.reason = self.reason or error.kind
        self.trouble = max(self.trouble, _LOST if isinstance(error, FailedError) and error.lost else _BUCKET_FAILED)

    def ask_again(self) -> None:
        """All ranks ask at the same step, so that the reducer hears from all."""
        self.active, self.epoch = False, 0
        with contextlib.suppress(ReducerError):  # a driver that is at its end: then the job rests for good
            self.reducer.request(self.spec)


class ReducerEndpoint(Transport):
    """A reducer behind a URL.

    Parameters
    ----------
    url : ReducerUrl
        The same on all ranks.

    Attributes
    ----------
    jobs : dict
        Of this rank, in the order in which they were first needed, which is the same on all ranks.

    Raises
    ------
    AbsentError
        If the host in the URL is not known.
    """

    name = "endpoint"
    deferred = True  # nothing is launched then, but it is waited for
    may_fail = True

    def __init__(self, url: ReducerUrl) -> None:
        self.url = url.resolved()
        self.jobs: dict[_Key, _Job] = {}

    def attach(self, group: dist.ProcessGroup, own_group: dist.ProcessGroup | None) -> None:
        """Bind, and agree on the number of the first job; no other run of the same reducer may have it."""
        super().attach(group, own_group)
        self._result_bytes: dict[int, int] = {}
        drawn = int.from_bytes(os.urandom(2), "little") // _MOST_JOBS * _MOST_JOBS
        numbers = torch.tensor([drawn if self.rank == 0 else 0, int.from_bytes(os.urandom(6), "little")])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        self._first_job = int(numbers[0]) if self.url.job is None else self.url.job
        self._alarm = Alarm(f"reducer/{int(numbers[1])}")

    # ---- a bucket ----------------------------------------------------------------------------------------------

    def start(self, exchange: Exchange) -> torch.futures.Future[Any]:
        """Send the planes on their way, and gather envelopes."""
        tickets: list[tuple[_Job, Ticket | None] | None] = []
        for section in exchange.layout.sections:
            majority = section.result_format is ResultFormat.MAJORITY
            if majority and section.encoding.counts_negatives:
                # The reducer decides such a majority only if nobody abstains, which is not known yet. Its job and that
                # of the tally are both made now: in this thread, so in the same order on all ranks.
                self._job(section, True)
                self._job(section, False)
                tickets.append(None)
            else:
                tickets.append(self._submit(exchange, section, majority))
        exchange.scratch["tickets"] = tickets
        size = exchange.envelope_bytes
        message = self._buffer("message", exchange.index, size)
        exchange.write_envelope(message.numpy())
        gathered = self._buffer("gathered", exchange.index, size * self.world)
        exchange.scratch["gathered"] = gathered
        exchange.sent_bytes += (self.world - 1) * size
        future: torch.futures.Future[Any] = all_gather_single(
            gathered, message, group=self.group, async_op=True
        ).get_future()
        return future

    def finish(self, exchange: Exchange) -> BucketVotes:
        """Wait for the counts of all sections; all ranks have sent theirs by now."""
        messages = exchange.scratch["gathered"].numpy().reshape(self.world, -1)
        layout = exchange.layout
        envelopes = read_envelopes(list(messages), layout, exchange.index, exchange.step)
        majorities = [majority_is_sent(section, envelopes) for section in layout.sections]
        tickets = [
            ticket or self._submit(exchange, section, majority)
            for section, majority, ticket in zip(layout.sections, majorities, exchange.scratch["tickets"], strict=True)
        ]
        end = time.monotonic() + self.url.timeout
        votes, failed = [], None
        # Of a bucket that has failed the other sections are not waited for: it is redone as a whole.
        for (job, ticket), majority in zip(tickets, majorities, strict=True):
            if failed is None:
                try:
                    result = self._collect(job, ticket, end)
                except ReducerError as error:
                    failed = error
                    if not job.resting:
                        self._alarm.ring()
                else:
                    votes.append(SectionVotes(VotesKind.MAJORITY if majority else VotesKind.TALLY, result.planes))
            elif ticket is not None:
                job.note(FailedError("another section of the bucket failed"))
        if failed is not None:
            raise ReducerFailedError(f"bucket {exchange.index} of step {exchange.step}: {failed}") from failed
        self._result_bytes[exchange.index] = sum(each.words.nbytes for each in votes)
        return BucketVotes(envelopes, tuple(votes))

    def _submit(self, exchange: Exchange, section: Section, majority: bool) -> tuple[_Job, Ticket | None]:
        """Send a section's planes; no ticket if that cannot be."""
        job = self._job(section, majority)
        if not job.active:
            job.reason = job.reason or "not_ready"
            return job, None
        planes = section.planes(exchange.own)
        exchange.sent_bytes += planes.nbytes
        try:
            return job, job.reducer.submit(planes, self._abstains(exchange, section, job.lines_per_chunk))
        except ReducerError as error:
            job.note(error)
            return job, None

    def _abstains(self, exchange: Exchange, section: Section, lines: int) -> npt.NDArray[np.bool_] | None:
        """The chunks in which this rank is a voter of no segment."""
        entries = exchange.entries
        if all(entries[number][1] for number in section.segments):
            return None
        votes = np.zeros(section.words, bool)
        for number in section.segments:
            votes[exchange.layout.segments[number].words] = entries[number][1] > 0
        chunk = lines * WORDS_PER_LINE
        return ~np.logical_or.reduceat(votes, np.arange(0, section.words, chunk))

    def _collect(self, job: _Job, ticket: Ticket | None, end: float) -> Reduced:
        if ticket is None or not job.active:
            raise FailedError(f"{self.url.scheme} reducer, job {job.spec.job}: {job.reason or 'it rests'}", job.reason)
        if job.trouble:
            raise FailedError(f"a bucket before it failed: {job.reason}", job.reason)
        try:
            while True:
                try:
                    result = job.reducer.collect(ticket, min(_LISTEN, max(0.0, end - time.monotonic())))
                    break
                except TimedOutError:
                    if time.monotonic() >= end:
                        raise
                if self._alarm.rings():
                    raise FailedError("another rank has given up", "another_rank")
            if result.partial:
                raise FailedError("the reducer went on without some worker", "partial")
        except ReducerError as error:
            job.note(error)
            raise
        return result

    def _job(self, section: Section, majority: bool) -> _Job:
        """The job for a section, which is asked for when it is first needed, on all ranks at the same bucket."""
        margin = min(section.margin, self.world) if majority else 0
        # A majority's tally, sent where somebody abstains, has a job of its own: it is submitted in another thread.
        key = (section.encoding.name, section.result_format, majority, margin)
        job = self.jobs.get(key)
        if job is None:
            if len(self.jobs) == _MOST_JOBS:
                raise RuntimeError(f"more than {_MOST_JOBS} kinds of encoding, result format and margin in one run")
            spec = JobSpec(
                (self._first_job + len(self.jobs)) % (1 << 16),
                self.rank,
                self.world,
                section.encoding.name,
                "majority" if majority else "tally",
                margin,
                self.url.slots,
                self.url.lines,
            )
            # One time limit is enough to learn that nobody is there.
            waits = all(each.active and each.reducer.failure is None for each in self.jobs.values())
            job = self.jobs[key] = _Job(connect(self.url), spec)
            try:
                job.reducer.open_job(spec, self.url.open_timeout if waits else 0.0)
            except ReducerError as error:
                job.reason = error.kind
            else:
                job.look()
                job.active = True
        return job

    # ---- the end of a step -------------------------------------------------------------------------------------

    def told(self) -> list[int]:
        """Per job: epoch (as a minimum and as a maximum), trouble, its reason, and how many chunks were used."""
        values = []
        for job in self.jobs.values():
            job.look()
            failure = job.reducer.failure
            if job.epoch and failure is not None and not job.trouble:
                job.note(failure)
            used = (job.reducer.next_chunk - job.base) % _CHUNKS if job.epoch else 0
            values += [-job.epoch, job.epoch, job.trouble, _reason_number(job.reason), used]
        return values

    def concluded(self, told: Sequence[int]) -> list[str]:
        """What all ranks make of that; the reasons for which a job rests or a bucket of it failed."""
        reasons = []
        for number, job in enumerate(self.jobs.values()):
            low, epoch, trouble, reason, used = told[_TOLD * number : _TOLD * (number + 1)]
            if reason:
                reasons.append(REASONS[reason])
            alike = 0 < epoch == -low
            if trouble == _LOST:
                job.ask_again()
            elif alike:
                job.base = (job.base + used) % _CHUNKS
                if trouble or not job.active:
                    self._resume(job)
                job.active = True
            else:
                job.active = False
            job.resting = not job.active
            job.trouble, job.reason = _FINE, ""
        if reasons:
            self._alarm.reset()
        return sorted(set(reasons))

    def _resume(self, job: _Job) -> None:
        try:
            job.reducer.resume(job.base)
        except ReducerError:
            return  # it has got lost meanwhile; all hear of it at the end of the next step

    def buffer_bytes(self) -> int:
        """Those of the envelopes and of the drivers, and the results of a step."""
        drivers = sum(job.reducer.buffer_bytes() for job in list(self.jobs.values()))
        return super().buffer_bytes() + drivers + sum(list(self._result_bytes.values()))

    def load(self) -> Load:
        """The share of frames that were sent again, and latencies, since this was last asked; the worst of all jobs."""
        share, latencies = 0.0, np.zeros_like(Status().latencies)
        for job in self.jobs.values():
            now = job.reducer.status(0)
            new, job.seen = now.since(job.seen), now
            share = max(share, new.retransmission_share)
            latencies += new.latencies
        total = Status(latencies=latencies)
        seconds = {quantile: total.latency_s(quantile) for quantile in (0.5, 0.9, 0.95, 0.99, 0.999)}
        return Load(
            retransmission_share=share,
            latency_s={quantile: value for quantile, value in seconds.items() if value is not None},
        )

    def close(self) -> None:
        """Leave all jobs."""
        for job in self.jobs.values():
            job.reducer.close()


def _reason_number(reason: str) -> int:
    if not reason:
        return 0
    known = reason if reason in REASONS else "refused" if reason.startswith("refused") else "failed"
    return REASONS.index(known)
