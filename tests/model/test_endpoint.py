"""Whole frames through the golden in-network endpoint, over a network that damages them."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_fabric.model import BINARY, GoldenWorker, JobConfig, Parent, ReducerParams, net, tally_encoding
from neuron_fabric.model.endpoint import NetworkEndpoint, buffer_bytes
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.registers import COUNTERS
from neuron_fabric.model.wire import DESTINATION_ALL, Header

PARAMS = ReducerParams(lanes=512, lines_per_chunk=2, slots=2, workers=4, acc_bits=3)
ME = Endpoint.of("02:00:00:00:00:ff", "10.0.0.254", 20045)
GROUP = Endpoint.multicast("239.1.2.3", 20045)
MEMBERS = {
    worker: Endpoint.of(f"02:00:00:00:00:0{worker}", f"10.0.0.{worker + 1}", 4000 + worker) for worker in range(3)
}


def damaged(frame, rng):
    """The frame after a network: as it was, or with a bit flipped, cut, or lengthened."""
    kind = rng.random()
    if kind < 0.7:
        return frame
    if kind < 0.85:
        # One bit: the checksum notices every one, but two can make up for each other (RFC 1071 is no CRC).
        changed = bytearray(frame)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind < 0.95:
        return frame[: rng.randrange(len(frame))]
    return frame + bytes(rng.randrange(1, 200))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_exact_over_a_network_that_damages_frames(seed, multicast):
    rng, bits = random.Random(seed), np.random.default_rng(seed)
    device = NetworkEndpoint(PARAMS, ME, GROUP if multicast else None)
    config = JobConfig(5, 1, MEMBERS, BINARY)
    device.open(config)
    workers = {w: GoldenWorker(PARAMS, config, w, 2, reducer=ME) for w in MEMBERS}
    lines = 5
    planes = {w: bits.integers(0, 256, (1, lines * 64), np.uint8) for w in MEMBERS}
    for worker, mine in planes.items():
        workers[worker].submit(mine, lines)
    for _ in range(400):
        for number, worker in workers.items():
            for payload in worker.outgoing(again=True):
                device.receive(damaged(net.build(MEMBERS[number], ME, payload), rng))
        for frame in device.poll():
            for number, worker in workers.items():
                try:
                    datagram = net.parse(damaged(frame, rng), MEMBERS[number], GROUP)
                except net.FrameError:
                    continue
                worker.receive(datagram.payload, datagram.source)
        if all(worker.done for worker in workers.values()):
            break
    tally = sum(np.unpackbits(mine[0], bitorder="little").astype(int) for mine in planes.values())
    want = [np.packbits((tally >> k & 1).astype(np.uint8), bitorder="little") for k in range(2)]
    for worker in workers.values():
        np.testing.assert_array_equal(worker.result().planes, want)
    assert set(device.reducer.counters) <= {name for name, _ in COUNTERS}
    # A damaged frame is dropped for what it is and never gets as far as the protocol's own checks; but nothing inside a
    # frame protects its source MAC address, which is part of what is pinned.
    refused = {name for name in device.reducer.counters if name.startswith("refused")}
    assert refused <= {"refused_wrong_sender"}


def contribution(worker, payload=bytes(64)):
    return Header(0, 5, worker, 0, lines=1, epoch=1).pack() + payload


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        (lambda f: f[:30], "dropped_too_short"),
        (lambda f: f[:12] + b"\x86\xdd" + f[14:], "dropped_not_ipv4"),
        (lambda f: b"\xff" * 6 + f[6:], "dropped_not_ours"),
        (lambda f: f[:-1] + b"\x01", "dropped_udp_checksum"),
        (lambda f: f[:40] + b"\0\0" + f[42:], "dropped_no_checksum"),
        (lambda f: f + bytes(200), "dropped_too_long"),
    ],
)
def test_what_is_dropped_is_counted_by_kind(change, counter):
    device = NetworkEndpoint(PARAMS, ME)
    device.open(JobConfig(5, 1, MEMBERS, BINARY))
    device.receive(change(net.build(MEMBERS[0], ME, contribution(0))))
    assert dict(device.reducer.counters) == {counter: 1}
    assert device.poll() == []


def test_a_sender_is_known_by_its_address():
    device = NetworkEndpoint(PARAMS, ME)
    device.open(JobConfig(5, 1, MEMBERS, BINARY))
    device.receive(net.build(MEMBERS[1], ME, contribution(0)))
    assert device.reducer.counters["refused_wrong_sender"] == 1


@pytest.mark.parametrize("group", [None, GROUP])
def test_a_result_goes_to_the_group_or_to_each_member(group):
    device = NetworkEndpoint(PARAMS, ME, group)
    device.open(JobConfig(5, 1, MEMBERS, BINARY))
    for worker, address in MEMBERS.items():
        device.receive(net.build(address, ME, contribution(worker)))
    sent = [net.parse(frame, None) for frame in device.poll()]
    wanted = [group] if group else list(MEMBERS.values())
    assert [datagram.destination for datagram in sent] == wanted * 2  # two planes
    assert all(Header.unpack(datagram.payload).worker == DESTINATION_ALL for datagram in sent)


@pytest.mark.parametrize("group", [None, GROUP], ids=["unicast", "group"])
def test_two_levels_over_frames(group):
    """Two children under a root, each an endpoint of its own: the members get the count of all leaves.

    With a group the root sends each result once, and the children listen there.
    """
    upper = tally_encoding(BINARY, 2)
    params = ReducerParams(lanes=512, lines_per_chunk=2, slots=2, workers=4, acc_bits=4)
    root_at = Endpoint.of("02:00:00:00:01:00", "10.0.1.0", 20045)
    child_at = [Endpoint.of(f"02:00:00:00:02:0{i}", f"10.0.2.{i}", 20045) for i in range(2)]
    leaf_at = [Endpoint.of(f"02:00:00:00:03:0{i}", f"10.0.3.{i}", 20045) for i in range(4)]
    root = NetworkEndpoint(params, root_at, group)
    root.open(JobConfig(9, 4, dict(enumerate(child_at)), upper))
    nodes = {root_at: root}
    for i in range(2):
        child = NetworkEndpoint(params, child_at[i], listen=group)
        members = {0: leaf_at[2 * i], 1: leaf_at[2 * i + 1]}
        child.open(JobConfig(5, 1, members, BINARY, parent=Parent(root_at, 9, i, 4, 2)))
        nodes[child_at[i]] = child
    for number, votes in enumerate((0b1111, 0b0111, 0b0011, 0b0001)):
        frame = net.build(leaf_at[number], child_at[number // 2], contribution(number % 2, bytes([votes]) + bytes(63)))
        nodes[child_at[number // 2]].receive(frame)
    delivered = []
    for _ in range(4):
        for node in nodes.values():
            for frame in node.poll():
                datagram = net.parse(frame, None)
                if datagram.destination == group:
                    for at in child_at:
                        nodes[at].receive(frame)
                elif datagram.destination in nodes:
                    nodes[datagram.destination].receive(frame)
                else:
                    delivered.append(datagram)
    results = [(d.destination, Header.unpack(d.payload), d.payload[22:]) for d in delivered]
    assert {destination for destination, _, _ in results} == set(leaf_at)
    mine = {header.plane: body for destination, header, body in results if destination == leaf_at[3]}
    tally = [sum((mine[k][0] >> i & 1) << k for k in mine) for i in range(5)]
    assert tally == [4, 3, 2, 1, 0]
    assert all(header.voters == 4 for _, header, _ in results)
    assert not any(name.startswith(("dropped", "refused")) for node in nodes.values() for name in node.reducer.counters)


def test_a_group_is_listened_to_only_where_it_is_asked_for():
    """Where results are sent is not where frames come from."""
    frame = net.build(MEMBERS[0], GROUP, contribution(0))
    for listen, counters in ((None, {"dropped_not_ours": 1}), (GROUP, {"frames": 1, "lines": 1, "slot_high_water": 1})):
        device = NetworkEndpoint(PARAMS, ME, GROUP, listen)
        device.open(JobConfig(5, 1, MEMBERS, BINARY))
        device.receive(frame)
        assert dict(device.reducer.counters) == counters


def test_members_without_an_address_are_refused_by_name():
    device = NetworkEndpoint(PARAMS, ME)
    with pytest.raises(ValueError, match="worker 0 has no Endpoint"):
        device.open(JobConfig(5, 1, range(3), BINARY))


def test_the_buffer_holds_the_longest_frame():
    assert buffer_bytes(ReducerParams()) == 42 + 22 + 16 * 64 + 64
