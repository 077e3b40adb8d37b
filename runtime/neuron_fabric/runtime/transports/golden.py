"""Sign counting by the golden model: real frames through the protocol's reference reducer, inside this process.

The topology is that of :class:`Collective`; what differs is that each rank's shard is cut into chunks, put into
CONTRIBUTE and ABSTAIN frames and counted by a :class:`SignCountReducer`. It is slow, and it is the definition: what it
returns is what the gateware returns for the same frames.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, SignCountReducer
from neuron_fabric.model.wire import Reason
from neuron_fabric.model.worker import BucketFailedError, GoldenWorker
from neuron_fabric.runtime.envelope import Envelopes
from neuron_fabric.runtime.layout import WORDS_PER_LINE
from neuron_fabric.runtime.transports.base import U64, Exchange, ReducerFailedError, result_planes
from neuron_fabric.runtime.transports.collective import Collective

__all__ = ["Golden"]

_SLOTS = 8
"""Slots of each job, that is, chunks in flight."""


class Golden(Collective):
    """The golden model in process."""

    name = "golden"
    may_fail = True

    def attach(self, group: dist.ProcessGroup, own_group: dist.ProcessGroup | None) -> None:
        """Bind, and build this rank's reducer."""
        super().attach(group, own_group)
        # Tallies, and majorities with a margin of 0 to N: a greater one does the same as N.
        jobs = self.world + 2
        self.params = ReducerParams(
            workers=self.world,
            acc_bits=max(2, BINARY.tally_bits(self.world)),
            slots=_SLOTS << (jobs - 1).bit_length(),
            jobs=jobs,
        )
        self.reducer = SignCountReducer(self.params)
        self._jobs: dict[tuple[bool, int], list[GoldenWorker]] = {}

    def _workers(self, majority: bool, margin: int) -> list[GoldenWorker]:
        """The workers of the job for one result format, which is opened when it is first needed."""
        key = majority, min(margin, self.world) if majority else 0
        if key not in self._jobs:
            config = JobConfig(
                job=len(self._jobs),
                epoch=1,
                members=range(self.world),
                encoding=BINARY,
                result_format="majority" if majority else "tally",
                margin=key[1],
                base=_SLOTS * len(self._jobs),
                slots=_SLOTS,
            )
            self.reducer.open(config)
            planes = result_planes(majority, self.world)
            self._jobs[key] = [GoldenWorker(self.params, config, rank, planes) for rank in range(self.world)]
        return self._jobs[key]

    def _count(self, rows: U64, exchange: Exchange, envelopes: Envelopes, majority: bool, counts: U64) -> None:
        lines = rows.shape[1] // WORDS_PER_LINE
        if not lines:
            return
        workers = self._workers(majority, exchange.layout.margin)
        abstains = self._abstains(exchange, envelopes, lines)
        for worker, row, chunks in zip(workers, rows, abstains, strict=True):
            worker.submit(np.ascontiguousarray(row).view(np.uint8)[None], lines, abstain=chunks)
        try:
            self._run(workers)
        except (ReducerFailedError, BucketFailedError) as error:
            # Chunk numbers are never used twice; the next bucket starts after those of this one.
            for worker in workers:
                worker.resume(worker.next_chunk)
            raise ReducerFailedError(f"golden reducer: {error}") from error
        planes = workers[self.rank].result().planes
        counts[:] = planes.view(np.uint64)

    def _run(self, workers: list[GoldenWorker]) -> None:
        """Carry frames until every worker has its results."""
        while not all(worker.done for worker in workers):
            frames = [frame for worker in workers for frame in worker.outgoing()]
            if not frames:
                raise ReducerFailedError("no answer to the last frames")
            for frame in frames:
                reason = self.reducer.receive(frame)
                if reason is not Reason.NONE:
                    raise ReducerFailedError(f"a frame was refused: {reason.name}")
            for answer in self.reducer.poll():
                for worker in workers:
                    worker.receive(answer.payload)

    def _abstains(self, exchange: Exchange, envelopes: Envelopes, lines: int) -> list[list[bool]]:
        """Per worker and chunk of this rank's shard: whether the worker is a voter of none of its segments."""
        first = self._shards(exchange.layout.words)[self.rank].start
        chunk_words = self.params.lines_per_chunk * WORDS_PER_LINE
        result = []
        for worker in range(self.world):
            votes = np.zeros(exchange.layout.words, bool)
            for index, segment in enumerate(exchange.layout.segments):
                votes[segment.words] = envelopes.sent[worker, index] > 0
            mine = votes[first : first + lines * WORDS_PER_LINE]
            result.append([not mine[at : at + chunk_words].any() for at in range(0, mine.size, chunk_words)])
        return result
