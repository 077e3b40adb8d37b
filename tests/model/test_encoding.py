import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model import bitplane
from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding, encoding_by_name, int_encoding, tally_encoding
from neuron_fabric.model.params import ReducerParams


@pytest.mark.parametrize(
    ("encoding", "world", "bits"),
    [
        (BINARY, 1, 1),
        (BINARY, 3, 2),
        (BINARY, 4, 3),
        (BINARY, 255, 8),
        (TERNARY, 1, 2),
        (TERNARY, 3, 3),
        (TERNARY, 4, 4),
        (int_encoding(2), 1, 2),
        (int_encoding(2), 3, 4),
        (int_encoding(4), 16, 8),
        (tally_encoding(BINARY, 4), 4, 5),
        (tally_encoding(TERNARY, 3), 5, 5),
        (tally_encoding(tally_encoding(BINARY, 3), 2), 2, 4),  # three levels: 12 leaves
    ],
)
def test_tally_bits(encoding, world, bits):
    assert encoding.tally_bits(world) == bits
    encoding.check_fits(world, bits)
    with pytest.raises(ValueError, match=f"takes {bits} bits; the accumulator has {bits - 1}"):
        encoding.check_fits(world, bits - 1)


@given(st.sampled_from([BINARY, TERNARY, int_encoding(3)]), st.integers(1, 40))
def test_tally_bits_are_enough_and_not_one_too_many(encoding, world):
    low, high = encoding.bounds(world)
    bits = encoding.tally_bits(world)

    def fits(bits):
        if encoding.signed:
            return -(1 << bits - 1) <= low and high < 1 << bits - 1
        return high < 1 << bits

    assert fits(bits)
    assert not fits(bits - 1)


def test_int_planes_are_twos_complement():
    assert int_encoding(4).weights == (1, 2, 4, -8)


@pytest.mark.parametrize("weight", [0, 3, -6])
def test_a_weight_that_is_no_power_of_two_is_refused(weight):
    with pytest.raises(ValueError, match=rf"weight {weight} of plane 1 is not"):
        Encoding("odd", (1, weight))


def test_a_count_is_not_signed():
    with pytest.raises(ValueError, match="a count of negative votes cannot have a negative weight"):
        Encoding("odd", (-1,), counts_negatives=True)


def test_names():
    assert encoding_by_name("binary") is BINARY
    assert encoding_by_name("int-4") == int_encoding(4)
    with pytest.raises(ValueError, match="unknown encoding 'octal'"):
        encoding_by_name("octal")


@pytest.mark.parametrize(
    ("field", "value"),
    [("lanes", 12), ("lanes", 0), ("lines_per_chunk", 256), ("slots", 3), ("workers", 65), ("acc_bits", 0)],
)
def test_sizes_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        ReducerParams(**{field: value})


def test_a_size_that_is_no_integer_is_refused_by_name():
    with pytest.raises(TypeError, match=r"lanes must be an integer, not 512\.0"):
        ReducerParams(lanes=512.0)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_bit_sliced_arithmetic_against_integers(signed, width):
    rng = np.random.default_rng(width)
    planes = rng.integers(0, 1 << 64, size=(width, 2, 3), dtype=np.uint64)
    values = bitplane.unpack_tally(planes, signed)
    for threshold in range(-40, 41):
        got = bitplane.unpack_tally(bitplane.greater_than(planes, threshold, signed)[None], False)
        np.testing.assert_array_equal(got, values > threshold)
    for voters in range(9):
        for margin in range(4):
            for counts_negatives in (False, True):
                votes = voters - 2 * values if counts_negatives else values
                negative, nonzero = bitplane.majority_planes(
                    planes, voters, margin, counts_negatives=counts_negatives, signed=signed
                )
                np.testing.assert_array_equal(bitplane.unpack_tally(negative[None], False), votes < -margin)
                np.testing.assert_array_equal(bitplane.unpack_tally(nonzero[None], False), abs(votes) > margin)


@given(st.data())
def test_accumulate_is_addition_modulo_the_width(data):
    width = data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tally = np.zeros((width, 1, 2), np.uint64)
    total = np.zeros((1, 128), np.int64)
    for _ in range(data.draw(st.integers(0, 12))):
        shift, negative = data.draw(st.integers(0, width - 1)), data.draw(st.booleans())
        plane = rng.integers(0, 1 << 64, size=(1, 2), dtype=np.uint64)
        bitplane.accumulate(tally, plane, shift, negative)
        total += (-1 if negative else 1) * (bitplane.unpack_tally(plane[None], False) << shift)
    np.testing.assert_array_equal(bitplane.unpack_tally(tally, False), total % (1 << width))


@pytest.mark.parametrize("line_bytes", [1, 2, 8, 9, 64])
def test_lines_and_words_are_inverse(line_bytes):
    payload = np.random.default_rng(0).bytes(3 * line_bytes)
    words = bitplane.from_lines(payload, 3, line_bytes)
    assert bitplane.to_lines(words, line_bytes) == payload
