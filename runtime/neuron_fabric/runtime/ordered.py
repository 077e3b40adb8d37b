"""An FP32 average that is summed in rank order, so that its bits depend on nothing but the ranks' gradients.

An all-reduce sums each element in an order that follows from its place in the buffer; with three workers and more, the
same gradient in another bucket has other last bits, and a resumed run, whose buckets are laid out anew, is no longer
bitwise the interrupted one. Here every rank adds the parts of one shard in rank order. It sends as much as a ring
all-reduce does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from neuron_fabric.runtime.collectives import all_gather_single

__all__ = ["OrderedAverage"]


@dataclass(eq=False)
class OrderedAverage:
    """One average on its way.

    :meth:`start` runs in the hook's thread and launches the first of two collectives; :meth:`finish` runs in the worker
    thread when that is complete and launches the second on a process group of its own.
    """

    tensor: torch.Tensor
    incoming: torch.Tensor
    future: torch.futures.Future[list[torch.Tensor]]
    world: int

    @classmethod
    def start(cls, tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> OrderedAverage:
        """Send each rank its shard of ``tensor / divisor``; ``tensor`` (1-D, contiguous) is overwritten with that."""
        world = group.size()
        tensor.mul_(1.0 / divisor)  # as plain DDP
        shard = -(-tensor.numel() // world)
        outgoing = torch.zeros(shard * world, dtype=tensor.dtype)
        outgoing[: tensor.numel()] = tensor
        incoming = torch.empty_like(outgoing)
        work = dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)
        return cls(tensor, incoming, work.get_future(), world)

    def finish(self, own_group: dist.ProcessGroup) -> None:
        """Add the parts of this rank's shard in rank order, gather all shards into ``tensor``."""
        self.future.wait()
        parts = self.incoming.view(self.world, -1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        gathered = torch.empty(total.numel() * self.world, dtype=total.dtype)
        all_gather_single(gathered, total, group=own_group)
        self.tensor.copy_(gathered[: self.tensor.numel()])
