import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from neuron_fabric.model import codec
from neuron_fabric.model.encoding import BINARY, TERNARY

finite = st.floats(-(2.0**100), 2.0**100, width=32)
segments = hnp.arrays(np.float32, st.integers(1, 70), elements=finite)


def signs(encoded, n):
    bits = [np.unpackbits(plane, count=n, bitorder="little").astype(np.int64) for plane in encoded.planes]
    return 1 - 2 * bits[0] if len(bits) == 1 else bits[0] - bits[1]


@given(segments, st.integers(0, 3))
def test_binary_bits_are_the_negatives_and_zeros_vote_by_parity(gradient, parity):
    encoded = codec.encode_binary(gradient, parity=parity)
    if not gradient.any():
        assert encoded.abstains
        assert not encoded.planes[0].any()
        return
    votes = signs(encoded, gradient.size)
    np.testing.assert_array_equal(votes[gradient != 0], np.sign(gradient[gradient != 0]))
    np.testing.assert_array_equal(votes[gradient == 0], -1 if parity % 2 else 1)
    assert encoded.l1 == pytest.approx(np.abs(gradient.astype(np.float64)).sum())
    assert encoded.sent == gradient.size


def test_negative_zero_is_a_zero():
    gradient = np.array([-0.0, 0.0, 1.0], np.float32)
    assert list(signs(codec.encode_binary(gradient, parity=0), 3)) == [1, 1, 1]
    assert list(signs(codec.encode_binary(gradient, parity=1), 3)) == [-1, -1, 1]


@given(segments, st.floats(0, 2, width=32))
def test_ternary_sends_what_is_above_the_gate(gradient, gate):
    encoded = codec.encode_ternary(gradient, gate=gate)
    votes = signs(encoded, gradient.size)
    if not gradient.any():
        assert encoded.abstains
        return
    threshold = np.float32(gate * np.abs(gradient).mean(dtype=np.float64))
    np.testing.assert_array_equal(votes, np.sign(gradient) * (np.abs(gradient) > threshold))
    assert encoded.sent == np.count_nonzero(votes)


def test_unused_bits_of_the_last_byte_are_zero():
    encoded = codec.encode_binary(-np.ones(9, np.float32))
    assert list(encoded.planes[0]) == [0xFF, 0x01]


@given(st.integers(1, 16), st.data())
def test_decoding_the_votes_of_equal_magnitudes_gives_the_mean(world, data):
    votes = np.array(data.draw(st.lists(st.sampled_from([-1, 1]), min_size=world, max_size=world)))
    gradients = (votes * 0.5).astype(np.float32)
    encoded = [codec.encode_binary(gradient[None]) for gradient in gradients]
    tally = sum(int(e.planes[0][0]) for e in encoded)
    scale = codec.common_scale([e.l1 for e in encoded], [e.sent for e in encoded])
    decoded = codec.decode(codec.vote_sum([tally], world, BINARY), scale, world)
    assert decoded[0] == np.float32(0.5) * np.float32(votes.sum()) / np.float32(world)


def test_an_abstainer_counts_as_zero_as_in_the_mean_of_ddp():
    one, other = np.array([2.0], np.float32), np.array([0.0], np.float32)
    encoded = [codec.encode_binary(one), codec.encode_binary(other, parity=1)]
    assert encoded[1].abstains
    scale = codec.common_scale([e.l1 for e in encoded], [e.sent for e in encoded])
    decoded = codec.decode(codec.vote_sum([0], 1, BINARY), scale, 2)
    assert decoded[0] == 1.0


def test_nothing_sent_is_exactly_zero():
    scale = codec.common_scale([0.0, 0.0], [0, 0])
    assert not codec.decode(codec.vote_sum(np.zeros(5, int), 0, BINARY), scale, 2).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encode", [codec.encode_binary, codec.encode_ternary])
def test_a_value_that_is_not_finite_reaches_everybody_and_never_becomes_a_vote(bad, encode):
    gradient = np.array([1.0, bad, -1.0], np.float32)
    encoded = encode(gradient)
    assert not np.isfinite(encoded.l1)
    scale = codec.common_scale([1.0, encoded.l1], [3, encoded.sent])
    for encoding in (BINARY, TERNARY):
        assert np.isnan(codec.decode(codec.vote_sum([0, 1, 2], 2, encoding), scale, 2)).all()


def test_opposite_infinities_do_not_cancel():
    assert np.isnan(codec.common_scale([np.inf, np.inf], [1, 1]))


def test_a_tie_is_zero_and_the_margin_is_strict():
    assert list(codec.majority([-3, -1, 0, 1, 3], margin=1)) == [-1, 0, 0, 0, 1]
    assert list(codec.majority([-1, 0, 1])) == [-1, 0, 1]


@given(st.integers(0, 2**16))
def test_unclipped_error_feedback_loses_nothing(seed):
    """Sum of what was decoded plus the mean residual is the sum of the gradients."""
    rng = np.random.default_rng(seed)
    world, n, steps = 3, 16, 12
    residual = np.zeros((world, n), np.float32)
    decoded_sum, gradient_sum = np.zeros(n), np.zeros(n)
    for step in range(steps):
        gradient = rng.normal(size=(world, n)).astype(np.float32)
        encoded = [codec.encode_binary(gradient[w], residual[w], parity=w + step) for w in range(world)]
        scale = codec.common_scale([e.l1 for e in encoded], [e.sent for e in encoded])
        votes = np.array([signs(e, n) for e in encoded])
        for w in range(world):
            residual[w] = codec.residual_after(gradient[w] + residual[w], votes[w], scale)
        decoded_sum += codec.decode(votes.sum(0), scale, world)
        gradient_sum += gradient.mean(0)
    np.testing.assert_allclose(decoded_sum + residual.mean(0), gradient_sum, atol=1e-4)


def test_clip_and_decay():
    p = np.array([5.0, -5.0, 0.5], np.float32)
    e = codec.residual_after(p, [1, -1, 1], np.float32(1), clip=1.0, decay=0.5)
    np.testing.assert_array_equal(e, np.array([0.5, -0.5, -0.25], np.float32))
