"""Built-in workloads on real data that packages carry.

    task = workload("digits")

Data are loaded when a workload is made, so that one whose data are missing is in nobody's way.
"""

from __future__ import annotations

from neuron_fabric.runtime.workloads.base import Workload

__all__ = ["WORKLOADS", "Workload", "workload"]

WORKLOADS = ("digits", "reviews", "fashion")
"""Names of all workloads."""


def workload(name: str) -> Workload:
    """The workload of that name, with its data.

    Raises
    ------
    ValueError
        If there is none of that name.
    RuntimeError
        If its data are not installed; the message says which package brings them.
    """
    if name == "digits":
        from neuron_fabric.runtime.workloads.digits import DigitsWorkload

        return DigitsWorkload()
    if name == "reviews":
        from neuron_fabric.runtime.workloads.reviews import ReviewsWorkload

        return ReviewsWorkload()
    if name == "fashion":
        from neuron_fabric.runtime.workloads.fashion import FashionWorkload

        return FashionWorkload()
    raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
