"""The golden model of the CXL endpoint: a reducer that is written to and read as memory.

One transaction is one 64-byte line: :meth:`CxlReducer.mem_wr` and :meth:`CxlReducer.mem_rd` take it and answer at once.
What the addresses mean is in :mod:`neuron_fabric.model.cxl_map`, what hosts must do in ``docs/cxl.md``. The numbers in
comments are those of the rules in ``docs/protocol.md``.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from neuron_fabric.model import bitplane
from neuron_fabric.model.cxl_map import (
    SEEN_BITS,
    ContributeLine,
    CxlMap,
    IdentityLine,
    ResultLine,
    Status,
    StatusFlags,
    StatusLine,
)
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.reducer import JobConfig, check_job
from neuron_fabric.model.slot import SlotVersion
from neuron_fabric.model.wire import serial_newer

__all__ = ["ALL_BYTES", "CXL_COUNTERS", "CxlJob", "CxlReducer", "Outcome", "Read", "counter_table"]

ALL_BYTES = (1 << LINE_BYTES) - 1
"""Byte enables of a full-line write; bit ``i`` is for byte ``i``."""

_CHUNKS = 1 << 32
_ZEROS = bytes(LINE_BYTES)


class Read(NamedTuple):
    """What a read returns: 64 bytes, which mean nothing where ``poison`` is set."""

    data: bytes
    poison: bool = False


class Outcome(enum.Enum):
    """What became of a write. Every write has one; its value is the name of the counter.

    It is the model's and the counters' knowledge: a host sees that a write completed, and no more.
    """

    STORED = "identity_writes"
    ADDED = "lines"
    ABSTAINED = "abstentions"
    DUPLICATE = "duplicates"
    STALE = "stale"
    PARTIAL_WRITE = "refused_partial_write"
    JOB_NOT_OPEN = "refused_job_not_open"
    WRONG_EPOCH = "refused_wrong_epoch"
    WRONG_SENDER = "refused_wrong_sender"
    BAD_PLANE = "refused_bad_plane"
    BAD_LINES = "refused_bad_lines"
    ABSTAIN_AFTER_VOTE = "refused_abstain_after_vote"
    READ_ONLY = "refused_read_only"


CXL_COUNTERS: tuple[tuple[str, str], ...] = (
    ("identity_writes", "writes to the identity window"),
    ("lines", "lines added to a tally"),
    ("abstentions", "abstentions taken"),
    ("duplicates", "lines already seen, or of a worker that abstained; nothing was added"),
    ("stale", "writes to a chunk older than the one its slot version holds"),
    ("refused_partial_write", "contributions of less than a line"),
    ("refused_job_not_open", "contributions to a bank in which no job is open"),
    ("refused_wrong_epoch", "contributions with the epoch bits of another epoch"),
    ("refused_wrong_sender", "contributions of a worker that is not a member"),
    ("refused_bad_plane", "contributions to a plane that the encoding does not have"),
    ("refused_bad_lines", "contributions to a line that the job's chunks do not have"),
    ("refused_abstain_after_vote", "abstentions of a worker that has sent lines of the chunk"),
    ("refused_read_only", "writes to results, status or where there is nothing"),
    ("completed", "chunks completed"),
    ("abandoned", "incomplete chunks whose slot version was claimed by a newer one"),
    ("reads", "reads"),
    ("poisoned", "reads answered with poison"),
)
"""(name, meaning) of every counter. All but the last four count writes, each write once."""


@dataclass(frozen=True)
class CxlJob:
    """A job as a controller opens it at a CXL endpoint, and as its hosts know it.

    Parameters
    ----------
    config : JobConfig
        One leaf per member, no straggler rule, no parent. Addresses of members are not used: which worker a host is
        follows from the pages that it may map.
    lines : int
        Lines of every chunk, the same for the whole job, so that a device knows from the first line on when a chunk is
        complete and no write has to come before another one. A host pads the last chunk of a bucket with zeros.
    bank : int
        The job bank, which is the address field.
    first_chunk : int
        The chunk number with which hosts begin, and from which the device reconstructs full numbers.
    """

    config: JobConfig
    lines: int
    bank: int = 0
    first_chunk: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The workers, in ascending order."""
        return tuple(sorted(self.config.members))

    @property
    def result_planes(self) -> int:
        """Planes of a result."""
        return self.config.result_planes


class _Bank:
    """An open job and its slots."""

    def __init__(self, job: CxlJob, address_map: CxlMap) -> None:
        params = address_map.params
        self.job = job
        self.members = frozenset(job.members)
        self.everything = address_map.seen_mask(job.config.encoding.planes, job.lines)
        self.slots = job.config.slot_count(params)
        self.versions = [SlotVersion.empty(params) for _ in range(2 * self.slots)]
        for index, state in enumerate(self.versions):
            # As if it held the last chunk before the first one that it may take: newer and older are defined from the
            # start, and a write of a run that ended before this one was opened can claim nothing.
            first = job.first_chunk + (index - job.first_chunk) % len(self.versions)
            state.chunk = (first - len(self.versions)) % _CHUNKS

    def version(self, chunk: int) -> SlotVersion:
        """Where a chunk is kept; versions of one slot are ``slots`` apart, so low bits of the number are the index.

        Which slots of the pool those are (``config.base``) can be seen nowhere.
        """
        return self.versions[chunk % len(self.versions)]


class CxlReducer:
    """The reference CXL endpoint.

    Parameters
    ----------
    address_map : CxlMap
        Sizes and addresses.

    Attributes
    ----------
    counters : collections.Counter
        By the names of :data:`CXL_COUNTERS`.
    """

    def __init__(self, address_map: CxlMap) -> None:
        self.map = address_map
        self.params = address_map.params
        self.counters: Counter[str] = Counter()
        self._memory = bytearray(address_map.identity_bytes)
        self._banks: dict[int, _Bank] = {}

    # ---- control -----------------------------------------------------------------------------------------------

    def open(self, job: CxlJob) -> None:
        """Open a job in its bank, or reopen it with a newer epoch. ``ValueError`` names what does not fit."""
        config = job.config
        where = f"job {config.job}"
        if config.parent is not None or config.straggler is not None or config.encoding.leaves != 1:
            raise ValueError(f"{where}: a CXL endpoint has no tree and no straggler rule; use the in-network endpoint")
        if not 0 <= job.bank < self.params.jobs:
            raise ValueError(f"{where}: bank {job.bank} is out of range; this endpoint has {self.params.jobs}")
        if not 1 <= job.lines <= self.params.lines_per_chunk:
            raise ValueError(f"{where}: lines must be 1 to {self.params.lines_per_chunk}, not {job.lines}")
        if not 0 <= job.first_chunk < _CHUNKS:
            raise ValueError(f"{where}: first_chunk has 32 bits; {job.first_chunk} does not fit")
        for bank, old in self._banks.items():
            number = old.job.config.job
            if (bank == job.bank) != (number == config.job):
                raise ValueError(f"{where}: bank {bank} is open with job {number}; close that first")
        check_job(config, self.params, [old.job.config for old in self._banks.values()])
        self._banks[job.bank] = _Bank(job, self.map)

    def close(self, bank: int) -> None:
        """Forget a bank's job (rule 6). Closing a bank that is not open does nothing."""
        self._banks.pop(bank, None)

    def reset(self) -> None:
        """Forget every job (rule 6); counters and plain memory stay."""
        self._banks.clear()

    def versions(self, bank: int) -> tuple[SlotVersion, ...]:
        """What the slot versions of a bank's job hold, by their numbers (chunk mod 2 S); none if it is not open.

        For benches, which look without reading: nothing is counted.
        """
        return tuple(self._banks[bank].versions) if bank in self._banks else ()

    @property
    def incomplete(self) -> int:
        """Slot versions that hold an incomplete chunk: the level of which ``slot_high_water`` is the maximum."""
        return sum(state.valid and not state.complete for bank in self._banks.values() for state in bank.versions)

    # ---- transactions ------------------------------------------------------------------------------------------

    def mem_wr(self, address: int, data: bytes, byte_enable: int = ALL_BYTES) -> Outcome:
        """Write those of the 64 bytes that are enabled. Returning is the completion; see :class:`Outcome`.

        ``ValueError`` for what no fabric would deliver here: another size, an address that is not a line's or is
        outside the device.
        """
        if len(data) != LINE_BYTES or not 0 <= byte_enable <= ALL_BYTES:
            raise ValueError(
                f"a write has {LINE_BYTES} bytes and as many enables, not {len(data)} and {byte_enable:#x}"
            )
        match self.map.decode(address):
            case IdentityLine(line):
                outcome = self._store(line * LINE_BYTES, data, byte_enable)
            case ContributeLine() as target:
                # What write-combining has flushed too early can't be told from a line with zeros in it.
                outcome = self._contribute(target, data) if byte_enable == ALL_BYTES else Outcome.PARTIAL_WRITE
            case _:
                outcome = Outcome.READ_ONLY
        self.counters[outcome.value] += 1
        return outcome

    def mem_rd(self, address: int) -> Read:
        """Read a line; nothing changes but two counters. ``ValueError`` as for :meth:`mem_wr`."""
        match self.map.decode(address):
            case IdentityLine(line):
                read = Read(bytes(self._memory[line * LINE_BYTES : (line + 1) * LINE_BYTES]))
            case ContributeLine():
                read = Read(_ZEROS)
            case ResultLine() as target:
                read = self._result(target)
            case StatusLine() as target:
                read = Read(self._status(target).pack())
            case _:
                read = Read(_ZEROS, poison=True)
        self.counters["reads"] += 1
        self.counters["poisoned"] += read.poison
        return read

    # ---- windows -----------------------------------------------------------------------------------------------

    def _store(self, offset: int, data: bytes, byte_enable: int) -> Outcome:
        for index, byte in enumerate(data):
            if byte_enable >> index & 1:
                self._memory[offset + index] = byte
        return Outcome.STORED

    def _contribute(self, target: ContributeLine, data: bytes) -> Outcome:
        bank = self._banks.get(target.bank)
        # Rule 1; the first failing check counts.
        if bank is None:
            return Outcome.JOB_NOT_OPEN
        job, encoding = bank.job, bank.job.config.encoding
        if target.epoch != self.map.low_epoch(job.config.epoch):
            return Outcome.WRONG_EPOCH
        if target.worker not in bank.members:
            return Outcome.WRONG_SENDER
        abstain = target.plane == self.map.abstain_plane
        if not abstain and target.plane >= encoding.planes:
            return Outcome.BAD_PLANE
        if target.line >= (1 if abstain else job.lines):
            return Outcome.BAD_LINES

        state = bank.version(target.chunk)
        chunk = self.map.nearest(target.chunk, state.chunk)
        if not state.valid or chunk != state.chunk:
            # Rule 3.
            if not serial_newer(chunk, state.chunk):
                return Outcome.STALE
            self.counters["abandoned"] += state.valid and not state.complete
            state.claim(chunk, job.lines)

        # Rule 2, line by line; in a complete chunk every member has everything.
        seen = state.seen.get(target.worker, 0)
        sent = bank.everything if abstain else 1 << self.map.seen_bit(target.plane, target.line)
        if seen & sent == sent:
            return Outcome.DUPLICATE
        if abstain and seen:
            return Outcome.ABSTAIN_AFTER_VOTE
        if abstain:
            state.abstained.add(target.worker)
        else:
            state.voters += not seen  # once per worker, however many lines
            state.add(target.line, bitplane.from_lines(data, 1, LINE_BYTES), encoding, target.plane)
        state.seen[target.worker] = seen | sent
        if all(state.seen.get(worker) == bank.everything for worker in bank.members):
            state.finish()  # rule 4
            self.counters["completed"] += 1
        return Outcome.ABSTAINED if abstain else Outcome.ADDED

    def _result(self, target: ResultLine) -> Read:
        bank = self._banks.get(target.bank)
        if bank is None or target.epoch != self.map.low_epoch(bank.job.config.epoch):
            return Read(_ZEROS, poison=True)
        job, config = bank.job, bank.job.config
        state = bank.version(target.chunk)
        ready = state.valid and state.complete and target.chunk == self.map.low_chunk(state.chunk)
        if not ready or target.plane >= job.result_planes or target.line >= job.lines:
            return Read(_ZEROS, poison=True)
        planes = (
            state.majority_planes(config.encoding, config.margin)
            if config.result_format == "majority"
            else state.tally_planes(job.result_planes)
        )
        return Read(bitplane.to_lines(planes[target.plane][target.line : target.line + 1], LINE_BYTES))

    def _status(self, target: StatusLine) -> Status:
        bank = self._banks.get(target.bank)
        if bank is None or target.slot >= bank.slots:
            return Status()
        job, config = bank.job, bank.job.config
        state = bank.versions[target.version * bank.slots + target.slot]
        flags = StatusFlags.OPEN
        if state.valid:
            flags |= StatusFlags.CLAIMED
        if state.complete:
            flags |= StatusFlags.COMPLETE
        if config.result_format == "majority":
            flags |= StatusFlags.MAJORITY
        return Status(
            chunk=state.chunk,
            epoch=config.epoch,
            job=config.job,
            flags=flags,
            lines=job.lines,
            planes=config.encoding.planes,
            result_planes=job.result_planes,
            voters=state.voters,
            done=sum(1 << worker for worker, seen in state.seen.items() if seen == bank.everything),
            abstained=sum(1 << worker for worker in state.abstained),
            seen=state.seen.get(target.worker, 0) >> SEEN_BITS * target.part & (1 << SEEN_BITS) - 1,
        )


def counter_table() -> str:
    """The counters as a Markdown table, for the documentation page that is generated from it."""
    rows = ["| counter | counts |", "|---|---|"]
    rows += [f"| {name} | {doc} |" for name, doc in CXL_COUNTERS]
    return "\n".join(rows) + "\n"
