"""The emulator as a whole: behind its socket, under faults, under attack, and as a process."""

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from neuron_fabric.model import (
    BINARY,
    TERNARY,
    FrameType,
    GoldenWorker,
    Header,
    JobConfig,
    ReducerParams,
    SignCountReducer,
)
from neuron_fabric.model.control import Close, Grant, JobState, Open, StatusReply, StatusRequest, control_frame
from neuron_fabric.model.wire import HEADER_BYTES, Reason
from neuron_fabric.runtime.emulator import kernels
from neuron_fabric.runtime.emulator.cli import main
from neuron_fabric.runtime.emulator.controller import ControllerLimits
from neuron_fabric.runtime.emulator.datagrams import DatagramSocket, UdpAddress, is_loopback
from neuron_fabric.runtime.emulator.engine import Engine, engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan, Faults
from neuron_fabric.runtime.emulator.kernels import Frame, Message
from neuron_fabric.runtime.emulator.server import EmulatorServer

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
HOSTILE = int(os.environ.get("NEURON_FABRIC_FUZZ", "100000"))
ANY = UdpAddress.parse("udp://127.0.0.1:0")
PATIENCE = 20.0  # seconds until a test gives up; nothing here takes one
SMALL = engine_params(workers=4, slots=8, lines=2, jobs=2)


def table(frames):
    """Frames, (bytes, peer), as one buffer and its rows."""
    rows, at = [], 0
    for data, peer in frames:
        rows.append((at, len(data), peer, 1))
        at += len(data)
    return np.frombuffer(b"".join(data for data, _peer in frames), np.uint8).copy(), np.array(rows, np.int64)


# -------------------------------------------------------------------------------------------------------------- attack

JOB, EPOCH, STRANGER = 7, 5, 99


def hostile(rng, members, lines):
    """A datagram and its sender, of which nothing may come."""
    worker = rng.choice(list(members))
    fields = {
        "type": rng.choice([FrameType.CONTRIBUTE, FrameType.CONTRIBUTE, FrameType.ABSTAIN]),
        "job": JOB,
        "worker": worker,
        "chunk": rng.randrange(16),
        "lines": lines,
        "epoch": EPOCH,
    }
    peer = members[worker]
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)), rng.choice([peer, STRANGER])
    if kind == 1:
        fields["job"] = rng.choice([0, 6, 8, 9, 0xFFFF])
    elif kind == 2:
        peer = rng.choice([STRANGER, *(address for other, address in members.items() if other != worker)])
    elif kind == 3:
        fields["epoch"] = rng.choice([EPOCH - 1, EPOCH - 1, EPOCH + 1, 0])
    elif kind == 4:
        fields["type"] = rng.choice([FrameType.RESULT, FrameType.NACK, FrameType.GRANT])
    elif kind == 5:
        fields["worker"] = rng.choice([w for w in range(70) if w not in members])
    elif kind == 6:
        fields |= {"type": FrameType.CONTRIBUTE, "voters": rng.choice([0, 2, 0xFFFF])}
    elif kind == 7:
        fields |= rng.choice([{"plane": 1}, {"planes": 2}, {"planes": 0}, {"plane": 255}])
    elif kind == 8:
        fields["lines"] = rng.choice([0, lines + 1, 255])
    size = 0 if fields["type"] is FrameType.ABSTAIN else fields["lines"] * 64
    frame = Header(**fields).pack() + rng.randbytes(size)
    if kind == 9:  # truncated, or with something behind it
        frame = frame[: rng.randrange(len(frame))] if rng.random() < 0.7 else frame + rng.randbytes(rng.randint(1, 64))
    return frame, peer


def test_hostile_datagrams_change_nothing(record_property):
    """Half-filled chunks, and NEURON_FABRIC_FUZZ datagrams (100,000) of a fixed seed: no bit of a tally changes."""
    print(f"NEURON_FABRIC_SEED={SEED}, NEURON_FABRIC_FUZZ={HOSTILE}")
    rng = random.Random(SEED)
    engine = Engine(SMALL)
    members = {0: 1000, 1: 1001, 3: 1003}
    engine.open(JobConfig(JOB, EPOCH - 1, members, BINARY, multicast=False, slots=4))
    engine.open(JobConfig(JOB, EPOCH, members, BINARY, multicast=False, slots=4))
    engine.open(JobConfig(9, 1, {0: 5000}, TERNARY, multicast=False, base=4, slots=4))
    bodies = {worker: rng.randbytes(128) for worker in members}
    begun = [
        (
            Header(FrameType.CONTRIBUTE, JOB, worker, chunk, lines=2, epoch=EPOCH).pack() + bodies[worker],
            members[worker],
        )
        for chunk in range(16)
        for worker in members
        if (chunk + worker) % 3
    ]
    engine.receive(*table(begun[:6]))
    while engine.due:
        engine.emit()
    state = engine._state
    kept = [array.copy() for array in (state.versions, state.seen, state.pending, state.tally)]
    before = engine.counters()
    done = 0
    while done < HOSTILE:
        frames = [hostile(rng, members, 2) for _ in range(min(1000, HOSTILE - done))]
        control = engine.receive(*table(frames))
        assert all(frames[row][0][2] & 0xF in (4, 6, 7) for row in control)
        done += len(frames) - len(control)
        while engine.due:
            out, rows = engine.emit()
            for at, size, peer, _good in rows.tolist():
                assert Header.unpack(out[at : at + size]).type is FrameType.NACK
                assert peer in members.values()
    counters = engine.counters()
    refused = {name: counters[name] - before[name] for name in counters if name.startswith("refused_")}
    assert sum(refused.values()) == counters["frames"] - before["frames"] == HOSTILE
    assert all(refused[f"refused_{name}"] for name in ("bad_magic", "bad_length", "wrong_epoch", "wrong_sender"))
    for array, copy in zip((state.versions, state.seen, state.pending, state.tally), kept, strict=True):
        assert np.array_equal(array, copy)
    record_property("hostile datagrams", HOSTILE)


def test_hostile_datagrams_at_the_socket_leave_the_emulator_at_work():
    rng = random.Random(SEED)
    with EmulatorServer(ANY, SMALL) as server, Group(server, 2) as group:
        group.open()
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for number in range(3000):
            data, _peer = hostile(rng, {0: 0, 1: 1}, 2)
            if number % 3 == 0:
                data = b"NF" + bytes([0x14 + number % 4]) + data[3:]
            stranger.sendto(data, group.address)
            if number % 100 == 99:
                group.status()  # so that the socket's buffer never overflows
        stranger.close()
        group.check(rng, lines=40)
        assert server.engine.counters()["frames"] > 1500


# ------------------------------------------------------------------------------------------------------------- workers


class Group:
    """All workers of a job, with a socket each, over the model's worker."""

    def __init__(self, server, world, *, job=3, encoding=BINARY, **terms):
        self.address = str(server.address.host), server.address.port
        self.world, self.job, self.encoding, self.terms = world, job, encoding, terms
        self.params = server.engine.params
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(world)]
        for one in self.sockets:
            one.connect(self.address)
            one.settimeout(0.05)
        self.epoch = self.opened = 0
        self.resent = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.sockets:
            one.close()

    def ask(self, worker, payload, kind, *, epoch=0, accept=lambda header, body: True):
        """Send a control frame until it is answered."""
        frame = control_frame(payload, job=self.job, worker=worker, epoch=epoch)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.sockets[worker].send(frame)
            try:
                data = self.sockets[worker].recv(2048)
                header = Header.unpack(data)
            except (TimeoutError, ConnectionError, ValueError):
                continue
            if header.type is kind and accept(header, data[HEADER_BYTES:]):
                return header, data[HEADER_BYTES:]
        raise AssertionError(f"worker {worker} was not answered")

    def open(self):
        """Open the job; the epoch."""
        self.opened += 1
        wants = [
            Open(
                self.world,
                nonce=100 * self.opened + worker,
                encoding=int(self.encoding is TERNARY),
                lines_per_chunk=self.params.lines_per_chunk,
                slots=4,
                **self.terms,
            )
            for worker in range(self.world)
        ]
        for worker in (*range(self.world - 1), *range(self.world - 1)):  # all have come once before any waits
            self.sockets[worker].send(control_frame(wants[worker], job=self.job, worker=worker, epoch=self.epoch))
        grants = [
            self.ask(
                worker,
                wants[worker],
                FrameType.GRANT,
                epoch=self.epoch,
                accept=lambda header, body, worker=worker: (
                    header.reason == 0 and Grant.unpack(body).nonce == wants[worker].nonce
                ),
            )
            for worker in reversed(range(self.world))
        ]
        (self.epoch,) = {header.epoch for header, _body in grants}
        grant = Grant.unpack(grants[0][1])
        config = JobConfig(
            self.job,
            self.epoch,
            range(self.world),
            self.encoding,
            "majority" if self.terms.get("result_format") else "tally",
            self.terms.get("margin", 0),
            multicast=False,
            slots=grant.slots,
        )
        self.config = config
        self.workers = [GoldenWorker(self.params, config, w, grant.result_planes) for w in range(self.world)]
        return self.epoch

    def status(self, worker=0):
        cookie = random.getrandbits(64)
        _header, body = self.ask(
            worker, StatusRequest(cookie), FrameType.STATUS, accept=lambda _header, body: len(body) > 20
        )
        return StatusReply.unpack(body)

    def reduce(self, planes):
        """One bucket, sent again until everybody has it."""
        lines = planes.shape[2] // self.params.line_bytes
        for worker, mine in zip(self.workers, planes, strict=True):
            worker.submit(mine, lines)
        end, again = time.monotonic() + PATIENCE, False
        while not all(worker.done for worker in self.workers):
            assert time.monotonic() < end, "the bucket was not finished"
            for worker, own in zip(self.workers, self.sockets, strict=True):
                for frame in worker.outgoing(again=again):
                    own.send(frame)
                    self.resent += again
            readable, _, _ = select.select(self.sockets, [], [], 0.02)
            again = not readable
            for own in readable:
                worker = self.workers[self.sockets.index(own)]
                worker.receive(own.recv(65536))
        return [worker.result() for worker in self.workers]

    def check(self, rng, lines):
        """One bucket of random planes; every worker's result is that of the golden model."""
        shape = (self.world, self.encoding.planes, lines * self.params.line_bytes)
        planes = np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
        golden = SignCountReducer(self.params)
        golden.open(self.config)
        alone = [
            GoldenWorker(self.params, self.config, w, self.workers[w]._result_planes, first_chunk=worker.next_chunk)
            for w, worker in enumerate(self.workers)
        ]
        for worker, mine in zip(alone, planes, strict=True):
            worker.submit(mine, lines)
        while not all(worker.done for worker in alone):
            for worker in alone:
                for frame in worker.outgoing():
                    golden.receive(frame)
            for frame in golden.poll():
                alone[frame.header.worker].receive(frame.payload)
        for mine, wanted in zip(self.reduce(planes), alone, strict=True):
            assert np.array_equal(mine.planes, wanted.result().planes)
            assert np.array_equal(mine.voters, wanted.result().voters)

    def close(self):
        for worker in range(self.world):
            self.ask(worker, Close(100 * self.opened + worker), FrameType.CLOSE, epoch=self.epoch)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize(
    ("encoding", "terms"),
    [(BINARY, {}), (TERNARY, {}), (BINARY, {"result_format": 1, "margin": 1}), (TERNARY, {"result_format": 1})],
)
def test_buckets_through_the_socket(encoding, terms, offload):
    rng = random.Random(SEED)
    with EmulatorServer(ANY, SMALL, offload=offload) as server:
        with Group(server, 3, encoding=encoding, **terms) as group:
            assert group.open() == 1
            for lines in (1, 2, 17, 40):
                group.check(rng, lines)
            assert group.status().state is JobState.OPEN
            group.close()
            assert group.open() == 2
            group.check(rng, 5)
        if not offload:
            assert not any(server.offload.values())


def test_two_jobs_at_once():
    rng = random.Random(SEED)
    with EmulatorServer(ANY, SMALL) as server, Group(server, 2, job=1) as one, Group(server, 4, job=2) as two:
        one.open()
        two.open()
        for _ in range(4):
            one.check(rng, 9)
            two.check(rng, 9)
        reply = one.status()
        assert (reply.jobs_used, reply.jobs_total, reply.slots_used) == (2, 2, 8)
        assert reply.counters["completed"] == 2 * 4 * 5


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_faults_cost_time_and_no_bit(seed):
    print(f"NEURON_FABRIC_SEED={seed}")
    plan = FaultPlan.parse("loss=0.05,duplicate=0.05,reorder=0.1,corrupt=0.05")
    rng = random.Random(seed)
    with EmulatorServer(ANY, SMALL, faults=plan, fault_seed=seed) as server:
        with Group(server, 3, encoding=TERNARY) as group:
            group.open()
            for _ in range(6):
                group.check(rng, 40)
            assert group.resent
        for faults in (server.inbound, server.outbound):
            assert all(faults.counters[name] for name in ("loss", "duplicate", "reorder", "corrupt"))
        # A control frame that was damaged is refused as well, before anybody looks at it.
        assert server.engine.counters()["refused_bad_checksum"] >= 0.9 * server.inbound.counters["corrupt"]


def test_a_delay_is_kept():
    with EmulatorServer(ANY, SMALL, faults=FaultPlan(delay=0.02)) as server, Group(server, 2) as group:
        group.open()
        began = time.monotonic()
        group.status()
        assert time.monotonic() - began >= 0.04  # each way
        group.check(random.Random(SEED), 4)


def test_a_restart_is_seen_and_the_epoch_goes_on():
    with contextlib.ExitStack() as running:
        first = running.enter_context(EmulatorServer(ANY, SMALL))
        with Group(first, 2) as group:
            group.open()
            group.check(random.Random(SEED), 4)
            nonce = group.status().uptime_nonce
            running.close()
            with EmulatorServer(first.address, SMALL):
                reply = group.status()
                assert reply.uptime_nonce != nonce
                assert reply.state is JobState.NONE
                assert group.open() == 2
                group.check(random.Random(SEED), 4)


def test_a_job_that_nobody_uses_is_closed_in_time():
    with EmulatorServer(ANY, SMALL, limits=ControllerLimits(idle=0.1)) as server, Group(server, 2) as group:
        group.open()
        end = time.monotonic() + PATIENCE
        while server.controller.jobs and time.monotonic() < end:
            select.select([], [], [], 0.02)
        assert server.controller.events["idle"] == 1
        assert group.open() == 2


# ---------------------------------------------------------------------------------------------------------------- parts


def test_a_send_of_many_arrives_as_many():
    """What one side sends in one call the other receives as the same frames, with or without the kernel's help."""
    for offloads in ((True, True), (True, False), (False, True)):
        one, two = (DatagramSocket(ANY, offload=offload) for offload in offloads)
        peer = int(two.address.host) << 16 | two.address.port
        sizes = [1046] * 70 + [500] + [22] * 3
        data = np.frombuffer(random.Random(SEED).randbytes(sum(sizes)), np.uint8).copy()
        rows = np.array([(sum(sizes[:k]), size, peer, 1) for k, size in enumerate(sizes)], np.int64)
        messages = np.zeros_like(rows)
        count = kernels.coalesce(rows, messages)
        assert count < 5
        assert one.send(data.data, messages[:count]) == (count, 0)
        got, frames = [], np.zeros((200, len(Frame)), np.int64)
        end = time.monotonic() + PATIENCE
        while len(got) < len(sizes) and time.monotonic() < end:
            select.select([two.socket], [], [], 1)
            number, lost = kernels.split(two.receive(), frames)
            assert not lost
            for at, size, sender, _good in frames[:number].tolist():
                assert sender == int(one.address.host) << 16 | one.address.port
                got.append(two.data[at : at + size].tobytes())
        assert got == [data[at : at + size].tobytes() for at, size, _peer, _good in rows.tolist()]
        one.close()
        two.close()


def test_what_the_system_refuses_to_send_is_counted():
    own = DatagramSocket(ANY)
    messages = np.zeros((2, len(Message)), np.int64)
    messages[:, Message.LENGTH] = messages[:, Message.SEGMENT] = 10
    messages[0, Message.PEER] = (255 << 40) + (255 << 32) + (255 << 24) + (255 << 16) + 9  # broadcast is not allowed
    messages[1, Message.PEER] = (127 << 40) + (1 << 16) + own.address.port
    assert own.send(np.zeros(10, np.uint8).data, messages) == (2, 1)
    own.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("tcp://127.0.0.1:1", "it must be udp://address:port"),
        ("udp://127.0.0.1", "it must be udp://address:port"),
        ("udp://127.0.0.1:99999", "Port out of range"),
        ("udp://example.org:9", "'example.org' is no IPv4 address"),
        ("udp://[::1]:9", "'::1' is no IPv4 address"),
        ("udp://127.0.0.1:9/x", "it must be udp://address:port"),
    ],
)
def test_an_address_that_is_none_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        UdpAddress.parse(url)


def test_other_machines_are_not_let_in_by_accident():
    with pytest.raises(ValueError, match="can be reached from other machines"):
        EmulatorServer(UdpAddress.parse("udp://0.0.0.0:0"))
    server = EmulatorServer(UdpAddress.parse("udp://0.0.0.0:0"), SMALL, allow_remote=True)
    server.stop()
    server.serve()
    assert is_loopback(int(ANY.host) << 16 | 5)
    assert not is_loopback(10 << 40 | 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lost=0.1", "unknown fault 'lost'; there are loss, duplicate, reorder, corrupt, delay, crash"),
        ("loss=0.1,loss=0.2", "fault loss is given twice"),
        ("loss=much", "fault loss must be a number, not 'much'"),
        ("loss=1.5", "fault loss is a probability, 0 to 1, not 1.5"),
        ("loss=nan", "fault loss is a probability"),
        ("delay=60", "fault delay is 0 to 10 seconds"),
        ("crash=2.5", "fault crash must be a number"),
        ("crash=-1", "fault crash is a number of frames"),
    ],
)
def test_a_fault_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        FaultPlan.parse(text)


def passed(faults, batches, size=40, count=50):
    """What comes out of equal batches, each frame as its bytes and whether its checksum holds."""
    result = []
    for number in range(batches):
        frames = [((number * count + k).to_bytes(4, "big") * (size // 4), k) for k in range(count)]
        data, rows = faults.apply(*table(frames), float(number))
        result += [(data[at : at + n].tobytes(), bool(good)) for at, n, _peer, good in rows.tolist()]
    data, rows = faults.apply(np.zeros(0, np.uint8), np.zeros((0, len(Frame)), np.int64), 1e9)
    return result + [(data[at : at + n].tobytes(), bool(good)) for at, n, _peer, good in rows.tolist()]


def test_no_fault_is_no_change():
    out = passed(Faults(FaultPlan(), 1, inbound=True), 3)
    assert [int.from_bytes(data[:4], "big") for data, good in out if good] == list(range(150))


def test_faults_repeat_with_their_seed():
    plan = FaultPlan.parse("loss=0.1,duplicate=0.1,reorder=0.1,corrupt=0.1")
    first, again, other = (passed(Faults(plan, seed, inbound=True), 40) for seed in (5, 5, 6))
    assert first == again != other


def test_each_fault_does_what_it_says():
    lost = passed(Faults(FaultPlan(loss=0.2), 1, inbound=True), 40)
    assert 1450 < len(lost) < 1750
    twice = Counter(passed(Faults(FaultPlan(duplicate=0.2), 1, inbound=True), 40))
    assert set(twice.values()) == {1, 2}
    assert len(twice) == 2000
    late = [
        int.from_bytes(data[:4], "big") for data, _good in passed(Faults(FaultPlan(reorder=0.2), 1, inbound=True), 40)
    ]
    assert late != sorted(late)
    assert sorted(late) == list(range(2000))
    faults = Faults(FaultPlan(corrupt=0.2), 1, inbound=True)
    damaged = [data for data, good in passed(faults, 40) if not good]
    assert len(damaged) == faults.counters["corrupt"] > 300
    assert not any(data == data[:4] * 10 for data in damaged)
    delayed = Faults(FaultPlan(delay=0.5), 1, inbound=True)
    frame = table([(b"abcd", 1)])
    assert len(delayed.apply(*frame, 0.0)[1]) == 0
    assert delayed.wake == 0.5
    frame[0][:] = 0  # the buffer is used again
    data, rows = delayed.apply(frame[0], frame[1][:0], 0.5)
    assert data[rows[0, 0] : rows[0, 0] + rows[0, 1]].tobytes() == b"abcd"
    assert delayed.wake is None


def test_damage_on_the_way_out_can_be_seen_by_who_checks():
    params = ReducerParams(slots=2, jobs=1)
    frame = Header(FrameType.RESULT, 1, 0, 0, lines=16).pack() + bytes(1024)
    faults = Faults(FaultPlan(corrupt=1), 1, inbound=False)
    for _ in range(300):
        data, rows = faults.apply(*table([(frame, 1)]), 0.0)
        ((at, size, _peer, _good),) = rows.tolist()
        damaged = data[at : at + size].tobytes()
        reason = SignCountReducer(params).receive(damaged)
        assert reason in (Reason.BAD_MAGIC, Reason.BAD_VERSION, Reason.BAD_LENGTH, Reason.BAD_TYPE)
        assert len(damaged) < len(frame) or reason is not Reason.BAD_TYPE


def test_what_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr("neuron_fabric.runtime.emulator.faults._MOST_HELD", 10)
    faults = Faults(FaultPlan(reorder=1), 1, inbound=True)
    faults.apply(*table([(b"abcd", 1)] * 25), 0.0)
    assert faults.counters["held_dropped"] == 15


# -------------------------------------------------------------------------------------------------------------- process


@pytest.fixture
def process(tmp_path):
    """Start ``neuron-fabric emulate`` with options; the process, its address, the metrics file, its first line."""
    started = []

    def start(*options):
        metrics = tmp_path / "metrics.prom"
        command = [sys.executable, "-m", "neuron_fabric.runtime.emulator.cli", "--listen", "udp://127.0.0.1:0"]
        command += ["--metrics", str(metrics), "--slots", "8", "--lines", "2", "--workers", "4", *options]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(child)
        line = child.stdout.readline()
        assert line.startswith("listening on udp://127.0.0.1:"), child.communicate()
        return child, UdpAddress.parse(line.split()[2].rstrip(":")), metrics, line

    yield start
    for child in started:
        child.kill()
        child.communicate()


class At:
    """What a Group needs of a server that is elsewhere."""

    def __init__(self, address):
        self.address = address
        self.engine = Engine(SMALL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_serves_and_stops_in_peace(process, number):
    child, address, metrics, _line = process()
    with Group(At(address), 2) as group:
        group.open()
        group.check(random.Random(SEED), 10)
    child.send_signal(number)
    out, errors = child.communicate(timeout=PATIENCE)
    assert (child.returncode, errors) == (0, "")
    assert "5 chunks, 10 results" in out
    text = metrics.read_text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["neuron_fabric_reducer_completed_total"] == "5"
    assert values['neuron_fabric_reducer_controller_events_total{kind="granted"}'] == "1"
    assert values["neuron_fabric_reducer_jobs_open"] == "0"
    assert text.count("# TYPE") == text.count("# HELP")


def test_a_crash_is_one(process):
    child, address, _metrics, line = process("--fault", "crash=20", "--fault-seed", "3")
    assert "faults on purpose: crash=20, seed 3" in line
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.connect((str(address.host), address.port))
    for _ in range(25):
        try:
            own.send(b"nonsense")
        except ConnectionRefusedError:
            break
    out, _errors = child.communicate(timeout=PATIENCE)
    own.close()
    assert child.returncode == 70
    assert "stopped" not in out


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--listen", "udp://0.0.0.0:0"], 2, "can be reached from other machines"),
        (["--fault", "gremlins=1"], 2, "unknown fault 'gremlins'"),
        (["--slots", "5"], 2, "slots must be a power of two"),
        (["--quota", "5"], 2, "quota must be a power of two"),
        (["--listen", "udp://127.0.0.1:0", "--metrics", "/nowhere/at/all"], 1, "No such file or directory"),
        (["--listen", "udp://192.0.2.1:9", "--allow-remote"], 1, "Cannot assign requested address"),
    ],
)
def test_what_cannot_be_started_says_why(capsys, options, status, message):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == status
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1
