"""What can happen between a host and a CXL device, at its worst: a source of disorder for tests and benches.

Stores to different addresses overtake each other and are overtaken by loads. A line in the contribute window may be
written again later (a cache that should not have held it evicts it twice), reach the device in parts (write-combining
was flushed early) or not at all. Loads run ahead of their turn, back to the last fence. What holds: one address keeps
its order, a fence waits for the stores of its host, and plain memory is memory.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neuron_fabric.model.cxl import ALL_BYTES, Outcome, Read
from neuron_fabric.model.cxl_map import ContributeLine, CxlMap
from neuron_fabric.model.params import LINE_BYTES

__all__ = ["CxlMemory", "Fabric", "FabricPort"]


class CxlMemory(Protocol):
    """The device: the golden model, or a bench that drives one."""

    def mem_wr(self, address: int, data: bytes, byte_enable: int = ALL_BYTES) -> Outcome:
        """Write the enabled bytes of a line."""

    def mem_rd(self, address: int) -> Read:
        """Read a line."""


@dataclass
class _Store:
    data: bytes
    port: FabricPort
    fences: int
    """How many fences of its port it outlives, and can be repeated until then."""
    arrived: bool = False


class Fabric:
    """The way of all hosts to one device.

    Parameters
    ----------
    device : CxlMemory
    address_map : CxlMap
    rng : random.Random
        All that happens follows from it.
    lose, split, repeat : float
        Probabilities that a store does not arrive, arrives in two parts, arrives again. Only contributions are lost.
    ahead : float
        Probability that a line that was loaded before is loaded right after a fence, to be returned when it is asked
        for.
    linger : int
        The most fences of its host that a store outlives to be repeated. A host takes two for a round of up to S
        chunks, and a device knows stale numbers up to 4 S back.

    Attributes
    ----------
    meanwhile : callable
        Called in the middle of what a host does; may let other hosts act.
    counters : collections.Counter
        What was done: ``lost``, ``split``, ``repeated``, ``ahead``.
    """

    def __init__(
        self,
        device: CxlMemory,
        address_map: CxlMap,
        rng: random.Random,
        *,
        lose: float = 0.1,
        split: float = 0.1,
        repeat: float = 0.2,
        ahead: float = 0.3,
        linger: int = 8,
    ) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.counters: Counter[str] = Counter()
        self.device = device
        self.map = address_map
        self.rng = rng
        self.lose, self.split, self.repeat, self.ahead, self.linger = lose, split, repeat, ahead, linger
        self._pending: dict[int, deque[_Store]] = {}

    def port(self) -> FabricPort:
        """The port of one more host."""
        return FabricPort(self)

    def disturb(self) -> None:
        """Let a few stores, of any host, get to the device, and other hosts go on."""
        self.meanwhile()
        while self._pending and self.rng.random() < 0.7:
            self._deliver(self.rng.choice(list(self._pending)))

    def add(self, port: FabricPort, address: int, data: bytes) -> None:
        """Take a store on its way."""
        fences = self.rng.randint(1, self.linger) if self.rng.random() < self.repeat else 0
        self._pending.setdefault(address, deque()).append(_Store(data, port, fences))

    def settle(self, address: int) -> None:
        """Deliver everything to one address that has not arrived."""
        while any(not store.arrived for store in self._pending.get(address, ())):
            self._deliver(address)

    def fence(self, port: FabricPort) -> None:
        """Deliver everything of one port that has not arrived, in any order."""
        while waiting := [
            address
            for address, stores in self._pending.items()
            if any(store.port is port and not store.arrived for store in stores)
        ]:
            self._deliver(self.rng.choice(waiting))
        for address, stores in list(self._pending.items()):
            for store in [store for store in stores if store.port is port]:
                store.fences -= 1
                if store.fences <= 0:
                    stores.remove(store)
            if not stores:
                del self._pending[address]

    def _deliver(self, address: int) -> None:
        """Bring the oldest store to an address to the device; it stays to be repeated, unless the next one waits."""
        stores = self._pending[address]
        store = stores[0]
        rng, lossy = self.rng, isinstance(self.map.decode(address), ContributeLine)
        if store.arrived:
            self.counters["repeated"] += 1
        if lossy and not store.arrived and rng.random() < self.lose:
            self.counters["lost"] += 1
        elif rng.random() < self.split:
            self.counters["split"] += 1
            some = rng.randrange(1, ALL_BYTES)
            for enable in (some, ALL_BYTES & ~some):
                junk = rng.randbytes(LINE_BYTES)
                masked = bytes(store.data[i] if enable >> i & 1 else junk[i] for i in range(LINE_BYTES))
                self.device.mem_wr(address, masked, enable)
        else:
            self.device.mem_wr(address, store.data)
        store.arrived = True
        if len(stores) > 1 or store.fences == 0:
            stores.popleft()
            if not stores:
                del self._pending[address]


class FabricPort:
    """One host's way through a :class:`Fabric`: a :class:`~neuron_fabric.model.cxl_host.CxlPort`."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._ahead: dict[int, Read] = {}
        self._history: deque[int] = deque(maxlen=64)

    def store(self, address: int, data: bytes) -> None:
        """Send a line on its way."""
        self._ahead.pop(address, None)  # a processor sees its own stores
        self.fabric.add(self, address, data)
        self.fabric.disturb()

    def load(self, addresses: Sequence[int]) -> list[Read]:
        """Load lines, in an order of the fabric's choice."""
        reads: dict[int, Read] = {}
        order = list(range(len(addresses)))
        self.fabric.rng.shuffle(order)
        for index in order:
            address = addresses[index]
            self.fabric.disturb()
            self.fabric.settle(address)
            ahead = self._ahead.pop(address, None)
            reads[index] = self.fabric.device.mem_rd(address) if ahead is None else ahead
            self.fabric.counters["ahead"] += ahead is not None
            self._history.append(address)
        return [reads[index] for index in range(len(addresses))]

    def fence(self) -> None:
        """Wait for the stores; forget what was loaded ahead, and load ahead anew."""
        self.fabric.disturb()
        self.fabric.fence(self)
        self._ahead = {
            address: self.fabric.device.mem_rd(address)
            for address in dict.fromkeys(self._history)
            if self.fabric.rng.random() < self.fabric.ahead
        }
