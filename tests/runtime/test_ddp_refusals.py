"""What of DDP cannot work with the hook: refused by name, on all ranks, with nothing left behind."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, attach, collectives
from neuron_fabric.runtime.refusals import refuse_options, require_ddp

PLAN = Plan.low_bit(error_feedback=ErrorFeedback())  # it needs a thread and a group, so that something could be left


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def left_behind():
    """Threads, and groups that are lent out."""
    lent = [each for those in collectives._lent.values() for each in those if each.in_use]
    return threading.active_count(), len(lent)


def trains(ddp, width=8):
    ddp.zero_grad()
    ddp(torch.ones(2, width)).square().mean().backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in ddp.parameters()])
    everybody = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, gradient)
    assert all(torch.equal(gradient, other) for other in everybody)
    assert gradient.any()


def optimizer_in_backward():
    from torch.distributed.optim import _apply_optimizer_in_backward  # slow to import, and warns

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model[2].parameters(), {"lr": 0.1})
    return DistributedDataParallel(model)


def delayed():
    model = Net()
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("2.weight", model[2].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )


def mixed_precision():
    return DistributedDataParallel(
        Net(), mixed_precision=torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.float16)
    )


def hooked():
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    return ddp


def hooked_by_torch():
    ddp = DistributedDataParallel(Net())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return ddp


def skipping():
    return DistributedDataParallel(Net(), find_unused_parameters=True, skip_all_reduce_unused_params=True)


def python_reducer():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DistributedDataParallel(Net())


def elsewhere():
    ddp = DistributedDataParallel(Net())
    ddp.module[2].bias = nn.Parameter(torch.zeros(4, device="meta"))
    return ddp


def sparse():
    return DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True)))


REFUSED = [
    (optimizer_in_backward, ValueError, r"'2\.weight' has an optimizer in the backward pass .*; step the optimizer"),
    (delayed, ValueError, "option delay_all_reduce_named_params: .*; build the DDP model without it"),
    (mixed_precision, ValueError, r"option mixed_precision registers a .*; use torch\.autocast"),
    (skipping, ValueError, "option skip_all_reduce_unused_params .* would hang; build the DDP model without it"),
    (python_reducer, ValueError, "python_reducer gives a communication hook single gradients"),
    (elsewhere, ValueError, r"'2\.bias' is on meta: only CPU tensors are supported"),
    (sparse, ValueError, r"layer '0' \(Embedding\) makes sparse gradients"),
    (hooked, RuntimeError, r"has a communication hook already \(allreduce_hook\), .*: attach once"),
    (hooked_by_torch, RuntimeError, r"communication hook already \(BuiltinCommHookType\.ALLREDUCE\)"),
]


def check_refused(rank, world):
    for make, error, message in REFUSED:
        ddp = make()
        before = left_behind()
        hooks = list(getattr(ddp, "_comm_hooks", ()))
        for plan in (Plan.fp32(), PLAN):
            with pytest.raises(error, match=message):
                attach(ddp, plan)
        assert left_behind() == before, make
        assert list(getattr(ddp, "_comm_hooks", ())) == hooks, make


def check_second_hook(rank, world):
    """The first state is not hurt by what is refused, and the model can go on with it."""
    ddp = DistributedDataParallel(Net())
    state = attach(ddp, PLAN)
    before = left_behind()
    with pytest.raises(RuntimeError, match=r"hook already \(neuron_fabric_hook\), and register_comm_hook takes only"):
        attach(ddp, PLAN)
    assert left_behind() == before
    trains(ddp)
    state.close()
    # DDP keeps a hook for ever; a new wrapping of the same model takes another.
    again = attach(DistributedDataParallel(ddp.module), PLAN)
    again.close()


def check_one_rank_only(rank, world):
    """What only one rank has all of them refuse: that one by name, the others since it cannot."""
    ddp = hooked() if rank == 1 else DistributedDataParallel(Net())
    before = left_behind()
    own = "communication hook already" if rank == 1 else f"rank {rank}: another rank cannot attach"
    with pytest.raises(RuntimeError, match=own):
        attach(ddp, PLAN)
    assert left_behind() == before
    if rank != 1:
        assert not ddp._comm_hooks
    trains(ddp)


def check_register_fails_late(rank, world):
    """Whatever DDP itself refuses gives thread and group back."""
    ddp = DistributedDataParallel(Net())

    def refuse(state, hook):
        raise RuntimeError("DDP says no")

    register, ddp.register_comm_hook = ddp.register_comm_hook, refuse
    threads, lent = left_behind()
    with pytest.raises(RuntimeError, match="DDP says no"):
        attach(ddp, PLAN)
    assert left_behind() == (threads, lent)
    ddp.register_comm_hook = register
    state = attach(ddp, PLAN)
    trains(ddp)
    state.close()


def check_no_ddp(rank, world):
    ddp = DistributedDataParallel(Net())
    for model, message in (
        (Net(), r"Net is no DistributedDataParallel: wrap the model first"),
        (torch.compile(ddp, backend="eager"), "attach to the DDP model first, then compile it"),
        (nn.DataParallel(Net()), "DataParallel is no DistributedDataParallel"),
        ("model", "attach needs a DistributedDataParallel model, not str"),
        (None, "not NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            attach(model, Plan.fp32())
    assert require_ddp(ddp) is ddp
    refuse_options(ddp)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    ["check_refused", "check_second_hook", "check_one_rank_only", "check_register_fails_late", "check_no_ddp"],
)
def test_what_cannot_work_is_refused_on_all_ranks_with_nothing_left_behind(run_ranks, check):
    run_ranks(__file__, check, 2)
