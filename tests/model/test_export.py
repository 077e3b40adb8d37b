"""The register table for other languages."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from neuron_fabric.model.docs import main
from neuron_fabric.model.encoding import int_encoding
from neuron_fabric.model.export import FILES, regs_h, regs_json
from neuron_fabric.model.registers import COUNTERS, REGISTERS, encoding_values, expand, words
from neuron_fabric.model.wire import Reason

GENERATED = Path(__file__).parents[2] / "hw" / "generated"


@pytest.mark.parametrize("name", FILES)
def test_committed_files_are_up_to_date(name):
    committed = (GENERATED / name).read_text(encoding="utf-8")
    assert committed == FILES[name](), "run: python -m neuron_fabric.model.docs"


def test_one_command_writes_them_all(tmp_path):
    docs, generated = tmp_path / "docs", tmp_path / "a" / "b"
    docs.mkdir()
    (docs / "page.md").write_text("<!-- generated: reasons -->\n<!-- end -->", encoding="utf-8")
    main(docs, generated)
    assert "| 9 | BAD_PLANE |" in (docs / "page.md").read_text(encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in generated.iterdir()} == {
        name: make() for name, make in FILES.items()
    }


def test_no_name_is_defined_twice():
    names = [line.split()[1].partition("(")[0] for line in regs_h().splitlines() if line.startswith("#define")]
    assert len(set(names)) == len(names)


def claims():
    """C expressions that must be true, from the table's own unrolling."""
    for word in words(3):
        register = word.register
        base = f"NF_JOB({word.bank}) + " if register.per_job else ""
        for entry in range(register.entries_per_word) if register.entries else (None,):
            k = None if entry is None else register.entries_per_word * word.index + entry
            argument = "" if k is None else f"({k})"
            yield f"{base}NF_{register.name}{argument} == {word.address}"
            for field in register.fields:
                name = f"NF_{register.name}_{field.name.upper()}"
                shift = field.lsb + register.entry_bits * (entry or 0)
                if field.width < 32:
                    yield f"{name}_SHIFT{argument} == {shift}"
                    yield f"{name}_MASK{argument} == {(1 << field.width) - 1 << shift}u"
    yield from (f"NF_REASON_{reason.name} == {reason.value}" for reason in Reason)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")
def test_the_header_says_the_same_in_c(tmp_path):
    """Compiled twice in one file, without a warning; every macro has the table's value."""
    checks = [f"typedef char check{number}[({claim}) ? 1 : -1];" for number, claim in enumerate(claims())]
    assert len(checks) > 500
    source = tmp_path / "check.c"
    source.write_text("\n".join(['#include "regs.h"', '#include "regs.h"', *checks, ""]), encoding="utf-8")
    command = ["cc", "-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c99", "-fsyntax-only", f"-I{GENERATED}"]
    done = subprocess.run([*command, str(source)], check=False, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr[:2000]


def test_the_json_finds_every_address():
    content = json.loads(regs_json())
    bank = content["job_bank"]
    found = {
        base + register["offset"] + register["stride"] * index
        for base, registers in (
            (0, content["registers"]),
            *((bank["base"] + bank["stride"] * job, bank["registers"]) for job in range(2)),
        )
        for register in registers
        for index in range(register["count"])
    }
    assert found == {address for _, address, _ in expand(2)}
    assert [counter["name"] for counter in content["counters"]] == [name for name, _ in COUNTERS]
    assert content["reasons"] == {reason.name: reason.value for reason in Reason}


def test_weights_decode_by_the_json():
    """What a driver in another language would do with it."""
    registers = {register["name"]: register for register in json.loads(regs_json())["job_bank"]["registers"]}
    weights = registers["JOB_WEIGHTS"]
    fields = {field["name"]: field for field in weights["fields"]}
    encoding = int_encoding(7)
    words = encoding_values(encoding)
    per_word = 32 // weights["array"]["entry_bits"]

    def read(plane, name):
        word = words[f"JOB_WEIGHTS{plane // per_word}"] >> weights["array"]["entry_bits"] * (plane % per_word)
        return word >> fields[name]["lsb"] & (1 << fields[name]["width"]) - 1

    assert encoding.weights == tuple(
        (-1 if read(plane, "negative") else 1) << read(plane, "shift") for plane in range(encoding.planes)
    )


def test_every_register_is_in_both():
    assert all(f"#define NF_{register.name}" in regs_h() for register in REGISTERS)
    assert all(f'"name": "{register.name}"' in regs_json() for register in REGISTERS)
