"""Named configurations: each can be made, and does what it says that it is for."""

from __future__ import annotations

import gc

import pytest

from neuron_fabric.hw.configurations import CONFIGURATIONS, Configuration, check_sizes, configuration, suits
from neuron_fabric.hw.verilog import TOPS, build
from neuron_fabric.model import BINARY, TERNARY, ReducerParams
from neuron_fabric.model.registers import capability_values

ALL = pytest.mark.parametrize("one", CONFIGURATIONS.values(), ids=CONFIGURATIONS)

WIRE_BYTES = 8 + 42 + 22 + 16 * 64 + 4 + 12
"""A full frame of 16 lines with preamble, frame check sequence and gap."""


@ALL
def test_fields(one: Configuration) -> None:
    assert CONFIGURATIONS[one.name] is configuration(one.name) is one
    assert one.doc
    assert one.reason
    assert one.device
    assert one.tops
    assert len(set(one.tops)) == len(one.tops)
    assert one.clock_mhz > 0


@ALL
@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_every_top_can_be_made(one: Configuration) -> None:
    """Of sizes that the registers can tell."""
    assert set(one.tops) <= set(TOPS)
    check_sizes(one.params, one.tops)
    assert capability_values(one.params)
    for top in one.tops:
        assert build(top, one.params).params == one.params
    gc.collect()  # what is never elaborated complains when it goes: here, not in another test


@ALL
def test_binary_and_ternary_jobs_fit(one: Configuration) -> None:
    """Every worker can vote in binary, and all or all but one in ternary."""
    params = one.params
    assert BINARY.tally_bits(params.workers) <= params.acc_bits
    assert TERNARY.planes <= params.max_planes
    assert TERNARY.tally_bits(params.workers - 1) <= params.acc_bits


@ALL
def test_every_job_can_have_slots(one: Configuration) -> None:
    assert one.params.jobs <= one.params.slots


@pytest.mark.parametrize("name", ["ultrascale_100g", "ultrascale_100g_64w"])
def test_100_gigabit_passes_at_the_target_clock(name: str) -> None:
    """Full frames, 17 beats each, at the rate at which the wire brings them."""
    one = CONFIGURATIONS[name]
    assert one.params.lines_per_chunk == 16
    assert one.clock_mhz * 1e6 > 17 * 100e9 / (8 * WIRE_BYTES)
    assert one.line_rate_gbps > 100


def test_the_names_that_others_use_are_there() -> None:
    assert {"ecp5_small", "ecp5_85k", "ultrascale_100g", "ultrascale_100g_64w", "sim_small"} <= set(CONFIGURATIONS)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="there is no configuration 'versal': use ecp5_small, ecp5_85k, "):
        configuration("versal")


@pytest.mark.parametrize("top", ["udp", "cxl"])
def test_tops_of_whole_lines_want_512_lanes(top: str) -> None:
    assert suits(top, ReducerParams())
    assert not suits(top, ReducerParams(lanes=64))
    with pytest.raises(ValueError, match=f"top '{top}': lanes must be 512, not 64: its beats are lines of 64 bytes"):
        check_sizes(ReducerParams(lanes=64), ("core", top))


def test_tallies_that_cannot_hold_all_workers_are_refused() -> None:
    check_sizes(ReducerParams(workers=31, acc_bits=5), ("core",))
    with pytest.raises(ValueError, match="a binary tally of 32 workers takes 6 bits; acc_bits is 5: use fewer workers"):
        check_sizes(ReducerParams(workers=32, acc_bits=5), ("core",))
