"""The reader of texts that nobody vouches for."""

import contextlib
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuron_fabric.runtime.document import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    DocumentError,
    from_json,
    from_yaml,
    key_path,
    to_yaml,
)

CPU_SECONDS = 20.0
"""Nothing that is tried here takes a tenth of it: a slow machine keeps it, and what grows too fast does not."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("1e5", 1e5),
        ("+.5E+3", 500.0),
        (".5", 0.5),
        ("-5.", -5.0),
        ("0", 0),
        ("-12", -12),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("off", "off"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        (".", "."),
        ("'1e-4'", "1e-4"),
        ("<<", "<<"),
    ],
)
def test_scalars_of_yaml(text, value):
    read = from_yaml(f"key: {text}".encode())["key"]
    assert read == value
    assert type(read) is type(value)


HOSTILE = {
    "alias bomb": (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 1, column 4: anchors and aliases"),
    "anchor": (b"&a a", "anchors and aliases"),
    "python object": (b"!!python/object/apply:os.system ['false']", "tag 'tag:yaml.org,2002:python/object/apply"),
    "tag": (b"a: !!float 3", "tag 'tag:yaml.org,2002:float' is not allowed"),
    "duplicate": (b"a:\n  b: 1\n  b: 2", "line 3, column 3: key 'b' is given twice"),
    "duplicate in two spellings": (b"4: 1\n'4': 2", "key '4' is given twice"),
    "key that is a list": (b"[1]: 2", "a key must be text"),
    "two documents": (b"a: 1\n---\nb: 2", "another document"),
    "not UTF-8": (b"a: \xff", "byte 3 is not UTF-8"),
    "control character": (b"a: \x00", "special characters are not allowed"),
    "infinity": (b"a: [{b: 1e999}]", r"a\[0\]\.b: inf is not a finite number"),
    "not a number": (b"a: .nan", "a: nan is not a finite number"),
    "long number": (b"a: " + b"9" * 5000, "too many digits"),
    "no character": (b'"\\UFFFFFFFF"', "escape is no character"),
    "too large": (b"#" * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
    "deep flow": (b"[" * MAX_BYTES, f"nested deeper than {MAX_DEPTH}"),
    "deep mapping": (b"{a: " * 200_000, f"nested deeper than {MAX_DEPTH}"),
    "deep block": (b"- " * 500_000, f"nested deeper than {MAX_DEPTH}"),
    "deep question": (b"? " * 500_000, f"nested deeper than {MAX_DEPTH}"),
    "many keys": (b"\n".join(b"k%d: 1" % i for i in range(80_000)), f"more than {MAX_NODES} keys"),
    "many entries": (b"[" + b"1," * 500_000 + b"]", f"more than {MAX_NODES} keys"),
    "colons": (b":" * 1_000_000, "mapping values are not allowed"),
    "exclamation": (b"!" * 1_000_000, "is not allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused_in_bounded_time(name):
    text, message = HOSTILE[name]
    begin = time.process_time()
    with pytest.raises(DocumentError, match=message):
        from_yaml(text)
    assert time.process_time() - begin < CPU_SECONDS


@pytest.mark.parametrize("unit", [b"#\n", b"a ", b"a\n", b"\n", b" ", b"#"])
def test_a_long_text_takes_bounded_time(unit):
    begin = time.process_time()
    from_yaml(unit * (MAX_BYTES // len(unit)))
    assert time.process_time() - begin < CPU_SECONDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' is given twice"),
        (b'{"a": NaN}', "a: nan is not a finite number"),
        (b'{"a": [1, -1e999]}', r"a\[1\]: -inf is not a finite number"),
        (b"9" * 5000, "too many digits"),
        (b"[" * MAX_BYTES, f"nested deeper than {MAX_DEPTH}"),
        (b"[" * 20 + b"]" * 20, f"nested deeper than {MAX_DEPTH}"),
        (b"[" + b"1," * 50_000 + b"1]", f"more than {MAX_NODES}"),
        (b"{\n  a}", "line 2, column 3: Expecting property name"),
        (b"", "line 1, column 1"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_hostile_json_is_refused(text, message):
    with pytest.raises(DocumentError, match=message):
        from_json(text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
@example(
    ["1e-4", ".5", "1E5", "no", "", "~", "0777", "2026-01-31", "<<", "=", "1:30", " x", "é\x85\u2028", "\x07", "\ufeff"]
)
@example({"1e-4": {"": {"~": 1e-05}}})
def test_yaml_reads_what_it_has_written(value):
    again = from_yaml(to_yaml(value).encode())
    assert again == value
    assert repr(again) == repr(value)  # types too


@settings(max_examples=300)
@given(st.text(alphabet="ab1.-+eE:,#&*!|>%@`'\"{}[]?~ \n\t\\xU0\r\u2028\x85é<=", max_size=60) | st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    for read in (from_yaml, from_json):
        with contextlib.suppress(DocumentError):
            read(text.encode("utf-8", "surrogatepass"))


def test_key_paths():
    assert key_path(("regions", 1, "error_feedback", "clip")) == "regions[1].error_feedback.clip"
    assert key_path(("model", "parameters", "head.weight")) == 'model.parameters["head.weight"]'
    assert key_path(()) == "the document"
