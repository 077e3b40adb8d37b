import os

from hypothesis import settings

# A busy machine is not a slow test: nothing here is timed. A failure prints what repeats it.
settings.register_profile("neuron-fabric", deadline=None, print_blob=True)
settings.load_profile("neuron-fabric")


def pytest_report_header(config):
    """Say which seeds this run has, so that a log is enough to repeat it."""
    seed = os.environ.get("NEURON_FABRIC_SEED", "1, the default")
    return f"seeds: NEURON_FABRIC_SEED is {seed}; hypothesis prints its own and takes --hypothesis-seed"
