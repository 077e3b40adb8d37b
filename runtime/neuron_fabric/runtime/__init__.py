"""PyTorch runtime: low-bit gradient aggregation behind the communication hook of DistributedDataParallel."""

from neuron_fabric.runtime.hook import NeuronFabricState, attach, neuron_fabric_hook
from neuron_fabric.runtime.plan import ErrorFeedback, Plan, Region, ResultFormat, Route

__all__ = [
    "ErrorFeedback",
    "NeuronFabricState",
    "Plan",
    "Region",
    "ResultFormat",
    "Route",
    "attach",
    "neuron_fabric_hook",
]
