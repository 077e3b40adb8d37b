"""What the votes of a step say about training, from a sample of its counts.

Every rank has the same votes, so every rank comes to the same figures and nothing needs to be sent for them. They are
sums of integers, which no order of adding can change. A few thousand elements a bucket are enough for shares within a
percent, and cost tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_fabric.runtime.layout import BucketLayout
from neuron_fabric.runtime.transports.base import BucketVotes, VotesKind

__all__ = ["RegionVotes", "VoteSample", "VoteStatistics"]

_BITS = 64
SAMPLED_WORDS = 64
"""Words of 64 elements that are looked at in a bucket; at least one of each segment."""


@dataclass
class RegionVotes:
    """Sums over the sampled elements of a region, of those for which all workers voted.

    Attributes
    ----------
    elements, unanimous, ties : int
        How many; of them with ``|S| = voters``, and with ``S = 0``.
    margin : int
        Sum of ``|S|``.
    scale_sum : float
        Sum over segments of their scale times their elements, and of the elements in ``scale_elements``.
    """

    elements: int = 0
    unanimous: int = 0
    ties: int = 0
    margin: int = 0
    scale_sum: float = 0.0
    scale_elements: int = 0


class VoteSample:
    """Which elements of a bucket's layout are looked at: words spread evenly over each segment."""

    def __init__(self, layout: BucketLayout, words: int = SAMPLED_WORDS) -> None:
        total = sum(segment.numel for segment in layout.segments)
        picked: list[npt.NDArray[np.int64]] = []
        segment_of: list[npt.NDArray[np.int64]] = []
        valid: list[npt.NDArray[np.bool_]] = []
        for index, segment in enumerate(layout.segments):
            whole = segment.numel // _BITS
            count = max(1, min(whole, words * segment.numel // total))
            at = np.arange(count, dtype=np.int64) * max(1, whole) // count
            picked.append(segment.word + at)
            segment_of.append(np.full(count, index, np.int64))
            valid.append(at[:, None] * _BITS + np.arange(_BITS) < segment.numel)
        self._words = np.concatenate(picked)
        self._segment_of = np.concatenate(segment_of)
        self._valid = np.concatenate(valid)

    def sums(self, votes: BucketVotes, world: int) -> npt.NDArray[np.int64] | None:
        """Elements, unanimous ones, ties and sum of ``|S|`` of each segment, shape (segments, 4).

        Segments for which some worker abstained have zeros. None where only a majority came back, which keeps no
        counts.
        """
        if votes.kind is VotesKind.MAJORITY:
            return None
        sampled = np.ascontiguousarray(votes.words[:, self._words])
        bits = np.unpackbits(sampled.view(np.uint8), axis=1, bitorder="little").reshape(len(sampled), -1, _BITS)
        if votes.kind is VotesKind.TALLY:
            bits <<= np.arange(len(bits), dtype=np.uint8)[:, None, None]
        counts = bits.sum(0, dtype=np.int16)
        margins = np.abs(world - 2 * counts)
        rows = np.stack(
            [
                self._valid.sum(1),
                ((margins == world) & self._valid).sum(1),
                ((margins == 0) & self._valid).sum(1),
                np.where(self._valid, margins, 0).sum(1),
            ],
            axis=1,
        ).astype(np.int64)
        sums = np.zeros((len(votes.envelopes.voters), 4), np.int64)
        np.add.at(sums, self._segment_of, rows)
        sums[votes.envelopes.voters != world] = 0
        return sums


class VoteStatistics:
    """Collects the votes of one step, by region."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._samples: dict[int, VoteSample] = {}
        self.regions: dict[str, RegionVotes] = {}

    def clear(self) -> None:
        """Begin a step."""
        self.regions = {}

    def add(self, layout: BucketLayout, votes: BucketVotes) -> None:
        """Add a bucket; in the same order on all ranks, since scales are floating-point sums."""
        sample = self._samples.get(layout.digest)
        if sample is None:
            sample = self._samples[layout.digest] = VoteSample(layout)
        sums = sample.sums(votes, self._world)
        for index, segment in enumerate(layout.segments):
            region = self.regions.setdefault(segment.region.name, RegionVotes())
            region.scale_sum += float(votes.envelopes.scale(index)) * segment.numel
            region.scale_elements += segment.numel
            if sums is not None:
                elements, unanimous, ties, margin = sums[index].tolist()
                region.elements += elements
                region.unanimous += unanimous
                region.ties += ties
                region.margin += margin

    def shares(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
        """Unanimity, tie rate and mean of ``|S| / voters``, by region; without regions of which nothing is known."""
        known = {name: votes for name, votes in self.regions.items() if votes.elements}
        return (
            {name: votes.unanimous / votes.elements for name, votes in known.items()},
            {name: votes.ties / votes.elements for name, votes in known.items()},
            {name: votes.margin / (votes.elements * self._world) for name, votes in known.items()},
        )

    def scales(self) -> Mapping[str, float]:
        """Mean scale by region."""
        return {
            name: votes.scale_sum / votes.scale_elements
            for name, votes in self.regions.items()
            if math.isfinite(votes.scale_sum)
        }
