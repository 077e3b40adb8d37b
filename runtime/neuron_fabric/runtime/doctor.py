"""What is between this machine and a reducer, what limits it, and what to do: ``neuron-fabric doctor URL``.

A few questions (STATUS) show whether somebody is there, how far away, and how busy. The socket and the route say how
much fits a packet. Then a job that nobody needs is opened, for one or two members in this process, and measured: it
takes only slots that are free. The exit status is 0 if all is well, 1 with warnings, 2 if nobody answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from neuron_fabric.model import control
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.wire import HEADER_BYTES, VERSION, FrameType, Header, HeaderError, Reason
from neuron_fabric.runtime.codec import codec_backend
from neuron_fabric.runtime.reducer.base import (
    WORDS_PER_LINE,
    AbsentError,
    Grant,
    JobSpec,
    ReducerError,
    Status,
    Ticket,
)
from neuron_fabric.runtime.reducer.udp import UdpReducer, UdpSettings, resolve
from neuron_fabric.runtime.reducer.urls import ENVIRONMENT_VARIABLE, ReducerUrl

__all__ = ["Finding", "Goodput", "Report", "examine", "findings_of", "limit_of", "main"]

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # Linux; the socket module does not name them
_IP_MTU, _IPV6_MTU = 14, 24
_IPV4_UDP_BYTES, _IPV6_UDP_BYTES = 28, 48
_MUCH_LOST = 0.01
_BUSY = 0.8
_QUEUED = 4
_PATIENCE = 10.0
_ATTEMPTS = 4

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Finding:
    """Something that could be better: a ``warning``, or a ``note`` that need not be acted on."""

    severity: str
    what: str
    do: str


@dataclass(frozen=True)
class Goodput:
    """What the job that nobody needs has shown.

    Attributes
    ----------
    slots, lines_per_chunk, result_planes : int
        As granted.
    elements_per_s : float
        Counted once for all members.
    bits_per_s_up, bits_per_s_down : float
        UDP payloads of all members together.
    resent_share : float
        Contributions sent again over all that were sent.
    lost_share : float or None
        Frames that did not arrive at the other end, of both directions, over all: from both ends' counters. None where
        the reducer serves other jobs, since it counts for all together.
    contributions, resent, received : int
        Frames, of all members.
    dropped : dict of str to int
        What came and did not count, and what was refused.
    cpu_share : float
        Processor time of this process over wall clock; each member has a thread.
    latency_median_s, latency_p99_s : float or None
        From a chunk's first frame to its result.
    """

    members: int
    seconds: float
    slots: int
    lines_per_chunk: int
    result_planes: int
    elements_per_s: float
    bits_per_s_up: float
    bits_per_s_down: float
    resent_share: float
    lost_share: float | None
    contributions: int
    resent: int
    received: int
    dropped: dict[str, int]
    cpu_share: float
    latency_median_s: float | None
    latency_p99_s: float | None


@dataclass
class Report:
    """All that was found; what is not known is None."""

    url: str
    slots_wanted: int
    lines_wanted: int
    reachable: bool = False
    problem: str = ""
    """Why it is not reachable, or no job could be had."""
    protocol_version: int = VERSION
    control_version: int = control.CONTROL_VERSION
    incarnation: str = ""
    """Drawn by the reducer's controller when it started."""
    restarted: bool = False
    round_trips: int = 0
    round_trips_lost: int = 0
    round_trip_min_s: float | None = None
    round_trip_median_s: float | None = None
    round_trip_p99_s: float | None = None
    jobs_used: int | None = None
    jobs_total: int | None = None
    slots_used: int | None = None
    slots_total: int | None = None
    mtu: int | None = None
    frame_bytes: int = 0
    """The longest packet of a chunk of the lines wanted, with its IP and UDP headers."""
    lines_that_fit: int | None = None
    udp_segment: bool = False
    udp_gro: bool = False
    receive_buffer: int = 0
    send_buffer: int = 0
    buffer_needed: int = 0
    """For a result of every slot at once; the kernel counts about twice the bytes."""
    goodput: Goodput | None = None
    limit: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        if not self.reachable:
            return 2
        return int(any(finding.severity == "warning" for finding in self.findings))


def examine(
    url: ReducerUrl, *, seconds: float = 2.0, members: int = 2, round_trips: int = 50, timeout: float = 2.0
) -> Report:
    """Examine the reducer behind a ``udp:`` URL.

    Parameters
    ----------
    url : ReducerUrl
        Its ``slots`` and ``lines`` are asked for; its ``job`` is not touched.
    seconds : float
        Of measuring goodput; 0 opens no job for that.
    members : int
        Of the job that is measured, all in this process.
    round_trips : int
    timeout : float
        Seconds until a reducer that says nothing counts as absent.

    Raises
    ------
    ValueError
        If the URL is of another kind.
    """
    if url.scheme != "udp":
        raise ValueError(f"{url.scheme}: is in this process; there is a way to examine only for udp://host:port")
    report = Report(f"udp://{url.place}", url.slots, url.lines)
    host, _, port = url.place.rpartition(":")
    try:
        with _Probe(host.strip("[]"), int(port), timeout) as probe:
            probe.look_at_socket(report)
            probe.ask(report, round_trips)
            job = probe.unused_job()
            if seconds > 0:
                before = probe.counters()
                _measure(report, url, (host.strip("[]"), int(port)), job, seconds, members)
                after = probe.counters()
                probe.look_again(report)
                if report.goodput is not None and report.jobs_used == 0 and not report.restarted:
                    new = {name: value - before.get(name, 0) for name, value in after.items()}
                    report.goodput = _with_losses(report.goodput, new)
    except (AbsentError, _SpeaksOtherwiseError) as error:
        report.reachable = isinstance(error, _SpeaksOtherwiseError)
        report.problem = str(error)
    report.findings = findings_of(report)
    report.limit = limit_of(report)
    return report


class _SpeaksOtherwiseError(Exception):
    """Somebody answers, but not in this protocol or version."""


class _Probe:
    """A socket that asks for STATUS. A reducer that tells it only members is first asked for a job of one."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._family, address = resolve(host, port)
        self._name, self._timeout = f"udp://{host}:{port}", timeout
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self._member: tuple[int, int, int] | None = None
        """Job, nonce and epoch of the job of one."""
        self._told: control.StatusReply | None = None
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, UdpSettings.socket_bytes)
        try:
            self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise AbsentError(f"{self._name}: {error.strerror or error}") from error

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self._socket.close()

    def look_at_socket(self, report: Report) -> None:
        """What the kernel gives a driver, and what fits a packet on this route."""
        six = self._family == socket.AF_INET6
        around = HEADER_BYTES + (_IPV6_UDP_BYTES if six else _IPV4_UDP_BYTES)
        report.frame_bytes = around + report.lines_wanted * LINE_BYTES
        level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
        with contextlib.suppress(OSError):
            report.mtu = self._socket.getsockopt(level, option)
            report.lines_that_fit = max(0, report.mtu - around) // LINE_BYTES
        report.udp_segment, report.udp_gro = self._has(_UDP_SEGMENT), self._has(_UDP_GRO)
        report.receive_buffer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        report.send_buffer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def _has(self, option: int) -> bool:
        try:
            self._socket.setsockopt(_SOL_UDP, option, 0)
        except OSError:
            return False
        return True

    def ask(self, report: Report, count: int) -> None:
        """Round trips, and what the answers say."""
        if not any(self._status() is not None for _ in range(_ATTEMPTS)):
            self._join(report)
        taken: list[float] = []
        for _ in range(count):
            trip = self._status()
            if trip is not None:
                taken.append(trip)
        told = self._told
        if told is None or not taken:
            raise AbsentError(report.problem or f"{self._name}: STATUS is not answered")
        report.reachable = True
        report.incarnation = f"{told.uptime_nonce:016x}"
        report.round_trips, report.round_trips_lost = count, count - len(taken)
        quantiles = np.quantile(taken, [0, 0.5, 0.99]).tolist()
        report.round_trip_min_s, report.round_trip_median_s, report.round_trip_p99_s = quantiles
        own = self._member is not None
        report.jobs_used, report.jobs_total = told.jobs_used - own, told.jobs_total
        report.slots_used, report.slots_total = told.slots_used - own, told.slots_total

    def counters(self) -> dict[str, int]:
        """What the reducer has counted, of all jobs; what it did before if it does not answer."""
        any(self._status() is not None for _ in range(_ATTEMPTS))
        return {} if self._told is None else dict(self._told.counters)

    def look_again(self, report: Report) -> None:
        """Whether the reducer is the one that it was."""
        if self._told is not None:
            report.restarted = f"{self._told.uptime_nonce:016x}" != report.incarnation

    def unused_job(self) -> int:
        """A number that no job has, as far as the reducer tells."""
        while True:
            job = secrets.randbelow(1 << 16)
            if self._member is not None and job == self._member[0]:
                continue
            # It tells a stranger nothing; then a number is drawn as a training run draws its own.
            if self._member is not None or self._status(job) is None or self._told is None:
                return job
            if self._told.state is control.JobState.NONE:
                return job

    def _join(self, report: Report) -> None:
        """Become the only member of a job, and so somebody whom STATUS is answered."""
        job, nonce = secrets.randbelow(1 << 16), secrets.randbits(64)
        frame = control.control_frame(control.Open(1, nonce, slots=1, lines_per_chunk=1), job=job, worker=0)
        for _ in range(_ATTEMPTS):
            answer = self._exchange(frame, FrameType.GRANT, nonce)
            if answer is None:
                continue
            header = answer[0]
            if header.reason:
                raise _SpeaksOtherwiseError(f"it is there, and refuses a job of one: {_reason(header.reason)}")
            self._member = job, nonce, header.epoch
            return
        raise AbsentError(f"{self._name}: neither STATUS nor OPEN is answered in {self._timeout:g} s each")

    def _leave(self) -> None:
        if self._member is not None:
            job, nonce, epoch = self._member
            frame = control.control_frame(control.Close(nonce), job=job, worker=0, epoch=epoch)
            with contextlib.suppress(AbsentError, _SpeaksOtherwiseError):
                any(self._exchange(frame, FrameType.CLOSE, nonce) for _ in range(_ATTEMPTS))

    def _status(self, job: int | None = None) -> float | None:
        """Seconds of one round trip; None if no answer came in time."""
        cookie = secrets.randbits(64)
        asked = job if job is not None else self._member[0] if self._member is not None else 0
        frame = control.control_frame(control.StatusRequest(cookie), job=asked, worker=0)
        begin = time.perf_counter()
        answer = self._exchange(frame, FrameType.STATUS, cookie)
        return None if answer is None else time.perf_counter() - begin

    def _exchange(self, frame: bytes, kind: FrameType, mark: int) -> tuple[Header, Any] | None:
        """Send a frame; header and payload of the answer that bears the mark, or None if there is none in time."""
        end = time.monotonic() + self._timeout / _ATTEMPTS
        try:
            self._socket.send(frame)
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                data = self._socket.recv(1 << 16)
                answer = _read(data)
                if answer is None or answer[0].type is not kind:
                    continue
                payload = answer[1]
                if isinstance(payload, control.StatusReply) and payload.cookie == mark:
                    self._told = payload
                    return answer
                if isinstance(payload, (control.Grant, control.Close)) and payload.nonce == mark:
                    return answer
        except TimeoutError:
            return None
        except ConnectionRefusedError:
            raise AbsentError(f"{self._name}: the host is there, and nobody listens on this port") from None
        except OSError as error:
            raise AbsentError(f"{self._name}: {error.strerror or error}") from error
        return None


def _read(data: bytes) -> tuple[Header, Any] | None:
    """A control frame; None for any other."""
    payloads: dict[FrameType, Any] = {
        FrameType.GRANT: control.Grant,
        FrameType.STATUS: control.StatusReply,
        FrameType.CLOSE: control.Close,
    }
    try:
        header = Header.unpack(data)
        payload = payloads.get(header.type)
        return None if payload is None else (header, payload.unpack(data[HEADER_BYTES:]))
    except (HeaderError, control.ControlError) as error:
        raise _SpeaksOtherwiseError(f"what answers does not speak this protocol: {error}") from None


def _reason(number: int) -> str:
    try:
        return Reason(number).name
    except ValueError:
        return f"reason {number}"


# ---- goodput ---------------------------------------------------------------------------------------------------------


def _measure(report: Report, url: ReducerUrl, place: tuple[str, int], job: int, seconds: float, members: int) -> None:
    """Open a job, keep its window full for a while, close it."""
    with contextlib.ExitStack() as stack:
        drivers = [stack.enter_context(UdpReducer(*place)) for _ in range(members)]
        try:
            for worker, driver in enumerate(drivers):
                driver.request(JobSpec(job, worker, members, slots=url.slots, lines_per_chunk=url.lines))
            grants = [driver.grant(url.open_timeout) for driver in drivers]
            report.goodput = _run(drivers, grants[0], seconds)
        except ReducerError as error:
            report.problem = f"no job could be measured: {error}"


def _run(drivers: Sequence[UdpReducer], grant: Grant, seconds: float) -> Goodput:
    members = len(drivers)
    words = _QUEUED * grant.slots * grant.lines_per_chunk * WORDS_PER_LINE
    rows = np.random.default_rng(1).integers(0, 1 << 64, (members, words), dtype=np.uint64)
    wanted = np.zeros((grant.result_planes, words), np.uint64)
    codec_backend().count_planes(rows, wanted)
    waiting: deque[list[Ticket]] = deque()
    before = [driver.status(0) for driver in drivers]
    begin, cpu, done = time.perf_counter(), time.process_time(), 0
    wrong = 0
    while waiting or time.perf_counter() - begin < seconds:
        if len(waiting) < _QUEUED and time.perf_counter() - begin < seconds:
            waiting.append([driver.submit(rows[worker : worker + 1]) for worker, driver in enumerate(drivers)])
            continue
        for driver, ticket in zip(drivers, waiting.popleft(), strict=True):
            wrong += not np.array_equal(driver.collect(ticket, _PATIENCE).planes, wanted)
        done += 64 * words
    passed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    counted = [driver.status(0).since(earlier) for driver, earlier in zip(drivers, before, strict=True)]
    total = {name: sum(each.counters.get(name, 0) for each in counted) for name in counted[0].counters}
    together = Status(total, latencies=np.sum([each.latencies for each in counted], axis=0))
    dropped = {name: total.get(name, 0) for name in ("duplicates", "foreign", "malformed", "mismatched", "nacks")}
    return Goodput(
        members,
        passed,
        grant.slots,
        grant.lines_per_chunk,
        grant.result_planes,
        done / passed,
        8 * total["bytes_sent"] / passed,
        8 * total["bytes_received"] / passed,
        together.retransmission_share,
        None,
        total["contributions"],
        total["resent"],
        total["frames_received"],
        dropped | {"wrong_results": wrong},
        cpu / passed,
        together.latency_s(0.5),
        together.latency_s(0.99),
    )


def _with_losses(goodput: Goodput, counted: dict[str, int]) -> Goodput:
    """With what the reducer counted meanwhile.

    A contribution that was sent again and is no duplicate there takes the place of one that was lost; results that were
    sent and did not come were lost, too. It counts a result once for all its planes.
    """
    up = goodput.resent - counted.get("duplicates", 0)
    down = goodput.result_planes * counted.get("results", 0) - goodput.received
    frames = goodput.contributions + goodput.resent + goodput.received
    return dataclasses.replace(goodput, lost_share=(max(0, up) + max(0, down)) / frames)


# ---- what it means ---------------------------------------------------------------------------------------------------


def findings_of(report: Report) -> list[Finding]:
    """What could be better, worst first."""
    found: list[Finding] = []

    def warn(what: str, do: str) -> None:
        found.append(Finding("warning", what, do))

    if not report.reachable:
        warn(report.problem, "start a reducer there (neuron-fabric emulate), or correct the address, or open its port")
        return found
    if report.problem:
        warn(report.problem, "close jobs that are not used, or compare the versions on both sides")
    if report.restarted:
        warn("the reducer restarted meanwhile", "read its log: training goes on, and pays for each restart in FP32")
    if report.round_trips_lost:
        share = f"{report.round_trips_lost} of {report.round_trips}"
        warn(f"{share} questions were not answered in time", "look for drops on the way: ip -s link, nstat, the switch")
    if report.jobs_total is not None and report.jobs_used is not None and report.jobs_used >= report.jobs_total:
        warn(f"all {report.jobs_total} jobs are taken", "close jobs that are not used, or give it more (--jobs)")
    if report.mtu is not None and report.frame_bytes > report.mtu:
        fits = f"ask for at most {report.lines_that_fit} lines (?lines={report.lines_that_fit})"
        warn(
            f"{report.lines_wanted} lines make packets of {report.frame_bytes} bytes; the route's MTU is {report.mtu}",
            fits if report.lines_that_fit else f"raise the MTU of the route to {report.frame_bytes} at least",
        )
    for name, has in (("UDP_SEGMENT", report.udp_segment), ("UDP_GRO", report.udp_gro)):
        if not has:
            warn(f"the kernel has no {name}: every frame costs a system call", "use Linux 5.0 or newer on this machine")
    goodput = report.goodput
    slots, planes = (goodput.slots, goodput.result_planes) if goodput else (report.slots_wanted, 2)
    report.buffer_needed = 2 * slots * planes * report.frame_bytes
    if report.receive_buffer < report.buffer_needed:
        warn(
            f"the socket's buffer has {report.receive_buffer} bytes, and {slots} results need {report.buffer_needed}",
            f"sysctl -w net.core.rmem_max={report.buffer_needed // 2}, or ask for fewer slots",
        )
    if goodput is not None:
        found += _findings_of_goodput(report, goodput)
    return found


def _findings_of_goodput(report: Report, goodput: Goodput) -> list[Finding]:
    found = []
    if goodput.dropped["wrong_results"]:
        what = f"{goodput.dropped['wrong_results']} results were wrong"
        found.append(Finding("warning", what, "do not use this reducer; run its self-test, and report this"))
    lost = goodput.lost_share
    if lost is not None and lost > _MUCH_LOST:
        do = "look for drops on the way: ip -s link, nstat -az | grep UdpRcvbuf, the switch; ask for fewer slots"
        found.append(Finding("warning", f"{lost:.1%} of frames were lost", do))
    elif goodput.resent_share > _MUCH_LOST:
        what = f"{goodput.resent_share:.1%} of frames were sent again"
        if lost is None:
            do = "look for drops on the way and for busy processors at both ends; ask for fewer slots"
        else:
            what += f", and {lost:.1%} of all were lost: answers are late, not lost"
            do = f"look for busy processors at both ends; {_load()}"
        found.append(Finding("warning", what, do))
    strange = {name: goodput.dropped[name] for name in ("malformed", "mismatched", "nacks") if goodput.dropped[name]}
    if strange:
        told = ", ".join(f"{count} {name}" for name, count in strange.items())
        found.append(
            Finding("warning", f"frames that did not count: {told}", "look for what damages frames on the way")
        )
    if goodput.slots < report.slots_wanted or goodput.lines_per_chunk < report.lines_wanted:
        what = f"granted {goodput.slots} slots of {goodput.lines_per_chunk} lines; {report.slots_wanted} of "
        do = "enough if the window does not limit; else close other jobs or raise the reducer's --slots or --quota"
        found.append(Finding("note", f"{what}{report.lines_wanted} were asked for", do))
    return found


def limit_of(report: Report) -> str:
    """What limits, in one sentence; empty if nothing was measured.

    A full window in every round trip is the most that the window lets through. What stays far below it waits somewhere
    else: for this side, if there are fewer chunks on the way than there may be, else for what is beyond.
    """
    goodput, trip = report.goodput, report.round_trip_median_s
    if goodput is None or trip is None:
        return ""
    lost = goodput.resent_share if goodput.lost_share is None else goodput.lost_share
    if lost > _MUCH_LOST:
        name = "sent again" if goodput.lost_share is None else "lost"
        return f"Loss limits: {lost:.1%} of frames were {name}."
    if goodput.cpu_share > _BUSY * min(goodput.members, os.cpu_count() or 1):
        return f"This machine's processor limits: {goodput.members} drivers used {goodput.cpu_share:.2f} cores."
    window = goodput.slots * goodput.lines_per_chunk * WORDS_PER_LINE * 64
    most = window / trip
    latency = goodput.latency_median_s or trip
    filled = goodput.elements_per_s * latency / window
    if goodput.elements_per_s > most / 2:
        return (
            f"The window limits: {goodput.slots} slots of {goodput.lines_per_chunk} lines in a round trip of "
            f"{1e6 * trip:.0f} us are {most / 1e6:.0f} M elements/s at most; more slots give more."
        )
    if filled < 0.5:
        return f"This machine limits: its drivers keep {filled:.0%} of the window on the way; {_load()}."
    return (
        f"The reducer, the way to it or the slowest member limits: a chunk takes {1e6 * latency:.0f} us under load, an "
        f"idle round trip {1e6 * trip:.0f} us."
    )


def _load() -> str:
    """How busy this machine is, where the system tells."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "not known"
    return f"the load here is {load} on {os.cpu_count()} cores"


# ---- the command -----------------------------------------------------------------------------------------------------


@app.command(help=__doc__)
def doctor(
    url: Annotated[
        str, typer.Argument(help="As udp://10.0.0.1:20045?slots=128&lines=16.", envvar=ENVIRONMENT_VARIABLE)
    ],
    seconds: Annotated[float, typer.Option(min=0, help="Of measuring goodput; 0 opens no job for it.")] = 2.0,
    members: Annotated[int, typer.Option(min=1, max=2, help="Of the job that is measured, in this process.")] = 2,
    round_trips: Annotated[int, typer.Option(min=1, help="Questions to time.")] = 50,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds until silence counts as absence.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="All that was found, as JSON.")] = False,
) -> None:
    try:
        report = examine(
            ReducerUrl.parse(url), seconds=seconds, members=members, round_trips=round_trips, timeout=timeout
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report) | {"status": report.status}, indent=2))
    else:
        _show(report, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(report.status)


def _show(report: Report, console: Console) -> None:
    if report.reachable:
        table = Table(title=report.url, box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        for name, value in _facts(report).items():
            table.add_row(name, value)
        console.print(table)
    if report.limit:
        console.print(f"what limits: {report.limit}")
    for finding in report.findings:
        console.print(f"{finding.severity}: {finding.what}\n  what to do: {finding.do}", markup=False)
    if not report.findings:
        console.print("all is well")


def _facts(report: Report) -> dict[str, str]:
    facts = {"protocol": f"version {report.protocol_version}, control frames version {report.control_version}"}
    if report.incarnation:
        facts["incarnation"] = report.incarnation
    if report.round_trip_min_s is not None:
        times = (report.round_trip_min_s, report.round_trip_median_s, report.round_trip_p99_s)
        shown = " / ".join(f"{1e6 * value:.0f}" for value in times if value is not None)
        facts["round trip"] = f"{shown} us (least, median, 99 %), {report.round_trips_lost} lost"
    if report.jobs_total is not None:
        facts["jobs"] = f"{report.jobs_used} of {report.jobs_total} in use"
        facts["slots"] = f"{report.slots_used} of {report.slots_total} in use"
    facts["packets"] = f"up to {report.frame_bytes} bytes; MTU {report.mtu or 'not known'}"
    offload = [name for name, has in (("UDP_SEGMENT", report.udp_segment), ("UDP_GRO", report.udp_gro)) if has]
    facts["kernel"] = ", ".join(offload) or "neither UDP_SEGMENT nor UDP_GRO"
    facts["socket buffers"] = (
        f"{report.receive_buffer} bytes in, {report.send_buffer} out; needed {report.buffer_needed}"
    )
    goodput = report.goodput
    if goodput is not None:
        facts["granted"] = f"{goodput.slots} slots of {goodput.lines_per_chunk} lines"
        facts["goodput"] = (
            f"{goodput.elements_per_s / 1e6:.1f} M elements/s, {goodput.bits_per_s_up / 1e9:.3f} Gb/s up, "
            f"{goodput.bits_per_s_down / 1e9:.3f} down, {goodput.members} members, {goodput.cpu_share:.2f} cores"
        )
        lost = "not known" if goodput.lost_share is None else f"{goodput.lost_share:.2%}"
        facts["sent again"] = f"{goodput.resent_share:.2%}; lost {lost}"
        if goodput.latency_median_s is not None and goodput.latency_p99_s is not None:
            latencies = f"{1e6 * goodput.latency_median_s:.0f} / {1e6 * goodput.latency_p99_s:.0f}"
            facts["latency"] = f"{latencies} us (median, 99 %) of a chunk"
    return facts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of ``neuron-fabric doctor``; ends by ``SystemExit``."""
    app(args=argv if argv is None else list(argv), prog_name="neuron-fabric doctor")


if __name__ == "__main__":
    main()
