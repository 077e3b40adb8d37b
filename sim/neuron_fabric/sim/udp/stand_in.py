"""The golden model with ports: something to run the bench on without any gateware, and with faults if need be.

It takes frames as they come and sends what is due later, in an order of its own, through the same narrow queues as the
gateware. What a driver writes to the registers is all that it knows of jobs and addresses.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping

from neuron_fabric.model import net
from neuron_fabric.model.encoding import Encoding
from neuron_fabric.model.endpoint import NetworkEndpoint
from neuron_fabric.model.net import HEADERS_BYTES, Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, Parent, Straggler
from neuron_fabric.model.registerfile import RegisterFile, Response
from neuron_fabric.model.registers import Access, words
from neuron_fabric.model.wire import DESTINATION_ALL, FrameType, Header
from neuron_fabric.sim.bench import BenchTimeoutError, CycleBench

__all__ = ["StandIn", "StandIns", "run"]

_BEAT = 64
_DELAY = 12  # cycles from a frame's last beat to its effect


class StandIn:
    """``wires[name] = value`` drives an input, ``wires[name]`` reads an output, :meth:`tick` is a clock edge.

    Parameters
    ----------
    params : ReducerParams
    seed : int
        Of its delays.
    """

    def __init__(self, params: ReducerParams, seed: int = 0) -> None:
        self.params = params
        self.rng = random.Random(f"stand-in:{seed}")
        self._in: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self._words = {word.address: word for word in words(params.jobs)}
        self._addresses = {word.name: word.address for word in words(params.jobs)}
        self._reset()

    def __setitem__(self, name: str, value: int) -> None:
        self._in[name] = value

    def __getitem__(self, name: str) -> int:
        return self._out[name]

    def _reset(self) -> None:
        self.registers = RegisterFile(self.params)
        self.endpoint = NetworkEndpoint(self.params, Endpoint(0, 0, 0))
        self.observed: Counter[str] = Counter()
        self.opened: dict[int, JobConfig] = {}
        self._table: dict[tuple[int, int, int], Endpoint] = {}
        self._now = 0
        self._frame = bytearray()
        self._pipeline: deque[tuple[int, bytes]] = deque()
        self._nacks: deque[bytes] = deque()
        self._relays: deque[bytes] = deque()
        self._results: deque[list[bytes]] = deque()
        self._sending: deque[int] = deque()
        self._last_keep = 0
        self._write: list[int | None] = [None, None]
        self._strobe = 0
        self._write_answer: int | None = None
        self._read_answer: tuple[int, int] | None = None
        self._read_due: tuple[int, int] | None = None
        self._outputs()

    # ---- a clock edge ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What the outputs are in the next cycle."""
        if self._in["rst"]:
            self._reset()
            return
        pins, out = self._in, self._out
        self._now += 1
        self.observed["cycles"] += 1
        taken = pins["s_axis_tvalid"] and out["s_axis_tready"]
        self.observed["stall_in"] += pins["s_axis_tvalid"] and not taken
        sent = out["m_axis_tvalid"] and pins["m_axis_tready"]
        self.observed["stall_out"] += out["m_axis_tvalid"] and not sent
        if taken:
            self._beat(pins)
        if sent:
            self._sending.popleft()
        self._bus()
        self._work()
        self._outputs()

    def _beat(self, pins: dict[str, int]) -> None:
        data = pins["s_axis_tdata"].to_bytes(_BEAT, "little")
        self._frame += data[: pins["s_axis_tkeep"].bit_length()]
        if pins["s_axis_tlast"]:
            self._pipeline.append((self._now + _DELAY, bytes(self._frame)))
            self._frame.clear()

    def _outputs(self) -> None:
        out = self._out
        out["s_axis_tready"] = int(len(self._pipeline) < 12 and self.rng.random() < 0.95)
        out["m_axis_tvalid"] = int(bool(self._sending))
        beat = self._sending[0] if self._sending else 0
        out["m_axis_tlast"] = int(len(self._sending) == 1)
        out["m_axis_tdata"] = beat
        out["m_axis_tkeep"] = self._last_keep if len(self._sending) == 1 else (1 << _BEAT) - 1
        out["s_axil_awready"] = int(self._write[0] is None and self._write_answer is None)
        out["s_axil_wready"] = int(self._write[1] is None and self._write_answer is None)
        out["s_axil_arready"] = int(self._read_due is None and self._read_answer is None)
        out["s_axil_bvalid"] = int(self._write_answer is not None)
        out["s_axil_bresp"] = self._write_answer or 0
        out["s_axil_rvalid"] = int(self._read_answer is not None)
        out["s_axil_rdata"], out["s_axil_rresp"] = self._read_answer or (0, 0)

    # ---- frames ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._pipeline and self._pipeline[0][0] <= self._now:
            self.receive(self._pipeline.popleft()[1])
        self.endpoint.reducer.advance(self._now)
        self._take_nacks()
        # Results are taken up when there is room; until then requests coalesce, and claims drop them.
        if not self._results and self.rng.random() < 0.2:
            self._take_results()
        if not self._sending:
            frame = self.next_frame()
            if frame is not None:
                self._begin(frame)

    def receive(self, frame: bytes) -> None:
        """A whole frame has its effect."""
        self.endpoint.receive(frame)

    def _take_nacks(self) -> None:
        """NACKs and relays leave the model at once: their queues are here."""
        reducer = self.endpoint.reducer
        for outgoing in reducer._nacks:
            if len(self._nacks) < 16:
                self._nacks += self._framed(outgoing.address, outgoing.payload)
            else:
                self.observed["nacks_dropped"] += 1
        reducer._nacks.clear()
        for outgoing in reducer._relays:
            if len(self._relays) < 8 * self.params.workers:
                self._relays += self._framed(None, outgoing.payload)
            else:
                self.observed["relays_dropped"] += 1
        reducer._relays.clear()

    def _framed(self, address: object, payload: bytes) -> list[bytes]:
        if isinstance(address, Endpoint):
            to = [address]
        elif self.endpoint.group is not None:
            to = [self.endpoint.group]
        else:
            to = list(self.endpoint._members[Header.unpack(payload).job])
        return [net.build(self.endpoint.me, one, payload) for one in to]

    def _take_results(self) -> None:
        groups: dict[tuple[bytes, bytes], list[bytes]] = {}
        for frame in self.endpoint.poll():
            header = frame[HEADERS_BYTES + 2 : HEADERS_BYTES + 14]
            groups.setdefault((frame[:6], header), []).append(frame)
        answers = list(groups.values())
        self.rng.shuffle(answers)
        # One to all counts once, however many members it goes to.
        self.observed["results"] += len({self._counted(answer[0]) for answer in answers})
        self._results += self.answers(answers)

    @staticmethod
    def _counted(frame: bytes) -> bytes:
        header = Header.unpack(frame[HEADERS_BYTES:])
        alone = header.type is not FrameType.RESULT or header.worker != DESTINATION_ALL
        return frame[HEADERS_BYTES + 2 : HEADERS_BYTES + 14] + (frame[:6] if alone else b"")

    def answers(self, answers: list[list[bytes]]) -> list[list[bytes]]:
        """What is sent, of the results that are taken up."""
        return answers

    def next_frame(self) -> bytes | None:
        """The frame to send, if there is one."""
        queues = [queue for queue in (self._nacks, self._relays) if queue]
        choices = len(queues) + bool(self._results)
        if not choices or self.rng.random() < 0.3:
            return None
        choice = self.rng.randrange(choices)
        if choice < len(queues):
            self.observed["nacks"] += queues[choice] is self._nacks
            return queues[choice].popleft()
        planes = self._results[0]
        frame = planes.pop(0)
        if not planes:
            self._results.popleft()
        return frame

    def _begin(self, frame: bytes) -> None:
        last = len(frame) % _BEAT or _BEAT
        self._last_keep = (1 << last) - 1
        for at in range(0, len(frame), _BEAT):
            self._sending.append(int.from_bytes(frame[at : at + _BEAT], "little"))

    # ---- registers ---------------------------------------------------------------------------------------------------

    def _bus(self) -> None:
        pins, out = self._in, self._out
        if pins["s_axil_bready"]:
            self._write_answer = None
        if pins["s_axil_rready"]:
            self._read_answer = None
        if self._read_due is not None and self._read_due[0] <= self._now:
            self._read_answer, self._read_due = self._read(self._read_due[1]), None
        if pins["s_axil_arvalid"] and out["s_axil_arready"]:
            self._read_due = self._now + 1, pins["s_axil_araddr"]
        if pins["s_axil_awvalid"] and out["s_axil_awready"]:
            self._write[0] = pins["s_axil_awaddr"]
        if pins["s_axil_wvalid"] and out["s_axil_wready"]:
            self._write[1] = pins["s_axil_wdata"]
            self._strobe = pins["s_axil_wstrb"]
        address, data = self._write
        if address is not None and data is not None and not self._pipeline:
            self._write_answer = int(self._store(address, data))
            self._write = [None, None]

    def _read(self, address: int) -> tuple[int, int]:
        word = self._words.get(address)
        if word is not None and word.register.access in (Access.COUNTER, Access.MAXIMUM):
            return self.counter(word.name.removeprefix("COUNT_").lower()), int(Response.OKAY)
        value, response = self.registers.read(address)
        return value, int(response)

    def counter(self, name: str) -> int:
        """What a counter says."""
        if name == "busy":
            name = "lines"
        counts = self.observed if name in self.observed or name in _OBSERVED else self.endpoint.reducer.counters
        return counts[name]

    def _store(self, address: int, data: int) -> Response:
        response = self.registers.write(address, data, self._strobe)
        word = self._words.get(address)
        if response is Response.OKAY and word is not None:
            self.written(word.name, data)
        return response

    def written(self, name: str, data: int) -> None:
        """What a write brings about."""
        field = self.registers.field
        if name.startswith(("LOCAL", "GROUP", "LISTEN")):
            self.endpoint.me = self._endpoint("LOCAL")
            self.endpoint.group = self._endpoint("GROUP") if field("GROUP_PORT", "enable") else None
            self.endpoint.listen = self._endpoint("LISTEN") if field("LISTEN_PORT", "enable") else None
        elif name == "ENTRY_WRITE" and data & 1:
            select = tuple(field("ENTRY_SELECT", part) for part in ("bank", "worker", "parent"))
            self._table[select] = self._endpoint("ENTRY")  # type: ignore[index]
        elif name == "CONTROL":
            if data & 1:
                self.endpoint.reducer.reset()
                self.opened.clear()
                self._nacks.clear()
                self._relays.clear()
            if data & 2:
                self.endpoint.reducer.clear_counters()
                self.observed.clear()
        elif name.endswith("_CONTROL"):
            self._job(int(name[3:].partition("_")[0]), data & 1)

    def _job(self, bank: int, opens: int) -> None:
        if bank in self.opened:
            self.endpoint.reducer.close(self.opened.pop(bank).job)
        if opens:
            self.opened[bank] = self._config(bank)
            self.endpoint.open(self.opened[bank])

    def _endpoint(self, name: str) -> Endpoint:
        field = self.registers.field
        mac = field(f"{name}_MAC_HI", "mac") << 32 | field(f"{name}_MAC_LO", "mac")
        return Endpoint(mac, field(f"{name}_IP", "ip"), field(f"{name}_PORT", "port"))

    def _config(self, bank: int) -> JobConfig:
        """A job as the registers of its bank have it."""

        def field(register: str, name: str, entry: int = 0) -> int:
            return self.registers.field(f"JOB{bank}_{register}", name, entry)

        workers = [worker for worker in range(self.params.workers) if field("MEMBERS", "member", worker)]
        weights = tuple(
            (-1) ** field("WEIGHTS", "negative", plane) << field("WEIGHTS", "shift", plane)
            for plane in range(field("ENCODING", "planes"))
        )
        leaves, planes = field("ENCODING", "leaves"), field("RESULT", "planes")
        # The registers do not say what a leaf may contribute, only how many planes that comes to.
        bits = min(planes, self.params.acc_bits)
        count = 1 << field("SLOTS", "log2_count")
        majority = field("RESULT", "majority")
        parent = None
        if field("RESULT", "child"):
            parent = Parent(
                self._table[bank, 0, 1],
                field("PARENT", "job"),
                field("PARENT_WORKER", "worker"),
                field("PARENT", "epoch"),
                1 << 20,
            )
        straggler = None
        if field("TIMEOUT", "cycles"):
            straggler = Straggler(field("TIMEOUT", "cycles"), field("QUORUM", "voters"))
        return _Given(
            field("CONTROL", "job"),
            field("EPOCH", "epoch"),
            {worker: self._table[bank, worker, 0] for worker in workers},
            Encoding("written", weights, bool(field("ENCODING", "counts_negatives")), leaves, (0, 0)),
            "majority" if majority else "tally",
            field("RESULT", "margin"),
            straggler,
            parent,
            bool(field("RESULT", "multicast")),
            field("SLOTS", "base"),
            count,
        ).with_planes(2 if majority else bits)


_OBSERVED = frozenset({"cycles", "stall_in", "stall_out", "results", "nacks", "nacks_dropped", "relays_dropped"})


class _Given(JobConfig):
    """A job whose result planes were written to a register."""

    def with_planes(self, planes: int) -> JobConfig:
        object.__setattr__(self, "_planes", planes)
        return self

    @property
    def result_planes(self) -> int:
        return int(self._planes)  # type: ignore[attr-defined]


class StandIns:
    """Several of them; the ports of each begin with its name and an underscore, clock and reset are shared."""

    def __init__(self, nodes: Mapping[str, StandIn]) -> None:
        self._nodes = nodes

    def __setitem__(self, name: str, value: int) -> None:
        node, _, port = name.partition("_")
        for known, device in self._nodes.items():
            if known == node or name == "rst":
                device[port or name] = value

    def __getitem__(self, name: str) -> int:
        node, _, port = name.partition("_")
        return self._nodes[node][port]

    def tick(self) -> None:
        """A clock edge for all."""
        for node in self._nodes.values():
            node.tick()


def run(bench: CycleBench, device: StandIn | StandIns, limit: int = 1_000_000) -> None:
    """Run a bench to its end on something with ports that is not a simulator.

    ``BenchTimeoutError`` after ``limit`` cycles; else what the bench raises.
    """
    while not bench.done:
        if bench.cycle >= limit:
            raise BenchTimeoutError(f"not finished after {limit} cycles")
        bench.drive(device)
        bench.observe(device)
        device.tick()
