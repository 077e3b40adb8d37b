"""Starts a command again on several local ranks, over gloo on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from neuron_fabric.runtime.codec import codec_backend

__all__ = ["COLLECTIVE_LIMIT", "launch", "launched", "process_group"]

COLLECTIVE_LIMIT = timedelta(seconds=120)
"""How long a collective of such a job may take."""


def launched() -> bool:
    """Whether this process is one of the ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(module: str, argv: Sequence[str], ranks: int) -> int:
    """Run ``python -m module argv`` on so many local ranks under torchrun; its exit status."""
    codec_backend()  # compiled once here, and not by every rank at the same time
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*torchrun, "-m", module, *argv], env=environment, check=False).returncode


@contextmanager
def process_group() -> Iterator[None]:
    """In one of the ranks: the default process group, and one thread of computation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
