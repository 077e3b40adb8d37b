"""The golden model of the register slave: what software sees of a reducer, transaction by transaction."""

from __future__ import annotations

import enum
import operator
from collections import Counter

from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registers import (
    COUNTERS,
    JOB_OPEN,
    MAXIMA,
    Access,
    Word,
    address_bits,
    capability_values,
    words,
)

__all__ = ["COUNTER_MAX", "RegisterFile", "Response"]

COUNTER_MAX = (1 << 32) - 1
"""Where a counter stops."""


class Response(enum.IntEnum):
    """BRESP and RRESP, as AXI encodes them."""

    OKAY = 0
    SLVERR = 2
    """No register there, or a write to one that is read-only. Nothing was changed; what was read is 0."""


class RegisterFile:
    """The registers of a reducer of these sizes, its counters and its address table.

    Parameters
    ----------
    params : ReducerParams
        There is a bank for each of ``params.jobs``.

    Attributes
    ----------
    commands : collections.Counter
        How often each field of a command register was written with a 1, by the field's name.
    addresses : dict
        What ENTRY_WRITE has stored: (bank, worker) to :class:`~neuron_fabric.model.net.Endpoint`. The parent of a job
        is worker None.

    Raises
    ------
    ValueError
        A size doesn't fit the capability registers.
    """

    def __init__(self, params: ReducerParams) -> None:
        self.params = params
        self.commands: Counter[str] = Counter()
        self.addresses: dict[tuple[int, int | None], Endpoint] = {}
        self._limit = 1 << address_bits(params.jobs)
        self._words = {word.address: word for word in words(params.jobs)}
        self._writable = {word.name: word.writable(params) for word in self._words.values()}
        self._values = dict.fromkeys(self._writable, 0) | capability_values(params)
        self._counter_names = {name for name, _ in COUNTERS}

    def read(self, address: int) -> tuple[int, Response]:
        """The word at a byte address, whose two low bits don't matter, and how the slave answers.

        ``ValueError`` if the address has more bits than the slave.
        """
        word = self._at(address)
        return (0, Response.SLVERR) if word is None else (self._values[word.name], Response.OKAY)

    def write(self, address: int, data: int, strobe: int = 0b1111) -> Response:
        """Write those bytes of a word whose bit in ``strobe`` is set.

        CONTROL.reset closes every job (``open`` is 0 then, all else stays), CONTROL.clear_counters calls
        :meth:`clear`, ENTRY_WRITE.write stores in :attr:`addresses`. ``ValueError`` if an argument has more bits than
        the slave's port.
        """
        if not 0 <= operator.index(data) < 1 << 32:
            raise ValueError(f"data has 32 bits; {data:#x} does not fit")
        if not 0 <= operator.index(strobe) < 1 << 4:
            raise ValueError(f"strobe has 4 bits; {strobe:#x} does not fit")
        word = self._at(address)
        if word is None or not word.register.access.writable:
            return Response.SLVERR
        enabled = sum(0xFF << 8 * byte for byte in range(4) if strobe >> byte & 1) & self._writable[word.name]
        if word.register.access is Access.COMMAND:
            self._command(word, data & enabled)
        else:
            self._values[word.name] = (self._values[word.name] & ~enabled) | (data & enabled)
        return Response.OKAY

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to a counter of the table, which stops at 2**32 - 1; a maximum takes ``n`` as the level.

        ``KeyError`` for an unknown name, ``ValueError`` for a negative ``n``.
        """
        if name not in self._counter_names:
            raise KeyError(f"no counter {name!r} in the register table")
        if operator.index(n) < 0:
            raise ValueError(f"counter {name!r} only goes up, so it can't count {n}")
        key = f"COUNT_{name.upper()}"
        value = max(self._values[key], n) if name in MAXIMA else self._values[key] + n
        self._values[key] = min(value, COUNTER_MAX)

    def clear(self) -> None:
        """Set all counters and maxima to 0."""
        for name, _ in COUNTERS:
            self._values[f"COUNT_{name.upper()}"] = 0

    def endpoint(self, name: str) -> Endpoint:
        """The address in the registers of that prefix: LOCAL, GROUP, LISTEN or ENTRY."""
        return Endpoint(
            self._values[f"{name}_MAC_HI"] << 32 | self._values[f"{name}_MAC_LO"],
            self._values[f"{name}_IP"],
            self.field(f"{name}_PORT", "port"),
        )

    def field(self, name: str, field: str, entry: int = 0) -> int:
        """The value of a field, e.g. ``field("JOB0_CONTROL", "open")`` or ``field("JOB0_WEIGHTS", "shift", plane)``.

        Arrays go by the name without a number. ``KeyError`` if this reducer hasn't such a register, field or entry.
        """
        for word in self._words.values():
            if name == (word.name if word.register.count == 1 else word.name.removesuffix(str(word.index))):
                for number, place in word.fields(self.params):
                    if (number, place.name) == (entry, field):
                        return (self._values[word.name] & place.mask) >> place.lsb
        raise KeyError(f"this reducer has no {name}.{field} of entry {entry}")

    def _at(self, address: int) -> Word | None:
        if not 0 <= operator.index(address) < self._limit:
            raise ValueError(f"address must be 0 to {self._limit - 1:#x}, not {address:#x}")
        return self._words.get(address & ~0b11)

    def _command(self, word: Word, bits: int) -> None:
        issued = [field.name for _entry, field in word.fields(self.params) if bits & field.mask]
        self.commands.update(issued)
        if "reset" in issued:
            for bank in range(self.params.jobs):
                self._values[f"JOB{bank}_CONTROL"] &= ~JOB_OPEN.mask
        if "clear_counters" in issued:
            self.clear()
        if "write" in issued:
            bank, worker, parent = (self.field("ENTRY_SELECT", name) for name in ("bank", "worker", "parent"))
            if bank < self.params.jobs and (parent or worker < self.params.workers):
                self.addresses[bank, None if parent else worker] = self.endpoint("ENTRY")
