"""How one gradient bucket is laid out: which of its elements go FP32 and where the low-bit segments stand.

DDP rebuilds its buckets after the first iteration, so a layout is made from the bucket as it comes and kept under what
it was made from. Everything that lasts (residuals, routes) belongs to parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.runtime.codec import words_for
from neuron_fabric.runtime.plan import Region, ResultFormat

__all__ = ["WORDS_PER_LINE", "BucketLayout", "Segment", "lay_out"]

WORDS_PER_LINE = LINE_BYTES // 8


@dataclass(frozen=True)
class Segment:
    """One parameter's elements in a bucket, on a low-bit route.

    ``offset`` and ``numel`` are in elements of the bucket; ``word`` is where its sign bits start in the plane.
    """

    name: str
    offset: int
    numel: int
    word: int
    region: Region

    @property
    def words(self) -> slice:
        """The segment's words of a plane."""
        return slice(self.word, self.word + words_for(self.numel))

    @property
    def elements(self) -> slice:
        """The segment's elements of the bucket."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class BucketLayout:
    """One bucket.

    Attributes
    ----------
    numel : int
        Elements of the bucket.
    segments : tuple of Segment
        On low-bit routes, in bucket order.
    fp32_runs : tuple of (offset, numel)
        What remains, neighbours merged.
    words : int
        uint64 words of one sign plane, a whole number of lines.
    result_format, margin
        MAJORITY only if all segments ask for it with one margin; a tally serves every mixture.
    digest : int
        64 bits that are equal on two ranks iff the layouts are.
    """

    numel: int
    segments: tuple[Segment, ...]
    fp32_runs: tuple[tuple[int, int], ...]
    words: int
    result_format: ResultFormat
    margin: int
    digest: int

    @property
    def fp32_numel(self) -> int:
        """Elements that go FP32."""
        return sum(numel for _, numel in self.fp32_runs)

    @property
    def all_fp32(self) -> bool:
        """Whether the bucket is one plain all-reduce."""
        return not self.segments


def lay_out(bucket: GradBucket, names: Mapping[int, str], regions: Mapping[str, Region | None]) -> BucketLayout:
    """Lay a bucket out by the regions of its parameters (None: FP32).

    ``names`` maps ``id(parameter)`` to its name. ``RuntimeError`` if a parameter is unknown, which means that the hook
    is registered on another model than its state was made for.
    """
    segments: list[Segment] = []
    runs: list[tuple[int, int]] = []
    offset = word = 0
    digest = hashlib.sha256()
    for parameter in bucket.parameters():
        name, numel = names.get(id(parameter)), parameter.numel()
        if name is None:
            raise RuntimeError(
                f"a bucket holds a parameter of shape {tuple(parameter.shape)} that the state does not know: register "
                "the hook on the model that the state was made for"
            )
        region = regions[name]
        digest.update(f"{name}:{offset}:{numel}:{region}".encode())
        if region is not None:
            segments.append(Segment(name, offset, numel, word, region))
            word += words_for(numel)
        elif runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + numel)
        else:
            runs.append((offset, numel))
        offset += numel
    buffer: torch.Tensor = bucket.buffer()
    if buffer.numel() != offset:
        raise RuntimeError(f"a bucket of {buffer.numel()} elements holds parameters of {offset}: it has padding")
    formats = {(s.region.result_format, s.region.margin) for s in segments}
    result_format, margin = formats.pop() if len(formats) == 1 else (ResultFormat.TALLY, 0)
    return BucketLayout(
        offset,
        tuple(segments),
        tuple(runs),
        -(-word // WORDS_PER_LINE) * WORDS_PER_LINE,
        result_format,
        margin,
        int.from_bytes(digest.digest()[:8], "little"),
    )
