"""Run functions of test modules on several local ranks, with a deadline.

    def test_something(run_ranks):                      # the fixture of conftest.py
        run_ranks(__file__, "check_something", world=3, fast=True)

A pool of processes per world size keeps its gloo group over all tests, because importing torch takes longer than most
checks. Every rank imports the test module by its path and calls the function with (rank, world, **options). When a rank
fails or the deadline passes, the test fails with the output of all ranks, and the pool is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

COLLECTIVE_LIMIT = timedelta(seconds=60)
GRACE = 5.0
"""Seconds that the other ranks get to say what they noticed when one has failed."""


class Pool:
    """``world`` rank processes, waiting for work."""

    def __init__(self, world):
        self.world = world
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.logs = [Path(self.folder.name) / f"rank{rank}.log" for rank in range(world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(rank), str(world), self.folder.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=environment,
                    text=True,
                )
            self.processes.append(process)

    def run(self, path, function, deadline, options):
        """Run one check; returns None, or what went wrong."""
        command = json.dumps({"path": str(path), "function": function, "options": options}) + "\n"
        for process in self.processes:
            process.stdin.write(command)
            process.stdin.flush()
        end = time.monotonic() + deadline
        errors, waiting = {}, set(range(self.world))
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    for rank in waiting:
                        errors[rank] = f"no answer after {deadline} s" if not errors else "waited for the others"
                    break
                for key, _ in ready:
                    line = key.fileobj.readline()
                    answer = json.loads(line) if line else f"died with status {self.processes[key.data].wait()}"
                    selector.unregister(key.fileobj)
                    waiting.discard(key.data)
                    if answer is not None:
                        errors[key.data] = answer
                        end = min(end, time.monotonic() + GRACE)
        if not errors:
            return None
        texts = [f"--- rank {rank}: {errors[rank]}\n{self.logs[rank].read_text()[-3000:]}" for rank in sorted(errors)]
        return "\n".join(texts)

    def close(self):
        """End all ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
        self.folder.cleanup()


class Pools:
    """One pool per world size, made when first needed."""

    def __init__(self):
        self._pools = {}

    def run(self, path, function, world, *, deadline=120.0, **options):
        """Raise ``AssertionError`` unless the check ends well on every rank before ``deadline`` seconds."""
        if world not in self._pools:
            self._pools[world] = Pool(world)
        trouble = self._pools[world].run(path, function, deadline, options)
        if trouble is not None:
            self._pools.pop(world).close()
            raise AssertionError(f"{function}({options}) on {world} ranks\n{trouble}")

    def close(self):
        """End all pools."""
        while self._pools:
            self._pools.popitem()[1].close()


def _serve():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a check prints must not look like an answer
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT
    )
    modules = {}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            path = command["path"]
            if path not in modules:
                spec = importlib.util.spec_from_file_location(f"checks_{len(modules)}", path)
                modules[path] = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = modules[path]
                spec.loader.exec_module(modules[path])
            getattr(modules[path], command["function"])(rank, world, **command["options"])
            dist.barrier()
            answer = None
        except BaseException:
            answer = traceback.format_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
