"""The benchmark of a link in a short form; what it measures here is not judged."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from neuron_fabric.runtime import bench_link, namespaces
from neuron_fabric.runtime.bench import main
from neuron_fabric.runtime.bench_link import CASES, FP32
from neuron_fabric.runtime.namespaces import INTERFACE, NotPermittedError, capped_star

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
SHORT = ["--elements", "70000", "--bucket", "30000", "--rounds", "2", "--slots", "32", "--seed", str(SEED)]
PATIENCE = 60.0


def run(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(["link", *argv])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def ours(process=None):
    """Network namespaces that this process, or the one with that number, has made."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [
        line.split()[0] for line in found.splitlines() if line.startswith(f"neuron-fabric-{process or os.getpid()}-")
    ]


@pytest.fixture
def permitted():
    try:
        with capped_star(["a", "b"], 100):
            pass
    except NotPermittedError as error:
        print(f"not permitted: {error}")
        pytest.skip(f"network namespaces are not permitted here: {error}")


def check_rows(rows):
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert len(row["all_seconds"]) == 2
        assert row["elements_per_s"] > 0
        assert 0 < row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
        assert len(row["cpu_ranks"]) == 2
        assert all(share > 0 for share in row["cpu_ranks"])
    assert rows[0]["ratio"] == 1


@pytest.mark.distributed
def test_a_short_run_on_loopback(capsys, tmp_path):
    """The command itself holds both ways to count votes against each other, bit for bit."""
    output = tmp_path / "link.json"
    code, out, err = run(capsys, *SHORT, "--network", "loopback", "--output", str(output))
    assert code in (0, None), err[-3000:]
    report = json.loads(output.read_text())
    assert report["settings"]["seed"] == SEED
    assert report["ranks"] == 2
    (found,) = report["networks"]
    check_rows(found["rows"])
    # FP32 is 4 bytes an element and rank. On an interface that others use there may be more.
    assert found["rows"][0]["bytes_a_round"]["rank_sends"] > 8 * 70000
    assert all(case in out for case in CASES)


@pytest.mark.distributed
def test_a_short_run_on_capped_links(capsys, tmp_path, permitted):
    output = tmp_path / "link.json"
    code, _, err = run(capsys, *SHORT, "--network", "capped", "--rate", "100", "--output", str(output))
    assert code in (0, None), err[-3000:]
    assert ours() == []
    (found,) = json.loads(output.read_text())["networks"]
    check_rows(found["rows"])
    fp32, _, driver = found["rows"]
    assert fp32["case"] == FP32
    # Counters are of each rank's own link: these are bytes of the algorithms, and may be judged.
    assert 1 < fp32["bytes_a_round"]["rank_sends"] / (4 * 70000) < 1.3
    assert fp32["bytes_a_round"]["reducer_sends"] < 10000
    assert driver["bytes_a_round"]["reducer_sends"] > 2 * 2 * 70000 / 8


def look_and_fail():
    with capped_star(["a", "b"], 7) as star:
        assert len(ours()) == 3
        for host in ("a", "b"):
            command = [*star.enter(host), "tc", "qdisc", "show", "dev", INTERFACE]
            assert "rate 7Mbit" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert star.addresses["a"] != star.addresses["b"]
        raise ZeroDivisionError


def test_links_are_capped_and_taken_down(permitted):
    with pytest.raises(ZeroDivisionError):
        look_and_fail()
    assert ours() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(permitted, tmp_path, number):
    # Where the tests run in the background, SIGINT is ignored, and what they start inherits that.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from neuron_fabric.runtime.bench import main; main(sys.argv[1:])"
    )
    endless = ["link", "--network", "capped", "--rounds", "1000000", "--output", str(tmp_path / "link.json")]
    process = subprocess.Popen([sys.executable, "-c", code, *endless], stderr=subprocess.DEVNULL)
    mark = f"neuron-fabric-{process.pid}-"
    try:
        end = time.monotonic() + PATIENCE
        while not pids(mark + "rank1"):
            assert time.monotonic() < end
            assert process.poll() is None
            pause(process)
        started = pids(mark + "rank0") + pids(mark + "rank1") + pids(mark + "reducer")
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
    finally:
        if process.poll() is None:  # let it take down what it put up
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        process.kill()
        process.wait()
    assert ours(process.pid) == []
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]


def pids(namespace):
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return found.stdout.split()


def pause(process):
    """Wait a little, and less if it ends."""
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return


def test_where_namespaces_are_not_permitted_it_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    output = tmp_path / "link.json"
    code, out, _ = run(capsys, *SHORT, "--network", "capped", "--output", str(output))
    assert code in (0, None)
    assert "links of 1000 Mb/s: not measured: " in out
    (found,) = json.loads(output.read_text())["networks"]
    assert "root" in found["not_measured"] or "install iproute2" in found["not_measured"]


def test_an_emulator_that_does_not_start_is_an_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_link.sys, "executable", "/bin/false")
    code, _, err = run(capsys, *SHORT, "--network", "loopback", "--output", str(tmp_path / "link.json"))
    assert code == 1
    assert "the emulator does not start" in err


def test_slots_must_be_a_power_of_two(capsys):
    code, _, err = run(capsys, "--slots", "3")
    assert code == 2
    assert "power of two" in err
