"""Plans: which route each region of a model takes.

A region is a named set of parameters, found by name patterns and by the type of the module that holds them; a plan is
an ordered list of regions. The first region that matches a parameter has it; what none matches goes FP32.
"""

from __future__ import annotations

import enum
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from neuron_fabric.runtime.fingerprint import NamedParameter, walk_parameters

__all__ = [
    "DEFAULT_GATE",
    "SPARSE_MEMORY",
    "SPARSE_SHARE",
    "ErrorFeedback",
    "Plan",
    "Region",
    "ResultFormat",
    "Route",
    "bound_parameters",
]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
SPARSE_SHARE = 0.05
"""Above this share of exact zeros a segment without error feedback leaves the binary route (they would vote noise)."""
SPARSE_MEMORY = 0.9
"""The share is an exponential average over steps with this memory, begun at 0: a unit that is dead for one batch is no
sparse segment, while an embedding with nine rows of ten unused is found at its first step."""
DEFAULT_GATE = 0.7
"""Of the ternary route, in units of a segment's mean magnitude: the best ternary values for normal and for uniform
elements have theirs near this (Li, Zhang and Liu 2016, arXiv 1605.04711)."""


class Route(enum.Enum):
    """What a region's gradient takes."""

    FP32 = "fp32"
    BINARY = "binary"
    TERNARY = "ternary"


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
        Shell patterns (``*``, ``?``, ``[...]``) on parameter names without wrapper prefixes. Each must match. A tied
        parameter is matched by any of its names.
    module_types : sequence of str
        If not empty, only parameters of modules of these classes, or of classes that inherit from them, among those
        that the patterns match: a class name (``Conv2d``) or a dotted path (``torch.nn.Conv2d``). Each must match.
    route : Route
    gate : float, optional
        For the ternary route: what is under ``gate`` times the segment's mean magnitude sends nothing;
        :data:`DEFAULT_GATE` if None.
    result_format : ResultFormat
    margin : int
        For ``majority``: votes with ``|S| <= margin`` decode to 0.
    unit_scale : bool
        For ``majority``: decode votes to exactly -1, 0 or +1 instead of the segment's mean magnitude. This is signSGD
        with majority vote as published; it needs a learning rate of its own and is here to be compared with.
    zeros : str
        For ``binary``: what an exact zero votes. ``parity``: by the parity of rank + step, so that zeros cancel, and
        what is too sparse leaves the low-bit route. ``positive``: always +1, and sparse segments stay: this is what a
        scheme does that takes the sign bit for the sign. It is biased and here to be compared with.
    error_feedback : ErrorFeedback, optional
    max_ndim : int, optional
        Match only parameters with at most this many dimensions (1: biases and norms).
    embeddings : bool
        Whether weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` may be in a low-bit region. Their gradients are
        mostly zeros, which make bad votes, so they go FP32 unless asked for. On the ternary route zeros do not vote.
    may_be_empty : bool
        Whether a pattern or a type that matches no parameter is no error.
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
    module_types: Sequence[str] = ()
    gate: float | None = None
    zeros: str = "parity"

    def __post_init__(self) -> None:
        for field, what in (("patterns", "patterns"), ("module_types", "names")):
            given = getattr(self, field)
            if isinstance(given, str):
                raise TypeError(f"region {self.name!r}: {field} is a sequence of {what}; write ({given!r},)")
            object.__setattr__(self, field, tuple(given))
        object.__setattr__(self, "route", Route(self.route))
        object.__setattr__(self, "result_format", ResultFormat(self.result_format))
        if not self.patterns:
            raise ValueError(f"region {self.name!r}: no patterns")
        if self.margin < 0:
            raise ValueError(f"region {self.name!r}: margin must not be negative, but is {self.margin}")
        if self.route is Route.FP32 and (self.error_feedback or self.unit_scale or self.margin):
            raise ValueError(f"region {self.name!r}: an fp32 region has no margin, unit scale or error feedback")
        if self.zeros not in ("parity", "positive"):
            raise ValueError(f"region {self.name!r}: zeros vote by parity or positive, not {self.zeros!r}")
        if self.zeros != "parity" and self.route is not Route.BINARY:
            raise ValueError(f"region {self.name!r}: zeros vote on the binary route alone, not on {self.route.value}")
        if self.gate is not None and self.route is not Route.TERNARY:
            raise ValueError(f"region {self.name!r}: a gate is for the ternary route, not for {self.route.value}")
        if self.gate is not None and not 0 <= self.gate < float("inf"):
            raise ValueError(f"region {self.name!r}: gate must be at least 0 and finite, but is {self.gate}")
        if self.route is Route.TERNARY and self.gate is None:
            object.__setattr__(self, "gate", DEFAULT_GATE)
        if self.result_format is not ResultFormat.MAJORITY and (self.margin or self.unit_scale):
            raise ValueError(f"region {self.name!r}: margin and unit scale are for majority results, not for a tally")
        if self.error_feedback is not None and self.unit_scale:
            raise ValueError(f"region {self.name!r}: error feedback needs the segment's scale, not a unit scale")

    def matches(self, parameter: NamedParameter, *, pattern: str | None = None, module_type: str | None = None) -> bool:
        """Whether a parameter is in this region (by one pattern or one type only, if given)."""
        if self.max_ndim is not None and parameter.parameter.ndim > self.max_ndim:
            return False
        patterns = self.patterns if pattern is None else (pattern,)
        types = self.module_types if module_type is None else (module_type,)
        # Of a tied parameter, name and type of one and the same place must match.
        return any(
            any(fnmatch.fnmatchcase(name, each) for each in patterns)
            and (not types or any(_is_a(type(owner), each) for each in types))
            for name, owner in zip(parameter.names, parameter.owners, strict=True)
        )

    def unmatched(self, parameters: Sequence[NamedParameter]) -> str | None:
        """The first pattern or type that matches no parameter, in words; None if there is none."""
        for pattern in self.patterns:
            if not any(self.matches(each, pattern=pattern) for each in parameters):
                among = f" of a module of type {' or '.join(self.module_types)}" if self.module_types else ""
                return f"pattern {pattern!r} matches no parameter{among}"
        for module_type in self.module_types:
            if not any(self.matches(each, module_type=module_type) for each in parameters):
                return f"module type {module_type!r} matches no parameter among those of its patterns"
        return None


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

        Frozen parameters count as matched, though they end in no bucket and are not in what is returned.

        Raises
        ------
        ValueError
            If a pattern or a module type matches no parameter, if a low-bit region has a parameter that is not
            float32, or one that gets sparse gradients; the message names it.
        """
        parameters = walk_parameters(module)
        for region in self.regions:
            lost = None if region.may_be_empty else region.unmatched(parameters)
            if lost is not None:
                limit = "" if region.max_ndim is None else f" of at most {region.max_ndim} dimension(s)"
                raise ValueError(
                    f"region {region.name!r}: {lost}{limit}; the model has {_some([each.name for each in parameters])}"
                )
        refuse_sparse_gradients(module)
        bound: dict[str, Region | None] = {}
        for each in parameters:
            if not each.parameter.requires_grad:
                continue
            region_of = next((region for region in self.regions if region.matches(each)), None)
            embedding = any(isinstance(owner, _EMBEDDINGS) for owner in each.owners)
            if region_of is None or region_of.route is Route.FP32 or (embedding and not region_of.embeddings):
                bound[each.name] = None
            elif each.parameter.dtype != torch.float32:
                raise ValueError(
                    f"region {region_of.name!r}: parameter {each.name!r} is {each.parameter.dtype}; the low-bit route "
                    "takes torch.float32: give it an fp32 region, which keeps its own dtype"
                )
            else:
                bound[each.name] = region_of
        return bound


def bound_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by the names that they have in the bare model, whatever wraps it or parts of it.

    A tied parameter has the name that the model registers first. Raises as
    :func:`~neuron_fabric.runtime.fingerprint.walk_parameters` does, which says what a wrapper is.
    """
    return {each.name: each.parameter for each in walk_parameters(module) if each.parameter.requires_grad}


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ``ValueError`` naming the first layer whose gradients are sparse tensors."""
    for name, layer in module.named_modules():
        if isinstance(layer, _EMBEDDINGS) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) makes sparse gradients, which no bucket can hold; build it "
                "with sparse=False"
            )


def _is_a(cls: type, name: str) -> bool:
    """Whether a class, or one that it inherits from below ``nn.Module``, has this name or dotted path."""
    where, _, last = name.rpartition(".")
    for each in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if name in (each.__name__, f"{each.__module__}.{each.__qualname__}"):
            return True
        # torch.nn.Conv2d is defined elsewhere. What is looked at is only what somebody has imported already.
        if where and getattr(sys.modules.get(where), "__dict__", {}).get(last) is each:
            return True
    return False


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
