"""Names, ties and fingerprints of models under all sorts of wrappers."""

import hashlib
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from neuron_fabric.runtime.fingerprint import Fingerprint, ParameterSpec, fingerprint, walk_parameters
from neuron_fabric.runtime.workloads.digits import ResNet


class Sharded(nn.Module):
    """Holds its module as FSDP does."""

    def __init__(self, inner):
        super().__init__()
        self._fsdp_wrapped_module = inner


class WithLoss(nn.Module):
    """A wrapper as people write them."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner
        self.loss = nn.CrossEntropyLoss()
        self.register_buffer("seen", torch.zeros(()))


class Declared(nn.Module):
    """One that says so itself."""

    neuron_fabric_wraps = "net"

    def __init__(self, inner):
        super().__init__()
        self.net = inner


class Translator(nn.Module):
    """A transformer whose output layer is its embedding; ``early`` registers the output layer first."""

    def __init__(self, early=False, tie=True):
        super().__init__()
        if early:
            self.output = nn.Linear(8, 20, bias=False)
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        if not early:
            self.output = nn.Linear(8, 20, bias=False)
        if tie:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.layer(self.embedding(tokens)))


def compiled(module):
    # torch makes a function of a module that is compiled twice, which is no model any more.
    return module if hasattr(module, "_orig_mod") else torch.compile(module, backend="eager")


WRAPPERS = (nn.DataParallel, compiled, Sharded, checkpoint_wrapper, WithLoss, Declared)
MODEL = fingerprint(ResNet(4))


def test_names_are_those_of_the_model_in_its_order():
    model = ResNet(4)
    walked = walk_parameters(model)
    assert [(each.name, each.parameter) for each in walked] == list(model.named_parameters())
    owners = {each.name: type(each.owners[0]) for each in walked}
    assert owners["stages.1.conv1.weight"] is nn.Conv2d
    assert owners["norm.bias"] is nn.BatchNorm2d
    assert str(MODEL.parameters["stages.1.conv1.weight"]) == "float32[8, 4, 3, 3]"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_wrappers_change_nothing_in_any_order(depth):
    inner = ResNet(4)
    for stack in itertools.product(WRAPPERS, repeat=depth):
        model = inner
        for wrap in stack:
            model = wrap(model)
        assert fingerprint(model).digest == MODEL.digest, stack
        assert [each.name for each in walk_parameters(model)] == [name for name, _ in inner.named_parameters()], stack


def test_wrappers_within_the_model_change_nothing():
    model = ResNet(4)
    model.stages[0] = Sharded(checkpoint_wrapper(model.stages[0]))
    model.stages[1] = compiled(Sharded(model.stages[1]))
    model.stages[2].conv1 = Declared(compiled(model.stages[2].conv1))
    model.head = nn.DataParallel(model.head)
    assert fingerprint(compiled(nn.DataParallel(model))).digest == MODEL.digest


def test_a_compiled_model_that_has_run_is_the_same():
    model = compiled(ResNet(4))
    model(torch.zeros(2, 1, 8, 8)).sum().backward()
    assert fingerprint(model).digest == MODEL.digest


def test_a_submodule_called_module_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3, bias=False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3, bias=False)
            self.body = Holder()

    names = ["module.weight", "body.module.weight"]
    for model in (Net(), nn.DataParallel(Net()), WithLoss(Sharded(Net()))):
        assert [each.name for each in walk_parameters(model)] == names
    # On the outside, a class that holds nothing else is a wrapper, unless it says that it is none.
    assert [each.name for each in walk_parameters(Holder())] == ["weight"]
    Holder.neuron_fabric_wraps = None
    assert [each.name for each in walk_parameters(nn.DataParallel(Holder()))] == ["module.weight"]


def test_what_cannot_be_told_is_refused():
    mixed = Sharded(ResNet(4))
    mixed.extra = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"Sharded wraps its child '_fsdp_wrapped_module' and holds parameter 'extra\."
    ):
        fingerprint(nn.DataParallel(mixed))
    mixed = Declared(ResNet(4))
    mixed.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="Declared wraps its child 'net' and holds parameter 'temperature' beside it"):
        fingerprint(mixed)
    del mixed.net
    with pytest.raises(ValueError, match="says that it wraps 'net', but has no such child"):
        fingerprint(mixed)
    flat = Sharded(nn.Identity())
    flat._fsdp_wrapped_module._flat_param = nn.Parameter(torch.zeros(9))
    with pytest.raises(ValueError, match="use_orig_params=True"):
        fingerprint(flat)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet"):
        fingerprint(nn.Sequential(nn.LazyLinear(3)))


def test_tied_weights_have_all_their_names():
    model = Translator()
    tied = next(each for each in walk_parameters(compiled(model)) if len(each.names) > 1)
    assert tied.names == ("embedding.weight", "output.weight")
    assert tied.owners == (model.embedding, model.output)
    made = fingerprint(model)
    assert made.tied == (("embedding.weight", "output.weight"),)
    assert made.parameters["output.weight"] == made.parameters["embedding.weight"]
    assert len(made.parameters) == len(list(model.named_parameters(remove_duplicate=False)))


def test_a_module_that_is_used_twice_and_a_child_that_holds_its_parent():
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer), "c": layer})
    layer.add_module("up", model)
    assert fingerprint(model).tied == (("a.bias", "b.0.bias", "c.bias"), ("a.weight", "b.0.weight", "c.weight"))


def test_the_order_of_registration_does_not_matter():
    assert fingerprint(Translator(early=True)) == fingerprint(Translator())
    assert fingerprint(Translator(early=True)).digest == fingerprint(Translator()).digest
    assert fingerprint(Translator(tie=False)).digest != fingerprint(Translator()).digest


def test_what_training_changes_is_not_in_it():
    model = ResNet(4).to(memory_format=torch.channels_last)
    model.stem.weight.requires_grad_(False)
    assert fingerprint(model).digest == MODEL.digest


def test_the_digest_is_the_same_everywhere():
    parameters = {"b": ParameterSpec((), "float32"), "a": ParameterSpec((2, 3), "bfloat16")}
    text = b'{"parameters":{"a":"bfloat16[2, 3]","b":"float32[]"},"tied":[]}'
    assert Fingerprint(parameters).digest == "sha256:" + hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "head", nn.Linear(16, 11)), "profile has head.bias (10,), model has (11,)"),
        (lambda m: m.head.half(), "profile has head.bias in float32, model has it in float16"),
        (
            lambda m: setattr(m, "head", nn.Linear(16, 10, bias=False)),
            "profile has head.bias (10,) float32, model has no such parameter",
        ),
        (
            lambda m: setattr(m, "extra", nn.Linear(2, 3)),
            "model has extra.bias (3,) float32, profile has no such parameter",
        ),
        (
            lambda m: setattr(m.stages[0].conv2, "weight", m.stages[0].conv1.weight),
            "model ties stages.0.conv1.weight and stages.0.conv2.weight, profile does not",
        ),
    ],
)
def test_the_first_difference_in_words(change, words):
    model = ResNet(4)
    change(model)
    assert MODEL.difference(fingerprint(model)) == words
    assert MODEL.difference(fingerprint(ResNet(4))) is None


def test_specs_are_text_and_back():
    for spec in MODEL.parameters.values():
        assert ParameterSpec.parse(str(spec)) == spec
    assert ParameterSpec.parse("float8_e4m3fn[1,2]") == ParameterSpec((1, 2), "float8_e4m3fn")
    for wrong in ("", "float32", "float32[1", "float32[-1]", "float32[1,]", "F[1]", "float32[1]\n"):
        with pytest.raises(ValueError, match="no dtype and shape"):
            ParameterSpec.parse(wrong)


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ((("a", "x"),), "'x' is no parameter"),
        ((("a", "b"), ("b", "a")), "is tied twice"),
        ((("a",),), "two or more"),
        ((("a", "c"),), "of one shape"),
    ],
)
def test_ties_must_make_sense(tied, message):
    spec = ParameterSpec((2,), "float32")
    with pytest.raises(ValueError, match=message):
        Fingerprint({"a": spec, "b": spec, "c": ParameterSpec((3,), "float32")}, tied)
