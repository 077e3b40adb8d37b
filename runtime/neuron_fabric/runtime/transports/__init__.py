"""Reducer transports behind one interface.

=============  ====================================================================================================
``allgather``  every rank gets every rank's votes and counts for itself: the stock method, one stage; default to N=4
``collective`` each rank counts a shard: all-to-all of votes, all-gather of tally planes: scales with N
``golden``     as ``collective``, but each shard is counted by the protocol's golden model, frame by frame
a URL          a reducer: an FPGA, a daemon that stands for one (:mod:`neuron_fabric.runtime.reducer`)
``endpoint``   the reducer whose URL is in the environment variable ``NEURON_FABRIC_REDUCER``
=============  ====================================================================================================
"""

import os

from neuron_fabric.runtime.reducer import ENVIRONMENT_VARIABLE, ReducerUrl
from neuron_fabric.runtime.transports.allgather import AllGather
from neuron_fabric.runtime.transports.base import BucketVotes, Exchange, Transport, VotesKind
from neuron_fabric.runtime.transports.collective import Collective
from neuron_fabric.runtime.transports.endpoint import ReducerEndpoint
from neuron_fabric.runtime.transports.golden import Golden

__all__ = [
    "TRANSPORTS",
    "AllGather",
    "BucketVotes",
    "Collective",
    "Exchange",
    "Golden",
    "ReducerEndpoint",
    "Transport",
    "VotesKind",
    "check_name",
    "make",
]

TRANSPORTS: dict[str, type[Transport]] = {"allgather": AllGather, "collective": Collective, "golden": Golden}
ALLGATHER_UP_TO = 4
"""Up to this world an all-gather of signs sends no more bytes than two stages do, and it saves one stage's latency.

Of ternary votes it sends a third more at four workers, in one stage instead of two.
"""


def make(name: str, world: int) -> Transport:
    """A transport by name or by the URL of a reducer.

    ``auto`` takes ``allgather`` up to four workers and ``collective`` above. ``ValueError`` for a name or URL that is
    none; :class:`~neuron_fabric.runtime.reducer.AbsentError` for a host that is not known.
    """
    if name == "auto":
        name = "allgather" if world <= ALLGATHER_UP_TO else "collective"
    if name == "endpoint":
        name = os.environ.get(ENVIRONMENT_VARIABLE, "")
        if ":" not in name:
            raise ValueError(
                f"transport 'endpoint': set {ENVIRONMENT_VARIABLE} to the URL of a reducer, as udp://127.0.0.1:20045"
            )
    if ":" in name:
        return ReducerEndpoint(ReducerUrl.parse(name))
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}: use auto, {', '.join(TRANSPORTS)}, endpoint or a reducer's URL")
    return TRANSPORTS[name]()


def check_name(name: str) -> str:
    """The name or URL of a transport as it is; ``ValueError`` as :func:`make` raises it, with nothing made."""
    if name in ("auto", *TRANSPORTS):
        return name
    url = os.environ.get(ENVIRONMENT_VARIABLE, "") if name == "endpoint" else name
    if ":" in url:
        ReducerUrl.parse(url)
    else:
        make(name, 1)  # says what is wrong
    return name
