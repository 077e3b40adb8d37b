"""Driver and emulator under faults for a while; ``python -m neuron_fabric.runtime.reducer.soak`` does it for longer.

``NEURON_FABRIC_SOAK_SECONDS`` says how long; by default 10 s each.
"""

import os

import numpy as np
import pytest

from neuron_fabric.runtime.reducer import soak as soaking
from neuron_fabric.runtime.reducer.soak import SoakError, soak

SECONDS = float(os.environ.get("NEURON_FABRIC_SOAK_SECONDS", "10"))
SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))


@pytest.mark.timeout(60 + 20 * SECONDS)
@pytest.mark.parametrize(("members", "encoding"), [(2, "binary"), (3, "ternary"), (5, "binary")])
def test_no_wrong_bit_and_bounded_memory(members, encoding):
    print(f"NEURON_FABRIC_SEED={SEED}")
    report = soak(1 << 40, SECONDS, members=members, encoding=encoding, seed=SEED)
    print(report)
    assert report.elements > 0
    assert report.wrong_on_purpose > 0
    assert report.grown_bytes < 64 << 20


def test_a_wrong_bit_is_found(monkeypatch):
    right = soaking.expected

    def wrong(spec, planes):
        tally = right(spec, planes)
        tally[0, 0] ^= np.uint64(1)
        return tally

    monkeypatch.setattr(soaking, "expected", wrong)
    with pytest.raises(SoakError, match="has a wrong count"):
        soak(10_000, 60)
