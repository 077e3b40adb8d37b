"""Every back end of the codec against its definition in the model."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_fabric.model import codec
from neuron_fabric.model.encoding import BINARY, TERNARY
from neuron_fabric.runtime.codec import (
    BACKENDS,
    ENVIRONMENT_VARIABLE,
    codec_backend,
    count_table,
    majority_table,
    packed_majority_table,
    words_for,
)

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 511, 512, 513, 2047, 2048, 2049, 2560, 4096 + 65]
WORLDS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 23, 31, 32, 63, 64]
SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1.0, -1.0, 3e38, -3e38], np.float32)
NOT_FINITE = np.array([np.nan, np.inf, -np.inf], np.float32)
DIRTY = np.uint64(0xA5A5_A5A5_A5A5_A5A5)
INFINITE, ONE = np.float32(np.inf), np.float32(1)

FAST = settings(max_examples=150, deadline=None)


@pytest.fixture(params=BACKENDS, scope="module")
def kernels(request):
    return codec_backend(request.param)


def same_bits(ours, theirs):
    """Equal to the bit, the sign of zero included; one NaN is as good as another."""
    assert ours.dtype == theirs.dtype == np.float32
    missing = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), missing)
    np.testing.assert_array_equal(ours.view(np.uint32)[~missing], theirs.view(np.uint32)[~missing])


def unaligned(values, offset=1):
    """The same values in a view that starts ``offset`` elements into its memory."""
    memory = np.full(values.size + offset + 3, 77, values.dtype)
    view = memory[offset : offset + values.size]
    view[:] = values
    return view


def floats(rng, n, *, special=0.2, zeros=0.1, not_finite=0.0):
    """Normal values of many magnitudes among zeros, denormals, huge ones and, if wanted, NaN and Inf."""
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 8)).astype(np.float32)
    for share, pool in ((special, SPECIAL), (zeros, SPECIAL[:2]), (not_finite, NOT_FINITE)):
        where = rng.random(n) < share
        values[where] = rng.choice(pool, np.count_nonzero(where))
    return values


def bits(rng, n, share=0.5):
    return rng.random(n) < share


def pack(plane):
    packed = np.zeros(8 * words_for(plane.size), np.uint8)
    packed[: -(-plane.size // 8)] = np.packbits(plane, bitorder="little")
    return packed.view(np.uint64)


def message(planes):
    """Rows as they lie in a gathered message: a header before each and other segments' words behind."""
    words = planes.shape[1]
    memory = np.full((planes.shape[0], words + 5), DIRTY, np.uint64)
    memory[:, 3 : 3 + words] = planes
    return memory[:, 3 : 3 + words]


def check_encode(kernels, gradient, residual, parity):
    words = np.full(words_for(gradient.size), DIRTY, np.uint64)
    with np.errstate(all="ignore"):
        expected = codec.encode_binary(gradient, residual, parity=parity)
    if residual is None:
        l1, zeros = kernels.encode_binary(gradient, parity, words)
    else:
        l1, zeros = kernels.encode_binary_residual(gradient, residual, parity, words)
    written = words.view(np.uint8)
    np.testing.assert_array_equal(written[: expected.planes[0].size], expected.planes[0])
    assert not written[expected.planes[0].size :].any()
    assert zeros == expected.zeros
    assert np.isfinite(l1) == np.isfinite(expected.l1)
    if np.isfinite(l1):
        assert l1 == pytest.approx(expected.l1, rel=1e-12, abs=0)
    return l1, words


# ------------------------------------------------------------------------------------------------------------- encode


@pytest.mark.parametrize("parity", [0, 1, 2, 7])
@pytest.mark.parametrize("n", SIZES)
def test_encode_at_every_size(kernels, n, parity):
    rng = np.random.default_rng(n)
    gradient, residual = floats(rng, n), floats(rng, n)
    check_encode(kernels, gradient, None, parity)
    check_encode(kernels, gradient, residual, parity)


@FAST
@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    parity=st.integers(0, 3),
    zeros=st.sampled_from([0, 0.5, 0.98, 1]),
    not_finite=st.sampled_from([0, 0, 0.01, 0.5]),
    feedback=st.booleans(),
)
def test_encode(kernels, n, seed, parity, zeros, not_finite, feedback):
    rng = np.random.default_rng(seed)
    gradient = floats(rng, n, zeros=zeros, not_finite=not_finite)
    check_encode(kernels, gradient, floats(rng, n, not_finite=not_finite) if feedback else None, parity)


@pytest.mark.parametrize("n", [1, 64, 65, 200])
@pytest.mark.parametrize("parity", [0, 1])
def test_a_zero_gradient_abstains_whatever_the_residual(kernels, n, parity):
    gradient = np.resize(SPECIAL[:2], n)
    assert check_encode(kernels, gradient, None, parity)[0] == 0
    for residual in (np.full(n, -1, np.float32), np.full(n, np.nan, np.float32)):
        l1, words = check_encode(kernels, gradient, residual, parity)
        assert l1 == 0
        assert not words.any()


def test_a_residual_that_cancels_the_gradient_votes_by_parity(kernels):
    gradient = np.full(70, 0.1, np.float32)
    for parity in (0, 1):
        _, words = check_encode(kernels, gradient, -gradient, parity)
        assert words[0] == (2**64 - 1 if parity else 0)


@pytest.mark.parametrize("at", [0, 63, 64, 99])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_one_value_that_is_not_finite_shows_in_l1(kernels, at, value):
    for feedback in (False, True):
        arrays = np.full((2, 100), 0.5, np.float32)
        arrays[int(feedback), at] = value
        l1, _ = check_encode(kernels, arrays[0], arrays[1] if feedback else None, 0)
        assert not np.isfinite(l1)


def test_huge_and_tiny_values_neither_overflow_nor_vanish(kernels):
    assert check_encode(kernels, np.full(1000, -3e38, np.float32), None, 0)[0] == pytest.approx(3e41, rel=1e-7)
    assert check_encode(kernels, np.full(1000, 1e-45, np.float32), None, 0)[0] == 1000 * float(np.float32(1e-45))


def test_l1_does_not_depend_on_where_an_array_lies(kernels):
    gradient = np.random.default_rng(5).standard_normal(10_000).astype(np.float32)
    expected = check_encode(kernels, gradient, None, 0)[0]
    for offset in range(1, 17):
        assert check_encode(kernels, unaligned(gradient, offset), None, 0)[0] == expected


# ------------------------------------------------------------------------------------------------------------ ternary


def check_encode_ternary(kernels, gradient, residual, gate):
    n = gradient.size
    planes = np.full((2, words_for(n)), DIRTY, np.uint64)
    with np.errstate(all="ignore"):
        expected = codec.encode_ternary(gradient, residual, gate=gate)
    if residual is None:
        l1, sent, zeros = kernels.encode_ternary(gradient, gate, *planes)
    else:
        l1, sent, zeros = kernels.encode_ternary_residual(gradient, residual, gate, *planes)
    for ours, theirs in zip(planes.view(np.uint8), expected.planes, strict=True):
        np.testing.assert_array_equal(ours[: theirs.size], theirs)
        assert not ours[theirs.size :].any()
    assert (sent, zeros) == (expected.sent, expected.zeros)
    assert np.isfinite(l1) == np.isfinite(expected.l1)
    if np.isfinite(l1):
        assert l1 == pytest.approx(expected.l1, rel=1e-12, abs=0)
    return l1, sent, planes


@pytest.mark.parametrize("gate", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("n", SIZES)
def test_encode_ternary_at_every_size(kernels, n, gate):
    rng = np.random.default_rng(n)
    gradient, residual = (unaligned(rng.standard_normal(n).astype(np.float32), offset) for offset in (1, 2))
    check_encode_ternary(kernels, gradient, None, gate)
    check_encode_ternary(kernels, gradient, residual, gate)


@FAST
@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    gate=st.one_of(st.sampled_from([0.0, 0.5, 0.7, 1.0]), st.floats(0, 20)),
    special=st.sampled_from([0, 0.2]),
    zeros=st.sampled_from([0, 0.5, 0.98, 1]),
    not_finite=st.sampled_from([0, 0, 0.01, 0.5]),
    feedback=st.booleans(),
)
def test_encode_ternary(kernels, n, seed, gate, special, zeros, not_finite, feedback):
    rng = np.random.default_rng(seed)
    gradient = floats(rng, n, special=special, zeros=zeros, not_finite=not_finite)
    residual = floats(rng, n, special=special, not_finite=not_finite) if feedback else None
    check_encode_ternary(kernels, gradient, residual, gate)


@pytest.mark.parametrize("n", [1, 64, 65, 200])
def test_what_passes_no_gate_sends_nothing(kernels, n):
    for gradient, residual, gate in (
        (np.full(n, 0.5, np.float32), None, 1.0),  # at the gate is not above it
        (np.full(n, -0.5, np.float32), None, 1.0),
        (np.full(n, 0.5, np.float32), np.full(n, -0.5, np.float32), 0.0),
        (np.resize(SPECIAL[:2], n), np.full(n, np.nan, np.float32), 0.7),
        (np.full(n, 3e38, np.float32), None, 10.0),  # a gate that no float32 can hold
    ):
        l1, sent, planes = check_encode_ternary(kernels, gradient, residual, gate)
        assert (l1, sent) == (0, 0)
        assert not planes.any()


@pytest.mark.parametrize("at", [0, 63, 64, 99])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_one_value_that_is_not_finite_shows_in_the_ternary_l1(kernels, at, value):
    for feedback in (False, True):
        arrays = np.full((2, 100), 0.5, np.float32)
        arrays[int(feedback), at] = value
        l1, _, planes = check_encode_ternary(kernels, arrays[0], arrays[1] if feedback else None, 0.5)
        assert np.isnan(l1)
        assert not planes.any()


def ternary_votes(rng, world, n):
    """Rows of both planes as they lie in gathered messages, and the vote sum of each element."""
    votes = np.array([rng.choice([-1, 0, 1], n, p=[p, 0.3, 0.7 - p]) for p in 0.7 * rng.random(world)])
    votes[:, : n // 4] = rng.choice([-1, 1], n // 4)  # some unanimity, for the longest carries
    rows = [message(np.array([pack(vote == sign) for vote in votes]).reshape(world, -1)) for sign in (1, -1)]
    return rows, votes.reshape(world, n).sum(0)


def check_ternary_result(kernels, rng, world, n, scale):
    (positive, negative), sums = ternary_votes(rng, world, n)
    depth = TERNARY.tally_bits(world)
    expected = np.array([pack(sums >> k & 1 == 1) for k in range(depth)]).reshape(depth, -1)
    planes = message(np.full_like(expected, DIRTY))
    kernels.count_ternary(positive, negative, planes)
    np.testing.assert_array_equal(planes, expected)

    divisor, margin = int(rng.integers(1, world + 1)), int(rng.integers(0, world + 2))
    vote = codec.majority(sums, margin)
    for table, decoded in (
        (count_table(world, world, scale, divisor, TERNARY), codec.decode(sums, scale, divisor)),
        (majority_table(world, world, scale, margin, TERNARY), codec.decode(vote, scale, 1)),
    ):
        out = unaligned(np.full(n, 5, np.float32))
        kernels.decode_ternary_rows(positive, negative, table, out)
        same_bits(out, decoded)
        assert (out.base[[0, n + 1, n + 2, n + 3]] == 77).all()
        out = unaligned(np.full(n, 5, np.float32))
        kernels.decode_planes(planes, table, out)
        same_bits(out, decoded)
    packed = np.full((2, words_for(n)), DIRTY, np.uint64)
    kernels.pack_signed_majority(planes, margin, n, packed)
    np.testing.assert_array_equal(packed, [pack(vote < 0), pack(vote != 0)])


@pytest.mark.parametrize("n", SIZES)
def test_ternary_results_at_every_size(kernels, n):
    rng = np.random.default_rng(n)
    for world in (1, 4, 9, 20):
        check_ternary_result(kernels, rng, world, n, np.float32(0.013))


@pytest.mark.parametrize("world", [*range(1, 18), 31, 32, 33, 47, 63, 64])
def test_ternary_results_at_every_world(kernels, world):
    rng = np.random.default_rng(world)
    for n in (513, 4200):
        check_ternary_result(kernels, rng, world, n, np.float32(rng.random()))


@FAST
@given(
    world=st.integers(1, 64),
    n=st.integers(1, 400),
    seed=st.integers(0, 2**32),
    scale=st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, 1e-45, np.nan])),
)
def test_ternary_results(kernels, world, n, seed, scale):
    check_ternary_result(kernels, np.random.default_rng(seed), world, n, np.float32(scale))


@FAST
@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    scale=st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, 1.0, np.nan])),
    clip=st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(0, 10)),
    decay=st.sampled_from([1.0, 0.5, 0.9, 0.0]),
    not_finite=st.sampled_from([0, 0.1]),
)
def test_commit_ternary(kernels, n, seed, scale, clip, decay, not_finite):
    rng = np.random.default_rng(seed)
    scale = np.float32(scale)
    gradient = unaligned(floats(rng, n, special=0.05, not_finite=not_finite), 3)
    residual = unaligned(floats(rng, n, special=0.05, not_finite=not_finite), 1)
    sent = rng.integers(-1, 2, n)
    with np.errstate(all="ignore"):
        kept = codec.residual_after(gradient + residual, sent, scale, clip=clip, decay=decay)
    before = gradient.copy()
    bound = INFINITE if clip is None else np.float32(clip)
    kernels.commit_ternary_residual(
        gradient, residual, pack(sent == 1), pack(sent == -1), scale, bound, np.float32(decay)
    )
    same_bits(residual, kept)
    same_bits(gradient, before)
    assert (residual.base[[0, n + 1, n + 2, n + 3]] == 77).all()


# -------------------------------------------------------------------------------------------------------------- count


@pytest.mark.parametrize("n", [0, 1, 65, 512, 2049, 4600])
@pytest.mark.parametrize("world", [*range(1, 18), 31, 32, 33, 47, 63, 64])
def test_count_planes(kernels, world, n):
    rng = np.random.default_rng(world)
    votes = np.array([bits(rng, n, share) for share in rng.random(world)]).reshape(world, n)
    votes[:, : n // 2] |= bits(rng, n // 2, 0.1)  # some unanimity, for the longest carries
    rows = message(np.array([pack(vote) for vote in votes]).reshape(world, words_for(n)))
    planes = np.full((world.bit_length(), words_for(n)), DIRTY, np.uint64)
    kernels.count_planes(rows, planes)
    for k, plane in enumerate(planes):
        np.testing.assert_array_equal(plane, pack(votes.sum(0) >> k & 1 == 1))


# ------------------------------------------------------------------------------------------------------------- decode


def tallied(rng, world, voters, n):
    """Rows of ``world`` workers of whom only ``voters`` vote, their tally's planes, and the count per element."""
    votes = np.array([bits(rng, n, share) for share in rng.random(world)]).reshape(world, n)
    votes[rng.permutation(world)[voters:]] = False
    count = votes.sum(0)
    rows = message(np.array([pack(vote) for vote in votes]).reshape(world, words_for(n)))
    planes = message(np.array([pack(count >> k & 1 == 1) for k in range(world.bit_length())]))
    return rows, planes, count


def check_decode(kernels, rng, world, voters, n, scale):
    rows, planes, count = tallied(rng, world, voters, n)
    sums = codec.vote_sum(count, voters, BINARY)
    divisor = int(rng.integers(1, world + 1))
    margin = int(rng.integers(0, world + 1))
    vote = codec.majority(sums, margin)
    for table, expected in (
        (count_table(world, voters, scale, divisor), codec.decode(sums, scale, divisor)),
        (majority_table(world, voters, scale), codec.decode(codec.majority(sums), scale, 1)),
        (majority_table(world, voters, scale, margin), codec.decode(vote, scale, 1)),
    ):
        for decode, source in ((kernels.decode_rows, rows), (kernels.decode_planes, planes)):
            out = unaligned(np.full(n, 5, np.float32))
            decode(source, table, out)
            same_bits(out, expected)
            assert (out.base[[0, n + 1, n + 2, n + 3]] == 77).all()
    packed = np.full((2, words_for(n)), DIRTY, np.uint64)
    kernels.pack_majority(planes, voters, margin, n, packed)
    np.testing.assert_array_equal(packed, [pack(vote < 0), pack(vote != 0)])
    out = np.empty(n, np.float32)
    kernels.decode_planes(packed, packed_majority_table(scale), out)
    same_bits(out, codec.decode(vote, scale, 1))


@pytest.mark.parametrize("n", SIZES)
def test_decode_at_every_size(kernels, n):
    rng = np.random.default_rng(n)
    for world, missing in itertools.product((1, 4, 9, 20), (0, 1)):
        check_decode(kernels, rng, world, world - missing, n, np.float32(0.013))


@pytest.mark.parametrize("world", WORLDS)
def test_decode_at_every_world(kernels, world):
    rng = np.random.default_rng(world)
    for voters in {0, 1, world // 2, world - 1, world}:
        check_decode(kernels, rng, world, voters, 4200, np.float32(rng.random()))


@FAST
@given(
    world=st.integers(1, 64),
    absent=st.integers(0, 3),
    n=st.integers(1, 400),
    seed=st.integers(0, 2**32),
    scale=st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, 1e-45, np.nan])),
)
def test_decode(kernels, world, absent, n, seed, scale):
    check_decode(kernels, np.random.default_rng(seed), world, max(0, world - absent), n, np.float32(scale))


def test_every_count_of_every_world_decodes(kernels):
    for world in WORLDS:
        n = world + 1
        count = np.arange(n)
        votes = count[None, :] > np.arange(world)[:, None]
        expected = codec.decode(codec.vote_sum(count, world, BINARY), np.float32(0.1), world)
        out = np.empty(n, np.float32)
        kernels.decode_rows(np.array([pack(v) for v in votes]), count_table(world, world, np.float32(0.1), world), out)
        same_bits(out, expected)


# ------------------------------------------------------------------------------------------------------------- commit


def check_commit(kernels, rng, n, scale, clip, decay, not_finite=0.0):
    world = int(rng.integers(1, 20))
    gradient = unaligned(floats(rng, n, special=0.05, not_finite=not_finite), 3)
    residual = unaligned(floats(rng, n, special=0.05, not_finite=not_finite), 1)
    rows, planes, count = tallied(rng, world, world, n)
    own = rows[-1]
    sent = np.where(np.unpackbits(np.ascontiguousarray(own).view(np.uint8), count=n, bitorder="little"), -1, 1)
    with np.errstate(all="ignore"):
        kept = codec.residual_after(gradient + residual, sent, scale, clip=clip, decay=decay)
    decoded = codec.decode(codec.vote_sum(count, world, BINARY), scale, world)
    table = count_table(world, world, scale, world)
    arguments = (own, scale, INFINITE if clip is None else np.float32(clip), np.float32(decay))

    after = residual.copy()
    before = gradient.copy()
    kernels.commit_residual(gradient, after, *arguments)
    same_bits(after, kept)
    same_bits(gradient, before)
    for kernel, source in ((kernels.commit_and_decode_rows, rows), (kernels.commit_and_decode_planes, planes)):
        g, e = unaligned(gradient, 1), unaligned(residual, 2)
        kernel(g, e, *arguments, source, table)
        same_bits(e, kept)
        same_bits(g, decoded)
        assert (g.base[[0, n + 1]] == 77).all()
        assert (e.base[[0, 1, n + 2]] == 77).all()


@pytest.mark.parametrize("n", SIZES)
def test_commit_at_every_size(kernels, n):
    rng = np.random.default_rng(n)
    for clip, decay in ((None, 1.0), (1.0, 1.0), (2.5, 0.5)):
        check_commit(kernels, rng, n, np.float32(0.7), clip, decay)


@FAST
@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    scale=st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, 1.0, np.nan])),
    clip=st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(0, 10)),
    decay=st.sampled_from([1.0, 0.5, 0.9, 0.0]),
    not_finite=st.sampled_from([0, 0.1]),
)
def test_commit(kernels, n, seed, scale, clip, decay, not_finite):
    check_commit(kernels, np.random.default_rng(seed), n, np.float32(scale), clip, decay, not_finite)


def test_no_clip_with_a_scale_of_zero_keeps_the_residual(kernels):
    residual = np.array([1, -2, 0], np.float32)
    kernels.commit_residual(np.zeros(3, np.float32), residual, np.zeros(1, np.uint64), np.float32(0), INFINITE, ONE)
    same_bits(residual, np.array([1, -2, 0], np.float32))


# ---------------------------------------------------------------------------------------------------------- arguments


def test_inputs_may_be_read_only(kernels):
    n = 130
    rng = np.random.default_rng(0)
    gradient, residual, out = floats(rng, n), floats(rng, n), np.empty(n, np.float32)
    words = np.zeros((4, words_for(n)), np.uint64)
    table = count_table(4, 4, ONE, 4)  # as long as that of three workers' ternary votes
    for array in (gradient, table):
        array.flags.writeable = False
    kernels.encode_binary(gradient, 1, words[0])
    kernels.encode_binary_residual(gradient, gradient, 1, words[0])
    kernels.encode_ternary(gradient, 0.5, words[0], words[1])
    kernels.encode_ternary_residual(gradient, gradient, 0.5, words[0], words[1])
    words.flags.writeable = False
    kernels.decode_rows(words, table, out)
    kernels.decode_planes(words[:3], table, out)
    kernels.decode_ternary_rows(words[:3], words[:3], table, out)
    kernels.commit_residual(out, residual, words[0], ONE, ONE, ONE)
    kernels.commit_ternary_residual(out, residual, words[0], words[0], ONE, ONE, ONE)


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        ("words", lambda k, f, w: k.encode_binary(f(65), 0, w(1)[0])),
        ("words", lambda k, f, w: k.encode_binary(f(64), 0, w(2)[0])),
        ("residual", lambda k, f, w: k.encode_binary_residual(f(64), f(63), 0, w(1)[0])),
        ("1 to 64", lambda k, f, w: k.count_planes(w(1, 0), w(1, 1))),
        ("1 to 64", lambda k, f, w: k.count_planes(w(1, 65), w(1, 7))),
        ("planes", lambda k, f, w: k.count_planes(w(1, 4), w(1, 2))),
        ("planes", lambda k, f, w: k.count_planes(w(1, 4), w(2, 3))),
        ("planes", lambda k, f, w: k.pack_majority(w(2, 3), 4, 0, 64, w(2, 2))),
        ("planes", lambda k, f, w: k.pack_majority(w(1, 8), 4, 0, 64, w(1, 2))),
        ("packed", lambda k, f, w: k.pack_majority(w(1, 3), 4, 0, 64, w(1, 3))),
        ("margin", lambda k, f, w: k.pack_majority(w(1, 3), 4, -1, 64, w(1, 2))),
        ("table", lambda k, f, w: k.decode_rows(w(1, 4), f(5), f(64))),
        ("fit", lambda k, f, w: k.decode_rows(w(2, 4), f(8), f(64))),
        ("1 to 64", lambda k, f, w: k.decode_rows(w(1, 65), f(128), f(64))),
        ("table", lambda k, f, w: k.decode_planes(w(1, 3), f(4), f(64))),
        ("1 to 8", lambda k, f, w: k.decode_planes(w(1, 9), f(512), f(64))),
        ("fit", lambda k, f, w: k.decode_planes(w(1, 3), f(8), f(65))),
        ("residual", lambda k, f, w: k.commit_residual(f(64), f(65), w(1)[0], ONE, ONE, ONE)),
        ("own", lambda k, f, w: k.commit_residual(f(64), f(64), w(2)[0], ONE, ONE, ONE)),
        ("words", lambda k, f, w: k.encode_ternary(f(65), 0.5, w(1)[0], w(1)[0])),
        ("words", lambda k, f, w: k.encode_ternary(f(64), 0.5, w(1)[0], w(2)[0])),
        ("residual", lambda k, f, w: k.encode_ternary_residual(f(64), f(63), 0.5, w(1)[0], w(1)[0])),
        ("1 to 64", lambda k, f, w: k.count_ternary(w(1, 0), w(1, 0), w(1, 1))),
        ("shape", lambda k, f, w: k.count_ternary(w(1, 4), w(1, 3), w(1, 4))),
        ("planes", lambda k, f, w: k.count_ternary(w(1, 4), w(1, 4), w(1, 3))),
        ("2 to 8", lambda k, f, w: k.pack_signed_majority(w(1, 1), 0, 64, w(1, 2))),
        ("fit", lambda k, f, w: k.pack_signed_majority(w(2, 3), 0, 64, w(2, 2))),
        ("packed", lambda k, f, w: k.pack_signed_majority(w(1, 3), 0, 64, w(1, 3))),
        ("margin", lambda k, f, w: k.pack_signed_majority(w(1, 3), -1, 64, w(1, 2))),
        ("table", lambda k, f, w: k.decode_ternary_rows(w(1, 4), w(1, 4), f(8), f(64))),
        ("fit", lambda k, f, w: k.decode_ternary_rows(w(2, 4), w(2, 4), f(16), f(64))),
        ("shape", lambda k, f, w: k.decode_ternary_rows(w(1, 4), w(1, 3), f(16), f(64))),
        ("residual", lambda k, f, w: k.commit_ternary_residual(f(64), f(65), w(1)[0], w(1)[0], ONE, ONE, ONE)),
        ("own", lambda k, f, w: k.commit_ternary_residual(f(64), f(64), w(1)[0], w(2)[0], ONE, ONE, ONE)),
        ("fit", lambda k, f, w: k.commit_and_decode_rows(f(64), f(64), w(1)[0], ONE, ONE, ONE, w(2, 4), f(8))),
        ("table", lambda k, f, w: k.commit_and_decode_planes(f(64), f(64), w(1)[0], ONE, ONE, ONE, w(1, 3), f(2))),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(kernels, rule, call):
    arrays = []

    def of_floats(n):
        arrays.append(np.ones(n, np.float32))
        return arrays[-1]

    def of_words(words, planes=1):
        arrays.append(np.ones((planes, words), np.uint64))
        return arrays[-1]

    with pytest.raises(ValueError, match=rule):
        call(kernels, of_floats, of_words)
    assert all((array == 1).all() for array in arrays)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("1 to 64 workers, not 65", lambda: count_table(65, 1, ONE, 1)),
        ("1 to 64 workers, not 0", lambda: majority_table(0, 0, ONE)),
        ("5 voters in a world of 4", lambda: count_table(4, 5, ONE, 4)),
        ("divisor 0", lambda: count_table(4, 4, ONE, 0)),
        ("margin -1", lambda: majority_table(4, 4, ONE, -1)),
    ],
)
def test_tables_refuse_what_cannot_be(rule, make):
    with pytest.raises(ValueError, match=rule):
        make()


def test_a_table_has_an_entry_for_all_that_planes_can_spell():
    assert [count_table(world, world, ONE, world).size for world in (1, 2, 3, 4, 7, 8, 64)] == [2, 4, 4, 8, 8, 16, 128]
    assert [count_table(world, world, ONE, world, TERNARY).size for world in (1, 2, 3, 4, 64)] == [4, 8, 8, 16, 256]
    assert list(count_table(3, 3, ONE, 1, TERNARY)) == [0, 1, 2, 3, -4, -3, -2, -1]
    assert (count_table(4, 0, np.float32(0), 4)[:1] == 0).all()
    assert np.isnan(count_table(4, 4, np.float32(np.nan), 4)).all()


# ----------------------------------------------------------------------------------------------------------- back end


@pytest.mark.parametrize("name", BACKENDS)
def test_the_environment_chooses_the_back_end(monkeypatch, name):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    assert name == codec_backend().NAME


def test_numba_is_the_default(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert codec_backend().NAME == "numba"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert codec_backend().NAME == "numba"


def test_an_unknown_back_end_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="NEURON_FABRIC_CODEC='cuda' is unknown: use numpy or numba"):
        codec_backend()


def test_without_numba_numpy_takes_over_and_says_so(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    import neuron_fabric.runtime

    monkeypatch.delattr(neuron_fabric.runtime, "kernels", raising=False)
    monkeypatch.setitem(sys.modules, "neuron_fabric.runtime.kernels", None)
    with pytest.warns(RuntimeWarning, match="numba cannot be imported"):
        assert codec_backend().NAME == "numpy"
    with pytest.raises(ImportError):
        codec_backend("numba")


def test_both_back_ends_offer_the_same_names():
    first, second = (codec_backend(name) for name in BACKENDS)
    assert first.__all__ == second.__all__
