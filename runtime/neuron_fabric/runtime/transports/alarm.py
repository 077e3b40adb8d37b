"""A bell between ranks: who cannot go on rings it, so that the others do not wait out their time limit.

It is a counter in the store that the process group met in. Nothing depends on it but how long a failure takes: without
a store (it is not in torch's public interface) everybody just waits for as long as is allowed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

__all__ = ["Alarm"]


class Alarm:
    """One bell, the same on all ranks that give it one name.

    Parameters
    ----------
    name : str
        The same on all ranks of a job, and of no other.
    """

    def __init__(self, name: str) -> None:
        self._key = f"neuron-fabric/{name}"
        self._store: Any = None
        with contextlib.suppress(Exception):
            self._store = dist.distributed_c10d._get_default_store()
        self._known = self._read()

    def ring(self) -> None:
        """Tell the others; once until :meth:`reset` is enough."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.add(self._key, 1)

    def rings(self) -> bool:
        """Whether anybody has rung it since :meth:`reset`, oneself included."""
        return self._read() != self._known

    def reset(self) -> None:
        """Forget what has rung so far; after all ranks know of it."""
        self._known = self._read()

    def _read(self) -> int:
        if self._store is None:
            return 0
        try:
            return int(self._store.add(self._key, 0))
        except Exception:  # a store that is gone tells nothing, and the time limit holds
            self._store = None
            return self._known if hasattr(self, "_known") else 0
