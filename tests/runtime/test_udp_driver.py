"""The UDP driver against a golden reducer behind a socket: exact under faults, bounded when nobody answers.

``NEURON_FABRIC_SEED`` chooses the random planes and faults; it is printed.
"""

import importlib.util
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from neuron_fabric.model.encoding import encoding_by_name
from neuron_fabric.model.wire import HEADER_BYTES, Flags, FrameType, Header, Reason
from neuron_fabric.runtime.reducer import (
    AbsentError,
    FailedError,
    JobSpec,
    ReducerUrl,
    RefusedError,
    TimedOutError,
    connect,
)
from neuron_fabric.runtime.reducer import udp_kernels as kernels
from neuron_fabric.runtime.reducer.golden import GoldenReducer
from neuron_fabric.runtime.reducer.latency import BINS, quantile_s
from neuron_fabric.runtime.reducer.udp import UdpReducer, UdpSettings

_spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)
StandIn = stand_in.StandIn

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
QUICK = UdpSettings(
    initial_wait=0.01, dead_after=0.3, probe_every=0.05, idle_probe_every=0.1, ask_every=0.02, refused_every=0.05
)
PATIENCE = 20.0
"""Seconds that nothing here takes unless it is broken."""


@pytest.fixture
def rng():
    print(f"NEURON_FABRIC_SEED={SEED}")
    return np.random.default_rng(SEED)


def opened(port, members, settings=QUICK, **spec):
    drivers = [UdpReducer("127.0.0.1", port, settings) for _ in range(members)]
    for worker, driver in enumerate(drivers):
        driver.request(JobSpec(3, worker, members, **spec))
    return drivers, [driver.grant(PATIENCE) for driver in drivers]


def close(drivers):
    for driver in drivers:
        driver.close()


def random_planes(rng, encoding, words):
    planes = rng.integers(0, 1 << 64, (encoding_by_name(encoding).planes, words), dtype=np.uint64)
    if encoding == "ternary":
        planes[1] &= ~planes[0]
    return planes


def golden(everybody, abstains, **spec):
    """The definition's result of one bucket."""
    name = f"reference-{id(everybody)}"
    reducers = [GoldenReducer(name) for _ in everybody]
    for worker, reducer in enumerate(reducers):
        reducer.request(JobSpec(3, worker, len(everybody), **spec))
    for reducer in reducers:
        reducer.grant(PATIENCE)
    tickets = [r.submit(p, a) for r, p, a in zip(reducers, everybody, abstains, strict=True)]
    results = [r.collect(t, PATIENCE) for r, t in zip(reducers, tickets, strict=True)]
    close(reducers)
    return results[0]


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "it never came"
        pause.wait(0.005)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["binary", "ternary"])
@pytest.mark.parametrize(("result_format", "margin"), [("tally", 0), ("majority", 1)])
@pytest.mark.parametrize(
    "faults", [{}, {"loss": 0.03, "duplicate": 0.05, "reorder": 0.1, "corrupt": 0.02}], ids=["clean", "faults"]
)
def test_results_are_those_of_the_golden_model(rng, encoding, result_format, margin, faults):
    members, terms = 3, {"encoding": encoding, "result_format": result_format, "margin": margin}
    with StandIn(members, slots=4, lines=3, seed=SEED, **faults) as reducer:
        drivers, grants = opened(reducer.port, members, **terms)
        assert {(grant.epoch, grant.slots, grant.lines_per_chunk) for grant in grants} == {(1, 4, 3)}
        sent, tickets = [], []
        for lines in (1, 2, 3, 4, 30, 1):  # all in flight at once, longer and shorter than the window
            planes = [random_planes(rng, encoding, 8 * lines) for _ in drivers]
            abstains = [rng.random(-(-lines // 3)) < 0.3 for _ in drivers]
            sent.append((planes, abstains))
            tickets.append([d.submit(p, a) for d, p, a in zip(drivers, planes, abstains, strict=True)])
        for (planes, abstains), issued in zip(sent, tickets, strict=True):
            wanted = golden(planes, abstains, lines_per_chunk=3, slots=4, **terms)
            for driver, ticket in zip(drivers, issued, strict=True):
                got = driver.collect(ticket, PATIENCE)
                assert np.array_equal(got.planes, wanted.planes)
                assert np.array_equal(got.voters, wanted.voters)
                assert not got.partial
        counters = drivers[0].status(0).counters
        assert counters["mismatched"] == counters["malformed"] == 0
        close(drivers)


def test_a_worker_with_nothing_to_say_abstains_from_all(rng):
    with StandIn(2) as reducer:
        drivers, _ = opened(reducer.port, 2)
        planes = random_planes(rng, "binary", 8 * 40)
        tickets = [drivers[0].submit(planes), drivers[1].submit(None, words=8 * 40)]
        for driver, ticket in zip(drivers, tickets, strict=True):
            got = driver.collect(ticket, PATIENCE)
            assert np.array_equal(got.planes[0], planes[0])
            assert not got.planes[1].any()
            assert got.voters.tolist() == [1, 1, 1]
        assert drivers[1].status(0).counters["abstentions"] >= 3
        close(drivers)


def test_chunk_numbers_come_round(rng):
    with StandIn(2, slots=4) as reducer:
        drivers, grants = opened(reducer.port, 2, next_chunk=(1 << 32) - 6, epoch=41)
        assert (grants[0].first_chunk, grants[0].epoch) == ((1 << 32) - 6, 42)
        planes = [random_planes(rng, "binary", 8 * 16 * 20) for _ in drivers]
        tickets = [d.submit(p) for d, p in zip(drivers, planes, strict=True)]
        for driver, ticket in zip(drivers, tickets, strict=True):
            assert np.array_equal(driver.collect(ticket, PATIENCE).planes[0], planes[0][0] ^ planes[1][0])
            assert driver.next_chunk == 14
        close(drivers)


def test_without_the_kernels_help(rng):
    settings = UdpSettings(initial_wait=0.01, offload=False)
    with StandIn(2, slots=8) as reducer:
        drivers, _ = opened(reducer.port, 2, settings)
        planes = [random_planes(rng, "binary", 8 * 16 * 20) for _ in drivers]
        tickets = [d.submit(p) for d, p in zip(drivers, planes, strict=True)]
        for driver, ticket in zip(drivers, tickets, strict=True):
            assert np.array_equal(driver.collect(ticket, PATIENCE).planes[0], planes[0][0] ^ planes[1][0])
        close(drivers)


def test_nothing_is_sent_for_a_slot_that_is_not_free(rng):
    """Rule 10: with S slots and no answer, S chunks are on their way and no more, however long that lasts."""
    with StandIn(2, slots=4) as reducer:
        drivers, _ = opened(reducer.port, 2)
        reducer.mute = True
        seen = set()
        take = reducer.reducer.receive

        def noted(frame, sender):
            seen.add(Header.unpack(frame).chunk)
            return take(frame, sender)

        reducer.reducer.receive = noted
        drivers[0].submit(random_planes(rng, "binary", 8 * 16 * 20))
        wait_for(lambda: drivers[0].status(0).counters["resent"] > 20)
        assert seen == {0, 1, 2, 3}
        close(drivers)


def test_many_threads_and_backpressure(rng):
    """More buckets than may wait: submit waits, and no result gets lost."""
    settings = UdpSettings(initial_wait=0.01, buckets=3)
    with StandIn(2, slots=4) as reducer:
        drivers, _ = opened(reducer.port, 2, settings)
        planes = [[random_planes(rng, "binary", 8 * (1 + k % 40)) for k in range(40)] for _ in drivers]
        tickets = [[], []]

        def feed(worker):
            for each in planes[worker]:
                tickets[worker].append(drivers[worker].submit(each))

        threads = [threading.Thread(target=feed, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for worker, driver in enumerate(drivers):
            for ticket, one, other in zip(tickets[worker], *planes, strict=True):
                assert np.array_equal(driver.collect(ticket, PATIENCE).planes[0], one[0] ^ other[0])
        close(drivers)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_nobody_answers():
    with StandIn(1) as reducer:
        reducer.deaf = True
        driver = UdpReducer("127.0.0.1", reducer.port, QUICK)
        with pytest.raises(AbsentError, match="no answer in"):
            driver.open_job(JobSpec(3, 0, 1), timeout=0.1)
        with pytest.raises(FailedError, match="not granted yet"):
            driver.submit(np.zeros((1, 8), np.uint64))
        reducer.deaf = False
        assert driver.grant(PATIENCE).epoch == 1  # it has gone on asking
        driver.close()


def test_the_other_members_are_not_there():
    with StandIn(2) as reducer:
        driver = UdpReducer("127.0.0.1", reducer.port, QUICK)
        driver.request(JobSpec(3, 0, 2))
        wait_for(lambda: driver._waits_for)
        with pytest.raises(TimedOutError, match="1 of 2 members"):
            driver.grant(0)
        driver.close()


def test_refused_and_asked_again():
    with StandIn(1) as reducer:
        reducer.refuse = Reason.NO_CAPACITY
        driver = UdpReducer("127.0.0.1", reducer.port, QUICK)
        with pytest.raises(RefusedError, match="NO_CAPACITY") as caught:
            driver.open_job(JobSpec(3, 0, 1), PATIENCE)
        assert (caught.value.reason, caught.value.kind) == (Reason.NO_CAPACITY, "refused_no_capacity")
        reducer.refuse = None

        def granted():
            try:
                return driver.grant(0)
            except RefusedError:
                return None

        wait_for(granted)
        driver.close()


def test_the_reducer_dies_and_another_takes_its_place(rng):
    reducer = StandIn(2)
    drivers, _ = opened(reducer.port, 2, epoch=6)
    reducer.deaf = True
    tickets = [driver.submit(random_planes(rng, "binary", 8)) for driver in drivers]
    for driver, ticket in zip(drivers, tickets, strict=True):
        with pytest.raises(FailedError, match="no sign of life") as caught:
            driver.collect(ticket, PATIENCE)
        assert caught.value.lost
        with pytest.raises(FailedError, match="no sign of life"):
            driver.submit(random_planes(rng, "binary", 8))
        with pytest.raises(FailedError):
            driver.resume(50)  # there is nothing to resume
    reducer.close()
    with StandIn(2, port=reducer.port):
        for worker, driver in enumerate(drivers):
            driver.request(JobSpec(3, worker, 2))
        grants = [driver.grant(PATIENCE) for driver in drivers]
        assert {(grant.epoch, grant.first_chunk) for grant in grants} == {(8, 1)}  # the workers remember
        planes = [random_planes(rng, "binary", 8) for _ in drivers]
        tickets = [d.submit(p) for d, p in zip(drivers, planes, strict=True)]
        for driver, ticket in zip(drivers, tickets, strict=True):
            assert np.array_equal(driver.collect(ticket, PATIENCE).planes[0], planes[0][0] ^ planes[1][0])
        close(drivers)


def test_nobody_listens_any_more(rng):
    reducer = StandIn(1)
    drivers, _ = opened(reducer.port, 1)
    reducer.close()
    ticket = drivers[0].submit(random_planes(rng, "binary", 8))
    with pytest.raises(FailedError, match="nobody listens") as caught:
        drivers[0].collect(ticket, PATIENCE)
    assert (caught.value.kind, caught.value.lost) == ("absent", True)
    close(drivers)


def test_a_restart_is_noticed_even_when_nothing_is_sent():
    with StandIn(1) as reducer:
        drivers, _ = opened(reducer.port, 1)
        reducer.forget()
        wait_for(lambda: drivers[0].failure is not None)
        assert (drivers[0].failure.kind, drivers[0].failure.lost) == ("restarted", True)
        close(drivers)


def test_stale_fails_the_bucket_and_the_job_goes_on_at_an_agreed_chunk(rng):
    with StandIn(2, slots=4) as reducer:
        drivers, grants = opened(reducer.port, 2)
        # Somebody has gone past the first chunks: what is sent for those is stale.
        ahead = Header(FrameType.ABSTAIN, 3, 1, 8, voters=0, epoch=grants[0].epoch).pack()
        with reducer.lock:
            reducer.reducer.receive(ahead, reducer.asked[3][1][2])
            reducer.reducer.poll()
            ticket = drivers[0].submit(random_planes(rng, "binary", 8))
            behind = drivers[0].submit(random_planes(rng, "binary", 8))
        with pytest.raises(FailedError, match="stale") as caught:
            drivers[0].collect(ticket, PATIENCE)
        assert (caught.value.kind, caught.value.lost) == ("nack_stale", False)
        with pytest.raises(FailedError, match="stale"):
            drivers[0].collect(behind, PATIENCE)
        planes = [random_planes(rng, "binary", 8 * 100) for _ in drivers]
        tickets = []
        for driver, each in zip(drivers, planes, strict=True):
            with driver._changed:  # the thread learns of both at once
                driver.resume(12)
                tickets.append(driver.submit(each))
        for driver, ticket in zip(drivers, tickets, strict=True):
            assert np.array_equal(driver.collect(ticket, PATIENCE).planes[0], planes[0][0] ^ planes[1][0])
            assert driver.next_chunk == 12 + 7
        close(drivers)


def test_a_bucket_has_only_so_much_time(rng):
    settings = UdpSettings(initial_wait=0.01, bucket_timeout=0.2, buckets=2)
    with StandIn(2) as reducer:
        drivers, _ = opened(reducer.port, 2, settings)
        ticket = drivers[0].submit(random_planes(rng, "binary", 8))  # the other worker never comes
        with pytest.raises(TimedOutError):
            drivers[0].collect(ticket, 0.01)
        with pytest.raises(FailedError, match=r"not done after 0\.2 s") as caught:
            drivers[0].collect(ticket, PATIENCE)
        assert (caught.value.kind, caught.value.lost) == ("timed_out", False)
        close(drivers)


def test_closing_ends_every_wait(rng):
    with StandIn(2) as reducer:
        drivers, _ = opened(reducer.port, 2)
        ticket = drivers[0].submit(random_planes(rng, "binary", 8))
        caught = []

        def wait():
            try:
                drivers[0].collect(ticket, PATIENCE)
            except FailedError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        close(drivers)
        close(drivers)
        waiting.join(PATIENCE)
        assert [error.kind for error in caught] == ["closed"]
        assert reducer.frames["CLOSE"] >= 2
        with pytest.raises(FailedError, match="closed"):
            drivers[0].submit(random_planes(rng, "binary", 8))


def test_bad_shapes_are_refused():
    with StandIn(1) as reducer:
        (driver,), _ = opened(reducer.port, 1)
        for planes, words, message in (
            (np.zeros((2, 8), np.uint64), 0, r"shape \(1, words\)"),
            (np.zeros((1, 8), np.int64), 0, "uint64"),
            (np.zeros((1, 9), np.uint64), 0, "whole lines"),
            (np.zeros((1, 16), np.uint64)[:, ::2], 0, "contiguous"),
            (None, 0, "whole lines"),
        ):
            with pytest.raises(ValueError, match=message):
                driver.submit(planes, words=words)
        with pytest.raises(ValueError, match="the bucket has 1 chunks"):
            driver.submit(np.zeros((1, 8), np.uint64), np.zeros(2, bool))
        driver.close()


def test_status_tells_what_the_reducer_tells(rng):
    with StandIn(1, slots=4, jobs=4) as reducer:
        (driver,), _ = opened(reducer.port, 1)
        driver.collect(driver.submit(random_planes(rng, "binary", 8 * 64)), PATIENCE)
        status = driver.status(PATIENCE)
        assert (status.remote, status.occupancy) == ({"frames": 7}, 0.25)
        assert 0 < status.round_trip_s < PATIENCE
        assert status.counters["chunks"] == 4
        assert 0 < status.latency_s(0.5) <= status.latency_s(0.99) < PATIENCE
        later = driver.status(0).since(status)
        assert (later.counters["chunks"], later.latency_s(0.5), later.retransmission_share) == (0, None, 0.0)
        driver.close()


# ---- the kernels by themselves --------------------------------------------------------------------------------------


def test_the_timer_is_that_of_the_rfc():
    timing = np.zeros(kernels.TIMING_FIELDS)
    kernels.start_timer(timing, 0.05, 0.003, 1.0)
    samples = np.array([0.010, 0.012, 0.050, 0.011, 0.010, 0.0001]) * 1e9
    srtt = rttvar = None
    for sample in samples:
        kernels._sample(timing, sample)
        if srtt is None:
            srtt, rttvar = sample, sample / 2
        else:
            rttvar = 0.75 * rttvar + 0.25 * abs(srtt - sample)
            srtt = 0.875 * srtt + 0.125 * sample
        assert timing[kernels.T_SRTT] == pytest.approx(srtt)
        assert timing[kernels.T_RTO] == pytest.approx(min(max(srtt + 4 * rttvar, 3e6), 1e9))
    for _ in range(200):
        kernels._sample(timing, 1000.0)
    assert timing[kernels.T_RTO] == 3e6
    kernels._sample(timing, 1e12)
    assert timing[kernels.T_RTO] == 1e9


def test_quantiles_of_the_histogram(rng):
    samples = rng.lognormal(12, 1.5, 5000).astype(np.int64)
    histogram = np.zeros(BINS, np.int64)
    for sample in samples:
        histogram[kernels._bin(sample)] += 1
    for quantile in (0.1, 0.5, 0.9, 0.99):
        exact = np.quantile(samples, quantile)
        assert exact * 0.99 <= 1e9 * quantile_s(histogram, quantile) <= exact * 1.3
    assert quantile_s(np.zeros(BINS, np.int64), 0.5) is None


class InFlight:
    """A job with one chunk of two lines in flight in slot 1 of 4, and nothing around it."""

    def __init__(self):
        self.job = np.zeros(kernels.JOB_FIELDS, np.int64)
        for field, value in (
            (kernels.J_JOB, 3), (kernels.J_WORKER, 1), (kernels.J_EPOCH, 5), (kernels.J_PLANES, 1),
            (kernels.J_RESULT, 2), (kernels.J_LINES, 2), (kernels.J_SLOTS, 4), (kernels.J_END, 6), (kernels.J_TAIL, 1),
        ):  # fmt: skip
            self.job[field] = value
        self.timing = np.zeros(kernels.TIMING_FIELDS)
        kernels.start_timer(self.timing, 0.05, 0.003, 1.0)
        self.slots = np.zeros((4, kernels.SLOT_FIELDS), np.int64)
        self.slots[:, kernels.S_CHUNK] = (8, 5, 6, 7)
        self.planes = np.arange(16, dtype=np.uint64)[None]
        self.result = np.zeros((2, 16), np.uint64)
        self.abstain, self.facts = np.zeros(1, np.uint8), np.zeros((3, 1), np.int64)
        self.buckets = np.zeros((1, kernels.BUCKET_FIELDS), np.int64)
        self.buckets[0] = (
            5, 1, 2, 1, self.planes.ctypes.data, 128, self.result.ctypes.data, 128,
            self.abstain.ctypes.data, self.facts.ctypes.data,
        )  # fmt: skip
        self.counters = np.zeros(len(kernels.COUNTERS), np.int64)
        self.histogram = np.zeros(BINS, np.int64)
        self.out, self.batches = np.zeros(1 << 16, np.uint8), np.zeros((64, 3), np.int64)

    def fill(self, now):
        count, _ = kernels.fill(
            now, self.job, self.timing, self.slots, self.buckets, self.out, self.batches, self.counters
        )
        return [self.out[at : at + size].tobytes() for at, size, _ in self.batches[:count]]

    def take(self, *frames):
        data = np.frombuffer(b"".join(frames), np.uint8).copy()
        ends = np.cumsum([len(frame) for frame in frames])
        pieces = np.array([(end - len(f), len(f), max(len(f), 1)) for end, f in zip(ends, frames, strict=True)])
        controls = np.zeros((4, 2), np.int64)
        return kernels.take(
            1000, self.job, self.timing, self.slots, self.buckets, data, pieces.astype(np.int64), len(frames),
            self.counters, self.histogram, controls,
        )  # fmt: skip

    def count(self, name):
        return int(self.counters[kernels.COUNTERS.index(name)])


def answer(plane, *, body=None, **changes):
    fields = {"job": 3, "worker": 1, "chunk": 5, "plane": plane, "planes": 2, "voters": 2, "lines": 2, "epoch": 5}
    kind = changes.pop("type", FrameType.RESULT)
    return Header(kind, **{**fields, **changes}).pack() + (bytes(range(128)) if body is None else body)


def test_a_frame_on_the_wire():
    state = InFlight()
    (frame,) = state.fill(0)
    header = Header.unpack(frame)
    assert header == Header(FrameType.CONTRIBUTE, 3, 1, 5, 0, 1, 1, 2, 5)
    assert frame[HEADER_BYTES:] == state.planes.tobytes()
    assert state.fill(1) == []  # nothing is due
    assert state.fill(int(60e6)) == [frame]  # the same again
    assert (state.count("contributions"), state.count("resent")) == (1, 1)


def test_what_was_lost_together_goes_again_together_and_later_each_time():
    state = InFlight()
    state.buckets[0, [kernels.B_CHUNKS, kernels.B_LINES, kernels.B_LEFT]] = 4, 8, 4
    state.planes, state.abstain = np.zeros((1, 64), np.uint64), np.ones(4, np.uint8)
    state.buckets[0, kernels.B_ABSTAIN] = state.abstain.ctypes.data
    state.job[kernels.J_END] = 9

    def sent(now):
        return sorted(Header.unpack(frame[at : at + HEADER_BYTES]).chunk for frame in state.fill(now)
                      for at in range(0, len(frame), HEADER_BYTES))  # fmt: skip

    assert sent(0) == [5, 6, 7, 8]
    assert sent(int(49e6)) == []
    assert sent(int(51e6)) == [5, 6, 7, 8]
    assert state.timing[kernels.T_RTO] == 100e6  # doubled once, not four times
    assert sent(int(150e6)) == []
    assert sent(int(152e6)) == [5, 6, 7, 8]
    assert state.timing[kernels.T_RTO] == 200e6


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"job": 4}, "foreign"),
        ({"worker": 2}, "foreign"),
        ({"epoch": 4}, "foreign"),
        ({"type": FrameType.CONTRIBUTE}, "foreign"),
        ({"chunk": 1}, "duplicates"),
        ({"chunk": 9}, "duplicates"),
        ({"chunk": 6}, "duplicates"),
        ({"planes": 3}, "mismatched"),
        ({"plane": 2}, "mismatched"),
        ({"lines": 1, "body": bytes(64)}, "mismatched"),
        ({"body": bytes(127)}, "mismatched"),
        ({"body": bytes(129)}, "mismatched"),
        ({"flags": Flags.MAJORITY}, "mismatched"),
        ({"flags": Flags.PARTIAL}, "mismatched"),
    ],
)
def test_results_that_do_not_fit_are_dropped(changes, counter):
    state = InFlight()
    state.fill(0)
    state.take(answer(**{"plane": 1, **changes}))
    assert state.count(counter) == 1
    assert not state.result.any()
    assert state.slots[1, kernels.S_GOT] == 0


def test_planes_must_agree_and_come_once():
    state = InFlight()
    state.fill(0)
    state.take(answer(0), answer(1, voters=1), answer(0, body=bytes(128)))
    assert (state.count("mismatched"), state.count("duplicates"), state.count("chunks")) == (1, 1, 0)
    state.take(answer(1, worker=0xFFFF, flags=Flags.RESEND))
    assert state.count("chunks") == 1
    assert state.result.tobytes() == 2 * bytes(range(128))
    assert state.facts[:, 0].tolist() == [2, 0, 0]
    assert state.slots[1, kernels.S_CHUNK] == 9  # the slot's next one
    state.take(answer(1))
    assert state.count("duplicates") == 2


def test_a_partial_result_says_who_is_in_it():
    state = InFlight()
    state.fill(0)
    tail = (0b10).to_bytes(64, "little")
    state.take(*(answer(p, flags=Flags.PARTIAL, voters=1, missing=1, body=bytes(range(128)) + tail) for p in (0, 1)))
    assert state.facts[:, 0].tolist() == [1, 1, 2]
    assert state.result.tobytes() == 2 * bytes(range(128))


def test_a_nack_counts_only_for_what_is_in_flight():
    for changes, counts in (({}, 1), ({"worker": 0xFFFF}, 0), ({"chunk": 1}, 0), ({"epoch": 4}, 0)):
        state = InFlight()
        state.fill(0)
        state.take(answer(0, type=FrameType.NACK, reason=Reason.STALE, body=b"", **changes))
        assert state.count("nacks") == counts
        assert state.job[kernels.J_NACKED] == (Reason.STALE if counts else 0)


def test_hostile_frames_change_nothing(rng):
    """Random bytes, cut frames, and good frames with one field spoilt: no word of a result, no slot changes."""
    state = InFlight()
    state.fill(0)
    before = state.slots.copy(), state.job.copy(), state.buckets.copy()
    good = answer(0)
    frames = []
    for _ in range(20_000):
        kind = rng.integers(3)
        if kind == 0:
            frames.append(rng.bytes(int(rng.integers(0, 200))))
        elif kind == 1:
            frames.append(good[: rng.integers(len(good))])
        else:
            spoilt = bytearray(good)
            at = int(rng.choice([0, 1, 2, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 18, 20, 21]))
            spoilt[at] ^= int(rng.integers(1, 256))
            if (at == 14 and spoilt[at] < 2) or (at == 2 and spoilt[at] & 15 == FrameType.NACK):
                continue  # the other plane; a refusal
            frames.append(bytes(spoilt))
    for begin in range(0, len(frames), 500):
        state.take(*(frame for frame in frames[begin : begin + 500] if frame))
    assert state.count("frames_received") >= 18_000
    assert not state.result.any()
    for array, old in zip((state.slots, state.job, state.buckets), before, strict=True):
        assert np.array_equal(array, old)


# ---- URLs -----------------------------------------------------------------------------------------------------------


def test_urls():
    url = ReducerUrl.parse("udp://10.1.2.3:20045?job=7&slots=128&lines=8&timeout=2.5")
    assert (url.scheme, url.place, url.job, url.slots, url.lines, url.timeout) == (
        "udp", "10.1.2.3:20045", 7, 128, 8, 2.5,
    )  # fmt: skip
    assert ReducerUrl.parse("golden:here").place == "here"
    for wrong, message in (
        ("cxl:///dev/dax0.0", "there are udp://host:port"),
        ("rtl://udp", "there are udp://host:port"),
        ("127.0.0.1:9000", "unknown kind"),
        ("udp://127.0.0.1", "udp://host:port"),
        ("udp://:9000", "udp://host:port"),
        ("udp://h:99999", "udp://host:port"),
        ("udp://h:9?slots=6", "power of two"),
        ("udp://h:9?slots=many", "must be a number"),
        ("udp://h:9?lines=0", "must be 1 to 255"),
        ("udp://h:9?colour=red", "unknown option 'colour'"),
    ):
        with pytest.raises(ValueError, match=message):
            ReducerUrl.parse(wrong)
    with pytest.raises(AbsentError):
        connect("udp://no.such.host.invalid:9000")
