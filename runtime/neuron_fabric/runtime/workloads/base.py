"""What a built-in workload is: a model, an optimizer, batches of real data, and a score on data it never trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Workload"]


class Workload(Protocol):
    """One training task, the same on every rank; :func:`neuron_fabric.runtime.loop.train_run` trains it.

    Attributes
    ----------
    name : str
        By which ``workloads.workload`` finds it.
    metric : str
        What :meth:`score` measures: ``accuracy``, in points (per cent), where more is better.
    epochs : int
        Length of a run, unless asked for another.
    batch : int
        Examples per rank and step.
    head : tuple of str
        Patterns of the classifier head's parameters, for policies made by hand.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def metric(self) -> str: ...  # noqa: D102
    @property
    def epochs(self) -> int: ...  # noqa: D102
    @property
    def batch(self) -> int: ...  # noqa: D102
    @property
    def head(self) -> tuple[str, ...]: ...  # noqa: D102

    def model(self) -> nn.Module:
        """A new model; what is random in it comes from torch's global generator."""

    def optimizer(self, model: nn.Module, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """Optimizer and schedule of a run of so many steps; the schedule moves once a step."""

    def steps_per_epoch(self, world: int) -> int:
        """Whole batches of ``world`` ranks in the training data; ``ValueError`` if there is not one."""

    def batches(self, epoch: int, seed: int, rank: int, world: int) -> Iterator[tuple[Tensor, ...]]:
        """One rank's batches of one epoch, ``steps_per_epoch`` of them; a function of the arguments alone."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch, a scalar; ``model`` may be wrapped."""

    def score(self, model: nn.Module) -> float:
        """The metric on the test data; leaves the model in evaluation mode."""
