"""The command ``neuron-fabric``: finds the commands of the parts that are installed.

A part registers ``main(argv) -> int`` under the entry-point group :data:`GROUP`; nothing of it is imported before it is
asked for, so that ``neuron-fabric verilog`` needs no torch and ``neuron-fabric train`` no gateware tools.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

__all__ = ["EXTRAS", "GROUP", "main"]

GROUP = "neuron_fabric.commands"
EXTRAS = dict.fromkeys(("train", "bench", "calibrate", "doctor", "emulate", "profile", "trust"), "train") | {
    "verilog": "hw",
    "sim": "sim",
}
"""Which extra of the package a command needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``neuron-fabric COMMAND ...``; the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] not in commands:
        wrong = bool(argv) and argv[0] not in ("-h", "--help")
        if wrong:
            print(f"neuron-fabric: no command {argv[0]!r}", file=sys.stderr)
        print("usage: neuron-fabric COMMAND [--help]\ncommands: " + ", ".join(sorted(commands)))
        return 2 if wrong or not argv else 0
    name, rest = argv[0], argv[1:]
    try:
        command = commands[name].load()
    except ImportError as error:
        extra = EXTRAS.get(name, "dev")
        print(
            f"neuron-fabric {name}: {error}; install what it needs, in the checkout: pip install '.[{extra}]'",
            file=sys.stderr,
        )
        return 1
    return int(command(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
