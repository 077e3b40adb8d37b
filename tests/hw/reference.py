"""A naive model of the reducer core, one Python integer per lane, written from the protocol's rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from neuron_fabric.model import Encoding, ReducerParams

ALL = 0xFFFF


@dataclass(frozen=True)
class Frame:
    """One frame as a worker sends it; ``data`` has one integer of ``lanes`` bits per line, none for an ABSTAIN."""

    worker: int
    chunk: int
    lines: int
    plane: int = 0
    data: tuple[int, ...] = ()
    abstain: bool = False


@dataclass(frozen=True)
class Result:
    """One whole result: ``data[plane][line]``."""

    destination: int
    chunk: int
    lines: int
    voters: int
    data: tuple[tuple[int, ...], ...]


@dataclass
class _Version:
    chunk: int
    lines: int
    seen: dict[int, set[int]] = field(default_factory=dict)
    voters: int = 0
    sums: list[list[int]] = field(default_factory=list)  # [line][lane]
    complete: bool = False


class NaiveReducer:
    def __init__(
        self, params: ReducerParams, encoding: Encoding, members: list[int], majority: bool = False, margin: int = 0
    ) -> None:
        self.params, self.encoding, self.members = params, encoding, members
        self.majority, self.margin = majority, margin
        self.versions: dict[int, _Version] = {}
        self.events: Counter[str] = Counter()
        self.abandoned: set[int] = set()

    def receive(self, frame: Frame) -> Result | None:
        """The result that this frame makes due, if any."""
        place = frame.chunk % (2 * self.params.slots)
        state = self.versions.get(place)
        if state is not None and state.chunk != frame.chunk:
            if not 0 < (frame.chunk - state.chunk) % 2**32 < 2**31:
                self.events["stale"] += 1
                return None
            if not state.complete:
                self.events["abandoned"] += 1
            state = None
        if state is None:
            state = self.versions[place] = _Version(frame.chunk, frame.lines)
            state.sums = [[0] * self.params.lanes for _ in range(frame.lines)]
        if state.lines != frame.lines:
            self.events["refused"] += 1
            return None

        every = set(range(self.encoding.planes))
        seen = state.seen.setdefault(frame.worker, set())
        wanted = every if frame.abstain else {frame.plane}
        if wanted <= seen:
            self.events["duplicate"] += 1
            return self._result(state, frame.worker) if state.complete else None
        if frame.abstain and seen:
            self.events["refused"] += 1
            return None

        self.events["accepted_frame"] += 1
        if not frame.abstain:
            if not seen:
                state.voters += 1
            weight = self.encoding.weights[frame.plane]
            for sums, bits in zip(state.sums, frame.data, strict=True):
                for lane in range(self.params.lanes):
                    sums[lane] += weight * (bits >> lane & 1)
            self.events["accepted_line"] += frame.lines
        seen |= wanted
        if all(state.seen.get(member) == every for member in self.members):
            state.complete = True
            self.events["completed"] += 1
            return self._result(state, ALL)
        return None

    def _result(self, state: _Version, destination: int) -> Result:
        planes: list[list[int]]
        if self.majority:
            planes = [[0] * state.lines, [0] * state.lines]
            for line, sums in enumerate(state.sums):
                for lane, total in enumerate(sums):
                    vote = state.voters - 2 * total if self.encoding.counts_negatives else total
                    planes[0][line] |= (vote < -self.margin) << lane
                    planes[1][line] |= (abs(vote) > self.margin) << lane
        else:
            bits = self.encoding.tally_bits(len(self.members))
            planes = [
                [sum((total >> j & 1) << lane for lane, total in enumerate(sums)) for sums in state.sums]
                for j in range(bits)
            ]
        return Result(destination, state.chunk, state.lines, state.voters, tuple(tuple(p) for p in planes))
