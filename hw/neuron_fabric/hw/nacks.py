"""NACKs that wait to be sent: a bounded queue for those who refuse frames."""

from __future__ import annotations

from amaranth import Module, Mux, ResetInserter, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from neuron_fabric.hw.addresses import lookup_signature
from neuron_fabric.hw.framing import ENDPOINT, HEADER, version_type
from neuron_fabric.hw.layout import config_layout, of_bank, refusal_layout
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import FrameType

__all__ = ["ECHO", "NACK", "REFUSED", "NackQueue"]

ECHO = data.StructLayout(
    {name: HEADER[name].shape for name in ("job", "worker", "chunk", "plane", "planes", "lines", "reason", "epoch")}
)
"""What a NACK says."""
REFUSED = data.StructLayout({"valid": unsigned(1), "echo": ECHO, "source": ENDPOINT})
"""A strobe: a frame of a pinned sender was refused."""
NACK = data.StructLayout({"header": HEADER, "destination": ENDPOINT})
"""A NACK to send."""


class NackQueue(wiring.Component):
    """NACKs of both who refuse frames, each with a queue of its own, so that they never wait for each other.

    Everything a NACK says, and where it goes, is stored when the frame is refused: what becomes of the job meanwhile
    does not change it.

    Parameters
    ----------
    params : ReducerParams

    Members
    -------
    refused : :data:`REFUSED`, in
        From the stage that validates frames.
    refusal : :func:`~neuron_fabric.hw.layout.refusal_layout`, in
        From the core. Its sender is looked up.
    config : array of :func:`~neuron_fabric.hw.layout.config_layout`, in
    lookup : :func:`~neuron_fabric.hw.addresses.lookup_signature`
    flush : in
        Forget all that waits; a NACK that is being stored in this cycle, too.
    nack : stream of :data:`NACK`, out
        ``flush`` may take one back.
    dropped : out
        How many were dropped in this cycle since their queue was full.
    """

    DEPTH = 16
    """NACKs that a queue holds."""

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        super().__init__(
            {
                "refused": In(REFUSED),
                "refusal": In(refusal_layout(params)),
                "config": In(data.ArrayLayout(config_layout(params), params.jobs)),
                "lookup": Out(lookup_signature(params)),
                "flush": In(1),
                "nack": Out(stream.Signature(NACK)),
                "dropped": Out(2),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The core's refusals wait a cycle for the address; the queues take turns."""
        m = Module()
        core = self.refusal

        def configured(name: str) -> Value:
            """A field of the configuration of the refused frame's job."""
            return of_bank(core.bank, (self.config[bank][name] for bank in range(self._params.jobs)))

        found = Signal()
        found_echo = Signal(ECHO, reset_less=True)
        m.d.comb += [
            self.lookup.enable.eq(core.valid),
            self.lookup.bank.eq(core.bank),
            self.lookup.worker.eq(core.worker),
        ]
        # A frame that has come as far as the core was of its job's epoch, with that encoding's number of planes.
        m.d.sync += [
            found.eq(core.valid),
            *(found_echo[name].eq(configured(name)) for name in ("job", "planes", "epoch")),
            *(found_echo[name].eq(core[name]) for name in ("worker", "chunk", "plane", "lines", "reason")),
        ]

        entry = data.StructLayout({"echo": ECHO, "destination": ENDPOINT})
        entry_queue = SyncFIFO(width=entry.size, depth=self.DEPTH)
        core_queue = SyncFIFO(width=entry.size, depth=self.DEPTH)
        m.submodules.entry_queue = ResetInserter(self.flush)(entry_queue)
        m.submodules.core_queue = ResetInserter(self.flush)(core_queue)
        sources = (
            (entry_queue, self.refused.valid, self.refused.echo, self.refused.source),
            (core_queue, found, found_echo, self.lookup.endpoint),
        )
        for number, (queue, enters, echo, destination) in enumerate(sources):
            stored = Signal(entry, name=f"stored{number}")
            m.d.comb += [
                stored.echo.eq(echo),
                stored.destination.eq(destination),
                queue.w_data.eq(stored),
                queue.w_en.eq(enters),
            ]
        m.d.comb += self.dropped.eq((entry_queue.w_en & ~entry_queue.w_rdy) + (core_queue.w_en & ~core_queue.w_rdy))

        turn = Signal()
        front = Signal(entry)
        from_core = Signal()
        header = self.nack.payload.header
        m.d.comb += [
            from_core.eq(core_queue.r_rdy & (turn | ~entry_queue.r_rdy)),
            front.eq(Mux(from_core, core_queue.r_data, entry_queue.r_data)),
            self.nack.valid.eq(entry_queue.r_rdy | core_queue.r_rdy),
            entry_queue.r_en.eq(self.nack.ready & ~from_core),
            core_queue.r_en.eq(self.nack.ready & from_core),
            header.version_type.eq(version_type(FrameType.NACK)),
            *(header[name].eq(front.echo[name]) for name, _field in ECHO),
            self.nack.payload.destination.eq(front.destination),
        ]
        with m.If(self.nack.valid):
            m.d.sync += turn.eq(from_core ^ self.nack.ready)  # the other's turn, once this one is taken
        return m
