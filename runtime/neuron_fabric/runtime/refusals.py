"""What of DistributedDataParallel cannot work with the hook, refused by name before anything is registered.

Only what is certain to fail, to hang, or to be silently wrong is here. What a plan asks of parameters (float32, no
sparse gradients) is refused by :meth:`neuron_fabric.runtime.plan.Plan.bind`.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.plan import bound_parameters

__all__ = ["refuse_options", "require_ddp"]


def require_ddp(model: object) -> DistributedDataParallel:
    """Give ``model`` back if it is a DDP model; ``TypeError`` that says what to do if not.

    This cannot be agreed on with other ranks: what has no process group has nobody to ask.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    name = type(model).__name__
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, DistributedDataParallel):
        raise TypeError(
            f"{name} is a compiled DistributedDataParallel: attach to the DDP model first, then compile it with "
            "torch.compile(ddp)"
        )
    if isinstance(model, nn.Module):
        raise TypeError(
            f"{name} is no DistributedDataParallel: wrap the model first, ddp = DistributedDataParallel(model), and "
            "attach to ddp"
        )
    raise TypeError(f"attach needs a DistributedDataParallel model, not {name}")


def refuse_options(ddp: DistributedDataParallel) -> None:
    """Raise for the first thing about a DDP model with which the hook cannot work.

    Raises
    ------
    RuntimeError
        If the model has a communication hook, since DDP takes one and never gives it back.
    ValueError
        For an option of DDP, an optimizer in the backward pass, or a parameter that is not on the CPU.
    """
    # Attributes of DDP that older versions of torch do not have count as not set.
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "torch._dynamo's python_reducer gives a communication hook single gradients instead of buckets: leave "
            "torch._dynamo.config.optimize_ddp at its default"
        )
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise ValueError(
            "DDP option delay_all_reduce_named_params: its parameters are averaged by an all-reduce of DDP's own, past "
            "any plan; build the DDP model without it"
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "DDP option mixed_precision registers a communication hook of its own; use torch.autocast and, with "
            "float16, torch.amp.GradScaler instead"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "DDP option skip_all_reduce_unused_params leaves buckets out, and a step that waits for its last bucket "
            "would hang; build the DDP model without it"
        )
    parameters = bound_parameters(ddp.module)
    for name, parameter in parameters.items():
        if getattr(parameter, "_in_backward_optimizers", None):
            raise ValueError(
                f"parameter {name!r} has an optimizer in the backward pass (_apply_optimizer_in_backward), for which "
                "DDP needs the communication hook itself; step the optimizer after the backward pass"
            )
        if parameter.device.type != "cpu":
            raise ValueError(f"parameter {name!r} is on {parameter.device}: only CPU tensors are supported")
    hook = _registered_hook(ddp)
    if hook is not None:
        raise RuntimeError(
            f"the DDP model has a communication hook already ({hook}), and register_comm_hook takes only one: attach "
            "once, or wrap the bare model in a new DistributedDataParallel"
        )


def _registered_hook(ddp: DistributedDataParallel) -> str | None:
    """The name of the communication hook, one that is built into torch included; None if there is none."""
    hooks = getattr(ddp, "_comm_hooks", ())
    if hooks:
        return str(getattr(hooks[0][0], "__qualname__", hooks[0][0]))
    # A built-in hook leaves its name in the log only.
    logged: str | None = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    return logged
