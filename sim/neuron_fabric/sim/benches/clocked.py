"""What the benches under cocotb have in common: the clock, the ports, the checks for X.

One cycle is: the bench says what the inputs are, the clock falls, half a period later the bench looks at the outputs,
the clock rises. Inputs change with the falling edge and settle before the rising one, so no race is possible.
"""

from __future__ import annotations

from typing import Any

from cocotb.triggers import Timer

from neuron_fabric.sim.bench import BenchTimeoutError, CycleBench

__all__ = ["HALF_PERIOD_NS", "UnknownValueError", "Wires", "check_unknown", "noted", "number", "run"]

HALF_PERIOD_NS = 2  # 250 MHz


class UnknownValueError(AssertionError):
    """An output of the gateware is X or Z after reset."""


def number(handle: Any) -> int:
    """The value of a port or register; :class:`UnknownValueError` if a bit is neither 0 nor 1."""
    value = handle.value
    try:
        return int(value)
    except ValueError:
        raise UnknownValueError(f"{handle._name} is {value}") from None


class Wires:
    """The ports of the design by name: ``wires[name] = value`` drives an input, ``wires[name]`` reads an output.

    Writing is slow, so only what changes is written.
    """

    def __init__(self, dut: Any) -> None:
        self._dut = dut
        self._handles: dict[str, Any] = {}
        self._driven: dict[str, int] = {}

    def _handle(self, name: str) -> Any:
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = getattr(self._dut, name)
        return handle

    def __setitem__(self, name: str, value: int) -> None:
        if self._driven.get(name) != value:
            self._driven[name] = value
            self._handle(name).value = value

    def __getitem__(self, name: str) -> int:
        return number(self._handle(name))


async def run(dut: Any, bench: CycleBench, limit: int) -> None:
    """Move the clock until the bench is done, then look whether any output was X.

    Raises
    ------
    BenchTimeoutError
        After ``limit`` cycles.
    UnknownValueError
        An output was X at a clock edge after reset.
    """
    wires = Wires(dut)
    half = Timer(HALF_PERIOD_NS, "ns")
    while not bench.done:
        if bench.cycle >= limit:
            raise BenchTimeoutError(f"not finished after {limit} cycles")
        bench.drive(wires)
        dut.clk.value = 0
        await half
        bench.observe(wires)
        dut.clk.value = 1
        await half
    check_unknown(dut)


def noted(dut: Any, prefix: str) -> dict[str, int]:
    """The registers of the module around the gateware whose names begin with ``prefix``, without it."""
    return {h._name.removeprefix(prefix): number(h) for h in dut if h._name.startswith(prefix)}


def check_unknown(dut: Any) -> None:
    """Raise :class:`UnknownValueError` if the module around the gateware saw X on an output."""
    watched = noted(dut, "unknown_")
    if not watched:
        raise UnknownValueError("no output was watched for X in this simulation")
    unknown = [name for name, seen in watched.items() if seen]
    if unknown:
        raise UnknownValueError(f"X after reset on {', '.join(unknown)}")
