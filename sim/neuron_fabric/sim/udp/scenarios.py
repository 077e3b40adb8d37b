"""Every script by its name, with the bench that can judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.udp.bench import Bench
from neuron_fabric.sim.udp.live import LiveBench, live_stragglers
from neuron_fabric.sim.udp.script import SCRIPTS, Script
from neuron_fabric.sim.udp.strike import StrikeBench, strikes

__all__ = ["SCENARIOS", "bench_of"]

SCENARIOS: dict[str, tuple[Callable[..., Script], type[Bench]]] = {
    **{name: (made, Bench) for name, made in SCRIPTS.items()},
    "live": (live_stragglers, LiveBench),
    "strikes": (strikes, StrikeBench),
}


def bench_of(name: str, params: ReducerParams, seed: int, options: Mapping[str, Any], **how: Any) -> Bench:
    """The bench of a script, made from a seed; ``ValueError`` names what there is.

    ``options`` are those of the script, ``how`` those of :class:`~neuron_fabric.sim.udp.bench.Bench`.
    """
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}: there are {', '.join(SCENARIOS)}")
    made, kind = SCENARIOS[name]
    return kind(made(params, seed, **options), **how)
