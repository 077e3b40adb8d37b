"""Verilog export: stable text, stable names, and a JSON manifest beside each file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amaranth.back import verilog
from amaranth.hdl import Value
from amaranth.lib import data, wiring

from neuron_fabric.hw.axis import AxiStreamReducer
from neuron_fabric.hw.core import ReducerCore
from neuron_fabric.hw.csr import AxiLiteRegisters, job_layout, shared_layout
from neuron_fabric.hw.cxl_endpoint import CxlEndpoint
from neuron_fabric.hw.layout import EVENTS, config_layout, contribution_layout, refusal_layout, result_layout
from neuron_fabric.hw.udp_endpoint import UdpEndpoint
from neuron_fabric.model.cxl_map import CxlMap
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.registers import expand
from neuron_fabric.model.wire import HEADER_BYTES, HEADER_FIELDS, HEADER_OFFSET

__all__ = ["TOPS", "build", "export", "export_all"]

_RENAMED = {"config": "cfg"}
"""Port names that are keywords of Verilog."""

TOPS: dict[str, str] = {
    "core": "neuron_fabric_reducer_core",
    "axis": "neuron_fabric_reducer_axis",
    "csr": "neuron_fabric_registers",
    "udp": "neuron_fabric_udp",
    "cxl": "neuron_fabric_cxl",
}
"""Name of a top for people, and of its Verilog module and files."""

_COMPONENTS: dict[str, Callable[[ReducerParams], Any]] = {
    "core": ReducerCore,
    "axis": AxiStreamReducer,
    "csr": AxiLiteRegisters,
    "udp": UdpEndpoint,
    "cxl": CxlEndpoint,
}


def build(top: str, params: ReducerParams) -> Any:
    """The component of a top; ``ValueError`` for an unknown one."""
    if top not in _COMPONENTS:
        raise ValueError(f"unknown top {top!r}: use {', '.join(TOPS)}")
    return _COMPONENTS[top](params)


def _ports(component: Any) -> list[tuple[str, str, Value]]:
    ports = []
    for path, member, value in component.signature.flatten(component):
        direction = "input" if member.flow == wiring.In else "output"
        name = "__".join(str(part) for part in path)
        ports.append((_RENAMED.get(name, name), direction, Value.cast(value)))
    return ports


_ZERO_WORDS = re.compile(
    r"^    (?P<name>\S+)\[0\] = (?P<zero>\d+'[dh]0+);\n(?:    (?P=name)\[\d+\] = (?P=zero);\n)+", re.M
)


def _shorten(text: str) -> str:
    """Clear each memory by a loop instead of by one statement (of 768 digits) a word."""

    def loop(match: re.Match[str]) -> str:
        name, zero, words = match["name"], match["zero"], match[0].count("\n")
        width = zero.partition("'")[0]
        return f"    for (cleared = 0; cleared < {words}; cleared = cleared + 1) {name}[cleared] = {width}'h0;\n"

    text, count = _ZERO_WORDS.subn(loop, text)
    if count != text.count("initial begin\n"):
        raise RuntimeError("the Verilog back end writes memories in another form than this module knows")
    numbers = itertools.count()  # block names must differ inside a module
    return re.sub(
        r"^  initial begin$",
        lambda _: f"  initial begin : clear{next(numbers)}\n    integer cleared;",
        text,
        flags=re.M,
    )


_CONSTANT = re.compile(r"^  always @\*\n    (?P<constant>\S+ = \d+'[bdh][0-9a-fA-F]+;)\n", re.M)


def _trigger(text: str) -> str:
    """Give a process that only assigns a constant something to wait for.

    Under the rules of Verilog-2005 `always @*` without an input never runs, and in a simulator with four states the
    bits would stay X. The back end does the same in processes of several statements.
    """
    numbers = itertools.count()

    def triggered(match: re.Match[str]) -> str:
        name = f"begun{next(numbers)}"
        return f"  reg {name} = 0;\n  always @* begin\n    if ({name}) begin end\n    {match['constant']}\n  end\n"

    return _CONSTANT.sub(triggered, text)


def _layout(layout: data.StructLayout, name: str = "", offset: int = 0) -> list[dict[str, Any]]:
    rows = []
    for key, field in layout:
        full, at = f"{name}{key}", offset + field.offset
        if isinstance(field.shape, data.StructLayout):
            rows += _layout(field.shape, f"{full}.", at)
        else:
            rows.append({"field": full, "offset": at, "width": field.width})
    return rows


def _manifest(top: str, component: Any) -> dict[str, Any]:
    params = component.params
    ports = [{"name": "clk", "direction": "input", "width": 1}, {"name": "rst", "direction": "input", "width": 1}]
    ports += [
        {"name": name, "direction": direction, "width": len(value)} for name, direction, value in _ports(component)
    ]
    result: dict[str, Any] = {
        "top": top,
        "module": TOPS[top],
        "parameters": asdict(params),
        "ports": ports,
    }
    if top in ("core", "axis"):
        result["latency_cycles"] = ReducerCore.LATENCY
    if top == "core":
        result["layouts"] = {
            "config": _layout(config_layout(params)),
            "contribution": _layout(contribution_layout(params)),
            "result": _layout(result_layout(params)),
            "events": _layout(EVENTS),
            "refusal": _layout(refusal_layout(params)),
        }
    if top == "csr":
        result["layouts"] = {"jobs": _layout(job_layout(params)), "shared": _layout(shared_layout(params))}
    if top in ("axis", "udp"):
        result["header"] = {
            "offset_bytes": HEADER_OFFSET,
            "size_bytes": HEADER_BYTES,
            "byte_order": "big",
            "fields": [{"field": f.name, "offset": f.offset, "size": f.size} for f in HEADER_FIELDS],
        }
    if top == "cxl":
        result["windows"] = _windows(component.map)
    if top in ("csr", "udp", "cxl"):
        result["registers"] = [
            {"register": name, "address": address, "access": register.access.value}
            for name, address, register in expand(params.jobs)
        ]
    return result


def _windows(address_map: CxlMap) -> list[dict[str, Any]]:
    return [
        {
            "window": window.name.lower(),
            "base": window << address_map.window_bits,
            "fields": [{"field": field.name, "offset": field.lsb, "width": field.width} for field in fields],
        }
        for window, fields in address_map.fields.items()
    ]


def export(top: str, params: ReducerParams, out_dir: str | Path) -> Path:
    """Write ``<module>.v`` and ``<module>.json`` into ``out_dir``; the same arguments give the same bytes.

    ``top`` is one of :data:`TOPS`. The folder is made if it isn't there. Gives back the path of the Verilog file.
    """
    return export_all((top,), params, out_dir)[0]


def export_all(tops: Iterable[str], params: ReducerParams, out_dir: str | Path) -> list[Path]:
    """:meth:`export` several tops; nothing is written unless all of them can be made."""
    components = {top: build(top, params) for top in tops}
    return [_write(top, component, Path(out_dir)) for top, component in components.items()]


def _write(top: str, component: Any, folder: Path) -> Path:
    ports = {name: (value, None) for name, _direction, value in _ports(component)}  # None: an input if not driven
    text = verilog.convert(component, name=TOPS[top], ports=ports, emit_src=False, strip_internal_attrs=True)
    sizes = ", ".join(f"{name}={value}" for name, value in asdict(component.params).items())
    head = (
        f"// NEURON-Fabric {TOPS[top]}: {sizes}\n// All modules are in this file.\n// verilator lint_off DECLFILENAME\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{TOPS[top]}.v"
    path.write_text(head + _trigger(_shorten(text)), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(_manifest(top, component), indent=2) + "\n", encoding="utf-8")
    return path
