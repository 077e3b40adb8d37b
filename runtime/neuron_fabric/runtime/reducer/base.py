"""What a reducer is to a worker: one job of it, into which planes go and out of which their counts come.

    with connect("udp://127.0.0.1:20045") as reducer:
        reducer.open_job(JobSpec(job=7, worker=0, members=2), timeout=5.0)
        ticket = reducer.submit(planes)
        result = reducer.collect(ticket, timeout=5.0)

Whatever is behind it (a board, a daemon, the golden model in this process), the same calls drive it, every wait has a
limit, and what goes wrong is one of a few types of :class:`ReducerError`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from neuron_fabric.model.encoding import Encoding, encoding_by_name
from neuron_fabric.model.params import LINE_BYTES, MAX_LINES
from neuron_fabric.model.wire import Reason
from neuron_fabric.runtime.reducer.latency import BINS, quantile_s

__all__ = [
    "WORDS_PER_LINE",
    "AbsentError",
    "FailedError",
    "Grant",
    "JobSpec",
    "Reduced",
    "Reducer",
    "ReducerError",
    "RefusedError",
    "Status",
    "Ticket",
    "TimedOutError",
]

U64 = npt.NDArray[np.uint64]

WORDS_PER_LINE = LINE_BYTES // 8
_MAX_SLOTS = 1 << 16
MAX_MEMBERS = 64


class ReducerError(RuntimeError):
    """A reducer did not do what it was asked for; ``kind`` is one word for counters and reports."""

    kind = "failed"


class AbsentError(ReducerError):
    """Nobody answers."""

    kind = "absent"


class RefusedError(ReducerError):
    """The reducer said no; ``reason`` is the code that it gave."""

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def kind(self) -> str:  # type: ignore[override]
        """``refused_`` and the name of the reason."""
        try:
            return f"refused_{Reason(self.reason).name.lower()}"
        except ValueError:
            return f"refused_{self.reason}"


class FailedError(ReducerError):
    """A bucket cannot be finished any more, and none behind it, until the job is resumed or opened again."""

    def __init__(self, message: str, kind: str = "failed", *, lost: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.lost = lost
        """Whether the reducer has lost the job, so that it must be opened again."""

    def again(self) -> FailedError:
        """The same error for another caller, whose trace is its own."""
        return FailedError(str(self), self.kind, lost=self.lost)


class TimedOutError(ReducerError):
    """It took longer than the caller wanted to wait."""

    kind = "timed_out"


@dataclass(frozen=True)
class JobSpec:
    """What a worker asks for; all members of a job must ask for the same, but for ``worker`` and what they remember.

    Parameters
    ----------
    job : int
        16 bits; which training run and which of its jobs.
    worker, members : int
        This worker's number, and how many there are: 0 to ``members - 1``, at most 64.
    encoding : str
        As :func:`neuron_fabric.model.encoding.encoding_by_name` knows it.
    result_format : str
        ``tally`` or ``majority``.
    margin : int
        Of a majority.
    slots : int
        Chunks in flight that are asked for, a power of two; fewer may be granted.
    lines_per_chunk : int
        Lines of a chunk that are asked for, 1 to 255; fewer may be granted.
    epoch : int
        The highest epoch of this job that this worker remembers.
    next_chunk : int
        The first chunk number that it has never used.
    """

    job: int
    worker: int
    members: int
    encoding: str = "binary"
    result_format: str = "tally"
    margin: int = 0
    slots: int = 64
    lines_per_chunk: int = 16
    epoch: int = 0
    next_chunk: int = 0

    def __post_init__(self) -> None:
        encoding_by_name(self.encoding)
        if self.result_format not in ("tally", "majority"):
            raise ValueError(f"result_format must be tally or majority, not {self.result_format!r}")
        self._check("job", 0, 0xFFFF)
        self._check("members", 1, MAX_MEMBERS)
        self._check("worker", 0, self.members - 1)
        self._check("margin", 0, 0xFFFF)
        self._check("slots", 1, _MAX_SLOTS)
        self._check("lines_per_chunk", 1, MAX_LINES)
        self._check("epoch", 0, 0xFFFF)
        self._check("next_chunk", 0, 0xFFFFFFFF)
        if self.slots & (self.slots - 1):
            raise ValueError(f"slots must be a power of two, not {self.slots}")

    def _check(self, name: str, low: int, high: int) -> None:
        if not low <= operator.index(getattr(self, name)) <= high:
            raise ValueError(f"{name} must be {low} to {high}, not {getattr(self, name)}")

    @property
    def majority(self) -> bool:
        """Whether results are majorities."""
        return self.result_format == "majority"

    @property
    def table(self) -> Encoding:
        """The encoding itself."""
        return encoding_by_name(self.encoding)

    @property
    def result_planes(self) -> int:
        """Planes of a result."""
        return 2 if self.majority else self.table.tally_bits(self.members)

    def remembering(self, epoch: int, next_chunk: int) -> JobSpec:
        """The same job, asked for again by one who has come so far."""
        return replace(self, epoch=epoch, next_chunk=next_chunk)


@dataclass(frozen=True)
class Grant:
    """What the reducer gave.

    Attributes
    ----------
    epoch : int
        Of this incarnation of the job; the same for all members.
    slots, lines_per_chunk : int
        At most as many as were asked for.
    first_chunk : int
        Where all members begin.
    result_planes : int
    accumulator_bits, max_workers : int
    encodings : tuple of str
        That this reducer knows.
    """

    epoch: int
    slots: int
    lines_per_chunk: int
    first_chunk: int
    result_planes: int
    accumulator_bits: int
    max_workers: int
    encodings: tuple[str, ...] = ("binary",)


@dataclass(frozen=True)
class Ticket:
    """Stands for a submitted bucket; ``number`` counts them from 0 on."""

    number: int
    chunks: int
    words: int


@dataclass(frozen=True)
class Reduced:
    """The result of one bucket.

    Attributes
    ----------
    planes : uint64, shape (result planes, words)
        Tally planes, LSB first, or (negative, nonzero).
    voters : int64, shape (chunks,)
        Workers in the tally, per chunk.
    missing : int64, shape (chunks,)
        Members that neither voted nor abstained before the reducer's own timeout; 0 where nobody was left out.
    counted : uint64, shape (chunks,)
        Where some are missing: bit ``w`` is set if worker ``w`` is in the tally.
    """

    planes: U64
    voters: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int64]
    counted: U64

    @property
    def partial(self) -> bool:
        """Whether somebody was left out of some chunk."""
        return bool(self.missing.any())


def _no_latencies() -> npt.NDArray[np.int64]:
    return np.zeros(BINS, np.int64)


@dataclass(frozen=True)
class Status:
    """How the reducer does, as this worker sees it.

    Attributes
    ----------
    counters : mapping of str to int
        This side's: frames and bytes sent and received, what was sent again, what was dropped and why.
    remote : mapping of str to int
        The reducer's own counters, by the names of the register table; empty if it did not answer.
    occupancy : float or None
        Slots that jobs were granted over slots there are; None if unknown.
    round_trip_s : float or None
        Of a question to the reducer; None if it did not answer.
    latencies : int64, shape (BINS,)
        From a chunk's first frame to the last of its result: :mod:`neuron_fabric.runtime.reducer.latency`.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    remote: Mapping[str, int] = field(default_factory=dict)
    occupancy: float | None = None
    round_trip_s: float | None = None
    latencies: npt.NDArray[np.int64] = field(default_factory=_no_latencies, repr=False, compare=False)

    def latency_s(self, quantile: float) -> float | None:
        """A quantile (0 to 1) of the latencies, in seconds; None if there were none."""
        return quantile_s(self.latencies, quantile)

    @property
    def retransmission_share(self) -> float:
        """Contributions sent again over contributions sent, in frames."""
        counters = self.counters
        sent = sum(counters.get(name, 0) for name in ("contributions", "abstentions", "resent"))
        return counters.get("resent", 0) / sent if sent else 0.0

    def since(self, earlier: Status) -> Status:
        """What has been counted on this side after ``earlier``; what the reducer told stays as it is."""
        counters = {name: value - earlier.counters.get(name, 0) for name, value in self.counters.items()}
        return replace(self, counters=counters, latencies=self.latencies - earlier.latencies)


class Reducer(ABC):
    """One worker's way to one job. Methods may be called from any thread; one at a time submits.

    A bucket that fails takes those behind it with it: :meth:`submit` and :meth:`collect` raise :class:`FailedError`
    until :meth:`resume` or until the job is opened again.
    """

    url: str

    @abstractmethod
    def request(self, spec: JobSpec) -> None:
        """Begin to ask for a job, or for a new epoch of the one that is open; returns at once.

        Buckets in flight fail. Asking goes on in the background until there is a grant or :meth:`close`.
        """

    @abstractmethod
    def grant(self, timeout: float = 0.0) -> Grant:
        """The grant for what was last requested, for which this waits ``timeout`` seconds at most.

        Raises
        ------
        AbsentError
            Nobody has answered yet.
        RefusedError
            The last answer was no. It is asked for again all the same, since capacity comes and goes.
        TimedOutError
            The reducer is there, and waits for other members.
        """

    def open_job(self, spec: JobSpec, timeout: float = 10.0) -> Grant:
        """:meth:`request` and :meth:`grant`."""
        self.request(spec)
        return self.grant(timeout)

    @abstractmethod
    def submit(self, planes: U64 | None, abstain: npt.NDArray[np.bool_] | None = None, *, words: int = 0) -> Ticket:
        """Send a bucket on its way; returns before it is sent.

        Parameters
        ----------
        planes : uint64, shape (planes of the encoding, words), or None
            Whole lines: ``words`` is a multiple of 8. It is read until the bucket is collected or has failed, so it
            must not change before. Rows may be apart, but each must be contiguous. None abstains from all ``words``.
        abstain : bool, shape (chunks,), optional
            Chunks to which this worker has nothing to say.

        Raises
        ------
        ValueError
            If the shape is none of these.
        FailedError
            If there is no grant, or a bucket before has failed.
        TimedOutError
            If too many buckets are waiting, and none gets done in the reducer's time limit.
        """

    @abstractmethod
    def collect(self, ticket: Ticket, timeout: float) -> Reduced:
        """The result of a bucket, for which this waits ``timeout`` seconds at most; once a ticket.

        Raises
        ------
        FailedError
            If it failed.
        TimedOutError
            If it is not there in time; it may be asked for again.
        """

    @abstractmethod
    def resume(self, chunk: int) -> None:
        """Give up whatever is in flight and go on at ``chunk``, agreed by all members and never used before."""

    @property
    @abstractmethod
    def next_chunk(self) -> int:
        """The first chunk number that this worker has not used."""

    @property
    @abstractmethod
    def failure(self) -> FailedError | None:
        """Why nothing can be submitted though there was a grant; None if all is well."""

    @abstractmethod
    def status(self, timeout: float = 1.0) -> Status:
        """Counters and measures, with the reducer's own if it answers in ``timeout`` seconds (0: do not ask)."""

    def buffer_bytes(self) -> int:
        """Bytes that it holds whatever is in flight."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Leave the job and end whatever runs in the background; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked_planes(planes: U64 | None, words: int, rows: int) -> int:
    """The words of a bucket that may be submitted; ``ValueError`` names what does not fit."""
    if planes is not None:
        if planes.ndim != 2 or planes.dtype != np.uint64 or planes.shape[0] != rows:
            raise ValueError(
                f"planes must be uint64 of shape ({rows}, words), not {planes.dtype} of shape {planes.shape}"
            )
        if planes.shape[1] > 1 and planes.strides[1] != planes.itemsize:
            raise ValueError("each plane must be contiguous")
        if words not in (0, planes.shape[1]):
            raise ValueError(f"planes have {planes.shape[1]} words, not {words}")
        words = planes.shape[1]
    if words < 1 or words % WORDS_PER_LINE:
        raise ValueError(f"a bucket has whole lines of {WORDS_PER_LINE} words, not {words} words")
    return words


def checked_abstain(abstain: npt.NDArray[np.bool_] | None, chunks: int) -> npt.NDArray[np.uint8]:
    """One byte a chunk; ``ValueError`` if it does not fit."""
    if abstain is None:
        return np.zeros(chunks, np.uint8)
    if abstain.shape != (chunks,):
        raise ValueError(f"abstain has shape {abstain.shape}; the bucket has {chunks} chunks")
    return np.ascontiguousarray(abstain, np.bool_).view(np.uint8).copy()
