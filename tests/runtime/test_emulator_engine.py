"""The emulator's engine against the golden model: the same results, the same NACKs, the same counters."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_fabric.model import (
    BINARY,
    TERNARY,
    FrameType,
    Header,
    JobConfig,
    Parent,
    Reason,
    ReducerParams,
    SignCountReducer,
    Straggler,
    int_encoding,
)
from neuron_fabric.model.control import StatusRequest, control_frame
from neuron_fabric.model.wire import HEADER_BYTES
from neuron_fabric.runtime.emulator import kernels
from neuron_fabric.runtime.emulator.engine import Engine, engine_params
from neuron_fabric.runtime.emulator.kernels import Frame, Message

PARAMS = ReducerParams(lanes=64, lines_per_chunk=3, slots=8, workers=64, acc_bits=9, max_planes=4, jobs=3)


def table(frames):
    """Frames as one buffer and its rows; a frame is (bytes, peer) or (bytes, peer, checksum holds)."""
    rows, at = [], 0
    for data, peer, *good in frames:
        rows.append((at, len(data), peer, int(good[0]) if good else 1))
        at += len(data)
    return (
        np.frombuffer(b"".join(frame[0] for frame in frames) or b"\0", np.uint8).copy(),
        np.array(rows, np.int64).reshape(-1, len(Frame)),
    )


def sent(engine):
    """Everything that is due, as a multiset of (peer, bytes)."""
    result = Counter()
    while engine.due:
        out, rows = engine.emit()
        result += Counter((int(row[Frame.PEER]), out[row[0] : row[0] + row[1]].tobytes()) for row in rows)
    return result


def some_job(rng, number, base, slots):
    encoding = rng.choice([BINARY, BINARY, TERNARY, TERNARY, int_encoding(3)])
    world = rng.choice([1, 2, 2, 3, 5])
    workers = rng.sample(range(PARAMS.workers), world)
    majority = rng.random() < 0.4
    return JobConfig(
        number,
        rng.randint(1, 3),
        {worker: 1000 * number + worker for worker in workers},
        encoding,
        "majority" if majority else "tally",
        rng.choice([0, 0, 1, 2, 40]) if majority else 0,
        multicast=False,
        base=base,
        slots=slots,
    )


def some_frame(rng, jobs, first):
    """A frame near where a job is, right or not quite."""
    job = rng.choice(jobs)
    planes = job.encoding.planes
    worker = rng.choice([*job.members, *job.members, *job.members, rng.randrange(80)])
    peer = job.members.get(worker, 7)
    fields = {
        "job": job.job,
        "worker": worker,
        "chunk": (first + rng.randrange(3 * job.slots + 1)) % (1 << 32),
        "plane": rng.randrange(planes),
        "planes": planes,
        "voters": 1,
        "lines": rng.choice([2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 1]),
        "epoch": job.epoch,
    }
    kind = rng.choices([FrameType.CONTRIBUTE, FrameType.ABSTAIN], [8, 1])[0]
    if kind is FrameType.ABSTAIN:
        fields |= {"plane": 0, "voters": 0}
    size = 0 if kind is FrameType.ABSTAIN else fields["lines"] * PARAMS.line_bytes
    good = True
    trouble = rng.randrange(60)
    if trouble == 0:
        fields["epoch"] += rng.choice([-1, 1])
    elif trouble == 1:
        fields["plane"] = rng.randrange(256)
    elif trouble == 2:
        fields["planes"] = rng.randrange(256)
    elif trouble == 3:
        fields["voters"] = rng.choice([0, 2, 0xFFFF])
    elif trouble == 4:
        fields["lines"] = rng.randrange(256)
        size = rng.choice([size, fields["lines"] * PARAMS.line_bytes])
    elif trouble == 5:
        size += rng.choice([-1, 1]) if size else 1
    elif trouble == 6:
        fields["job"] = rng.randrange(1 << 16)
    elif trouble == 7:
        kind = rng.choice([FrameType.RESULT, FrameType.NACK, FrameType.GRANT])
    elif trouble == 8:
        peer = rng.choice([0, 7, 1 << 50])
    elif trouble == 9:
        good = False
    elif trouble == 10:
        fields["chunk"] = rng.getrandbits(32)
    elif trouble == 11:
        fields |= {"flags": rng.randrange(256), "missing": rng.randrange(1 << 16), "reason": rng.randrange(256)}
    data = Header(kind, **fields).pack() + rng.randbytes(max(size, 0))
    if trouble == 12:
        data = rng.randbytes(rng.randrange(80))
    elif trouble == 13:
        data = data[: rng.randrange(HEADER_BYTES + 1)]
    elif trouble == 14:
        at = rng.randrange(3)
        data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data, peer, good


def is_control(frame):
    return frame[2] and len(frame[0]) >= HEADER_BYTES and frame[0][:2] == b"NF" and frame[0][2] in (0x14, 0x16, 0x17)


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_results_and_counters_are_those_of_the_golden_model(seed):
    rng = random.Random(seed)
    engine, golden = Engine(PARAMS, nack_queue=5), SignCountReducer(PARAMS, nack_queue=5)
    first = rng.choice([0, 5, (1 << 32) - 6, (1 << 31) - 3])
    places = rng.choice([[(0, 4), (4, 2), (6, 1)], [(4, 4), (2, 1), (0, 2)]])
    jobs = [some_job(rng, number, *place) for number, place in enumerate(places, start=1)]
    for job in jobs:
        engine.open(job)
        golden.open(job)
    for _batch in range(rng.randint(1, 25)):
        frames = [
            frame
            for frame in (some_frame(rng, jobs, first) for _ in range(rng.randint(0, 40)))
            if not is_control(frame)
        ]
        data, rows = table(frames)
        assert not engine.receive(data, rows).size
        for payload, peer, good in frames:
            golden.receive(payload, peer, checksum_ok=good)
        if rng.random() < 0.7:
            assert sent(engine) == Counter((frame.address, frame.payload) for frame in golden.poll())
        if rng.random() < 0.1:
            index = rng.randrange(len(jobs))
            golden.close(jobs[index].job)
            engine.close(jobs[index].job)
            if rng.random() < 0.7:
                epoch = jobs[index].epoch + 1
                again = some_job(rng, jobs[index].job, *places[index])
                jobs[index] = JobConfig(**{**vars(again), "epoch": epoch})
                golden.open(jobs[index])
                engine.open(jobs[index])
        first = (first + rng.choice([0, 0, 0, 1, 4])) % (1 << 32)
    assert sent(engine) == Counter((frame.address, frame.payload) for frame in golden.poll())
    counters = engine.counters()
    assert {name: value for name, value in counters.items() if value} == +golden.counters


@pytest.mark.parametrize("world", [1, 2, 7, 63, 64])
@pytest.mark.parametrize("encoding", [BINARY, TERNARY])
@pytest.mark.parametrize("majority", [False, True])
def test_large_worlds_with_full_chunks(world, encoding, majority):
    """Every tally up to the widest there is, with lines of the real width."""
    rng = np.random.default_rng(world)
    params = engine_params(slots=2, jobs=1)
    config = JobConfig(
        1,
        1,
        {worker: worker for worker in range(world)},
        encoding,
        "majority" if majority else "tally",
        int(majority),
        multicast=False,
    )
    engine, golden = Engine(params), SignCountReducer(params)
    engine.open(config)
    golden.open(config)
    lines = params.lines_per_chunk
    bias = rng.random(lines * 64)  # so that some elements are unanimous
    frames = []
    for worker in range(world):
        for plane in range(encoding.planes):
            header = Header(FrameType.CONTRIBUTE, 1, worker, 5, plane, encoding.planes, lines=lines, epoch=1)
            body = np.where(rng.random(lines * 64) < bias, 0, 255) if worker else rng.integers(0, 256, lines * 64)
            frames.append((header.pack() + body.astype(np.uint8).tobytes(), worker))
    engine.receive(*table(frames))
    for payload, peer in frames:
        golden.receive(payload, peer)
    assert sent(engine) == Counter((frame.address, frame.payload) for frame in golden.poll())


def test_frames_for_the_controller_are_handed_out_and_not_counted():
    engine = Engine(PARAMS)
    status = control_frame(StatusRequest(5), job=1, worker=0)
    frames = [(b"nonsense", 1), (status, 2), (status + bytes(1000), 2), (status, 3, False), (status, 4)]
    assert engine.receive(*table(frames)).tolist() == [1, 4]
    counters = engine.counters()
    assert (counters["frames"], counters["refused_bad_checksum"], counters["refused_bad_length"]) == (2, 1, 1)
    assert engine.control_dropped == 1


def test_what_does_not_fit_the_output_stays_due():
    """Two workers, 8 chunks, and room for one chunk's frames only."""
    params = ReducerParams(lanes=64, lines_per_chunk=1, slots=8, workers=2, acc_bits=2)
    engine = Engine(params)
    engine._out, engine._frames = engine._out[:180], engine._frames[:5]
    engine.open(JobConfig(1, 1, {0: 10, 1: 11}, BINARY, multicast=False))
    frames = [
        (Header(FrameType.CONTRIBUTE, 1, worker, chunk, epoch=1).pack() + bytes(8), 10 + worker)
        for chunk in range(8)
        for worker in (0, 1)
    ]
    engine.receive(*table(frames))
    calls = 0
    chunks = Counter()
    while engine.due:
        out, rows = engine.emit()
        assert len(rows) == 4
        chunks.update(Header.unpack(out[row[0] : row[0] + row[1]]).chunk for row in rows)
        calls += 1
    assert calls == 8
    assert chunks == dict.fromkeys(range(8), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multicast": True}, "sends results to each member"),
        ({"straggler": Straggler(5, 1)}, "has no straggler rule"),
        ({"parent": Parent(1, 2, 3, 4, 5)}, "has no trees"),
        ({"members": {0: "here"}}, "address of worker 0 must be an integer, not 'here'"),
        ({"members": {70: 1}}, "worker 70 is out of range"),
        ({"slots": 3}, "slots must be a power of two"),
    ],
)
def test_a_job_that_the_engine_cannot_run_is_refused_by_name(change, message):
    settings = {"job": 1, "epoch": 1, "members": {0: 1}, "encoding": BINARY, "multicast": False}
    with pytest.raises(ValueError, match=message):
        Engine(PARAMS).open(JobConfig(**settings | change))


@pytest.mark.parametrize("row", [(0, 9, 1, 1), (-1, 3, 1, 1), (8, 1, 1, 1), (2, -1, 1, 1)])
def test_a_row_outside_of_the_buffer_is_refused(row):
    with pytest.raises(ValueError, match="not within the buffer"):
        Engine(PARAMS).receive(np.zeros(8, np.uint8), np.array([row], np.int64))


def test_buffers_are_split_into_frames():
    datagrams = np.array([(0, 10, 4, 1), (100, 0, 0, 2), (200, 7, 0, 3), (300, 8, 4, 4)], np.int64)
    frames = np.zeros((9, len(Frame)), np.int64)
    number, lost = kernels.split(datagrams, frames)
    wanted = [(0, 4, 1), (4, 4, 1), (8, 2, 1), (100, 0, 2), (200, 7, 3), (300, 4, 4), (304, 4, 4)]
    assert [tuple(row[:3]) for row in frames[:number].tolist()] == wanted
    assert lost == 0
    assert kernels.split(datagrams, frames[:3]) == (3, 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1046, 1046, 1046, 30, 0]), st.booleans()), max_size=300))
def test_messages_are_runs_that_one_call_can_send(rows):
    at, frames = 0, []
    for peer, size, gap in rows:
        at += 5 * gap
        frames.append((at, size, peer, 1))
        at += size
    array = np.array(frames, np.int64).reshape(-1, len(Frame))
    messages = np.zeros_like(array)
    found = messages[: kernels.coalesce(array, messages)]
    again = []
    for offset, length, peer, segment in found[
        :, [Message.OFFSET, Message.LENGTH, Message.PEER, Message.SEGMENT]
    ].tolist():
        assert length <= 65507
        assert length <= kernels.MAX_SEGMENTS * segment
        again += [(k, min(segment, offset + length - k), peer, 1) for k in range(offset, offset + length, segment or 1)]
        again += [(offset, 0, peer, 1)] * (not length)
    assert again == frames
    assert len(found) <= max(1, len(frames))


def test_memory_is_taken_once():
    engine = Engine(engine_params())
    before = engine.bytes
    assert before < 16 << 20
    for epoch in range(1, 4):
        engine.open(JobConfig(1, epoch, {0: 1}, BINARY, multicast=False, slots=1))
        frame = Header(FrameType.CONTRIBUTE, 1, 0, 0, epoch=epoch).pack() + bytes(64)
        engine.receive(*table([(frame, 1)] * 1000))
        assert sum(sent(engine).values()) == 1
    assert engine.counters()["duplicates"] == 3 * 999
    assert engine.bytes == before
    assert Reason.NONE == 0
