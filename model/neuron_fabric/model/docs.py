"""Write what is generated and committed: ``python -m neuron_fabric.model.docs [DOCS [GENERATED]]``.

In the pages of the folder DOCS a generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; the
folder GENERATED gets the register table for other languages. Tests compare what is committed with what would be
generated. Parts that describe another package are made there, and found by name when a page has one.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from neuron_fabric.model import control
from neuron_fabric.model.cxl import counter_table
from neuron_fabric.model.cxl_map import address_table, status_table
from neuron_fabric.model.export import write_files
from neuron_fabric.model.registers import register_table
from neuron_fabric.model.wire import Reason, header_table

__all__ = ["PARTS", "filled", "main"]


def _reasons() -> str:
    rows = [f"| {reason.value} | {reason.name} |" for reason in Reason]
    return "\n".join(["| code | reason |", "|---|---|", *rows]) + "\n"


def _configurations() -> str:
    # The model must not depend on the gateware; only who writes this part needs it.
    table: Callable[[], str] = importlib.import_module("neuron_fabric.hw.configurations").configuration_table
    return table()


PARTS: dict[str, Callable[[], str]] = {
    "header": header_table,
    "reasons": _reasons,
    "open": partial(control.control_table, control.OPEN_FIELDS),
    "grant": partial(control.control_table, control.GRANT_FIELDS),
    "close": partial(control.control_table, control.CLOSE_FIELDS),
    "status": partial(control.control_table, control.STATUS_FIELDS),
    "status_reply": partial(control.control_table, control.STATUS_REPLY_FIELDS),
    "registers": register_table,
    "cxl_addresses": address_table,
    "cxl_status": status_table,
    "cxl_counters": counter_table,
    "configurations": _configurations,
}
_PART = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every generated part made anew. ``ValueError`` names a part that nobody makes."""

    def make(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in PARTS:
            raise ValueError(f"no generated part {name!r}: there are {', '.join(PARTS)}")
        return f"<!-- generated: {name} -->\n{PARTS[name]()}<!-- end -->"

    return _PART.sub(make, text)


def main(docs: Path, generated: Path) -> None:
    """Fill every page of ``docs`` in place, and write the files of ``generated``."""
    for page in sorted(docs.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    write_files(generated)


if __name__ == "__main__":
    folders = [*sys.argv[1:], *["docs", "hw/generated"][len(sys.argv) - 1 :]]
    main(Path(folders[0]), Path(folders[1]))
