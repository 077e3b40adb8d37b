"""Faults in the design itself: one operator of the exported Verilog is exchanged for another."""

from __future__ import annotations

import random
import re

__all__ = ["mutants"]

_EXCHANGE = {"&": "|", "|": "&", "^": "|", "+": "-", "-": "+", "==": "!="}
_SITE = re.compile(r"(?<= )(?P<operator>&|\||\^|\+|-|==)(?= )")


def mutants(text: str, count: int, seed: int, modules: str = "") -> list[tuple[str, str]]:
    """``count`` versions of a Verilog text with one binary operator exchanged, and what was done to each.

    Only continuous assignments are touched: in the text that Amaranth makes, all logic is in them. With ``modules``
    only those of modules in whose names this regular expression is found.
    """
    lines = text.splitlines(keepends=True)
    sites = []
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("module "):
            inside = re.search(modules, line) is not None
        elif inside and line.startswith("  assign "):
            sites += [(number, match) for match in _SITE.finditer(line.partition("=")[2])]
    rng = random.Random(f"mutants:{seed}")
    made = []
    for number, match in rng.sample(sites, count):
        line = lines[number]
        left, equals, right = line.partition("=")
        new = right[: match.start()] + _EXCHANGE[match["operator"]] + right[match.end() :]
        changed = [*lines[:number], left + equals + new, *lines[number + 1 :]]
        made.append(("".join(changed), f"line {number + 1}: {line.strip()} with {_EXCHANGE[match['operator']]}"))
    return made
