"""A bench of the core in Amaranth's simulator: drive, record every cycle, judge afterwards."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amaranth.hdl import Value
from amaranth.lib import data
from amaranth.sim import Simulator

from neuron_fabric.hw import EVENTS, ReducerCore, make_config
from neuron_fabric.hw.layout import contribution_layout, result_layout
from neuron_fabric.model import Encoding, ReducerParams
from neuron_fabric.model.reducer import JobConfig

from .reference import ALL, Frame, NaiveReducer, Result

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

LIMIT = 20_000
"""Cycles after which something that is waited for will not come any more."""

Ready = Callable[[int], bool]
"""Whether the sink is ready in a cycle."""


@contextmanager
def seeded(*salt: object) -> Iterator[random.Random]:
    """A random generator; says how to repeat the run if it fails."""
    try:
        yield random.Random(f"{SEED}/{salt}")
    except BaseException as error:
        error.add_note(f"repeat with NEURON_FABRIC_SEED={SEED}")
        raise


def always(_cycle: int) -> bool:
    return True


def sometimes(rng: random.Random, probability: float) -> Ready:
    return lambda _cycle: rng.random() < probability


async def tick_until(ctx: Any, signal: Any, what: str, limit: int = LIMIT) -> None:
    """As ``ctx.tick().until(signal)``, but not for ever."""
    for _ in range(limit):
        _clk, reset, done = await ctx.tick().sample(signal)
        if done and not reset:
            return
    raise TimeoutError(f"{limit} cycles waiting for {what}")


async def tick_while(ctx: Any, busy: Callable[[], bool], what: str, limit: int = LIMIT) -> None:
    """Ticks while ``busy()``, but not for ever."""
    for _ in range(limit):
        if not busy():
            return
        await ctx.tick()
    raise TimeoutError(f"{limit} cycles waiting for {what}")


def pack(layout: data.StructLayout, values: dict[str, int]) -> int:
    return sum(value << layout[name].offset for name, value in values.items())


def unpack(layout: data.StructLayout, bits: int) -> dict[str, int]:
    return {name: bits >> f.offset & ((1 << f.width) - 1) for name, f in layout}


def beats(params: ReducerParams, frame: Frame) -> list[dict[str, int]]:
    """A frame as the beats of the contribution stream."""
    common = {
        "bank": 0,
        "voters": 1,
        "worker": frame.worker,
        "chunk": frame.chunk,
        "plane": frame.plane,
        "lines": frame.lines,
    }
    if frame.abstain:
        return [common | {"first": 1, "last": 1, "kind": 1, "data": (1 << params.lanes) - 1}]
    assert len(frame.data) == frame.lines
    return [
        common | {"first": int(k == 0), "last": int(k == frame.lines - 1), "kind": 0, "data": bits}
        for k, bits in enumerate(frame.data)
    ]


@dataclass
class Trace:
    """What was seen, cycle by cycle."""

    sent: list[int] = field(default_factory=list)
    """Cycles in which a contribution beat was transferred."""
    held: int = 0
    """The most cycles in a row in which a beat was held back."""
    came: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)
    """Result beats: first cycle in which it was valid, cycle of the transfer, fields."""
    events: Counter[str] = field(default_factory=Counter)

    def results(self) -> list[Result]:
        """The beats put together; checks their framing."""
        results = []
        beats = iter(fields for _valid, _taken, fields in self.came)
        for head in beats:
            planes: list[tuple[int, ...]] = []
            beat = head
            for plane in range(head["planes"]):
                lines = []
                for line in range(head["lines"]):
                    if plane or line:
                        beat = next(beats)
                    assert beat["first"] == (line == 0)
                    assert beat["last"] == (line == head["lines"] - 1)
                    assert beat["plane"] == plane
                    for name in ("destination", "chunk", "planes", "lines", "voters", "flags"):
                        assert beat[name] == head[name], name
                    lines.append(beat["data"])
                planes.append(tuple(lines))
            results.append(Result(head["destination"], head["chunk"], head["lines"], head["voters"], tuple(planes)))
        return results


class CoreBench:
    """The core for one job, with a naive model beside it."""

    def __init__(
        self,
        params: ReducerParams,
        encoding: Encoding,
        members: Iterable[int] | int,
        majority: bool = False,
        margin: int = 0,
    ) -> None:
        self.params, self.encoding, self.majority = params, encoding, majority
        self.members = list(range(members)) if isinstance(members, int) else list(members)
        self.core = ReducerCore(params)
        job = JobConfig(0, 0, self.members, encoding, "majority" if majority else "tally", margin)
        self.config = make_config(job, params)
        self.model = NaiveReducer(params, encoding, self.members, majority, margin)
        self.trace = Trace()
        self.cycle = 0
        self.idle = 0
        self.limit = LIMIT

    def line(self, rng: random.Random) -> int:
        return rng.getrandbits(self.params.lanes)

    def frame(self, rng: random.Random, worker: int, chunk: int, lines: int, plane: int = 0) -> Frame:
        return Frame(worker, chunk, lines, plane, tuple(self.line(rng) for _ in range(lines)))

    async def put(self, ctx: Any, frame: Frame, pause: Ready | None = None) -> None:
        """Send a frame; ``pause`` says in which cycles to wait before a beat."""
        layout = contribution_layout(self.params)
        port = self.core.contribution
        what = f"contribution.ready, with a frame of worker {frame.worker} for chunk {frame.chunk}"
        for beat in beats(self.params, frame):
            if pause is not None:
                await tick_while(ctx, lambda: pause(self.cycle), "the end of a pause of the source", self.limit)
            ctx.set(Value.cast(port.payload), pack(layout, beat))
            ctx.set(port.valid, 1)
            await tick_until(ctx, port.ready, what, self.limit)
            ctx.set(port.valid, 0)

    async def drain(self, ctx: Any, cycles: int = 60) -> None:
        """Wait until nothing has come for a while."""
        self.idle = 0
        what = f"{cycles} cycles without result.valid"
        await tick_while(ctx, lambda: self.idle < cycles, what, self.limit)

    def run(self, main: Callable[[Any], Any], ready: Ready = always) -> Trace:
        """Run ``main(ctx)`` with a recorder and a sink beside it."""
        core, trace = self.core, self.trace
        sim = Simulator(core)
        sim.add_clock(1e-6)

        async def record(ctx: Any) -> None:
            source, sink = core.contribution, core.result
            previous: int | None = None
            since = held = 0
            event_layout = EVENTS
            ticks: AsyncIterator[Any] = ctx.tick().sample(
                source.valid,
                source.ready,
                sink.valid,
                sink.ready,
                Value.cast(sink.payload),
                Value.cast(core.events),
            )
            async for _clk, rst, in_valid, in_ready, out_valid, out_ready, payload, events in ticks:
                if not rst:
                    held = held + 1 if in_valid and not in_ready else 0
                    trace.held = max(trace.held, held)
                    if in_valid and in_ready:
                        trace.sent.append(self.cycle)
                    if previous is not None:
                        assert out_valid, "valid was taken back"
                        assert payload == previous, "the payload changed while it waited"
                    elif out_valid:
                        since = self.cycle
                    previous = payload if out_valid and not out_ready else None
                    if out_valid and out_ready:
                        trace.came.append((since, self.cycle, unpack(result_layout(self.params), payload)))
                    self.idle = 0 if out_valid else self.idle + 1
                    for name, value in unpack(event_layout, events).items():
                        trace.events[name] += value
                else:
                    previous = None
                self.cycle += 1

        async def sink(ctx: Any) -> None:
            while True:
                ctx.set(core.result.ready, ready(self.cycle))
                await ctx.tick()

        async def driver(ctx: Any) -> None:
            ctx.set(core.config[0], self.config)
            ctx.set(core.group, 1)
            ctx.set(core.quiet, 1)
            await main(ctx)

        sim.add_testbench(driver)
        sim.add_testbench(record, background=True)
        sim.add_testbench(sink, background=True)
        sim.run()
        return trace

    def play(
        self,
        frames: Iterable[Frame],
        ready: Ready = always,
        pause: Ready | None = None,
        space: int | None = None,
    ) -> list[Result]:
        """Send frames through core and model, compare, and give back what came.

        With ``space`` the bench waits that many idle cycles after each frame, so that every result that is due must
        come, in order; without it a result may be lost to a later claim of its slot version, as the protocol allows,
        and several requests of the same worker may be answered by one.
        """
        frames = list(frames)
        due = [result for frame in frames if (result := self.model.receive(frame)) is not None]

        async def main(ctx: Any) -> None:
            for frame in frames:
                await self.put(ctx, frame, pause)
                if space is not None:
                    await self.drain(ctx, space)
            await self.drain(ctx, 60 + 4 * self.params.slots)

        trace = self.run(main, ready)
        came = trace.results()
        if space is not None:
            assert came == due
        else:
            self.check_results(due, came)
        self.check_events()
        for _valid, _taken, fields in trace.came:
            assert fields["flags"] == self.majority | (fields["destination"] != ALL) << 2
        return came

    def check_results(self, due: list[Result], came: list[Result]) -> None:
        wanted, got = Counter(due), Counter(came)
        for result, count in got.items():
            assert count <= wanted[result], f"too often, or wrong: {result}"
        # What a slot version holds in the end has not been claimed, so nothing of it may be missing.
        held = {state.chunk for state in self.model.versions.values()}
        for result in wanted:
            if result.chunk in held and result not in got:
                assert result.destination != ALL, f"missing: {result}"
                everybody = Result(ALL, result.chunk, result.lines, result.voters, result.data)
                assert everybody in got, f"neither sent nor still owed to everybody: {result}"

    def check_events(self) -> None:
        seen = {name: count for name, count in self.trace.events.items() if count and name != "result_sent"}
        assert seen == {name: count for name, count in self.model.events.items() if count}
        assert self.trace.events["result_sent"] == len(self.trace.results())
