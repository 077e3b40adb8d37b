"""Handwritten digits: 1,797 scanned 8x8 images inside scikit-learn, for a small ResNet.

Data: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits (the test part).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional

from neuron_fabric.runtime.workloads.resnet import ResNet, ResNetWorkload

__all__ = ["HEAD_PATTERNS", "Digits", "DigitsWorkload", "ResNet", "shifted"]

HEAD_PATTERNS = ("head.*",)
"""Names of the classifier head's parameters."""
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), float32 with zero mean and unit variance over the training set; labels int64."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls) -> Digits:
        """1,437 images to train on and 360 to test on, in the same split always, classes in proportion."""
        data = load_digits()
        split = train_test_split(
            data.images.astype("float32"), data.target, test_size=360, random_state=_SPLIT_SEED, stratify=data.target
        )
        train_images, test_images, train_labels, test_labels = (torch.as_tensor(part) for part in split)
        mean, deviation = train_images.mean(), train_images.std()
        return cls(
            ((train_images - mean) / deviation)[:, None],
            train_labels.long(),
            ((test_images - mean) / deviation)[:, None],
            test_labels.long(),
        )


def shifted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image moved by -1, 0 or +1 pixels in both directions, the border repeated."""
    n, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    rows = torch.randint(3, (n, 1, 1), generator=generator) + torch.arange(height)[:, None]
    columns = torch.randint(3, (n, 1, 1), generator=generator) + torch.arange(width)
    return padded[torch.arange(n)[:, None, None], 0, rows, columns][:, None]


@dataclass(frozen=True)
class DigitsWorkload(ResNetWorkload):
    """The ResNet on randomly shifted digits; parameters as of :class:`ResNetWorkload`, and ``data``."""

    name = "digits"

    data: Digits = field(default_factory=Digits.load, repr=False, compare=False)

    @property
    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels."""
        return self.data.train_images, self.data.train_labels

    @property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels."""
        return self.data.test_images, self.data.test_labels

    def batches(self, epoch: int, seed: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """As of all workloads, each image shifted."""
        shift = torch.Generator().manual_seed((1000 * seed + epoch) * world + rank)
        for images, labels in super().batches(epoch, seed, rank, world):
            yield shifted(images, shift), labels
