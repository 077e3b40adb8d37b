"""The register slave: AXI4-Lite on one side, configuration and event strobes on the other.

Everything about a register (where it is, its fields, who may write) comes from the table in
:mod:`neuron_fabric.model.registers`; :class:`neuron_fabric.model.registerfile.RegisterFile` is its model.

A transfer is a cycle in which valid and ready of a channel are both 1. In cycles:

| cycle | write | read |
|---|---|---|
| 0 | the later one of AW and W is transferred | AR is transferred |
| 1 | written, unless `hold` is 1 or the response before still waits | word selected; a counter is visited |
| 2 | new value out, command pulses, B is valid | the counter's sum |
| 3 | | R is valid |

A read shows what was written up to its cycle 1, and every event up to and including its cycle 1.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from amaranth import Cat, Module, Mux, Signal, unsigned
from amaranth.hdl import ShapeLike, Value
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registerfile import COUNTER_MAX, Response
from neuron_fabric.model.registers import (
    COUNTER_BASE,
    COUNTERS,
    JOB_OPEN,
    MAXIMA,
    REGISTERS,
    Access,
    Field,
    Register,
    Word,
    address_bits,
    capability_values,
    words,
)

__all__ = ["AxiLiteRegisters", "EventCounters", "count_layout", "job_layout", "shared_layout"]

_COUNTED = tuple(name for name, _doc in COUNTERS if name not in MAXIMA)


def job_layout(params: ReducerParams) -> data.StructLayout:
    """A job's bank: one member per register, by its name in lower case without ``JOB_``.

    A register of several fields is a struct, of one field that field, and an array of registers an array with one
    entry per worker or plane: ``control.open``, ``epoch``, ``members[worker]``, ``weights[plane].shift``.
    """
    return data.StructLayout({register.key: _shape(register, params) for register in REGISTERS if register.per_job})


def shared_layout(params: ReducerParams) -> data.StructLayout:
    """The registers that can be written and are of no job, as :func:`job_layout` has those of a job's bank.

    For instance ``local_ip``, ``group_port.enable``, ``entry_select.worker``.
    """
    return data.StructLayout({register.key: _shape(register, params) for register in REGISTERS if _is_shared(register)})


def _is_shared(register: Register) -> bool:
    return register.access is Access.RW and not register.per_job


def _shape(register: Register, params: ReducerParams) -> ShapeLike:
    fields = {field.name: unsigned(field.width) for field in register.fields}
    entry = data.StructLayout(fields) if len(fields) > 1 else next(iter(fields.values()))
    return data.ArrayLayout(entry, getattr(params, register.entries)) if register.entries else entry


def count_layout(params: ReducerParams, widths: Mapping[str, int] | None = None) -> data.StructLayout:
    """What goes into the counters, by their names: by how much to count in this cycle, or the level to hold.

    A count has one bit and a level as many as it takes to say how many slot versions there are, but for those named in
    ``widths``.
    ``ValueError`` for a name that is not in the table or a width outside 1 to 32.
    """
    shapes = {name: bits_for(2 * params.slots) if name in MAXIMA else 1 for name, _doc in COUNTERS}
    for name, width in (widths or {}).items():
        if name not in shapes:
            raise ValueError(f"widths: there is no counter {name!r} in the register table")
        if not 1 <= operator.index(width) <= 32:
            raise ValueError(f"widths: {name} must have 1 to 32 bits, not {width}")
        shapes[name] = width
    return data.StructLayout(shapes)


def _or(values: Sequence[Value]) -> Value:
    """Their bitwise OR, as a tree: a chain of hundreds is too deep for Python."""
    while len(values) > 1:
        values = [reduce(or_, values[at : at + 8]) for at in range(0, len(values), 8)]
    return values[0]


class EventCounters(wiring.Component):
    """All counters of the table, 32 bits each, which stop at their greatest value.

    The words are in one small memory with one adder. Every counter collects events in a few flip-flops, and is visited
    in turn, one a cycle: what was collected goes to the adder and from there to its word. A read visits the counter
    that is asked for out of turn, so it is exact. With 47 counters on an ECP5 (Yosys 0.70, ``-nowidelut``, a carry cell
    counted as two LUT4) that is 1,063 LUT4 and 395 flip-flops; an adder and a register a counter would be 3,159 and
    1,504.

    Parameters
    ----------
    layout : :func:`count_layout`

    Members
    -------
    count : by how much each counter goes up in this cycle
    clear : all counters are 0 after this cycle, and what came in this cycle isn't counted
    visit : visit counter ``index``; at most every other cycle
    total : in the cycle after ``visit``: the counter, with what came in the cycle of ``visit``
    """

    def __init__(self, layout: data.StructLayout) -> None:
        super().__init__(
            {
                "count": In(layout),
                "clear": In(1),
                "visit": In(1),
                "index": In(range(len(_COUNTED))),
                "total": Out(32),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Two stages: collect, and add. The memory is read and written in the second, so there is no hazard."""
        m = Module()
        widths = {name: Value.cast(self.count[name]).shape().width for name in _COUNTED}
        # Between two visits are at most as many cycles as there are counters, and again as many in which others were
        # visited out of turn.
        most = {name: 2 * len(_COUNTED) * ((1 << width) - 1) for name, width in widths.items()}
        m.submodules.words = words = Memory(shape=unsigned(32), depth=len(_COUNTED), init=[])
        read = words.read_port(domain="comb")
        write = words.write_port()

        # ---- collect -----------------------------------------------------------------------------------------------
        turn = Signal(range(len(_COUNTED)))
        index = Signal.like(turn)
        visited = Signal(len(_COUNTED))
        taken = Signal(max(bits_for(value) for value in most.values()))
        m.d.comb += [index.eq(Mux(self.visit, self.index, turn)), visited.eq(1 << index)]
        with m.If(~self.visit):
            m.d.sync += turn.eq(Mux(turn == len(_COUNTED) - 1, 0, turn + 1))
        collected = []
        for number, name in enumerate(_COUNTED):
            pending = Signal(bits_for(most[name]), name=f"pending_{name}")
            now = Signal(bits_for(most[name]), name=f"now_{name}")
            m.d.comb += now.eq(pending + self.count[name])
            m.d.sync += pending.eq(Mux(self.clear | visited[number], 0, now))
            collected.append(Mux(visited[number], now, 0))
        m.d.comb += taken.eq(_or(collected))

        # ---- add ---------------------------------------------------------------------------------------------------
        addend = Signal.like(taken)
        valid = Signal(len(_COUNTED))  # a word that isn't is 0: reset and clear take one cycle
        here = Signal(len(_COUNTED))
        total = Signal(max(32, len(taken)) + 1)
        m.d.sync += [read.addr.eq(index), addend.eq(Mux(self.clear, 0, taken))]
        m.d.comb += [
            here.eq(1 << read.addr),
            total.eq(Mux((valid & here).any(), read.data, 0) + addend),
            self.total.eq(Mux(total[32:].any(), COUNTER_MAX, total)),
            write.en.eq(1),
            write.addr.eq(read.addr),
            write.data.eq(self.total),
        ]
        m.d.sync += valid.eq(Mux(self.clear, 0, valid | here))
        return m


class AxiLiteRegisters(wiring.Component):
    """The registers of a reducer as an AXI4-Lite slave of 32-bit words.

    One write and one read can be under way at once and don't wait for each other. AW and W may come in any order. Byte
    strobes are honoured, protection bits and the two lowest address bits are ignored. An address without a register is
    answered with SLVERR and 0; a write to what is read-only is answered with SLVERR and has no effect. Bits without a
    field, or of workers or planes that this reducer hasn't, read as 0, and writing them is no error.

    With the default sizes and one job that is 2,485 LUT4 and 1,180 flip-flops of an ECP5, counted as for
    :class:`EventCounters`, and about 490 and 270 more for each further job.

    Parameters
    ----------
    params : ReducerParams
        There is a bank for each of ``params.jobs``.
    widths : mapping of str to int, optional
        Bits of inputs of ``count``, by name; see :func:`count_layout`.

    Members
    -------
    s_axil_* : the slave's port; the address has :func:`~neuron_fabric.model.registers.address_bits` bits
    jobs : array of :func:`job_layout`, out
        What was written. A job's registers other than JOB_CONTROL should only change while it isn't open; this block
        doesn't see to that.
    shared : :func:`shared_layout`, out
        What was written to the registers that are of no job.
    hold : in
        While it is 1 no write is executed, and so its response comes later; reads go on. It may depend on ``opened``
        and ``closed`` of the same cycle.
    opened, closed : out, one bit per job
        High in the first cycle in which the job's ``open`` is 1, or 0 again (but not for ``rst``).
    control_reset : out
        CONTROL.reset was written, and all jobs are closed, as of this cycle.
    control_clear : out
        CONTROL.clear_counters was written.
    entry_write : out
        ENTRY_WRITE.write was written, and ``shared.entry_*`` stay as they are in this cycle and the next.
    count : :func:`count_layout`, in
        Events; those in the cycle of ``control_clear`` are not counted.

    Raises
    ------
    ValueError
        A size doesn't fit the registers, or ``widths`` is wrong.
    """

    WRITE_LATENCY = 2
    """Cycles from the later transfer on AW and W to BVALID and to the new value, if no response was waiting and
    ``hold`` was 0 one cycle after it."""
    READ_LATENCY = 3
    """Cycles from the transfer on AR to RVALID."""

    def __init__(self, params: ReducerParams, widths: Mapping[str, int] | None = None) -> None:
        self.params = params
        self._constants = capability_values(params)
        self._words = words(params.jobs)
        self._count_layout = count_layout(params, widths)
        address = address_bits(params.jobs)
        super().__init__(
            {
                "s_axil_awaddr": In(address),
                "s_axil_awprot": In(3),
                "s_axil_awvalid": In(1),
                "s_axil_awready": Out(1),
                "s_axil_wdata": In(32),
                "s_axil_wstrb": In(4),
                "s_axil_wvalid": In(1),
                "s_axil_wready": Out(1),
                "s_axil_bresp": Out(2),
                "s_axil_bvalid": Out(1),
                "s_axil_bready": In(1),
                "s_axil_araddr": In(address),
                "s_axil_arprot": In(3),
                "s_axil_arvalid": In(1),
                "s_axil_arready": Out(1),
                "s_axil_rdata": Out(32),
                "s_axil_rresp": Out(2),
                "s_axil_rvalid": Out(1),
                "s_axil_rready": In(1),
                "jobs": Out(data.ArrayLayout(job_layout(params), params.jobs)),
                "shared": Out(shared_layout(params)),
                "hold": In(1),
                "opened": Out(params.jobs),
                "closed": Out(params.jobs),
                "control_reset": Out(1),
                "control_clear": Out(1),
                "entry_write": Out(1),
                "count": In(self._count_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The two channels share nothing but the registers."""
        m = Module()
        self._write(m)
        self._read(m)
        was_open = Signal(len(self.opened))
        is_open = Cat(job.control.open for job in self.jobs)
        m.d.sync += was_open.eq(is_open)
        m.d.comb += [self.opened.eq(is_open & ~was_open), self.closed.eq(was_open & ~is_open)]
        return m

    def _fields(self, word: Word) -> list[tuple[Value, Field]]:
        """The storage of each field of a register that can be written, and its place in the word."""
        register = word.register
        storage: Any = (self.jobs[word.bank] if register.per_job else self.shared)[register.key]
        found = []
        for entry, field in word.fields(self.params):
            part = storage[entry] if register.entries else storage
            found.append((Value.cast(part if len(register.fields) == 1 else part[field.name]), field))
        return found

    def _write(self, m: Module) -> None:
        have_address = Signal()
        have_data = Signal()
        address = Signal(len(self.s_axil_awaddr) - 2, reset_less=True)
        value = Signal(32, reset_less=True)
        strobe = Signal(4, reset_less=True)
        mask = Signal(32)
        execute = Signal()
        m.d.comb += [
            self.s_axil_awready.eq(~have_address),
            self.s_axil_wready.eq(~have_data),
            mask.eq(Cat(strobe[byte].replicate(8) for byte in range(4))),
            execute.eq(have_address & have_data & ~self.s_axil_bvalid & ~self.hold),
        ]
        with m.If(self.s_axil_awready):
            m.d.sync += [have_address.eq(self.s_axil_awvalid), address.eq(self.s_axil_awaddr[2:])]
        with m.If(self.s_axil_wready):
            m.d.sync += [have_data.eq(self.s_axil_wvalid), value.eq(self.s_axil_wdata), strobe.eq(self.s_axil_wstrb)]
        with m.If(self.s_axil_bready):
            m.d.sync += self.s_axil_bvalid.eq(0)

        commands: dict[str, Signal] = {}
        hits = []
        for word in self._words:
            if not word.register.access.writable:
                continue
            hit = Signal(name=f"write_{word.name}")
            hits.append(hit)
            m.d.comb += hit.eq(execute & (address == word.address >> 2))
            if word.register.access is Access.COMMAND:
                for _entry, field in word.fields(self.params):
                    commands[field.name] = Signal(name=f"command_{field.name}")
                    m.d.comb += commands[field.name].eq(hit & (value & mask)[field.lsb])
                continue
            with m.If(hit):
                for storage, field in self._fields(word):
                    place = slice(field.lsb, field.lsb + field.width)
                    m.d.sync += storage.eq((storage & ~mask[place]) | (value[place] & mask[place]))
        with m.If(execute):
            m.d.sync += [
                have_address.eq(0),
                have_data.eq(0),
                self.s_axil_bvalid.eq(1),
                self.s_axil_bresp.eq(Mux(_or(hits), Response.OKAY, Response.SLVERR)),
            ]
        m.d.sync += [
            self.control_reset.eq(commands["reset"]),
            self.control_clear.eq(commands["clear_counters"]),
            self.entry_write.eq(commands["write"]),
        ]
        with m.If(commands["reset"]):
            m.d.sync += [job.control[JOB_OPEN.name].eq(0) for job in self.jobs]

    def _read(self, m: Module) -> None:
        m.submodules.counters = counters = EventCounters(self._count_layout)
        maxima = {}
        for name in MAXIMA:
            level = self.count[name]
            held = Signal.like(level, name=f"held_{name}")
            maxima[name] = Signal.like(level, name=f"maximum_{name}")
            m.d.comb += maxima[name].eq(Mux(self.control_clear, 0, Mux(level > held, level, held)))
            m.d.sync += held.eq(maxima[name])

        address = Signal(len(self.s_axil_araddr) - 2, reset_less=True)
        selecting = Signal()
        adding = Signal()
        counted = Signal()
        add_counted = Signal()
        m.d.comb += [
            self.s_axil_arready.eq(~(selecting | adding | self.s_axil_rvalid)),
            counters.count.eq(self.count),
            counters.clear.eq(self.control_clear),
            counters.visit.eq(selecting & counted),
        ]
        m.d.sync += [
            selecting.eq(self.s_axil_arvalid & self.s_axil_arready),
            address.eq(self.s_axil_araddr[2:]),
            adding.eq(selecting),
            add_counted.eq(counted),
        ]
        hits, counter_hits, values, indices = [], [], [], []
        for word in self._words:
            hit = Signal(name=f"read_{word.name}")
            hits.append(hit)
            m.d.comb += hit.eq(address == word.address >> 2)
            if word.register.access in (Access.COUNTER, Access.MAXIMUM):
                name, _doc = COUNTERS[(word.address - COUNTER_BASE) // 4]
                if name in MAXIMA:
                    values.append(Mux(hit, maxima[name], 0))
                else:
                    counter_hits.append(hit)
                    indices.append(Mux(hit, _COUNTED.index(name), 0))
            elif word.register.access is Access.RO:
                values.append(Mux(hit, self._constants[word.name], 0))
            elif word.register.access is Access.RW:
                values += [Mux(hit, storage, 0) << field.lsb for storage, field in self._fields(word)]
        m.d.comb += [counted.eq(_or(counter_hits)), counters.index.eq(_or(indices))]
        with m.If(selecting):
            m.d.sync += [
                self.s_axil_rdata.eq(_or(values)),
                self.s_axil_rresp.eq(Mux(_or(hits), Response.OKAY, Response.SLVERR)),
            ]
        with m.If(adding):
            m.d.sync += self.s_axil_rvalid.eq(1)
            with m.If(add_counted):
                m.d.sync += self.s_axil_rdata.eq(counters.total)
        with m.If(self.s_axil_rvalid & self.s_axil_rready):
            m.d.sync += self.s_axil_rvalid.eq(0)
