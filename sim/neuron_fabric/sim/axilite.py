"""The software's end of an AXI4-Lite port, as a state machine that knows no simulator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from neuron_fabric.sim.streams import StreamRules, pattern

__all__ = ["Access", "AxiLiteMaster"]

_CHANNELS = ("aw", "w", "b", "ar", "r")


@dataclass(eq=False)
class Access:
    """A read or a write, and what became of it.

    Attributes
    ----------
    address : int
    write : bool
    data : int
        To write; of a read, what came.
    strobe : int
        Bytes to write.
    taken : int, optional
        The cycle in which its address was transferred; of a write, the later one of address and data.
    response : int, optional
        None until it is there.
    """

    address: int
    write: bool
    data: int = 0
    strobe: int = 0b1111
    taken: int | None = None
    response: int | None = None

    @property
    def done(self) -> bool:
        """Whether the response is there."""
        return self.response is not None


class AxiLiteMaster:
    """Sends reads and writes, each kind in order, the two independently; every channel stalls by a pattern of its own.

    The next address (and data) is offered while the response before still waits.

    Parameters
    ----------
    seed : object
        Of the stall patterns.
    stalls : str
        A pattern of :data:`~neuron_fabric.sim.streams.PATTERNS`, or "any".
    prefix : str
        Of the port names.
    """

    def __init__(self, seed: object, stalls: str = "any", prefix: str = "s_axil") -> None:
        self._go = {channel: pattern(stalls, f"{channel}:{seed}") for channel in _CHANNELS}
        self._names = {
            f"{channel}{part}": f"{prefix}_{channel}{part}"
            for channel in _CHANNELS
            for part in ("valid", "ready", "addr", "data", "strb", "resp", "prot")
        }
        self._rules = {channel: StreamRules(f"{prefix}_{channel}") for channel in ("b", "r")}
        self.reset()

    def reset(self) -> None:
        """Forget everything: the slave was reset."""
        self._waiting: dict[str, deque[Access]] = {channel: deque() for channel in _CHANNELS}
        self._offered = dict.fromkeys(("aw", "w", "ar"), False)
        self._ready = dict.fromkeys(("b", "r"), False)
        for rules in self._rules.values():
            rules.reset()

    def read(self, address: int) -> Access:
        """Ask for a register."""
        access = Access(address, False)
        self._waiting["ar"].append(access)
        self._waiting["r"].append(access)
        return access

    def write(self, address: int, data: int, strobe: int = 0b1111) -> Access:
        """Write a register."""
        access = Access(address, True, data, strobe)
        for channel in ("aw", "w", "b"):
            self._waiting[channel].append(access)
        return access

    @property
    def busy(self) -> bool:
        """Whether a response is still to come."""
        return bool(self._waiting["b"] or self._waiting["r"])

    def drive(self, wires: Any) -> None:
        """Set the inputs of this cycle."""
        names = self._names
        for channel, offered in self._offered.items():
            if not offered and self._waiting[channel] and next(self._go[channel]) and self._in_turn(channel):
                access = self._waiting[channel][0]
                self._offered[channel] = True
                if channel == "w":
                    wires[names["wdata"]] = access.data
                    wires[names["wstrb"]] = access.strobe
                else:
                    wires[names[f"{channel}addr"]] = access.address
                    wires[names[f"{channel}prot"]] = 0
            wires[names[f"{channel}valid"]] = int(self._offered[channel])
        for channel in self._ready:
            # A response may be expected before anything was asked: ready may be high at any time.
            self._ready[channel] = bool(self._waiting[channel]) and next(self._go[channel])
            wires[names[f"{channel}ready"]] = int(self._ready[channel])

    def _in_turn(self, channel: str) -> bool:
        """Neither half of a write runs ahead of the other half of the write before."""
        other = {"aw": "w", "w": "aw"}.get(channel)
        return other is None or len(self._waiting[other]) <= len(self._waiting[channel])

    def observe(self, wires: Any, cycle: int) -> list[Access]:
        """Look at the outputs of this cycle; what has got its response.

        ``StreamRuleError`` for a response that nobody waits for, or that changes before it is taken.
        """
        names = self._names
        for channel, offered in self._offered.items():
            if offered and wires[names[f"{channel}ready"]]:
                self._offered[channel] = False
                self._waiting[channel].popleft().taken = cycle
        done = []
        for channel, ready in self._ready.items():
            waiting = self._waiting[channel]
            if not waiting and cycle % 16:
                continue  # reading ports is slow, and what comes unasked stays
            valid = bool(wires[names[f"{channel}valid"]])
            answer: tuple[int, int] | None = None
            if valid:
                data = wires[names["rdata"]] if channel == "r" else 0
                answer = wires[names[f"{channel}resp"]], data
            self._rules[channel].cycle(valid, ready, answer)
            if answer is None:
                continue
            if not waiting or waiting[0].taken is None or waiting[0].taken >= cycle:
                raise self._rules[channel].error("a response that nobody has asked for")
            if ready:
                access = waiting.popleft()
                access.response, data = answer
                if not access.write:
                    access.data = data
                done.append(access)
        return done
