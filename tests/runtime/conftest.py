import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_ranks():
    """``run_ranks(path, function, world, ...)``: see ranks.py."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pools = module.Pools()
    yield pools.run
    pools.close()
