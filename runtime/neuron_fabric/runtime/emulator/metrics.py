"""What an emulator has done, as a file in the text format of Prometheus."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from neuron_fabric.model.registers import COUNTERS, MAXIMA
from neuron_fabric.runtime.emulator.controller import Controller
from neuron_fabric.runtime.emulator.engine import Engine
from neuron_fabric.runtime.emulator.faults import Faults

__all__ = ["Metrics", "render"]

_EVERY_SECONDS = 1.0
_PREFIX = "neuron_fabric_reducer"


class Observed(Protocol):
    """What is reported on."""

    engine: Engine
    controller: Controller
    counters: Counter[str]
    inbound: Faults
    outbound: Faults


class Metrics:
    """A file that is replaced as a whole, so that a reader never sees half of it.

    ``OSError`` if it cannot be written, when this is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        self._next = 0.0
        self._write("")

    def due(self, now: float) -> bool:
        """Whether it is time to write it again."""
        return now >= self._next

    def write(self, server: Observed) -> None:
        """Write the file. A disk that is full does not stop the reducer: the file is then the last that fitted."""
        now = time.monotonic()
        self._next = now + _EVERY_SECONDS
        with contextlib.suppress(OSError):
            self._write(render(server, now - self._began))

    def _write(self, text: str) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path)


def render(server: Observed, uptime: float) -> str:
    """The text."""
    values = server.engine.counters()
    lines: list[str] = []
    for name, doc in COUNTERS:
        if name in values:
            kind = "gauge" if name in MAXIMA else "counter"
            _add(lines, name if name in MAXIMA else f"{name}_total", kind, doc, [("", values[name])])
    controller = server.controller
    cpu = sum(os.times()[:2])
    for name, doc, value in (
        ("slots_used", "slots of all open jobs", controller.slots_used),
        ("slots", "slots there are", server.engine.params.slots),
        ("jobs_open", "jobs that are open", len(controller.jobs)),
        ("jobs", "most jobs that can be open", server.engine.params.jobs),
        ("memory_bytes", "memory of the engine", server.engine.bytes),
        ("uptime_seconds", "time since the start", round(uptime, 3)),
    ):
        _add(lines, name, "gauge", doc, [("", value)])
    _add(lines, "cpu_seconds_total", "counter", "processor time of the process", [("", round(cpu, 3))])
    jobs = sorted(controller.jobs.items())
    activity = [(f'job="{number}",epoch="{job.epoch}"', server.engine.activity(number)) for number, job in jobs]
    _add(lines, "job_frames", "gauge", "frames taken for an open job in its epoch", activity)
    for name, doc, counts in (
        ("controller_events_total", "what the controller did", controller.events),
        ("socket_total", "what went through the socket", {**server.counters, "control_dropped": _dropped(server)}),
        ("faults_in_total", "faults on purpose, on the way in", server.inbound.counters),
        ("faults_out_total", "faults on purpose, on the way out", server.outbound.counters),
    ):
        _add(lines, name, "counter", doc, [(f'kind="{kind}"', value) for kind, value in sorted(counts.items())])
    return "\n".join(lines) + "\n"


def _dropped(server: Observed) -> int:
    return server.engine.control_dropped


def _add(lines: list[str], name: str, kind: str, doc: str, samples: Iterable[tuple[str, float]]) -> None:
    samples = list(samples)
    if samples:
        lines += [f"# HELP {_PREFIX}_{name} {doc}", f"# TYPE {_PREFIX}_{name} {kind}"]
        lines += [
            f"{_PREFIX}_{name}{{{label}}} {value}" if label else f"{_PREFIX}_{name} {value}" for label, value in samples
        ]
