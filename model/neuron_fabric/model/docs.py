"""Fill the generated parts of the documentation: ``python -m neuron_fabric.model.docs [FOLDER]``.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. A test compares what is committed with what
would be generated.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from neuron_fabric.model.registers import register_table
from neuron_fabric.model.wire import Reason, header_table

__all__ = ["PARTS", "filled", "main"]


def _reasons() -> str:
    rows = [f"| {reason.value} | {reason.name} |" for reason in Reason]
    return "\n".join(["| code | reason |", "|---|---|", *rows]) + "\n"


PARTS = {"header": header_table, "reasons": _reasons, "registers": register_table}
_PART = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every generated part made anew. ``ValueError`` names a part that nobody makes."""

    def make(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in PARTS:
            raise ValueError(f"no generated part {name!r}: there are {', '.join(PARTS)}")
        return f"<!-- generated: {name} -->\n{PARTS[name]()}<!-- end -->"

    return _PART.sub(make, text)


def main(folder: Path) -> None:
    """Fill every page of a folder in place."""
    for page in sorted(folder.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
