"""Calibration: measure a training in FP32, propose where votes would do, confirm it by trials, and write the profile.

Built-in workloads have a command, ``neuron-fabric calibrate``. In a training script of one's own:

    calibrator = attach_calibrator(ddp)                  # instead of attach(ddp, profile)
    for batch in batches:
        loss = ...
        calibrator.observe(loss.item())
        loss.backward()
        ...
    records = calibrator.records(workload="mine")        # on every rank
    if rank == 0:
        save_records(records, "records.json")            # then: neuron-fabric calibrate --records records.json
"""

from neuron_fabric.runtime.calibration.building import ProfileOptions, build_profile
from neuron_fabric.runtime.calibration.proposals import Thresholds, assess, ladder
from neuron_fabric.runtime.calibration.recorder import Calibrator, attach_calibrator
from neuron_fabric.runtime.calibration.records import Records, load_records, save_records
from neuron_fabric.runtime.calibration.search import Outcome, halve

__all__ = [
    "Calibrator",
    "Outcome",
    "ProfileOptions",
    "Records",
    "Thresholds",
    "assess",
    "attach_calibrator",
    "build_profile",
    "halve",
    "ladder",
    "load_records",
    "save_records",
]
