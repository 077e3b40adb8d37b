"""The CXL endpoint: the core behind streams of memory transactions, its registers behind AXI4-Lite."""

from __future__ import annotations

from amaranth import Module, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.banks import BankConfig
from neuron_fabric.hw.csr import AxiLiteRegisters
from neuron_fabric.hw.cxl_core import CxlCore
from neuron_fabric.hw.cxl_layout import COMMON_FIELDS
from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.model.params import LINE_BYTES, ReducerParams

__all__ = ["CxlEndpoint"]

_WIDTHS = {"stall_in": 2, "stall_out": 2}
"""Each of the two ports of a direction is counted for itself."""


class CxlEndpoint(wiring.Component):
    """:class:`~neuron_fabric.hw.cxl_core.CxlCore` as a top: AXI4-Stream ports and a register slave, and nothing else.

    Parameters
    ----------
    params : ReducerParams
        With 512 lanes.
    identity_bytes, epoch_bits, chunk_bits : int, optional
        As of :class:`~neuron_fabric.model.cxl_map.CxlMap`.

    Members
    -------
    s_axil_* : AXI4-Lite slave; see :class:`~neuron_fabric.hw.csr.AxiLiteRegisters`
    s_axis_req_* : MemRd: ``tdata`` is the byte address, ``tid`` the tag
    s_axis_rwd_* : MemWr: ``tdata`` the line, ``tkeep`` the byte enables, ``tuser`` the byte address, ``tid`` the tag
    m_axis_drs_* : data of a MemRd: ``tuser`` is poison
    m_axis_ndr_* : completion of a MemWr

    Raises
    ------
    ValueError
        Sizes that :class:`~neuron_fabric.model.cxl_map.CxlMap` or the registers refuse.
    """

    def __init__(
        self, params: ReducerParams, *, identity_bytes: int = 1 << 16, epoch_bits: int = 4, chunk_bits: int = 0
    ) -> None:
        self.params = params
        self.map = CxlMap(params, identity_bytes, epoch_bits, chunk_bits)
        self._registers = AxiLiteRegisters(params, _WIDTHS)
        slave = {
            name: member for name, member in self._registers.signature.members.items() if name.startswith("s_axil_")
        }
        super().__init__(
            {
                **slave,
                "s_axis_req_tvalid": In(1),
                "s_axis_req_tready": Out(1),
                "s_axis_req_tdata": In(64),
                "s_axis_req_tid": In(16),
                "s_axis_rwd_tvalid": In(1),
                "s_axis_rwd_tready": Out(1),
                "s_axis_rwd_tdata": In(8 * LINE_BYTES),
                "s_axis_rwd_tkeep": In(LINE_BYTES),
                "s_axis_rwd_tuser": In(64),
                "s_axis_rwd_tid": In(16),
                "m_axis_drs_tvalid": Out(1),
                "m_axis_drs_tready": In(1),
                "m_axis_drs_tdata": Out(8 * LINE_BYTES),
                "m_axis_drs_tuser": Out(1),
                "m_axis_drs_tid": Out(16),
                "m_axis_ndr_tvalid": Out(1),
                "m_axis_ndr_tready": In(1),
                "m_axis_ndr_tid": Out(16),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Wiring, and events that become counts."""
        m = Module()
        m.submodules.registers = registers = self._registers
        m.submodules.core = core = CxlCore(self.map)
        for name, member in registers.signature.members.items():
            if name.startswith("s_axil_"):
                mine, its = getattr(self, name), getattr(registers, name)
                m.d.comb += its.eq(mine) if member.flow is In else mine.eq(its)
        self._configure(m, registers, core)

        reads, writes, responses, completions = core.reads, core.writes, core.responses, core.completions
        m.d.comb += [
            reads.valid.eq(self.s_axis_req_tvalid),
            self.s_axis_req_tready.eq(reads.ready),
            reads.payload.address.eq(self.s_axis_req_tdata),
            reads.payload.tag.eq(self.s_axis_req_tid),
            writes.valid.eq(self.s_axis_rwd_tvalid),
            self.s_axis_rwd_tready.eq(writes.ready),
            writes.payload.address.eq(self.s_axis_rwd_tuser),
            writes.payload.tag.eq(self.s_axis_rwd_tid),
            writes.payload.enable.eq(self.s_axis_rwd_tkeep),
            writes.payload.data.eq(self.s_axis_rwd_tdata),
            self.m_axis_drs_tvalid.eq(responses.valid),
            responses.ready.eq(self.m_axis_drs_tready),
            self.m_axis_drs_tdata.eq(responses.payload.data),
            self.m_axis_drs_tuser.eq(responses.payload.poison),
            self.m_axis_drs_tid.eq(responses.payload.tag),
            self.m_axis_ndr_tvalid.eq(completions.valid),
            completions.ready.eq(self.m_axis_ndr_tready),
            self.m_axis_ndr_tid.eq(completions.payload),
        ]

        def stalled(*streams: data.View) -> object:
            return sum(stream.valid & ~stream.ready for stream in streams)

        for name, _field in core.events.shape():
            m.d.comb += registers.count[name].eq(core.events[name])
        m.d.comb += [
            registers.count.busy.eq(core.events.lines),
            registers.count.cycles.eq(1),
            registers.count.stall_in.eq(stalled(reads, writes)),
            registers.count.stall_out.eq(stalled(responses, completions)),
            registers.count.slot_high_water.eq(core.level),
        ]
        return m

    def _configure(self, m: Module, registers: AxiLiteRegisters, core: CxlCore) -> None:
        """From the fields of the registers to those of the core."""
        m.d.comb += [
            core.opened.eq(registers.opened),
            core.closed.eq(registers.closed),
            registers.hold.eq(core.hold),
        ]
        for bank, (job, config) in enumerate(zip(registers.jobs, core.config, strict=True)):
            m.submodules[f"bank{bank}"] = common = BankConfig(self.params)
            m.d.comb += [
                common.registers.eq(job),
                config.open.eq(job.control.open),
                config.lines.eq(job.lines),
                config.first_chunk.eq(job.first_chunk),
                *(Value.cast(config[name]).eq(Value.cast(common.config[name])) for name in COMMON_FIELDS),
            ]
