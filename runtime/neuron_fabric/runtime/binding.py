"""Binding: a profile to a live model, or a refusal that says where they differ."""

from __future__ import annotations

from torch import nn

from neuron_fabric.runtime.fingerprint import fingerprint
from neuron_fabric.runtime.plan import Plan, Region
from neuron_fabric.runtime.profile import Profile

__all__ = ["BindingError", "bind", "check_model", "check_world", "plan_for"]


class BindingError(ValueError):
    """A profile that does not fit: what it has and what there is."""


def plan_for(profile: Profile, module: nn.Module, world: int) -> Plan:
    """The plan of a profile for this model and number of workers, with everything admitted.

    Parameters
    ----------
    profile : Profile
    module : nn.Module
        May be wrapped, also in parts; :mod:`neuron_fabric.runtime.fingerprint` says how.
    world : int
        Number of workers.

    Raises
    ------
    BindingError
        If the profile is for another model or other world sizes, or a region does not fit the model; the message names
        the profile and the first difference.
    """
    _bound(profile, module, world)
    return profile.plan()


def bind(profile: Profile, module: nn.Module, world: int) -> dict[str, Region | None]:
    """The region of each trained parameter, None for FP32, in the model's order.

    Names are those of the bare model; a tied parameter has the first of its names. The first region of the profile
    that matches has a parameter. Arguments and errors as :func:`plan_for`.
    """
    return _bound(profile, module, world)


def check_world(profile: Profile, world: int) -> None:
    """Raise ``BindingError`` unless the profile holds for this many workers."""
    if world not in profile.world:
        raise BindingError(
            f"profile {profile.name!r} holds for {profile.world} workers, not for {world}: use so many, or calibrate "
            f"for {world}"
        )


def check_model(profile: Profile, module: nn.Module) -> None:
    """Raise ``BindingError`` with the first difference unless the profile is for this model, or for any."""
    if profile.model is None:
        return
    try:
        live = fingerprint(module)
    except ValueError as error:
        raise BindingError(f"profile {profile.name!r}: {error}") from error
    difference = profile.model.fingerprint().difference(live)
    if difference is not None:
        raise BindingError(
            f"profile {profile.name!r} is for another model: {difference}; use the profile of this model, or calibrate "
            "anew"
        )


def _bound(profile: Profile, module: nn.Module, world: int) -> dict[str, Region | None]:
    check_world(profile, world)
    check_model(profile, module)
    try:
        return profile.plan().bind(module)
    except ValueError as error:
        raise BindingError(f"profile {profile.name!r}: {error}") from error
