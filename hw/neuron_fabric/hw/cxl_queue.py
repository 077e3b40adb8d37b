"""A queue of responses in which a place is promised before there is a response."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

__all__ = ["ResponseQueue"]


class ResponseQueue(wiring.Component):
    """Responses in order. Whoever promises one only while there is ``room`` can push it at any time, without waiting.

    So a pipeline in front never stalls: what it may not answer, it does not begin.

    Parameters
    ----------
    shape : ShapeLike
        Of a response.
    depth : int
        Places. To promise one every cycle it takes one more than there are cycles from a promise to its push, and
        another one for the way through the queue.

    Members
    -------
    room : there is a place
    promise : take it; only with ``room``
    push, response : fill the oldest promise
    responses : stream of ``shape``, out
    """

    def __init__(self, shape: ShapeLike, depth: int = 16) -> None:
        self._shape = shape
        self._depth = depth
        super().__init__(
            {
                "room": Out(1),
                "promise": In(1),
                "push": In(1),
                "response": In(shape),
                "responses": Out(stream.Signature(shape)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A counter of places that are taken, beside a FIFO that therefore is never full."""
        m = Module()
        flat = Signal(self._shape)
        width = len(flat.as_value()) if hasattr(flat, "as_value") else len(flat)
        m.submodules.fifo = fifo = SyncFIFO(width=width, depth=self._depth)
        taken = Signal(range(self._depth + 1))
        m.d.comb += [
            flat.eq(self.response),
            self.room.eq(taken != self._depth),
            fifo.w_en.eq(self.push),
            fifo.w_data.eq(flat),
            self.responses.valid.eq(fifo.r_rdy),
            self.responses.payload.eq(fifo.r_data),
            fifo.r_en.eq(self.responses.ready),
        ]
        m.d.sync += taken.eq(taken + self.promise - (self.responses.valid & self.responses.ready))
        return m
