"""Driver and emulator against each other for long, over a bad network: no wrong bit, no growing memory.

    python -m neuron_fabric.runtime.reducer.soak --frames 1000000

Some workers and the emulator run in this process, over the loopback interface. Every result is compared with a count
made here.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuron_fabric.model import bitplane
from neuron_fabric.runtime.emulator.datagrams import UdpAddress
from neuron_fabric.runtime.emulator.engine import engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan
from neuron_fabric.runtime.emulator.server import EmulatorServer
from neuron_fabric.runtime.reducer.base import U64, WORDS_PER_LINE, JobSpec, Ticket
from neuron_fabric.runtime.reducer.udp import UdpReducer, UdpSettings

__all__ = ["SoakError", "SoakReport", "soak"]

FAULTS = "loss=0.01,duplicate=0.01,reorder=0.01,corrupt=0.01"
_LINES = 16
_PATIENCE = 60.0
_QUEUED = 4
_WARM_SHARE = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


class SoakError(AssertionError):
    """A result is wrong, or a worker did not get one."""


@dataclass(frozen=True)
class SoakReport:
    """What a run has shown.

    Attributes
    ----------
    frames : int
        That the drivers sent and received.
    elements : int
        Counted, once for all workers.
    resent, wrong_on_purpose : int
        Frames that were sent again; frames that a fault hit.
    seconds, cpu_share : float
        Wall clock; processor time of everything here over that.
    grown_bytes : int
        Resident memory at the end over that after a fifth of the run.
    """

    frames: int
    elements: int
    resent: int
    wrong_on_purpose: int
    seconds: float
    cpu_share: float
    grown_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.frames} frames, {self.elements / 1e9:.2f} G elements in {self.seconds:.1f} s: "
            f"{self.frames / self.seconds:,.0f} frames/s, {self.elements / self.seconds / 1e9:.3f} G elements/s, "
            f"{self.cpu_share:.2f} processors; {self.resent} sent again, {self.wrong_on_purpose} hit by a fault; "
            f"memory grew by {self.grown_bytes / 2**20:.1f} MiB"
        )


def expected(spec: JobSpec, planes: Sequence[U64]) -> U64:
    """The tally of all workers' planes."""
    table = spec.table
    tally = np.zeros((table.tally_bits(len(planes)), planes[0].shape[1]), np.uint64)
    for each in planes:
        for index, plane in enumerate(each):
            bitplane.accumulate(tally, plane, table.shift(index), table.weights[index] < 0)
    return tally


class _End:
    """Lets all workers end with the same bucket, the last that any has begun when it is time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._last: int | None = None

    def begin(self, number: int) -> bool:
        """Whether bucket ``number`` is still to be done."""
        with self._lock:
            if self._last is not None and number >= self._last:
                return False
            self._begun = max(self._begun, number + 1)
            return True

    def now(self) -> None:
        """It is time."""
        with self._lock:
            self._last = self._begun


class _Worker(threading.Thread):
    """One worker: submits buckets of agreed sizes and checks every result."""

    def __init__(
        self, port: int, spec: JobSpec, pool: list[list[U64]], wanted: list[U64], seed: int, end: _End
    ) -> None:
        super().__init__(name=f"soak-{spec.worker}", daemon=True)
        self.driver = UdpReducer("127.0.0.1", port, UdpSettings(bucket_timeout=_PATIENCE))
        self.driver.request(spec)
        self.spec, self.pool, self.wanted = spec, pool, wanted
        self.random = np.random.default_rng(seed)  # the same on all workers
        self.end = end
        self.elements = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            self.driver.grant(_PATIENCE)
            waiting: list[tuple[int, int, Ticket]] = []
            number = 0
            while True:
                if len(waiting) < _QUEUED and self.end.begin(number):
                    kind = int(self.random.integers(len(self.pool)))
                    waiting.append((number, kind, self.driver.submit(self.pool[kind][self.spec.worker])))
                    number += 1
                    continue
                if not waiting:
                    break
                which, kind, ticket = waiting.pop(0)
                result = self.driver.collect(ticket, _PATIENCE)
                if not np.array_equal(result.planes, self.wanted[kind]):
                    raise SoakError(f"worker {self.spec.worker}: bucket {which} has a wrong count")
                self.elements += 64 * ticket.words
        except BaseException as error:
            self.problem = error


def soak(
    frames: int,
    seconds: float,
    *,
    members: int = 2,
    encoding: str = "binary",
    faults: str = FAULTS,
    seed: int = 1,
) -> SoakReport:
    """Run until the drivers have sent and received ``frames`` frames, or ``seconds`` have passed.

    Raises
    ------
    SoakError
        At the first wrong count.
    ReducerError
        If a worker does not get a result.
    """
    random = np.random.default_rng(seed)
    specs = [JobSpec(5, worker, members, encoding) for worker in range(members)]
    pool = []
    for _ in range(24):
        shape = specs[0].table.planes, WORDS_PER_LINE * int(random.integers(1, 60 * _LINES))
        pool.append([random.integers(0, 1 << 64, shape, dtype=np.uint64) for _ in range(members)])
    wanted = [expected(specs[0], planes) for planes in pool]
    server = EmulatorServer(
        UdpAddress.parse("udp://127.0.0.1:0"),
        engine_params(workers=members, slots=128, lines=_LINES, jobs=1),
        faults=FaultPlan.parse(faults),
        fault_seed=seed,
    )
    with server:
        end = _End()
        workers = [_Worker(server.address.port, spec, pool, wanted, seed, end) for spec in specs]
        begin, cpu = time.monotonic(), time.process_time()
        for worker in workers:
            worker.start()
        warm = 0
        pause = threading.Event()
        while True:
            passed = time.monotonic() - begin
            share = max(_frames(workers) / frames, passed / seconds)
            if share >= _WARM_SHARE and not warm:
                warm = _resident()
            if share >= 1 or any(worker.problem for worker in workers):
                break
            pause.wait(0.05)
        end.now()
        for worker in workers:
            worker.join(2 * _PATIENCE)
        passed, spent, grown = time.monotonic() - begin, time.process_time() - cpu, _resident() - warm
        problems = [worker.problem for worker in workers if worker.problem is not None]
        report = SoakReport(
            _frames(workers),
            workers[0].elements,
            sum(worker.driver.status(0).counters["resent"] for worker in workers),
            sum(server.inbound.counters.values()) + sum(server.outbound.counters.values()),
            passed,
            spent / passed,
            grown,
        )
        for worker in workers:
            worker.driver.close()
    if problems:
        raise problems[0]
    if any(worker.elements != workers[0].elements for worker in workers):
        raise SoakError("the workers have not done the same")
    return report


def _frames(workers: list[_Worker]) -> int:
    counters = [worker.driver.status(0).counters for worker in workers]
    return sum(each["frames_sent"] + each["frames_received"] for each in counters)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="to send and receive (default: 1,000,000)")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most (default: 60)")
    parser.add_argument("--members", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--encoding", choices=["binary", "ternary"], default="binary")
    parser.add_argument("--fault", default=FAULTS, help=f"as of neuron-fabric emulate (default: {FAULTS})")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("NEURON_FABRIC_SEED", "1")))
    options = parser.parse_args(argv)
    print(f"seed {options.seed}, {options.members} workers, {options.encoding}, faults {options.fault or 'none'}")
    report = soak(
        options.frames,
        60 * options.minutes,
        members=options.members,
        encoding=options.encoding,
        faults=options.fault,
        seed=options.seed,
    )
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
