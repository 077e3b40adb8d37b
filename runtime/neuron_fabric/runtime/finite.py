"""Is a gradient finite? Asked of every bucket of every step, so it must cost next to nothing."""

from __future__ import annotations

import torch

__all__ = ["all_finite"]


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element of a tensor with at least one is NaN or infinite; without a temporary of its size.

    ``torch.isfinite(tensor).all()`` takes some 50 times as long as a sum on the CPU, and several bytes an element. A
    sum is finite only if all elements are; one that is not may have overflowed, and only then extremes are looked for.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
