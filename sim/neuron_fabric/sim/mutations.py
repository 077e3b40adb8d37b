"""Golden models with one fault each, to prove that the benches can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from neuron_fabric.model import bitplane
from neuron_fabric.model.reducer import JobConfig, Outgoing, SignCountReducer
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, Reason

__all__ = ["MUTATIONS"]


class _TiesVote(SignCountReducer):
    """A tie votes +1: the fault with which training collapses (it shows only in majority results)."""

    def poll(self) -> list[Outgoing]:
        return [_with_body(out, _nonzero) for out in super().poll()]


def _with_body(outgoing: Outgoing, change: Callable[[bytes], bytes]) -> Outgoing:
    header = outgoing.header
    if header.type is not FrameType.RESULT or header.planes != 2 or header.plane != 1:
        return outgoing
    return Outgoing(outgoing.address, outgoing.payload[:HEADER_BYTES] + change(outgoing.body))


def _nonzero(body: bytes) -> bytes:
    return b"\xff" * len(body)


class _ShiftOff(SignCountReducer):
    """Every plane is added one place too high."""

    def _accumulate(self, job: Any, state: Any, header: Header, payload: Any) -> None:
        lines = header.lines
        plane = bitplane.from_lines(memoryview(payload)[HEADER_BYTES:], lines, self.params.line_bytes)
        super()._accumulate(job, state, header, payload[:HEADER_BYTES] + bytes(len(payload) - HEADER_BYTES))
        weight = job.config.encoding.weights[header.plane]
        shift = job.config.encoding.shift(header.plane)
        bitplane.accumulate(state.tally[:, :lines], plane, shift + 1, weight < 0)


class _SeenIgnored(SignCountReducer):
    """A duplicate is added again, as long as the chunk is not complete."""

    def _contribute(self, job: Any, header: Header, payload: Any, sender: Any) -> Reason:
        state = job.state(header.chunk)
        seen = state.seen.get(header.worker, 0)
        again = (
            state.valid
            and state.chunk == header.chunk
            and not state.complete
            and header.type is FrameType.CONTRIBUTE
            and header.lines == state.lines
            and seen >> header.plane & 1
        )
        if again:
            self._accumulate(job, state, header, payload)
        return super()._contribute(job, header, payload, sender)


class _CarriedOver(SignCountReducer):
    """A claim does not mark the lines as unwritten."""

    def _claim(self, job: Any, state: Any, header: Header) -> None:
        written = state.written.copy()
        super()._claim(job, state, header)
        state.written[:] = written


class _AbstainersCounted(SignCountReducer):
    """An abstaining worker is counted as a voter."""

    def _complete(self, job: Any, state: Any, number: int) -> None:
        state.voters = len(state.seen)
        super()._complete(job, state, number)


class _LineLost(SignCountReducer):
    """The last bit of the last line of a contribution gets lost."""

    def _accumulate(self, job: Any, state: Any, header: Header, payload: Any) -> None:
        super()._accumulate(job, state, header, bytes(payload[:-1]) + bytes([payload[-1] & 0x7F]))


class _NoResend(SignCountReducer):
    """Nobody gets a result again; seen from the bench, the gateware sends what nobody asked for."""

    def _due_to(self, state: Any, header: Header, destination: int) -> None:
        return


class _StaleTaken(SignCountReducer):
    """An older chunk claims as well."""

    def _contribute(self, job: Any, header: Header, payload: Any, sender: Any) -> Reason:
        state = job.state(header.chunk)
        if state.valid and state.chunk != header.chunk:
            state.chunk = (header.chunk - 1) % (1 << 32)
        return super()._contribute(job, header, payload, sender)


class _LanesTurned(SignCountReducer):
    """Lanes in the order of ``numpy.packbits`` without ``bitorder="little"``."""

    def _accumulate(self, job: Any, state: Any, header: Header, payload: Any) -> None:
        body = np.unpackbits(np.frombuffer(payload, np.uint8)[HEADER_BYTES:])
        turned = np.packbits(body, bitorder="little").tobytes()
        super()._accumulate(job, state, header, bytes(payload[:HEADER_BYTES]) + turned)


# ---- of the in-network endpoint --------------------------------------------------------------------------------------


class _AnySender(SignCountReducer):
    """A member's address is not looked at."""

    @staticmethod
    def _pinned(job: Any, worker: int, sender: Any) -> bool:
        return worker in job.members


class _StrangersTold(SignCountReducer):
    """Whoever sends a frame in a member's name gets a NACK."""

    def _refuse(self, header: Any, reason: Reason, sender: Any) -> Reason:
        job = self._jobs.get(header.job) if header is not None else None
        known = job is not None and header.type is not FrameType.RESULT and header.worker in job.members
        return super()._refuse(header, reason, job.members[header.worker] if known and job is not None else sender)


class _VotersPerPlane(SignCountReducer):
    """The voters of a child count with every plane."""

    def _accumulate(self, job: Any, state: Any, header: Header, payload: Any) -> None:
        super()._accumulate(job, state, header, payload)
        if state.seen.get(header.worker, 0):
            state.voters += header.voters


class _QuorumOfOne(SignCountReducer):
    """When time is up one voter is enough."""

    def open(self, config: JobConfig) -> None:
        rule = config.straggler
        super().open(config if rule is None else replace(config, straggler=replace(rule, quorum=1)))


class _LateUnnoticed(SignCountReducer):
    """Who comes too late is counted as one who comes twice."""

    def receive(self, *args: Any, **options: Any) -> Reason:
        reason = super().receive(*args, **options)
        self.counters["duplicates"] += self.counters.pop("late", 0)
        return reason


class _AbstainersMissed(SignCountReducer):
    """A PARTIAL result counts those who abstained as missing."""

    def _frames(self, job: Any, state: Any, destination: int) -> Any:
        state.missing += len(state.abstained) if state.partial else 0
        return super()._frames(job, state, destination)


class _ParentsEpoch(SignCountReducer):
    """What is relayed keeps the epoch that the job has at the parent."""

    def _relay(self, job: Any, header: Header, body: bytes) -> None:
        super()._relay(job, header, body)
        if self._relays:
            down = self._relays.pop()
            self._relays.append(
                Outgoing(None, replace(down.header, epoch=header.epoch).pack() + down.payload[HEADER_BYTES:])
            )


class _SlotsShared(SignCountReducer):
    """Every job has all slots' worth of versions, whatever its range: a chunk is kept when it should be claimed."""

    def open(self, config: JobConfig) -> None:
        super().open(config)
        job = self._jobs[config.job]
        job.slots = type(job)(replace(config, base=0, slots=None), self.params).slots


MUTATIONS: dict[str, type[SignCountReducer]] = {
    "ties-vote": _TiesVote,
    "shift-off-by-one": _ShiftOff,
    "seen-ignored": _SeenIgnored,
    "lines-carried-over": _CarriedOver,
    "abstainers-counted": _AbstainersCounted,
    "last-bit-lost": _LineLost,
    "no-resend": _NoResend,
    "stale-taken": _StaleTaken,
    "lanes-turned": _LanesTurned,
    "any-sender": _AnySender,
    "strangers-told": _StrangersTold,
    "voters-per-plane": _VotersPerPlane,
    "quorum-of-one": _QuorumOfOne,
    "late-unnoticed": _LateUnnoticed,
    "abstainers-missed": _AbstainersMissed,
    "parents-epoch": _ParentsEpoch,
    "slots-shared": _SlotsShared,
}
"""By name."""
