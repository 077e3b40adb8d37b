"""What a calibration has measured, as a file: statistics of gradients and votes, by parameter and interval of steps.

Records are plain numbers in one strict schema; loading them executes nothing. All ranks of a run have the same ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from neuron_fabric.runtime.codec import MAX_WORLD
from neuron_fabric.runtime.document import DocumentError, from_json
from neuron_fabric.runtime.profile import ModelSection

__all__ = ["EncodingRecord", "Interval", "ParameterRecord", "Records", "RecordsError", "load_records", "save_records"]

MAX_RECORD_BYTES = 64 << 20
_MAX_NODES = 5_000_000


class RecordsError(ValueError):
    """A file of records that is refused."""


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Cosine = Annotated[float, Field(ge=-1.001, le=1.001)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class EncodingRecord(_Part):
    """How well one encoding reproduced the FP32 mean gradient of one parameter in one interval."""

    cosine: Cosine
    """Between decoded and FP32 gradient, mean over recorded steps."""
    lowest_cosine: Cosine
    """The least of them."""
    averaged_cosine: Cosine
    """The same between running averages of both (memory 0.9 a step), which is what momentum makes of them."""
    error: NotNegative
    """``|decoded - FP32|**2 / |FP32|**2``, mean over recorded steps."""
    length: NotNegative
    """``|decoded| / |FP32|``, mean over recorded steps."""


class ParameterRecord(_Part):
    """One parameter in one interval; means over the recorded steps in which its gradient was not zero."""

    steps: Annotated[int, Field(ge=1)]
    """How many steps that were."""
    norm: NotNegative
    """Of the FP32 mean gradient."""
    norm_deviation: NotNegative
    """Standard deviation of that norm from step to step."""
    noise: NotNegative
    """Variance between the workers' gradients over the square of the mean gradient's norm."""
    density: Share
    """``|g|_1 / (sqrt(n) |g|_2)`` of the mean gradient: 1 if all magnitudes are equal, .80 for a normal distribution,
    lower for heavy tails; also the cosine between the gradient and its own signs."""
    zeros: Share
    """Exact zeros of a worker's gradient."""
    margin: Share
    """``|S|`` over workers, of sign votes where all workers voted."""
    ties: Share
    """Share of elements with ``S = 0``."""
    unanimity: Share
    """Share of elements in which all workers agree."""
    sign_error: Share
    """Share of elements whose majority has another sign than the FP32 mean; a tie counts half."""
    encodings: dict[str, EncodingRecord]
    """By encoding."""


class Interval(_Part):
    """A stretch of steps."""

    first: Annotated[int, Field(ge=0)]
    """Its first step."""
    end: Annotated[int, Field(ge=1)]
    """The step after its last one."""
    parameters: dict[str, ParameterRecord]
    """Those that had a gradient."""


class Records(_Part):
    """A recorded run in FP32."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    workload: str = ""
    """What was trained."""
    seed: int | None = None
    """Its seed."""
    world: Annotated[int, Field(ge=1, le=MAX_WORLD)]
    """Workers."""
    steps: Annotated[int, Field(ge=1)]
    """Backward passes."""
    model: ModelSection
    """Fingerprint."""
    elements: dict[str, Annotated[int, Field(ge=0)]]
    """Of each trained parameter, in the model's order."""
    embeddings: tuple[str, ...] = ()
    """Parameters that are weights of embeddings."""
    excluded: tuple[str, ...] = ()
    """Parameters that can never be low-bit, as those that are not float32."""
    intervals: tuple[Interval, ...]
    """In order; at least one."""
    loss: tuple[float | None, ...] = ()
    """The greatest over ranks of each step, as far as it was observed."""
    unanimity: dict[str, tuple[float | None, ...]] = {}
    """Share of unanimous elements of each parameter, step by step; null where nothing was recorded."""

    @model_validator(mode="after")
    def _complete(self) -> Records:
        if not self.intervals:
            raise ValueError("no interval was recorded: train for some more steps")
        known = set(self.elements)
        for interval in self.intervals:
            stranger = next((name for name in interval.parameters if name not in known), None)
            if stranger is not None:
                raise ValueError(f"interval from step {interval.first}: parameter {stranger!r} is not among elements")
        return self


def save_records(records: Records, path: str | os.PathLike[str]) -> None:
    """Write records as JSON; ``OSError`` if that fails."""
    Path(path).write_text(records.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load_records(path: str | os.PathLike[str]) -> Records:
    """Read records.

    Raises
    ------
    RecordsError
        If the file is none; the message names the first place that is wrong.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise RecordsError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    try:
        document = from_json(data, max_bytes=MAX_RECORD_BYTES, max_nodes=_MAX_NODES)
        return Records.model_validate_json(json.dumps(document))
    except DocumentError as error:
        raise RecordsError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "records"
        raise RecordsError(f"{path}: {where}: {first['msg']}") from None
