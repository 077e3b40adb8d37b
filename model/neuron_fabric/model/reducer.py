"""The golden model: a sign-count reducer that obeys every rule of the protocol, bit for bit.

Frames go in one by one (:meth:`SignCountReducer.receive`), frames come out when asked for
(:meth:`SignCountReducer.poll`), time is told from outside (:meth:`SignCountReducer.advance`). The numbers in comments
are those of the rules in ``docs/protocol.md``.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from neuron_fabric.model import bitplane
from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.slot import SlotVersion
from neuron_fabric.model.wire import (
    DESTINATION_ALL,
    HEADER_BYTES,
    Flags,
    FrameType,
    Header,
    HeaderError,
    Reason,
    serial_newer,
)

__all__ = ["BITMAP_BYTES", "JobConfig", "Outgoing", "Parent", "SignCountReducer", "Straggler", "check_job"]

ResultFormat = Literal["tally", "majority"]

BITMAP_BYTES = 64
"""A PARTIAL result ends with one line: bit ``w`` is set where worker ``w`` is counted in the tally."""

_TO_PARENT = -1
"""Key of the pending bit that stands for the parent reducer."""

_MAX_TIMEOUT = 1 << 31
"""Half a turn of a 32-bit clock, so that a timeout that has passed is noticed before the clock has come round."""


@dataclass(frozen=True)
class Parent:
    """Where a child reducer of a tree sends its tallies: as ``worker`` of ``job`` at ``address``.

    ``leaves`` is the most workers below any child of that parent: it fixes how many planes go up.
    """

    address: Hashable
    job: int
    worker: int
    epoch: int
    leaves: int


@dataclass(frozen=True)
class Straggler:
    """Complete a chunk ``timeout`` ticks (1 to 2**31) after it was claimed, if there are ``quorum`` voters."""

    timeout: int
    quorum: int


@dataclass(frozen=True)
class JobConfig:
    """One job, as a controller opens it.

    Parameters
    ----------
    job, epoch : int
        16 bits each.
    members : iterable of int, or mapping of int to address
        The workers. With a mapping each worker's address is pinned: a frame from elsewhere is refused.
    encoding : Encoding
    result_format : "tally" or "majority"
    margin : int
        For ``majority``: an element is nonzero where ``|S| > margin``.
    straggler : Straggler, optional
        Only for one-plane jobs without a parent.
    parent : Parent, optional
        Makes this reducer a child: its tallies go up, what the parent answers is relayed down.
    multicast : bool
        One result addressed to all, or one result per member.
    base : int
        The first of the reducer's slots that the job has, a multiple of their number.
    slots : int, optional
        Their number S, a power of two; by default all. A chunk's slot is ``base + chunk mod S``, its version
        ``(chunk div S) mod 2``.
    """

    job: int
    epoch: int
    members: Mapping[int, Hashable] | Iterable[int]
    encoding: Encoding
    result_format: ResultFormat = "tally"
    margin: int = 0
    straggler: Straggler | None = None
    parent: Parent | None = None
    multicast: bool = True
    base: int = 0
    slots: int | None = None

    def __post_init__(self) -> None:
        # A one-shot iterable would be empty the second time it is looked at.
        members = dict(self.members) if isinstance(self.members, Mapping) else tuple(self.members)
        object.__setattr__(self, "members", members)

    def slot_count(self, params: ReducerParams) -> int:
        """S, the number of slots that the job has in a reducer of these sizes."""
        return params.slots if self.slots is None else self.slots

    @property
    def result_planes(self) -> int:
        """Planes of a result; of what goes up, in a child."""
        if self.result_format == "majority":
            return 2
        if self.parent is not None:
            return self.encoding.tally_bits(-(-self.parent.leaves // self.encoding.leaves))
        return self.encoding.tally_bits(len(tuple(self.members)))


@dataclass(frozen=True)
class Outgoing:
    """A frame to send: UDP payload and where to (None: to every member)."""

    address: Hashable | None
    payload: bytes

    @property
    def header(self) -> Header:
        """The parsed header."""
        return Header.unpack(self.payload)

    @property
    def body(self) -> bytes:
        """What follows the header."""
        return self.payload[HEADER_BYTES:]


@dataclass
class _SlotVersion(SlotVersion):
    """A slot version with what only frames need; a seen bit stands for a plane."""

    missing: int = 0
    partial: bool = False
    claimed_at: int = 0
    pending: dict[int, None] = field(default_factory=dict)  # destinations, in the order in which they became due


class _Job:
    """An open job and its slots."""

    def __init__(self, config: JobConfig, params: ReducerParams) -> None:
        self.config = config
        self.members: dict[int, Hashable | None] = (
            dict(config.members) if isinstance(config.members, Mapping) else dict.fromkeys(config.members)
        )
        self.all_planes = (1 << config.encoding.planes) - 1
        count = config.slot_count(params)
        self.slots = [[_SlotVersion.empty(params) for _version in range(2)] for _slot in range(count)]

    def place(self, chunk: int) -> tuple[int, int]:
        """A chunk's slot, counted from the job's first one, and its version."""
        return chunk % len(self.slots), chunk // len(self.slots) % 2

    def state(self, chunk: int) -> _SlotVersion:
        """Where a chunk is kept."""
        slot, version = self.place(chunk)
        return self.slots[slot][version]

    @property
    def incomplete(self) -> int:
        """Slot versions that hold an incomplete chunk."""
        return sum(state.valid and not state.complete for versions in self.slots for state in versions)


def check_job(config: JobConfig, params: ReducerParams, beside: Iterable[JobConfig] = ()) -> None:
    """Whether a reducer of these sizes can run a job beside the open ones, whatever endpoint is around it.

    A job in ``beside`` of the same number is the one that is reopened.

    Raises
    ------
    ValueError
        Names what does not fit.
    """
    _check_alone(config, params)
    where = f"job {config.job}"
    others = []
    for other in beside:
        if other.job != config.job:
            others.append(other)
        elif config.epoch <= other.epoch:
            raise ValueError(
                f"{where} is open with epoch {other.epoch}; reopening needs a higher one, not {config.epoch}"
            )
    if len(others) >= params.jobs:
        raise ValueError(f"{where}: {len(others)} jobs are open; this reducer has {params.jobs} job banks")
    mine = range(config.base, config.base + config.slot_count(params))
    for other in others:
        theirs = range(other.base, other.base + other.slot_count(params))
        if mine.start < theirs.stop and theirs.start < mine.stop:
            raise ValueError(
                f"{where}: slots {mine.start} to {mine.stop - 1} overlap slots {theirs.start} to {theirs.stop - 1} of "
                f"job {other.job}"
            )
        if config.parent is not None and other.parent is not None and config.parent.job == other.parent.job:
            raise ValueError(
                f"{where}: job {other.job} is a child of the parent's job {config.parent.job}, too, and what that "
                "answers could not be told apart"
            )


def _check_alone(config: JobConfig, params: ReducerParams) -> None:
    encoding = config.encoding
    where = f"job {config.job}"
    for name in ("job", "epoch"):
        _check_bits(where, name, getattr(config, name))
    members = [operator.index(worker) for worker in config.members]
    if not members:
        raise ValueError(f"{where}: no members")
    for worker in members:
        if not 0 <= worker < params.workers:
            raise ValueError(f"{where}: worker {worker} is out of range; this reducer has {params.workers} workers")
    if len(set(members)) != len(members):
        raise ValueError(f"{where}: a worker is listed twice in {members}")
    if encoding.planes > params.max_planes:
        raise ValueError(
            f"{where}: encoding {encoding.name!r} has {encoding.planes} planes; this reducer takes {params.max_planes}"
        )
    for plane, weight in enumerate(encoding.weights):
        if encoding.shift(plane) > params.max_shift:
            raise ValueError(
                f"{where}: encoding {encoding.name!r} has weight {weight} in plane {plane}; the greatest that this "
                f"reducer takes is {1 << params.max_shift}"
            )
    encoding.check_fits(len(members), params.acc_bits)
    _check_bits(where, "the number of leaves", len(members) * encoding.leaves)
    if config.result_format not in ("tally", "majority"):
        raise ValueError(f"{where}: result format is tally or majority, not {config.result_format!r}")
    greatest = (1 << min(params.acc_bits, 16)) - 1
    if not 0 <= operator.index(config.margin) <= greatest:
        raise ValueError(f"{where}: margin must be 0 to {greatest}, not {config.margin}")
    _check_slots(where, config.base, config.slot_count(params), params)
    if config.parent is not None:
        _check_parent(where, config, config.parent, len(members))
    if config.result_planes > params.acc_bits and config.result_format == "tally":
        raise ValueError(
            f"{where}: a result takes {config.result_planes} planes; the accumulator has {params.acc_bits} bits"
        )
    if config.straggler is not None:
        if params.lanes < params.workers:
            raise ValueError(
                f"{where}: the straggler rule needs a lane for each of {params.workers} workers, whom a PARTIAL result "
                f"lists in one beat; this reducer has {params.lanes}"
            )
        if encoding.planes != 1:
            raise ValueError(f"{where}: the straggler rule needs a one-plane encoding, not {encoding.name!r}")
        if config.parent is not None:
            raise ValueError(f"{where}: the straggler rule is for reducers without a parent")
        if not 1 <= operator.index(config.straggler.quorum) <= len(members):
            raise ValueError(f"{where}: quorum must be 1 to {len(members)}, not {config.straggler.quorum}")
        if not 1 <= operator.index(config.straggler.timeout) <= _MAX_TIMEOUT:
            raise ValueError(f"{where}: timeout must be 1 to {_MAX_TIMEOUT} ticks, not {config.straggler.timeout}")


def _check_bits(where: str, name: str, value: int) -> None:
    if not 0 <= operator.index(value) <= 0xFFFF:
        raise ValueError(f"{where}: {name} has 16 bits; {value} does not fit")


def _check_slots(where: str, base: int, count: int, params: ReducerParams) -> None:
    if operator.index(count) < 1 or count & (count - 1):
        raise ValueError(f"{where}: slots must be a power of two, not {count}")
    if not 0 <= operator.index(base) <= params.slots - count or base % count:
        raise ValueError(
            f"{where}: {count} slots from slot {base} on are not among the {params.slots} of this reducer, or do not "
            "begin at a multiple of their number"
        )


def _check_parent(where: str, config: JobConfig, parent: Parent, members: int) -> None:
    for name in ("job", "epoch", "worker"):
        _check_bits(where, f"the parent's {name}", getattr(parent, name))
    if parent.worker == DESTINATION_ALL:
        raise ValueError(f"{where}: worker {parent.worker:#x} of the parent stands for all")
    if config.result_format != "tally":
        raise ValueError(f"{where}: a child reducer sends tallies; only the root can decide a majority")
    leaves = members * config.encoding.leaves
    if parent.leaves < leaves:
        raise ValueError(
            f"{where}: {leaves} workers are below this reducer, more than the {parent.leaves} that its parent was told"
        )


class SignCountReducer:
    """The reference reducer.

    Parameters
    ----------
    params : ReducerParams
        Sizes; the open jobs share ``params.slots`` slots.
    nack_queue : int
        NACKs waiting to be sent; further ones are dropped and counted.
    relay_queue : int
        Frames of a parent waiting to be relayed to the members; further ones are dropped and counted, and asked for
        again by the workers' retransmissions.

    Attributes
    ----------
    counters : collections.Counter
        By the names of the register table. ``slot_high_water`` is a maximum: the most slot versions that held an
        incomplete chunk after a frame; :meth:`clear_counters` keeps it right.
    """

    def __init__(self, params: ReducerParams, *, nack_queue: int = 16, relay_queue: int = 64) -> None:
        self.params = params
        self.counters: Counter[str] = Counter()
        self._jobs: dict[int, _Job] = {}
        self._nacks: deque[Outgoing] = deque()
        self._relays: deque[Outgoing] = deque()
        self._nack_queue = nack_queue
        self._relay_queue = relay_queue
        self._due: dict[tuple[int, int, int], None] = {}  # (job, slot, version) with pending results, oldest first
        self._now = 0
        self._level = 0  # slot versions that hold an incomplete chunk

    # ---- control -----------------------------------------------------------------------------------------------

    def open(self, config: JobConfig) -> None:
        """Open a job, or reopen it with a newer epoch. ``ValueError`` names what does not fit: :func:`check_job`."""
        check_job(config, self.params, (job.config for job in self._jobs.values()))
        self.close(config.job)
        self._jobs[config.job] = _Job(config, self.params)

    def close(self, job: int) -> None:
        """Forget a job and free its slots (rule 6). Closing a job that is not open does nothing."""
        closed = self._jobs.pop(job, None)
        if closed is not None:
            self._level -= closed.incomplete
        self._due = {key: None for key in self._due if key[0] != job}
        self._relays = deque(relay for relay in self._relays if relay.header.job != job)

    def reset(self) -> None:
        """Forget everything but the counters (rule 6)."""
        self._level = 0
        self._jobs.clear()
        self._due.clear()
        self._nacks.clear()
        self._relays.clear()

    def clear_counters(self) -> None:
        """Set all counters to 0, and ``slot_high_water`` to what is held now."""
        self.counters.clear()
        self._note_level()

    # ---- input -------------------------------------------------------------------------------------------------

    def receive(
        self,
        payload: bytes | bytearray | memoryview,
        sender: Hashable | None = None,
        *,
        checksum_ok: bool = True,
    ) -> Reason:
        """Take one frame (a UDP payload) and apply it.

        Returns the reason for which it was refused, or ``Reason.NONE``; a duplicate is not refused.
        """
        self.counters["frames"] += 1
        if not checksum_ok:
            # Nothing in the frame can be trusted, so nobody can be told.
            return self._refuse(None, Reason.BAD_CHECKSUM, sender)
        try:
            header = Header.unpack(payload)
        except HeaderError as error:
            return self._refuse(None, error.reason, sender)
        reason = self._validate(header, len(payload) - HEADER_BYTES, sender)
        if reason is not Reason.NONE:
            return self._refuse(header, reason, sender)
        if header.type is FrameType.RESULT:
            child = self._child(header)
            if child is not None:
                self._relay(child, header, bytes(payload[HEADER_BYTES:]))
            return Reason.NONE
        return self._contribute(self._jobs[header.job], header, payload, sender)

    def _child(self, header: Header) -> _Job | None:
        """The job that is a member of the job that a parent's RESULT names, if the result is meant for it."""
        for job in self._jobs.values():
            parent = job.config.parent
            if parent is not None and parent.job == header.job and header.worker in (parent.worker, DESTINATION_ALL):
                return job
        return None

    def _validate(self, header: Header, body: int, sender: Hashable | None) -> Reason:
        """Rule 1; the first failing check counts."""
        kind = header.type
        if kind is FrameType.RESULT and any(job.config.parent is not None for job in self._jobs.values()):
            return self._validate_result(header, body, sender)
        if kind not in (FrameType.CONTRIBUTE, FrameType.ABSTAIN):
            return Reason.BAD_TYPE
        if body != (0 if kind is FrameType.ABSTAIN else header.lines * self.params.line_bytes):
            return Reason.BAD_LENGTH
        job = self._jobs.get(header.job)
        if job is None:
            return Reason.JOB_NOT_OPEN
        config = job.config
        if header.epoch != config.epoch:
            return Reason.WRONG_EPOCH
        if not self._pinned(job, header.worker, sender):
            return Reason.WRONG_SENDER
        if header.planes != config.encoding.planes or header.plane >= config.encoding.planes:
            return Reason.BAD_PLANE
        if not 1 <= header.lines <= self.params.lines_per_chunk:
            return Reason.BAD_LINES
        if kind is FrameType.CONTRIBUTE and not 1 <= header.voters <= config.encoding.leaves:
            return Reason.BAD_VOTERS
        return Reason.NONE

    def _validate_result(self, header: Header, body: int, sender: Hashable | None) -> Reason:
        """The same checks for what a parent answers; it is known by the job, worker and epoch at the parent."""
        bitmap = BITMAP_BYTES if header.flags & Flags.PARTIAL else 0
        if body != header.lines * self.params.line_bytes + bitmap:
            return Reason.BAD_LENGTH
        child = self._child(header)
        parent = None if child is None else child.config.parent
        if parent is None:
            return Reason.JOB_NOT_OPEN
        if header.epoch != parent.epoch:
            return Reason.WRONG_EPOCH
        if sender != parent.address:
            return Reason.WRONG_SENDER
        return Reason.NONE

    @staticmethod
    def _pinned(job: _Job, worker: int, sender: Hashable | None) -> bool:
        return worker in job.members and job.members[worker] in (None, sender)

    def _refuse(self, header: Header | None, reason: Reason, sender: Hashable | None) -> Reason:
        self.counters["stale" if reason is Reason.STALE else f"refused_{reason.name.lower()}"] += 1
        job = self._jobs.get(header.job) if header is not None else None
        if header is None or job is None or header.type is FrameType.RESULT:
            return reason
        if not self._pinned(job, header.worker, sender):
            return reason
        if len(self._nacks) >= self._nack_queue:
            self.counters["nacks_dropped"] += 1
            return reason
        nack = Header(
            FrameType.NACK,
            header.job,
            header.worker,
            header.chunk,
            header.plane,
            header.planes,
            0,
            header.lines,
            header.epoch,
            reason=reason,
        )
        self._nacks.append(Outgoing(job.members[header.worker], nack.pack()))
        return reason

    def _contribute(
        self, job: _Job, header: Header, payload: bytes | bytearray | memoryview, sender: Hashable | None
    ) -> Reason:
        state = job.state(header.chunk)
        worker = header.worker
        abstain = header.type is FrameType.ABSTAIN
        planes = job.all_planes if abstain else 1 << header.plane

        if state.valid and header.chunk != state.chunk:
            if not serial_newer(header.chunk, state.chunk):
                return self._refuse(header, Reason.STALE, sender)
            if not state.complete:
                self.counters["abandoned"] += 1
        if not state.valid or header.chunk != state.chunk:
            self._level += not state.valid or state.complete
            self._claim(job, state, header)
            self._due.pop((header.job, *job.place(header.chunk)), None)

        if header.lines != state.lines:
            return self._refuse(header, Reason.LINES_DIFFER, sender)
        seen = state.seen.get(worker, 0)
        if state.complete or seen & planes == planes:
            # Rule 2, and rule 5 for one who comes after the straggler timeout.
            self.counters["late" if state.partial and not seen else "duplicates"] += 1
            if state.complete:
                self._due_to(state, header, _TO_PARENT if job.config.parent is not None else worker)
            return Reason.NONE
        if abstain and seen:
            return self._refuse(header, Reason.ABSTAIN_AFTER_VOTE, sender)

        if abstain:
            state.abstained.add(worker)
        else:
            if not seen:
                state.voters += header.voters  # once per worker, however many planes (rule 7)
            self._accumulate(job, state, header, payload)
        state.seen[worker] = seen | planes
        self._complete_if(job, state, header)
        self._note_level()
        return Reason.NONE

    def _claim(self, job: _Job, state: _SlotVersion, header: Header) -> None:
        """Rule 3: take the version over, whatever it holds."""
        state.claim(header.chunk, header.lines)
        state.pending.clear()
        state.missing, state.partial = 0, False
        state.claimed_at = self._now

    def _accumulate(
        self, job: _Job, state: _SlotVersion, header: Header, payload: bytes | bytearray | memoryview
    ) -> None:
        plane = bitplane.from_lines(memoryview(payload)[HEADER_BYTES:], header.lines, self.params.line_bytes)
        state.add(0, plane, job.config.encoding, header.plane)
        self.counters["lines"] += header.lines

    def _complete_if(self, job: _Job, state: _SlotVersion, header: Header) -> None:
        """Rule 4."""
        if all(state.seen.get(worker) == job.all_planes for worker in job.members):
            self._complete(job, state, header.job)

    def _complete(self, job: _Job, state: _SlotVersion, number: int) -> None:
        state.finish()
        self.counters["completed"] += 1
        if job.config.parent is not None:
            destinations: Iterable[int] = (_TO_PARENT,)
        else:
            destinations = (DESTINATION_ALL,) if job.config.multicast else job.members
        state.pending.update(dict.fromkeys(destinations))
        self._level -= 1
        self._due[number, *job.place(state.chunk)] = None

    def _due_to(self, state: _SlotVersion, header: Header, destination: int) -> None:
        if DESTINATION_ALL not in state.pending:
            state.pending[destination] = None
            self._due[header.job, *self._jobs[header.job].place(state.chunk)] = None

    def _note_level(self) -> None:
        if self._level:
            self.counters["slot_high_water"] = max(self.counters["slot_high_water"], self._level)

    # ---- time --------------------------------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        """Tell the time, in ticks; applies the straggler rule (rule 5)."""
        self._now = now
        for number, job in self._jobs.items():
            rule = job.config.straggler
            if rule is None:
                continue
            for versions in job.slots:
                for state in versions:
                    if (
                        state.valid
                        and not state.complete
                        and now - state.claimed_at >= rule.timeout
                        and state.voters >= rule.quorum
                    ):
                        state.partial = True
                        state.missing = len(job.members) - len(state.seen)
                        self.counters["partial"] += 1
                        self._complete(job, state, number)

    # ---- output ------------------------------------------------------------------------------------------------

    def poll(self) -> list[Outgoing]:
        """Every frame that is waiting: NACKs, what a parent answered, and results."""
        frames = [*self._nacks, *self._relays]
        self.counters["nacks"] += len(self._nacks)
        self._nacks.clear()
        self._relays.clear()
        while self._due:
            number, slot, version = next(iter(self._due))
            del self._due[number, slot, version]
            job = self._jobs[number]
            state = job.slots[slot][version]
            for destination in state.pending:
                frames += self._frames(job, state, destination)
                self.counters["results"] += 1
            state.pending.clear()
        return frames

    def _frames(self, job: _Job, state: _SlotVersion, destination: int) -> Iterator[Outgoing]:
        if destination == _TO_PARENT:
            yield from self._upward(job, state)
            return
        config = job.config
        flags = Flags.NONE
        if config.result_format == "majority":
            flags |= Flags.MAJORITY
            planes: bitplane.Words | tuple[bitplane.Words, ...] = state.majority_planes(config.encoding, config.margin)
        else:
            planes = state.tally_planes(config.result_planes)
        tail = b""
        if state.partial:
            flags |= Flags.PARTIAL
            counted = sum(1 << worker for worker in state.seen if worker not in state.abstained)
            tail = counted.to_bytes(BITMAP_BYTES, "little")
        if destination != DESTINATION_ALL and config.multicast:
            flags |= Flags.RESEND
        for index, plane in enumerate(planes):
            header = Header(
                FrameType.RESULT,
                config.job,
                destination,
                state.chunk,
                index,
                len(planes),
                state.voters,
                state.lines,
                config.epoch,
                flags,
                state.missing,
            )
            body = bitplane.to_lines(plane, self.params.line_bytes)
            address = None if destination == DESTINATION_ALL else job.members[destination]
            yield Outgoing(address, header.pack() + body + tail)

    def _upward(self, job: _Job, state: _SlotVersion) -> Iterator[Outgoing]:
        """Rule 7: a completed tally goes up as one worker's contribution; no voter below, an abstention."""
        parent = job.config.parent
        if parent is None:
            raise RuntimeError(f"job {job.config.job} has no parent")
        planes = job.config.result_planes
        kind = FrameType.CONTRIBUTE if state.voters else FrameType.ABSTAIN
        for index in range(planes if state.voters else 1):
            header = Header(
                kind,
                parent.job,
                parent.worker,
                state.chunk,
                index,
                planes,
                state.voters,
                state.lines,
                parent.epoch,
            )
            body = bitplane.to_lines(state.tally[index, : state.lines], self.params.line_bytes)
            yield Outgoing(parent.address, header.pack() + (body if state.voters else b""))

    def _relay(self, job: _Job, header: Header, body: bytes) -> None:
        """Rule 7: what the parent answers goes to the members unstored."""
        if len(self._relays) >= self._relay_queue:
            self.counters["relays_dropped"] += 1
            return
        down = Header(
            FrameType.RESULT,
            job.config.job,
            DESTINATION_ALL,
            header.chunk,
            header.plane,
            header.planes,
            header.voters,
            header.lines,
            job.config.epoch,
            header.flags & (Flags.MAJORITY | Flags.PARTIAL),
            header.missing,
        )
        self._relays.append(Outgoing(None, down.pack() + body))
