import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model.wire import (
    HEADER_BYTES,
    HEADER_FIELDS,
    Flags,
    FrameType,
    Header,
    HeaderError,
    Reason,
    header_table,
    serial_newer,
)

headers = st.builds(
    Header,
    type=st.sampled_from(FrameType),
    job=st.integers(0, 0xFFFF),
    worker=st.integers(0, 0xFFFF),
    chunk=st.integers(0, 0xFFFFFFFF),
    plane=st.integers(0, 0xFF),
    planes=st.integers(0, 0xFF),
    voters=st.integers(0, 0xFFFF),
    lines=st.integers(0, 0xFF),
    epoch=st.integers(0, 0xFFFF),
    flags=st.integers(0, 7).map(Flags),
    missing=st.integers(0, 0xFFFF),
    reason=st.integers(0, 0xFF),
)


def test_fields_tile_the_header():
    at = 0
    for field in HEADER_FIELDS:
        assert field.offset == at
        at += field.size
    assert at == HEADER_BYTES


@given(headers)
def test_pack_and_parse_are_inverse(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header
    assert Header.unpack(packed + b"payload") == header


@given(headers)
def test_every_field_stands_where_the_table_says(header):
    packed = header.pack()
    for field in HEADER_FIELDS[3:]:
        value = int.from_bytes(packed[field.offset : field.offset + field.size], "big")
        assert value == getattr(header, field.name)


@given(st.binary(max_size=64))
def test_random_bytes_never_crash(data):
    try:
        header = Header.unpack(data)
    except HeaderError as error:
        reason = error.reason
    else:
        assert header.pack() == data[:HEADER_BYTES]
        return
    assert reason in (Reason.BAD_LENGTH, Reason.BAD_MAGIC, Reason.BAD_VERSION, Reason.BAD_TYPE)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(0, 0x00, Reason.BAD_MAGIC), (2, 0x20, Reason.BAD_VERSION), (2, 0x1F, Reason.BAD_TYPE)],
)
def test_refusals_name_the_reason(at, value, reason):
    packed = bytearray(Header(FrameType.CONTRIBUTE, 1, 2, 3).pack())
    packed[at] = value
    with pytest.raises(HeaderError) as caught:
        Header.unpack(packed)
    assert caught.value.reason is reason


@pytest.mark.parametrize(("name", "value"), [("job", 1 << 16), ("chunk", -1), ("lines", 256), ("voters", 70000)])
def test_a_value_out_of_range_is_named(name, value):
    fields = {"job": 0, "worker": 0, "chunk": 0, name: value}
    with pytest.raises(ValueError, match=rf"'{name}' has \d+ bits"):
        Header(FrameType.ABSTAIN, **fields).pack()


@given(st.integers(0, 0xFFFFFFFF), st.integers(1, (1 << 31) - 1))
def test_serial_numbers_wrap(old, step):
    new = (old + step) & 0xFFFFFFFF
    assert serial_newer(new, old)
    assert not serial_newer(old, new)
    assert not serial_newer(old, old)


def test_the_table_for_the_documentation_has_every_field():
    table = header_table()
    assert all(f"| {field.name} |" in table for field in HEADER_FIELDS)
