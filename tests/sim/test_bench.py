"""The bench against ports that do what no good design does."""

from __future__ import annotations

import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.sim.bench import Bench, BenchTimeoutError
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.stimulus import scenario
from neuron_fabric.sim.streams import StreamRuleError

SMALL = ReducerParams(lanes=64, lines_per_chunk=2, slots=1, workers=2, acc_bits=2, max_planes=1)


class Ports:
    """Outputs that follow a script."""

    def __init__(self, ready: bool = True, valid: str = "0", last: str = "0", keep: int = 0xFF) -> None:
        self.ready, self.valid, self.last, self.keep = ready, valid, last, keep
        self.cycle = -1

    def s_ready(self) -> bool:
        return self.ready

    def m_valid(self) -> bool:
        self.cycle += 1
        return self.valid[self.cycle % len(self.valid)] == "1"

    def m_beat(self) -> tuple[int, bool, int]:
        return 0, self.last[self.cycle % len(self.last)] == "1", self.keep


def run(ports: Ports, sink: str = "always") -> Bench:
    made = scenario("full_rate", SMALL, 1, chunks=3, encoding="binary")
    return finish(Bench(made, source="always", sink=sink, patience=200), ports)


def finish(bench: Bench, ports: Ports) -> Bench:
    while not bench.done:
        assert bench.cycle < 50_000
        bench.drive()
        bench.observe(ports)
    return bench


def test_input_that_is_never_ready() -> None:
    message = r"200 cycles without a beat, waiting for s_axis_tready for beat 0 of frame 0 \(contribute\)"
    with pytest.raises(BenchTimeoutError, match=message):
        run(Ports(ready=False))


def test_no_results() -> None:
    """The third chunk would claim the first one's slot version, so it is held back."""
    message = "200 cycles without a beat, waiting for results: chunk 0 to all, chunk 1 to all$"
    with pytest.raises(BenchTimeoutError, match=message):
        run(Ports())


def test_valid_falls() -> None:
    with pytest.raises(StreamRuleError, match="valid fell"):
        run(Ports(valid="0000010"), sink="last")


def test_endless_frame() -> None:
    with pytest.raises(Mismatch, match="m_axis_tlast does not come"):
        run(Ports(valid="1"))


def test_beat_with_null_bytes() -> None:
    with pytest.raises(Mismatch, match="m_axis_tkeep is 0x7f"):
        run(Ports(valid="1", keep=0x7F))


def test_result_that_nobody_has_asked_for() -> None:
    with pytest.raises(Mismatch, match="without a good header"):
        run(Ports(valid="1", last="1"))


def test_rest_of_a_result_does_not_come() -> None:
    """Nothing is owed, and half a result has come."""
    bench = Bench(scenario("not_open", SMALL, 1), source="always", sink="always", patience=200)
    ports = Ports(valid="0000011" + 2000 * "0")
    with pytest.raises(BenchTimeoutError, match="waiting for the rest of a result, up to m_axis_tlast"):
        finish(bench, ports)


@pytest.mark.parametrize("sink", ["pauses", "rarely", "last"])
def test_result_that_nobody_has_asked_for_at_the_end(sink: str) -> None:
    """It is offered when all was sent, perhaps while the sink is not ready; the bench does not end before it looks."""
    params = ReducerParams(64, 1, 1, 1, 1, 1)
    for seed in range(60):
        bench = Bench(scenario("not_open", params, seed), source="always", sink=sink)
        ports = Ports(valid=60 * "0" + 20_000 * "1", last="1")
        with pytest.raises(Mismatch, match="without a good header"):
            finish(bench, ports)


def test_quiet_cycles_outlast_patience() -> None:
    """With long chunks, and a sink that is seldom ready, the end takes longer than any beat may."""
    params = ReducerParams(64, 255, 1, 1, 1, 1)
    bench = Bench(scenario("not_open", params, 1), source="always", sink="rarely", patience=200)
    assert finish(bench, Ports()).cycle > 200


def test_events_are_compared() -> None:
    made = scenario("not_open", SMALL, 1)
    bench = Bench(made, source="always", sink="always")
    finish(bench, Ports())
    good = {"bad_job": len(made.frames), "stale": 0, "result_sent": 0}
    bench.check_events(good)
    with pytest.raises(Mismatch, match="events: stale 1 times, expected 0"):
        bench.check_events(good | {"stale": 1})
