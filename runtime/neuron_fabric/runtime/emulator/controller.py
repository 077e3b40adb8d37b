"""The controller of a reducer: who may use it, with what slots, under which epoch.

It answers OPEN, CLOSE and STATUS (``docs/protocol.md``) and has neither socket nor clock: the caller brings frames with
the address they came from and the time, and sends what is returned. What it controls is a :class:`Device`: the
emulator's engine, or hardware behind registers (:class:`~neuron_fabric.runtime.emulator.csr.CsrDevice`).
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from neuron_fabric.model.control import (
    ENCODINGS,
    NO_FIELD,
    OPEN_FIELDS,
    RESULT_FORMATS,
    Close,
    ControlError,
    Grant,
    JobState,
    Open,
    StatusReply,
    StatusRequest,
    control_frame,
    first_difference,
)
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, HeaderError, Reason, serial_newer
from neuron_fabric.runtime.emulator.slots import SlotRanges

__all__ = ["Controller", "ControllerLimits", "Device"]

Address = Hashable
Replies = list[tuple[bytes, Address]]

_MAX_EPOCH = 0xFFFF
_INDEX = {item.name: index for index, item in enumerate(OPEN_FIELDS)}


class Device(Protocol):
    """A reducer as a controller sees it."""

    params: ReducerParams
    multicast: bool
    """Whether one result goes to all members, or one to each."""

    def open(self, config: JobConfig) -> None:
        """Open a job, or reopen it with a newer epoch. ``ValueError`` names what does not fit."""

    def close(self, job: int) -> None:
        """Close a job and free its slots."""

    def counters(self) -> dict[str, int]:
        """Counters by the names of the register table."""

    def activity(self, job: int) -> int:
        """A number that goes up while the job is used."""


@dataclass(frozen=True)
class ControllerLimits:
    """How much a controller gives, and for how long.

    Parameters
    ----------
    quota : int, optional
        The most slots of one job, a power of two; by default the slots over the job banks, so that the last job to come
        gets as many as the first.
    idle : float
        Seconds after which a job that nobody uses is closed.
    patience : float
        Seconds after which an OPEN that is not repeated is forgotten.
    openings : int
        Jobs that may be waiting for members at once.
    """

    quota: int | None = None
    idle: float = 300.0
    patience: float = 5.0
    openings: int = 64

    def __post_init__(self) -> None:
        if self.quota is not None and (self.quota < 1 or self.quota & (self.quota - 1)):
            raise ValueError(f"quota must be a power of two, not {self.quota}")
        for name in ("idle", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if self.openings < 1:
            raise ValueError(f"openings must be at least 1, not {self.openings}")


@dataclass
class _Request:
    """What one worker asked for."""

    wants: Open
    address: Address
    epoch: int
    seen: float
    answered: float | None = None


@dataclass
class _Opening:
    """A job whose members are coming together."""

    requests: dict[int, _Request] = field(default_factory=dict)

    @property
    def reference(self) -> Open:
        """What the lowest worker wants; the others are compared with it."""
        return self.requests[min(self.requests)].wants


@dataclass
class _Served:
    """A job that is open."""

    config: JobConfig
    lines: int
    first_chunk: int
    nonces: dict[int, int]
    addresses: dict[int, Address]
    used: float
    activity: int = 0
    closed: set[int] = field(default_factory=set)


class Controller:
    """Opens and closes jobs at a device.

    Parameters
    ----------
    device : Device
    trusted : callable, optional
        Which addresses, other than those of members, may ask for STATUS; by default all.
    limits : ControllerLimits

    Attributes
    ----------
    uptime_nonce : int
        64 random bits: a restart is another number.
    events : collections.Counter
        What happened: grants, closed, idle, refusals by reason, frames that were ignored.
    """

    def __init__(
        self,
        device: Device,
        *,
        trusted: Callable[[Address], bool] = lambda _address: True,
        limits: ControllerLimits | None = None,
    ) -> None:
        self.device = device
        self.limits = limits or ControllerLimits()
        self.uptime_nonce = secrets.randbits(64)
        self.events: Counter[str] = Counter()
        params = device.params
        share = params.slots // params.jobs
        # A share need not be a power of two; the greatest one in it is.
        self.quota = min(self.limits.quota or 1 << max(share.bit_length() - 1, 0), params.slots)
        self._trusted = trusted
        self._ranges = SlotRanges(params.slots)
        self._openings: dict[int, _Opening] = {}
        self._served: dict[int, _Served] = {}
        self._epochs: dict[int, int] = {}
        # Nonces that were used up: a delayed OPEN must not begin an opening that nobody wants any more.
        self._retired: OrderedDict[tuple[int, int], deque[int]] = OrderedDict()

    # ---- what others see ---------------------------------------------------------------------------------------

    @property
    def slots_used(self) -> int:
        """Slots of all open jobs."""
        return self._ranges.used

    @property
    def jobs(self) -> dict[int, JobConfig]:
        """The open jobs."""
        return {number: served.config for number, served in self._served.items()}

    def state(self, job: int) -> JobState:
        """Where a job stands."""
        if job in self._served:
            return JobState.REOPENING if job in self._openings else JobState.OPEN
        return JobState.WAITING if job in self._openings else JobState.NONE

    # ---- frames ------------------------------------------------------------------------------------------------

    def receive(self, payload: bytes, address: Address, now: float) -> Replies:
        """Take one control frame, a UDP payload; the frames to send, with where to.

        Nothing that comes raises: what cannot be read is counted, and answered only if it is an OPEN.
        """
        try:
            header = Header.unpack(payload)
        except HeaderError:
            return self._ignore("unreadable")
        body = payload[HEADER_BYTES:]
        if header.type is FrameType.OPEN:
            return self._open(header, body, address, now)
        if header.type is FrameType.CLOSE:
            return self._close(header, body, address)
        if header.type is FrameType.STATUS:
            return self._status(header, body, address, now)
        return self._ignore("no_control_frame")

    def tick(self, now: float) -> None:
        """Forget openings that nobody pursues, close jobs that nobody uses. To be called about once a second."""
        for job, opening in list(self._openings.items()):
            self._forget_stale(job, opening, now)
        for job, served in list(self._served.items()):
            activity = self.device.activity(job)
            if activity != served.activity:
                served.activity, served.used = activity, now
            elif now - served.used >= self.limits.idle:
                self.events["idle"] += 1
                self._end(job)

    def close_all(self) -> None:
        """Close every job: the controller stops."""
        for job in list(self._served):
            self._end(job)
        self._openings.clear()

    def _ignore(self, why: str) -> Replies:
        self.events[f"ignored_{why}"] += 1
        return []

    # ---- OPEN --------------------------------------------------------------------------------------------------

    def _open(self, header: Header, body: bytes, address: Address, now: float) -> Replies:
        try:
            wants = Open.unpack(body)
        except ControlError as error:
            return self._refuse(header, 0, address, error.reason, error.field)
        job, worker = header.job, header.worker
        served = self._served.get(job)
        if served is not None and served.nonces.get(worker) == wants.nonce:
            if served.addresses[worker] != address:
                return self._refuse(header, wants.nonce, address, Reason.WRONG_SENDER)
            return [self._grant(job, served, worker)]
        if wants.nonce in self._retired.get((job, worker), ()):
            return self._ignore("retired")
        problem = self._problem(worker, wants)
        if problem is not None:
            return self._refuse(header, wants.nonce, address, *problem)
        opening = self._openings.get(job)
        if opening is None:
            if len(self._openings) >= self.limits.openings:
                return self._refuse(header, wants.nonce, address, Reason.NO_CAPACITY)
            opening = self._openings[job] = _Opening()
        before = opening.requests.get(worker)
        if before is not None and before.wants.nonce != wants.nonce:
            self._retire(job, worker, before.wants.nonce)
            before = None
        answered = before.answered if before is not None else None
        opening.requests[worker] = _Request(wants, address, header.epoch, now, answered)
        self._forget_stale(job, opening, now)
        return self._advance(header, opening, now)

    def _problem(self, worker: int, wants: Open) -> tuple[Reason, int] | None:
        """What this reducer cannot do, whoever else comes."""
        params, encoding = self.device.params, ENCODINGS[wants.encoding]
        if wants.members > params.workers:
            return Reason.NO_CAPACITY, _INDEX["members"]
        if worker >= wants.members:
            return Reason.BAD_VALUE, _INDEX["members"]
        if not self._encodings() >> wants.encoding & 1:
            return Reason.BAD_VALUE, _INDEX["encoding"]
        if encoding.tally_bits(wants.members) > params.acc_bits:
            return Reason.OVERFLOW, _INDEX["members"]
        if wants.margin >= 1 << min(params.acc_bits, 16):
            return Reason.BAD_VALUE, _INDEX["margin"]
        return None

    def _advance(self, header: Header, opening: _Opening, now: float) -> Replies:
        """Grant, if this was the last member; else tell the one that has just come how it stands."""
        request = opening.requests[header.worker]
        nonce, address = request.wants.nonce, request.address
        for other in opening.requests.values():
            index = first_difference(opening.reference, other.wants)
            if index is not None:
                return self._refuse(header, nonce, address, Reason.DISAGREES, index)
        if len(opening.requests) == request.wants.members:
            return self._complete(header, opening, now)
        if request.answered is not None and now - request.answered < 1:
            return []
        request.answered = now
        return self._refuse(header, nonce, address, Reason.NOT_READY, present=len(opening.requests))

    def _complete(self, header: Header, opening: _Opening, now: float) -> Replies:
        job, requests = header.job, dict(sorted(opening.requests.items()))
        nonce, address = requests[header.worker].wants.nonce, requests[header.worker].address
        wants = opening.reference
        served = self._served.get(job)
        epoch = 1 + max(self._epochs.get(job, 0), *(request.epoch for request in requests.values()))
        if epoch > _MAX_EPOCH:
            return self._refuse(header, nonce, address, Reason.NO_EPOCH)
        if served is None and len(self._served) >= self.device.params.jobs:
            return self._refuse(header, nonce, address, Reason.NO_CAPACITY)
        if served is not None:
            self._end(job)
        slots = min(wants.slots, self.quota, self._ranges.largest())
        base = self._ranges.take(slots) if slots else None
        if base is None:
            return self._refuse(header, nonce, address, Reason.NO_CAPACITY, _INDEX["slots"])
        config = JobConfig(
            job,
            epoch,
            {worker: request.address for worker, request in requests.items()},
            ENCODINGS[wants.encoding],
            "majority" if RESULT_FORMATS[wants.result_format] == "majority" else "tally",
            wants.margin,
            multicast=self.device.multicast,
            base=base,
            slots=slots,
        )
        try:
            self.device.open(config)
        except ValueError:
            # The device knows more than its sizes tell; what it refuses is refused to the members.
            self._ranges.give_back(base)
            self.events["device_refused"] += 1
            return self._refuse(header, nonce, address, Reason.BAD_VALUE)
        first = requests[min(requests)].wants.next_chunk
        for request in requests.values():
            if serial_newer(request.wants.next_chunk, first):
                first = request.wants.next_chunk
        del self._openings[job]
        self._epochs[job] = epoch
        self._served[job] = served = _Served(
            config,
            min(wants.lines_per_chunk, self.device.params.lines_per_chunk),
            first,
            {worker: request.wants.nonce for worker, request in requests.items()},
            {worker: request.address for worker, request in requests.items()},
            now,
            self.device.activity(job),
        )
        self.events["granted"] += 1
        return [self._grant(job, served, worker) for worker in requests]

    def _grant(self, job: int, served: _Served, worker: int) -> tuple[bytes, Address]:
        config = served.config
        members = len(served.nonces)
        grant = Grant(
            served.nonces[worker],
            self.device.params.workers,
            self.device.params.acc_bits,
            self._encodings(),
            config.slot_count(self.device.params),
            served.first_chunk,
            members,
            members,
            served.lines,
            config.result_planes,
        )
        return control_frame(grant, job=job, worker=worker, epoch=config.epoch), served.addresses[worker]

    def _refuse(
        self, header: Header, nonce: int, address: Address, reason: Reason, detail: int = NO_FIELD, present: int = 0
    ) -> Replies:
        self.events[f"refused_{reason.name.lower()}"] += 1
        params = self.device.params
        grant = Grant(nonce, params.workers, params.acc_bits, self._encodings(), present=present, detail=detail)
        frame = control_frame(grant, job=header.job, worker=header.worker, epoch=header.epoch, reason=reason)
        return [(frame, address)]

    def _encodings(self) -> int:
        params = self.device.params
        return sum(
            1 << index
            for index, encoding in enumerate(ENCODINGS)
            if encoding.planes <= params.max_planes
            and all(encoding.shift(plane) <= params.max_shift for plane in range(encoding.planes))
        )

    def _forget_stale(self, job: int, opening: _Opening, now: float) -> None:
        for worker, request in list(opening.requests.items()):
            if now - request.seen >= self.limits.patience:
                del opening.requests[worker]
                self.events["forgotten"] += 1
        if not opening.requests:
            self._openings.pop(job, None)

    def _retire(self, job: int, worker: int, nonce: int) -> None:
        nonces = self._retired.setdefault((job, worker), deque(maxlen=4))
        nonces.append(nonce)
        self._retired.move_to_end((job, worker))
        while len(self._retired) > 64 * self.limits.openings:
            self._retired.popitem(last=False)

    def _end(self, job: int) -> None:
        served = self._served.pop(job)
        for worker, nonce in served.nonces.items():
            self._retire(job, worker, nonce)
        self.device.close(job)
        self._ranges.give_back(served.config.base)

    # ---- CLOSE and STATUS --------------------------------------------------------------------------------------

    def _close(self, header: Header, body: bytes, address: Address) -> Replies:
        try:
            close = Close.unpack(body)
        except ControlError:
            return self._ignore("unreadable")
        job, worker = header.job, header.worker

        def answer(reason: Reason = Reason.NONE) -> Replies:
            frame = control_frame(close, job=job, worker=worker, epoch=header.epoch, reason=reason)
            return [(frame, address)]

        opening = self._openings.get(job)
        request = opening.requests.get(worker) if opening is not None else None
        if (
            opening is not None
            and request is not None
            and (request.wants.nonce, request.address)
            == (
                close.nonce,
                address,
            )
        ):
            # It no longer waits for the others.
            self._retire(job, worker, close.nonce)
            del opening.requests[worker]
            if not opening.requests:
                del self._openings[job]
            return answer()
        served = self._served.get(job)
        if served is None:
            return answer(Reason.JOB_NOT_OPEN)
        if served.addresses.get(worker) != address:
            return self._ignore("foreign_close")
        if served.nonces[worker] != close.nonce or served.config.epoch != header.epoch:
            return answer(Reason.WRONG_EPOCH)
        served.closed.add(worker)
        if len(served.closed) == len(served.nonces):
            self.events["closed"] += 1
            self._end(job)
        return answer()

    def _status(self, header: Header, body: bytes, address: Address, now: float) -> Replies:
        try:
            request = StatusRequest.unpack(body)
        except ControlError:
            # An answer to a status is longer, so two controllers cannot answer each other for ever.
            return self._ignore("unreadable")
        served = self._served.get(header.job)
        member = served is not None and served.addresses.get(header.worker) == address
        if not member and not self._trusted(address):
            return self._ignore("foreign_status")
        if served is not None and member:
            served.used = now
        params = self.device.params
        reply = StatusReply(
            request.cookie,
            self.uptime_nonce,
            params.slots,
            params.jobs,
            self.slots_used,
            len(self._served),
            self.state(header.job),
            self.device.counters(),
        )
        epoch = served.config.epoch if served is not None else self._epochs.get(header.job, 0)
        return [(control_frame(reply, job=header.job, worker=header.worker, epoch=epoch), address)]
