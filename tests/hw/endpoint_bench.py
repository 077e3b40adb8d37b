"""A bench of the whole in-network endpoint: frames in, frames out, registers, and the golden model beside."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from amaranth.hdl import Cat

from neuron_fabric.hw.udp_endpoint import UdpEndpoint
from neuron_fabric.model import JobConfig, ReducerParams, net, programming
from neuron_fabric.model.endpoint import NetworkEndpoint, buffer_bytes
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.programming import RegisterWrite
from neuron_fabric.model.registers import COUNTERS, words
from neuron_fabric.model.wire import DESTINATION_ALL, Flags, FrameType, Header

from .bench import Ready, always, tick_until
from .stream_bench import LINE, Bench, frames_of, never

Step = bytes | int | list[RegisterWrite] | None
Script = Iterable[Step | Callable[[], Step]]
"""One after the other: send a frame, wait for so many cycles, or write registers; or what a call gives in its turn."""


class EndpointBench:
    """Plays a script, and tells the model in the order in which the gateware looks at things.

    Which frames come before a job is opened or closed and which after is seen at the place where headers are looked at:
    the model gets a frame when its header passes there, and a change of jobs when the registers show it.
    """

    def __init__(
        self,
        params: ReducerParams,
        me: Endpoint,
        group: Endpoint | None = None,
        listen: Endpoint | None = None,
        relays: int = 8,
    ) -> None:
        self.params, self.me, self.group, self.listen = params, me, group, listen
        self.dut = dut = UdpEndpoint(params, relays)
        self.bench = Bench(dut)
        self.model = NetworkEndpoint(params, me, group, listen)
        self.names = {word.name: word.address for word in words(params.jobs)}
        self.input = self.bench.watch(dut.s_axis_tvalid, dut.s_axis_tready, dut.s_axis_tlast)
        out = Cat(dut.m_axis_tdata, dut.m_axis_tkeep, dut.m_axis_tlast)
        self.output = self.bench.watch(dut.m_axis_tvalid, dut.m_axis_tready, out)
        self.due: Counter[bytes] = Counter()
        self.nacks_due = 0
        self.upcoming: dict[int, JobConfig] = {}
        self.open: dict[int, JobConfig] = {}
        self.configs: dict[tuple[int, int], JobConfig] = {}
        self.stalls = Counter[str]()
        self.nacks_at: list[int] = []
        self.resets_at: list[int] = []
        self.counters: dict[str, int] = {}
        self._cleared = 0  # beats of the output before the counters were cleared
        self._unseen: list[bytes] = []  # sent, and not yet given to the model
        self.bench.sim.add_testbench(self._watch, background=True)

    async def _watch(self, ctx: Any) -> None:
        dut = self.dut
        port, registers = dut.ingress.datagram, dut.registers
        signals = (
            port.valid & port.ready & port.payload.first,
            registers.opened,
            registers.closed,
            registers.control_reset,
            registers.control_clear,
            dut.s_axis_tvalid & ~dut.s_axis_tready,
            dut.m_axis_tvalid & ~dut.m_axis_tready,
            registers.count.nacks,
        )
        cycle = 0
        async for _clk, rst, header, opened, closed, reset, clear, stall_in, stall_out, nack in ctx.tick().sample(
            *signals
        ):
            if rst:
                self._restart()
            if clear:
                self.model.reducer.clear_counters()
                self.stalls.clear()
                self._cleared = len(self.output.beats)
            else:
                self.stalls.update({"stall_in": stall_in, "stall_out": stall_out, "cycles": 1})
            if nack:
                self.nacks_at.append(cycle)
            for bank in range(self.params.jobs):
                if closed >> bank & 1:
                    self.model.reducer.close(self.open.pop(bank).job)
                if opened >> bank & 1:
                    self.open[bank] = self.upcoming[bank]
                    self.model.open(self.open[bank])
                    self.configs[self.open[bank].job, self.open[bank].epoch] = self.open[bank]
            if reset:
                self.model.reducer.reset()
                self.resets_at.append(cycle)
            if header:
                self._next_frame(whole=True)
            cycle += 1

    def _restart(self) -> None:
        """After a hardware reset nothing is as it was, and what was on its way out is cut off."""
        self._unseen.clear()
        self.output.beats.clear()
        self._cleared = 0
        self.model = NetworkEndpoint(self.params, self.me, self.group, self.listen)
        self.open.clear()
        self.due.clear()
        self.nacks_due = 0
        self.stalls.clear()

    def _next_frame(self, whole: bool) -> None:
        """Give the model frames up to one that has passed the receiver; or all that have not."""
        while self._unseen:
            frame = self._unseen.pop(0)
            taken = self._passes(frame)
            self.model.receive(frame)
            self._ask()
            if taken and whole:
                return
        assert not whole, "a frame has passed that was not sent"

    def _ask(self) -> None:
        for answer in self.model.poll():
            self.due[answer] += 1
            header = self._header(answer)
            self.nacks_due += header.type is FrameType.NACK

    def _passes(self, frame: bytes) -> bool:
        try:
            net.parse(frame, self.me, self.listen, buffer_bytes(self.params))
        except net.FrameError:
            return False
        return True

    @staticmethod
    def _header(frame: bytes) -> Header:
        return Header.unpack(net.parse(frame, None).payload)

    def _relays(self, header: Header) -> bool:
        """Whether a frame is a parent's RESULT."""
        config = self.configs.get((header.job, header.epoch))
        return header.type is FrameType.RESULT and config is not None and config.parent is not None

    # ---- ports ---------------------------------------------------------------------------------------------------

    async def send(
        self, ctx: Any, frame: bytes, pause: Ready = never, *, first: int = 0, beats: int | None = None
    ) -> None:
        """Send a frame from beat ``first`` on, or only its first ``beats``."""
        dut = self.dut
        for at in range(0, len(frame), LINE)[first:beats]:
            part = frame[at : at + LINE]
            while pause(self.bench.cycle):
                await ctx.tick()
            last = at + LINE >= len(frame)
            if last:
                self._unseen.append(frame)
            ctx.set(dut.s_axis_tdata, int.from_bytes(part, "little"))
            ctx.set(dut.s_axis_tkeep, (1 << len(part)) - 1)
            ctx.set(dut.s_axis_tlast, last)
            ctx.set(dut.s_axis_tvalid, 1)
            await tick_until(ctx, dut.s_axis_tready, "s_axis_tready")
            ctx.set(dut.s_axis_tvalid, 0)

    async def write(self, ctx: Any, writes: Iterable[RegisterWrite]) -> None:
        dut = self.dut
        for address, value in writes:
            ctx.set(dut.s_axil_awaddr, address)
            ctx.set(dut.s_axil_awvalid, 1)
            ctx.set(dut.s_axil_wdata, value)
            ctx.set(dut.s_axil_wstrb, 0xF)
            ctx.set(dut.s_axil_wvalid, 1)
            ctx.set(dut.s_axil_bready, 1)
            await tick_until(ctx, dut.s_axil_awready & dut.s_axil_wready, "s_axil_awready")
            ctx.set(dut.s_axil_awvalid, 0)
            ctx.set(dut.s_axil_wvalid, 0)
            await tick_until(ctx, dut.s_axil_bvalid, "s_axil_bvalid")

    async def read(self, ctx: Any, name: str) -> int:
        dut = self.dut
        ctx.set(dut.s_axil_araddr, self.names[name])
        ctx.set(dut.s_axil_arvalid, 1)
        ctx.set(dut.s_axil_rready, 1)
        await tick_until(ctx, dut.s_axil_arready, "s_axil_arready")
        ctx.set(dut.s_axil_arvalid, 0)
        await tick_until(ctx, dut.s_axil_rvalid, "s_axil_rvalid")
        return int(ctx.get(dut.s_axil_rdata))

    # ---- what registers do ---------------------------------------------------------------------------------------

    def addresses(self) -> list[RegisterWrite]:
        return programming.set_addresses(self.params, self.me, group=self.group, listen=self.listen)

    def opening(self, config: JobConfig, bank: int) -> list[RegisterWrite]:
        self.upcoming[bank] = config
        return programming.open_job(self.params, config, bank)

    def closing(self, bank: int) -> list[RegisterWrite]:
        return programming.close_job(self.params, bank)

    def control(self, reset: bool = False, clear: bool = False) -> list[RegisterWrite]:
        return [RegisterWrite(self.names["CONTROL"], reset | clear << 1)]

    # ---- a whole run ---------------------------------------------------------------------------------------------

    def play(
        self,
        jobs: dict[int, JobConfig],
        script: Script,
        ready: Ready = always,
        pause: Ready = never,
        beside: Script = (),
    ) -> None:
        """Open jobs, by bank, and play the script, and another one at the same time that only writes registers."""
        begun, done = [False], [False]

        async def main(ctx: Any) -> None:
            for bank, config in jobs.items():
                await self.write(ctx, self.opening(config, bank))
            begun[0] = True
            await self._play(ctx, script, pause)
            while not done[0]:
                await ctx.tick()

        async def companion(ctx: Any) -> None:
            while not begun[0]:
                await ctx.tick()
            await self._play(ctx, beside, pause)
            done[0] = True

        self.bench.sim.add_testbench(companion)
        self.run(main, ready)

    async def _play(self, ctx: Any, script: Script, pause: Ready) -> None:
        for step in script:
            now = step() if callable(step) else step
            if isinstance(now, bytes):
                await self.send(ctx, now, pause)
            elif isinstance(now, int):
                for _ in range(now):
                    await ctx.tick()
            else:
                await self.write(ctx, now or ())

    def tell_time(self, now: int) -> None:
        """The straggler rule of the model; only while nothing moves."""
        self._next_frame(whole=False)
        self.model.reducer.advance(now)
        self._ask()

    def run(self, main: Callable[[Any], Any], ready: Ready = always) -> None:
        """Run ``main`` until nothing moves, and read all counters."""

        async def driver(ctx: Any) -> None:
            await self.write(ctx, self.addresses())
            await main(ctx)
            self.bench.idle = 0
            while self.bench.idle < 150:
                await ctx.tick()
            self._next_frame(whole=False)
            for name, _doc in COUNTERS:
                self.counters[name] = await self.read(ctx, f"COUNT_{name.upper()}")
                if name in ("stall_in", "stall_out", "cycles"):
                    self.stalls[f"read_{name}"] = self.stalls[name]

        self.bench.sink(self.dut.m_axis_tready, ready)
        self.bench.run(driver)

    def frames(self, first: int = 0) -> list[bytes]:
        """What came out, from a beat on."""
        return frames_of(self.output.beats[first:])

    def check(self, everything: bool = False, jobs_change: bool = False) -> None:
        """Frames against what was due, and every counter.

        ``everything`` that was due must have come, each as often; else results may have coalesced or been dropped
        when their slot version was claimed, and NACKs and relays when their queues were full. ``jobs_change``: what a
        closed job had waiting may be missing.
        """
        came = Counter(self.frames())
        for frame, count in came.items():
            assert count <= self.due[frame], f"{self.due[frame]} due, {count} came: {self._header(frame)}"
        if everything:
            assert came == self.due
        seen: Counter[str] = Counter()
        for frame in self.frames(self._cleared):
            seen.update(self._counts(frame))
        if not jobs_change:
            assert self.counters["nacks_dropped"] == self.nacks_due - sum(
                count for frame, count in came.items() if self._header(frame).type is FrameType.NACK
            )
            self._check_held(came)
        want = dict.fromkeys((name for name, _doc in COUNTERS), 0) | self.model.reducer.counters
        want |= {"busy": want["lines"], "results": seen["results"], "nacks": seen["nacks"]}
        want |= {name: self.stalls[f"read_{name}"] for name in ("stall_in", "stall_out", "cycles")}
        for name in ("nacks_dropped", "relays_dropped"):  # checked by what was seen
            want[name] = self.counters[name]
        # The register is read in a cycle that the bench does not see.
        assert 0 <= want.pop("cycles") - self.counters["cycles"] < 10
        assert {name: value for name, value in self.counters.items() if name != "cycles"} == want

    def _counts(self, frame: bytes) -> list[str]:
        """The counters that this frame's leaving counts up."""
        datagram = net.parse(frame, None)
        header = Header.unpack(datagram.payload)
        if header.type is FrameType.NACK:
            return ["nacks"]
        if self._relays(header):
            return ["relays"]
        if header.type is not FrameType.ABSTAIN and header.plane + 1 < header.planes:
            return []
        if header.worker == DESTINATION_ALL and self.group is None:
            members = self.configs[header.job, header.epoch].members
            assert isinstance(members, dict)
            return ["results"] if datagram.destination == members[max(members)] else []
        return ["results"]

    def _check_held(self, came: Counter[bytes]) -> None:
        """What a slot version holds in the end was not claimed, so whoever was due the result has got one."""
        parents = {(c.parent.job, c.parent.epoch): c for c in self.open.values() if c.parent is not None}
        configs = {(c.job, c.epoch): c for c in self.open.values()}
        told = set()
        for frame in came:
            header = self._header(frame)
            told.add((header.job, header.epoch, header.worker, header.chunk, header.plane))
        for frame in self.due.keys() - came.keys():
            header = self._header(frame)
            up = header.type in (FrameType.CONTRIBUTE, FrameType.ABSTAIN)
            config = (parents if up else configs).get((header.job, header.epoch))
            if header.type is FrameType.NACK or config is None or self._relays(header):
                continue
            # The model's own state is the only place where it says what is held.
            state = self.model.reducer._jobs[config.job].state(header.chunk)
            if state.chunk == header.chunk and state.complete:
                everybody = (header.job, header.epoch, DESTINATION_ALL, header.chunk, header.plane)
                assert header.flags & Flags.RESEND, f"missing: {header}"
                assert everybody in told, f"missing: {header}"


def frame_of(source: Endpoint, to: Endpoint, payload: bytes) -> bytes:
    return net.build(source, to, payload)


def contribution(
    rng: random.Random, config: JobConfig, worker: int, chunk: int, lines: int, plane: int = 0, voters: int = 1
) -> bytes:
    """A UDP payload of random bits."""
    header = Header(
        FrameType.CONTRIBUTE, config.job, worker, chunk, plane, config.encoding.planes, voters, lines, config.epoch
    )
    return header.pack() + rng.randbytes(LINE * lines)


def abstention(config: JobConfig, worker: int, chunk: int, lines: int) -> bytes:
    planes = config.encoding.planes
    return Header(FrameType.ABSTAIN, config.job, worker, chunk, 0, planes, 0, lines, config.epoch).pack()
