"""The core with several jobs against the golden model: pools, stragglers, trees, unicast, opening and closing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator

from neuron_fabric.hw import EVENTS, ReducerCore, make_config
from neuron_fabric.hw.layout import contribution_layout, refusal_layout, result_layout
from neuron_fabric.model import BINARY, TERNARY, ReducerParams, int_encoding, tally_encoding
from neuron_fabric.model.reducer import JobConfig, Outgoing, Parent, SignCountReducer, Straggler
from neuron_fabric.model.wire import DESTINATION_ALL, Flags, FrameType, Header, Reason

from .bench import LIMIT, Ready, always, pack, seeded, sometimes, tick_until, tick_while, unpack

PARAMS = ReducerParams(lanes=16, lines_per_chunk=3, slots=8, workers=4, acc_bits=5, max_planes=3, jobs=3)
TIMEOUT = 900
REASONS = (Reason.STALE, Reason.LINES_DIFFER, Reason.ABSTAIN_AFTER_VOTE)
EVENT_OF = {
    "accepted_line": "lines",
    "duplicate": "duplicates",
    "late": "late",
    "stale": "stale",
    "abandoned": "abandoned",
    "partial": "partial",
    "result_sent": "results",
}
"""Events of the core that a counter of the model has one for one."""


@dataclass(frozen=True)
class Vote:
    """A frame as it reaches the core."""

    bank: int
    header: Header
    lines: tuple[int, ...] = ()

    def payload(self, params: ReducerParams) -> bytes:
        return self.header.pack() + b"".join(line.to_bytes(params.line_bytes, "little") for line in self.lines)


@dataclass(frozen=True)
class Sent:
    """A frame as it leaves: whom it goes to, header and lines."""

    bank: int
    to: int | str
    header: Header
    lines: tuple[int, ...]


class PoolBench:
    """Core and model side by side; job ``j`` is in bank ``j``."""

    def __init__(self, params: ReducerParams, jobs: list[JobConfig], group: bool = True, ready: Ready = always) -> None:
        self.params, self.group, self.ready = params, group, ready
        self.core = ReducerCore(params)
        self.model = SignCountReducer(params, nack_queue=1 << 30)
        self.jobs = jobs
        self.due: list[Sent] = []
        self.nacks: list[tuple[int, ...]] = []
        self.came: list[Sent] = []
        self.refused: list[tuple[int, ...]] = []
        self.events: Counter[str] = Counter()
        self.level = self.cycle = self.idle = self.held = 0
        self.time = 0

    # ---- the model ---------------------------------------------------------------------------------------------

    def expect(self, outgoing: Outgoing) -> None:
        header = outgoing.header
        size = self.params.line_bytes
        if header.type is FrameType.NACK:
            bank = next(bank for bank, job in enumerate(self.jobs) if job.job == header.job)
            self.nacks.append((header.reason, bank, header.worker, header.chunk, header.plane, header.lines))
            return
        body = outgoing.body
        # The line of a PARTIAL result has 64 bytes on the wire; a narrower core gives one beat.
        if header.flags & Flags.PARTIAL:
            body = body[: header.lines * size] + body[header.lines * size :][:size]
        lines = tuple(int.from_bytes(body[at : at + size], "little") for at in range(0, len(body), size))
        if header.type is not FrameType.RESULT:
            bank = next(
                bank for bank, job in enumerate(self.jobs) if job.parent is not None and job.parent.job == header.job
            )
            self.due.append(Sent(bank, "up", header, lines))
            return
        bank = next(bank for bank, job in enumerate(self.jobs) if job.job == header.job)
        targets: list[int | str] = [header.worker]
        if header.worker == DESTINATION_ALL:
            targets = ["group"] if self.group else list(self.jobs[bank].members)
        self.due += [Sent(bank, target, header, lines) for target in targets]

    def feed(self, vote: Vote) -> Reason:
        reason = self.model.receive(vote.payload(self.params))
        assert reason in (Reason.NONE, *REASONS), f"the bench sends only what is valid, but: {reason.name}"
        self.poll()
        return reason

    def poll(self) -> None:
        for outgoing in self.model.poll():
            self.expect(outgoing)

    # ---- the core ----------------------------------------------------------------------------------------------

    async def put(self, ctx: Any, vote: Vote, pause: Ready | None = None) -> None:
        port, header = self.core.contribution, vote.header
        layout = contribution_layout(self.params)
        common = {
            "bank": vote.bank,
            "worker": header.worker,
            "chunk": header.chunk,
            "plane": header.plane,
            "lines": header.lines,
            "voters": header.voters,
            "kind": int(header.type is FrameType.ABSTAIN),
        }
        beats = vote.lines or (0,)
        for index, data in enumerate(beats):
            if pause is not None:
                await tick_while(ctx, lambda: pause(self.cycle), "the end of a pause of the source")
            values = common | {"first": int(index == 0), "last": int(index == len(beats) - 1), "data": data}
            ctx.set(Value.cast(port.payload), pack(layout, values))
            ctx.set(port.valid, 1)
            await tick_until(ctx, port.ready, f"contribution.ready with {header}")
            ctx.set(port.valid, 0)

    async def drain(self, ctx: Any, cycles: int = 2 * 16 + 12) -> None:
        """Until nothing has come for so long that every slot version was visited."""
        self.idle = 0
        await tick_while(ctx, lambda: self.idle < cycles, "the end of the results")

    async def change(self, ctx: Any, bank: int, config: JobConfig | None) -> None:
        """Open or close as the register slave would."""
        core = self.core
        if config is None:
            self.model.close(self.jobs[bank].job)
            port = core.closed
        else:
            self.model.open(config)
            self.jobs[bank] = config
            ctx.set(core.config[bank], make_config(config, self.params))
            port = core.opened
        ctx.set(port, 1 << bank)
        await ctx.tick()
        ctx.set(port, 0)
        await tick_until(ctx, ~core.hold, "the fall of hold")

    async def sleep(self, ctx: Any) -> None:
        """Longer than the timeout of any job."""
        await ctx.tick().repeat(TIMEOUT + 8 * self.params.slots)
        self.time += TIMEOUT
        self.model.advance(self.time)
        self.poll()

    def run(self, main: Callable[[Any], Any]) -> None:
        core = self.core
        sim = Simulator(core)
        sim.add_clock(1e-6)

        async def driver(ctx: Any) -> None:
            ctx.set(core.group, self.group)
            ctx.set(core.quiet, 1)
            for bank, job in enumerate(self.jobs):
                await self.change(ctx, bank, job)
            await main(ctx)

        async def sink(ctx: Any) -> None:
            while True:
                ctx.set(core.result.ready, self.ready(self.cycle))
                await ctx.tick()

        sim.add_testbench(driver)
        sim.add_testbench(self._record, background=True)
        sim.add_testbench(sink, background=True)
        sim.run()

    async def _record(self, ctx: Any) -> None:
        core = self.core
        beats: list[dict[str, int]] = []
        waiting: int | None = None
        ticks = ctx.tick().sample(
            core.contribution.valid,
            core.contribution.ready,
            core.result.valid,
            core.result.ready,
            Value.cast(core.result.payload),
            Value.cast(core.events),
            Value.cast(core.refusal),
            core.level,
        )
        stalled = 0
        async for _clk, _rst, offered, taken, valid, ready, payload, events, refusal, level in ticks:
            stalled = stalled + 1 if offered and not taken else 0
            self.held = max(self.held, stalled)
            if waiting is not None:
                assert (valid, payload) == (1, waiting), "a beat was changed or taken back while it waited"
            waiting = payload if valid and not ready else None
            self.idle = 0 if valid else self.idle + 1
            if valid and ready:
                beats.append(unpack(result_layout(self.params), payload))
                if beats[-1]["last"]:
                    self.came.append(self._frame(beats))
                    beats = []
            for name, value in unpack(EVENTS, events).items():
                self.events[name] += value
            fields = unpack(refusal_layout(self.params), refusal)
            if fields.pop("valid"):
                self.refused.append(tuple(fields.values()))
            self.level = max(self.level, level)
            self.cycle += 1

    def _frame(self, beats: list[dict[str, int]]) -> Sent:
        head = beats[0]
        assert [beat["first"] for beat in beats] == [1] + [0] * (len(beats) - 1)
        for beat in beats:
            assert all(beat[name] == head[name] for name in head if name not in ("first", "last", "data"))
        to: int | str = "up" if head["up"] else "group" if head["group"] else head["worker"]
        kind = FrameType.RESULT
        if head["up"]:
            kind = FrameType.ABSTAIN if head["empty"] else FrameType.CONTRIBUTE
        header = Header(
            kind,
            head["job"],
            head["destination"],
            head["chunk"],
            head["plane"],
            head["planes"],
            head["voters"],
            head["lines"],
            head["epoch"],
            Flags(head["flags"]),
            head["missing"],
        )
        return Sent(head["bank"], to, header, () if head["empty"] else tuple(beat["data"] for beat in beats))

    # ---- what must hold ----------------------------------------------------------------------------------------

    def check_counts(self, *but: str) -> None:
        counts = {event: self.model.counters[name] for event, name in EVENT_OF.items() if event not in but}
        assert {event: self.events[event] for event in counts} == counts
        assert self.events["completed"] + self.events["partial"] == self.model.counters["completed"]
        refused = sum(self.model.counters[f"refused_{reason.name.lower()}"] for reason in REASONS[1:])
        assert self.events["refused"] == refused
        assert sorted(self.refused) == sorted(self.nacks)
        assert self.level == self.model.counters["slot_high_water"]


def three_jobs(rng: random.Random, group: bool) -> list[JobConfig]:
    """A pool of eight slots: two, four and two of them."""
    return [
        JobConfig(11, 1, range(4), BINARY, multicast=False, base=6, slots=2, straggler=Straggler(TIMEOUT, 2)),
        JobConfig(
            12,
            5,
            (0, 2, 3),
            rng.choice([BINARY, TERNARY, int_encoding(2), int_encoding(3), tally_encoding(BINARY, 3)]),
            result_format="majority",
            margin=rng.randint(0, 2),
            base=0,
            slots=4,
        ),
        JobConfig(
            13,
            9,
            (1, 2, 3) if group else (3,),
            rng.choice([BINARY, TERNARY]),
            base=4,
            slots=1,
            parent=Parent(None, 77, rng.randrange(4), rng.randrange(1 << 16), leaves=6) if rng.random() < 0.7 else None,
        ),
    ]


def random_vote(bench: PoolBench, rng: random.Random, front: dict[int, int]) -> Vote:
    """Around the newest chunk of a job; often one that is needed, sometimes an older or a much newer one."""
    bank = rng.randrange(len(bench.jobs))
    job = bench.jobs[bank]
    slots = job.slots or bench.params.slots
    if rng.random() < 0.1:
        front[bank] += rng.choice([1, 1, 1, 2 * slots])
    chunk = (front[bank] - rng.choice([0] * 6 + list(range(2 * slots)) + [2 * slots])) % 2**32
    worker = rng.choice(list(job.members))
    lines = 1 + (chunk + (rng.random() < 0.03)) % bench.params.lines_per_chunk
    planes = job.encoding.planes
    plane = rng.randrange(planes)
    abstain = rng.random() < 0.15
    header = Header(
        FrameType.ABSTAIN if abstain else FrameType.CONTRIBUTE,
        job.job,
        worker,
        chunk,
        plane,
        planes,
        0 if abstain else rng.randint(1, job.encoding.leaves),
        lines,
        job.epoch,
    )
    data = () if abstain else tuple(rng.getrandbits(bench.params.lanes) for _ in range(lines))
    return Vote(bank, header, data)


@pytest.mark.parametrize("case", range(4))
def test_every_answer_in_its_turn(case: int) -> None:
    """With a pause after every frame nothing coalesces, so frames, refusals and counts are the model's, all of them."""
    with seeded(case) as rng:
        group = case % 2 == 0
        bench = PoolBench(PARAMS, three_jobs(rng, group), group, sometimes(rng, 0.8) if case % 3 else always)
        front = {bank: rng.choice([0, 2**32 - 5, 1000]) for bank in range(3)}

        async def main(ctx: Any) -> None:
            slept = 0
            for step in range(150):
                if bench.cycle - slept > TIMEOUT // 2:
                    # What was claimed since then has not timed out yet, and all of it will have.
                    await bench.sleep(ctx)
                    slept = bench.cycle
                elif rng.random() < 0.02:
                    bank = rng.randrange(3)
                    config = bench.jobs[bank]
                    if rng.random() < 0.5:
                        await bench.change(ctx, bank, None)
                    await bench.change(ctx, bank, replace(config, epoch=config.epoch + 1))
                else:
                    vote = random_vote(bench, rng, front)
                    bench.feed(vote)
                    await bench.put(ctx, vote)
                await bench.drain(ctx)
                bench.model.advance(bench.time)
                bench.poll()
                await bench.drain(ctx)
                assert Counter(bench.came) == Counter(bench.due), f"step {step}"
            assert bench.events["partial"]
            bench.check_counts()

        bench.run(main)


@pytest.mark.parametrize("case", range(4))
def test_without_a_pause(case: int) -> None:
    """Frames back to back, the output stalled at random: what comes is right, and what is still held comes."""
    with seeded("gapless", case) as rng:
        group = case % 2 == 0
        jobs = [replace(job, straggler=None) for job in three_jobs(rng, group)]
        bench = PoolBench(PARAMS, jobs, group, sometimes(rng, rng.choice([0.2, 0.6, 1.0])))
        front = dict.fromkeys(range(3), 100)
        pause = None if case % 3 else sometimes(rng, 0.3)

        async def main(ctx: Any) -> None:
            for _ in range(800):
                vote = random_vote(bench, rng, front)
                bench.feed(vote)
                await bench.put(ctx, vote, pause)
            await bench.drain(ctx, 200)

        bench.run(main)
        wanted, got = Counter(bench.due), Counter(bench.came)
        assert not got - wanted, "too often, or wrong"
        # Everybody's result of a chunk that is still held must have come.
        for sent in wanted:
            chunk, job = sent.header.chunk, bench.model._jobs[bench.jobs[sent.bank].job]
            held = job.state(chunk)
            # Who asks again may be answered by the result to all.
            if held.complete and held.chunk == chunk and not sent.header.flags & Flags.RESEND:
                assert got[sent], sent
        bench.check_counts("result_sent")
        assert bench.held <= PARAMS.lines_per_chunk + 1


def test_partial_results_say_who_is_counted() -> None:
    with seeded() as rng:
        config = JobConfig(1, 1, range(4), BINARY, straggler=Straggler(TIMEOUT, 1))
        bench = PoolBench(replace(PARAMS, jobs=1), [config])

        def vote(worker: int, abstain: bool = False) -> Vote:
            kind = FrameType.ABSTAIN if abstain else FrameType.CONTRIBUTE
            header = Header(kind, 1, worker, 7, 0, 1, 1 - abstain, 2, 1)
            return Vote(0, header, () if abstain else (rng.getrandbits(16), rng.getrandbits(16)))

        async def main(ctx: Any) -> None:
            for one in (vote(0, abstain=True), vote(3)):
                bench.feed(one)
                await bench.put(ctx, one)
            await bench.sleep(ctx)
            await bench.drain(ctx)
            for one in (vote(1), vote(3), vote(0, abstain=True)):
                bench.feed(one)
                await bench.put(ctx, one)
                await bench.drain(ctx)

        bench.run(main)
        assert bench.came == bench.due
        first = bench.came[0]
        assert (first.header.flags, first.header.missing, first.header.voters) == (Flags.PARTIAL, 2, 1)
        assert first.lines[-1] == 1 << 3  # who is counted
        assert (bench.events["late"], bench.events["duplicate"]) == (1, 2)
        bench.check_counts()


def test_a_timeout_without_a_quorum_waits_for_it() -> None:
    """Also for more than a round of the clock's comparison: a version that has timed out stays so."""
    with seeded() as rng:
        config = JobConfig(1, 1, range(4), BINARY, straggler=Straggler(TIMEOUT, 2))
        bench = PoolBench(replace(PARAMS, jobs=1), [config])
        votes = [
            Vote(0, Header(FrameType.CONTRIBUTE, 1, worker, 3, 0, 1, 1, 1, 1), (rng.getrandbits(16),))
            for worker in range(2)
        ]

        async def main(ctx: Any) -> None:
            bench.feed(votes[0])
            await bench.put(ctx, votes[0])
            await bench.sleep(ctx)
            await bench.sleep(ctx)
            assert not bench.came
            bench.feed(votes[1])
            bench.model.advance(bench.time)
            bench.poll()
            await bench.put(ctx, votes[1])
            await bench.drain(ctx)

        bench.run(main)
        assert {sent.header.missing for sent in bench.came} == {2}
        assert bench.came == bench.due


@pytest.mark.parametrize("gap", [0, 1, 2])
@pytest.mark.parametrize("lines", [1, 2, 3])
@pytest.mark.parametrize("slots", [2, 8])
def test_timeouts_pass_beside_frames_in_step(slots: int, lines: int, gap: int) -> None:
    """Frames of one length, back to back, leave the same cycle free again and again: visits must not depend on it."""
    with seeded(slots, lines, gap) as rng:
        params = ReducerParams(lanes=8, lines_per_chunk=3, slots=2 * slots, workers=3, acc_bits=3, max_planes=1, jobs=2)
        jobs = [
            JobConfig(1, 1, range(3), BINARY, base=0, slots=slots, straggler=Straggler(100, 1)),
            JobConfig(2, 1, range(2), BINARY, "majority", base=slots, slots=slots),
        ]
        bench = PoolBench(params, jobs)

        def vote(bank: int, worker: int, chunk: int) -> Vote:
            header = Header(FrameType.CONTRIBUTE, bank + 1, worker, chunk, 0, 1, 1, lines, 1)
            return Vote(bank, header, tuple(rng.getrandbits(8) for _ in range(lines)))

        async def main(ctx: Any) -> None:
            for chunk in range(2 * slots):
                await bench.put(ctx, vote(0, 0, chunk))
            chunk = 0
            while bench.cycle < 2500:
                for worker in range(2):
                    await bench.put(ctx, vote(1, worker, chunk))
                    for _ in range(gap):
                        await ctx.tick()
                chunk += 1

        bench.run(main)
        assert bench.events["partial"] == 2 * slots
        assert bench.events["completed"] > 100


def test_a_straggler_in_the_middle_of_its_frame_is_counted_whole() -> None:
    """The timeout passes while a contribution's lines are still coming: it is in the result with all its lines."""
    with seeded() as rng:
        config = JobConfig(1, 1, range(3), BINARY, straggler=Straggler(400, 2))
        bench = PoolBench(replace(PARAMS, jobs=1), [config])
        votes = [
            Vote(
                0,
                Header(FrameType.CONTRIBUTE, 1, worker, 3, 0, 1, 1, 3, 1),
                tuple(rng.getrandbits(16) for _ in range(3)),
            )
            for worker in range(2)
        ]

        async def main(ctx: Any) -> None:
            await bench.put(ctx, votes[0])
            begun = bench.cycle
            # One line before the timeout and two well after it.
            await bench.put(ctx, votes[1], lambda cycle: begun + 1 < cycle < begun + 900)
            await bench.drain(ctx)

        bench.run(main)
        for vote in votes:
            bench.feed(vote)
        bench.model.advance(400)
        bench.poll()
        assert bench.came == bench.due
        assert bench.came[0].header.voters == 2


def test_closing_between_frames() -> None:
    """With the output shut, results of the closed job that have not begun to leave never do, those of others come."""
    with seeded() as rng:
        jobs = [
            JobConfig(1, 1, (0,), BINARY, base=0, slots=4),
            JobConfig(2, 1, (0,), BINARY, base=4, slots=4),
        ]
        is_open = True
        bench = PoolBench(replace(PARAMS, jobs=2), jobs, ready=lambda _cycle: is_open)

        def vote(bank: int, chunk: int, epoch: int = 1) -> Vote:
            header = Header(FrameType.CONTRIBUTE, bank + 1, 0, chunk, 0, 1, 1, 3, epoch)
            return Vote(bank, header, tuple(rng.getrandbits(16) for _ in range(3)))

        async def main(ctx: Any) -> None:
            nonlocal is_open
            is_open = False
            await ctx.tick().repeat(2)
            votes = [vote(bank, chunk) for chunk in range(5) for bank in range(2)]
            for one in votes:
                bench.feed(one)
                await bench.put(ctx, one)
            await bench.change(ctx, 0, None)
            await bench.change(ctx, 0, replace(jobs[0], epoch=2))
            again = vote(0, 0, epoch=2)
            bench.feed(again)
            await bench.put(ctx, again)
            is_open = True
            await bench.drain(ctx, 100)
            # Its lines leave as slowly as they come in, and not before.
            slow = vote(0, 1, epoch=2)
            bench.feed(slow)
            await bench.put(ctx, slow, lambda cycle: bool(cycle % 16))
            await bench.drain(ctx, 100)

        bench.run(main)
        came = [(sent.bank, sent.header.epoch, sent.header.chunk) for sent in bench.came]
        assert came[0] == (0, 1, 0)  # it had begun
        assert sorted(came[1:]) == [(0, 2, 0), (0, 2, 1)] + [(1, 1, chunk) for chunk in range(5)]
        assert not Counter(bench.came) - Counter(bench.due)


def test_all_jobs_close_at_once_and_not_before_the_stage_in_front_is_quiet() -> None:
    with seeded() as rng:
        jobs = [JobConfig(1 + j, 1, (0, 1), BINARY, base=2 * j, slots=2) for j in range(3)]
        bench = PoolBench(PARAMS, jobs)

        def vote(bank: int, worker: int) -> Vote:
            header = Header(FrameType.CONTRIBUTE, bank + 1, worker, 0, 0, 1, 1, 1, 1)
            return Vote(bank, header, (rng.getrandbits(16),))

        async def main(ctx: Any) -> None:
            for bank in range(3):
                await bench.put(ctx, vote(bank, 0))
            ctx.set(bench.core.quiet, 0)
            ctx.set(bench.core.closed, 0b111)
            await ctx.tick()
            ctx.set(bench.core.closed, 0)
            await ctx.tick().repeat(100)
            assert ctx.get(bench.core.hold)
            # A frame whose header was looked at before still counts for the job that was open then.
            await bench.put(ctx, vote(0, 1))
            await bench.drain(ctx)
            assert len(bench.came) == 2  # planes of a tally of two
            ctx.set(bench.core.quiet, 1)
            await tick_until(ctx, ~bench.core.hold, "the fall of hold")
            for bank in range(3):
                await bench.put(ctx, vote(bank, 1))
            await bench.drain(ctx)
            assert len(bench.came) == 2  # worker 0 is forgotten everywhere
            assert ctx.get(bench.core.level) == 3

        bench.run(main)


def test_what_a_childs_members_ask_for_again_goes_up_once() -> None:
    with seeded() as rng:
        config = JobConfig(1, 1, (0, 1), BINARY, parent=Parent(None, 9, 2, 5, leaves=2))
        is_open = True
        bench = PoolBench(replace(PARAMS, jobs=1), [config], ready=lambda _cycle: is_open)

        async def main(ctx: Any) -> None:
            nonlocal is_open
            votes = {}
            for chunk in range(6):
                is_open = chunk == 0
                for worker in range(2):
                    header = Header(FrameType.CONTRIBUTE, 1, worker, chunk, 0, 1, 1, 3, 1)
                    votes[worker, chunk] = Vote(0, header, tuple(rng.getrandbits(16) for _ in range(3)))
                    bench.feed(votes[worker, chunk])
                    await bench.put(ctx, votes[worker, chunk])
                await ctx.tick().repeat(20)
            before = len(bench.came)
            # Four results fill the buffer, and one is owed.
            for worker in (0, 1, 0):
                await bench.put(ctx, votes[worker, 0])
            is_open = True
            await bench.drain(ctx, 100)
            again = [sent for sent in bench.came[before:] if sent.header.chunk == 0]
            assert [(sent.to, sent.header.plane) for sent in again] == [("up", 0), ("up", 1)]

        bench.run(main)


def test_input_that_leaves_no_cycle_is_held_for_one() -> None:
    """Frames of one beat in every cycle would keep visits from ever coming to what is owed."""
    with seeded() as rng:
        config = JobConfig(1, 1, (0, 1), BINARY)
        is_open = True
        bench = PoolBench(replace(PARAMS, jobs=1), [config], ready=lambda _cycle: is_open)

        async def main(ctx: Any) -> None:
            nonlocal is_open
            is_open = False
            for chunk in range(8):
                for worker in range(2):
                    header = Header(FrameType.CONTRIBUTE, 1, worker, chunk, 0, 1, 1, 3, 1)
                    one = Vote(0, header, tuple(rng.getrandbits(16) for _ in range(3)))
                    bench.feed(one)
                    await bench.put(ctx, one)
            is_open = True
            again = Vote(0, Header(FrameType.ABSTAIN, 1, 0, 9, 0, 1, 0, 3, 1))
            for _ in range(60 * ReducerCore.PATIENCE):
                await bench.put(ctx, again)
            assert sorted({sent.header.chunk for sent in bench.came}) == list(range(8))

        bench.run(main)
        assert bench.held == 1


def test_a_stall_is_made_up_for() -> None:
    """After the output stood still, results that were owed do not hold up those that follow: all soon come at once."""
    params = ReducerParams(lanes=8, lines_per_chunk=16, slots=16, workers=4, acc_bits=4, max_planes=1)
    with seeded() as rng:
        bench = PoolBench(params, [JobConfig(1, 1, range(4), BINARY, result_format="majority")])
        stalled = range(3000, 6000)
        bench.ready = lambda cycle: cycle not in stalled
        completed: dict[int, int] = {}
        came: dict[int, int] = {}

        async def main(ctx: Any) -> None:
            chunk = 0
            while bench.cycle < 12_000:
                for worker in range(4):
                    header = Header(FrameType.CONTRIBUTE, 1, worker, chunk, 0, 1, 1, 16, 1)
                    lines = tuple(rng.getrandbits(8) for _ in range(16))
                    if worker == 3:
                        completed[chunk] = bench.cycle
                    await bench.put(ctx, Vote(0, header, lines))
                    await ctx.tick()  # a header's
                    for sent in bench.came[len(came) :]:
                        came.setdefault(sent.header.chunk, bench.cycle)
                chunk += 1

        bench.run(main)
        after = {chunk: came.get(chunk, LIMIT) - cycle for chunk, cycle in completed.items() if 7000 < cycle < 11_000}
        assert max(after.values()) <= 150
        assert bench.held <= 16
