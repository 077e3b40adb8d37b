"""The bench of the CXL endpoint: actors' transactions go in, and the golden model says what must come out.

An actor is a generator. It yields what it wants to be done and gets it back when that is over: a list of reads and
writes, all of them under way at once; register writes; or a pause. The bench mixes what all actors want, so that the
order in which transactions reach the endpoint is anybody's guess, and tells the model in the order in which they did.

The bench knows no simulator: see :class:`neuron_fabric.sim.benches.clocked.CycleBench`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from neuron_fabric.model.cxl import ALL_BYTES, CXL_COUNTERS, CxlJob, CxlReducer, Read
from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.programming import RegisterWrite, close_job, open_job
from neuron_fabric.model.registers import pack, words
from neuron_fabric.sim.axilite import Access, AxiLiteMaster
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import StreamRules, pattern

__all__ = ["Actor", "Control", "CxlBench", "Load", "Pause", "Reset", "Step", "Store", "closing", "opening", "resetting"]

_RESET_CYCLES = 3
_STREAMS = ("req", "rwd", "drs", "ndr")


@dataclass(eq=False)
class Store:
    """A write of the enabled bytes of a line."""

    address: int
    data: bytes = bytes(LINE_BYTES)
    enable: int = ALL_BYTES


@dataclass(eq=False)
class Load:
    """A read, and what came."""

    address: int
    read: Read | None = None


@dataclass(frozen=True)
class Control:
    """Register writes, and what some of them (by their index) do to the model when they take effect."""

    writes: list[RegisterWrite]
    effects: dict[int, Callable[[CxlReducer], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pause:
    """Nothing, for so many cycles."""

    cycles: int


@dataclass(frozen=True)
class Reset:
    """Reset everything; what was on its way has no answer, and who waits for one goes on without."""

    cycles: int = _RESET_CYCLES


Step = list[Load | Store] | Control | Pause | Reset
Actor = Generator[Step, None, None]


def opening(address_map: CxlMap, job: CxlJob) -> Control:
    """Open a job, or reopen it."""
    writes = open_job(address_map.params, job.config, job.bank, lines=job.lines, first_chunk=job.first_chunk)
    return Control(writes, {0: lambda model: model.close(job.bank), len(writes) - 1: lambda model: model.open(job)})


def closing(address_map: CxlMap, bank: int) -> Control:
    """Close a job."""
    return Control(close_job(address_map.params, bank), {0: lambda model: model.close(bank)})


def resetting() -> Control:
    """Close all jobs by CONTROL.reset."""
    address = next(word.address for word in words() if word.name == "CONTROL")
    return Control([RegisterWrite(address, pack("CONTROL", reset=1))], {0: lambda model: model.reset()})


@dataclass(eq=False)
class _Running:
    """An actor, and what it waits for."""

    actor: Actor
    missing: int = 0
    until: int = 0


class CxlBench:
    """Sends what actors want to the endpoint and compares every response, tag, and counter with the golden model.

    Parameters
    ----------
    address_map : CxlMap
    actors : callable
        Makes them; gets the bench, whose ``device`` (the model) and ``rng`` they may look at.
    seed : int
    stalls : str or dict of str
        Stall patterns of the ports ``req``, ``rwd``, ``drs``, ``ndr``, ``axil``; a string is for all of them. A stream
        may have an iterator of its own.
    in_order : bool
        Transactions of a kind go in the order in which they were asked for; else in any order.
    patience : int
        Cycles without anything moving after which the run has failed.

    Attributes
    ----------
    device : CxlReducer
    measured : Measured
        ``frames`` are transactions, ``lines`` those that were added to a tally, ``results`` the data that came.
    """

    def __init__(
        self,
        address_map: CxlMap,
        actors: Callable[[CxlBench], Iterable[Actor]],
        seed: int = 1,
        *,
        stalls: str | Mapping[str, str | Iterator[bool]] = "any",
        in_order: bool = False,
        patience: int = 3000,
    ) -> None:
        self.map = address_map
        self.device = CxlReducer(address_map)
        self.rng = random.Random(f"cxl:{seed}")
        self.measured = Measured()
        self._in_order = in_order
        self._patience = patience
        chosen: dict[str, str | Iterator[bool]] = dict.fromkeys((*_STREAMS, "axil"), "any")
        chosen |= dict.fromkeys(chosen, stalls) if isinstance(stalls, str) else dict(stalls)
        self._go: dict[str, Iterator[bool]] = {}
        for port in _STREAMS:
            go = chosen[port]
            self._go[port] = pattern(go, f"{port}:{seed}") if isinstance(go, str) else go
        self._registers = AxiLiteMaster(seed, str(chosen["axil"]))
        self._rules = {port: StreamRules(f"m_axis_{port}") for port in ("drs", "ndr")}
        self._cycle = self._moved = 0
        self._reset_until = _RESET_CYCLES
        # what waits to be sent, is offered, and was taken in the cycle before
        self._waiting: dict[str, list[tuple[Any, _Running]]] = {"req": [], "rwd": []}
        self._offered: dict[str, tuple[Any, _Running, int] | None] = {"req": None, "rwd": None}
        self._taken: tuple[str, Any, _Running, int] | None = None
        # what must come
        self._due: dict[str, deque[tuple[Any, _Running, int]]] = {"drs": deque(), "ndr": deque()}
        self._ready = {"drs": False, "ndr": False}
        self._effects: deque[Callable[[CxlReducer], None] | None] = deque()
        self._controls: deque[tuple[Access, _Running]] = deque()
        self._responding = False
        # what must have been counted
        self._stalled = {"in": 0, "out": 0}
        self._high_water = 0
        self._first: int | None = None
        self._counters: dict[str, Access] | None = None
        self._checked = False
        self._running: list[_Running] = []
        for actor in actors(self):
            self.start(actor)

    def start(self, actor: Actor) -> None:
        """Let one more actor act."""
        self._running.append(_Running(actor))

    @property
    def cycle(self) -> int:
        """The cycle that comes next."""
        return self._cycle

    @property
    def done(self) -> bool:
        """Whether all actors are, every response has come, and the counters were right."""
        return self._checked

    # ---- every cycle ---------------------------------------------------------------------------------------------

    def drive(self, wires: Any) -> None:
        """Set the inputs of this cycle."""
        if self._cycle >= self._reset_until:
            self._advance()
        wires["rst"] = int(self._cycle < self._reset_until)
        if self._cycle < self._reset_until:
            for port in ("req", "rwd"):
                wires[f"s_axis_{port}_tvalid"] = 0
            for port in ("drs", "ndr"):
                wires[f"m_axis_{port}_tready"] = 0
            self._registers.drive(wires)
            return
        for port, waiting in self._waiting.items():
            if self._offered[port] is None and len(waiting) > 0 and next(self._go[port]):
                step, running = waiting.pop(0 if self._in_order else self.rng.randrange(len(waiting)))
                tag = self.rng.getrandbits(16)
                self._offered[port] = step, running, tag
                wires[f"s_axis_{port}_tid"] = tag
                if port == "req":
                    wires["s_axis_req_tdata"] = step.address
                else:
                    wires["s_axis_rwd_tuser"] = step.address
                    wires["s_axis_rwd_tkeep"] = step.enable
                    wires["s_axis_rwd_tdata"] = int.from_bytes(step.data, "little")
            wires[f"s_axis_{port}_tvalid"] = int(self._offered[port] is not None)
        for port in self._ready:
            self._ready[port] = next(self._go[port])
            wires[f"m_axis_{port}_tready"] = int(self._ready[port])
        self._registers.drive(wires)

    def observe(self, wires: Any) -> None:
        """Look at the outputs of this cycle; raises what is wrong with them."""
        if self._cycle >= self._reset_until:
            self._observe_registers(wires)
            self._apply()
            self._observe_requests(wires)
            self._observe_responses(wires)
            self._watch()
        self._cycle += 1
        self.measured.cycles = self._cycle

    def _advance(self) -> None:
        """Let actors go on that have got what they waited for."""
        for running in list(self._running):
            if running.missing or running.until > self._cycle:
                continue
            try:
                step = next(running.actor)
            except StopIteration:
                self._running = [other for other in self._running if other is not running]
                continue
            self._moved = self._cycle
            if isinstance(step, Pause):
                running.until = self._cycle + step.cycles
            elif isinstance(step, Reset):
                self._reset(step.cycles)
            elif isinstance(step, Control):
                running.missing = len(step.writes)
                for index, (address, value) in enumerate(step.writes):
                    self._controls.append((self._registers.write(address, value), running))
                    self._effects.append(step.effects.get(index))
            else:
                running.missing = len(step)
                for one in step:
                    self._waiting["req" if isinstance(one, Load) else "rwd"].append((one, running))
        if not self._running and self._counters is None and self._taken is None:
            self._read_counters()

    def _reset(self, cycles: int) -> None:
        self._reset_until = self._cycle + cycles
        self._registers.reset()
        self.device.reset()
        self.device.counters.clear()
        for port in ("req", "rwd"):
            self._waiting[port].clear()
            self._offered[port] = None
        for port in ("drs", "ndr"):
            self._due[port].clear()
            self._rules[port].reset()
        self._taken = None
        self._effects.clear()
        self._controls.clear()
        self._responding = False
        self._stalled = {"in": 0, "out": 0}
        self._high_water = 0
        for running in self._running:
            running.missing = 0

    # ---- the model -----------------------------------------------------------------------------------------------

    def _apply(self) -> None:
        """What was taken in the cycle before: it has met the configuration of this cycle."""
        if self._taken is None:
            return
        port, step, running, tag = self._taken
        self._taken = None
        if port == "req":
            self._due["drs"].append(((step, self.device.mem_rd(step.address)), running, tag))
        else:
            self.device.mem_wr(step.address, step.data, step.enable)
            self._due["ndr"].append((step, running, tag))
        self._high_water = max(self._high_water, self.device.incomplete)

    # ---- ports ---------------------------------------------------------------------------------------------------

    def _observe_registers(self, wires: Any) -> None:
        """A write takes effect in the cycle in which its response is valid for the first time."""
        if self._effects and not self._responding and wires["s_axil_bvalid"]:
            self._responding = True
            effect = self._effects.popleft()
            if effect is not None:
                effect(self.device)
        for access in self._registers.observe(wires, self._cycle):
            self._moved = self._cycle
            if access.response:
                raise Mismatch(f"register {access.address:#x} answers with {access.response}")
            if access.write:
                self._responding = False
                expected, running = self._controls.popleft()
                if access is not expected:
                    raise RuntimeError("register writes are answered in another order than they were made")
                running.missing -= 1
        if self._counters is not None and not self._registers.busy:
            self._check_counters()

    def _observe_requests(self, wires: Any) -> None:
        for port, offered in self._offered.items():
            if offered is None:
                continue
            if not wires[f"s_axis_{port}_tready"]:
                self._stalled["in"] += 1
                continue
            if self._taken is not None:
                raise Mismatch("a read and a write were taken in the same cycle")
            self._taken = port, *offered
            self._offered[port] = None
            self._moved = self._cycle
            self.measured.frames += 1
            if self._first is None:
                self._first = self._cycle
            self.measured.busy = self._cycle + 1 - self._first

    def _observe_responses(self, wires: Any) -> None:
        for port, due in self._due.items():
            valid = bool(wires[f"m_axis_{port}_tvalid"])
            response: tuple[int, int, int] | None = None
            if valid:
                tag = wires[f"m_axis_{port}_tid"]
                drs = port == "drs"
                response = tag, wires["m_axis_drs_tuser"] if drs else 0, wires["m_axis_drs_tdata"] if drs else 0
            self._rules[port].cycle(valid, self._ready[port], response)
            if response is None:
                continue
            if not self._ready[port]:
                self._stalled["out"] += 1
                continue
            if not due:
                raise Mismatch(f"m_axis_{port}: a response that nobody has asked for: {response}")
            self._moved = self._cycle
            step, running, tag = due.popleft()
            running.missing -= 1
            if response[0] != tag:
                raise Mismatch(f"m_axis_{port}: tag {response[0]:#x} instead of {tag:#x}")
            if port == "drs":
                load, expected = step
                load.read = Read(response[2].to_bytes(LINE_BYTES, "little"), bool(response[1]))
                self.measured.results += 1
                if load.read != expected:
                    target = self.map.decode(load.address)
                    raise Mismatch(f"{target}: {_text(load.read)} instead of {_text(expected)}")

    # ---- the end -------------------------------------------------------------------------------------------------

    def _read_counters(self) -> None:
        names = [*(name for name, _ in CXL_COUNTERS), "busy", "stall_in", "stall_out", "slot_high_water", "cycles"]
        addresses = {word.name: word.address for word in words()}
        self._counters = {name: self._registers.read(addresses[f"COUNT_{name.upper()}"]) for name in names}

    def _check_counters(self) -> None:
        counted = {name: access.data for name, access in (self._counters or {}).items()}
        expected = {name: self.device.counters[name] for name, _ in CXL_COUNTERS}
        expected |= {
            "busy": expected["lines"],
            "stall_in": self._stalled["in"],
            "stall_out": self._stalled["out"],
            "slot_high_water": self._high_water,
        }
        wrong = [
            f"{name} is {counted[name]}, not {value}" for name, value in expected.items() if counted[name] != value
        ]
        if not 0 < counted["cycles"] <= self._cycle:
            wrong.append(f"cycles is {counted['cycles']} after {self._cycle}")
        if wrong:
            raise Mismatch("counters: " + "; ".join(wrong))
        self.measured.lines = expected["lines"]
        self.measured.figures["completed"] = expected["completed"]
        self._checked = True

    def _watch(self) -> None:
        if self._cycle - self._moved <= self._patience or any(r.until > self._cycle for r in self._running):
            return
        offered = [f"s_axis_{port}_tready" for port, offer in self._offered.items() if offer is not None]
        missing = [f"{len(due)} responses on m_axis_{port}" for port, due in self._due.items() if due]
        what = ", ".join([*offered, *missing, *(["a register's response"] if self._registers.busy else [])])
        raise BenchTimeoutError(
            f"cycle {self._cycle}: nothing has moved for {self._patience} cycles; waiting for {what or 'an actor'}"
        )


def _text(read: Read) -> str:
    return "poison" if read.poison and not any(read.data) else f"{read.data.hex()}{' with poison' * read.poison}"
