"""Payloads of control frames: what is packed is parsed, and what is out of range is refused by name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model import control
from neuron_fabric.model.control import (
    Close,
    ControlError,
    Grant,
    JobState,
    Open,
    StatusReply,
    StatusRequest,
    control_frame,
    first_difference,
)
from neuron_fabric.model.registers import COUNTERS
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, Reason

U64 = st.integers(0, (1 << 64) - 1)
U16 = st.integers(0, 0xFFFF)


def field_values(fields, **special):
    """Any value in the range of each field of a table."""
    return {f.name: special.get(f.name, st.integers(f.low, f.high)) for f in fields if f.name != "version"}


def _consistent(request):
    return request if request.result_format else replace(request, margin=0)


opens = st.builds(Open, **field_values(control.OPEN_FIELDS, slots=st.integers(0, 16).map(lambda bits: 1 << bits))).map(
    _consistent
)
grants = st.builds(Grant, **field_values(control.GRANT_FIELDS))
closes = st.builds(Close, nonce=U64)
requests = st.builds(StatusRequest, cookie=U64)
counters = st.dictionaries(st.sampled_from([name for name, _doc in COUNTERS]), st.integers(1, (1 << 32) - 1))
replies = st.builds(
    StatusReply,
    **field_values(control.STATUS_REPLY_FIELDS, state=st.sampled_from(JobState), counters=counters),
)
payloads = st.one_of(opens, grants, closes, requests, replies)


@pytest.mark.parametrize(
    "fields",
    [
        control.OPEN_FIELDS,
        control.GRANT_FIELDS,
        control.CLOSE_FIELDS,
        control.STATUS_FIELDS,
        control.STATUS_REPLY_FIELDS,
    ],
)
def test_fields_tile_their_payload(fields):
    at = 0
    for field in fields:
        assert field.offset == at
        assert 0 <= field.low <= field.high < 1 << 8 * field.size
        at += field.size


@given(payloads)
def test_pack_and_unpack_are_inverse(payload):
    packed = payload.pack()
    assert len(packed) <= control.MAX_CONTROL_BYTES
    assert type(payload).unpack(packed) == payload


@given(payloads)
def test_every_field_stands_where_its_table_says(payload):
    packed = payload.pack()
    for field in payload.fields[1:]:
        value = int.from_bytes(packed[field.offset : field.offset + field.size], "big")
        wanted = getattr(payload, field.name)
        assert value == (len(wanted) if field.name == "counters" else wanted)


@given(payloads, st.data())
def test_a_payload_of_another_length_or_version_is_refused(payload, data):
    packed = payload.pack()
    short = data.draw(st.integers(1, len(packed) - 1))
    for wrong, reason in (
        (b"", Reason.BAD_LENGTH),
        (packed[:short], Reason.BAD_LENGTH),
        (packed + b"\0", Reason.BAD_LENGTH),
        (b"\2" + packed[1:], Reason.BAD_VERSION),
    ):
        with pytest.raises(ControlError) as caught:
            type(payload).unpack(wrong)
        assert caught.value.reason is reason


@given(st.sampled_from([Open, Grant, Close, StatusRequest, StatusReply]), st.binary(max_size=96))
def test_random_bytes_never_crash(kind, data):
    try:
        payload = kind.unpack(b"\1" + data)
    except ControlError as error:
        reason = error.reason
    else:
        assert kind.unpack(payload.pack()) == payload
        return
    assert reason in (Reason.BAD_LENGTH, Reason.BAD_VALUE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": 0}, "OPEN: members must be 1 to 65535, not 0"),
        ({"members": 1 << 16}, "OPEN: members must be 1 to 65535, not 65536"),
        ({"encoding": 2}, "OPEN: encoding must be 0 to 1, not 2"),
        ({"slots": 3}, "OPEN: slots must be a power of two, not 3"),
        ({"lines_per_chunk": 0}, "OPEN: lines_per_chunk must be 1 to 255, not 0"),
        ({"margin": 1}, "OPEN: tallies have no margin, so it must be 0, not 1"),
        ({"nonce": -1}, "OPEN: nonce must be 0 to"),
        ({"next_chunk": "7"}, "OPEN: next_chunk must be 0 to 4294967295, not '7'"),
    ],
)
def test_what_is_out_of_range_is_named(change, message):
    with pytest.raises(ControlError, match=message) as caught:
        replace(Open(2, 1), **change).pack()
    assert caught.value.reason is Reason.BAD_VALUE
    assert control.OPEN_FIELDS[caught.value.field].name in change


def test_what_comes_out_of_range_is_refused_as_well():
    packed = bytearray(Open(2, 1).pack())
    packed[1] = 9
    with pytest.raises(ControlError, match="encoding must be 0 to 1, not 9") as caught:
        Open.unpack(packed)
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_VALUE, 1)


def test_counters_stop_where_registers_do_and_zeros_are_left_out():
    reply = StatusReply(1, 2, 8, 1, counters={"frames": 1 << 40, "lines": 0})
    assert StatusReply.unpack(reply.pack()).counters == {"frames": (1 << 32) - 1}
    with pytest.raises(ControlError, match="no counter 'poems'"):
        replace(reply, counters={"poems": 1}).pack()


def test_a_counter_of_a_later_table_is_left_out():
    packed = bytearray(StatusReply(1, 2, 8, 1, counters={"frames": 7, "lines": 9}).pack())
    packed[-12:-10] = (0xFFFF).to_bytes(2, "big")
    assert StatusReply.unpack(packed).counters == {"lines": 9}


@given(payloads, U16, U16, U16, st.sampled_from(Reason))
def test_a_frame_is_a_header_and_the_payload(payload, job, worker, epoch, reason):
    frame = control_frame(payload, job=job, worker=worker, epoch=epoch, reason=reason)
    header = Header.unpack(frame)
    assert (header.job, header.worker, header.epoch, header.reason) == (job, worker, epoch, reason)
    assert (header.chunk, header.planes, header.voters, header.lines) == (0, 0, 0, 0)
    assert header.type in (FrameType.OPEN, FrameType.GRANT, FrameType.CLOSE, FrameType.STATUS)
    assert type(payload).unpack(frame[HEADER_BYTES:]) == payload


@pytest.mark.parametrize("name", ["encoding", "result_format", "members", "margin", "lines_per_chunk", "slots"])
def test_the_first_difference_is_found(name):
    one = Open(2, 1, margin=1, result_format=1)
    other = replace(one, **{name: getattr(one, name) * 2 if name != "encoding" else 1}, nonce=9, next_chunk=7)
    index = first_difference(one, other)
    assert control.OPEN_FIELDS[index].name == name
    assert first_difference(one, replace(one, nonce=9, next_chunk=7)) is None


def test_a_refusal_names_its_field():
    assert Grant(1, 8, 6, 3, detail=4).field == "members"
    assert Grant(1, 8, 6, 3).field is None
