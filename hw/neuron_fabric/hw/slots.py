"""The slot table: what a reducer knows of each chunk in flight, and what it decides about a frame."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.hw.layout import FrameKind, config_layout, contribution_layout, version_width
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.wire import DESTINATION_ALL

__all__ = ["SlotTable", "result_meta_layout"]


def result_meta_layout(params: ReducerParams) -> data.StructLayout:
    """What a result is, apart from its lines."""
    return data.StructLayout(
        {
            "destination": unsigned(16),
            "chunk": unsigned(32),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "voters": unsigned(bits_for(params.workers)),
        }
    )


class SlotTable(wiring.Component):
    """State of all slot versions, one look-up per cycle, with the verdict in the cycle after it.

    A slot version's word has its chunk number (without the bits that name the slot version), its line count, the seen
    bit of every (worker, plane), the number of voters, whether it is complete, and the destinations that are still
    owed its result. The words live in a memory; only ``valid`` and ``waiting`` (somebody is owed a result) are
    flip-flops, so that reset forgets every chunk at once.

    Frames are whole and their lines in order, so the written marks of all lines of a chunk are one: all lines are
    written once the first contribution was accepted, that is, when there is a voter.

    Members
    -------
    config : the job
    look, look_version, look_fetch : sample a slot version; for a frame's first beat, or to fetch an owed result
    frame : the first beat, in the cycle after ``look``
    look_valid, fetch_valid : the frame, or the fetch, of the last ``look`` is being judged in this cycle
    commit : the verdict takes effect (always, but for a claim that has to wait)
    free : a result can start in this cycle
    version : the slot version that is being judged
    claims : the frame takes the slot version over
    stale, refused, duplicate, abandoned, accepted : what becomes of the frame
    overwrite : it is the first contribution to its chunk
    completes : it completes its chunk
    launch : a result starts now, with ``meta``; ``blank`` if nobody voted
    waiting : slot versions that somebody is owed a result of
    """

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        bits = version_width(params)
        super().__init__(
            {
                "config": In(config_layout(params)),
                "look": In(1),
                "look_version": In(bits),
                "frame": In(contribution_layout(params)),
                "look_valid": In(1),
                "fetch_valid": In(1),
                "commit": In(1),
                "free": In(1),
                "version": Out(bits),
                "claims": Out(1),
                "stale": Out(1),
                "refused": Out(1),
                "duplicate": Out(1),
                "abandoned": Out(1),
                "accepted": Out(1),
                "overwrite": Out(1),
                "completes": Out(1),
                "launch": Out(1),
                "blank": Out(1),
                "meta": Out(result_meta_layout(params)),
                "waiting": Out(1 << bits),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Memory read, then rules 2, 3, 4 and 8 of the protocol, then write back, in one cycle."""
        m = Module()
        params = self._params
        workers, planes = params.workers, params.max_planes
        version_bits = version_width(params)
        versions = 1 << version_bits
        tag_bits = 32 - version_bits
        layout = data.StructLayout(
            {
                "tag": unsigned(tag_bits),
                "lines": unsigned(bits_for(params.lines_per_chunk)),
                "seen": data.ArrayLayout(unsigned(planes), workers),
                "voters": unsigned(bits_for(workers)),
                "complete": unsigned(1),
                "owed": unsigned(workers + 1),  # bit w: worker w; the top bit: everybody
            }
        )

        m.submodules.words = words = Memory(shape=layout, depth=versions, init=[], attrs=COLLISIONS_DO_NOT_MATTER)
        read = words.read_port()
        write = words.write_port()
        valid = Signal(versions)
        # The read port shows a word as it was before a write in the same cycle: forward from distance 1.
        forward = Signal()
        written = Signal(layout, reset_less=True)
        word = Signal(layout)
        new = Signal(layout)
        with m.If(self.look):
            m.d.sync += [
                self.version.eq(self.look_version),
                forward.eq(write.en & (write.addr == self.look_version)),
            ]
        with m.If(write.en):
            m.d.sync += written.eq(new)
        m.d.comb += [
            read.addr.eq(self.look_version),
            read.en.eq(self.look),
            word.eq(Mux(forward, written, read.data)),
            write.addr.eq(self.version),
            write.data.eq(new),
        ]

        # ---- which chunk -------------------------------------------------------------------------------------------
        live = Signal()
        distance = Signal(tag_bits)
        same = Signal()
        newer = Signal()
        judged = Signal()
        tag = self.frame.chunk[version_bits:]
        m.d.comb += [
            live.eq(valid.bit_select(self.version, 1)),
            distance.eq(tag - word.tag),
            same.eq(live & (distance == 0)),
            newer.eq((distance != 0) & ~distance[-1]),
            judged.eq(self.look_valid),
            self.claims.eq(judged & (~live | newer)),
            self.stale.eq(judged & live & (distance != 0) & ~newer),
            self.abandoned.eq(judged & live & newer & ~word.complete),
        ]

        # ---- which frame -------------------------------------------------------------------------------------------
        abstain = Signal()
        unused = Signal(planes)  # planes that the encoding hasn't, which thus count as sent
        seen = Signal(layout["seen"].shape)
        voters = Signal.like(word.voters)
        mine = Signal(planes)
        whole = Signal()
        repeated = Signal()
        differs = Signal()
        m.d.comb += [
            abstain.eq(self.frame.kind == FrameKind.ABSTAIN),
            seen.eq(Mux(same, word.seen, 0)),
            voters.eq(Mux(same, word.voters, 0)),
            mine.eq(seen[self.frame.worker]),
            whole.eq((mine | unused).all()),
            repeated.eq(Mux(abstain, whole, mine.bit_select(self.frame.plane, 1))),
            differs.eq(word.lines != self.frame.lines),
            self.duplicate.eq(judged & same & ~differs & repeated),
            self.refused.eq(judged & same & (differs | (abstain & mine.any() & ~whole))),
            self.accepted.eq(judged & ~self.stale & ~self.refused & ~self.duplicate),
            self.overwrite.eq(voters == 0),
        ]
        for plane in range(planes):
            m.d.comb += unused[plane].eq(self.config.planes <= plane)

        # ---- what it makes of the chunk ----------------------------------------------------------------------------
        now_mine = Signal(planes)
        now_seen = Signal(layout["seen"].shape)
        now_voters = Signal.like(word.voters)
        done = Signal(workers)
        m.d.comb += [
            now_mine.eq(Mux(abstain, -1, mine | (1 << self.frame.plane))),
            now_voters.eq(voters + (~abstain & ~mine.any())),
            self.completes.eq(self.accepted & done.all()),
        ]
        for worker in range(workers):
            m.d.comb += [
                now_seen[worker].eq(Mux(self.frame.worker == worker, now_mine, seen[worker])),
                done[worker].eq(~self.config.members[worker] | (now_seen[worker] | unused).all()),
            ]

        # ---- whom it makes us answer -------------------------------------------------------------------------------
        answers = Signal()  # a duplicate of a complete chunk, unless everybody is still owed it anyway
        owes = Signal()
        picked = Signal(workers + 1)
        picked_worker = Signal(16)
        m.d.comb += [
            answers.eq(self.duplicate & word.complete & ~word.owed[workers]),
            owes.eq(self.fetch_valid & live & word.owed.any()),
            self.launch.eq((self.completes | answers | owes) & self.free),
            picked.eq(1 << workers),
            picked_worker.eq(DESTINATION_ALL),
        ]
        with m.If(~word.owed[workers]):
            for worker in reversed(range(workers)):
                with m.If(word.owed[worker]):
                    m.d.comb += [picked.eq(1 << worker), picked_worker.eq(worker)]
        m.d.comb += [
            self.meta.chunk.eq(Cat(self.version, Mux(self.fetch_valid, word.tag, tag))),
            self.meta.lines.eq(Mux(self.fetch_valid, word.lines, self.frame.lines)),
            self.meta.voters.eq(Mux(self.accepted, now_voters, word.voters)),
            self.blank.eq(self.meta.voters == 0),
        ]
        with m.If(self.fetch_valid):
            m.d.comb += self.meta.destination.eq(picked_worker)
        with m.Else():
            m.d.comb += self.meta.destination.eq(Mux(self.completes, DESTINATION_ALL, self.frame.worker))

        # ---- write back --------------------------------------------------------------------------------------------
        m.d.comb += new.eq(word)
        with m.If(self.fetch_valid):
            m.d.comb += [new.owed.eq(word.owed & ~picked), write.en.eq(self.launch & self.commit)]
        with m.Elif(self.accepted):
            m.d.comb += [
                new.tag.eq(tag),
                new.lines.eq(self.frame.lines),
                new.seen.eq(now_seen),
                new.voters.eq(now_voters),
                new.complete.eq(self.completes),
                new.owed.eq(Mux(self.completes & ~self.launch, 1 << workers, 0)),
                write.en.eq(self.commit),
            ]
        with m.Else():
            m.d.comb += [
                new.owed.eq(word.owed | (1 << self.frame.worker)),
                write.en.eq(answers & ~self.launch & self.commit),
            ]
        here = Signal(versions)
        m.d.comb += here.eq(1 << self.version)
        with m.If(write.en):
            m.d.sync += [
                valid.eq(valid | here),
                self.waiting.eq(Mux(new.owed.any(), self.waiting | here, self.waiting & ~here)),
            ]
        return m
