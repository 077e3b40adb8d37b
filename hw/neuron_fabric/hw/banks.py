"""From the registers of a job's bank to the configuration that the datapath works with."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.csr import job_layout
from neuron_fabric.hw.layout import config_layout
from neuron_fabric.model.params import ReducerParams

__all__ = ["BankConfig"]


class BankConfig(wiring.Component):
    """What is written in a bank, as :func:`~neuron_fabric.hw.layout.config_layout`.

    The write that closes a job may change its number as well, while frames of the job are still inside. So the number
    stays what it was when the job was open, until another is opened.

    Members
    -------
    registers : :func:`~neuron_fabric.hw.csr.job_layout`, in
    config : :func:`~neuron_fabric.hw.layout.config_layout`, out
    """

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        super().__init__({"registers": In(job_layout(params)), "config": Out(config_layout(params))})

    def elaborate(self, platform: object) -> Module:
        """Wires, and the number's register."""
        m = Module()
        registers, config = self.registers, self.config
        number = Signal(16)
        m.d.comb += config.job.eq(Mux(registers.control.open, registers.control.job, number))
        m.d.sync += number.eq(config.job)
        values: dict[str, Value] = {
            "epoch": registers.epoch,
            "base": registers.slots.base,
            "log2_slots": registers.slots.log2_count,
            "members": Value.cast(registers.members),
            "planes": registers.encoding.planes,
            "counts_negatives": registers.encoding.counts_negatives,
            "result_format": registers.result.majority,
            "result_planes": registers.result.planes,
            "margin": registers.result.margin,
            "multicast": registers.result.multicast,
            "timeout": registers.timeout,
            "quorum": registers.quorum,
            "child": registers.result.child,
            "parent_job": registers.parent.job,
            "parent_epoch": registers.parent.epoch,
            "parent_worker": registers.parent_worker,
        }
        for name, value in values.items():
            m.d.comb += Value.cast(config[name]).eq(value)
        for plane in range(self._params.max_planes):
            m.d.comb += [
                config.negative[plane].eq(registers.weights[plane].negative),
                config.shift[plane].eq(registers.weights[plane].shift),
            ]
        missing = {name for name, _field in config_layout(self._params)} - {*values, "job", "negative", "shift"}
        if missing:
            raise NotImplementedError(f"no register for {', '.join(sorted(missing))}")
        return m
