"""Handwritten digits: 1,797 scanned 8x8 images inside scikit-learn, and a small ResNet for them.

Data: Alpaydin and Kaynak 1998, UCI Optical Recognition of Handwritten Digits (the test part).
Model: the basic blocks of He et al. 2015 (arXiv 1512.03385), one per stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

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


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, three stages of one basic block (``width``, 2 and 4 times that), mean over the image, linear head."""

    def __init__(self, width: int = 16, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(
            _Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (n, classes)."""
        features = self.stages(functional.relu(self.norm(self.stem(x)))).mean((2, 3))
        logits: torch.Tensor = self.head(features)
        return logits


@dataclass(frozen=True)
class DigitsWorkload:
    """The ResNet on randomly shifted digits, by SGD with momentum and a cosine schedule.

    Parameters
    ----------
    width : int
        Channels of the first stage.
    batch : int
        Images per rank and step.
    epochs : int
    learning_rate, momentum, weight_decay : float
    data : Digits
    """

    name = "digits"
    metric = "accuracy"
    head = HEAD_PATTERNS

    width: int = 16
    batch: int = 8
    epochs: int = 6
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    data: Digits = field(default_factory=Digits.load, repr=False, compare=False)

    def model(self) -> nn.Module:
        """A :class:`ResNet`."""
        return ResNet(self.width)

    def optimizer(self, model: nn.Module, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """SGD; the rate falls to 0 along half a cosine."""
        optimizer = SGD(model.parameters(), self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return optimizer, CosineAnnealingLR(optimizer, total_steps)

    def steps_per_epoch(self, world: int) -> int:
        """What is left over is not seen in that epoch."""
        per_step = self.batch * world
        steps = len(self.data.train_labels) // per_step
        if not steps:
            raise ValueError(f"{per_step} images a step are more than the {len(self.data.train_labels)} there are")
        return steps

    def batches(self, epoch: int, seed: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Shifted images and labels: one order for all ranks, of which each takes its part."""
        images, labels = self.data.train_images, self.data.train_labels
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        shift = torch.Generator().manual_seed((1000 * seed + epoch) * world + rank)
        for step in range(self.steps_per_epoch(world)):
            mine = order[(step * world + rank) * self.batch :][: self.batch]
            yield shifted(images[mine], shift), labels[mine]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Cross entropy."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy on the test digits, per cent."""
        model.eval()
        return 100.0 * float((model(self.data.test_images).argmax(1) == self.data.test_labels).float().mean())
