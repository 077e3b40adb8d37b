"""Evidence: short runs of the real command's parts, and what the tables make of runs."""

import io
import json
import math
import os

import pytest
from rich.console import Console

from neuron_fabric.runtime.paired import paired_difference
from neuron_fabric.runtime.profile import loads
from neuron_fabric.runtime.trust import Evidence, Fault, TrustRun, choose_fault, gather, main
from neuron_fabric.runtime.trust_report import compared_rows, fault_rows, healthy_row, write_evidence
from neuron_fabric.runtime.workloads.digits import DigitsWorkload

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

PROFILE = """
schema_version: 1
name: short
regions:
  - {name: head, patterns: ["head.*"], encoding: fp32}
  - {name: one_dimensional, max_ndim: 1, encoding: fp32}
  - {name: body}
phases: {warmup_steps: 12}
recovery: {cool_down_steps: 15, trial_steps: 5}
target: {tolerance_points: 2.0}
"""


# ---- checks that run on every rank -----------------------------------------------------------------------------------


def check_gather(rank, world, out):
    from pathlib import Path

    task = DigitsWorkload(width=4, batch=16, epochs=3)
    seen = []
    evidence = gather(task, loads(PROFILE), seeds=[SEED], healthy_steps=200, transport="allgather", tell=seen.append)
    assert [run.policy for run in seen] == [
        "fp32",
        "static-zeros",
        "static-unscaled",
        "profile",
        "unmonitored",
        "monitored",
        "profile",
    ]
    assert evidence.fault == Fault(72, 86)
    assert evidence.runs == [*seen[:4], *seen[4:6], seen[6]]
    fp32, zeros, _, profile, unmonitored, monitored, again = seen
    assert all(run.steps == 132 and len(run.losses) == 132 for run in seen)
    assert fp32.low_bit_share == 0
    assert zeros.low_bit_share == 1
    assert 0.8 < profile.low_bit_share < 1
    assert profile.changes == [(12, True)]
    assert profile.fallbacks["warmup"] == 12  # of one region; the others are FP32 by plan
    assert again.seed == SEED + 1
    assert monitored.left(evidence.fault) in range(74, 82)
    assert monitored.returned(evidence.fault) > evidence.fault.last
    assert monitored.alarms
    assert unmonitored.left(evidence.fault) is None
    assert unmonitored.loss_within(evidence.fault) > monitored.loss_within(evidence.fault)
    if rank == 0:
        write_evidence([evidence], Path(out), Console(file=io.StringIO()))


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_evidence_of_short_runs(run_ranks, tmp_path):
    run_ranks(__file__, "check_gather", 2, deadline=280.0, out=str(tmp_path))
    (found,) = json.loads((tmp_path / "trust.json").read_text())
    assert (found["workload"], found["profile"], found["world"], found["tolerance_points"]) == (
        "digits",
        "short",
        2,
        2.0,
    )
    assert [row["policy"] for row in found["compared"]] == ["fp32", "static-zeros", "static-unscaled", "profile"]
    assert [row["policy"] for row in found["faulty"]] == ["unmonitored", "monitored"]
    assert found["healthy"]["steps"] == 264
    assert len(found["runs"]) == 7


def test_a_paired_difference_has_students_interval():
    # Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), and Student's 97.5 % point at two degrees is 4.3027.
    difference = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert difference.mean == 2
    assert difference.high - 2 == pytest.approx(4.302653 / math.sqrt(3))
    assert difference.low == pytest.approx(4 - difference.high)
    assert str(difference) == "+2.00 (-0.48 to +4.48)"
    # Pairs count, not scatter over seeds.
    assert paired_difference([1.0, 50.0, 99.0], [2.0, 51.0, 100.0]).high == -1
    one = paired_difference([3.0], [1.0])
    assert (one.mean, one.low, one.high, str(one)) == (2.0, -math.inf, math.inf, "+2.00")


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [([], [], "not 0 and 0"), ([1.0], [1.0, 2.0], "not 1 and 2"), ([math.nan], [1.0], "finite")],
)
def test_what_is_no_pair_is_refused(mine, theirs, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(mine, theirs)


def evidence_of(scores, **more):
    evidence = Evidence("digits", "accuracy", "p", "h", 4, 0.5, fault=Fault(100, 119))
    for policy, values in scores.items():
        evidence.compared += [
            TrustRun(policy, policy, seed, 200, score, 0.1, 0.9, losses=[0.1] * 200, **more)
            for seed, score in enumerate(values, 1)
        ]
    return evidence


def test_verdicts_go_by_mean_and_interval():
    rows = compared_rows(
        evidence_of(
            {
                "fp32": [98.0, 99.0, 98.5],
                "near": [97.8, 98.9, 98.4],
                "worse": [98.0, 97.0, 96.0],
                "failed": [80.0, 81.0, 80.2],
                "gone": [math.nan, 99.0, 99.0],
            }
        )
    )
    verdicts = {row["policy"]: (row["keeps"], row["fails"]) for row in rows}
    assert verdicts == {
        "fp32": (None, False),
        "near": (True, False),
        "worse": (False, False),
        "failed": (False, True),
        "gone": (None, True),
    }
    assert rows[4]["difference_text"] == "diverged"
    assert rows[4]["score"] == 99


def test_a_fault_is_followed_from_its_first_step():
    evidence = evidence_of({"fp32": [98.0, 99.0]})
    changes = {1: [(20, True), (50, False), (60, True), (104, False), (156, True)], 2: [(20, True), (110, False)]}
    for seed, changed in changes.items():
        evidence.faulty.append(TrustRun("monitored", "m", seed, 200, 98.0, losses=[1.0] * 200, changes=changed))
    (row,) = fault_rows(evidence)
    assert (row["left"], row["delay"], row["delay_most"]) == (2, 7, 10)
    assert (row["returned"], row["back_after"]) == (1, 37)
    assert row["difference"]["mean"] == -0.5
    assert row["loss_within"] == 1.0


def test_alarms_without_a_fault_are_counted_by_step(tmp_path, capsys):
    evidence = evidence_of({"profile": [98.0, 99.0]}, alarms=[(7, "step 8: a"), (7, "step 8: b"), (9, "step 10: c")])
    evidence.healthy, evidence.warmup_steps = list(evidence.compared), 8
    row = healthy_row(evidence)
    assert (row["runs"], row["steps"], row["alarmed_steps"], len(row["alarms"])) == (2, 400, 4, 6)
    assert row["alarmed_in_warmup"] == 2
    evidence.compared[0].score = math.nan
    write_evidence([evidence], tmp_path, Console(width=200))
    assert "seed 1, step 8: a" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "trust.json").read_text())
    assert found["runs"][0]["score"] is None


def test_a_fault_waits_for_the_detectors_and_must_fit():
    profile = loads(PROFILE)
    assert choose_fault(profile, 132) == Fault(72, 86)
    assert choose_fault(profile, 300, 0.25) == Fault(100, 114, 0.25)
    with pytest.raises(ValueError, match="do not fit in 110 steps: give the run more epochs"):
        choose_fault(profile, 110)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["digits", "--profile", "cats=a.yaml"], "write WORKLOAD=FILE"),
        (
            ["digits", "--profile", "digits=nowhere.yaml"],
            "no profile nowhere.yaml: write one with neuron-fabric calibrate",
        ),
        (["digits", "--part", "all"], "no part 'all'"),
        (["digits", "--transport", "pigeon"], "unknown transport 'pigeon'"),
    ],
)
def test_bad_options_are_refused_by_name(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["trust"])
    assert main(argv) == 2
    assert message in capsys.readouterr().err
