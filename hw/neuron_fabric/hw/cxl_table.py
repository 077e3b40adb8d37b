"""The version table of the CXL endpoint: what it knows of each chunk in flight, and what becomes of a contribution.

The numbers in comments are those of the rules in ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Cat, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.hw.cxl_layout import question_layout, seen_layout, state_layout
from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.hw.layout import index_width, version_width, voters_width
from neuron_fabric.model.cxl_map import CxlMap

__all__ = ["VersionTable"]


class VersionTable(wiring.Component):
    """State of all slot versions, one look-up per cycle, with the verdict in the cycle after it.

    A version's word has its chunk number, the written mark of each line, and for each worker whether it has begun,
    done everything, abstained. What a worker has sent, line by line, is in a second memory with a word per version and
    worker, which means something only where the worker has begun: so a claim clears one word and no row. Only what
    closing a job must forget at once are flip-flops.

    Members
    -------
    look_version, look_worker : what to look up
    question : the transaction of the last look-up
    state : what it found
    accepted, claims, overwrites, completes : what a contribution does: it counts, it takes the version over, it is the
        first one to its line, it completes the chunk
    stale, duplicate, refused : why one does nothing; ``refused`` is an abstention after a vote
    abandoned : a claim ends an incomplete chunk
    forget : versions to forget; those that are being asked for must not be among them
    level : versions that hold an incomplete chunk
    """

    def __init__(self, address_map: CxlMap) -> None:
        params = address_map.params
        self._params = params
        self._chunk_bits = address_map.chunk_bits
        bits = version_width(params)
        super().__init__(
            {
                "look_version": In(bits),
                "look_worker": In(index_width(params.workers)),
                "question": In(question_layout(address_map)),
                "state": Out(state_layout(address_map)),
                "accepted": Out(1),
                "claims": Out(1),
                "overwrites": Out(1),
                "completes": Out(1),
                "stale": Out(1),
                "duplicate": Out(1),
                "refused": Out(1),
                "abandoned": Out(1),
                "forget": In(1 << bits),
                "level": Out(bits_for(1 << bits)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Memory read, then rules 2, 3 and 4 of the protocol, then write back, in one cycle."""
        m = Module()
        params, question, state = self._params, self.question, self.state
        versions = len(self.forget)
        layout = data.StructLayout(
            {
                "chunk": unsigned(32),
                "complete": unsigned(1),
                "voters": unsigned(voters_width(params)),
                "begun": unsigned(params.workers),
                "done": unsigned(params.workers),
                "abstained": unsigned(params.workers),
                "written": unsigned(params.lines_per_chunk),
            }
        )
        version = Signal.like(self.look_version)
        worker = Signal.like(self.look_worker)
        m.d.sync += [version.eq(self.look_version), worker.eq(self.look_worker)]
        now_word = Signal(layout)
        now_seen = Signal(seen_layout(params))
        held = Signal(layout)
        row = Signal(seen_layout(params))
        self._memory(m, "words", self.look_version, version, now_word, held)
        self._memory(m, "rows", Cat(self.look_worker, self.look_version), Cat(worker, version), now_seen, row)

        # ---- which chunk (rule 3) ----------------------------------------------------------------------------------
        claimed = Signal(versions)
        incomplete = Signal(versions)
        here = Signal(versions)
        live = Signal()
        distance = Signal(self._chunk_bits)  # of the nearest number with these low bits; a sign and less than half
        newer = Signal()
        chunk = Signal(32)
        kept = Signal(layout)  # the version's word, unless a claim forgets it
        m.d.comb += [
            here.eq(1 << version),
            live.eq((claimed & here).any()),
            chunk.eq(Mux(live, held.chunk, question.before)),
            distance.eq(question.chunk - chunk),
            newer.eq((distance != 0) & ~distance[-1]),
            state.current.eq(live & (distance == 0)),
            self.claims.eq(question.contributes & newer),
            self.stale.eq(question.contributes & ~newer & ~state.current),
            self.abandoned.eq(self.claims & live & ~held.complete),
            kept.eq(Mux(state.current, held, 0)),
        ]

        # ---- which lines (rule 2) ----------------------------------------------------------------------------------
        begun, done = Signal(), Signal()
        seen = Signal(seen_layout(params))
        repeated = Signal()
        m.d.comb += [
            begun.eq((kept.begun & question.worker).any()),
            done.eq((kept.done & question.worker).any()),
            seen.eq(Mux(begun, row, 0)),
            repeated.eq(Mux(question.abstains, done, (seen.as_value() & question.sent.as_value()).any())),
            self.duplicate.eq(question.contributes & state.current & repeated),
            self.refused.eq(question.contributes & question.abstains & begun & ~done),
            self.accepted.eq(question.contributes & ~self.stale & ~self.duplicate & ~self.refused),
            self.overwrites.eq(~(kept.written & question.line).any()),
        ]

        # ---- what it makes of the chunk (rule 4) -------------------------------------------------------------------
        whole = Signal()
        m.d.comb += [
            now_seen.eq(seen.as_value() | question.sent.as_value()),
            whole.eq((now_seen.as_value() | ~question.everything.as_value()).all()),
            now_word.chunk.eq(chunk + distance.as_signed()),
            now_word.begun.eq(kept.begun | question.worker),
            now_word.done.eq(kept.done | Mux(whole, question.worker, 0)),
            now_word.complete.eq((now_word.done | ~question.members).all()),
            self.completes.eq(self.accepted & now_word.complete),
        ]
        with m.If(question.abstains):
            m.d.comb += [
                now_word.voters.eq(kept.voters),
                now_word.abstained.eq(kept.abstained | question.worker),
                now_word.written.eq(kept.written),
            ]
        with m.Else():
            m.d.comb += [
                now_word.voters.eq(kept.voters + ~begun),
                now_word.abstained.eq(kept.abstained),
                now_word.written.eq(kept.written | question.line),
            ]
        with m.If(self.accepted):
            m.d.sync += [
                claimed.eq((claimed | here) & ~self.forget),
                incomplete.eq(Mux(now_word.complete, incomplete & ~here, incomplete | here) & ~self.forget),
            ]
        with m.Else():
            m.d.sync += [claimed.eq(claimed & ~self.forget), incomplete.eq(incomplete & ~self.forget)]
        m.d.sync += self.level.eq(_count(list(incomplete)))

        # ---- what can be read --------------------------------------------------------------------------------------
        m.d.comb += [
            state.claimed.eq(live),
            state.complete.eq(live & held.complete),
            state.written.eq((held.written & question.line).any()),
            state.chunk.eq(chunk),
            state.voters.eq(Mux(live, held.voters, 0)),
            state.done.eq(Mux(live, held.done, 0)),
            state.abstained.eq(Mux(live, held.abstained, 0)),
            state.seen.eq(Mux(live & (held.begun & question.worker).any(), row, 0)),
        ]
        return m

    def _memory(self, m: Module, name: str, look: Value, at: Value, new: data.View, word: data.View) -> None:
        """Words that are read at ``look``, are ``word`` in the next cycle, and become ``new`` there if ``accepted``.

        The read port shows a word as it was before a write in the same cycle, so that is forwarded; the hazard has
        distance 1.
        """
        memory = Memory(shape=word.shape(), depth=1 << len(look), init=[], attrs=COLLISIONS_DO_NOT_MATTER)
        m.submodules[name] = memory
        read, write = memory.read_port(), memory.write_port()
        forward = Signal(name=f"forward_{name}")
        last = Signal(word.shape(), reset_less=True, name=f"last_{name}")
        m.d.sync += [forward.eq(self.accepted & (at == look)), last.eq(new)]
        m.d.comb += [
            read.addr.eq(look),
            word.eq(Mux(forward, last, read.data)),
            write.en.eq(self.accepted),
            write.addr.eq(at),
            write.data.eq(new),
        ]


def _count(bits: Sequence[Value]) -> Value:
    """How many are set, as a tree."""
    if len(bits) == 1:
        return bits[0]
    half = len(bits) // 2
    return _count(bits[:half]) + _count(bits[half:])
