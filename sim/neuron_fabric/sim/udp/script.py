"""What is done with an endpoint: a list of steps, made from a seed before anything runs.

Every generator has the signature ``generator(params, seed, **options) -> Script`` and is listed in :data:`SCRIPTS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from neuron_fabric.model.encoding import BINARY
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig
from neuron_fabric.sim.stimulus import encodings_for
from neuron_fabric.sim.udp.stations import NEVER, Network, draw_job, slot_ranges
from neuron_fabric.sim.udp.traffic import Adversary, Flow, Send

__all__ = [
    "SCRIPTS",
    "Block",
    "Check",
    "Clear",
    "Close",
    "Expire",
    "Open",
    "Reset",
    "Restart",
    "Script",
    "Step",
    "Strike",
    "Sweep",
]


@dataclass(frozen=True)
class Open:
    """Open a job in a bank, which is closed."""

    bank: int
    config: JobConfig


@dataclass(frozen=True)
class Close:
    """Close the job in a bank. Frames of other jobs go on meanwhile."""

    bank: int
    job: int


@dataclass(frozen=True)
class Reset:
    """CONTROL.reset after so many beats of the next frame, whose rest follows it."""

    beats: int


@dataclass(frozen=True)
class Restart:
    """Hardware reset after so many beats of the next frame; ``tail``: its rest is sent after it."""

    beats: int
    tail: bool


@dataclass(frozen=True)
class Check:
    """Wait until all has come, and compare every counter."""


@dataclass(frozen=True)
class Clear:
    """The same, and then CONTROL.clear_counters."""


@dataclass(frozen=True)
class Expire:
    """No input until the time of every straggler is up."""


@dataclass(frozen=True)
class Block:
    """The output is not ready for so many cycles from now on."""

    cycles: int


@dataclass(frozen=True)
class Sweep:
    """Read every register, while frames go on."""


@dataclass(frozen=True)
class Strike:
    """Close a job, or all of them by CONTROL.reset (``bank`` None), while its own frames come in."""

    bank: int | None
    job: int = 0


Step = Send | Open | Close | Reset | Restart | Check | Clear | Expire | Block | Sweep | Strike


@dataclass(frozen=True)
class Script:
    """Steps, and how they are to be done.

    Attributes
    ----------
    name, seed, params, network
    steps : tuple of Step
    polite : bool
        A frame that claims a slot version waits until the answers of that version are out, as rule 10 of the protocol
        makes every worker do.
    timeout : int
        The straggler timeout of jobs that have one that matters.
    """

    name: str
    seed: int
    params: ReducerParams
    network: Network
    steps: tuple[Step, ...] = field(repr=False)
    polite: bool = True
    timeout: int = NEVER

    @property
    def frames(self) -> int:
        """Frames that are sent."""
        return sum(isinstance(step, Send) for step in self.steps)


# ---- random --------------------------------------------------------------------------------------------------------


def random_traffic(
    params: ReducerParams,
    seed: int,
    *,
    frames: int = 10_000,
    trouble: float = 0.35,
    restarts: bool = False,
    events: int = 1200,
    timeout: int = 10_000,
    polite: bool | None = None,
    group: bool | None = None,
    kinds: list[str] | None = None,
) -> Script:
    """Several jobs at once, honest workers on a bad network, and an adversary.

    Every ``events`` frames or so something happens: a job is closed and another one opened in its bank, CONTROL.reset
    in the middle of a frame, counters are cleared or compared, the output is blocked for a while, the time of the
    stragglers is up, and with ``restarts`` a hardware reset in the middle of a frame.
    """
    rng = random.Random(f"udp:random:{seed}")
    maker = _Random(params, rng, timeout, Network.draw(rng, group), kinds or ["any"])
    maker.open_all()
    while maker.sent < frames:
        if rng.random() < 1 / events:
            maker.event(restarts)
        elif rng.random() < trouble:
            maker.disturb()
        else:
            maker.advance()
    steps = [*maker.steps, Check()]
    polite = rng.random() < 0.7 if polite is None else polite
    return Script("random", seed, params, maker.network, tuple(steps), polite, timeout)


class _Random:
    """Makes the steps of :func:`random_traffic`."""

    def __init__(
        self, params: ReducerParams, rng: random.Random, timeout: int, network: Network, kinds: list[str]
    ) -> None:
        self.params, self.rng, self.timeout, self.network = params, rng, timeout, network
        self.kinds = kinds
        self.steps: list[Step] = []
        self.sent = 0
        self.epoch = rng.randrange(1, 1000)
        self.flows: dict[int, Flow] = {}
        self.adversary = Adversary(params, network, rng)
        self._since_expiry = 0

    def send(self, frame: Send) -> None:
        """One more frame."""
        self.steps.append(frame)
        self.sent += 1
        self._since_expiry += 1

    def open_all(self) -> None:
        """A job for every bank, or all but one, or one that has all slots."""
        banks = self.rng.randint(1, min(self.params.jobs, self.params.slots))
        chosen = self.rng.sample(range(self.params.jobs), banks)
        for bank, slots in zip(chosen, slot_ranges(self.params, banks, self.rng), strict=True):
            self.open(bank, slots)

    def open(self, bank: int, slots: tuple[int, int]) -> None:
        """A new job for a bank."""
        self.epoch += self.rng.choice([1, 1, self.rng.randint(1, 50)])
        timeout = self.rng.choice([self.timeout, NEVER])
        config = draw_job(
            self.params, self.rng, bank, self.epoch, slots, kind=self.rng.choice(self.kinds), timeout=timeout
        )
        self.steps.append(Open(bank, config))
        self.flows[bank] = Flow(self.params, self.network, bank, config, self.rng)

    def close(self, bank: int) -> tuple[int, int]:
        """Close it; the slots that are free then."""
        flow = self.flows.pop(bank)
        self.steps.append(Close(bank, flow.config.job))
        return flow.config.base, flow.config.slot_count(self.params)

    def advance(self) -> None:
        """A frame of an honest worker, or of the parent."""
        frame = self.rng.choice(list(self.flows.values())).step()
        if frame is not None:
            self.send(frame)

    def disturb(self) -> None:
        """A frame that should not be, or not any more."""
        self.send(self.adversary.frame(self.rng.choice(list(self.flows.values()))))

    def event(self, restarts: bool) -> None:
        """Something that is not a frame."""
        rng = self.rng
        match rng.randrange(11 if restarts else 10):
            case 0 | 1 | 2:
                bank = rng.choice(list(self.flows))
                old = self.flows[bank]
                slots = self.close(bank)
                for _ in range(rng.randrange(30) if self.flows else 0):
                    self.advance()
                for _ in range(rng.randrange(4)):  # as if nobody had told the workers
                    self.send(self.adversary.late_comer(old))
                self.open(bank, slots)
                self.adversary.remember(old)
            case 3:
                # Only at some places of a frame is there something to lose.
                self.steps.append(Reset(rng.choice([1, 2, 3, rng.randint(1, self.params.lines_per_chunk + 1)])))
                self._begin_again()
            case 4:
                self.steps.append(Clear())
            case 5:
                self.steps.append(Check())
            case 6:
                self.steps.append(Block(rng.choice([50, 400, rng.randint(1, 3000)])))
            case 7:
                self.steps.append(Sweep())
            case 10:
                self.steps.append(
                    Restart(rng.choice([1, 2, rng.randint(1, self.params.lines_per_chunk + 1)]), rng.random() < 0.5)
                )
                self._begin_again()
            case _:
                if any(flow.expires for flow in self.flows.values()):
                    self.steps.append(Expire())
                    for flow in self.flows.values():
                        flow.expired()
                else:
                    self.steps.append(Block(rng.randint(1, 300)))

    def _begin_again(self) -> None:
        """All jobs are gone; the next frame is the one in which that happens."""
        self.send(next(iter(self.flows.values())).whole())
        for flow in self.flows.values():
            self.adversary.remember(flow)
        for _ in range(self.rng.randrange(4)):
            self.send(self.adversary.late_comer(self.rng.choice(list(self.flows.values()))))
        self.flows.clear()
        self.open_all()


# ---- directed ------------------------------------------------------------------------------------------------------


def one_slot(
    params: ReducerParams, seed: int, *, chunks: int = 1000, world: int = 2, lines: int = 0, **job: Any
) -> Script:
    """Aggregations one after the other on one slot, in the middle of the pool if there is one."""
    rng = random.Random(f"udp:one_slot:{seed}")
    slot = rng.randrange(params.slots)
    config = draw_job(params, rng, 0, 1, (slot, 1), **{"kind": "plain", "world": world, **job})
    flow = Flow(params, Network.draw(rng), 0, config, rng, lossless=True, lines=lines)
    return _directed("one_slot", params, seed, flow, chunks)


def slot_counts(params: ReducerParams, seed: int, *, slots: int, chunks: int = 64, **job: Any) -> Script:
    """A job with so many slots, on a bad network."""
    rng = random.Random(f"udp:slots:{seed}")
    base = rng.randrange(params.slots // slots) * slots
    config = draw_job(params, rng, 0, 1, (base, slots), **{"kind": "plain", **job})
    return _directed("slot_counts", params, seed, Flow(params, Network.draw(rng), 0, config, rng), chunks)


def full_rate(
    params: ReducerParams, seed: int, *, chunks: int = 24, group: bool = True, blocked: int = 0, **job: Any
) -> Script:
    """Full frames without a pause, to measure the rate; ``job`` as for :func:`draw_job`.

    With ``blocked`` the output is closed for so many cycles, and nobody waits for results.
    """
    rng = random.Random(f"udp:rate:{seed}")
    config = draw_job(
        params,
        rng,
        0,
        1,
        (0, params.slots),
        **{"kind": "plain", "world": params.workers, "encoding": BINARY, "multicast": True, **job},
    )
    flow = Flow(params, Network.draw(rng, group), 0, config, rng, lossless=True, lines=params.lines_per_chunk)
    made = _directed("full_rate", params, seed, flow, chunks)
    if not blocked:
        return made
    opening, *frames = made.steps
    return replace(made, steps=(opening, Check(), Block(blocked), *frames), polite=False)


def long_stall(params: ReducerParams, seed: int, *, cycles: int = 10_000, frames: int = 1200) -> Script:
    """The output is closed for long while the input goes on; afterwards what is still wanted comes."""
    rng = random.Random(f"udp:stall:{seed}")
    network = Network.draw(rng)
    maker = _Random(params, rng, NEVER, network, ["plain", "child"])
    maker.open_all()
    steps = [*maker.steps, Check(), Block(cycles)]
    maker.steps.clear()
    while maker.sent < frames:
        maker.advance() if rng.random() < 0.8 else maker.disturb()
    return Script("long_stall", seed, params, network, (*steps, *maker.steps, Check()), polite=False)


def every_encoding(params: ReducerParams, seed: int, *, chunks: int = 12) -> Script:
    """All encodings, formats and ways to send results, one job after the other in one bank."""
    rng = random.Random(f"udp:encodings:{seed}")
    network = Network.draw(rng)
    steps: list[Step] = []
    epoch = 1
    for world in sorted({1, 2, params.workers}):
        for encoding in encodings_for(params, world):
            for form in ("tally", "majority"):
                bank = rng.randrange(params.jobs)
                config = draw_job(
                    params, rng, bank, epoch, (0, params.slots),
                    kind="plain", encoding=encoding, world=world, result_format=form,
                )  # fmt: skip
                flow = Flow(params, network, bank, config, rng)
                steps += [Open(bank, config), *flow.chunks(chunks), Check(), Close(bank, config.job)]
                epoch += 1
    return Script("every_encoding", seed, params, network, tuple(steps))


def worlds(params: ReducerParams, seed: int, *, chunks: int = 4) -> Script:
    """As many workers as there can be, from one on, one job after the other."""
    rng = random.Random(f"udp:worlds:{seed}")
    network = Network.draw(rng)
    steps: list[Step] = []
    for world in range(1, params.workers + 1):
        bank = rng.randrange(params.jobs)
        config = draw_job(params, rng, bank, world, (0, params.slots), kind="plain", world=world)
        steps += [Open(bank, config), *Flow(params, network, bank, config, rng).chunks(chunks), Close(bank, config.job)]
    return Script("worlds", seed, params, network, (*steps, Check()))


def stragglers(
    params: ReducerParams, seed: int, *, rounds: int = 12, timeout: int = 3000, world: int | None = None, **job: Any
) -> Script:
    """Every chunk misses somebody until its time is up: voters, abstainers, and those who come too late or never."""
    rng = random.Random(f"udp:stragglers:{seed}")
    config = draw_job(
        params,
        rng,
        0,
        1,
        (0, params.slots),
        **{"kind": "straggler", "world": world or params.workers, "timeout": timeout, **job},
    )
    flow = Flow(params, Network.draw(rng), 0, config, rng)
    members = flow.traffic.members
    steps: list[Step] = [Open(0, config)]
    for first in range(0, rounds * params.slots, params.slots):
        late: list[Send] = []
        sent: list[Send] = []
        for chunk in range(first, first + params.slots):
            lines = rng.randint(1, params.lines_per_chunk)
            for worker in rng.sample(members, len(members)):
                vote = flow.traffic.vote(worker, chunk, lines)[0].payload
                abstain = flow.traffic.abstain(worker, chunk, lines)
                frame = flow.framed(worker, rng.choice([vote, vote, vote, abstain]), "contribute")
                (late if rng.random() < 0.4 else sent).append(frame)
        rng.shuffle(sent)
        rng.shuffle(late)
        steps += [*sent, Expire(), *late[: rng.randint(0, len(late))]]
    return Script("stragglers", seed, params, flow.network, (*steps, Check()), timeout=timeout)


def _directed(name: str, params: ReducerParams, seed: int, flow: Flow, chunks: int) -> Script:
    return Script(name, seed, params, flow.network, (Open(flow.bank, flow.config), *flow.chunks(chunks), Check()))


SCRIPTS: dict[str, Callable[..., Script]] = {
    "random": random_traffic,
    "one_slot": one_slot,
    "slot_counts": slot_counts,
    "full_rate": full_rate,
    "long_stall": long_stall,
    "stragglers": stragglers,
    "every_encoding": every_encoding,
    "worlds": worlds,
}
