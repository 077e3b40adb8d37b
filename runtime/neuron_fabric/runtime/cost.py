"""What an endpoint can do per second, against an FP32 ring all-reduce: does low-bit pay here?

A law of eight bounds; the smallest binds. Units are in the names: ``bits_per_s``, ``elements_per_s``, ``s``, ``hz``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields

from neuron_fabric.model.encoding import Encoding, encoding_by_name
from neuron_fabric.model.params import LINE_BYTES

__all__ = ["MAJORITY_BITS", "Bound", "Endpoint", "Verdict", "judge", "ring_elements_per_s"]

MAJORITY_BITS = 2
"""Bits of a majority result: negative, nonzero."""
FRAME_OVERHEAD_BYTES = 88
"""Beside the lines of a frame: Ethernet, IPv4, UDP and protocol headers (64), preamble, checksum and gap (24)."""
TCP_SHARE = 1448 / 1538
"""Payload of a full TCP segment over its bytes on the wire, at an MTU of 1,500."""


class Bound(enum.StrEnum):
    """A term of the law."""

    ENDPOINT_IN = "endpoint_in"
    ENDPOINT_OUT = "endpoint_out"
    WORKER_UP = "worker_up"
    WORKER_DOWN = "worker_down"
    CORE_IN = "core_in"
    CORE_OUT = "core_out"
    SLOTS = "slots"
    MEMORY = "memory"


@dataclass(frozen=True)
class Endpoint:
    """An endpoint and its links.

    Parameters
    ----------
    port_bits_per_s : float
        Rate of one of the endpoint's ports, per direction.
    worker_bits_per_s : float
        Rate of a worker's link, per direction.
    ports : int
        Ports of the endpoint, among which the workers are spread evenly.
    multicast : bool
        Whether a result leaves a port once for all workers behind it, instead of once per worker.
    lanes : int
        Elements per cycle of the datapath, W.
    clock_hz : float
    lines_per_frame : int
        K; a frame takes one cycle more than its lines.
    slots : int
        Chunks in flight, S.
    accumulator_bits : int
        A.
    memory_bits_per_s : float
        Of the tallies; infinite for memory on the chip.
    network_round_trip_s, skew_s : float
        Of an empty network, and the usual time between the first and the last worker's contribution.
    """

    port_bits_per_s: float
    worker_bits_per_s: float
    ports: int = 1
    multicast: bool = False
    lanes: int = 512
    clock_hz: float = 250e6
    lines_per_frame: int = 16
    slots: int = 64
    accumulator_bits: int = 6
    memory_bits_per_s: float = math.inf
    network_round_trip_s: float = 10e-6
    skew_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, zero_is_fine = getattr(self, each.name), each.name in ("network_round_trip_s", "skew_s", "multicast")
            if math.isnan(value) or value < 0 or (value == 0 and not zero_is_fine):
                raise ValueError(
                    f"endpoint: {each.name} must be {'0 or more' if zero_is_fine else 'positive'}, but is {value}"
                )

    @property
    def wire_share(self) -> float:
        """Payload over bytes on the wire, eta: 1024/1112 at 16 lines."""
        payload = LINE_BYTES * self.lines_per_frame
        return payload / (payload + FRAME_OVERHEAD_BYTES)

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk: one frame's lines of one plane."""
        return 8 * LINE_BYTES * self.lines_per_frame


@dataclass(frozen=True)
class Verdict:
    """The law's answer.

    Attributes
    ----------
    bounds_elements_per_s : dict of Bound to float
        All terms, before retransmissions.
    binding : Bound
        The smallest; the first in the order of :class:`Bound` if two are equal.
    elements_per_s : float
        What the endpoint aggregates.
    ring_elements_per_s : float
        What the ring all-reduce does on the workers' links; infinite with one worker, who sends nothing.
    """

    bounds_elements_per_s: dict[Bound, float]
    binding: Bound
    elements_per_s: float
    ring_elements_per_s: float

    @property
    def speed_up(self) -> float:
        """How many times faster than the ring."""
        return self.elements_per_s / self.ring_elements_per_s


def ring_elements_per_s(worker_bits_per_s: float, world: int, wire_share: float = TCP_SHARE) -> float:
    """FP32 ring all-reduce: 64 (N - 1) / N bits per element on every link, in each direction."""
    return math.inf if world == 1 else wire_share * worker_bits_per_s * world / (64 * (world - 1))


def judge(
    endpoint: Endpoint,
    world: int,
    encoding: Encoding | str,
    result_format: str = "tally",
    *,
    retransmission_share: float = 0.0,
    ring_wire_share: float = TCP_SHARE,
) -> Verdict:
    """Elements per second through an endpoint, for ``world`` workers.

    Parameters
    ----------
    encoding : Encoding or str
        Gives the bits up, u, and, for a tally, the bits down, d.
    result_format : str
        ``tally`` or ``majority``.
    retransmission_share : float
        Frames sent again per frame sent; 0 or more.
    ring_wire_share : float
        Payload over wire bytes of the ring's transport.

    Raises
    ------
    ValueError
        For an unknown format or encoding, or a number out of its range.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, but is {world}")
    if not 0 <= retransmission_share < math.inf:
        raise ValueError(f"retransmission_share must be 0 or more, but is {retransmission_share}")
    if result_format not in ("tally", "majority"):
        raise ValueError(f"unknown result format {result_format!r}: use tally or majority")
    encoding = encoding_by_name(encoding) if isinstance(encoding, str) else encoding
    up = encoding.planes
    down = encoding.tally_bits(world) if result_format == "tally" else MAJORITY_BITS
    eta, framing = endpoint.wire_share, endpoint.lines_per_frame / (endpoint.lines_per_frame + 1)
    copies = 1 if endpoint.multicast else world
    # A multicast result leaves every port, so more ports carry no more results; unicast copies are spread over them.
    out_bits_per_s = endpoint.port_bits_per_s * (1 if endpoint.multicast else endpoint.ports)
    bounds = {
        Bound.ENDPOINT_IN: eta * endpoint.port_bits_per_s * endpoint.ports / (world * up),
        Bound.ENDPOINT_OUT: eta * out_bits_per_s / (copies * down),
        Bound.WORKER_UP: eta * endpoint.worker_bits_per_s / up,
        Bound.WORKER_DOWN: eta * endpoint.worker_bits_per_s / down,
        Bound.CORE_IN: framing * endpoint.clock_hz * endpoint.lanes / (world * up),
        Bound.CORE_OUT: framing * endpoint.clock_hz * endpoint.lanes / (copies * down),
    }
    # A slot is taken for the round trip, in which its chunk goes in and out once at the slowest place.
    chunk = endpoint.chunk_elements
    into = min(bounds[Bound.ENDPOINT_IN], bounds[Bound.WORKER_UP], bounds[Bound.CORE_IN])
    out = min(bounds[Bound.ENDPOINT_OUT], bounds[Bound.WORKER_DOWN], bounds[Bound.CORE_OUT])
    round_trip_s = endpoint.network_round_trip_s + endpoint.skew_s + chunk / into + chunk / out
    bounds[Bound.SLOTS] = endpoint.slots * chunk / round_trip_s
    accumulator = endpoint.accumulator_bits
    bounds[Bound.MEMORY] = endpoint.memory_bits_per_s / (2 * accumulator * world * up + accumulator)
    binding = min(bounds, key=bounds.__getitem__)
    return Verdict(
        bounds,
        binding,
        bounds[binding] / (1 + retransmission_share),
        ring_elements_per_s(endpoint.worker_bits_per_s, world, ring_wire_share),
    )
