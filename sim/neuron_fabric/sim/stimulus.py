"""Stimulus: seeded lists of frames, made without any simulator.

A :class:`Scenario` is a job and the frames that its workers send, as UDP payloads in the order in which they arrive.
The same scenario runs in Icarus, in Verilator, in Amaranth's simulator, through the golden model alone, or through a
socket. What the reducer must answer is not written here: the golden model says it.

Every generator has the signature ``generator(params, seed, **options) -> Scenario`` and is listed in
:data:`SCENARIOS`, so that a scenario can be named in a command line or an environment variable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding, encoding_by_name, int_encoding, tally_encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig
from neuron_fabric.model.wire import (
    HEADER_BYTES,
    HEADER_FIELDS,
    HEADER_OFFSET,
    MAGIC,
    SERIAL_HALF,
    VERSION,
    Flags,
    FrameType,
    Header,
)

__all__ = ["SCENARIOS", "Frame", "Scenario", "encodings_for", "scenario", "stream_beats"]

_CHUNKS = 1 << 32
_FIELDS = {f.name: f for f in HEADER_FIELDS}


@dataclass(frozen=True)
class Frame:
    """One frame as it is sent.

    Attributes
    ----------
    payload : bytes
        The UDP payload.
    note : str
        What it is meant to be, for messages: ``contribute``, ``duplicate``, ``stale``, ...
    repaired : bytes, optional
        Only for a wrong length: what the gateware, which has a promise about lengths from the stage in front of it,
        makes of the frame. Empty: it drops the frame. None: the length is right.
    refusal : str, optional
        For a bad frame: the gateware's event for it.
    """

    payload: bytes
    note: str = "contribute"
    repaired: bytes | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Scenario:
    """A job, its frames, and how they are to be sent.

    Attributes
    ----------
    name, seed, params, job
    frames : tuple of Frame
    enabled : bool
        False: the job is not open.
    reset : (int, int), optional
        Reset the reducer after so many beats of the frame with that index; the rest of that frame is never sent.
    may_drop : bool
        Send a frame that claims a version even if that version's result is not out yet. Otherwise such a frame waits,
        as rule 10 of the protocol makes every worker do.
    patient : bool
        Also wait for results that were asked for again, so that no claim excuses a missing one.
    """

    name: str
    seed: int
    params: ReducerParams
    job: JobConfig
    frames: tuple[Frame, ...] = field(repr=False)
    enabled: bool = True
    reset: tuple[int, int] | None = None
    may_drop: bool = False
    patient: bool = True


def stream_beats(payload: bytes, line_bytes: int, rng: random.Random) -> list[int]:
    """A payload as beats of an AXI stream: behind 42 bytes of other headers, byte k of a beat in bits 8k+7..8k.

    The other headers are noise: nothing here may depend on them.
    """
    data = rng.randbytes(HEADER_OFFSET) + payload
    data += bytes(-len(data) % line_bytes)
    return [int.from_bytes(data[at : at + line_bytes], "little") for at in range(0, len(data), line_bytes)]


def encodings_for(params: ReducerParams, world: int) -> list[Encoding]:
    """Every kind of encoding that fits ``params`` for ``world`` members."""
    kinds = [
        BINARY,
        TERNARY,
        int_encoding(2),
        int_encoding(3),
        tally_encoding(BINARY, 3),
        tally_encoding(TERNARY, 2),
    ]
    return [kind for kind in kinds if kind.planes <= params.max_planes and kind.tally_bits(world) <= params.acc_bits]


def _encoding(name: str) -> Encoding:
    """As :func:`encoding_by_name`, and ``tally-binary-3``: the results of children with at most 3 workers each."""
    if name.startswith("tally-"):
        _, child, leaves = name.split("-")
        return tally_encoding(encoding_by_name(child), int(leaves))
    return encoding_by_name(name)


class Traffic:
    """Makes the frames of one job."""

    def __init__(self, params: ReducerParams, job: JobConfig, rng: random.Random) -> None:
        self.params = params
        self.job = job
        self.rng = rng
        self.members = tuple(job.members)

    def bits(self, lines: int) -> bytes:
        """Random lines, some of them dense, sparse, all ones or all zeros."""
        size = lines * self.params.line_bytes
        draw = self.rng.randbytes
        match self.rng.randrange(8):
            case 0:
                return bytes(size)
            case 1:
                return b"\xff" * size
            case 2:
                return bytes(a & b & c for a, b, c in zip(draw(size), draw(size), draw(size), strict=True))
            case 3:
                return bytes(a | b | c for a, b, c in zip(draw(size), draw(size), draw(size), strict=True))
            case _:
                return draw(size)

    def contribute(self, worker: int, chunk: int, plane: int, lines: int, body: bytes | None = None) -> bytes:
        """One plane of one chunk. Fields that a receiver must ignore are random."""
        header = Header(
            FrameType.CONTRIBUTE,
            self.job.job,
            worker,
            chunk % _CHUNKS,
            plane,
            self.job.encoding.planes,
            lines=lines,
            epoch=self.job.epoch,
            flags=self.rng.choice([Flags.NONE, Flags.NONE, Flags.RESEND]),
            missing=self.rng.choice([0, 0, self.rng.randrange(1 << 16)]),
            reason=self.rng.choice([0, 0, self.rng.randrange(256)]),
        )
        return header.pack() + (self.bits(lines) if body is None else body)

    def vote(self, worker: int, chunk: int, lines: int) -> list[Frame]:
        """All planes of a worker, whose values are such as the encoding promises."""
        encoding = self.job.encoding
        bodies: list[bytes] | list[None] = [None] * encoding.planes
        if self.guarded:
            # A child's tally is less than its bits could say; so the planes are not independent of each other.
            low, high = (encoding.leaves * bound for bound in encoding.leaf_range or (0, 0))
            size = 8 * lines * self.params.line_bytes
            drawn = np.frombuffer(self.rng.randbytes(size), np.uint8).astype(int)
            spread = self.rng.choice([drawn % (high - low + 1), drawn % 2 * (high - low), 0 * drawn])
            bodies = [
                np.packbits((low + spread) >> plane & 1, bitorder="little").tobytes()
                for plane in range(encoding.planes)
            ]
        return [Frame(self.contribute(worker, chunk, plane, lines, body)) for plane, body in enumerate(bodies)]

    @property
    def guarded(self) -> bool:
        """Whether there are bit patterns that no worker may send."""
        encoding = self.job.encoding
        return encoding.signed and encoding.leaf_range is not None

    def abstain(self, worker: int, chunk: int, lines: int) -> bytes:
        """A worker without a vote for a chunk."""
        planes = self.job.encoding.planes
        return Header(
            FrameType.ABSTAIN,
            self.job.job,
            worker,
            chunk % _CHUNKS,
            self.rng.randrange(planes),
            planes,
            voters=self.rng.randrange(2),
            lines=lines,
            epoch=self.job.epoch,
        ).pack()

    def chunk(self, chunk: int, lines: int, abstainers: Iterable[int] = ()) -> list[Frame]:
        """Everything that completes a chunk, in the order of workers and planes."""
        frames = []
        away = set(abstainers)
        for worker in self.members:
            if worker in away:
                frames.append(Frame(self.abstain(worker, chunk, lines), "abstain"))
            else:
                frames += self.vote(worker, chunk, lines)
        return frames

    # ---- frames that must change nothing -----------------------------------------------------------------------

    def bad_header(self, payload: bytes, what: str) -> Frame:
        """``payload`` with one field of its header spoilt."""
        rng, params, job = self.rng, self.params, self.job
        lines, line_bytes, planes = payload[_FIELDS["lines"].offset], params.line_bytes, job.encoding.planes

        def other(value: int, bits: int) -> int:
            return value ^ rng.randrange(1, 1 << bits)

        body = payload[HEADER_BYTES:]
        match what:
            case "magic":
                changed = {"magic": MAGIC ^ 1 << rng.randrange(16)}
            case "version":
                changed = {"version_type": other(VERSION, 4) << 4 | FrameType.CONTRIBUTE}
            case "type":
                changed = {"version_type": VERSION << 4 | rng.randrange(2, 16)}
            case "job":
                changed = {"job": job.job ^ 1 << rng.randrange(16)}
            case "epoch":
                changed = {"epoch": job.epoch ^ 1 << rng.randrange(16)}
            case "worker":
                strangers = [w for w in range(params.workers) if w not in self.members]
                # Numbers beyond the width of the member mask must not wrap around into it.
                beyond = [params.workers, 1 << params.workers.bit_length(), 0x8000 | self.members[0], 0xFFFF]
                changed = {"worker": rng.choice(strangers + beyond)}
            case "plane":
                changed = {"plane": rng.randrange(planes, 256)}
            case "planes":
                changed = {"planes": other(planes, 8)}
            case "lines":
                # None, and where a byte can say it too many. None is as often drawn as all others together.
                lines = rng.choice([0, rng.choice([0, *range(params.lines_per_chunk + 1, 256)])])
                body, changed = rng.randbytes(lines * line_bytes), {"lines": lines}
            case "voters":
                changed = {"voters": rng.choice([0, job.encoding.leaves + 1, 0xFFFF])}
            case _:
                raise ValueError(f"no way to spoil {what!r} is known")
        header = bytearray(payload[:HEADER_BYTES])
        for name, value in changed.items():
            at = _FIELDS[name]
            header[at.offset : at.offset + at.size] = value.to_bytes(at.size, "big")
        return Frame(bytes(header) + body, f"bad {what}", refusal="bad_plane" if what == "planes" else f"bad_{what}")

    def wrong_length(self, payload: bytes) -> Frame:
        """``payload`` with too many beats or too few."""
        line_bytes = self.params.line_bytes
        lines = (len(payload) - HEADER_BYTES) // line_bytes
        # Cut between two beats of the header, of which the first one has more than what is before the header.
        cuts = range(HEADER_OFFSET // line_bytes + 1, (HEADER_OFFSET + HEADER_BYTES) // line_bytes)
        match self.rng.randrange(4):
            case 0 if lines > 1 and not self.guarded:
                kept = self.rng.randrange(1, lines)
                short = payload[: HEADER_BYTES + kept * line_bytes]
                return Frame(short, "too few beats", short + bytes(len(payload) - len(short)), "length")
            case 1 if lines:
                return Frame(payload[:HEADER_BYTES], "no beats", b"", "length")
            case 2 if cuts:
                beats = self.rng.choice(cuts)
                return Frame(payload[: beats * line_bytes - HEADER_OFFSET], "cut in the header", b"", "length")
            case _:
                extra = self.rng.randbytes(self.rng.randint(1, 3) * line_bytes)
                return Frame(payload + extra, "too many beats", payload, "length")


# In the order in which they are checked.
_SPOILS = ("magic", "version", "type", "job", "epoch", "worker", "plane", "planes", "lines", "voters")


def _job(
    params: ReducerParams,
    rng: random.Random,
    *,
    world: int | None = None,
    encoding: str | None = None,
    result_format: str | None = None,
    margin: int | None = None,
) -> JobConfig:
    """A job; what is not given is drawn."""
    if world is None:
        world = rng.randint(1, params.workers)
    members = tuple(sorted(rng.sample(range(params.workers), world)))
    kind = rng.choice(encodings_for(params, world)) if encoding is None else _encoding(encoding)
    # A majority over children needs the number of leaves that voted, which the gateware doesn't take.
    votes = not (kind.counts_negatives and kind.leaves > 1)
    form = rng.choice(["tally", "majority"] if votes else ["tally"]) if result_format is None else result_format
    if form not in ("tally", "majority"):
        raise ValueError(f"result format is tally or majority, not {form!r}")
    if margin is None:
        margin = rng.choice([0, 0, rng.randint(0, min(world, (1 << params.acc_bits) - 1))])
    return JobConfig(
        rng.randrange(1 << 16),
        rng.randrange(1, 1 << 16),
        members,
        kind,
        "majority" if form == "majority" else "tally",
        margin if form == "majority" else 0,
    )


def _start(name: str, params: ReducerParams, seed: int, **job: Any) -> tuple[random.Random, Traffic]:
    rng = random.Random(f"{name}:{seed}")
    return rng, Traffic(params, _job(params, rng, **job), rng)


def _finish(name: str, seed: int, traffic: Traffic, frames: Sequence[Frame], **options: Any) -> Scenario:
    return Scenario(name, seed, traffic.params, traffic.job, tuple(frames), **options)


# ---- random --------------------------------------------------------------------------------------------------------


def random_frames(params: ReducerParams, seed: int, *, chunks: int = 40, trouble: float = 0.3, **job: Any) -> Scenario:
    """Everything at once, drawn from the seed.

    Chunks in flight overlap and their frames are shuffled, as a network does; some workers abstain; some chunks are
    never finished and so get claimed; chunk numbers skip ahead, and often run through 2**32. With probability
    ``trouble`` a frame is preceded by one that must change nothing or hardly anything: a duplicate with the same or
    with other bits, a stale one, another line count, an ABSTAIN after a vote, a bad header, a wrong length.
    """
    rng, traffic = _start("random", params, seed, **job)
    flight = _Flight(traffic, rng, trouble)
    window = rng.choice([1, params.slots, 2 * params.slots])
    number = rng.choice([0, rng.randrange(_CHUNKS), _CHUNKS - rng.randint(1, chunks)])
    waiting = chunks
    oldest = number
    while waiting or flight.open:
        while waiting and (number - oldest) % _CHUNKS < window:
            flight.launch(number)
            waiting -= 1
            number = (number + 1) % _CHUNKS
            if rng.random() < 0.03:  # all ranks resume at a number that was never used
                number = (number + 2 * params.slots * rng.randint(1, 1 << 20)) % _CHUNKS
                break
        flight.step()
        oldest = next(iter(flight.open), number)
    # Asked again at the end, where no claim can excuse a missing answer.
    recent = flight.recent()
    again = [Frame(payload, "duplicate") for payload in rng.sample(recent, min(6, len(recent)))]
    return _finish("random", seed, traffic, [*flight.frames, *again], patient=rng.random() < 0.7)


class _Flight:
    """Chunks in flight of the random scenario."""

    def __init__(self, traffic: Traffic, rng: random.Random, trouble: float) -> None:
        self.traffic = traffic
        self.rng = rng
        self.trouble = trouble
        self.frames: list[Frame] = []
        self.open: dict[int, list[Frame]] = {}  # in the order of launch
        self._sent: list[tuple[int, bytes]] = []
        self._lines: dict[int, int] = {}

    def launch(self, chunk: int) -> None:
        """Put a new chunk in flight."""
        rng, most = self.rng, self.traffic.params.lines_per_chunk
        lines = rng.choice([most, most, rng.randint(1, most), 1])
        share = rng.choice([0, 0, 0.2, 0.2, 1])
        frames = self.traffic.chunk(chunk, lines, [w for w in self.traffic.members if rng.random() < share])
        rng.shuffle(frames)
        if rng.random() < 0.06:
            frames.pop()  # never finished
        if frames:
            self.open[chunk] = frames
            self._lines[chunk] = lines

    def recent(self) -> list[bytes]:
        """Frames of the chunks that the slots may still hold."""
        return [payload for _chunk, payload in self._sent[-8 * self.traffic.params.slots :]]

    def step(self) -> None:
        """Send one frame of an open chunk, and perhaps a troublesome one before it."""
        rng = self.rng
        if not self.open:
            return
        if rng.random() < self.trouble:
            self._disturb()
        # The oldest is preferred, so that chunks do not all end together.
        chunk = rng.choice([next(iter(self.open)), rng.choice(list(self.open))])
        waiting = self.open[chunk]
        frame = waiting.pop()
        if not waiting:
            del self.open[chunk]
        self._sent.append((chunk, frame.payload))
        if rng.random() < 0.03:
            spoilt = self.traffic.wrong_length(frame.payload)
            self.frames.append(spoilt)
            if spoilt.repaired:
                return
        self.frames.append(frame)

    def _disturb(self) -> None:
        rng, traffic = self.rng, self.traffic
        if not self._sent:
            return
        chunk, payload = rng.choice(self._sent[-8 * traffic.params.slots :])
        lines = self._lines[chunk]
        worker = rng.choice(traffic.members)
        plane = rng.randrange(traffic.job.encoding.planes)
        match rng.randrange(8):
            case 0 | 1:
                self.frames.append(Frame(payload, "duplicate"))
            case 2 if len(payload) > HEADER_BYTES:
                # Adding a duplicate again might cancel out; adding other bits does not.
                size = len(payload) - HEADER_BYTES
                self.frames.append(Frame(payload[:HEADER_BYTES] + rng.randbytes(size), "duplicate, other bits"))
            case 3:
                old = chunk - 2 * traffic.params.slots * rng.choice([1, 2, rng.randint(1, 1 << 20)])
                self.frames.append(Frame(traffic.contribute(worker, old, plane, lines), "stale"))
            case 4 if traffic.params.lines_per_chunk > 1:
                other = rng.choice([n for n in range(1, traffic.params.lines_per_chunk + 1) if n != lines])
                self.frames.append(Frame(traffic.contribute(worker, chunk, plane, other), "another line count"))
            case 5:
                sender = Header.unpack(payload).worker
                self.frames.append(Frame(traffic.abstain(sender, chunk, lines), "abstain after vote"))
            case 6:
                # The voters of an ABSTAIN mean nothing.
                spoils = _SPOILS if len(payload) > HEADER_BYTES else _SPOILS[:-1]
                self.frames.append(traffic.bad_header(payload, rng.choice(spoils)))
            case _:
                self.frames.append(Frame(payload, "duplicate"))


# ---- directed ------------------------------------------------------------------------------------------------------


def full_rate(params: ReducerParams, seed: int, *, chunks: int = 64, lines: int | None = None, **job: Any) -> Scenario:
    """Whole chunks one after the other, nothing else: for the line rate and for the latency."""
    _, traffic = _start("full_rate", params, seed, **{"world": params.workers, **job})
    count = params.lines_per_chunk if lines is None else lines
    return _finish("full_rate", seed, traffic, [f for c in range(chunks) for f in traffic.chunk(c, count)])


def one_slot(params: ReducerParams, seed: int, *, chunks: int = 1000, **job: Any) -> Scenario:
    """Many chunks through one slot version each time it is free, with all line counts: nothing is carried over."""
    rng, traffic = _start("one_slot", params, seed, **job)
    frames: list[Frame] = []
    for number in range(chunks):
        away = [worker for worker in traffic.members if rng.random() < 0.15]
        sent = traffic.chunk(number * params.slots, rng.randint(1, params.lines_per_chunk), away)
        rng.shuffle(sent)
        frames += sent
    return _finish("one_slot", seed, traffic, frames)


def short_frames(params: ReducerParams, seed: int, *, chunks: int = 200, **job: Any) -> Scenario:
    """Frames of one line back to back on one slot: every tally is read right after it is written."""
    rng, traffic = _start("short_frames", params, seed, **{"world": params.workers, **job})
    frames: list[Frame] = []
    for number in range(chunks):
        sent = traffic.chunk(number * 2 * params.slots, 1)
        rng.shuffle(sent)
        frames += sent
    return _finish("short_frames", seed, traffic, frames)


def wrap_around(params: ReducerParams, seed: int, **job: Any) -> Scenario:
    """Chunk numbers run through 2**32, jump by the most that is still newer, and by one more, which is stale."""
    rng, traffic = _start("wrap_around", params, seed, **job)
    lines = params.lines_per_chunk
    step = 2 * params.slots
    frames: list[Frame] = []
    number = _CHUNKS - 3 * step - 1
    for _ in range(6 * step):
        frames += traffic.chunk(number, rng.randint(1, lines))
        number = (number + 1) % _CHUNKS
    number -= 1  # the last one sent
    for _ in range(4):
        # The greatest jump within a slot version, which is a multiple of 2 S below half the range.
        number = (number + SERIAL_HALF - step) % _CHUNKS
        frames += traffic.chunk(number, lines)
        for worker in traffic.members:
            older = number - rng.choice([step, SERIAL_HALF - step])
            frames.append(Frame(traffic.contribute(worker, older, 0, lines), "stale"))
            frames.append(Frame(traffic.contribute(worker, number + SERIAL_HALF, 0, lines), "half the range away"))
    return _finish("wrap_around", seed, traffic, frames)


def claims(params: ReducerParams, seed: int, **job: Any) -> Scenario:
    """A version is claimed by ABSTAIN and by a shorter chunk: old lines and old votes are gone.

    What nobody wrote must read as zero: the chunk before leaves ones in all lines.
    """
    rng, traffic = _start("claims", params, seed, **job)
    most, step = params.lines_per_chunk, 2 * params.slots
    planes = range(traffic.job.encoding.planes)
    frames: list[Frame] = []
    number = 0
    for _ in range(12):
        for worker in traffic.members:
            ones = b"\xff" * (most * params.line_bytes)
            frames += [Frame(traffic.contribute(worker, number, plane, most, ones)) for plane in planes]
        number += step
        lines = rng.randint(1, most)
        claimer, *rest = rng.sample(traffic.members, len(traffic.members))
        frames.append(Frame(traffic.abstain(claimer, number, lines), "claim by abstain"))
        frames.append(Frame(traffic.abstain(claimer, number, lines), "duplicate"))
        for worker in rest:
            if rng.random() < 0.5:
                frames.append(Frame(traffic.abstain(worker, number, lines), "abstain"))
            else:
                frames += traffic.vote(worker, number, lines)
        number += step
        # An unfinished chunk, then one that claims it: the abandoned votes must not count.
        frames += traffic.chunk(number, most)[:-1]
        number += step
        frames += traffic.chunk(number, rng.randint(1, most))
        number += step
    return _finish("claims", seed, traffic, frames)


def duplicates(params: ReducerParams, seed: int, *, chunks: int = 12, **job: Any) -> Scenario:
    """Every frame again before the chunk is complete, and everybody again after it."""
    rng, traffic = _start("duplicates", params, seed, **job)
    frames: list[Frame] = []
    for number in range(chunks):
        lines = rng.randint(1, params.lines_per_chunk)
        sent = traffic.chunk(number, lines, [w for w in traffic.members if rng.random() < 0.2])
        for frame in sent:
            frames += [frame, replace(frame, note="duplicate")]
        frames += [replace(frame, note="duplicate") for frame in rng.sample(sent, len(sent))]
    return _finish("duplicates", seed, traffic, frames)


def bad_frames(params: ReducerParams, seed: int, *, rounds: int = 3, **job: Any) -> Scenario:
    """Every way to spoil a header, and wrong lengths, between frames that must come through unharmed."""
    rng, traffic = _start("bad_frames", params, seed, **job)
    frames: list[Frame] = []
    number = 0
    for _ in range(rounds):
        for what in (*_SPOILS, "two faults", *["length"] * 8):
            lines = rng.randint(1, params.lines_per_chunk)
            sent = traffic.chunk(number, lines)
            victim = rng.randrange(len(sent))
            payload = sent[victim].payload
            if what == "length":
                spoilt = traffic.wrong_length(payload)
                # A repaired frame takes the place of the good one.
                sent[victim : victim + (1 if spoilt.repaired else 0)] = [spoilt]
            elif what == "two faults":
                # The first check that fails is the one that is counted.
                first, second = sorted(rng.sample(range(len(_SPOILS)), 2))
                spoilt = traffic.bad_header(traffic.bad_header(payload, _SPOILS[second]).payload, _SPOILS[first])
                sent.insert(victim, spoilt)
            else:
                sent.insert(victim, traffic.bad_header(payload, what))
            frames += sent
            number += 1
    return _finish("bad_frames", seed, traffic, frames)


def not_open(params: ReducerParams, seed: int, **job: Any) -> Scenario:
    """Good frames for a job that is not open."""
    _, traffic = _start("not_open", params, seed, **job)
    frames = [replace(f, note="not open", refusal="bad_job") for c in range(4) for f in traffic.chunk(c, 1)]
    return _finish("not_open", seed, traffic, frames, enabled=False)


def blocked_output(params: ReducerParams, seed: int, **job: Any) -> Scenario:
    """As much as the slots hold, with duplicates: to be run with an output that is not ready until all are in.

    Rule 8: input never waits for output.
    """
    rng, traffic = _start("blocked_output", params, seed, **job)
    frames: list[Frame] = []
    for number in range(2 * params.slots):
        sent = traffic.chunk(number, params.lines_per_chunk)
        frames += [*sent, *(replace(f, note="duplicate") for f in rng.sample(sent, min(2, len(sent))))]
    return _finish("blocked_output", seed, traffic, frames)


def dropped_results(params: ReducerParams, seed: int, *, rounds: int = 4, **job: Any) -> Scenario:
    """Versions are claimed again while their results wait for a blocked output: those may be lost, no others.

    Only this scenario goes against rule 10. At the end each worker asks again for what the slots hold.
    """
    rng, traffic = _start("dropped_results", params, seed, **job)
    chunks = [
        traffic.chunk(number, rng.randint(1, params.lines_per_chunk)) for number in range(rounds * 2 * params.slots)
    ]
    frames = [frame for chunk in chunks for frame in chunk]
    frames += [replace(frame, note="duplicate") for chunk in chunks[-2 * params.slots :] for frame in chunk]
    return _finish("dropped_results", seed, traffic, frames, may_drop=True)


def reset_in_frame(params: ReducerParams, seed: int, *, beats: int | None = None, **job: Any) -> Scenario:
    """A reset in the middle of a frame: no vote, no seen bit, no result and no half frame is left behind.

    Before it every worker but one votes with ones; after it the same chunks are sent again with other bits.
    """
    rng, traffic = _start("reset_in_frame", params, seed, **job)
    lines = params.lines_per_chunk
    ones = b"\xff" * (lines * params.line_bytes)
    frames: list[Frame] = []
    for number in range(2 * params.slots):
        frames += traffic.chunk(number, lines)
    held = 2 * params.slots
    for worker in traffic.members:
        for plane in range(traffic.job.encoding.planes):
            frames.append(Frame(traffic.contribute(worker, held, plane, lines, ones)))
    at = len(frames) - 1
    header = (HEADER_OFFSET + HEADER_BYTES) // params.line_bytes
    where = rng.randint(1, header + lines - 1) if beats is None else beats
    for number in range(3 * params.slots):
        frames += traffic.chunk(number, lines if number else rng.randint(1, lines))
    return _finish("reset_in_frame", seed, traffic, frames, reset=(at, where))


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "random": random_frames,
    "full_rate": full_rate,
    "one_slot": one_slot,
    "short_frames": short_frames,
    "wrap_around": wrap_around,
    "claims": claims,
    "duplicates": duplicates,
    "bad_frames": bad_frames,
    "not_open": not_open,
    "blocked_output": blocked_output,
    "dropped_results": dropped_results,
    "reset_in_frame": reset_in_frame,
}


def scenario(name: str, params: ReducerParams, seed: int, **options: Any) -> Scenario:
    """The scenario of that name; ``ValueError`` names what there is."""
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}: there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name](params, seed, **options)
