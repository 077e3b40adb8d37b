"""Addresses of the CXL endpoint: wiring, as :meth:`neuron_fabric.model.cxl_map.CxlMap.decode` says."""

from __future__ import annotations

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.cxl_layout import target_layout
from neuron_fabric.model.cxl_map import CxlMap

__all__ = ["AddressDecoder"]


class AddressDecoder(wiring.Component):
    """What a byte address means. The byte in the line (bits 5:0) is ignored.

    Members
    -------
    address : byte address; above the device there is nothing
    target : :func:`~neuron_fabric.hw.cxl_layout.target_layout`
    """

    def __init__(self, address_map: CxlMap) -> None:
        self._map = address_map
        super().__init__({"address": In(64), "target": Out(target_layout(address_map))})

    def elaborate(self, platform: object) -> Module:
        """Only "nothing there" takes logic, and choosing between the windows."""
        m = Module()
        address_map, target = self._map, self.target
        offset = self.address[: address_map.window_bits]
        m.d.comb += target.window.eq(self.address[address_map.window_bits : address_map.address_bits])
        with m.Switch(target.window):
            for window, fields in address_map.fields.items():
                with m.Case(window):
                    for field in fields:
                        m.d.comb += target[field.name].eq(offset[field.lsb : field.lsb + field.width])
                    beyond = offset[fields[0].lsb + fields[0].width :].any()
                    m.d.comb += target.nothing.eq(beyond | self.address[address_map.address_bits :].any())
        return m
