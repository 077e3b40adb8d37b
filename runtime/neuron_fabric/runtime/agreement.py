"""What the ranks must agree on, and how they find out in time that they do not."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from neuron_fabric.runtime.collectives import all_gather_single
from neuron_fabric.runtime.plan import bound_parameters

__all__ = ["agree_on_outcome", "agree_ready", "check_same", "describe_model"]

_MOST_BYTES = 1 << 24


def describe_model(module: nn.Module) -> list[str]:
    """One line per trained parameter: name, shape and dtype, in the module's order."""
    return [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in bound_parameters(module).items()]


def check_same(what: str, lines: list[str], group: dist.ProcessGroup | None = None) -> None:
    """Raise ``ValueError`` on every rank if ``lines`` differ between ranks, naming the first difference.

    A collective: all ranks of ``group`` must call it. ``lines`` may be of different lengths.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = "\n".join(lines).encode()
    digests = torch.empty(world * 32, dtype=torch.uint8)
    digest = torch.frombuffer(bytearray(hashlib.sha256(mine).digest()), dtype=torch.uint8)
    all_gather_single(digests, digest, group=group)
    if (digests.view(world, 32) == digest).all(1).all():
        return
    # Only now, when there is something to report, does anybody send the text itself.
    length = torch.tensor([min(len(mine), _MOST_BYTES)])
    lengths = torch.empty(world, dtype=torch.int64)
    all_gather_single(lengths, length, group=group)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: int(length)] = torch.from_numpy(np.frombuffer(mine[: int(length)], np.uint8).copy())
    texts = torch.empty(world * padded.numel(), dtype=torch.uint8)
    all_gather_single(texts, padded, group=group)
    everybody = [
        bytes(text[: int(n)].numpy()).decode(errors="replace").split("\n")
        for text, n in zip(texts.view(world, -1), lengths, strict=True)
    ]
    for other, theirs in enumerate(everybody):
        for number, (a, b) in enumerate(itertools.zip_longest(everybody[0], theirs, fillvalue="nothing")):
            if a != b:
                raise ValueError(
                    f"rank {rank}: the ranks do not have the same {what}: entry {number} is {a!r} on rank 0 and {b!r} "
                    f"on rank {other}"
                )
    raise ValueError(f"rank {rank}: the ranks do not have the same {what}")


def agree_ready(problem: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank if any rank has a problem: its own where it has one, else that some other rank has.

    So a rank that cannot go on does not leave the others waiting for it. A collective.
    """
    failed = torch.tensor([int(problem is not None)])
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if problem is not None:
        raise problem
    if failed.item():
        raise RuntimeError(f"rank {group.rank()}: another rank cannot attach; its own error says why")


def agree_on_outcome(
    failed: list[bool], not_finite: bool, digest: int, group: dist.ProcessGroup, told: Sequence[int] = ()
) -> tuple[list[bool], bool, list[int]]:
    """What the ranks tell each other once at the end of a backward pass, in one MAX all-reduce.

    Parameters
    ----------
    failed : list of bool
        Which of the step's buckets failed on this rank.
    not_finite : bool
        Whether this rank saw a gradient that is not finite.
    digest : int
        Stands for the plan of the next step; below 2**62 and the same on all ranks.
    group : ProcessGroup
    told : sequence of int
        Anything else; of each the maximum counts.

    Returns
    -------
    failed, not_finite, told
        On any rank.

    Raises
    ------
    RuntimeError
        On every rank, if the digests differ.
    """
    # The maximum of (x, -x) over ranks is (max, -min): equal ends mean that all ranks have the same x.
    outcome = torch.tensor([digest, -digest, int(not_finite), *map(int, failed), *told], dtype=torch.int64)
    dist.all_reduce(outcome, dist.ReduceOp.MAX, group=group)
    if int(outcome[0]) != -int(outcome[1]):
        raise RuntimeError("the ranks have come to different plans for the next step")
    rest = 3 + len(failed)
    return outcome[3:rest].bool().tolist(), bool(outcome[2]), outcome[rest:].tolist()
