"""The codec's kernels on plain numpy: the fallback without numba, and a second opinion for its tests.

Thin adapters from words in place to :mod:`neuron_fabric.model.codec`. The contract is
:class:`neuron_fabric.runtime.codec.CodecKernels`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import codec
from neuron_fabric.model.encoding import BINARY, TERNARY
from neuron_fabric.runtime.codec import words_for

__all__ = [
    "NAME",
    "commit_and_decode_planes",
    "commit_and_decode_rows",
    "commit_residual",
    "commit_ternary_residual",
    "count_planes",
    "count_ternary",
    "decode_planes",
    "decode_rows",
    "decode_ternary_rows",
    "encode_binary",
    "encode_binary_residual",
    "encode_ternary",
    "encode_ternary_residual",
    "pack_majority",
    "pack_signed_majority",
]

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.uint8]

NAME = "numpy"

# NaN, Inf and overflow are data here (the scale reports them), not a reason to warn from inside a backward pass.
_quiet = np.errstate(all="ignore")


def encode_binary(gradient: F32, parity: int, words: U64) -> tuple[float, int]:
    """Sign bits, L1 sum and exact zeros of a gradient."""
    return _encode(gradient, None, parity, words)


def encode_binary_residual(gradient: F32, residual: F32, parity: int, words: U64) -> tuple[float, int]:
    """Sign bits and L1 sum of gradient + residual, exact zeros of the gradient."""
    _check(residual.size == gradient.size, "residual and gradient differ in size")
    return _encode(gradient, residual, parity, words)


def encode_ternary(gradient: F32, gate: float, positive: U64, negative: U64) -> tuple[float, int, int]:
    """Both planes of a gradient, L1 sum and number of what is sent, exact zeros."""
    return _encode_ternary(gradient, None, gate, positive, negative)


def encode_ternary_residual(
    gradient: F32, residual: F32, gate: float, positive: U64, negative: U64
) -> tuple[float, int, int]:
    """The same of gradient + residual, exact zeros of the gradient."""
    _check(residual.size == gradient.size, "residual and gradient differ in size")
    return _encode_ternary(gradient, residual, gate, positive, negative)


def count_planes(rows: U64, planes: U64) -> None:
    """Count rows of bits into bit planes."""
    _check(1 <= rows.shape[0] <= 64, "rows must be 1 to 64 workers")
    _check(planes.shape == (rows.shape[0].bit_length(), rows.shape[1]), "planes do not fit the rows")
    planes[:] = 0
    for row in rows:
        carry = row
        for plane in planes:
            plane[:], carry = plane ^ carry, plane & carry


def count_ternary(positive: U64, negative: U64, planes: U64) -> None:
    """Vote sums of rows of two planes as two's complement planes."""
    world, words = positive.shape
    _check(1 <= world <= 64, "rows must be 1 to 64 workers")
    _check(negative.shape == positive.shape, "positive and negative rows differ in shape")
    _check(planes.shape == (TERNARY.tally_bits(world), words), "planes do not fit the rows")
    tally = np.zeros(64 * words, np.int8)
    for plus, minus in zip(positive, negative, strict=True):
        tally += _bits(plus, tally.size).astype(np.int8) - _bits(minus, tally.size).astype(np.int8)
    for k, plane in enumerate(planes):
        _pack(tally >> k & 1 == 1, plane)


def pack_majority(planes: U64, voters: int, margin: int, n: int, packed: U64) -> None:
    """Negative and nonzero planes of a tally."""
    _check(1 <= planes.shape[0] <= 7, "planes must be 1 to 7")
    _check(planes.shape[1] == words_for(n), "planes do not fit n")
    _check(packed.shape == (2, planes.shape[1]), "packed must be two planes of the tally's length")
    _check(margin >= 0, "margin is negative")
    _pack_votes(codec.vote_sum(_index(planes, n), voters, BINARY), margin, packed)


def pack_signed_majority(planes: U64, margin: int, n: int, packed: U64) -> None:
    """Negative and nonzero planes of a vote sum in two's complement."""
    depth = planes.shape[0]
    _check(2 <= depth <= 8, "planes must be 2 to 8")
    _check(planes.shape[1] == words_for(n), "planes do not fit n")
    _check(packed.shape == (2, planes.shape[1]), "packed must be two planes of the tally's length")
    _check(margin >= 0, "margin is negative")
    votes = _index(planes, n).astype(np.int64)
    _pack_votes(np.where(votes >> (depth - 1), votes - (1 << depth), votes), margin, packed)


def decode_rows(rows: U64, table: F32, out: F32) -> None:
    """Look up the count of each element's bits."""
    _check(1 <= rows.shape[0] <= 64, "rows must be 1 to 64 workers")
    _check(rows.shape[1] == words_for(out.size), "rows do not fit out")
    planes = np.empty((rows.shape[0].bit_length(), rows.shape[1]), np.uint64)
    count_planes(rows, planes)
    decode_planes(planes, table, out)


def decode_ternary_rows(positive: U64, negative: U64, table: F32, out: F32) -> None:
    """Look up the vote sum of each element's bits."""
    _check(1 <= positive.shape[0] <= 64, "rows must be 1 to 64 workers")
    _check(positive.shape[1] == words_for(out.size), "rows do not fit out")
    planes = np.empty((TERNARY.tally_bits(positive.shape[0]), positive.shape[1]), np.uint64)
    count_ternary(positive, negative, planes)
    decode_planes(planes, table, out)


def decode_planes(planes: U64, table: F32, out: F32) -> None:
    """Look up the index that each element's bits spell."""
    _check(1 <= planes.shape[0] <= 8, "planes must be 1 to 8")
    _check(table.size == 1 << planes.shape[0], "table must have 2 ** planes entries")
    _check(planes.shape[1] == words_for(out.size), "planes do not fit out")
    np.take(table, _index(planes, out.size), out=out)


@_quiet
def commit_residual(
    gradient: F32, residual: F32, own: U64, scale: np.float32, clip: np.float32, decay: np.float32
) -> None:
    """Error feedback of one segment, in place."""
    _check(residual.size == gradient.size, "residual and gradient differ in size")
    _check(own.size == words_for(gradient.size), "own does not fit the gradient")
    _commit(gradient, residual, 1 - 2 * _bits(own, gradient.size).astype(np.int8), scale, clip, decay)


@_quiet
def commit_ternary_residual(
    gradient: F32,
    residual: F32,
    positive: U64,
    negative: U64,
    scale: np.float32,
    clip: np.float32,
    decay: np.float32,
) -> None:
    """Error feedback of one segment, in place."""
    _check(residual.size == gradient.size, "residual and gradient differ in size")
    for own in (positive, negative):
        _check(own.size == words_for(gradient.size), "own does not fit the gradient")
    plus, minus = (_bits(own, gradient.size).astype(np.int8) for own in (positive, negative))
    _commit(gradient, residual, plus - minus, scale, clip, decay)


def commit_and_decode_rows(
    gradient: F32,
    residual: F32,
    own: U64,
    scale: np.float32,
    clip: np.float32,
    decay: np.float32,
    rows: U64,
    table: F32,
) -> None:
    """Commit, then decode over the gradient."""
    _check(1 <= rows.shape[0] <= 64, "rows must be 1 to 64 workers")
    planes = np.empty((rows.shape[0].bit_length(), rows.shape[1]), np.uint64)
    count_planes(rows, planes)
    commit_and_decode_planes(gradient, residual, own, scale, clip, decay, planes, table)


def commit_and_decode_planes(
    gradient: F32,
    residual: F32,
    own: U64,
    scale: np.float32,
    clip: np.float32,
    decay: np.float32,
    planes: U64,
    table: F32,
) -> None:
    """Commit, then decode over the gradient."""
    decoded = np.empty_like(gradient)
    decode_planes(planes, table, decoded)
    commit_residual(gradient, residual, own, scale, clip, decay)
    gradient[:] = decoded


@_quiet
def _encode(gradient: F32, residual: F32 | None, parity: int, words: U64) -> tuple[float, int]:
    _check(words.size == words_for(gradient.size), "words do not fit the gradient")
    encoded = codec.encode_binary(gradient, residual, parity=parity)
    _store(encoded.planes[0], words)
    return encoded.l1, encoded.zeros


@_quiet
def _encode_ternary(
    gradient: F32, residual: F32 | None, gate: float, positive: U64, negative: U64
) -> tuple[float, int, int]:
    for words in (positive, negative):
        _check(words.size == words_for(gradient.size), "words do not fit the gradient")
    encoded = codec.encode_ternary(gradient, residual, gate=gate)
    _store(encoded.planes[0], positive)
    _store(encoded.planes[1], negative)
    return encoded.l1, encoded.sent, encoded.zeros


def _commit(
    gradient: F32,
    residual: F32,
    sent: npt.NDArray[np.int8],
    scale: np.float32,
    clip: np.float32,
    decay: np.float32,
) -> None:
    bound = None if np.isposinf(clip) else float(clip)
    residual[:] = codec.residual_after(gradient + residual, sent, scale, clip=bound, decay=float(decay))


def _pack_votes(votes: npt.NDArray[np.int64], margin: int, packed: U64) -> None:
    vote = codec.majority(votes, margin)
    _pack(vote < 0, packed[0])
    _pack(vote != 0, packed[1])


def _index(planes: U64, n: int) -> npt.NDArray[np.uint8]:
    """The number, 0 to 255, that each element's bits spell."""
    index = np.zeros(n, np.uint8)
    for k, plane in enumerate(planes):
        index |= _bits(plane, n) << np.uint8(k)
    return index


def _bits(words: U64, n: int) -> Bits:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=n, bitorder="little")


def _pack(bits: npt.NDArray[np.bool_], words: U64) -> None:
    _store(np.packbits(bits, bitorder="little"), words)


def _store(packed: Bits, words: U64) -> None:
    padded = np.zeros(8 * words.size, np.uint8)
    padded[: packed.size] = packed
    words[:] = padded.view(np.uint64)


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)
