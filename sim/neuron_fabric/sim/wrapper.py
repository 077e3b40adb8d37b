"""A Verilog module around the gateware for simulation: it counts event strobes and watches for X.

Both would be read in every cycle, and reading is what makes a Python bench slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TOP", "wrap"]

TOP = "neuron_fabric_bench"
"""Name of the module."""

_SHARED = ("clk", "rst")


def wrap(manifest: dict[str, Any], instances: Sequence[str] = ("",)) -> str:
    """Verilog of the module around the design of a manifest (as :func:`neuron_fabric.hw.export` writes it).

    Its ports are those of the design. For each port ``event_x`` it has a register ``count_x``, the number of strobes
    since the last reset, and for each output ``y`` a register ``unknown_y``, set when any bit was not 0 or 1 at a clock
    edge since the last reset.

    Several ``instances`` of the design have a name each, and their ports begin with it and an underscore; clock and
    reset are shared.

    In Icarus ``+dump=FILE`` writes wave forms.
    """
    ports = manifest["ports"]
    prefixes = [f"{name}_" if name else "" for name in instances]
    outputs, events, declared = [], [], [f"    input wire [0:0] {name}" for name in _SHARED]
    made = []
    for name, prefix in zip(instances, prefixes, strict=True):
        connected = []
        for port in ports:
            shared = port["name"] in _SHARED
            outer = port["name"] if shared else f"{prefix}{port['name']}"
            connected.append(f"        .{port['name']}({outer})")
            if shared:
                continue
            declared.append(f"    {port['direction']} wire [{port['width'] - 1}:0] {outer}")
            if port["direction"] == "output":
                outputs.append(outer)
                if port["name"].startswith("event_"):
                    events.append((f"{prefix}{port['name'].removeprefix('event_')}", outer))
        made += [f"    {manifest['module']} {name or 'dut'} (", ",\n".join(connected), "    );"]
    lines = [
        f"module {TOP} (",
        ",\n".join(declared),
        ");",
        *made,
        *[f"    reg [31:0] count_{name};" for name, _port in events],
        *[f"    reg unknown_{name};" for name in outputs],
        "    always @(posedge clk) begin",
        "        if (rst) begin",
        *[f"            count_{name} <= 0;" for name, _port in events],
        *[f"            unknown_{name} <= 0;" for name in outputs],
        "        end else begin",
        *[f"            count_{name} <= count_{name} + {{31'b0, {port}}};" for name, port in events],
        *[f"            if ((^{name}) === 1'bx) unknown_{name} <= 1;" for name in outputs],
        "        end",
        "    end",
        "`ifdef __ICARUS__",
        "    reg [8*1024:1] dump;",
        '    initial if ($value$plusargs("dump=%s", dump)) begin',
        "        $dumpfile(dump);",
        f"        $dumpvars(0, {TOP});",
        "    end",
        "`endif",
        "endmodule",
    ]
    return "\n".join(lines) + "\n"
