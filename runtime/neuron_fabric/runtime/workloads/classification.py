"""What workloads that sort examples into classes have in common: batches, loss and accuracy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Classification"]


class Classification(ABC):
    """Most of a :class:`~neuron_fabric.runtime.workloads.base.Workload`; the rest is model, optimizer and data."""

    metric: ClassVar[str] = "accuracy"
    head: ClassVar[tuple[str, ...]] = ("head.*",)
    examples: ClassVar[str]
    """What one example is called, in the plural."""
    scored: ClassVar[int] = 1000
    """Test examples that go through the model at once."""
    batch: int

    @property
    @abstractmethod
    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and int64 labels to train on, both of length n."""

    @property
    @abstractmethod
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels to test on."""

    def steps_per_epoch(self, world: int) -> int:
        """What is left over is not seen in that epoch."""
        per_step, there = self.batch * world, len(self.train[1])
        steps = there // per_step
        if not steps:
            raise ValueError(f"{per_step} {self.examples} a step are more than the {there} there are")
        return steps

    def batches(self, epoch: int, seed: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Inputs and labels: one order for all ranks, of which each takes its part."""
        inputs, labels = self.train
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for step in range(self.steps_per_epoch(world)):
            mine = order[(step * world + rank) * self.batch :][: self.batch]
            yield inputs[mine], labels[mine]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Cross entropy."""
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy on the test examples, per cent."""
        model.eval()
        inputs, labels = self.test
        parts = [slice(at, at + self.scored) for at in range(0, len(labels), self.scored)]
        right = sum(int((model(inputs[part]).argmax(1) == labels[part]).sum()) for part in parts)
        return 100.0 * right / len(labels)
