"""What a model is: the names, shapes, dtypes and ties of its parameters, whatever wraps it or parts of it.

Names are those of the bare model. A module is taken for a wrapper, and its inner module takes its place, if

* it is a DistributedDataParallel or a DataParallel;
* it holds its inner module under one of the names that torch reserves for that (:data:`RESERVED`), as
  ``torch.compile``, FSDP and activation checkpointing do, wherever in the model it stands;
* its class says so: ``neuron_fabric_wraps = "name of the child"``;
* it stands outside of everything else and all its parameters are those of one child called ``module``, as with the
  wrappers that people write. ``neuron_fabric_wraps = None`` in its class says that it is no wrapper.

So a submodule called ``module`` inside a model keeps its name. A wrapper with parameters of its own is refused: whether
they are the model's would be a guess.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["RESERVED", "Fingerprint", "NamedParameter", "ParameterSpec", "fingerprint", "walk_parameters"]

RESERVED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Children that only wrappers have: torch.compile's, FSDP's and those of activation checkpointing and offloading."""
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_DECLARATION = "neuron_fabric_wraps"
_FLATTENED = "_flat_param"
_SPEC = re.compile(r"([a-z][a-z0-9_]{0,31})\[((?:\d{1,15}(?:, ?\d{1,15}){0,15})?)\]")


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """One parameter of a model.

    Attributes
    ----------
    names : tuple of str
        All names that it has in the bare model; more than one if it is tied. The first is the one that the model
        registers first, as ``named_parameters`` has it.
    parameter : nn.Parameter
    owners : tuple of nn.Module
        The modules that hold it, one for each name.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    owners: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True)
class ParameterSpec:
    """Shape and dtype of a parameter; as text ``float32[64, 32]``, and ``float32[]`` for a scalar."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> ParameterSpec:
        """The inverse of ``str``. ``ValueError`` for anything else."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:60]!r} is no dtype and shape; write them like 'float32[64, 32]'")
        return cls(tuple(int(size) for size in match[2].split(",") if size), match[1])


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal for two models to be the same one. Independent of the order of registration.

    Attributes
    ----------
    parameters : mapping of str to ParameterSpec
        Every name, frozen parameters and all names of tied ones too.
    tied : tuple of tuple of str
        The names of each parameter that has several, sorted.
    """

    parameters: Mapping[str, ParameterSpec]
    tied: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(sorted(self.parameters.items())))
        object.__setattr__(self, "tied", tuple(sorted(tuple(sorted(names)) for names in self.tied)))
        seen: set[str] = set()
        for names in self.tied:
            for name in names:
                if name not in self.parameters or name in seen:
                    raise ValueError(f"tied name {name!r} " + ("is tied twice" if name in seen else "is no parameter"))
                seen.add(name)
            if len(names) < 2 or len({self.parameters[name] for name in names}) > 1:
                raise ValueError(f"tied names {', '.join(names)}: two or more are needed, of one shape and dtype")

    @property
    def digest(self) -> str:
        """``sha256:`` and 64 hexadecimal digits."""
        content = {"parameters": {name: str(spec) for name, spec in self.parameters.items()}, "tied": self.tied}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: Fingerprint, us: str = "profile", them: str = "model") -> str | None:
        """The first difference in words, by name; None if there is none.

        >>> mine = Fingerprint({"layer2.weight": ParameterSpec((64, 32), "float32")})
        >>> mine.difference(Fingerprint({"layer2.weight": ParameterSpec((64, 64), "float32")}))
        'profile has layer2.weight (64, 32), model has (64, 64)'
        """
        for name in sorted(self.parameters.keys() | other.parameters.keys()):
            ours, theirs = self.parameters.get(name), other.parameters.get(name)
            if ours is None or theirs is None:
                has, lacks, spec = (us, them, ours) if ours is not None else (them, us, theirs)
                return f"{has} has {name} {_words(spec)}, {lacks} has no such parameter"
            if ours.shape != theirs.shape:
                return f"{us} has {name} {ours.shape}, {them} has {theirs.shape}"
            if ours.dtype != theirs.dtype:
                return f"{us} has {name} in {ours.dtype}, {them} has it in {theirs.dtype}"
        for ours_tied, theirs_tied, has, lacks in (
            (self.tied, other.tied, us, them),
            (other.tied, self.tied, them, us),
        ):
            for names in ours_tied:
                if names not in theirs_tied:
                    return f"{has} ties {' and '.join(names)}, {lacks} does not"
        return None


def fingerprint(module: nn.Module) -> Fingerprint:
    """The fingerprint of a live model. Raises as :func:`walk_parameters` does."""
    parameters = walk_parameters(module)
    return Fingerprint(
        {name: _spec(each) for each in parameters for name in each.names},
        tuple(each.names for each in parameters if len(each.names) > 1),
    )


def walk_parameters(module: nn.Module) -> list[NamedParameter]:
    """All parameters of a model, trained or frozen, in the order in which the model registers them.

    Raises
    ------
    ValueError
        If a wrapper has parameters of its own, if FSDP has flattened parameters into one, or if a lazy module has no
        shapes yet; the message names it.
    """
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, parameter, owner in _walk(module, "", (), outside=True):
        if name.rpartition(".")[2] == _FLATTENED:
            raise ValueError(
                f"{name!r} is many parameters that FSDP has made one; wrap the model with use_orig_params=True"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the model once before it is looked at")
        by_id[id(parameter)] = parameter
        known = names.setdefault(id(parameter), [])
        if name not in known:
            known.append(name)
            owners.setdefault(id(parameter), []).append(owner)
    return [NamedParameter(tuple(names[key]), parameter, tuple(owners[key])) for key, parameter in by_id.items()]


def _walk(
    module: nn.Module, prefix: str, above: tuple[int, ...], *, outside: bool
) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    if id(module) in above:  # a child that holds its parent; its parameters have had their names
        return
    above = (*above, id(module))
    inner = _inner(module, outside=outside)
    if inner is not None:
        yield from _walk(inner, prefix, above, outside=outside)
        return
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter, module
    for name, child in module._modules.items():  # named_children would leave out the second name of a shared child
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.", above, outside=False)


def _inner(module: nn.Module, *, outside: bool) -> nn.Module | None:
    """What a wrapper wraps; None if ``module`` is no wrapper."""
    children = module._modules
    declared: Any = getattr(type(module), _DECLARATION, "")
    if isinstance(module, _PARALLEL):
        key = "module"
    elif declared is None:
        return None
    elif declared:
        key = str(declared)
        if children.get(key) is None:
            raise ValueError(f"{_class(module)} says that it wraps {key!r}, but has no such child module")
    else:
        key = next((name for name in RESERVED if name in children), "")
        if not key and outside and children.get("module") is not None and _beside(module, "module") is None:
            key = "module"
    inner = children.get(key) if key else None
    if inner is not None and (own := _beside(module, key)) is not None:
        raise ValueError(
            f"{_class(module)} wraps its child {key!r} and holds parameter {own!r} beside it: whether that is the "
            "model's cannot be told; move it into the model"
        )
    return inner


def _beside(module: nn.Module, key: str) -> str | None:
    """The first parameter of a module that is not its child's."""
    # Not by the names that module.named_parameters() gives: FSDP takes its own part out of those.
    for name, _ in module.named_parameters(recurse=False):
        return name
    for other, child in module._modules.items():
        if other != key and child is not None:
            for name, _ in child.named_parameters():
                return f"{other}.{name}"
    return None


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _spec(each: NamedParameter) -> ParameterSpec:
    return ParameterSpec(tuple(each.parameter.shape), _dtype(each.parameter.dtype))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(spec: ParameterSpec | None) -> str:
    return "" if spec is None else f"{spec.shape} {spec.dtype}"
