"""Profiles in the hook: phases, alarms, probes, checkpoints, and what runs tell of themselves."""

import io
import json
import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.model.encoding import TERNARY
from neuron_fabric.runtime import attach
from neuron_fabric.runtime.envelope import ENTRY, Envelopes
from neuron_fabric.runtime.layout import BucketLayout, sections_of
from neuron_fabric.runtime.plan import Region
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.steering import ordered_float, ordered_key
from neuron_fabric.runtime.telemetry import JsonLines
from neuron_fabric.runtime.transports.base import BucketVotes, SectionVotes, VotesKind
from neuron_fabric.runtime.votes import VoteStatistics

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

PROFILE = """
schema_version: 1
name: test
regions:
  - {name: head, patterns: ["4.*"], encoding: fp32}
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body, error_feedback: {clip: 1.0}}
phases: {warmup_steps: 4}
health: {settle_steps: 10}
recovery: {cool_down_steps: 6, trial_steps: 5, probe_interval: 0}
"""


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5))


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * SEED + 10 * step + rank)
    x = torch.randn(16, 40, generator=generator)
    return x, x[:, :5].argmax(1)


class Run:
    """A small training run; every rank makes the same model."""

    def __init__(self, rank, text=PROFILE, fp32="allreduce", transport="allgather"):
        torch.manual_seed(SEED)
        self.rank, self.step = rank, 0
        self.ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
        self.state = attach(self.ddp, loads(text), transport, fp32=fp32)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.05, momentum=0.9)
        self.records = []
        self.state.telemetry = self.records.append

    def train(self, steps, loss_shown=None):
        for _ in range(steps):
            x, y = batch(self.rank, self.step)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            shown = loss.item() if loss_shown is None else loss_shown(self.step, loss.item())
            self.state.observe(shown, self.optimizer.param_groups[0]["lr"])
            loss.backward()
            self.optimizer.step()
            self.step += 1

    def modes(self):
        return [record["routes"]["body"]["reason"] for record in self.records]

    def parameters(self):
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()])

    def checkpoint(self):
        file = io.BytesIO()
        torch.save(
            {
                "model": self.ddp.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "state": self.state.state_dict(),
                "step": self.step,
            },
            file,
        )
        return file.getvalue()

    def restore(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=True)
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["state"])
        self.step = saved["step"]


def same_everywhere(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    assert all(other == everybody[0] for other in everybody), everybody


# ---- checks that run on every rank -----------------------------------------------------------------------------------


def check_phases(rank, world):
    run = Run(rank)
    run.train(9)
    assert run.modes() == ["warmup"] * 4 + ["plan"] * 5
    assert [record["low_bit_share"] > 0.8 for record in run.records] == [False] * 4 + [True] * 5
    assert run.records[0]["sent_bytes"] > 8 * run.records[-1]["sent_bytes"] or world > 2
    assert run.state.fallbacks["warmup"] == 4
    assert "steps" in run.state.summary()
    same_everywhere([record["routes"] for record in run.records])
    run.state.close()


def check_ternary(rank, world, transport):
    """A ternary region votes when it may, also on a reducer that is asked what it can do; its votes are followed."""
    text = PROFILE.replace("{name: body,", "{name: body, encoding: ternary, gate: 0.5,")
    run = Run(rank, text, transport=transport)
    noted = []
    observe = run.state.steering.controller.observe
    run.state.steering.controller.observe = lambda *given, **named: (noted.append(given[0]), observe(*given, **named))[
        1
    ]
    run.train(9)
    assert run.modes() == ["warmup"] * 4 + ["plan"] * 5
    assert [record["low_bit_share"] > 0.8 for record in run.records] == [False] * 4 + [True] * 5
    assert all(0 < signals.unanimity["body"] < 0.9 and signals.tie_rate["body"] > 0.2 for signals in noted[4:])
    same_everywhere([(signals.unanimity, signals.margin, signals.scale) for signals in noted])
    run.state.close()


def check_alarm_and_return(rank, world):
    """One rank's loss alone is enough, all leave at the same step, and all come back."""
    run = Run(rank)
    run.train(45, lambda step, loss: math.nan if step == 20 and rank == world - 1 else loss)
    modes = run.modes()
    # Step 20 is over when it becomes known, and the plan of step 21 was agreed then.
    assert modes[20:22] == ["plan", "plan"]
    assert modes[22] == "health_not_finite"
    away = modes[22:].index("plan")
    assert 6 <= away <= 12, modes
    assert set(modes[22 + away :]) == {"plan"}
    assert run.records[20]["alarms"]
    same_everywhere(modes)
    run.state.close()


def check_probes(rank, world):
    run = Run(rank, PROFILE.replace("probe_interval: 0", "probe_interval: 5"))
    plain = Run(rank, PROFILE.replace("warmup_steps: 4", "warmup_steps: 1000"))
    run.train(4)
    plain.train(4)
    assert torch.equal(run.parameters(), plain.parameters()) or world > 2
    run.train(1)
    plain.train(1)
    assert run.modes()[4] == "probe"
    # A probe's step is FP32's.
    assert torch.allclose(run.parameters(), plain.parameters(), rtol=1e-5, atol=1e-7)
    assert run.records[4]["up_bits"] > plain.records[4]["up_bits"]
    heard = []
    run.state.steering.note_cosine = lambda region, cosine: heard.append((region, cosine))
    run.train(5)
    assert run.modes()[9] == "probe"
    ((region, cosine),) = heard
    assert region == "body"
    assert 0.5 < cosine < 1
    same_everywhere(heard)
    for each in (run, plain):
        each.state.close()


def check_resume(rank, world, transport):
    whole = Run(rank, fp32="ordered", transport=transport)
    whole.train(8)
    saved = whole.checkpoint()
    whole.train(8)
    resumed = Run(rank, fp32="ordered", transport=transport)
    resumed.restore(saved)
    resumed.train(8)
    assert torch.equal(whole.parameters(), resumed.parameters())
    assert whole.state.residuals.keys() == resumed.state.residuals.keys() != set()
    for name, residual in whole.state.residuals.items():
        assert torch.equal(residual, resumed.state.residuals[name])
    assert whole.modes()[8:] == resumed.modes()
    # Buckets are laid out anew, so what is padded differs; what was to be sent does not.
    for name in ("steps", "elements", "low_bit_elements"):
        assert whole.state.traffic.as_dict()[name] == resumed.state.traffic.as_dict()[name]
    # A record is one step's, whatever was counted before it.
    assert [r["low_bit_elements"] for r in whole.records[8:]] == [r["low_bit_elements"] for r in resumed.records]
    same_everywhere(resumed.modes())
    for each in (whole, resumed):
        each.state.close()


def check_states_that_do_not_fit(rank, world):
    run = Run(rank)
    good = run.state.state_dict()
    for change, message in (
        ({"version": 9}, "version 9"),
        ({"rank": rank + 1}, "save one a rank"),
        ({"steering": None}, "has a profile"),
        ({"residuals": {"nobody": torch.zeros(3)}}, "'nobody'"),
    ):
        with pytest.raises(ValueError, match=message):
            run.state.load_state_dict(good | change)
    # Another world size: residuals begin anew.
    run.train(6)
    assert any(residual.any() for residual in run.state.residuals.values())
    run.state.load_state_dict(run.state.state_dict() | {"world": world + 1})
    assert not any(residual.any() for residual in run.state.residuals.values())
    run.state.close()


def check_ordered_is_the_sum_in_rank_order(rank, world):
    run = Run(rank, PROFILE.replace("warmup_steps: 4", "warmup_steps: 1000"), fp32="ordered")
    gradients = []
    for each in range(world):
        model = Net()
        model.load_state_dict(run.ddp.module.state_dict())
        x, y = batch(each, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append([p.grad * (1.0 / world) for p in model.parameters()])
    run.train(1)
    for index, parameter in enumerate(run.ddp.parameters()):
        total = gradients[0][index].clone()
        for other in gradients[1:]:
            total += other[index]
        assert torch.equal(parameter.grad, total)
    run.state.close()


def check_another_profile_on_one_rank(rank, world):
    text = PROFILE.replace("warmup_steps: 4", f"warmup_steps: {4 + rank}")
    with pytest.raises(ValueError, match="plan and transport"):
        attach(DistributedDataParallel(Net()), loads(text))


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("transport", ["allgather", "golden"])
def test_a_ternary_region_of_a_profile(run_ranks, transport):
    run_ranks(__file__, "check_ternary", 2, transport=transport)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "check",
    [
        "check_phases",
        "check_alarm_and_return",
        "check_probes",
        "check_states_that_do_not_fit",
        "check_ordered_is_the_sum_in_rank_order",
        "check_another_profile_on_one_rank",
    ],
)
def test_with_a_profile(run_ranks, check, world):
    run_ranks(__file__, check, world)


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "transport"), [(2, "allgather"), (3, "allgather"), (3, "collective")])
def test_resuming_is_bitwise(run_ranks, world, transport):
    run_ranks(__file__, "check_resume", world, transport=transport)


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=8))
def test_keys_have_the_order_of_their_floats(values):
    assert ordered_float(max(map(ordered_key, values))) == max(values)
    for value in values:
        assert ordered_float(ordered_key(value)) == value


def test_a_maximum_keeps_nan_and_forgets_nothing():
    assert math.isnan(ordered_float(max(ordered_key(math.nan), ordered_key(math.inf))))
    assert ordered_float(max(ordered_key(None), ordered_key(-math.inf))) == -math.inf
    assert ordered_float(ordered_key(None)) is None


def votes_of(planes, numels, region=None, world=None):
    """A layout of segments of these sizes, and votes of it.

    ``planes`` has a bit for every element: of shape (world, planes, elements) for rows, (planes, elements) for a tally
    of ``world`` workers.
    """
    ends = np.cumsum(numels).tolist()
    placed = [(f"p{end}", end - numel, numel, region or Region("r")) for numel, end in zip(numels, ends, strict=True)]
    segments, sections = sections_of(placed)
    layout = BucketLayout(ends[-1], segments, (), sections, len(numels))
    words = np.zeros((*planes.shape[:-1], sections[0].words), np.uint64)
    for segment in segments:
        part = np.zeros((*planes.shape[:-1], 64 * -(-segment.numel // 64)), np.uint8)
        part[..., : segment.numel] = planes[..., segment.elements]
        words[..., segment.words] = np.packbits(part, axis=-1, bitorder="little").view(np.uint64)
    entries = np.zeros((world or len(planes), len(segments)), ENTRY)
    entries["l1"] = 1.0
    entries["sent"] = numels
    kind = VotesKind.ROWS if world is None else VotesKind.TALLY
    return layout, BucketVotes(Envelopes(entries), (SectionVotes(kind, words),))


def test_shares_of_few_elements_are_exact():
    rng = np.random.default_rng(SEED)
    numels = [3, 64, 100, 500]
    rows = rng.integers(0, 2, (4, sum(numels)), dtype=np.uint8)
    rows[:, :60] = rows[0, :60]
    layout, votes = votes_of(rows[:, None], numels)
    statistics = VoteStatistics(4)
    statistics.add(layout, votes)
    sums = np.abs(4 - 2 * rows.sum(0, dtype=int))
    whole = [slice(0, 3), slice(3, 67), slice(67, 131), slice(167, 615)]  # whole words, where there is one
    seen = np.concatenate([sums[part] for part in whole])
    unanimity, ties, margin = statistics.shares()
    assert unanimity["r"] == (seen == 4).mean()
    assert ties["r"] == (seen == 0).mean()
    assert margin["r"] == pytest.approx(seen.mean() / 4)


def test_tallies_say_the_same_as_rows():
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, 2, (5, 700), dtype=np.uint8)
    layout, votes = votes_of(rows[:, None], [700])
    counts = rows.sum(0)
    planes = np.stack([counts >> bit & 1 for bit in range(3)])
    _layout, tally = votes_of(planes, [700], world=5)
    by_rows, by_tally = VoteStatistics(5), VoteStatistics(5)
    by_rows.add(layout, votes)
    by_tally.add(layout, tally)
    assert by_rows.shares() == by_tally.shares()


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_shares_of_ternary_votes(world):
    rng = np.random.default_rng(SEED)
    region = Region("r", route="ternary")
    votes = rng.choice([-1, 0, 1], (world, 500), p=[0.3, 0.3, 0.4])
    votes[:, :40] = votes[0, :40]
    votes[0, 100:] = 0  # one worker sends few
    rows = np.stack([votes > 0, votes < 0], axis=1)
    sums = votes.sum(0)
    planes = np.stack([sums >> bit & 1 for bit in range(TERNARY.tally_bits(world))])
    sent = np.count_nonzero(votes, axis=1)
    shares = []
    for layout, votes_given in (votes_of(rows, [500], region), votes_of(planes, [500], region, world)):
        votes_given.envelopes.sent[:, 0] = sent
        statistics = VoteStatistics(world)
        statistics.add(layout, votes_given)
        shares.append(statistics.shares())
    assert shares[0] == shares[1]
    unanimity, ties, margin = shares[0]
    seen = sums[:448]  # the whole words
    assert unanimity["r"] == min(1, (abs(seen) == world).sum() / (448 * (sent.min() / 500)))
    assert ties["r"] == (seen == 0).mean()
    assert margin["r"] == pytest.approx(abs(seen).mean() / world)


def test_segments_with_an_abstainer_and_majorities_are_left_out():
    rows = np.zeros((4, 64), np.uint8)
    layout, votes = votes_of(rows[:, None], [64])
    majority = SectionVotes(VotesKind.MAJORITY, votes.sections[0].words[:2, 0])
    statistics = VoteStatistics(4)
    statistics.add(layout, BucketVotes(votes.envelopes, (majority,)))
    votes.envelopes.voters[0] = 3
    statistics.add(layout, votes)
    assert statistics.shares() == ({}, {}, {})
    assert statistics.scales().keys() == {"r"}


def test_lines_of_json(tmp_path):
    sink = JsonLines(tmp_path / "run.jsonl")
    sink({"step": 0, "loss": math.nan, "routes": {"a": {"low_bit": True}}, "alarms": [math.inf]})
    sink({"step": 1})
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "loss": None, "routes": {"a": {"low_bit": True}}, "alarms": [None]}, {"step": 1}]
