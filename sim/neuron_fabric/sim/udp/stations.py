"""Who is in the network around an endpoint, and the jobs that they run on it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from neuron_fabric.model.encoding import Encoding, encoding_by_name
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, Parent, Straggler
from neuron_fabric.sim.stimulus import encodings_for

__all__ = ["NEVER", "Network", "draw_job", "parent_at", "slot_ranges", "worker_at"]

NEVER = 1 << 31
"""A straggler timeout that no simulation reaches."""

_PORT = 20045
_ME = Endpoint(0x02_00_00_02_00_01, 0x0A_C8_00_01, _PORT)


def worker_at(bank: int, worker: int) -> Endpoint:
    """Where a worker of the job in a bank is."""
    return Endpoint(0x02_00_00_00_00_00 | bank << 8 | worker, 0x0A_00_00_01 | bank << 16 | worker << 8, 30000 + worker)


def parent_at(bank: int) -> Endpoint:
    """Where the parent reducer of the job in a bank is."""
    return Endpoint(0x02_00_00_01_00_00 | bank, 0x0A_64_00_01 | bank << 8, _PORT)


@dataclass(frozen=True)
class Network:
    """The endpoint's own addresses: ``me``, the group of its members, and the group of its parent."""

    me: Endpoint = _ME
    group: Endpoint | None = None
    listen: Endpoint | None = None

    @classmethod
    def draw(cls, rng: random.Random, group: bool | None = None) -> Network:
        """With or without groups."""
        to_all, heard = Endpoint.multicast("239.1.2.3", _PORT + 1), Endpoint.multicast("239.1.2.4", _PORT + 2)
        with_group = rng.random() < 0.6 if group is None else group
        return cls(group=to_all if with_group else None, listen=heard if rng.random() < 0.6 else None)


def slot_ranges(params: ReducerParams, jobs: int, rng: random.Random) -> list[tuple[int, int]]:
    """Disjoint ranges (base, count) of the pool, one per job, halved at random."""
    ranges = [(0, params.slots)]
    while len(ranges) < jobs or (rng.random() < 0.3 and any(count > 1 for _base, count in ranges)):
        base, count = ranges.pop(rng.choice([k for k, (_base, count) in enumerate(ranges) if count > 1]))
        ranges += [(base, count // 2), (base + count // 2, count // 2)]
    return rng.sample(ranges, jobs)


def draw_job(
    params: ReducerParams,
    rng: random.Random,
    bank: int,
    epoch: int,
    slots: tuple[int, int],
    *,
    kind: str = "any",
    encoding: Encoding | str | None = None,
    world: int | None = None,
    result_format: str | None = None,
    multicast: bool | None = None,
    margin: int | None = None,
    timeout: int = NEVER,
) -> JobConfig:
    """A job for a bank; what is not given is drawn.

    ``kind`` is "plain", "child", "straggler" or "any"; ``encoding`` may be its name. The job's number is the bank's:
    the same after it was reopened.
    """
    if kind == "any":
        kind = rng.choice(["plain", "plain", "child", "straggler"])
    if world is None:
        world = rng.randint(1, params.workers)
    workers = sorted(rng.sample(range(params.workers), world))
    kinds = [e for e in encodings_for(params, world) if kind != "straggler" or e.planes == 1]
    chosen = encoding_by_name(encoding) if isinstance(encoding, str) else encoding or rng.choice(kinds)
    form = "tally" if kind == "child" else (result_format or rng.choice(["tally", "majority"]))
    if margin is None:
        margin = rng.choice([0, 0, 1, rng.randint(0, world)])
    parent = None
    if kind == "child":
        below = world * chosen.leaves
        leaves = below
        while chosen.tally_bits(-(-(leaves + 1) // chosen.leaves)) <= params.acc_bits and rng.random() < 0.7:
            leaves += 1
        number = 0x5000 | bank << 4 | rng.randrange(16)
        parent = Parent(parent_at(bank), number, rng.randrange(0xFFFF), rng.randrange(1, 1 << 16), leaves)
    return JobConfig(
        0x1230 + 0x111 * bank,
        epoch,
        {worker: worker_at(bank, worker) for worker in workers},
        chosen,
        "majority" if form == "majority" else "tally",
        min(margin, (1 << params.acc_bits) - 1) if form == "majority" else 0,
        Straggler(timeout, rng.randint(1, world)) if kind == "straggler" else None,
        parent,
        rng.random() < 0.5 if multicast is None else multicast,
        *slots,
    )
