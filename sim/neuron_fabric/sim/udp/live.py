"""Stragglers whose time is up while frames come in.

When exactly a chunk is timed out, nobody but the gateware can know. So the golden model is asked afterwards: every
PARTIAL result says whom it counts, and there must be a moment in the order of the frames, and at the right time, at
which the chunk held just those. Played back with its chunks completed at these moments, the golden model must say every
bit and every counter that was seen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import Straggler
from neuron_fabric.model.wire import DESTINATION_ALL, Flags, FrameType, Header
from neuron_fabric.sim.axilite import Access as Transfer
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import ReceivedFrame
from neuron_fabric.sim.udp.recorder import Recorder
from neuron_fabric.sim.udp.script import Check, Expire, Open, Script, Step
from neuron_fabric.sim.udp.stations import Network, draw_job
from neuron_fabric.sim.udp.traffic import Flow, Send

__all__ = ["LiveBench", "live_stragglers"]


def live_stragglers(params: ReducerParams, seed: int, *, chunks: int = 80, timeout: int = 0) -> Script:
    """Votes of one job whose members take about as long as the timeout lasts; every vote may come twice."""
    timeout = timeout or 3 * params.workers * (params.lines_per_chunk + 2)
    rng = random.Random(f"udp:live:{seed}")
    config = draw_job(
        params, rng, 0, 1, (0, params.slots),
        kind="straggler", encoding=BINARY, world=params.workers, multicast=True, timeout=timeout,
    )  # fmt: skip
    # Somebody must be able to be missing.
    quorum = rng.randint(1, max(1, params.workers - 1))
    config = replace(config, straggler=Straggler(timeout, quorum))
    flow = Flow(params, Network.draw(rng, True), 0, config, rng)
    members = flow.traffic.members
    steps: list[Step] = [Open(0, config)]
    waiting: list[tuple[float, Send]] = []
    for chunk in range(chunks):
        lines = rng.randint(1, params.lines_per_chunk)
        for worker in members:
            vote = flow.traffic.vote(worker, chunk, lines)[0].payload
            payload = rng.choice([vote, vote, vote, vote, flow.traffic.abstain(worker, chunk, lines)])
            for _ in range(rng.choice([1, 1, 1, 2])):
                waiting.append((chunk + rng.expovariate(0.4), flow.framed(worker, payload, "contribute")))
    waiting.sort(key=lambda entry: entry[0])
    steps += [frame for _when, frame in waiting]
    return Script("live", seed, params, flow.network, (*steps, Expire(), Check()), timeout=timeout)


@dataclass
class _Chunk:
    """What came in and what came out."""

    arrivals: list[tuple[int, Header]] = field(default_factory=list)  # with the cycles in which they ended
    result: tuple[int, Header, int] | None = None  # when its first result began; whom it counts


class LiveBench(Recorder):
    """Records everything, and judges at the end.

    Parameters
    ----------
    slack : int
        The most cycles from the end of a frame to its effect, and from a chunk's time to its completion.
    """

    def __init__(self, script: Script, *, slack: int = 0, **options: Any) -> None:
        super().__init__(script, **options)
        self._slack = slack or self._settling
        self._config = next(step.config for step in script.steps if isinstance(step, Open))
        self._members = len(tuple(self._config.members))
        self._seen: dict[int, _Chunk] = defaultdict(_Chunk)

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def _sent(self, frame: Send) -> None:
        header = Header.unpack(frame.frame[HEADERS_BYTES:])
        super()._sent(frame)
        self._seen[header.chunk].arrivals.append((self.cycle, header))

    def _received(self, frame: ReceivedFrame) -> None:
        super()._received(frame)
        header = Header.unpack(frame.data[HEADERS_BYTES:])
        chunk = self._seen.get(header.chunk)
        if header.type is FrameType.RESULT and chunk is not None and chunk.result is None:
            counted = int.from_bytes(frame.data[-self.params.line_bytes :], "little")
            chunk.result = frame.begun, header, counted if header.flags & Flags.PARTIAL else 0

    def _claims_too_early(self, step: Send) -> bool:
        """Not before the result of the chunk that has the slot version, if one will come without further votes."""
        number = Header.unpack(step.frame[HEADERS_BYTES:]).chunk
        before = self._seen.get(number - 2 * self._config.slot_count(self.params))
        if number in self._seen or before is None or before.result is not None or self._config.straggler is None:
            return False
        voters = {frame.worker for _cycle, frame in before.arrivals if frame.type is FrameType.CONTRIBUTE}
        return len(voters) >= self._config.straggler.quorum

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def _replay(self, reads: dict[str, Transfer]) -> None:
        moments = {number: self._moment(number, chunk) for number, chunk in self._seen.items()}
        self.measured.figures["partial"] = sum(moment is not None for moment in moments.values())
        counted: dict[int, int] = defaultdict(int)
        for cycle, what in self._in_order():
            if isinstance(what, ReceivedFrame):
                self.scoreboard.frame(what)
                continue
            self.scoreboard.react(self.oracle.feed(what.frame), cycle)
            number = Header.unpack(what.frame[HEADERS_BYTES:]).chunk
            counted[number] += 1
            if moments.get(number) == counted[number]:
                self.scoreboard.react(self.oracle.expire_chunk(self._config.job, number), cycle)
        # While a chunk waits for its time others may be begun, so how many were open at once is not known exactly.
        most, counters = 2 * self.params.slots, self.oracle.counters
        counters["slot_high_water"] = min(max(reads["slot_high_water"].data, counters["slot_high_water"]), most)

    def _moment(self, number: int, chunk: _Chunk) -> int | None:
        """After how many of its frames a chunk was timed out; None if it was completed by the last member."""
        if chunk.result is None:
            return None
        begun, header, counted = chunk.result
        if header.worker != DESTINATION_ALL:
            raise Mismatch(f"chunk {number}: the first result is for worker {header.worker}")
        claimed = chunk.arrivals[0][0]
        rule = self._config.straggler
        if rule is None:
            raise RuntimeError("the job has no stragglers")
        if not header.flags & Flags.PARTIAL:
            voters: set[int] = set()
            quorum_at = None
            for cycle, frame in chunk.arrivals:
                voters |= {frame.worker} if frame.type is FrameType.CONTRIBUTE else set()
                quorum_at = cycle if quorum_at is None and len(voters) >= rule.quorum else quorum_at
            seen: set[int] = set()
            last = next(cycle for cycle, frame in chunk.arrivals if self._completes(seen, frame))
            if quorum_at is not None and last > max(quorum_at, claimed + rule.timeout) + self._slack:
                raise Mismatch(f"chunk {number}: its time was up at {claimed + rule.timeout}, its last vote at {last}")
            return None
        if begun < claimed + rule.timeout:
            raise Mismatch(f"chunk {number}: claimed at {claimed}, timed out at {begun}, before {rule.timeout} cycles")
        possible = self._possible(chunk, counted, header.missing, claimed + rule.timeout, begun, rule.quorum)
        if not possible:
            members = [worker for worker in range(self.params.workers) if counted >> worker & 1]
            raise Mismatch(
                f"chunk {number}: counts {members}, {header.missing} are missing; at no time after "
                f"{claimed + rule.timeout} and before {begun} was it so: {chunk.arrivals}"
            )
        return possible[0]

    def _completes(self, seen: set[int], frame: Header) -> bool:
        seen.add(frame.worker)
        return len(seen) == self._members

    def _possible(self, chunk: _Chunk, counted: int, missing: int, due: int, begun: int, quorum: int) -> list[int]:
        """Numbers of frames after which the chunk may have been timed out as it says."""
        possible = []
        seen: dict[int, bool] = {}
        quorum_at = None
        ends = [cycle for cycle, _frame in chunk.arrivals]
        for index, (cycle, frame) in enumerate(chunk.arrivals):
            if frame.worker not in seen:
                seen[frame.worker] = frame.type is FrameType.CONTRIBUTE
            if quorum_at is None and sum(seen.values()) >= quorum:
                quorum_at = cycle
            if quorum_at is None:
                continue
            voters = sum(1 << worker for worker, votes in seen.items() if votes)
            following = ends[index + 1] if index + 1 < len(ends) else begun
            fits = voters == counted and self._members - len(seen) == missing
            # It is over at the latest so long after its time, and not over before it: the next frame was too late.
            in_time = cycle <= max(due, quorum_at) + self._slack and following + self._slack >= max(due, quorum_at)
            if fits and in_time and cycle < begun:
                possible.append(index + 1)
        return possible
