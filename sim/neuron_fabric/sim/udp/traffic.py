"""Frames of honest workers and parents on a bad network, and frames that nobody should send.

Whether a frame is good or bad, and what it does, is not decided here: the golden model says it.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuron_fabric.model import net
from neuron_fabric.model.endpoint import buffer_bytes
from neuron_fabric.model.net import ETHERNET_BYTES, HEADERS_BYTES, IP_BYTES, Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import BITMAP_BYTES, JobConfig
from neuron_fabric.model.wire import DESTINATION_ALL, HEADER_BYTES, Flags, FrameType, Header
from neuron_fabric.sim.stimulus import Traffic
from neuron_fabric.sim.udp.stations import NEVER, Network, worker_at

__all__ = ["Adversary", "Flow", "Send"]

_CHUNKS = 1 << 32


@dataclass(frozen=True)
class Send:
    """One Ethernet frame.

    Attributes
    ----------
    frame : bytes
    note : str
        What it is meant to be.
    bank : int, optional
        The only job that it can have to do with; None: any.
    """

    frame: bytes
    note: str
    bank: int | None = None


class Flow:
    """The members of one job, who keep to the protocol, on a network that loses, repeats and reorders.

    What a network loses is sent again, so a lost contribution is one that comes late, and a lost result is one that is
    asked for again. A chunk follows the one a window before it as soon as all of that one is sent; that its result must
    have come, too, is for the bench to see to.

    Parameters
    ----------
    params, network, bank, config, rng
    lossless : bool
        Nothing is lost, repeated or reordered, all take part, and every chunk has as many lines.
    lines : int
        How many; 0: drawn for each.
    """

    def __init__(
        self,
        params: ReducerParams,
        network: Network,
        bank: int,
        config: JobConfig,
        rng: random.Random,
        *,
        lossless: bool = False,
        lines: int = 0,
    ) -> None:
        self.params, self.network, self.bank, self.config, self.rng = params, network, bank, config, rng
        self.traffic = Traffic(params, config, rng)
        self.recent: deque[tuple[int, int, bytes]] = deque(maxlen=48)  # worker, chunk, UDP payload
        self.lines: dict[int, int] = {}
        self.number = rng.choice([0, rng.randrange(_CHUNKS), _CHUNKS - rng.randint(1, 60)])
        self._lossless = lossless
        self._fixed = lines
        self._window = config.slot_count(params)
        self._open: dict[int, list[tuple[int, bytes]]] = {}
        self._late: list[tuple[int, int, bytes]] = []
        self._queue: deque[Send] = deque()

    @property
    def expires(self) -> bool:
        """Whether stragglers are waited for no longer than a simulation lasts."""
        return self.config.straggler is not None and self.config.straggler.timeout != NEVER

    def expired(self) -> None:
        """Time is up: what the stragglers have to say is on its way."""
        for worker, chunk, payload in self._late:
            self._queue.append(self.framed(worker, payload, "late"))
            self.recent.append((worker, chunk, payload))
        self._late.clear()

    def chunks(self, count: int) -> Iterator[Send]:
        """Frames until so many chunks were begun and all of them are sent."""
        begun = 0
        while begun < count or self._open or self._queue:
            if begun < count and self._may_launch():
                self._launch()
                begun += 1
                continue
            frame = self.step(launch=False)
            if frame is not None:
                yield frame

    def step(self, *, launch: bool = True) -> Send | None:
        """The next frame; None where the network has lost it."""
        rng = self.rng
        if launch and self._may_launch() and (not self._open or rng.random() < 0.3):
            self._launch()
        if self._queue and (not self._open or rng.random() < 0.5):
            return self._queue.popleft()
        if not self._open:
            return None
        chunk = next(iter(self._open)) if self._lossless or rng.random() < 0.5 else rng.choice(list(self._open))
        waiting = self._open[chunk]
        worker, payload = waiting.pop(0)
        if not waiting:
            del self._open[chunk]
            if self.config.parent is not None:
                self._answer(chunk)
        self.recent.append((worker, chunk, payload))
        note = "contribute" if len(payload) > HEADER_BYTES else "abstain"
        if not self._lossless and rng.random() < 0.08:
            self._queue.append(self.framed(worker, payload, "duplicate"))
        return self.framed(worker, payload, note)

    def whole(self) -> Send:
        """A full frame of a contribution to a chunk of its own."""
        worker = self.traffic.members[0]
        payload = self.traffic.contribute(worker, self.number, 0, self.params.lines_per_chunk)
        return replace(self.framed(worker, payload, "cut"), bank=None)

    def framed(self, worker: int, payload: bytes, note: str, source: Endpoint | None = None) -> Send:
        """A worker's datagram as an Ethernet frame."""
        frame = net.build(
            source or worker_at(self.bank, worker), self.network.me, payload, identification=self.rng.randrange(1 << 16)
        )
        return Send(frame, note, self.bank)

    # ---- chunks --------------------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        return len(self._open) < self._window and (self.number - self._window) % _CHUNKS not in self._open

    def _launch(self) -> None:
        rng, chunk, most = self.rng, self.number, self.params.lines_per_chunk
        self.number = (self.number + 1) % _CHUNKS
        if not self._lossless and not self._open and rng.random() < 0.02:
            # After a bucket was redone all ranks go on at a number that was never used.
            self.number = (self.number + 2 * self._window * rng.randint(1, 1 << 20)) % _CHUNKS
        lines = self._fixed or rng.choice([most, rng.randint(1, most), rng.randint(1, min(most, 3)), 1])
        share = 0 if self._lossless else rng.choice([0, 0, 0, 0.2, 1])
        frames: list[tuple[int, bytes]] = []
        for worker in self.traffic.members:
            if rng.random() < share:
                frames.append((worker, self.traffic.abstain(worker, chunk, lines)))
                continue
            sent = [frame.payload for frame in self.traffic.vote(worker, chunk, lines)]
            frames += [(worker, _with_voters(payload, self._voters(worker, chunk))) for payload in sent]
        if not self._lossless:
            rng.shuffle(frames)
            if rng.random() < 0.05:
                frames.pop()  # never finished
            if self.config.straggler is not None and rng.random() < 0.6:
                for _ in range(rng.randint(1, len(frames) or 1)):
                    if frames:
                        worker, payload = frames.pop()
                        self._late.append((worker, chunk, payload))
        self.lines[chunk] = lines
        if frames:
            self._open[chunk] = frames

    def _voters(self, worker: int, chunk: int) -> int:
        """Of a child reducer; the same in all its planes."""
        return 1 + (worker * 7 + chunk) % self.config.encoding.leaves

    # ---- the parent ----------------------------------------------------------------------------------------------

    def _answer(self, chunk: int) -> None:
        """What the parent says to a chunk that went up: any number of planes, some of them twice."""
        if not self._lossless and self.rng.random() < 0.1:
            return
        for frame in self.parent_frames(chunk, self.lines[chunk]):
            self._queue.append(frame)
            if not self._lossless and self.rng.random() < 0.1:
                self._queue.append(frame)

    def parent_frames(self, chunk: int, lines: int, spoilt: Mapping[str, Any] | None = None) -> list[Send]:
        """A result of the parent; ``spoilt`` are fields of its header that are wrong."""
        rng, parent, network = self.rng, self.config.parent, self.network
        if parent is None or not isinstance(parent.address, Endpoint):
            raise ValueError("this job has no parent")
        planes = rng.choice([2, rng.randint(1, 6)])
        partial = rng.random() < 0.2
        flags = rng.choice([0, Flags.MAJORITY, Flags.RESEND, 0x80]) | (Flags.PARTIAL if partial else 0)
        size = lines * self.params.line_bytes + (BITMAP_BYTES if partial else 0)
        frames = []
        for plane in range(planes):
            header = Header(
                FrameType.RESULT,
                parent.job,
                rng.choice([parent.worker, DESTINATION_ALL]),
                chunk,
                plane,
                planes,
                rng.randrange(1, 64),
                lines,
                parent.epoch,
                Flags(flags),
                rng.randrange(4) if partial else 0,
                rng.choice([0, 0, 7]),
            )
            payload = replace(header, **spoilt or {}).pack() + rng.randbytes(size)
            to = network.listen if network.listen is not None and rng.random() < 0.6 else network.me
            frames.append(Send(net.build(parent.address, to, payload), "parent's result", self.bank))
        return frames


def _with_voters(payload: bytes, voters: int) -> bytes:
    return payload[:16] + struct.pack(">H", voters) + payload[18:]


class Adversary:
    """Makes frames that are damaged, wrong, foreign, old, or from somebody else."""

    def __init__(self, params: ReducerParams, network: Network, rng: random.Random) -> None:
        self.params, self.network, self.rng = params, network, rng
        self._gone: deque[Flow] = deque(maxlen=4)
        self._kinds: tuple[tuple[int, Callable[[Flow], Send]], ...] = (
            (6, self._repeated),
            (3, self._other_bits),
            (2, self._stale),
            (2, self._other_lines),
            (2, self._abstain_after_vote),
            (6, self._flipped),
            (6, self._spoilt_header),
            (3, self._wrong_sender),
            (2, self._odd_type),
            (4, self._wrong_length),
            (4, self._wrong_datagram),
            (2, self._padded),
            (2, self._cut),
            (3, self._foreign),
            (2, self._noise),
            (1, self._of_a_closed_job),
            (3, self._wrong_parent),
        )

    def frame(self, flow: Flow) -> Send:
        """One of them, about a job that is open."""
        weights, kinds = zip(*self._kinds, strict=True)
        chosen: Callable[[Flow], Send] = self.rng.choices(kinds, weights)[0]
        return chosen(flow)

    def remember(self, flow: Flow) -> None:
        """A job that is closed."""
        self._gone.append(flow)

    def late_comer(self, flow: Flow) -> Send:
        """An honest frame of a job that was just closed."""
        worker, _chunk, payload = self._some(flow)
        return replace(flow.framed(worker, payload, "of a closed job"), bank=None)

    # ---- from the protocol's point of view -------------------------------------------------------------------------

    def _some(self, flow: Flow) -> tuple[int, int, bytes]:
        """A frame that was sent not long ago, or that might be sent."""
        if flow.recent:
            return self.rng.choice(flow.recent)
        worker = self.rng.choice(flow.traffic.members)
        return worker, flow.number, flow.traffic.contribute(worker, flow.number, 0, 1)

    def _repeated(self, flow: Flow) -> Send:
        worker, _chunk, payload = self._some(flow)
        return flow.framed(worker, payload, "duplicate")

    def _other_bits(self, flow: Flow) -> Send:
        worker, _chunk, payload = self._some(flow)
        changed = payload[:HEADER_BYTES] + self.rng.randbytes(len(payload) - HEADER_BYTES)
        return flow.framed(worker, changed, "duplicate, other bits")

    def _stale(self, flow: Flow) -> Send:
        rng, worker = self.rng, self.rng.choice(flow.traffic.members)
        _worker, chunk, _payload = self._some(flow)
        old = chunk - 2 * flow.config.slot_count(self.params) * rng.choice([1, 2, rng.randint(1, 1 << 20)])
        lines = rng.randint(1, self.params.lines_per_chunk)
        return flow.framed(worker, flow.traffic.contribute(worker, old % _CHUNKS, 0, lines), "stale")

    def _other_lines(self, flow: Flow) -> Send:
        worker, chunk, _payload = self._some(flow)
        plane = self.rng.randrange(flow.config.encoding.planes)
        lines = self.rng.randint(1, self.params.lines_per_chunk)
        return flow.framed(worker, flow.traffic.contribute(worker, chunk, plane, lines), "another line count")

    def _abstain_after_vote(self, flow: Flow) -> Send:
        worker, chunk, _payload = self._some(flow)
        lines = flow.lines.get(chunk, 1)
        return flow.framed(worker, flow.traffic.abstain(worker, chunk, lines), "abstain after vote")

    def _spoilt_header(self, flow: Flow) -> Send:
        worker, _chunk, payload = self._some(flow)
        what = ["magic", "version", "type", "job", "epoch", "worker", "plane", "planes", "lines", "voters"]
        first, second = self.rng.sample(what, 2)
        spoilt = flow.traffic.bad_header(payload, first).payload
        if self.rng.random() < 0.3:
            spoilt = flow.traffic.bad_header(spoilt, second).payload
        limit = buffer_bytes(self.params) - HEADERS_BYTES
        if len(spoilt) > limit and self.rng.random() < 0.8:
            spoilt = payload[:18] + b"\0" + payload[19:]
        return replace(flow.framed(worker, spoilt, f"bad {first}"), bank=None)

    def _wrong_sender(self, flow: Flow) -> Send:
        rng = self.rng
        worker, _chunk, payload = self._some(flow)
        right = worker_at(flow.bank, worker)
        other = worker_at(rng.randrange(self.params.jobs), rng.randrange(self.params.workers))
        source = rng.choice([
            replace(right, mac=right.mac ^ 1 << rng.randrange(48)),
            replace(right, ip=right.ip ^ 1 << rng.randrange(32)),
            replace(right, port=right.port ^ 1 << rng.randrange(16)),
            other,
            self.network.me,
        ])  # fmt: skip
        return flow.framed(worker, payload, "another sender", source)

    def _odd_type(self, flow: Flow) -> Send:
        rng = self.rng
        worker, _chunk, payload = self._some(flow)
        kind = rng.choice([*range(2, 16), FrameType.RESULT, FrameType.ABSTAIN, FrameType.CONTRIBUTE])
        body = rng.choice([payload[HEADER_BYTES:], b"", rng.randbytes(64)])
        changed = payload[:2] + bytes([0x10 | kind]) + payload[3:HEADER_BYTES] + body
        return replace(flow.framed(worker, changed, f"type {kind}"), bank=None)

    def _wrong_length(self, flow: Flow) -> Send:
        rng = self.rng
        worker, _chunk, payload = self._some(flow)
        changed = rng.choice([
            payload[: rng.randrange(HEADER_BYTES)],
            payload[:HEADER_BYTES],
            payload[: rng.randrange(len(payload))],
            payload + rng.randbytes(rng.randint(1, 3)),
            payload + rng.randbytes(64),
            payload[: max(HEADER_BYTES, len(payload) - 64)],
        ])  # fmt: skip
        return flow.framed(worker, changed, "wrong length")

    def _of_a_closed_job(self, flow: Flow) -> Send:
        return self.late_comer(self.rng.choice(self._gone)) if self._gone else self._repeated(flow)

    def _wrong_parent(self, flow: Flow) -> Send:
        rng, parent = self.rng, flow.config.parent
        if parent is None:
            return self._odd_type(flow)
        _worker, chunk, _payload = self._some(flow)
        most = self.params.lines_per_chunk
        lines = rng.choice([0, 1, most, most + 1, rng.randint(1, most)])
        spoilt: dict[str, Any] = rng.choice([
            {"epoch": parent.epoch ^ 1},
            {"job": parent.job ^ 1 << rng.randrange(16)},
            {"worker": parent.worker ^ 1},
            {"lines": lines ^ 1},
            {"flags": Flags.PARTIAL},
            {},
        ])  # fmt: skip
        frame = rng.choice(flow.parent_frames(chunk, lines, spoilt)).frame
        if rng.random() < 0.3:
            changed = bytearray(frame)
            changed[6 + rng.randrange(6)] ^= 1 << rng.randrange(8)  # the sender's MAC address has no checksum
            frame = bytes(changed)
        return Send(frame, "not quite the parent's result")

    # ---- from the network's point of view --------------------------------------------------------------------------

    def _good(self, flow: Flow) -> bytes:
        worker, _chunk, payload = self._some(flow)
        return flow.framed(worker, payload, "").frame

    def _flipped(self, flow: Flow) -> Send:
        """One bit only: a ones' complement sum does not notice every pair."""
        frame, rng = bytearray(self._good(flow)), self.rng
        start, stop = rng.choice([
            (0, ETHERNET_BYTES),
            (ETHERNET_BYTES, ETHERNET_BYTES + IP_BYTES),
            (ETHERNET_BYTES + IP_BYTES, HEADERS_BYTES),
            (HEADERS_BYTES, HEADERS_BYTES + HEADER_BYTES),
            (HEADERS_BYTES, len(frame)),
            (HEADERS_BYTES, len(frame)),
        ])  # fmt: skip
        frame[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
        return Send(bytes(frame), "a bit flipped", flow.bank)

    def _padded(self, flow: Flow) -> Send:
        frame = self._good(flow)
        limit = buffer_bytes(self.params)
        size = self.rng.choice([1, 4, self.rng.randint(1, 200), max(1, limit - len(frame)), limit + 1 - len(frame)])
        return Send(frame + self.rng.randbytes(max(1, size)), "padded", flow.bank)

    def _cut(self, flow: Flow) -> Send:
        frame = self._good(flow)
        return Send(frame[: self.rng.randrange(1, len(frame))], "cut off", flow.bank)

    def _wrong_datagram(self, flow: Flow) -> Send:
        """One number of the Ethernet, IPv4 or UDP header is wrong, the checksums in front of it are right."""
        frame, rng = bytearray(self._good(flow)), self.rng
        ip, udp = ETHERNET_BYTES, ETHERNET_BYTES + IP_BYTES
        what = rng.choice(["total", "udp length", "no checksum", "options", "version", "fragment", "protocol", "type"])
        total, length = (int.from_bytes(frame[at : at + 2], "big") for at in (ip + 2, udp + 4))
        off = rng.choice([-1, 1, -64, 64, rng.randrange(1 << 16)])
        match what:
            case "total":
                frame[ip + 2 : ip + 4] = ((total + off) % (1 << 16)).to_bytes(2, "big")
            case "udp length":
                frame[udp + 4 : udp + 6] = ((length + off) % (1 << 16)).to_bytes(2, "big")
            case "no checksum":
                frame[udp + 6 : udp + 8] = bytes(2)
            case "options":
                frame[ip] = 0x40 | rng.choice([0, 4, 6, 15])
            case "version":
                frame[ip] = rng.choice([0, 5, 6]) << 4 | 5
            case "fragment":
                frame[ip + 6 : ip + 8] = rng.choice([0x2000, 0x0001, 0x1FFF, 0x8000, 0]).to_bytes(2, "big")
            case "protocol":
                frame[ip + 9] = rng.choice([1, 6, 16, 18, 132])
            case _:
                frame[12:14] = rng.choice([0x0806, 0x86DD, 0x8100, 0x0801]).to_bytes(2, "big")
        frame[ip + 10 : ip + 12] = bytes(2)
        frame[ip + 10 : ip + 12] = net.internet_checksum(frame[ip : ip + IP_BYTES]).to_bytes(2, "big")
        if what == "udp length" and rng.random() < 0.5:
            self._sum(frame)
        return Send(bytes(frame), f"wrong {what}", flow.bank)

    @staticmethod
    def _sum(frame: bytearray) -> None:
        """Make the UDP checksum what it would be with the lengths as they are."""
        ip, udp = ETHERNET_BYTES, ETHERNET_BYTES + IP_BYTES
        frame[udp + 6 : udp + 8] = bytes(2)
        pseudo = bytes(frame[ip + 12 : ip + 20]) + b"\0\x11" + bytes(frame[udp + 4 : udp + 6])
        frame[udp + 6 : udp + 8] = (net.internet_checksum(pseudo + frame[udp:]) or 0xFFFF).to_bytes(2, "big")

    def _foreign(self, flow: Flow) -> Send:
        rng, me = self.rng, self.network.me
        worker, _chunk, payload = self._some(flow)
        source = worker_at(flow.bank, worker)
        match rng.randrange(5):
            case 0:
                to = rng.choice([
                    replace(me, mac=me.mac ^ 1 << rng.randrange(48)),
                    replace(me, ip=me.ip ^ 1 << rng.randrange(32)),
                    replace(me, port=me.port ^ 1 << rng.randrange(16)),
                    replace(me, mac=(1 << 48) - 1),
                ])  # fmt: skip
                frame = net.build(source, to, payload)
            case 1:
                group = rng.choice([self.network.group, self.network.listen, Endpoint.multicast("224.0.0.251", 5353)])
                frame = net.build(source, group or me, payload)
            case 2:
                frame = b"\xff" * 6 + source.mac.to_bytes(6, "big") + b"\x08\x06" + rng.randbytes(46)  # ARP
            case 3:
                frame = me.mac.to_bytes(6, "big") + source.mac.to_bytes(6, "big") + b"\x86\xdd" + rng.randbytes(60)
            case _:
                good = net.build(source, me, payload)
                frame = good[:12] + b"\x81\x00\x00\x05" + good[12:]  # a VLAN tag
        return Send(frame, "foreign", flow.bank)

    def _noise(self, flow: Flow) -> Send:
        rng, limit = self.rng, buffer_bytes(self.params)
        size = rng.choice([1, 13, 14, 41, 42, 59, rng.randint(1, 63), limit, limit + 1, limit + 64, 3 * limit])
        frame = rng.randbytes(size)
        if rng.random() < 0.5:
            frame = (self._good(flow)[: HEADERS_BYTES + HEADER_BYTES] + frame)[:size]
        return Send(frame, "noise", flow.bank)
