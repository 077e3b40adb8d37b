"""The command line of the Verilog export: which sizes and tops it takes, and what it writes."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from neuron_fabric.hw.cli import main
from neuron_fabric.hw.configurations import CONFIGURATIONS
from neuron_fabric.hw.fusesoc import core_text
from neuron_fabric.hw.verilog import TOPS
from neuron_fabric.model import ReducerParams


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def written(folder: Path) -> dict[str, dict[str, object]]:
    """The manifests in a folder, by top."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {manifest["top"]: manifest for manifest in manifests}


def test_a_configuration_by_name(tmp_path: Path) -> None:
    """Its tops, of its sizes."""
    one = CONFIGURATIONS["ecp5_small"]
    assert run("--config=ecp5_small", f"--out={tmp_path}") == 0
    manifests = written(tmp_path)
    assert set(manifests) == set(one.tops)
    assert all(manifest["parameters"] == asdict(one.params) for manifest in manifests.values())


def test_options_win_over_the_configuration(tmp_path: Path) -> None:
    assert run("--config=ecp5_small", "--top=axis", "--slots=2", "--jobs=2", f"--out={tmp_path}") == 0
    (manifest,) = written(tmp_path).values()
    assert manifest["top"] == "axis"
    assert manifest["parameters"] == asdict(CONFIGURATIONS["ecp5_small"].params) | {"slots": 2, "jobs": 2}


def test_without_a_configuration_sizes_are_the_defaults(tmp_path: Path) -> None:
    assert run("--top=core", "--lanes=64", f"--out={tmp_path}") == 0
    (manifest,) = written(tmp_path).values()
    assert manifest["parameters"] == asdict(ReducerParams(lanes=64))


def test_narrow_lanes_leave_out_the_tops_that_need_whole_lines(tmp_path: Path) -> None:
    assert run("--lanes=64", "--slots=1", "--lines-per-chunk=1", f"--out={tmp_path}") == 0
    assert set(written(tmp_path)) == set(TOPS) - {"udp", "cxl"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=none"], "there is no configuration 'none': use ecp5_small"),
        (["--config=ecp5_small", "--top=udp"], "top 'udp': lanes must be 512, not 64"),
        (["--config=ultrascale_100g", "--lanes=256"], "top 'udp': lanes must be 512, not 256"),
        (["--config=ecp5_small", "--workers=32"], "a binary tally of 32 workers takes 6 bits; acc_bits is 5"),
        (["--config=ecp5_small", "--slots=3"], "slots must be a power of two"),
        (["--top=core", "--jobs=256"], "jobs must be 1 to 255, not 256"),
        (["--top=poem"], "unknown top 'poem'"),
        (["--top=axis", "--lanes=24"], "lanes must divide 512"),
    ],
)
@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_what_cannot_work_is_refused_with_the_rule(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written."""
    assert run(*arguments, f"--out={tmp_path}") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    gc.collect()  # what is never elaborated complains when it goes: here, not in another test


def test_configurations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list-configs") == 0
    listed = capsys.readouterr().out
    for name, one in CONFIGURATIONS.items():
        assert f"{name}: {one.doc}" in listed
        assert f"lanes={one.params.lanes}, " in listed
        assert one.reason in listed


def test_a_core_description_is_beside_each_file(tmp_path: Path) -> None:
    """YAML whose files are there and whose top module is in them; the first line is what FuseSoC knows it by."""
    assert run("--lanes=64", "--slots=1", "--lines-per-chunk=1", f"--out={tmp_path}") == 0
    cores = sorted(tmp_path.glob("*.core"))
    assert [path.stem for path in cores] == [path.stem for path in sorted(tmp_path.glob("*.v"))]
    for path in cores:
        text = path.read_text()
        assert text.startswith("CAPI=2:\n# lanes=64, lines_per_chunk=1, slots=1, ")
        core = yaml.safe_load(text)
        assert core["name"] == f"neuron_fabric:hw:{path.stem}:{version('neuron-fabric')}"
        files = [tmp_path / name for fileset in core["filesets"].values() for name in fileset["files"]]
        assert files == [path.with_suffix(".v"), path.with_suffix(".json")]
        assert all(file.is_file() for file in files)
        target = core["targets"]["default"]
        assert set(target["filesets"]) == set(core["filesets"])
        assert f"\nmodule {target['toplevel']}(" in files[0].read_text()


def test_the_core_description_says_all_sizes() -> None:
    comment = core_text("top", ReducerParams()).splitlines()[1]
    assert comment == "# " + ", ".join(f"{name}={value}" for name, value in asdict(ReducerParams()).items())
