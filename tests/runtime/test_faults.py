"""Faults on purpose: they do what they say, for as long as they say, and the monitor notices."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import Plan, attach
from neuron_fabric.runtime.codec import codec_backend, count_table, words_for
from neuron_fabric.runtime.faults import VoteBias, _BiasedKernels, bias_votes
from neuron_fabric.runtime.loop import train_run
from neuron_fabric.runtime.plan import ErrorFeedback, Region, ResultFormat
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.workloads.digits import DigitsWorkload

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

PROFILE = """
schema_version: 1
name: digits
regions:
  - {name: head, patterns: ["head.*"], encoding: fp32}
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body}
phases: {warmup_steps: 20}
recovery: {cool_down_steps: 30, trial_steps: 10}
"""
FIRST, LAST = 90, 114


# ---- checks that run on every rank -----------------------------------------------------------------------------------


def check_bias(rank, world, feedback, majority):
    """Outside the fault nothing is changed; within, zeros, ties and stuck lanes come out as +1 times the scale."""
    model = nn.Linear(64, 4, bias=False)
    ddp = DistributedDataParallel(model)
    region = Region(
        "all",
        error_feedback=ErrorFeedback() if feedback else None,
        result_format=ResultFormat.MAJORITY if majority else ResultFormat.TALLY,
    )
    state = attach(ddp, Plan((region,)), "allgather")
    bias_votes(state, 1, 2, stuck_share=0.25)
    with pytest.raises(ValueError, match="has a fault already"):
        bias_votes(state, 4, 5)
    x = torch.full((4, 64), -1.0 if rank % 2 else 1.0)  # the ranks disagree everywhere: ties at two workers
    x[:, :2] = -1.0  # but not here
    stuck = torch.zeros(64, dtype=torch.bool)
    stuck[::4] = True
    for step in range(4):
        ddp.zero_grad()
        for residual in state.residuals.values():
            residual.zero_()
        (ddp(x) * torch.arange(1.0, 5.0)[:, None].T).sum().backward()
        gradient = model.weight.grad
        if step in (1, 2):
            tied = torch.ones(64, dtype=torch.bool)
            tied[:2] = False
            assert (gradient[:, tied | stuck] > 0).all()
            assert (gradient[:, ~tied & ~stuck] < 0).all()
        else:
            assert (gradient[:, 2:] == 0).all()
            assert (gradient[:, :2] < 0).all()
    state.close()


def check_zeros(rank, world):
    """Half the gradient is exactly zero on every rank: +1 within the fault, cancelling over two steps without."""
    model = nn.Linear(64, 4, bias=False)
    ddp = DistributedDataParallel(model)
    state = attach(ddp, Plan((Region("all", error_feedback=ErrorFeedback(clip=0.0)),)), "allgather")
    bias_votes(state, 2, 3)
    x = torch.full((4, 64), -1.0)
    x[:, 32:] = 0
    pairs = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(x).sum().backward()
        pairs.append(model.weight.grad[:, 32:].clone())
    assert torch.equal(pairs[0] + pairs[1], torch.zeros(4, 32))
    assert (pairs[2] > 0).all()
    assert torch.equal(pairs[2], pairs[3])
    with pytest.raises(ValueError, match="cannot begin now, before step 4"):
        bias_votes(state, 3, 9)
    state.close()


def check_positive_zeros(rank, world):
    """A region that says so does the same without a fault, and no guard takes it off the low-bit route."""
    for zeros, stays in (("positive", True), ("parity", False)):
        model = nn.Linear(64, 4, bias=False)
        ddp = DistributedDataParallel(model)
        state = attach(ddp, Plan((Region("all", zeros=zeros),)), "allgather")
        x = torch.full((4, 64), -1.0)
        x[:, 8:] = 0
        for _ in range(4):
            ddp.zero_grad()
            ddp(x).sum().backward()
        assert (state.fallbacks["sparse"] == 0) is stays
        assert bool((model.weight.grad[:, 8:] > 0).all()) is stays
        state.close()


def check_monitor(rank, world):
    """The same fault twice: a monitored run leaves within ten steps and comes back, the other one is hurt."""
    task = DigitsWorkload(width=8, batch=16, epochs=4)
    profile = loads(PROFILE)
    scores, runs = {}, {}
    for monitored in (True, False):
        votes = []

        def attached(ddp, monitored=monitored, votes=votes):
            state = attach(ddp, profile if monitored else profile.plan(), "allgather")
            state.telemetry = lambda record: votes.append(record["low_bit_elements"] > 0)
            bias_votes(state, FIRST, LAST, stuck_share=0.5)
            return state

        run = runs[monitored] = train_run(task, SEED, attached)
        scores[monitored] = run.score
        if monitored:
            assert all(votes[20:FIRST])
            left = votes[FIRST:].index(False)
            assert 2 <= left <= 10
            assert not any(votes[FIRST + left : LAST + 1])
            assert any(votes[LAST + 1 :])
    within = {key: np.mean(run.losses[LAST - 5 : LAST]) for key, run in runs.items()}
    assert within[False] > 1.5 * within[True], within
    assert scores[True] > 85
    assert scores[False] < scores[True] - 5, scores


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("majority", [False, True])
def test_a_bias_lasts_as_long_as_it_should(run_ranks, feedback, majority):
    run_ranks(__file__, "check_bias", 2, feedback=feedback, majority=majority)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_zeros", "check_positive_zeros"])
def test_zeros_vote_plus_one(run_ranks, check):
    run_ranks(__file__, check, 2)


@pytest.mark.distributed
def test_the_monitor_leaves_and_comes_back_and_without_it_training_is_hurt(run_ranks):
    run_ranks(__file__, "check_monitor", 2, deadline=280.0)


@pytest.mark.parametrize(("share", "lanes"), [(0.0, 0), (0.25, 16), (0.5, 32), (1.0, 64)])
def test_stuck_lanes_are_spread_over_a_word(share, lanes):
    passing = int(VoteBias(stuck_share=share).passing)
    assert 64 - passing.bit_count() == lanes
    assert passing == int(np.uint64(passing))


@pytest.mark.parametrize("elements", [5, 64, 130])
def test_lanes_behind_the_end_stay_zero(elements):
    kernels = _BiasedKernels(codec_backend(), VoteBias(stuck_share=1.0))
    gradient = -np.ones(elements, np.float32)
    words = np.zeros(words_for(elements), np.uint64)
    assert kernels.encode_binary(gradient, 1, words) == (elements, 0)
    assert not words.any()
    positive, negative = words.copy(), words.copy()
    _, sent, _ = kernels.encode_ternary(gradient, 0.5, positive, negative)
    assert sent == elements
    assert not negative.any()
    assert sum(int(word).bit_count() for word in positive) == elements
    # Whoever abstains stays out of it.
    positive[:] = 0
    kernels.encode_ternary(np.zeros(elements, np.float32), 0.5, positive, negative)
    assert not positive.any()


def test_what_is_no_tie_decodes_as_before():
    table = count_table(4, 4, np.float32(2), 4)
    biased = _BiasedKernels(codec_backend(), VoteBias())._biased(table)
    assert biased[:5].tolist() == [2.0, 1.0, 2.0, -1.0, -2.0]
    untouched = _BiasedKernels(codec_backend(), VoteBias(ties=False))._biased(table)
    assert untouched is table


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ValueError, match="stuck_share must be 0 to 1"):
        VoteBias(stuck_share=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zeros": "negative"}, "zeros vote by parity or positive, not 'negative'"),
        ({"zeros": "positive", "route": "ternary"}, "zeros vote on the binary route alone, not on ternary"),
    ],
)
def test_regions_refuse_zeros_they_do_not_know(options, message):
    with pytest.raises(ValueError, match=message):
        Region("r", **options)
