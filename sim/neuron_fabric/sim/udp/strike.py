"""Jobs that are closed while their own frames come in.

Opening and closing take effect between two frames; between which, only the gateware knows. But it says how many frames
found their job closed, and as they come in order, those were the last ones. Played back with the job closed just before
them, the golden model must say every bit and every counter that was seen: nothing of a frame is done by halves.
"""

from __future__ import annotations

import random

from neuron_fabric.model.net import HEADERS_BYTES
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import Header
from neuron_fabric.sim.axilite import Access as Transfer
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import ReceivedFrame
from neuron_fabric.sim.udp.recorder import Recorder
from neuron_fabric.sim.udp.script import Check, Open, Script, Step, Strike
from neuron_fabric.sim.udp.stations import Network, draw_job, slot_ranges
from neuron_fabric.sim.udp.traffic import Flow, Send

__all__ = ["StrikeBench", "strikes"]


def strikes(params: ReducerParams, seed: int, *, rounds: int = 20, chunks: int = 12) -> Script:
    """Two jobs if there can be; in every round one of them, or by CONTROL.reset both, is closed under way."""
    rng = random.Random(f"udp:strikes:{seed}")
    network = Network.draw(rng)
    steps: list[Step] = []
    epoch = 1
    for _ in range(rounds):
        jobs = min(2, params.jobs, params.slots)
        flows = []
        for bank, slots in enumerate(slot_ranges(params, jobs, rng)):
            config = draw_job(params, rng, bank, epoch, slots, kind="plain", world=min(3, params.workers))
            flows.append(Flow(params, network, bank, config, rng))
            steps.append(Open(bank, config))
            epoch += 1
        sent = [frame for flow in flows for frame in flow.chunks(chunks)]
        # Frames of a job keep their order among themselves.
        order = [frame.bank for frame in sent]
        rng.shuffle(order)
        queues = {flow.bank: [frame for frame in sent if frame.bank == flow.bank] for flow in flows}
        frames: list[Step] = [queues[bank].pop(0) for bank in order if bank is not None]
        struck = rng.choice([*flows, None])
        strike = Strike(None) if struck is None else Strike(struck.bank, struck.config.job)
        frames.insert(rng.randrange(len(frames)), strike)
        steps += [*frames, Check(), *(Strike(flow.bank, flow.config.job) for flow in flows), Check()]
    return Script("strikes", seed, params, network, tuple(steps), polite=False)


class StrikeBench(Recorder):
    """Finds out after which frame a job was closed."""

    _judged_steps = 0

    def _replay(self, reads: dict[str, Transfer]) -> None:
        strikes = self._strikes()
        refused = reads["refused_job_not_open"].data - self.oracle.counters["refused_job_not_open"]
        jobs = {strike.job for strike in strikes}
        everybody = any(strike.bank is None for strike in strikes)
        concerned = [frame for _cycle, frame in self._in_order() if self._concerns(frame, jobs, everybody)]
        if refused > len(concerned):
            raise Mismatch(f"{refused} frames found their job closed; {len(concerned)} were for such a job")
        last = len(concerned) - refused
        passed = 0
        if not last:
            self._end(jobs, everybody)
        for cycle, what in self._in_order():
            if isinstance(what, ReceivedFrame):
                self.scoreboard.frame(what)
                continue
            self.scoreboard.react(self.oracle.feed(what.frame), cycle)
            if self._concerns(what, jobs, everybody):
                passed += 1
                if passed == last:
                    self._end(jobs, everybody)
        self._judged_steps = self._step

    def _strikes(self) -> list[Strike]:
        """Since the last comparison."""
        return [step for step in self.script.steps[self._judged_steps : self._step] if isinstance(step, Strike)]

    @staticmethod
    def _concerns(what: Send | ReceivedFrame, jobs: set[int], everybody: bool) -> bool:
        if isinstance(what, ReceivedFrame):
            return False
        return everybody or Header.unpack(what.frame[HEADERS_BYTES:]).job in jobs

    def _end(self, jobs: set[int], everybody: bool) -> None:
        if everybody:
            self.oracle.reset()
            self.scoreboard.reset()
        for job in jobs if not everybody else ():
            self.oracle.close(job)
            self.scoreboard.closed(job)
