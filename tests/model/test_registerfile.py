"""The model of the register slave, against rules that are written out here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registerfile import COUNTER_MAX, RegisterFile, Response
from neuron_fabric.model.registers import COUNTERS, Access, capability_values, words

JOBS = 2
PARAMS = ReducerParams(workers=40, max_planes=9, jobs=JOBS)
TABLE = {word.address: word for word in words(JOBS)}
AT = {word.name: word.address for word in TABLE.values()}
LIMIT = 0x800  # 0x400 + 2 * 0x80, rounded up to a power of two
NAMES = [name for name, _ in COUNTERS]

words32 = st.integers(0, COUNTER_MAX)
addresses = st.one_of(st.sampled_from(sorted(TABLE)), st.integers(0, LIMIT - 1))


@given(st.lists(st.tuples(addresses, words32, st.integers(0, 15)), max_size=40))
def test_bytes_that_were_written_read_back(writes):
    """A naive memory of bytes beside it."""
    file = RegisterFile(PARAMS)
    memory = {}
    for address, data, strobe in writes:
        word = TABLE.get(address - address % 4)
        response = file.write(address, data, strobe)
        writable = word is not None and word.register.access in (Access.RW, Access.COMMAND)
        assert response == (Response.OKAY if writable else Response.SLVERR)
        if not writable or word.register.access is Access.COMMAND:
            if word is not None and word.name == "CONTROL" and strobe & 1 and data & 1:
                for bank in range(JOBS):
                    at = AT[f"JOB{bank}_CONTROL"]
                    memory[at] = memory.get(at, 0) & 0xFE
            continue
        for byte in range(4):
            if strobe >> byte & 1:
                memory[word.address + byte] = data >> 8 * byte & 0xFF
    constants = capability_values(PARAMS)
    for address, word in TABLE.items():
        value = sum(memory.get(address + byte, 0) << 8 * byte for byte in range(4)) & word.writable(PARAMS)
        assert file.read(address) == (constants.get(word.name, value), Response.OKAY), word.name


@given(st.integers(0, LIMIT - 1))
def test_an_address_without_a_register_is_an_error_and_zero(address):
    file = RegisterFile(PARAMS)
    known = address - address % 4 in TABLE
    assert file.read(address)[1] == (Response.OKAY if known else Response.SLVERR)
    assert known or file.read(address)[0] == 0


@given(st.lists(st.tuples(st.sampled_from(NAMES), words32), max_size=30))
def test_counters_saturate_and_maxima_hold(events):
    file = RegisterFile(PARAMS)
    for name, n in events:
        file.count(name, n)
    for name in NAMES:
        mine = [n for event, n in events if event == name]
        due = max(mine, default=0) if name == "slot_high_water" else min(sum(mine), 2**32 - 1)
        assert file.read(AT[f"COUNT_{name.upper()}"]) == (due, Response.OKAY)
        assert file.write(AT[f"COUNT_{name.upper()}"], 0) == Response.SLVERR
        assert file.read(AT[f"COUNT_{name.upper()}"])[0] == due
    assert file.write(AT["CONTROL"], 0b10, 0b0001) == Response.OKAY
    assert not any(file.read(AT[f"COUNT_{name.upper()}"])[0] for name in NAMES)


def test_commands_act_once_and_read_as_zero():
    file = RegisterFile(PARAMS)
    for bank in range(JOBS):
        file.write(AT[f"JOB{bank}_CONTROL"], 0x00070001)
    file.count("frames", 5)
    file.write(AT["CONTROL"], 0b11, 0b1110)
    assert not file.commands
    file.write(AT["CONTROL"], COUNTER_MAX & ~0b10)
    assert file.commands == {"reset": 1}
    assert file.read(AT["CONTROL"]) == (0, Response.OKAY)
    assert [file.read(AT[f"JOB{bank}_CONTROL"])[0] for bank in range(JOBS)] == [0x00070000] * JOBS
    assert file.read(AT["COUNT_FRAMES"])[0] == 5
    file.write(AT["CONTROL"], 0b10)
    assert file.commands == {"reset": 1, "clear_counters": 1}
    assert file.read(AT["COUNT_FRAMES"])[0] == 0


def test_fields_by_name():
    file = RegisterFile(PARAMS)
    file.write(AT["JOB1_WEIGHTS2"], 0x83)
    file.write(AT["JOB1_MEMBERS1"], 1 << 7)
    file.write(AT["JOB1_EPOCH"], 0x1FFFF)
    assert file.field("JOB1_WEIGHTS", "shift", 8) == 3
    assert file.field("JOB1_WEIGHTS", "negative", 8) == 1
    assert [worker for worker in range(40) if file.field("JOB1_MEMBERS", "member", worker)] == [39]
    assert file.field("JOB1_EPOCH", "epoch") == 0xFFFF
    assert file.field("CAPABILITY1", "workers") == 40
    for name, field, entry in (("JOB1_WEIGHTS", "shift", 9), ("JOB2_EPOCH", "epoch", 0), ("JOB1_EPOCH", "poem", 0)):
        with pytest.raises(KeyError, match=f"no {name}.{field} of entry {entry}"):
            file.field(name, field, entry)


def write_entry(file, at, select):
    values = {"MAC_LO": at.mac & COUNTER_MAX, "MAC_HI": at.mac >> 32, "IP": at.ip, "PORT": at.port, "SELECT": select}
    for name, value in values.items():
        assert file.write(AT[f"ENTRY_{name}"], value) == Response.OKAY
    file.write(AT["ENTRY_WRITE"], 1)


def test_entries_are_stored_where_select_says():
    file = RegisterFile(PARAMS)
    here, there = Endpoint(0x112233445566, 0x0A000001, 20045), Endpoint(1, 2, 3)
    write_entry(file, here, 39)
    write_entry(file, there, 1 << 16 | 39)
    write_entry(file, here, 1 << 24 | 1 << 16 | 7)
    file.write(AT["ENTRY_WRITE"], COUNTER_MAX, 0b1110)
    expected = {(0, 39): here, (1, 39): there, (1, None): here}
    assert file.addresses == expected
    # Neither a worker nor a bank that is not there, of which the parent has no worker's number.
    for select in (40, 0xFFFF, 2 << 16, 1 << 24 | 2 << 16):
        write_entry(file, there, select)
    assert file.addresses == expected
    file.write(AT["CONTROL"], 1)
    assert file.addresses == expected
    write_entry(file, there, 1 << 24 | 1 << 16 | 0xFFFF)
    assert file.addresses[1, None] == there


def test_endpoints_by_their_prefix():
    file = RegisterFile(PARAMS)
    file.write(AT["LISTEN_MAC_HI"], 0xFFFF0100)
    file.write(AT["LISTEN_MAC_LO"], 0x5E010203)
    file.write(AT["LISTEN_PORT"], 0x00010009)
    assert file.endpoint("LISTEN") == Endpoint(0x01005E010203, 0, 9)
    assert file.endpoint("GROUP") == Endpoint(0, 0, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda file: file.read(LIMIT), ValueError, "address must be 0 to 0x7ff, not 0x800"),
        (lambda file: file.read(-4), ValueError, "address must be"),
        (lambda file: file.write(0, 1 << 32), ValueError, "data has 32 bits; 0x100000000 does not fit"),
        (lambda file: file.write(0, 0, 16), ValueError, "strobe has 4 bits; 0x10 does not fit"),
        (lambda file: file.count("poems"), KeyError, "no counter 'poems'"),
        (lambda file: file.count("frames", -1), ValueError, "'frames' only goes up, so it can't count -1"),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(RegisterFile(PARAMS))
