"""All-gather of packed votes: the baseline, and the fastest way for few workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from neuron_fabric.runtime.collectives import all_gather_single
from neuron_fabric.runtime.envelope import read_envelopes
from neuron_fabric.runtime.transports.base import BucketVotes, Exchange, SectionVotes, Transport, VotesKind

__all__ = ["AllGather"]


class AllGather(Transport):
    """One collective; every rank counts all bits itself while it decodes."""

    name = "allgather"
    deferred = False

    def scratch_bytes(self) -> int:
        """Gloo's all-gathers receive into memory of their own and copy; those of all buckets may be under way."""
        return sum(self._sizes("gathered"))

    def start(self, exchange: Exchange) -> torch.futures.Future[Any]:
        """Gather [envelope, planes] of all ranks."""
        head = exchange.envelope_bytes
        size = head + exchange.own.nbytes
        message = self._buffer("message", exchange.index, size)
        view = message.numpy()
        exchange.write_envelope(view)
        view[head:].view(np.uint64)[:] = exchange.own
        gathered = self._buffer("gathered", exchange.index, size * self.world)
        exchange.scratch["gathered"] = gathered
        exchange.sent_bytes += (self.world - 1) * size
        work = all_gather_single(gathered, message, group=self.group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def finish(self, exchange: Exchange) -> BucketVotes:
        """Views of what was gathered."""
        head, layout = exchange.envelope_bytes, exchange.layout
        messages = exchange.scratch["gathered"].numpy().reshape(self.world, -1)
        envelopes = read_envelopes(list(messages), layout, exchange.index, exchange.step)
        rows = messages[:, head:].view(np.uint64)
        return BucketVotes(
            envelopes, tuple(SectionVotes(VotesKind.ROWS, section.planes(rows)) for section in layout.sections)
        )
