"""The form of a saved state, so that a file that is not one is refused before anything has changed.

A checkpoint may be cut short, edited, of another program or hostile. ``torch.load(weights_only=True)`` keeps code out;
what is left are dicts, lists, numbers, texts and tensors, and here is what they must be. What a state must have to fit
one run (its parameters, regions, world) the parts check that take it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from neuron_fabric.runtime.codec import MAX_WORLD
from neuron_fabric.runtime.controller import Mode
from neuron_fabric.runtime.document import key_path
from neuron_fabric.runtime.reasons import Reason

__all__ = ["STATE_VERSION", "SavedState", "read_state", "read_steering"]

STATE_VERSION = 1

_MOST = 1 << 62


def _plain(value: object) -> object:
    # Where a float is wanted, even a strict model takes whatever turns itself into one, as a tensor does.
    if type(value) not in (int, float):
        raise ValueError(f"must be a number, not {type(value).__name__}")
    return value


Version = Annotated[int, Field(ge=STATE_VERSION, le=STATE_VERSION)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Step = Annotated[int, Field(ge=-1, le=_MOST)]
World = Annotated[int, Field(ge=1, le=MAX_WORLD)]
_Plain = BeforeValidator(_plain)
Float = Annotated[float, _Plain]
Positive = Annotated[float, Field(gt=0), _Plain]
NotNegative = Annotated[float, Field(ge=0), _Plain]
Share = Annotated[float, Field(ge=0, le=1), _Plain]
AnyFloat = Annotated[float, Field(allow_inf_nan=True), _Plain]
SavedMode = Annotated[Mode, Field(strict=False)]
SavedReason = Annotated[Reason, Field(strict=False)]
_Row = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


class SavedDetector(_Saved):
    """Of :class:`neuron_fabric.runtime.health.HealthMonitor`: one detrended CUSUM."""

    count: Count
    trend: Float
    variance: NotNegative
    total: NotNegative
    latched: bool
    seen: Step


class SavedBound(_Saved):
    """Of the same: a signal with a bound."""

    above: Count
    latched: bool


class SavedHealth(_Saved):
    """Of :class:`neuron_fabric.runtime.health.HealthMonitor`."""

    version: Version
    world: World
    step: Step
    overflows: list[Step]
    loss: SavedDetector
    votes: dict[str, SavedDetector]
    bounds: dict[str, SavedBound]
    alarmed: Step


class SavedGate(_Saved):
    """Of :class:`neuron_fabric.runtime.admission.Admission`: a switch."""

    is_open: bool
    since: Count


class SavedAdmission(_Saved):
    """Of :class:`neuron_fabric.runtime.admission.Admission`."""

    averages: dict[str, NotNegative]
    load: SavedGate
    busy: str
    failures: Count
    wait: Count
    well: Count
    cost: dict[str, SavedGate]


class SavedController(_Saved):
    """Of :class:`neuron_fabric.runtime.controller.PlanController`."""

    version: Version
    step: Count
    mode: SavedMode
    cooling: Count
    stage: Count
    trial: Count
    spent: Count
    steady: Count
    learning_rates: list[NotNegative]
    withdrawn: dict[str, SavedReason]
    regions: list[str]
    classes: list[Annotated[int, Field(ge=-_MOST, le=_MOST)]]
    alarms: list[Annotated[tuple[Step, SavedReason, str, list[str], AnyFloat, AnyFloat], _Row]]
    health: SavedHealth
    admission: SavedAdmission

    @model_validator(mode="after")
    def _fits_itself(self) -> SavedController:
        if self.stage and self.stage >= len(self.classes):
            raise ValueError(f"stage {self.stage} of {len(self.classes)} classes")
        unknown = sorted(self.withdrawn.keys() - set(self.regions))
        if unknown:
            raise ValueError(f"region {unknown[0]!r} was withdrawn and is none")
        if self.health.step >= self.step:
            raise ValueError(f"health knows of step {self.health.step}, before step {self.step} has run")
        return self


class SavedDecision(_Saved):
    """Of :class:`neuron_fabric.runtime.controller.Decision`."""

    step: Count
    mode: SavedMode
    routes: dict[str, Annotated[tuple[bool, SavedReason, str], _Row]]
    is_probe: bool
    digest: Count


class SavedSteering(_Saved):
    """Of :class:`neuron_fabric.runtime.steering.Steering`: ``current`` is the decision of the step to come."""

    controller: SavedController
    current: SavedDecision

    @model_validator(mode="after")
    def _fits_itself(self) -> SavedSteering:
        if self.current.step != self.controller.step - 1:
            raise ValueError(f"a decision of step {self.current.step} beside a controller at {self.controller.step}")
        if self.current.routes.keys() != set(self.controller.regions):
            raise ValueError("the decision's regions are not those of the controller")
        return self


class SavedState(_Saved):
    """Of :class:`neuron_fabric.runtime.hook.NeuronFabricState`.

    ``steering`` is in the form of :class:`SavedSteering`, which whoever takes it over checks.
    """

    version: Version
    world: World
    rank: Count
    step: Count
    loss_scale: Positive
    residuals: dict[str, torch.Tensor]
    sparse: list[str]
    zero_share: dict[str, Share]
    traffic: dict[str, Count]
    fallbacks: dict[str, Count]
    steering: dict[str, Any] | None

    def residuals_like(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The residuals, if they are of the parameters of ``own`` and as large; ``ValueError`` if not."""
        for names, where in (
            (self.residuals.keys() - own.keys(), "the state has"),
            (own.keys() - self.residuals.keys(), "this plan has"),
        ):
            if names:
                raise ValueError(f"state: only {where} a residual of parameter {min(names)!r}")
        for name, here in own.items():
            saved = self.residuals[name]
            if saved.dtype != here.dtype or saved.shape != here.shape or saved.layout is not torch.strided:
                raise ValueError(
                    f"state: the residual of parameter {name!r} is {saved.dtype} of shape {tuple(saved.shape)} and "
                    f"must be {here.dtype} of shape {tuple(here.shape)}"
                )
            if saved.device.type != "cpu" or not bool(torch.isfinite(saved).all()):
                raise ValueError(f"state: the residual of parameter {name!r} is not finite or not on the CPU")
        return self.residuals

    def only_of(self, parameters: Mapping[str, object]) -> None:
        """``ValueError`` if something is said of a parameter that is none of these."""
        unknown = sorted({*self.sparse, *self.zero_share} - parameters.keys())
        if unknown:
            raise ValueError(f"state: it knows a parameter {unknown[0]!r}, which this model has not")


def read_state(state: object) -> SavedState:
    """What ``NeuronFabricState.state_dict`` gave, checked; ``ValueError`` with the first thing that is wrong.

    The tensors are those of ``state``, not copies.
    """
    version = state.get("version") if isinstance(state, Mapping) else STATE_VERSION
    if type(version) is int and STATE_VERSION < version <= _MOST:
        raise ValueError(f"state: version {version!r} where {STATE_VERSION} is known")
    return _read(SavedState, state, "state")


def read_steering(state: object) -> SavedSteering:
    """What ``Steering.state_dict`` gave, checked; ``ValueError`` with the first thing that is wrong."""
    return _read(SavedSteering, state, "steering state")


_Model = TypeVar("_Model", bound=_Saved)


def _read(model: type[_Model], state: object, what: str) -> _Model:
    try:
        return model.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = key_path(first["loc"]) if first["loc"] else "the whole"
        raise ValueError(f"{what}: {where}: {first['msg']}; it is damaged, or not a state of this version") from None
