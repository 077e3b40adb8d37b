"""Plain values from a YAML or JSON text that nobody vouches for, and back.

Only mappings with text keys, lists, text, numbers, booleans and null come out; nothing of a text is ever executed.
Anchors, aliases, tags, merge keys and duplicate keys are refused, as is what is too large or too deep, so that reading
takes bounded time and memory. Scalars follow the core schema of YAML 1.2: ``1e-4``, ``1E-4`` and ``.5`` are numbers,
while ``no``, ``1_000``, ``0777`` and ``2026-01-31`` are text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import yaml

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "DocumentError", "from_json", "from_yaml", "key_path", "to_yaml"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000
"""Keys, list entries and values of one document."""

_SCALARS = (
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", "tTfF"),
    ("null", r"(?:~|null|Null|NULL|)\Z", ("~", "n", "N", "")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)\Z", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?\Z", "-+.0123456789"),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", "-+."),
)
"""Kind, what it looks like, and the characters that it begins with."""


class DocumentError(ValueError):
    """A text that is no document: what is wrong and where."""


def from_yaml(data: bytes) -> Any:
    """The value of a YAML document. ``DocumentError`` if it has none or is refused."""
    text = _text(data)
    try:
        loader = _Loader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]
    except yaml.YAMLError as error:
        raise DocumentError(_what(error)) from None
    except (ValueError, OverflowError):  # from int() and chr()
        raise DocumentError("a number has too many digits, or an escape is no character") from None
    return _checked(value)


def from_json(data: bytes, *, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES) -> Any:
    """The value of a JSON document. ``DocumentError`` if it has none or is refused."""
    text = _text(data, max_bytes)
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise DocumentError(f"nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise DocumentError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except DocumentError:
        raise
    except ValueError:  # from int()
        raise DocumentError("a number has too many digits") from None
    return _checked(value, max_nodes)


def to_yaml(value: Any) -> str:
    """YAML text that :func:`from_yaml` reads back as it was, on one machine as on another."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
    )
    return text


def key_path(keys: Iterable[str | int]) -> str:
    """``regions[1].error_feedback.clip``; keys that are no plain names are quoted."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        elif re.fullmatch(r"\w{1,80}", key):
            path += f".{key}" if path else key
        else:
            path += f"[{json.dumps(key[:80])}]"
    return path or "the document"


def _text(data: bytes, max_bytes: int = MAX_BYTES) -> str:
    if len(data) > max_bytes:
        raise DocumentError(f"larger than {max_bytes} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"byte {error.start} is not UTF-8") from None


def _checked(value: Any, max_nodes: int = MAX_NODES) -> Any:
    """The value, if it is neither too deep nor too large and all its numbers are finite."""
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    nodes = 0
    while waiting:
        each, path = waiting.pop()
        nodes += 1
        if nodes > max_nodes:
            raise DocumentError(f"more than {max_nodes} keys and values")
        if len(path) > MAX_DEPTH:
            raise DocumentError(f"{key_path(path)}: nested deeper than {MAX_DEPTH}")
        if isinstance(each, float) and not math.isfinite(each):
            raise DocumentError(f"{key_path(path)}: {each} is not a finite number")
        if isinstance(each, dict):
            nodes += len(each)
            waiting += [(inner, (*path, key)) for key, inner in each.items()]
        elif isinstance(each, list):
            waiting += [(inner, (*path, index)) for index, inner in enumerate(each)]
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise DocumentError(f"key {key[:80]!r} is given twice")
        made[key] = value
    return made


def _what(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        return where + (error.problem or error.context or "cannot be read")
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """The safe loader without what makes a document hostile, and with numbers as people write them."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (a class variable in PyYAML, which its types do not say)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Refused here, before anything is built: an alias makes a small text large, depth a deep stack.
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused(event, "anchors and aliases are not allowed; write the value out")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, f"tag {event.tag[:80]!r} is not allowed")
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise _refused(event, f"nested deeper than {MAX_DEPTH}")
        if self._nodes > MAX_NODES:
            raise _refused(event, f"more than {MAX_NODES} keys and values")
        self._depth += 1
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        return node  # type: ignore[no-any-return]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        made: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused(key_node, "a key must be text")
            key = str(key_node.value)  # as it is written: 4 and "4" are one key, as in JSON
            if key in made:
                raise _refused(key_node, f"key {key[:80]!r} is given twice")
            made[key] = self.construct_object(value_node, deep=deep)
        return made


class _Dumper(yaml.SafeDumper):
    """The safe dumper, without anchors, and with quotes around text that some reader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Left to itself, the emitter loses some of the rarer line breaks.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def _refused(at: Any, problem: str) -> yaml.MarkedYAMLError:
    """``at`` is an event or a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


# What none matches is text. The dumper keeps its wider ones as well, so that it quotes "no" and "2026-01-31" too.
for _class in (_Loader, _Dumper):
    for _kind, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list(_first))
