"""The core of the CXL endpoint: transactions in, responses out, one a cycle, in the order in which they were taken.

| cycle | stage | what happens to a transaction that is transferred in cycle 0 |
|---|---|---|
| 0 | accept | a write or a read is taken, in turn where both wait; a place for its response is promised |
| 1 | decode | what the address means; the configuration of its job bank is sampled |
| 2 | check | every check that needs no state; the slot version is looked up |
| 3 | judge | verdict; the version's state and plain memory are written; tally and plain memory are read |
| 4 | lanes | tally plus the weighted bits, written back; or a plane of it, or its comparison with the thresholds |
| 5 | respond | the data goes into the queue of responses; a completion did in cycle 4 |

Nothing in the pipeline ever waits. A transaction is taken only if there is a place for its response: so a stalled data
channel holds only reads, and stalled completions hold only writes.

**Atomic.** The memories show old data in the cycle of a write. A version's state is read in cycle 2 and written in
cycle 3, a tally is read in cycle 3 and written in cycle 4: for both the hazard has distance 1, and both are forwarded.
Plain memory is read and written in the same stage, so there is none. So every transaction finds what all before it have
left.

**Opening and closing** take effect between two transactions, since each samples its job's configuration in one cycle. A
closed job's versions are forgotten two cycles later, when the last transaction that found it open has been judged.
Until then ``hold`` keeps the registers as they are.
"""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from neuron_fabric.hw.cxl_check import TransactionCheck
from neuron_fabric.hw.cxl_layout import CXL_EVENTS, READ, REFUSALS, RESPONSE, WRITE, cxl_config_layout
from neuron_fabric.hw.cxl_queue import ResponseQueue
from neuron_fabric.hw.cxl_status import StatusWriter
from neuron_fabric.hw.cxl_table import VersionTable
from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER, PlaneAdder, PlaneSelector, TallyMemory, tally_layout
from neuron_fabric.hw.layout import ResultFormat, version_width
from neuron_fabric.hw.thresholds import PlaneControls, controls_layout
from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.model.params import LINE_BYTES

__all__ = ["CxlCore"]

_CARRIED = data.StructLayout({"write": 1, "tag": 16, "enable": LINE_BYTES, "data": 8 * LINE_BYTES})
"""What goes with a transaction from stage to stage."""


class CxlCore(wiring.Component):
    """Plain memory, and exact sums of weighted bit planes from many workers, behind memory transactions.

    :class:`neuron_fabric.model.cxl.CxlReducer` is the model, with transactions in the order of their transfers.

    Parameters
    ----------
    address_map : CxlMap

    Members
    -------
    config : array of :func:`~neuron_fabric.hw.cxl_layout.cxl_config_layout`, one for each job bank, in
        A transaction that is transferred in cycle t finds it as it is in cycle t + 1.
    opened, closed : in, one bit per job
        High in the first cycle in which ``open`` of a configuration is 1, or 0 again. More than one bit only when all
        jobs are closed.
    hold : out
        While it is 1 the configuration must not change. It depends on ``closed`` of the same cycle.
    writes, reads : streams of :data:`~neuron_fabric.hw.cxl_layout.WRITE`, :data:`~neuron_fabric.hw.cxl_layout.READ`, in
    completions, responses : streams of a tag, :data:`~neuron_fabric.hw.cxl_layout.RESPONSE`, out
        Each in the order of its requests.
    events : :data:`~neuron_fabric.hw.cxl_layout.CXL_EVENTS`, out
        Strobes, four cycles after the transfer they belong to.
    level : out
        Slot versions that hold an incomplete chunk.
    """

    READ_LATENCY = 6
    """Cycles from the transfer of a read to its data being valid, if no response was waiting."""
    WRITE_LATENCY = 5
    """The same of a write and its completion."""

    def __init__(self, address_map: CxlMap) -> None:
        self.map = address_map
        self.params = params = address_map.params
        super().__init__(
            {
                "config": In(data.ArrayLayout(cxl_config_layout(params), params.jobs)),
                "opened": In(params.jobs),
                "closed": In(params.jobs),
                "hold": Out(1),
                "writes": In(stream.Signature(WRITE)),
                "reads": In(stream.Signature(READ)),
                "completions": Out(stream.Signature(unsigned(16))),
                "responses": Out(stream.Signature(RESPONSE)),
                "events": Out(CXL_EVENTS),
                "level": Out(bits_for(2 * params.slots)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """See the table at the top of this module."""
        m = Module()
        address_map = self.map

        m.submodules.completions = completions = ResponseQueue(unsigned(16))
        m.submodules.responses = responses = ResponseQueue(RESPONSE)
        m.submodules.check = check = TransactionCheck(address_map)
        m.submodules.table = table = VersionTable(address_map)
        m.submodules.status = status = StatusWriter(address_map)
        wiring.connect(m, completions.responses, wiring.flipped(self.completions))
        wiring.connect(m, responses.responses, wiring.flipped(self.responses))
        self._forget(m, table)

        # ---- accept ------------------------------------------------------------------------------------------------
        taken = Signal(_CARRIED)
        taken_valid = Signal()
        address = Signal(64)
        self._accept(m, completions, responses, taken, taken_valid, address)

        # ---- decode, check -----------------------------------------------------------------------------------------
        to_decode, to_check, to_judge = (Signal(_CARRIED, reset_less=True, name=f"carried{k}") for k in (1, 2, 3))
        decode_valid = Signal()
        decode_address = Signal(64, reset_less=True)
        decode_full = Signal(reset_less=True)
        m.d.sync += [
            decode_valid.eq(taken_valid),
            decode_address.eq(address),
            decode_full.eq(taken.enable.all()),
            to_decode.eq(taken),
            to_check.eq(to_decode),
            to_judge.eq(to_check),
        ]
        m.d.comb += [
            check.config.eq(self.config),
            check.valid.eq(decode_valid),
            check.write.eq(to_decode.write),
            check.address.eq(decode_address),
            check.full.eq(decode_full),
            table.look_version.eq(check.look_version),
            table.look_worker.eq(check.look_worker),
        ]

        # ---- judge -------------------------------------------------------------------------------------------------
        known = check.checked
        readable = Signal()
        poison = Signal()
        m.d.comb += [
            table.question.eq(known.question),
            readable.eq(known.result & table.state.current & table.state.complete),
            poison.eq(known.poison | (known.result & ~readable)),
            status.config.eq(known.config),
            status.state.eq(table.state),
            status.part.eq(known.part),
        ]
        memory = Memory(
            shape=unsigned(8 * LINE_BYTES),
            depth=address_map.identity_bytes // LINE_BYTES,
            init=[],
            attrs=COLLISIONS_DO_NOT_MATTER,
        )
        m.submodules.memory = memory
        store, load = memory.write_port(granularity=8), memory.read_port()
        m.d.comb += [
            store.addr.eq(known.line),
            store.en.eq(Mux(known.stores, to_judge.enable, 0)),
            store.data.eq(to_judge.data),
            load.addr.eq(known.line),
            load.en.eq(known.loads),
        ]

        # ---- lanes -------------------------------------------------------------------------------------------------
        tag = Signal(16, reset_less=True)
        completes, responds = Signal(), Signal()
        loaded, poisoned = Signal(), Signal()
        status_line = Signal(8 * LINE_BYTES, reset_less=True)
        m.d.sync += [
            tag.eq(to_judge.tag),
            completes.eq(check.checked_valid & to_judge.write),
            responds.eq(check.checked_valid & ~to_judge.write),
            loaded.eq(known.loads),
            poisoned.eq(poison),
            status_line.eq(Mux(known.status, status.line, 0)),
        ]
        result_line = self._lanes(m, table, known, to_judge.data, readable)
        m.d.comb += [completions.push.eq(completes), completions.response.eq(tag)]
        self._count(m, table, known, check.checked_valid & ~to_judge.write, poison)

        # ---- respond -----------------------------------------------------------------------------------------------
        response = Signal(RESPONSE, reset_less=True)
        m.d.sync += [
            responses.push.eq(responds),
            response.tag.eq(tag),
            response.poison.eq(poisoned),
            response.data.eq(result_line | status_line | Mux(loaded, load.data, 0)),
        ]
        m.d.comb += responses.response.eq(response)
        return m

    def _accept(
        self,
        m: Module,
        completions: ResponseQueue,
        responses: ResponseQueue,
        taken: data.View,
        valid: Signal,
        address: Signal,
    ) -> None:
        """A write or a read, if there is a place for its response; in turn where both could be taken."""
        can_write, can_read, takes_write, takes_read = Signal(), Signal(), Signal(), Signal()
        turn = Signal()  # a write's
        write, read = self.writes.payload, self.reads.payload
        m.d.comb += [
            can_write.eq(self.writes.valid & completions.room),
            can_read.eq(self.reads.valid & responses.room),
            self.writes.ready.eq(completions.room & (turn | ~can_read)),
            self.reads.ready.eq(responses.room & (~turn | ~can_write)),
            takes_write.eq(self.writes.valid & self.writes.ready),
            takes_read.eq(self.reads.valid & self.reads.ready),
            completions.promise.eq(takes_write),
            responses.promise.eq(takes_read),
            valid.eq(takes_write | takes_read),
            taken.write.eq(takes_write),
            taken.tag.eq(Mux(takes_write, write.tag, read.tag)),
            taken.enable.eq(write.enable),
            taken.data.eq(write.data),
            address.eq(Mux(takes_write, write.address, read.address)),
        ]
        with m.If(valid):
            m.d.sync += turn.eq(takes_read)

    def _forget(self, m: Module, table: VersionTable) -> None:
        """Which versions to forget, and how long the registers must wait for that.

        Those of a job that is opened, too: whatever was done to its range while it was open.
        """
        params = self.params
        ending, ended = Signal(params.jobs), Signal(params.jobs)
        banks = Signal(params.jobs)
        base = Signal(version_width(params))
        log2_slots = Signal.like(self.config[0].log2_slots)
        every = Signal()
        m.d.sync += [ending.eq(self.closed), ended.eq(ending)]
        m.d.comb += [
            self.hold.eq(self.closed.any() | ending.any() | ended.any()),
            banks.eq(self.opened | ended),
            every.eq((ended & (ended - 1)).any()),
        ]
        for bank in range(params.jobs):
            with m.If(banks[bank]):
                m.d.comb += [base.eq(self.config[bank].base), log2_slots.eq(self.config[bank].log2_slots)]
        for version in range(2 * params.slots):
            slot = version % params.slots
            inside = slot >> log2_slots == base >> log2_slots
            m.d.comb += table.forget[version].eq(every | (banks.any() & inside))
        m.d.comb += self.level.eq(table.level)

    def _lanes(self, m: Module, table: VersionTable, known: data.View, bits: Value, readable: Signal) -> Signal:
        """The tally: read in the judge stage, then summed or looked at. Gives back the line of a result, or zeros.

        Controls that go to all lanes come straight from registers.
        """
        params = self.params
        line_bits = int(ceil_log2(params.lines_per_chunk))
        address_bits = version_width(params) + line_bits
        m.submodules.tallies = tallies = TallyMemory(params.lanes, params.acc_bits, 1 << address_bits)
        m.submodules.adder = adder = PlaneAdder(params.lanes, params.acc_bits, params.max_shift + 1)
        m.submodules.selector = selector = PlaneSelector(params.lanes, params.acc_bits)
        m.submodules.controls = controls = PlaneControls(params)

        address = Signal(address_bits)
        m.d.comb += [
            address.eq(Cat(known.line[:line_bits], known.version)),
            tallies.read_address.eq(address),
            controls.majority.eq(known.config.result_format == ResultFormat.MAJORITY),
            controls.plane.eq(known.plane),
            controls.voters.eq(table.state.voters),
            controls.margin.eq(known.config.margin),
            controls.counts_negatives.eq(known.config.counts_negatives),
            controls.signed.eq(known.signed),
            # A line that nobody has written reads as zero: all have abstained.
            controls.blank.eq(~readable | ~table.state.written),
        ]

        add = Signal()
        forward = Signal()
        at = Signal(address_bits, reset_less=True)
        addend = Signal(params.lanes, reset_less=True)
        start = Signal.like(adder.start, reset_less=True)
        negative, overwrite = Signal(reset_less=True), Signal(reset_less=True)
        chosen = Signal(controls_layout(params.acc_bits), reset_less=True)
        planes = tally_layout(params.lanes, params.acc_bits)
        total = Signal(planes, reset_less=True)  # the last one written
        tally = Signal(planes)
        m.d.sync += [
            add.eq(table.accepted & ~known.question.abstains),
            forward.eq(add & (at == address)),
            at.eq(address),
            addend.eq(bits),
            start.eq(known.start),
            negative.eq(known.negative),
            overwrite.eq(table.overwrites),
            chosen.eq(controls.controls),
            total.eq(adder.total),
        ]
        m.d.comb += [
            tally.eq(Mux(forward, total, tallies.read_data)),
            adder.tally.eq(tally),
            adder.bits.eq(addend),
            adder.start.eq(start),
            adder.negative.eq(negative),
            adder.overwrite.eq(overwrite),
            tallies.write_enable.eq(add),
            tallies.write_address.eq(at),
            tallies.write_data.eq(adder.total),
            selector.tally.eq(tally),
        ]
        for name, _field in chosen.shape():
            m.d.comb += getattr(selector, name).eq(chosen[name])
        return selector.result

    def _count(self, m: Module, table: VersionTable, known: data.View, reads: Value, poison: Signal) -> None:
        """One strobe for every write, and what else there is to count."""
        abstains = known.question.abstains
        happened = {
            "identity_writes": known.stores,
            "lines": table.accepted & ~abstains,
            "abstentions": table.accepted & abstains,
            "duplicates": table.duplicate,
            "stale": table.stale,
            **{name: known.refused[index] for index, name in enumerate(REFUSALS)},
            "refused_abstain_after_vote": table.refused,
            "refused_read_only": known.read_only,
            "completed": table.completes,
            "abandoned": table.abandoned,
            "reads": reads,
            "poisoned": poison,
        }
        m.d.sync += [self.events[name].eq(value) for name, value in happened.items()]
