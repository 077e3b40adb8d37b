"""``python -m neuron_fabric.sim``: run the RTL tests and print their table; arguments go to pytest."""

from __future__ import annotations

import sys

import pytest

from neuron_fabric.sim.simulators import project_root


def main(arguments: list[str] | None = None) -> int:
    """Run the tests marked ``rtl``; ``-k``, ``-x`` and so on as for pytest.

    The environment variable ``NEURON_FABRIC_SEEDS`` says how many seeds, ``NEURON_FABRIC_SEED`` which is the first.
    """
    tests = project_root() / "tests" / "sim"
    if not tests.is_dir():
        print(f"neuron_fabric.sim: no tests at {tests}; run this in a checkout of NEURON-Fabric", file=sys.stderr)
        return 2
    given = sys.argv[1:] if arguments is None else arguments
    return int(pytest.main([str(tests), "-m", "rtl", *given]))


if __name__ == "__main__":
    raise SystemExit(main())
