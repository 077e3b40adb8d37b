"""Reducer transports behind one interface.

=============  ====================================================================================================
``allgather``  every rank gets every rank's signs and counts for itself: the stock method, one stage; default to N=4
``collective`` each rank counts a shard: all-to-all of signs, all-gather of tally planes: scales with N
``golden``     as ``collective``, but each shard is counted by the protocol's golden model, frame by frame
=============  ====================================================================================================
"""

from neuron_fabric.runtime.transports.allgather import AllGather
from neuron_fabric.runtime.transports.base import BucketVotes, Exchange, Transport, VotesKind
from neuron_fabric.runtime.transports.collective import Collective
from neuron_fabric.runtime.transports.golden import Golden

__all__ = [
    "TRANSPORTS",
    "AllGather",
    "BucketVotes",
    "Collective",
    "Exchange",
    "Golden",
    "Transport",
    "VotesKind",
    "make",
]

TRANSPORTS: dict[str, type[Transport]] = {"allgather": AllGather, "collective": Collective, "golden": Golden}
ALLGATHER_UP_TO = 4
"""Up to this world an all-gather of signs sends no more bytes than two stages do, and it saves one stage's latency."""


def make(name: str, world: int) -> Transport:
    """A transport by name; ``auto`` takes ``allgather`` up to four workers and ``collective`` above."""
    if name == "auto":
        name = "allgather" if world <= ALLGATHER_UP_TO else "collective"
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}: use auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]()
