"""The codec's kernels, compiled by numba to run at the speed of memory.

The contract is :class:`neuron_fabric.runtime.codec.CodecKernels`, the definition :mod:`neuron_fabric.model.codec`.

The work is done by a few operations on the 64 elements of one word, each written as LLVM vectors of 64 lanes
(:func:`_encode64`, :func:`_gate64`, :func:`_commit64`, :func:`_look_up64`, and those of :func:`_adder` on eight words
of bits): a comparison of 64 floats *is* a word of bits, and a word of bits is what chooses between two vectors. LLVM
splits them into whatever registers the machine has. Loops that its vectoriser is left to discover took 1.7 times as
long to encode, and lost their vectors whenever the inliner changed its mind. Nothing here uses fastmath: results are
the same bits on every machine, the L1 sum included.

All kernels release the GIL and use one thread. They are compiled for one signature each when this module is first
imported (kept on disk after that), so that no backward pass waits for a compiler; hence the order, helpers first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

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
Bytes = npt.NDArray[np.uint8]

NAME = "numba"

LANES = 64  # elements per word
QUARTER = 16  # elements decoded at once: with 64, the blends spill registers where these are 256 bits wide
GROUP = 8  # words counted at once
BLOCK = 32  # words a fused kernel works on before the next: their gradient and residual, 16 KiB, stay in the L1 cache
MAX_PLANES = 8
UNSIGNED_PLANES = 7  # of the count of 64 workers; their vote sum takes one more

# Declared read-only or strided where that is allowed: numba passes the narrower kinds to these, not the reverse, and
# one compiled version then serves every caller.
_IN = types.Array(types.float32, 1, "C", readonly=True)
_OUT = types.Array(types.float32, 1, "C")
_WORDS_IN = types.Array(types.uint64, 1, "C", readonly=True)
_WORDS_OUT = types.Array(types.uint64, 1, "C")
_PLANES_IN = types.Array(types.uint64, 2, "A", readonly=True)
_PLANES_OUT = types.Array(types.uint64, 2, "A")
_L1_AND_ZEROS = types.Tuple((types.float64, types.int64))
_L1_SENT_ZEROS = types.Tuple((types.float64, types.int64, types.int64))
_SCALE_CLIP_DECAY = (types.float32, types.float32, types.float32)
_COMMIT = (_OUT, _OUT, _WORDS_IN, *_SCALE_CLIP_DECAY)

_helper = njit(nogil=True)


def _kernel(signature: Any) -> Callable[[Any], Any]:
    def compile_kernel(function: Any) -> Any:
        try:
            return njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to keep compiled code in: a read-only image without a home
            return njit(signature, nogil=True)(function)

    return compile_kernel


# ------------------------------------------------------------------------------------------------- vectors of 64 lanes

_BIT, _BYTE, _I32, _I64, _DOUBLE = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType()


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int) -> Any:
    """Pointer to ``lanes`` elements of a C-contiguous array, from ``index`` on."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _vector(data.type.pointee, lanes).as_pointer())


def _load(builder: Any, pointer: Any, element_bytes: int) -> Any:
    value = builder.load(pointer)
    value.align = element_bytes  # a view may start anywhere: not the vector's alignment, LLVM's default
    return value


def _store(builder: Any, value: Any, pointer: Any, element_bytes: int) -> None:
    builder.store(value, pointer).align = element_bytes


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = _vector(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_vector(_I32, lanes), None))


def _halves(builder: Any, vector: Any) -> tuple[Any, Any]:
    half = vector.type.count // 2
    undefined = ir.Constant(vector.type, ir.Undefined)
    first, second = (
        builder.shuffle_vector(vector, undefined, ir.Constant(_vector(_I32, half), list(range(start, start + half))))
        for start in (0, half)
    )
    return first, second


def _sum_of_magnitudes(builder: Any, p: Any, bits: Any = None) -> Any:
    """Sum of ``|p|`` as a double, of those lanes only whose bit is set if ``bits`` are given."""
    # Magnitudes by clearing the sign bit, widened and summed as a binary tree.
    integers = _vector(_I32, LANES)
    magnitude = builder.and_(builder.bitcast(p, integers), ir.Constant(integers, [0x7FFFFFFF] * LANES))
    if bits is not None:
        magnitude = builder.select(builder.bitcast(bits, _vector(_BIT, LANES)), magnitude, ir.Constant(integers, None))
    parts = [builder.bitcast(magnitude, p.type)]
    while parts[0].type.count > 8:
        parts = [half for part in parts for half in _halves(builder, part)]
    parts = [builder.fpext(part, _vector(_DOUBLE, 8)) for part in parts]
    while len(parts) > 1:
        parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    total = parts[0]
    while total.type.count > 1:
        total = builder.fadd(*_halves(builder, total))
    return builder.extract_element(total, ir.Constant(_I32, 0))


@intrinsic
def _encode64(typing: Any, gradient: Any, residual: Any, start: Any) -> Any:
    """(negative, zero, zeros of the gradient, sum of magnitudes) of 64 elements; ``residual`` may be None."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        g = _load(builder, _pointer(context, builder, kinds[0], arguments[0], arguments[2], LANES), 4)
        nothing = ir.Constant(g.type, None)
        gradient_zero = builder.bitcast(builder.fcmp_ordered("==", g, nothing), _I64)
        p, zero = g, gradient_zero
        if not isinstance(residual, types.NoneType):
            r = _load(builder, _pointer(context, builder, kinds[1], arguments[1], arguments[2], LANES), 4)
            p = builder.fadd(g, r)
            zero = builder.bitcast(builder.fcmp_ordered("==", p, nothing), _I64)
        negative = builder.bitcast(builder.fcmp_ordered("<", p, nothing), _I64)
        l1 = _sum_of_magnitudes(builder, p)
        return context.make_tuple(builder, signature.return_type, [negative, zero, builder.ctpop(gradient_zero), l1])

    result = types.Tuple((types.uint64, types.uint64, types.int64, types.float64))
    return result(gradient, residual, types.intp), generate


@intrinsic
def _gate64(typing: Any, gradient: Any, residual: Any, threshold: Any, start: Any) -> Any:
    """(above ``threshold``, below ``-threshold``, sum of their magnitudes) of 64 elements; ``residual`` may be None."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        p = _load(builder, _pointer(context, builder, kinds[0], arguments[0], arguments[3], LANES), 4)
        if not isinstance(residual, types.NoneType):
            r = _load(builder, _pointer(context, builder, kinds[1], arguments[1], arguments[3], LANES), 4)
            p = builder.fadd(p, r)
        t = _splat(builder, arguments[2], LANES)
        positive = builder.bitcast(builder.fcmp_ordered(">", p, t), _I64)
        negative = builder.bitcast(builder.fcmp_ordered("<", p, builder.fneg(t)), _I64)
        l1 = _sum_of_magnitudes(builder, p, builder.or_(positive, negative))
        return context.make_tuple(builder, signature.return_type, [positive, negative, l1])

    result = types.Tuple((types.uint64, types.uint64, types.float64))
    return result(gradient, residual, types.float32, types.intp), generate


@intrinsic
def _commit64(
    typing: Any, gradient: Any, residual: Any, minus: Any, plus: Any, scale: Any, bound: Any, decay: Any, start: Any
) -> Any:
    """``residual = decay * clip(gradient + residual - scale * sent, -bound, bound)`` of 64 elements.

    ``sent`` is -1 where ``minus`` has a bit, and +1 where ``plus`` has one, or everywhere else if ``plus`` is None.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        g_at, r_at = (_pointer(context, builder, signature.args[k], arguments[k], arguments[7], LANES) for k in (0, 1))
        scale, bound, decay = (_splat(builder, argument, LANES) for argument in arguments[4:7])
        p = builder.fadd(_load(builder, g_at, 4), _load(builder, r_at, 4))
        sent = scale
        if not isinstance(plus, types.NoneType):
            # Multiplied, so that a scale which is not a number stays one.
            nothing = builder.fmul(scale, ir.Constant(scale.type, None))
            sent = builder.select(builder.bitcast(arguments[3], _vector(_BIT, LANES)), scale, nothing)
        sent = builder.select(builder.bitcast(arguments[2], _vector(_BIT, LANES)), builder.fneg(scale), sent)
        e = builder.fsub(p, sent)
        # Comparisons that NaN fails, as numpy.clip: what is not finite stays so.
        lowest = builder.fneg(bound)
        e = builder.select(builder.fcmp_ordered("<", e, lowest), lowest, e)
        e = builder.select(builder.fcmp_ordered(">", e, bound), bound, e)
        _store(builder, builder.fmul(decay, e), r_at, 4)
        return context.get_dummy_value()

    f32 = types.float32
    return types.void(gradient, residual, types.uint64, plus, f32, f32, f32, types.intp), generate


@intrinsic
def _look_up64(typing: Any, planes: Any, table: Any, out: Any, start: Any) -> Any:
    """``out = table[planes[0] + 2 planes[1] + 4 planes[2] ...]`` for 64 elements; ``planes`` is a tuple of words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        planes = cgutils.unpack_tuple(builder, arguments[0])
        entries = context.make_array(signature.args[1])(context, builder, arguments[1]).data
        values = [builder.load(builder.gep(entries, [ir.Constant(_I64, k)])) for k in range(1 << len(planes))]

        def choose(masks: list[Any], first: int) -> Any:
            """Entry by entry, depth first: few vectors are alive at a time."""
            if not masks:
                return _splat(builder, values[first], QUARTER)
            low, high = choose(masks[:-1], first), choose(masks[:-1], first + (1 << len(masks) - 1))
            return builder.select(masks[-1], high, low)

        for quarter in range(0, LANES, QUARTER):
            masks = [
                builder.bitcast(
                    builder.trunc(builder.lshr(plane, ir.Constant(_I64, quarter)), ir.IntType(QUARTER)),
                    _vector(_BIT, QUARTER),
                )
                for plane in planes
            ]
            start = builder.add(arguments[3], ir.Constant(_I64, quarter))
            target = _pointer(context, builder, signature.args[2], arguments[2], start, QUARTER)
            _store(builder, choose(masks, 0), target, 4)
        return context.get_dummy_value()

    return types.void(planes, table, out, types.intp), generate


def _indexer(depth: int) -> Any:
    """Make the operation that reads ``depth`` planes as numbers."""

    @intrinsic
    def index64(typing: Any, block: Any, i: Any, index: Any) -> Any:
        """The number that ``block[:depth, i]`` spells for each of 64 elements, to ``index``, 64 bytes."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            planes = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            total = ir.Constant(_vector(_BYTE, LANES), None)
            for k in range(depth):
                at = builder.add(arguments[1], ir.Constant(_I64, k * BLOCK))
                bits = builder.bitcast(builder.load(builder.gep(planes, [at])), _vector(_BIT, LANES))
                weight = ir.Constant(total.type, [1 << k] * LANES)
                total = builder.or_(total, builder.select(bits, weight, ir.Constant(total.type, None)))
            target = _pointer(context, builder, signature.args[2], arguments[2], ir.Constant(_I64, 0), LANES)
            _store(builder, total, target, 1)
            return context.get_dummy_value()

        return types.void(block, types.intp, index), generate

    return index64


_index64 = _indexer(UNSIGNED_PLANES)
_index64_all = _indexer(MAX_PLANES)


def _adder(depth: int, complement: bool) -> Any:
    """Make the operation that adds rows, or their complements, to tallies of ``depth`` planes."""

    @intrinsic
    def add_rows(typing: Any, rows: Any, numbers: Any, word: Any, block: Any, i: Any) -> Any:
        """Add eight words from ``word`` on, of the rows in ``numbers``, to the tallies ``block[:, i:i+8]``."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source = context.make_array(signature.args[0])(context, builder, arguments[0])
            row_stride = cgutils.unpack_tuple(builder, source.strides)[0]
            bytes_before = builder.mul(arguments[2], ir.Constant(_I64, 8))
            # The columns of a written addition, each a list of vectors: two or three of a column become one and a
            # carry to the next (Wallace's tree), until every column has one.
            columns: list[list[Any]] = [[] for _ in range(depth)]
            for number in cgutils.unpack_tuple(builder, arguments[1]):
                offset = builder.add(builder.mul(number, row_stride), bytes_before)
                row = builder.gep(builder.bitcast(source.data, _BYTE.as_pointer()), [offset])
                bits = _load(builder, builder.bitcast(row, _vector(_I64, GROUP).as_pointer()), 8)
                columns[0].append(builder.not_(bits) if complement else bits)
            for k, column in enumerate(columns):
                at = builder.add(arguments[4], ir.Constant(_I64, k * BLOCK))
                tally = _pointer(context, builder, signature.args[3], arguments[3], at, GROUP)
                column.append(_load(builder, tally, 8))
                while len(column) > 1:
                    a, b, *c = column[:3]
                    half = builder.xor(a, b)
                    carry = builder.and_(a, b)
                    total = builder.xor(half, c[0]) if c else half
                    column[:3] = []
                    column.append(total)
                    if k + 1 < depth:  # what is carried out of the top is nothing, or a multiple of 2 ** depth
                        columns[k + 1].append(builder.or_(carry, builder.and_(half, c[0])) if c else carry)
                _store(builder, column[0], tally, 8)
            return context.get_dummy_value()

        return types.void(rows, numbers, types.intp, block, types.intp), generate

    return add_rows


# ------------------------------------------------------------------------------------------------------------- encode


@intrinsic
def _ones(typing: Any, word: Any) -> Any:
    """How many bits of a word are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@_helper
def _encode(gradient: F32, residual: F32 | None, parity: int, words: U64) -> tuple[float, int]:
    n = gradient.size
    if words.size != (n + 63) // 64:
        raise ValueError("words do not fit the gradient")
    if residual is not None and residual.size != n:
        raise ValueError("residual and gradient differ in size")
    zeros_vote = np.uint64(0) - np.uint64(parity & 1)
    l1 = 0.0
    zeros = 0
    for w in range(n // 64):
        negative, zero, zeros_here, l1_here = _encode64(gradient, residual, w * 64)
        words[w] = negative | (zero & zeros_vote)
        zeros += zeros_here
        l1 += l1_here
    tail = n % 64
    if tail:
        # The tail is encoded as a whole word of its own, filled up with zeros.
        padded = np.zeros(64, np.float32)
        padded[:tail] = gradient[n - tail :]
        if residual is None:
            negative, zero, zeros_here, l1_here = _encode64(padded, None, 0)
        else:
            padded_residual = np.zeros(64, np.float32)
            padded_residual[:tail] = residual[n - tail :]
            negative, zero, zeros_here, l1_here = _encode64(padded, padded_residual, 0)
        inside = (np.uint64(1) << np.uint64(tail)) - np.uint64(1)
        words[n // 64] = negative | (zero & zeros_vote & inside)
        zeros += zeros_here - (64 - tail)
        l1 += l1_here
    if zeros == n:
        words[:] = 0
        l1 = 0.0
    return l1, zeros


@_kernel(_L1_AND_ZEROS(_IN, types.int64, _WORDS_OUT))
def encode_binary(gradient: F32, parity: int, words: U64) -> tuple[float, int]:
    """Sign bits, L1 sum and exact zeros of a gradient."""
    return _encode(gradient, None, parity, words)  # type: ignore[no-any-return]


@_kernel(_L1_AND_ZEROS(_IN, _IN, types.int64, _WORDS_OUT))
def encode_binary_residual(gradient: F32, residual: F32, parity: int, words: U64) -> tuple[float, int]:
    """Sign bits and L1 sum of gradient + residual, exact zeros of the gradient."""
    return _encode(gradient, residual, parity, words)  # type: ignore[no-any-return]


@_helper
def _encode_ternary(
    gradient: F32, residual: F32 | None, gate: float, positive: U64, negative: U64
) -> tuple[float, int, int]:
    n = gradient.size
    whole, tail = n // 64, n % 64
    if positive.size != (n + 63) // 64 or negative.size != positive.size:
        raise ValueError("words do not fit the gradient")
    if residual is not None and residual.size != n:
        raise ValueError("residual and gradient differ in size")
    # Tails are encoded as whole words of their own, filled up with zeros, which pass no gate.
    padded = np.zeros(64, np.float32)
    padded[:tail] = gradient[n - tail :]
    padded_residual = np.zeros(64, np.float32)
    if residual is not None:
        padded_residual[:tail] = residual[n - tail :]
    zeros = tail - 64 if tail else 0  # not those of the filling
    total = 0.0
    for w in range(whole):
        _, _, zeros_here, l1_here = _encode64(gradient, residual, w * 64)
        zeros += zeros_here
        total += l1_here
    if tail:
        _, _, zeros_here, l1_here = _encode64(padded, padded_residual, 0)
        zeros += zeros_here
        total += l1_here
    positive[:] = 0
    negative[:] = 0
    if zeros == n:
        return 0.0, 0, zeros
    if not np.isfinite(total):
        return np.nan, 0, zeros
    threshold = np.float32(gate * (total / n))
    l1 = 0.0
    for w in range(whole):
        positive[w], negative[w], l1_here = _gate64(gradient, residual, threshold, w * 64)
        l1 += l1_here
    if tail:
        positive[whole], negative[whole], l1_here = _gate64(padded, padded_residual, threshold, 0)
        l1 += l1_here
    sent = 0
    for w in range(positive.size):
        sent += _ones(positive[w] | negative[w])
    return l1, sent, zeros


@_kernel(_L1_SENT_ZEROS(_IN, types.float64, _WORDS_OUT, _WORDS_OUT))
def encode_ternary(gradient: F32, gate: float, positive: U64, negative: U64) -> tuple[float, int, int]:
    """Both planes of a gradient, L1 sum and number of what is sent, exact zeros."""
    return _encode_ternary(gradient, None, gate, positive, negative)  # type: ignore[no-any-return]


@_kernel(_L1_SENT_ZEROS(_IN, _IN, types.float64, _WORDS_OUT, _WORDS_OUT))
def encode_ternary_residual(
    gradient: F32, residual: F32, gate: float, positive: U64, negative: U64
) -> tuple[float, int, int]:
    """The same of gradient + residual, exact zeros of the gradient."""
    return _encode_ternary(gradient, residual, gate, positive, negative)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- count


@_helper
def _check_rows(rows: U64) -> int:
    """Planes of the tally of these rows."""
    workers, words = rows.shape
    if not 1 <= workers <= 64:
        raise ValueError("rows must be 1 to 64 workers")
    if words > 1 and rows.strides[1] != 8:
        raise ValueError("a row's words must be contiguous")
    depth = 0
    while workers >> depth:
        depth += 1
    return depth


def _counter(depth: int, *, complement: bool, anew: bool) -> Any:
    """Make the helper that adds words ``first`` to ``first + count`` of all rows to tallies, ``block[:depth, :count]``.

    ``complement``: add the bits that are not set. ``anew``: begin at zero.
    """
    add_rows = _adder(depth, complement)

    @_helper
    def count_block(rows: U64, first: int, count: int, block: U64) -> None:
        if anew:
            block[:depth] = 0
        workers = rows.shape[0]
        whole = count - count % GROUP
        r = 0
        while workers - r >= 8:
            for i in range(0, whole, GROUP):
                add_rows(rows, (r, r + 1, r + 2, r + 3, r + 4, r + 5, r + 6, r + 7), first + i, block, i)
            r += 8
        if workers - r >= 4:
            for i in range(0, whole, GROUP):
                add_rows(rows, (r, r + 1, r + 2, r + 3), first + i, block, i)
            r += 4
        if workers - r >= 2:
            for i in range(0, whole, GROUP):
                add_rows(rows, (r, r + 1), first + i, block, i)
            r += 2
        if workers - r >= 1:
            for i in range(0, whole, GROUP):
                add_rows(rows, (r,), first + i, block, i)
        for i in range(whole, count):
            for r in range(workers):
                carry = ~rows[r, first + i] if complement else rows[r, first + i]
                k = 0
                while carry and k < depth:
                    tally = block[k, i]
                    block[k, i] = tally ^ carry
                    carry &= tally
                    k += 1

    return count_block


_count_block = _counter(UNSIGNED_PLANES, complement=False, anew=True)
_add_positive = _counter(MAX_PLANES, complement=False, anew=False)
_add_not_negative = _counter(MAX_PLANES, complement=True, anew=False)


@_helper
def _sum_block(positive: U64, negative: U64, first: int, count: int, block: U64) -> None:
    """Vote sums in two's complement: -N, the positive bits, and a 1 for each of N bits that is not negative."""
    workers = positive.shape[0]
    for k in range(MAX_PLANES):
        block[k] = np.uint64(0) - np.uint64(-workers >> k & 1)
    _add_positive(positive, first, count, block)
    _add_not_negative(negative, first, count, block)


@_helper
def _check_ternary_rows(positive: U64, negative: U64) -> int:
    """Planes of the vote sum of these rows."""
    depth: int = _check_rows(positive) + 1
    _check_rows(negative)
    if positive.shape != negative.shape:
        raise ValueError("positive and negative rows differ in shape")
    return depth


@_helper
def _copy_block(planes: U64, first: int, count: int, block: U64) -> None:
    for k in range(planes.shape[0]):
        for i in range(count):
            block[k, i] = planes[k, first + i]


@_kernel(types.void(_PLANES_IN, _PLANES_OUT))
def count_planes(rows: U64, planes: U64) -> None:
    """Count rows of bits into bit planes."""
    depth = _check_rows(rows)
    words = rows.shape[1]
    if planes.shape[0] != depth or planes.shape[1] != words:
        raise ValueError("planes do not fit the rows")
    block = np.empty((MAX_PLANES, BLOCK), np.uint64)
    for first in range(0, words, BLOCK):
        count = min(BLOCK, words - first)
        _count_block(rows, first, count, block)
        for k in range(depth):
            for i in range(count):
                planes[k, first + i] = block[k, i]


@_kernel(types.void(_PLANES_IN, _PLANES_IN, _PLANES_OUT))
def count_ternary(positive: U64, negative: U64, planes: U64) -> None:
    """Sum rows of two planes into two's complement planes."""
    depth = _check_ternary_rows(positive, negative)
    words = positive.shape[1]
    if planes.shape[0] != depth or planes.shape[1] != words:
        raise ValueError("planes do not fit the rows")
    block = np.empty((MAX_PLANES, BLOCK), np.uint64)
    for first in range(0, words, BLOCK):
        count = min(BLOCK, words - first)
        _sum_block(positive, negative, first, count, block)
        for k in range(depth):
            for i in range(count):
                planes[k, first + i] = block[k, i]


@_helper
def _at_least(planes: U64, w: int, bound: int) -> np.uint64:
    """Whether each tally is at least ``bound``: the carry out of tally + (2 ** depth - bound)."""
    depth = planes.shape[0]
    if bound <= 0:
        return ~np.uint64(0)
    if bound >= 1 << depth:
        return np.uint64(0)
    addend = (1 << depth) - bound
    carry = np.uint64(0)
    for k in range(depth):
        carry = planes[k, w] | carry if addend >> k & 1 else planes[k, w] & carry
    return carry


@_kernel(types.void(_PLANES_IN, types.int64, types.int64, types.int64, _PLANES_OUT))
def pack_majority(planes: U64, voters: int, margin: int, n: int, packed: U64) -> None:
    """Negative and nonzero planes of a tally."""
    depth, words = planes.shape
    if not 1 <= depth <= UNSIGNED_PLANES:
        raise ValueError("planes must be 1 to 7")
    if words != (n + 63) // 64:
        raise ValueError("planes do not fit n")
    if packed.shape[0] != 2 or packed.shape[1] != words:
        raise ValueError("packed must be two planes of the tally's length")
    if margin < 0:
        raise ValueError("margin is negative")
    low = (voters + margin) // 2 + 1  # S = voters - 2c < -margin iff c >= low
    high = (voters - margin + 1) // 2  # S > margin iff c < high
    for w in range(words):
        negative = _at_least(planes, w, low)
        packed[0, w] = negative
        packed[1, w] = negative | ~_at_least(planes, w, high)
    if n % 64:
        inside = (np.uint64(1) << np.uint64(n % 64)) - np.uint64(1)
        packed[0, words - 1] &= inside
        packed[1, words - 1] &= inside


@_kernel(types.void(_PLANES_IN, types.int64, types.int64, _PLANES_OUT))
def pack_signed_majority(planes: U64, margin: int, n: int, packed: U64) -> None:
    """Negative and nonzero planes of a vote sum in two's complement."""
    depth, words = planes.shape
    if not 2 <= depth <= MAX_PLANES:
        raise ValueError("planes must be 2 to 8")
    if words != (n + 63) // 64:
        raise ValueError("planes do not fit n")
    if packed.shape[0] != 2 or packed.shape[1] != words:
        raise ValueError("packed must be two planes of the tally's length")
    if margin < 0:
        raise ValueError("margin is negative")
    low = planes[: depth - 1]  # S, or S + 2 ** (depth - 1) where the sign is set
    for w in range(words):
        sign = planes[depth - 1, w]
        negative = sign & ~_at_least(low, w, (1 << depth - 1) - margin)
        packed[0, w] = negative
        packed[1, w] = negative | (~sign & _at_least(low, w, margin + 1))
    if n % 64:
        inside = (np.uint64(1) << np.uint64(n % 64)) - np.uint64(1)
        packed[0, words - 1] &= inside
        packed[1, words - 1] &= inside


# -------------------------------------------------------------------------------------------------- decode and commit


# These two take a block, not a word: numba counts references at every call, which costs as much as decoding a word.
@_helper
def _commit_block(
    gradient: F32,
    residual: F32,
    minus: U64,
    plus: U64 | None,
    first: int,
    count: int,
    scale: np.float32,
    bound: np.float32,
    decay: np.float32,
    start: int,
) -> None:
    """Commit ``64 * count`` elements from ``start`` on, whose own bits are the words from ``first`` on."""
    for i in range(count):
        if plus is None:
            _commit64(gradient, residual, minus[first + i], None, scale, bound, decay, start + 64 * i)
        else:
            _commit64(gradient, residual, minus[first + i], plus[first + i], scale, bound, decay, start + 64 * i)


@_helper
def _look_up_block(
    block: U64, first: int, count: int, depth: int, lut: F32, index: Bytes, out: F32, start: int
) -> None:
    """Decode words ``first`` to ``first + count`` of ``block`` to the elements from ``start`` on."""
    if depth <= 3:
        for i in range(first, first + count):
            _look_up64((block[0, i], block[1, i], block[2, i]), lut, out, start)
            start += 64
    elif depth == 4:
        for i in range(first, first + count):
            _look_up64((block[0, i], block[1, i], block[2, i], block[3, i]), lut, out, start)
            start += 64
    elif depth <= UNSIGNED_PLANES:  # so many blends that reading the table element by element is faster
        for i in range(first, first + count):
            _index64(block, i, index)
            for j in range(64):
                out[start + j] = lut[index[j]]
            start += 64
    else:
        for i in range(first, first + count):
            _index64_all(block, i, index)
            for j in range(64):
                out[start + j] = lut[index[j]]
            start += 64


@_helper
def _run(
    out: F32,
    residual: F32 | None,
    minus: U64,
    plus: U64 | None,
    scale: np.float32,
    clip: np.float32,
    decay: np.float32,
    rows: U64 | None,
    negative: U64 | None,
    planes: U64 | None,
    table: F32,
) -> None:
    """All of decode and commit, in one pass: what is None is left out when numba compiles a kernel of it.

    ``minus`` and ``plus`` are the worker's own bits; ``plus`` is None where it votes one or the other. ``negative`` are
    the rows beside ``rows`` of a ternary vote.
    """
    n = out.size
    words = (n + 63) // 64
    depth = 0
    if residual is not None:
        if residual.size != n:
            raise ValueError("residual and gradient differ in size")
        if minus.size != words:
            raise ValueError("own does not fit the gradient")
        if plus is not None and plus.size != words:
            raise ValueError("own does not fit the gradient")
    if rows is not None:
        depth = _check_rows(rows) if negative is None else _check_ternary_rows(rows, negative)
        if rows.shape[1] != words:
            raise ValueError("rows do not fit out")
    if planes is not None:
        depth = planes.shape[0]
        if not 1 <= depth <= MAX_PLANES:
            raise ValueError("planes must be 1 to 8")
        if planes.shape[1] != words:
            raise ValueError("planes do not fit out")
    if table is not None:
        if table.size != 1 << depth:
            raise ValueError("table must have 2 ** planes entries")
        # Planes above the table's are read, too: they are zero, or copies of the sign.
        lut = np.empty(1 << MAX_PLANES, np.float32)
        for first in range(0, lut.size, table.size):
            lut[first : first + table.size] = table
    # Not clip * scale throughout: infinity times a scale of zero is NaN.
    bound = clip if np.isinf(clip) else clip * scale
    block = np.zeros((MAX_PLANES, BLOCK), np.uint64)
    index = np.empty(LANES, np.uint8)
    tail = n % 64
    for first in range(0, words, BLOCK):
        count = min(BLOCK, words - first)
        if rows is not None:
            if negative is None:
                _count_block(rows, first, count, block)
            else:
                _sum_block(rows, negative, first, count, block)
        if planes is not None:
            _copy_block(planes, first, count, block)
        whole = min(count, n // 64 - first)
        if residual is not None:
            _commit_block(out, residual, minus, plus, first, whole, scale, bound, decay, 64 * first)
        if table is not None:
            _look_up_block(block, 0, whole, depth, lut, index, out, 64 * first)
    if tail:
        # The tail is worked on as a whole word of its own; it is the last one of the last block.
        start = n - tail
        padded = np.zeros(64, np.float32)
        if residual is not None:
            padded_residual = np.zeros(64, np.float32)
            padded[:tail] = out[start:]
            padded_residual[:tail] = residual[start:]
            _commit_block(padded, padded_residual, minus, plus, words - 1, 1, scale, bound, decay, 0)
            residual[start:] = padded_residual[:tail]
        if table is not None:
            _look_up_block(block, (words - 1) % BLOCK, 1, depth, lut, index, padded, 0)
            out[start:] = padded[:tail]


_NOT_USED = np.float32(0)


@_kernel(types.void(_PLANES_IN, _IN, _OUT))
def decode_rows(rows: U64, table: F32, out: F32) -> None:
    """Look up the count of each element's bits."""
    _run(out, None, None, None, _NOT_USED, _NOT_USED, _NOT_USED, rows, None, None, table)


@_kernel(types.void(_PLANES_IN, _PLANES_IN, _IN, _OUT))
def decode_ternary_rows(positive: U64, negative: U64, table: F32, out: F32) -> None:
    """Look up the vote sum of each element's bits."""
    _run(out, None, None, None, _NOT_USED, _NOT_USED, _NOT_USED, positive, negative, None, table)


@_kernel(types.void(_PLANES_IN, _IN, _OUT))
def decode_planes(planes: U64, table: F32, out: F32) -> None:
    """Look up the index that each element's bits spell."""
    _run(out, None, None, None, _NOT_USED, _NOT_USED, _NOT_USED, None, None, planes, table)


@_kernel(types.void(*_COMMIT))
def commit_residual(
    gradient: F32, residual: F32, own: U64, scale: np.float32, clip: np.float32, decay: np.float32
) -> None:
    """Error feedback of one segment, in place."""
    _run(gradient, residual, own, None, scale, clip, decay, None, None, None, None)


@_kernel(types.void(_OUT, _OUT, _WORDS_IN, _WORDS_IN, *_SCALE_CLIP_DECAY))
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
    _run(gradient, residual, negative, positive, scale, clip, decay, None, None, None, None)


@_kernel(types.void(*_COMMIT, _PLANES_IN, _IN))
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
    _run(gradient, residual, own, None, scale, clip, decay, rows, None, None, table)


@_kernel(types.void(*_COMMIT, _PLANES_IN, _IN))
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
    _run(gradient, residual, own, None, scale, clip, decay, None, None, planes, table)
