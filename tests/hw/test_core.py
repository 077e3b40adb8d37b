"""The reducer core against a naive model, in Amaranth's simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from amaranth.hdl import ClockDomain, Module
from amaranth.sim import Simulator

from neuron_fabric.hw import ReducerCore
from neuron_fabric.hw.layout import contribution_layout, result_layout
from neuron_fabric.model import BINARY, TERNARY, Encoding, ReducerParams, int_encoding, tally_encoding

from .bench import CoreBench, always, beats, pack, seeded, sometimes, tick_until, unpack
from .reference import ALL, Frame, NaiveReducer, Result

SMALL = ReducerParams(lanes=16, lines_per_chunk=4, slots=2, workers=3, acc_bits=4, max_planes=2)

ENCODINGS = [BINARY, TERNARY, int_encoding(2), int_encoding(3), tally_encoding(BINARY, 3), tally_encoding(TERNARY, 2)]


def votes(bench: CoreBench, rng: random.Random, chunk: int, lines: int) -> list[Frame]:
    """All frames of one chunk, every worker with all planes, in random order."""
    planes = range(bench.encoding.planes)
    frames = [bench.frame(rng, worker, chunk, lines, plane) for worker in bench.members for plane in planes]
    rng.shuffle(frames)
    return frames


@pytest.mark.parametrize(
    ("encoding", "majority"),
    [(encoding, False) for encoding in ENCODINGS]
    + [(encoding, True) for encoding in ENCODINGS if encoding.leaves == 1],  # of others, see test_pool
    ids=lambda value: getattr(value, "name", "majority" if value else "tally"),
)
def test_every_encoding(encoding: Encoding, majority: bool) -> None:
    params = ReducerParams(lanes=32, lines_per_chunk=3, slots=2, workers=3, acc_bits=5, max_planes=3)
    with seeded(encoding.name, majority) as rng:
        bench = CoreBench(params, encoding, 3, majority, margin=0)
        frames = [frame for chunk in range(12) for frame in votes(bench, rng, chunk, rng.randint(1, 3))]
        bench.play(frames, space=4)


@pytest.mark.parametrize("encoding", [BINARY, TERNARY, int_encoding(3)], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("margin", [0, 1, 2, 3, 7, 31])
def test_margins(encoding: Encoding, margin: int) -> None:
    params = ReducerParams(lanes=64, lines_per_chunk=2, slots=1, workers=4, acc_bits=5, max_planes=3)
    with seeded(encoding.name, margin) as rng:
        bench = CoreBench(params, encoding, 4, majority=True, margin=margin)
        frames = []
        for chunk in range(5):
            silent = rng.sample(range(4), rng.randint(0, 4))
            for worker in range(4):
                if worker in silent:
                    frames.append(Frame(worker, chunk, 2, abstain=True))
                else:
                    frames += [bench.frame(rng, worker, chunk, 2, plane) for plane in range(encoding.planes)]
        bench.play(frames, space=4)


def test_extremes_of_the_accumulator() -> None:
    """All ones and all zeros, where a tally takes every bit it has."""
    params = ReducerParams(lanes=8, lines_per_chunk=1, slots=1, workers=7, acc_bits=3, max_planes=2)
    for majority in (False, True):
        bench = CoreBench(params, BINARY, 7, majority)
        bench.play([Frame(w, c, 1, 0, (0xF0 | w,)) for c in range(3) for w in range(7)], space=4)
        bench = CoreBench(params, TERNARY, 3, majority)
        bench.play([Frame(w, 0, 1, p, (0xF0 >> 4 * p,)) for p in range(2) for w in range(3)], space=4)


def test_duplicates_before_and_after_completion() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, TERNARY, [0, 2])
        a, b, c = (bench.frame(rng, 0, 5, 3, 0), bench.frame(rng, 0, 5, 3, 1), bench.frame(rng, 2, 5, 3, 0))
        silent = Frame(2, 6, 3, abstain=True)
        d = bench.frame(rng, 2, 5, 3, 1)
        frames = [a, a, b, a, c, b, d, d, a, Frame(0, 5, 3, abstain=True), c]
        frames += [silent, silent, bench.frame(rng, 2, 6, 3, 0)]
        frames += [bench.frame(rng, 0, 6, 3, 0), bench.frame(rng, 0, 6, 3, 1), silent, bench.frame(rng, 2, 6, 3, 1)]
        came = bench.play(frames, space=4)
        assert [(result.destination, result.chunk) for result in came] == [
            (ALL, 5),
            (2, 5),
            (0, 5),
            (0, 5),
            (2, 5),
            (ALL, 6),
            (2, 6),
            (2, 6),
        ]
        assert bench.model.events["duplicate"] == 11


def test_stale_is_dropped() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 2)
        frames = votes(bench, rng, 9, 4)[:1] + votes(bench, rng, 5, 4) + [Frame(1, 1, 4, abstain=True)]
        frames += [Frame(0, 9, 4, abstain=True), Frame(1, 9, 4, abstain=True)]
        frames += [bench.frame(rng, worker, 9, 4) for worker in range(2)]
        bench.play(frames, space=4)
        assert bench.trace.events["stale"] == 3


def test_half_the_range_apart_is_not_newer() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 1)
        bench.play([bench.frame(rng, 0, chunk, 2) for chunk in (3, 3 + 2**31, 3 + 2**31 - 4, 3)], space=4)
        assert bench.trace.events["stale"] == 2


def test_chunk_numbers_wrap() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 3)
        frames = [frame for k in range(-12, 12) for frame in votes(bench, rng, k % 2**32, rng.randint(1, 4))]
        came = bench.play(frames, space=4)
        assert [result.chunk for result in came] == [k % 2**32 for k in range(-12, 12)]


@pytest.mark.parametrize("silent", [False, True], ids=["contribute", "abstain"])
@pytest.mark.parametrize("left", ["complete", "incomplete"])
def test_claim_carries_nothing_over(silent: bool, left: str) -> None:
    """A shorter chunk, then a longer one whose further lines still hold the first chunk's tallies."""
    with seeded(silent, left) as rng:
        bench = CoreBench(SMALL, BINARY, 3)
        frames = [Frame(w, 0, 4, 0, (0xFFFF,) * 4) for w in range(3 if left == "complete" else 2)]
        frames += [Frame(0, 4, 1, abstain=True) if silent else bench.frame(rng, 0, 4, 1)]
        frames += [bench.frame(rng, 1, 4, 1), Frame(2, 4, 1, abstain=True)]
        frames += [Frame(w, 8, 4, abstain=True) for w in range(3)]
        frames += votes(bench, rng, 12, 4)
        came = {result.chunk: result for result in bench.play(frames, space=4)}
        assert came[8].voters == 0
        assert came[8].data == ((0,) * 4,) * 2
        assert bench.trace.events["abandoned"] == (left == "incomplete")


def test_a_thousand_chunks_on_one_slot() -> None:
    params = ReducerParams(lanes=8, lines_per_chunk=2, slots=1, workers=2, acc_bits=2, max_planes=1)
    with seeded() as rng:
        bench = CoreBench(params, BINARY, 2)
        frames = [frame for chunk in range(1000) for frame in votes(bench, rng, chunk, 1 + (rng.random() < 0.1))]
        came = bench.play(frames)
        assert [result.chunk for result in came] == list(range(1000))
        assert bench.trace.held == 0


def test_another_line_count_is_refused() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 2)
        frames = [bench.frame(rng, 0, 7, 3), bench.frame(rng, 1, 7, 2), bench.frame(rng, 0, 7, 4)]
        frames += [Frame(1, 7, 4, abstain=True), bench.frame(rng, 1, 7, 3), bench.frame(rng, 1, 7, 1)]
        bench.play(frames, space=4)
        assert bench.trace.events["refused"] == 4


def test_abstain_after_some_planes_is_refused() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, TERNARY, 1)
        frames = [bench.frame(rng, 0, 1, 2, 0), Frame(0, 1, 2, abstain=True), bench.frame(rng, 0, 1, 2, 1)]
        bench.play([*frames, Frame(0, 1, 2, abstain=True)], space=4)
        assert bench.trace.events["refused"] == 1
        assert bench.trace.events["duplicate"] == 1


def test_one_member_who_is_not_the_first() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, [2])
        bench.play([bench.frame(rng, 2, chunk, 1 + chunk % 4) for chunk in range(20)], space=4)


def test_most_workers() -> None:
    params = ReducerParams(lanes=8, lines_per_chunk=1, slots=1, workers=64, acc_bits=7, max_planes=1)
    with seeded() as rng:
        bench = CoreBench(params, BINARY, 64)
        bench.play([frame for chunk in range(3) for frame in votes(bench, rng, chunk, 1)])


def test_full_width() -> None:
    params = ReducerParams()
    with seeded() as rng:
        bench = CoreBench(params, BINARY, 16)
        bench.play([frame for chunk in (3, 4) for frame in votes(bench, rng, chunk, 16)])


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["contribute", "abstain", "contribute after abstain"])
def test_latency(how: str, lines: int) -> None:
    """Exact, from the completing frame's first beat; so its last beat is never earlier than that before the result."""
    with seeded(how, lines) as rng:
        bench = CoreBench(SMALL, BINARY, 2, majority=True)
        one, two = bench.frame(rng, 0, 0, lines), bench.frame(rng, 1, 0, lines)
        silent = Frame(0, 0, lines, abstain=True)
        frames = {
            "contribute": [one, two],
            "abstain": [two, silent],
            "contribute after abstain": [silent, two],
        }[how]
        bench.play(frames)
        beats_of_last = 1 if how == "abstain" else lines
        first = bench.trace.sent[-beats_of_last]
        valid = [since for since, _taken, _fields in bench.trace.came]
        assert valid[0] - first == ReducerCore.LATENCY == 5
        assert valid == [valid[0] + k for k in range(2 * lines)]


def test_latency_is_kept_behind_another_result() -> None:
    """Back to back on two slots: the second result follows the first without a gap."""
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 1)
        bench.play([bench.frame(rng, 0, chunk, 4) for chunk in range(50)])
        assert bench.trace.sent == list(range(bench.trace.sent[0], bench.trace.sent[0] + 200))
        assert [since for since, _taken, _fields in bench.trace.came] == [cycle + 5 for cycle in bench.trace.sent]


@pytest.mark.parametrize(
    ("members", "majority", "lines", "total"),
    [
        (2, True, 4, 2400),
        (4, False, 4, 2400),
        (2, True, 1, 600),
        (4, False, 3, 600),
        (2, False, 2, 600),
        (3, True, 4, 600),
    ],
)
def test_sustained_rate(members: int, majority: bool, lines: int, total: int) -> None:
    """One beat in every cycle, one beat out in every cycle that has one to give, nothing lost, nothing behind."""
    params = ReducerParams(lanes=8, lines_per_chunk=4, slots=2, workers=4, acc_bits=3, max_planes=1)
    with seeded(members, majority, lines) as rng:
        bench = CoreBench(params, BINARY, members, majority)
        chunks = total // (members * lines)
        frames = [frame for chunk in range(chunks) for frame in votes(bench, rng, chunk, lines)]
        came = bench.play(frames)
        assert len(came) == chunks
        sent = bench.trace.sent
        assert sent[-1] - sent[0] == len(sent) - 1 == members * chunks * lines - 1
        planes = 2 if majority else BINARY.tally_bits(members)
        # The last result is complete as soon as its own planes take.
        assert bench.trace.came[-1][1] - sent[-lines] == 5 + planes * lines - 1
        assert [result.chunk for result in came] == list(range(chunks))


@pytest.mark.parametrize("order", ["bursts", "abstain"])
def test_sustained_rate_with_results_waiting(order: str) -> None:
    """Completions in bursts, or by ABSTAIN: results wait in the tally memory and still nothing is lost."""
    params = ReducerParams(lanes=8, lines_per_chunk=4, slots=8, workers=2, acc_bits=3, max_planes=1)
    with seeded(order) as rng:
        bench = CoreBench(params, BINARY, 2, majority=True)
        frames = []
        for base in range(0, 160, 4):
            for worker in range(2):
                for chunk in range(base, base + 4):
                    frames.append(bench.frame(rng, worker, chunk, 4))
                    if order == "abstain" and worker == 1:
                        frames[-1] = Frame(worker, chunk, 4, abstain=True)
                        frames += [Frame(0, base - 1, 4, abstain=True)] * 4 if base else []
        if order == "bursts":
            came = bench.play(frames)
            assert sorted(result.chunk for result in came) == list(range(160))
            assert bench.trace.sent[-1] - bench.trace.sent[0] == len(bench.trace.sent) - 1
        else:
            bench.play(frames)
        assert bench.trace.held <= params.lines_per_chunk


def test_one_line_frames_on_one_line() -> None:
    """The hazard of distance 1, for tallies and for the slot's word, in every cycle."""
    params = ReducerParams(lanes=16, lines_per_chunk=1, slots=1, workers=5, acc_bits=4, max_planes=2)
    with seeded() as rng:
        bench = CoreBench(params, TERNARY, 5)
        frames = []
        for chunk in range(100):
            frames += votes(bench, rng, 2 * chunk, 1)
            if rng.random() < 0.3:
                frames.insert(-1, frames[-2])
        bench.play(frames)
        assert len(bench.trace.results()) == 100
        assert bench.trace.sent[-1] - bench.trace.sent[0] == len(frames) - 1


def test_the_output_never_holds_the_input() -> None:
    """With the sink closed for good, every frame is still taken in its cycle; what is owed comes when it opens."""
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 2)
        frames = [frame for chunk in range(200) for frame in votes(bench, rng, chunk, 4)]
        bench.play(frames, ready=lambda cycle: cycle > 1650)
        assert bench.trace.sent[-1] - bench.trace.sent[0] == 1600 - 1
        # The buffer's four, and the four versions still in the tally memory.
        assert [r.chunk for r in bench.trace.results()][:4] == [0, 1, 2, 3]
        assert sorted(r.chunk for r in bench.trace.results())[-4:] == [196, 197, 198, 199]


def test_a_duplicate_adds_nothing_to_a_result_owed_to_everybody() -> None:
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 1)
        # The sink is closed: chunks 0 to 3 and what leaves fill the buffer, 5 is owed to everybody, so that its
        # repetition adds nothing.
        frames = [bench.frame(rng, 0, chunk, 4) for chunk in range(6)]
        came = bench.play([*frames, frames[5], frames[5]], ready=lambda cycle: cycle > 60)
        assert [(result.destination, result.chunk) for result in came] == [(ALL, chunk) for chunk in range(6)]


@pytest.mark.parametrize("gap", [0, 20])
@pytest.mark.parametrize("silent", [False, True], ids=["contribute", "abstain"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 2, 1)], ids=str)
def test_everybody_who_asks_again_gets_an_answer(order: tuple[int, ...], silent: bool, gap: int) -> None:
    """Also if the result has long gone to all and there is no room for another one: then it is noted who asked."""
    with seeded(order, silent, gap) as rng:
        bench = CoreBench(replace(SMALL, slots=4), BINARY, 3)
        # Lines that fill the buffer exactly.
        first, *others = ([bench.frame(rng, worker, chunk, 4) for worker in range(3)] for chunk in range(5))
        again = [Frame(worker, 0, 4, abstain=True) if silent else first[worker] for worker in order]
        due = [bench.model.receive(frame) for frames in (first, *others, again) for frame in frames]
        is_open = True

        async def main(ctx: Any) -> None:
            nonlocal is_open
            for frame in first:
                await bench.put(ctx, frame)
            await bench.drain(ctx)
            assert [result.destination for result in bench.trace.results()] == [ALL]
            is_open = False
            before = len(bench.trace.came)
            for frame in (frame for frames in others for frame in frames):  # four results fill the buffer
                await bench.put(ctx, frame)
            await ctx.tick().repeat(20)
            for frame in again:
                await bench.put(ctx, frame)
                if gap:
                    await ctx.tick().repeat(gap)
            await ctx.tick().repeat(20)
            assert len(bench.trace.came) == before
            is_open = True
            await bench.drain(ctx)

        came = bench.run(main, ready=lambda _cycle: is_open).results()
        assert [(result.destination, result.chunk) for result in came[:5]] == [(ALL, chunk) for chunk in range(5)]
        # Two requests of the same worker are answered by one.
        assert sorted(result.destination for result in came[5:]) == sorted(set(order))
        assert set(came) == {result for result in due if result is not None}
        bench.check_events()


def test_waits_have_a_limit() -> None:
    """What never comes fails a test and doesn't hang it."""
    with seeded() as rng:
        bench = CoreBench(SMALL, BINARY, 1)
        bench.limit = 100
        frame = bench.frame(rng, 0, 0, 4)
        with pytest.raises(TimeoutError, match=r"100 cycles waiting for \d+ cycles without result\.valid"):
            bench.play([frame], ready=lambda _cycle: False)
        bench = CoreBench(SMALL, BINARY, 1)
        bench.limit = 100
        with pytest.raises(TimeoutError, match="100 cycles waiting for the end of a pause of the source"):
            bench.play([frame], pause=always)

        async def wait(ctx: Any) -> None:
            await tick_until(ctx, bench.core.result.valid, "result.valid", 50)

        bench = CoreBench(SMALL, BINARY, 1)
        with pytest.raises(TimeoutError, match=r"50 cycles waiting for result\.valid"):
            bench.run(wait)


def test_claim_waits_for_the_copy_only() -> None:
    """A claim of a version whose result is being copied waits at most K cycles, and not for the sink."""
    params = ReducerParams(lanes=8, lines_per_chunk=16, slots=1, workers=2, acc_bits=3, max_planes=1)
    with seeded() as rng:
        bench = CoreBench(params, BINARY, 2)
        frames = []
        for chunk in range(30):
            frames += [bench.frame(rng, 0, 2 * chunk, 16), Frame(1, 2 * chunk, 16, abstain=True)]
        bench.play(frames)
        assert 0 < bench.trace.held <= 16
        assert len(bench.trace.results()) == 30  # each had begun to be copied when it was claimed


def test_reset_in_the_middle_of_a_frame() -> None:
    with seeded():
        bench = CoreBench(SMALL, BINARY, 2)
        core = bench.core
        m = Module()
        m.domains.sync = domain = ClockDomain()
        m.submodules.core = core
        got = []

        async def main(ctx: Any) -> None:
            ctx.set(core.config[0], bench.config)
            ctx.set(core.group, 1)
            ctx.set(core.quiet, 1)
            ctx.set(core.result.ready, 1)
            layout = contribution_layout(SMALL)

            async def send(frame: Frame, count: int) -> None:
                for beat in beats(SMALL, frame)[:count]:
                    ctx.set(core.contribution.payload.as_value(), pack(layout, beat))
                    ctx.set(core.contribution.valid, 1)
                    await tick_until(ctx, core.contribution.ready, "contribution.ready")
                ctx.set(core.contribution.valid, 0)

            for cut in (1, 2, 3, 4):
                for before in (0, 1):
                    broken = Frame(before, 0, 4, 0, (0xFFFF,) * 4)
                    await send(Frame(0, 0, 4, 0, (0xFFFF,) * 4), 4 * before)
                    await send(broken, cut)
                    ctx.set(domain.rst, 1)
                    await ctx.tick()
                    ctx.set(domain.rst, 0)
                    # The rest of the frame has no beginning: it is dropped.
                    for beat in beats(SMALL, broken)[cut:]:
                        ctx.set(core.contribution.payload.as_value(), pack(layout, beat))
                        ctx.set(core.contribution.valid, 1)
                        await tick_until(ctx, core.contribution.ready, "contribution.ready")
                    ctx.set(core.contribution.valid, 0)
                    got.clear()
                    for worker in range(2):
                        await send(Frame(worker, 0, 4, 0, (0x0F0F << worker,) * 4), 4)
                    await ctx.tick().repeat(20)
                    assert [(b["voters"], b["data"]) for b in got] == [(2, 0x0F0F ^ 0x1E1E)] * 4 + [(2, 0x0E0E)] * 4
                    ctx.set(domain.rst, 1)
                    await ctx.tick()
                    ctx.set(domain.rst, 0)

        async def record(ctx: Any) -> None:
            async for _clk, _rst, valid, payload in ctx.tick().sample(
                core.result.valid, core.result.payload.as_value()
            ):
                if valid:
                    got.append(unpack(result_layout(SMALL), payload))

        sim = Simulator(m)
        sim.add_clock(1e-6)
        sim.add_testbench(main)
        sim.add_testbench(record, background=True)
        sim.run()


# ---- random ----------------------------------------------------------------------------------------------------------


def random_frames(bench: CoreBench, rng: random.Random, count: int) -> list[Frame]:
    """Frames of all kinds around a slowly moving chunk number: most of them useful, the rest a nuisance."""
    params, encoding = bench.params, bench.encoding
    base = rng.choice([0, 2**32 - 5, 2**31 - 3, rng.getrandbits(32)])
    lines: dict[int, int] = {}
    sent: list[Frame] = []
    while len(sent) < count:
        if rng.random() < 0.25 / len(bench.members) / encoding.planes:
            base += rng.choice([1, 1, 1, 2, 2 * params.slots, 2 * params.slots + 1])
        reach = 2 * params.slots if rng.random() < 0.1 else 1
        chunk = (base + rng.randint(-reach, reach)) % 2**32
        worker = rng.choice(bench.members)
        count_of = lines.setdefault(chunk, rng.randint(1, params.lines_per_chunk))
        if rng.random() < 0.03:
            count_of = rng.randint(1, params.lines_per_chunk)
        if sent and rng.random() < 0.1:
            sent.append(rng.choice(sent[-10:]))
        elif rng.random() < 0.1:
            sent.append(Frame(worker, chunk, count_of, abstain=True))
        else:
            sent.append(bench.frame(rng, worker, chunk, count_of, rng.randrange(encoding.planes)))
    return sent


@pytest.mark.parametrize("case", range(24))
def test_random_frames(case: int) -> None:
    with seeded(case) as rng:
        encoding = rng.choice([BINARY, BINARY, TERNARY, int_encoding(2), int_encoding(3), tally_encoding(BINARY, 2)])
        workers = rng.randint(1, 5)
        members = sorted(rng.sample(range(workers), rng.randint(1, workers)))
        acc_bits = max(4, encoding.tally_bits(len(members)))
        params = ReducerParams(
            lanes=rng.choice([8, 16]),
            lines_per_chunk=rng.randint(1, 4),
            slots=rng.choice([1, 2, 4]),
            workers=workers,
            acc_bits=acc_bits,
            max_planes=max(rng.randint(1, 4), encoding.planes),
        )
        majority = encoding.leaves == 1 and rng.random() < 0.5
        bench = CoreBench(params, encoding, members, majority, margin=rng.choice([0, 0, 1, 2]))
        frames = random_frames(bench, rng, 250)
        ready = rng.choice([always, sometimes(rng, 0.5), sometimes(rng, 0.1), sometimes(rng, 0.9)])
        pause = rng.choice([None, None, sometimes(rng, 0.5), sometimes(rng, 0.1)])
        bench.play(frames, ready, pause)
        assert bench.trace.held <= params.lines_per_chunk


@pytest.mark.parametrize("case", range(6))
def test_workers_that_keep_to_the_protocol(case: int) -> None:
    """Each worker has at most S chunks in flight, results get lost on the way and are asked for again: all arrive."""
    with seeded("protocol", case) as rng:
        encoding = rng.choice([BINARY, TERNARY])
        count = rng.randint(1, 4)
        params = ReducerParams(8, rng.randint(1, 3), rng.choice([1, 2, 4]), 4, 4, 2)
        bench = CoreBench(params, encoding, count, majority=rng.random() < 0.5)
        total, slots = 40, params.slots
        lines = [rng.randint(1, params.lines_per_chunk) for _ in range(total)]
        frames = [
            [
                [Frame(w, c, lines[c], abstain=True)]
                if rng.random() < 0.15
                else [bench.frame(rng, w, c, lines[c], p) for p in range(encoding.planes)]
                for c in range(total)
            ]
            for w in range(count)
        ]
        have: list[set[int]] = [set() for _ in range(count)]
        truth = NaiveReducer(params, encoding, bench.members, bench.majority)
        expected: dict[int, Result] = {}
        for c in range(total):
            for w in range(count):
                for frame in frames[w][c]:
                    result = truth.receive(frame)
                    if result is not None:
                        expected[c] = result
        loss = rng.choice([0.0, 0.3])
        taken = 0

        async def main(ctx: Any) -> None:
            nonlocal taken
            sent: list[set[tuple[int, int]]] = [set() for _ in range(count)]
            while any(len(chunks) < total for chunks in have):
                assert bench.cycle < 40_000, "a result never came"
                whole = bench.trace.came
                while taken < len(whole):
                    beat = whole[taken][2]
                    taken += 1
                    if beat["last"] and beat["plane"] == beat["planes"] - 1:
                        for w in range(count):
                            if beat["destination"] in (w, ALL) and rng.random() >= loss:
                                have[w].add(beat["chunk"])
                choices = []
                for w in range(count):
                    low = min((c for c in range(total) if c not in have[w]), default=total)
                    for c in range(low, min(low + slots, total)):
                        if c in have[w]:
                            continue
                        fresh = [(c, i) for i in range(len(frames[w][c])) if (c, i) not in sent[w]]
                        if fresh:
                            choices.append((w, *fresh[0]))
                        elif rng.random() < 0.02:
                            choices.append((w, c, rng.randrange(len(frames[w][c]))))
                if not choices:
                    await ctx.tick()
                    continue
                w, c, i = rng.choice(choices)
                sent[w].add((c, i))
                bench.model.receive(frames[w][c][i])
                await bench.put(ctx, frames[w][c][i])
            await bench.drain(ctx)

        trace = bench.run(main, rng.choice([always, sometimes(rng, 0.4)]))
        bench.check_events()
        for result in trace.results():
            right = expected[result.chunk]
            assert (result.lines, result.voters, result.data) == (right.lines, right.voters, right.data)
        assert bench.model.events["completed"] == total
        assert bench.model.events["stale"] == bench.model.events["abandoned"] == 0
