"""The in-network endpoint as a whole against its golden model: frames in, frames out, every counter."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest

from neuron_fabric.hw.udp_endpoint import UdpEndpoint
from neuron_fabric.model import BINARY, TERNARY, JobConfig, Parent, ReducerParams, tally_encoding
from neuron_fabric.model.net import Endpoint, build
from neuron_fabric.model.reducer import Straggler
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES, Flags, FrameType, Header

from .bench import seeded, sometimes
from .endpoint_bench import EndpointBench, abstention, contribution
from .stream_bench import LINE

PARAMS = ReducerParams(lines_per_chunk=2, slots=8, workers=4, acc_bits=5, max_planes=2, jobs=4)
ME = Endpoint.of("02:00:00:12:34:56", "10.1.2.3", 20045)
GROUP = Endpoint.multicast("239.1.2.3", 20046)
LISTEN = Endpoint.multicast("239.9.9.9", 20047)


def at(number: int) -> Endpoint:
    return Endpoint(0x0200_0000_0000 + number, 0x0A00_0000 + number, 4000 + number)


PARENT = Parent(at(99), job=9, worker=1, epoch=40, leaves=4)
TALLY = JobConfig(5, 1, {0: at(0), 1: at(1), 3: at(3)}, BINARY, base=0, slots=2)
MAJORITY = JobConfig(6, 2, {1: at(11), 2: at(12)}, TERNARY, "majority", 1, base=2, slots=1, multicast=False)
CHILD = JobConfig(7, 3, {0: at(20), 3: at(23)}, BINARY, parent=PARENT, base=4, slots=2)
ROOT = JobConfig(8, 4, {2: at(32), 3: at(33)}, tally_encoding(BINARY, 3), base=6, slots=2, multicast=False)
JOBS = (TALLY, MAJORITY, CHILD, ROOT)

FULL = ReducerParams(lines_per_chunk=16, slots=4, workers=4, acc_bits=3)
FULL_JOB = JobConfig(5, 1, {w: at(w) for w in range(4)}, BINARY)


def opened(*jobs: JobConfig) -> dict[int, JobConfig]:
    return dict(enumerate(jobs))


class Traffic:
    """What members of some jobs may send, with everything that goes wrong on the way."""

    def __init__(self, rng: random.Random, params: ReducerParams, jobs: tuple[JobConfig, ...]) -> None:
        self.rng, self.params, self.jobs = rng, params, jobs
        self.progress = {job.job: rng.getrandbits(32) for job in jobs}
        self.lines: dict[tuple[int, int], int] = {}

    def vote(self, job: JobConfig) -> tuple[Endpoint, bytes]:
        """A frame of a member, about a chunk that may be in flight."""
        rng = self.rng
        slots = job.slot_count(self.params)
        if rng.random() < 0.08:
            self.progress[job.job] += rng.choice((1, 1, slots, 2 * slots, 5))
        step = rng.choice((0, 0, 0, 0, 1, 1, -1, -slots, slots, -2 * slots))
        chunk = (self.progress[job.job] + step) % (1 << 32)
        lines = self.lines.setdefault((job.job, chunk), rng.randint(1, self.params.lines_per_chunk))
        if rng.random() < 0.03:
            lines = self.params.lines_per_chunk + 1 - lines
        worker, address = rng.choice(list(job.members.items()))  # type: ignore[union-attr]
        if rng.random() < 0.15:
            return address, abstention(job, worker, chunk, lines)
        plane = rng.randrange(job.encoding.planes)
        voters = rng.randint(1, job.encoding.leaves)
        return address, contribution(rng, job, worker, chunk, lines, plane, voters)

    def answer(self, job: JobConfig) -> tuple[Endpoint, bytes]:
        """What a child's parent says."""
        rng, parent = self.rng, job.parent
        assert parent is not None
        flags = Flags(rng.choice((0, 0, 2, 4)))
        lines = rng.randint(1, self.params.lines_per_chunk)
        header = Header(
            FrameType.RESULT, parent.job, rng.choice((parent.worker, DESTINATION_ALL)), rng.getrandbits(32),
            rng.randrange(3), 3, rng.randint(1, 4), lines, parent.epoch, flags, rng.randrange(2),
        )  # fmt: skip
        tail = rng.randbytes(LINE) if flags & Flags.PARTIAL else b""
        return parent.address, header.pack() + rng.randbytes(LINE * lines) + tail  # type: ignore[return-value]

    def frame(self, faults: float = 0.0) -> bytes:
        """An Ethernet frame, with probability ``faults`` changed in one place or another."""
        rng = self.rng
        job = rng.choice(self.jobs)
        source, payload = self.answer(job) if job.parent is not None and rng.random() < 0.4 else self.vote(job)
        to = LISTEN if rng.random() < 0.05 else ME
        if rng.random() >= faults:
            return build(source, to, payload)
        changed = bytearray(payload)
        match rng.randrange(6):
            case 0 | 1:  # a field of the header, with checksums that hold
                at_byte = rng.randrange(HEADER_BYTES)
                changed[at_byte] ^= 1 << rng.randrange(8)
            case 2:  # another length
                changed = changed[: rng.randint(0, len(changed))] + rng.randbytes(rng.choice((0, 1, LINE)))
            case 3:  # from elsewhere
                source = rng.choice((at(0), at(11), at(99), replace(source, port=source.port ^ 1)))
            case 4:  # on the way, which a checksum notices, or whose frame it is
                frame = bytearray(build(source, to, payload))
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                return bytes(frame)
            case _:
                frame = bytearray(build(source, to, payload))
                return bytes(frame[: rng.randint(1, len(frame))] + rng.randbytes(rng.choice((0, 40, 300))))
        return build(source, to, bytes(changed))


def test_one_chunk_of_each_job() -> None:
    """With time for every answer nothing coalesces and nothing is dropped: exactly what the model sends."""
    with seeded() as rng:
        bench = EndpointBench(PARAMS, ME, GROUP)
        script: list[Any] = []
        for chunk in range(3):
            for job in JOBS:
                for worker, address in job.members.items():  # type: ignore[union-attr]
                    for plane in range(job.encoding.planes):
                        payload = contribution(rng, job, worker, chunk, 2, plane)
                        script += [build(address, ME, payload), 40]
                        script += [build(address, ME, payload), 40]
            if chunk == 0:
                script.append(bench.control(clear=True))
        bench.play(opened(*JOBS), script)
        bench.check(everything=True)
        assert bench.counters["completed"] == 8


@pytest.mark.parametrize("group", [GROUP, None])
@pytest.mark.parametrize("ready", [1.0, 0.4])
def test_random_frames_with_time_to_answer(group: Endpoint | None, ready: float) -> None:
    with seeded(group, ready) as rng:
        bench = EndpointBench(PARAMS, ME, group, LISTEN)
        traffic = Traffic(rng, PARAMS, JOBS)
        script: list[Any] = []
        for _ in range(50):
            script += [traffic.frame(0.2), 60 if ready == 1 else 120]
        bench.play(opened(*JOBS), script, sometimes(rng, ready))
        bench.check(everything=True)


@pytest.mark.parametrize("group", [GROUP, None])
@pytest.mark.parametrize(("ready", "pause"), [(1.0, 0.0), (0.8, 0.4), (0.3, 0.0)])
def test_random_frames_back_to_back(group: Endpoint | None, ready: float, pause: float) -> None:
    with seeded(group, ready, pause) as rng:
        bench = EndpointBench(PARAMS, ME, group, LISTEN)
        traffic = Traffic(rng, PARAMS, JOBS)
        script = [traffic.frame(0.3) for _ in range(400)]
        bench.play(opened(*JOBS), script, sometimes(rng, ready), sometimes(rng, pause))
        bench.check()
        if pause == 0:
            assert bench.input.held <= 2 * PARAMS.lines_per_chunk + 1


@pytest.mark.parametrize("ready", [1.0, 0.5])
def test_jobs_open_and_close_between_frames(ready: float) -> None:
    """With frames coming all the time, each is judged by the jobs that are open when its header is looked at."""
    with seeded(ready) as rng:
        bench = EndpointBench(PARAMS, ME, GROUP)
        generations = [tuple(replace(job, epoch=job.epoch + 16 * k) for job in JOBS) for k in range(3)]
        # Banks and slots change hands, too.
        swapped = [replace(MAJORITY, base=0, epoch=90), replace(TALLY, base=2, epoch=91)]
        traffic = Traffic(rng, PARAMS, (*(job for jobs in generations for job in jobs), *swapped))
        beside: list[Any] = [40]
        for step in (
            lambda: bench.opening(generations[1][2], 2),
            lambda: bench.closing(3),
            lambda: bench.opening(generations[1][0], 0),
            lambda: bench.control(reset=True),
            lambda: bench.opening(swapped[0], 0),
            lambda: bench.opening(swapped[1], 1),
            lambda: bench.opening(generations[2][2], 2),
        ):
            beside += [step, rng.randint(1, 100)]
        bench.play(opened(*JOBS), [traffic.frame(0.1) for _ in range(900)], sometimes(rng, ready), beside=beside)
        bench.check(jobs_change=True)


def test_refusals_while_jobs_close() -> None:
    """A NACK says what was so when its frame was refused, though the closing write clears the job's number."""
    with seeded() as rng:
        bench = EndpointBench(PARAMS, ME, GROUP)
        jobs = [replace(TALLY, epoch=epoch) for epoch in range(1, 9)]
        beside: list[Any] = []
        for job in jobs[1:]:
            beside += [bench.closing(0), lambda job=job: bench.opening(job, 0), rng.randint(20, 60)]

        def stale() -> bytes:
            """Mostly; the first of a job are not."""
            job = bench.open.get(0, jobs[0])
            worker = rng.randrange(2)
            return build(at(worker), ME, abstention(job, worker, rng.choice((100, 0, 4, 8, 96)), 1))

        bench.play({0: jobs[0]}, [stale] * 2200, beside=beside)
        bench.check(jobs_change=True)
        assert bench.counters["stale"] > 100


def test_a_banks_slots_change_while_results_wait() -> None:
    """Long frames inside, results before a slow output: nothing of a closed job is sent as if it were the next's."""
    with seeded() as rng:
        bench = EndpointBench(replace(FULL, slots=8), ME, GROUP)
        jobs = [
            JobConfig(5, epoch, {0: at(0), 1: at(1)}, BINARY, base=2 * (epoch % 4), slots=2, multicast=bool(epoch & 1))
            for epoch in range(1, 7)
        ]
        beside: list[Any] = []
        for job in jobs[1:]:
            beside += [rng.randint(300, 350), lambda job=job: bench.opening(job, 0)]

        def vote() -> bytes:
            job = bench.open.get(0, jobs[0])
            worker = rng.randrange(2)
            return build(at(worker), ME, contribution(rng, job, worker, rng.randrange(4), 16))

        bench.play({0: jobs[0]}, [vote] * 160, lambda cycle: cycle % 16 == 0 or cycle > 3500, beside=beside)
        bench.check(jobs_change=True)
        assert bench.counters["completed"] > 12


def test_stragglers() -> None:
    """With the model's clock moved on when the gateware's timeouts are over for certain."""
    with seeded() as rng:
        job = JobConfig(3, 7, {w: at(w) for w in range(4)}, BINARY, straggler=Straggler(400, 2), base=0, slots=4)
        bench = EndpointBench(PARAMS, ME, GROUP)

        def send(worker: int, chunk: int) -> bytes:
            return build(at(worker), ME, contribution(rng, job, worker, chunk, 2))

        def absent(worker: int, chunk: int) -> bytes:
            return build(at(worker), ME, abstention(job, worker, chunk, 2))

        script: list[Any] = [send(0, 0), send(3, 0), send(1, 1), absent(0, 1), send(2, 2), send(0, 2), absent(3, 2)]
        script += [900, lambda: bench.tell_time(1000), send(1, 0), 40, send(1, 0), 40, send(0, 0), 40, absent(2, 0), 40]
        script += [send(1, 2), 40, send(2, 1), 900, lambda: bench.tell_time(2000), send(3, 1), 60]
        bench.play({0: job}, script)
        bench.check(everything=True)
        assert (bench.counters["partial"], bench.counters["late"]) == (3, 5)


@pytest.mark.parametrize("moment", range(4))
def test_control_reset_forgets_what_waits(moment: int) -> None:
    """NACKs and relays before a closed output, some of frames that are still inside when the reset comes."""
    with seeded(moment) as rng:
        bench = EndpointBench(PARAMS, ME)
        traffic = Traffic(rng, PARAMS, JOBS)
        bad = [build(at(0), ME, contribution(rng, TALLY, 0, 5, 1, plane=1)) for _ in range(60)]
        answers = [build(source, ME, payload) for source, payload in (traffic.answer(CHILD) for _ in range(12))]
        stale = [build(at(1), ME, abstention(TALLY, 1, chunk, 1)) for chunk in [12] + [4] * 40]
        done = [0]

        def finished() -> None:
            done[0] = bench.bench.cycle

        script = [*answers, *bad, *stale]
        beats = sum(-(-len(frame) // LINE) for frame in script)
        beside: list[Any] = [beats - 8 + moment, bench.control(reset=True), 200, finished]
        bench.play(opened(*JOBS), script, lambda _cycle: done[0] > 0, beside=beside)
        bench.check(jobs_change=True)
        (reset_at,) = bench.resets_at
        assert reset_at < bench.output.cycles[0]
        assert all(cycle <= reset_at for cycle in bench.nacks_at), "a NACK has left the queue after the reset"
        assert 0 < bench.counters["stale"] < 40, "the reset did not come between them"
        came = len(bench.frames())
        assert 0 < came < 20, "more than what the transmitter has room for"


@pytest.mark.parametrize("reset", ["control", "hardware"])
@pytest.mark.parametrize("cut", range(4))
def test_reset_in_a_frame(reset: str, cut: int) -> None:
    """Neither leaves a vote behind: the chunk is counted afresh by the job's next epoch."""
    with seeded(reset, cut) as rng:
        bench = EndpointBench(PARAMS, ME, GROUP)
        again = replace(TALLY, epoch=2)
        frame = build(at(0), ME, contribution(rng, TALLY, 0, 5, 2))

        async def main(ctx: Any) -> None:
            await bench.write(ctx, bench.opening(TALLY, 0))
            await bench.send(ctx, build(at(1), ME, contribution(rng, TALLY, 1, 5, 2)))
            await bench.send(ctx, frame, beats=cut)
            if reset == "control":
                await bench.write(ctx, bench.control(reset=True))
                await bench.send(ctx, frame, first=cut)
            else:
                await bench.bench.pulse_reset(ctx, bench.dut.s_axis_tvalid)
                await bench.write(ctx, bench.addresses())
                await bench.send(ctx, frame[LINE * cut :])
            await bench.write(ctx, bench.opening(again, 0))
            for worker in (0, 1, 3):
                await bench.send(ctx, build(at(worker), ME, contribution(rng, again, worker, 5, 2)))

        bench.run(main)
        bench.check(everything=True)
        assert bench.counters["completed"] == 1


def full_frames(rng: random.Random, job: JobConfig, params: ReducerParams, chunks: int) -> list[bytes]:
    return [
        build(address, ME, contribution(rng, job, worker, chunk, params.lines_per_chunk))
        for chunk in range(chunks)
        for worker, address in job.members.items()  # type: ignore[union-attr]
    ]


def test_the_input_never_waits_for_the_output() -> None:
    """10,000 cycles of full frames with the output closed: sixteen lines in seventeen cycles, to the end."""
    with seeded() as rng:
        bench = EndpointBench(FULL, ME, GROUP)
        frames = full_frames(rng, FULL_JOB, FULL, 148)
        bench.play({0: FULL_JOB}, frames, lambda _cycle: len(bench.input.cycles) == 17 * len(frames))
        cycles = bench.input.cycles
        assert len(cycles) == 17 * len(frames)
        assert cycles[-1] - cycles[0] > 10_000
        assert bench.output.cycles[0] > cycles[-1]
        rate = 16 * len(frames) / (cycles[-1] - cycles[0] + 1)
        print(f"{rate:.4f} lines a cycle, the longest wait of the input {bench.input.held} cycles")
        assert rate > 0.999 * 16 / 17
        bench.check()


def test_results_to_a_group_at_the_inputs_rate() -> None:
    with seeded() as rng:
        bench = EndpointBench(FULL, ME, GROUP)
        frames = full_frames(rng, FULL_JOB, FULL, 12)
        bench.play({0: FULL_JOB}, frames)
        cycles = bench.input.cycles
        rate = 16 * len(frames) / (cycles[-1] - cycles[0] + 1)
        latency = bench.output.valid_since[0] - cycles[4 * 17 - 1]
        print(f"{rate:.4f} lines a cycle; first result {latency} cycles after the last beat of the completing frame")
        assert rate > 0.999 * 16 / 17
        bench.check(everything=True)


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
@pytest.mark.parametrize("lanes", [64, 256])
def test_other_widths_are_refused_by_name(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes must be 512 for a UDP endpoint, not {lanes}"):
        UdpEndpoint(replace(PARAMS, lanes=lanes))
    gc.collect()  # what was refused goes while the warning about it is off
