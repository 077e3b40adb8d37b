"""The benchmarks of time and memory in a short form; what they measure here is not judged."""

import json
import math
import os
import random

import pytest

from neuron_fabric.runtime.bench import main
from neuron_fabric.runtime.bench_hook import CASES, median_interval
from neuron_fabric.runtime.bench_memory import CASES as MEMORY_CASES

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))


def run(capfd, *argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    told = capfd.readouterr()
    assert ended.value.code == 0, told.err[-3000:]
    return told.out


@pytest.mark.distributed
def test_the_hook_adds_at_most_one_collective_to_a_step(capfd, tmp_path):
    short = ["--pairs", "6", "--warm-up", "4", "--hidden", "64", "--batch", "4", "--bucket-mb", "0.02"]
    out = run(capfd, "hook", *short, "--seed", str(SEED), "--output", str(tmp_path / "hook.json"))
    assert "FP32 plan: the interval's upper end is" in out
    report = json.loads((tmp_path / "hook.json").read_text())
    assert report["ranks"] == 2
    assert report["settings"]["seed"] == SEED
    rows = {row["case"]: row for row in report["rows"]}
    assert list(rows) == list(CASES)
    for row in rows.values():
        assert len(row["ratios"]) == 6
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["processor_ratio"] > 0
        assert row["plain_collectives"] == rows["plain DDP"]["collectives"] > 2  # several buckets
    # These are counts, and may be judged: by the process groups themselves, none that the hook launches can hide.
    added = {name: row["collectives"] - row["plain_collectives"] for name, row in rows.items()}
    assert added["FP32 plan"] == added["PyTorch's allreduce_hook"] == 0
    assert added["profile, FP32 warm-up"] == 1
    assert added["low-bit, allgather"] > 0
    assert added["profile, voting"] == added["low-bit, allgather"] + 1
    assert added["low-bit, collective"] > added["low-bit, allgather"]


@pytest.mark.distributed
def test_memory_beside_what_is_declared(capfd, tmp_path):
    case = "error feedback, collective"
    short = ["--steps", "3", "--hidden", "96", "--repeats", "1", "--case", case, "--seed", str(SEED)]
    out = run(capfd, "memory", *short, "--output", str(tmp_path / "memory.json"))
    assert "residuals" in out
    report = json.loads((tmp_path / "memory.json").read_text())
    plain, ours = report["rows"]
    assert (plain["case"], ours["case"]) == ("plain DDP", case)
    assert plain["declared"] == {}
    assert plain["over_plain"] == [0]
    assert ours["declared"]["residuals"] == 4 * 4 * (96 * 96 + 96)
    assert all(peak > 0 for row in report["rows"] for peak in row["peaks"])


@pytest.mark.parametrize(("command", "cases"), [("hook", CASES), ("memory", MEMORY_CASES)])
def test_an_unknown_row_is_refused(command, cases, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--case", "pigeons"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "no row 'pigeons'" in told


def test_the_interval_of_a_median_is_of_order_statistics():
    # The ends of exact binomial tables for 95 %: the 6th and 15th of 20, the 86th and 115th of 200.
    assert median_interval(range(1, 21)) == (10.5, 6, 15)
    assert median_interval(range(1, 201)) == (100.5, 86, 115)
    assert median_interval([3, 1, 2, 6, 5, 4]) == (3.5, 1, 6)
    with pytest.raises(ValueError, match="5 values have no interval"):
        median_interval([1.0] * 5)


def test_the_interval_covers_the_median_as_often_as_it_says():
    """For a distribution that is nothing like a normal one."""
    generator = random.Random(SEED)
    runs, covered = 2000, 0
    for _ in range(runs):
        _, low, high = median_interval([generator.expovariate(1.0) ** 3 for _ in range(40)])
        covered += low <= math.log(2) ** 3 <= high
    # 40 values give 96.2 %; five standard deviations of 2,000 runs are 2.1 points.
    assert 0.94 < covered / runs < 0.985
