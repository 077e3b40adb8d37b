"""The communication hook: low-bit segments to the reducer, FP32 ones to one all-reduce, both in flight at once.

    ddp = DistributedDataParallel(model)
    state = attach(ddp, Plan.low_bit(keep_fp32=["head.*"], one_d_fp32=True))

How a step runs, and why:

* Every first-stage collective is launched by :func:`neuron_fabric_hook` itself, in bucket order, on DDP's process
  group. Collectives that depend on a first one (tally planes, the step's outcome, an FP32 redo) are launched by one
  worker thread, in bucket order, on a group of their own. So each group sees one order on all ranks; launching from
  future callbacks would let two ranks disagree.
* Encoding only reads: the gradient stays in the bucket until the bucket's outcome is known.
* With a profile, with error feedback, or with a reducer that can fail on one rank, all buckets of a step are held until
  the last one is there; one MAX all-reduce tells all ranks which buckets failed, whether anything was not finite, what
  the health signals are, and the digest of the next step's plan. Failed buckets are redone in FP32 in ascending order,
  then residuals are committed, then the rest is decoded.
* Otherwise each bucket is decoded as soon as its votes are there, and nothing is added to plain DDP's collectives.
"""

# No "from __future__ import annotations" here: torch compares the hook's annotations with the types themselves.
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime.admission import Capability
from neuron_fabric.runtime.agreement import agree_on_outcome, agree_ready, check_same, describe_model
from neuron_fabric.runtime.binding import bind
from neuron_fabric.runtime.checkpoint import STATE_VERSION, read_state
from neuron_fabric.runtime.codec import (
    MAX_WORLD,
    CodecKernels,
    codec_backend,
    count_table,
    majority_table,
    packed_majority_table,
)
from neuron_fabric.runtime.collectives import borrow_group, give_back_group
from neuron_fabric.runtime.controller import PlanController
from neuron_fabric.runtime.cost import Endpoint
from neuron_fabric.runtime.fifo import Fifo
from neuron_fabric.runtime.finite import all_finite
from neuron_fabric.runtime.layout import ENCODINGS, BucketLayout, Segment, lay_out
from neuron_fabric.runtime.ordered import OrderedAverage
from neuron_fabric.runtime.plan import (
    DEFAULT_GATE,
    SPARSE_MEMORY,
    SPARSE_SHARE,
    Plan,
    Region,
    ResultFormat,
    Route,
    bound_parameters,
)
from neuron_fabric.runtime.profile import Profile
from neuron_fabric.runtime.reasons import Reason
from neuron_fabric.runtime.refusals import refuse_options, require_ddp
from neuron_fabric.runtime.steering import Steering
from neuron_fabric.runtime.telemetry import StepClock, step_record
from neuron_fabric.runtime.traffic import Traffic, ring_bytes
from neuron_fabric.runtime.transports import make
from neuron_fabric.runtime.transports.base import BucketVotes, Exchange, ReducerFailedError, VotesKind
from neuron_fabric.runtime.uneven import gradient_divisor

__all__ = ["NeuronFabricState", "attach", "neuron_fabric_hook"]

_PROBE_PIECE = 1 << 15
"""Elements that a probe compares at a time, in double precision."""

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]


@dataclass(eq=False)
class _Bucket:
    """One bucket of the running step."""

    exchange: Exchange
    buffer: torch.Tensor
    last: bool
    done: torch.futures.Future[Any]
    signs: torch.futures.Future[Any] | None
    fp32: torch.futures.Future[Any] | OrderedAverage | None
    remainder: torch.Tensor | None
    probe: bool = False
    """Whether the whole bucket is averaged in FP32 and the votes only compared with that."""
    votes: BucketVotes | None = None
    failure: ReducerFailedError | None = None
    finite: bool = True
    """Whether no rank's gradient has a NaN or Inf; a bucket that failed is looked at after its redo."""

    @property
    def layout(self) -> BucketLayout:
        return self.exchange.layout

    def look(self) -> bool:
        """Whether what came back of all ranks is finite."""
        summed = self.buffer if self.layout.all_fp32 or self.probe else self.remainder
        return (self.votes is None or self.votes.envelopes.finite) and (summed is None or all_finite(summed))


class NeuronFabricState:
    """State of :func:`neuron_fabric_hook` for one DDP model; made by :func:`attach`.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Parameters must be on the CPU.
    plan : Plan or Profile
        With a plan its regions vote in every step; with a profile in those in which it admits them.
    transport : str
        ``auto``, ``allgather``, ``collective``, ``golden``, or the URL of a reducer, as ``udp://127.0.0.1:20045``;
        ``endpoint`` takes that of the environment variable ``NEURON_FABRIC_REDUCER``.
    fp32 : str
        ``allreduce``, or ``ordered`` for averages whose bits do not depend on how buckets are laid out
        (:mod:`neuron_fabric.runtime.ordered`), so that a resumed run is bitwise the interrupted one at any world size.

    Attributes
    ----------
    step : int
        Backward passes so far.
    telemetry : callable, optional
        Called at the end of each step with a record of plain values, by the worker thread; see
        :mod:`neuron_fabric.runtime.telemetry`. Only for states that agree on each step's outcome.
    at_step : callable, optional
        Called with the step's number before its first bucket is looked at, where something votes: for faults on purpose
        (:mod:`neuron_fabric.runtime.faults`).
    traffic : Traffic
    fallbacks : Counter
        What was to go low-bit and went FP32, by reason: ``reducer_failed`` (buckets; beside it, steps by what was wrong
        with the reducer: ``reducer_absent`` and others), ``sparse`` (parameters).
    residuals : dict of str to float32 tensor
        Error feedback per parameter, flat, in the storage order of the bucket.

    Raises
    ------
    TypeError
        If ``ddp`` is no DDP model.
    ValueError
        If the plan does not fit the model, the world is larger than 64, ranks differ in model or plan, or the DDP model
        has an option that cannot work (:mod:`neuron_fabric.runtime.refusals`).
    RuntimeError
        If the model has a communication hook, or another rank cannot attach.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plan: Plan | Profile,
        transport: str = "auto",
        *,
        fp32: str = "allreduce",
    ) -> None:
        self._ddp = weakref.ref(require_ddp(ddp))
        self.profile = plan if isinstance(plan, Profile) else None
        self.plan = Plan() if isinstance(plan, Profile) else plan
        self.group: dist.ProcessGroup = ddp.process_group
        self.rank, self.world = self.group.rank(), self.group.size()
        problem = None
        self.steering: Steering | None = None
        try:
            if fp32 not in ("allreduce", "ordered"):
                raise ValueError(f"fp32 must be allreduce or ordered, not {fp32!r}")
            self._bind(ddp, transport)
        except Exception as error:
            problem = error  # raised once the others know that something is wrong
        check_same("model", describe_model(ddp.module), self.group)
        profile = ["none"] if self.profile is None else [self.profile.name, self.profile.hash]
        check_same("plan and transport", [repr(self.plan), transport, fp32, *profile], self.group)
        agree_ready(problem, self.group)
        if self.steering is not None:
            # Decisions are made from it, so it must be one and the same.
            check_same("reducer", [repr(each) for each in self._reducer()], self.group)
        # A step's outcome is agreed only where it matters to somebody.
        self._holds = (
            self.steering is not None
            or bool(self.residuals)
            or (self._transport.may_fail and any(self.regions.values()))
        )
        self._ordered = fp32 == "ordered"
        second = self._holds or self._ordered or (self._transport.deferred and any(self.regions.values()))
        self._own_group = borrow_group(self.group) if second else None
        self._transport.attach(self.group, self._own_group)
        self._worker = Fifo("neuron-fabric") if self._own_group is not None else None
        # Then a bucket is its all-reduce and nothing else, and needs no layout.
        self._only_fp32 = self._worker is None and not any(self.regions.values())
        self._layouts: dict[tuple[Any, ...], BucketLayout] = {}
        self._voting: tuple[str, ...] = ()
        self._current: list[BucketLayout] = []
        self._probing = False
        self._divisor = self.world
        self._held: list[_Bucket] = []
        self._sparse: set[str] = set()
        self._too_sparse: set[str] = set()
        self._zero_share: dict[str, float] = {}
        self._stopped: Exception | None = None
        self._loss_scale = 1.0
        self.step = 0
        self.traffic = Traffic()
        self.fallbacks: Counter[str] = Counter()
        self.telemetry: Callable[[dict[str, Any]], None] | None = None
        self.at_step: Callable[[int], None] | None = None
        self._clock = StepClock()

    def observe(self, loss: float | None = None, learning_rate: float | None = None) -> None:
        """Tell the monitor this rank's loss (before scaling by a GradScaler) and learning rate.

        What is told before or during a backward pass belongs to it; of several values the last counts. Over the ranks
        the greatest counts. Without a profile this does nothing.
        """
        if self.steering is not None:
            self.steering.observe(loss, learning_rate)

    # ---- checkpoints and reports -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as tensors and plain values (it loads under ``weights_only=True``).

        Call it between two steps, on every rank: residuals are each rank's own.
        """
        return {
            "version": STATE_VERSION,
            "world": self.world,
            "rank": self.rank,
            "step": self.step,
            "loss_scale": self._loss_scale,
            "residuals": {name: residual.clone() for name, residual in self.residuals.items()},
            "sparse": sorted(self._sparse | self._too_sparse),
            "zero_share": dict(self._zero_share),
            "traffic": self.traffic.as_dict(),
            "fallbacks": dict(self.fallbacks),
            "steering": None if self.steering is None else self.steering.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, before the first step.

        At the same world size the run goes on bitwise (at three workers and more with ``fp32="ordered"``). At another
        one residuals start at zero, since nobody's residual is anybody's any more: what is lost is at most one clipped
        error an element.

        Raises
        ------
        ValueError
            If it is damaged, of another version, of another rank, or of other parameters or regions; nothing has
            changed then.
        """
        saved = read_state(state)
        same_world = saved.world == self.world
        if same_world and saved.rank != self.rank:
            raise ValueError(f"state: it is rank {saved.rank}'s, and this is rank {self.rank}: save one a rank")
        residuals = saved.residuals_like(self.residuals)
        saved.only_of(self.regions)
        traffic = Traffic.from_dict(saved.traffic)
        if (self.steering is None) != (saved.steering is None):
            raise ValueError("state: one of the two runs has a profile and the other has none")
        if self.steering is not None and saved.steering is not None:
            self.steering.load_state_dict(saved.steering)  # the last that can be refused
        for name, residual in self.residuals.items():
            residual.copy_(residuals[name]) if same_world else residual.zero_()
        self.step, self._loss_scale = saved.step, saved.loss_scale
        self._sparse, self._too_sparse = set(saved.sparse), set()
        self._zero_share = dict(saved.zero_share)
        self.traffic, self.fallbacks = traffic, Counter(saved.fallbacks)
        self._layouts.clear()

    def summary(self) -> str:
        """A few lines for people: how far, how much went low-bit, what fell back and why."""
        totals = self.traffic.as_dict()
        share = totals["low_bit_elements"] / totals["elements"] if totals["elements"] else 0.0
        lines = [
            f"{self.step} steps; {share:.1%} of all gradient elements low-bit",
            f"sent {totals['sent_bytes'] / 1e6:.1f} MB, an FP32 ring {totals['ring_bytes'] / 1e6:.1f} MB",
        ]
        lines += [f"{reason}: {count}" for reason, count in sorted(self.fallbacks.items())]
        if self.steering is not None:
            lines.append(f"mode {self.steering.decision.mode.value}")
        return "\n".join(lines)

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups on which collectives are launched: DDP's, and the one for second stages where there is one."""
        return (self.group,) if self._own_group is None else (self.group, self._own_group)

    def declared_bytes(self) -> dict[str, int]:
        """The most that a step holds beside what plain DDP holds, in bytes by purpose, if laid out as the last one.

        ================  ==========================================================================================
        ``residuals``     error feedback; all the time
        ``messages``      the transport's buffers; from the first step on
        ``planes``        this rank's planes; within a step
        ``remainders``    the FP32 elements of mixed buckets, put together; within a step
        ``scratch``       what collectives copy, and what a probe decodes into; within a step
        ================  ==========================================================================================
        """
        layouts = self._current
        mixed = [layout for layout in layouts if layout.segments]
        return {
            "residuals": sum(residual.nbytes for residual in self.residuals.values()),
            "messages": self._transport.buffer_bytes(),
            "planes": sum(8 * layout.words for layout in mixed),
            "remainders": sum(4 * layout.fp32_numel for layout in mixed),
            "scratch": self._transport.scratch_bytes() + self._ordered_bytes() + self._probe_bytes(),
        }

    def _ordered_bytes(self) -> int:
        """Ordered averages send and receive from buffers of their own; the second stage is one bucket's at a time."""
        sizes = [4 * (layout.fp32_numel + self.world) for layout in self._current] if self._ordered else []
        return 2 * sum(sizes) + 3 * max(sizes, default=0)

    def _probe_bytes(self) -> int:
        if self.profile is None or not self.profile.controller_policy().recovery.probe_interval:
            return 0
        return 4 * max((s.numel for layout in self._current for s in layout.segments), default=0) + 16 * _PROBE_PIECE

    def _bind(self, ddp: DistributedDataParallel, transport: str) -> None:
        """Everything that can be refused without asking the other ranks."""
        if not 1 <= self.world <= MAX_WORLD:
            raise ValueError(f"a tally counts 1 to {MAX_WORLD} workers, not {self.world}")
        refuse_options(ddp)
        parameters = bound_parameters(ddp.module)
        self._transport = make(transport, self.world)
        self._kernels: CodecKernels = codec_backend()
        self.regions: dict[str, Region | None]
        if self.profile is None:
            self.regions = self.plan.bind(ddp.module)
        else:
            self.regions = bind(self.profile, ddp.module, self.world)
            self.plan = self.profile.plan()
            policy, regions = self.profile.controller_policy(), self.profile.region_policies()
            controller = PlanController(policy, self.world, regions, *self._reducer())
            self.steering = Steering(controller, self.world)
        self._names = {id(p): name for name, p in parameters.items()}
        self.residuals = {
            name: torch.zeros(parameters[name].numel())
            for name, region in self.regions.items()
            if region is not None and region.error_feedback is not None
        }

    def _reducer(self) -> tuple[Capability | None, Endpoint | None]:
        """What the transport's reducer can do, and its figures for the cost law."""
        return self._transport.capability(self.world), self._transport.endpoint(self.world)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss, and so on all gradients; set it to ``scaler.get_scale()`` before each backward.

        Only error feedback needs it: what a vote left behind was left at the scale of its own step.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(f"loss_scale must be positive and finite, but is {scale}")
        if scale != self._loss_scale:
            for residual in self.residuals.values():
                residual.mul_(scale / self._loss_scale)
            self._loss_scale = scale

    # ---- hook thread -------------------------------------------------------------------------------------------

    def launch(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Encode a bucket and launch its collectives; the future's value is the averaged gradient."""
        if self._stopped is not None:
            raise RuntimeError(f"this state takes no more buckets: {self._stopped}") from self._stopped
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise RuntimeError("a bucket with sparse gradients reached the hook; build the layer with sparse=False")
        if bucket.index() == 0:
            self._begin_step()
        if self._only_fp32:
            self._count_fp32(bucket, buffer)
            return self._all_reduce(buffer).then(_first)
        layout = self._layout(bucket)
        self._current.append(layout)
        exchange = Exchange(bucket.index(), self.step, layout, [], np.zeros(layout.words, np.uint64))
        itemsize, last = buffer.element_size(), bucket.is_last()
        self.traffic.add(
            buckets=1,
            steps=int(last),
            elements=layout.numel,
            ring_bytes=ring_bytes(itemsize * layout.numel, self.world),
        )
        probe = self._probing and not layout.all_fp32
        fp32_numel = layout.numel if probe else layout.fp32_numel
        if fp32_numel:
            self.traffic.add_fp32(itemsize * fp32_numel, self.world)
        self.step += last

        if layout.all_fp32 and self._worker is None:
            return self._all_reduce(buffer).then(_first)
        signs, fp32, remainder = None, None, None
        if layout.segments:
            self._encode(exchange, buffer.numpy())
            signs = self._transport.start(exchange)
        if layout.all_fp32 or probe:
            fp32 = self._average(buffer)
        elif layout.fp32_runs:
            remainder = torch.cat([buffer.narrow(0, at, numel) for at, numel in layout.fp32_runs])
            fp32 = self._average(remainder)
        held = _Bucket(exchange, buffer, last, torch.futures.Future(), signs, fp32, remainder, probe)
        if self._worker is None:
            waits: list[Any] = [future for future in (signs, fp32) if future is not None]
            return torch.futures.collect_all(waits).then(lambda done: self._finish_now(held, done))
        self._worker.submit(lambda: self._second_stage(held))
        return held.done.then(_value_or_raise)

    def _count_fp32(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        last, size = bucket.is_last(), buffer.nbytes
        ring = ring_bytes(size, self.world)
        self.step += last
        self.traffic.add(
            buckets=1,
            steps=int(last),
            elements=buffer.numel(),
            up_bits=8 * size,
            down_bits=8 * size,
            sent_bytes=ring,
            ring_bytes=ring,
        )

    def _average(self, tensor: torch.Tensor) -> torch.futures.Future[Any] | OrderedAverage:
        if self._ordered:
            return OrderedAverage.start(tensor, self.group, self._divisor)
        return self._all_reduce(tensor)

    def _all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[Any]:
        # As plain DDP: multiply in the tensor's dtype, then sum. Dividing gives other bits at three workers.
        tensor.mul_(1.0 / self._divisor)
        # Of the group itself: dist.all_reduce comes to the same and takes some 40 us longer, in every bucket.
        work = self.group.allreduce([tensor])
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def _begin_step(self) -> None:
        """Take up what the last step decided, on all ranks alike: who votes, and what has turned out to be sparse."""
        if self.at_step is not None:
            self.at_step(self.step)
        if self.telemetry is not None:
            self._clock.begin(self.traffic.as_dict())
        if self._too_sparse:
            self.fallbacks["sparse"] += len(self._too_sparse)
            self._sparse |= self._too_sparse
            self._too_sparse.clear()
            self._layouts.clear()
        names = [region.name for region in self.plan.regions]
        if self.steering is not None:
            self._probing = self.steering.decision.is_probe
            names = [name for name in names if self.steering.low_bit(name) or self.steering.probes(name)]
        self._voting = tuple(names)
        self._current = []
        ddp = self._ddp()
        self._divisor = self.world if ddp is None else gradient_divisor(ddp, self.group)

    def _layout(self, bucket: GradBucket) -> BucketLayout:
        key = (self._voting, *map(id, bucket.parameters()))
        layout = self._layouts.get(key)
        if layout is None:
            routes = {
                name: None if region is None or name in self._sparse or region.name not in self._voting else region
                for name, region in self.regions.items()
            }
            layout = self._layouts[key] = lay_out(bucket, self._names, routes)
        return layout

    def _encode(self, exchange: Exchange, gradient: F32) -> None:
        sections = [section.planes(exchange.own) for section in exchange.layout.sections]
        for segment in exchange.layout.segments:
            part, own = gradient[segment.elements], sections[segment.section][:, segment.words]
            if segment.region.route is Route.TERNARY:
                exchange.entries.append(self._encode_ternary(segment, part, own))
            else:
                exchange.entries.append(self._encode_binary(segment, part, own, self.rank + exchange.step))

    def _encode_binary(self, segment: Segment, gradient: F32, own: U64, parity: int) -> tuple[float, int, int]:
        """Write a segment's plane; its entry of the envelope."""
        if segment.region.zeros == "positive":
            parity = 0
        if segment.name in self.residuals:
            residual = self.residuals[segment.name].numpy()
            l1, zeros = self._kernels.encode_binary_residual(gradient, residual, parity, own[0])
        else:
            l1, zeros = self._kernels.encode_binary(gradient, parity, own[0])
        return l1, 0 if zeros == segment.numel else segment.numel, zeros

    def _encode_ternary(self, segment: Segment, gradient: F32, own: U64) -> tuple[float, int, int]:
        """Write a segment's two planes; its entry of the envelope."""
        gate = DEFAULT_GATE if segment.region.gate is None else segment.region.gate
        if segment.name in self.residuals:
            residual = self.residuals[segment.name].numpy()
            return self._kernels.encode_ternary_residual(gradient, residual, gate, own[0], own[1])
        return self._kernels.encode_ternary(gradient, gate, own[0], own[1])

    # ---- when the votes are there ------------------------------------------------------------------------------

    def _finish_now(self, bucket: _Bucket, done: torch.futures.Future[Any]) -> torch.Tensor:
        """No second stage and nothing to agree on: decode in the future's callback, which launches nothing."""
        for future in done.value():
            future.value()  # raises what the collective raised
        bucket.votes = self._transport.finish(bucket.exchange)
        self._note(bucket)
        self._decode(bucket)
        return bucket.buffer

    def _second_stage(self, bucket: _Bucket) -> None:
        """Worker thread: the dependent collectives of one bucket, in bucket order."""
        self._held.append(bucket)
        try:
            if self._stopped is not None:
                raise self._stopped
            if bucket.signs is not None:
                bucket.signs.wait()
                try:
                    bucket.votes = self._transport.finish(bucket.exchange)
                except ReducerFailedError as error:
                    if not self._holds:
                        raise
                    bucket.failure = error
                self._note(bucket)
            if isinstance(bucket.fp32, OrderedAverage):
                bucket.fp32.finish(self._second_group)
            elif bucket.fp32 is not None:
                bucket.fp32.wait()
            bucket.fp32 = None  # done; what it holds is not needed any more
            if not self._holds:
                self._decode(bucket)
            else:
                bucket.finite = bucket.look()  # now, while backward goes on, and not at its end
                if not bucket.last:
                    return
                self._conclude()
        except Exception as error:
            # Whoever waits for these buckets must get the reason instead of waiting for ever. And nothing more may be
            # launched: this rank's collectives would meet those of another bucket on the other ranks.
            outcome: Any = error
            self._stopped = error
        else:
            outcome = None
        held, self._held = self._held, []
        for each in held:
            each.done.set_result(each.buffer if outcome is None else outcome)

    def _conclude(self) -> None:
        """End of a backward pass: agree, redo what failed, commit residuals, decode the rest."""
        buckets, steering = self._held, self.steering
        finite = all(bucket.finite for bucket in buckets)
        if steering is not None and self._probing:
            self._compare(buckets, steering)
        # The plan was compared when the state was made; what has changed since is who left the low-bit route, and what
        # the controller has decided.
        next_plan = [*sorted(self._sparse | self._too_sparse), *([str(steering.next.digest)] if steering else [])]
        digest = hashlib.sha256("\n".join(next_plan).encode()).digest()
        failures = [bucket.failure is not None for bucket in buckets]
        mine = self._transport.told()
        told = steering.told(self._transport.load()) if steering is not None else []
        failed, not_finite, told = agree_on_outcome(
            failures, not finite, int.from_bytes(digest[:7], "little"), self._second_group, [*mine, *told]
        )
        self.traffic.add(sent_bytes=ring_bytes(8 * (3 + len(buckets) + len(told)), self.world))
        theirs, told = told[: len(mine)], told[len(mine) :]
        reasons = self._transport.concluded(theirs)
        if any(failed):
            self.fallbacks.update(f"reducer_{reason}" for reason in reasons)
        for bucket, again in zip(buckets, failed, strict=True):
            if again:
                bucket.votes = None
                self.fallbacks["reducer_failed"] += 1
            if again and not bucket.probe:
                bucket.buffer.mul_(1.0 / self._divisor)
                dist.all_reduce(bucket.buffer, group=self._second_group)
                self.traffic.add_fp32(bucket.buffer.nbytes, self.world)
                not_finite = not_finite or not all_finite(bucket.buffer)  # the same sum on all ranks
        for bucket, again in zip(buckets, failed, strict=True):
            if not again and bucket.votes is not None and not bucket.probe:
                self._decode(bucket, commit=not not_finite)
        decision = None
        if steering is not None:
            decision = steering.conclude(told, not_finite, self._withdrawn(), sum(failed))
            for route in decision.routes.values():
                if not route.low_bit and route.reason is not Reason.PLAN:
                    self.fallbacks[route.reason.value] += 1
        if self.telemetry is not None:
            alarms = steering.controller.alarms if steering is not None else ()
            self.telemetry(
                step_record(
                    self.step - 1,
                    decision,
                    alarms,
                    self._clock.lap(self.traffic.as_dict()),
                    failed=sum(failed),
                    not_finite=not_finite,
                )
            )

    @property
    def _second_group(self) -> dist.ProcessGroup:
        if self._own_group is None:
            raise RuntimeError("no process group for second stages")
        return self._own_group

    def _withdrawn(self) -> dict[str, Reason]:
        """Regions all of whose parameters have left the low-bit route."""
        left = self._sparse | self._too_sparse
        members: dict[str, list[str]] = {}
        for name, region in self.regions.items():
            if region is not None:
                members.setdefault(region.name, []).append(name)
        return {region: Reason.SPARSE for region, names in members.items() if left.issuperset(names)}

    def _compare(self, buckets: list[_Bucket], steering: Steering) -> None:
        """A probe: the cosine between what the votes decode to and the FP32 average, by region."""
        sums: dict[str, F64] = {}
        for bucket in buckets:
            if bucket.votes is None or not bucket.probe:
                continue
            exact = bucket.buffer.numpy()
            for index, segment in enumerate(bucket.layout.segments):
                total = sums.setdefault(segment.region.name, np.zeros(3))
                total += self._compare_segment(bucket.votes, index, segment, exact[segment.elements])
        for region, (dot, mine, theirs) in sums.items():
            norm = float(np.sqrt(mine * theirs))
            steering.note_cosine(region, float(dot) / norm if np.isfinite(norm) and norm > 0 else None)

    def _compare_segment(self, votes: BucketVotes, index: int, segment: Segment, exact: F32) -> F64:
        """With a the decoded votes and b the average: a.b, a.a and b.b, in double precision, a piece at a time."""
        decoded = np.empty(segment.numel, np.float32)
        self._decode_segment(votes, index, segment, decoded)
        pieces = (slice(at, at + _PROBE_PIECE) for at in range(0, segment.numel, _PROBE_PIECE))
        return sum((_dots(decoded[piece], exact[piece]) for piece in pieces), np.zeros(3))

    def _note(self, bucket: _Bucket) -> None:
        """Count what was sent, and which segments turned out too sparse for signs; all ranks see the same."""
        exchange, layout = bucket.exchange, bucket.layout
        self.traffic.add(
            sent_bytes=exchange.sent_bytes, up_bits=64 * layout.words, envelope_bits=8 * exchange.envelope_bytes
        )
        if bucket.votes is None:
            return
        self.traffic.add(
            low_bit_elements=sum(segment.numel for segment in layout.segments),
            down_bits=64 * bucket.votes.words_back(layout),
        )
        if self.steering is not None:
            self.steering.votes.add(layout, bucket.votes)
        envelopes = bucket.votes.envelopes
        voting = envelopes.sent > 0
        zeros = np.where(voting, envelopes.zeros, 0).sum(0)
        for index, segment in enumerate(bucket.layout.segments):
            region = segment.region
            unguarded = region.error_feedback is not None or region.unit_scale or region.zeros == "positive"
            unguarded = unguarded or region.route is Route.TERNARY  # where a zero does not vote
            if unguarded or not voting[:, index].any():
                continue
            share = int(zeros[index]) / int(envelopes.sent[:, index].sum())
            average = SPARSE_MEMORY * self._zero_share.get(segment.name, 0.0) + (1 - SPARSE_MEMORY) * share
            self._zero_share[segment.name] = average
            if average > SPARSE_SHARE:
                self._too_sparse.add(segment.name)

    def _decode(self, bucket: _Bucket, *, commit: bool = False) -> None:
        """Write the averaged gradient over the bucket; with ``commit``, residuals too."""
        if bucket.layout.all_fp32:
            return  # averaged in place, in whatever dtype
        gradient = bucket.buffer.numpy()
        if bucket.remainder is not None:
            summed, at = bucket.remainder.numpy(), 0
            for offset, numel in bucket.layout.fp32_runs:
                gradient[offset : offset + numel] = summed[at : at + numel]
                at += numel
        votes = bucket.votes
        if votes is None:
            return
        for index, segment in enumerate(bucket.layout.segments):
            part = gradient[segment.elements]
            feedback = segment.region.error_feedback
            # Whoever abstains keeps its residual. A gradient none of which passed the gate is kept for later.
            abstained = bucket.exchange.entries[index][2] == segment.numel
            if feedback is None or abstained or not commit:
                self._decode_segment(votes, index, segment, part)
                continue
            clip = np.float32(np.inf if feedback.clip is None else feedback.clip)
            decay = np.float32(feedback.decay)
            residual = self.residuals[segment.name].numpy()
            own = bucket.layout.sections[segment.section].planes(bucket.exchange.own)[:, segment.words]
            table, scale = _table(votes, index, segment, self.world, self._divisor)
            words = votes.sections[segment.section].words[..., segment.words]
            if segment.region.route is Route.TERNARY:
                self._kernels.commit_ternary_residual(part, residual, own[0], own[1], scale, clip, decay)
                self._decode_segment(votes, index, segment, part)
            elif votes.sections[segment.section].kind is VotesKind.ROWS:
                self._kernels.commit_and_decode_rows(part, residual, own[0], scale, clip, decay, words[:, 0], table)
            else:
                self._kernels.commit_and_decode_planes(part, residual, own[0], scale, clip, decay, words, table)

    def _decode_segment(self, votes: BucketVotes, index: int, segment: Segment, out: F32) -> None:
        table, _scale = _table(votes, index, segment, self.world, self._divisor)
        words = votes.sections[segment.section].words[..., segment.words]
        if votes.sections[segment.section].kind is not VotesKind.ROWS:
            self._kernels.decode_planes(words, table, out)
        elif segment.region.route is Route.TERNARY:
            self._kernels.decode_ternary_rows(words[:, 0], words[:, 1], table, out)
        else:
            self._kernels.decode_rows(words[:, 0], table, out)

    def close(self) -> None:
        """Give back the worker thread and the process group. A backward pass after this raises ``RuntimeError``."""
        if self._worker is not None:
            self._worker.close()
        self._transport.close()
        if self._own_group is not None and self._stopped is None:  # else it is out of step, and nobody may use it again
            give_back_group(self.group, self._own_group)
        self._own_group = None
        self._stopped = self._stopped or RuntimeError("it was closed")


def _table(votes: BucketVotes, index: int, segment: Segment, world: int, divisor: int) -> tuple[F32, np.float32]:
    """What each tally of a segment decodes to, and the segment's scale."""
    scale, voters = votes.envelopes.scale(index), int(votes.envelopes.voters[index])
    region = segment.region
    encoding = ENCODINGS[region.route]
    if region.unit_scale and np.isfinite(scale):
        scale = np.float32(1)
    if votes.sections[segment.section].kind is VotesKind.MAJORITY:
        return packed_majority_table(scale), scale
    if region.result_format is ResultFormat.MAJORITY:
        return majority_table(world, voters, scale, region.margin, encoding), scale
    return count_table(world, voters, scale, divisor, encoding), scale


def _dots(a: F32, b: F32) -> F64:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return np.array([x @ y, x @ x, y @ y])


def neuron_fabric_hook(state: NeuronFabricState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook for ``ddp.register_comm_hook(state, neuron_fabric_hook)``."""
    return state.launch(bucket)


def attach(
    ddp: DistributedDataParallel, plan: Plan | Profile, transport: str = "auto", *, fp32: str = "allreduce"
) -> NeuronFabricState:
    """Make the state for a DDP model and register the hook.

    A collective: every rank must call it. With a plan, its regions vote in every step; with a profile, in those in
    which its phases, the health of the training and the reducer admit them.

    Raises as :class:`NeuronFabricState` does, before anything is registered.
    """
    state = NeuronFabricState(ddp, plan, transport, fp32=fp32)
    try:
        ddp.register_comm_hook(state, neuron_fabric_hook)
    except Exception:
        state.close()
        raise
    return state


def _first(future: torch.futures.Future[Any]) -> torch.Tensor:
    result: torch.Tensor = future.value()[0]
    return result


def _value_or_raise(future: torch.futures.Future[Any]) -> torch.Tensor:
    # An exception set on a future that DDP waits for surfaces as a cast error; raised in a callback it is itself.
    value = future.value()
    if isinstance(value, Exception):
        raise value
    result: torch.Tensor = value
    return result
