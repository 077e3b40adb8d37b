"""What the hook keeps and takes, byte by byte, is what it declares.

Tensors are found by the garbage collector and numpy's arrays by tracemalloc, so these figures do not depend on the
machine; ``neuron-fabric bench memory`` measures whole processes.
"""

import gc
import os
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, Region, Route, attach
from neuron_fabric.runtime import hook as hook_module
from neuron_fabric.runtime.codec import codec_backend
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.reasons import Reason

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SLACK = 24 << 10
"""Envelopes, tables, samples of votes, scalars: nothing that grows with the number of elements."""
SIZES = {"a": (512, 700), "c": (700, 300), "b": (300,), "d": (90, 1000)}

PROBING = """
schema_version: 1
name: probing
regions: [{name: body}]
phases: {warmup_steps: 0}
health: {correlation_bound: 1, correlation_release: 1}
recovery: {probe_interval: 3}
"""


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self):
        super().__init__()
        for name, shape in SIZES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, coefficients):
        return sum((getattr(self, name) * value).sum() for name, value in coefficients.items())


def tensors():
    """All storages that Python knows of, by their address; whoever keeps them keeps the address from another's use."""
    gc.collect()
    # Of other classes are those without memory that a compiled model leaves behind.
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in {torch.Tensor, nn.Parameter}]
    return {storage.data_ptr(): storage for storage in storages}


def arrays():
    """Bytes of numpy's arrays that were made since tracing began."""
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([domain]).traces)


class Watched:
    """A DDP model whose gradients are given, and the bytes that its state adds.

    Whatever was there before ``attach`` is not counted, and neither are gradients and DDP's buckets.
    """

    def __init__(self, rank, plan, transport):
        generator = torch.Generator().manual_seed(SEED + rank)
        self.given = {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}
        self.ddp = DistributedDataParallel(Given(), bucket_cap_mb=1.2)
        codec_backend()  # loads code, which is slow while memory is traced
        self._others = tensors()
        tracemalloc.start()
        self.state = attach(self.ddp, plan, transport)
        launch = self.state.launch

        def watched(bucket):
            storage = bucket.buffer().untyped_storage()
            self._others[storage.data_ptr()] = storage
            return launch(bucket)

        self.state.launch = watched

    def step(self):
        self.ddp(self.given).backward()
        if self.state._worker is not None:  # the thread that gave back the last bucket may not be through with it
            through = threading.Event()
            self.state._worker.submit(through.set)
            assert through.wait(60)

    def bytes(self):
        gradients = [p.grad for p in self.ddp.parameters() if p.grad is not None]
        others = self._others.keys() | {gradient.untyped_storage().data_ptr() for gradient in gradients}
        return sum(storage.nbytes() for at, storage in tensors().items() if at not in others) + arrays()

    def close(self):
        tracemalloc.stop()
        self.state.close()


def check_kept(rank, world, plan, transport):
    """At the end of backward, when all buckets are held, there is what was declared: no more and no less."""
    feedback = ErrorFeedback(1.0)
    plan = {
        "binary": Plan((Region("all", ("*",), error_feedback=feedback),)),
        "ternary": Plan((Region("all", ("*",), Route.TERNARY, error_feedback=feedback),)),
        "mixed": Plan((Region("kept", ("a",), Route.FP32), Region("all", ("*",), error_feedback=feedback))),
    }[plan]
    run = Watched(rank, plan, transport)
    state, seen, original = run.state, [], hook_module.agree_on_outcome

    def watched(*args, **options):
        seen.append((run.bytes(), state.declared_bytes()))
        return original(*args, **options)

    run.step()
    run.step()  # now the buckets are laid out for good
    hook_module.agree_on_outcome = watched
    try:
        run.step()
        after = run.bytes()
    finally:
        hook_module.agree_on_outcome = original
    ((held, declared),) = seen
    assert declared["residuals"] == sum(residual.nbytes for residual in state.residuals.values())
    assert (declared["remainders"] > 0) == (state.traffic.elements > state.traffic.low_bit_elements)
    expected = sum(declared.values()) - declared["scratch"]
    assert abs(held - expected) <= SLACK, (held, declared)
    kept = declared["residuals"] + declared["messages"]
    assert abs(after - kept) <= SLACK, (after, declared)
    assert expected > kept + 2 * SLACK  # else these two would be one
    run.close()


def check_probe(rank, world):
    """A probe decodes a parameter at a time, and compares it piece by piece."""
    run = Watched(rank, loads(PROBING), "allgather")
    reasons, peaks = [], []
    run.state.telemetry = lambda record: reasons.append(record["routes"]["body"]["reason"])
    for _ in range(6):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run.step()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)  # of numpy, and of Python itself
    assert [reason == Reason.PROBE.value for reason in reasons] == [False, False, True] * 2
    declared = run.state.declared_bytes()
    decoded = 4 * 512 * 700
    assert peaks[4] <= declared["planes"] + 4 * SLACK, peaks
    assert decoded < peaks[5] <= declared["planes"] + declared["scratch"] + 4 * SLACK, (peaks, declared)
    assert decoded < declared["scratch"] < 2 * decoded
    run.close()


def check_nothing(rank, world):
    """An all-FP32 plan declares nothing and has nothing."""
    run = Watched(rank, Plan(), "collective")
    for _ in range(3):
        run.step()
    assert not any(run.state.declared_bytes().values())
    assert run.bytes() < SLACK
    run.close()


@pytest.mark.distributed
@pytest.mark.parametrize("transport", ["allgather", "collective"])
@pytest.mark.parametrize("plan", ["binary", "ternary", "mixed"])
def test_what_is_kept_is_what_is_declared(run_ranks, plan, transport):
    run_ranks(__file__, "check_kept", 2, plan=plan, transport=transport)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_probe", "check_nothing"])
def test_scratch(run_ranks, check):
    run_ranks(__file__, check, 2)
