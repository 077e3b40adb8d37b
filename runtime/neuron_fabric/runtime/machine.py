"""What a measured figure depends on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["machine"]


def machine() -> dict[str, str | float | None]:
    """What a figure depends on: CPU model, cores, how busy they are, system, and versions of what computes."""
    facts: dict[str, str | float | None] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": sys.version.split()[0],
    }
    for package in ("numpy", "numba", "llvmlite", "torch"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
