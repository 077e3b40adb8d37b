"""Gateware of the reducer, in Amaranth: the core, its AXI4-Stream wrapper and their Verilog export."""

from neuron_fabric.hw.axis import AxiStreamReducer
from neuron_fabric.hw.core import ReducerCore
from neuron_fabric.hw.lanes import PlaneAdder, PlaneSelector
from neuron_fabric.hw.layout import EVENTS, FrameKind, ResultFormat, config_fields, make_config
from neuron_fabric.hw.verilog import export

__all__ = [
    "EVENTS",
    "AxiStreamReducer",
    "FrameKind",
    "PlaneAdder",
    "PlaneSelector",
    "ReducerCore",
    "ResultFormat",
    "config_fields",
    "export",
    "make_config",
]
