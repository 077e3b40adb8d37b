"""A Verilog module around the gateware for simulation: it counts event strobes and watches for X.

Both would be read in every cycle, and reading is what makes a Python bench slow.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TOP", "wrap"]

TOP = "neuron_fabric_bench"
"""Name of the module."""


def wrap(manifest: dict[str, Any]) -> str:
    """Verilog of the module around the design of a manifest (as :func:`neuron_fabric.hw.export` writes it).

    Its ports are those of the design. For each port ``event_x`` it has a register ``count_x``, the number of strobes
    since the last reset, and for each output ``y`` a register ``unknown_y``, set when any bit was not 0 or 1 at a clock
    edge since the last reset.

    In Icarus ``+dump=FILE`` writes wave forms.
    """
    ports = manifest["ports"]
    outputs = [port["name"] for port in ports if port["direction"] == "output"]
    events = [name.removeprefix("event_") for name in outputs if name.startswith("event_")]
    declared = ",\n".join(f"    {port['direction']} wire [{port['width'] - 1}:0] {port['name']}" for port in ports)
    connected = ",\n".join(f"        .{port['name']}({port['name']})" for port in ports)
    lines = [
        f"module {TOP} (",
        declared,
        ");",
        f"    {manifest['module']} dut (",
        connected,
        "    );",
        *[f"    reg [31:0] count_{name};" for name in events],
        *[f"    reg unknown_{name};" for name in outputs],
        "    always @(posedge clk) begin",
        "        if (rst) begin",
        *[f"            count_{name} <= 0;" for name in events],
        *[f"            unknown_{name} <= 0;" for name in outputs],
        "        end else begin",
        *[f"            count_{name} <= count_{name} + {{31'b0, event_{name}}};" for name in events],
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
