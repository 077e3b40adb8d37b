"""Names of collectives that differ between versions of torch."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["all_gather_single"]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of equally large tensors into one, under the name that this torch does not call deprecated."""
