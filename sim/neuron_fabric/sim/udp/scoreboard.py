"""Compares every frame of the endpoint with the golden model, and keeps account of what is owed.

What an answer says is fixed when its chunk is complete, so it is compared byte for byte. What depends on timing:

* Pending answers are one bit per slot version and destination. So requests that come before the answer has begun share
  it: after a request an answer must begin, one for that destination alone or the one to all, and there are never more
  answers than there were requests.
* A claim, or the end of the job, cancels what has not begun. What has begun comes out whole, but nothing of an older
  holder of a slot version begins after something of a newer one.
* Planes of one answer follow each other; NACKs and relayed frames of the parent may come in between.
* NACKs come in any order; those that find their queue full are dropped, and so are relays, which keep their order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.wire import DESTINATION_ALL, FrameType, Header, HeaderError
from neuron_fabric.sim.difference import difference
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import ReceivedFrame
from neuron_fabric.sim.udp.oracle import Due, Held, Key, Reaction, key_of

__all__ = ["NACK_QUEUE", "RELAY_QUEUE", "Scoreboard"]

NACK_QUEUE = 16
RELAY_QUEUE = 8
"""So many are never dropped."""


@dataclass
class _Answer:
    """An answer to one destination, which may be asked for again and again."""

    key: Key
    held: Held
    frames: tuple[bytes, ...]
    asked: list[int] = field(default_factory=list)  # cycles in which the asking frames were in
    owed: list[int] = field(default_factory=list)  # those without an answer that began after them
    begun: int = 0  # answers
    plane: int = 0  # of the answer that is coming
    cancelled: bool = False


@dataclass
class _Relay:
    """A frame of the parent on its way to the members."""

    copies: list[bytes]  # that are still to come
    job: int
    optional: bool = False  # the rest may be missing


class Scoreboard:
    """Takes what goes in and what comes out, with the cycle of each, and raises :class:`Mismatch`.

    Attributes
    ----------
    results, nacks, relays : int
        Frames or answers that came out whole: answers by their destination in the header, NACKs, and frames of the
        parent (however many copies).
    nacks_due, relays_due : int
        What the golden model has sent of these.
    """

    def __init__(self, relays: int = RELAY_QUEUE) -> None:
        self._relay_queue = relays
        self.clear()
        self.restart()

    def clear(self) -> None:
        """The counters were cleared, with nothing owed."""
        self.nacks = self.relays = self.nacks_due = self.relays_due = 0
        self._nacks_lost = self._relays_lost = 0
        self._answers_begun: dict[tuple[Key, Held], Counter[bytes]] = {}
        self._nacks_full = self._relays_full = False

    def restart(self) -> None:
        """Hardware reset: nothing is owed, and counters are 0."""
        self.clear()
        self._answers: dict[Key, _Answer] = {}
        self._unsettled: dict[Key, _Answer] = {}
        self._current: _Answer | None = None
        self._nacks: Counter[bytes] = Counter()
        self._relays: deque[_Relay] = deque()
        self._relay = _Relay([], 0)  # the one that is coming
        self._newest: dict[tuple[int, ...], int] = {}
        self._closed: set[int] = set()

    # ---- input ---------------------------------------------------------------------------------------------------

    def react(self, reaction: Reaction, cycle: int) -> None:
        """A frame is in, whose last beat was taken in ``cycle``, or time is up."""
        if reaction.claims is not None:
            self._cancel(lambda answer: answer.held == reaction.claims)
        for due in reaction.due:
            self._ask(due, cycle)
        if reaction.nacks:
            self._nacks.update(reaction.nacks)
            self.nacks_due += len(reaction.nacks)
            self._nacks_full |= self._nacks.total() > NACK_QUEUE
        if reaction.relays:
            self._relays.extend(_Relay(list(copies), _job_of(copies[0])) for copies in reaction.relays)
            self.relays_due += len(reaction.relays)
            self._relays_full |= len(self._relays) > self._relay_queue

    def _ask(self, due: Due, cycle: int) -> None:
        answer = self._answers.get(due.key)
        if answer is None or answer.held != due.held:
            answer = self._answers[due.key] = _Answer(due.key, due.held, due.frames)
        if answer.frames != due.frames:
            raise RuntimeError(f"the golden model has changed its mind about {due.key}")
        answer.asked.append(cycle)
        answer.owed.append(cycle)
        self._unsettled[due.key] = answer

    def closed(self, job: int) -> None:
        """A job is closed: its answers, NACKs and relays that still wait may come or not."""
        self._cancel(lambda answer: answer.held.job == job)
        self._nacks_lost += sum(n for nack, n in self._nacks.items() if _job_of(nack) == job)
        self._lose_relays(lambda relay: relay.job == job)

    def reset(self) -> None:
        """CONTROL.reset: nothing is owed, and what has begun comes."""
        self._cancel(lambda answer: True)
        self._nacks_lost += self._nacks.total()
        self._lose_relays(lambda relay: True)

    def _lose_relays(self, applies: Callable[[_Relay], bool]) -> None:
        for relay in (self._relay, *self._relays):
            if applies(relay):
                self._relays_lost += relay is not self._relay and not relay.optional
                relay.optional = True

    def _cancel(self, applies: Callable[[_Answer], bool]) -> None:
        for key, answer in list(self._unsettled.items()):
            if applies(answer):
                answer.cancelled = True
                answer.owed.clear()
                if answer.plane == 0:
                    del self._unsettled[key]

    # ---- output --------------------------------------------------------------------------------------------------

    def frame(self, frame: ReceivedFrame) -> str:
        """A frame came out; what it was: ``nack``, ``relay`` or ``answer``."""
        data = frame.data
        try:
            header = Header.unpack(data[HEADERS_BYTES:])
        except HeaderError as error:
            raise Mismatch(f"a frame without a good header: {error}: {data[:64].hex()}") from None
        if header.type is FrameType.NACK:
            self._nack(data, header)
            return "nack"
        key = key_of(data, header)
        answer = self._answers.get(key)
        if answer is None and header.type is FrameType.RESULT:
            self._relayed(data, header)
            return "relay"
        if answer is None:
            raise Mismatch(f"{key}: a frame that nobody has asked for")
        self._plane(answer, frame)
        return "answer"

    def _nack(self, data: bytes, header: Header) -> None:
        if not self._nacks[data]:
            alike = [nack for nack in self._nacks.elements() if nack[HEADERS_BYTES + 4 : HEADERS_BYTES + 8] ==
                     data[HEADERS_BYTES + 4 : HEADERS_BYTES + 8]]  # fmt: skip
            near = f"; the nearest one: {_difference(data, alike[0])}" if alike else ""
            raise Mismatch(f"a NACK that nothing has caused: {header}{near}")
        self._nacks[data] -= 1
        self.nacks += 1

    def _relayed(self, data: bytes, header: Header) -> None:
        current = self._relay
        if data not in current.copies and (current.optional or not current.copies):
            skipped = next((k for k, relay in enumerate(self._relays) if data in relay.copies), None)
            if skipped is None:
                near = f"; the nearest one: {_difference(data, self._relays[0].copies[0])}" if self._relays else ""
                raise Mismatch(f"a RESULT that nobody has asked for: {header}{near}")
            for _ in range(skipped):
                self._relays.popleft()
            current = self._relay = self._relays.popleft()
            self.relays += 1
        if data not in current.copies:
            missing = Header.unpack(current.copies[0][HEADERS_BYTES:])
            raise Mismatch(f"a parent's result is not at all members yet, and another begins: {missing}, then {header}")
        current.copies.remove(data)

    def _plane(self, answer: _Answer, frame: ReceivedFrame) -> None:
        key, current = answer.key, self._current
        if current is not None and current is not answer:
            raise Mismatch(f"{key}: begins in the middle of {current.key}")
        if answer.plane == 0:
            asked = sum(cycle < frame.begun for cycle in answer.asked)
            answer.begun += 1
            if answer.begun > asked:
                raise Mismatch(f"{key}: asked for {asked} times, answered {answer.begun} times")
            self._in_order(answer)
            for served in self._served(answer):
                served.owed = [cycle for cycle in served.owed if cycle >= frame.begun]
        expected = answer.frames[answer.plane]
        if frame.data != expected:
            raise Mismatch(f"{key}, plane {answer.plane} of {len(answer.frames)}: {_difference(frame.data, expected)}")
        answer.plane += 1
        self._current = answer
        if answer.plane == len(answer.frames):
            answer.plane = 0
            self._current = None
            destination = key._replace(destination=b""), answer.held
            self._answers_begun.setdefault(destination, Counter())[key.destination] += 1
            for served in self._served(answer):
                if not served.owed:
                    self._unsettled.pop(served.key, None)

    def _served(self, answer: _Answer) -> list[_Answer]:
        """The answer, and if it goes to all, those for a destination alone that it stands for."""
        key = answer.key
        if key.up or key.worker != DESTINATION_ALL:
            return [answer]
        multicast = key.destination[0] & 1
        return [answer] + [
            other
            for other in self._unsettled.values()
            if other.held == answer.held and (multicast or other.key.destination == key.destination)
        ]

    def _in_order(self, answer: _Answer) -> None:
        """Nothing older may follow something newer, of a slot version or of a job."""
        held = answer.held
        for where, when in (((held.job,), held.opening), ((held.opening, held.place), held.generation)):
            if when < self._newest.get(where, when):
                raise Mismatch(f"{answer.key}: was claimed, and its successor's result was there already")
            self._newest[where] = when

    # ---- questions -----------------------------------------------------------------------------------------------

    def owed(self, held: Held | None = None) -> list[str]:
        """What has to come out still, of one chunk or of all; NACKs and relays, which may be dropped, left out."""
        if not self._unsettled and self._current is None and not self._relay.copies:
            return []
        owed = [
            str(answer.key)
            for answer in self._unsettled.values()
            if answer.owed and (held is None or answer.held == held)
        ]
        if self._current is not None and (held is None or self._current.held == held):
            owed.append(f"the rest of {self._current.key}")
        if held is None and self._relay.copies and not self._relay.optional:
            owed.append("the rest of a parent's result")
        return owed

    @property
    def waiting(self) -> tuple[int, int]:
        """NACKs and parent's results that did not come, or not yet."""
        return self._nacks.total(), len(self._relays)

    def settle(self, nacks_dropped: int, relays_dropped: int) -> None:
        """Everything has come that will; raise unless what is missing was counted as dropped."""
        for what, dropped, missing, lost, full in (
            ("NACKs", nacks_dropped, self.nacks_due - self.nacks, self._nacks_lost, self._nacks_full),
            ("parent's results", relays_dropped, self.relays_due - self.relays, self._relays_lost, self._relays_full),
        ):
            if not missing - lost <= dropped <= missing:
                raise Mismatch(f"{missing} {what} did not come, of which {lost} may be lost; {dropped} were counted")
            if dropped and not full:
                raise Mismatch(f"{dropped} {what} were dropped, and the queue was never full")
        self._nacks.clear()
        self._relays.clear()

    @property
    def results(self) -> tuple[int, int]:
        """Answers that came, by their destination in the header: at least, and at most.

        Without a group one to all is one however many members there are; the two differ only if some of them did not
        get theirs.
        """
        least = most = 0
        members = Counter(key._replace(destination=b"") for key in self._answers)
        for (key, _held), copies in self._answers_begun.items():
            if key.worker == DESTINATION_ALL and not key.up:
                most += max(copies.values())
                least += max(copies.values()) if len(copies) == members[key] else 0
            else:
                least += copies.total()
                most += copies.total()
        return least, most


_CHECKSUMS = (24, 25, 40, 41)
"""Where IPv4 and UDP have theirs."""


def _job_of(frame: bytes) -> int:
    return Header.unpack(frame[HEADERS_BYTES:]).job


def _difference(data: bytes, expected: bytes) -> str:
    # A checksum differs with whatever it covers.
    return difference(data, expected, front=" of the Ethernet, IPv4 and UDP headers", derived=_CHECKSUMS)
