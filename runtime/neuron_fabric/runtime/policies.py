"""The policies that are compared on every workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuron_fabric.runtime.plan import Plan, Region, ResultFormat

__all__ = ["Policy", "policies", "static_policies"]


@dataclass(frozen=True)
class Policy:
    """A plan with the name under which it is reported."""

    key: str
    label: str
    plan: Plan


def policies(head: Sequence[str]) -> tuple[Policy, ...]:
    """FP32, unscaled majority, scaled majority, counts, and counts with FP32 head and 1-D parameters.

    ``head`` are the patterns of the classifier head's parameters. *Unscaled* is signSGD with majority vote as
    published (Bernstein et al. 2018), run at FP32's learning rate, which is what "static low-bit" means here.
    """
    return (
        Policy("fp32", "FP32", Plan.fp32()),
        Policy(
            "unscaled",
            "majority, unscaled",
            Plan.low_bit(result_format=ResultFormat.MAJORITY, unit_scale=True),
        ),
        Policy("majority", "majority, scaled", Plan.low_bit(result_format=ResultFormat.MAJORITY)),
        Policy("counts", "sign counts", Plan.low_bit()),
        Policy("counts-fp32-head", "sign counts, FP32 head", Plan.low_bit(keep_fp32=head, one_d_fp32=True)),
    )


def static_policies() -> tuple[Policy, ...]:
    """Low-bit everywhere and always, in two forms that fail somewhere; what a profile is compared with.

    Both vote on every parameter in every step, embeddings included. *Zeros as +1* are counts with a scale that take the
    sign bit for the sign: under an optimizer that normalises, as Adam, what has no gradient drifts. *Unscaled* is the
    one of :func:`policies`.
    """
    zeros = Region("all", embeddings=True, zeros="positive")
    unscaled = Region("all", embeddings=True, result_format=ResultFormat.MAJORITY, unit_scale=True)
    return (
        Policy("static-zeros", "static counts, zeros as +1", Plan((zeros,))),
        Policy("static-unscaled", "static majority, unscaled", Plan((unscaled,))),
    )
