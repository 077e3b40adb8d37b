"""Uneven inputs: by how many workers a gradient is divided while some have joined.

In ``ddp.join()`` a rank that has run out of inputs runs the hook with buckets of zeros, so it abstains from every vote
and adds zero to every sum. By default DDP goes on dividing by all workers. With ``divide_by_initial_world_size=False``
it divides by those that still have inputs, and tells a communication hook nothing of it; so the hook asks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["gradient_divisor"]


def gradient_divisor(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> int:
    """By how many workers the gradients of the backward pass that runs are to be divided, the same on all ranks.

    To be called from the communication hook, at the first bucket, on every rank. Only where the answer is not the world
    size anyhow is this a collective, and waits for the other ranks.
    """
    joining = getattr(ddp, "_join_config", None)
    if joining is None or not joining.enable or ddp._divide_by_initial_world_size:
        return group.size()
    # A joined rank calls the hook from no backward pass.
    active = torch.tensor([int(torch._C._current_graph_task_id() != -1)])
    dist.all_reduce(active, group=group)
    return int(active)
