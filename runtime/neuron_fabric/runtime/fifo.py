"""One thread that runs what it is given, in order: dependent collectives are launched from here only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Fifo"]


class Fifo:
    """A queue with one worker thread. Tasks handle their own exceptions; the waits inside them have limits."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        # A daemon, so that a collective that never completes cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after all that were submitted before. ``RuntimeError`` after :meth:`close`."""
        if self._closed:
            raise RuntimeError("the worker thread was closed")
        self._tasks.put(task)

    def close(self) -> None:
        """Finish what was submitted and end the thread; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and what it holds; the next one may be long in coming
