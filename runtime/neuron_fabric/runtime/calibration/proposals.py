"""From records to proposals: which parameters may vote, how, and in which order of trust.

A parameter is judged by its worst interval. Rules come first (what cannot vote, what is sparse, what is too small to be
worth it), then one figure: the cosine between the running averages of the decoded and of the FP32 gradient, which is
what an optimizer with momentum sees of the two. How low it may be is not known before somebody has trained with it; so
what comes out is a ladder of proposals, from all dense parameters down to the few best, that trials choose from.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from neuron_fabric.model.encoding import encoding_by_name
from neuron_fabric.runtime.calibration.recorder import ENCODINGS, TriedEncoding
from neuron_fabric.runtime.calibration.records import Interval, ParameterRecord, Records
from neuron_fabric.runtime.plan import ResultFormat
from neuron_fabric.runtime.profile import FeedbackSpec, RegionSpec

__all__ = ["Assessment", "Kind", "ParameterAssessment", "Proposal", "Thresholds", "assess", "ladder", "patterns_for"]

_FP32_BITS = 32


class Kind(enum.StrEnum):
    """What a parameter is to a calibration."""

    EXCLUDED = "excluded"
    """Cannot be low-bit: not float32, or no gradient was seen."""
    SPARSE = "sparse"
    """Its gradient has too many exact zeros, which have no sign."""
    SMALL = "small"
    """So few elements that FP32 costs next to nothing: biases, norms, tiny layers."""
    SENSITIVE = "sensitive"
    """Its votes point too far away from its gradient."""
    DENSE = "dense"
    """May vote."""


@dataclass(frozen=True)
class Thresholds:
    """What a calibration decides by.

    Parameters
    ----------
    sparse_share : float
        Share of exact zeros above which a parameter is sparse; the hook itself has .05.
    small_share : float
        Of all elements; a parameter with at most one dimension, or with less than this share, is small.
    least_cosine : float
        A parameter whose counts, without residual, come to less than this in its worst interval is sensitive.
    feedback_gain : float
        By how much the cosine must grow before a parameter gets a residual, which costs memory and time.
    warmup_cosine : float
        The warm-up in FP32 ends when the voting parameters' mean cosine stays above this, if it does so from the run's
        first half on; and not before the first interval is over.
    """

    sparse_share: float = 0.05
    small_share: float = 0.002
    least_cosine: float = 0.35
    feedback_gain: float = 0.05
    warmup_cosine: float = 0.4

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value <= 1:
                raise ValueError(f"threshold {each.name} must be 0 to 1, but is {value}")

    def varied(self, share: float) -> list[tuple[str, Thresholds]]:
        """Each threshold alone, down and up by ``share`` (0.2 is 20 per cent), with a name as ``small_share -20 %``."""
        return [
            (f"{each.name} {sign:+.0%}".replace("%", " %"), replace(self, **{each.name: min(1.0, value * (1 + sign))}))
            for each in fields(self)
            for value in [getattr(self, each.name)]
            for sign in (-share, share)
        ]


@dataclass(frozen=True)
class ParameterAssessment:
    """What the records say of one parameter; cosines are those of the worst interval."""

    name: str
    elements: int
    kind: Kind
    zeros: float
    cosines: Mapping[str, float]
    density: float
    noise: float
    margin: float
    sign_error: float

    def cosine(self, encoding: str) -> float:
        """The cosine of one encoding; 0 where it was not tried."""
        return self.cosines.get(encoding, 0.0)


@dataclass(frozen=True)
class Assessment:
    """All parameters of a model, in its order."""

    records: Records
    thresholds: Thresholds
    parameters: tuple[ParameterAssessment, ...]

    def of_kind(self, *kinds: Kind) -> list[ParameterAssessment]:
        """Those of some kinds."""
        return [each for each in self.parameters if each.kind in kinds]


@dataclass(frozen=True)
class Proposal:
    """One way to run the model: which parameters vote and how; all others go FP32.

    Attributes
    ----------
    name : str
    voting : mapping of parameter name to TriedEncoding
    assessment : Assessment
    warmup_steps : int
    """

    name: str
    voting: Mapping[str, TriedEncoding]
    assessment: Assessment
    warmup_steps: int

    @property
    def low_bit_share(self) -> float:
        """Elements that vote over all elements."""
        elements = self.assessment.records.elements
        return sum(elements[name] for name in self.voting) / max(1, sum(elements.values()))

    @property
    def bits(self) -> float:
        """Payload bits up and down per element, mean over all elements."""
        records = self.assessment.records
        total = 0.0
        for name, elements in records.elements.items():
            encoding = self.voting.get(name)
            total += elements * (2 * _FP32_BITS if encoding is None else bits_of(encoding, records.world))
        return total / max(1, sum(records.elements.values()))

    @property
    def cost(self) -> tuple[float, int]:
        """By which proposals are ordered: bits, and of two with as many bits the one with fewer residuals."""
        return self.bits, sum(how.error_feedback is not None for how in self.voting.values())

    def region_name(self, parameter: str) -> str:
        """The region of a parameter in this proposal's profile."""
        return self._names[parameter]

    def regions(self) -> tuple[RegionSpec, ...]:
        """The regions of a profile: what stays FP32, by reason, then what votes, the most robust half first.

        A pattern of one region matches no parameter of another.
        """
        members: dict[str, list[str]] = {}
        for parameter, region in self._names.items():
            members.setdefault(region, []).append(parameter)
        specs = []
        for region, names in members.items():
            patterns = patterns_for(names, list(self._names))
            encoding = self.voting.get(names[0])
            if encoding is None:
                specs.append((-1, RegionSpec(name=region, patterns=patterns, encoding="fp32")))
                continue
            sensitivity = self._classes[names[0]]
            embeddings = any(name in self.assessment.records.embeddings for name in names)
            specs.append((sensitivity, _voting_region(region, patterns, encoding, sensitivity, embeddings)))
        return tuple(spec for _, spec in sorted(specs, key=lambda pair: pair[0]))

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        names = {}
        for each in self.assessment.parameters:
            encoding = self.voting.get(each.name)
            if encoding is not None:
                names[each.name] = f"{encoding.name}-{('robust', 'delicate')[self._classes[each.name]]}"
            else:  # what could vote and does not is what this proposal takes for sensitive
                names[each.name] = (Kind.SENSITIVE if each.kind is Kind.DENSE else each.kind).value
        return names

    @functools.cached_property
    def _classes(self) -> dict[str, int]:
        """0 for the half of the voting parameters with the better cosines, 1 for the others."""
        by_name = {each.name: each for each in self.assessment.parameters}
        ordered = sorted(self.voting, key=lambda name: -by_name[name].cosine(self.voting[name].name))
        return {name: int(2 * index >= len(ordered) and len(ordered) > 1) for index, name in enumerate(ordered)}


def _voting_region(
    name: str, patterns: tuple[str, ...], encoding: TriedEncoding, sensitivity: int, embeddings: bool
) -> RegionSpec:
    feedback = encoding.error_feedback
    options: dict[str, Any] = {
        "name": name,
        "patterns": patterns,
        "encoding": encoding.route.value,
        "result_format": encoding.result_format.value,
        "gate": encoding.gate,
        "sensitivity": sensitivity,
        "embeddings": embeddings,
    }
    if feedback is not None:
        options["error_feedback"] = FeedbackSpec(clip=feedback.clip, decay=feedback.decay)
    return RegionSpec(**options)


def bits_of(encoding: TriedEncoding, world: int) -> int:
    """Payload bits up and down per element of one encoding."""
    wire = encoding_by_name(encoding.route.value)
    down = 2 if encoding.result_format is ResultFormat.MAJORITY else wire.tally_bits(world)
    return wire.planes + down


def assess(records: Records, thresholds: Thresholds | None = None) -> Assessment:
    """Judge every parameter of a recorded run."""
    thresholds = thresholds or Thresholds()
    dimensions = {
        name: len(spec.shape) for name, spec in records.model.fingerprint().parameters.items()
    }  # tied ones by each of their names
    total = max(1, sum(records.elements.values()))
    judged = []
    for name, elements in records.elements.items():
        seen = [interval.parameters[name] for interval in records.intervals if name in interval.parameters]
        small = dimensions.get(name, 2) <= 1 or elements < thresholds.small_share * total
        judged.append(_assess_one(name, elements, seen, small, name in records.excluded, thresholds))
    return Assessment(records, thresholds, tuple(judged))


def _assess_one(
    name: str, elements: int, seen: Sequence[ParameterRecord], small: bool, excluded: bool, thresholds: Thresholds
) -> ParameterAssessment:
    encodings = list(dict.fromkeys(key for each in seen for key in each.encodings))
    cosines = {
        key: min(each.encodings[key].averaged_cosine for each in seen if key in each.encodings) for key in encodings
    }
    steps = sum(each.steps for each in seen)

    def mean(field: str) -> float:
        return sum(getattr(each, field) * each.steps for each in seen) / steps if steps else 0.0

    zeros = max((each.zeros for each in seen), default=0.0)
    if excluded or not seen:
        kind = Kind.EXCLUDED
    elif small:
        kind = Kind.SMALL
    elif zeros > thresholds.sparse_share:
        kind = Kind.SPARSE
    elif cosines.get("binary", 0.0) < thresholds.least_cosine:
        kind = Kind.SENSITIVE
    else:
        kind = Kind.DENSE
    return ParameterAssessment(
        name, elements, kind, zeros, cosines, mean("density"), mean("noise"), mean("margin"), mean("sign_error")
    )


def ladder(
    assessment: Assessment, *, encodings: Sequence[TriedEncoding] = ENCODINGS, most: int = 8
) -> tuple[Proposal, ...]:
    """Proposals to try, the cheapest in bits first; none if nothing may vote.

    Those are, in counts, in majorities, in counts with residual where it helps, and in ternary votes: the dense
    parameters; the dense and the sensitive ones, to see whether the latter matter; and the dense ones without the
    module that has the lowest cosine. The first ``most`` that differ are taken.
    """
    by_name = {each.name: each for each in encodings}
    dense = assessment.of_kind(Kind.DENSE)
    everything = assessment.of_kind(Kind.DENSE, Kind.SENSITIVE)
    sets = {"dense": dense, "all": everything, "fewer": _without_the_lowest(dense)}
    wanted = (
        ("dense", "binary"),
        ("all", "binary"),
        ("dense", "binary-majority"),
        ("dense", "binary-feedback"),
        ("dense", "ternary"),
        ("fewer", "binary"),
        ("all", "binary-majority"),
        ("all", "binary-feedback"),
        ("all", "ternary"),
    )
    distinct: dict[tuple[tuple[str, str], ...], Proposal] = {}
    for label, style in wanted:
        if style in by_name and sets[label]:
            voting = {each.name: by_name[_style_of(each, style, assessment.thresholds)] for each in sets[label]}
            proposal = Proposal(f"{label}-{style}", voting, assessment, _warmup(voting, assessment))
            distinct.setdefault(tuple((name, how.name) for name, how in voting.items()), proposal)
    return tuple(sorted(list(distinct.values())[:most], key=lambda proposal: proposal.cost))


def _style_of(parameter: ParameterAssessment, style: str, thresholds: Thresholds) -> str:
    """``binary-feedback`` only where the residual helps this parameter; everything else as it is said."""
    if style != "binary-feedback":
        return style
    gain = parameter.cosine("binary-feedback") - parameter.cosine("binary")
    return "binary-feedback" if gain >= thresholds.feedback_gain else "binary"


def _without_the_lowest(parameters: Sequence[ParameterAssessment]) -> list[ParameterAssessment]:
    """All but those of the module with the lowest cosine; empty if there is only one."""
    lowest = min(parameters, key=lambda each: each.cosine("binary"), default=None)
    return [each for each in parameters if lowest and _module(each.name) != _module(lowest.name)]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _warmup(voting: Mapping[str, TriedEncoding], assessment: Assessment) -> int:
    """The end of the last interval in the run's first half whose mean cosine is too low, or of the very first one.

    Where the cosine is too low later on, too, waiting is no cure, and the first one it is.
    """
    records = assessment.records
    first = records.intervals[0].end
    low = [
        each for each in records.intervals if _mean_cosine(voting, each, records) < assessment.thresholds.warmup_cosine
    ]
    if not low or 2 * low[-1].end > records.steps:
        return first
    return max(first, low[-1].end)


def _mean_cosine(voting: Mapping[str, TriedEncoding], interval: Interval, records: Records) -> float:
    """Over what votes, weighted by elements; 1 where nothing was seen."""
    cosines = [
        (interval.parameters[name].encodings[how.name].averaged_cosine, records.elements[name])
        for name, how in voting.items()
        if name in interval.parameters and how.name in interval.parameters[name].encodings
    ]
    weight = sum(elements for _, elements in cosines)
    return sum(cosine * elements for cosine, elements in cosines) / weight if weight else 1.0


def patterns_for(names: Sequence[str], every: Sequence[str]) -> tuple[str, ...]:
    """Shell patterns that match ``names`` and nothing else of ``every``: whole modules as ``module.*``, else names."""
    wanted, patterns, covered = set(names), [], set()
    for name in names:
        if name in covered:
            continue
        parts = name.split(".")
        for depth in range(1, len(parts)):
            prefix = ".".join(parts[:depth]) + "."
            inside = [each for each in every if each.startswith(prefix)]
            if len(inside) > 1 and wanted.issuperset(inside):
                patterns.append(_literal(prefix) + "*")
                covered.update(inside)
                break
        else:
            patterns.append(_literal(name))
            covered.add(name)
    return tuple(patterns)


def _literal(text: str) -> str:
    """A pattern that matches only this text."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)
