"""Every rule of the protocol, one by one, and then all of them under a hostile network."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_fabric.model import (
    BINARY,
    TERNARY,
    BucketFailedError,
    Encoding,
    Flags,
    FrameType,
    GoldenWorker,
    Header,
    JobConfig,
    Parent,
    Reason,
    ReducerParams,
    SignCountReducer,
    Straggler,
    int_encoding,
    tally_encoding,
)
from neuron_fabric.model.reducer import BITMAP_BYTES
from neuron_fabric.model.registers import COUNTERS
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES

PARAMS = ReducerParams(lanes=64, lines_per_chunk=2, slots=2, workers=8, acc_bits=6, max_planes=4)
JOB, EPOCH = 7, 3
ROOT_JOB, ROOT_EPOCH = 21, 9


def contribution(worker, chunk, data=b"", *, plane=0, planes=1, lines=1, voters=1, **fields):
    header = Header(
        fields.pop("type", FrameType.CONTRIBUTE), JOB, worker, chunk, plane, planes, voters, lines, EPOCH, **fields
    )
    return header.pack() + data.ljust(lines * PARAMS.line_bytes, b"\0")


def abstention(worker, chunk, *, planes=1, lines=1):
    return Header(FrameType.ABSTAIN, JOB, worker, chunk, 0, planes, 0, lines, EPOCH).pack()


def reducer(members=(0, 1), encoding=BINARY, params=PARAMS, **config):
    device = SignCountReducer(params)
    device.open(JobConfig(JOB, EPOCH, members, encoding, **config))
    return device


def tally(frames, element):
    """The tally of one element from the planes of one result."""
    return sum(
        (frame.body[element // 8] >> element % 8 & 1) << frame.header.plane
        for frame in frames
        if frame.header.type is FrameType.RESULT
    )


def test_counts_and_answers_all_when_everybody_has_sent():
    device = reducer()
    assert device.receive(contribution(0, 5, b"\x03")) is Reason.NONE
    assert device.poll() == []
    assert device.receive(contribution(1, 5, b"\x01")) is Reason.NONE
    frames = device.poll()
    assert [frame.header.plane for frame in frames] == [0, 1]
    assert all(f.header.worker == DESTINATION_ALL and f.header.voters == 2 for f in frames)
    assert [tally(frames, i) for i in range(3)] == [2, 1, 0]
    assert device.poll() == []


def test_a_duplicate_adds_nothing_and_after_completion_is_answered_to_its_sender():
    device = reducer()
    device.receive(contribution(0, 0, b"\x01"))
    assert device.receive(contribution(0, 0, b"\x01")) is Reason.NONE
    assert device.poll() == []
    device.receive(contribution(1, 0, b"\x01"))
    first = device.poll()
    assert tally(first, 0) == 2
    device.receive(contribution(0, 0, b"\xff"))
    again = device.poll()
    assert tally(again, 0) == 2
    assert all(f.header.worker == 0 and f.header.flags & Flags.RESEND for f in again)
    assert device.counters["duplicates"] == 2


def test_a_newer_chunk_claims_whatever_the_version_holds():
    device = reducer()
    device.receive(contribution(0, 0, b"\xff" * 16, lines=2))
    assert device.receive(contribution(1, 4, b"\x01")) is Reason.NONE  # same slot, same version
    assert device.counters["abandoned"] == 1
    assert device.receive(contribution(0, 0, b"\xff" * 16, lines=2)) is Reason.STALE
    (nack,) = device.poll()
    assert nack.header.type is FrameType.NACK
    assert (nack.header.reason, nack.header.worker, nack.header.chunk) == (Reason.STALE, 0, 0)
    device.receive(contribution(0, 4, b"\x00"))
    assert tally(device.poll(), 0) == 1


def test_an_unwritten_line_reads_as_zero_after_a_claim_by_abstain():
    device = reducer()
    for worker in range(2):
        device.receive(contribution(worker, 0, b"\xff" * 16, lines=2))
    device.poll()
    for worker in range(2):
        device.receive(abstention(worker, 4, lines=1))
    frames = device.poll()
    assert [frame.header.voters for frame in frames] == [0, 0]
    assert not any(any(frame.body) for frame in frames)


def test_the_two_versions_of_a_slot_are_apart():
    device = reducer()
    device.receive(contribution(0, 0, b"\x01"))
    device.receive(contribution(0, 2, b"\x02"))  # same slot, other version
    device.receive(contribution(1, 0, b"\x01"))
    assert tally(device.poll(), 0) == 2
    device.receive(contribution(1, 2, b"\x02"))
    assert tally(device.poll(), 1) == 2


def test_a_chunk_has_one_line_count():
    device = reducer()
    device.receive(contribution(0, 0, lines=2))
    assert device.receive(contribution(1, 0, lines=1)) is Reason.LINES_DIFFER


def test_chunk_numbers_wrap():
    device = reducer()
    last = (1 << 32) - 4
    for chunk in (last, 0):
        for worker in range(2):
            assert device.receive(contribution(worker, chunk, b"\x01")) is Reason.NONE
    assert device.receive(contribution(0, last)) is Reason.STALE


def test_abstainers_are_no_voters_and_a_vote_cannot_be_taken_back():
    device = reducer((0, 1, 2), TERNARY)
    device.receive(contribution(0, 0, b"\x01", planes=2))
    assert device.receive(abstention(0, 0, planes=2)) is Reason.ABSTAIN_AFTER_VOTE
    device.receive(contribution(0, 0, b"\x02", plane=1, planes=2))
    device.receive(abstention(1, 0, planes=2))
    device.receive(contribution(1, 0, b"\xff", planes=2))  # a duplicate of what was given up
    device.receive(abstention(2, 0, planes=2))
    frames = [f for f in device.poll() if f.header.type is FrameType.RESULT]
    assert frames[0].header.voters == 1
    assert [tally(frames, i) for i in range(3)] == [1, 7, 0]  # +1, -1 in three bits, 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f[:10], Reason.BAD_LENGTH),
        (lambda f: f + b"x", Reason.BAD_LENGTH),
        (lambda f: b"\0" + f[1:], Reason.BAD_MAGIC),
        (lambda f: f[:2] + b"\x30" + f[3:], Reason.BAD_VERSION),
        (lambda f: f[:2] + b"\x1c" + f[3:], Reason.BAD_TYPE),
        (lambda f: f[:2] + b"\x12" + f[3:], Reason.BAD_TYPE),
        (lambda f: f[:4] + b"\0\x08" + f[6:], Reason.JOB_NOT_OPEN),
        (lambda f: f[:20] + b"\0\x02" + f[22:], Reason.WRONG_EPOCH),
        (lambda f: f[:6] + b"\0\x05" + f[8:], Reason.WRONG_SENDER),
        (lambda f: f[:14] + b"\x01" + f[15:], Reason.BAD_PLANE),
        (lambda f: f[:15] + b"\x02" + f[16:], Reason.BAD_PLANE),
        (lambda f: f[:16] + b"\0\x02" + f[18:], Reason.BAD_VOTERS),
        (lambda f: f[:16] + b"\0\0" + f[18:], Reason.BAD_VOTERS),
        (lambda f: f[:18] + b"\0" + f[19:HEADER_BYTES], Reason.BAD_LINES),
        (lambda f: f[:18] + b"\x03" + f[19:] + bytes(16), Reason.BAD_LINES),
    ],
)
def test_a_frame_that_is_refused_changes_nothing_and_is_counted(change, reason):
    device = reducer()
    assert device.receive(change(contribution(0, 0, b"\x01"))) is reason
    assert device.counters[f"refused_{reason.name.lower()}"] == 1
    for worker in range(2):
        device.receive(contribution(worker, 0, b"\x02"))
    frames = [f for f in device.poll() if f.header.type is FrameType.RESULT]
    assert [tally(frames, i) for i in range(2)] == [0, 2]


def test_a_bad_checksum_is_dropped_silently():
    device = reducer()
    assert device.receive(contribution(0, 0), checksum_ok=False) is Reason.BAD_CHECKSUM
    assert device.poll() == []


def test_an_address_is_pinned_and_only_a_pinned_sender_gets_a_nack():
    device = reducer({0: "a", 1: "b"})
    assert device.receive(contribution(0, 0), "b") is Reason.WRONG_SENDER
    assert device.poll() == []
    assert device.receive(contribution(0, 0, planes=2), "a") is Reason.BAD_PLANE
    (nack,) = device.poll()
    assert nack.address == "a"


def test_the_nack_queue_is_bounded():
    device = SignCountReducer(PARAMS, nack_queue=2)
    device.open(JobConfig(JOB, EPOCH, (0,), BINARY))
    for _ in range(5):
        device.receive(contribution(0, 0, planes=2))
    assert len(device.poll()) == 2
    assert device.counters["nacks_dropped"] == 3


def test_without_multicast_every_member_gets_its_own_result():
    device = reducer({0: "a", 3: "b"}, multicast=False)
    device.receive(contribution(0, 0), "a")
    device.receive(contribution(3, 0), "b")
    assert [(f.address, f.header.worker, f.header.plane) for f in device.poll()] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("b", 3, 0),
        ("b", 3, 1),
    ]


def test_majority_with_a_tie_and_a_margin():
    for margin in (0, 1):
        device = reducer((0, 1, 2), result_format="majority", margin=margin)
        for worker, bits in enumerate((b"\x01", b"\x01", b"\x05")):
            device.receive(contribution(worker, 0, bits))
        planes = [frame.body[:1] for frame in device.poll()]
        # votes: element 0 is -3, 1 is +3, 2 is +1
        assert planes == [b"\x01", bytes([0xFF if margin == 0 else 0xFB])]
    device = reducer((0, 1), result_format="majority")
    device.receive(contribution(0, 0, b"\x01"))
    device.receive(contribution(1, 0, b"\x02"))
    assert [frame.body[:1] for frame in device.poll()] == [b"\x00", b"\xfc"]


def test_straggler_rule():
    device = reducer((0, 1, 2, 3), straggler=Straggler(timeout=10, quorum=2))
    device.advance(100)
    device.receive(contribution(0, 0, b"\x01"))
    device.receive(abstention(1, 0))
    device.advance(120)
    assert device.poll() == []  # no quorum
    device.receive(contribution(2, 0, b"\x01"))
    device.advance(121)
    frames = device.poll()
    assert tally(frames, 0) == 2
    header = frames[0].header
    assert header.flags & Flags.PARTIAL
    assert (header.voters, header.missing) == (2, 1)
    assert int.from_bytes(frames[0].body[PARAMS.line_bytes :], "little") == 0b101
    device.receive(contribution(3, 0, b"\x01"))
    again = device.poll()
    assert device.counters["late"] == 1
    assert tally(again, 0) == 2
    assert again[0].header.worker == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"members": ()}, "no members"),
        ({"members": (0, 8)}, "worker 8 is out of range"),
        ({"encoding": int_encoding(5)}, "5 planes; this reducer takes 4"),
        ({"members": range(8), "encoding": int_encoding(4)}, "takes 7 bits; the accumulator has 6"),
        ({"result_format": "mean"}, "result format is tally or majority"),
        ({"members": (0, 1, 0)}, r"a worker is listed twice in \[0, 1, 0\]"),
        ({"encoding": Encoding("far", (16,))}, "weight 16 in plane 0; the greatest that this reducer takes is 8"),
        ({"encoding": Encoding("many", (1,), leaves=1 << 15)}, "takes 17 bits; the accumulator has 6"),
        ({"margin": -1}, "margin must be 0 to 63, not -1"),
        ({"margin": 64}, "margin must be 0 to 63, not 64"),
        ({"slots": 0}, "slots must be a power of two, not 0"),
        ({"slots": 3}, "slots must be a power of two, not 3"),
        ({"slots": 4}, "4 slots from slot 0 on are not among the 2 of this reducer"),
        ({"slots": 1, "base": 2}, "1 slots from slot 2 on are not among"),
        ({"slots": 1, "base": -1}, "1 slots from slot -1 on are not among"),
        ({"base": 1}, "2 slots from slot 1 on are not among"),
        ({"encoding": TERNARY, "straggler": Straggler(1, 1)}, "needs a one-plane encoding"),
        ({"straggler": Straggler(1, 3)}, "quorum must be 1 to 2, not 3"),
        ({"straggler": Straggler(1, 0)}, "quorum must be 1 to 2, not 0"),
        ({"straggler": Straggler(0, 1)}, "timeout must be 1 to 2147483648 ticks, not 0"),
        ({"straggler": Straggler(1 << 32, 1)}, "timeout must be 1 to 2147483648 ticks, not 4294967296"),
        ({"parent": Parent("p", 1, 0, 1, 4), "result_format": "majority"}, "only the root can decide"),
        ({"parent": Parent("p", 1, 0, 1, 4), "straggler": Straggler(1, 1)}, "reducers without a parent"),
        ({"parent": Parent("p", 1, 0, 1, 1)}, "more than the 1 that its parent was told"),
        ({"parent": Parent("p", 1 << 16, 0, 1, 2)}, "the parent's job has 16 bits; 65536 does not fit"),
        ({"parent": Parent("p", 1, 0xFFFF, 1, 2)}, "worker 0xffff of the parent stands for all"),
        ({"parent": Parent("p", 1, 0, 1, 64)}, "a result takes 7 planes; the accumulator has 6 bits"),
        ({"epoch": 1 << 16}, "epoch has 16 bits"),
    ],
)
def test_a_job_that_cannot_work_is_refused_by_name(config, message):
    settings = {"job": JOB, "epoch": EPOCH, "members": (0, 1), "encoding": BINARY} | config
    with pytest.raises(ValueError, match=message):
        SignCountReducer(PARAMS).open(JobConfig(**settings))


def test_reopening_needs_a_newer_epoch_and_forgets_the_slots():
    device = reducer()
    device.receive(contribution(0, 0, b"\x01"))
    with pytest.raises(ValueError, match="reopening needs a higher one"):
        device.open(JobConfig(JOB, EPOCH, (0, 1), BINARY))
    device.open(JobConfig(JOB, EPOCH + 1, (0, 1), BINARY))
    assert device.receive(contribution(0, 0, b"\x01")) is Reason.WRONG_EPOCH


def child_of(job, **config):
    return {"parent": Parent("root", job, 0, 1, 2), **config}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"base": 0, "slots": 4}, "job 8: slots 0 to 3 overlap slots 2 to 3 of job 7"),
        ({"base": 2, "slots": 1}, "job 8: slots 2 to 2 overlap slots 2 to 3 of job 7"),
        ({"base": 3, "slots": 1}, "job 8: slots 3 to 3 overlap slots 2 to 3 of job 7"),
        ({}, "job 8: slots 0 to 7 overlap slots 2 to 3 of job 7"),
        ({"base": 4, "slots": 4} | child_of(5), "job 8: job 7 is a child of the parent's job 5, too"),
    ],
)
def test_jobs_that_cannot_be_open_together_are_refused_by_name(second, message):
    """And what is refused leaves everything as it was; closing the one lets the other in."""
    device = SignCountReducer(replace(PARAMS, slots=8, jobs=2))
    first = JobConfig(JOB, EPOCH, (0, 1), BINARY, base=2, slots=2, **child_of(5))
    device.open(first)
    device.receive(contribution(0, 0, b"\x01"))
    refused = JobConfig(JOB + 1, EPOCH, (0, 1), BINARY, **second)
    with pytest.raises(ValueError, match=message):
        device.open(refused)
    device.receive(contribution(1, 0, b"\x01"))
    assert len(device.poll()) == 2
    device.close(JOB)
    device.open(refused)


def test_there_are_only_so_many_banks():
    device = SignCountReducer(replace(PARAMS, slots=8, jobs=2))
    for job in range(2):
        device.open(JobConfig(job, EPOCH, (0, 1), BINARY, base=job, slots=1))
    third = JobConfig(2, EPOCH, (0, 1), BINARY, base=2, slots=1)
    with pytest.raises(ValueError, match="job 2: 2 jobs are open; this reducer has 2 job banks"):
        device.open(third)
    device.open(JobConfig(1, EPOCH + 1, (0, 1), BINARY, base=4, slots=4))  # reopened, in another place
    device.close(0)
    device.open(third)


def test_children_of_one_parent_with_jobs_of_their_own_share_a_reducer():
    """A RESULT finds its child by the parent's job, and by nothing else, since it may be for all."""
    device = SignCountReducer(replace(PARAMS, jobs=2))
    for index in range(2):
        parent = Parent("root", ROOT_JOB + index, 0, ROOT_EPOCH, 2)
        device.open(JobConfig(JOB + index, EPOCH, (0, 1), BINARY, base=index, slots=1, parent=parent))
    for index in (1, 0):
        answer = Header(FrameType.RESULT, ROOT_JOB + index, DESTINATION_ALL, 0, epoch=ROOT_EPOCH).pack() + bytes(8)
        assert device.receive(answer, "root") is Reason.NONE
        (relayed,) = device.poll()
        assert relayed.header.job == JOB + index


def test_a_job_has_its_own_number_of_slots():
    """With one slot of many, chunks 0 and 2 have one place and 0 and 1 have not; the worker's window is one chunk."""
    params = replace(PARAMS, slots=8)
    config = JobConfig(JOB, EPOCH, (0, 1), BINARY, base=5, slots=1)
    device = SignCountReducer(params)
    device.open(config)
    for chunk in (0, 1):
        device.receive(contribution(0, chunk))
    assert device.counters["abandoned"] == 0
    device.receive(contribution(0, 2))
    assert device.counters["abandoned"] == 1
    worker = GoldenWorker(params, config, 0, 2)
    worker.submit(np.zeros((1, 10 * params.line_bytes), np.uint8), 10)
    assert [Header.unpack(frame).chunk for frame in worker.outgoing()] == [0]


def some_frame(rng, job, params):
    """A frame for one of the chunks around the place where a job is, right or not quite."""
    encoding = job.encoding
    fields = {
        "type": rng.choice([FrameType.CONTRIBUTE] * 5 + [FrameType.ABSTAIN]),
        "job": job.job,
        "worker": rng.choice([*job.members, rng.randrange(params.workers)]),
        "chunk": rng.randrange(12),
        "plane": rng.randrange(encoding.planes),
        "planes": encoding.planes,
        "lines": rng.choice([1, 1, 1, 2]),
        "epoch": rng.choice([job.epoch] * 9 + [job.epoch - 1]),
    }
    size = 0 if fields["type"] is FrameType.ABSTAIN else fields["lines"] * params.line_bytes
    return Header(**fields).pack() + rng.randbytes(size)


@given(seed=st.integers(0, 2**32 - 1))
def test_jobs_that_share_a_pool_do_not_notice_each_other(seed):
    """Each answers as if it had a reducer of its own with as many slots as it has here, and the counters add up."""
    rng = random.Random(seed)
    params = replace(PARAMS, slots=8, jobs=3)
    places = rng.choice([[(0, 4), (4, 2), (6, 2)], [(0, 1), (2, 2), (4, 4)], [(7, 1), (0, 2), (2, 1)]])
    jobs = [
        JobConfig(
            number,
            rng.randrange(1, 1 << 16),
            rng.sample(range(8), rng.randint(1, 3)),
            rng.choice([BINARY, TERNARY, int_encoding(2)]),
            rng.choice(["tally", "majority"]),
            multicast=rng.random() < 0.5,
            base=base,
            slots=count,
        )
        for number, (base, count) in enumerate(places)
    ]
    shared = SignCountReducer(params, nack_queue=10_000)
    alone = [SignCountReducer(replace(params, slots=job.slots, jobs=1), nack_queue=10_000) for job in jobs]
    for job, own in zip(jobs, alone, strict=True):
        shared.open(job)
        own.open(replace(job, base=0))
    for _ in range(rng.randrange(300)):
        index = rng.randrange(3)
        frame = some_frame(rng, jobs[index], params)
        assert shared.receive(frame) is alone[index].receive(frame)
        if rng.random() < 0.2:
            sent = shared.poll()
            for job, own in zip(jobs, alone, strict=True):
                assert [out for out in sent if out.header.job == job.job] == own.poll()
    for index, job in enumerate(jobs):
        if rng.random() < 0.2:
            shared.close(job.job)
            alone[index].close(job.job)
    assert Counter(out.payload for out in shared.poll()) == Counter(out.payload for own in alone for out in own.poll())
    high = "slot_high_water"
    counted = sum((own.counters for own in alone), Counter())
    assert max(own.counters[high] for own in alone) <= shared.counters[high] <= counted[high]
    del shared.counters[high], counted[high]
    assert shared.counters == counted


def test_slot_high_water_is_the_most_that_was_incomplete_at_once():
    device = SignCountReducer(replace(PARAMS, slots=8, jobs=2))
    high = lambda: device.counters["slot_high_water"]  # noqa: E731
    device.open(JobConfig(JOB, EPOCH, (0, 1), BINARY, base=0, slots=4, straggler=Straggler(10, 1)))
    device.open(JobConfig(JOB + 1, EPOCH, (0,), BINARY, base=4, slots=2))
    device.receive(Header(FrameType.CONTRIBUTE, JOB + 1, 0, 0, epoch=EPOCH).pack() + bytes(8))
    assert (device.counters["completed"], high()) == (1, 0)  # complete with its first frame
    for chunk in (0, 1, 4):  # both versions of slot 0, and slot 1
        device.receive(contribution(0, chunk))
    assert high() == 3
    device.receive(contribution(0, 8))  # takes the place of chunk 0
    assert (device.counters["abandoned"], high()) == (1, 3)
    device.receive(contribution(1, 1))
    device.receive(contribution(0, 9))  # takes a complete one's place
    assert high() == 3
    device.advance(10)
    assert (device.counters["partial"], high()) == (3, 3)
    device.clear_counters()
    assert not device.counters
    for chunk in (16, 17):
        device.receive(contribution(0, chunk))
    device.clear_counters()
    assert device.counters == {"slot_high_water": 2}
    device.close(JOB)
    device.clear_counters()
    assert not device.counters
    device.open(JobConfig(JOB, EPOCH, (0, 1), BINARY, base=0, slots=4))
    device.receive(contribution(0, 0))
    device.reset()
    assert high() == 1
    device.clear_counters()
    assert not device.counters


def test_close_and_reset_leave_no_vote_behind():
    for forget in (lambda device: device.close(JOB), lambda device: device.reset()):
        device = reducer()
        device.receive(contribution(0, 0, b"\x01"))
        device.receive(contribution(1, 0, b"\x01"))
        forget(device)
        assert device.poll() == []
        assert device.receive(contribution(0, 0)) is Reason.JOB_NOT_OPEN
        device.open(JobConfig(JOB, EPOCH, (0, 1), BINARY))
        device.receive(contribution(0, 0, b"\x00"))
        device.receive(contribution(1, 0, b"\x00"))
        assert tally(device.poll(), 0) == 0


def test_a_thousand_chunks_on_one_slot_carry_nothing_over():
    params = ReducerParams(lanes=64, lines_per_chunk=1, slots=1, workers=3, acc_bits=2)
    device = reducer((0, 1, 2), params=params)
    rng = np.random.default_rng(1)
    for chunk in range(1000):
        data = rng.integers(0, 256, (3, 8), np.uint8)
        for worker in rng.permutation(3):
            device.receive(contribution(int(worker), chunk, data[worker].tobytes()))
        frames = device.poll()
        want = np.unpackbits(data, axis=1, bitorder="little").astype(int).sum(0)
        assert [tally(frames, i) for i in range(64)] == list(want)


def test_every_counter_of_the_model_is_in_the_register_table():
    names = {name for name, _ in COUNTERS}
    device = reducer((0, 1, 2), straggler=Straggler(1, 1))
    device.receive(contribution(0, 0))
    device.receive(b"")
    device.advance(5)
    device.receive(contribution(1, 0))
    device.receive(contribution(0, 4))
    device.receive(contribution(0, 8))
    device.receive(contribution(0, 4))
    device.poll()
    assert set(device.counters) <= names


class Network:
    """Carries frames with loss, duplication and reordering."""

    def __init__(self, rng, loss, duplication):
        self.rng, self.loss, self.duplication = rng, loss, duplication
        self.frames = []

    def send(self, frame):
        copies = 1 + (self.rng.random() < self.duplication)
        self.frames += [frame] * (0 if self.rng.random() < self.loss else copies)

    def deliver(self):
        self.rng.shuffle(self.frames)
        cut = self.rng.randint(0, len(self.frames))
        now, self.frames = self.frames[:cut], self.frames[cut:]
        return now


def run_bucket(device, workers, planes, lines, rng, loss=0.2, duplication=0.2):
    up, down = Network(rng, loss, duplication), Network(rng, loss, duplication)
    for worker, mine in zip(workers, planes, strict=True):
        worker.submit(mine, lines)
    for _ in range(2000):
        for worker in workers:
            for frame in worker.outgoing(again=rng.random() < 0.3):
                up.send(frame)
        for frame in up.deliver():
            device.receive(frame)
        for out in device.poll():
            for worker in workers:
                if out.header.worker in (worker.worker, DESTINATION_ALL):
                    down.send((worker, out.payload))
        for worker, frame in down.deliver():
            worker.receive(frame)
        if all(worker.done for worker in workers):
            return [worker.result() for worker in workers]
    raise AssertionError("the bucket did not finish")


def expected_tally(encoding, planes, result_planes):
    total = 0
    for mine in planes:
        if mine is not None:
            bits = np.unpackbits(mine, axis=1, bitorder="little").astype(np.int64)
            total = total + np.tensordot(np.array(encoding.weights), bits, axes=1)
    total = np.broadcast_to(total, (planes_length(planes) * 8,))
    return np.stack([np.packbits((total >> k & 1).astype(np.uint8), bitorder="little") for k in range(result_planes)])


def planes_length(planes):
    return next(mine.shape[1] for mine in planes if mine is not None)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    world=st.integers(1, 5),
    encoding=st.sampled_from([BINARY, TERNARY, int_encoding(2), int_encoding(3)]),
    start=st.sampled_from([0, 1, 5, (1 << 32) - 3]),
)
def test_exact_on_every_worker_under_loss_duplication_and_reordering(seed, world, encoding, start):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    device = reducer(range(world), encoding)
    result_planes = encoding.tally_bits(world)
    config = JobConfig(JOB, EPOCH, range(world), encoding)
    workers = [GoldenWorker(PARAMS, config, w, result_planes, first_chunk=start) for w in range(world)]
    for _bucket in range(3):
        lines = rng.randint(1, 9)
        shape = (encoding.planes, lines * PARAMS.line_bytes)
        planes = [bits.integers(0, 256, shape, np.uint8) for _ in range(world)]
        if world > 1 and rng.random() < 0.3:
            planes[rng.randrange(world)] = None
        results = run_bucket(device, workers, planes, lines, rng)
        want = expected_tally(encoding, planes, result_planes)
        for result in results:
            np.testing.assert_array_equal(result.planes, want)
            assert set(result.voters) == {sum(mine is not None for mine in planes)}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_tree_of_two_levels_counts_like_one_reducer(seed):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    leaves = 3
    upper = tally_encoding(BINARY, leaves)
    root = SignCountReducer(PARAMS)
    root.open(JobConfig(ROOT_JOB, ROOT_EPOCH, {0: "c0", 1: "c1"}, upper))
    children = []
    for index, members in enumerate(((0, 1, 2), (3, 4))):
        child = SignCountReducer(PARAMS)
        # The root knows the job, the workers and the epoch under numbers of its own.
        child.open(JobConfig(JOB, EPOCH, members, BINARY, parent=Parent("root", ROOT_JOB, index, ROOT_EPOCH, leaves)))
        children.append(child)
    result_planes = upper.tally_bits(2)
    config = JobConfig(JOB, EPOCH, range(5), BINARY)
    workers = [GoldenWorker(PARAMS, config, w, result_planes, first_chunk=0) for w in range(5)]
    below = [children[0]] * 3 + [children[1]] * 2
    lines = 5
    planes = [bits.integers(0, 256, (1, lines * PARAMS.line_bytes), np.uint8) for _ in range(5)]
    planes[rng.randrange(5)] = None
    for worker, mine in zip(workers, planes, strict=True):
        worker.submit(mine, lines)
    links = [Network(rng, 0.2, 0.2) for _ in range(4)]
    for _ in range(3000):
        for worker, child in zip(workers, below, strict=True):
            for frame in worker.outgoing(again=rng.random() < 0.3):
                links[0].send((child, frame))
        for child, frame in links[0].deliver():
            child.receive(frame)
        for index, child in enumerate(children):
            for out in child.poll():
                if out.address == "root":
                    links[1].send((index, out.payload))
                else:
                    for worker, mine in zip(workers, below, strict=True):
                        if mine is child:
                            links[2].send((worker, out.payload))
        for index, frame in links[1].deliver():
            root.receive(frame, f"c{index}")
        for out in root.poll():
            for index, child in enumerate(children):
                if out.address in (None, f"c{index}"):
                    links[3].send((child, out.payload))
        for child, frame in links[3].deliver():
            child.receive(frame, "root")
        for worker, frame in links[2].deliver():
            worker.receive(frame)
        if all(worker.done for worker in workers):
            break
    want = expected_tally(BINARY, planes, result_planes)
    for worker in workers:
        result = worker.result()
        np.testing.assert_array_equal(result.planes, want)
        assert set(result.voters) == {4}


@pytest.mark.parametrize(
    ("change", "sender", "reason"),
    [
        ({"job": JOB}, "root", Reason.JOB_NOT_OPEN),
        ({"worker": 4}, "root", Reason.JOB_NOT_OPEN),
        ({"epoch": EPOCH}, "root", Reason.WRONG_EPOCH),
        ({}, "elsewhere", Reason.WRONG_SENDER),
        ({"lines": 2}, "root", Reason.BAD_LENGTH),
    ],
)
def test_a_child_relays_only_what_its_parent_answers_to_it(change, sender, reason):
    child = SignCountReducer(PARAMS)
    child.open(JobConfig(JOB, EPOCH, (0, 1), BINARY, parent=Parent("root", ROOT_JOB, 5, ROOT_EPOCH, 2)))
    fields = {"job": ROOT_JOB, "worker": 5, "chunk": 0, "lines": 1, "epoch": ROOT_EPOCH}
    good = Header(FrameType.RESULT, **fields).pack() + bytes(8)
    assert child.receive(good, "root") is Reason.NONE
    (relayed,) = child.poll()
    assert (relayed.header.job, relayed.header.worker, relayed.header.epoch) == (JOB, DESTINATION_ALL, EPOCH)
    assert child.receive(Header(FrameType.RESULT, **fields | change).pack() + bytes(8), sender) is reason
    assert child.poll() == []


def test_closing_a_child_forgets_what_it_has_not_relayed():
    device = SignCountReducer(replace(PARAMS, jobs=2))
    for index in range(2):
        parent = Parent("root", ROOT_JOB + index, 0, ROOT_EPOCH, 2)
        device.open(JobConfig(JOB + index, EPOCH, (0, 1), BINARY, base=index, slots=1, parent=parent))
        answer = Header(FrameType.RESULT, ROOT_JOB + index, DESTINATION_ALL, 0, epoch=ROOT_EPOCH, flags=Flags(0xF7))
        device.receive(answer.pack() + bytes(8 + BITMAP_BYTES), "root")
    device.close(JOB)
    (relayed,) = device.poll()
    assert relayed.header.job == JOB + 1
    # Flags of a later version are nothing that this one may promise.
    assert relayed.header.flags == Flags.MAJORITY | Flags.PARTIAL


def test_a_worker_waits_for_the_slot():
    config = JobConfig(JOB, EPOCH, (0, 1), BINARY)
    worker = GoldenWorker(PARAMS, config, 0, 2)
    worker.submit(np.zeros((1, 10 * PARAMS.line_bytes), np.uint8), 10)  # five chunks, two slots
    assert [Header.unpack(frame).chunk for frame in worker.outgoing()] == [0, 1]
    assert worker.outgoing() == []
    assert [Header.unpack(frame).chunk for frame in worker.outgoing(again=True)] == [0, 1]


def test_stale_fails_the_bucket_and_all_resume_at_a_chunk_never_used():
    device = reducer()
    config = JobConfig(JOB, EPOCH, (0, 1), BINARY)
    slow = GoldenWorker(PARAMS, config, 0, 2)
    slow.submit(np.zeros((1, PARAMS.line_bytes), np.uint8), 1)
    device.receive(contribution(1, 4))
    for frame in slow.outgoing():
        device.receive(frame)
    (nack,) = device.poll()
    with pytest.raises(BucketFailedError, match="gone past chunk 0"):
        slow.receive(nack.payload)
    slow.resume(8)
    assert slow.next_chunk == 8


def test_a_worker_ignores_what_is_not_for_it():
    device = reducer()
    config = JobConfig(JOB, EPOCH, (0, 1), BINARY)
    worker = GoldenWorker(PARAMS, config, 0, 2, reducer="reducer")
    worker.submit(np.zeros((1, PARAMS.line_bytes), np.uint8), 1)
    for frame in worker.outgoing():
        device.receive(frame)
    device.receive(contribution(1, 0, b"\x01"))
    frames = [out.payload for out in device.poll()]
    worker.receive(frames[0], "somebody")
    worker.receive(frames[0][:-1], "reducer")
    worker.receive(frames[0][:20] + b"\0\0" + frames[0][22:], "reducer")
    worker.receive(b"", "reducer")
    assert worker.counters["ignored"] == 4
    assert not worker.done
    for frame in frames:
        worker.receive(frame, "reducer")
    assert worker.done
