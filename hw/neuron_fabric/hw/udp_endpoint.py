"""The in-network endpoint: Ethernet frames in, Ethernet frames out, registers beside."""

from __future__ import annotations

from typing import Any

from amaranth import Cat, Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.addresses import AddressTable
from neuron_fabric.hw.banks import BankConfig
from neuron_fabric.hw.core import ReducerCore
from neuron_fabric.hw.csr import AxiLiteRegisters
from neuron_fabric.hw.egress import Egress
from neuron_fabric.hw.framing import LANES, check_size
from neuron_fabric.hw.ingress import INGRESS_EVENTS, Ingress
from neuron_fabric.hw.layout import config_layout
from neuron_fabric.hw.nacks import NackQueue
from neuron_fabric.hw.relay import RelayBuffer
from neuron_fabric.hw.udp_rx import UdpReceiver
from neuron_fabric.hw.udp_tx import UdpTransmitter
from neuron_fabric.model.net import Drop
from neuron_fabric.model.params import LINE_BYTES, ReducerParams
from neuron_fabric.model.wire import Reason

__all__ = ["UdpEndpoint"]


class UdpEndpoint(wiring.Component):
    """:class:`~neuron_fabric.model.endpoint.NetworkEndpoint` as gateware.

    Receiver, validation, core and transmitter one behind the other, each taking 16 lines in 17 cycles; NACKs and what a
    parent answers go around the core to the transmitter. **The input never waits for the output**: what is to be sent
    waits in buffers of which the NACKs' and the relays' drop what they have no room for, while the core owes results.

    Jobs open and close between frames: see ``hold`` of :class:`~neuron_fabric.hw.core.ReducerCore`. A NACK says what
    was so when its frame was refused, also if the job is closed before it leaves; relays of a closed job are forgotten;
    CONTROL.reset forgets both. A frame that has begun to leave is always sent to its end.

    Parameters
    ----------
    params : ReducerParams
        ``lanes`` must be 512.
    relays : int
        Places for a parent's results on their way to the members; a power of two.

    Members
    -------
    s_axis_*, m_axis_* : AXI4-Stream of frames without preamble and frame check sequence
        As of :class:`~neuron_fabric.hw.udp_rx.UdpReceiver` and :class:`~neuron_fabric.hw.udp_tx.UdpTransmitter`.
    s_axil_* : AXI4-Lite
        As of :class:`~neuron_fabric.hw.csr.AxiLiteRegisters`.
    """

    def __init__(self, params: ReducerParams, relays: int = 8) -> None:
        check_size("a UDP endpoint", params.lanes, params.lines_per_chunk + 1)
        self.params = params
        self.registers = AxiLiteRegisters(params, widths={"nacks_dropped": 2, "completed": 2})
        self.ingress = Ingress(params)
        self._relays = relays
        super().__init__(
            {
                "s_axis_tdata": In(LANES),
                "s_axis_tkeep": In(LINE_BYTES),
                "s_axis_tvalid": In(1),
                "s_axis_tready": Out(1),
                "s_axis_tlast": In(1),
                "m_axis_tdata": Out(LANES),
                "m_axis_tkeep": Out(LINE_BYTES),
                "m_axis_tvalid": Out(1),
                "m_axis_tready": In(1),
                "m_axis_tlast": Out(1),
                **{name: port for name, port in self.registers.signature.members.items() if name.startswith("s_axil_")},
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Only wires, and what CONTROL.reset needs."""
        m = Module()
        params = self.params
        max_lines = params.lines_per_chunk + 1  # a PARTIAL result has one more than its chunk
        m.submodules.registers = registers = self.registers
        m.submodules.receiver = receiver = UdpReceiver(max_lines)
        m.submodules.ingress = ingress = self.ingress
        m.submodules.core = core = ReducerCore(params)
        m.submodules.nacks = nacks = NackQueue(params)
        m.submodules.relays = relays = RelayBuffer(params, self._relays)
        m.submodules.egress = egress = Egress(params)
        m.submodules.transmitter = transmitter = UdpTransmitter(max_lines)
        m.submodules.addresses = addresses = AddressTable(params, readers=3)

        # ---- ports -------------------------------------------------------------------------------------------------
        for name, port in self.signature.members.items():
            inner: Any = {"s_axis": receiver, "m_axis": transmitter, "s_axil": registers}[name[:6]]
            here, there = getattr(self, name), getattr(inner, name)
            m.d.comb += there.eq(here) if port.flow is In else here.eq(there)

        # ---- configuration -----------------------------------------------------------------------------------------
        shared = registers.shared
        config = Signal(data.ArrayLayout(config_layout(params), params.jobs))
        is_open = Signal(params.jobs)
        m.d.comb += is_open.eq(Cat(job.control.open for job in registers.jobs))
        for bank in range(params.jobs):
            m.submodules[f"bank{bank}"] = settings = BankConfig(params)
            m.d.comb += [
                Value.cast(settings.registers).eq(Value.cast(registers.jobs[bank])),
                Value.cast(config[bank]).eq(Value.cast(settings.config)),
                ingress.leaves[bank].eq(registers.jobs[bank].encoding.leaves),
            ]
        for block in (ingress, core, nacks, relays):
            m.d.comb += Value.cast(block.config).eq(Value.cast(config))
        receives = receiver.config
        for endpoint, prefix in (
            (receives.me, "local"),
            (transmitter.me, "local"),
            (receives.group, "listen"),
            (egress.group, "group"),
            (addresses.endpoint, "entry"),
        ):
            port = shared[f"{prefix}_port"]
            m.d.comb += [
                endpoint.mac.eq(Cat(shared[f"{prefix}_mac_lo"], shared[f"{prefix}_mac_hi"])),
                endpoint.ip.eq(shared[f"{prefix}_ip"]),
                endpoint.port.eq(port.port if prefix in ("listen", "group") else port),
            ]
        m.d.comb += [
            receives.group_enable.eq(shared.listen_port.enable),
            core.group.eq(shared.group_port.enable),
            relays.group.eq(shared.group_port.enable),
            addresses.write.eq(registers.entry_write),
            *(getattr(addresses, name).eq(shared.entry_select[name]) for name in ("bank", "worker", "parent")),
            ingress.open.eq(is_open),
            relays.open.eq(is_open),
        ]

        # ---- jobs open and close between frames --------------------------------------------------------------------
        # What is inside when CONTROL.reset comes may still be refused, the last in the cycle after ``hold`` falls.
        resetting = Signal()
        m.d.comb += [
            core.opened.eq(registers.opened),
            core.closed.eq(registers.closed),
            core.quiet.eq(ingress.quiet),
            ingress.hold.eq(core.hold),
            registers.hold.eq(core.hold),
            nacks.flush.eq(registers.control_reset | resetting),
        ]
        m.d.sync += resetting.eq(registers.control_reset | (resetting & core.hold))

        # ---- the way of frames -------------------------------------------------------------------------------------
        wiring.connect(m, receiver.datagram, ingress.datagram)
        wiring.connect(m, ingress.contribution, core.contribution)
        wiring.connect(m, core.result, egress.result)
        wiring.connect(m, nacks.nack, egress.nack)
        wiring.connect(m, relays.relay, egress.relay)
        wiring.connect(m, egress.datagram, transmitter.datagram)
        for reader, lookup in enumerate((ingress.lookup, nacks.lookup, egress.lookup)):
            wiring.connect(m, lookup, addresses.lookups[reader])
        m.d.comb += [
            nacks.refused.eq(ingress.refused),
            nacks.refusal.eq(core.refusal),
            relays.relayed.eq(ingress.relayed),
        ]

        # ---- counters ----------------------------------------------------------------------------------------------
        events, refusal = core.events, core.refusal
        counted: dict[str, Value | int] = {
            "frames": ingress.events.frame,
            "lines": events.accepted_line,
            "completed": events.completed + events.partial,
            "results": events.result_sent,
            "duplicates": events.duplicate,
            "stale": events.stale,
            "late": events.late,
            "partial": events.partial,
            "abandoned": events.abandoned,
            "nacks": egress.nack_sent,
            "nacks_dropped": nacks.dropped,
            "relays_dropped": relays.dropped,
            **{name: ingress.events[name] for name, _field in INGRESS_EVENTS if name != "frame"},
            **{
                f"refused_{reason.name.lower()}": refusal.valid & (refusal.reason == reason)
                for reason in (Reason.LINES_DIFFER, Reason.ABSTAIN_AFTER_VOTE)
            },
            **{f"dropped_{drop.name.lower()}": receiver.events[drop.name.lower()] for drop in Drop},
            "stall_in": self.s_axis_tvalid & ~self.s_axis_tready,
            "stall_out": self.m_axis_tvalid & ~self.m_axis_tready,
            "busy": events.accepted_line,
            "cycles": 1,
            "slot_high_water": core.level,
        }
        for name, value in counted.items():
            m.d.comb += registers.count[name].eq(value)
        return m
