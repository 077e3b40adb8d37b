"""What a run tells of itself: one record of plain values a step, and where it goes.

    state.telemetry = JsonLines(path)

A record says what was decided for the step and why, how much went which way, what it cost in time and bytes, and which
alarms the step raised.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from neuron_fabric.runtime.controller import Decision
from neuron_fabric.runtime.health import Alarm

__all__ = ["JsonLines", "StepClock", "TensorBoard", "step_record", "tee"]

Record = dict[str, Any]
Sink = Callable[[Record], None]


class StepClock:
    """Time and traffic of one step: from the first bucket to the end of the last."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._totals: dict[str, int] = {}

    def begin(self, totals: dict[str, int]) -> None:
        """The first bucket of a step is here, and these are the totals before it."""
        self._begun, self._totals = time.perf_counter(), totals

    def lap(self, totals: Mapping[str, int]) -> dict[str, float]:
        """Seconds since :meth:`begin`, and by how much each total has grown since then."""
        grown = {name: value - self._totals.get(name, 0) for name, value in totals.items()}
        return {"seconds": time.perf_counter() - self._begun, **grown}


def step_record(
    step: int,
    decision: Decision | None,
    alarms: Sequence[Alarm],
    measured: Mapping[str, float],
    *,
    failed: int,
    not_finite: bool,
) -> Record:
    """The record of one step; ``decision`` is None for a fixed plan."""
    record: Record = {"step": step, "failed_buckets": failed, "not_finite": not_finite, **measured}
    elements = measured.get("elements", 0)
    record["low_bit_share"] = measured.get("low_bit_elements", 0) / elements if elements else 0.0
    if decision is not None:
        record["mode"] = decision.mode.value
        record["probe"] = decision.is_probe
        record["routes"] = {
            name: {"low_bit": route.low_bit, "reason": route.reason.value, "detail": route.detail}
            for name, route in decision.routes.items()
        }
    record["alarms"] = [str(alarm) for alarm in alarms]
    return record


class JsonLines:
    """Appends records to a file, one line of JSON each, and flushes every line.

    Values that JSON has no number for (NaN, Inf) are written as null. ``OSError`` if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO = Path(path).open("a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, record: Record) -> None:
        """Append a record."""
        self._file.write(json.dumps(_finite(record), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes the numbers of records as scalars, and alarms and changes of mode as text.

    Parameters
    ----------
    folder : path
        ``RuntimeError`` if the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError(
                "TensorBoard telemetry needs the package tensorboard: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        self._mode = ""

    def __call__(self, record: Record) -> None:
        """Write a record's scalars and events."""
        step = record["step"]
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(f"neuron_fabric/{name}", value, step)  # type: ignore[no-untyped-call]
        for region, route in record.get("routes", {}).items():
            tag = f"neuron_fabric/low_bit/{region}"
            self._writer.add_scalar(tag, int(route["low_bit"]), step)  # type: ignore[no-untyped-call]
        mode = record.get("mode", self._mode)
        for text in [*record["alarms"], *([f"mode {mode}"] if mode != self._mode else [])]:
            self._writer.add_text("neuron_fabric/events", text, step)  # type: ignore[no-untyped-call]
        self._mode = mode

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()  # type: ignore[no-untyped-call]


def tee(*sinks: Sink) -> Sink:
    """A sink that passes each record to several."""

    def both(record: Record) -> None:
        for sink in sinks:
            sink(record)

    return both


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
