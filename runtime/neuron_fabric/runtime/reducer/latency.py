"""A histogram of latencies that never grows.

Four bins to an octave of nanoseconds, so a quantile is known within 25 %.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BINS", "quantile_s"]

I64 = npt.NDArray[np.int64]

BINS = 256


def quantile_s(histogram: I64, quantile: float) -> float | None:
    """The upper edge, in seconds, of the bin where a share ``quantile`` of all samples is reached; None without any.

    Bin k below 8 is for k nanoseconds; above, bin ``4 * octave + value`` for those from ``value << octave`` on, where
    ``value`` is 4 to 7.
    """
    total = int(histogram.sum())
    if not total:
        return None
    place = int(np.searchsorted(np.cumsum(histogram), quantile * total, side="left"))
    octave, value = (place // 4 - 1, 4 + place % 4) if place >= 8 else (0, place)
    return float((value + 1) << octave) / 1e9
