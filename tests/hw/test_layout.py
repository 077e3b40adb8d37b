"""The configuration: what it holds, and what is refused by name."""

from __future__ import annotations

import gc
import re

import pytest

from neuron_fabric.hw import AxiStreamReducer, ResultFormat, config_fields, make_config
from neuron_fabric.hw.layout import contribution_layout, result_layout
from neuron_fabric.model import BINARY, TERNARY, Encoding, ReducerParams, int_encoding, tally_encoding

PARAMS = ReducerParams(lanes=64, workers=8, acc_bits=4, max_planes=3)


def test_fields_of_a_configuration() -> None:
    fields = config_fields(int_encoding(3), [2], ResultFormat.TALLY, 0, PARAMS)
    assert fields == {
        "members": 0b100,
        "planes": 3,
        "negative": 0b100,
        "shift": 2 << 4 | 1 << 2,
        "counts_negatives": 0,
        "result_format": 0,
        "result_planes": 3,
        "margin": 0,
    }
    config = make_config(BINARY, range(8), ResultFormat.MAJORITY, 3, PARAMS)
    assert (config.members, config.planes, config.counts_negatives, config.margin) == (0xFF, 1, 1, 3)
    assert (config.result_format, config.result_planes) == (ResultFormat.MAJORITY, 4)


@pytest.mark.parametrize(
    ("encoding", "members", "majority", "margin", "what"),
    [
        (BINARY, [], False, 0, "members: a job needs at least one member"),
        (BINARY, [1, 1], False, 0, "members: a worker is listed twice"),
        (BINARY, [8], False, 0, "members: worker 8 is out of range; this reducer has 8 workers"),
        (int_encoding(4), [0], False, 0, "encoding 'int-4' has 4 planes; this reducer takes 3"),
        (Encoding("odd", (8,)), [0], False, 0, "encoding 'odd': weight 8 of plane 0"),
        (TERNARY, range(8), False, 0, "encoding 'ternary' with 8 members makes tallies from -8 to 8"),
        (BINARY, [0], True, 16, "margin must be 0 to 15, not 16"),
        (BINARY, [0], True, -1, "margin must be 0 to 15, not -1"),
        (tally_encoding(BINARY, 3), [0], True, 0, "encoding 'tally(binary,3)': a majority needs the number of leaves"),
    ],
)
def test_refusals(encoding: Encoding, members: list[int], majority: bool, margin: int, what: str) -> None:
    result_format = ResultFormat.MAJORITY if majority else ResultFormat.TALLY
    with pytest.raises(ValueError, match=re.escape(what)):
        config_fields(encoding, members, result_format, margin, PARAMS)


def test_stream_layouts_are_as_published() -> None:
    """The packed payloads are part of the Verilog interface."""
    params = ReducerParams()
    assert {name: (field.offset, field.width) for name, field in contribution_layout(params)} == {
        "first": (0, 1),
        "last": (1, 1),
        "kind": (2, 1),
        "worker": (3, 4),
        "chunk": (7, 32),
        "plane": (39, 1),
        "lines": (40, 5),
        "data": (45, 512),
    }
    assert {name: (field.offset, field.width) for name, field in result_layout(params)} == {
        "first": (0, 1),
        "last": (1, 1),
        "destination": (2, 16),
        "chunk": (18, 32),
        "plane": (50, 3),
        "planes": (53, 3),
        "lines": (56, 5),
        "voters": (61, 5),
        "flags": (66, 1),
        "data": (67, 512),
    }


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_lanes_that_do_not_divide_the_header_are_refused() -> None:
    with pytest.raises(ValueError, match="lanes must divide 512 for an AXI4-Stream reducer, but is 24"):
        AxiStreamReducer(ReducerParams(lanes=24))
    gc.collect()  # what was not finished complains when it goes: here, not in another test
