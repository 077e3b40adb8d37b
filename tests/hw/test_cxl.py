"""The CXL endpoint against its golden model, transaction by transaction, in Amaranth's simulator."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import pytest

from neuron_fabric.hw.cxl_core import CxlCore
from neuron_fabric.hw.cxl_endpoint import CxlEndpoint
from neuron_fabric.model import BINARY, TERNARY, JobConfig, ReducerParams, int_encoding
from neuron_fabric.model.cxl import ALL_BYTES, CXL_COUNTERS, CxlJob
from neuron_fabric.model.cxl_map import (
    ContributeLine,
    CxlMap,
    IdentityLine,
    ResultLine,
    Status,
    StatusFlags,
    StatusLine,
)
from neuron_fabric.model.programming import open_job
from neuron_fabric.model.registers import words
from neuron_fabric.sim.cxl_bench import (
    Actor,
    Control,
    CxlBench,
    Load,
    Pause,
    Reset,
    Step,
    Store,
    closing,
    opening,
    resetting,
)
from neuron_fabric.sim.cxl_stimulus import scenario

from .bench import SEED
from .cxl_bench import run

SMALL = ReducerParams(lines_per_chunk=3, slots=4, workers=5, acc_bits=5, max_planes=3, jobs=2)
SIZES = {
    "small": SMALL,
    "one": ReducerParams(lines_per_chunk=1, slots=1, workers=1, acc_bits=1, max_planes=1),
    "one slot": ReducerParams(lines_per_chunk=2, slots=1, workers=3, acc_bits=4, max_planes=2),
    "three jobs": ReducerParams(lines_per_chunk=4, slots=8, workers=4, acc_bits=4, max_planes=2, jobs=3),
    "default": ReducerParams(jobs=2),
    "many workers": ReducerParams(lines_per_chunk=2, slots=2, workers=64, acc_bits=8, max_planes=4),
    "many parts": ReducerParams(lines_per_chunk=130, slots=2, workers=2, acc_bits=4, max_planes=3),
}
SLOTS = next(word.address for word in words() if word.name == "JOB0_SLOTS")
TRANSACTIONS = 1500
COUNTED: Counter[str] = Counter()


def number(line: bytes) -> int:
    return int.from_bytes(line, "little")


class Script:
    """Directed transactions: each is over before the next begins, unless they are given together."""

    def __init__(self, bench: CxlBench, job: CxlJob) -> None:
        self.map, self.job = bench.map, job

    def store(self, worker, chunk, data=b"", *, plane=0, line=0, epoch=None, enable=ALL_BYTES):
        epoch = self.job.config.epoch if epoch is None else epoch
        target = ContributeLine(self.job.bank, worker, epoch, chunk, plane, line)
        return Store(self.map.encode(target), data.ljust(64, b"\0"), enable)

    def abstain(self, worker, chunk):
        return self.store(worker, chunk, plane=self.map.abstain_plane)

    def result(self, chunk, plane=0, line=0, epoch=None):
        epoch = self.job.config.epoch if epoch is None else epoch
        return Load(self.map.encode(ResultLine(self.job.bank, epoch, chunk, plane, line)))

    def status(self, chunk, worker=0, part=0):
        slots = self.job.config.slot_count(self.map.params)
        return Load(self.map.encode(StatusLine(self.job.bank, chunk % slots, chunk // slots % 2, worker, part)))


def job(members=(0, 1), encoding=BINARY, lines=1, first_chunk=0, bank=0, epoch=3, number=7, **config) -> CxlJob:
    return CxlJob(JobConfig(number, epoch, members, encoding, **config), lines, bank, first_chunk)


def directed(what, *jobs: CxlJob, params: ReducerParams = SMALL, **options) -> CxlBench:
    """Open the jobs, then do what the generator ``what(script of each job)`` says; the model judges the rest."""

    def actors(bench: CxlBench) -> list[Actor]:
        def act() -> Actor:
            for one in jobs:
                yield opening(bench.map, one)
            yield from what(*(Script(bench, one) for one in jobs))

        return [act()]

    return run(params, actors, **({"stalls": "always", "in_order": True} | options))


# ---- window by window ------------------------------------------------------------------------------------------


def test_plain_memory_keeps_the_enabled_bytes():
    def what(script):
        for line in (0, 63):
            address = script.map.encode(IdentityLine(line))
            load = Load(address)
            yield [Store(address, bytes(range(64))), Store(address, b"\xff" * 64, 1 << 5 | 1 << 63)]
            yield [load]
            assert load.read == (bytes([*range(5), 0xFF, *range(6, 63), 0xFF]), False)

    assert directed(what, job()).device.counters["identity_writes"] == 4


def test_counts_and_is_readable_when_every_member_has_sent_every_line():
    def what(script):
        yield [script.store(0, 0, b"\x03"), script.store(1, 0, b"\x01"), script.store(0, 0, b"\x80", line=1)]
        early = script.result(0)
        yield [early]
        assert early.read.poison
        yield [script.store(1, 0, b"\x80", line=1)]
        loads = [script.result(0, plane, line) for plane in range(2) for line in range(2)]
        status = script.status(0)
        yield [*loads, status, script.result(0, 2), script.result(0, 0, 2), script.result(4), script.result(0, epoch=4)]
        assert [load.read.data[0] for load in loads] == [0x02, 0x00, 0x01, 0x80]
        seen = Status.unpack(status.read.data)
        assert seen.flags == StatusFlags.OPEN | StatusFlags.CLAIMED | StatusFlags.COMPLETE
        assert (seen.chunk, seen.epoch, seen.job, seen.voters, seen.done, seen.seen) == (0, 3, 7, 2, 3, 3)

    assert directed(what, job(lines=2)).device.counters["poisoned"] == 5


def test_a_line_counts_once_and_only_whole():
    def what(script):
        yield [script.store(0, 0, b"\x01"), script.store(0, 0, b"\xff"), script.store(1, 0, b"\xff", enable=1)]
        yield [script.store(1, 0, b"\x01", enable=ALL_BYTES >> 1), script.store(1, 0, b"\x01")]
        load = script.result(0, 1)
        yield [load, script.status(0), script.status(0, 1)]
        assert load.read.data == b"\x01".ljust(64, b"\0")

    counters = directed(what, job()).device.counters
    assert (counters["lines"], counters["duplicates"], counters["refused_partial_write"]) == (2, 1, 2)


def test_abstainers_are_no_voters_and_a_vote_cannot_be_taken_back():
    def what(script):
        yield [script.store(0, 0, b"\x01"), script.abstain(0, 0), script.store(0, 0, b"\x02", plane=1)]
        yield [script.abstain(0, 0), script.abstain(1, 0), script.abstain(1, 0), script.store(1, 0, b"\xff")]
        yield [script.abstain(2, 0)]
        loads = [script.result(0, plane) for plane in range(3)]
        yield [*loads, script.status(0), script.status(0, 1)]
        # Element 0 is +1, element 1 is -1 in three bits.
        assert [load.read.data[0] for load in loads] == [3, 2, 2]
        # A chunk from which all abstain is zero, whatever was there.
        yield [script.abstain(worker, 8) for worker in range(3)]
        blank = script.result(8)
        yield [blank, script.status(8)]
        assert blank.read == (bytes(64), False)

    counters = directed(what, job((0, 1, 2), TERNARY)).device.counters
    assert (counters["abstentions"], counters["duplicates"], counters["refused_abstain_after_vote"]) == (5, 3, 1)


def test_newer_chunks_claim_and_older_ones_are_stale():
    def what(script):
        yield [script.store(0, 0, b"\xff"), script.store(1, 8, b"\x01"), script.store(0, 0), script.result(0)]
        yield [script.store(0, 8, b"\x01"), script.result(8, 1), script.store(1, 0), script.result(0)]
        # Half of the window away is older.
        yield [script.store(0, 8 + 16), script.status(8)]

    counters = directed(what, job()).device.counters
    assert (counters["abandoned"], counters["stale"], counters["completed"]) == (1, 3, 1)


@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3])
def test_a_job_begins_with_its_first_chunk(first):
    def what(script):
        for offset in range(8):
            chunk = (first + offset) % (1 << 32)
            before, after = script.status(chunk), script.status(chunk)
            yield [before]
            yield [script.store(0, (chunk - 8) % (1 << 32))]
            yield [script.store(0, chunk)]
            yield [after]
            statuses = [Status.unpack(load.read.data) for load in (before, after)]
            assert [StatusFlags.CLAIMED in status.flags for status in statuses] == [False, True]
            assert [status.chunk for status in statuses] == [(chunk - 8) % (1 << 32), chunk]

    assert directed(what, job(first_chunk=first)).device.counters["stale"] == 8


def test_what_cannot_be_written_is_refused_and_what_is_not_there_is_poison():
    def what(script):
        address_map = script.map
        lines = [
            script.result(0).address,
            script.status(0).address,
            (3 << address_map.window_bits) - 64,  # behind the last result
            address_map.size,
            (1 << 64) - 64,
        ]
        yield [Store(address) for address in lines]
        yield [Load(address) for address in lines]
        yield [Load(script.store(0, 0).address)]

    counters = directed(what, job()).device.counters
    assert (counters["refused_read_only"], counters["poisoned"], counters["reads"]) == (5, 4, 6)


def test_jobs_have_slots_of_their_own():
    def what(one, two):
        for chunk in range(4):
            yield [script.store(worker, chunk, bytes([chunk])) for script in (one, two) for worker in range(2)]
        loads = [
            script.result(chunk, 1) for script in (one, two) for chunk in ((0, 1, 2, 3) if script is one else (2, 3))
        ]
        yield [*loads, two.result(0)]
        assert [load.read.data[0] for load in loads] == [0, 1, 2, 3, 2, 3]
        # A slot that the job has not reads as if no job were open.
        nothing = Load(two.map.encode(StatusLine(1, 1, 0, 0, 0)))
        yield [nothing, *(Load(two.map.encode(StatusLine(0, slot, 1, 0, 0))) for slot in range(4))]
        assert nothing.read == (bytes(64), False)

    directed(what, job(base=2, slots=2), job(base=1, slots=1, bank=1, number=8))


# ---- opening and closing ---------------------------------------------------------------------------------------


def test_a_reopened_job_begins_anew():
    def what(script):
        yield [script.store(0, 0), script.store(1, 0), script.store(0, 1)]
        yield closing(script.map, 0)
        yield [script.store(0, 1), script.result(0), script.status(0)]
        again = job(epoch=4)
        yield opening(script.map, again)
        script.job = again
        status = script.status(0)
        yield [script.store(0, 0, epoch=3), script.result(0, epoch=3), script.result(0), status]
        assert Status.unpack(status.read.data).flags == StatusFlags.OPEN
        yield [script.store(0, 0), script.store(1, 0), script.result(0)]

    counters = directed(what, job()).device.counters
    assert (counters["completed"], counters["refused_job_not_open"], counters["refused_wrong_epoch"]) == (2, 1, 1)


def test_closing_all_jobs_at_once_frees_all_slots():
    """Seen at the high-water mark, which the bench compares: four chunks, then three."""

    def what(one, two):
        yield [script.store(0, chunk) for script in (one, two) for chunk in range(2)]
        yield resetting()
        two.job = job(base=2, slots=2, bank=1, number=8, epoch=4)
        yield opening(two.map, two.job)
        yield [two.store(0, chunk) for chunk in range(3)]

    directed(what, job(base=0, slots=2), job(base=2, slots=2, bank=1, number=8))


def test_registers_can_be_written_at_once_after_a_job_was_closed():
    """The slots of the old job are freed, not those that the next write names; seen at the high-water mark."""
    old, new = job(base=0, slots=2), job(base=2, slots=2, epoch=4)

    def what(script):
        yield [script.store(0, chunk) for chunk in range(4)]
        close = closing(script.map, 0)
        moved = next(write for write in open_job(SMALL, new.config, lines=1) if write.address == SLOTS)
        yield Control([*close.writes, moved], close.effects)
        yield opening(script.map, new)
        script.job = new
        yield [script.store(0, chunk) for chunk in range(4)]

    directed(what, old)


def test_a_job_is_closed_between_two_transactions():
    """Among claims that follow each other in consecutive cycles; the high-water mark says how many came before."""
    before = set()
    for pause in range(4, 16):

        def actors(bench: CxlBench, pause: int = pause) -> list[Actor]:
            one = job()
            script = Script(bench, one)

            def claims() -> Actor:
                yield Pause(8)
                yield [script.store(0, chunk) for chunk in range(8)]

            def act() -> Actor:
                yield opening(bench.map, one)
                bench.start(claims())
                yield Pause(pause)
                yield closing(bench.map, 0)

            return [act()]

        bench = run(SMALL, actors, stalls="always", in_order=True)
        before.add(bench.device.counters["lines"])
    assert before >= set(range(1, 8))


@pytest.mark.parametrize("seed", range(2))
def test_jobs_change_under_full_traffic(seed):
    """Every few cycles, so that transactions are in every stage when it happens."""
    bench = run(
        SMALL,
        scenario("random", transactions=1000, reopen=15),
        seed=SEED + seed,
        stalls={"axil": "always", "req": "always"},
    )
    assert bench.device.counters["refused_job_not_open"] > 50


def test_reset_forgets_what_is_on_its_way():
    def actors(bench: CxlBench) -> list[Actor]:
        one = job()
        script = Script(bench, one)

        def lost() -> Actor:
            yield opening(bench.map, one)
            yield [script.store(0, 0, b"\xff"), *(script.status(0) for _ in range(30))]

        def act() -> Actor:
            yield Pause(150)
            yield Reset()
            closed = script.status(0)
            yield [closed]
            assert closed.read == (bytes(64), False)
            yield opening(bench.map, one)
            yield [script.store(worker, 0, b"\x01") for worker in range(2)]
            load = script.result(0, 1)
            yield [load]
            assert load.read.data[0] == 1

        return [lost(), act()]

    stuck = itertools.chain(itertools.repeat(False, 160), itertools.repeat(True))
    run(SMALL, actors, stalls={"axil": "always", "req": "always", "rwd": "always", "ndr": "always", "drs": stuck})


@pytest.mark.parametrize("cycles", [1, 3])
def test_reset_forgets_what_is_in_the_pipeline(cycles):
    """A transaction in every stage; the bench compares the counters, which a late one would move."""

    def actors(bench: CxlBench) -> list[Actor]:
        one = job()
        script = Script(bench, one)

        def lost() -> Actor:
            yield opening(bench.map, one)
            yield [script.store(chunk % 2, chunk // 2) for chunk in range(16)] + [script.result(0) for _ in range(16)]

        def act() -> Actor:
            while bench.measured.frames < 16:
                yield Pause(1)
            yield Reset(cycles)
            yield Pause(20)

        return [lost(), act()]

    bench = run(SMALL, actors, stalls="always", in_order=True)
    assert not bench.device.counters


# ---- flow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stuck", "runs"), [("drs", "ndr"), ("ndr", "drs")])
def test_responses_that_are_not_taken_hold_their_own_kind_only(stuck, runs):
    cycles = 600
    done = {}

    def actors(bench: CxlBench) -> list[Actor]:
        def act(port: str, steps: Step) -> Actor:
            yield steps
            done[port] = bench.cycle

        address = bench.map.encode(IdentityLine(1))
        return [act("ndr", [Store(address) for _ in range(200)]), act("drs", [Load(address) for _ in range(200)])]

    late = itertools.chain(itertools.repeat(False, cycles), itertools.repeat(True))
    run(SMALL, actors, stalls={"req": "always", "rwd": "always", runs: "always", "axil": "always", stuck: late})
    assert done[runs] < 250
    assert done[stuck] > cycles


def test_reads_and_writes_take_turns():
    """With both always waiting, both are done at the same time."""
    done = {}

    def actors(bench: CxlBench) -> list[Actor]:
        def act(name: str, steps: Step) -> Actor:
            yield steps
            done[name] = bench.cycle

        address = bench.map.encode(IdentityLine(1))
        return [act("w", [Store(address) for _ in range(200)]), act("r", [Load(address) for _ in range(200)])]

    run(SMALL, actors, stalls="always")
    assert max(done.values()) < 420
    assert abs(done["w"] - done["r"]) <= 2


@pytest.mark.parametrize("mix", ["lines", "memory", "results", "both"])
@pytest.mark.parametrize("size", ["small", "one slot"])
def test_one_transaction_a_cycle(mix, size):
    bench = run(SIZES[size], scenario("full_rate", transactions=300, mix=mix), stalls="always", in_order=True)
    assert bench.measured.frames == bench.measured.busy == 300


def test_latency():
    cycles = {}

    def actors(bench: CxlBench) -> list[Actor]:
        def act() -> Actor:
            address = bench.map.encode(IdentityLine(0))
            for name, step in (("write", Store(address)), ("read", Load(address))):
                yield Pause(20)
                begun = bench.cycle
                yield [step]
                cycles[name] = bench.cycle - begun

        return [act()]

    run(SMALL, actors, stalls="always")
    # An actor asks in the cycle of the transfer and is told in the cycle after the response.
    assert cycles == {"write": CxlCore.WRITE_LATENCY + 1, "read": CxlCore.READ_LATENCY + 1}


# ---- anything --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_any_transactions(size):
    bench = run(SIZES[size], scenario("random", transactions=TRANSACTIONS), seed=SEED)
    assert bench.measured.frames == TRANSACTIONS
    COUNTED.update(bench.device.counters)


def test_any_transactions_with_wide_numbers():
    for epoch_bits, chunk_bits in ((1, 32), (16, 9)):
        sizes = {"identity_bytes": 64, "epoch_bits": epoch_bits, "chunk_bits": chunk_bits}
        run(SIZES["one slot"], scenario("random", transactions=1000), sizes=sizes)


def test_any_transactions_have_met_every_outcome():
    if not COUNTED:
        pytest.skip("the runs that are counted were not selected")
    assert min(COUNTED[name] for name, _ in CXL_COUNTERS) > 10, COUNTED


# ---- hosts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("encoding", [BINARY, TERNARY, int_encoding(2)], ids=lambda encoding: encoding.name)
def test_hosts_get_exact_sums(encoding, majority):
    params = ReducerParams(lines_per_chunk=3, slots=4, workers=5, acc_bits=5, max_planes=2, jobs=2)
    options = {"encoding": encoding.name, "majority": majority, "chunks": 6, "slots": 2, "first_chunk": (1 << 32) - 3}
    run(params, scenario("hosts", **options, margin=int(majority)), sizes={"identity_bytes": 8192})


@pytest.mark.parametrize("margin", range(6))
def test_majority_at_every_margin(margin):
    options = {"chunks": 2, "majority": True, "margin": margin, "lines": 1}
    run(SMALL, scenario("hosts", **options))


@pytest.mark.parametrize("world", [1, 2, 16])
def test_worlds(world):
    run(ReducerParams(lines_per_chunk=2, slots=8, workers=16), scenario("hosts", world=world, chunks=9))


def test_plain_memory_is_exact_beside_a_reduction():
    bench = run(SMALL, scenario("hosts", chunks=8, background=4))
    assert bench.device.counters["identity_writes"] > 50


def test_a_thousand_chunks_on_one_slot():
    params = ReducerParams(lines_per_chunk=1, slots=1, workers=2, acc_bits=2, max_planes=1)
    bench = run(params, scenario("hosts", chunks=1000, first_chunk=(1 << 32) - 500), stalls="always")
    assert bench.device.counters["completed"] == 1000


# ---- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_sizes_that_cannot_work_are_refused_by_name():
    with pytest.raises(ValueError, match="lanes must be 512"):
        CxlEndpoint(ReducerParams(lanes=64))
    with pytest.raises(ValueError, match="identity_bytes must be a power of two"):
        CxlEndpoint(ReducerParams(), identity_bytes=100)


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_the_ports_are_the_documented_ones():
    streams = {
        "s_axis_req": {"tvalid", "tready", "tdata", "tid"},
        "s_axis_rwd": {"tvalid", "tready", "tdata", "tkeep", "tuser", "tid"},
        "m_axis_drs": {"tvalid", "tready", "tdata", "tuser", "tid"},
        "m_axis_ndr": {"tvalid", "tready", "tid"},
    }
    names = {f"{port}_{part}" for port, parts in streams.items() for part in parts}
    dut = CxlEndpoint(SMALL)
    assert {name for name in dut.signature.members if not name.startswith("s_axil_")} == names
    assert dut.map == CxlMap(SMALL)
    del dut
    gc.collect()  # the filter is for its warning
