"""Hardware as a :class:`~neuron_fabric.runtime.emulator.controller.Device`: a reducer behind its registers.

The registers are those of ``docs/registers.md``, at a memory map of which nothing is known but how to read and write
32 bits: a PCIe BAR, a UIO device, a simulated AXI4-Lite port, or the golden register file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.programming import RegisterWrite, close_job, open_job, set_addresses
from neuron_fabric.model.reducer import JobConfig, check_job
from neuron_fabric.model.registers import COUNTERS, DEVICE_ID, JOB_OPEN, MAP_VERSION, REGISTERS, words
from neuron_fabric.model.wire import VERSION

__all__ = ["CsrDevice", "DeviceError"]


class DeviceError(RuntimeError):
    """What is behind the memory map is not a reducer that this software knows, or does not do what it was told."""


class CsrDevice:
    """A reducer that is opened and closed by register writes.

    Parameters
    ----------
    read32 : callable
        Byte address to value.
    write32 : callable
        Byte address and value; a write is answered before it returns.
    local : Endpoint
        The reducer's own address.
    group : Endpoint, optional
        The multicast group for results; without one they go to each member.

    Raises
    ------
    DeviceError
        No reducer, or one with another register map or protocol.
    """

    def __init__(
        self,
        read32: Callable[[int], int],
        write32: Callable[[int, int], None],
        local: Endpoint,
        *,
        group: Endpoint | None = None,
    ) -> None:
        self._read32 = read32
        self._write32 = write32
        self.params = self._capabilities()
        self.multicast = group is not None
        table = {word.name: word.address for word in words(self.params.jobs)}
        self._counters = [(name, table[f"COUNT_{name.upper()}"]) for name, _doc in COUNTERS]
        self._frames = table["COUNT_FRAMES"]
        self._control = [table[f"JOB{bank}_CONTROL"] for bank in range(self.params.jobs)]
        self._banks: dict[int, tuple[int, JobConfig]] = {}
        # Whatever ran here before: its jobs are nobody's now, and the endpoint's address changes only without a job.
        for bank in range(self.params.jobs):
            self._write(close_job(self.params, bank))
        self._write(set_addresses(self.params, local, group=group))

    def _capabilities(self) -> ReducerParams:
        found = self._read("ID", "id")
        if found != DEVICE_ID:
            raise DeviceError(
                f"register ID is {found:#010x}, not {DEVICE_ID:#010x}: there is no reducer behind this map"
            )
        for name, field, known in (("register map", "map", MAP_VERSION), ("wire protocol", "protocol", VERSION)):
            version = self._read("VERSION", field)
            if version != known:
                raise DeviceError(f"the reducer has version {version} of the {name}; this software knows {known}")
        try:
            return ReducerParams(
                lanes=self._read("CAPABILITY0", "lanes"),
                lines_per_chunk=self._read("CAPABILITY0", "lines"),
                slots=self._read("CAPABILITY1", "slots"),
                workers=self._read("CAPABILITY1", "workers"),
                acc_bits=self._read("CAPABILITY0", "acc_bits"),
                max_planes=self._read("CAPABILITY2", "max_planes"),
                jobs=self._read("CAPABILITY2", "jobs"),
            )
        except ValueError as error:
            raise DeviceError(f"the reducer's capability registers make no sense: {error}") from None

    def _read(self, register: str, field: str) -> int:
        found = next(item for item in REGISTERS if item.name == register)
        place = next(item for item in found.fields if item.name == field)
        return (self._read32(found.offset) & place.mask) >> place.lsb

    def _write(self, writes: Iterable[RegisterWrite]) -> None:
        for write in writes:
            self._write32(write.address, write.value)

    def open(self, config: JobConfig) -> None:
        """Open a job in a free bank, or reopen it with a newer epoch.

        Raises
        ------
        ValueError
            Names what does not fit, or a member without an :class:`~neuron_fabric.model.net.Endpoint`.
        DeviceError
            The bank does not read as open afterwards.
        """
        check_job(config, self.params, (other for _bank, other in self._banks.values()))
        taken = {bank for bank, _config in self._banks.values()}
        bank, _config = self._banks.get(config.job) or (
            next(bank for bank in range(self.params.jobs) if bank not in taken),
            None,
        )
        self._write(open_job(self.params, config, bank))
        if not self._read32(self._control[bank]) & JOB_OPEN.mask:
            raise DeviceError(f"job {config.job}: bank {bank} does not read as open after it was opened")
        self._banks[config.job] = bank, replace(config)

    def close(self, job: int) -> None:
        """Close a job and free its slots. Closing a job that is not open does nothing."""
        if job in self._banks:
            bank, _config = self._banks.pop(job)
            self._write(close_job(self.params, bank))

    def counters(self) -> dict[str, int]:
        """All counters; they hold 2**32 - 1 instead of wrapping."""
        return {name: self._read32(address) for name, address in self._counters}

    def activity(self, job: int) -> int:
        """Frames that were received: the registers do not count them per job, so any job's traffic keeps all alive."""
        return self._read32(self._frames) if job in self._banks else 0
