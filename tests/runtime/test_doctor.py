"""The doctor against an emulator in this process; what it measures here is not judged, only what it makes of it."""

import contextlib
import dataclasses
import json
import socket
import threading

import pytest

from neuron_fabric.model.control import JobState
from neuron_fabric.runtime import doctor
from neuron_fabric.runtime.doctor import Goodput, Report, examine, findings_of, limit_of, main
from neuron_fabric.runtime.emulator import server as server_module
from neuron_fabric.runtime.emulator.controller import ControllerLimits
from neuron_fabric.runtime.emulator.datagrams import UdpAddress
from neuron_fabric.runtime.emulator.engine import engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan
from neuron_fabric.runtime.emulator.server import EmulatorServer
from neuron_fabric.runtime.reducer import JobSpec, ReducerUrl
from neuron_fabric.runtime.reducer.udp import UdpReducer

ANY = UdpAddress.parse("udp://127.0.0.1:0")
SMALL = engine_params(workers=4, slots=64, lines=16, jobs=2)
PATIENCE = 20.0


def reducer(**options):
    return EmulatorServer(ANY, SMALL, limits=ControllerLimits(quota=32), **options)


def run(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_reducer_that_is_well(capsys):
    with reducer() as server:
        code, out, _ = run(capsys, server.url + "?slots=16", "--seconds", "0.3", "--json")
        found = json.loads(out)
        # Nothing is left behind.
        assert server.controller.slots_used == 0
        assert not server.controller.jobs
    assert found["reachable"]
    assert code == found["status"] == int(any(each["severity"] == "warning" for each in found["findings"]))
    assert found["incarnation"] == f"{server.controller.uptime_nonce:016x}"
    assert not found["restarted"]
    assert (found["jobs_used"], found["jobs_total"], found["slots_used"], found["slots_total"]) == (0, 2, 0, 64)
    assert 0 < found["round_trip_min_s"] <= found["round_trip_median_s"] <= found["round_trip_p99_s"]
    assert found["mtu"] >= found["frame_bytes"] == 16 * 64 + 22 + 28
    goodput = found["goodput"]
    assert (goodput["slots"], goodput["lines_per_chunk"], goodput["members"]) == (16, 16, 2)
    assert goodput["elements_per_s"] > 0
    assert goodput["dropped"]["wrong_results"] == 0
    assert found["limit"]


def test_a_person_can_read_it(capsys):
    with reducer() as server:
        code, out, _ = run(capsys, server.url, "--seconds", "0.2", "--members", "1", "--round-trips", "5")
    assert code in (0, 1)
    assert "what limits: " in out
    assert "note: granted 32 slots of 16 lines; 64 of 16 were asked for" in out
    assert "0 of 2 in use" in out


def test_nothing_to_complain_of_is_status_zero(capsys):
    with reducer() as server:
        report = examine(ReducerUrl.parse(server.url), seconds=0, round_trips=5)
        offload = server.offload
    named = [each.what for each in report.findings if not (each.what.startswith("the kernel has no UDP_"))]
    assert not named
    assert report.status == int(not all(offload.values()))


@pytest.mark.parametrize("silent", [False, True], ids=["nobody listens", "silent"])
def test_nobody_is_there(capsys, silent):
    with contextlib.ExitStack() as stack:
        if silent:
            mute = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            mute.bind(("127.0.0.1", 0))
            port = mute.getsockname()[1]
        else:
            port = free_port()
        code, out, _ = run(capsys, f"udp://127.0.0.1:{port}", "--timeout", "0.2")
    assert code == 2
    assert ("neither STATUS nor OPEN is answered" if silent else "nobody listens on this port") in out
    assert "what to do: start a reducer there" in out


def test_a_host_that_is_not_known_is_not_reachable(monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    report = examine(ReducerUrl.parse("udp://nowhere.invalid:20045"))
    assert report.status == 2
    assert "Name or service not known" in report.problem


def test_what_answers_in_another_version_is_named():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.settimeout(PATIENCE)

        def answer():
            data, address = other.recvfrom(2048)
            # The header's version is the high half of its third byte.
            other.sendto(data[:2] + bytes([data[2] & 0x0F | 0x70]) + data[3:], address)

        thread = threading.Thread(target=answer)
        thread.start()
        report = examine(ReducerUrl.parse(f"udp://127.0.0.1:{other.getsockname()[1]}"))
        thread.join(PATIENCE)
    assert report.status == 1
    assert "protocol version is 7, not 1" in report.problem
    assert report.findings[0].what == report.problem


def test_a_reducer_that_tells_only_members_is_asked_as_one(monkeypatch):
    """As over a network, where addresses that are no member's are not told."""
    monkeypatch.setattr(server_module, "_trusted", lambda _address: False)
    with reducer() as server:
        report = examine(ReducerUrl.parse(server.url + "?slots=8"), seconds=0.1, round_trips=3, timeout=0.4)
        assert not server.controller.jobs
    assert report.reachable
    assert report.goodput is not None
    # The job through which it asks is not counted.
    assert (report.jobs_used, report.slots_used) == (0, 0)


def test_jobs_of_others_are_left_alone(monkeypatch):
    """It takes no number that a job has, and says when there is no room."""
    with reducer() as server, UdpReducer("127.0.0.1", server.address.port) as one:
        one.open_job(JobSpec(700, 0, 1, slots=8), PATIENCE)
        drawn = iter([700, 701])
        monkeypatch.setattr(doctor.secrets, "randbelow", lambda _end: next(drawn))
        report = examine(ReducerUrl.parse(server.url + "?slots=8"), seconds=0.1, round_trips=3)
        assert report.goodput is not None
        assert server.controller.state(700) is JobState.OPEN
        assert (report.jobs_used, report.slots_used) == (1, 8)
        assert one.failure is None
        monkeypatch.undo()
        with UdpReducer("127.0.0.1", server.address.port) as two:
            two.open_job(JobSpec(702, 0, 1, slots=8), PATIENCE)
            full = examine(ReducerUrl.parse(server.url + "?open_timeout=1"), seconds=0.1, round_trips=3)
    assert full.status == 1
    assert "NO_CAPACITY" in full.problem
    assert any(each.what == "all 2 jobs are taken" for each in full.findings)


def test_loss_is_seen_and_named():
    with reducer(faults=FaultPlan.parse("loss=0.2"), fault_seed=3) as server:
        report = examine(ReducerUrl.parse(server.url + "?slots=8"), seconds=0.5, round_trips=10, timeout=0.1)
    assert report.goodput is not None
    assert report.goodput.resent_share > 0.05
    # Each way loses a fifth.
    assert 0.1 < report.goodput.lost_share < 0.3
    assert report.goodput.dropped["wrong_results"] == 0
    assert any("of frames were lost" in each.what for each in report.findings)
    assert report.limit.startswith("Loss limits")
    assert report.status == 1


def well(**goodput):
    """A report with nothing to complain of."""
    measured = Goodput(2, 1.0, 16, 16, 2, 1e8, 1e8, 2e8, 0.0, 0.0, 100, 0, 200, {"wrong_results": 0}, 0.5, 1e-3, 2e-3)
    dropped = {"duplicates": 0, "foreign": 0, "malformed": 0, "mismatched": 0, "nacks": 0, "wrong_results": 0}
    return Report(
        "udp://10.0.0.1:1",
        16,
        16,
        reachable=True,
        round_trips=10,
        round_trip_median_s=1e-4,
        jobs_used=0,
        jobs_total=8,
        mtu=1500,
        frame_bytes=1074,
        lines_that_fit=22,
        udp_segment=True,
        udp_gro=True,
        receive_buffer=1 << 20,
        send_buffer=1 << 20,
        goodput=dataclasses.replace(measured, dropped=dropped, **goodput),
    )


def test_findings():
    report = well()
    assert findings_of(report) == []
    for change, what, do in [
        ({"mtu": 1000, "lines_that_fit": 14}, "packets of 1074 bytes; the route's MTU is 1000", "?lines=14"),
        ({"udp_gro": False}, "no UDP_GRO", "Linux"),
        ({"receive_buffer": 4096}, "16 results need 68736", "net.core.rmem_max=34368"),
        ({"round_trips_lost": 2}, "2 of 10 questions", "drops"),
        ({"restarted": True}, "restarted", "log"),
        ({"jobs_used": 8}, "all 8 jobs", "--jobs"),
    ]:
        (found,) = findings_of(dataclasses.replace(report, **change))
        assert found.severity == "warning"
        assert what in found.what
        assert do in found.do
    (found,) = findings_of(well(slots=4))
    assert found.severity == "note"
    (late,) = findings_of(well(resent_share=0.1))
    assert "answers are late, not lost" in late.what
    (lost,) = findings_of(well(resent_share=0.1, lost_share=0.08))
    assert lost.what == "8.0% of frames were lost"
    wrong = well()
    wrong.goodput.dropped["wrong_results"] = 1
    assert "results were wrong" in findings_of(wrong)[0].what


def test_what_limits():
    # 16 slots of 16 lines of 512 elements in 0.1 ms: 1.3 G elements/s.
    assert limit_of(well(elements_per_s=1e9)).startswith("The window limits: 16 slots")
    # In a millisecond the same window makes 131 M elements/s.
    assert limit_of(well(elements_per_s=1e8)).startswith("The reducer, the way to it or the slowest member limits")
    assert limit_of(well(elements_per_s=1e8, latency_median_s=1e-4)).startswith(
        "This machine limits: its drivers keep 8%"
    )
    assert limit_of(well(cpu_share=10.0)).startswith("This machine's processor limits")
    assert limit_of(well(lost_share=0.1)) == "Loss limits: 10.0% of frames were lost."
    assert limit_of(well(resent_share=0.1, lost_share=None)) == "Loss limits: 10.0% of frames were sent again."
    assert limit_of(dataclasses.replace(well(), goodput=None)) == ""


def test_other_kinds_of_reducers_are_refused(capsys):
    code, _, err = run(capsys, "golden:here")
    assert code == 2
    assert "only" in err
