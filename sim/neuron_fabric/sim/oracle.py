"""What the reducer must answer: the golden model, asked frame by frame."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from neuron_fabric.model.reducer import SignCountReducer
from neuron_fabric.model.wire import FrameType, Header, Reason
from neuron_fabric.sim.mutations import MUTATIONS
from neuron_fabric.sim.stimulus import Frame, Scenario

__all__ = ["Oracle", "Reaction", "Result"]


@dataclass(frozen=True)
class Result:
    """One result: the UDP payloads of its planes, in order."""

    chunk: int
    destination: int
    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Reaction:
    """What one frame does.

    Attributes
    ----------
    reason : Reason
        Why the frame was refused, or ``NONE``.
    results : tuple of Result
        What becomes due: to all when the frame completes its chunk, to its sender when it asks again.
    claims : int, optional
        The chunk that this frame takes the slot version from.
    """

    reason: Reason
    results: tuple[Result, ...]
    claims: int | None


class Oracle:
    """The golden model of one scenario.

    Parameters
    ----------
    scenario : Scenario
    mutation : str, optional
        A fault of :data:`~neuron_fabric.sim.mutations.MUTATIONS`, to see whether a bench notices.

    Attributes
    ----------
    events : collections.Counter
        How often each event of the gateware must have happened, by the names of its ports without ``event_``.
    """

    def __init__(self, scenario: Scenario, mutation: str = "") -> None:
        self._scenario = scenario
        self._mutation = mutation
        self.events: Counter[str] = Counter()
        self.reset()

    def reset(self) -> None:
        """The reducer was reset: its state and the counts of events start again."""
        scenario = self._scenario
        kind = MUTATIONS[self._mutation] if self._mutation else SignCountReducer
        self._golden = kind(scenario.params)
        if scenario.enabled:
            self._golden.open(scenario.job)
        self._held: dict[int, int] = {}
        self.events.clear()

    def feed(self, frame: Frame) -> Reaction:
        """Apply the next frame."""
        golden, events = self._golden, self.events
        if frame.repaired is not None:
            events["length"] += 1
        payload = frame.payload if frame.repaired is None else frame.repaired
        if not payload:
            return Reaction(Reason.BAD_LENGTH, (), None)
        before = golden.counters.copy()
        reason = golden.receive(payload)
        after = golden.counters - before
        if frame.refusal is not None and frame.repaired is None:
            if reason is Reason.NONE:
                raise ValueError(f"stimulus: the golden model takes a frame that was meant to be bad ({frame.note})")
            events[frame.refusal] += 1
            return Reaction(reason, (), None)
        for event, counters in _EVENTS.items():
            events[event] += sum(after[counter] for counter in counters)
        return Reaction(reason, self._results(), self._claim(payload, reason, after))

    def _results(self) -> tuple[Result, ...]:
        groups: dict[tuple[int, int], list[bytes]] = {}
        for outgoing in self._golden.poll():
            header = outgoing.header
            if header.type is FrameType.RESULT:
                groups.setdefault((header.chunk, header.worker), []).append(outgoing.payload)
        return tuple(Result(*key, tuple(frames)) for key, frames in groups.items())

    def _claim(self, payload: bytes, reason: Reason, after: Counter[str]) -> int | None:
        """Keep the books about who holds which slot version."""
        if reason is not Reason.NONE:
            return None  # a frame that claims is never refused
        header = Header.unpack(payload)
        if not after["duplicates"]:
            self.events["accepted_frame"] += 1
        where = header.chunk % (2 * self._scenario.job.slot_count(self._scenario.params))
        before = self._held.get(where)
        self._held[where] = header.chunk
        return before if before is not None and before != header.chunk else None


# Events of the gateware, as sums of the golden model's counters. Header refusals are told by the stimulus.
_EVENTS = {
    "accepted_line": ("lines",),
    "duplicate": ("duplicates",),
    "stale": ("stale",),
    "abandoned": ("abandoned",),
    "refused": ("refused_lines_differ", "refused_abstain_after_vote"),
    "completed": ("completed",),
}
