"""The bench of the in-network endpoint on the golden model with ports: what is right passes, what is wrong is found."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, Straggler
from neuron_fabric.model.registerfile import Response
from neuron_fabric.model.registers import COUNTERS
from neuron_fabric.model.wire import FrameType, Header
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.mutations import MUTATIONS
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import StreamRuleError
from neuron_fabric.sim.udp.bench import Bench
from neuron_fabric.sim.udp.scenarios import SCENARIOS, bench_of
from neuron_fabric.sim.udp.stand_in import StandIn, run

SMALL = ReducerParams(lanes=512, lines_per_chunk=3, slots=4, workers=3, acc_bits=5, max_planes=3, jobs=2)
SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

OPTIONS: dict[str, dict[str, Any]] = {
    "random": {"frames": 500},
    "one_slot": {"chunks": 100},
    "slot_counts": {"slots": 2},
    "long_stall": {"cycles": 2000, "frames": 400},
    "every_encoding": {"chunks": 3},
}


def bench(name: str, seed: int, options: dict[str, Any] | None = None, **how: Any) -> Bench:
    return bench_of(name, SMALL, seed, OPTIONS.get(name, {}) | (options or {}), **how)


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - {"live"}))
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_what_is_right_passes(name: str, seed: int) -> None:
    made = bench(name, seed)
    run(made, StandIn(SMALL, seed))
    assert made.measured.frames
    assert made.measured.results


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_with_hardware_resets(seed: int) -> None:
    made = bench("random", seed, {"restarts": True, "events": 100, "frames": 600})
    run(made, StandIn(SMALL, seed))


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
def test_live_stragglers(seed: int) -> None:
    made = bench("live", seed)
    run(made, StandIn(SMALL, seed))
    assert made.measured.figures["partial"]


# ---- faults in the device ------------------------------------------------------------------------------------------


class Faulty(StandIn):
    """Does something wrong now and then."""

    def __init__(self, params: ReducerParams, seed: int) -> None:
        self.dice = random.Random(f"fault:{seed}")
        super().__init__(params, seed)

    def now(self, share: float = 0.05) -> bool:
        return self.dice.random() < share


class LosesAResult(Faulty):
    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        return [answer for answer in answers if not self.now()]


class SendsTwice(Faulty):
    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        return [list(answer) for answer in answers for _ in range(2 if self.now() else 1)]


class MixesPlanes(Faulty):
    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        return [answer[::-1] for answer in answers]


class MixesResults(Faulty):
    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        if len(answers) < 2 or len(answers[0]) < 2:
            return answers
        first, second, *rest = answers
        return [[first[0], second[0], *first[1:], *second[1:]], *rest]


class Damages(Faulty):
    """Changes one byte of some frames."""

    at: Callable[[bytes, random.Random], int]
    share = 0.05

    def next_frame(self) -> bytes | None:
        frame = super().next_frame()
        if frame is None or not self.now(self.share):
            return frame
        changed = bytearray(frame)
        changed[type(self).at(frame, self.dice)] ^= 1 << self.dice.randrange(8)
        return bytes(changed)


class WrongBit(Damages):
    at = staticmethod(lambda frame, dice: dice.randrange(64, len(frame)) if len(frame) > 64 else 63)


class WrongChecksum(Damages):
    at = staticmethod(lambda frame, dice: dice.choice([24, 25, 40, 41]))


class WrongDestination(Damages):
    at = staticmethod(lambda frame, dice: dice.choice([*range(6), *range(30, 34), 36, 37]))


class WrongHeader(Damages):
    at = staticmethod(lambda frame, dice: HEADERS_BYTES + dice.randrange(22))


class TooShort(Faulty):
    def next_frame(self) -> bytes | None:
        frame = super().next_frame()
        return frame[:-1] if frame is not None and self.now() else frame


class SwallowsNacks(Faulty):
    def next_frame(self) -> bytes | None:
        if self._nacks and self.now():
            self._nacks.popleft()
        return super().next_frame()


class InventsANack(Faulty):
    def next_frame(self) -> bytes | None:
        frame = super().next_frame()
        if frame is not None and Header.unpack(frame[HEADERS_BYTES:]).type is FrameType.NACK and self.now(0.2):
            self._nacks.append(frame)
        return frame


class TurnsRelays(Faulty):
    def _take_nacks(self) -> None:
        super()._take_nacks()
        self._relays.reverse()


class Miscounts(Faulty):
    def counter(self, name: str) -> int:
        return super().counter(name) + (name == "duplicates" and self.now(0.5))


class CountsTooMuch(Faulty):
    """What is counted is certain only when all is quiet, but not any value is possible before that."""

    def counter(self, name: str) -> int:
        return super().counter(name) + (1000 if name == "frames" and not self._quiet() else 0)

    def _quiet(self) -> bool:
        return not self._pipeline and not self._frame


class ForgetsToCount(Faulty):
    def tick(self) -> None:
        stalled = self.observed["stall_out"]
        super().tick()
        if self.observed["stall_out"] > stalled and self.now():
            self.observed["stall_out"] -= 1


class ClockStops(Faulty):
    def tick(self) -> None:
        super().tick()
        if self.now(0.001):
            self.observed["cycles"] -= 1


class RegisterStuck(Faulty):
    def _read(self, address: int) -> tuple[int, int]:
        value, response = super()._read(address)
        return (value & ~1 if address >= 0x400 else value), response


class AnswersHoles(Faulty):
    def _read(self, address: int) -> tuple[int, int]:
        value, _response = super()._read(address)
        return value, int(Response.OKAY)


class StaysOpen(Faulty):
    def written(self, name: str, data: int) -> None:
        if name == "CONTROL":
            data &= ~1
        super().written(name, data)


class SendsForTheDead(Faulty):
    """Results of a version that was claimed meanwhile come all the same, after those of its new holder."""

    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        kept, self.kept = getattr(self, "kept", []), answers[:1]
        return [*answers[1:], *kept]


class Sleeps(Faulty):
    """Results come very late."""

    def _take_results(self) -> None:
        if self._now % 4096 < 50:
            super()._take_results()


class NeverReady(Faulty):
    def _outputs(self) -> None:
        super()._outputs()
        self._out["s_axis_tready"] &= int(self._now % 3000 < 1000)


class ValidFalls(Faulty):
    def _outputs(self) -> None:
        super()._outputs()
        self._out["m_axis_tvalid"] &= int(not self.now())


class HalfABeat(Faulty):
    def _outputs(self) -> None:
        super()._outputs()
        if self.now():
            self._out["m_axis_tkeep"] &= (1 << 63) - 1


def finding(attempts: Iterable[tuple[Bench, StandIn]]) -> str:
    """What a bench has to say about the first device in which it finds something."""
    for made, device in attempts:
        try:
            run(made, device)
        except (Mismatch, BenchTimeoutError, StreamRuleError) as error:
            return str(error)
    return ""


FAULTS: dict[type[Faulty], tuple[str, dict[str, Any]]] = {
    LosesAResult: ("cycles with a ready output, waiting for chunk", {}),
    SendsTwice: ("asked for . times, answered", {}),
    MixesPlanes: ("header field plane is", {}),
    MixesResults: ("begins in the middle of", {"polite": False}),
    WrongBit: ("elements? (is|differ)|header field", {}),
    WrongChecksum: ("Ethernet, IPv4 and UDP headers is|a NACK that nothing has caused|nobody has asked for", {}),
    WrongDestination: ("nobody has asked for|a NACK that nothing has caused", {}),
    WrongHeader: ("header field|nobody has asked for|without a good header|nothing has caused", {}),
    TooShort: ("bytes, expected|nothing has caused|nobody has asked for", {}),
    SwallowsNacks: ("NACKs did not come", {}),
    InventsANack: ("a NACK that nothing has caused", {}),
    TurnsRelays: ("a parent's result is not at all members yet|nobody has asked for", {"kinds": ["child"]}),
    Miscounts: ("duplicates is|COUNT_DUPLICATES is", {}),
    CountsTooMuch: ("COUNT_FRAMES is", {"frames": 6000}),
    ForgetsToCount: ("counters: stall_out is", {}),
    ClockStops: ("counters: cycles is", {"events": 40}),
    RegisterStuck: ("read of 0x4", {"frames": 3000}),
    AnswersHoles: ("read of .* response 0, expected 0, response 2", {"frames": 3000}),
    StaysOpen: ("counters: |answered|nothing has caused", {"events": 60}),
    SendsForTheDead: ("was claimed, and its successor|cycles with a ready output", {"polite": False}),
    Sleeps: ("cycles with a ready output, waiting for", {}),
    NeverReady: ("an input beat waits for|without progress, waiting for s_axis_tready", {}),
    ValidFalls: ("m_axis: valid fell", {}),
    HalfABeat: ("m_axis: tkeep is|the beat changed", {}),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_in_the_device(fault: type[Faulty]) -> None:
    message, options = FAULTS[fault]
    found = finding((bench("random", seed, options, sink="half"), fault(SMALL, seed)) for seed in range(12))
    assert re.search(message, found), found


class Hurries(Faulty):
    """Times chunks out before their time."""

    def _config(self, bank: int) -> JobConfig:
        config = super()._config(bank)
        rule = config.straggler
        if rule is not None:
            object.__setattr__(config, "straggler", Straggler(rule.timeout // 2, rule.quorum))
        return config


class Oversleeps(Faulty):
    """And long after it."""

    def _work(self) -> None:
        if self._now % 600 < 500:
            rules, now = self.endpoint.reducer, self._now
            advance = rules.advance
            rules.advance = lambda now: None  # type: ignore[method-assign]
            super()._work()
            rules.advance = advance  # type: ignore[method-assign]
            rules._now = now
        else:
            super()._work()


@pytest.mark.parametrize(
    ("fault", "message"), [(Hurries, "before .* cycles"), (Oversleeps, "its time was up|at no time")]
)
def test_fault_in_the_time(fault: type[Faulty], message: str) -> None:
    found = finding((bench("live", seed, slack=60), fault(SMALL, seed)) for seed in range(4))
    assert re.search(message, found), found


class ClosesByHalves(Faulty):
    """Of a frame that finds its job closed something is left."""

    def receive(self, frame: bytes) -> None:
        before = self.endpoint.reducer.counters["refused_job_not_open"]
        super().receive(frame)
        if self.endpoint.reducer.counters["refused_job_not_open"] > before and self.now(0.3):
            self.endpoint.reducer.counters["lines"] += 1


def test_fault_in_closing() -> None:
    found = finding((bench("strikes", seed), ClosesByHalves(SMALL, seed)) for seed in range(4))
    assert "counters: " in found


# ---- faults in the golden model ------------------------------------------------------------------------------------

SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "quorum-of-one": ("stragglers", {}),
    "late-unnoticed": ("stragglers", {}),
    "abstainers-missed": ("stragglers", {}),
    "parents-epoch": ("random", {"kinds": ["child"]}),
    "voters-per-plane": ("random", {"frames": 1500}),
}
"""Where a fault does not show in just any traffic."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_fault_in_the_golden_model(name: str) -> None:
    """As if the gateware were right and the model wrong: the two differ, and that is noticed."""
    scenario, options = SHOWN.get(name, ("random", {}))
    assert finding((bench(scenario, seed, options, mutation=name), StandIn(SMALL, seed)) for seed in range(6))


TIMING = {"nacks_dropped", "relays_dropped", "stall_in", "stall_out", "busy", "cycles"}
"""Counters that the golden model does not have, or that count nothing as long as it is asked after every frame."""


# ---- stimulus ------------------------------------------------------------------------------------------------------


def test_same_seed_same_steps() -> None:
    for name in SCENARIOS:
        assert bench(name, 7).script.steps == bench(name, 7).script.steps
    assert bench("random", 7).script.steps != bench("random", 8).script.steps


def test_random_traffic_leaves_nothing_out() -> None:
    """Over a few seeds every counter of the protocol and of the receiver counts, and every kind of step occurs.

    But one: a checksum that does not hold is found by the receiver, so the protocol never sees one.
    """
    counted: set[str] = set()
    steps: set[str] = set()
    for seed in range(8):
        made = bench("random", seed, {"restarts": True, "events": 60, "frames": 1200})
        steps |= {type(step).__name__ for step in made.script.steps}
        device = StandIn(SMALL, seed)
        counters = made.oracle.counters
        while not made.done:
            made.drive(device)
            made.observe(device)
            device.tick()
            counters = made.oracle.counters
            counted |= counters.keys()
    assert steps == {"Send", "Open", "Close", "Reset", "Restart", "Check", "Clear", "Expire", "Block", "Sweep"}
    expected = {name for name, doc in COUNTERS if not doc.startswith("CXL: ")} - TIMING - {"refused_bad_checksum"}
    assert counted >= expected, expected - counted


def test_unknown_scenario() -> None:
    with pytest.raises(ValueError, match="no scenario 'gibt es nicht': there are random, "):
        bench("gibt es nicht", 0)
