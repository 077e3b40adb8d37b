"""Plans: which route each region of a model takes.

A region is a named set of parameters, found by name patterns; a plan is an ordered list of regions. The first region
that matches a parameter has it; what none matches goes FP32.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = [
    "SPARSE_MEMORY",
    "SPARSE_SHARE",
    "ErrorFeedback",
    "Plan",
    "Region",
    "ResultFormat",
    "Route",
    "bound_parameters",
]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
SPARSE_SHARE = 0.05
"""Above this share of exact zeros a segment without error feedback leaves the binary route (they would vote noise)."""
SPARSE_MEMORY = 0.9
"""The share is an exponential average over steps with this memory, begun at 0: a unit that is dead for one batch is no
sparse segment, while an embedding with nine rows of ten unused is found at its first step."""


class Route(enum.Enum):
    """What a region's gradient takes."""

    FP32 = "fp32"
    BINARY = "binary"


class ResultFormat(enum.Enum):
    """What comes back for a low-bit region: exact counts, or the majority's sign with ties as 0."""

    TALLY = "tally"
    MAJORITY = "majority"


@dataclass(frozen=True)
class ErrorFeedback:
    """Keep what a vote left behind and add it to the next gradient.

    Parameters
    ----------
    clip : float or None
        Bound of the residual per element, in units of the segment's scale. Unclipped residuals settle above the
        gradient itself and turn it away; 1.0 is the measured choice.
    decay : float
        Factor a step, 0 to 1.
    """

    clip: float | None = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip >= 0:
            raise ValueError(f"error feedback: clip must not be negative, but is {self.clip}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"error feedback: decay must be 0 to 1, but is {self.decay}")


@dataclass(frozen=True)
class Region:
    """A named set of parameters with one route.

    Parameters
    ----------
    name : str
    patterns : sequence of str
        Shell patterns (``*``, ``?``, ``[...]``) on parameter names without wrapper prefixes. Each must match.
    route : Route
    result_format : ResultFormat
    margin : int
        For ``majority``: votes with ``|S| <= margin`` decode to 0.
    unit_scale : bool
        For ``majority``: decode votes to exactly -1, 0 or +1 instead of the segment's mean magnitude. This is signSGD
        with majority vote as published; it needs a learning rate of its own and is here to be compared with.
    error_feedback : ErrorFeedback, optional
    max_ndim : int, optional
        Match only parameters with at most this many dimensions (1: biases and norms).
    embeddings : bool
        Whether weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` may be in a low-bit region. Their gradients are
        mostly zeros, which make bad votes, so they go FP32 unless asked for.
    may_be_empty : bool
        Whether a pattern that matches no parameter is no error.
    """

    name: str
    patterns: Sequence[str] = ("*",)
    route: Route = Route.BINARY
    result_format: ResultFormat = ResultFormat.TALLY
    margin: int = 0
    unit_scale: bool = False
    error_feedback: ErrorFeedback | None = None
    max_ndim: int | None = None
    embeddings: bool = False
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str):
            raise TypeError(f"region {self.name!r}: patterns is a sequence of patterns; write ({self.patterns!r},)")
        object.__setattr__(self, "patterns", tuple(self.patterns))
        object.__setattr__(self, "route", Route(self.route))
        object.__setattr__(self, "result_format", ResultFormat(self.result_format))
        if not self.patterns:
            raise ValueError(f"region {self.name!r}: no patterns")
        if self.margin < 0:
            raise ValueError(f"region {self.name!r}: margin must not be negative, but is {self.margin}")
        if self.route is Route.FP32 and (self.error_feedback or self.unit_scale or self.margin):
            raise ValueError(f"region {self.name!r}: an fp32 region has no margin, unit scale or error feedback")
        if self.result_format is not ResultFormat.MAJORITY and (self.margin or self.unit_scale):
            raise ValueError(f"region {self.name!r}: margin and unit scale are for majority results, not for a tally")
        if self.error_feedback is not None and self.unit_scale:
            raise ValueError(f"region {self.name!r}: error feedback needs the segment's scale, not a unit scale")

    def matches(self, name: str, ndim: int, pattern: str | None = None) -> bool:
        """Whether a parameter is in this region (by one pattern only, if given)."""
        if self.max_ndim is not None and ndim > self.max_ndim:
            return False
        return any(fnmatch.fnmatchcase(name, each) for each in ((pattern,) if pattern else self.patterns))


@dataclass(frozen=True)
class Plan:
    """An ordered list of regions; what none matches goes FP32."""

    regions: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", tuple(self.regions))
        names = [region.name for region in self.regions]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"plan: region {sorted(twice)[0]!r} is declared twice")

    @classmethod
    def fp32(cls) -> Plan:
        """Everything FP32."""
        return cls()

    @classmethod
    def low_bit(cls, *, keep_fp32: Sequence[str] = (), one_d_fp32: bool = False, **body: object) -> Plan:
        """One low-bit region, with the parameters of ``keep_fp32`` (patterns) and optionally all 1-D ones on FP32.

        ``body`` are further fields of that :class:`Region`.
        """
        regions = []
        if keep_fp32:
            regions.append(Region("kept", keep_fp32, Route.FP32))
        if one_d_fp32:
            regions.append(Region("one_dimensional", ("*",), Route.FP32, max_ndim=1, may_be_empty=True))
        regions.append(Region("body", **body))  # type: ignore[arg-type]
        return cls(tuple(regions))

    def bind(self, module: nn.Module) -> dict[str, Region | None]:
        """Give every trained parameter its region, None for FP32.

        Raises
        ------
        ValueError
            If a pattern matches no parameter, if a low-bit region has a parameter that is not float32, or one that
            gets sparse gradients; the message names it.
        """
        parameters = bound_parameters(module)
        for region in self.regions:
            for pattern in () if region.may_be_empty else region.patterns:
                if not any(region.matches(name, p.ndim, pattern) for name, p in parameters.items()):
                    limit = "" if region.max_ndim is None else f" of at most {region.max_ndim} dimension(s)"
                    raise ValueError(
                        f"region {region.name!r}: pattern {pattern!r} matches no parameter{limit}; "
                        f"the model has {_some(list(parameters))}"
                    )
        refuse_sparse_gradients(module)
        embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, _EMBEDDINGS)}
        bound: dict[str, Region | None] = {}
        for name, parameter in parameters.items():
            region_of = next((r for r in self.regions if r.matches(name, parameter.ndim)), None)
            if (
                region_of is None
                or region_of.route is Route.FP32
                or (id(parameter) in embeddings and not region_of.embeddings)
            ):
                bound[name] = None
            elif parameter.dtype != torch.float32:
                raise ValueError(
                    f"region {region_of.name!r}: parameter {name!r} is {parameter.dtype}; the low-bit route takes "
                    "torch.float32: give it an fp32 region, which keeps its own dtype"
                )
            else:
                bound[name] = region_of
        return bound


def bound_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by the names that they have in the bare model, whatever wraps it or parts of it.

    DDP and DataParallel are taken off the outside; ``torch.compile`` puts ``_orig_mod`` into names, wherever it was
    applied. ``ValueError`` if two parameters end with one name.
    """
    while isinstance(module, _WRAPPERS) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, _WRAPPERS) else module._orig_mod  # type: ignore[assignment]
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        bare = ".".join(part for part in name.split(".") if part != "_orig_mod")
        if bare in parameters:
            raise ValueError(
                f"two parameters of the model are called {bare!r} once compilation is taken off their names"
            )
        if parameter.requires_grad:
            parameters[bare] = parameter
    return parameters


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ``ValueError`` naming the first layer whose gradients are sparse tensors."""
    for name, layer in module.named_modules():
        if isinstance(layer, _EMBEDDINGS) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) makes sparse gradients, which no bucket can hold; build it "
                "with sparse=False"
            )


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
