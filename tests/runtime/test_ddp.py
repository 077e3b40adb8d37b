"""The features of DistributedDataParallel with the hook, each beside plain DDP.

Every feature trains four times on the same batches: without a hook, with an all-FP32 plan (bitwise the same), with a
low-bit plan and with a profile (the same bits on all ranks, finite, and it learns).
"""

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from neuron_fabric.runtime import ErrorFeedback, Plan, Region, Route, attach
from neuron_fabric.runtime.profile import loads

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
print(f"NEURON_FABRIC_SEED={SEED}")
LOW_BIT = Plan.low_bit(keep_fp32=["head.*"], one_d_fp32=True, error_feedback=ErrorFeedback(clip=1.0))
NO_FEEDBACK = Plan.low_bit(keep_fp32=["head.*"], one_d_fp32=True)
PROFILE = """
schema_version: 1
name: ddp
regions:
  - {name: head, patterns: ["head.*"], encoding: fp32}
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body, error_feedback: {clip: 1.0}}
phases: {warmup_steps: 3}
recovery: {probe_interval: 10}
"""


class Net(nn.Module):
    """``branch`` may be left out; layers may be of other dtypes than float32, or recomputed in the backward pass."""

    def __init__(self, dtypes=None, recompute=None):
        super().__init__()
        self.first = nn.Linear(40, 96)
        self.branch = nn.Linear(96, 96)
        self.second = nn.Linear(96, 64)
        self.head = nn.Linear(64, 5)
        self.recompute = recompute
        for name, dtype in (dtypes or {}).items():
            getattr(self, name).to(dtype)

    def forward(self, x, branch=True):
        x = self._layer(self.first, x).relu()
        if branch:
            if self.recompute is None:
                x = self._branch(x)
            else:
                x = checkpoint(self._branch, x, use_reentrant=self.recompute == "reentrant")
        return self._layer(self.head, self._layer(self.second, x).tanh()).float()

    def _branch(self, x):
        return x + self._layer(self.branch, x).tanh().to(x.dtype)

    @staticmethod
    def _layer(layer, x):
        return layer(x.to(layer.weight.dtype))


def batch(rank, step, size=32):
    generator = torch.Generator().manual_seed(100_000 * SEED + 100 * step + rank)
    x = torch.randn(size, 40, generator=generator)
    return x, x[:, :5].argmax(1)


def same_on_all_ranks(tensor):
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    for other in everybody:
        assert torch.equal(other, tensor)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


class Run:
    """One training; every rank makes the same model."""

    def __init__(
        self, rank, plan, *, model=None, rate=0.1, transport="allgather", fp32="allreduce", inside=False, **options
    ):
        torch.manual_seed(SEED)
        self.rank = rank
        net = Net(**(model or {}))
        net = torch.compile(net, backend="aot_eager") if inside else net
        self.ddp = DistributedDataParallel(net, **{"bucket_cap_mb": 0.01, **options})
        self.state = None if plan is None else attach(self.ddp, plan, transport, fp32=fp32)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), rate, momentum=0.9)
        self.losses, self.without_grad, self.records = [], [], []
        if self.state is not None:
            self.state.telemetry = self.records.append

    def loss(self, step, forward=None, **arguments):
        x, y = batch(self.rank, step)
        return nn.functional.cross_entropy((self.ddp if forward is None else forward)(x, **arguments), y)

    def votes(self):
        """Whether the body votes in the step that has just run."""
        return self.state.profile is None or self.records[-1]["routes"]["body"]["low_bit"]

    def parameters(self):
        return flat(self.ddp.parameters())

    def note(self, loss):
        """End of a step's backward pass: its loss over all ranks, and who has no gradient."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        self.without_grad.append([name for name, p in self.ddp.module.named_parameters() if p.grad is None])

    def learned(self):
        """Whether the loss has fallen by a fifth, from the first three steps to the last three."""
        return sum(self.losses[-3:]) < 0.8 * sum(self.losses[:3])

    def close(self):
        if self.state is not None:
            self.state.close()


# ---- one step of each feature ----------------------------------------------------------------------------------------


def step_plainly(run, step):
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward()
    return loss


def step_accumulating(run, step):
    """Two backward passes without and one with an all-reduce."""
    run.optimizer.zero_grad()
    for part in range(3):
        with run.ddp.no_sync() if part < 2 else nullcontext():
            loss = run.loss(3 * step + part) / 3
            loss.backward()
    return 3 * loss


def step_on_kept_gradients(run, step):
    """Gradients are zeroed in place, so that views into buckets stay."""
    run.optimizer.zero_grad(set_to_none=False)
    loss = run.loss(step)
    loss.backward()
    return loss


def step_without_branch(run, step):
    """The branch is unused on one rank in some steps, and on all in others."""
    run.optimizer.zero_grad()
    used = step % 4 != 3 and (step % 4 != 1 or run.rank != 0)
    residual = None if run.state is None else run.state.residuals.get("branch.weight")
    before = None if residual is None else residual.clone()
    loss = run.loss(step, branch=used)
    loss.backward()
    if residual is not None:
        assert torch.equal(residual, before) == (not used or not run.votes()), "a residual is spent only on a vote"
    return loss


def step_in_bfloat16(run, step):
    run.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run.loss(step)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in run.ddp.parameters())
    return loss


def step_clipped(run, step):
    loss = step_plainly(run, step)
    nn.utils.clip_grad_norm_(run.ddp.parameters(), 0.5)
    return loss


@dataclass
class Feature:
    """How to wrap, how to step, and for how long."""

    step: object = step_plainly
    options: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    steps: int = 24
    exact: bool = True
    """Whether an all-FP32 plan is bitwise plain DDP at three workers, too."""


FEATURES = {
    "nothing special": Feature(),
    "no_sync": Feature(step_accumulating, steps=16),
    "find_unused_parameters": Feature(step_without_branch, {"find_unused_parameters": True}),
    "static_graph": Feature(options={"static_graph": True}),
    "gradient_as_bucket_view": Feature(options={"gradient_as_bucket_view": True}),
    # Plain DDP divides a gradient that is already in its bucket after the sum, the others before.
    "kept views": Feature(step_on_kept_gradients, {"gradient_as_bucket_view": True}, exact=False),
    "kept gradients": Feature(step_on_kept_gradients),
    "views and unused": Feature(step_without_branch, {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "clipping": Feature(step_clipped),
    "autocast": Feature(step_in_bfloat16),
    "recomputation": Feature(model={"recompute": "plain"}),
    "reentrant recomputation": Feature(options={"static_graph": True}, model={"recompute": "reentrant"}),
    "batched_grad_copy": Feature(options={"batched_grad_copy": True}),
    "one bucket a parameter": Feature(options={"bucket_cap_mb_list": [1e-6]}),
}


def trained(run, feature):
    """Train; the parameters after each step."""
    history = []
    for step in range(feature.steps):
        loss = feature.step(run, step)
        run.note(loss)
        run.optimizer.step()
        history.append(run.parameters())
    run.close()
    return history


def check_feature(rank, world, name):
    feature = FEATURES[name]
    made = {"model": feature.model, **feature.options}
    plain = Run(rank, None, **made)
    want = trained(plain, feature)
    assert plain.learned(), plain.losses
    exact = Run(rank, Plan.fp32(), **made)
    for step, (got, wanted) in enumerate(zip(trained(exact, feature), want, strict=True)):
        if feature.exact or world == 2:
            assert torch.equal(got, wanted), step
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert exact.without_grad == plain.without_grad
    assert exact.state.step == feature.steps

    for plan, transport in ((LOW_BIT, "collective"), (loads(PROFILE), "allgather")):
        run = Run(rank, plan, transport=transport, **made)
        history = trained(run, feature)
        assert torch.isfinite(history[-1]).all()
        same_on_all_ranks(history[-1])
        assert run.learned(), run.losses
        assert run.without_grad == plain.without_grad
        assert run.state.step == feature.steps
        assert run.state.traffic.low_bit_elements > 0.5 * run.state.traffic.elements
        assert not any(reason.startswith("health") for reason in run.state.fallbacks)
        assert not torch.equal(history[-1], want[-1])


@pytest.mark.distributed
@pytest.mark.parametrize("name", FEATURES)
def test_two_ranks_with(run_ranks, name):
    run_ranks(__file__, "check_feature", 2, name=name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["no_sync", "find_unused_parameters", "kept views"])
def test_three_ranks_with(run_ranks, name):
    run_ranks(__file__, "check_feature", 3, name=name)


# ---- gradient scaling ------------------------------------------------------------------------------------------------

OVERFLOW = 20
STEPS = 50


def train_scaled(run, *, overflow=False, autocast=True, steps=STEPS):
    """Mixed precision with a GradScaler; the scale before each step, and the parameters after it.

    In step OVERFLOW the loss of the last rank alone overflows.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
    scales, history = [], [run.parameters()]
    for step in range(steps):
        scales.append(scaler.get_scale())
        if run.state is not None:
            run.state.loss_scale = scaler.get_scale()
        before = {} if run.state is None else {name: each.clone() for name, each in run.state.residuals.items()}
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = run.loss(step)
        overflows = overflow and step == OVERFLOW
        scaler.scale(loss * (math.inf if overflows and run.rank == dist.get_world_size() - 1 else 1.0)).backward()
        if overflows:
            assert not torch.isfinite(flat(p.grad for p in run.ddp.parameters())).all()
            for name, residual in before.items():
                assert torch.equal(run.state.residuals[name], residual), name
        run.note(loss)
        scaler.step(run.optimizer)
        scaler.update()
        history.append(run.parameters())
    run.close()
    return scales, history


def check_overflow(rank, world):
    plain = Run(rank, None)
    scales, want = train_scaled(plain, overflow=True)
    assert scales[OVERFLOW + 1] == scales[OVERFLOW] / 2, "the scale goes down"
    assert max(scales[OVERFLOW + 1 :]) > scales[OVERFLOW], "and comes back"
    for plan in (Plan.fp32(), LOW_BIT, NO_FEEDBACK, loads(PROFILE)):
        run = Run(rank, plan)
        their_scales, history = train_scaled(run, overflow=True)
        assert their_scales == scales
        assert torch.equal(history[OVERFLOW], history[OVERFLOW + 1]), "the step was skipped"
        assert not torch.equal(history[OVERFLOW + 1], history[OVERFLOW + 2])
        same_on_all_ranks(history[-1])
        assert run.learned(), run.losses
        assert all(torch.isfinite(residual).all() for residual in run.state.residuals.values())
        if plan == Plan.fp32():
            assert all(torch.equal(*pair) for pair in zip(history, want, strict=True))
        assert not any(reason.startswith("health") for reason in run.state.fallbacks), run.state.fallbacks


def check_scale_is_exact(rank, world):
    """Scales are powers of two, so in float32 they change no bit: of no vote, and of no residual that waits for one."""
    for transport in ("allgather", "collective"):
        scaled, bare = (Run(rank, LOW_BIT, transport=transport) for _ in range(2))
        scales, history = train_scaled(scaled, autocast=False, steps=30)
        assert len(set(scales)) > 3
        assert all(torch.equal(*pair) for pair in zip(history[1:], trained(bare, Feature(steps=30)), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_an_overflow_on_one_rank_is_skipped_by_all(run_ranks, world):
    run_ranks(__file__, "check_overflow", world)


@pytest.mark.distributed
def test_residuals_follow_the_loss_scale(run_ranks):
    run_ranks(__file__, "check_scale_is_exact", 2)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def check_dtype(rank, world, dtype):
    """Layers of another dtype keep it, averaged as plain DDP does, beside float32 layers that vote."""
    dtype = getattr(torch, dtype)
    model = {"dtypes": {"branch": dtype, "head": dtype}}
    plain = Run(rank, None, model=model)
    want = trained(plain, Feature())
    exact = Run(rank, Plan.fp32(), model=model)
    assert all(torch.equal(*pair) for pair in zip(trained(exact, Feature()), want, strict=True))
    plan = Plan((Region("other dtypes", ("branch.*", "head.*"), Route.FP32), *LOW_BIT.regions[1:]))
    mixed = PROFILE.replace('["head.*"]', '["branch.*", "head.*"]')
    for each, options in (
        (plan, {}),
        (plan, {"transport": "collective"}),
        (plan, {"fp32": "ordered"}),
        (Plan(), {"fp32": "ordered"}),
        (loads(mixed), {}),
    ):
        run = Run(rank, each, model=model, **options)
        first = Run(rank, None, model=model)
        for fresh in (run, first):
            step_plainly(fresh, 0)
        for (name, got), (_, wanted) in zip(
            run.ddp.module.named_parameters(), first.ddp.module.named_parameters(), strict=True
        ):
            assert got.grad.dtype == wanted.grad.dtype == got.dtype, name
            if name.startswith(("branch", "head")):
                assert torch.equal(got.grad, wanted.grad), name
        run.optimizer.step()
        history = trained(run, Feature())
        assert torch.isfinite(history[-1]).all()
        same_on_all_ranks(history[-1])
        assert run.learned(), run.losses
    with pytest.raises(ValueError, match=rf"'branch\.weight' is {dtype}; the low-bit route takes torch\.float32"):
        attach(DistributedDataParallel(Net(**model)), LOW_BIT)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_beside_votes(run_ranks, dtype):
    run_ranks(__file__, "check_dtype", 2, dtype=dtype)


# ---- compilation -----------------------------------------------------------------------------------------------------


def check_compiled(rank, world):
    """A model that is compiled before it is wrapped, and a DDP model that is compiled after the hook is attached."""
    for plan in (Plan.fp32(), LOW_BIT):
        # torch.compile cuts the graph at DDP's buckets, and takes none that are smaller than DDP's first.
        want = trained(Run(rank, plan, bucket_cap_mb=25), Feature(steps=6))[-1]
        for inside in (True, False):
            run = Run(rank, plan, bucket_cap_mb=25, inside=inside)
            forward = run.ddp if inside else torch.compile(run.ddp, backend="aot_eager")
            for step in range(6):
                run.optimizer.zero_grad()
                run.loss(step, forward).backward()
                run.optimizer.step()
            same_on_all_ranks(run.parameters())
            torch.testing.assert_close(run.parameters(), want, rtol=1e-3, atol=1e-4)
            assert run.state.step == 6
            assert set(run.state.regions) == {name for name, _ in Net().named_parameters()}
            run.close()


@pytest.mark.distributed
def test_compiled_models(run_ranks):
    run_ranks(__file__, "check_compiled", 2, deadline=200.0)
