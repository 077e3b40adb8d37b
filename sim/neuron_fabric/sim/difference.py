"""Where two frames differ first, in words: what a scoreboard says of a wrong one."""

from __future__ import annotations

from collections.abc import Collection

from neuron_fabric.model.wire import HEADER_BYTES, HEADER_FIELDS, HEADER_OFFSET

__all__ = ["difference"]


def difference(data: bytes, expected: bytes, *, front: str = "", derived: Collection[int] = ()) -> str:
    """The first byte, header field or element in which two frames of the protocol differ.

    Parameters
    ----------
    data, expected : bytes
        From the first byte of the headers in front on.
    front : str
        Said after the number of a byte before the protocol's header.
    derived : collection of int
        Bytes that differ with whatever else does, as checksums: told only if nothing else is wrong.
    """
    if len(data) != len(expected):
        return f"{len(data)} bytes, expected {len(expected)}"
    differs = [k for k, (a, b) in enumerate(zip(data, expected, strict=True)) if a != b]
    if not differs:
        return "the same, but not due any more"
    at = next((k for k in differs if k not in derived), differs[0])
    start = HEADER_OFFSET + HEADER_BYTES
    if at < HEADER_OFFSET:
        return f"byte {at}{front} is {data[at]:#04x}, expected {expected[at]:#04x}"
    if at < start:
        for name, offset, size, _doc in HEADER_FIELDS:
            begin = HEADER_OFFSET + offset
            if begin <= at < begin + size:
                was, should = data[begin : begin + size], expected[begin : begin + size]
                return f"header field {name} is 0x{was.hex()}, expected 0x{should.hex()}"
    wrong = sum((a ^ b).bit_count() for a, b in zip(data[start:], expected[start:], strict=True))
    bit = ((data[at] ^ expected[at]) & -(data[at] ^ expected[at])).bit_length() - 1
    return (
        f"element {8 * (at - start) + bit} is {data[at] >> bit & 1}, expected {expected[at] >> bit & 1}; "
        f"{wrong} elements differ"
    )
