"""The runtime's codec: which kernels it uses, and the small tables that tell them what a count means.

A kernel never knows what a tally stands for. Tallies of N workers take only a few values, so everything that depends on
encoding, scale, voters, divisor and margin is a table with one float32 per tally, made here by the functions of
:mod:`neuron_fabric.model.codec`; decoding a tally, a majority and a majority with a margin is then one kernel with
three tables, and the definition stays in one place. A signed tally is in two's complement, and its table too.

    kernels = codec_backend()
    l1, zeros = kernels.encode_binary(gradient, rank + step, words)
    ...                                                       # gather, or reduce
    kernels.decode_rows(rows, count_table(world, voters, scale, world), gradient)

**Words.** A segment starts at a 64-bit word. Bit ``i`` of a segment is bit ``i % 64`` of uint64 word ``i // 64``, which
on the little-endian hosts this runs on is ``numpy.packbits(bitorder="little")``. ``n`` elements take
``words_for(n)`` words, and the unused bits of the last one are zero.
"""

from __future__ import annotations

import operator
import os
import warnings
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import codec
from neuron_fabric.model.encoding import BINARY, Encoding

__all__ = [
    "BACKENDS",
    "ENVIRONMENT_VARIABLE",
    "MAX_WORLD",
    "CodecKernels",
    "codec_backend",
    "count_table",
    "majority_table",
    "packed_majority_table",
    "words_for",
]

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]

ENVIRONMENT_VARIABLE = "NEURON_FABRIC_CODEC"
BACKENDS = ("numpy", "numba")
MAX_WORLD = 64
"""Most workers one tally counts here: at most ``MAX_WORLD.bit_length()`` planes, and one more if it is signed."""


class CodecKernels(Protocol):
    """What a back end offers, bit for bit the same in each (``l1`` up to the order of a float64 sum).

    A ternary gate depends on such a sum, too, and an element that is within a part in 10**16 of the gate may pass on
    one machine and not on another. That is its worker's own affair: nobody else encodes that gradient.

    Arrays are one segment's: ``gradient``, ``residual`` and ``out`` are float32 of shape (n,), C-contiguous, at any
    4-byte address; ``words`` and ``own`` are uint64 of shape (words_for(n),), C-contiguous; ``rows`` and ``planes`` are
    uint64 of shape (N, words_for(n)) and (d, words_for(n)), with any stride between rows, as slices of gathered
    messages have. ``positive`` and ``negative`` are like ``words`` where one worker encodes or commits, and like
    ``rows`` where N are counted. What is only read may be read-only. Every kernel raises ``ValueError`` when sizes do
    not fit, before it writes anything; another dtype, a 0-d array or an unaligned one is a ``TypeError`` of numba's and
    undefined in numpy. Arrays must not overlap.
    """

    NAME: str

    def encode_binary(self, gradient: F32, parity: int, words: U64) -> tuple[float, int]:
        """Write the sign bits of ``gradient`` to ``words``; return its L1 sum and how many elements are exactly zero.

        A bit is 1 iff the element is negative, or zero with ``parity`` (rank + step) odd. The sum is a float64, not
        finite iff some element is not. If all elements are zero the worker abstains: zero words.
        """

    def encode_binary_residual(self, gradient: F32, residual: F32, parity: int, words: U64) -> tuple[float, int]:
        """As :meth:`encode_binary` for ``p = gradient + residual``, added in float32.

        The zeros are still those of ``gradient``: if it is zero everywhere the worker abstains whatever its residual,
        with zero words and a sum of 0. Neither array is changed.
        """

    def encode_ternary(self, gradient: F32, gate: float, positive: U64, negative: U64) -> tuple[float, int, int]:
        """Write the two planes of ``gradient``; return the L1 sum of what is sent, how much that is, and exact zeros.

        With ``t = gate * mean |gradient|`` as float32, a bit of ``positive`` is 1 iff the element is above ``t``, of
        ``negative`` iff it is below ``-t``. The sum is NaN iff some element is not finite, and then nothing is sent.
        """

    def encode_ternary_residual(
        self, gradient: F32, residual: F32, gate: float, positive: U64, negative: U64
    ) -> tuple[float, int, int]:
        """As :meth:`encode_ternary` for ``p = gradient + residual``, added in float32.

        The zeros are still those of ``gradient``: if it is zero everywhere the worker abstains whatever its residual,
        with zero words and a sum of 0. Neither array is changed.
        """

    def count_planes(self, rows: U64, planes: U64) -> None:
        """Count N = 1 to 64 workers' bits per element into ``N.bit_length()`` tally planes, LSB first."""

    def count_ternary(self, positive: U64, negative: U64, planes: U64) -> None:
        """Vote sums of N = 1 to 64 workers' rows as two's complement planes, LSB first.

        There are ``TERNARY.tally_bits(N)`` of them, which is ``N.bit_length() + 1``. No element may have both bits.
        """

    def pack_majority(self, planes: U64, voters: int, margin: int, n: int, packed: U64) -> None:
        """Make a majority result of tally planes: ``packed[0] = S < -margin``, ``packed[1] = |S| > margin``.

        ``S = voters - 2 * tally``. ``n`` is the number of elements: the bits after them are written as zero.
        """

    def pack_signed_majority(self, planes: U64, margin: int, n: int, packed: U64) -> None:
        """As :meth:`pack_majority` of d = 2 to 8 two's complement planes of S itself."""

    def decode_rows(self, rows: U64, table: F32, out: F32) -> None:
        """``out = table[count]``, counting N workers' rows; ``table`` has ``2 ** N.bit_length()`` entries."""

    def decode_ternary_rows(self, positive: U64, negative: U64, table: F32, out: F32) -> None:
        """As :meth:`count_ternary`, then :meth:`decode_planes`; ``table`` has ``2 ** (N.bit_length() + 1)`` entries."""

    def decode_planes(self, planes: U64, table: F32, out: F32) -> None:
        """``out = table[index]``, the index's bits being d = 1 to 8 planes, LSB first; ``2 ** d`` table entries."""

    def commit_residual(
        self, gradient: F32, residual: F32, own: U64, scale: np.float32, clip: np.float32, decay: np.float32
    ) -> None:
        """Replace ``residual`` by what sending ``own`` bits left behind: ``decay * clip(p - scale * sent)``.

        ``p = gradient + residual``, ``sent`` is -1 where ``own`` has a 1 and +1 elsewhere; ``clip`` is in units of
        ``scale``, at least 0, infinite for none. As :func:`neuron_fabric.model.codec.residual_after`. Not for a worker
        that abstained (it sent nothing) and not for a step with a non-finite scale (no residual of it may change).
        """

    def commit_ternary_residual(
        self,
        gradient: F32,
        residual: F32,
        positive: U64,
        negative: U64,
        scale: np.float32,
        clip: np.float32,
        decay: np.float32,
    ) -> None:
        """As :meth:`commit_residual`, ``sent`` being +1 and -1 where the worker's planes say so and 0 elsewhere.

        Also for a worker that sent nothing though its gradient was not zero everywhere.
        """

    def commit_and_decode_rows(
        self,
        gradient: F32,
        residual: F32,
        own: U64,
        scale: np.float32,
        clip: np.float32,
        decay: np.float32,
        rows: U64,
        table: F32,
    ) -> None:
        """:meth:`commit_residual`, then :meth:`decode_rows` over ``gradient``, in one pass through memory."""

    def commit_and_decode_planes(
        self,
        gradient: F32,
        residual: F32,
        own: U64,
        scale: np.float32,
        clip: np.float32,
        decay: np.float32,
        planes: U64,
        table: F32,
    ) -> None:
        """:meth:`commit_residual`, then :meth:`decode_planes` over ``gradient``, in one pass through memory."""


def codec_backend(name: str | None = None) -> CodecKernels:
    """The kernels to use: ``numba`` where it can be imported, else ``numpy``.

    ``name``, or else the environment variable ``NEURON_FABRIC_CODEC``, chooses one. ``ValueError`` for a name that is
    not in :data:`BACKENDS`, ``ImportError`` where ``numba`` was asked for by name and cannot be imported.
    """
    origin = "codec" if name is not None else ENVIRONMENT_VARIABLE
    chosen = name if name is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if chosen not in (None, *BACKENDS):
        raise ValueError(f"{origin}={chosen!r} is unknown: use {' or '.join(BACKENDS)}")
    if chosen != "numpy":
        try:
            from neuron_fabric.runtime import kernels
        except ImportError as error:
            if chosen == "numba":
                raise
            warnings.warn(
                f"numba cannot be imported ({error}): the codec runs on numpy, some 20 times slower "
                f"({ENVIRONMENT_VARIABLE}=numpy says that this is meant)",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            return cast(CodecKernels, kernels)
    from neuron_fabric.runtime import kernels_numpy

    return cast(CodecKernels, kernels_numpy)


def words_for(n: int) -> int:
    """64-bit words of one plane of ``n`` elements."""
    return -(-n // 64)


def count_table(world: int, voters: int, scale: np.float32, divisor: int, encoding: Encoding = BINARY) -> F32:
    """What each tally decodes to: ``scale * S / divisor``; for ``binary``, ``S = voters - 2 * tally``.

    Returns float32 of shape ``(2 ** encoding.tally_bits(world),)``: the index is all that the planes of ``world``
    workers can spell, in two's complement where the encoding is signed. ``voters`` are those who did not abstain;
    ``divisor`` is ``world`` less the workers that were dropped. ``ValueError`` if ``world`` is not 1 to 64, ``voters``
    not 0 to ``world`` or ``divisor`` not positive.
    """
    divisor = operator.index(divisor)
    if divisor < 1:
        raise ValueError(f"divisor {divisor} is not positive")
    return _decode(_votes(world, voters, encoding), scale, divisor)


def majority_table(world: int, voters: int, scale: np.float32, margin: int = 0, encoding: Encoding = BINARY) -> F32:
    """What each tally decodes to under majority: ``scale`` times the sign of S where ``|S| > margin``, else 0.

    Shape and errors as :func:`count_table`; ``ValueError`` too if ``margin`` is negative.
    """
    return _decode(codec.majority(_votes(world, voters, encoding), _margin(margin)), scale, 1)


def packed_majority_table(scale: np.float32) -> F32:
    """Table of shape (4,) for the two planes, negative and nonzero, of a ``majority`` result."""
    return _decode(np.array([0, 0, 1, -1]), scale, 1)


# A scale that is not finite or overflows is data, not a reason to warn from inside a backward pass.
@np.errstate(all="ignore")
def _decode(votes: npt.NDArray[np.int64], scale: np.float32, divisor: int) -> F32:
    return codec.decode(votes, scale, divisor)


def _votes(world: int, voters: int, encoding: Encoding) -> npt.NDArray[np.int64]:
    world, voters = operator.index(world), operator.index(voters)
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"the codec counts 1 to {MAX_WORLD} workers, not {world}")
    if not 0 <= voters <= world:
        raise ValueError(f"{voters} voters in a world of {world}")
    tallies = np.arange(1 << encoding.tally_bits(world))
    if encoding.signed:
        tallies[tallies.size // 2 :] -= tallies.size
    return codec.vote_sum(tallies, voters, encoding)


def _margin(margin: int) -> int:
    margin = operator.index(margin)
    if margin < 0:
        raise ValueError(f"margin {margin} is negative")
    return margin
