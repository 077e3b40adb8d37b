import pytest

from neuron_fabric.model.cxl import CXL_COUNTERS
from neuron_fabric.model.encoding import BINARY, TERNARY, int_encoding
from neuron_fabric.model.net import Drop
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registers import (
    COUNTERS,
    DEVICE_ID,
    JOB_BASE,
    JOB_STRIDE,
    MAXIMA,
    REGISTERS,
    Access,
    address_bits,
    capability_values,
    encoding_values,
    expand,
    register_table,
    words,
)


def test_addresses_are_aligned_and_nobody_shares_one():
    addresses = [address for _, address, _ in expand(jobs=3)]
    assert all(address % 4 == 0 for address in addresses)
    assert len(set(addresses)) == len(addresses)
    assert max(r.offset + 4 * r.count for r in REGISTERS if not r.per_job) <= JOB_BASE
    assert max(r.offset + 4 * r.count for r in REGISTERS if r.per_job) <= JOB_STRIDE


@pytest.mark.parametrize("register", REGISTERS, ids=lambda register: register.name)
def test_fields_fit_and_do_not_overlap(register):
    used = 0
    for field in register.fields:
        assert field.mask < 1 << (register.entry_bits if register.entries else 32)
        assert not used & field.mask
        used |= field.mask
    assert register.doc
    if register.entries:
        greatest = {"workers": 64, "max_planes": 32}[register.entries]
        assert register.count * register.entries_per_word == greatest


def test_capability_says_what_was_built():
    params = ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=6, jobs=5)
    values = capability_values(params)
    by_name = {register.name: register for register in REGISTERS}

    def read(register, field):
        (found,) = [f for f in by_name[register].fields if f.name == field]
        return values[register] >> found.lsb & (1 << found.width) - 1

    assert read("CAPABILITY0", "lanes") == 512
    assert read("CAPABILITY0", "lines") == 16
    assert read("CAPABILITY1", "slots") == 8
    assert read("CAPABILITY1", "workers") == 16
    assert read("CAPABILITY0", "acc_bits") == 6
    assert read("CAPABILITY2", "jobs") == 5


@pytest.mark.parametrize("encoding", [BINARY, TERNARY, int_encoding(6)])
def test_weights_read_back(encoding):
    values = encoding_values(encoding)
    weights = []
    for plane in range(values["JOB_ENCODING"] & 0xFF):
        byte = values[f"JOB_WEIGHTS{plane // 4}"] >> 8 * (plane % 4) & 0xFF
        weights.append((-1 if byte >> 7 else 1) << (byte & 0x1F))
    assert tuple(weights) == encoding.weights


def test_the_table_for_the_documentation_has_every_register():
    table = register_table()
    assert all(f"| {register.name} |" in table for register in REGISTERS)


@pytest.mark.parametrize("jobs", [1, 2, 24, 255])
def test_the_address_has_no_bit_too_many_or_too_few(jobs):
    last = max(address for _, address, _ in expand(jobs))
    assert last < 1 << address_bits(jobs)
    assert JOB_BASE + JOB_STRIDE * jobs > 1 << address_bits(jobs) - 1


@pytest.mark.parametrize("jobs", [0, 256, -1])
def test_a_number_of_jobs_that_cannot_be_is_refused(jobs):
    with pytest.raises(ValueError, match=f"jobs must be 1 to 255, not {jobs}"):
        words(jobs)


def test_writable_bits_end_with_the_workers_and_planes():
    masks = {word.name: word.writable(ReducerParams(workers=35, max_planes=6)) for word in words()}
    assert (masks["JOB0_MEMBERS0"], masks["JOB0_MEMBERS1"]) == (0xFFFFFFFF, 0b111)
    assert (masks["JOB0_WEIGHTS0"], masks["JOB0_WEIGHTS1"], masks["JOB0_WEIGHTS2"]) == (0x9F9F9F9F, 0x9F9F, 0)
    assert (masks["CONTROL"], masks["JOB0_EPOCH"], masks["ID"], masks["COUNT_FRAMES"]) == (0b11, 0xFFFF, 0, 0)


def test_every_counter_has_a_register_of_its_kind():
    found = {register.name: register.access for register in REGISTERS}
    for name, _doc in COUNTERS:
        assert found[f"COUNT_{name.upper()}"] is (Access.MAXIMUM if name in MAXIMA else Access.COUNTER)
    assert {name for name, _doc in COUNTERS} >= MAXIMA


def test_both_endpoints_count_under_names_of_the_table():
    """Each name once, though they share some."""
    names = [name for name, _doc in COUNTERS]
    assert len(set(names)) == len(names)
    assert {name for name, _doc in CXL_COUNTERS} <= set(names)
    assert {f"dropped_{kind.name.lower()}" for kind in Drop} <= set(names)


def test_read_only_registers_are_those_that_are_built_in():
    values = capability_values(ReducerParams(jobs=3))
    assert list(values) == [register.name for register in REGISTERS if register.access is Access.RO]
    assert values["ID"] == DEVICE_ID == int.from_bytes(b"NFR1", "big")


def test_a_size_that_does_not_fit_its_field_is_named():
    with pytest.raises(ValueError, match=r"CAPABILITY0\.lanes is 65536, which does not fit its 16 bits"):
        capability_values(ReducerParams(lanes=1 << 16))


def test_a_field_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="poem"):
        REGISTERS[0].pack(poem=1)
