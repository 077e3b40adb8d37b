"""Profiles: what a short one means, round trips, hashes, and what is said of a bad one."""

import datetime
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from neuron_fabric.runtime.binding import bind
from neuron_fabric.runtime.controller import ControllerPolicy, PlanController
from neuron_fabric.runtime.document import MAX_NODES
from neuron_fabric.runtime.fingerprint import ParameterSpec, fingerprint
from neuron_fabric.runtime.phases import PhasePolicy
from neuron_fabric.runtime.plan import DEFAULT_GATE, ErrorFeedback, Region, ResultFormat, Route
from neuron_fabric.runtime.profile import (
    FeedbackSpec,
    ModelSection,
    Profile,
    ProfileError,
    Provenance,
    RegionSpec,
    Run,
    WorldSizes,
    dumps,
    key_table,
    load,
    loads,
    save,
)
from neuron_fabric.runtime.profile_cli import app
from neuron_fabric.runtime.workloads.digits import ResNet

DOCS = Path(__file__).parents[2] / "docs" / "profile.md"
EXAMPLE = re.search(r"```yaml\n(schema_version.*?)```", DOCS.read_text(), re.DOTALL)[1]
SHORT = "schema_version: 1\nname: short\n"
SYNTAXES = ("yaml", "json")


def refusal(text, syntax="yaml"):
    with pytest.raises(ProfileError) as caught:
        loads(text, syntax)
    return str(caught.value)


# ---- meaning ---------------------------------------------------------------------------------------------------------


def test_a_short_profile_has_all_defaults():
    short = loads(SHORT)
    assert short == Profile(schema_version=1, name="short")
    assert short.plan().regions == ()
    assert short.controller_policy() == ControllerPolicy()
    assert all(world in short.world for world in (1, 2, 64))
    assert 65 not in short.world


def test_a_region_becomes_a_region_of_a_plan():
    text = """
      - name: body
        patterns: ["a.*", "b"]
        module_types: [Conv2d]
        max_ndim: 4
        encoding: ternary
        gate: .5
        error_feedback: {clip: null, decay: 5e-1}
        result_format: majority
        margin: 1
        embeddings: true
        may_be_empty: true
        sensitivity: 3
    """
    made = loads(f"{SHORT}regions:{text}")
    assert made.plan().regions == (
        Region(
            "body",
            ("a.*", "b"),
            Route.TERNARY,
            ResultFormat.MAJORITY,
            1,
            error_feedback=ErrorFeedback(None, 0.5),
            max_ndim=4,
            embeddings=True,
            may_be_empty=True,
            module_types=("Conv2d",),
            gate=0.5,
        ),
    )
    (policy,) = made.region_policies()
    assert (policy.name, policy.encoding, policy.result_format, policy.sensitivity) == (
        "body",
        "ternary",
        "majority",
        3,
    )


def test_defaults_that_depend_on_other_keys_are_written_down():
    assert loads(SHORT + "regions: [{name: a, encoding: ternary}]").regions[0].gate == DEFAULT_GATE
    made = loads(SHORT + 'model: {parameters: {"w": "float32[3]", "v": "float32[3]"}, tied: [[w, v]]}')
    assert made.model.tied == (("v", "w"),)
    assert made.model.digest == made.model.fingerprint().digest


def test_the_example_of_the_documentation_fits_its_model():
    example = loads(EXAMPLE)
    bound = bind(example, ResNet(4), 4)
    assert {region.name for region in bound.values() if region is not None} == {"late", "body"}
    assert [name for name, region in bound.items() if region is None][:2] == ["norm.weight", "norm.bias"]
    PlanController(example.controller_policy(), 4, example.region_policies()).decide(0)


def test_the_documentation_has_every_key():
    stated = DOCS.read_text().partition("<!-- keys -->\n")[2].partition("<!-- end -->")[0]
    assert stated == key_table(), "put the output of `neuron-fabric profile keys` between the marks of docs/profile.md"


# ---- round trips and hashes ------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PATTERNS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.integers(0, 10**6)


@st.composite
def regions(draw):
    encoding = draw(st.sampled_from(["fp32", "binary", "ternary"]))
    low_bit = encoding != "fp32"
    majority = low_bit and draw(st.booleans())
    feedback = st.builds(FeedbackSpec, clip=st.none() | st.floats(0, 1e30), decay=st.floats(0, 1))
    return RegionSpec(
        name=draw(NAMES),
        patterns=tuple(draw(st.lists(PATTERNS, min_size=1, max_size=3))),
        module_types=tuple(draw(st.lists(PATTERNS, max_size=2))),
        max_ndim=draw(st.none() | st.integers(0, 64)),
        encoding=encoding,
        gate=draw(st.floats(0, 10)) if encoding == "ternary" else None,
        error_feedback=draw(st.none() | feedback) if low_bit else None,
        result_format="majority" if majority else "tally",
        margin=draw(st.integers(0, 64)) if majority else 0,
        embeddings=draw(st.booleans()),
        may_be_empty=draw(st.booleans()),
        sensitivity=draw(st.integers(0, 99)),
    )


@st.composite
def profiles(draw):
    specs = st.builds(
        ParameterSpec, st.lists(st.integers(0, 10**9), max_size=4).map(tuple), st.sampled_from(["float32", "bfloat16"])
    )
    parameters = draw(st.none() | st.dictionaries(PATTERNS, specs.map(str), min_size=1, max_size=5))
    given_regions = draw(st.lists(regions(), max_size=3, unique_by=lambda region: region.name))
    return Profile(
        schema_version=1,
        name=draw(NAMES),
        model=None if parameters is None else ModelSection(parameters=parameters),
        world=draw(
            st.builds(WorldSizes, sizes=st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple))
            | st.builds(WorldSizes, min=st.integers(1, 8) | st.none(), max=st.integers(8, 64) | st.none())
        ),
        regions=tuple(given_regions),
        phases=draw(
            st.builds(
                PhasePolicy,
                warmup_steps=STEPS,
                windows=st.none() | st.tuples(st.tuples(st.integers(0, 10), st.none() | st.integers(11, 100))),
                recalibration_points=st.lists(STEPS, max_size=3).map(tuple),
                learning_rate_factor=st.floats(1, 1e6, exclude_min=True) | st.just(2),
            )
        ),
        provenance=Provenance(
            workload=draw(TEXTS),
            date=draw(st.none() | st.dates()),
            seeds=tuple(draw(st.lists(st.integers(), max_size=3))),
            runs=tuple(draw(st.lists(st.builds(Run, policy=PATTERNS, seed=st.integers(), metric=FINITE), max_size=2))),
            statistics={region.name: {"cosine": draw(FINITE)} for region in given_regions},
            versions=draw(st.dictionaries(NAMES, TEXTS, max_size=2)),
            notes=draw(TEXTS),
        ),
    )


@settings(max_examples=60)
@given(profiles(), st.sampled_from(SYNTAXES))
def test_a_profile_reads_as_it_was_written(profile, syntax):
    text = dumps(profile, syntax)
    again = loads(text, syntax)
    assert again == profile
    assert again.hash == profile.hash
    assert dumps(again, syntax) == text
    assert loads(dumps(again, "json"), "json") == again


@settings(max_examples=400)
@given(st.data(), st.sampled_from(SYNTAXES))
def test_changed_bytes_are_a_profile_or_a_refusal(data, syntax):
    text = bytearray(EXAMPLE.encode() if syntax == "yaml" else dumps(loads(EXAMPLE), "json").encode())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 30)))
        with_what = data.draw(
            st.binary(max_size=6)
            | st.sampled_from(
                [b"&a ", b"*a", b"!!int ", b"1e999", b"-", b"null", b": ", b"{", b"]", b'"', b"\n  ", b"true"]
            )
            | st.just(bytes(text[begin:end]) * 2)
        )
        text[begin:end] = with_what
    try:
        read = loads(bytes(text), syntax)
    except ProfileError:
        return
    assert loads(dumps(read)) == read


def test_the_hash_is_of_the_meaning_not_of_the_spelling():
    base = loads(SHORT + "world: [4, 2]\nphases: {learning_rate_factor: 2}")
    same = loads('{"name": "short", "world": {"sizes": [2, 4]}, "regions": [], "schema_version": 1}', "json")
    assert base == same
    assert base.hash == same.hash
    assert loads(SHORT + "provenance: {runs: [{policy: a, seed: 1, metric: -0.0}]}").hash == (
        loads(SHORT + "provenance: {runs: [{policy: a, seed: 1, metric: 0}]}").hash
    )
    assert loads(SHORT + "phases: {warmup_steps: 101}").hash != loads(SHORT).hash


def test_a_profile_made_in_code_has_the_hash_of_its_file():
    made = Profile(schema_version=1, name="made", phases=PhasePolicy(learning_rate_factor=3, windows=[(0, 5)]))
    assert loads(dumps(made)).hash == made.hash
    with pytest.raises(ValueError, match="valid integer"):  # a policy made in code is held to the schema too
        Profile(schema_version=1, name="made", phases=PhasePolicy(warmup_steps=1.5))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_with_another_hash_is_refused_with_both(tmp_path, suffix):
    path = tmp_path / f"profile{suffix}"
    made = loads(EXAMPLE)
    save(made, path)
    assert load(path) == made
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    changed = path.read_text().replace("SGD 0.1", "SGD 0.2")
    path.write_text(changed)
    with pytest.raises(ProfileError) as caught:
        load(path)
    told = re.findall(r"sha256:[0-9a-f]{64}", str(caught.value))
    assert told[0] == made.hash
    path.write_text(re.sub(r'(,\n  "hash".*|hash: .*)\n', "\n", changed))
    assert load(path).hash == told[1]


def test_a_profile_that_nobody_could_load_is_not_written(tmp_path):
    many = {f"p{index}": "float32[1]" for index in range(MAX_NODES // 2)}
    with pytest.raises(ProfileError, match=f"more than {MAX_NODES} keys"):
        save(Profile(schema_version=1, name="large", model=ModelSection(parameters=many)), tmp_path / "large.yaml")
    assert not list(tmp_path.iterdir())


def test_a_fingerprint_goes_through_the_file():
    made = Profile(schema_version=1, name="net", model=ModelSection.of(fingerprint(ResNet(4))))
    assert loads(dumps(made)).model.fingerprint() == fingerprint(ResNet(4))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a profile is a mapping of keys to values, not []"),
        ("", "a profile is a mapping of keys to values, not None"),
        ("name: x", "schema_version: missing; this version of the package reads 1"),
        ("schema_version: 2\nname: x", "schema_version: 2; this version of the package reads 1"),
        ("schema_version: true\nname: x", "schema_version: True; this"),
        ("schema_version: 1", "name: is missing"),
        (SHORT + "names: y", "names: 'y': no such key; did you mean 'name'?"),
        (SHORT + "name: y", "line 3, column 1: key 'name' is given twice"),
        (SHORT + "regions: [{name: a, marginn: 3}]", "regions[0].marginn: 3: no such key; did you mean 'margin'?"),
        (SHORT + "phases: {warmup: 3}", "phases.warmup: 3: no such key; did you mean 'warmup_steps'?"),
        (SHORT + "regions: [{name: a}, {name: b, error_feedback: {clip: -1}}]", "regions[1].error_feedback.clip: -1: "),
        (SHORT + "regions: [{name: a, margin: 1}]", "regions[0]: region 'a': margin and unit scale are for majority"),
        (SHORT + "regions: [{name: a, gate: 1}]", "regions[0]: region 'a': a gate is for the ternary route"),
        (SHORT + "regions: [{name: a, encoding: int4}]", "regions[0].encoding: 'int4': should be 'fp32', 'binary' or"),
        (SHORT + "regions: [{name: a, patterns: []}]", "regions[0]: region 'a': no patterns"),
        (SHORT + "regions: [{name: a, patterns: a}]", "regions[0].patterns: 'a': should be a valid array"),
        (SHORT + "regions: [{name: a}, {name: a}]", "region 'a' is declared twice"),
        (SHORT + "regions: [{name: 'a b'}]", "regions[0].name: 'a b': String should match pattern"),
        (SHORT + "phases: {warmup_steps: 1.5}", "phases.warmup_steps: 1.5: should be a valid integer"),
        (SHORT + "phases: {warmup_steps: '1'}", "phases.warmup_steps: '1': should be a valid integer"),
        (SHORT + "phases: {warmup_steps: true}", "phases.warmup_steps: True: should be a valid integer"),
        (SHORT + "phases: {windows: [[5, 5]]}", "phases: window 5 to 5 must"),
        (SHORT + "health: {clip: .5}", "clip must be above slack (1.0), but is 0.5"),
        (SHORT + "health: {clip: .inf}", "health.clip: inf is not a finite number"),
        (SHORT + "recovery: {trial_steps: 0}", "recovery: "),
        (SHORT + "admission: {occupancy: {high: .5}}", "admission.occupancy.low: is missing"),
        (SHORT + "target: {tolerance_points: -1}", "target.tolerance_points: -1: should be greater than or equal to 0"),
        (SHORT + "world: [0, 2]", "world.sizes[0]: 0: should be greater than or equal to 1"),
        (SHORT + "world: [65]", "world.sizes[0]: 65: should be less than or equal to 64"),
        (SHORT + "world: []", "world: no world size at all"),
        (SHORT + "world: {min: 4, max: 2}", "world: min 4 is larger than max 2"),
        (SHORT + "world: {min: 4, sizes: [2]}", "world: give sizes, or min and max, not both"),
        (SHORT + "world: 4", "world: 4: should be an object"),
        (SHORT + "model: {parameters: {a.b: float32}}", "model: a.b: 'float32' is no dtype and shape"),
        (SHORT + 'model: {parameters: {a: "float32[]"}, tied: [[a, b]]}', "model: tied name 'b' is no parameter"),
        (SHORT + 'model: {parameters: {a: "float32[]"}, digest: x}', "model: digest is 'x', but the parameters listed"),
        (SHORT + "provenance: {date: 2026-02-30}", "provenance.date: '2026-02-30': should be a valid date"),
        (SHORT + "provenance: {statistics: {body: {a: 1}}}", "'body' is no region of this profile"),
        (SHORT + "hash: 3", "hash: the file says 3, its content has sha256:"),
        (SHORT + "provenance: {notes: &x y}", "line 3, column 21: anchors and aliases are not allowed"),
        (SHORT + 'provenance: {notes: "\\uD800"}', "the document: "),
        (SHORT + "regions: [1, 2, 3, 4, 5, 6, 7]", "profile: and 2 more"),
    ],
)
def test_a_bad_profile_is_refused_by_key_value_and_rule(text, message):
    told = refusal(text)
    assert message in told
    assert all(line.startswith("profile: ") for line in told.splitlines())


def test_a_long_value_is_not_repeated_in_full():
    assert len(refusal(SHORT + f"health: {{clip: {'x' * 10_000}}}")) < 300
    assert len(refusal(SHORT + f"{'x' * 900}: 1")) < 300


def test_files_that_are_none(tmp_path):
    with pytest.raises(ProfileError, match="not a regular file"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ProfileError, match=r"large\.yaml: larger than"):
        load(tmp_path / "large.yaml")


# ---- command line ----------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text(EXAMPLE)
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_show(example):
    status, out, _ = run("show", example)
    made = loads(EXAMPLE)
    assert status == 0
    assert made.hash in out
    assert all(region.name in out for region in made.regions)
    assert run("show", "--full", example)[1] == dumps(made)
    assert loads(run("show", "--json", example)[1], "json") == made
    assert json.loads(run("show", "--json", example)[1])["hash"] == made.hash


def test_check(example, tmp_path):
    assert run("check", example, "--world", 4)[0] == 0
    status, _, errors = run("check", example, "--world", 3)
    assert status == 1
    assert "not for 3" in errors
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema_version: 1")
    status, out, errors = run("check", bad, example, tmp_path / "none.yaml")
    assert status == 1
    assert out.count("good") == 1
    assert f"{bad}: name: is missing" in errors
    assert "none.yaml" in errors


def test_hash(example, tmp_path):
    status, line, _ = run("hash", example)
    assert status == 0
    example.write_text(EXAMPLE + line)
    assert run("check", example)[0] == 0
    assert run("hash", tmp_path / "none.yaml")[0] == 1


def test_keys():
    assert run("keys")[1] == key_table()


def test_dates_are_dates():
    assert loads(SHORT + "provenance: {date: 2026-01-31}").provenance.date == datetime.date(2026, 1, 31)
