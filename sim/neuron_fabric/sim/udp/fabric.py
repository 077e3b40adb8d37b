"""A tree of endpoints, end to end: workers, a switch that moves frames by MAC address, and one result for all.

Nothing here asks the golden reducer. Workers are :class:`~neuron_fabric.model.worker.GoldenWorker`; what must come out
is the sum of everybody's integers, as if there were one reducer and no network. The switch loses, repeats and reorders
frames if it is told to; or it holds hardly any, so that whoever sends must wait for whoever receives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from neuron_fabric.model import net
from neuron_fabric.model.encoding import Encoding, encoding_by_name, tally_encoding
from neuron_fabric.model.endpoint import buffer_bytes
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.programming import RegisterWrite, open_job, set_addresses
from neuron_fabric.model.reducer import JobConfig, Parent
from neuron_fabric.model.registers import COUNTERS, words
from neuron_fabric.model.worker import GoldenWorker
from neuron_fabric.sim.axilite import Access as Transfer
from neuron_fabric.sim.axilite import AxiLiteMaster
from neuron_fabric.sim.bench import BenchTimeoutError
from neuron_fabric.sim.measured import Measured
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import FrameSink, FrameSource, pattern

__all__ = ["Fabric", "Tree"]

_PORT = 20045
_RESET_CYCLES = 3
_AGAIN = 900  # cycles without a frame for it after which a worker sends again
_HARMLESS = frozenset(
    {"frames", "lines", "completed", "results", "duplicates", "stall_in", "stall_out", "busy", "cycles"}
    | {"slot_high_water"}
)
"""Counters that count without anything being wrong; a worker may be impatient."""
_TROUBLE = frozenset({"stale", "nacks", "nacks_dropped", "relays_dropped", "refused_bad_type"})
"""And those that count when the network is bad; a child has no use for the NACKs of its parent."""


@dataclass(frozen=True)
class Tree:
    """Two children and their parent, and what their workers do.

    Attributes
    ----------
    params : ReducerParams
        Of all three.
    seed : int
    workers : tuple of int
        How many each child has.
    encoding, result_format, margin
        Of the whole.
    groups : bool
        Results go to multicast groups; else to each member in turn.
    buckets, lines : int
        How much is summed: so many buckets of so many lines.
    trouble : float
        The share of frames that the switch loses, and of those that it repeats or delays.
    depth : int
        Frames that a port of the switch holds; 0: any number. A port that is full stops whoever sends to it.
    stalls : str
        Pattern of all streams.
    """

    params: ReducerParams
    seed: int
    workers: tuple[int, int] = (3, 2)
    encoding: str = "binary"
    result_format: Literal["tally", "majority"] = "tally"
    margin: int = 0
    groups: bool = True
    buckets: int = 3
    lines: int = 40
    trouble: float = 0.0
    depth: int = 0
    stalls: str = "mostly"

    @property
    def leaves(self) -> int:
        """Most workers below one child."""
        return max(self.workers)


@dataclass(eq=False)
class _Node:
    """One endpoint, and its ports."""

    name: str
    me: Endpoint
    group: Endpoint | None
    listen: Endpoint | None
    config: JobConfig
    source: FrameSource
    sink: FrameSink
    bus: AxiLiteMaster
    inbox: deque[bytes] = field(default_factory=deque)  # the switch's port to it
    outbox: deque[bytes] = field(default_factory=deque)  # what it sent and the switch could not pass on
    writes: list[Transfer] = field(default_factory=list)
    reads: dict[str, Transfer] = field(default_factory=dict)


@dataclass(eq=False)
class _Station:
    """A worker: where it is, whom it talks to, what it has to say."""

    me: Endpoint
    node: _Node
    worker: GoldenWorker
    inbox: deque[bytes] = field(default_factory=deque)
    outbox: deque[bytes] = field(default_factory=deque)
    heard: int = 0
    bits: npt.NDArray[np.uint8] | None = None
    abstains: list[bool] = field(default_factory=list)


class Fabric:
    """The bench of a tree: :meth:`drive`, :meth:`observe`, :attr:`done`, as for one endpoint."""

    def __init__(self, tree: Tree, patience: int = 6000) -> None:
        self.tree = tree
        self.params = tree.params
        self.measured = Measured()
        self._rng = random.Random(f"fabric:{tree.seed}")
        self._patience = patience
        self._encoding = encoding_by_name(tree.encoding)
        self._nodes = self._make_nodes()
        self._stations = [station for node in self._nodes[1:] for station in self._make_stations(node)]
        self._addresses = {word.name: word.address for word in words(self.params.jobs)}
        self._bucket = 0
        self._moved = self._heard = 0  # when a beat moved, when something reached a worker or a driver
        self._delayed: list[tuple[int, bytes]] = []
        self.cycle = 0
        self.done = False
        for node in self._nodes:
            node.writes = [node.bus.write(address, value) for address, value in self._program(node)]
        self._submit()

    # ---- who is there ------------------------------------------------------------------------------------------------

    def _make_nodes(self) -> list[_Node]:
        tree = self.tree
        at = [Endpoint(0x02_00_00_00_10_00 | k, 0x0A_00_01_00 | k, _PORT) for k in range(3)]
        groups = [Endpoint.multicast(f"239.0.0.{1 + k}", _PORT) if tree.groups else None for k in range(3)]
        up = tally_encoding(self._encoding, tree.leaves)
        root = JobConfig(7, 3, dict(enumerate(at[1:])), up, tree.result_format, tree.margin)
        configs = [root]
        for k in range(2):
            members = {worker: self._worker_at(k, worker) for worker in range(tree.workers[k])}
            parent = Parent(at[0], root.job, k, root.epoch, tree.leaves)
            configs.append(JobConfig(20 + k, 5 + k, members, self._encoding, parent=parent))
        nodes = []
        for k, (name, config) in enumerate(zip(("root", "left", "right"), configs, strict=True)):
            seed = f"{name}:{tree.seed}"
            source = FrameSource(f"{name}_s_axis", pattern(tree.stalls, f"in:{seed}"), seed=seed)
            sink = FrameSink(f"{name}_m_axis", pattern(tree.stalls, f"out:{seed}"), buffer_bytes(self.params))
            bus = AxiLiteMaster(seed, "always", f"{name}_s_axil")
            nodes.append(_Node(name, at[k], groups[k], groups[0] if k else None, config, source, sink, bus))
        return nodes

    @staticmethod
    def _worker_at(child: int, worker: int) -> Endpoint:
        return Endpoint(0x02_00_00_00_20_00 | child << 8 | worker, 0x0A_00_02_00 | child << 4 | worker, 31000 + worker)

    def _make_stations(self, node: _Node) -> Iterator[_Station]:
        root = self._nodes[0].config
        # A worker knows how the root's results look; its own reducer only passes them on.
        config = replace(node.config, parent=None, result_format=root.result_format)
        if not isinstance(node.config.members, dict):
            raise TypeError("members have addresses")
        for worker, address in node.config.members.items():
            golden = GoldenWorker(self.params, config, worker, root.result_planes, reducer=node.me)
            yield _Station(address, node, golden)

    def _program(self, node: _Node) -> list[RegisterWrite]:
        addresses = set_addresses(self.params, node.me, group=node.group, listen=node.listen)
        return [*addresses, *open_job(self.params, node.config)]

    # ---- every cycle -------------------------------------------------------------------------------------------------

    def drive(self, wires: Any) -> None:
        """Set the inputs of this cycle."""
        resetting = self.cycle < _RESET_CYCLES
        wires["rst"] = int(resetting)
        if not resetting and self._ready():
            self._talk()
            self._switch()
        for node in self._nodes:
            if resetting:
                for name in ("s_axis_tvalid", "m_axis_tready", "s_axil_awvalid", "s_axil_wvalid", "s_axil_arvalid",
                             "s_axil_bready", "s_axil_rready"):  # fmt: skip
                    wires[f"{node.name}_{name}"] = 0
                continue
            if node.source.idle and node.inbox:
                node.source.send(node.inbox.popleft())
            node.source.drive(wires)
            full = self.tree.depth and len(node.outbox) >= self.tree.depth
            node.sink.drive(wires, False if full else None)
            node.bus.drive(wires)

    def observe(self, wires: Any) -> None:
        """Look at the outputs of this cycle; raises what is wrong with them."""
        if self.cycle >= _RESET_CYCLES:
            for node in self._nodes:
                if node.source.observe(wires):
                    self._moved = self.cycle
                    self.measured.frames += node.source.idle
                frame = node.sink.observe(wires, self.cycle)
                if frame is not None:
                    self._moved = self.cycle
                    node.outbox.append(frame.data)
                for transfer in node.bus.observe(wires, self.cycle):
                    self._moved = self._heard = self.cycle
                    if transfer.response:
                        raise Mismatch(f"{node.name}: response {transfer.response} at {transfer.address:#x}")
            if self.cycle - self._heard > self._patience:
                raise BenchTimeoutError(
                    f"cycle {self.cycle}: for {self._patience} cycles no worker has heard anything: {self._state()}"
                )
        self.cycle += 1
        self.measured.cycles = self.cycle

    def _ready(self) -> bool:
        return all(write.done for node in self._nodes for write in node.writes)

    def _state(self) -> str:
        waiting = [f"{node.name} {len(node.inbox)} in {len(node.outbox)} out" for node in self._nodes]
        open_ones = sum(not station.worker.done for station in self._stations)
        return f"bucket {self._bucket}, {open_ones} workers wait; the switch holds: {', '.join(waiting)}"

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """The next bucket of every worker: random values, some chunks without any."""
        rng, tree = self._rng, self.tree
        chunks = -(-tree.lines // self.params.lines_per_chunk)
        size = tree.lines * self.params.line_bytes
        for station in self._stations:
            planes = np.frombuffer(rng.randbytes(self._encoding.planes * size), np.uint8).reshape(-1, size)
            if self._encoding.signed:  # nobody votes for and against
                planes = np.stack([planes[0], planes[1] & ~planes[0]])
            station.bits = planes
            station.abstains = [rng.random() < 0.1 for _ in range(chunks)]
            station.worker.submit(planes, tree.lines, abstain=station.abstains)
            station.heard = self.cycle

    def _talk(self) -> None:
        """Workers take what has come and send what they may."""
        for station in self._stations:
            while station.inbox:
                datagram = net.parse(station.inbox.popleft(), station.me, station.node.group)
                station.worker.receive(datagram.payload, datagram.source)
                station.heard = self._heard = self.cycle
            again = self.cycle - station.heard > _AGAIN
            if again:
                station.heard = self.cycle
            if not station.outbox and not station.worker.done:
                payloads = station.worker.outgoing(again=again)
                station.outbox.extend(net.build(station.me, station.node.me, payload) for payload in payloads)
        if all(station.worker.done for station in self._stations) and not self.done:
            self._finish_bucket()

    def _finish_bucket(self) -> None:
        if self._bucket < self.tree.buckets:
            self._judge()
            self._bucket += 1
            if self._bucket < self.tree.buckets:
                self._submit()
                return
        if self._settled():
            self._count()

    def _settled(self) -> bool:
        quiet = all(node.source.idle and not (node.inbox or node.outbox or node.sink.partial) for node in self._nodes)
        return quiet and not self._delayed and self.cycle - self._moved > 20 * self.params.lines_per_chunk + 200

    # ---- the switch --------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        """Move frames: from workers and endpoints to whoever has the destination's address."""
        for station in self._stations:
            if station.outbox:
                self._pass_on(station.outbox)
        for node in self._nodes:
            if node.outbox:
                self._pass_on(node.outbox)
        due = [frame for cycle, frame in self._delayed if cycle <= self.cycle]
        if due:
            self._delayed = [entry for entry in self._delayed if entry[0] > self.cycle]
            for frame in due:
                for inbox in self._ports(frame):
                    inbox.append(frame)

    def _pass_on(self, queue: deque[bytes]) -> None:
        rng, frame, trouble = self._rng, queue[0], self.tree.trouble
        ports = self._ports(frame)
        if self.tree.depth and any(len(port) >= self.tree.depth for port in ports):
            return
        queue.popleft()
        if not ports:
            raise Mismatch(f"a frame for {frame[:6].hex()}, who is nobody")
        for port in ports:
            if trouble and rng.random() < trouble:
                continue  # lost
            port.append(frame)
        if trouble and rng.random() < trouble:
            self._delayed.append((self.cycle + rng.randint(1, 600), frame))

    def _ports(self, frame: bytes) -> list[deque[bytes]]:
        mac = int.from_bytes(frame[:6], "big")
        ports = [node.inbox for node in self._nodes if mac in (node.me.mac, node.listen and node.listen.mac)]
        return ports + [
            station.inbox
            for station in self._stations
            if mac in (station.me.mac, station.node.group and station.node.group.mac)
        ]

    # ---- what must come out ------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Everybody has the sum over everybody."""
        tree = self.tree
        expected, voters = _flat_sum(self._encoding, self._stations, self.params)
        for station in self._stations:
            result = station.worker.result()
            if result.voters.tolist() != voters:
                raise Mismatch(f"bucket {self._bucket}: voters {result.voters.tolist()}, expected {voters}")
            total = _decoded(
                result.planes, self._encoding, tree.result_format, np.repeat(voters, self._per_chunk(voters))
            )
            if tree.result_format == "majority":
                wanted = np.where(abs(expected) > tree.margin, np.sign(expected), 0)
            else:
                wanted = expected
            if not np.array_equal(total, wanted):
                wrong = int((total != wanted).sum())
                raise Mismatch(f"bucket {self._bucket}, {station.me}: {wrong} of {wanted.size} elements are wrong")
        self.measured.results += len(voters)
        self.measured.lines += tree.lines

    def _per_chunk(self, voters: Sequence[int]) -> list[int]:
        """Elements of each chunk of a bucket."""
        whole, lanes = self.params.lines_per_chunk, self.params.lanes
        counts = [whole] * len(voters)
        counts[-1] = self.tree.lines - whole * (len(voters) - 1)
        return [count * lanes for count in counts]

    def _count(self) -> None:
        """Counters say that nothing was wrong, unless the switch did something."""
        for node in self._nodes:
            if not node.reads:
                node.reads = {name: node.bus.read(self._addresses[f"COUNT_{name.upper()}"]) for name, _doc in COUNTERS}
        if not all(read.done for node in self._nodes for read in node.reads.values()):
            return
        for node in self._nodes:
            counts = {name: read.data for name, read in node.reads.items() if read.data}
            chunks = self.tree.buckets * -(-self.tree.lines // self.params.lines_per_chunk)
            if counts.get("completed") != chunks:
                raise Mismatch(f"{node.name}: {counts.get('completed')} chunks completed, expected {chunks}")
            expected = _HARMLESS | (_TROUBLE if self.tree.trouble or self.tree.depth else frozenset())
            wrong = {name: count for name, count in counts.items() if name not in expected}
            if wrong:
                raise Mismatch(f"{node.name}: counters {wrong}")
        self.measured.figures["duplicates"] = sum(node.reads["duplicates"].data for node in self._nodes)
        self.done = True


def _flat_sum(
    encoding: Encoding, stations: Sequence[_Station], params: ReducerParams
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The vote sum of every element over all workers, in plain integers, and the voters of every chunk."""
    per_chunk = params.lines_per_chunk * params.line_bytes * 8
    total: npt.NDArray[np.int64] | None = None
    voters = [0] * len(stations[0].abstains)
    for station in stations:
        if station.bits is None:
            raise RuntimeError("a worker has no bucket")
        bits = np.unpackbits(station.bits, axis=1, bitorder="little").astype(np.int64)
        votes: npt.NDArray[np.int64] = np.tensordot(encoding.weights, bits, 1)
        if encoding.counts_negatives:
            votes = 1 - 2 * votes
        for chunk, abstains in enumerate(station.abstains):
            if abstains:
                votes[chunk * per_chunk : (chunk + 1) * per_chunk] = 0
            voters[chunk] += not abstains
        total = votes if total is None else total + votes
    if total is None:
        raise RuntimeError("there are no workers")
    return total, voters


def _decoded(
    planes: npt.NDArray[np.uint8], encoding: Encoding, result_format: str, voters: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """A result's vote sums, or their signs."""
    bits = np.unpackbits(planes, axis=1, bitorder="little").astype(np.int64)
    if result_format == "majority":
        signs: npt.NDArray[np.int64] = bits[1] - 2 * bits[0]
        return signs
    weights = [1 << plane for plane in range(len(bits))]
    if encoding.signed:
        weights[-1] = -weights[-1]
    tally: npt.NDArray[np.int64] = np.tensordot(weights, bits, 1)
    return voters - 2 * tally if encoding.counts_negatives else tally
