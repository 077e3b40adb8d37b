"""The bench of the in-network endpoint: does the steps of a script and judges what comes out.

It knows no simulator. One cycle is

1. :meth:`Bench.drive` sets the inputs,
2. the simulator lets the logic settle,
3. :meth:`Bench.observe` looks at the outputs, which with those inputs decide which beats move at the coming clock edge,
4. the clock ticks.

**How the golden model keeps in step.** A frame is judged when it is about to be sent; frames are applied in order, so
what they do depends on nothing else. A register write that opens or closes a job takes effect between frames; which
ones, is certain because no frame that has to do with that job is under way meanwhile (frames of other jobs are). Time
matters for stragglers only: input stops before the first of them can be timed out, and goes on when all are.

Every wait has a limit in cycles, so a bench ends whatever the gateware does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neuron_fabric.model.endpoint import buffer_bytes
from neuron_fabric.model.programming import RegisterWrite, close_job, open_job, set_addresses
from neuron_fabric.model.registerfile import RegisterFile, Response
from neuron_fabric.model.registers import COUNTERS, Access, Word, address_bits, pack, words
from neuron_fabric.sim.axilite import Access as Transfer
from neuron_fabric.sim.axilite import AxiLiteMaster
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import FrameSink, FrameSource, ReceivedFrame, pattern
from neuron_fabric.sim.udp.oracle import Oracle, Reaction
from neuron_fabric.sim.udp.scoreboard import RELAY_QUEUE, Scoreboard
from neuron_fabric.sim.udp.script import (
    Block,
    Check,
    Clear,
    Close,
    Expire,
    Open,
    Reset,
    Restart,
    Script,
    Strike,
    Sweep,
)
from neuron_fabric.sim.udp.traffic import Send

__all__ = ["Bench"]

_RESET_CYCLES = 3
_MEASURED = frozenset(
    {"results", "nacks", "nacks_dropped", "relays_dropped", "stall_in", "stall_out", "busy", "cycles"}
)
"""Counters that the golden model does not have, or that depend on timing."""


@dataclass
class _Control:
    """Register writes that take effect between frames."""

    writes: list[RegisterWrite]
    bank: int | None  # which job's frames must not be under way; None: any
    apply: Callable[[], None]  # tells the golden model
    ready_at: int
    at_once: bool = False  # and if there are any under way all the same
    transfers: list[Transfer] = field(default_factory=list)
    begun: bool = False


@dataclass
class _Barrier:
    """Waits until everything is quiet, then reads all counters."""

    clear: bool
    reads: dict[str, Transfer] = field(default_factory=dict)
    clearing: Transfer | None = None


class Bench:
    """Source, sink, registers and scoreboard around one script.

    Parameters
    ----------
    script : Script
    source, sink, bus : str
        Stall patterns of the ports (:data:`~neuron_fabric.sim.streams.PATTERNS`), "any" to draw one.
    patience : int
        Cycles without any progress after which the run has failed.
    lateness : int
        The most cycles in which the output is ready, nothing is offered, and something is owed.
    mutation : str, optional
        A fault in the golden model.
    relays : int
        Frames of a parent that the endpoint can always hold.
    """

    def __init__(
        self,
        script: Script,
        *,
        source: str = "any",
        sink: str = "any",
        bus: str = "any",
        patience: int = 4000,
        lateness: int = 1500,
        mutation: str = "",
        relays: int = RELAY_QUEUE,
    ) -> None:
        params = script.params
        self.script = script
        self.params = params
        self.measured = Measured()
        self.oracle = Oracle(params, script.network, mutation)
        self.scoreboard = Scoreboard(relays)
        self.registers = RegisterFile(params)
        self.source = FrameSource("s_axis", pattern(source, f"source:{script.seed}"), seed=script.seed)
        self.sink = FrameSink("m_axis", pattern(sink, f"sink:{script.seed}"), buffer_bytes(params))
        self.bus = AxiLiteMaster(script.seed, bus)
        self._rng = random.Random(f"udp:bench:{script.seed}")
        self._patience, self._lateness = patience, lateness
        # After its last beat a frame waits for its checksum, and behind those before it, each of which may wait for a
        # result to be copied; after this many cycles it has done whatever it does.
        lines = params.lines_per_chunk
        self._settling = 100 + 20 * lines
        # After this many cycles with a ready output nothing more will come, if nothing is owed.
        self._quiet = 200 + 4 * lines
        self._words = words(params.jobs)
        self._addresses = {word.name: word.address for word in self._words}
        self._readable = [word for word in self._words if word.register.access not in (Access.COUNTER, Access.MAXIMUM)]
        self._counted = [word for word in self._words if word.register.access is Access.COUNTER]
        self._holes = sorted(set(range(0, 1 << address_bits(params.jobs), 4)) - {word.address for word in self._words})

        self.cycle = 0
        self.done = False
        self._step = 0
        self._first = 0
        self._slowest = 0
        self._begun: int | None = None  # the first frame that came out
        self._ended = self._lines_out = 0  # the last one, and the lines of all
        self._restart_at(0)

    def _restart_at(self, cycle: int) -> None:
        """Everything that a hardware reset forgets."""
        self._reset_until = cycle + _RESET_CYCLES
        self._controls: deque[_Control] = deque()
        self._barrier: _Barrier | None = None
        self._expiry: int | None = None  # when input may go on
        self._blocked_until = 0
        self._cut: Reset | Restart | None = None
        self._reaction: Reaction | None = None
        self._frame: Send | None = None
        self._sync_until = 0
        self._sync_bank: int | None = None
        self._deadline: int | None = None
        self._last_end = dict.fromkeys(range(self.params.jobs), cycle)
        self._still = 0
        self._moved = cycle
        self._waited = 0
        self._probes: dict[Transfer, Callable[[Transfer], None]] = {}
        self._counting_since = self._reset_until
        self._stalls_before = self.source.stalled, self.sink.stalled
        self._base = dict.fromkeys((name for name, _doc in COUNTERS), 0)
        self._cycles_offset: int | None = None
        self.registers = RegisterFile(self.params)
        self._queue(
            set_addresses(self.params, self.script.network.me, group=self.script.network.group,
                          listen=self.script.network.listen),
            None,
            lambda: None,
        )  # fmt: skip

    # ---- every cycle ---------------------------------------------------------------------------------------------

    def drive(self, wires: Any) -> None:
        """Set the inputs of this cycle."""
        resetting = self.cycle < self._reset_until
        wires["rst"] = int(resetting)
        if resetting:
            for name in ("s_axis_tvalid", "m_axis_tready", "s_axil_awvalid", "s_axil_wvalid", "s_axil_arvalid"):
                wires[name] = 0
            wires["s_axil_bready"] = wires["s_axil_rready"] = 0
            return
        self._advance()
        self.source.drive(wires, self._may_go_on())
        self.sink.drive(wires, self._output_ready())
        self.bus.drive(wires)

    def observe(self, wires: Any) -> None:
        """Look at the outputs of this cycle; raises what is wrong with them."""
        if self.cycle >= self._reset_until:
            if self.source.observe(wires):
                self._moved = self.cycle
                self._beat_sent()
            frame = self.sink.observe(wires, self.cycle)
            if frame is not None:
                self._received(frame)
                self.measured.results += 1
                self._begun = frame.begun if self._begun is None else self._begun
                self._ended = frame.ended
                self._lines_out += -(-len(frame.data) // 64) - 1
            if self.sink.valid:
                self._still = self._waited = 0
                if self.sink.ready:
                    self._moved = self.cycle
            elif self.sink.ready:
                self._still += 1
            for transfer in self.bus.observe(wires, self.cycle):
                self._moved = self.cycle
                self._judge_transfer(transfer)
            self._watch()
            if self._cut is not None and isinstance(self._cut, Restart) and self._at_cut():
                self._restart()
        self.cycle += 1
        self.measured.cycles = self.cycle

    # ---- the script ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take up whatever can be begun in this cycle."""
        self._control()
        if self._barrier is not None:
            self._check_counters(self._barrier)
            return
        if self._expiry is not None:
            if self.cycle < self._expiry:
                return
            self._expiry = None
        while self.source.idle and self._expiry is None and self._barrier is None:
            if self._deadline is not None and self.cycle >= self._deadline:
                self._expire()
                return
            if self._step == len(self.script.steps):
                self.done = not self._controls and not self.bus.busy
                self._finish()
                return
            if not self._begin(self.script.steps[self._step]):
                return
            self._step += 1

    def _begin(self, step: Any) -> bool:
        """Begin a step if it can be; whether the next one may be looked at."""
        match step:
            case Send():
                return self._send(step)
            case Open(bank, config):
                self._queue(open_job(self.params, config, bank), bank, lambda: self.oracle.open(config))
            case Close(bank, job):
                self._queue(close_job(self.params, bank), bank, lambda: self._close(job))
            case Reset():
                if not self._settled(None) or self._controls or self.bus.busy:
                    return False
                self._cut = step
            case Restart():
                self._cut = step
            case Check() | Clear():
                if self._deadline is not None:
                    self._expire()  # nothing may be timed out while counters are read
                    return False
                if not self._all_quiet():
                    return False
                self._barrier = _Barrier(isinstance(step, Clear))
            case Expire():
                return self._expire()
            case Sweep():
                if self._controls or self.bus.busy:
                    return False
                for word in (*self._readable, *self._counted):
                    self._read(word)
            case Block(cycles):
                self._blocked_until = self.cycle + cycles
            case Strike(bank, _job):
                write = [self._control_write(reset=1)] if bank is None else close_job(self.params, bank)
                self._controls.append(_Control(write, bank, lambda: None, self.cycle, at_once=True))
            case _:
                raise TypeError(f"no such step: {step!r}")
        return True

    def _close(self, job: int) -> None:
        self.oracle.close(job)
        self.scoreboard.closed(job)

    # ---- frames ----------------------------------------------------------------------------------------------------

    def _send(self, step: Send) -> bool:
        """Begin a frame unless it has to wait."""
        if isinstance(self._cut, Restart):
            # All that waits is forgotten in a moment.
            self._frame = step
            self._judge()
            self.source.send(step.frame)
            return True
        if any(
            not control.at_once and (control.bank is None or step.bank in (None, control.bank))
            for control in self._controls
        ):
            return False
        if self.cycle < self._sync_until and (self._sync_bank is None or step.bank in (None, self._sync_bank)):
            return False
        if self.script.polite and self._cut is None and self._claims_too_early(step):
            return False
        self._frame = step
        if self._cut is None:
            self._judge()
        self.source.send(step.frame)
        return True

    def _claims_too_early(self, step: Send) -> bool:
        """Whether a frame takes a slot version whose answers are not out."""
        claims = self.oracle.claim_of(step.frame)
        return claims is not None and bool(self.scoreboard.owed(claims))

    def _received(self, frame: ReceivedFrame) -> None:
        self.scoreboard.frame(frame)

    def _judge(self) -> None:
        """Ask the golden model about the present frame; it is told no later than its last beat is sent."""
        if self._frame is None:
            raise RuntimeError("there is no frame")
        self._reaction = self.oracle.feed(self._frame.frame)
        touched = self._reaction.touched
        timeout = None if touched is None else self.oracle.timeout(touched)
        if timeout is not None and timeout <= self.script.timeout and self._deadline is None:
            # Nothing may be timed out before the input has stopped and everything before has been done.
            self._deadline = self.cycle + timeout - 2 * self._settling - 600

    def _beat_sent(self) -> None:
        if self.measured.busy == 0:
            self._first = self.cycle
        self.measured.busy = self.cycle + 1 - self._first
        if self.source.sent > 1:
            self.measured.lines += 1
        if not self.source.idle:
            return
        frame, reaction = self._frame, self._reaction
        if frame is None or reaction is None:
            raise RuntimeError("a frame ends that has not begun")
        self._sent(frame)
        self.measured.frames += 1
        banks = self._last_end if frame.bank is None else (frame.bank,)
        for bank in banks:
            self._last_end[bank] = self.cycle
        self.scoreboard.react(reaction, self.cycle)
        if reaction.partial:
            self._sync_until, self._sync_bank = self.cycle + 2 * self._settling, frame.bank
        self._frame = self._reaction = None

    def _sent(self, frame: Send) -> None:
        """A frame is in."""

    def _may_go_on(self) -> bool:
        """Whether the next beat of the present frame may be offered."""
        if not isinstance(self._cut, Reset) or not self._at_cut():
            return True
        if not self._controls:
            # The frame's first half is in; what is done with it when the rest is there, is what a closed job does.
            self._queue([self._control_write(reset=1)], None, self._reset, at=self.cycle + 4)
        return False

    def _at_cut(self) -> bool:
        cut = self._cut
        return cut is not None and self._frame is not None and self.source.sent >= min(cut.beats, self.source.beats - 1)

    def _reset(self) -> None:
        """CONTROL.reset is about to be written."""
        self.oracle.reset()
        self.scoreboard.reset()

    def _restart(self) -> None:
        """Hardware reset, now."""
        cut, frame = self._cut, self._frame
        if not isinstance(cut, Restart) or frame is None:
            raise RuntimeError("no hardware reset is due")
        rest = self.source.cut()
        self.sink.reset()
        self.bus.reset()
        self.oracle.restart()
        self.scoreboard.restart()
        self._restart_at(self.cycle + 1)
        if cut.tail and rest:
            self._frame = Send(rest, "what a reset has left of a frame")
            self._judge()
            self.source.send(rest)

    # ---- registers -------------------------------------------------------------------------------------------------

    def _control_write(self, **fields: int) -> RegisterWrite:
        return RegisterWrite(self._addresses["CONTROL"], pack("CONTROL", **fields))

    def _queue(self, writes: list[RegisterWrite], bank: int | None, apply: Callable[[], None], at: int = -1) -> None:
        ready = at if at >= 0 else self.cycle
        self._controls.append(_Control(writes, bank, apply, ready))

    def _control(self) -> None:
        """Begin or end the register writes in front."""
        if not self._controls:
            if not self.bus.busy and self._rng.random() < 0.004:
                self._look()
            return
        control = self._controls[0]
        if not control.begun:
            may = control.at_once or isinstance(self._cut, Reset) or self._settled(control.bank)
            if self.cycle < control.ready_at or self.bus.busy or not may:
                return
            control.apply()
            for address, value in control.writes:
                expected = self.registers.write(address, value)
                if expected is not Response.OKAY:
                    raise RuntimeError(f"the model of the registers refuses a write to {address:#x}")
                control.transfers.append(self.bus.write(address, value))
            control.begun = True
        if all(transfer.done for transfer in control.transfers):
            self._controls.popleft()
            if isinstance(self._cut, Reset):
                self._cut = None
                self._judge()

    def _look(self) -> None:
        """Read a register while everything goes on, or do what is an error."""
        rng = self._rng
        kind = rng.randrange(8)
        if kind == 0:
            address = rng.choice(self._holes)
            self._probes[self.bus.read(address)] = self._expect(0, Response.SLVERR)
        elif kind == 1:
            word = rng.choice([w for w in self._words if not w.register.access.writable])
            address = rng.choice([word.address, rng.choice(self._holes)])
            self._probes[self.bus.write(address, rng.getrandbits(32))] = self._expect(None, Response.SLVERR)
        elif kind == 2:
            # Means nothing before ENTRY_WRITE, in front of which they are written anew.
            word = rng.choice([w for w in self._words if w.name.startswith("ENTRY_") and w.name != "ENTRY_WRITE"])
            data, strobe = rng.getrandbits(32), rng.randrange(16)
            self.registers.write(word.address, data, strobe)
            self.bus.write(word.address, data, strobe)
        elif kind < 5:
            self._read(rng.choice(self._readable))
        else:
            self._read(rng.choice(self._counted))

    def _read(self, word: Word) -> None:
        """Read a register, and compare what can be known of it while everything goes on."""
        if word.register.access is Access.COUNTER:
            check = self._bounded(word)
        else:
            value, response = self.registers.read(word.address)
            check = self._expect(value, response)
        self._probes[self.bus.read(word.address)] = check

    @staticmethod
    def _expect(value: int | None, response: Response) -> Callable[[Transfer], None]:
        def check(transfer: Transfer) -> None:
            if transfer.response != response or (value is not None and transfer.data != value):
                raise Mismatch(
                    f"{'write to' if transfer.write else 'read of'} {transfer.address:#05x} gives {transfer.data:#x}, "
                    f"response {transfer.response}, expected {value}, response {response}"
                )

        return check

    def _bounded(self, word: Word) -> Callable[[Transfer], None]:
        """A counter while it counts: no less than what is certain, no more than what the frames begun can cause."""
        name = word.name.removeprefix("COUNT_").lower()
        least = self._base[name]

        def check(transfer: Transfer) -> None:
            if transfer.response != Response.OKAY:
                raise Mismatch(f"read of {word.name}: response {transfer.response}")
            most = None if name in _MEASURED else self._most(name)
            if transfer.data < least or (most is not None and transfer.data > most):
                raise Mismatch(f"{word.name} is {transfer.data}, expected {least} to {most}")

        return check

    def _most(self, name: str) -> int | None:
        """What a counter can be at most, if that is known."""
        return self.oracle.counters[name]

    def _judge_transfer(self, transfer: Transfer) -> None:
        check = self._probes.pop(transfer, None)
        if check is not None:
            check(transfer)
        elif transfer.write and transfer.response != Response.OKAY:
            raise Mismatch(f"write to {transfer.address:#05x}: response {transfer.response}, expected OKAY")

    # ---- quiet -----------------------------------------------------------------------------------------------------

    def _settled(self, bank: int | None) -> bool:
        """Whether all frames that have to do with a job have done what they do."""
        if not self.source.idle and (bank is None or self._frame is None or self._frame.bank in (None, bank)):
            return False
        ends = self._last_end.values() if bank is None else (self._last_end[bank],)
        return self.cycle > max(ends) + self._settling

    def _all_quiet(self) -> bool:
        return (
            self._settled(None)
            and self.cycle >= max(self._blocked_until, self._sync_until)
            and not self._controls
            and not self.bus.busy
            and not self.scoreboard.owed()
            and not self.sink.partial
            and self._still > self._quiet
        )

    def _output_ready(self) -> bool | None:
        """Closed while it is blocked, open while everything is to come to rest, else as its pattern says."""
        if self.cycle < self._blocked_until:
            return False
        waiting = self._step < len(self.script.steps) and isinstance(self.script.steps[self._step], Check | Clear)
        return True if self._barrier is not None or (waiting and self.source.idle) else None

    def _expire(self) -> bool:
        """Wait until the time of all stragglers is up; whether that has begun."""
        if not self._settled(None):
            return False
        self._deadline = None
        self.scoreboard.react(self.oracle.expire(self.script.timeout), self.cycle)
        self._expiry = self.cycle + self.script.timeout + 2 * self._settling
        return True

    # ---- counters --------------------------------------------------------------------------------------------------

    def _check_counters(self, barrier: _Barrier) -> None:
        if not barrier.reads:
            if not self.bus.busy:
                barrier.reads = {
                    name: self.bus.read(self._addresses[f"COUNT_{name.upper()}"]) for name, _doc in COUNTERS
                }
            return
        if not all(read.done for read in barrier.reads.values()):
            return
        if barrier.clearing is None:
            self._compare(barrier.reads)
            if not barrier.clear:
                self._barrier = None
                return
            barrier.clearing = self.bus.write(*self._control_write(clear_counters=1))
        if barrier.clearing.done:
            self._cleared((barrier.clearing.taken or 0) + 3)
            self._barrier = None

    def _compare(self, reads: dict[str, Transfer]) -> None:
        """Every counter, exactly."""
        got = {name: read.data for name, read in reads.items()}
        self.scoreboard.settle(got["nacks_dropped"], got["relays_dropped"])
        least, most = self.scoreboard.results
        stalled_in, stalled_out = self._stalls_before
        expected = {name: self.oracle.counters[name] for name in got if name not in _MEASURED}
        expected |= {
            "results": min(max(got["results"], least), most),
            "nacks": self.scoreboard.nacks,
            "nacks_dropped": got["nacks_dropped"],
            "relays_dropped": got["relays_dropped"],
            "stall_in": self.source.stalled - stalled_in,
            "stall_out": self.sink.stalled - stalled_out,
            "busy": self.oracle.counters["lines"],
            "cycles": self._expected_cycles(reads["cycles"]),
        }
        wrong = [f"{name} is {got[name]}, expected {expected[name]}" for name in got if got[name] != expected[name]]
        if wrong:
            raise Mismatch("counters: " + "; ".join(wrong))
        self._base = got

    def _expected_cycles(self, read: Transfer) -> int:
        """A read shows the events up to the cycle after its address was taken.

        How many cycles after reset or clearing the first one counts is measured once, and must be nearly none.
        """
        taken = read.taken if read.taken is not None else 0
        passed = taken + 2 - self._counting_since
        if self._cycles_offset is None:
            self._cycles_offset = read.data - passed
            if abs(self._cycles_offset) > 3:
                return passed
        return passed + self._cycles_offset

    def _cleared(self, cycle: int) -> None:
        self.oracle.reducer.clear_counters()
        self.scoreboard.clear()
        self._counting_since = cycle
        self._cycles_offset = None
        self._stalls_before = self.source.stalled, self.sink.stalled
        self._base = dict.fromkeys(self._base, 0)

    # ---- limits ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Raise if something takes too long."""
        if self.source.longest > self._settling:
            raise Mismatch(f"cycle {self.cycle}: an input beat waits for {self.source.longest} cycles")
        timed_out = self._expiry is None or self.cycle > self._expiry - self._settling
        if self.sink.ready and not self.sink.valid and self.source.idle and timed_out and self.scoreboard.owed():
            self._waited += 1
            self._slowest = max(self._slowest, self._waited)
            if self._waited > self._lateness:
                raise BenchTimeoutError(
                    f"cycle {self.cycle}: {self._waited} cycles with a ready output, waiting for {self._owed()}"
                )
        if self.cycle <= max(self._moved, self._blocked_until, self._expiry or 0, self._sync_until) + self._patience:
            return
        if not self.source.idle:
            note = self._frame.note if self._frame is not None else ""
            what = f"s_axis_tready for beat {self.source.sent} of frame {self.measured.frames} ({note})"
        elif self.bus.busy:
            what = "a response of the register slave"
        elif self.scoreboard.owed():
            what = self._owed()
        else:
            what = f"step {self._step} of {len(self.script.steps)}"
        raise BenchTimeoutError(f"cycle {self.cycle}: {self._patience} cycles without progress, waiting for {what}")

    def _finish(self) -> None:
        self.measured.figures |= {
            "input_wait": self.source.longest,
            "output_wait": self._slowest,
            "input_rate": round(self.measured.rate, 4),
        }
        if self._begun is not None:
            self.measured.figures["output_rate"] = round(self._lines_out / (self._ended + 1 - self._begun), 4)

    def _owed(self) -> str:
        owed = self.scoreboard.owed()
        return "; ".join(owed[:3]) + (f" and {len(owed) - 3} more" if len(owed) > 3 else "")
