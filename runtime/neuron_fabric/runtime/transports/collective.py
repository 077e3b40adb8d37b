"""All-to-all of shards of votes, a count per shard, all-gather of the counts: vote counting without special hardware.

Every rank is the reducer of one shard of each section of a bucket: of so many lines, in all planes. Per rank and n
elements of u bits it sends about ``u n + d n`` bits (d tally planes) where an all-gather of votes sends
``(N - 1) u n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from neuron_fabric.model.encoding import TERNARY
from neuron_fabric.runtime.codec import codec_backend
from neuron_fabric.runtime.collectives import all_gather_single
from neuron_fabric.runtime.envelope import Envelopes, read_envelopes
from neuron_fabric.runtime.layout import WORDS_PER_LINE, BucketLayout, Section
from neuron_fabric.runtime.transports.base import (
    U64,
    BucketVotes,
    Exchange,
    ReducerFailedError,
    SectionVotes,
    Transport,
    VotesKind,
    majority_is_sent,
    result_planes,
)

__all__ = ["Collective"]

_STATUS_BYTES = 8
_OK, _FAILED = 0, 1


class Collective(Transport):
    """Two stages; the second is launched from the hook's worker thread on a process group of its own."""

    name = "collective"
    deferred = True

    def attach(self, group: dist.ProcessGroup, own_group: dist.ProcessGroup | None) -> None:
        """Bind to DDP's process group and to the one for second stages."""
        super().attach(group, own_group)
        self._kernels = codec_backend()

    def _shard(self, section: Section, rank: int) -> slice:
        """A rank's words of each plane of a section: whole lines, for all ranks as equal as can be."""
        lines = section.words // WORDS_PER_LINE
        begin, end = (lines * number // self.world for number in (rank, rank + 1))
        return slice(begin * WORDS_PER_LINE, end * WORDS_PER_LINE)

    def _shards(self, layout: BucketLayout, rank: int) -> list[slice]:
        """A rank's words of each plane of each section."""
        return [self._shard(section, rank) for section in layout.sections]

    def _shapes(self, layout: BucketLayout, planes: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """(planes, words) of a rank's shard of each section, if a section has so many planes."""
        return [
            (depth, shard.stop - shard.start) for depth, shard in zip(planes, self._shards(layout, rank), strict=True)
        ]

    def scratch_bytes(self) -> int:
        """Gloo's all-gather receives into memory of its own and copies, one bucket at a time.

        Before it a majority's shard has a tally for a while, which is smaller.
        """
        return max(self._sizes("gathered"), default=0)

    def start(self, exchange: Exchange) -> torch.futures.Future[Any]:
        """Send each rank its shards of this rank's planes, behind the whole envelope."""
        head, layout = exchange.envelope_bytes, exchange.layout
        own = [section.planes(exchange.own) for section in layout.sections]
        shapes = [self._shapes(layout, _planes_up(layout), rank) for rank in range(self.world)]
        sizes = [head + 8 * _size(of_rank) for of_rank in shapes]
        outgoing = self._buffer("outgoing", exchange.index, sum(sizes))
        view, at = outgoing.numpy(), 0
        for rank, (of_rank, size) in enumerate(zip(shapes, sizes, strict=True)):
            exchange.write_envelope(view[at:])
            parts = _split(view[at + head : at + size].view(np.uint64), of_rank)
            for part, planes, shard in zip(parts, own, self._shards(layout, rank), strict=True):
                part[:] = planes[:, shard]
            at += size
        mine = sizes[self.rank]
        incoming = self._buffer("incoming", exchange.index, mine * self.world)
        exchange.scratch["incoming"] = incoming
        exchange.sent_bytes += sum(sizes) - mine
        work = dist.all_to_all_single(incoming, outgoing, [mine] * self.world, sizes, group=self.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def finish(self, exchange: Exchange) -> BucketVotes:
        """Count this rank's shards, gather everybody's counts."""
        head, layout = exchange.envelope_bytes, exchange.layout
        messages = exchange.scratch["incoming"].numpy().reshape(self.world, -1)
        envelopes = read_envelopes(list(messages), layout, exchange.index, exchange.step)
        majorities = [majority_is_sent(section, envelopes) for section in layout.sections]
        depths = [
            result_planes(section, majority, self.world)
            for section, majority in zip(layout.sections, majorities, strict=True)
        ]
        shapes = [self._shapes(layout, depths, rank) for rank in range(self.world)]
        size = _STATUS_BYTES + 8 * max(map(_size, shapes))
        message = self._buffer("counts", exchange.index, size)
        status, body = message.numpy()[:_STATUS_BYTES].view(np.uint64), message.numpy()[_STATUS_BYTES:].view(np.uint64)
        try:
            rows = _split(messages[:, head:].view(np.uint64), self._shapes(layout, _planes_up(layout), self.rank))
            counts = _split(body, shapes[self.rank])
            for section, majority, its_rows, its_counts in zip(layout.sections, majorities, rows, counts, strict=True):
                self._count(section, majority, its_rows, its_counts, exchange, envelopes)
            status[0] = _OK
        except Exception as error:
            # Whatever it is: the others are in the all-gather already, so this rank must come too and say so there.
            status[0] = _FAILED
            exchange.scratch["failure"] = error

        gathered = self._buffer("gathered", exchange.index, size * self.world)
        exchange.sent_bytes += (self.world - 1) * size
        all_gather_single(gathered, message, group=self.own_group)
        everybody = gathered.numpy().reshape(self.world, size)
        failed = [rank for rank in range(self.world) if everybody[rank, :_STATUS_BYTES].view(np.uint64)[0] != _OK]
        if failed:
            raise ReducerFailedError(
                f"the reducer of rank {failed[0]} failed for bucket {exchange.index} of step {exchange.step}"
            ) from exchange.scratch.get("failure")

        whole = [(depth, section.words) for depth, section in zip(depths, layout.sections, strict=True)]
        words = self._buffer("planes", exchange.index, 8 * _size(whole))
        results = _split(words.numpy().view(np.uint64), whole)
        for rank, of_rank in enumerate(shapes):
            parts = _split(everybody[rank, _STATUS_BYTES:].view(np.uint64), of_rank)
            for result, shard, part in zip(results, self._shards(layout, rank), parts, strict=True):
                result[:, shard] = part
        kinds = [VotesKind.MAJORITY if majority else VotesKind.TALLY for majority in majorities]
        return BucketVotes(envelopes, tuple(map(SectionVotes, kinds, results)))

    def _count(
        self,
        section: Section,
        majority: bool,
        rows: U64,
        counts: U64,
        exchange: Exchange,
        envelopes: Envelopes,
    ) -> None:
        """Count this rank's shard of a section.

        ``rows`` has shape (world, planes, width); ``counts``, shape (result planes, width), is written.
        """
        kernels, encoding, width = self._kernels, section.encoding, rows.shape[2]
        tally = np.empty((encoding.tally_bits(self.world), width), np.uint64) if majority else counts
        if encoding is TERNARY:
            kernels.count_ternary(rows[:, 0], rows[:, 1], tally)
            if majority:
                kernels.pack_signed_majority(tally, section.margin, 64 * width, counts)
        else:
            kernels.count_planes(rows[:, 0], tally)
            if majority:
                kernels.pack_majority(tally, self.world, section.margin, 64 * width, counts)


def _planes_up(layout: BucketLayout) -> list[int]:
    return [section.encoding.planes for section in layout.sections]


def _size(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(depth * width for depth, width in shapes)


def _split(words: U64, shapes: Sequence[tuple[int, int]]) -> list[U64]:
    """Views of what lies one after the other in the last axis of ``words``, each of shape (..., *shape)."""
    parts, at = [], 0
    for depth, width in shapes:
        parts.append(words[..., at : at + depth * width].reshape(*words.shape[:-1], depth, width))
        at += depth * width
    return parts
