"""Named sizes of a reducer: what is built for which device, and why.

``neuron-fabric verilog --config NAME`` exports one; ``docs/hardware.md`` has a table that is made from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neuron_fabric.hw.framing import LANES
from neuron_fabric.model.encoding import BINARY
from neuron_fabric.model.params import ReducerParams

__all__ = ["CONFIGURATIONS", "Configuration", "check_sizes", "configuration", "configuration_table", "suits"]


@dataclass(frozen=True)
class Configuration:
    """A reducer for some device."""

    name: str
    """How the command line calls it."""
    doc: str
    """What it is for, in a few words."""
    params: ReducerParams
    """Its sizes."""
    tops: tuple[str, ...]
    """The tops that are exported if none is named; the first is what the configuration is made for."""
    clock_mhz: float
    """The clock that a design with it should reach, in MHz: a target, which no simulation needs."""
    device: str
    """The smallest device that it is meant for."""
    reason: str
    """Why these sizes, by what limits them."""

    @property
    def line_rate_gbps(self) -> float:
        """Bits that pass the datapath in a second at the target clock, in Gb/s, headers and payload."""
        return self.params.lanes * self.clock_mhz / 1000


def _by_name(*configurations: Configuration) -> dict[str, Configuration]:
    return {configuration.name: configuration for configuration in configurations}


CONFIGURATIONS: dict[str, Configuration] = _by_name(
    Configuration(
        name="ecp5_small",
        doc="the core alone, an eighth as wide, for place and route in seconds",
        params=ReducerParams(lanes=64, lines_per_chunk=16, slots=4, workers=8, acc_bits=5, max_planes=2, jobs=1),
        tops=("core",),
        clock_mhz=150,
        device="Lattice ECP5 LFE5U-25F, speed grade 6",
        reason="every part of the datapath is there and each is small; 5 bits hold a ternary tally of 8 workers",
    ),
    Configuration(
        name="ecp5_85k",
        doc="the in-network endpoint on the largest FPGA with open tools",
        params=ReducerParams(lanes=512, lines_per_chunk=16, slots=16, workers=16, acc_bits=5, max_planes=2, jobs=2),
        tops=("udp", "core"),
        clock_mhz=80,
        device="Lattice ECP5 LFE5U-85F, speed grade 8",
        reason=(
            "block RAM decides: the endpoint takes nearly all of 208; a word of 512 lanes of 5 bits fills 72 of them, "
            "and 512 words are as many as 16 slots of two versions have lines; 5 bits hold a binary tally of 16, "
            "a ternary one of 15 workers"
        ),
    ),
    Configuration(
        name="ultrascale_100g",
        doc="an endpoint on a 100 Gb/s port, or behind CXL",
        params=ReducerParams(lanes=512, lines_per_chunk=16, slots=64, workers=16, acc_bits=6, max_planes=2, jobs=4),
        tops=("udp", "cxl", "core"),
        clock_mhz=250,
        device="AMD UltraScale+ XCU50",
        reason=(
            "full frames at 100 Gb/s are 191 million beats a second; 64 chunks of 1 KiB a plane cover round trips of "
            "5 us; 6 bits hold a ternary tally of 16 workers"
        ),
    ),
    Configuration(
        name="ultrascale_100g_64w",
        doc="the same for 64 workers",
        params=ReducerParams(lanes=512, lines_per_chunk=16, slots=64, workers=64, acc_bits=8, max_planes=2, jobs=4),
        tops=("udp", "cxl", "core"),
        clock_mhz=250,
        device="AMD UltraScale+ XCU50",
        reason="8 bits hold a ternary tally of 64 workers; members and seen bits are as wide as they can be",
    ),
    Configuration(
        name="sim_small",
        doc="simulation: whole lines, everything else small",
        params=ReducerParams(lanes=512, lines_per_chunk=4, slots=4, workers=4, acc_bits=4, max_planes=2, jobs=2),
        tops=("udp", "cxl", "axis", "core", "csr"),
        clock_mhz=100,
        device="none: simulators only",
        reason=(
            "Ethernet frames and memory lines have 512 lanes; few slots are soon used again, and two jobs share them; "
            "4 bits hold a ternary tally of 4 workers"
        ),
    ),
)
"""By name."""

_WHOLE_LINES = frozenset({"udp", "cxl"})
"""Tops whose beats are whole 64-byte lines."""


def configuration(name: str) -> Configuration:
    """The configuration of that name; ``ValueError`` says which there are."""
    if name not in CONFIGURATIONS:
        raise ValueError(f"there is no configuration {name!r}: use {', '.join(CONFIGURATIONS)}")
    return CONFIGURATIONS[name]


def suits(top: str, params: ReducerParams) -> bool:
    """Whether a top can have datapath beats of so many lanes."""
    return top not in _WHOLE_LINES or params.lanes == LANES


def check_sizes(params: ReducerParams, tops: Iterable[str]) -> None:
    """Refuse sizes that make no sense together in any of these tops.

    Raises
    ------
    ValueError
        Names the rule that is broken. What a top's component refuses itself is not looked at here.
    """
    for top in tops:
        if not suits(top, params):
            raise ValueError(
                f"top {top!r}: lanes must be {LANES}, not {params.lanes}: its beats are lines of {LANES // 8} bytes"
            )
    need = BINARY.tally_bits(params.workers)
    if need > params.acc_bits:
        raise ValueError(
            f"workers: a binary tally of {params.workers} workers takes {need} bits; acc_bits is {params.acc_bits}: "
            "use fewer workers or wider tallies"
        )


def configuration_table() -> str:
    """The configurations as Markdown, for the documentation page that is generated from it."""
    sizes = ("lanes", "lines_per_chunk", "slots", "workers", "acc_bits", "max_planes", "jobs")
    rows = [
        f"| configuration | tops | {' | '.join(name.replace('_', ' ') for name in sizes)} | MHz |",
        f"|---|---|{'---|' * len(sizes)}---|",
    ]
    for one in CONFIGURATIONS.values():
        values = " | ".join(str(getattr(one.params, name)) for name in sizes)
        rows.append(f"| `{one.name}` | {', '.join(one.tops)} | {values} | {one.clock_mhz:g} |")
    rows += ["", "| configuration | what it is for | device | why these sizes |", "|---|---|---|---|"]
    rows += [f"| `{one.name}` | {one.doc} | {one.device} | {one.reason} |" for one in CONFIGURATIONS.values()]
    return "\n".join(rows) + "\n"
