"""Profiles bound to live models: who gets which region, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import Route, attach
from neuron_fabric.runtime.binding import BindingError, bind, plan_for
from neuron_fabric.runtime.fingerprint import fingerprint
from neuron_fabric.runtime.profile import FeedbackSpec, ModelSection, Profile, RegionSpec, WorldSizes
from neuron_fabric.runtime.workloads.digits import ResNet

HEAD = RegionSpec(name="head", patterns=("head.*",), encoding="fp32")
BODY = RegionSpec(name="body")


class Translator(nn.Module):
    """A transformer whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.output = nn.Linear(8, 20, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.layer(self.embedding(tokens)))


def profile(*regions, **sections):
    return Profile(schema_version=1, name="test", regions=regions, **sections)


def names(bound):
    return {name: None if region is None else region.name for name, region in bound.items()}


def compiled(module):
    return torch.compile(module, backend="eager")


def test_each_parameter_has_the_first_region_that_matches():
    norms = RegionSpec(name="norms", module_types=("BatchNorm2d",), encoding="fp32")
    late = RegionSpec(name="late", patterns=("stages.2.*", "stages.1.*"), result_format="majority", margin=1)
    bound = bind(profile(HEAD, norms, late, BODY), ResNet(4), 4)
    for name, region in names(bound).items():
        if "norm" in name or name.startswith("head") or "shortcut.1" in name:
            assert region is None, name
        else:
            assert region == ("late" if name.startswith(("stages.1", "stages.2")) else "body"), name
    assert list(bound) == [name for name, _ in ResNet(4).named_parameters()]
    assert bound["stages.1.conv1.weight"].margin == 1


@pytest.mark.parametrize(
    "kind", ["Conv2d", "torch.nn.Conv2d", "torch.nn.modules.conv.Conv2d", "_ConvNd", "torch.nn.modules.conv._ConvNd"]
)
def test_module_types_by_name_path_and_base_class(kind):
    bound = bind(profile(RegionSpec(name="convolutions", module_types=(kind,))), ResNet(4), 2)
    owned = {f"{name}.weight" for name, module in ResNet(4).named_modules() if isinstance(module, nn.Conv2d)}
    assert {name for name, region in bound.items() if region is not None} == owned


def test_patterns_narrow_module_types():
    bound = bind(profile(RegionSpec(name="some", patterns=("stages.0.*",), module_types=("Conv2d",))), ResNet(4), 2)
    assert [n for n, region in bound.items() if region] == ["stages.0.conv1.weight", "stages.0.conv2.weight"]


def test_a_transformer_by_module_types():
    attention = RegionSpec(name="attention", module_types=("MultiheadAttention",), max_ndim=2)
    linear = RegionSpec(name="linear", patterns=("layer.*",), module_types=("Linear",))
    bound = names(bind(profile(attention, linear), Translator(), 2))
    assert bound["layer.self_attn.in_proj_weight"] == "attention"
    assert bound["layer.self_attn.out_proj.weight"] == "linear"  # of a class that inherits from Linear
    assert bound["layer.linear1.weight"] == "linear"
    assert bound["layer.norm1.weight"] is None


@pytest.mark.parametrize("pattern", ["embedding.*", "output.weight"])
def test_any_name_of_a_tied_weight_will_do(pattern):
    tied = RegionSpec(name="tied", patterns=(pattern,), embeddings=True)
    for model in (Translator(), compiled(nn.DataParallel(Translator()))):
        bound = names(bind(profile(tied, BODY), model, 2))
        assert bound["embedding.weight"] == "tied"
        assert "output.weight" not in bound
    # It is an embedding under its other name too.
    bound = names(bind(profile(RegionSpec(name="tied", patterns=(pattern,)), BODY), Translator(), 2))
    assert bound["embedding.weight"] is None


def test_name_and_type_of_a_tied_weight_must_be_of_one_place():
    mixed = RegionSpec(name="mixed", patterns=("output.*",), module_types=("Embedding",), embeddings=True)
    with pytest.raises(BindingError, match=r"pattern 'output\.\*' matches no parameter of a module of type Embedding"):
        bind(profile(mixed), Translator(), 2)


def test_memory_format_makes_no_difference():
    model = ResNet(4).to(memory_format=torch.channels_last)
    assert model.stages[0].conv1.weight.stride() != ResNet(4).stages[0].conv1.weight.stride()
    assert bind(profile(HEAD, BODY), model, 2) == bind(profile(HEAD, BODY), ResNet(4), 2)


def test_wrappers_make_no_difference():
    made = profile(HEAD, BODY, model=ModelSection.of(fingerprint(ResNet(4))))
    plain = bind(made, ResNet(4), 2)
    partly = ResNet(4)
    partly.stages[1] = compiled(partly.stages[1])
    for model in (compiled(ResNet(4)), nn.DataParallel(compiled(ResNet(4))), compiled(nn.DataParallel(partly))):
        assert bind(made, model, 2) == plain


def test_a_region_of_frozen_parameters_is_in_no_bucket():
    model = ResNet(4)
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    made = profile(RegionSpec(name="stem", patterns=("stem.*",)), BODY, model=ModelSection.of(fingerprint(ResNet(4))))
    bound = bind(made, model, 2)
    assert "stem.weight" not in bound
    assert "stem" not in names(bound).values()


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (RegionSpec(name="lost", patterns=("head.*", "neck.*")), r"region 'lost': pattern 'neck\.\*' matches no param"),
        (RegionSpec(name="lost", module_types=("Conv2d", "Conv3d")), "module type 'Conv3d' matches no parameter"),
        (RegionSpec(name="lost", module_types=("os.system",)), r"matches no parameter of a module of type os\.system"),
        (RegionSpec(name="lost", max_ndim=0), "pattern '\\*' matches no parameter of at most 0 dimension"),
    ],
)
def test_what_matches_nothing_is_refused_unless_it_may_be_empty(region, message):
    with pytest.raises(BindingError, match=f"profile 'test': .*{message}"):
        bind(profile(region, BODY), ResNet(4), 2)
    empty = region.model_copy(update={"may_be_empty": True})
    assert set(names(bind(profile(empty, BODY), ResNet(4), 2)).values()) <= {"lost", "body"}


@pytest.mark.parametrize(
    ("world", "said"),
    [(WorldSizes(sizes=(4, 2)), "2, 4"), (WorldSizes(min=4, max=16), "4 to 16"), (WorldSizes(max=2), "1 to 2")],
)
def test_another_world_size_is_refused(world, said):
    with pytest.raises(BindingError, match=f"profile 'test' holds for {said} workers, not for 3"):
        bind(profile(BODY, world=world), ResNet(4), 3)
    assert bind(profile(BODY, world=world), ResNet(4), 4 if 4 in world else 2)


def test_another_model_is_refused_with_the_first_difference():
    made = profile(BODY, model=ModelSection.of(fingerprint(ResNet(4))))
    with pytest.raises(
        BindingError, match=r"for another model: profile has head\.weight \(10, 16\), model has \(10, 32"
    ):
        bind(made, ResNet(8), 2)
    with pytest.raises(BindingError, match=r"model has embedding\.weight \(20, 8\) float32, profile has no such"):
        plan_for(made, Translator(), 2)


def test_low_bit_takes_float32_only():
    with pytest.raises(BindingError, match=r"parameter 'stem\.weight' is torch\.float64; the low-bit route takes"):
        bind(profile(HEAD, BODY), ResNet(4).double(), 2)
    head = RegionSpec(name="all", encoding="fp32")
    assert set(bind(profile(head), ResNet(4).double(), 2).values()) == {None}


def test_ternary_regions_bind():
    bound = bind(profile(HEAD, RegionSpec(name="body", encoding="ternary", gate=0.5)), ResNet(4), 2)
    assert bound["stem.weight"].route is Route.TERNARY
    assert bound["stem.weight"].gate == 0.5


# ---- on real ranks ---------------------------------------------------------------------------------------------------


def check_a_bound_profile_trains(rank, world):
    """Several routes and formats in one bucket, some parameters frozen, the model compiled and channels-last."""
    torch.manual_seed(1)
    model = ResNet(4).to(memory_format=torch.channels_last)
    made = profile(
        HEAD,
        RegionSpec(name="one_dimensional", max_ndim=1, encoding="fp32"),
        RegionSpec(name="first", patterns=("stages.0.*",), result_format="majority"),
        RegionSpec(name="stem", patterns=("stem.*",)),
        RegionSpec(name="last", patterns=("stages.2.*",), module_types=("Conv2d",), encoding="ternary"),
        RegionSpec(name="convolutions", module_types=("Conv2d",), error_feedback=FeedbackSpec()),
        model=ModelSection.of(fingerprint(model)),
        world=WorldSizes(sizes=(world,)),
    )
    model.stem.requires_grad_(False)
    ddp = DistributedDataParallel(compiled(model))
    state = attach(ddp, plan_for(made, ddp, world))
    assert state.regions == bind(made, ddp, world)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(world * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 1, 8, 8, generator=generator)).square().sum().backward()
        optimizer.step()
    layouts = state._layouts.values()
    assert any(len(layout.sections) > 1 and layout.fp32_runs for layout in layouts)
    assert set(state.residuals) == {n for n, region in state.regions.items() if region and region.name[:4] == "conv"}
    assert model.stem.weight.grad is None
    for name, parameter in model.named_parameters():
        everybody = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(everybody, parameter.detach())
        assert all(torch.equal(everybody[0], other) for other in everybody), name
    state.close()


@pytest.mark.distributed
def test_a_bound_profile_trains(run_ranks):
    run_ranks(__file__, "check_a_bound_profile_trains", 2)
