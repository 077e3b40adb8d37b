"""The calibrator: a communication hook that trains in FP32 and measures what low-bit votes would have made of it.

    calibrator = attach_calibrator(ddp)            # instead of attach(ddp, profile)
    ...                                            # the training loop as before, with calibrator.observe(loss)
    records = calibrator.records()

What training gets is the FP32 average of plain DDP, bit for bit. Beside it every encoding votes on the same gradients,
with residuals of its own where it has error feedback, the votes are added up, and what they decode to is compared with
the average. This takes one all-reduce of all votes in float32 a bucket and a few copies of the gradient; it is made to
be exact, not fast.
"""

# No "from __future__ import annotations" here: torch compares the hook's annotations with the types themselves.
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.agreement import check_same, describe_model
from neuron_fabric.runtime.calibration.records import EncodingRecord, Interval, ParameterRecord, Records
from neuron_fabric.runtime.fingerprint import fingerprint, walk_parameters
from neuron_fabric.runtime.plan import DEFAULT_GATE, ErrorFeedback, ResultFormat, Route, refuse_sparse_gradients
from neuron_fabric.runtime.profile import ModelSection

__all__ = ["ENCODINGS", "Calibrator", "TriedEncoding", "attach_calibrator", "calibration_hook"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_MEMORY = np.float32(0.9)
"""Of the running averages that stand for momentum."""
_LONGEST_TIMELINE = 100_000


@dataclass(frozen=True)
class TriedEncoding:
    """One way to vote, of which records say how well it does."""

    name: str
    route: Route
    result_format: ResultFormat = ResultFormat.TALLY
    error_feedback: ErrorFeedback | None = None
    gate: float | None = None

    @property
    def votes_as(self) -> tuple[object, ...]:
        """Two encodings with the same have the same votes and differ in what is decoded."""
        return (self.route, self.error_feedback, self.gate)


ENCODINGS = (
    TriedEncoding("binary", Route.BINARY),
    TriedEncoding("binary-majority", Route.BINARY, ResultFormat.MAJORITY),
    TriedEncoding("binary-feedback", Route.BINARY, error_feedback=ErrorFeedback(1.0)),
    TriedEncoding("binary-plain-feedback", Route.BINARY, error_feedback=ErrorFeedback(None)),
    TriedEncoding("ternary", Route.TERNARY, gate=DEFAULT_GATE),
    TriedEncoding("ternary-feedback", Route.TERNARY, gate=DEFAULT_GATE, error_feedback=ErrorFeedback(1.0)),
)
"""What is tried by default. The first one must be binary without residual: vote statistics are of its votes."""


@dataclass
class _Sums:
    """What has been added up for one parameter and encoding in the running interval."""

    cosine: float = 0.0
    lowest: float = 1.0
    averaged: float = 0.0
    error: float = 0.0
    length: float = 0.0


@dataclass
class _ParameterSums:
    steps: int = 0
    voted: int = 0
    norm: float = 0.0
    norm_squared: float = 0.0
    noise: float = 0.0
    density: float = 0.0
    zeros: float = 0.0
    margin: float = 0.0
    ties: float = 0.0
    unanimity: float = 0.0
    sign_error: float = 0.0
    encodings: dict[str, _Sums] = field(default_factory=dict)


class Calibrator:
    """State of :func:`calibration_hook` for one DDP model; made by :func:`attach_calibrator`.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Parameters must be on the CPU.
    interval_steps : int
        Statistics are kept apart for each stretch of so many steps.
    every, burst : int
        Of every ``every`` steps the first ``burst`` are measured (all by default); residuals go on from burst to burst.
    encodings : sequence of TriedEncoding

    Attributes
    ----------
    step : int
        Backward passes so far.
    loss_scale : float
        As of :class:`~neuron_fabric.runtime.hook.NeuronFabricState`.

    Memory beside plain DDP: a copy of the largest bucket for each encoding while it is measured, and for all steps a
    residual or a running average of the model's size for each encoding.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        interval_steps: int = 50,
        every: int = 1,
        burst: int = 1,
        encodings: tuple[TriedEncoding, ...] = ENCODINGS,
    ) -> None:
        for name, value in (("interval_steps", interval_steps), ("every", every), ("burst", burst)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        first = encodings[0] if encodings else None
        if first is None or first.route is not Route.BINARY or first.error_feedback is not None:
            raise ValueError("the first encoding must be binary without error feedback: vote statistics are of it")
        self.group: dist.ProcessGroup = ddp.process_group
        self.rank, self.world = self.group.rank(), self.group.size()
        refuse_sparse_gradients(ddp.module)
        check_same("model", describe_model(ddp.module), self.group)
        self.encodings = encodings
        self._ballots = list(dict.fromkeys(each.votes_as for each in encodings))
        self._interval_steps, self._every, self._burst = interval_steps, every, burst
        parameters = [each for each in walk_parameters(ddp.module) if each.parameter.requires_grad]
        self._names = {id(each.parameter): each.name for each in parameters}
        self._elements = {each.name: each.parameter.numel() for each in parameters}
        self._embeddings = tuple(
            each.name for each in parameters if any(isinstance(owner, _EMBEDDINGS) for owner in each.owners)
        )
        self._excluded = tuple(each.name for each in parameters if each.parameter.dtype != torch.float32)
        self._model = ModelSection.of(fingerprint(ddp.module))
        self._residuals: dict[tuple[object, ...], F32] = {}
        self._averages: dict[tuple[str, str], F32] = {}
        self._intervals: list[Interval] = []
        self._sums: dict[str, _ParameterSums] = {}
        self._begun = 0
        self._loss: list[float | None] = []
        self._told: float | None = None
        self._unanimity: dict[str, list[float | None]] = {}
        self._loss_scale = 1.0
        self.step = 0

    # ---- what the user tells -----------------------------------------------------------------------------------

    def observe(self, loss: float | None = None, learning_rate: float | None = None) -> None:
        """Tell this rank's loss, before or during the backward pass that it belongs to."""
        del learning_rate  # taken so that a training loop need not know what it talks to
        if loss is not None:
            self._told = float(loss)

    @property
    def loss_scale(self) -> float:
        """The factor on all gradients; set it to ``scaler.get_scale()`` before each backward pass."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"loss_scale must be positive and finite, but is {scale}")
        for kept in (*self._residuals.values(), *self._averages.values()):
            kept *= np.float32(scale / self._loss_scale)
        self._loss_scale = scale

    def close(self) -> None:
        """Nothing is held that needs closing; here for loops that close whatever they attached."""

    # ---- the hook ----------------------------------------------------------------------------------------------

    def launch(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as plain DDP does, and measure."""
        buffer = bucket.buffer()
        measures = self.step % self._every < self._burst and buffer.dtype == torch.float32
        own = buffer.numpy().copy() if measures else None
        buffer.mul_(1.0 / self.world)
        dist.all_reduce(buffer, group=self.group)
        if own is not None and bool(torch.isfinite(buffer).all()):  # the same on all ranks
            self._measure(bucket, own, buffer.numpy())
        if bucket.is_last():
            self._end_step()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _measure(self, bucket: GradBucket, own: F32, mean: F32) -> None:
        parts: list[tuple[str, slice]] = []
        at = 0
        for parameter in bucket.parameters():
            parts.append((self._names[id(parameter)], slice(at, at + parameter.numel())))
            at += parameter.numel()
        votes = np.zeros((len(self._ballots), own.size), np.float32)
        # Of each parameter: squared norm, zeros, whether it votes; of each ballot the L1 sum and how many are sent.
        told = np.zeros((len(parts), 3 + 2 * len(self._ballots)))
        for row, (name, where) in enumerate(parts):
            gradient = own[where]
            zeros = int(np.count_nonzero(gradient == 0))
            if zeros == gradient.size:
                continue  # abstains
            told[row, :3] = np.square(gradient, dtype=np.float64).sum(), zeros, 1
            for column, ballot in enumerate(self._ballots):
                p = self._with_residual(ballot, name, gradient)
                sent = self._vote(ballot, p, votes[column, where])
                told[row, 3 + 2 * column : 5 + 2 * column] = np.abs(p[sent]).sum(dtype=np.float64), int(sent.sum())
        added = torch.from_numpy(votes.copy())
        dist.all_reduce(added, group=self.group)
        everywhere = torch.from_numpy(told.copy())
        dist.all_reduce(everywhere, group=self.group)
        counts, sums = added.numpy(), everywhere.numpy()
        for row, (name, where) in enumerate(parts):
            if sums[row, 2]:
                self._add(name, own[where], mean[where], votes[:, where], counts[:, where], sums[row])

    def _with_residual(self, ballot: tuple[object, ...], name: str, gradient: F32) -> F32:
        residual = self._residuals.get((name, *ballot))
        return gradient if residual is None else gradient + residual

    def _vote(self, ballot: tuple[object, ...], p: F32, out: F32) -> npt.NDArray[np.bool_]:
        """Write -1, 0 or +1 to ``out``; which elements were sent."""
        route, _, gate = ballot
        if route is Route.BINARY:
            zero = -1.0 if (self.rank + self.step) % 2 else 1.0
            np.copyto(out, np.where(p == 0, np.float32(zero), np.sign(p)))
            return np.ones(p.shape, bool)
        threshold = np.float32(float(gate) * float(np.abs(p).sum(dtype=np.float64)) / p.size)  # type: ignore[arg-type]
        sent: npt.NDArray[np.bool_] = np.abs(p) > threshold
        np.copyto(out, np.where(sent, np.sign(p), np.float32(0)))
        return sent

    def _add(self, name: str, own: F32, mean: F32, votes: F32, counts: F32, told: F64) -> None:
        """Take one parameter of one step into the interval's sums."""
        world, n = self.world, mean.size
        exact = mean.astype(np.float64)
        squared = float(exact @ exact)
        scales = {}
        for column, ballot in enumerate(self._ballots):
            l1, sent = told[3 + 2 * column], told[4 + 2 * column]
            scales[ballot] = np.float32(l1 / sent) if sent else np.float32(0)
            feedback = ballot[1]
            if isinstance(feedback, ErrorFeedback) and own.any():
                left = self._with_residual(ballot, name, own) - scales[ballot] * votes[column]
                if feedback.clip is not None:
                    bound = np.float32(feedback.clip) * scales[ballot]
                    left = np.clip(left, -bound, bound)
                self._residuals[(name, *ballot)] = np.float32(feedback.decay) * left
        if not squared:
            return
        sums = self._sums.setdefault(name, _ParameterSums())
        sums.steps += 1
        norm = math.sqrt(squared) / self._loss_scale
        sums.norm += norm
        sums.norm_squared += norm * norm
        # Mean squared distance of a worker's gradient from the mean, made unbiased, over the mean's square.
        spread = max(0.0, told[0] / world - squared) * (world / (world - 1) if world > 1 else 0.0)
        sums.noise += spread / squared
        sums.density += float(np.abs(exact).sum()) / math.sqrt(n * squared)
        sums.zeros += told[1] / (told[2] * n)
        timeline: float | None = None
        if told[2] == world:
            balance = counts[0]
            sums.voted += 1
            sums.margin += float(np.abs(balance).mean()) / world
            ties, unanimous = float((balance == 0).mean()), float((np.abs(balance) == world).mean())
            sums.ties += ties
            sums.unanimity += unanimous
            nonzero = exact != 0
            wrong = (balance * mean)[nonzero]
            sums.sign_error += float((wrong < 0).mean() + 0.5 * (balance[nonzero] == 0).mean())
            timeline = unanimous
        if self.step < _LONGEST_TIMELINE:
            line = self._unanimity.setdefault(name, [])
            line.extend([None] * (self.step - len(line)))
            line.append(timeline)
        average = self._average("", name, mean)
        for encoding in self.encodings:
            balance = counts[self._ballots.index(encoding.votes_as)]
            scale = scales[encoding.votes_as]
            majority = encoding.result_format is ResultFormat.MAJORITY
            decoded = scale * np.sign(balance) if majority else scale * balance / np.float32(world)
            cosine, length = _compare(decoded, exact, squared)
            into = sums.encodings.setdefault(encoding.name, _Sums())
            into.cosine += cosine
            into.lowest = min(into.lowest, cosine)
            into.length += length
            into.error += length * length - 2 * length * cosine + 1
            averaged = self._average(encoding.name, name, decoded)
            exact_average = average.astype(np.float64)
            into.averaged += _compare(averaged, exact_average, float(exact_average @ exact_average))[0]

    def _average(self, encoding: str, name: str, value: F32) -> F32:
        """The running average of a parameter's gradient as one encoding has it ("" for FP32)."""
        average = self._averages.get((encoding, name))
        if average is None:
            average = self._averages[(encoding, name)] = np.zeros(value.size, np.float32)
        average *= _MEMORY
        average += (1 - _MEMORY) * value
        return average

    def _end_step(self) -> None:
        if len(self._loss) < _LONGEST_TIMELINE:
            loss = torch.tensor([-math.inf if self._told is None else self._told], dtype=torch.float64)
            dist.all_reduce(loss, dist.ReduceOp.MAX, group=self.group)
            greatest = float(loss)
            self._loss.append(greatest if math.isfinite(greatest) else None)
        self._told = None
        self.step += 1
        if self.step - self._begun == self._interval_steps:
            self._end_interval()

    def _end_interval(self) -> None:
        if self._sums:
            parameters = {name: _record(self._sums[name]) for name in self._elements if name in self._sums}
            self._intervals.append(Interval(first=self._begun, end=self.step, parameters=parameters))
        self._sums = {}
        self._begun = self.step

    # ---- what comes out ----------------------------------------------------------------------------------------

    def records(self, *, workload: str = "", seed: int | None = None) -> Records:
        """All that was measured so far, the same on every rank. Ends the running interval.

        ``ValueError`` if nothing was measured yet.
        """
        self._end_interval()
        if not self._intervals:
            raise ValueError("nothing was measured yet: train for some steps with the calibrator attached")
        return Records(
            workload=workload,
            seed=seed,
            world=self.world,
            steps=self.step,
            model=self._model,
            elements=self._elements,
            embeddings=self._embeddings,
            excluded=self._excluded,
            intervals=tuple(self._intervals),
            loss=tuple(self._loss),
            unanimity={name: tuple(line) for name, line in self._unanimity.items()},
        )


def _compare(decoded: F32, exact: F64, squared: float) -> tuple[float, float]:
    """Cosine, and length of ``decoded`` in units of ``exact``; both 0 where ``decoded`` is."""
    mine = decoded.astype(np.float64)
    own = float(mine @ mine)
    if own == 0 or squared == 0:
        return 0.0, 0.0
    return float(mine @ exact) / math.sqrt(own * squared), math.sqrt(own / squared)


def _record(sums: _ParameterSums) -> ParameterRecord:
    steps, voted = sums.steps, max(1, sums.voted)
    mean = sums.norm / steps
    return ParameterRecord(
        steps=steps,
        norm=mean,
        norm_deviation=math.sqrt(max(0.0, sums.norm_squared / steps - mean * mean)),
        noise=sums.noise / steps,
        density=min(1.0, sums.density / steps),
        zeros=sums.zeros / steps,
        margin=sums.margin / voted,
        ties=sums.ties / voted,
        unanimity=sums.unanimity / voted,
        sign_error=sums.sign_error / voted,
        encodings={
            name: EncodingRecord(
                cosine=each.cosine / steps,
                lowest_cosine=each.lowest,
                averaged_cosine=each.averaged / steps,
                error=max(0.0, each.error / steps),
                length=each.length / steps,
            )
            for name, each in sums.encodings.items()
        },
    )


def calibration_hook(state: Calibrator, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook for ``ddp.register_comm_hook(calibrator, calibration_hook)``."""
    return state.launch(bucket)


def attach_calibrator(ddp: DistributedDataParallel, **options: object) -> Calibrator:
    """Make a :class:`Calibrator` for a DDP model, with its options, and register its hook. Every rank must call it.

    Raises
    ------
    ValueError
        If an option is out of range, a layer makes sparse gradients, or the ranks have different models.
    """
    calibrator = Calibrator(ddp, **options)  # type: ignore[arg-type]
    register: Callable[..., None] = ddp.register_comm_hook
    register(calibrator, calibration_hook)
    return calibrator
