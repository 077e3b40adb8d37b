"""Process groups and collectives, where versions of torch differ or their defaults do not fit."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "borrow_group", "give_back_group", "timeout_of"]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of equally large tensors into one, under the name that this torch does not call deprecated."""

_DEFAULT_TIMEOUT = timedelta(minutes=5)
_MOST_SPARE = 32


class _Lent:
    """A group and whether it is in use on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.in_use = True


_lent: dict[dist.ProcessGroup, list[_Lent]] = {}
"""By the group they are like. All ranks of that group have the same list, since making one is a collective."""


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of ``group`` may take on the CPU."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout


def borrow_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``group``, with its timeout, that nobody else uses. A collective of those ranks.

    Groups are lent and given back instead of made and destroyed: a rank that destroys one may cut off another that is
    not quite done with it, and torch gives the next one of the same ranks the same name.
    """
    lent = _lent.setdefault(group, [])
    # A group may be free here and not yet on another rank; only one that is free everywhere can be used again.
    busy = torch.ones(_MOST_SPARE, dtype=torch.int64)
    for index, each in enumerate(lent[:_MOST_SPARE]):
        busy[index] = int(each.in_use)
    dist.all_reduce(busy, dist.ReduceOp.MAX, group=group)
    for index, taken in enumerate(busy.tolist()):
        if not taken:
            lent[index].in_use = True
            return lent[index].group
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend="gloo",
        # Only the members of this group are here; without this every rank of the job would have to call.
        use_local_synchronization=True,
    )
    lent.append(_Lent(made))
    return made


def give_back_group(group: dist.ProcessGroup, own: dist.ProcessGroup) -> None:
    """Say that ``own``, borrowed for ``group``, is idle and in step on this rank."""
    for each in _lent.get(group, []):
        if each.group is own:
            each.in_use = False
