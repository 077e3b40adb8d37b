"""The judges themselves: each rule can be broken, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_OFFSET, Flags, FrameType, Header, Reason
from neuron_fabric.sim.oracle import Reaction, Result
from neuron_fabric.sim.scoreboard import Mismatch, Scoreboard
from neuron_fabric.sim.streams import PATTERNS, StreamRuleError, StreamRules, pattern


def result(chunk: int, destination: int) -> Result:
    flags = Flags.NONE if destination == DESTINATION_ALL else Flags.RESEND
    headers = [Header(FrameType.RESULT, 1, destination, chunk, plane, 2, 3, 1, 1, flags) for plane in range(2)]
    return Result(chunk, destination, tuple(header.pack() + bytes([plane] * 8) for plane, header in enumerate(headers)))


def frames(of: Result) -> list[bytes]:
    return [bytes(HEADER_OFFSET) + frame for frame in of.frames]


ALL, AGAIN = result(5, DESTINATION_ALL), result(5, 2)
COMPLETES = Reaction(Reason.NONE, (ALL,), None)
ASKS = Reaction(Reason.NONE, (AGAIN,), None)


def board(*, delivered: bool = True) -> Scoreboard:
    """Chunk 5 was completed in cycles 10 to 12, and its result came in cycle 15."""
    made = Scoreboard()
    made.frame_begins(COMPLETES, 10)
    made.frame_ends(COMPLETES)
    if delivered:
        for frame in frames(ALL):
            made.result_frame(frame, 15)
    return made


def ask(made: Scoreboard, cycle: int) -> None:
    made.frame_begins(ASKS, cycle)
    made.frame_ends(ASKS)


def test_all_is_well() -> None:
    made = board(delivered=False)
    assert made.owed() == ["chunk 5 to all"]
    first, second = frames(ALL)
    made.result_frame(first, 15)
    assert made.owed() == ["chunk 5 to all", "the rest of chunk 5"]
    made.result_frame(second, 17)
    assert made.owed() == []
    ask(made, 20)
    assert made.owed() == ["chunk 5 to worker 2, again"]
    assert made.owed(again=False) == []
    for frame in frames(AGAIN):
        made.result_frame(frame, 25)
    assert made.owed() == []
    assert made.results == 2


def test_one_answer_serves_all_who_asked_before_it_began() -> None:
    made = board()
    for cycle in (20, 21, 30):
        ask(made, cycle)
    for frame in frames(AGAIN):
        made.result_frame(frame, 25)
    assert made.owed() == ["chunk 5 to worker 2, again"]
    for frame in frames(AGAIN):
        made.result_frame(frame, 31)
    assert made.owed() == []


def test_the_result_to_all_is_an_answer_too() -> None:
    made = board(delivered=False)
    ask(made, 13)
    for frame in frames(ALL):
        made.result_frame(frame, 15)
    assert made.owed() == []


def test_a_claim_cancels() -> None:
    made = board()
    ask(made, 20)
    made.frame_begins(Reaction(Reason.NONE, (), 5), 30)
    assert made.owed() == []


def _twice(made: Scoreboard) -> None:
    made.result_frame(frames(ALL)[0], 40)


def _unasked(made: Scoreboard) -> None:
    made.result_frame(frames(AGAIN)[0], 40)


def _asked_too_late(made: Scoreboard) -> None:
    ask(made, 41)
    made.result_frame(frames(AGAIN)[0], 41)


def _too_often(made: Scoreboard) -> None:
    ask(made, 20)
    for frame in [*frames(AGAIN), frames(AGAIN)[0]]:
        made.result_frame(frame, 25)


def _other_chunk(made: Scoreboard) -> None:
    made.result_frame(frames(result(6, DESTINATION_ALL))[0], 40)


def _planes_swapped(made: Scoreboard) -> None:
    ask(made, 20)
    made.result_frame(frames(AGAIN)[1], 25)


def _mixed(made: Scoreboard) -> None:
    ask(made, 20)
    made.result_frame(frames(AGAIN)[0], 25)
    made.result_frame(frames(ALL)[1], 26)


def _bit(made: Scoreboard) -> None:
    ask(made, 20)
    frame = bytearray(frames(AGAIN)[0])
    frame[-1] ^= 0x10
    made.result_frame(bytes(frame), 25)


def _short(made: Scoreboard) -> None:
    ask(made, 20)
    made.result_frame(frames(AGAIN)[0][:-8], 25)


def _noise(made: Scoreboard) -> None:
    ask(made, 20)
    made.result_frame(b"\1" + frames(AGAIN)[0][1:], 25)


def _no_header(made: Scoreboard) -> None:
    made.result_frame(bytes(72), 25)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_twice, "chunk 5 to 0xffff: sent twice"),
        (_unasked, "chunk 5 to 0x2: asked for 0 times, answered 1 times"),
        (_asked_too_late, "asked for 0 times"),
        (_too_often, "asked for 1 times, answered 2 times"),
        (_other_chunk, "chunk 6 to 0xffff: that chunk is not complete"),
        (_planes_swapped, "header field plane is 0x01, expected 0x00"),
        (_mixed, "header field flags is 0x00, expected 0x04"),
        (_bit, "element 60 is 1, expected 0; 1 elements differ"),
        (_short, "64 bytes, expected 72"),
        (_noise, "byte 0 is 0x01, expected 0"),
        (_no_header, "without a good header"),
    ],
)
def test_wrong_results(wrong: Callable[[Scoreboard], None], message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        wrong(board())


def test_a_result_before_the_last_vote() -> None:
    made = Scoreboard()
    made.frame_begins(COMPLETES, 10)
    with pytest.raises(Mismatch, match="comes before the last vote"):
        made.result_frame(frames(ALL)[0], 11)


def test_stream_rules() -> None:
    rules = StreamRules("m_axis")
    for valid, ready, beat in [
        (False, True, None),
        (True, False, 1),
        (True, True, 1),
        (True, True, 2),
        (False, False, 3),
    ]:
        rules.cycle(valid, ready, beat)
    rules.cycle(True, False, 4)
    with pytest.raises(StreamRuleError, match="m_axis: the beat changed"):
        rules.cycle(True, True, 5)
    rules.reset()
    rules.cycle(True, False, 4)
    with pytest.raises(StreamRuleError, match="m_axis: valid fell"):
        rules.cycle(False, True, 4)
    rules.reset()
    rules.cycle(False, False, None)


@pytest.mark.parametrize("name", [*PATTERNS, "any"])
def test_patterns_repeat_for_a_seed_and_never_end(name: str) -> None:
    first, again = pattern(name, 3), pattern(name, 3)
    drawn = [next(first) for _ in range(2000)]
    assert drawn == [next(again) for _ in range(2000)]
    assert any(drawn)
    with pytest.raises(ValueError, match="no stall pattern 'never'"):
        pattern("never", 3)
