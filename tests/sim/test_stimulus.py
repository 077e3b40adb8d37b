"""The scenarios through the golden model alone, held against plain integer sums."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES, FrameType, Header, Reason
from neuron_fabric.sim.oracle import Oracle, Reaction
from neuron_fabric.sim.stimulus import SCENARIOS, Scenario, encodings_for, scenario

SMALL = ReducerParams(lanes=64, lines_per_chunk=4, slots=2, workers=5, acc_bits=5, max_planes=3)
TINY = ReducerParams(lanes=8, lines_per_chunk=1, slots=1, workers=1, acc_bits=1, max_planes=1)


def replay(made: Scenario) -> list[Reaction]:
    oracle = Oracle(made)
    reactions = []
    for index, frame in enumerate(made.frames):
        if made.reset is not None and made.reset[0] == index:
            oracle.reset()
            continue
        reactions.append(oracle.feed(frame))
    return reactions


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("params", [SMALL, TINY], ids=["small", "tiny"])
def test_golden_model_sums_what_was_accepted(name: str, seed: int, params: ReducerParams) -> None:
    """An independent sum, in plain integers, of the first frame of each worker and plane of a chunk."""
    made = scenario(name, params, seed)
    job = made.job
    oracle = Oracle(made)
    votes: dict[int, dict[tuple[int, int], np.ndarray]] = {}
    compared = 0
    for index, frame in enumerate(made.frames):
        if made.reset is not None and made.reset[0] == index:
            oracle.reset()
            votes.clear()
            continue
        reaction = oracle.feed(frame)
        payload = frame.payload if frame.repaired is None else frame.repaired
        if reaction.reason is not Reason.NONE or not payload:
            continue
        header = Header.unpack(payload)
        if reaction.claims is not None:
            votes.pop(header.chunk, None)  # chunk numbers come again after 2**32
        chunk = votes.setdefault(header.chunk, {})
        away = (header.worker, -1) in chunk
        if header.type is FrameType.CONTRIBUTE and (header.worker, header.plane) not in chunk and not away:
            bits = np.unpackbits(np.frombuffer(payload, np.uint8)[HEADER_BYTES:], bitorder="little").astype(int)
            chunk[header.worker, header.plane] = bits
        elif header.type is FrameType.ABSTAIN and not any(worker == header.worker for worker, _plane in chunk):
            chunk[header.worker, -1] = np.zeros(0, int)
        for result in reaction.results:
            if result.destination != DESTINATION_ALL:
                continue
            tally = np.zeros(header.lines * params.lanes, int)
            for (_worker, plane), bits in chunk.items():
                if plane >= 0:
                    tally += job.encoding.weights[plane] * bits
            voters = len({worker for worker, plane in chunk if plane >= 0})
            if job.result_format == "majority":
                total = voters - 2 * tally if job.encoding.counts_negatives else tally
                planes = [total < -job.margin, abs(total) > job.margin]
            else:
                planes = [tally >> plane & 1 for plane in range(len(result.frames))]
            for plane, sent in zip(planes, result.frames, strict=True):
                body = np.unpackbits(np.frombuffer(sent, np.uint8)[HEADER_BYTES:], bitorder="little")
                np.testing.assert_array_equal(body, plane)
                assert Header.unpack(sent).voters == voters
            compared += 1
    assert compared == oracle.events["completed"] or made.reset
    assert compared or name == "not_open"


def test_same_seed_same_frames() -> None:
    for name in SCENARIOS:
        assert scenario(name, SMALL, 7) == scenario(name, SMALL, 7)
        assert scenario(name, SMALL, 7).frames == scenario(name, SMALL, 7).frames
    assert scenario("random", SMALL, 7).frames != scenario("random", SMALL, 8).frames


def test_random_frames_leave_nothing_out() -> None:
    """Over the seeds of one run every kind of trouble, encoding, format and refusal occurs."""
    notes: Counter[str] = Counter()
    events: Counter[str] = Counter()
    kinds = set()
    for seed in range(20):
        made = scenario("random", SMALL, seed)
        notes.update(frame.note for frame in made.frames)
        kinds.add((made.job.encoding.name, made.job.result_format))
        oracle = Oracle(made)
        for frame in made.frames:
            oracle.feed(frame)
        events += oracle.events
    for note in ("abstain", "duplicate", "duplicate, other bits", "stale", "another line count", "too few beats"):
        assert notes[note] >= 5, note
    for event in ("completed", "duplicate", "stale", "abandoned", "refused", "length", "bad_plane", "bad_voters"):
        assert events[event] >= 5, event
    names = {encoding.name for encoding in encodings_for(SMALL, 1)}
    assert names == {"binary", "ternary", "int-2", "int-3", "tally(binary,3)", "tally(ternary,2)"}
    assert {name for name, _ in kinds} == names
    assert {form for _, form in kinds} == {"tally", "majority"}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("lanes", "lines"), [(256, 1), (256, 3), (64, 255), (256, 255), (512, 255), (8, 2)])
def test_corner_sizes(name: str, lanes: int, lines: int) -> None:
    """A header with no beat to cut behind, and as many lines as a byte can count: scenarios are made and judged."""
    params = ReducerParams(lanes=lanes, lines_per_chunk=lines, slots=1, workers=2, acc_bits=3, max_planes=2)
    options = {"one_slot": {"chunks": 6}, "short_frames": {"chunks": 6}, "full_rate": {"chunks": 3}}
    options["random"] = {"chunks": 8}
    for seed in range(6):
        made = scenario(name, params, seed, **options.get(name, {}))
        assert made.frames
        replay(made)


@pytest.mark.parametrize("lines", [1, 4, 255])
def test_bad_line_counts(lines: int) -> None:
    """No line at all is refused for that reason, as too many lines are; with 255 there is no count too great."""
    params = ReducerParams(lanes=64, lines_per_chunk=lines, slots=1, workers=2, acc_bits=3, max_planes=2)
    seen = set()
    for seed in range(8):
        made = scenario("bad_frames", params, seed)
        for frame, reaction in zip(made.frames, replay(made), strict=True):
            if frame.note == "bad lines" and reaction.reason is Reason.BAD_LINES:
                header = Header.unpack(frame.payload)
                body = 0 if header.type is FrameType.ABSTAIN else header.lines * params.line_bytes
                assert len(frame.payload) == HEADER_BYTES + body
                seen.add(header.lines)
    assert 0 in seen
    assert all(count == 0 or count > lines for count in seen)
    assert lines == 255 or len(seen) > 1


def test_wrap_around_wraps() -> None:
    made = scenario("wrap_around", SMALL, 0)
    chunks = [Header.unpack(frame.payload).chunk for frame in made.frames]
    assert max(chunks) > 0xFFFFFFF0
    assert min(chunks) < 8
    reasons = Counter(reaction.reason for reaction in replay(made))
    assert reasons[Reason.STALE] == 4 * 2 * len(tuple(made.job.members))
    assert set(reasons) == {Reason.NONE, Reason.STALE}


def test_unknown_scenario() -> None:
    with pytest.raises(ValueError, match="no scenario 'gibt es nicht': there are random, "):
        scenario("gibt es nicht", SMALL, 0)
