"""The golden model of the in-network endpoint: Ethernet frames in, Ethernet frames out.

It is :mod:`neuron_fabric.model.net` around :class:`~neuron_fabric.model.reducer.SignCountReducer`: a frame that is not
taken is counted by kind and goes no further, so a frame whose checksum does not hold never reaches the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuron_fabric.model import net
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import BITMAP_BYTES, JobConfig, SignCountReducer
from neuron_fabric.model.wire import HEADER_BYTES

__all__ = ["NetworkEndpoint", "buffer_bytes", "member_endpoints"]


def buffer_bytes(params: ReducerParams) -> int:
    """The longest frame of the protocol: headers, a full chunk of one plane, and the line of a PARTIAL result."""
    return net.HEADERS_BYTES + HEADER_BYTES + params.lines_per_chunk * params.line_bytes + BITMAP_BYTES


def member_endpoints(config: JobConfig) -> dict[int, Endpoint]:
    """The addresses of a job's members, in ascending order of the workers.

    ``ValueError`` names a worker that has no :class:`~neuron_fabric.model.net.Endpoint`, or says that the parent has
    none.
    """
    addresses = config.members if isinstance(config.members, Mapping) else dict.fromkeys(config.members)
    endpoints = {worker: address for worker, address in sorted(addresses.items()) if isinstance(address, Endpoint)}
    missing = [worker for worker in addresses if worker not in endpoints]
    if missing:
        raise ValueError(f"job {config.job}: worker {missing[0]} has no Endpoint; members must be {{worker: Endpoint}}")
    if config.parent is not None and not isinstance(config.parent.address, Endpoint):
        raise ValueError(f"job {config.job}: the parent's address must be an Endpoint")
    return endpoints


class NetworkEndpoint:
    """A reducer with an address.

    Parameters
    ----------
    params : ReducerParams
    me : Endpoint
        Its own address.
    group : Endpoint, optional
        The multicast group to which results for all are sent. Without one, they are sent to each member in turn.
    listen : Endpoint, optional
        A multicast group whose frames are taken like those to ``me``: for children, the group of their parent.

    Attributes
    ----------
    reducer : SignCountReducer
        Behind it; its counters are the endpoint's, frames that were dropped before it included.
    """

    def __init__(
        self,
        params: ReducerParams,
        me: Endpoint,
        group: Endpoint | None = None,
        listen: Endpoint | None = None,
    ) -> None:
        self.params = params
        self.me = me
        self.group = group
        self.listen = listen
        self.reducer = SignCountReducer(params)
        self._members: dict[int, list[Endpoint]] = {}

    def open(self, config: JobConfig) -> None:
        """Open a job. ``ValueError`` names what does not fit, or who has no address: :func:`member_endpoints`."""
        members = member_endpoints(config)
        self.reducer.open(config)
        self._members[config.job] = list(members.values())

    def receive(self, frame: bytes) -> None:
        """Take one Ethernet frame, whatever it is."""
        try:
            datagram = net.parse(frame, self.me, self.listen, max_bytes=buffer_bytes(self.params))
        except net.FrameError as error:
            self.reducer.counters[f"dropped_{error.kind.name.lower()}"] += 1
            return
        self.reducer.receive(datagram.payload, datagram.source)

    def poll(self) -> list[bytes]:
        """Every Ethernet frame that is due."""
        frames = []
        for outgoing in self.reducer.poll():
            if isinstance(outgoing.address, Endpoint):
                destinations = [outgoing.address]
            elif self.group is not None:
                destinations = [self.group]
            else:
                destinations = self._members[outgoing.header.job]
            frames += [net.build(self.me, destination, outgoing.payload) for destination in destinations]
        return frames
