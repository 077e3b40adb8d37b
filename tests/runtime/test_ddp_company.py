"""The hook in company: a second model on another group, the user's own collectives, and ranks that fail."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, attach
from neuron_fabric.runtime.profile import loads

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
print(f"NEURON_FABRIC_SEED={SEED}")
LOW_BIT = Plan.low_bit(one_d_fp32=True, error_feedback=ErrorFeedback(clip=1.0))
PROFILE = """
schema_version: 1
name: company
regions:
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body, error_feedback: {clip: 1.0}}
phases: {warmup_steps: 2}
"""
TIMEOUT = 3.0
"""Seconds that a collective may take in a group with a rank that fails."""


def plans():
    return {
        "fp32": (Plan.fp32(), "allgather"),
        "at once": (Plan.low_bit(), "allgather"),
        "two stages": (Plan.low_bit(), "collective"),
        "held": (LOW_BIT, "allgather"),
        "held, two stages": (LOW_BIT, "collective"),
        "golden": (LOW_BIT, "golden"),
        "profile": (loads(PROFILE), "allgather"),
    }


class Net(nn.Sequential):
    def __init__(self, width=40):
        super().__init__(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, width), nn.Tanh(), nn.Linear(width, 3))


def wrap(plan, transport="allgather", *, width=40, group=None):
    torch.manual_seed(SEED + width)
    ddp = DistributedDataParallel(Net(width), bucket_cap_mb=0.005, process_group=group)
    return ddp, None if plan is None else attach(ddp, plan, transport)


def inputs(rank, step):
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(10_000 * SEED + 100 * step + rank))


def descend(ddp, rate=0.1):
    with torch.no_grad():
        for p in ddp.parameters():
            p -= rate * p.grad
            p.grad = None


def flat(ddp):
    return torch.cat([p.detach().reshape(-1).clone() for p in ddp.parameters()])


def alone(plan, transport, rank, width, steps, group=None):
    """The parameters after training one model by itself."""
    ddp, state = wrap(plan, transport, width=width, group=group)
    for step in range(steps):
        ddp(inputs(rank, step)).square().mean().backward()
        descend(ddp)
    if state is not None:
        state.close()
    return flat(ddp)


# ---- company ---------------------------------------------------------------------------------------------------------


def check_two_models(rank, world):
    """Two models on two groups, in one backward pass and in turns: each trains as it does alone, bit for bit."""
    other = dist.new_group(list(range(world)))
    steps = 6
    for name, (plan, transport) in plans().items():
        want = (alone(plan, transport, rank, 40, steps), alone(plan, transport, rank, 24, steps, other))
        if name == "fp32" and world == 2:
            assert torch.equal(want[0], alone(None, None, rank, 40, steps))
        (a, state_a), (b, state_b) = wrap(plan, transport), wrap(plan, transport, width=24, group=other)
        for step in range(steps):
            x = inputs(rank, step)
            if step % 3 == 0:
                (a(x).square().mean() + b(x).square().mean()).backward()
            elif step % 3 == 1:
                loss_a, loss_b = a(x).square().mean(), b(x).square().mean()
                loss_b.backward()
                loss_a.backward()
            else:
                a(x).square().mean().backward()
                b(x).square().mean().backward()
            descend(a)
            descend(b)
        assert torch.equal(flat(a), want[0]), name
        assert torch.equal(flat(b), want[1]), name
        assert state_a.step == state_b.step == steps
        state_a.close()
        state_b.close()


def check_own_collectives(rank, world):
    """Collectives of the user between and inside of backward passes, on DDP's group and on another."""
    other = dist.new_group(list(range(world)))
    steps, total = 5, world * (world + 1) // 2
    for name, (plan, transport) in plans().items():
        want = alone(plan, transport, rank, 40, steps)
        ddp, state = wrap(plan, transport)
        sums = []

        def add_up(gradient, group, sums=sums):
            mine = torch.tensor([rank + 1])
            dist.all_reduce(mine, group=group)
            sums.append(int(mine))
            return gradient

        for parameter, group in ((ddp.module[4].weight, None), (ddp.module[2].bias, other), (ddp.module[0].bias, None)):
            parameter.register_hook(lambda gradient, group=group: add_up(gradient, group))
        for step in range(steps):
            pending = torch.tensor([rank + 1.0])
            work = dist.all_reduce(pending, group=other, async_op=True)  # in flight over the whole step
            ddp(inputs(rank, step)).square().mean().backward()
            gathered = [torch.zeros(1) for _ in range(world)]
            dist.all_gather(gathered, torch.tensor([float(rank)]))
            work.wait()
            assert [int(each) for each in gathered] == list(range(world))
            assert pending.item() == total
            descend(ddp)
        assert sums == [total] * 3 * steps, name
        assert torch.equal(flat(ddp), want), name
        state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", ["check_two_models", "check_own_collectives"])
def test_in_company(run_ranks, check, world):
    run_ranks(__file__, check, world)


# ---- ranks that fail -------------------------------------------------------------------------------------------------


class InjectedError(Exception):
    pass


def check_a_batch_is_skipped(rank, world):
    """An exception in the forward pass that the user handles costs nobody anything."""
    for plan, transport in plans().values():
        want = alone(plan, transport, rank, 40, 4)
        ddp, state = wrap(plan, transport)
        for step in range(4):
            if step == 2 and rank == 0:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    ddp(torch.zeros(8, 19))
            ddp(inputs(rank, step)).square().mean().backward()
            descend(ddp)
        assert torch.equal(flat(ddp), want)
        state.close()


def fails(where, rank, group, plan, transport):
    """Train until the last rank fails; what this rank gets, and after how many seconds."""
    ddp, state = wrap(plan, transport, group=group)
    for step in range(3):
        ddp(inputs(rank, step)).square().mean().backward()
        descend(ddp)

    def break_off(*_arguments):
        raise InjectedError(f"in the {where} pass")

    broken = rank == dist.get_world_size() - 1
    if broken and where == "forward":
        ddp.module[2].register_forward_pre_hook(break_off)
    elif broken:
        # Not the first gradient that is made, so that some buckets are on their way already.
        ddp.module[0].weight.register_hook(break_off)
    caught = None
    start = time.monotonic()
    try:
        ddp(inputs(rank, 3)).square().mean().backward()
    except Exception as error:
        caught = error
    state.close()
    return caught, time.monotonic() - start, broken


def check_one_rank_fails(rank, world, name, where):
    """The one that fails says why; the others get the reason within their group's timeout; nobody hangs at the end."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=TIMEOUT))
    plan, transport = plans()[name]
    alone(plan, transport, rank, 40, 2)  # whatever has to be compiled is
    dist.barrier()
    caught, seconds, broken = fails(where, rank, group, plan, transport)
    if broken:
        assert isinstance(caught, InjectedError), caught
    else:
        assert caught is not None, "a backward pass cannot end without a rank"
        text = str(caught).lower()
        assert "timed out" in text or "timeout" in text or "connection closed" in text, caught
    # Each of the buckets that are in flight may take its time; they run out together, not one after the other.
    assert seconds < 4 * TIMEOUT, seconds
    # The job may go on, with a group that is in step.
    dist.barrier()
    alone(plan, transport, rank, 40, 1)


@pytest.mark.distributed
def test_a_forward_pass_that_fails_and_is_done_again(run_ranks):
    run_ranks(__file__, "check_a_batch_is_skipped", 2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fp32", "forward"),
        ("held, two stages", "forward"),
        ("fp32", "backward"),
        ("at once", "backward"),
        ("two stages", "backward"),
        ("held", "backward"),
        ("held, two stages", "backward"),
        ("profile", "backward"),
    ],
)
def test_a_rank_that_fails_leaves_no_other_waiting(run_ranks, name, where):
    run_ranks(__file__, "check_one_rank_fails", 2, name=name, where=where, deadline=60.0)
