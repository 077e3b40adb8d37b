"""The status line: what a slot version holds, as a line of memory."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.cxl_layout import cxl_config_layout, state_layout
from neuron_fabric.hw.layout import ResultFormat, index_width
from neuron_fabric.model.cxl_map import SEEN_BITS, STATUS_FIELDS, CxlMap
from neuron_fabric.model.params import LINE_BYTES

__all__ = ["StatusWriter"]


class StatusWriter(wiring.Component):
    """Wiring: the fields of :data:`neuron_fabric.model.cxl_map.STATUS_FIELDS` at their places.

    Members
    -------
    config : of an open job
    state : :func:`~neuron_fabric.hw.cxl_layout.state_layout`
    part : which of the seen bits
    line : the 64 bytes
    """

    def __init__(self, address_map: CxlMap) -> None:
        self._map = address_map
        super().__init__(
            {
                "config": In(cxl_config_layout(address_map.params)),
                "state": In(state_layout(address_map)),
                "part": In(index_width(address_map.parts)),
                "line": Out(8 * LINE_BYTES),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Little-endian, so that a field is a slice."""
        m = Module()
        config, state = self.config, self.state
        majority = config.result_format == ResultFormat.MAJORITY
        row = self._map.seen_row
        seen = Signal(self._map.parts * SEEN_BITS)
        for plane in range(self._map.params.max_planes):
            lines = state.seen[plane]
            m.d.comb += seen[plane * row : plane * row + len(lines)].eq(lines)
        values: dict[str, Value] = {
            "chunk": state.chunk,
            "epoch": config.epoch,
            "job": config.job,
            "flags": Cat(config.open, state.claimed, state.complete, majority),
            "lines": config.lines,
            "planes": config.planes,
            "result_planes": Mux(majority, 2, config.result_planes),
            "voters": state.voters,
            "done": state.done,
            "abstained": state.abstained,
            "seen": seen.word_select(self.part, SEEN_BITS),
        }
        for field in STATUS_FIELDS:
            m.d.comb += self.line[8 * field.offset : 8 * (field.offset + field.size)].eq(values[field.name])
        return m
