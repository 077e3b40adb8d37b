"""A small ResNet for small pictures, and what its workloads have in common.

Model: the basic blocks of He et al. 2015 (arXiv 1512.03385), one per stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from neuron_fabric.runtime.workloads.classification import Classification

__all__ = ["ResNet", "ResNetWorkload"]


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
class ResNetWorkload(Classification):
    """The ResNet on pictures, by SGD with momentum and a cosine schedule.

    Parameters
    ----------
    width : int
        Channels of the first stage.
    batch : int
        Images per rank and step.
    epochs : int
    learning_rate, momentum, weight_decay : float
    """

    examples = "images"

    width: int = 16
    batch: int = 8
    epochs: int = 6
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def model(self) -> nn.Module:
        """A :class:`ResNet`."""
        return ResNet(self.width)

    def optimizer(self, model: nn.Module, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """SGD; the rate falls to 0 along half a cosine."""
        optimizer = SGD(model.parameters(), self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return optimizer, CosineAnnealingLR(optimizer, total_steps)
