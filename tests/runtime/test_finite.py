"""The quick question for NaN and Inf answers as the slow one does."""

import math

import pytest
import torch

from neuron_fabric.runtime.finite import all_finite

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_is_enough(dtype):
    for at in (0, 500, 999):
        for value in BAD:
            tensor = torch.ones(1000, dtype=dtype)
            tensor[at] = value
            assert not all_finite(tensor), (at, value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_overflows_is_no_infinity(dtype):
    greatest = torch.finfo(dtype).max
    for tensor in (torch.full((1000,), greatest, dtype=dtype), torch.zeros(7, dtype=dtype), torch.ones(1, dtype=dtype)):
        assert torch.isfinite(tensor).all()
        assert all_finite(tensor)
        assert all_finite(-tensor)


def test_infinities_that_cancel_are_found():
    assert not all_finite(torch.tensor([math.inf, -math.inf, 1.0]))
    assert not all_finite(torch.tensor([complex(0, math.inf), complex(1, -math.inf)]))
    assert all_finite(torch.tensor([3e38, -3e38, 3e38, 3e38]))
