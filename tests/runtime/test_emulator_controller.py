"""Who may use a reducer: openings, refusals, epochs, slots, and the same controller over registers."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model import BINARY, TERNARY, JobConfig, ReducerParams
from neuron_fabric.model.control import (
    OPEN_FIELDS,
    Close,
    Grant,
    JobState,
    Open,
    StatusReply,
    StatusRequest,
    control_frame,
)
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.registerfile import RegisterFile, Response
from neuron_fabric.model.registers import words
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, Reason
from neuron_fabric.runtime.emulator.controller import Controller, ControllerLimits
from neuron_fabric.runtime.emulator.csr import CsrDevice, DeviceError
from neuron_fabric.runtime.emulator.slots import SlotRanges

PARAMS = ReducerParams(slots=16, workers=8, acc_bits=4, jobs=2)


class Device:
    """Remembers what it was told; refuses whatever ``refuse`` says."""

    multicast = False

    def __init__(self, params=PARAMS):
        self.params = params
        self.open_jobs = {}
        self.active = Counter()
        self.log = []
        self.refuse = None

    def open(self, config):
        if self.refuse:
            raise ValueError(self.refuse)
        self.open_jobs[config.job] = config
        self.log.append(("open", config.job, config.epoch))

    def close(self, job):
        self.open_jobs.pop(job)
        self.log.append(("close", job))

    def counters(self):
        return {"frames": 5, "lines": 0}

    def activity(self, job):
        return self.active[job]


class Client:
    """Sends control frames to a controller and reads what comes back."""

    def __init__(self, controller, job=1):
        self.controller, self.job, self.now = controller, job, 100.0

    def send(self, payload, worker, *, epoch=0, address=None):
        frame = control_frame(payload, job=self.job, worker=worker, epoch=epoch)
        replies = self.controller.receive(frame, address or f"at {worker}", self.now)
        return [(Header.unpack(reply), reply[HEADER_BYTES:], where) for reply, where in replies]

    def open(self, worker, nonce=None, *, epoch=0, address=None, **terms):
        wants = Open(**{"members": 2, "nonce": nonce if nonce is not None else worker, "slots": 4} | terms)
        return [
            (header, Grant.unpack(body), where)
            for header, body, where in self.send(wants, worker, epoch=epoch, address=address)
        ]

    def open_all(self, nonce=0, members=2, **terms):
        for worker in range(members):
            answers = self.open(worker, 100 * nonce + worker, members=members, **terms)
        return answers

    def reasons(self, answers):
        return [Reason(header.reason) for header, _grant, _where in answers]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def client(device):
    return Client(Controller(device))


def test_a_job_is_granted_when_all_members_have_come(client, device):
    ((header, grant, where),) = client.open(0, 7, next_chunk=5, epoch=3)
    assert (header.type, header.reason, grant.nonce, grant.present, where) == (
        FrameType.GRANT,
        Reason.NOT_READY,
        7,
        1,
        "at 0",
    )
    assert client.controller.state(1) is JobState.WAITING
    answers = client.open(1, 8, next_chunk=9)
    assert [where for _header, _grant, where in answers] == ["at 0", "at 1"]
    for worker, (header, grant, _where) in enumerate(answers):
        assert (header.job, header.worker, header.epoch, header.reason) == (1, worker, 4, 0)
        assert (grant.nonce, grant.slots, grant.lines_per_chunk, grant.first_chunk) == (7 + worker, 4, 16, 9)
        assert (grant.members, grant.result_planes, grant.max_workers, grant.acc_bits) == (2, 2, 8, 4)
        assert grant.encodings == 3
    assert device.open_jobs[1] == JobConfig(1, 4, {0: "at 0", 1: "at 1"}, BINARY, multicast=False, base=0, slots=4)


def test_the_others_are_waited_for_with_one_word_a_second(client):
    assert client.reasons(client.open(0)) == [Reason.NOT_READY]
    for step, wanted in ((0.4, []), (0.4, []), (0.4, [Reason.NOT_READY]), (0.4, [])):
        client.now += step
        assert client.reasons(client.open(0)) == wanted


def test_an_open_that_is_repeated_gets_the_same_grant_again(client, device):
    first = client.open_all()
    assert client.open(0) == first[:1]
    assert client.open(1) == first[1:]
    assert device.log == [("open", 1, 1)]


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"members": 3}, "members"),
        ({"encoding": 1}, "encoding"),
        ({"result_format": 1}, "result_format"),
        ({"result_format": 1, "margin": 2}, "result_format"),
        ({"lines_per_chunk": 8}, "lines_per_chunk"),
        ({"slots": 8}, "slots"),
    ],
)
def test_members_that_disagree_are_told_in_what(client, device, terms, field):
    client.open(0)
    ((header, grant, _where),) = client.open(1, **terms)
    assert (header.reason, grant.field) == (Reason.DISAGREES, field)
    ((header, grant, _where),) = client.open(0)
    assert (header.reason, grant.field) == (Reason.DISAGREES, field)
    assert len(client.open(1, 9)) == 2  # another try, which agrees
    assert device.log == [("open", 1, 1)]


@pytest.mark.parametrize(
    ("worker", "terms", "reason", "field"),
    [
        (0, {"members": 9}, Reason.NO_CAPACITY, "members"),
        (2, {"members": 2}, Reason.BAD_VALUE, "members"),
        (0, {"members": 8, "encoding": 1}, Reason.OVERFLOW, "members"),
        (0, {"result_format": 1, "margin": 16}, Reason.BAD_VALUE, "margin"),
    ],
)
def test_what_a_reducer_cannot_do_is_refused_at_once(client, worker, terms, reason, field):
    ((header, grant, _where),) = client.open(worker, **terms)
    assert (header.reason, grant.field) == (reason, field)
    assert client.controller.state(1) is JobState.NONE


def test_a_reducer_without_ternary_says_so():
    client = Client(Controller(Device(ReducerParams(slots=16, workers=2, acc_bits=4, max_planes=1))))
    ((header, grant, _where),) = client.open(0, encoding=1)
    assert (header.reason, grant.field, grant.encodings) == (Reason.BAD_VALUE, "encoding", 1)


def test_a_malformed_open_is_answered_with_the_field(client):
    frame = bytearray(control_frame(Open(2, 1), job=1, worker=0))
    frame[HEADER_BYTES + 1] = 7
    ((reply, where),) = client.controller.receive(bytes(frame), "x", 0.0)
    grant = Grant.unpack(reply[HEADER_BYTES:])
    assert (Header.unpack(reply).reason, grant.field, where) == (Reason.BAD_VALUE, "encoding", "x")


def test_the_first_chunk_is_the_newest_in_serial_numbers(client):
    client.open(0, next_chunk=(1 << 32) - 5)
    answers = client.open(1, next_chunk=3)
    assert {grant.first_chunk for _header, grant, _where in answers} == {3}


def test_another_nonce_from_all_reopens_and_from_one_waits(client, device):
    client.open_all()
    assert client.reasons(client.open(0, 50, address="elsewhere")) == [Reason.NOT_READY]
    assert client.controller.state(1) is JobState.REOPENING
    assert device.open_jobs[1].epoch == 1  # the old one goes on
    answers = client.open(1, 51)
    assert [where for _header, _grant, where in answers] == ["elsewhere", "at 1"]
    assert device.log == [("open", 1, 1), ("close", 1), ("open", 1, 2)]
    assert device.open_jobs[1].members == {0: "elsewhere", 1: "at 1"}


def test_a_late_copy_of_an_old_open_begins_nothing(client, device):
    client.open_all()
    client.open_all(1)
    client.send(Close(100), 0, epoch=2)
    client.send(Close(101), 1, epoch=2)
    for nonce in (0, 1):
        assert client.open_all(nonce) == []
    assert device.log == [("open", 1, 1), ("close", 1), ("open", 1, 2), ("close", 1)]
    assert client.controller.state(1) is JobState.NONE


def test_a_granted_worker_is_pinned(client):
    client.open_all()
    assert client.reasons(client.open(0, address="elsewhere")) == [Reason.WRONG_SENDER]


def test_epochs_go_on_after_everything_was_closed_and_end_somewhere(client):
    client.open_all()
    for worker in range(2):
        client.send(Close(worker), worker, epoch=1)
    assert {header.epoch for header, _grant, _where in client.open_all(1)} == {2}
    assert {header.epoch for header, _grant, _where in client.open_all(2, epoch=0xFFFE)} == {0xFFFF}
    assert client.reasons(client.open_all(3)) == [Reason.NO_EPOCH]


def test_an_opening_that_is_not_pursued_is_forgotten(client):
    client.open(0)
    client.now += 6
    assert client.reasons(client.open(1)) == [Reason.NOT_READY]
    client.now += 6
    client.controller.tick(client.now)
    assert client.controller.state(1) is JobState.NONE


def test_only_so_many_openings_wait(device):
    controller = Controller(device, limits=ControllerLimits(openings=2))
    clients = [Client(controller, job) for job in range(3)]
    assert [client.reasons(client.open(0)) for client in clients] == [
        [Reason.NOT_READY],
        [Reason.NOT_READY],
        [Reason.NO_CAPACITY],
    ]


def test_slots_are_shared_fairly_and_given_back(device):
    controller = Controller(device)
    for job in (1, 2):
        answers = Client(controller, job).open_all(slots=64)
        assert {grant.slots for _header, grant, _where in answers} == {8}
    assert controller.slots_used == 16
    third = Client(controller, 3)
    assert third.reasons(third.open_all()) == [Reason.NO_CAPACITY]
    for worker in range(2):
        Client(controller, 1).send(Close(worker), worker, epoch=1)
    assert controller.slots_used == 8
    assert len(third.open(0)) == 2
    assert device.open_jobs[3].base == 0


def test_a_quota_gives_one_job_more():
    controller = Controller(Device(), limits=ControllerLimits(quota=16))
    answers = Client(controller).open_all(slots=64)
    assert {grant.slots for _header, grant, _where in answers} == {16}
    second = Client(controller, 2)
    ((header, grant, _where),) = second.open_all()
    assert (header.reason, grant.field) == (Reason.NO_CAPACITY, "slots")


def test_a_close_of_all_frees_and_is_answered_however_often(client, device):
    client.open_all()
    ((header, body, where),) = client.send(Close(0), 0, epoch=1)
    assert (header.type, header.reason, where) == (FrameType.CLOSE, 0, "at 0")
    assert Close.unpack(body) == Close(0)
    assert client.send(Close(0), 0, epoch=1)[0][0].reason == 0
    assert client.send(Close(1), 1, epoch=9)[0][0].reason == Reason.WRONG_EPOCH
    assert client.send(Close(1), 1, epoch=1, address="elsewhere") == []
    assert client.controller.state(1) is JobState.OPEN
    assert client.send(Close(1), 1, epoch=1)[0][0].reason == 0
    assert client.send(Close(1), 1, epoch=1)[0][0].reason == Reason.JOB_NOT_OPEN
    assert device.log == [("open", 1, 1), ("close", 1)]


def test_who_waits_may_give_up(client):
    client.open(0)
    assert client.send(Close(0), 0)[0][0].reason == 0
    assert client.controller.state(1) is JobState.NONE


def test_a_job_that_nobody_uses_is_closed(client, device):
    client.open_all()
    for _ in range(5):
        client.now += 200
        device.active[1] += 1
        client.controller.tick(client.now)
    client.now += 200
    client.send(StatusRequest(1), 1)  # a member that asks is alive
    client.now += 200
    client.controller.tick(client.now)
    assert client.controller.state(1) is JobState.OPEN
    client.now += 200
    client.controller.tick(client.now)
    assert device.log == [("open", 1, 1), ("close", 1)]


def test_status(client):
    client.open_all()
    ((header, body, _where),) = client.send(StatusRequest(77), 5)
    reply = StatusReply.unpack(body)
    assert (header.type, header.epoch) == (FrameType.STATUS, 1)
    assert (reply.cookie, reply.uptime_nonce) == (77, client.controller.uptime_nonce)
    assert (reply.state, reply.slots_used, reply.slots_total, reply.jobs_used, reply.jobs_total) == (
        JobState.OPEN,
        4,
        16,
        1,
        2,
    )
    assert reply.counters == {"frames": 5}
    assert client.send(reply, 5) == []  # an answer is not answered


def test_status_is_for_members_and_those_who_are_trusted(device):
    client = Client(Controller(device, trusted=lambda address: address == "friend"))
    client.open_all()
    assert len(client.send(StatusRequest(1), 0, address="friend")) == 1
    assert len(client.send(StatusRequest(1), 0)) == 1
    assert client.send(StatusRequest(1), 0, address="stranger") == []
    assert client.send(StatusRequest(1), 1, address="at 0") == []


def test_what_the_device_refuses_is_refused_and_leaves_nothing(client, device):
    device.refuse = "no"
    assert client.reasons(client.open_all()) == [Reason.BAD_VALUE]
    assert client.controller.slots_used == 0
    device.refuse = None
    assert len(client.open(1)) == 2


@given(st.lists(st.binary(max_size=60), max_size=20), st.integers(0, 2**32 - 1))
def test_hostile_frames_open_nothing(blobs, seed):
    rng = random.Random(seed)
    device = Device()
    client = Client(Controller(device))
    client.open_all()
    good = [
        control_frame(Open(3, 5), job=2, worker=0),
        control_frame(Close(0), job=1, worker=0, epoch=7),
        control_frame(StatusRequest(4), job=1, worker=0),
    ]
    for blob in blobs:
        frame = bytearray(rng.choice(good))
        at = rng.randrange(len(frame))
        for data in (blob, b"NF\x14" + blob, bytes(frame[:at]), bytes(frame[:at]) + blob):
            replies = client.controller.receive(data, "stranger", 0.0)
            assert len(replies) <= 1
    assert device.log == [("open", 1, 1)]


@given(st.integers(0, 2**32 - 1))
def test_slot_ranges_never_overlap_and_join_again(seed):
    rng = random.Random(seed)
    ranges, taken = SlotRanges(64), {}
    for _ in range(60):
        if taken and rng.random() < 0.45:
            base = rng.choice(list(taken))
            ranges.give_back(base)
            del taken[base]
        else:
            length = 1 << rng.randrange(7)
            largest = ranges.largest()
            base = ranges.take(length)
            assert (base is None) == (length > largest)
            if base is not None:
                assert base % length == 0
                mine = set(range(base, base + length))
                assert mine <= set(range(64))
                assert all(mine.isdisjoint(range(b, b + n)) for b, n in taken.items())
                taken[base] = length
        assert ranges.used == sum(taken.values())
    for base in taken:
        ranges.give_back(base)
    assert ranges.largest() == 64


def test_slot_ranges_refuse_what_is_no_power_of_two():
    with pytest.raises(ValueError, match="total must be a power of two, not 12"):
        SlotRanges(12)
    with pytest.raises(ValueError, match="must be a power of two, not 3"):
        SlotRanges(8).take(3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"quota": 3}, "quota must be a power of two"),
        ({"idle": 0}, "idle must be more"),
        ({"openings": 0}, "at least 1"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ValueError, match=message):
        ControllerLimits(**limits)


# ------------------------------------------------------------------------------------------------------------ hardware

HARDWARE = ReducerParams(slots=16, workers=40, acc_bits=7, max_planes=2, jobs=2)
ME = Endpoint.of("02:aa:bb:cc:dd:ee", "10.0.0.254", 20045)


def over_registers(params=HARDWARE, **options):
    file = RegisterFile(params)

    def read32(address):
        value, response = file.read(address)
        assert response is Response.OKAY
        return value

    def write32(address, value):
        assert file.write(address, value) is Response.OKAY

    return file, CsrDevice(read32, write32, ME, **options)


def worker_at(worker):
    return Endpoint(0x020000000000 | worker, 0x0A000000 | worker, 4000 + worker)


def test_a_device_tells_its_sizes_and_gets_its_address():
    file, device = over_registers()
    assert device.params == HARDWARE
    assert not device.multicast
    assert file.endpoint("LOCAL") == ME
    assert over_registers(group=Endpoint.multicast("239.1.2.3", 20045))[1].multicast


def test_the_same_controller_writes_registers():
    file, device = over_registers()
    controller = Controller(device)
    for job, encoding in ((5, 0), (6, 1)):
        client = Client(controller, job)
        for worker in range(3):
            answers = client.open(worker, members=3, encoding=encoding, address=worker_at(10 * job + worker))
        assert [grant.result_planes for _header, grant, _where in answers] == [2 + encoding] * 3
    for bank, job in enumerate((5, 6)):
        assert file.field(f"JOB{bank}_CONTROL", "open") == 1
        assert file.field(f"JOB{bank}_CONTROL", "job") == job
        assert file.field(f"JOB{bank}_EPOCH", "epoch") == 1
        assert file.field(f"JOB{bank}_SLOTS", "base") == 4 * bank
        assert file.field(f"JOB{bank}_SLOTS", "log2_count") == 2
        assert file.field(f"JOB{bank}_ENCODING", "planes") == 1 + bank
        assert [file.field(f"JOB{bank}_MEMBERS", "member", worker) for worker in range(4)] == [1, 1, 1, 0]
        assert [file.addresses[bank, worker] for worker in range(3)] == [worker_at(10 * job + w) for w in range(3)]
    client = Client(controller, 5)
    for worker in range(3):
        client.send(Close(worker), worker, epoch=1, address=worker_at(50 + worker))
    assert [file.field(f"JOB{bank}_CONTROL", "open") for bank in range(2)] == [0, 1]
    client = Client(controller, 7)
    for worker in range(2):
        client.open(worker, address=worker_at(worker))
    assert file.field("JOB0_CONTROL", "job") == 7  # the bank that was free


def test_a_reopened_job_keeps_its_bank_and_gets_its_epoch():
    file, device = over_registers()
    client = Client(Controller(device))
    for nonce, epoch in ((0, 1), (5, 2)):
        for worker in range(2):
            client.open(worker, nonce + worker, address=worker_at(worker))
        assert file.field("JOB0_EPOCH", "epoch") == epoch
        assert file.field("JOB1_CONTROL", "open") == 0


def test_counters_and_activity_come_from_the_registers():
    file, device = over_registers()
    file.count("frames", 9)
    file.count("stale", 2)
    assert {name: value for name, value in device.counters().items() if value} == {"frames": 9, "stale": 2}
    assert device.activity(1) == 0
    device.open(JobConfig(1, 1, {0: worker_at(0)}, TERNARY, multicast=False))
    assert device.activity(1) == 9
    device.close(1)
    device.close(1)
    assert device.activity(1) == 0


def test_what_ran_before_is_closed():
    file = RegisterFile(HARDWARE)
    control = next(word.address for word in words(2) if word.name == "JOB1_CONTROL")
    file.write(control, 9 << 16 | 1)
    CsrDevice(lambda address: file.read(address)[0], lambda *write: file.write(*write) and None, ME)
    assert file.field("JOB1_CONTROL", "open") == 0


@pytest.mark.parametrize(
    ("register", "value", "message"),
    [
        (0x000, 0xFFFFFFFF, "there is no reducer behind this map"),
        (0x004, 1 << 16 | 2, "version 2 of the register map; this software knows 1"),
        (0x004, 3 << 16 | 1, "version 3 of the wire protocol; this software knows 1"),
        (0x008, 0, "capability registers make no sense: lanes must be"),
    ],
)
def test_what_is_no_reducer_that_is_known_is_refused(register, value, message):
    file = RegisterFile(HARDWARE)
    writes = []
    with pytest.raises(DeviceError, match=message):
        CsrDevice(
            lambda address: value if address == register else file.read(address)[0],
            lambda *write: writes.append(write),
            ME,
        )
    assert not writes


def test_a_bank_that_does_not_open_is_noticed():
    file = RegisterFile(HARDWARE)
    device = CsrDevice(lambda address: file.read(address)[0], lambda _address, _value: None, ME)
    with pytest.raises(DeviceError, match="job 3: bank 0 does not read as open"):
        device.open(JobConfig(3, 1, {0: worker_at(0)}, BINARY, multicast=False))


def test_the_fields_that_a_refusal_can_name_are_there():
    assert {"members", "encoding", "margin", "slots"} <= {field.name for field in OPEN_FIELDS}
