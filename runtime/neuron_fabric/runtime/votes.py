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

from neuron_fabric.model.encoding import TERNARY
from neuron_fabric.runtime.layout import BucketLayout, Section
from neuron_fabric.runtime.transports.base import BucketVotes, SectionVotes, VotesKind

__all__ = ["RegionVotes", "VoteSample", "VoteStatistics"]

_BITS = 64
SAMPLED_WORDS = 64
"""Words of 64 elements that are looked at in a bucket; at least one of each segment."""


@dataclass
class RegionVotes:
    """Sums over the sampled elements of a region, in segments in which all workers voted.

    Attributes
    ----------
    elements, unanimous, ties : int
        How many; of them with ``|S| = world``, and with ``S = 0``.
    margin : int
        Sum of ``|S|``.
    voted : float
        Of the elements those on which a worker voted, the one that voted least: all of them for ``binary``.
    scale_sum : float
        Sum over segments of their scale times their elements, and of the elements in ``scale_elements``.
    """

    elements: int = 0
    unanimous: int = 0
    ties: int = 0
    margin: int = 0
    voted: float = 0.0
    scale_sum: float = 0.0
    scale_elements: int = 0


class VoteSample:
    """Which elements of a bucket's layout are looked at: words spread evenly over each segment."""

    def __init__(self, layout: BucketLayout, words: int = SAMPLED_WORDS) -> None:
        self._layout = layout
        total = sum(segment.numel for segment in layout.segments)
        self._sections = [self._pick(section, words, total) for section in layout.sections]

    def _pick(
        self, section: Section, words: int, total: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Words of a section's planes, the segment of each, and which of its elements are elements."""
        picked: list[npt.NDArray[np.int64]] = []
        segment_of: list[npt.NDArray[np.int64]] = []
        valid: list[npt.NDArray[np.bool_]] = []
        for number in section.segments:
            segment = self._layout.segments[number]
            whole = segment.numel // _BITS
            count = max(1, min(whole, words * segment.numel // total))
            at = np.arange(count, dtype=np.int64) * max(1, whole) // count
            picked.append(segment.word + at)
            segment_of.append(np.full(count, number, np.int64))
            valid.append(at[:, None] * _BITS + np.arange(_BITS) < segment.numel)
        return np.concatenate(picked), np.concatenate(segment_of), np.concatenate(valid)

    def sums(self, votes: BucketVotes, world: int) -> npt.NDArray[np.int64]:
        """Elements, unanimous ones, ties and sum of ``|S|`` of each segment, shape (segments, 4).

        Zeros for segments in which some worker did not vote, and where only a majority came back, which keeps no
        counts.
        """
        sums = np.zeros((len(self._layout.segments), 4), np.int64)
        for section, its_votes, (words, segment_of, valid) in zip(
            self._layout.sections, votes.sections, self._sections, strict=True
        ):
            if its_votes.kind is VotesKind.MAJORITY:
                continue
            margins = np.abs(_vote_sums(section, its_votes, words, world))
            rows = np.stack(
                [
                    valid.sum(1),
                    ((margins == world) & valid).sum(1),
                    ((margins == 0) & valid).sum(1),
                    np.where(valid, margins, 0).sum(1),
                ],
                axis=1,
            ).astype(np.int64)
            np.add.at(sums, segment_of, rows)
        sums[votes.envelopes.voters != world] = 0
        return sums


def _vote_sums(
    section: Section, votes: SectionVotes, words: npt.NDArray[np.int64], world: int
) -> npt.NDArray[np.int16]:
    """S of all elements of some words, shape (words, 64)."""
    sampled = np.ascontiguousarray(votes.words[..., words])
    bits = np.unpackbits(sampled.view(np.uint8), axis=-1, bitorder="little").reshape(*sampled.shape, _BITS)
    tally: npt.NDArray[np.int16]
    if votes.kind is VotesKind.ROWS:
        by_plane = bits.sum(0, dtype=np.int16)
        tally = by_plane[0] - by_plane[1] if section.encoding is TERNARY else by_plane[0]
    else:
        tally = (bits << np.arange(len(bits), dtype=np.uint8)[:, None, None]).sum(0, dtype=np.int16)
        if section.encoding.signed:
            tally -= bits[-1].astype(np.int16) << len(bits)
    return world - 2 * tally if section.encoding.counts_negatives else tally


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
            elements, unanimous, ties, margin = sums[index].tolist()
            region.elements += elements
            region.unanimous += unanimous
            region.ties += ties
            region.margin += margin
            region.voted += elements * (int(votes.envelopes.sent[:, index].min()) / segment.numel)

    def shares(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
        """Unanimity, tie rate and mean of ``|S| / world``, by region; without regions of which nothing is known.

        Unanimity is the chance that all others vote as the worker that votes least does. Of ternary votes that is an
        estimate: what was sampled may have more votes than the segment.
        """
        known = {name: votes for name, votes in self.regions.items() if votes.elements}
        return (
            {name: min(1.0, votes.unanimous / votes.voted) for name, votes in known.items()},
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
