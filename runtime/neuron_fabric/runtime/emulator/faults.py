"""A bad network on purpose: frames that are lost, sent twice, overtaken, late or damaged, repeatably.

    Faults(FaultPlan.parse("loss=0.01,duplicate=0.01,reorder=0.01,corrupt=0.01,delay=0.001"), seed=1)

One of these stands in front of the engine and another behind it. Which frame is hit follows from the seed and from how
many have passed before; which frame that is depends on the timing of the run.

What is damaged on the way in comes with a checksum that does not hold, as it would: one changed bit always changes the
checksum. On the way out it cannot be sent like that, since the system computes the checksum of what it is given; so
such a frame is damaged where whoever checks what it receives must see it: its magic, its version or its length.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from neuron_fabric.runtime.emulator.kernels import I64, Bytes, Frame

__all__ = ["FaultPlan", "Faults"]

_MOST_HELD_BYTES = 32 << 20
_MOST_HELD = 1 << 15
_REORDER_SECONDS = 0.002
_MARKED_BYTES = 3  # magic, version and type


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong.

    Parameters
    ----------
    loss, duplicate, reorder, corrupt : float
        Probability for each frame, each way. A frame that is reordered is held for up to 2 ms.
    delay : float
        Seconds by which every frame is late, each way.
    crash : int
        The process ends at once, as if killed, after so many frames have come in; 0: never.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    crash: int = 0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fault {name} is a probability, 0 to 1, not {getattr(self, name)}")
        if not 0 <= self.delay <= 10:
            raise ValueError(f"fault delay is 0 to 10 seconds, not {self.delay}")
        if self.crash < 0:
            raise ValueError(f"fault crash is a number of frames, not {self.crash}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``loss=0.01,crash=5000``; ``ValueError`` names what is not known or not a number."""
        kinds = {field.name: int if field.name == "crash" else float for field in fields(cls)}
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"unknown fault {name!r}; there are {', '.join(kinds)}")
            if name in values:
                raise ValueError(f"fault {name} is given twice")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise ValueError(f"fault {name} must be a number, not {value!r}") from None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def any(self) -> bool:
        """Whether frames are touched at all."""
        return bool(self.loss or self.duplicate or self.reorder or self.corrupt or self.delay)


class Faults:
    """One direction of a bad network, for tables of frames.

    Parameters
    ----------
    plan : FaultPlan
    seed : int
    inbound : bool
        Whether a damaged frame comes with a checksum that does not hold; else its damage can be seen.

    Attributes
    ----------
    counters : collections.Counter
        Frames hit, by kind; ``held_dropped`` are those for which there was no more room.
    """

    def __init__(self, plan: FaultPlan, seed: int, *, inbound: bool) -> None:
        self.plan = plan
        self.counters: Counter[str] = Counter()
        self._inbound = inbound
        self._random = np.random.default_rng((seed, int(inbound)))
        self._held: list[tuple[float, int, Bytes, I64]] = []  # a heap by time
        self._held_bytes = 0
        self._number = 0

    @property
    def wake(self) -> float | None:
        """When the next held frame is to go on, None if there is none."""
        return self._held[0][0] if self._held else None

    def apply(self, data: Bytes, frames: I64, now: float) -> tuple[Bytes, I64]:
        """What arrives now of these frames and of those that were held: bytes and rows over them.

        The arrays that are given are not changed; what is returned may be views of them.
        """
        n = len(frames)
        if n:
            data = data[: int((frames[:, Frame.OFFSET] + frames[:, Frame.LENGTH]).max())]
            if self.plan.any:
                data, frames = self._spoil(data, frames, n, now)
        ready = self._ready(now)
        if not ready:
            return data, frames
        if not n:
            return self._joined(ready)
        return self._joined([*ready, (data, frames)])

    def _spoil(self, data: Bytes, frames: I64, n: int, now: float) -> tuple[Bytes, I64]:
        plan, draw = self.plan, self._random.random((4, n))
        lost, twice, late, damaged = (
            draw[k] < chance for k, chance in enumerate((plan.loss, plan.duplicate, plan.reorder, plan.corrupt))
        )
        twice &= ~lost
        late &= ~lost
        damaged &= ~lost
        for name, hit in (("loss", lost), ("duplicate", twice), ("reorder", late), ("corrupt", damaged)):
            self.counters[name] += int(np.count_nonzero(hit))
        if damaged.any():
            # Only the damaged ones are changed, and not the caller's; a copy of such a frame is damaged as well.
            data, frames = data.copy(), frames.copy()
            for row in np.flatnonzero(damaged):
                self._damage(data, frames[row])
        times = np.where(lost, 0, 1 + twice)
        held = np.repeat(late, times)
        frames = np.repeat(frames, times, axis=0)
        if plan.delay:
            on_time = frames[~held]
            if len(on_time):
                self._hold(now + plan.delay, data, on_time)
            self._hold_each(now + plan.delay, data, frames[held])
            return data, frames[:0]
        if held.any():
            self._hold_each(now, data, frames[held])
            frames = frames[~held]
        return data, np.ascontiguousarray(frames)

    def _damage(self, data: Bytes, row: I64) -> None:
        at, size = int(row[Frame.OFFSET]), int(row[Frame.LENGTH])
        if self._inbound:
            row[Frame.GOOD] = 0
            if size:
                data[at + self._random.integers(size)] ^= 1 << self._random.integers(8)
        elif size and self._random.random() < 0.5:
            row[Frame.LENGTH] = self._random.integers(size)
        else:
            data[at + self._random.integers(min(size, _MARKED_BYTES))] ^= 1 << self._random.integers(4, 8)

    def _hold_each(self, earliest: float, data: Bytes, frames: I64) -> None:
        for k in range(len(frames)):
            self._hold(earliest + _REORDER_SECONDS * self._random.random(), data, frames[k : k + 1])

    def _hold(self, until: float, data: Bytes, frames: I64) -> None:
        """Keep frames with bytes of their own: the buffer they are in will be used again."""
        if self._held_bytes >= _MOST_HELD_BYTES or len(self._held) >= _MOST_HELD:
            self.counters["held_dropped"] += len(frames)
            return
        own, rows = _packed(data, frames)
        self._held_bytes += own.nbytes
        self._number += 1
        heapq.heappush(self._held, (until, self._number, own, rows))

    def _ready(self, now: float) -> list[tuple[Bytes, I64]]:
        ready = []
        while self._held and self._held[0][0] <= now:
            _until, _number, data, frames = heapq.heappop(self._held)
            self._held_bytes -= data.nbytes
            ready.append((data, frames))
        return ready

    @staticmethod
    def _joined(parts: list[tuple[Bytes, I64]]) -> tuple[Bytes, I64]:
        at, rows = 0, []
        for data, frames in parts:
            moved = frames.copy()
            moved[:, Frame.OFFSET] += at
            rows.append(moved)
            at += len(data)
        return np.concatenate([data for data, _frames in parts]), np.concatenate(rows)


def _packed(data: Bytes, frames: I64) -> tuple[Bytes, I64]:
    """The bytes of these frames alone, and rows over them."""
    rows = frames.copy()
    ends = np.cumsum(rows[:, Frame.LENGTH])
    rows[:, Frame.OFFSET] = ends - rows[:, Frame.LENGTH]
    pieces = [data[at : at + size] for at, size in frames[:, [Frame.OFFSET, Frame.LENGTH]].tolist()]
    return np.concatenate(pieces) if pieces else data[:0].copy(), rows
