import subprocess
import sys

from neuron_fabric.model import cli


def test_help_lists_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    assert "bench, calibrate, doctor, emulate, profile, sim, train, trust, verilog" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys):
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err


def test_every_command_has_an_extra():
    from importlib.metadata import entry_points

    assert {point.name for point in entry_points(group=cli.GROUP)} == set(cli.EXTRAS)


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    class Broken:
        name = "train"

        def load(self):
            raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(cli, "entry_points", lambda group: [Broken()])
    assert cli.main(["train"]) == 1
    message = "No module named 'torch'; install what it needs, in the checkout: pip install '.[train]'"
    assert message in capsys.readouterr().err


def imported(module):
    code = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_each_part_imports_only_what_it_may():
    assert not imported("neuron_fabric.model") & {"torch", "amaranth", "cocotb", "numba", "rich", "typer"}
    assert not imported("neuron_fabric.hw") & {"torch", "cocotb", "numba"}
    assert not imported("neuron_fabric.runtime") & {"amaranth", "cocotb", "rich", "matplotlib", "sklearn"}
    assert not imported("neuron_fabric.sim") & {"torch"}
