"""The training loop: the same runs for the same seeds, stops where it should, and closes what was attached."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from neuron_fabric.runtime import Plan, attach
from neuron_fabric.runtime.loop import train_run

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))


class Toy:
    """Noisy classes of random points: five steps an epoch, with dropout, in no time."""

    name, metric, epochs, batch, head = "toy", "accuracy", 3, 8, ("2.*",)

    def __init__(self, spoil=None):
        self.spoil = spoil
        """Rank and step whose loss is NaN."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))

    def optimizer(self, model, total_steps):
        self.total_steps = total_steps
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_steps)

    def steps_per_epoch(self, world):
        return 5

    def batches(self, epoch, seed, rank, world):
        for step in range(5):
            generator = torch.Generator().manual_seed(1000 * seed + 100 * epoch + 10 * step + rank)
            x = torch.randn(self.batch, 6, generator=generator)
            if self.spoil == (rank, 5 * epoch + step):
                x[0, 0] = math.nan
            yield x, x[:, :3].argmax(1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def score(self, model):
        model.eval()
        x = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
        return 100.0 * float((model(x).argmax(1) == x[:, :3].argmax(1)).float().mean())


def same_everywhere(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    assert all(other == everybody[0] for other in everybody), everybody


# ---- checks that run on every rank -----------------------------------------------------------------------------------


def check_plain_and_all_fp32(rank, world):
    plain = train_run(Toy(), SEED, lambda ddp: None)
    hooked = train_run(Toy(), SEED, lambda ddp: attach(ddp, Plan.fp32()))
    assert plain.losses == hooked.losses  # two ranks: bit for bit
    assert plain.scores == hooked.scores
    assert (plain.steps, len(plain.losses), len(plain.scores)) == (15, 15, 3)
    assert plain.score == plain.scores[-1]
    assert plain.traffic == {}
    assert hooked.traffic["steps"] == 15
    assert 0 < plain.step_seconds < 60
    assert not plain.diverged
    assert train_run(Toy(), SEED + 1, lambda ddp: None).losses != plain.losses
    same_everywhere((plain.losses, plain.scores))


def check_stopping(rank, world):
    whole, part = Toy(), Toy()
    long, told, epochs = train_run(whole, SEED, lambda ddp: None), [], []
    short = train_run(
        part,
        SEED,
        lambda ddp: None,
        steps=7,
        on_step=lambda step, loss, state: told.append((step, loss, state)),
        on_epoch=lambda run, epoch, of: epochs.append((run.steps, epoch, of, len(run.scores))),
    )
    # The schedule is that of the whole run, so the beginning is the same.
    assert part.total_steps == whole.total_steps == 15
    assert short.losses == long.losses[:7]
    assert len(short.scores) == 2
    assert short.scores[0] == long.scores[0]
    assert [step for step, _, _ in told] == list(range(7))
    assert all(math.isfinite(loss) and state is None for _, loss, state in told)
    assert epochs == [(5, 1, 3, 1), (7, 2, 3, 2)]
    assert train_run(Toy(), SEED, lambda ddp: None, steps=10).steps == 10
    assert train_run(Toy(), SEED, lambda ddp: None, epochs=2, steps=100).steps == 10
    for options in ({"steps": 0}, {"epochs": 0}):
        with pytest.raises(ValueError, match="must be at least 1, but is 0"):
            train_run(Toy(), SEED, lambda ddp: None, **options)


def check_divergence(rank, world):
    """One rank's loss is enough, and the run ends with the epoch."""
    run = train_run(Toy(spoil=(world - 1, 6)), SEED, lambda ddp: None)
    assert run.diverged
    assert (run.steps, len(run.scores)) == (10, 2)
    assert math.isfinite(run.losses[5])
    assert math.isnan(run.losses[6])
    same_everywhere(run.scores)


def check_states(rank, world):
    """A state is told each step's loss and rate before its backward pass, and is closed whatever happens."""
    heard, closed = [], []
    state = SimpleNamespace(observe=lambda loss, rate: heard.append((loss, rate)), close=lambda: closed.append(True))
    run = train_run(Toy(), SEED, lambda ddp: state)
    total = torch.tensor([loss for loss, _ in heard])
    dist.all_reduce(total)
    assert (total / world).tolist() == pytest.approx(run.losses)
    assert heard[0][1] == 0.1
    assert [rate for _, rate in heard] == sorted((rate for _, rate in heard), reverse=True)
    assert closed == [True]

    def fail(step, loss, state):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        train_run(Toy(), SEED, lambda ddp: state, on_step=fail)
    assert closed == [True, True]


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_plain_and_all_fp32", "check_stopping", "check_divergence", "check_states"])
def test_the_loop(run_ranks, check):
    run_ranks(__file__, check, 2)
