"""Actors for the CXL endpoint's bench: hosts that do what they should, and masters that do anything."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from neuron_fabric.model.cxl import ALL_BYTES, CxlJob
from neuron_fabric.model.cxl_map import (
    SEEN_BITS,
    ContributeLine,
    CxlMap,
    IdentityLine,
    ResultLine,
    Status,
    StatusFlags,
    StatusLine,
    Window,
)
from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding, int_encoding
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.reducer import JobConfig
from neuron_fabric.sim.cxl_bench import Actor, Control, CxlBench, Load, Pause, Store, closing, opening, resetting
from neuron_fabric.sim.scoreboard import Mismatch

__all__ = ["SCENARIOS", "Host", "expected", "random_job", "scenario"]

_CHUNKS = 1 << 32
_ENCODINGS = (BINARY, TERNARY, int_encoding(2), int_encoding(3), int_encoding(4))

Planes = npt.NDArray[np.uint8]


# ---- jobs --------------------------------------------------------------------------------------------------------


def random_job(
    rng: random.Random, address_map: CxlMap, bank: int, epoch: int, beside: list[CxlJob], **fixed: Any
) -> CxlJob | None:
    """Any job that fits beside the open ones, or None if no slot is free.

    ``fixed`` are fields of :class:`~neuron_fabric.model.reducer.JobConfig`, or ``lines``, or ``first_chunk``.
    """
    params = address_map.params
    taken = [range(j.config.base, j.config.base + j.config.slot_count(params)) for j in beside]
    free = [
        (base, count)
        for count in (1 << k for k in range(params.slots.bit_length()))
        for base in range(0, params.slots, count)
        if all(base + count <= other.start or other.stop <= base for other in taken)
    ]
    if not free:
        return None
    base, slots = rng.choice(free)
    members = sorted(rng.sample(range(params.workers), rng.randint(1, params.workers)))
    fitting = [encoding for encoding in _ENCODINGS if _fits(encoding, len(members), address_map)]
    margin = min(rng.choice([0, 0, 1, 2, 3]), (1 << params.acc_bits) - 1)
    form = {"result_format": "majority", "margin": margin} if rng.random() < 0.5 else {}
    lines = rng.randint(1, params.lines_per_chunk)
    first_chunk = rng.choice([0, rng.getrandbits(32), _CHUNKS - rng.randrange(1, 4 * slots)])
    config: dict[str, Any] = {
        "job": rng.getrandbits(8) << 8 | bank,
        "epoch": epoch,
        "members": members,
        "encoding": rng.choice(fitting),
        "base": base,
        "slots": slots,
        **form,
    }
    where = {name: fixed.pop(name) for name in ("lines", "first_chunk") if name in fixed}
    return CxlJob(JobConfig(**(config | fixed)), **({"lines": lines, "first_chunk": first_chunk} | where), bank=bank)


def _fits(encoding: Encoding, members: int, address_map: CxlMap) -> bool:
    params = address_map.params
    return (
        encoding.planes <= params.max_planes
        and encoding.tally_bits(members) <= params.acc_bits
        and all(encoding.shift(plane) <= params.max_shift for plane in range(encoding.planes))
    )


# ---- masters that do anything ------------------------------------------------------------------------------------


class _Anything:
    """Transactions of every kind, right and wrong, in proportions that let chunks be completed."""

    def __init__(self, bench: CxlBench) -> None:
        self._bench = bench
        self._map = bench.map
        self._rng = bench.rng
        self.jobs: dict[int, CxlJob] = {}
        self._kinds: dict[Callable[[], Load | Store], float] = {
            self._contribution: 10,
            self._result: 3,
            self._status: 1.5,
            self._identity: 2,
            self._nowhere: 0.4,
        }

    def __call__(self) -> Load | Store:
        (kind,) = self._rng.choices(list(self._kinds), list(self._kinds.values()))
        return kind()

    def _identity(self) -> Load | Store:
        rng = self._rng
        lines = self._map.identity_bytes // LINE_BYTES
        address = self._map.encode(IdentityLine(rng.choice([rng.randrange(min(lines, 4)), lines - 1])))
        if rng.random() < 0.5:
            return Load(address)
        enable = rng.choice([ALL_BYTES, rng.getrandbits(64), 1 << rng.randrange(64), 0])
        return Store(address, rng.randbytes(LINE_BYTES), enable)

    def _nowhere(self) -> Load | Store:
        """Any line of any window, the gaps, and what is above the device."""
        rng = self._rng
        window = rng.choice(list(Window)) << self._map.window_bits
        address = rng.choice([window + rng.getrandbits(self._map.window_bits), rng.getrandbits(64)])
        address -= address % LINE_BYTES
        if rng.random() < 0.5:
            return Load(address)
        return Store(address, rng.randbytes(LINE_BYTES), rng.choice([ALL_BYTES, rng.getrandbits(64)]))

    def _bank(self) -> int:
        params = self._map.params
        if self.jobs and self._rng.random() < 0.95:
            return self._rng.choice(list(self.jobs))
        return self._rng.randrange(1 << (params.jobs - 1).bit_length())

    def _chunk(self, bank: int, *, forward: float) -> tuple[CxlJob | None, int, dict[int, int]]:
        """The job, a chunk of it, and what the workers have sent of that."""
        rng, job, versions = self._rng, self.jobs.get(bank), self._bench.device.versions(bank)
        if job is None or not versions:
            return job, rng.getrandbits(32), {}
        state = rng.choice(versions)
        claims = not state.valid or (state.complete and rng.random() < forward)
        if claims or rng.random() < 0.01:
            return job, (state.chunk + len(versions)) % _CHUNKS, {}
        if rng.random() < 0.08:
            return job, (state.chunk - rng.choice([1, 1, 2]) * len(versions)) % _CHUNKS, {}
        return job, state.chunk, state.seen

    def _contribution(self) -> Load | Store:
        rng, address_map = self._rng, self._map
        params = address_map.params
        bank = self._bank()
        job, chunk, seen = self._chunk(bank, forward=0.5)
        worker = rng.randrange(1 << (params.workers - 1).bit_length())
        epoch, plane, line = rng.getrandbits(16), rng.getrandbits(5), rng.getrandbits(8)
        if job is not None:
            epoch = job.config.epoch
            if rng.random() < 0.98:
                worker = rng.choice(job.members)
            plane, line = rng.randrange(job.config.encoding.planes), rng.randrange(job.lines)
            missing = [
                (who, at_plane, at_line)
                for who in job.members
                for at_plane in range(job.config.encoding.planes)
                for at_line in range(job.lines)
                if not seen.get(who, 0) >> address_map.seen_bit(at_plane, at_line) & 1
            ]
            if missing and rng.random() < 0.7:
                worker, plane, line = rng.choice(missing)
            fault = rng.random()
            if fault < 0.02:
                epoch += rng.randint(1, 3)
            elif fault < 0.04:
                plane = rng.getrandbits(5)
            elif fault < 0.06:
                line = rng.getrandbits(8)
            elif fault < 0.1:
                plane, line = address_map.abstain_plane, rng.choice([0, 0, 0, 0, 1])
        plane &= address_map.abstain_plane
        line &= (1 << (params.lines_per_chunk - 1).bit_length()) - 1
        address = address_map.encode(ContributeLine(bank, worker, epoch, chunk, plane, line))
        if rng.random() < 0.03:
            return Load(address)
        enable = rng.getrandbits(64) if rng.random() < 0.03 else ALL_BYTES
        return Store(address, _line(rng), enable)

    def _result(self) -> Load:
        rng, params = self._rng, self._map.params
        bank = self._bank()
        job, chunk, _seen = self._chunk(bank, forward=0.02)
        planes, lines = max(params.acc_bits, 2), params.lines_per_chunk
        epoch = rng.getrandbits(16)
        if job is not None and rng.random() < 0.95:
            planes, lines, epoch = job.result_planes, job.lines, job.config.epoch
        return Load(self._map.encode(ResultLine(bank, epoch, chunk, rng.randrange(planes), rng.randrange(lines))))

    def _status(self) -> Load:
        rng, params = self._rng, self._map.params
        bank = self._bank()
        slots = params.slots
        if bank in self.jobs and rng.random() < 0.8:
            slots = self.jobs[bank].config.slot_count(params)
        workers = 1 << (params.workers - 1).bit_length()
        target = StatusLine(
            bank, rng.randrange(slots), rng.randrange(2), rng.randrange(workers), rng.randrange(self._map.parts)
        )
        return Load(self._map.encode(target))


def _line(rng: random.Random) -> bytes:
    return rng.choice([rng.randbytes(LINE_BYTES), bytes(LINE_BYTES), b"\xff" * LINE_BYTES])


def _random(bench: CxlBench, *, transactions: int = 2000, masters: int = 24, reopen: int = 400) -> list[Actor]:
    """Everything at once; about every ``reopen`` cycles a job is opened, closed or reopened, or all are closed."""
    anything, rng, address_map = _Anything(bench), bench.rng, bench.map
    left = transactions
    epochs = [rng.choice([0, 14, 65000]) for _ in range(address_map.params.jobs)]

    def master() -> Actor:
        nonlocal left
        while left > 0:
            count = min(left, rng.choice([1, 1, 2, 6]))
            left -= count
            yield [anything() for _ in range(count)]

    def change() -> Iterator[Control]:
        bank = rng.randrange(address_map.params.jobs)
        what = rng.random()
        if what < 0.1:
            anything.jobs.clear()
            yield resetting()
        elif what < 0.25:
            anything.jobs.pop(bank, None)
            yield closing(address_map, bank)
        else:
            anything.jobs.pop(bank, None)
            epochs[bank] += rng.randint(1, 3)
            job = random_job(rng, address_map, bank, epochs[bank], list(anything.jobs.values()))
            if job is not None:
                yield opening(address_map, job)
                anything.jobs[bank] = job
            else:
                yield closing(address_map, bank)

    def controller() -> Actor:
        while left > 0:
            yield from change()
            yield Pause(rng.randint(1, 2 * reopen) if len(anything.jobs) == address_map.params.jobs else 1)

    return [controller(), *(master() for _ in range(masters))]


# ---- hosts that do what they should ------------------------------------------------------------------------------


class Host:
    """One worker that sends its planes and reads the results, as ``docs/cxl.md`` asks; its lines go in any order.

    Parameters
    ----------
    bench : CxlBench
    job : CxlJob
    worker : int
    planes : uint8, shape (planes, chunks, lines, 64)
    repeat, partial : float
        Probability that a line is written twice in a round; that a part of it is written as well, which is refused.

    Attributes
    ----------
    results : list of bytes, by (chunk, plane, line)
    """

    def __init__(
        self, bench: CxlBench, job: CxlJob, worker: int, planes: Planes, *, repeat: float = 0.2, partial: float = 0.1
    ) -> None:
        self._map, self._rng = bench.map, bench.rng
        self._job, self._worker, self._planes = job, worker, planes
        self._repeat, self._partial = repeat, partial
        everything = bench.map.seen_mask(job.config.encoding.planes, job.lines)
        self._missing = dict.fromkeys(range(planes.shape[1]), everything)
        self._everything = everything
        self.results: dict[tuple[int, int, int], bytes] = {}

    def act(self) -> Actor:
        """The actor."""
        job, slots = self._job, self._job.config.slot_count(self._map.params)
        while self._missing:
            first = min(self._missing)
            # Nothing for chunk c + S before the results of c are read.
            chunks = [chunk for chunk in self._missing if chunk < first + slots]
            stores: list[Load | Store] = [store for chunk in chunks for store in self._stores(chunk)]
            if stores:
                yield stores
            complete = []
            for chunk in chunks:
                loads = [Load(address) for address in self._statuses(chunk)]
                yield list(loads)
                if self._look(chunk, loads):
                    complete.append(chunk)
            for chunk in complete:
                results = {
                    (chunk, plane, line): Load(self._map.encode(ResultLine(*self._place(chunk), plane, line)))
                    for plane in range(job.result_planes)
                    for line in range(job.lines)
                }
                yield list(results.values())
                for at, load in results.items():
                    if load.read is None or load.read.poison:
                        raise Mismatch(f"chunk {chunk} is complete and its result is poison")
                    self.results[at] = load.read.data
                del self._missing[chunk]

    def _number(self, chunk: int) -> int:
        return (self._job.first_chunk + chunk) % _CHUNKS

    def _place(self, chunk: int) -> tuple[int, int, int]:
        return self._job.bank, self._job.config.epoch, self._number(chunk)

    def _stores(self, chunk: int) -> Iterator[Store]:
        job, rng = self._job, self._rng
        bank, epoch, number = self._place(chunk)
        for plane in range(job.config.encoding.planes):
            for line in range(job.lines):
                if not self._missing[chunk] >> self._map.seen_bit(plane, line) & 1:
                    continue
                address = self._map.encode(ContributeLine(bank, self._worker, epoch, number, plane, line))
                data = self._planes[plane, chunk, line].tobytes()
                yield Store(address, data)
                if rng.random() < self._repeat:
                    yield Store(address, data)
                if rng.random() < self._partial:
                    yield Store(address, rng.randbytes(LINE_BYTES), rng.randrange(ALL_BYTES))

    def _statuses(self, chunk: int) -> list[int]:
        slots, number = self._job.config.slot_count(self._map.params), self._number(chunk)
        return [
            self._map.encode(StatusLine(self._job.bank, number % slots, number // slots % 2, self._worker, part))
            for part in range(-(-self._everything.bit_length() // SEEN_BITS))
        ]

    def _look(self, chunk: int, loads: list[Load]) -> bool:
        seen, complete = 0, True
        for part, load in enumerate(loads):
            status = Status.unpack(load.read.data) if load.read is not None else Status()
            current = StatusFlags.CLAIMED in status.flags and status.chunk == self._number(chunk)
            seen |= (status.seen if current else 0) << SEEN_BITS * part
            complete = complete and current and StatusFlags.COMPLETE in status.flags
        self._missing[chunk] &= ~seen
        return complete


def expected(job: CxlJob, planes: list[Planes]) -> Planes:
    """Result planes, shape (result planes, chunks, lines, 64), from whole numbers; ``planes`` has one entry a host."""
    config = job.config
    total: npt.NDArray[np.int64] = np.zeros(8 * planes[0][0].size, np.int64)
    for mine in planes:
        bits = np.unpackbits(mine.reshape(len(mine), -1), axis=1, bitorder="little").astype(np.int64)
        total += np.tensordot(np.array(config.encoding.weights), bits, axes=1)
    if config.result_format == "majority":
        votes = len(planes) - 2 * total if config.encoding.counts_negatives else total
        rows = [votes < -config.margin, np.abs(votes) > config.margin]
    else:
        rows = [(total >> plane & 1) > 0 for plane in range(job.result_planes)]
    packed = [np.packbits(row, bitorder="little") for row in rows]
    return np.stack(packed).reshape(len(rows), *planes[0].shape[1:])


def _hosts(
    bench: CxlBench,
    *,
    chunks: int = 6,
    world: int = 0,
    encoding: str = "binary",
    slots: int = 0,
    lines: int = 0,
    majority: bool = False,
    margin: int = 0,
    first_chunk: int = 0,
    repeat: float = 0.2,
    partial: float = 0.1,
    background: int = 0,
) -> list[Actor]:
    """Hosts of one job reduce a bucket, and every result is compared with sums of whole numbers.

    ``background`` masters read and write plain memory meanwhile, each its own lines, and check what they read.
    """
    params, rng = bench.map.params, bench.rng
    found = {one.name: one for one in _ENCODINGS}[encoding]
    slots = slots or params.slots
    form: dict[str, Any] = {"result_format": "majority", "margin": margin} if majority else {}
    members = sorted(rng.sample(range(params.workers), world or params.workers))
    base = slots * rng.randrange(params.slots // slots)
    config = JobConfig(rng.getrandbits(16), 1, members, found, base=base, slots=slots, **form)
    job = CxlJob(config, lines or params.lines_per_chunk, rng.randrange(params.jobs), first_chunk)
    source = np.random.default_rng(rng.getrandbits(32))
    shape = (found.planes, chunks, job.lines, LINE_BYTES)
    planes = [source.integers(0, 256, shape, np.uint8) for _ in members]
    hosts = [
        Host(bench, job, worker, mine, repeat=repeat, partial=partial)
        for worker, mine in zip(members, planes, strict=True)
    ]
    want = expected(job, planes)
    finished = 0

    def start() -> Actor:
        yield opening(bench.map, job)
        for host in hosts:
            bench.start(check(host))

    def check(host: Host) -> Actor:
        nonlocal finished
        yield from host.act()
        for (chunk, plane, line), data in host.results.items():
            if data != want[plane, chunk, line].tobytes():
                raise Mismatch(f"chunk {chunk}, plane {plane}, line {line} differs from the sum of whole numbers")
        if len(host.results) != chunks * job.result_planes * job.lines:
            raise Mismatch("a host has not read all of its results")
        finished += 1

    def memory(first: int, count: int) -> Actor:
        """Plain memory, beside everything else."""
        lines = {line: bytearray(LINE_BYTES) for line in range(first, first + count)}
        while finished < len(hosts):
            line = rng.choice(list(lines))
            address, data = bench.map.encode(IdentityLine(line)), rng.randbytes(LINE_BYTES)
            enable = rng.choice([ALL_BYTES, rng.getrandbits(64)])
            yield [Store(address, data, enable)]
            for index in range(LINE_BYTES):
                if enable >> index & 1:
                    lines[line][index] = data[index]
            load = Load(bench.map.encode(IdentityLine(rng.choice(list(lines)))))
            yield [load]
            target = bench.map.decode(load.address)
            if not isinstance(target, IdentityLine) or load.read != (bytes(lines[target.line]), False):
                raise Mismatch("plain memory differs from what was written")

    share = bench.map.identity_bytes // LINE_BYTES // max(1, background)
    return [start(), *(memory(index * share, min(share, 8)) for index in range(background))]


# ---- as fast as it goes ------------------------------------------------------------------------------------------


def _full_rate(bench: CxlBench, *, transactions: int = 400, mix: str = "lines") -> list[Actor]:
    """Transactions back to back, in order.

    ``mix`` is ``lines`` (of all workers, to the same line of one slot version after the other), ``memory`` (plain
    memory, written), ``results`` (read while they are counted), or ``both``: reads and writes of the same lines.
    """
    params, address_map, rng = bench.map.params, bench.map, bench.rng
    members = range(params.workers)
    job = CxlJob(JobConfig(5, 1, members, BINARY), params.lines_per_chunk)

    def contribution(index: int) -> Store:
        """All workers of a line, then the next line, then the next chunk."""
        rest, worker = divmod(index, params.workers)
        chunk, line = divmod(rest, job.lines)
        return Store(address_map.encode(ContributeLine(0, worker, 1, chunk, 0, line)), rng.randbytes(LINE_BYTES))

    def result(index: int) -> Load:
        chunk, line = divmod(index // params.workers, job.lines)
        return Load(address_map.encode(ResultLine(0, 1, chunk, index % job.result_planes, line)))

    def memory(index: int) -> Store:
        return Store(address_map.encode(IdentityLine(index % 3)), rng.randbytes(LINE_BYTES), rng.getrandbits(64))

    kinds: dict[str, list[Callable[[int], Load | Store]]] = {
        "lines": [contribution],
        "memory": [memory],
        "results": [result],
        "both": [contribution, result],
    }

    def act() -> Actor:
        yield opening(address_map, job)
        yield [make(index) for make in kinds[mix] for index in range(transactions // len(kinds[mix]))]

    return [act()]


SCENARIOS: dict[str, Callable[..., list[Actor]]] = {"random": _random, "hosts": _hosts, "full_rate": _full_rate}


def scenario(name: str, **options: Any) -> Callable[[CxlBench], list[Actor]]:
    """Makes the actors of a scenario; ``ValueError`` for an unknown one."""
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}: there are {', '.join(SCENARIOS)}")
    return functools.partial(SCENARIOS[name], **options)
