"""A FuseSoC core description beside an exported Verilog file, in the format CAPI2.

FuseSoC (https://fusesoc.readthedocs.io) collects such files and hands the design to a simulator or a vendor's tool.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from neuron_fabric.model.params import ReducerParams

__all__ = ["core_text", "write_core"]


def core_text(module: str, params: ReducerParams) -> str:
    """The description of the Verilog file ``<module>.v``, whose top module has the same name.

    The sizes are a comment: they are fixed in the Verilog text, which has no parameters.
    """
    sizes = ", ".join(f"{name}={value}" for name, value in asdict(params).items())
    return f"""CAPI=2:
# {sizes}
name: neuron_fabric:hw:{module}:{version("neuron-fabric")}
description: NEURON-Fabric sign-count reducer, exported from Amaranth HDL

filesets:
  rtl:
    files:
      - {module}.v
    file_type: verilogSource-2005
  manifest:
    files:
      - {module}.json
    file_type: user

targets:
  default:
    filesets: [rtl, manifest]
    toplevel: {module}
"""


def write_core(verilog: Path, params: ReducerParams) -> Path:
    """Write the description beside an exported Verilog file and its manifest; gives back its path."""
    path = verilog.with_suffix(".core")
    path.write_text(core_text(verilog.stem, params), encoding="utf-8")
    return path
