"""Compares every result beat of the gateware with the golden model, and keeps account of who is owed what.

The gateware keeps its pending results as one bit per slot version and destination, so it may answer two requests with
one result; what it must do, whatever the timing, is:

* a completed chunk goes to all exactly once; its result may begin while the frame that completes it still comes in, but
  no plane of it ends before that frame does;
* after a duplicate of a completed chunk its sender gets a result that begins after the duplicate did: one for it alone,
  or the one to all; and never more results alone than it sent duplicates;
* a claim cancels what is still owed from the version that it takes;
* the planes of one result follow each other; each bit of each frame is that of the golden model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_OFFSET, Header, HeaderError
from neuron_fabric.sim.difference import difference
from neuron_fabric.sim.oracle import Reaction, Result

__all__ = ["Mismatch", "Scoreboard"]


class Mismatch(AssertionError):  # noqa: N818 - it is the finding of a comparison, not an error of the program
    """The gateware did not do what the golden model says."""


@dataclass
class _Completed:
    """What is known of a chunk that was completed."""

    to_all: Result
    begun: int  # when the frame that completes it began
    whole: bool = False  # that frame is in
    delivered: bool = False
    claimed: bool = False
    alone: dict[int, Result] = field(default_factory=dict)  # by destination
    asked: dict[int, list[int]] = field(default_factory=dict)  # by destination, when the duplicates began
    waiting: dict[int, list[int]] = field(default_factory=dict)  # those of them that have no answer
    answered: Counter[int] = field(default_factory=Counter)


class Scoreboard:
    """Takes what goes in and what comes out, with the cycle of each, and raises :class:`Mismatch`.

    Attributes
    ----------
    results : int
        Results that came out whole since the last reset.
    """

    def __init__(self) -> None:
        self.results = 0
        self._chunks: dict[int, _Completed] = {}
        self._unsettled: set[int] = set()  # chunks from which something may be owed
        self._current: Result | None = None
        self._plane = 0

    def reset(self) -> None:
        """The reducer was reset: nothing is owed any more."""
        self._chunks.clear()
        self._unsettled.clear()
        self._current = None
        self.results = 0

    # ---- input ---------------------------------------------------------------------------------------------------

    def frame_begins(self, reaction: Reaction, cycle: int) -> None:
        """The first beat of a frame is taken in ``cycle``."""
        if reaction.claims is not None and reaction.claims in self._chunks:
            chunk = self._chunks[reaction.claims]
            chunk.claimed = True
            chunk.waiting.clear()
        for result in reaction.results:
            if result.destination == DESTINATION_ALL:
                self._chunks[result.chunk] = _Completed(result, cycle)
                self._unsettled.add(result.chunk)
            else:
                chunk = self._chunks[result.chunk]
                chunk.alone[result.destination] = result
                chunk.asked.setdefault(result.destination, []).append(cycle)
                chunk.waiting.setdefault(result.destination, []).append(cycle)
                self._unsettled.add(result.chunk)

    def frame_ends(self, reaction: Reaction) -> None:
        """The last beat of a frame that counts was taken."""
        for result in reaction.results:
            self._chunks[result.chunk].whole = True

    # ---- output --------------------------------------------------------------------------------------------------

    def result_frame(self, data: bytes, begun: int) -> None:
        """A frame came out, whose first beat went in cycle ``begun``."""
        if self._current is None:
            self._begin(data, begun)
        current = self._current
        if current is None:
            raise RuntimeError("no result has begun")
        expected = bytes(HEADER_OFFSET) + current.frames[self._plane]
        if data != expected:
            raise Mismatch(
                f"result of chunk {current.chunk} to {current.destination:#x}, plane {self._plane} of "
                f"{len(current.frames)}: {difference(data, expected)}"
            )
        self._plane += 1
        if self._plane == len(current.frames):
            self._current = None
            self.results += 1
            if current.destination == DESTINATION_ALL:
                self._chunks[current.chunk].delivered = True

    def _begin(self, data: bytes, begun: int) -> None:
        try:
            header = Header.unpack(data[HEADER_OFFSET:])
        except HeaderError as error:
            raise Mismatch(f"a result without a good header: {error}") from None
        chunk = self._chunks.get(header.chunk)
        name = f"result of chunk {header.chunk} to {header.worker:#x}"
        if chunk is None:
            raise Mismatch(f"{name}: that chunk is not complete")
        if header.worker == DESTINATION_ALL:
            if chunk.delivered:
                raise Mismatch(f"{name}: sent twice")
            if begun <= chunk.begun or not chunk.whole:
                raise Mismatch(f"{name}: comes before the last vote")
            self._current = chunk.to_all
            served = list(chunk.waiting)
        else:
            served = [header.worker]
            asked = sum(cycle < begun for cycle in chunk.asked.get(header.worker, []))
            chunk.answered[header.worker] += 1
            if chunk.answered[header.worker] > asked:
                raise Mismatch(f"{name}: asked for {asked} times, answered {chunk.answered[header.worker]} times")
            self._current = chunk.alone[header.worker]
        for worker in served:
            chunk.waiting[worker] = [cycle for cycle in chunk.waiting.get(worker, []) if cycle >= begun]
        self._plane = 0

    # ---- questions -----------------------------------------------------------------------------------------------

    def owed(self, chunk: int | None = None, *, again: bool = True) -> list[str]:
        """What has to come out still, of one chunk or of all; ``again`` with what was asked for again."""
        owed = []
        for number in sorted(self._unsettled) if chunk is None else self._unsettled & {chunk}:
            state = self._chunks[number]
            to_all = not state.delivered and not state.claimed
            alone = [to for to, asked in state.waiting.items() if asked]
            if to_all:
                owed.append(f"chunk {number} to all")
            if again:
                owed += [f"chunk {number} to worker {to}, again" for to in alone]
            if not to_all and not alone:
                self._unsettled.discard(number)
        if self._current is not None and (chunk is None or self._current.chunk == chunk):
            owed.append(f"the rest of chunk {self._current.chunk}")
        return owed
