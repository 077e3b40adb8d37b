"""Pictures of clothes: Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv 1708.07747) as Debian packages it.

12,000 of the 60,000 training images and all 10,000 test images, each halved to 14x14, and the ResNet of the digits.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from neuron_fabric.runtime.workloads.resnet import ResNetWorkload

__all__ = ["FOLDER", "Fashion", "FashionWorkload", "read_idx"]

FOLDER = Path("/usr/share/datasets/fashion-mnist")
TRAIN = 12_000
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Fashion:
    """Images of shape (n, 1, 14, 14), float32 with zero mean and unit variance over the training set; labels int64."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Fashion:
        """Read the installed images.

        Raises
        ------
        RuntimeError
            If they are not installed.
        ValueError
            If a file is damaged.
        """
        if not folder.is_dir():
            raise RuntimeError(
                f"the images are not in {folder}: install the Debian package with "
                "sudo apt-get install dataset-fashion-mnist"
            )
        train, test = (_images(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k"))
        labels = (read_idx(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k"))
        train_labels, test_labels = (torch.from_numpy(each.astype(np.int64)) for each in labels)
        train, train_labels = train[:TRAIN], train_labels[:TRAIN]
        if len(train) != len(train_labels) or len(test) != len(test_labels):
            raise ValueError(f"{folder}: there are not as many images as labels")
        mean, deviation = train.mean(), train.std()
        return cls((train - mean) / deviation, train_labels, (test - mean) / deviation, test_labels)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """An array of bytes from a gzipped IDX file; ``ValueError`` if it is not one, or larger than 64 MiB."""
    try:
        with gzip.open(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error
    if len(data) > _MOST_BYTES or len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: no IDX file of bytes of at most {_MOST_BYTES >> 20} MiB")
    head = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, head, 4))
    values = np.frombuffer(data, np.uint8, offset=min(head, len(data)))
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path}: shape {shape} and {values.size} bytes do not agree")
    return values.reshape(shape)


def _images(path: Path) -> torch.Tensor:
    pixels = read_idx(path)
    if pixels.ndim != 3:
        raise ValueError(f"{path}: images have three dimensions, not {pixels.ndim}")
    return functional.avg_pool2d(torch.from_numpy(pixels.astype(np.float32))[:, None], 2)


@dataclass(frozen=True)
class FashionWorkload(ResNetWorkload):
    """The ResNet on pictures of clothes; parameters as of :class:`ResNetWorkload`, and ``data``."""

    name = "fashion"

    width: int = 8
    batch: int = 32
    epochs: int = 3
    data: Fashion = field(default_factory=Fashion.load, repr=False, compare=False)

    @property
    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels."""
        return self.data.train_images, self.data.train_labels

    @property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels."""
        return self.data.test_images, self.data.test_labels
