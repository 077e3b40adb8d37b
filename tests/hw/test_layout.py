"""The configuration: what it holds, and what is refused by name."""

from __future__ import annotations

import gc

import pytest

from neuron_fabric.hw import AxiStreamReducer, ResultFormat, config_fields, make_config
from neuron_fabric.hw.layout import contribution_layout, refusal_layout, result_layout
from neuron_fabric.model import BINARY, ReducerParams, int_encoding
from neuron_fabric.model.reducer import JobConfig, Parent, Straggler

PARAMS = ReducerParams(lanes=64, workers=8, acc_bits=4, max_planes=3)


def test_fields_of_a_configuration() -> None:
    fields = config_fields(JobConfig(0, 0, [2], int_encoding(3)), PARAMS)
    assert fields == {
        "job": 0,
        "epoch": 0,
        "base": 0,
        "log2_slots": 3,
        "members": 0b100,
        "planes": 3,
        "negative": 0b100,
        "shift": 2 << 4 | 1 << 2,
        "counts_negatives": 0,
        "result_format": 0,
        "result_planes": 3,
        "margin": 0,
        "multicast": 1,
        "timeout": 0,
        "quorum": 0,
        "child": 0,
        "parent_job": 0,
        "parent_epoch": 0,
        "parent_worker": 0,
    }
    config = make_config(JobConfig(0, 0, range(8), BINARY, "majority", 3), PARAMS)
    assert (config.members, config.planes, config.counts_negatives, config.margin) == (0xFF, 1, 1, 3)
    assert config.result_format == ResultFormat.MAJORITY


def test_options_of_a_configuration() -> None:
    parent = Parent(address=None, job=7, worker=3, epoch=9, leaves=12)
    job = JobConfig(1, 2, [0, 1], BINARY, parent=parent, multicast=False, base=4, slots=2)
    fields = config_fields(job, PARAMS)
    assert [fields[name] for name in ("job", "epoch", "base", "log2_slots", "multicast")] == [1, 2, 4, 1, 0]
    assert [fields[f"parent_{name}"] for name in ("job", "worker", "epoch")] == [7, 3, 9]
    assert (fields["child"], fields["result_planes"]) == (1, 4)  # as many planes as twelve leaves take
    fields = config_fields(JobConfig(1, 2, [0, 1], BINARY, straggler=Straggler(100, 1)), PARAMS)
    assert (fields["timeout"], fields["quorum"]) == (100, 1)


def test_a_job_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="job 3: worker 8 is out of range; this reducer has 8 workers"):
        config_fields(JobConfig(3, 0, [8], BINARY), PARAMS)


def test_stream_layouts_are_as_published() -> None:
    """The packed payloads are part of the Verilog interface."""
    params = ReducerParams()
    assert {name: (field.offset, field.width) for name, field in contribution_layout(params)} == {
        "first": (0, 1),
        "last": (1, 1),
        "kind": (2, 1),
        "bank": (3, 1),
        "worker": (4, 4),
        "chunk": (8, 32),
        "plane": (40, 1),
        "lines": (41, 5),
        "voters": (46, 6),
        "data": (52, 512),
    }
    assert {name: (field.offset, field.width) for name, field in result_layout(params)} == {
        "first": (0, 1),
        "last": (1, 1),
        "bank": (2, 1),
        "worker": (3, 4),
        "group": (7, 1),
        "up": (8, 1),
        "empty": (9, 1),
        "flags": (10, 3),
        "job": (13, 16),
        "destination": (29, 16),
        "missing": (45, 5),
        "chunk": (50, 32),
        "plane": (82, 3),
        "planes": (85, 3),
        "voters": (88, 6),
        "lines": (94, 5),
        "epoch": (99, 16),
        "data": (115, 512),
    }
    assert {name: (field.offset, field.width) for name, field in refusal_layout(params)} == {
        "valid": (0, 1),
        "reason": (1, 8),
        "bank": (9, 1),
        "worker": (10, 4),
        "chunk": (14, 32),
        "plane": (46, 1),
        "lines": (47, 5),
    }


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_lanes_that_do_not_divide_the_header_are_refused() -> None:
    with pytest.raises(ValueError, match="lanes must divide 512 for an AXI4-Stream reducer, but is 24"):
        AxiStreamReducer(ReducerParams(lanes=24))
    gc.collect()  # what was not finished complains when it goes: here, not in another test
