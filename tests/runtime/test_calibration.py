"""Calibration: what is measured is the definition, what is proposed follows from it, and trials decide."""

from __future__ import annotations

import fnmatch
import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.model import codec
from neuron_fabric.runtime.binding import bind
from neuron_fabric.runtime.calibration import (
    Calibrator,
    Outcome,
    ProfileOptions,
    Records,
    Thresholds,
    assess,
    attach_calibrator,
    build_profile,
    halve,
    ladder,
    load_records,
    save_records,
)
from neuron_fabric.runtime.calibration.building import replay
from neuron_fabric.runtime.calibration.proposals import Kind, patterns_for
from neuron_fabric.runtime.calibration.recorder import ENCODINGS
from neuron_fabric.runtime.calibration.records import RecordsError
from neuron_fabric.runtime.calibration.report import write_calibration
from neuron_fabric.runtime.calibration.search import rungs_for
from neuron_fabric.runtime.calibration.sensitivity import health_changes, threshold_changes
from neuron_fabric.runtime.fingerprint import fingerprint
from neuron_fabric.runtime.health import HealthPolicy
from neuron_fabric.runtime.plan import DEFAULT_GATE
from neuron_fabric.runtime.profile import ModelSection, dumps, loads

WORLD = 4

# ---- what is measured ------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


class Given(nn.Module):
    """The gradient is what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 5))
        self.rare = nn.Parameter(torch.zeros(70))

    def forward(self, weight, rare):
        return (self.weight * weight).sum() + (self.rare * rare).sum()


def trained(rank, *, calibrated, **options):
    torch.manual_seed(3)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    calibrator = attach_calibrator(ddp, **options) if calibrated else None
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(7):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 20, generator=generator)).square().mean()
        if calibrator is not None:
            calibrator.observe(loss.item())
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]), calibrator


def check_training_is_plain_ddp(rank, world):
    plain, _ = trained(rank, calibrated=False)
    recorded, calibrator = trained(rank, calibrated=True, interval_steps=3)
    assert torch.equal(plain, recorded)
    records = calibrator.records(workload="net", seed=3)
    assert [(each.first, each.end) for each in records.intervals] == [(0, 3), (3, 6), (6, 7)]
    assert records.elements == {"0.weight": 600, "0.bias": 30, "2.weight": 150, "2.bias": 5}
    assert len(records.loss) == 7
    assert all(loss > 0 for loss in records.loss)
    text = torch.from_numpy(np.frombuffer(records.model_dump_json().encode(), np.uint8).copy())
    first = text.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, text)  # all ranks have the same


def check_bursts(rank, world):
    _, calibrator = trained(rank, calibrated=True, interval_steps=4, every=4, burst=2)
    records = calibrator.records()
    assert [each.parameters["0.weight"].steps for each in records.intervals] == [2, 2]  # steps 0, 1 and 4, 5
    line = records.unanimity["0.weight"]
    assert [share is not None for share in line] == [True, True, False, False, True, True]


def gradients(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    weight = torch.randn(40, 5, generator=generator)
    rare = torch.randn(70, generator=generator)
    rare[rare.abs() < 1.2] = 0.0
    return weight, rare


def reference(world, steps):
    """Cosines of every encoding by the plain formulas of the model's codec, mean over steps."""
    found = {}
    residuals = {}
    for step in range(steps):
        everybody = [gradients(rank, step) for rank in range(world)]
        for index, name in enumerate(("weight", "rare")):
            parts = [each[index].reshape(-1).numpy() for each in everybody]
            mean = np.mean(parts, axis=0, dtype=np.float64)
            for how in ENCODINGS:
                sent, l1, count, taken = [], [], [], []
                for rank, part in enumerate(parts):
                    residual = residuals.get((how.name, name, rank), np.zeros_like(part))
                    if how.route.value == "binary":
                        coded = codec.encode_binary(part, residual, parity=rank + step)
                        bits = np.unpackbits(coded.planes[0], count=part.size, bitorder="little").astype(np.int64)
                        vote = 1 - 2 * bits
                    else:
                        coded = codec.encode_ternary(part, residual, gate=DEFAULT_GATE)
                        plus, minus = (
                            np.unpackbits(plane, count=part.size, bitorder="little").astype(np.int64)
                            for plane in coded.planes
                        )
                        vote = plus - minus
                    sent.append(vote)
                    l1.append(coded.l1)
                    count.append(coded.sent)
                    taken.append(part + residual)
                scale = codec.common_scale(l1, count)
                balance = np.sum(sent, axis=0)
                majority = how.result_format.value == "majority"
                votes, divisor = (codec.majority(balance), 1) if majority else (balance, world)
                decoded = codec.decode(votes, scale, divisor).astype(np.float64)
                for rank, (p, vote) in enumerate(zip(taken, sent, strict=True)):
                    if how.error_feedback is not None:
                        left = codec.residual_after(p, vote, scale, clip=how.error_feedback.clip)
                        residuals[how.name, name, rank] = left
                cosine = decoded @ mean / np.linalg.norm(decoded) / np.linalg.norm(mean)
                found.setdefault((name, how.name), []).append(cosine)
    return {key: np.mean(values) for key, values in found.items()}


def check_cosines_are_the_definition(rank, world):
    ddp = DistributedDataParallel(Given())
    calibrator = attach_calibrator(ddp, interval_steps=100)
    for step in range(6):
        ddp.zero_grad()
        ddp(*gradients(rank, step)).backward()
    (interval,) = calibrator.records().intervals
    for (name, how), cosine in reference(world, 6).items():
        got = interval.parameters[name].encodings[how].cosine
        assert math.isclose(got, cosine, abs_tol=1e-5), (name, how, got, cosine)
    assert interval.parameters["rare"].zeros > 0.5
    assert interval.parameters["weight"].zeros == 0


def check_not_finite_is_left_out(rank, world):
    ddp = DistributedDataParallel(Given())
    calibrator = attach_calibrator(ddp)
    for step in range(3):
        weight, rare = gradients(rank, step)
        if step == 1 and rank == world - 1:
            weight[0, 0] = math.nan
        ddp.zero_grad()
        ddp(weight, rare).backward()
    (interval,) = calibrator.records().intervals
    assert interval.parameters["weight"].steps == 2


def check_refusals(rank, world):
    ddp = DistributedDataParallel(Net())
    for wrong in ({"interval_steps": 0}, {"every": 0}, {"encodings": ENCODINGS[1:3][::-1]}):
        with pytest.raises(ValueError, match=r"at least 1|must be binary"):
            Calibrator(ddp, **wrong)
    with pytest.raises(ValueError, match="nothing was measured"):
        Calibrator(ddp).records()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_calibrated_run_is_bitwise_plain_ddp_and_all_ranks_have_the_same_records(run_ranks, world):
    run_ranks(__file__, "check_training_is_plain_ddp", world)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_cosines_are_those_of_the_definition(run_ranks, world):
    run_ranks(__file__, "check_cosines_are_the_definition", world)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_bursts", "check_not_finite_is_left_out", "check_refusals"])
def test_the_calibrator(run_ranks, check):
    run_ranks(__file__, check, 2)


# ---- what is proposed ------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 40)
        self.body = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 60))
        self.head = nn.Linear(60, 10)


COSINES = {"binary": 0.6, "binary-majority": 0.55, "binary-feedback": 0.8, "ternary": 0.7}


def made_records(*, cosines=None, zeros=None, intervals=3, unanimity=0.13, loss=None):
    """Records of a classifier whose head is sensitive and whose table is sparse."""
    model = Classifier()
    cosines = {"head.weight": {"binary": 0.1}, **(cosines or {})}
    zeros = {"table.weight": 0.9, **(zeros or {})}
    elements = {name: p.numel() for name, p in model.named_parameters()}

    def parameter(name):
        mine = {**COSINES, **cosines.get(name, {})}
        return {
            "steps": 20,
            "norm": 1.0,
            "norm_deviation": 0.1,
            "noise": 3.0,
            "density": 0.7,
            "zeros": zeros.get(name, 0.0),
            "margin": 0.4,
            "ties": 0.3,
            "unanimity": unanimity,
            "sign_error": 0.25,
            "encodings": {
                how: {"cosine": c, "lowest_cosine": c - 0.1, "averaged_cosine": c, "error": 0.5, "length": 0.7}
                for how, c in mine.items()
            },
        }

    steps = 20 * intervals
    return Records(
        workload="made",
        seed=1,
        world=WORLD,
        steps=steps,
        model=ModelSection.of(fingerprint(model)),
        elements=elements,
        embeddings=("table.weight",),
        intervals=tuple(
            {"first": 20 * k, "end": 20 * k + 20, "parameters": {name: parameter(name) for name in elements}}
            for k in range(intervals)
        ),
        loss=tuple(loss or [1.0 - 0.001 * step for step in range(steps)]),
        unanimity=dict.fromkeys(elements, (unanimity,) * steps),
    )


def test_the_head_and_the_table_are_found():
    kinds = {each.name: each.kind for each in assess(made_records()).parameters}
    assert kinds == {
        "table.weight": Kind.SPARSE,
        "body.0.weight": Kind.DENSE,
        "body.0.bias": Kind.SMALL,
        "body.2.weight": Kind.DENSE,
        "body.2.bias": Kind.SMALL,
        "head.weight": Kind.SENSITIVE,
        "head.bias": Kind.SMALL,
    }


def test_one_bad_interval_is_enough_and_warm_up_can_be_longer():
    records = made_records()
    document = json.loads(records.model_dump_json())
    worst = document["intervals"][2]["parameters"]["body.2.weight"]["encodings"]["binary"]
    worst["averaged_cosine"] = 0.2
    kinds = {each.name: each.kind for each in assess(Records.model_validate_json(json.dumps(document))).parameters}
    assert kinds["body.2.weight"] is Kind.SENSITIVE
    assert {proposal.warmup_steps for proposal in ladder(assess(records))} == {20}
    long = json.loads(made_records(intervals=6).model_dump_json())
    for interval in long["intervals"][:3]:
        for each in interval["parameters"].values():
            each["encodings"]["binary"]["averaged_cosine"] = 0.38
    proposals = ladder(assess(Records.model_validate_json(json.dumps(long))))
    assert {p.name: p.warmup_steps for p in proposals}["dense-binary"] == 60
    for interval in long["intervals"]:  # never good: waiting is no cure
        for each in interval["parameters"].values():
            each["encodings"]["binary"]["averaged_cosine"] = 0.38
    proposals = ladder(assess(Records.model_validate_json(json.dumps(long))))
    assert {p.name: p.warmup_steps for p in proposals}["dense-binary"] == 20


def test_proposals_are_ordered_by_bits_and_differ():
    proposals = ladder(assess(made_records()))
    assert [each.cost for each in proposals] == sorted(each.cost for each in proposals)
    named = {each.name: each for each in proposals}
    assert set(named["dense-binary"].voting) == {"body.0.weight", "body.2.weight"}
    assert set(named["all-binary"].voting) == {"body.0.weight", "body.2.weight", "head.weight"}
    assert set(named["fewer-binary"].voting) < set(named["dense-binary"].voting)
    assert all(how.error_feedback is not None for how in named["dense-binary-feedback"].voting.values())
    assert len({tuple(p.voting.items()) for p in proposals}) == len(proposals)
    assert len(ladder(assess(made_records()), most=2)) == 2
    total = sum(made_records().elements.values())
    voting = sum(made_records().elements[name] for name in named["dense-binary"].voting)
    assert named["dense-binary"].low_bit_share == voting / total
    assert math.isclose(named["dense-binary"].bits, (voting * (1 + 3) + (total - voting) * 64) / total)


def test_nothing_that_may_vote_is_no_proposal():
    low = {name: {"binary": 0.0} for name in ("body.0.weight", "body.2.weight", "head.weight")}
    assert all(not each.name.startswith("dense") for each in ladder(assess(made_records(cosines=low))))
    sparse = dict.fromkeys(("body.0.weight", "body.2.weight", "head.weight"), 0.5)
    assert ladder(assess(made_records(zeros=sparse))) == ()


def test_a_profile_binds_to_the_model_and_says_where_it_comes_from():
    assessment = assess(made_records())
    options = ProfileOptions("made", seeds=(1, 2, 3), workload="made up")
    outcomes = [Outcome("fp32", 1, 60, 90.0, 0.1, 0.0), Outcome("dense-binary", 1, 60, math.nan, math.nan, 1.0)]
    for proposal in ladder(assessment):
        profile = build_profile(proposal, assessment, options, outcomes)
        again = loads(dumps(profile))
        assert again == profile
        bound = bind(again, Classifier(), WORLD)
        assert {name for name, region in bound.items() if region is not None} == set(proposal.voting)
        for name, region in bound.items():
            if region is not None:
                assert region.name == proposal.region_name(name)
        assert [run.metric for run in profile.provenance.runs] == [90.0]  # NaN is no result
        assert profile.provenance.statistics["sparse"]["zeros"] == 0.9
    nothing = build_profile(None, assessment, options)
    assert not any(bind(nothing, Classifier(), WORLD).values())


def test_health_thresholds_are_raised_until_the_recorded_run_is_quiet():
    quiet = assess(made_records(intervals=10))
    proposal = next(each for each in ladder(quiet) if each.name == "dense-binary")
    assert build_profile(proposal, quiet, ProfileOptions("made")).health.threshold == HealthPolicy().threshold
    loss = [1.0 + 0.3 * (step >= 100) + 0.005 * (step % 3) for step in range(200)]
    jumpy = assess(made_records(intervals=10, loss=loss))
    proposal = next(each for each in ladder(jumpy) if each.name == "dense-binary")
    assert replay(HealthPolicy(), proposal, jumpy.records)
    health = build_profile(proposal, jumpy, ProfileOptions("made")).health
    assert health.threshold > HealthPolicy().threshold
    assert not replay(health, proposal, jumpy.records)
    assert health.probe_bound == 0.3  # half of .6


def test_a_loss_that_lies_still_before_it_moves_is_no_alarm():
    by_default = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=300)
        loss = [float(0.69 * 2 ** (0.002 * noise[step] if step < 60 else 0.3 * noise[step])) for step in range(300)]
        assessment = assess(made_records(intervals=15, loss=loss))
        proposal = next(each for each in ladder(assessment) if each.name == "dense-binary")
        by_default += bool(replay(HealthPolicy(), proposal, assessment.records))
        health = build_profile(proposal, assessment, ProfileOptions("made")).health
        assert 0.1 < health.loss_min_deviation < 0.4
        assert health.threshold == HealthPolicy().threshold
        assert not replay(health, proposal, assessment.records)
    assert by_default > 0


def test_every_threshold_is_varied_both_ways():
    assessment = assess(made_records(cosines={"body.0.weight": {"binary": 0.4}}))
    changes = threshold_changes(assessment)
    assert len(changes) == 2 * len(Thresholds.__dataclass_fields__)
    moved = {change.threshold: change.moved for change in changes if change.moved}
    assert moved == {"least_cosine +20 %": (("body.0.weight", "dense", "sensitive"),)}
    proposal = ladder(assessment)[0]
    profile = build_profile(proposal, assessment, ProfileOptions("made"))
    labels = [change.threshold for change in health_changes(proposal, profile.health)]
    assert "threshold -20 %" in labels
    assert "slack +20 %" in labels


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "c[0]", "d*", "module"]), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(names=NAMES, data=st.data())
def test_patterns_match_what_they_should_and_nothing_else(names, data):
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    patterns = patterns_for(wanted, names)
    matched = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    assert matched == set(wanted)
    assert len(patterns) <= len(wanted)
    for pattern in patterns:  # as a profile wants it: none that matches nothing
        assert any(fnmatch.fnmatchcase(name, pattern) for name in names)


# ---- records as a file -----------------------------------------------------------------------------------------------


def test_records_come_back_from_their_file(tmp_path):
    records = made_records()
    save_records(records, tmp_path / "records.json")
    assert load_records(tmp_path / "records.json") == records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(world=65), "world"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(intervals=[]), "no interval was recorded"),
        (lambda d: d["intervals"][0]["parameters"]["head.bias"].update(zeros=1.5), "zeros"),
        (
            lambda d: d["intervals"][0]["parameters"].update(other=d["intervals"][0]["parameters"]["head.bias"]),
            "'other'",
        ),
        (lambda d: d["elements"].pop("head.bias"), "'head.bias' is not among elements"),
        (lambda d: d.update(steps="60"), "steps"),
    ],
)
def test_records_that_are_wrong_are_refused_by_name(tmp_path, change, message):
    document = json.loads(made_records().model_dump_json())
    change(document)
    path = tmp_path / "records.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RecordsError, match=message):
        load_records(path)
    path.write_text("{")
    with pytest.raises(RecordsError, match="line 1"):
        load_records(path)
    with pytest.raises(RecordsError, match="regular file"):
        load_records(tmp_path)


# ---- trials ----------------------------------------------------------------------------------------------------------


def runner(true_deficits, calls):
    def run(proposal, seed, steps):
        calls.append((None if proposal is None else proposal.name, seed, steps))
        name = "fp32" if proposal is None else proposal.name
        score = 90.0 + 0.1 * seed - true_deficits.get(name, 0.0)
        return Outcome(name, seed, steps, score, 0.1, 0.9)

    return run


def test_the_cheapest_within_the_tolerance_wins_and_all_of_a_rung_are_paired():
    proposals = ladder(assess(made_records()))
    calls = []
    deficits = {each.name: 3.0 for each in proposals} | {"dense-binary": 0.3, "dense-ternary": -0.2}
    search = halve(proposals, runner(deficits, calls), seeds=(4, 5, 6), steps=400, tolerance=0.5)
    assert search.winner.proposal.name == "dense-binary"
    assert math.isclose(search.winner.deficit, 0.3)
    assert [rung.steps for rung in search.rungs] == [100, 200, 400]
    assert [len(rung.candidates) for rung in search.rungs] == [8, 5, 4]  # half of them, and the most cautious one
    for rung in search.rungs:
        for each in rung.candidates:
            assert [outcome.seed for outcome in each.outcomes] == [4, 5, 6]
    assert len(calls) == len(search.outcomes) == 3 * (3 + 8 + 5 + 4)


def test_nothing_within_the_tolerance_is_no_winner_and_divergence_is_infinitely_bad():
    proposals = ladder(assess(made_records()))
    deficits = {each.name: 3.0 for each in proposals} | {proposals[0].name: math.nan}
    search = halve(proposals, runner(deficits, []), seeds=(1,), steps=400, tolerance=0.5)
    assert search.winner is None
    assert search.rungs[0].candidates[-1].proposal is proposals[0]
    assert search.rungs[0].candidates[-1].deficit == math.inf


def test_the_most_cautious_stays_to_the_end():
    proposals = ladder(assess(made_records()))
    cautious = min(proposals, key=lambda each: each.low_bit_share)
    deficits = {cautious.name: 0.4}  # the others are better, until the last rung
    search = halve(proposals, runner(deficits, []), seeds=(1,), steps=400, tolerance=0.5)
    assert cautious in [each.proposal for each in search.rungs[-1].candidates]


def test_searches_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        halve((), runner({}, []), seeds=(), steps=4, tolerance=0.5)
    with pytest.raises(ValueError, match="tolerance"):
        halve((), runner({}, []), seeds=(1,), steps=4, tolerance=math.nan)
    assert halve((), runner({}, []), seeds=(1,), steps=4, tolerance=0.5).winner is None
    assert rungs_for(1, 7) == [7]
    assert rungs_for(8, 2) == [1, 1, 2]


def test_a_report_has_its_pictures_and_tables(tmp_path):
    assessment = assess(made_records())
    proposals = ladder(assessment)
    search = halve(proposals, runner({}, []), seeds=(1, 2), steps=400, tolerance=0.5)
    chosen = search.winner.proposal
    profile = build_profile(chosen, assessment, ProfileOptions("made"), search.outcomes)
    files = write_calibration(profile, assessment, search, chosen, tmp_path / "out")
    assert {each.name for each in files} == {
        "profile.yaml",
        "records.json",
        "report.md",
        "cosines.png",
        "timeline.png",
        "trials.png",
    }
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"Chosen: **{chosen.name}**" in text
    assert "| head.weight | 600 | sensitive |" in text
    for picture in ("cosines", "timeline", "trials"):
        assert f"({picture}.png)" in text
    without = write_calibration(
        build_profile(None, assessment, ProfileOptions("made")), assessment, None, None, tmp_path
    )
    assert "Nothing was found" in (tmp_path / "report.md").read_text()
    assert tmp_path / "trials.png" not in without
