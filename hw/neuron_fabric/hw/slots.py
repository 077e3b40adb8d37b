"""The slot table: what a reducer knows of each chunk in flight, and what it decides about a frame."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from neuron_fabric.hw.lanes import COLLISIONS_DO_NOT_MATTER
from neuron_fabric.hw.layout import (
    FrameKind,
    config_layout,
    contribution_layout,
    index_width,
    version_width,
    voters_width,
)
from neuron_fabric.model.params import ReducerParams

__all__ = ["SlotTable", "result_meta_layout"]


def result_meta_layout(params: ReducerParams) -> data.StructLayout:
    """What a result is, apart from its lines, and whom it is for: everybody, or a ``worker`` who asked again."""
    return data.StructLayout(
        {
            "bank": unsigned(index_width(params.jobs)),
            "everybody": unsigned(1),
            "worker": unsigned(index_width(params.workers)),
            "empty": unsigned(1),  # for a parent, which is sent no line if nobody voted
            "chunk": unsigned(32),
            "lines": unsigned(bits_for(params.lines_per_chunk)),
            "voters": unsigned(voters_width(params)),
            "partial": unsigned(1),
            "missing": unsigned(bits_for(params.workers)),
            "counted": unsigned(params.workers),
        }
    )


class SlotTable(wiring.Component):
    """State of all slot versions, one look-up per cycle, with the verdict in the cycle after it.

    A slot version's word has its chunk number and line count, the seen bits of every (worker, plane), who abstained,
    the number of voters, when it was claimed, whether and how it is complete, and the destinations that are still owed
    its result. The words live in a memory; flip-flops are only ``valid``, ``waiting`` (somebody is owed a result) and
    ``armed`` (the straggler rule may complete it), so that reset or the end of a job forgets chunks at once.

    Frames are whole and their lines in order, so the written marks of all lines of a chunk are one: all lines are
    written once the first contribution was accepted, that is, when there is a voter.

    A frame's first beat is judged, or, in other cycles, a slot version is visited: to start a result that somebody is
    owed, or to apply the straggler rule.

    Members
    -------
    look, look_version : sample a slot version, for a frame's first beat or a visit
    job, bank : its job, in the cycle after ``look``
    frame : the first beat, in the cycle after ``look``
    look_valid, visit_valid : the frame, or the visit, of the last ``look`` is being judged in this cycle
    commit : the verdict takes effect (always, but for a claim that has to wait)
    settled : no frame is still being added to the slot version that is visited
    room : a result can start whose lines are copied while they are summed
    free : a result can start whose lines are read from the tally memory
    now : the time, in cycles
    forget, forget_base, forget_log2 : end all chunks in this range of slots, of ``forget_bank``
    version : the slot version that is being judged
    claims : the frame takes the slot version over
    stale, lines_differ, abstains_late, duplicate, late, abandoned, accepted : what becomes of the frame
    overwrite : it is the first contribution to its chunk
    completes : it completes its chunk
    expires : the visit completes its chunk by the straggler rule
    launch : a result starts now, with ``meta``; ``blank`` if nobody voted
    waiting, armed : slot versions that are worth a visit; the first only if ``free``
    scan, scan_bank : whose a slot version is that is worth a visit
    level : slot versions that hold an incomplete chunk
    """

    def __init__(self, params: ReducerParams) -> None:
        self._params = params
        bits = version_width(params)
        super().__init__(
            {
                "look": In(1),
                "look_version": In(bits),
                "job": In(config_layout(params)),
                "bank": In(index_width(params.jobs)),
                "frame": In(contribution_layout(params)),
                "look_valid": In(1),
                "visit_valid": In(1),
                "commit": In(1),
                "settled": In(1),
                "room": In(1),
                "free": In(1),
                "now": In(32),
                "forget": In(1),
                "forget_bank": In(index_width(params.jobs)),
                "forget_base": In(index_width(params.slots)),
                "forget_log2": In(bits_for(int(ceil_log2(params.slots)))),
                "version": Out(bits),
                "claims": Out(1),
                "stale": Out(1),
                "lines_differ": Out(1),
                "abstains_late": Out(1),
                "duplicate": Out(1),
                "late": Out(1),
                "abandoned": Out(1),
                "accepted": Out(1),
                "overwrite": Out(1),
                "completes": Out(1),
                "expires": Out(1),
                "launch": Out(1),
                "blank": Out(1),
                "meta": Out(result_meta_layout(params)),
                "waiting": Out(1 << bits),
                "armed": Out(1 << bits),
                "scan": In(bits),
                "scan_bank": Out(index_width(params.jobs)),
                "level": Out(bits_for(2 * params.slots)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Memory read, then rules 2 to 5 and 8 of the protocol, then write back, in one cycle."""
        m = Module()
        params, job = self._params, self.job
        workers, planes = params.workers, params.max_planes
        versions = 1 << version_width(params)
        layout = data.StructLayout(
            {
                "chunk": unsigned(32),
                "lines": unsigned(bits_for(params.lines_per_chunk)),
                "seen": data.ArrayLayout(unsigned(planes), workers),
                "abstained": unsigned(workers),
                "voters": unsigned(voters_width(params)),
                "claimed": unsigned(32),  # when
                "expired": unsigned(1),  # the timeout has passed; kept, since the clock wraps
                "complete": unsigned(1),
                "partial": unsigned(1),
                "owed": unsigned(workers + 1),  # bit w: worker w; the top bit: everybody, or the parent
            }
        )
        everybody = 1 << workers

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
        distance = Signal(32)
        same = Signal()
        newer = Signal()
        judged = Signal()
        m.d.comb += [
            live.eq(valid.bit_select(self.version, 1)),
            distance.eq(self.frame.chunk - word.chunk),
            same.eq(live & (distance == 0)),
            newer.eq((distance != 0) & ~distance[-1]),
            judged.eq(self.look_valid),
            self.claims.eq(judged & (~live | newer)),
            self.stale.eq(judged & live & (distance != 0) & ~newer),
            self.abandoned.eq(judged & live & newer & ~word.complete),
        ]
        # Half the range apart has the top bit set, and is thus not newer.

        # ---- which frame -------------------------------------------------------------------------------------------
        abstain = Signal()
        unused = Signal(planes)  # planes that the encoding hasn't, which thus count as sent
        seen = Signal(layout["seen"].shape)
        voters = Signal.like(word.voters)
        mine = Signal(planes)
        whole = Signal()
        repeated = Signal()
        differs = Signal()
        known = Signal()
        m.d.comb += [
            abstain.eq(self.frame.kind == FrameKind.ABSTAIN),
            seen.eq(Mux(same, word.seen, 0)),
            voters.eq(Mux(same, word.voters, 0)),
            mine.eq(seen[self.frame.worker]),
            whole.eq((mine | unused).all()),
            repeated.eq(word.complete | Mux(abstain, whole, mine.bit_select(self.frame.plane, 1))),
            differs.eq(word.lines != self.frame.lines),
            known.eq(judged & same & ~differs & repeated),
            self.late.eq(known & word.partial & ~mine.any()),
            self.duplicate.eq(known & ~self.late),
            self.lines_differ.eq(judged & same & differs),
            self.abstains_late.eq(judged & same & ~differs & ~repeated & abstain & mine.any()),
            self.accepted.eq(judged & ~self.stale & ~self.lines_differ & ~self.abstains_late & ~known),
            self.overwrite.eq(voters == 0),
        ]
        for plane in range(planes):
            m.d.comb += unused[plane].eq(job.planes <= plane)

        # ---- what it makes of the chunk ----------------------------------------------------------------------------
        now_mine = Signal(planes)
        now_seen = Signal(layout["seen"].shape)
        now_voters = Signal.like(word.voters)
        done = Signal(workers)
        m.d.comb += [
            now_mine.eq(Mux(abstain, -1, mine | (1 << self.frame.plane))),
            now_voters.eq(voters + Mux(abstain | mine.any(), 0, self.frame.voters)),
            self.completes.eq(self.accepted & done.all()),
        ]
        for worker in range(workers):
            m.d.comb += [
                now_seen[worker].eq(Mux(self.frame.worker == worker, now_mine, seen[worker])),
                done[worker].eq(~job.members[worker] | (now_seen[worker] | unused).all()),
            ]

        # ---- what a visit makes of it ------------------------------------------------------------------------------
        visited = Signal()
        timed_out = Signal()
        owes = Signal()
        picked = Signal(workers + 1)
        picked_worker = Signal(index_width(workers))
        m.d.comb += [
            visited.eq(self.visit_valid & live & self.settled),
            timed_out.eq((job.timeout != 0) & (word.expired | ((self.now - word.claimed)[:32] >= job.timeout))),
            self.expires.eq(visited & ~word.complete & timed_out & (word.voters >= job.quorum)),
            owes.eq(visited & word.owed.any()),
            picked.eq(everybody),
        ]
        with m.If(~word.owed[workers]):
            for worker in reversed(range(workers)):
                with m.If(word.owed[worker]):
                    m.d.comb += [picked.eq(1 << worker), picked_worker.eq(worker)]

        # ---- whom we answer ----------------------------------------------------------------------------------------
        answers = Signal()  # one who asks again for a complete chunk, unless everybody is still owed it anyway
        straight = Signal()
        present = Signal(workers)
        absent = Signal(workers)
        m.d.comb += [
            answers.eq(known & word.complete & ~word.owed[workers]),
            straight.eq(self.completes & ~abstain),
            self.launch.eq(
                (straight & self.room) | (((self.completes & abstain) | answers | owes | self.expires) & self.free)
            ),
            absent.eq(job.members & ~present),
            self.meta.bank.eq(self.bank),
            self.meta.chunk.eq(Mux(self.visit_valid, word.chunk, self.frame.chunk)),
            self.meta.lines.eq(Mux(self.visit_valid, word.lines, self.frame.lines)),
            self.meta.voters.eq(Mux(self.accepted, now_voters, word.voters)),
            self.meta.partial.eq(~self.accepted & (self.expires | word.partial)),
            self.meta.missing.eq(Mux(self.meta.partial, sum(absent[worker] for worker in range(workers)), 0)),
            self.meta.counted.eq(present & ~word.abstained),
            self.blank.eq(self.meta.voters == 0),
            self.meta.empty.eq(job.child & self.blank),
        ]
        for worker in range(workers):
            m.d.comb += present[worker].eq(word.seen[worker].any())
        with m.If(self.visit_valid):
            m.d.comb += [
                self.meta.everybody.eq(self.expires | picked[workers]),
                self.meta.worker.eq(picked_worker),
            ]
        with m.Else():
            # What a child's members ask for again goes up: the parent answers them all.
            m.d.comb += [
                self.meta.everybody.eq(self.completes | job.child),
                self.meta.worker.eq(self.frame.worker),
            ]

        # ---- write back --------------------------------------------------------------------------------------------
        m.d.comb += new.eq(word)
        with m.If(self.visit_valid):
            with m.If(self.expires):
                m.d.comb += [
                    new.complete.eq(1),
                    new.partial.eq(1),
                    new.owed.eq(Mux(self.launch, 0, everybody)),
                    write.en.eq(1),
                ]
            with m.Else():
                m.d.comb += [
                    new.expired.eq(timed_out),
                    new.owed.eq(Mux(self.launch, word.owed & ~picked, word.owed)),
                    write.en.eq(visited),
                ]
        with m.Elif(self.accepted):
            m.d.comb += [
                new.chunk.eq(self.frame.chunk),
                new.lines.eq(self.frame.lines),
                new.seen.eq(now_seen),
                new.voters.eq(now_voters),
                new.abstained.eq(Mux(same, word.abstained, 0) | Mux(abstain, 1 << self.frame.worker, 0)),
                new.complete.eq(self.completes),
                new.owed.eq(Mux(self.completes & ~self.launch, everybody, 0)),
                write.en.eq(self.commit),
            ]
            with m.If(~same):
                m.d.comb += [new.claimed.eq(self.now), new.expired.eq(0), new.partial.eq(0)]
        with m.Else():
            m.d.comb += [
                new.owed.eq(word.owed | Mux(job.child, everybody, 1 << self.frame.worker)),
                write.en.eq(answers & ~self.launch & self.commit),
            ]
        m.submodules.owners = owners = Memory(shape=unsigned(index_width(params.jobs)), depth=versions, init=[])
        owner, claim = owners.read_port(domain="comb"), owners.write_port()
        m.d.comb += [
            owner.addr.eq(self.scan),
            self.scan_bank.eq(owner.data),
            claim.en.eq(write.en),
            claim.addr.eq(self.version),
            claim.data.eq(self.bank),
        ]

        here = Signal(versions)
        gone = Signal(versions)
        m.d.comb += here.eq(1 << self.version)
        with m.If(write.en):
            m.d.sync += [
                valid.eq(valid | here),
                self.waiting.eq(Mux(new.owed.any(), self.waiting | here, self.waiting & ~here)),
                self.armed.eq(Mux((job.timeout != 0) & ~new.complete, self.armed | here, self.armed & ~here)),
            ]
        with m.If(self.forget):
            m.d.sync += [
                valid.eq(valid & ~gone),
                self.waiting.eq(self.waiting & ~gone),
                self.armed.eq(self.armed & ~gone),
            ]
        for version in range(versions):
            slot = version % params.slots
            m.d.comb += gone[version].eq(((slot ^ self.forget_base) >> self.forget_log2) == 0)

        self._count(
            m, write.en & ~(live & ~word.complete) & ~new.complete, write.en & live & ~word.complete & new.complete
        )
        return m

    def _count(self, m: Module, begins: Value, ends: Value) -> None:
        """How many slot versions hold an incomplete chunk, by job, since a job's end is the end of them all."""
        levels = []
        for bank in range(self._params.jobs):
            level = Signal.like(self.level, name=f"level{bank}")
            mine = self.bank == bank
            with m.If(self.forget & (self.forget_bank == bank)):
                m.d.sync += level.eq(0)
            with m.Elif(mine & begins):
                m.d.sync += level.eq(level + 1)
            with m.Elif(mine & ends):
                m.d.sync += level.eq(level - 1)
            levels.append(level)
        m.d.comb += self.level.eq(sum(levels[1:], levels[0]))
