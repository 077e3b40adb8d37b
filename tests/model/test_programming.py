"""What a driver writes, read back through the model of the registers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model import (
    BINARY,
    TERNARY,
    JobConfig,
    Parent,
    ReducerParams,
    Straggler,
    int_encoding,
    tally_encoding,
)
from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.programming import close_job, open_job, set_addresses
from neuron_fabric.model.reducer import check_job
from neuron_fabric.model.registerfile import RegisterFile, Response
from neuron_fabric.model.registers import words

PARAMS = ReducerParams(slots=16, workers=40, acc_bits=10, max_planes=6, jobs=3)
AT = {word.name: word.address for word in words(PARAMS.jobs)}
ME = Endpoint.of("02:aa:bb:cc:dd:ee", "10.0.0.254", 20045)
GROUP = Endpoint.multicast("239.1.2.3", 20045)


def worker_at(worker):
    return Endpoint(0x020000000000 | worker << 33 | worker, 0x0A000000 | worker, 4000 + worker)


def write(file, writes):
    assert [file.write(*write) for write in writes] == [Response.OKAY] * len(writes)


def opened(file, bank):
    """The job in a bank, from nothing but what was written."""

    def field(register, name, entry=0):
        return file.field(f"JOB{bank}_{register}", name, entry)

    members = [worker for worker in range(file.params.workers) if field("MEMBERS", "member", worker)]
    weights = tuple(
        (-1 if field("WEIGHTS", "negative", plane) else 1) << field("WEIGHTS", "shift", plane)
        for plane in range(field("ENCODING", "planes"))
    )
    encoding = Encoding("?", weights, bool(field("ENCODING", "counts_negatives")), field("ENCODING", "leaves"))
    timeout, quorum = field("TIMEOUT", "cycles"), field("QUORUM", "voters")
    parent = file.addresses.get((bank, None)), field("PARENT", "job"), field("PARENT_WORKER", "worker")
    return {
        "open": field("CONTROL", "open"),
        "job": field("CONTROL", "job"),
        "epoch": field("EPOCH", "epoch"),
        "members": {worker: file.addresses.get((bank, worker)) for worker in members},
        "weights": encoding.weights,
        "counts_negatives": encoding.counts_negatives,
        "leaves": encoding.leaves,
        "result_format": "majority" if field("RESULT", "majority") else "tally",
        "result_planes": field("RESULT", "planes"),
        "multicast": field("RESULT", "multicast"),
        "margin": field("RESULT", "margin"),
        "straggler": Straggler(timeout, quorum) if timeout else None,
        "parent": (*parent, field("PARENT", "epoch")) if field("RESULT", "child") else None,
        "base": field("SLOTS", "base"),
        "slots": 1 << field("SLOTS", "log2_count"),
        "lines": field("LINES", "lines"),
        "first_chunk": field("FIRST_CHUNK", "chunk"),
    }


def wanted(config, lines=0, first_chunk=0):
    """The same from the job itself."""
    parent = config.parent
    majority = config.result_format == "majority"
    return {
        "open": 1,
        "job": config.job,
        "epoch": config.epoch,
        "members": dict(config.members) if isinstance(config.members, dict) else dict.fromkeys(config.members),
        "weights": config.encoding.weights,
        "counts_negatives": config.encoding.counts_negatives,
        "leaves": config.encoding.leaves,
        "result_format": config.result_format,
        "result_planes": config.result_planes,
        "multicast": config.multicast,
        "margin": config.margin if majority else 0,
        "straggler": config.straggler,
        "parent": parent and (parent.address, parent.job, parent.worker, parent.epoch),
        "base": config.base,
        "slots": PARAMS.slots if config.slots is None else config.slots,
        "lines": lines,
        "first_chunk": first_chunk,
    }


def some_job(rng):
    encoding = rng.choice([BINARY, TERNARY, int_encoding(2), int_encoding(4), tally_encoding(BINARY, 3)])
    world = rng.randint(1, max(n for n in range(1, PARAMS.workers + 1) if encoding.tally_bits(n) <= PARAMS.acc_bits))
    members = rng.sample(range(PARAMS.workers), world)
    extra = {}
    kind = rng.choice(["plain", "majority", "child", "straggler"])
    if kind == "majority":
        extra = {"result_format": "majority", "margin": rng.randrange(1 << PARAMS.acc_bits)}
    if kind == "child" and encoding.tally_bits(world) <= PARAMS.acc_bits:
        parent = Parent(worker_at(99), rng.getrandbits(16), rng.randrange(0xFFFF), rng.getrandbits(16), 0)
        extra = {"parent": Parent(parent.address, parent.job, parent.worker, parent.epoch, world * encoding.leaves)}
    if kind == "straggler" and encoding.planes == 1:
        extra = {"straggler": Straggler(rng.randint(1, 1 << 31), rng.randint(1, world))}
    slots = 1 << rng.randrange(5)
    return JobConfig(
        rng.getrandbits(16),
        rng.getrandbits(16),
        {worker: worker_at(worker) for worker in members} if rng.random() < 0.8 or "parent" in extra else members,
        encoding,
        multicast=rng.random() < 0.5,
        base=slots * rng.randrange(PARAMS.slots // slots),
        slots=slots,
        **extra,
    )


@given(st.integers(0, 2**32 - 1))
def test_every_job_reads_back(seed):
    """Jobs come and go in the banks: what is read is always the last one, whatever was there before."""
    rng = random.Random(seed)
    file = RegisterFile(PARAMS)
    for _ in range(6):
        config, bank = some_job(rng), rng.randrange(PARAMS.jobs)
        cxl = {"lines": rng.randint(1, 16), "first_chunk": rng.getrandbits(32)} if rng.random() < 0.5 else {}
        check_job(config, PARAMS)
        write(file, open_job(PARAMS, config, bank, **cxl))
        found, due = opened(file, bank), wanted(config, **cxl)
        if not isinstance(config.members, dict):
            assert found.pop("members").keys() == due.pop("members").keys()
        assert found == due
        if rng.random() < 0.5:
            write(file, close_job(PARAMS, bank))
            assert opened(file, bank)["open"] == 0


def test_nothing_changes_while_the_job_is_open():
    """The bank is closed by the first write and opened by the last; nothing in between opens it."""
    config = JobConfig(7, 3, {worker: worker_at(worker) for worker in (0, 39)}, TERNARY)
    file = RegisterFile(PARAMS)
    write(file, open_job(PARAMS, JobConfig(7, 2, [0], BINARY), 1))
    writes = open_job(PARAMS, config, 1)
    assert (writes[0], writes[-1]) == ((AT["JOB1_CONTROL"], 0), (AT["JOB1_CONTROL"], 7 << 16 | 1))
    states = []
    for one in writes:
        write(file, [one])
        states.append(file.field("JOB1_CONTROL", "open"))
    assert states == [0] * (len(writes) - 1) + [1]
    assert file.commands == {"write": 2}


def test_other_banks_are_left_alone():
    file = RegisterFile(PARAMS)
    configs = [JobConfig(bank, 1, {bank: worker_at(bank)}, BINARY, base=4 * bank, slots=4) for bank in range(3)]
    for bank in (0, 2, 1):
        write(file, open_job(PARAMS, configs[bank], bank))
    write(file, close_job(PARAMS, 1))
    assert [opened(file, bank) == wanted(configs[bank]) for bank in range(3)] == [True, False, True]


def test_a_reducer_with_few_workers_and_planes_gets_no_write_in_vain():
    params = ReducerParams(workers=4, max_planes=2)
    names = {word.address: word.name for word in words()}
    written = [names[write.address] for write in open_job(params, JobConfig(1, 1, [0], BINARY))]
    assert "JOB0_MEMBERS0" in written
    assert not {"JOB0_MEMBERS1", "JOB0_WEIGHTS1", "JOB0_WEIGHTS7"} & set(written)
    assert len(set(written)) == len(written) - 1  # JOB_CONTROL twice


@pytest.mark.parametrize(("group", "listen"), [(None, None), (GROUP, None), (None, GROUP), (GROUP, worker_at(5))])
def test_an_endpoints_own_addresses(group, listen):
    file = RegisterFile(PARAMS)
    write(file, set_addresses(PARAMS, ME, group=worker_at(1), listen=worker_at(2)))
    write(file, set_addresses(PARAMS, ME, group=group, listen=listen))
    assert file.endpoint("LOCAL") == ME
    for name, endpoint in (("GROUP", group), ("LISTEN", listen)):
        assert file.endpoint(name) == (endpoint or Endpoint(0, 0, 0))
        assert file.field(f"{name}_PORT", "enable") == (endpoint is not None)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"bank": 3}, "bank 3 is out of range; this reducer has 3"),
        ({"members": [40]}, {}, "worker 40 is out of range"),
        ({"members": {0: ME, 1: None}}, {}, "worker 1 has no Endpoint"),
        ({"members": {0: ME}, "parent": Parent("up", 1, 0, 1, 1)}, {}, "the parent's address must be an Endpoint"),
        ({"base": 3, "slots": 2}, {}, "2 slots from slot 3 on are not among the 16"),
        ({}, {"lines": 17}, "lines must be 0 to 16, not 17"),
        ({}, {"first_chunk": 1 << 32}, "first_chunk must be 0 to 4294967295"),
        ({"straggler": Straggler(1 << 32, 1)}, {}, "timeout must be 1 to 2147483648 ticks"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config, options, message):
    settings = {"job": 1, "epoch": 1, "members": [0], "encoding": BINARY} | config
    with pytest.raises(ValueError, match=message):
        open_job(PARAMS, JobConfig(**settings), **options)
