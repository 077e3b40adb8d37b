"""The two ends of an AXI4-Stream, as state machines that know no simulator.

Each is asked once a cycle what to drive and told once what was there, so that the same drivers, with the same stalls
and the same checks, run under cocotb and in Amaranth's simulator.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

__all__ = ["PATTERNS", "StreamRuleError", "StreamRules", "pattern"]


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
                raise StreamRuleError(f"{self._port}: valid fell before the beat was taken")
            if beat != self._waiting:
                raise StreamRuleError(f"{self._port}: the beat changed before it was taken")
        self._waiting = beat if valid and not ready else None
