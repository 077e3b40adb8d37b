"""Verilog export: stable names, stable text, a manifest that tells the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from neuron_fabric.hw.cli import main
from neuron_fabric.hw.configurations import suits
from neuron_fabric.hw.verilog import TOPS, export, export_all
from neuron_fabric.model import ReducerParams

SMALL = ReducerParams(lanes=64, lines_per_chunk=4, slots=2, workers=4, acc_bits=4, max_planes=2)

EVENTS = [
    "accepted_line",
    "accepted_frame",
    "duplicate",
    "stale",
    "abandoned",
    "refused",
    "completed",
    "result_sent",
    "bad_magic",
    "bad_version",
    "bad_type",
    "bad_job",
    "bad_epoch",
    "bad_worker",
    "bad_plane",
    "bad_lines",
    "bad_voters",
    "length",
]

PORTS = {
    "axis": {
        "clk": ("input", 1),
        "rst": ("input", 1),
        "s_axis_tdata": ("input", 64),
        "s_axis_tkeep": ("input", 8),
        "s_axis_tvalid": ("input", 1),
        "s_axis_tready": ("output", 1),
        "s_axis_tlast": ("input", 1),
        "m_axis_tdata": ("output", 64),
        "m_axis_tkeep": ("output", 8),
        "m_axis_tvalid": ("output", 1),
        "m_axis_tready": ("input", 1),
        "m_axis_tlast": ("output", 1),
        "cfg_enable": ("input", 1),
        "cfg_job": ("input", 16),
        "cfg_epoch": ("input", 16),
        "cfg_members": ("input", 4),
        "cfg_planes": ("input", 2),
        "cfg_negative": ("input", 2),
        "cfg_shift": ("input", 2),
        "cfg_counts_negatives": ("input", 1),
        "cfg_result_format": ("input", 1),
        "cfg_result_planes": ("input", 3),
        "cfg_margin": ("input", 4),
        **{f"event_{name}": ("output", 1) for name in EVENTS},
    },
    "core": {
        "clk": ("input", 1),
        "rst": ("input", 1),
        "cfg": ("input", 139),
        "group": ("input", 1),
        "opened": ("input", 1),
        "closed": ("input", 1),
        "quiet": ("input", 1),
        "hold": ("output", 1),
        "level": ("output", 3),
        "refusal": ("output", 48),
        "contribution__payload": ("input", 64 + 46),
        "contribution__valid": ("input", 1),
        "contribution__ready": ("output", 1),
        "result__payload": ("output", 64 + 106),
        "result__valid": ("output", 1),
        "result__ready": ("input", 1),
        "events": ("output", 10),
    },
}
_SLAVE = {
    "s_axil_awaddr": ("input", 11),
    "s_axil_awprot": ("input", 3),
    "s_axil_awvalid": ("input", 1),
    "s_axil_awready": ("output", 1),
    "s_axil_wdata": ("input", 32),
    "s_axil_wstrb": ("input", 4),
    "s_axil_wvalid": ("input", 1),
    "s_axil_wready": ("output", 1),
    "s_axil_bresp": ("output", 2),
    "s_axil_bvalid": ("output", 1),
    "s_axil_bready": ("input", 1),
    "s_axil_araddr": ("input", 11),
    "s_axil_arprot": ("input", 3),
    "s_axil_arvalid": ("input", 1),
    "s_axil_arready": ("output", 1),
    "s_axil_rdata": ("output", 32),
    "s_axil_rresp": ("output", 2),
    "s_axil_rvalid": ("output", 1),
    "s_axil_rready": ("input", 1),
}
PORTS |= {
    "udp": {
        "clk": ("input", 1),
        "rst": ("input", 1),
        "s_axis_tdata": ("input", 512),
        "s_axis_tkeep": ("input", 64),
        "s_axis_tvalid": ("input", 1),
        "s_axis_tready": ("output", 1),
        "s_axis_tlast": ("input", 1),
        "m_axis_tdata": ("output", 512),
        "m_axis_tkeep": ("output", 64),
        "m_axis_tvalid": ("output", 1),
        "m_axis_tready": ("input", 1),
        "m_axis_tlast": ("output", 1),
        **_SLAVE,
    },
    "cxl": {
        "clk": ("input", 1),
        "rst": ("input", 1),
        "s_axis_req_tvalid": ("input", 1),
        "s_axis_req_tready": ("output", 1),
        "s_axis_req_tdata": ("input", 64),
        "s_axis_req_tid": ("input", 16),
        "s_axis_rwd_tvalid": ("input", 1),
        "s_axis_rwd_tready": ("output", 1),
        "s_axis_rwd_tdata": ("input", 512),
        "s_axis_rwd_tkeep": ("input", 64),
        "s_axis_rwd_tuser": ("input", 64),
        "s_axis_rwd_tid": ("input", 16),
        "m_axis_drs_tvalid": ("output", 1),
        "m_axis_drs_tready": ("input", 1),
        "m_axis_drs_tdata": ("output", 512),
        "m_axis_drs_tuser": ("output", 1),
        "m_axis_drs_tid": ("output", 16),
        "m_axis_ndr_tvalid": ("output", 1),
        "m_axis_ndr_tready": ("input", 1),
        "m_axis_ndr_tid": ("output", 16),
        **_SLAVE,
    },
    "csr": {
        "clk": ("input", 1),
        "rst": ("input", 1),
        **_SLAVE,
        "jobs": ("output", 258),
        "shared": ("output", 411),
        "hold": ("input", 1),
        "opened": ("output", 1),
        "closed": ("output", 1),
        "control_reset": ("output", 1),
        "control_clear": ("output", 1),
        "entry_write": ("output", 1),
        "count": ("input", 50),
    },
}


def sizes(top: str) -> ReducerParams:
    """Small, but with whole lines where a top's beats are lines."""
    return SMALL if suits(top, SMALL) else replace(SMALL, lanes=512)


@pytest.mark.parametrize("top", list(TOPS))
def test_ports(top: str, tmp_path: Path) -> None:
    """The names at the top are what others build on; the manifest and the text agree about them."""
    path = export(top, sizes(top), tmp_path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    listed = {port["name"]: (port["direction"], port["width"]) for port in manifest["ports"]}
    assert listed == PORTS[top]
    assert manifest["module"] == path.stem

    module = re.search(rf"^module {path.stem}\(.*?^endmodule", path.read_text(), re.M | re.S)
    assert module is not None
    found = {
        name: (direction, int(high or 0) + 1)
        for direction, high, name in re.findall(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);", module[0], re.M)
    }
    assert found == PORTS[top]


@pytest.mark.parametrize("top", list(TOPS))
def test_the_same_text_twice(top: str, tmp_path: Path) -> None:
    """Also from another process, where hashes differ."""
    params = sizes(top)
    first = export(top, params, tmp_path / "a")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(params).items()]
    command = [sys.executable, "-m", "neuron_fabric.hw.cli", f"--top={top}", f"--out={tmp_path / 'b'}", *options]
    subprocess.run(command, check=True, capture_output=True)
    for name in (first.name, first.with_suffix(".json").name):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_manifest_of_the_header(tmp_path: Path) -> None:
    manifest = json.loads(export("axis", SMALL, tmp_path).with_suffix(".json").read_text())
    fields = {field["field"]: field["offset"] for field in manifest["header"]["fields"]}
    assert manifest["header"]["offset_bytes"] == 42
    assert (fields["magic"], fields["chunk"], fields["epoch"]) == (0, 10, 20)
    assert manifest["parameters"]["lanes"] == 64
    assert manifest["latency_cycles"] == 5


def test_full_width_is_small(tmp_path: Path) -> None:
    assert export("axis", ReducerParams(), tmp_path).stat().st_size < 200_000


def test_unknown_top_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown top 'tcp': use core, axis, csr, udp, cxl"):
        export("tcp", SMALL, tmp_path)


def test_bad_parameters_are_refused_on_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuron_fabric.hw.cli", "--slots=3", f"--out={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "slots must be a power of two up to 65536, not 3" in done.stderr


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_nothing_is_written_unless_all_tops_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lanes must divide 512"):
        export_all(("core", "axis"), ReducerParams(lanes=24), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["--top=core", "--lanes=8", f"--out={tmp_path / 'file' / 'below'}"])
    assert "error: [Errno 20] Not a directory" in capsys.readouterr().err
