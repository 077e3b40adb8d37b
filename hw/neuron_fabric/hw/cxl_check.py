"""The first two stages of the CXL endpoint's core: what a transaction is, as far as that needs no state."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.cxl_address import AddressDecoder
from neuron_fabric.hw.cxl_layout import OUTCOMES, REFUSALS, checked_layout, cxl_config_layout, target_layout
from neuron_fabric.hw.layout import ResultFormat, index_width, version_width
from neuron_fabric.hw.thresholds import is_signed
from neuron_fabric.model.cxl_map import CxlMap, Window

__all__ = ["TransactionCheck"]


class TransactionCheck(wiring.Component):
    """Decodes an address, samples its job's configuration in that same cycle, and checks one against the other.

    Members
    -------
    config : the job banks
    valid, write, address, full : a transaction; ``full`` if all bytes are enabled
    look_version, look_worker : one cycle later: which slot version, and which worker's lines
    checked_valid, checked : two cycles later
    """

    def __init__(self, address_map: CxlMap) -> None:
        self._map = address_map
        params = address_map.params
        super().__init__(
            {
                "config": In(data.ArrayLayout(cxl_config_layout(params), params.jobs)),
                "valid": In(1),
                "write": In(1),
                "address": In(64),
                "full": In(1),
                "look_version": Out(version_width(params)),
                "look_worker": Out(index_width(params.workers)),
                "checked_valid": Out(1),
                "checked": Out(checked_layout(address_map)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Decode, then check."""
        m = Module()
        params = self._map.params

        # ---- decode ------------------------------------------------------------------------------------------------
        m.submodules.decoder = decoder = AddressDecoder(self._map)
        sampled = Signal(cxl_config_layout(params))
        m.d.comb += decoder.address.eq(self.address)
        with m.Switch(decoder.target.bank):
            for bank in range(params.jobs):
                with m.Case(bank):
                    m.d.comb += sampled.eq(self.config[bank])
            with m.Default():  # any other bank is never open
                m.d.comb += sampled.eq(0)
        valid, write, full = Signal(), Signal(), Signal()
        target = Signal(target_layout(self._map), reset_less=True)
        config = Signal(cxl_config_layout(params), reset_less=True)
        m.d.sync += [
            valid.eq(self.valid),
            write.eq(self.write),
            full.eq(self.full),
            target.eq(decoder.target),
            config.eq(sampled),
        ]

        # ---- check -------------------------------------------------------------------------------------------------
        checked = Signal(checked_layout(self._map))
        out = Signal(checked_layout(self._map), reset_less=True)
        m.d.sync += [self.checked_valid.eq(valid), out.eq(checked)]
        m.d.comb += [self.checked.eq(out), self.look_worker.eq(target.worker)]
        # What makes something happen is forgotten by a reset, however short.
        for name in OUTCOMES:
            outcome = Signal.like(checked[name], name=f"checked_{name}")
            m.d.sync += outcome.eq(checked[name])
            m.d.comb += self.checked[name].eq(outcome)
        contributes = Signal()
        m.d.sync += contributes.eq(checked.question.contributes)
        m.d.comb += self.checked.question.contributes.eq(contributes)
        slot_is_there = self._version(m, target, config, checked)
        self._lines(m, target, config, checked)

        contribution, result, status = Signal(), Signal(), Signal()
        epoch_differs = Signal()
        fails = Signal(len(REFUSALS))
        abstains = checked.question.abstains
        m.d.comb += [
            contribution.eq(~target.nothing & (target.window == Window.CONTRIBUTE)),
            result.eq(~target.nothing & (target.window == Window.RESULT)),
            status.eq(~target.nothing & (target.window == Window.STATUS)),
            epoch_differs.eq(target.epoch != config.epoch[: self._map.epoch_bits]),
            abstains.eq(target.plane == self._map.abstain_plane),
            fails.eq(
                Cat(
                    ~full,
                    ~config.open,
                    epoch_differs,
                    ~(checked.question.worker & config.members).any(),
                    ~abstains & (target.plane >= config.planes),
                    target.line >= Mux(abstains, 1, config.lines),
                )
            ),
            checked.refused.eq(Mux(valid & write & contribution, fails & (~fails + 1), 0)),
            checked.question.contributes.eq(valid & write & contribution & (fails == 0)),
            checked.stores.eq(valid & write & ~target.nothing & (target.window == Window.IDENTITY)),
            checked.read_only.eq(valid & write & (target.nothing | result | status)),
            checked.loads.eq(valid & ~write & ~target.nothing & (target.window == Window.IDENTITY)),
            checked.result.eq(
                valid
                & ~write
                & result
                & config.open
                & ~epoch_differs
                & (target.plane < Mux(config.result_format == ResultFormat.MAJORITY, 2, config.result_planes))
                & (target.line < config.lines)
            ),
            checked.poison.eq(valid & ~write & (target.nothing | (result & ~checked.result))),
            checked.status.eq(valid & ~write & status & config.open & slot_is_there),
            checked.line.eq(target.line),
            checked.plane.eq(target.plane),
            checked.part.eq(target.part),
            checked.start.eq(1 << config.shift[target.plane]),
            checked.negative.eq(config.negative.bit_select(target.plane, 1)),
            checked.signed.eq(is_signed(config.negative, config.planes)),
            checked.config.eq(config),
        ]
        return m

    def _version(self, m: Module, target: data.View, config: data.View, checked: data.View) -> Signal:
        """Which slot version; gives back whether the job has the slot of a status line.

        A job's slots are a range of the device's, and its versions are numbered by the low bits of the chunk number.
        """
        bits = version_width(self._map.params)
        mask = Signal(bits)  # of those low bits
        named = Signal(bits)
        index = Signal(bits)
        slot_is_there = Signal()
        m.d.comb += [
            mask.eq((2 << config.log2_slots) - 1),
            named.eq(target.slot | target.version << config.log2_slots),
            index.eq(Mux(target.window == Window.STATUS, named, target.chunk & mask)),
            slot_is_there.eq(target.slot >> config.log2_slots == 0),
            self.look_version.eq(Cat(((index & mask >> 1) | config.base)[: bits - 1], (index >> config.log2_slots)[0])),
            checked.version.eq(self.look_version),
        ]
        # As if it held the last chunk before the first one that it may take.
        ahead = Signal(bits)  # of the first chunk, to the version's first one
        m.d.comb += [
            ahead.eq((index - config.first_chunk) & mask),
            checked.question.before.eq(config.first_chunk + ahead - mask - 1),
            checked.question.chunk.eq(target.chunk),
        ]
        return slot_is_there

    def _lines(self, m: Module, target: data.View, config: data.View, checked: data.View) -> None:
        """Whose line it is, and what there is to send."""
        params, question = self._map.params, checked.question
        lines = Signal(params.lines_per_chunk)
        m.d.comb += [
            question.worker.eq(1 << target.worker),
            question.members.eq(config.members),
            question.line.eq(1 << target.line[: index_width(params.lines_per_chunk)]),
            lines.eq(Cat(config.lines > line for line in range(params.lines_per_chunk))),
        ]
        for plane in range(params.max_planes):
            here = Mux(target.plane == plane, question.line, 0)
            m.d.comb += [
                question.everything[plane].eq(Mux(config.planes > plane, lines, 0)),
                question.sent[plane].eq(Mux(question.abstains, question.everything[plane], here)),
            ]
