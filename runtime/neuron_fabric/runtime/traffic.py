"""Counting bits: what goes to a reducer and comes back, what is really sent, and what FP32 would have taken."""

from __future__ import annotations

from dataclasses import dataclass, fields

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.runtime.layout import BucketLayout
from neuron_fabric.runtime.plan import ResultFormat

__all__ = ["Traffic", "ring_bytes"]


def ring_bytes(payload: int, world: int) -> int:
    """Bytes that one rank sends in a ring all-reduce (reduce-scatter, all-gather) of ``payload`` bytes."""
    return 2 * (world - 1) * payload // world


@dataclass
class Traffic:
    """Totals over a run, for one rank. All but ``buckets`` and ``steps`` are as sent or received by this rank.

    Attributes
    ----------
    elements : int
        Gradient elements, FP32 ones included.
    low_bit_elements : int
        Those on a low-bit route.
    up_bits, down_bits : int
        Payload between a worker and an endpoint: whole lines of sign planes and result planes, and 32 bits per
        element for what goes FP32.
    envelope_bits : int
        Headers and envelopes, in each direction.
    sent_bytes : int
        Payload bytes that this rank really put on the wire, by the algorithms of the collectives that ran.
    ring_bytes : int
        What a ring all-reduce of everything in FP32 would have put there.
    """

    steps: int = 0
    buckets: int = 0
    elements: int = 0
    low_bit_elements: int = 0
    up_bits: int = 0
    down_bits: int = 0
    envelope_bits: int = 0
    sent_bytes: int = 0
    ring_bytes: int = 0

    def count(self, layout: BucketLayout, world: int, itemsize: int, envelope_bytes: int) -> None:
        """Add one bucket's payload."""
        self.buckets += 1
        self.elements += layout.numel
        self.ring_bytes += ring_bytes(layout.numel * itemsize, world)
        fp32_bits = 8 * itemsize * layout.fp32_numel
        self.up_bits += fp32_bits
        self.down_bits += fp32_bits
        self.sent_bytes += ring_bytes(fp32_bits // 8, world)
        if layout.segments:
            planes = 2 if layout.result_format is ResultFormat.MAJORITY else BINARY.tally_bits(world)
            self.low_bit_elements += sum(segment.numel for segment in layout.segments)
            self.up_bits += 64 * layout.words
            self.down_bits += 64 * layout.words * planes
            self.envelope_bits += 8 * envelope_bytes

    def share_of_fp32(self) -> tuple[float, float]:
        """``up_bits`` and ``down_bits`` as shares of 32 bits per element."""
        fp32 = 32 * max(self.elements, 1)
        return self.up_bits / fp32, self.down_bits / fp32

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
