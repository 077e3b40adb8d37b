"""What the endpoint must answer: the golden model, asked frame by frame."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from neuron_fabric.model.endpoint import NetworkEndpoint
from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, SignCountReducer
from neuron_fabric.model.wire import FrameType, Header, HeaderError, serial_newer
from neuron_fabric.sim.mutations import MUTATIONS
from neuron_fabric.sim.udp.stations import Network

__all__ = ["Due", "Held", "Key", "Oracle", "Reaction", "key_of"]


class Key(NamedTuple):
    """What makes two answers the same: only one of them may be pending."""

    up: bool
    destination: bytes  # MAC, IP and port
    job: int
    epoch: int
    worker: int
    chunk: int

    def __str__(self) -> str:
        if self.up:
            return f"chunk {self.chunk}, up to job {self.job} epoch {self.epoch}"
        to = "all" if self.worker == 0xFFFF else f"worker {self.worker}"
        at = f"{int.from_bytes(self.destination[:6], 'big'):012x}"
        return f"chunk {self.chunk} of job {self.job} epoch {self.epoch} to {to} at {at}"


def key_of(frame: bytes, header: Header) -> Key:
    """The key of a frame that carries a result, down or up."""
    destination = frame[:6] + frame[30:34] + frame[36:38]
    up = header.type is not FrameType.RESULT
    return Key(up, destination, header.job, header.epoch, header.worker, header.chunk)


class Held(NamedTuple):
    """A chunk in a slot version: the how many-th that this version holds, in the how many-th opening of its job."""

    job: int
    opening: int
    place: int
    generation: int


@dataclass(frozen=True)
class Due:
    """An answer that became due: the Ethernet frames of its planes in order."""

    key: Key
    held: Held
    frames: tuple[bytes, ...]


@dataclass
class Reaction:
    """What a frame, or a timeout, brings about.

    Attributes
    ----------
    due : list of Due
    nacks : list of bytes
        Ethernet frames.
    relays : list of tuple of bytes
        Each what one frame of a parent becomes: a frame to the group, or one to each member.
    claims : Held, optional
        Whose slot version is taken.
    touched : int, optional
        The job whose slots the frame has changed, or asked.
    partial : bool
        A chunk whose time was up is complete by this frame; nothing may follow for that job before the gateware has
        noticed.
    """

    due: list[Due] = field(default_factory=list)
    nacks: list[bytes] = field(default_factory=list)
    relays: list[tuple[bytes, ...]] = field(default_factory=list)
    claims: Held | None = None
    touched: int | None = None
    partial: bool = False


class Oracle:
    """The golden model of one endpoint.

    Parameters
    ----------
    params : ReducerParams
    network : Network
    mutation : str, optional
        A fault of :data:`~neuron_fabric.sim.mutations.MUTATIONS`, to see whether a bench notices.
    """

    def __init__(self, params: ReducerParams, network: Network, mutation: str = "") -> None:
        self._params = params
        self._network = network
        self._mutation = mutation
        self._openings = 0
        self.restart()

    def restart(self) -> None:
        """Hardware reset: nothing is left, counters neither."""
        self.endpoint = NetworkEndpoint(self._params, self._network.me, self._network.group, self._network.listen)
        if self._mutation:
            self.endpoint.reducer = MUTATIONS[self._mutation](self._params)
        self._jobs: dict[int, tuple[JobConfig, int]] = {}  # by number: configuration and opening
        self._held: dict[tuple[int, int], tuple[Held, int]] = {}  # by (opening, place), with the chunk number
        self._now = 0

    @property
    def reducer(self) -> SignCountReducer:
        """The golden reducer."""
        return self.endpoint.reducer

    @property
    def counters(self) -> Counter[str]:
        """Of the golden model."""
        return self.reducer.counters

    # ---- control -----------------------------------------------------------------------------------------------

    def open(self, config: JobConfig) -> None:
        """A job is open from now on."""
        self.endpoint.open(config)
        self._openings += 1
        self._jobs[config.job] = config, self._openings

    def close(self, job: int) -> None:
        """A job is closed."""
        self.reducer.close(job)
        self._jobs.pop(job, None)

    def reset(self) -> None:
        """CONTROL.reset: all jobs are closed, and nothing waits to be sent."""
        self.reducer.reset()
        self._jobs.clear()

    def timeout(self, job: int) -> int | None:
        """The straggler timeout of an open job, in cycles."""
        config, _opening = self._jobs.get(job, (None, 0))
        return config.straggler.timeout if config is not None and config.straggler is not None else None

    # ---- frames ------------------------------------------------------------------------------------------------

    def claim_of(self, frame: bytes) -> Held | None:
        """Whose slot version the frame will take if it is good; the model is not asked and does not change."""
        header = self._contribution(frame)
        if header is None or header.job not in self._jobs:
            return None
        config, opening = self._jobs[header.job]
        held = self._held.get((opening, self._place(config, header.chunk)))
        if header.epoch != config.epoch or held is None or not serial_newer(header.chunk, held[1]):
            return None
        return held[0]

    def feed(self, frame: bytes) -> Reaction:
        """Apply a frame."""
        before = self.counters.copy()
        self.endpoint.receive(frame)
        changed = self.counters - before
        header = self._contribution(frame)
        reaction = Reaction()
        refused = any(name == "stale" or name.startswith(("refused_", "dropped_")) for name in changed)
        if header is not None and header.job in self._jobs and not refused:
            reaction.claims = self._claim(header)
            reaction.touched = header.job
            if self._overdue(header.job):
                # A vote that makes the quorum of a chunk whose time is up.
                partial = self.counters["partial"]
                self.reducer.advance(self._now)
                reaction.partial = self.counters["partial"] != partial
        self._collect(reaction)
        return reaction

    def expire(self, ticks: int) -> Reaction:
        """So much time goes by without a frame."""
        self._now += ticks
        self.reducer.advance(self._now)
        reaction = Reaction()
        self._collect(reaction)
        return reaction

    def expire_chunk(self, job: int, chunk: int) -> Reaction:
        """The time of one chunk is up, and of no other."""
        open_job = self.reducer._jobs[job]
        timeout = self.timeout(job)
        if timeout is None:
            raise ValueError(f"job {job} has no stragglers")
        state = open_job.state(chunk)
        claimed, state.claimed_at = state.claimed_at, self._now - timeout
        reaction = self.expire(0)
        state.claimed_at = claimed
        return reaction

    def _overdue(self, job: int) -> bool:
        timeout = self.timeout(job)
        return timeout is not None and timeout <= self._now

    @staticmethod
    def _contribution(frame: bytes) -> Header | None:
        try:
            header = Header.unpack(frame[HEADERS_BYTES:])
        except HeaderError:
            return None
        return header if header.type in (FrameType.CONTRIBUTE, FrameType.ABSTAIN) else None

    def _place(self, config: JobConfig, chunk: int) -> int:
        return chunk % (2 * config.slot_count(self._params))

    def _claim(self, header: Header) -> Held | None:
        config, opening = self._jobs[header.job]
        at = opening, self._place(config, header.chunk)
        before = self._held.get(at)
        if before is not None and before[1] == header.chunk:
            return None
        generation = before[0].generation + 1 if before is not None else 0
        self._held[at] = Held(header.job, *at, generation), header.chunk
        return before[0] if before is not None else None

    def _collect(self, reaction: Reaction) -> None:
        planes: dict[Key, list[bytes]] = {}
        relayed = []
        for frame in self.endpoint.poll():
            header = Header.unpack(frame[HEADERS_BYTES:])
            if header.type is FrameType.NACK:
                reaction.nacks.append(frame)
            elif header.type is FrameType.RESULT and self._is_child(header.job):
                relayed.append(frame)
            else:
                planes.setdefault(key_of(frame, header), []).append(frame)
        if relayed:
            reaction.relays.append(tuple(relayed))
        for key, frames in planes.items():
            reaction.due.append(Due(key, self._held_by(key), tuple(frames)))

    def _is_child(self, job: int) -> bool:
        return job in self._jobs and self._jobs[job][0].parent is not None

    def _held_by(self, key: Key) -> Held:
        for number, (config, opening) in self._jobs.items():
            parent = config.parent
            mine = (
                (parent is not None and (parent.job, parent.worker) == (key.job, key.worker))
                if key.up
                else (number == key.job)
            )
            if mine:
                return self._held[opening, self._place(config, key.chunk)][0]
        raise RuntimeError(f"the golden model answers for a job that is not open: {key}")
