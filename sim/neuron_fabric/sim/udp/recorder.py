"""A bench that writes down what goes in and what comes out, and asks the golden model afterwards.

For what nobody but the gateware can know beforehand: the moment at which something takes effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from neuron_fabric.sim.axilite import Access as Transfer
from neuron_fabric.sim.scoreboard import Mismatch
from neuron_fabric.sim.streams import ReceivedFrame
from neuron_fabric.sim.udp.bench import Bench
from neuron_fabric.sim.udp.oracle import Reaction
from neuron_fabric.sim.udp.traffic import Send

__all__ = ["Recorder"]


class Recorder(Bench):
    """What the bench of a script does, but for the judgement, which comes with every comparison of the counters."""

    def _restart_at(self, cycle: int) -> None:
        super()._restart_at(cycle)
        self._timeline: list[tuple[int, Send | ReceivedFrame]] = []

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        self._reaction = Reaction()

    def _sent(self, frame: Send) -> None:
        self._timeline.append((self.cycle, frame))

    def _received(self, frame: ReceivedFrame) -> None:
        self._timeline.append((frame.begun, frame))

    def _claims_too_early(self, step: Send) -> bool:
        return False

    def _expire(self) -> bool:
        if not self._settled(None):
            return False
        self._expiry = self.cycle + self.script.timeout + 2 * self._settling
        return True

    def _most(self, name: str) -> int | None:
        return None

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def _compare(self, reads: dict[str, Transfer]) -> None:
        self._replay(reads)
        if self.scoreboard.owed():
            raise Mismatch(f"did not come: {self._owed()}")
        self._timeline.clear()
        super()._compare(reads)

    def _replay(self, reads: dict[str, Transfer]) -> None:
        """Tell the golden model and the scoreboard what happened since the last comparison, in its order."""
        raise NotImplementedError

    def _in_order(self) -> Iterator[tuple[int, Send | ReceivedFrame]]:
        """What happened, with the cycles; what came in before what went out in the same one."""
        yield from sorted(self._timeline, key=lambda entry: (entry[0], isinstance(entry[1], ReceivedFrame)))
