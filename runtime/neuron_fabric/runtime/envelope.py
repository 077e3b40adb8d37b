"""The envelope: what travels in front of a bucket's planes.

A bucket's message is a header, one entry per segment, and the planes of its sections (or the part of them that the
receiver counts). A separate collective for the few bytes of an envelope would cost more than the planes themselves, so
it is the head of the payload collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import codec
from neuron_fabric.runtime.layout import BucketLayout

__all__ = ["ENTRY", "HEADER", "DisagreementError", "Envelopes", "envelope_bytes", "read_envelopes", "write_envelope"]

U8 = npt.NDArray[np.uint8]

HEADER = np.dtype([("magic", "<u4"), ("bucket", "<u4"), ("step", "<u8"), ("layout", "<u8")])
ENTRY = np.dtype([("l1", "<f8"), ("sent", "<u4"), ("zeros", "<u4")])
_MAGIC = 0x4E465631  # "NFV1"


class DisagreementError(RuntimeError):
    """Two ranks are not doing the same thing."""


class Envelopes:
    """The envelopes of all ranks for one bucket.

    Attributes
    ----------
    l1 : float64, shape (world, segments)
    sent : int64, shape (world, segments)
        Elements sent; 0 for an abstention, and for a worker none of whose elements passes a ternary gate.
    zeros : int64, shape (world, segments)
        Exact zeros of the gradient.
    voters : int64, shape (segments,)
        How many sent something.
    """

    def __init__(self, entries: npt.NDArray[np.void]) -> None:
        self.l1 = entries["l1"].astype(np.float64)
        self.sent = entries["sent"].astype(np.int64)
        self.zeros = entries["zeros"].astype(np.int64)
        self.voters = np.count_nonzero(self.sent, axis=0)

    def anybody_abstains(self, segments: Sequence[int]) -> bool:
        """Whether some rank is no voter of one of these segments."""
        return bool((self.voters[list(segments)] < len(self.sent)).any())

    @property
    def finite(self) -> bool:
        """Whether every rank's every segment is finite."""
        return bool(np.isfinite(self.l1).all())

    def scale(self, segment: int) -> np.float32:
        """The common scale of one segment."""
        return codec.common_scale(self.l1[:, segment], self.sent[:, segment])


def envelope_bytes(layout: BucketLayout) -> int:
    """Bytes before the planes; a multiple of 8."""
    return HEADER.itemsize + ENTRY.itemsize * len(layout.segments)


def write_envelope(
    message: U8, layout: BucketLayout, bucket: int, step: int, entries: list[tuple[float, int, int]]
) -> None:
    """Write header and entries (l1, sent, zeros) to the head of ``message``."""
    size = HEADER.itemsize
    message[:size].view(HEADER)[0] = (_MAGIC, bucket, step, layout.digest)
    message[size : size + ENTRY.itemsize * len(entries)].view(ENTRY)[:] = entries


def read_envelopes(messages: list[U8], layout: BucketLayout, bucket: int, step: int) -> Envelopes:
    """Read the heads of all ranks' messages, in rank order.

    Raises
    ------
    DisagreementError
        If a rank is at another bucket, step or layout than this one.
    """
    size = HEADER.itemsize
    wanted = {"magic": _MAGIC, "bucket": bucket, "step": step, "layout": layout.digest}
    for rank, message in enumerate(messages):
        header = message[:size].view(HEADER)[0]
        for field, value in wanted.items():
            if header[field] != value:
                raise DisagreementError(
                    f"rank {rank} sent {field} {int(header[field])} where this rank has {value} (bucket {bucket}, "
                    f"step {step}): the ranks do not run the same model, plan or number of steps"
                )
    length = ENTRY.itemsize * len(layout.segments)
    return Envelopes(np.stack([message[size : size + length].view(ENTRY) for message in messages]))
