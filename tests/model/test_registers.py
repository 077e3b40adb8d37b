import pytest

from neuron_fabric.model.encoding import BINARY, TERNARY, int_encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registers import (
    JOB_BASE,
    REGISTERS,
    capability_values,
    encoding_values,
    expand,
    register_table,
)


def test_addresses_are_aligned_and_nobody_shares_one():
    addresses = [address for _, address, _ in expand(jobs=3)]
    assert all(address % 4 == 0 for address in addresses)
    assert len(set(addresses)) == len(addresses)
    assert max(r.offset + 4 * r.count for r in REGISTERS if not r.per_job) <= JOB_BASE


@pytest.mark.parametrize("register", REGISTERS, ids=lambda register: register.name)
def test_fields_fit_and_do_not_overlap(register):
    used = 0
    for field in register.fields:
        mask = (1 << field.width) - 1 << field.lsb
        assert mask < 1 << 32
        assert not used & mask
        used |= mask
    assert register.doc


def test_capability_says_what_was_built():
    values = capability_values(ReducerParams(lanes=512, lines_per_chunk=16, slots=8, workers=16, acc_bits=6))
    by_name = {register.name: register for register in REGISTERS}

    def read(register, field):
        (found,) = [f for f in by_name[register].fields if f.name == field]
        return values[register] >> found.lsb & (1 << found.width) - 1

    assert read("CAPABILITY0", "lanes") == 512
    assert read("CAPABILITY0", "lines") == 16
    assert read("CAPABILITY1", "slots") == 8
    assert read("CAPABILITY1", "workers") == 16
    assert read("CAPABILITY0", "acc_bits") == 6


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
