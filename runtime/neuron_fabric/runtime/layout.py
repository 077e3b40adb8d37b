"""How one gradient bucket is laid out: which of its elements go FP32 and where the low-bit segments stand.

A job of a reducer has one encoding. So the low-bit segments of a bucket form one section for each encoding that they
use, and a section is what a reducer counts: some planes of as many whole lines. The sections of a bucket travel in one
message, one after the other.

DDP rebuilds its buckets after the first iteration, so a layout is made from the bucket as it comes and kept under what
it was made from. Everything that lasts (residuals, routes) belongs to parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding
from neuron_fabric.model.params import LINE_BYTES
from neuron_fabric.runtime.codec import words_for
from neuron_fabric.runtime.plan import Region, ResultFormat, Route

__all__ = ["ENCODINGS", "WORDS_PER_LINE", "BucketLayout", "Section", "Segment", "lay_out", "sections_of"]

U64 = npt.NDArray[np.uint64]

WORDS_PER_LINE = LINE_BYTES // 8
ENCODINGS = {Route.BINARY: BINARY, Route.TERNARY: TERNARY}
"""What a low-bit route sends, in the order of a bucket's sections."""


@dataclass(frozen=True)
class Segment:
    """One parameter's elements in a bucket, on a low-bit route.

    ``offset`` and ``numel`` are in elements of the bucket; ``section`` is the number of its section in the bucket, and
    ``word`` where its bits start in each plane of that.
    """

    name: str
    offset: int
    numel: int
    section: int
    word: int
    region: Region

    @property
    def words(self) -> slice:
        """The segment's words of a plane of its section."""
        return slice(self.word, self.word + words_for(self.numel))

    @property
    def elements(self) -> slice:
        """The segment's elements of the bucket."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Section:
    """The segments of one encoding in a bucket: what one job of a reducer counts.

    Attributes
    ----------
    encoding : Encoding
    segments : tuple of int
        Their numbers in the bucket, in bucket order.
    start : int
        uint64 words of the bucket's sections before this one.
    words : int
        uint64 words of one plane, a whole number of lines.
    result_format, margin
        MAJORITY only if all segments ask for it with one margin; a tally serves every mixture.
    """

    encoding: Encoding
    segments: tuple[int, ...]
    start: int
    words: int
    result_format: ResultFormat
    margin: int

    @property
    def stop(self) -> int:
        """uint64 words of the bucket's sections up to the end of this one."""
        return self.start + self.encoding.planes * self.words

    def planes(self, words: U64) -> U64:
        """A view of its planes, shape (..., planes, words), in a bucket's words, shape (..., layout.words)."""
        return words[..., self.start : self.stop].reshape(*words.shape[:-1], self.encoding.planes, self.words)


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
    sections : tuple of Section
        Of the encodings that the segments use.
    digest : int
        64 bits that are equal on two ranks iff the layouts are.
    """

    numel: int
    segments: tuple[Segment, ...]
    fp32_runs: tuple[tuple[int, int], ...]
    sections: tuple[Section, ...]
    digest: int

    @property
    def words(self) -> int:
        """uint64 words that a rank sends: all planes of all sections."""
        return self.sections[-1].stop if self.sections else 0

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
    low_bit: list[tuple[str, int, int, Region]] = []
    runs: list[tuple[int, int]] = []
    offset = 0
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
            low_bit.append((name, offset, numel, region))
        elif runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + numel)
        else:
            runs.append((offset, numel))
        offset += numel
    buffer: torch.Tensor = bucket.buffer()
    if buffer.numel() != offset:
        raise RuntimeError(f"a bucket of {buffer.numel()} elements holds parameters of {offset}: it has padding")
    segments, sections = sections_of(low_bit)
    return BucketLayout(offset, segments, tuple(runs), sections, int.from_bytes(digest.digest()[:8], "little"))


def sections_of(
    low_bit: Sequence[tuple[str, int, int, Region]],
) -> tuple[tuple[Segment, ...], tuple[Section, ...]]:
    """Put segments, given as (name, offset, numel, region) in bucket order, into one section per encoding."""
    segments: dict[int, Segment] = {}
    sections: list[Section] = []
    start = 0
    for route, encoding in ENCODINGS.items():
        numbers = tuple(number for number, each in enumerate(low_bit) if each[3].route is route)
        if not numbers:
            continue
        word = 0
        for number in numbers:
            name, offset, numel, region = low_bit[number]
            segments[number] = Segment(name, offset, numel, len(sections), word, region)
            word += words_for(numel)
        formats = {(low_bit[number][3].result_format, low_bit[number][3].margin) for number in numbers}
        result_format, margin = formats.pop() if len(formats) == 1 else (ResultFormat.TALLY, 0)
        words = -(-word // WORDS_PER_LINE) * WORDS_PER_LINE
        sections.append(Section(encoding, numbers, start, words, result_format, margin))
        start = sections[-1].stop
    return tuple(segments[number] for number in range(len(low_bit))), tuple(sections)
