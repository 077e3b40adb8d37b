"""The emulator's engine: a sign-count reducer for many jobs, at speed.

It does what :class:`~neuron_fabric.model.reducer.SignCountReducer` does, bit for bit and counter for counter, with
unicast results and without trees and stragglers; :mod:`neuron_fabric.runtime.emulator.kernels` has the rules. All
memory is taken when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from neuron_fabric.model.control import ENCODINGS
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, check_job
from neuron_fabric.model.wire import HEADER_BYTES
from neuron_fabric.runtime.emulator import kernels
from neuron_fabric.runtime.emulator.kernels import (
    ANYWHERE,
    COUNTER_NAMES,
    I64,
    Bytes,
    Frame,
    Job,
    Nack,
    Scalar,
    State,
    Version,
)

__all__ = ["Engine", "engine_params"]

_MAX_PLANES = 2  # of the encodings that an OPEN can ask for, which is also what a majority result needs
_OUT_BYTES = 4 << 20
_OUT_FRAMES = 8192
_CONTROL_FRAMES = 256


def engine_params(*, workers: int = 64, slots: int = 256, lines: int = 16, jobs: int = 8) -> ReducerParams:
    """Sizes of an engine whose tallies hold every encoding for so many workers; ``ValueError`` names a bad one."""
    ReducerParams(workers=workers)  # its range, before it is used
    return ReducerParams(
        lines_per_chunk=lines,
        slots=slots,
        workers=workers,
        acc_bits=max(encoding.tally_bits(workers) for encoding in ENCODINGS),
        max_planes=_MAX_PLANES,
        jobs=jobs,
    )


class Engine:
    """A reducer over tables of frames; the device behind the emulator's controller.

    Parameters
    ----------
    params : ReducerParams
        Sizes. ``acc_bits`` is at least 2, the planes of a majority result.
    nack_queue : int
        NACKs waiting to be sent; further ones are dropped and counted.

    Attributes
    ----------
    multicast : bool
        False: results go to each member in turn, since a loopback device has no groups.
    """

    multicast = False

    def __init__(self, params: ReducerParams, *, nack_queue: int = 256) -> None:
        if params.acc_bits < 2:
            raise ValueError(f"acc_bits must be at least 2, the planes of a majority result, not {params.acc_bits}")
        if nack_queue < 1:
            raise ValueError(f"nack_queue must be at least 1, not {nack_queue}")
        self.params = params
        size = params.lines_per_chunk * params.line_bytes
        versions = 2 * params.slots
        self._state = State(
            jobs=np.zeros((params.jobs, len(Job)), np.int64),
            weights=np.zeros((params.jobs, params.max_planes, 2), np.int64),
            members=np.zeros(params.jobs, np.uint64),
            addresses=np.full((params.jobs, params.workers), ANYWHERE, np.int64),
            bank_of=np.full(1 << 16, -1, np.int64),
            versions=np.zeros((versions, len(Version)), np.int64),
            seen=np.zeros((versions, params.max_planes), np.uint64),
            pending=np.zeros(versions, np.uint64),
            tally=np.zeros((versions, params.acc_bits, size), np.uint8),
            queue=np.zeros(versions, np.int64),
            nacks=np.zeros((nack_queue, len(Nack)), np.int64),
            counters=np.zeros(len(COUNTER_NAMES), np.int64),
            scalars=np.zeros(len(Scalar), np.int64),
            scratch=np.zeros((2, size), np.uint8),
            line_bytes=params.line_bytes,
        )
        planes = max(params.acc_bits, 2)
        one_chunk = params.workers * planes
        self._out = np.zeros(max(_OUT_BYTES, one_chunk * (HEADER_BYTES + size)), np.uint8)
        self._frames = np.zeros((max(_OUT_FRAMES, one_chunk), len(Frame)), np.int64)
        self._control = np.zeros(_CONTROL_FRAMES, np.int64)
        self._configs: dict[int, JobConfig] = {}

    @property
    def bytes(self) -> int:
        """Memory that is held."""
        arrays = [value for value in self._state if isinstance(value, np.ndarray)]
        return sum(array.nbytes for array in (*arrays, self._out, self._frames, self._control))

    # ---- device ------------------------------------------------------------------------------------------------

    def open(self, config: JobConfig) -> None:
        """Open a job, or reopen it with a newer epoch.

        ``config.members`` may map workers to addresses, integers that are not negative: frames from elsewhere are then
        refused.

        Raises
        ------
        ValueError
            Names what does not fit, or what this engine has not.
        """
        check_job(config, self.params, self._configs.values())
        where = f"job {config.job}"
        if config.parent is not None:
            raise ValueError(f"{where}: the emulator has no trees; open the job without a parent")
        if config.straggler is not None:
            raise ValueError(f"{where}: the emulator has no straggler rule; open the job without a timeout")
        if config.multicast:
            raise ValueError(f"{where}: the emulator sends results to each member; open the job with multicast=False")
        addresses = dict(config.members) if isinstance(config.members, Mapping) else dict.fromkeys(config.members)
        for worker, address in addresses.items():
            if address is not None and (not isinstance(address, int) or not 0 <= address < 1 << 63):
                raise ValueError(f"{where}: the address of worker {worker} must be an integer, not {address!r}")
        self.close(config.job)
        state = self._state
        banks = {int(state.bank_of[job]) for job in self._configs}
        bank = next(bank for bank in range(self.params.jobs) if bank not in banks)
        encoding = config.encoding
        values = {
            Job.NUMBER: config.job,
            Job.EPOCH: config.epoch,
            Job.PLANES: encoding.planes,
            Job.LEAVES: encoding.leaves,
            Job.BASE: config.base,
            Job.SLOTS: config.slot_count(self.params),
            Job.DEPTH: encoding.tally_bits(len(addresses)),
            Job.RESULT_PLANES: config.result_planes,
            Job.MAJORITY: config.result_format == "majority",
            Job.MARGIN: config.margin,
            Job.COUNTS_NEGATIVES: encoding.counts_negatives,
            Job.SIGNED: encoding.signed,
            Job.MEMBERS: len(addresses),
            Job.ACTIVITY: 0,
        }
        for column, value in values.items():
            state.jobs[bank, column] = value
        for plane in range(encoding.planes):
            state.weights[bank, plane] = encoding.shift(plane), encoding.weights[plane] < 0
        state.members[bank] = sum(1 << worker for worker in addresses)
        state.addresses[bank] = ANYWHERE
        for worker, address in addresses.items():
            state.addresses[bank, worker] = ANYWHERE if address is None else address
        state.bank_of[config.job] = bank
        self._configs[config.job] = config

    def close(self, job: int) -> None:
        """Forget a job and free its slots (rule 6). Closing a job that is not open does nothing."""
        config = self._configs.pop(job, None)
        if config is None:
            return
        state = self._state
        state.bank_of[job] = -1
        mine = slice(2 * config.base, 2 * (config.base + config.slot_count(self.params)))
        versions = state.versions[mine]
        incomplete = (versions[:, Version.VALID] != 0) & (versions[:, Version.COMPLETE] == 0)
        state.scalars[Scalar.LEVEL] -= np.count_nonzero(incomplete)
        versions[:, Version.VALID] = 0
        versions[:, Version.COMPLETE] = 0
        state.pending[mine] = 0  # what is in the queue of results is skipped there

    def counters(self) -> dict[str, int]:
        """All counters of the register table; those of what this device has not are 0."""
        return dict(zip(COUNTER_NAMES, self._state.counters.tolist(), strict=True))

    def activity(self, job: int) -> int:
        """Frames taken for an open job so far, by which a controller sees that it lives."""
        bank = int(self._state.bank_of[job])
        return int(self._state.jobs[bank, Job.ACTIVITY]) if bank >= 0 else 0

    # ---- frames ------------------------------------------------------------------------------------------------

    @property
    def control_dropped(self) -> int:
        """Control frames dropped because they were too long or too many at once."""
        return int(self._state.scalars[Scalar.CONTROL_DROPPED])

    @property
    def due(self) -> bool:
        """Whether :meth:`emit` has something to send."""
        scalars = self._state.scalars
        return bool(scalars[Scalar.QUEUED] or scalars[Scalar.NACKS])

    def receive(self, data: Bytes, frames: I64) -> I64:
        """Take frames, rows of :class:`~neuron_fabric.runtime.emulator.kernels.Frame` over ``data``.

        Returns the rows that are for the controller; the array is used again by the next call.

        Raises
        ------
        ValueError
            A row is not within ``data``.
        """
        return self._control[: kernels.receive(data, frames, self._state, self._control)]

    def emit(self) -> tuple[Bytes, I64]:
        """Frames to send: the bytes, and rows over them. Both are used again by the next call.

        What does not fit is sent by the next call: :attr:`due`.
        """
        return self._out, self._frames[: kernels.emit(self._state, self._out, self._frames)]
