"""States that were saved, damaged, and are taken over or refused without any change."""

import copy
import io
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, attach
from neuron_fabric.runtime.checkpoint import read_state, read_steering
from neuron_fabric.runtime.profile import loads

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
print(f"NEURON_FABRIC_SEED={SEED}")
PROFILE = """
schema_version: 1
name: damaged
regions:
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: hidden, patterns: ["0.*"], sensitivity: 1, error_feedback: {clip: 1.0}}
  - {name: table, patterns: ["2.*"]}
  - {name: body, error_feedback: {clip: 1.0}}
phases: {warmup_steps: 2}
health: {settle_steps: 2}
recovery: {cool_down_steps: 2, trial_steps: 6, probe_interval: 5}
"""


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3)
        )


class Run:
    """A short training with all that a state can hold: an alarm, a region that turned out sparse, a loss scale."""

    def __init__(self, rank, text=PROFILE):
        torch.manual_seed(SEED)
        self.rank, self.step = rank, 0
        self.ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
        self.state = attach(self.ddp, loads(text) if text else Plan.low_bit(error_feedback=ErrorFeedback()))
        # Three columns of four get no gradient, and so this layer leaves the binary route.
        self.ddp.module[2].weight.register_hook(lambda gradient: gradient * (torch.arange(24) % 4 == 0))

    def train(self, steps):
        for _ in range(steps):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10_000 * SEED + 10 * self.step + self.rank))
            self.state.loss_scale = 2.0 ** (self.step // 3)
            loss = self.ddp(x).square().mean()
            self.state.observe(math.nan if self.step == 7 else loss.item(), 0.05)
            (loss * self.state.loss_scale).backward()
            with torch.no_grad():
                for p in self.ddp.parameters():
                    p -= 0.05 / self.state.loss_scale * p.grad
                    p.grad = None
            self.step += 1

    def parameters(self):
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()])


def same(a, b):
    """Deep equality; of tensors bitwise, of numbers with their types."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def places(state, path=()):
    """The paths of everything in a state, containers included."""
    yield path
    if isinstance(state, dict):
        for key, value in state.items():
            yield from places(value, (*path, key))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            yield from places(value, (*path, index))


def at(state, path):
    for key in path:
        state = state[key]
    return state


class Hostile:
    """What says yes to everything."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_arguments):
        return self

    def __deepcopy__(self, memo):
        return self

    def __int__(self):
        return 1


WRONG_TYPE = {
    dict: [None, [], "text", 1, Hostile()],
    list: [None, {}, "text", 1, Hostile()],
    str: [None, 1, b"bytes", ["a"], Hostile()],
    bool: [None, 2, "true", Hostile(), torch.tensor(True)],
    int: [None, "1", 1.5, True, [1], 10**400, -(10**30), Hostile(), torch.tensor(1)],
    float: [None, "1.0", True, [1.0], math.nan, math.inf, Hostile(), torch.tensor(1.0)],
    torch.Tensor: [None, 1.0, [0.0], Hostile()],
    type(None): [{}, [], 1, "text", Hostile()],
}

FREE = ("fallbacks", "zero_share", "averages", "withdrawn")
"""Dicts that may have any of their entries or none."""


def of_wrong_type(value):
    kind = torch.Tensor if isinstance(value, torch.Tensor) else type(value)
    if isinstance(value, torch.Tensor):
        n = value.numel()
        return [
            *WRONG_TYPE[torch.Tensor],
            value.double(),
            value[:-1],
            torch.zeros(n + 1),
            value.view(1, n),
            torch.zeros(n, dtype=torch.int32),
            torch.full((n,), math.nan),
            value.to_sparse(),
            torch.empty(n, device="meta"),
        ]
    return WRONG_TYPE[kind]


def check_damaged(rank, world, text):
    run, twin = Run(rank, text), Run(rank, text)
    for each in (run, twin):
        each.train(11)
    good = run.state.state_dict()
    if text:
        assert good["steering"]["controller"]["spent"] == 1, "there was an alarm"
        assert good["sparse"] == ["2.weight"], "the state has what it is to have"
        assert good["steering"]["controller"]["withdrawn"] == {"table": "sparse"}
    assert good["loss_scale"] == 8.0
    everything = [path for path in places(good) if path]
    assert len(everything) > (100 if text else 20)
    told = []

    @seed(SEED)
    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def damage(data):
        path = data.draw(st.sampled_from(everything))
        state = copy.deepcopy(good)
        parent, key = at(state, path[:-1]), path[-1]
        keyed = isinstance(parent, dict)
        how = data.draw(st.sampled_from(["drop", "type", "add"] if keyed else ["type"]))
        fixed = len(path) < 2 or path[-2] not in FREE
        if how == "drop":
            if not fixed:
                return  # these may have any of their entries
            del parent[key]
        elif how == "add":
            parent["unheard of"] = parent[key] if fixed else Hostile()
        else:
            parent[key] = data.draw(st.sampled_from(of_wrong_type(parent[key])))
            if "alarms" in path and isinstance(parent[key], float):
                return  # what a signal read may be not finite
        with pytest.raises(ValueError, match=r"state|region|profile|counter") as caught:
            run.state.load_state_dict(state)
        told.append(str(caught.value))
        assert same(run.state.state_dict(), good), (path, how)

    damage()
    assert len(told) > 200
    assert all(len(message) < 400 for message in told), max(told, key=len)
    for each in (run, twin):
        each.train(8)
    assert torch.equal(run.parameters(), twin.parameters()), "behaviour has changed"
    assert same(run.state.state_dict(), twin.state.state_dict())
    for each in (run, twin):
        each.state.close()


def check_inconsistent(rank, world):
    """Of the right types, and still no state."""
    run = Run(rank)
    run.train(4)
    good = run.state.state_dict()

    def change(path, value):
        state = copy.deepcopy(good)
        at(state, path[:-1])[path[-1]] = value
        return state

    controller = ("steering", "controller")
    for path, value, message in (
        (("version",), 2, "version 2 where 1 is known"),
        (("world",), 65, "world: .*less than or equal to 64"),
        (("loss_scale",), 0.0, "loss_scale: .*greater than 0"),
        (("zero_share", "nobody"), 0.5, "a parameter 'nobody', which this model has not"),
        (("sparse",), ["nobody"], "a parameter 'nobody', which this model has not"),
        (("residuals", "0.weight"), torch.zeros(12, 24), r"of shape \(12, 24\) and must be torch.float32 of shape"),
        (("residuals",), {}, "only this plan has a residual of parameter '0.weight'"),
        (("traffic",), {}, "counter '.*' is missing"),
        ((*controller, "mode"), "asleep", "controller.mode: "),
        ((*controller, "stage"), 2, "stage 2 of 2 classes"),
        ((*controller, "withdrawn"), {"nobody": "sparse"}, "'nobody' was withdrawn"),
        ((*controller, "withdrawn"), {"body": "tired"}, "withdrawn.body: "),
        ((*controller, "step"), 99, "a decision of step 4 beside a controller at 99"),
        ((*controller, "health", "step"), 99, "health knows of step 99"),
        ((*controller, "health", "loss", "variance"), -1.0, "variance: .*greater than or equal to 0"),
        (("steering", "current", "routes"), {}, "regions are not those of the controller"),
        (("steering",), None, "one of the two runs has a profile"),
    ):
        with pytest.raises(ValueError, match=message):
            run.state.load_state_dict(change(path, value))
        assert same(run.state.state_dict(), good), path
    for nothing in (None, [], "state", 1):
        with pytest.raises(ValueError, match="state: the whole: "):
            run.state.load_state_dict(nothing)
        with pytest.raises(ValueError, match="steering state: the whole: "):
            run.state.steering.load_state_dict(nothing)
    # A run whose reducer was too slow goes on where nothing costs anything.
    for gate in (elsewhere := copy.deepcopy(good))["steering"]["controller"]["admission"]["cost"].values():
        gate["is_open"] = False
    run.state.load_state_dict(elsewhere)
    assert run.state.steering.next.routes["body"].low_bit
    run.state.load_state_dict(good)
    # What is refused last, by the admission's part, after health could have been taken over.
    for part in ("votes", "bounds"):
        state = copy.deepcopy(good)
        held = state["steering"]["controller"]["health"][part]
        held["other"] = held.pop("body")
        with pytest.raises(ValueError, match="region"):
            run.state.load_state_dict(state)
        assert same(run.state.state_dict(), good), part
    state = copy.deepcopy(good)
    state["steering"]["controller"]["health"]["loss"]["count"] += 1
    state["steering"]["controller"]["admission"]["cost"]["other"] = {"is_open": True, "since": 0}
    with pytest.raises(ValueError, match="'other'"):
        run.state.load_state_dict(state)
    assert same(run.state.state_dict(), good)
    run.state.close()


def check_saved(rank, world):
    """A state is tensors and plain values: it comes back whole through ``torch.load(weights_only=True)``."""
    for text in (PROFILE, None):
        run = Run(rank, text)
        for _ in range(4):
            state, file = run.state.state_dict(), io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert same(loaded, state)
            read_state(loaded)
            if text:
                read_steering(loaded["steering"])
            other = Run(rank, text)
            other.state.load_state_dict(loaded)
            assert same(other.state.state_dict(), state)
            # It is a copy: what happens to either afterwards leaves the other alone.
            for residual in loaded["residuals"].values():
                residual.fill_(7.0)
            assert same(other.state.state_dict(), state)
            other.state.close()
            run.train(4)
        run.state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("text", [PROFILE, None], ids=["profile", "plan"])
def test_a_damaged_state_is_refused_and_changes_nothing(run_ranks, text):
    run_ranks(__file__, "check_damaged", 2, text=text)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_inconsistent", "check_saved"])
def test_a_state_that_is_none_and_one_that_is(run_ranks, check):
    run_ranks(__file__, check, 2)
