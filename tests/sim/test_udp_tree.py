"""The bench of a tree on golden models with ports: what is right passes, what is wrong is found."""

from __future__ import annotations

import os
from typing import Any

import pytest

from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import FrameType, Header
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.tops import TREE
from neuron_fabric.sim.udp.fabric import Fabric, Tree
from neuron_fabric.sim.udp.stand_in import StandIn, StandIns, run

SMALL = ReducerParams(lanes=512, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3, jobs=2)
SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": False},
        {"result_format": "majority", "margin": 1},
        {"encoding": "ternary", "workers": (2, 2)},
        {"encoding": "ternary", "workers": (1, 2), "result_format": "majority"},
        {"trouble": 0.05, "lines": 12},
        {"depth": 1, "stalls": "half", "lines": 20},
        {"depth": 1, "stalls": "rarely", "groups": False, "lines": 20},
    ],
    ids=str,
)
def test_sum_of_a_tree(options: dict[str, Any]) -> None:
    tree = Tree(SMALL, SEED, **options)
    fabric = Fabric(tree)
    run(fabric, StandIns({name: StandIn(SMALL, SEED + k) for k, name in enumerate(TREE)}))
    assert fabric.measured.results == tree.buckets * -(-tree.lines // SMALL.lines_per_chunk)


class LosesAVote(StandIn):
    """Its tallies go up with one bit changed."""

    def next_frame(self) -> bytes | None:
        frame = super().next_frame()
        if frame is None or len(frame) < 128 or Header.unpack(frame[HEADERS_BYTES:]).type is not FrameType.CONTRIBUTE:
            return frame
        payload = bytearray(frame[HEADERS_BYTES:])
        payload[30] ^= 1
        again = self._framed(next(iter(self.opened.values())).parent.address, bytes(payload))  # type: ignore[union-attr]
        return again[0]


class Mute(StandIn):
    """Sends nothing."""

    def next_frame(self) -> bytes | None:
        return None


@pytest.mark.parametrize(
    ("kind", "message"), [(LosesAVote, "elements are wrong"), (Mute, "for 6000 cycles no worker has heard")]
)
def test_fault_in_a_child(kind: type[StandIn], message: str) -> None:
    devices = StandIns({name: (kind if name == "left" else StandIn)(SMALL, SEED) for name in TREE})
    with pytest.raises((Mismatch, BenchTimeoutError), match=message):
        run(Fabric(Tree(SMALL, SEED, buckets=1)), devices)
