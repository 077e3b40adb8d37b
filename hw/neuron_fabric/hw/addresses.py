"""The address table: where the members of every job are, and its parent."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, unsigned
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.hw.framing import ENDPOINT
from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.hw.layout import index_width
from neuron_fabric.model.params import ReducerParams

__all__ = ["AddressTable", "lookup_signature"]


def lookup_signature(params: ReducerParams) -> wiring.Signature:
    """One who asks for addresses: ``endpoint`` belongs to the last cycle in which ``enable`` was 1, and holds."""
    return wiring.Signature(
        {
            "enable": Out(1),
            "bank": Out(index_width(params.jobs)),
            "worker": Out(index_width(params.workers)),
            "parent": Out(1),  # the job's parent instead of a worker
            "endpoint": In(ENDPOINT),
        }
    )


class AddressTable(wiring.Component):
    """An :data:`~neuron_fabric.hw.framing.ENDPOINT` for every worker, and the parent, of every job bank.

    Reset does not clear it. An entry that is written in the cycle in which it is looked up comes as it was before in
    simulation; what hardware gives then must not matter.

    Parameters
    ----------
    params : ReducerParams
    readers : int
        How many ask, in one cycle if they like.

    Members
    -------
    write, bank, worker, parent, endpoint : store an entry; one that this reducer hasn't is ignored
    lookups : array of :func:`lookup_signature`
    """

    def __init__(self, params: ReducerParams, readers: int) -> None:
        self._params = params
        super().__init__(
            {
                "write": In(1),
                "bank": In(8),
                "worker": In(16),
                "parent": In(1),
                "endpoint": In(ENDPOINT),
                "lookups": In(lookup_signature(params)).array(readers),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A bank's entries are in a row: its workers, then its parent."""
        m = Module()
        params = self._params
        place_bits = bits_for(params.workers)
        depth = params.jobs << place_bits
        m.submodules.entries = entries = Memory(
            shape=unsigned(ENDPOINT.size), depth=depth, init=[], attrs=COLLISIONS_DO_NOT_MATTER
        )
        write = entries.write_port()
        place = Signal(place_bits)
        m.d.comb += [
            place.eq(Mux(self.parent, params.workers, self.worker)),
            write.addr.eq(Cat(place, self.bank)),
            write.data.eq(self.endpoint),
            write.en.eq(self.write & (self.bank < params.jobs) & (self.parent | (self.worker < params.workers))),
        ]
        for index, lookup in enumerate(self.lookups):
            read = entries.read_port()
            wanted = Signal(place_bits, name=f"wanted{index}")
            m.d.comb += [
                wanted.eq(Mux(lookup.parent, params.workers, lookup.worker)),
                read.addr.eq(Cat(wanted, lookup.bank)),
                read.en.eq(lookup.enable),
                lookup.endpoint.eq(read.data),
            ]
        return m
