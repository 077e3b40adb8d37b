"""Faults on purpose, in running votes: to see that a monitor notices, and what happens without one.

    state = attach(ddp, profile)
    bias_votes(state, 200, 259, stuck_share=0.5)

The same fault on every rank is one of the reducer or of the encoding: all ranks go on to have the same result, so
nothing but the training itself can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neuron_fabric.runtime.codec import CodecKernels
from neuron_fabric.runtime.hook import NeuronFabricState
from neuron_fabric.runtime.plan import Route

__all__ = ["VoteBias", "bias_votes"]

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]

_WORD = 64


@dataclass(frozen=True)
class VoteBias:
    """Which votes are +1 whatever the gradient says.

    Parameters
    ----------
    zeros : bool
        Binary ones of exact zeros, as if the sign bit were the sign.
    ties : bool
        The result where as many workers voted for as against; left alone if there are ternary regions.
    stuck_share : float
        Those of this share of all lanes, 0 to 1, in 64ths and evenly spread, as stuck wires of a reducer would make
        them.
    """

    zeros: bool = True
    ties: bool = True
    stuck_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stuck_share <= 1:
            raise ValueError(f"stuck_share must be 0 to 1, but is {self.stuck_share}")

    @property
    def passing(self) -> np.uint64:
        """One bit for each lane of a word; 0 where it is stuck."""
        stuck = round(_WORD * self.stuck_share)
        lanes = {lane * _WORD // stuck for lane in range(stuck)} if stuck else set()
        return np.uint64(sum(1 << lane for lane in range(_WORD) if lane not in lanes))


def bias_votes(
    state: NeuronFabricState,
    first_step: int,
    last_step: int | None = None,
    *,
    zeros: bool = True,
    ties: bool = True,
    stuck_share: float = 0.0,
) -> None:
    """Make a state vote with a :class:`VoteBias` from one step to another, both included, or to the end of the run.

    Call it before the first of these steps, with the same arguments on all ranks. FP32 segments are not touched.

    Raises
    ------
    ValueError
        If the steps are out of order or over, the share is out of range, or the state has a fault already.
    """
    last = float("inf") if last_step is None else last_step
    if not state.step <= first_step <= last:
        raise ValueError(f"a fault from step {first_step} to {last} cannot begin now, before step {state.step}")
    if state.at_step is not None:
        raise ValueError("this state has a fault already")
    # What most of a ternary region's elements come to is 0, and no tie.
    ternary = any(region is not None and region.route is Route.TERNARY for region in state.regions.values())
    healthy = state._kernels
    # __getattr__ passes on what a bias leaves alone, which mypy cannot see.
    biased: Any = _BiasedKernels(healthy, VoteBias(zeros, ties and not ternary, stuck_share))

    def at_step(step: int) -> None:
        state._kernels = biased if first_step <= step <= last else healthy

    state.at_step = at_step


class _BiasedKernels:
    """Kernels whose binary votes are biased; see :class:`~neuron_fabric.runtime.codec.CodecKernels`."""

    def __init__(self, healthy: CodecKernels, bias: VoteBias) -> None:
        self._healthy, self._bias, self._passing = healthy, bias, bias.passing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._healthy, name)

    def encode_binary(self, gradient: F32, parity: int, words: U64) -> tuple[float, int]:
        result = self._healthy.encode_binary(gradient, 0 if self._bias.zeros else parity, words)
        words &= self._passing
        return result

    def encode_binary_residual(self, gradient: F32, residual: F32, parity: int, words: U64) -> tuple[float, int]:
        result = self._healthy.encode_binary_residual(gradient, residual, 0 if self._bias.zeros else parity, words)
        words &= self._passing
        return result

    def encode_ternary(self, gradient: F32, gate: float, positive: U64, negative: U64) -> tuple[float, int, int]:
        result = self._healthy.encode_ternary(gradient, gate, positive, negative)
        if result[1]:  # whoever sends nothing stays out of it
            self._stick(gradient.size, positive, negative)
        return result

    def encode_ternary_residual(
        self, gradient: F32, residual: F32, gate: float, positive: U64, negative: U64
    ) -> tuple[float, int, int]:
        result = self._healthy.encode_ternary_residual(gradient, residual, gate, positive, negative)
        if result[1]:  # whoever sends nothing stays out of it
            self._stick(gradient.size, positive, negative)
        return result

    def _stick(self, elements: int, positive: U64, negative: U64) -> None:
        negative &= self._passing
        positive |= ~self._passing
        if elements % _WORD:
            positive[-1] &= np.uint64((1 << elements % _WORD) - 1)  # lanes behind the end stay 0

    def decode_rows(self, rows: U64, table: F32, out: F32) -> None:
        self._healthy.decode_rows(rows, self._biased(table), out)

    def decode_planes(self, planes: U64, table: F32, out: F32) -> None:
        self._healthy.decode_planes(planes, self._biased(table), out)

    def commit_and_decode_rows(self, *arguments: Any) -> None:
        self._commit_and_decode(self._healthy.commit_and_decode_rows, arguments)

    def commit_and_decode_planes(self, *arguments: Any) -> None:
        self._commit_and_decode(self._healthy.commit_and_decode_planes, arguments)

    def _commit_and_decode(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        *before, table = arguments
        kernel(*before, self._biased(table))

    def _biased(self, table: F32) -> F32:
        # What a unanimous yes decodes to is the greatest entry: this is what a tie becomes.
        return np.where(table == 0, table.max(), table).astype(np.float32) if self._bias.ties else table
