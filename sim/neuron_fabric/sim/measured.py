"""What a run of a bench tells, whatever its top."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Measured"]


@dataclass
class Measured:
    """Counts and figures of one run; they go through JSON.

    Attributes
    ----------
    cycles : int
        Clock cycles in all.
    frames, lines, results : int
        Frames (transactions) sent, payload lines sent, results received.
    busy : int
        Cycles from the first beat sent to the last one.
    latency_first : list of int
        The different latencies of results to all: cycles from the transfer of the first payload line of the completing
        frame to the cycle in which the result's header is valid. Only where nothing was in the way.
    latency_last : list of int
        The same from that frame's last line.
    figures : dict
        Whatever else a bench measures, by name; it is printed in the table and stored in the report.
    """

    cycles: int = 0
    frames: int = 0
    lines: int = 0
    results: int = 0
    busy: int = 0
    latency_first: list[int] = field(default_factory=list)
    latency_last: list[int] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Payload lines per cycle over the whole input."""
        return self.lines / self.busy if self.busy else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "rate": self.rate}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Measured:
        """What :meth:`as_dict` gave."""
        return cls(**{key: content[key] for key in asdict(cls())})
