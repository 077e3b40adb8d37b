"""The training job in a short form: real data, real ranks, the report."""

import json

import pytest
import torch

from neuron_fabric.runtime import Route
from neuron_fabric.runtime.policies import policies
from neuron_fabric.runtime.report import final_loss, summarise, write_report
from neuron_fabric.runtime.train import RunResult, Settings, compare, main, run_policy
from neuron_fabric.runtime.workloads.digits import HEAD_PATTERNS, Digits, ResNet, shifted


def test_the_digits_are_split_once_and_normalised():
    data = Digits.load()
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.train_images.mean().abs() < 1e-5
    assert (data.train_images.std() - 1).abs() < 1e-5
    assert sorted(data.test_labels.unique().tolist()) == list(range(10))
    assert torch.equal(data.test_labels, Digits.load().test_labels)


def test_shifting_moves_whole_images_by_at_most_one_pixel():
    images = torch.zeros(50, 1, 8, 8)
    images[:, 0, 3, 4] = 1
    moved = shifted(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(50))
    rows, columns = moved[:, 0].nonzero()[:, 1], moved[:, 0].nonzero()[:, 2]
    assert set(rows.tolist()) == {2, 3, 4}
    assert set(columns.tolist()) == {3, 4, 5}


def test_the_plan_with_fp32_head_keeps_head_and_norms():
    model = ResNet(4)
    (policy,) = [policy for policy in policies(HEAD_PATTERNS) if policy.key == "counts-fp32-head"]
    bound = policy.plan.bind(model)
    kept = {name for name, region in bound.items() if region is None}
    assert kept == {name for name, p in model.named_parameters() if p.ndim == 1 or name.startswith("head.")}
    assert all(region.route is Route.BINARY for region in bound.values() if region is not None)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def check_training(rank, world):
    data = Digits.load()
    settings = Settings(epochs=3, batch=16, width=8)
    seen = []
    for policy in policies(HEAD_PATTERNS):
        if policy.key in ("fp32", "counts-fp32-head"):
            result = run_policy(policy, 1, settings, data, lambda *told: seen.append(told[1:]))
            assert len(result.accuracy) == 3
            assert result.accuracy[-1] > 80
            assert final_loss(result) < result.loss[0] / 2
            if policy.key == "fp32":
                assert (result.bits_up, result.bits_down) == (32, 32)
                assert result.sent_bytes == pytest.approx(result.ring_bytes, rel=1e-3)
            else:
                assert result.bits_up < 4
                assert 0 < result.sent_bytes < result.ring_bytes / 5
    assert seen == [(1, 3), (2, 3), (3, 3)] * 2


def check_report(rank, world, out):
    from pathlib import Path

    settings = Settings(epochs=1, batch=32, width=4, seeds=2, policies=("fp32", "majority"), transport="allgather")
    results = compare(settings, Path(out))
    assert [(result.policy, result.seed) for result in results] == [
        ("fp32", 1),
        ("majority", 1),
        ("fp32", 2),
        ("majority", 2),
    ]


@pytest.mark.distributed
def test_two_ranks_learn_the_digits(run_ranks):
    run_ranks(__file__, "check_training", 2)


@pytest.mark.distributed
def test_a_comparison_leaves_numbers_and_a_picture(run_ranks, tmp_path):
    run_ranks(__file__, "check_report", 1, out=str(tmp_path))
    document = json.loads((tmp_path / "report.json").read_text())
    assert [row["policy"] for row in document["summary"]] == ["fp32", "majority"]
    assert document["settings"]["width"] == 4
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_summary_is_over_seeds(tmp_path, capsys):
    results = [
        RunResult(
            "counts", "sign counts", seed, 4, "golden", [50.0, accuracy], [2.0, 1.0], 0.01, fallbacks={"sparse": 1}
        )
        for seed, accuracy in ((1, 90.0), (2, 96.0))
    ]
    (row,) = summarise(results)
    assert (row["accuracy"], row["accuracy_low"], row["accuracy_high"]) == (93.0, 90.0, 96.0)
    assert row["fallbacks"] == {"sparse": 2}
    assert row["loopback_bytes"] is None
    write_report(results, {}, tmp_path)
    assert "93.00 (90.0-96.0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["--transport", "pigeon://here"], "unknown kind 'pigeon'"),
    ],
)
def test_bad_options_are_refused_by_name(argv, message, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
