"""All-to-all of sign shards, a count per shard, all-gather of the counts: sign counting without special hardware.

Every rank is the reducer of one shard of each bucket. Per rank and bucket of n bits it sends about
``n + d n`` bits (d tally planes) where an all-gather of signs sends ``(N - 1) n``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.runtime.codec import codec_backend
from neuron_fabric.runtime.collectives import all_gather_single
from neuron_fabric.runtime.envelope import Envelopes, read_envelopes
from neuron_fabric.runtime.layout import WORDS_PER_LINE
from neuron_fabric.runtime.transports.base import (
    U64,
    BucketVotes,
    Exchange,
    ReducerFailedError,
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

    def _shards(self, words: int) -> list[slice]:
        """Whole lines for each rank, as equal as can be."""
        lines = words // WORDS_PER_LINE
        ends = [lines * (rank + 1) // self.world * WORDS_PER_LINE for rank in range(self.world)]
        return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def start(self, exchange: Exchange) -> torch.futures.Future[Any]:
        """Send each rank its shard of this rank's signs, behind the whole envelope."""
        head = exchange.envelope_bytes
        shards = self._shards(exchange.layout.words)
        sizes = [head + 8 * (shard.stop - shard.start) for shard in shards]
        outgoing = self._buffer("outgoing", exchange.index, sum(sizes))
        view, at = outgoing.numpy(), 0
        for shard, size in zip(shards, sizes, strict=True):
            exchange.write_envelope(view[at:])
            view[at + head : at + size].view(np.uint64)[:] = exchange.own[shard]
            at += size
        mine = sizes[self.rank]
        incoming = self._buffer("incoming", exchange.index, mine * self.world)
        exchange.scratch["incoming"] = incoming
        exchange.sent_bytes += sum(sizes) - mine
        work = dist.all_to_all_single(incoming, outgoing, [mine] * self.world, sizes, group=self.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def finish(self, exchange: Exchange) -> BucketVotes:
        """Count this rank's shard, gather everybody's counts."""
        head, layout = exchange.envelope_bytes, exchange.layout
        messages = exchange.scratch["incoming"].numpy().reshape(self.world, -1)
        envelopes = read_envelopes(list(messages), layout, exchange.index, exchange.step)
        majority = majority_is_sent(layout, envelopes)
        planes = result_planes(majority, self.world)

        shards = self._shards(layout.words)
        longest = max(shard.stop - shard.start for shard in shards)
        size = _STATUS_BYTES + 8 * planes * longest
        message = self._buffer("counts", exchange.index, size)
        status, body = message.numpy()[:_STATUS_BYTES].view(np.uint64), message.numpy()[_STATUS_BYTES:].view(np.uint64)
        mine = shards[self.rank]
        width = mine.stop - mine.start
        try:
            counts = body[: planes * width].reshape(planes, width)
            self._count(messages[:, head:].view(np.uint64), exchange, envelopes, majority, counts)
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

        words = self._buffer("planes", exchange.index, 8 * planes * layout.words).numpy().view(np.uint64)
        words = words.reshape(planes, layout.words)
        for rank, shard in enumerate(shards):
            width = shard.stop - shard.start
            part = everybody[rank, _STATUS_BYTES:].view(np.uint64)[: planes * width]
            words[:, shard] = part.reshape(planes, width)
        return BucketVotes(envelopes, VotesKind.MAJORITY if majority else VotesKind.TALLY, words)

    def _count(self, rows: U64, exchange: Exchange, envelopes: Envelopes, majority: bool, counts: U64) -> None:
        """Count this rank's shard: ``rows`` has shape (world, width), ``counts`` (planes, width) is written."""
        if not majority:
            self._kernels.count_planes(rows, counts)
            return
        tally = np.empty((BINARY.tally_bits(self.world), rows.shape[1]), np.uint64)
        self._kernels.count_planes(rows, tally)
        self._kernels.pack_majority(tally, self.world, exchange.layout.margin, 64 * rows.shape[1], counts)
