"""Reducers as a worker sees them, chosen by URL.

======================  ===========================================================================================
``golden:name``         the golden model in this process, for all members that say the same name
``udp://host:port``     an in-network endpoint, or a daemon that stands for one (``neuron-fabric emulate``)
======================  ===========================================================================================

Options stand behind a question mark: ``udp://10.0.0.1:20045?slots=128&lines=16``.
"""

from neuron_fabric.runtime.reducer.base import (
    AbsentError,
    FailedError,
    Grant,
    JobSpec,
    Reduced,
    Reducer,
    ReducerError,
    RefusedError,
    Status,
    Ticket,
    TimedOutError,
)
from neuron_fabric.runtime.reducer.urls import ENVIRONMENT_VARIABLE, SCHEMES, ReducerUrl, connect

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "SCHEMES",
    "AbsentError",
    "FailedError",
    "Grant",
    "JobSpec",
    "Reduced",
    "Reducer",
    "ReducerError",
    "ReducerUrl",
    "RefusedError",
    "Status",
    "Ticket",
    "TimedOutError",
    "connect",
]
