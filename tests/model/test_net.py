import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_fabric.model.net import (
    HEADERS_BYTES,
    MIN_FRAME_BYTES,
    Datagram,
    Drop,
    Endpoint,
    FrameError,
    build,
    internet_checksum,
    ones_complement_sum,
    parse,
)

ME = Endpoint.of("02:00:00:00:00:01", "10.0.0.1", 20045)
PEER = Endpoint.of("02-00-00-00-00-02", "10.0.0.2", 40000)
GROUP = Endpoint.multicast("239.129.2.3", 20045)

endpoints = st.builds(Endpoint, st.integers(0, 2**48 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))


def kind_of(frame, me=ME, group=None, max_bytes=None):
    """The kind of a frame's drop; ``None`` if it is taken."""
    try:
        parse(frame, me, group, max_bytes)
    except FrameError as error:
        return error.kind
    return None


def patched(frame, at, new, ip_checksum=False):
    """The frame with other bytes at an offset; the IPv4 header's checksum made to hold again on request."""
    changed = bytearray(frame)
    changed[at : at + len(new)] = new
    if ip_checksum:
        changed[24:26] = bytes(2)
        changed[24:26] = internet_checksum(changed[14:34]).to_bytes(2, "big")
    return bytes(changed)


@given(endpoints, endpoints, st.binary(max_size=300), st.integers(0, 255), st.integers(0, 0xFFFF))
def test_build_and_parse_are_inverse(source, destination, payload, ttl, identification):
    frame = build(source, destination, payload, ttl, identification)
    assert len(frame) == max(MIN_FRAME_BYTES, HEADERS_BYTES + len(payload))
    meant = Datagram(source, destination, payload)
    assert parse(frame, destination) == meant
    assert parse(frame, None) == meant
    assert parse(memoryview(frame + b"padding"), destination) == meant


def test_a_frame_that_was_worked_out_by_hand():
    """Words 4500 0021 0000 4000 4011 0a00 0001 0a00 0002 add up to 0xd935; the UDP words to 0xad55 (RFC 1071)."""
    source = Endpoint(0x0A0B0C0D0E0F, 0x0A000001, 0x1234)
    destination = Endpoint(0x010203040506, 0x0A000002, 0x4321)
    frame = build(source, destination, b"hello")
    assert frame == bytes.fromhex(
        "010203040506 0a0b0c0d0e0f 08004500 0021 0000 4000 4011 26ca 0a000001 0a0000021234 4321 000d 52aa 68656c6c6f"
    ).ljust(60, b"\0")


@settings(max_examples=20)
@given(st.binary(max_size=90))
def test_every_bit_flip_is_noticed_or_stands_where_nobody_looks(payload):
    frame = build(PEER, ME, payload)
    for bit in range(8 * len(frame)):
        at = bit // 8
        changed = patched(frame, at, bytes([frame[at] ^ 1 << bit % 8]))
        if 6 <= at < 12:  # source MAC
            assert parse(changed, ME) == Datagram(
                replace(PEER, mac=PEER.mac ^ 1 << 8 * (11 - at) + bit % 8), ME, payload
            )
        elif at >= HEADERS_BYTES + len(payload):
            assert parse(changed, ME) == Datagram(PEER, ME, payload)
        else:
            assert kind_of(changed) is not None, f"bit {bit % 8} of byte {at}"


FRAME = build(PEER, ME, bytes(range(100)))


@pytest.mark.parametrize(
    ("kind", "frame"),
    [
        (Drop.TOO_SHORT, b""),
        (Drop.TOO_SHORT, FRAME[:41]),
        (Drop.NOT_IPV4, patched(FRAME, 12, b"\x86\xdd")),
        (Drop.IP_HEADER, patched(FRAME, 14, b"\x46")),
        (Drop.IP_HEADER, patched(FRAME, 14, b"\x65")),
        (Drop.FRAGMENT, patched(FRAME, 20, b"\x20\x00", True)),
        (Drop.FRAGMENT, patched(FRAME, 20, b"\x40\x01", True)),
        (Drop.IP_CHECKSUM, patched(FRAME, 22, b"\x3f")),
        (Drop.NOT_UDP, patched(FRAME, 23, b"\x06", True)),
        (Drop.NOT_OURS, build(PEER, replace(ME, mac=ME.mac ^ 1 << 47), b"")),
        (Drop.NOT_OURS, build(PEER, replace(ME, ip=ME.ip ^ 1), b"")),
        (Drop.NOT_OURS, build(PEER, replace(ME, port=ME.port ^ 0x100), b"")),
        (Drop.NOT_OURS, build(PEER, GROUP, b"")),
        (Drop.TOO_LONG, FRAME + bytes(1000)),
        (Drop.IP_LENGTH, FRAME[:-1]),
        (Drop.IP_LENGTH, patched(patched(FRAME, 16, b"\x00\x1b", True), 38, b"\x00\x07")),
        (Drop.UDP_LENGTH, patched(FRAME, 38, b"\x00\x6b")),
        (Drop.UDP_LENGTH, patched(FRAME, 16, struct.pack(">H", 127), True)),
        (Drop.NO_CHECKSUM, patched(FRAME, 40, bytes(2))),
        (Drop.UDP_CHECKSUM, patched(FRAME, 141, b"\x00")),
    ],
)
def test_every_kind_is_reached(kind, frame):
    assert kind_of(frame, max_bytes=1000) is kind


def test_the_first_failing_check_counts():
    """Break one thing after the other, from the last check to the first: each hides all that were broken before."""
    frame = FRAME
    steps = [
        (Drop.UDP_CHECKSUM, 141, b"\x00"),
        (Drop.NO_CHECKSUM, 40, bytes(2)),
        (Drop.UDP_LENGTH, 38, b"\x01\x00"),
        (Drop.IP_LENGTH, 16, b"\x02\x00"),
        (Drop.TOO_LONG, len(FRAME), bytes(500)),
        (Drop.NOT_OURS, 30, b"\x0b"),
        (Drop.NOT_UDP, 23, b"\x06"),
        (Drop.IP_CHECKSUM, 24, b"\x00\x00"),
        (Drop.FRAGMENT, 20, b"\x20"),
        (Drop.IP_HEADER, 14, b"\x55"),
        (Drop.NOT_IPV4, 12, b"\x09"),
    ]
    for kind, at, new in steps:
        frame = patched(frame, at, new, ip_checksum=14 <= at < 34 and kind > Drop.IP_CHECKSUM)
        assert kind_of(frame, max_bytes=500) is kind
    assert kind_of(frame[:41], max_bytes=40) is Drop.TOO_SHORT
    assert [kind for kind, _at, _new in reversed(steps)] == list(Drop)[1:]


def test_a_frame_may_just_fill_the_buffer():
    assert kind_of(FRAME, max_bytes=len(FRAME)) is None
    assert kind_of(FRAME, max_bytes=len(FRAME) - 1) is Drop.TOO_LONG


def test_foreign_and_bad():
    assert [kind for kind in Drop if kind.foreign] == [Drop.NOT_IPV4, Drop.NOT_UDP, Drop.NOT_OURS]


def test_a_group_is_taken_as_a_whole_or_not():
    assert GROUP.mac == 0x01005E010203
    assert parse(build(PEER, GROUP, b"x"), ME, GROUP).destination == GROUP
    for mixed in (replace(GROUP, mac=ME.mac), replace(GROUP, ip=ME.ip), replace(GROUP, port=1)):
        assert kind_of(build(PEER, mixed, b"x"), ME, GROUP) is Drop.NOT_OURS
    assert kind_of(build(PEER, ME, b"x"), ME, GROUP) is None


def test_a_checksum_of_zero_is_sent_as_ones():
    """Choose two payload bytes so that everything else adds up to 0xFFFF."""
    frame = build(PEER, ME, bytes(2))
    checksum = frame[40:42]
    ones = build(PEER, ME, checksum)
    assert ones[40:42] == b"\xff\xff"
    assert parse(ones, ME).payload == checksum


@given(st.binary(max_size=200))
def test_the_sum_is_that_of_the_definition(data):
    total = 0
    for at in range(0, len(data), 2):
        total += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        total = (total & 0xFFFF) + (total >> 16)
    assert ones_complement_sum(data) == total


def test_the_longest_datagram():
    payload = b"\xff" * 65507
    assert parse(build(PEER, ME, payload), ME).payload == payload
    with pytest.raises(ValueError, match="at most 65507 bytes"):
        build(PEER, ME, payload + b"x")


@given(st.binary(max_size=100))
def test_random_bytes_never_crash(data):
    kind_of(data)
    kind_of(FRAME[:14] + data, None)
    kind_of(FRAME[:34] + data, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Endpoint(1 << 48, 0, 0), "mac has 48 bits"),
        (lambda: Endpoint(0, -1, 0), "ip has 32 bits"),
        (lambda: Endpoint(0, 0, 65536), "port has 16 bits"),
        (lambda: Endpoint.of("02:00", "10.0.0.1", 1), "six pairs"),
        (lambda: Endpoint.of("02:00:00:00:00:0g", "10.0.0.1", 1), "six pairs"),
        (lambda: Endpoint.of("02:00:00:00:00:01", "10.0.0", 1), "octets"),
        (lambda: Endpoint.multicast("10.0.0.1", 1), "multicast"),
        (lambda: build(PEER, ME, b"", ttl=256), "ttl has 8 bits"),
        (lambda: build(PEER, ME, b"", identification=-1), "identification has 16 bits"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_addresses_are_integers():
    with pytest.raises(TypeError, match=r"ip must be an integer, not '10.0.0.1': see Endpoint.of"):
        Endpoint(0, "10.0.0.1", 0)  # type: ignore[arg-type]
    assert str(ME) == "10.0.0.1:20045 at 02:00:00:00:00:01"
