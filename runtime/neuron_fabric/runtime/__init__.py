"""PyTorch runtime: low-bit gradient aggregation behind the communication hook of DistributedDataParallel."""

from neuron_fabric.runtime.hook import NeuronFabricState, attach, neuron_fabric_hook
from neuron_fabric.runtime.plan import ErrorFeedback, Plan, Region, ResultFormat, Route
from neuron_fabric.runtime.profile import Profile, ProfileError
from neuron_fabric.runtime.profile import load as load_profile

__all__ = [
    "ErrorFeedback",
    "NeuronFabricState",
    "Plan",
    "Profile",
    "ProfileError",
    "Region",
    "ResultFormat",
    "Route",
    "attach",
    "load_profile",
    "neuron_fabric_hook",
]
