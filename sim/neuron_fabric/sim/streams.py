"""The two ends of an AXI4-Stream, as state machines that know no simulator.

Each is asked once a cycle what to drive and told once what was there, so that the same drivers, with the same stalls
and the same checks, run under cocotb and in Amaranth's simulator.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["PATTERNS", "FrameSink", "FrameSource", "ReceivedFrame", "StreamRuleError", "StreamRules", "pattern"]


class StreamRuleError(AssertionError):
    """A rule of AXI4-Stream was broken."""


def _coin(rng: random.Random, share: float) -> Iterator[bool]:
    while True:
        yield rng.random() < share


def _bursts(rng: random.Random, go: int, stop: int) -> Iterator[bool]:
    while True:
        yield from itertools.repeat(True, rng.randint(1, go))
        yield from itertools.repeat(False, rng.randint(1, stop))


PATTERNS: dict[str, Callable[[random.Random], Iterator[bool]]] = {
    "always": lambda rng: itertools.repeat(True),
    "mostly": lambda rng: _coin(rng, 0.9),
    "half": lambda rng: _coin(rng, 0.5),
    "rarely": lambda rng: _coin(rng, 0.15),
    "bursts": lambda rng: _bursts(rng, 40, 20),
    "pauses": lambda rng: _bursts(rng, 100, 150),
    "alternate": lambda rng: itertools.cycle([True, False]),
}
"""When a port goes and when it stalls."""


def pattern(name: str, seed: object) -> Iterator[bool]:
    """One endless pattern; "any" draws its name from the seed."""
    rng = random.Random(f"pattern:{name}:{seed}")
    if name == "any":
        name = rng.choice(list(PATTERNS))
    if name not in PATTERNS:
        raise ValueError(f"no stall pattern {name!r}: there are {', '.join(PATTERNS)} and any")
    return PATTERNS[name](rng)


class StreamRules:
    """A monitor: once ``valid``, a beat stays, unchanged, until it is taken."""

    def __init__(self, port: str) -> None:
        self._port = port
        self._waiting: object = None

    def reset(self) -> None:
        """After a reset any beat may have gone."""
        self._waiting = None

    def cycle(self, valid: bool, ready: bool, beat: object) -> None:
        """``beat`` is compared by equality; it is not looked at unless ``valid``."""
        if self._waiting is not None:
            if not valid:
                raise self.error("valid fell before the beat was taken")
            if beat != self._waiting:
                raise self.error("the beat changed before it was taken")
        self._waiting = beat if valid and not ready else None

    def error(self, what: str) -> StreamRuleError:
        """The exception that says what is wrong with this port."""
        return StreamRuleError(f"{self._port}: {what}")


class FrameSource:
    """Sends frames of bytes as beats; byte k of a beat is bits 8k to 8k + 7.

    Parameters
    ----------
    prefix : str
        Of the port names.
    stalls : iterator of bool
        Whether to go on, asked whenever nothing is offered.
    beat_bytes : int
    seed : object
        Of the bytes that ``tkeep`` leaves out, which may be anything.

    Attributes
    ----------
    beats, sent : int
        Beats of the present frame, and how many of them were taken.
    stalled : int
        Cycles in which a beat was offered and not taken.
    longest : int
        The most of them on end.
    """

    def __init__(self, prefix: str, stalls: Iterator[bool], beat_bytes: int = 64, seed: object = 0) -> None:
        self._prefix = prefix
        self._stalls = stalls
        self._beat_bytes = beat_bytes
        self._rng = random.Random(f"{prefix}:{seed}")
        self._frame = self._data = b""
        self._kept = 0
        self._valid = False
        self._waited = 0
        self.beats = self.sent = 0
        self.stalled = self.longest = 0

    @property
    def idle(self) -> bool:
        """Whether the next frame may be given."""
        return self.sent == self.beats

    def stall_by(self, stalls: Iterator[bool]) -> None:
        """Take another pattern."""
        self._stalls = stalls

    def send(self, frame: bytes) -> None:
        """Begin a frame, in this cycle at the earliest."""
        if not self.idle:
            raise RuntimeError(f"{self._prefix}: the frame before is not sent")
        if not frame:
            raise ValueError("a frame has at least one byte")
        self.beats = -(-len(frame) // self._beat_bytes)
        self._kept = len(frame) - (self.beats - 1) * self._beat_bytes
        self._frame = frame
        self._data = frame + self._rng.randbytes(self._beat_bytes - self._kept)
        self.sent = 0

    def cut(self) -> bytes:
        """Give the frame up (after a reset); what was not sent of it."""
        rest = self._frame[self.sent * self._beat_bytes :]
        self.beats = self.sent = 0
        self._valid = False
        return rest

    def drive(self, wires: Any, go: bool = True) -> None:
        """Set the inputs of this cycle; without ``go`` no new beat is offered."""
        if not self._valid and not self.idle and go and next(self._stalls):
            self._valid = True
            size, last = self._beat_bytes, self.sent == self.beats - 1
            data = self._data[self.sent * size : (self.sent + 1) * size]
            wires[f"{self._prefix}_tdata"] = int.from_bytes(data, "little")
            wires[f"{self._prefix}_tlast"] = int(last)
            wires[f"{self._prefix}_tkeep"] = (1 << (self._kept if last else size)) - 1
        wires[f"{self._prefix}_tvalid"] = int(self._valid)

    def observe(self, wires: Any) -> bool:
        """Look at this cycle; whether a beat was taken."""
        if not self._valid:
            return False
        if not wires[f"{self._prefix}_tready"]:
            self.stalled += 1
            self._waited += 1
            self.longest = max(self.longest, self._waited)
            return False
        self._valid = False
        self._waited = 0
        self.sent += 1
        return True


class ReceivedFrame(NamedTuple):
    """A frame, and the cycles in which its first and its last beat were taken."""

    data: bytes
    begun: int
    ended: int


class FrameSink:
    """Takes beats and makes frames of them, and sees to it that they keep the rules.

    Parameters
    ----------
    prefix : str
        Of the port names.
    stalls : iterator of bool
        Whether to be ready, asked every cycle.
    max_bytes : int
        The longest frame that may come.
    beat_bytes : int

    Attributes
    ----------
    ready, valid : bool
        In this cycle.
    stalled : int
        Cycles in which a beat was offered and not taken.
    """

    def __init__(self, prefix: str, stalls: Iterator[bool], max_bytes: int, beat_bytes: int = 64) -> None:
        self._prefix = prefix
        self._stalls = stalls
        self._max_bytes = max_bytes
        self._beat_bytes = beat_bytes
        self._full = (1 << beat_bytes) - 1
        self._rules = StreamRules(prefix)
        self._data = bytearray()
        self._begun = 0
        self.ready = self.valid = False
        self.stalled = 0

    @property
    def partial(self) -> bool:
        """Whether a frame has begun."""
        return bool(self._data)

    def reset(self) -> None:
        """The sender was reset."""
        self._rules.reset()
        self._data.clear()
        self.valid = False

    def stall_by(self, stalls: Iterator[bool]) -> None:
        """Take another pattern."""
        self._stalls = stalls

    def drive(self, wires: Any, ready: bool | None = None) -> None:
        """Set the inputs of this cycle; ``ready`` overrides the pattern."""
        self.ready = next(self._stalls) if ready is None else ready
        wires[f"{self._prefix}_tready"] = int(self.ready)

    def observe(self, wires: Any, cycle: int) -> ReceivedFrame | None:
        """Look at this cycle; the frame that it completes.

        ``StreamRuleError`` for a beat that changes or goes before it is taken, a beat of the wrong bytes, or a frame
        without an end.
        """
        self.valid = bool(wires[f"{self._prefix}_tvalid"])
        beat: tuple[int, int, int] | None = None
        if self.valid:
            beat = (
                wires[f"{self._prefix}_tdata"],
                wires[f"{self._prefix}_tkeep"],
                wires[f"{self._prefix}_tlast"],
            )
        self._rules.cycle(self.valid, self.ready, beat)
        if beat is None:
            return None
        if not self.ready:
            self.stalled += 1
            return None
        data, keep, last = beat
        size = keep.bit_length()
        if keep != (1 << size) - 1 or size == 0 or (size != self._beat_bytes and not last):
            raise self._rules.error(f"tkeep is {keep:#x} in a beat {'with' if last else 'without'} tlast")
        if not self._data:
            self._begun = cycle
        self._data += data.to_bytes(self._beat_bytes, "little")[:size]
        if len(self._data) > self._max_bytes:
            raise self._rules.error(f"tlast does not come within the {self._max_bytes} bytes of the longest frame")
        if not last:
            return None
        frame = ReceivedFrame(bytes(self._data), self._begun, cycle)
        self._data.clear()
        return frame
