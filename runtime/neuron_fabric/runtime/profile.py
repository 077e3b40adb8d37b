"""The calibrated profile: where one bit may be trusted, under which conditions, and how that was found out.

A profile is a YAML or JSON file of one schema. All but ``schema_version`` and ``name`` has a default. It carries a hash
of its content, so that ranks can compare what they have loaded and an edited file does not pass for a calibrated one.

    profile = load("digits.yaml")
    plan = plan_for(profile, ddp, world=4)        # neuron_fabric.runtime.binding

Nothing of a file is executed. ``docs/profile.md`` describes each key; its table is made from this module.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from neuron_fabric.runtime.admission import AdmissionPolicy, RegionPolicy
from neuron_fabric.runtime.codec import MAX_WORLD
from neuron_fabric.runtime.controller import ControllerPolicy, RecoveryPolicy
from neuron_fabric.runtime.document import MAX_BYTES, DocumentError, from_json, from_yaml, key_path, to_yaml
from neuron_fabric.runtime.fingerprint import Fingerprint, ParameterSpec
from neuron_fabric.runtime.health import HealthPolicy
from neuron_fabric.runtime.phases import PhasePolicy
from neuron_fabric.runtime.plan import ErrorFeedback, Plan, Region, ResultFormat, Route

__all__ = [
    "SCHEMA_VERSION",
    "CalibrationTarget",
    "FeedbackSpec",
    "ModelSection",
    "Profile",
    "ProfileError",
    "Provenance",
    "RegionSpec",
    "Run",
    "WorldSizes",
    "dumps",
    "key_table",
    "load",
    "loads",
    "save",
]

SCHEMA_VERSION = 1
_HASH = "hash"
_MOST_ERRORS = 5

Syntax = Literal["yaml", "json"]


class ProfileError(ValueError):
    """A profile that is refused: the key path, the value and the rule."""


World = Annotated[int, Field(ge=1, le=MAX_WORLD)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=2000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class _Section(BaseModel):
    # The policies are plain dataclasses that check themselves; this is what they are read by, too.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        revalidate_instances="always",
        use_attribute_docstrings=True,
    )


class ModelSection(_Section):
    """Fingerprint of the model that was calibrated."""

    parameters: dict[Name, str]
    """Dtype and shape of each parameter, as `float32[64, 32]`, by name; a tied one by all its names."""
    tied: tuple[tuple[Name, ...], ...] = ()
    """Names of one and the same parameter, a list for each."""
    digest: str | None = None
    """Of the two above; written on saving and compared on loading."""

    @model_validator(mode="after")
    def _complete(self) -> ModelSection:
        mine = self.fingerprint()
        if self.digest not in (None, mine.digest):
            raise ValueError(f"digest is {self.digest!r}, but the parameters listed have {mine.digest}")
        self.__dict__.update(_section_fields(mine))
        return self

    def fingerprint(self) -> Fingerprint:
        """As :mod:`neuron_fabric.runtime.fingerprint` has it."""
        specs = {}
        for name, text in self.parameters.items():
            try:
                specs[name] = ParameterSpec.parse(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return Fingerprint(specs, self.tied)

    @classmethod
    def of(cls, fingerprint: Fingerprint) -> ModelSection:
        """The section for a fingerprint."""
        return cls(**_section_fields(fingerprint))


def _section_fields(fingerprint: Fingerprint) -> dict[str, Any]:
    return {
        "parameters": {name: str(spec) for name, spec in fingerprint.parameters.items()},
        "tied": fingerprint.tied,
        "digest": fingerprint.digest,
    }


class WorldSizes(_Section):
    """How many workers a profile holds for; any number if nothing is said. A list is short for sizes."""

    sizes: tuple[World, ...] | None = None
    """Each of these."""
    min: World | None = None
    """Or from here on."""
    max: World | None = None
    """Or up to here, itself included."""

    @model_validator(mode="after")
    def _one_way(self) -> WorldSizes:
        if self.sizes is not None:
            if self.min is not None or self.max is not None:
                raise ValueError("give sizes, or min and max, not both")
            if not self.sizes:
                raise ValueError("no world size at all")
            self.__dict__["sizes"] = tuple(sorted(set(self.sizes)))
        elif self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is larger than max {self.max}")
        return self

    def __contains__(self, world: object) -> bool:
        if not isinstance(world, int):
            return False
        if self.sizes is not None:
            return world in self.sizes
        return (self.min or 1) <= world <= (self.max or MAX_WORLD)

    def __str__(self) -> str:
        if self.sizes is not None:
            return ", ".join(map(str, self.sizes))
        return f"{self.min or 1} to {self.max or MAX_WORLD}"


class FeedbackSpec(_Section):
    """Error feedback: keep what a vote left behind and add it to the next gradient."""

    clip: NotNegative | None = 1.0
    """Bound of the residual per element, in units of the segment's scale; null for none."""
    decay: Share = 1.0
    """Factor on the residual, a step."""


class RegionSpec(_Section):
    """A named set of parameters with one encoding. The first region that matches has a parameter; the rest is FP32."""

    name: Identifier
    """Unique in the profile; telemetry and statistics go by it."""
    patterns: tuple[Name, ...] = ("*",)
    """Shell patterns on parameter names; any name of a tied parameter will do. Each must match something."""
    module_types: tuple[Name, ...] = ()
    """If given, only parameters of modules of these classes: `Conv2d`, or a dotted path as `torch.nn.Conv2d`."""
    max_ndim: Annotated[int, Field(ge=0, le=64)] | None = None
    """If given, only parameters with at most so many dimensions; 1 is for biases and norms."""
    encoding: Literal["fp32", "binary", "ternary"] = "binary"
    """`fp32`, `binary` (one bit up) or `ternary` (two bits up, small elements send nothing)."""
    gate: NotNegative | None = None
    """For `ternary`: what is smaller than this times the segment's mean magnitude sends nothing; 0.7 if null."""
    error_feedback: FeedbackSpec | None = None
    """None by default."""
    result_format: Literal["tally", "majority"] = "tally"
    """What comes back: exact counts, or the majority's sign with ties as 0."""
    margin: Annotated[int, Field(ge=0, le=MAX_WORLD)] = 0
    """For `majority`: a vote that is decided by no more than this is a tie."""
    embeddings: bool = False
    """Whether weights of embeddings may be in here; else they go FP32."""
    may_be_empty: bool = False
    """Whether a pattern or type that matches nothing is no error."""
    sensitivity: Annotated[int, Field(ge=0, le=99)] = 0
    """Regions come back from an alarm in this order, 0 first: the most robust ones."""

    @model_validator(mode="after")
    def _as_plan(self) -> RegionSpec:
        self.__dict__["gate"] = self.region().gate  # a default that is used is written down
        return self

    def region(self) -> Region:
        """What a :class:`~neuron_fabric.runtime.plan.Plan` is made of. ``ValueError`` if its rules say no."""
        feedback = self.error_feedback
        return Region(
            self.name,
            self.patterns,
            Route(self.encoding),
            ResultFormat(self.result_format),
            self.margin,
            error_feedback=None if feedback is None else ErrorFeedback(feedback.clip, feedback.decay),
            max_ndim=self.max_ndim,
            embeddings=self.embeddings,
            may_be_empty=self.may_be_empty,
            module_types=self.module_types,
            gate=self.gate,
        )


class CalibrationTarget(_Section):
    """What the calibration had to reach."""

    metric: Identifier = "accuracy"
    """Name of the measure."""
    higher_is_better: bool = True
    """Its direction."""
    tolerance_points: NotNegative = 0.5
    """How much worse than the reference it may be, in points (per cent for accuracy)."""
    reference: Literal["fp32"] = "fp32"
    """What it is compared with."""
    paired_seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    """Pairs of runs, low-bit and reference with the same seed."""


class Run(_Section):
    """One training run of a calibration."""

    policy: Name
    """What was run, as `fp32` or the name of a proposal."""
    seed: int
    """Its seed."""
    metric: float
    """What it reached."""


class Provenance(_Section):
    """How the profile came about. Nothing here changes what is done."""

    workload: Text = ""
    """What was trained."""
    date: datetime.date | None = None
    """When, as 2026-01-31."""
    seeds: tuple[int, ...] = ()
    """Seeds of all runs."""
    runs: tuple[Run, ...] = ()
    """Results of all runs."""
    statistics: dict[Identifier, dict[Identifier, float]] = {}
    """What was measured, by region."""
    versions: dict[Identifier, Text] = {}
    """Packages and their versions."""
    notes: Text = ""
    """Anything else."""

    @model_validator(mode="after")
    def _ordered(self) -> Provenance:
        statistics = {name: dict(sorted(inner.items())) for name, inner in sorted(self.statistics.items())}
        self.__dict__.update(statistics=statistics, versions=dict(sorted(self.versions.items())))
        return self


class Profile(_Section):
    """A calibrated profile."""

    schema_version: Literal[1]
    """1. Another version is another schema."""
    name: Identifier
    """What logs call it."""
    model: ModelSection | None = None
    """The model that it is for; null for any that its patterns fit."""
    world: WorldSizes = WorldSizes()
    """World sizes that it holds for."""
    regions: tuple[RegionSpec, ...] = ()
    """In order of precedence."""
    phases: PhasePolicy = PhasePolicy()
    """In which steps low-bit is admitted at all."""
    health: HealthPolicy = HealthPolicy()
    """When training counts as ill."""
    recovery: RecoveryPolicy = RecoveryPolicy()
    """What follows an alarm."""
    admission: AdmissionPolicy = AdmissionPolicy()
    """What the reducer and the cost model must say."""
    target: CalibrationTarget = CalibrationTarget()
    """What was to be reached."""
    provenance: Provenance = Provenance()
    """How it came about."""

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        names = {region.name for region in self.plan().regions}  # a plan refuses a name that is there twice
        stranger = next((name for name in self.provenance.statistics if name not in names), None)
        if stranger is not None:
            raise ValueError(f"provenance.statistics: {stranger!r} is no region of this profile")
        return self

    def plan(self) -> Plan:
        """The plan when everything is admitted. See :mod:`neuron_fabric.runtime.binding` for one that fits a model."""
        return Plan(tuple(region.region() for region in self.regions))

    def controller_policy(self) -> ControllerPolicy:
        """What the :class:`~neuron_fabric.runtime.controller.PlanController` decides by."""
        return ControllerPolicy(self.health, self.phases, self.admission, self.recovery)

    def region_policies(self) -> tuple[RegionPolicy, ...]:
        """The regions as the controller sees them, in the profile's order."""
        return tuple(
            RegionPolicy(region.name, region.encoding, region.result_format, region.sensitivity)
            for region in self.regions
        )

    @property
    def hash(self) -> str:
        """``sha256:`` and 64 hexadecimal digits, over the canonical JSON of the content with all its defaults."""
        return _hash_of(_content(self))


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file: JSON if it ends in ``.json``, else YAML.

    Raises
    ------
    ProfileError
        If the file is no profile, or its hash is that of another content; the message names path, key, value and rule.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ProfileError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    return loads(data, "json" if path.suffix == ".json" else "yaml", source=str(path))


def loads(data: bytes | str, syntax: Syntax = "yaml", *, source: str = "profile") -> Profile:
    """Read a profile from text; ``source`` is what messages call it. ``ProfileError`` as :func:`load`."""
    try:
        raw = data.encode() if isinstance(data, str) else data
        document = from_json(raw) if syntax == "json" else from_yaml(raw)
    except (DocumentError, UnicodeEncodeError) as error:
        raise ProfileError(f"{source}: {error}") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{source}: a profile is a mapping of keys to values, not {_shown(document)}")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        given = _shown(version) if "schema_version" in document else "missing"
        raise ProfileError(f"{source}: schema_version: {given}; this version of the package reads {SCHEMA_VERSION}")
    claimed = document.pop(_HASH, None)
    if isinstance(document.get("world"), list):
        document["world"] = {"sizes": document["world"]}
    try:
        # Through JSON, so that both syntaxes have one strict schema: a list is a tuple, a text is a date.
        profile = Profile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ProfileError("\n".join(_explained(error, source))) from None
    if claimed is not None and claimed != profile.hash:
        raise ProfileError(
            f"{source}: hash: the file says {_shown(claimed)}, its content has {profile.hash}: it was changed since it "
            "was saved. Calibrate again, or, if the change is meant, take the hash line out"
        )
    return profile


def dumps(profile: Profile, syntax: Syntax = "yaml") -> str:
    """The canonical text of a profile: every key in the schema's order, and the hash at the end."""
    content = {**_content(profile), _HASH: profile.hash}
    if syntax == "json":
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
    return to_yaml(content)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, JSON if it ends in ``.json``, else YAML; the file is there whole or not at all.

    ``ProfileError`` if nobody could load it, as one that is too large.
    """
    path = Path(path)
    syntax: Syntax = "json" if path.suffix == ".json" else "yaml"
    text = dumps(profile, syntax)
    loads(text, syntax, source=str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def key_table() -> str:
    """All keys of the schema with defaults and meaning, as a Markdown table."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | {default} | {meaning} |" for path, default, meaning in _keys(Profile, "")]
    lines.append("| `hash` | none | Of the content; written on saving and compared on loading. |")
    return "\n".join(lines) + "\n"


def _keys(section: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Path, default and meaning of each key of a section and of the sections in it."""
    for name, annotation, default, meaning in _fields(section):
        inner = next((each for each in (annotation, *_flat(annotation)) if _is_section(each)), None)
        many = "[]" if inner is not None and get_origin(annotation) is tuple else ""
        path = f"{prefix}{name}{many}"
        if default is ...:
            shown = "required"
        elif _is_section(type(default)):
            shown = "see below"
        else:
            shown = f"`{json.dumps(default)}`"
        if not meaning and inner is not None:
            meaning = (inspect.getdoc(inner) or "").partition("\n")[0]
        yield path, shown, " ".join(re.sub(r":\w+:|``", lambda mark: "`"[: mark[0] == "``"], meaning).split())
        if inner is not None:
            # A default that is no section's own, as the two thresholds of a limit, stands with the keys below.
            given = asdict(default) if is_dataclass(default) and not isinstance(default, type) else {}
            for below, usual, what in _keys(inner, f"{path}."):
                key = below.removeprefix(f"{path}.")
                yield below, f"`{json.dumps(given[key])}`" if key in given else usual, what


def _fields(section: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, annotation, default (``...`` if required) and meaning of the fields of a section or policy."""
    if issubclass(section, BaseModel):
        for name, field in section.model_fields.items():
            yield name, field.annotation, ... if field.is_required() else field.default, field.description or ""
        return
    meanings = _parameters(inspect.getdoc(section) or "")
    annotations = get_type_hints(section)
    for each in fields(section):  # type: ignore[arg-type]
        default = ... if each.default is MISSING else each.default
        yield each.name, annotations[each.name], default, meanings.get(each.name, "")


def _parameters(doc: str) -> dict[str, str]:
    """What a docstring says of each parameter: lines ``a, b : type`` with an indented text below."""
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in doc.splitlines():
        if head := re.fullmatch(r"(\w+(?:, \w+)*) : .*", line):
            names = head[1].split(", ")
        elif line.startswith("    "):
            meanings.update({name: f"{meanings.get(name, '')} {line.strip()}" for name in names})
    return meanings


def _flat(annotation: Any) -> Iterator[Any]:
    for each in get_args(annotation):
        yield each
        yield from _flat(each)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, _Section) or is_dataclass(annotation))


def _content(profile: Profile) -> dict[str, Any]:
    content: dict[str, Any] = _plain(profile.model_dump(mode="json"))
    return content


def _plain(value: Any) -> Any:
    """The same with 0.0 for -0.0, which are equal and must have one hash."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value + 0.0 if isinstance(value, float) else value


def _hash_of(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _explained(error: ValidationError, source: str) -> Iterator[str]:
    problems = error.errors(include_url=False, include_context=False)
    for problem in problems[:_MOST_ERRORS]:
        where, kind = key_path(problem["loc"]), problem["type"]
        if kind == "missing":
            yield f"{source}: {where}: is missing"
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"{source}: {where}: {_shown(problem['input'])}: no such key{_meant(str(problem['loc'][-1]))}"
        else:
            rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
            # A rule between several keys names them and their values itself.
            value = "" if kind == "value_error" else f"{_shown(problem['input'])}: "
            yield f"{source}: {where}: {value}{rule.removeprefix(f'{where}: ')}"
    if len(problems) > _MOST_ERRORS:
        yield f"{source}: and {len(problems) - _MOST_ERRORS} more"


def _meant(key: str) -> str:
    known = {path.rpartition(".")[2].removesuffix("[]") for path, _, _ in _keys(Profile, "")} | {_HASH}
    close = difflib.get_close_matches(key[:64], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shown(value: object, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
