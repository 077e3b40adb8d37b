"""Encode and decode of one segment, as plain numpy, written to be read.

A segment is one parameter's elements inside one gradient bucket. A worker sends the sign bits of a segment and, beside
them, the L1 sum of what it sent; the reducer counts the bits; everyone decodes the count with one common scale.
signSGD with a majority vote is due to Bernstein et al. 2018 (arXiv 1802.04434), error feedback to Seide et al. 2014
and Karimireddy et al. 2019 (arXiv 1901.09847).

These functions are the definition; the kernels of the runtime must return the same bits.

Bit order: element ``i`` is bit ``i mod 8`` of byte ``i // 8``, LSB first, as ``numpy.packbits(bitorder="little")``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_fabric.model.encoding import Encoding

__all__ = [
    "Encoded",
    "common_scale",
    "decode",
    "encode_binary",
    "encode_ternary",
    "majority",
    "residual_after",
    "vote_sum",
]

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """What one worker says of one segment.

    Attributes
    ----------
    planes : tuple of uint8 arrays
        One packed bit plane per plane of the encoding, each ``ceil(n / 8)`` bytes; unused bits are zero.
    l1 : float
        Sum of ``|p|`` over the sent elements, in double precision. Not finite iff ``p`` is not finite somewhere.
    sent : int
        Elements that were sent: all for ``binary``, those above the gate for ``ternary``, 0 for an abstention.
    zeros : int
        Exact zeros among the gradient's elements; when all are, the worker abstains.
    """

    planes: tuple[U8, ...]
    l1: float
    sent: int
    zeros: int

    @property
    def abstains(self) -> bool:
        """True when the worker has no gradient here: it sends zero bits and is no voter."""
        return self.sent == 0


def encode_binary(gradient: F32, residual: F32 | None = None, *, parity: int = 0) -> Encoded:
    """One bit per element: 1 iff ``p = gradient + residual`` is negative.

    Parameters
    ----------
    gradient, residual : float32, shape (n,)
        ``residual`` is None without error feedback.
    parity : int
        ``rank + step``. An exact zero (+0 or -0) has no sign, so it votes by parity: unanimous zeros cancel from one
        step to the next, where a fixed vote would drift (a measured collapse on sparse gradients).

    A worker abstains iff its *gradient* is zero everywhere, whatever its residual.
    """
    zeros = int(np.count_nonzero(gradient == 0))
    if zeros == gradient.size:
        return Encoded((np.zeros(-(-gradient.size // 8), np.uint8),), 0.0, 0, zeros)
    p = gradient if residual is None else gradient + residual
    negative = p < 0
    if parity % 2:
        negative |= p == 0
    l1 = float(np.abs(p).sum(dtype=np.float64))
    return Encoded((np.packbits(negative, bitorder="little"),), l1, gradient.size, zeros)


def encode_ternary(gradient: F32, residual: F32 | None = None, *, gate: float = 0.5) -> Encoded:
    """Two bits per element: positive iff ``p > t``, negative iff ``p < -t``, with ``t = gate * mean |p|``.

    A non-finite ``p`` passes no gate but is in ``l1``, which therefore says so.
    """
    zeros = int(np.count_nonzero(gradient == 0))
    p = gradient if residual is None else gradient + residual
    magnitude = np.abs(p)
    threshold = np.float32(gate * (magnitude.sum(dtype=np.float64) / max(p.size, 1)))
    positive, negative = p > threshold, p < -threshold
    sent = positive | negative
    if zeros == gradient.size:
        sent = positive = negative = np.zeros(p.shape, bool)
        l1 = 0.0
    elif np.isfinite(p).all():
        l1 = float(magnitude[sent].sum(dtype=np.float64))
    else:
        l1 = float("nan")
    planes = (np.packbits(positive, bitorder="little"), np.packbits(negative, bitorder="little"))
    return Encoded(planes, l1, int(np.count_nonzero(sent)), zeros)


def common_scale(l1: npt.ArrayLike, sent: npt.ArrayLike) -> np.float32:
    """The segment's scale: mean magnitude over everything that was sent.

    ``l1`` and ``sent`` have shape (workers,); they are summed in rank order in double precision, so every rank gets
    the same float32. Zero where nobody sent anything; not finite where anybody's gradient was not finite.
    """
    total = np.float64(0)
    for value in np.asarray(l1, np.float64):
        total += value
    count = int(np.asarray(sent, np.int64).sum())
    if not np.isfinite(total):
        return np.float32(np.nan)
    return np.float32(total / count) if count else np.float32(0)


def vote_sum(tally: npt.ArrayLike, voters: int, encoding: Encoding) -> Ints:
    """The vote sum S of a tally; ``voters`` is the number of the segment's workers that did not abstain."""
    tally = np.asarray(tally, np.int64)
    return voters - 2 * tally if encoding.counts_negatives else tally


def majority(votes: npt.ArrayLike, margin: int = 0) -> Ints:
    """-1, 0 or +1: the sign of S where ``|S| > margin``, else 0. A tie is therefore 0."""
    votes = np.asarray(votes, np.int64)
    return np.where(np.abs(votes) > margin, np.sign(votes), 0)


def decode(votes: npt.ArrayLike, scale: np.float32, divisor: int) -> F32:
    """``scale * S / divisor`` in float32, evaluated from left to right.

    ``divisor`` is the world size for counts (an abstainer counts as zero, as in DDP's mean) and 1 for majority votes.
    A scale that is not finite makes the whole segment NaN, S = 0 included.
    """
    votes32 = np.asarray(votes, np.float32)
    result: F32 = np.float32(scale) * votes32 / np.float32(divisor)
    return result


def residual_after(
    p: F32, sent: npt.ArrayLike, scale: np.float32, *, clip: float | None = None, decay: float = 1.0
) -> F32:
    """Error feedback: what sending ``scale * sent`` left behind of ``p``.

    Parameters
    ----------
    p : float32, shape (n,)
        Gradient plus the residual before.
    sent : integers, shape (n,)
        -1, 0 or +1: this worker's own vote.
    scale : float32
        The common scale of the segment.
    clip : float, optional
        Bound per element, in units of ``scale``. Unclipped residuals grow past the gradient itself.
    decay : float
        Factor on what is kept.
    """
    e: F32 = p - np.float32(scale) * np.asarray(sent, np.float32)
    if clip is not None:
        bound = np.float32(clip) * np.float32(scale)
        e = np.clip(e, -bound, bound)
    if decay != 1.0:
        e = np.float32(decay) * e
    return e
