"""The CXL endpoint: its addresses, every rule one by one, and then hosts behind a fabric that does its worst."""

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuron_fabric.model import (
    BINARY,
    TERNARY,
    BucketFailedError,
    JobConfig,
    Parent,
    ReducerParams,
    Straggler,
    int_encoding,
    tally_encoding,
)
from neuron_fabric.model.cxl import ALL_BYTES, CXL_COUNTERS, CxlJob, CxlReducer, Outcome
from neuron_fabric.model.cxl_fabric import Fabric
from neuron_fabric.model.cxl_host import CxlHost
from neuron_fabric.model.cxl_map import (
    ADDRESS_BITS,
    STATUS_FIELDS,
    ContributeLine,
    CxlMap,
    IdentityLine,
    ResultLine,
    Status,
    StatusFlags,
    StatusLine,
    Window,
    address_table,
    status_table,
)
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.model.registers import COUNTERS

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))
JOB, EPOCH = 7, 3
ENCODINGS = (BINARY, TERNARY, int_encoding(2), int_encoding(4))
ZEROS = bytes(LINE_BYTES)
CHUNKS = 1 << 32


def sizes(slots=2, lines=3, workers=8, **changes):
    return ReducerParams(
        **{"slots": slots, "lines_per_chunk": lines, "workers": workers, "acc_bits": 8, "max_planes": 4, **changes}
    )


def opened(members=(0, 1), encoding=BINARY, *, params=None, lines=2, first_chunk=0, epoch=EPOCH, **config):
    """A device with one open job, and the short ways to write to it and to look at it."""
    device = CxlReducer(CxlMap(params or sizes()))
    job = CxlJob(JobConfig(JOB, epoch, members, encoding, **config), lines, first_chunk=first_chunk)
    device.open(job)
    address_map = device.map

    def write(worker, chunk, data=b"", *, plane=0, line=0, epoch=epoch, enable=ALL_BYTES):
        target = ContributeLine(0, worker, epoch, chunk, plane, line)
        return device.mem_wr(address_map.encode(target), data.ljust(LINE_BYTES, b"\0"), enable)

    def abstain(worker, chunk):
        return write(worker, chunk, plane=address_map.abstain_plane)

    def result(chunk, plane=0, line=0, epoch=epoch):
        return device.mem_rd(address_map.encode(ResultLine(0, epoch, chunk, plane, line)))

    def status(chunk, worker=0, part=0):
        slots = device.params.slots
        target = StatusLine(0, chunk % slots, chunk // slots % 2, worker, part)
        return Status.unpack(device.mem_rd(address_map.encode(target)).data)

    def element(chunk, index):
        """The tally of one element, as an unsigned number of its planes."""
        reads = [result(chunk, plane) for plane in range(job.result_planes)]
        assert not any(read.poison for read in reads)
        return sum((read.data[index // 8] >> index % 8 & 1) << plane for plane, read in enumerate(reads))

    return SimpleNamespace(**locals())


# ---- addresses -------------------------------------------------------------------------------------------------

reducer_sizes = st.builds(
    ReducerParams,
    lines_per_chunk=st.integers(1, 255),
    slots=st.sampled_from([1, 2, 8, 64]),
    workers=st.integers(1, 64),
    acc_bits=st.integers(1, 32),
    max_planes=st.integers(1, 32),
    jobs=st.integers(1, 5),
)
maps = st.builds(
    CxlMap,
    reducer_sizes,
    identity_bytes=st.sampled_from([64, 4096, 1 << 30]),
    epoch_bits=st.integers(1, 6),
)


@given(address_map=maps, data=st.data())
def test_encode_and_decode_are_inverse_and_every_line_has_one_address(address_map, data):
    line = data.draw(st.integers(0, address_map.size // LINE_BYTES - 1))
    target = address_map.decode(line * LINE_BYTES)
    if target is not None:
        assert address_map.encode(target) == line * LINE_BYTES
    window = data.draw(st.sampled_from(list(Window)))
    fields = address_map.fields[window]
    kind = type(address_map.decode(window << address_map.window_bits))
    target = kind(*(data.draw(st.integers(0, (1 << field.width) - 1)) for field in fields))
    assert address_map.decode(address_map.encode(target)) == target


@given(address_map=maps)
def test_fields_are_adjacent_and_wide_enough(address_map):
    params = address_map.params
    for fields in address_map.fields.values():
        low = 6
        for field in reversed(fields):
            assert field.lsb == low
            low += field.width
        assert low <= address_map.window_bits
    assert address_map.address_bits <= ADDRESS_BITS
    widths = {(w, f.name): f.width for w, fields in address_map.fields.items() for f in fields}
    assert 1 << widths[Window.CONTRIBUTE, "chunk"] >= 8 * params.slots
    assert 1 << widths[Window.CONTRIBUTE, "line"] >= params.lines_per_chunk
    assert address_map.abstain_plane >= params.max_planes
    top = address_map.seen_bit(params.max_planes - 1, params.lines_per_chunk - 1)
    assert top < 256 << widths[Window.STATUS, "part"]
    bits = [address_map.seen_bit(*at) for at in np.ndindex(params.max_planes, params.lines_per_chunk)]
    assert len(set(bits)) == len(bits)
    assert address_map.seen_mask(params.max_planes, params.lines_per_chunk) == sum(1 << bit for bit in bits)


def test_a_workers_contributions_to_a_job_are_one_range_of_pages():
    address_map = CxlMap(ReducerParams(jobs=2))
    areas = {}
    for worker in range(16):
        first = address_map.encode(ContributeLine(1, worker, 0, 0, 0, 0))
        last = address_map.encode(ContributeLine(1, worker, -1, -1, address_map.abstain_plane, 15))
        assert first % 4096 == 0
        assert last + LINE_BYTES - first == 1 << 22
        areas[worker] = range(first, last)
    assert len({area.start for area in areas.values()}) == 16


@given(
    current=st.integers(0, CHUNKS - 1), slots=st.sampled_from([1, 4, 64]), extra=st.integers(0, 3), offset=st.integers()
)
@example(current=CHUNKS - 1, slots=1, extra=0, offset=3)
def test_full_chunk_numbers_are_reconstructed_in_a_window_around_the_current_one(current, slots, extra, offset):
    bits = (8 * slots).bit_length() - 1 + extra
    address_map = CxlMap(sizes(slots), chunk_bits=bits)
    half = 1 << bits - 1
    chunk = (current + offset % (2 * half) - half) % CHUNKS
    assert address_map.nearest(address_map.low_chunk(chunk), current) == chunk


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": ReducerParams(lanes=64)}, "lanes must be 512"),
        ({"identity_bytes": 96}, "power of two"),
        ({"epoch_bits": 0}, "epoch_bits must be 1 to 16"),
        ({"chunk_bits": 5}, "chunk_bits must be 6 to 32"),
        (
            {"params": ReducerParams(slots=1 << 16, workers=64, max_planes=32, lines_per_chunk=255, jobs=255)},
            "a CXL address has 52",
        ),
    ],
)
def test_a_map_that_cannot_work_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        CxlMap(**{"params": ReducerParams(), **change})


def test_what_is_no_address_is_refused_by_name():
    address_map = CxlMap(sizes())
    with pytest.raises(ValueError, match="worker 8 does not fit its 3 address bits"):
        address_map.encode(ContributeLine(0, 8, 0, 0, 0, 0))
    for address in (1, -64, 1 << 64):
        with pytest.raises(ValueError, match="64-byte line"):
            address_map.decode(address)


@given(data=st.data())
def test_a_status_line_is_64_bytes_and_reads_back(data):
    status = Status(**{f.name: data.draw(st.integers(0, (1 << 8 * f.size) - 1)) for f in STATUS_FIELDS})
    line = status.pack()
    assert len(line) == LINE_BYTES
    assert Status.unpack(line) == status
    at = 0
    for field in STATUS_FIELDS:
        assert field.offset == at
        at += field.size


def test_the_tables_for_the_documentation_are_complete():
    assert all(f"| {window.name.lower()} |" in address_table() for window in Window)
    assert all(f"| {field.name} |" in status_table() for field in STATUS_FIELDS)


# ---- rules, one by one -----------------------------------------------------------------------------------------


def test_counts_and_is_readable_when_every_member_has_sent_every_line():
    device = opened()
    assert device.write(0, 0, b"\x03") is Outcome.ADDED
    assert device.write(1, 0, b"\x01") is Outcome.ADDED
    assert device.write(0, 0, b"\x80", line=1) is Outcome.ADDED
    assert device.result(0) == (ZEROS, True)
    assert device.write(1, 0, b"\x80", line=1) is Outcome.ADDED
    assert [device.element(0, i) for i in range(3)] == [2, 1, 0]
    assert device.result(0, plane=1, line=1).data[0] == 0x80
    status = device.status(0)
    assert status.flags == StatusFlags.OPEN | StatusFlags.CLAIMED | StatusFlags.COMPLETE
    assert (status.chunk, status.epoch, status.job, status.voters) == (0, EPOCH, JOB, 2)
    assert (status.lines, status.planes, status.result_planes, status.done) == (2, 1, 2, 0b11)


def test_a_line_counts_once_however_often_it_is_written():
    device = opened()
    for worker in range(2):
        device.write(worker, 0, b"\x01")
        assert device.write(worker, 0, b"\xff") is Outcome.DUPLICATE
        device.write(worker, 0, b"\x01", line=1)
    assert device.write(0, 0, b"\xff") is Outcome.DUPLICATE
    assert [device.element(0, i) for i in range(2)] == [2, 0]
    assert device.device.counters["duplicates"] == 3


def test_seen_bits_are_per_worker_plane_and_line():
    device = opened((0, 5), TERNARY)
    row = device.address_map.seen_row
    device.write(5, 0, plane=1, line=1)
    device.write(0, 0, plane=0, line=0)
    assert device.status(0, worker=5).seen == 1 << row + 1
    assert device.status(0, worker=0).seen == 1
    assert device.status(0, worker=1).seen == 0
    assert device.status(0).voters == 2
    assert device.status(0).done == 0


def test_seen_bits_that_do_not_fit_a_status_line_are_in_further_parts():
    params = sizes(lines=200, max_planes=3)
    device = opened((0,), int_encoding(3), params=params, lines=200)
    assert device.address_map.parts == 4
    for plane, line in ((0, 0), (1, 199), (2, 7)):
        device.write(0, 0, plane=plane, line=line)
    seen = [device.status(0, part=part).seen for part in range(4)]
    assert seen == [1, 1 << 199, 1 << 7, 0]


def test_a_partial_write_to_a_contribution_is_refused_and_changes_nothing():
    device = opened(lines=1)
    assert device.write(0, 0, b"\xff", enable=ALL_BYTES >> 1) is Outcome.PARTIAL_WRITE
    assert device.write(0, 0, b"\xff", enable=0) is Outcome.PARTIAL_WRITE
    assert device.status(0).seen == 0
    assert StatusFlags.CLAIMED not in device.status(0).flags
    for worker in range(2):
        device.write(worker, 0, b"\x01")
    assert [device.element(0, i) for i in range(2)] == [2, 0]
    assert device.device.counters["refused_partial_write"] == 2


def test_reads_of_contributions_are_zero_and_do_nothing():
    device = opened()
    device.write(0, 0, b"\xff")
    before = device.status(0)
    for target in (
        ContributeLine(0, 0, EPOCH, 0, 0, 0),
        ContributeLine(0, 7, 0, 5, device.address_map.abstain_plane, 2),
    ):
        assert device.device.mem_rd(device.address_map.encode(target)) == (ZEROS, False)
    assert device.status(0) == before


def test_abstainers_are_no_voters_and_a_vote_cannot_be_taken_back():
    device = opened((0, 1, 2), TERNARY, lines=1)
    device.write(0, 0, b"\x01")
    assert device.abstain(0, 0) is Outcome.ABSTAIN_AFTER_VOTE
    device.write(0, 0, b"\x02", plane=1)
    assert device.abstain(0, 0) is Outcome.DUPLICATE
    assert device.abstain(1, 0) is Outcome.ABSTAINED
    assert device.abstain(1, 0) is Outcome.DUPLICATE
    assert device.write(1, 0, b"\xff") is Outcome.DUPLICATE  # of what was given up
    assert device.status(0, worker=1).seen == device.address_map.seen_mask(2, 1)
    device.abstain(2, 0)
    assert [device.element(0, i) for i in range(3)] == [1, 7, 0]  # +1, -1 in three bits, 0
    assert (device.status(0).voters, device.status(0).abstained, device.status(0).done) == (1, 0b110, 0b111)


def test_a_chunk_from_which_all_abstain_is_zero_whatever_was_there():
    device = opened(lines=1)
    for worker in range(2):
        device.write(worker, 0, b"\xff" * 64)
    for worker in range(2):
        device.abstain(worker, 4)
    assert device.element(4, 0) == 0
    assert (device.status(4).voters, device.status(4).abstained) == (0, 0b11)
    device.write(0, 8)
    assert (device.status(8).voters, device.status(8).abstained) == (1, 0)


def test_a_newer_chunk_claims_whatever_the_version_holds():
    device = opened(lines=2)
    device.write(0, 0, b"\xff")
    device.write(0, 0, b"\xff", line=1)
    assert device.write(1, 4, b"\x01") is Outcome.ADDED  # same slot, same version
    assert device.device.counters["abandoned"] == 1
    assert device.write(0, 0, b"\xff") is Outcome.STALE
    assert device.result(0) == (ZEROS, True)
    device.write(0, 4)
    for worker in range(2):
        device.write(worker, 4, line=1)
    assert [device.element(4, i) for i in range(2)] == [1, 0]
    assert device.result(4, line=1).data == ZEROS


def test_the_two_versions_of_a_slot_are_apart():
    device = opened(lines=1)
    for chunk, data in ((0, b"\x01"), (2, b"\x02")):
        for worker in range(2):
            device.write(worker, chunk, data)
    assert [device.element(0, i) for i in range(2)] == [2, 0]
    assert [device.element(2, i) for i in range(2)] == [0, 2]


@pytest.mark.parametrize("first", [0, 5, CHUNKS - 3])
def test_a_job_begins_with_its_first_chunk_and_nothing_older_claims(first):
    device = opened(lines=1, first_chunk=first)
    for offset in range(4):
        assert StatusFlags.CLAIMED not in device.status((first + offset) % CHUNKS).flags
        assert device.write(0, (first + offset - 4) % CHUNKS) is Outcome.STALE
        assert device.write(0, (first + offset) % CHUNKS) is Outcome.ADDED
        assert device.status((first + offset) % CHUNKS).chunk == (first + offset) % CHUNKS


@pytest.mark.parametrize("current", [40, 2, CHUNKS - 2])
@pytest.mark.parametrize("chunk_bits", [4, 6])
def test_newer_and_stale_within_the_window(current, chunk_bits):
    """S = 2: numbers of one version are 4 apart, and the window is 16 wide, or 64."""
    outcomes = {}
    for versions in range(-8, 8):
        device = CxlReducer(CxlMap(sizes(), chunk_bits=chunk_bits))
        device.open(CxlJob(JobConfig(JOB, EPOCH, (0, 1), BINARY), 1, first_chunk=current))
        for offset in (0, 4 * versions):
            target = ContributeLine(0, 0, EPOCH, current + offset, 0, 0)
            outcomes[versions] = device.mem_wr(device.map.encode(target), ZEROS)
    half = (1 << chunk_bits) // 8
    for versions in range(-half, half):
        want = Outcome.STALE if versions < 0 else Outcome.ADDED if versions > 0 else Outcome.DUPLICATE
        assert outcomes[versions] is want
    if half < 8:
        assert outcomes[half] is Outcome.STALE  # exactly half of the window away


def test_an_unfinished_result_is_poison_and_never_data():
    device = opened((0, 1), TERNARY, lines=2)
    readable = [(plane, line) for plane in range(8) for line in range(3)]
    for plane, line in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for worker in range(2):
            assert all(device.result(0, *at) == (ZEROS, True) for at in readable)
            device.write(worker, 0, b"\xff" * 64, plane=plane, line=line)
    assert [at for at in readable if not device.result(0, *at).poison] == [
        (plane, line) for plane in range(3) for line in range(2)
    ]
    assert device.result(4) == (ZEROS, True)  # another chunk of the same version
    assert device.result(0, epoch=EPOCH + 1) == (ZEROS, True)
    device.device.close(0)
    before = device.device.counters.copy()
    assert device.result(0) == (ZEROS, True)
    assert device.device.counters - before == {"reads": 1, "poisoned": 1}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"epoch": EPOCH + 1}, Outcome.WRONG_EPOCH),
        ({"epoch": EPOCH - 1}, Outcome.WRONG_EPOCH),
        ({"worker": 2}, Outcome.WRONG_SENDER),
        ({"plane": 1}, Outcome.BAD_PLANE),
        ({"plane": 6}, Outcome.BAD_PLANE),
        ({"line": 2}, Outcome.BAD_LINES),
        ({"plane": 7, "line": 1}, Outcome.BAD_LINES),
    ],
)
def test_a_write_that_is_refused_changes_nothing_and_is_counted(change, outcome):
    device = opened()
    assert device.write(**{"worker": 0, "chunk": 0, "data": b"\xff", **change}) is outcome
    assert device.device.counters == {outcome.value: 1}
    assert StatusFlags.CLAIMED not in device.status(0).flags


def test_a_closed_bank_refuses_and_its_status_is_zero():
    device = opened(lines=1)
    device.write(0, 0, b"\x01")
    device.write(1, 0, b"\x01")
    device.device.reset()
    assert device.write(0, 0) is Outcome.JOB_NOT_OPEN
    assert device.status(0).pack() == ZEROS
    device.device.open(device.job)
    for worker in range(2):
        device.write(worker, 0)
    assert device.element(0, 0) == 0


def test_results_and_status_cannot_be_written_and_holes_are_poison():
    device = opened()
    address_map = device.address_map
    assert device.device.mem_wr(address_map.encode(ResultLine(0, 0, 0, 0, 0)), ZEROS) is Outcome.READ_ONLY
    assert device.device.mem_wr(address_map.encode(StatusLine(0, 0, 0, 0, 0)), ZEROS) is Outcome.READ_ONLY
    hole = (Window.RESULT << address_map.window_bits) - LINE_BYTES
    hole += 1 << address_map.window_bits  # the last line of the result window, which is smaller than a window can be
    for nothing in (hole, address_map.size, (1 << 64) - LINE_BYTES):
        assert address_map.decode(nothing) is None
        assert device.device.mem_wr(nothing, ZEROS) is Outcome.READ_ONLY
        assert device.device.mem_rd(nothing) == (ZEROS, True)
    with pytest.raises(ValueError, match="a write has 64 bytes"):
        device.device.mem_wr(0, b"\0")


@given(seed=st.integers(0, 2**32 - 1))
def test_the_identity_window_is_plain_memory(seed):
    rng = random.Random(seed)
    device = CxlReducer(CxlMap(sizes(), identity_bytes=512))
    memory = bytearray(512)
    for _ in range(50):
        line, data, enable = rng.randrange(8), rng.randbytes(64), rng.choice([ALL_BYTES, rng.getrandbits(64), 0])
        assert device.mem_wr(device.map.encode(IdentityLine(line)), data, enable) is Outcome.STORED
        for index in range(64):
            if enable >> index & 1:
                memory[64 * line + index] = data[index]
        line = rng.randrange(8)
        assert device.mem_rd(device.map.encode(IdentityLine(line))) == (
            bytes(memory[64 * line : 64 * line + 64]),
            False,
        )
    device.reset()
    assert b"".join(device.mem_rd(64 * line).data for line in range(8)) == memory


def test_majority_with_a_tie_and_a_margin():
    for margin in (0, 1):
        device = opened((0, 1, 2), result_format="majority", margin=margin, lines=1)
        for worker, bits in enumerate((b"\x01", b"\x01", b"\x05")):
            device.write(worker, 0, bits)
        # votes: element 0 is -3, 1 is +3, 2 is +1
        assert [device.result(0, p).data[:1] for p in range(2)] == [b"\x01", bytes([0xFF if margin == 0 else 0xFB])]
        assert device.result(0, 2).poison
        assert StatusFlags.MAJORITY in device.status(0).flags


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": ()}, "no members"),
        ({"encoding": int_encoding(5)}, "5 planes; this reducer takes 4"),
        ({"straggler": Straggler(1, 1)}, "no tree and no straggler rule"),
        ({"parent": Parent("p", 1, 0, 1, 4)}, "no tree and no straggler rule"),
        ({"encoding": tally_encoding(BINARY, 2)}, "no tree and no straggler rule"),
        ({"lines": 4}, "lines must be 1 to 3"),
        ({"bank": 2}, "bank 2 is out of range"),
        ({"first_chunk": CHUNKS}, "first_chunk has 32 bits"),
        ({"bank": 1}, "bank 0 is open with job 7; close that first"),
        ({"job": 8}, "bank 0 is open with job 7; close that first"),
        ({"epoch": EPOCH}, "reopening needs a higher one"),
        ({"job": 8, "bank": 1, "base": 0, "slots": 4}, "slots"),
        ({"base": 1, "slots": 2}, "slots"),
        ({"slots": 3}, "slots"),
    ],
)
def test_a_job_that_cannot_work_is_refused_by_name(change, message):
    device = CxlReducer(CxlMap(sizes(slots=4, jobs=2)))
    device.open(CxlJob(JobConfig(JOB, EPOCH, (0, 1), BINARY, slots=2), 1))
    where = {"lines": 1, "bank": 0, "first_chunk": 0}
    config = {"job": JOB, "epoch": EPOCH + 1, "members": (0, 1), "encoding": BINARY, "slots": 2}
    for name, value in change.items():
        (where if name in where else config)[name] = value
    with pytest.raises(ValueError, match=message):
        device.open(CxlJob(JobConfig(**config), **where))


def test_two_banks_do_not_meet():
    device = CxlReducer(CxlMap(sizes(jobs=2)))
    for bank in range(2):
        device.open(CxlJob(JobConfig(bank, EPOCH, (0,), BINARY, base=bank, slots=1), 1, bank=bank))
        device.mem_wr(device.map.encode(ContributeLine(bank, 0, EPOCH, 0, 0, 0)), bytes([1 + bank]) * 64)
    for bank in range(2):
        assert device.mem_rd(device.map.encode(ResultLine(bank, EPOCH, 0, 0, 0))).data == bytes([1 + bank]) * 64


def test_a_job_has_a_range_of_the_slots_and_what_is_no_slot_of_it_reads_as_closed():
    device = CxlReducer(CxlMap(sizes(slots=4, jobs=2)))
    jobs = [
        CxlJob(JobConfig(1, EPOCH, (0, 1), BINARY, base=2, slots=2), 1, bank=0),
        CxlJob(JobConfig(2, EPOCH, (0, 1), BINARY, base=1, slots=1), 1, bank=1),
    ]
    for job in jobs:
        device.open(job)
        for chunk in range(2 * job.config.slots):
            target = ContributeLine(job.bank, 0, EPOCH, chunk, 0, 0)
            assert device.mem_wr(device.map.encode(target), ZEROS) is Outcome.ADDED
    for job in jobs:
        for slot, version in np.ndindex(4, 2):
            line = device.mem_rd(device.map.encode(StatusLine(job.bank, slot, version, 0, 0))).data
            if slot < job.config.slots:
                status = Status.unpack(line)
                assert StatusFlags.CLAIMED in status.flags
                assert (status.chunk, status.job) == (version * job.config.slots + slot, job.config.job)
            else:
                assert line == ZEROS
    # The next chunk of a slot version claims it after twice the job's slots, not the device's.
    target = ContributeLine(1, 0, EPOCH, 2, 0, 0)
    assert device.mem_wr(device.map.encode(target), ZEROS) is Outcome.ADDED
    assert device.counters["abandoned"] == 1


def test_slots_of_a_closed_job_can_be_another_ones():
    device = CxlReducer(CxlMap(sizes(slots=4, jobs=2)))
    device.open(CxlJob(JobConfig(1, EPOCH, (0, 1), BINARY), 1, bank=0))
    device.close(0)
    device.open(CxlJob(JobConfig(2, EPOCH, (0, 1), BINARY, base=2, slots=2), 1, bank=1))
    device.close(0)
    device.reset()
    device.open(CxlJob(JobConfig(1, EPOCH, (0, 1), BINARY), 1, bank=0))


# ---- random transactions against a plain account of them -------------------------------------------------------


class Account:
    """What a device must hold, kept as sets and dictionaries from the rules alone, with full chunk numbers."""

    def __init__(self, members, encoding, lines, versions):
        self.members, self.encoding, self.lines, self.versions = members, encoding, lines, versions
        self.chunk, self.sent, self.gone = {}, {}, {}

    def complete(self, version):
        whole = set(np.ndindex(self.encoding.planes, self.lines))
        return version in self.chunk and all(
            w in self.gone[version] or whole <= {key[1:] for key in self.sent[version] if key[0] == w}
            for w in self.members
        )

    def write(self, worker, chunk, plane, line, data):
        """``plane`` None abstains."""
        version = chunk % self.versions
        if chunk < self.chunk.get(version, chunk):
            return Outcome.STALE
        if chunk != self.chunk.get(version):
            self.chunk[version], self.sent[version], self.gone[version] = chunk, {}, set()
        sent, gone = self.sent[version], self.gone[version]
        mine = [key for key in sent if key[0] == worker]
        if self.complete(version) or worker in gone or (worker, plane, line) in sent:
            return Outcome.DUPLICATE
        if plane is None and mine:
            return Outcome.DUPLICATE if len(mine) == self.lines * self.encoding.planes else Outcome.ABSTAIN_AFTER_VOTE
        if plane is None:
            gone.add(worker)
            return Outcome.ABSTAINED
        sent[worker, plane, line] = data
        return Outcome.ADDED

    def tally(self, version, line):
        total = np.zeros(512, np.int64)
        for (_, plane, where), data in self.sent[version].items():
            if where == line:
                total += self.encoding.weights[plane] * bits_of(data)
        return total


def bits_of(data):
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    encoding=st.sampled_from(ENCODINGS),
    slots=st.sampled_from([1, 2, 4]),
    lines=st.integers(1, 3),
    world=st.integers(1, 5),
    base=st.sampled_from([0, 77, CHUNKS - 9]),
)
def test_any_transactions_leave_what_a_plain_account_of_them_says(seed, encoding, slots, lines, world, base):
    rng = random.Random(seed)
    members = rng.sample(range(8), world)
    device = opened(members, encoding, params=sizes(slots), lines=lines, first_chunk=base)
    # The account's chunks are not cut to 32 bits, so that it need not know how they wrap.
    account, newest, writes = Account(members, encoding, lines, 2 * slots), base, 0
    for _ in range(300):
        chunk = max(base, newest + rng.randint(-3 * slots, slots))
        version = chunk % (2 * slots)
        current = account.chunk.get(version, base + (version - base) % (2 * slots) - 2 * slots)
        if chunk > current + 2 * slots:
            continue  # two steps of a version at once are out of the window
        newest = max(newest, chunk)
        worker = rng.choice(members)
        plane = rng.randrange(encoding.planes) if rng.random() < 0.9 else None
        line = rng.randrange(lines) if plane is not None else 0
        data = rng.randbytes(64)
        fault = rng.random()
        where = {"plane": device.address_map.abstain_plane if plane is None else plane, "line": line}
        if fault < 0.05:
            got, want = device.write(worker, chunk % CHUNKS, data, enable=1, **where), Outcome.PARTIAL_WRITE
        elif fault < 0.1:
            got, want = device.write(worker, chunk % CHUNKS, data, epoch=EPOCH + 8, **where), Outcome.WRONG_EPOCH
        else:
            got, want = (
                device.write(worker, chunk % CHUNKS, data, **where),
                account.write(worker, chunk, plane, line, data),
            )
        assert got is want
        writes += 1
        version = rng.choice(list(account.chunk) or [0])
        if version not in account.chunk:
            continue
        number, line = account.chunk[version] % CHUNKS, rng.randrange(lines)
        status = device.status(number, worker)
        assert status.chunk == number
        assert (StatusFlags.COMPLETE in status.flags) == account.complete(version)
        assert status.voters == len({key[0] for key in account.sent[version]})
        reads = [device.result(number, plane, line) for plane in range(device.job.result_planes)]
        assert all(read.poison != account.complete(version) for read in reads)
        if account.complete(version):
            want = account.tally(version, line)
            for plane, read in enumerate(reads):
                np.testing.assert_array_equal(bits_of(read.data), want >> plane & 1)
    counters = device.device.counters
    assert sum(counters[outcome.value] for outcome in Outcome) == writes


def test_every_counter_is_declared_and_named_as_in_the_register_table_where_it_means_the_same():
    names = [name for name, _ in CXL_COUNTERS]
    assert len(set(names)) == len(names)
    assert {outcome.value for outcome in Outcome} == set(names[:-4])
    assert {"lines", "completed", "duplicates", "stale", "abandoned"} <= {name for name, _ in COUNTERS} & set(names)


# ---- hosts -----------------------------------------------------------------------------------------------------


def expected(encoding, planes, result_planes, *, majority=None):
    """Result planes from whole numbers; ``planes`` has None for who abstains."""
    voters = [mine for mine in planes if mine is not None]
    length = voters[0].shape[1] if voters else 0
    total = np.zeros(8 * length, np.int64)
    for mine in voters:
        bits = np.unpackbits(mine, axis=1, bitorder="little").astype(np.int64)
        total += np.tensordot(np.array(encoding.weights), bits, axes=1)
    if majority is not None:
        votes = len(voters) - 2 * total if encoding.counts_negatives else total
        rows = [votes < -majority, np.abs(votes) > majority]
    else:
        rows = [total >> k & 1 for k in range(result_planes)]
    return np.stack([np.packbits(np.asarray(row, np.uint8), bitorder="little") for row in rows])


def hosts_of(device, fabric, job):
    return [CxlHost(device.map, job, worker, fabric.port()) for worker in job.members]


def stepper(hosts, fabric, step=CxlHost.step):
    """A function that lets some host go one round on, in the middle of which other hosts may do the same."""
    resting, rng = list(hosts), fabric.rng

    def go():
        ready = [host for host in resting if not host.done]
        if not ready:
            return
        host = rng.choice(ready)
        resting.remove(host)
        try:
            step(host)
        finally:
            resting.append(host)

    fabric.meanwhile = lambda: go() if rng.random() < 0.1 else None
    return go


def finish(hosts, fabric, rounds=3000, between=lambda: None):
    go = stepper(hosts, fabric)
    for _ in range(rounds):
        if all(host.done for host in hosts):
            return [host.result() for host in hosts]
        go()
        between()
    raise AssertionError("the bucket did not finish")


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    world=st.integers(1, 5),
    encoding=st.sampled_from(ENCODINGS),
    majority=st.sampled_from([None, 0, 2]),
    slots=st.sampled_from([1, 2, 4]),
    pool=st.sampled_from([1, 4]),
    job_lines=st.integers(1, 3),
    first_chunk=st.sampled_from([0, 5, CHUNKS - 3]),
)
def test_exact_on_every_host_behind_a_fabric_that_does_its_worst(
    seed, world, encoding, majority, slots, pool, job_lines, first_chunk
):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    device = CxlReducer(CxlMap(sizes(slots * pool)))
    members = rng.sample(range(8), world)
    form = {"base": rng.randrange(pool) * slots, "slots": slots}
    if majority is not None:
        form |= {"result_format": "majority", "margin": majority}
    job = CxlJob(JobConfig(JOB, EPOCH, members, encoding, **form), job_lines, first_chunk=first_chunk)
    device.open(job)
    fabric = Fabric(device, device.map, rng)
    hosts = hosts_of(device, fabric, job)
    plain, port = {}, fabric.port()

    def identity_traffic():
        line = rng.randrange(16)
        if line in plain and rng.random() < 0.5:
            (read,) = port.load([device.map.encode(IdentityLine(line))])
            assert read == (plain[line], False)
        else:
            plain[line] = rng.randbytes(64)
            port.store(device.map.encode(IdentityLine(line)), plain[line])

    chunks = 0
    for _bucket in range(3):
        lines = rng.randint(1, 4 * slots * job_lines)
        chunks += -(-lines // job_lines)
        planes = [bits.integers(0, 256, (encoding.planes, 64 * lines), np.uint8) for _ in members]
        if world > 1 and rng.random() < 0.3:
            planes[rng.randrange(world)] = None
        for host, mine in zip(hosts, planes, strict=True):
            host.submit(mine, lines)
        want = expected(encoding, planes, job.result_planes, majority=majority)
        for result in finish(hosts, fabric, between=identity_traffic):
            np.testing.assert_array_equal(result.planes, want)
            assert set(result.voters) == {sum(mine is not None for mine in planes)}
    assert device.counters["completed"] == chunks
    assert device.counters["abandoned"] == 0
    port.fence()
    for line, data in plain.items():
        assert device.mem_rd(device.map.encode(IdentityLine(line))).data == data


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_abstaining_from_some_chunks_counts_the_others(seed):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    device = CxlReducer(CxlMap(sizes()))
    job = CxlJob(JobConfig(JOB, EPOCH, (0, 1, 2), TERNARY), 2)
    device.open(job)
    fabric = Fabric(device, device.map, rng)
    hosts = hosts_of(device, fabric, job)
    planes = bits.integers(0, 256, (3, 2, 64 * 9), np.uint8)
    skipped = bits.integers(0, 2, (3, 5)).astype(bool)
    for host, mine, skip in zip(hosts, planes, skipped, strict=True):
        host.submit(mine, 9, abstain=list(skip))
    counted = planes * np.repeat(~skipped, 128, axis=1)[:, None, : 64 * 9]
    for result in finish(hosts, fabric):
        np.testing.assert_array_equal(result.planes, expected(TERNARY, list(counted), job.result_planes))
        np.testing.assert_array_equal(result.voters, 3 - skipped.sum(0))


def test_a_thousand_chunks_on_one_slot_carry_nothing_over():
    print(f"NEURON_FABRIC_SEED={SEED}")
    rng, bits = random.Random(SEED), np.random.default_rng(SEED)
    device = CxlReducer(CxlMap(sizes(slots=1)))
    job = CxlJob(JobConfig(JOB, EPOCH, (0, 1, 2), BINARY), 1, first_chunk=CHUNKS - 500)
    device.open(job)
    fabric = Fabric(device, device.map, rng)
    hosts = hosts_of(device, fabric, job)
    planes = bits.integers(0, 256, (3, 1, 64 * 1000), np.uint8)
    for host, mine in zip(hosts, planes, strict=True):
        host.submit(mine, 1000)
    for result in finish(hosts, fabric, rounds=30_000):
        np.testing.assert_array_equal(result.planes, expected(BINARY, list(planes), job.result_planes))
    # Nothing is proved by a fabric that behaves.
    assert min(fabric.counters[name] for name in ("lost", "split", "repeated", "ahead")) > 100
    assert min(device.counters[name] for name in ("duplicates", "stale", "refused_partial_write")) > 100
    assert device.counters["lines"] == 3000


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 40))
def test_a_new_epoch_takes_nothing_of_the_old_one_and_the_old_one_nothing_of_the_new(seed, steps):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    device = CxlReducer(CxlMap(sizes()))
    fabric = Fabric(device, device.map, rng, ahead=0.6)
    lines, old, new = 12, None, None
    for epoch in (EPOCH, EPOCH + 1):
        job = CxlJob(JobConfig(JOB, epoch, (0, 1), BINARY), 1)
        planes = bits.integers(0, 256, (2, 1, 64 * lines), np.uint8)
        want = expected(BINARY, list(planes), job.result_planes)
        device.open(job)
        hosts = hosts_of(device, fabric, job)
        for host, mine in zip(hosts, planes, strict=True):
            host.submit(mine, lines)
        old, new = new, (hosts, want)
        go = stepper(hosts, fabric)
        for _ in range(steps):
            go()

    def step(host):
        """The old hosts do not know yet, and go on whatever they are told."""
        try:
            host.step()
        except BucketFailedError:
            assert host in old[0]

    go = stepper(old[0] + new[0], fabric, step)
    for _ in range(2000):
        if all(host.done for host in new[0]):
            break
        go()
    for host in new[0]:
        np.testing.assert_array_equal(host.result().planes, new[1])
    for host in old[0]:
        if host.done:
            np.testing.assert_array_equal(host.result().planes, old[1])
        else:
            with pytest.raises(BucketFailedError, match="is not open with job 7, epoch 3"):
                host.step()


def test_a_job_that_is_reopened_between_status_and_results_gives_no_result():
    device = opened((0,), lines=1)
    device.write(0, 0, b"\x01")

    class Port:
        """Reopens the job before the second fence, and lets the new run complete the same chunk."""

        fences = 0

        def store(self, address, data):
            device.device.mem_wr(address, data)

        def load(self, addresses):
            return [device.device.mem_rd(address) for address in addresses]

        def fence(self):
            self.fences += 1
            if self.fences == 2:
                device.device.open(CxlJob(JobConfig(JOB, EPOCH + 1, (0,), BINARY), 1))
                assert device.write(0, 0, b"\xff", epoch=EPOCH + 1) is Outcome.ADDED

    host = CxlHost(device.address_map, device.job, 0, Port())
    host.submit(np.zeros((1, 64), np.uint8), 1)
    host.step()
    assert not host.done
    assert host.counters["poisoned"] == 1
    with pytest.raises(BucketFailedError, match="not open with job 7, epoch 3"):
        host.step()


def test_a_host_without_its_second_fence_meets_poison_and_never_a_wrong_result():
    rng, bits = random.Random(SEED), np.random.default_rng(SEED)
    device = CxlReducer(CxlMap(sizes(slots=1)))
    job = CxlJob(JobConfig(JOB, EPOCH, (0, 1), BINARY), 1)
    device.open(job)
    fabric = Fabric(device, device.map, rng, ahead=0.5)
    hosts = hosts_of(device, fabric, job)

    class OneFence:
        def __init__(self, port):
            self.store, self.load, self.odd, self.port = port.store, port.load, False, port

        def fence(self):
            self.odd = not self.odd
            if self.odd:
                self.port.fence()

    planes = bits.integers(0, 256, (2, 1, 64 * 60), np.uint8)
    for host, mine in zip(hosts, planes, strict=True):
        host._port = OneFence(host._port)
        host.submit(mine, 60)
    for result in finish(hosts, fabric):
        np.testing.assert_array_equal(result.planes, expected(BINARY, list(planes), job.result_planes))
    assert sum(host.counters["poisoned"] for host in hosts) > 0


def test_a_host_that_was_left_behind_or_is_set_up_differently_is_told():
    device = opened(lines=1)
    fabric = Fabric(device.device, device.address_map, random.Random(SEED))
    host = CxlHost(device.address_map, device.job, 0, fabric.port())
    host.submit(np.zeros((1, 64), np.uint8), 1)
    for chunk in (0, 4):
        device.write(1, chunk)
    with pytest.raises(BucketFailedError, match="gone past chunk 0"):
        host.step()
    other = CxlHost(device.address_map, CxlJob(device.job.config, 2), 0, fabric.port())
    other.submit(np.zeros((1, 64), np.uint8), 1)
    with pytest.raises(BucketFailedError, match=r"\(1, 1, 2, False\) in the device and \(2, 1, 2, False\) here"):
        other.step()


def test_a_host_writes_nothing_for_a_slot_that_is_not_free():
    device = opened(lines=1)

    class Recorder:
        def __init__(self):
            self.written = []

        def store(self, address, data):
            self.written.append(device.address_map.decode(address).chunk)
            device.device.mem_wr(address, data)

        def load(self, addresses):
            return [device.device.mem_rd(address) for address in addresses]

        def fence(self):
            pass

    port = Recorder()
    host = CxlHost(device.address_map, device.job, 0, port)
    host.submit(np.zeros((1, 640), np.uint8), 10)
    for _ in range(3):
        host.step()
    assert port.written == [0, 1]  # the device has them, so they are not written again
    device.abstain(1, 1)
    host.step()
    host.step()
    assert port.written == [0, 1, 3]


def test_a_host_outside_the_window_takes_no_result_of_another_chunk_for_its_own():
    device = opened((0,), lines=1)
    device.write(0, 0, b"\xff")
    # Eight times the slots on: the same address, but the device still holds chunk 0, complete.
    job = CxlJob(device.job.config, 1, first_chunk=16)
    host = CxlHost(device.address_map, job, 0, Fabric(device.device, device.address_map, random.Random(SEED)).port())
    host.submit(np.zeros((1, 64), np.uint8), 1)
    for _ in range(5):
        host.step()
    assert not host.done
    assert device.element(0, 0) == 1


def test_the_last_chunk_is_padded_with_zeros():
    device = opened((0,), lines=3)
    host = CxlHost(
        device.address_map, device.job, 0, Fabric(device.device, device.address_map, random.Random(SEED)).port()
    )
    host.submit(np.full((1, 256), 255, np.uint8), 4)
    for _ in range(50):
        host.step()
    assert host.result().planes.shape == (1, 256)
    assert [device.result(1, line=line).data[0] for line in range(3)] == [255, 0, 0]


def test_a_bucket_is_checked_before_it_begins():
    device = opened()
    host = CxlHost(
        device.address_map, device.job, 0, Fabric(device.device, device.address_map, random.Random(0)).port()
    )
    with pytest.raises(ValueError, match="planes must have shape"):
        host.submit(np.zeros((2, 64), np.uint8), 1)
    with pytest.raises(ValueError, match="abstain has 1 entries for 2 chunks"):
        host.submit(None, 3, abstain=[True])
    host.submit(None, 0)
    assert host.result().planes.shape == (2, 0)
    host.submit(None, 1)
    with pytest.raises(RuntimeError, match="not finished"):
        host.submit(None, 1)
    with pytest.raises(RuntimeError, match="not finished"):
        host.result()
