"""Uneven inputs: ``ddp.join()`` with the hook, beside plain DDP."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, Route, attach
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.transports import TRANSPORTS

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
print(f"NEURON_FABRIC_SEED={SEED}")
PROFILE = """
schema_version: 1
name: uneven
regions:
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body, error_feedback: {clip: 1.0}}
phases: {warmup_steps: 1}
"""


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(20, 60), nn.ReLU(), nn.BatchNorm1d(60), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)
        )


class Weight(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 21))
        self.bias = nn.Parameter(torch.zeros(21))

    def forward(self, x):
        return (self.weight * x).sum() + (self.bias * x[0]).sum()


def gradient(rank, step):
    return torch.randn(30, 21, generator=torch.Generator().manual_seed(10_000 * SEED + 100 * step + rank))


def lengths(world):
    """Steps of each rank; the last has most."""
    return [2 + 2 * rank for rank in range(world)]


def train(rank, world, plan, *, by_initial, transport="allgather", fp32="allreduce", accumulate=False, **options):
    torch.manual_seed(SEED)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01, **options)
    state = None if plan is None else attach(ddp, plan, transport, fp32=fp32)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(SEED + rank)
    history = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(lengths(world)[rank]):
            optimizer.zero_grad()
            if accumulate:
                with ddp.no_sync():
                    ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
            history.append(torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))
    if state is not None:
        assert state.step == max(lengths(world)), "a rank that has joined goes along with every step"
    # DDP ends with the model of who came last, on all ranks.
    history.append(torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))
    everybody = [torch.empty_like(history[-1]) for _ in range(world)]
    dist.all_gather(everybody, history[-1])
    assert all(torch.equal(history[-1], other) for other in everybody)
    assert torch.isfinite(history[-1]).all()
    # And goes on as usual.
    if not accumulate:
        ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
    if state is not None:
        state.close()
    return history


def check_fp32_is_plain_ddp(rank, world):
    for by_initial in (True, False):
        for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"accumulate": True}):
            want = train(rank, world, None, by_initial=by_initial, **options)
            got = train(rank, world, Plan.fp32(), by_initial=by_initial, **options)
            for step, pair in enumerate(zip(got, want, strict=True)):
                assert torch.equal(*pair), (by_initial, options, step)
        got = train(rank, world, Plan.fp32(), by_initial=by_initial, fp32="ordered")
        want = train(rank, world, None, by_initial=by_initial)
        torch.testing.assert_close(got[-1], want[-1], rtol=1e-4, atol=1e-6)


def check_low_bit_goes_along(rank, world):
    for by_initial in (True, False):
        feedback = ErrorFeedback()
        for plan in (
            Plan.low_bit(),
            Plan.low_bit(error_feedback=feedback),
            Plan.low_bit(route=Route.TERNARY, error_feedback=feedback),
            loads(PROFILE),
        ):
            for transport in TRANSPORTS:
                train(rank, world, plan, by_initial=by_initial, transport=transport)


def check_the_votes_of_those_who_have_inputs(rank, world, transport):
    """Each step by the definition: who has joined abstains, and the divisor is as DDP's."""
    for by_initial in (True, False):
        ddp = DistributedDataParallel(Weight())
        plan = Plan.low_bit(one_d_fp32=True, error_feedback=ErrorFeedback(clip=None, decay=0.0))
        state = attach(ddp, plan, transport)
        before = None
        with ddp.join(divide_by_initial_world_size=by_initial):
            for step in range(lengths(world)[rank]):
                ddp.zero_grad()
                ddp(gradient(rank, step)).backward()
                active = [each for each in range(world) if step < lengths(world)[each]]
                given = torch.stack([gradient(each, step) for each in active])
                divisor = world if by_initial else len(active)
                scale = given.double().abs().mean().float()
                want = scale * given.sign().sum(0) / divisor
                torch.testing.assert_close(ddp.module.weight.grad, want, rtol=1e-6, atol=1e-8)
                torch.testing.assert_close(ddp.module.bias.grad, given[:, 0].sum(0) / divisor, rtol=1e-5, atol=1e-6)
                before = state.residuals["weight"].clone()
        assert torch.equal(state.residuals["weight"], before), "who has joined keeps its residual"
        state.close()


def check_ternary_votes(rank, world, transport):
    """The same of ternary votes, with a gate that lets everything through."""
    ddp = DistributedDataParallel(Weight())
    state = attach(ddp, Plan.low_bit(one_d_fp32=True, route=Route.TERNARY, gate=0.0), transport)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(lengths(world)[rank]):
            ddp.zero_grad()
            ddp(gradient(rank, step)).backward()
            given = torch.stack([gradient(each, step) for each in range(world) if step < lengths(world)[each]])
            want = given.double().abs().mean().float() * given.sign().sum(0) / len(given)
            torch.testing.assert_close(ddp.module.weight.grad, want, rtol=1e-6, atol=1e-8)
    state.close()


def check_early_end(rank, world):
    """With throw_on_early_termination all ranks stop together, as in plain DDP."""
    for plan in (None, Plan.fp32(), Plan.low_bit(error_feedback=ErrorFeedback())):
        torch.manual_seed(SEED)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
        state = None if plan is None else attach(ddp, plan, "collective")
        done = []

        def train_to_the_end(ddp=ddp, done=done):
            with ddp.join(throw_on_early_termination=True):
                for step in range(lengths(world)[rank]):
                    ddp(torch.randn(8, 20)).square().mean().backward()
                    done.append(step)

        message = "exhausted all inputs" if rank == 0 else "at least one rank that exhausted inputs"
        with pytest.raises(RuntimeError, match=message):
            train_to_the_end()
        assert len(done) == lengths(world)[0]
        if state is not None:
            assert state.step == len(done)
            state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", ["check_fp32_is_plain_ddp", "check_low_bit_goes_along", "check_early_end"])
def test_uneven_inputs(run_ranks, check, world):
    run_ranks(__file__, check, world)


@pytest.mark.distributed
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_has_joined_abstains(run_ranks, transport):
    run_ranks(__file__, "check_the_votes_of_those_who_have_inputs", 3, transport=transport)
    run_ranks(__file__, "check_ternary_votes", 3, transport=transport)
