import os

import pytest
from hypothesis import settings

from neuron_fabric.sim.simulators import project_root
from neuron_fabric.sim.table import PROPERTY, Row, render, write_json

ROWS = pytest.StashKey()

# A busy machine is not a slow test: nothing here is timed. A failure prints what repeats it.
settings.register_profile("neuron-fabric", deadline=None, print_blob=True)
settings.load_profile("neuron-fabric")


def pytest_report_header(config):
    """Say which seeds this run has, so that a log is enough to repeat it."""
    seed = os.environ.get("NEURON_FABRIC_SEED", "1, the default")
    return f"seeds: NEURON_FABRIC_SEED is {seed}; hypothesis prints its own and takes --hypothesis-seed"


class Rows:
    """Collects the rows of all tests where the reports arrive: here, or in the process that others work for."""

    def __init__(self, config):
        self._rows = config.stash.setdefault(ROWS, [])

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._rows += [Row(**value) for name, value in report.user_properties if name == PROPERTY]


def pytest_configure(config):
    config.pluginmanager.register(Rows(config))


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    if not rows or hasattr(config, "workerinput"):
        return
    path = project_root() / "build" / "sim" / "report.json"
    write_json(rows, path)
    terminalreporter.ensure_newline()
    render(rows)
    seed = os.environ.get("NEURON_FABRIC_SEED", "1")
    print(f"random seeds from {seed} (NEURON_FABRIC_SEED, NEURON_FABRIC_SEEDS); table as JSON: {path}")
