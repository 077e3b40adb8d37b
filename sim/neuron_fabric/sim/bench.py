"""The bench: sends a scenario into the AXI4-Stream reducer and judges what comes out.

It knows no simulator. One cycle is

1. :meth:`Bench.drive` says what the inputs are,
2. the simulator lets the logic settle,
3. :meth:`Bench.observe` looks at the outputs, which with those inputs decide which beats move at the coming clock edge,
4. the clock ticks.

Every wait has a limit in cycles, so a bench ends whatever the gateware does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

from neuron_fabric.model.wire import HEADER_BYTES, HEADER_OFFSET
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.oracle import Oracle, Reaction
from neuron_fabric.sim.scoreboard import Mismatch, Scoreboard
from neuron_fabric.sim.stimulus import Scenario, stream_beats
from neuron_fabric.sim.streams import StreamRules, pattern

__all__ = ["Bench", "BenchTimeoutError", "CycleBench", "Drive", "Pins"]

_RESET_CYCLES = 3


class BenchTimeoutError(AssertionError):
    """Something did not happen within its number of cycles; the message says what was waited for."""


class CycleBench(Protocol):
    """A bench that is asked what to drive and told to look, once a cycle."""

    @property
    def done(self) -> bool:
        """Whether all was sent and all has come."""

    @property
    def cycle(self) -> int:
        """The cycle that comes next."""

    def drive(self, wires: Any) -> None:
        """Set the inputs of this cycle."""

    def observe(self, wires: Any) -> None:
        """Look at the outputs of this cycle; raises what is wrong with them."""


class Pins(Protocol):
    """The outputs of the gateware, read once a cycle after its inputs have settled."""

    def s_ready(self) -> bool:
        """``s_axis_tready``."""

    def m_valid(self) -> bool:
        """``m_axis_tvalid``."""

    def m_beat(self) -> tuple[int, bool, int]:
        """``m_axis_tdata``, ``m_axis_tlast`` and ``m_axis_tkeep``."""


@dataclass
class Drive:
    """The inputs of one cycle. ``data`` and ``last`` keep their values while ``valid`` is low."""

    reset: bool = True
    valid: bool = False
    data: int = 0
    last: bool = False
    ready: bool = False


class Bench:
    """Source, sink, monitors and scoreboard around one scenario.

    Parameters
    ----------
    scenario : Scenario
    source, sink : str
        Stall patterns of the two ports (:data:`~neuron_fabric.sim.streams.PATTERNS`). The sink may also be "last": not
        ready before the last frame is in.
    isolate : bool
        Send a frame only when nothing is on its way any more, to measure latencies.
    patience : int
        Cycles without any beat moving after which the run has failed.
    mutation : str, optional
        A fault in the golden model.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        source: str = "any",
        sink: str = "any",
        isolate: bool = False,
        patience: int = 3000,
        mutation: str = "",
    ) -> None:
        self.scenario = scenario
        self.measured = Measured()
        self.oracle = Oracle(scenario, mutation)
        self.scoreboard = Scoreboard()
        self._rng = random.Random(f"bench:{scenario.seed}")
        self._source = pattern(source, f"source:{scenario.seed}")
        self._sink = pattern("always" if sink == "last" else sink, f"sink:{scenario.seed}")
        self._sink_waits = sink == "last"
        self._isolate = isolate
        self._patience = patience
        self._rules = StreamRules("m_axis")
        self._drive = Drive()
        self._cycle = 0
        self._reset_until = _RESET_CYCLES
        # the frame that is being sent
        self._next = 0
        self._beats: list[int] = []
        self._beat = 0
        self._counting = 0  # beats of it that mean something
        self._reaction: Reaction | None = None
        self._judged: tuple[int, Reaction] | None = None
        # the result that is being received
        self._received = bytearray()
        self._begun = 0
        self._was_valid = False
        # when something happened last
        self._moved = 0
        self._still = 0  # cycles since then in which a result could have come and none was there
        self._first_sent: int | None = None
        self._completing: list[int] = []  # cycles of the first and the last line of a completing frame
        self._rose: int | None = None  # when its result was offered
        self._header_beats = (HEADER_OFFSET + HEADER_BYTES) // scenario.params.line_bytes
        # After the last result, as long as the longest could take to come, for those that nobody is owed.
        planes = max(2, scenario.params.acc_bits)
        self._quiet = 2 * planes * (scenario.params.lines_per_chunk + self._header_beats) + 32

    # ---- every cycle ---------------------------------------------------------------------------------------------

    def drive(self) -> Drive:
        """The inputs of this cycle."""
        drive = self._drive
        drive.reset = self._cycle < self._reset_until
        if drive.reset:
            drive.valid = drive.ready = False
            return drive
        drive.ready = next(self._sink) and not (self._sink_waits and not self._sent)
        if not drive.valid and next(self._source) and self._may_send():
            # A beat that is offered stays until it is taken.
            drive.valid = True
            drive.data = self._beats[self._beat]
            drive.last = self._beat == len(self._beats) - 1
        return drive

    def observe(self, pins: Pins) -> None:
        """The outputs of this cycle; raises what is wrong with them."""
        drive = self._drive
        if not drive.reset:
            valid = pins.m_valid()
            beat = pins.m_beat() if valid else None
            self._rules.cycle(valid, drive.ready, beat)
            if valid and not self._was_valid:
                self._rose = self._cycle
            self._was_valid = valid
            if drive.valid and pins.s_ready():
                self._beat_sent()
            if beat is not None and drive.ready:
                self._beat_received(*beat)
            if valid or self._moved == self._cycle:
                self._still = 0
            elif drive.ready:
                self._still += 1
            if self._isolate:
                self._measure()
            self._watch()
            if self.scenario.reset == (self._next - 1, self._beat) and self._reaction is not None:
                self._restart()
        self._cycle += 1
        self.measured.cycles = self._cycle

    @property
    def done(self) -> bool:
        """Whether all was sent, all came, and nothing came after it, though the sink was ready for it."""
        return self._sent and self._still > self._quiet and not self._received and not self.scoreboard.owed()

    @property
    def cycle(self) -> int:
        """The cycle that comes next."""
        return self._cycle

    def check_events(self, events: dict[str, int]) -> None:
        """Compare the gateware's event strobes, counted since the last reset, with what must have happened."""
        wrong = [
            f"{name} {count} times, expected {expected}"
            for name, count in sorted(events.items())
            if (expected := self._expected(name)) != count
        ]
        if wrong:
            raise Mismatch("events: " + "; ".join(wrong))

    def _expected(self, event: str) -> int:
        return self.scoreboard.results if event == "result_sent" else self.oracle.events[event]

    # ---- sending -------------------------------------------------------------------------------------------------

    @property
    def _sent(self) -> bool:
        return self._next == len(self.scenario.frames) and not self._beats

    def _may_send(self) -> bool:
        """Whether the next beat may be offered; takes up the next frame where one is due."""
        if self._beats:
            return True
        if self._next == len(self.scenario.frames):
            return False
        if self._isolate and self.scoreboard.owed():
            return False
        if self._judged is None or self._judged[0] != self._next:
            # What the frame will do depends only on those before it.
            self._judged = self._next, self.oracle.feed(self.scenario.frames[self._next])
        reaction = self._judged[1]
        # Rule 10: a slot version is not claimed before its result has come.
        waits = reaction.claims is not None and not self.scenario.may_drop
        if waits and self.scoreboard.owed(reaction.claims, again=self.scenario.patient):
            return False
        self._reaction = reaction
        frame, line_bytes = self.scenario.frames[self._next], self.scenario.params.line_bytes
        self._beats = stream_beats(frame.payload, line_bytes, self._rng)
        # Of a frame with too many beats the last ones do not count; the gateware need not wait for them.
        counting = frame.payload if frame.repaired is None else frame.repaired
        self._counting = min(len(self._beats), (HEADER_OFFSET + len(counting)) // line_bytes)
        self._beat = 0
        self._next += 1
        return True

    def _beat_sent(self) -> None:
        reaction = self._reaction
        if reaction is None:
            raise RuntimeError("a beat moves and none was offered")
        self._drive.valid = False
        self._moved = self._cycle
        if self._first_sent is None:
            self._first_sent = self._cycle
        if self._beat == 0:
            self.scoreboard.frame_begins(reaction, self._cycle)
        if self._beat >= self._header_beats:
            self.measured.lines += 1
            if reaction.results and self._beat in (self._header_beats, len(self._beats) - 1):
                self._completing += [self._cycle] * (2 if len(self._beats) == self._header_beats + 1 else 1)
        self._beat += 1
        if self._beat == self._counting:
            self.scoreboard.frame_ends(reaction)
        self.measured.busy = self._cycle + 1 - self._first_sent
        if self._beat == len(self._beats):
            self._beats = []
            self.measured.frames += 1

    def _restart(self) -> None:
        """Reset in the middle of a frame; its rest is never sent."""
        self._reset_until = self._cycle + 1 + _RESET_CYCLES
        self._beats = []
        self._judged = self._reaction = None
        self._received.clear()
        self._was_valid = False
        self._still = 0
        self._rules.reset()
        self.scoreboard.reset()
        self.oracle.reset()

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _beat_received(self, data: int, last: bool, keep: int) -> None:
        line_bytes = self.scenario.params.line_bytes
        self._moved = self._cycle
        if keep != (1 << line_bytes) - 1:
            raise Mismatch(f"m_axis_tkeep is {keep:#x}: a beat is always full")
        if not self._received:
            self._begun = self._cycle
        self._received += data.to_bytes(line_bytes, "little")
        if last:
            before = self.scoreboard.results
            self.scoreboard.result_frame(bytes(self._received), self._begun)
            self.measured.results += self.scoreboard.results - before
            self._received.clear()
        elif len(self._received) > (self.scenario.params.lines_per_chunk + self._header_beats) * line_bytes:
            raise Mismatch("m_axis_tlast does not come: the frame is longer than any result")

    def _measure(self) -> None:
        """Note the latency of a result that had nothing in its way."""
        if self._rose is None or len(self._completing) < 2:
            return
        for latency, start in zip(
            (self.measured.latency_first, self.measured.latency_last), self._completing, strict=True
        ):
            if self._rose - start not in latency:
                latency.append(self._rose - start)
        self._completing, self._rose = [], None

    # ---- limits --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._cycle - self._moved <= self._patience:
            return
        owed = self.scoreboard.owed()
        if self._sent and not owed and not self._received and not self._was_valid:
            return  # only the quiet cycles are missing, and they come as often as the sink is ready
        missing = ", ".join(owed[:4]) + (f" and {len(owed) - 4} more" if len(owed) > 4 else "")
        if self._drive.valid:
            note = self.scenario.frames[self._next - 1].note
            what = f"s_axis_tready for beat {self._beat} of frame {self._next - 1} ({note})"
        elif owed:
            what = f"results: {missing}"
        elif self._received:
            what = "the rest of a result, up to m_axis_tlast"
        else:
            what = "the source"
        raise BenchTimeoutError(f"cycle {self._cycle}: {self._patience} cycles without a beat, waiting for {what}")
