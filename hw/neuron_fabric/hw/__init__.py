"""Gateware of the reducer, in Amaranth: core, in-network and CXL endpoints, registers and Verilog export."""

from neuron_fabric.hw.axis import AxiStreamReducer
from neuron_fabric.hw.core import ReducerCore
from neuron_fabric.hw.csr import AxiLiteRegisters
from neuron_fabric.hw.cxl_endpoint import CxlEndpoint
from neuron_fabric.hw.lanes import PlaneAdder, PlaneSelector
from neuron_fabric.hw.layout import EVENTS, FrameKind, ResultFormat, config_fields, make_config
from neuron_fabric.hw.udp_endpoint import UdpEndpoint
from neuron_fabric.hw.udp_rx import UdpReceiver
from neuron_fabric.hw.udp_tx import UdpTransmitter
from neuron_fabric.hw.verilog import export

__all__ = [
    "EVENTS",
    "AxiLiteRegisters",
    "AxiStreamReducer",
    "CxlEndpoint",
    "FrameKind",
    "PlaneAdder",
    "PlaneSelector",
    "ReducerCore",
    "ResultFormat",
    "UdpEndpoint",
    "UdpReceiver",
    "UdpTransmitter",
    "config_fields",
    "export",
    "make_config",
]
