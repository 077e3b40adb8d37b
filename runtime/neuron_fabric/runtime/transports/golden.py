"""Vote counting by the golden model: real frames through the protocol's reference reducer, inside this process.

The topology is that of :class:`Collective`; what differs is that each rank's shard is cut into chunks, put into
CONTRIBUTE and ABSTAIN frames and counted by a :class:`SignCountReducer`. It is slow, and it is the definition: what it
returns is what the gateware returns for the same frames.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, SignCountReducer
from neuron_fabric.model.wire import Reason
from neuron_fabric.model.worker import BucketFailedError, GoldenWorker
from neuron_fabric.runtime.admission import Capability, Load
from neuron_fabric.runtime.envelope import Envelopes
from neuron_fabric.runtime.layout import ENCODINGS, WORDS_PER_LINE, Section
from neuron_fabric.runtime.transports.base import U64, Exchange, ReducerFailedError
from neuron_fabric.runtime.transports.collective import Collective

__all__ = ["Golden"]

_SLOTS = 8
"""Slots of each job, that is, chunks in flight."""


class Golden(Collective):
    """The golden model in process."""

    name = "golden"
    may_fail = True

    @staticmethod
    def _params(world: int) -> ReducerParams:
        # Of each encoding tallies, and majorities with a margin of 0 to N: a greater one does the same as N.
        jobs = len(ENCODINGS) * (world + 2)
        return ReducerParams(
            workers=world,
            acc_bits=max(encoding.tally_bits(world) for encoding in ENCODINGS.values()),
            slots=_SLOTS << (jobs - 1).bit_length(),
            jobs=jobs,
        )

    def capability(self, world: int) -> Capability:
        """What the reducer of each rank is built for."""
        params = self._params(world)
        names = [encoding.name for encoding in ENCODINGS.values()]
        return Capability(params.acc_bits, params.workers, _SLOTS, names)

    def load(self) -> Load:
        """Slots in use at the high-water mark, and what came twice or too late, by the reducer's own counters."""
        counters = self.reducer.counters
        seen = Load()
        if counters["frames"]:
            again = counters["duplicates"] + counters["late"] + counters["stale"]
            seen = Load(
                occupancy=counters["slot_high_water"] / self.params.slots,
                retransmission_share=again / counters["frames"],
            )
        self.reducer.clear_counters()
        return seen

    def attach(self, group: dist.ProcessGroup, own_group: dist.ProcessGroup | None) -> None:
        """Bind, and build this rank's reducer."""
        super().attach(group, own_group)
        self.params = self._params(self.world)
        self.reducer = SignCountReducer(self.params)
        self._jobs: dict[tuple[str, bool, int], list[GoldenWorker]] = {}

    def _workers(self, encoding: Encoding, majority: bool, margin: int) -> list[GoldenWorker]:
        """The workers of the job for one encoding and result format, which is opened when it is first needed."""
        margin = min(margin, self.world) if majority else 0
        key = encoding.name, majority, margin
        if key not in self._jobs:
            config = JobConfig(
                job=len(self._jobs),
                epoch=1,
                members=range(self.world),
                encoding=encoding,
                result_format="majority" if majority else "tally",
                margin=margin,
                base=_SLOTS * len(self._jobs),
                slots=_SLOTS,
            )
            self.reducer.open(config)
            workers = [GoldenWorker(self.params, config, rank, config.result_planes) for rank in range(self.world)]
            self._jobs[key] = workers
        return self._jobs[key]

    def _count(
        self,
        section: Section,
        majority: bool,
        rows: U64,
        counts: U64,
        exchange: Exchange,
        envelopes: Envelopes,
    ) -> None:
        lines = rows.shape[2] // WORDS_PER_LINE
        if not lines:
            return
        workers = self._workers(section.encoding, majority, section.margin)
        abstains = self._abstains(section, exchange, envelopes)
        for worker, planes, chunks in zip(workers, rows, abstains, strict=True):
            worker.submit(np.ascontiguousarray(planes).view(np.uint8), lines, abstain=chunks)
        try:
            self._run(workers)
        except (ReducerFailedError, BucketFailedError) as error:
            # Chunk numbers are never used twice; the next bucket starts after those of this one.
            for worker in workers:
                worker.resume(worker.next_chunk)
            raise ReducerFailedError(f"golden reducer: {error}") from error
        counts[:] = workers[self.rank].result().planes.view(np.uint64)

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

    def _abstains(self, section: Section, exchange: Exchange, envelopes: Envelopes) -> list[list[bool]]:
        """Per worker and chunk of this rank's shard: whether the worker is a voter of none of its segments."""
        chunk_words = self.params.lines_per_chunk * WORDS_PER_LINE
        result = []
        for worker in range(self.world):
            votes = np.zeros(section.words, bool)
            for number in section.segments:
                votes[exchange.layout.segments[number].words] = envelopes.sent[worker, number] > 0
            mine = votes[self._shard(section, self.rank)]
            result.append([not mine[at : at + chunk_words].any() for at in range(0, mine.size, chunk_words)])
        return result
