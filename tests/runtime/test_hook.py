"""The hook on real process groups: bit-equality, odd sizes, abstention, non-finite gradients, failures.

Binary and ternary votes go through the same checks, where both have them.
"""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.model import codec
from neuron_fabric.model.encoding import BINARY, TERNARY
from neuron_fabric.model.wire import FrameType, Header
from neuron_fabric.runtime import ErrorFeedback, Plan, Region, Route, attach
from neuron_fabric.runtime.collectives import borrow_group, give_back_group, timeout_of
from neuron_fabric.runtime.envelope import DisagreementError
from neuron_fabric.runtime.plan import DEFAULT_GATE
from neuron_fabric.runtime.transports import TRANSPORTS
from neuron_fabric.runtime.transports.base import ReducerFailedError

SIZES = {"scalar": (), "one": (1,), "seven": (7,), "eight": (8,), "nine": (9,), "short": (511,), "line": (512,)}
SIZES |= {"long": (513,), "matrix": (33, 65), "chunks": (3, 9000)}


class Given(nn.Module):
    """A model whose gradient is whatever it is given: the loss is the sum of parameter times coefficient."""

    def __init__(self, shapes=SIZES):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, coefficients):
        return sum((getattr(self, name) * value).sum() for name, value in coefficients.items())


def gradients(rank, step, shapes=SIZES, **changes):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, change in changes.items():
        made[name] = change(made[name])
    return {name: value for name, value in made.items() if value is not None}


def wrap(model, plan=None, transport="allgather", **options):
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    state = None if plan is None else attach(ddp, plan, transport)
    return ddp, state


def averaged(ddp, given):
    """One backward pass; the gradients by name."""
    ddp.zero_grad(set_to_none=True)
    ddp(given).backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def same_on_all_ranks(tensors):
    for name, tensor in tensors.items():
        everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, tensor)
        for other in everybody:
            assert torch.equal(other, tensor) or (other.isnan().all() and tensor.isnan().all()), name


def reference(everybody, step, name, world, *, route="binary", majority=False, margin=0, gate=DEFAULT_GATE):
    """The definition: what the segment of all ranks' gradients decodes to."""
    encoding = {"binary": BINARY, "ternary": TERNARY}[route]
    parts = [given.get(name) for given in everybody]
    parts = [torch.zeros(SIZES[name]) if part is None else part for part in parts]
    encoded = [
        codec.encode_ternary(part.reshape(-1).numpy(), gate=gate)
        if route == "ternary"
        else codec.encode_binary(part.reshape(-1).numpy(), parity=rank + step)
        for rank, part in enumerate(parts)
    ]
    voters = sum(not e.abstains for e in encoded)
    n = parts[0].numel()
    tally = np.zeros(n, np.int64)
    for e in encoded:
        for weight, plane in zip(encoding.weights, e.planes, strict=True):
            tally += weight * np.unpackbits(plane, count=n, bitorder="little").astype(np.int64)
    scale = codec.common_scale([e.l1 for e in encoded], [e.sent for e in encoded])
    votes = codec.vote_sum(tally, voters, encoding)
    decoded = codec.decode(codec.majority(votes, margin), scale, 1) if majority else codec.decode(votes, scale, world)
    return torch.from_numpy(decoded).reshape(parts[0].shape)


# ---- FP32 ------------------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(50, 120), nn.ReLU(), nn.Linear(120, 70), nn.Tanh(), nn.Linear(70, 5))


def train(ddp, rank, steps=5):
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):  # the buckets are rebuilt after the first
        optimizer.zero_grad()
        ddp(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def check_fp32_is_plain_ddp(rank, world):
    for view in (False, True):
        trained = []
        for plan in (None, Plan.fp32()):
            torch.manual_seed(0)
            ddp, state = wrap(Net(), plan, gradient_as_bucket_view=view)
            trained.append(train(ddp, rank))
            if state is not None:
                assert state.traffic.low_bit_elements == 0
                assert state.traffic.buckets > state.traffic.steps  # several buckets
        assert torch.equal(*trained), view


def check_fp32_remainder(rank, world):
    plan = Plan((Region("low", ("matrix", "line")),))
    plain, _ = wrap(Given())
    mixed, _ = wrap(Given(), plan)
    for step in range(3):
        given = gradients(rank, step)
        want, got = averaged(plain, given), averaged(mixed, given)
        for name in SIZES.keys() - {"matrix", "line"}:
            if world == 2:
                assert torch.equal(got[name], want[name]), name
            else:
                torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_all_fp32_plan_is_bitwise_plain_ddp(run_ranks, world):
    run_ranks(__file__, "check_fp32_is_plain_ddp", world)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_an_fp32_remainder_is_that_of_plain_ddp(run_ranks, world):
    run_ranks(__file__, "check_fp32_remainder", world)


# ---- low bit ---------------------------------------------------------------------------------------------------------

SPECIAL = {
    "plain": {},
    "zero everywhere": {"matrix": torch.zeros_like, "nine": torch.zeros_like, "scalar": torch.zeros_like},
    "zero on rank 0": {"chunks": lambda g: g * (dist.get_rank() > 0), "eight": lambda g: g * (dist.get_rank() > 0)},
    "some zeros": {"chunks": lambda g: torch.where(g.abs() < 0.02, 0.0, g)},
    "large": {"matrix": lambda g: g * 1e37},
}


def check_low_bit(rank, world, route):
    """All transports, all formats, odd sizes and special gradients: the definition, the same bits everywhere."""
    everything = {}
    for result_format, margin in (("tally", 0), ("majority", 0), ("majority", 1)):
        for transport in TRANSPORTS:
            plan = Plan.low_bit(route=route, result_format=result_format, margin=margin)
            ddp, state = wrap(Given(), plan, transport)
            for step, (title, changes) in enumerate(SPECIAL.items()):
                mine = gradients(rank, step, **changes)
                got = averaged(ddp, mine)
                same_on_all_ranks(got)
                everybody = [None] * world
                dist.all_gather_object(everybody, mine)
                for name, value in got.items():
                    majority = {"majority": result_format == "majority", "margin": margin}
                    want = reference(everybody, step, name, world, route=route, **majority)
                    # The L1 sum is each rank's own: its last bits depend on the order of summation.
                    torch.testing.assert_close(value, want, rtol=1e-6, atol=0, msg=f"{title}, {name}")
                    first = everything.setdefault((result_format, margin, title, name), value)
                    assert torch.equal(first, value), (transport, result_format, title, name)
            assert state.step == len(SPECIAL)
            state.close()


def check_not_finite(rank, world, feedback, route):
    plan = Plan.low_bit(route=route, error_feedback=ErrorFeedback() if feedback else None)
    for transport in TRANSPORTS:
        ddp, state = wrap(Given(), plan, transport)
        averaged(ddp, gradients(rank, 0))
        before = {name: residual.clone() for name, residual in state.residuals.items()}
        assert not feedback or any(residual.any() for residual in before.values())

        def poison(g):
            g = g.clone()
            if dist.get_rank() == world - 1:
                g.view(-1)[-1] = float("nan")
            return g

        got = averaged(ddp, gradients(rank, 1, matrix=poison))
        same_on_all_ranks(got)
        assert got["matrix"].isnan().all()
        assert all(torch.isfinite(value).all() for name, value in got.items() if name != "matrix")
        for name, residual in state.residuals.items():
            assert torch.equal(residual, before[name]), name
        state.close()


def check_unused_on_one_rank(rank, world, route):
    for transport in TRANSPORTS:
        plan = Plan.low_bit(route=route, error_feedback=ErrorFeedback())
        ddp, state = wrap(Given(), plan, transport, find_unused_parameters=True)
        averaged(ddp, gradients(rank, 0))
        before = state.residuals["chunks"].clone()
        drop = {"chunks": (lambda g: None)} if rank == 0 else {}
        got = averaged(ddp, gradients(rank, 1, **drop))
        same_on_all_ranks(got)
        changed = not torch.equal(state.residuals["chunks"], before)
        assert changed == (rank != 0), "whoever abstains keeps its residual"
        # Unused everywhere: DDP leaves the gradient alone, and no residual may be spent on it.
        before = state.residuals["chunks"].clone()
        assert "chunks" not in averaged(ddp, gradients(rank, 2, chunks=lambda g: None))
        assert torch.equal(state.residuals["chunks"], before)
        state.close()


def check_error_feedback(rank, world, route):
    """Unclipped: nothing is lost. Clipped: bounded. In both: as the definition says."""
    shapes = {"matrix": (40, 50), "nine": (9,)}
    for transport in TRANSPORTS:
        plan = Plan.low_bit(route=route, error_feedback=ErrorFeedback(clip=None))
        ddp, state = wrap(Given(shapes), plan, transport)
        decoded = dict.fromkeys(shapes, 0.0)
        wanted = dict.fromkeys(shapes, 0.0)
        for step in range(8):
            mine = gradients(rank, step, shapes)
            got = averaged(ddp, mine)
            for name in shapes:
                decoded[name] = decoded[name] + got[name].double()
                total = mine[name].double()
                dist.all_reduce(total)
                wanted[name] = wanted[name] + total / world
        for name, shape in shapes.items():
            left = state.residuals[name].double()
            dist.all_reduce(left)
            got = decoded[name] + left.view(shape) / world
            torch.testing.assert_close(got, wanted[name], rtol=0, atol=1e-4)
        state.close()

        plan = Plan.low_bit(route=route, error_feedback=ErrorFeedback(clip=1.0))
        ddp, state = wrap(Given(shapes), plan, transport)
        for step in range(4):
            averaged(ddp, gradients(rank, step, shapes))
        assert state.residuals["matrix"].abs().max() < 1.8  # the scale is about .8, of what passes a gate 1.3
        state.close()


def check_nothing_passes_the_gate(rank, world):
    """A worker none of whose elements passes keeps all of its gradient for later, unlike one that has no gradient."""
    shapes = {"matrix": (40, 50)}
    for transport in TRANSPORTS:
        plan = Plan.low_bit(route="ternary", gate=1.0, error_feedback=ErrorFeedback(clip=None))
        ddp, state = wrap(Given(shapes), plan, transport)
        level = {"matrix": torch.full((40, 50), 0.25 * (-1) ** rank)}  # at the gate, not above it
        assert not averaged(ddp, level)["matrix"].any()
        assert torch.equal(state.residuals["matrix"].view(40, 50), level["matrix"])
        assert not averaged(ddp, {"matrix": torch.zeros(40, 50)})["matrix"].any()
        assert torch.equal(state.residuals["matrix"].view(40, 50), level["matrix"])
        state.close()


def check_ternary_residual(rank, world):
    """Gate, clip and decay against the plain formulas, from the ranks' own gradients."""
    shapes = {"matrix": (40, 50)}
    for transport in TRANSPORTS:
        feedback = ErrorFeedback(clip=0.75, decay=0.5)
        ddp, state = wrap(Given(shapes), Plan.low_bit(route="ternary", gate=0.9, error_feedback=feedback), transport)
        residual = torch.zeros(shapes["matrix"])
        for step in range(4):
            mine = gradients(rank, step, shapes)["matrix"]
            p = mine + residual
            sent = torch.where(p.abs() > 0.9 * p.double().abs().mean().float(), torch.sign(p), 0.0)
            told = torch.stack([(p * sent).double().sum(), sent.double().abs().sum()])
            dist.all_reduce(told)
            scale = float(told[0] / told[1])
            residual = 0.5 * (p - scale * sent).clamp(-0.75 * scale, 0.75 * scale)
            dist.all_reduce(sent)
            got = averaged(ddp, {"matrix": mine})["matrix"]
            torch.testing.assert_close(got, scale * sent / world, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(state.residuals["matrix"].view(40, 50), residual, rtol=1e-4, atol=1e-6)
        state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("route", ["binary", "ternary"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_low_bit_gradients_are_the_definition_on_all_ranks_and_transports(run_ranks, world, route):
    run_ranks(__file__, "check_low_bit", world, route=route)


@pytest.mark.distributed
@pytest.mark.parametrize("route", ["binary", "ternary"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("feedback", [False, True])
def test_nan_on_one_rank_reaches_all_and_no_residual_changes(run_ranks, world, feedback, route):
    run_ranks(__file__, "check_not_finite", world, feedback=feedback, route=route)


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "route"), [(2, "binary"), (4, "binary"), (3, "ternary")])
def test_a_parameter_unused_on_one_rank(run_ranks, world, route):
    run_ranks(__file__, "check_unused_on_one_rank", world, route=route)


@pytest.mark.distributed
@pytest.mark.parametrize("route", ["binary", "ternary"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_error_feedback(run_ranks, world, route):
    run_ranks(__file__, "check_error_feedback", world, route=route)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_what_a_gate_holds_back(run_ranks, world):
    run_ranks(__file__, "check_nothing_passes_the_gate", world)
    run_ranks(__file__, "check_ternary_residual", world)


# ---- several encodings in one bucket ---------------------------------------------------------------------------------

MIXED = Plan(
    (
        Region("few", ("matrix", "eight"), "ternary", result_format="majority", margin=1),
        Region("signs", ("chunks", "nine", "long"), error_feedback=ErrorFeedback()),
        Region("gated", ("line", "short"), "ternary", gate=0.4, error_feedback=ErrorFeedback()),
    )
)


def collectives(state):
    """How many the state's groups have launched so far."""
    return sum(group._get_sequence_number_for_group() for group in state.process_groups)


def check_mixed_bucket(rank, world):
    """Binary, ternary and FP32 in one bucket give each parameter the bits that it has in a bucket of its own kind."""
    alone = {}
    for region in MIXED.regions:
        ddp, state = wrap(Given(), Plan((region,)))
        for step in range(3):
            got = averaged(ddp, gradients(rank, step))
            alone |= {(step, n): got[n] for n, of in state.regions.items() if of is not None}
            alone |= {(step, n, "left"): residual.clone() for n, residual in state.residuals.items()}
        state.close()
    plain, _ = wrap(Given())
    for transport in TRANSPORTS:
        ddp = DistributedDataParallel(Given())
        state = attach(ddp, MIXED, transport)
        for step in range(3):
            given = gradients(rank, step)
            before = collectives(state)
            got = averaged(ddp, given)
            # One a stage for both encodings, one for what is FP32, one for the outcome.
            if step == 2:  # before that DDP rebuilds its buckets
                assert collectives(state) - before == (1 if transport == "allgather" else 2) + 2
            same_on_all_ranks(got)
            want = averaged(plain, given)
            for name, value in got.items():
                if (step, name) in alone:
                    assert torch.equal(value, alone[step, name]), (transport, step, name)
                else:
                    torch.testing.assert_close(value, want[name], rtol=1e-6, atol=1e-7)
            for name, residual in state.residuals.items():
                assert torch.equal(residual, alone[step, name, "left"]), (transport, step, name)
        for layout in state._layouts.values():
            assert [section.encoding for section in layout.sections] == [BINARY, TERNARY]
        state.close()


def check_mixed_traffic(rank, world):
    """64 lines of signs, 32 of each ternary plane, and a tally or a majority back."""
    shapes = {"signs": (128, 256), "gated": (64, 256), "head": (10, 10)}
    head = Region("head", ("head",), Route.FP32)
    for transport in TRANSPORTS:
        for gated, back in (
            (Region("gated", ("gated",), "ternary"), 3),
            (Region("gated", ("gated",), "ternary", result_format="majority"), 2),
        ):
            ddp = DistributedDataParallel(Given(shapes))
            state = attach(ddp, Plan((head, gated, Region("signs"))), transport)
            # Who has no gradient changes nothing for ternary votes: they are summed as they are.
            averaged(ddp, gradients(rank, 0, shapes, gated=lambda g: g * (rank > 0)))
            traffic = state.traffic
            assert traffic.low_bit_elements == 3 * 2**14
            assert traffic.up_bits == 2**15 + 2 * 2**14 + 3200
            assert traffic.down_bits == 2 * 2**15 + back * 2**14 + 3200  # three workers
            envelope = traffic.envelope_bits // 8
            mine = sum(lines * (rank + 1) // 3 - lines * rank // 3 for lines in (64, 32, 32))
            last = 2 * (64 - 42) + back * (32 - 21)  # the most lines that a rank sends back
            payload = {
                "allgather": 2 * (128 * 64 + envelope),
                "collective": 2 * envelope + 64 * (128 - mine) + 2 * (64 * last + 8),
            }
            payload["golden"] = payload["collective"] + 2 * 2 * 8 * 4 // 3
            assert traffic.sent_bytes == payload[transport] + 2 * 2 * 400 // 3
            state.close()


def check_golden_ternary_frames(rank, world):
    """The golden reducer counts ternary sections from frames of both planes of a ternary job."""
    ddp, state = wrap(Given(), Plan.low_bit(route="ternary"), "golden")
    reducer, seen = state._transport.reducer, set()
    receive = reducer.receive

    def spy(frame):
        header = Header.unpack(frame)
        seen.add((header.type, header.plane, header.planes))
        return receive(frame)

    reducer.receive = spy
    averaged(ddp, gradients(rank, 0, chunks=lambda g: g * (rank > 0)))
    assert (FrameType.CONTRIBUTE, 0, 2) in seen
    assert (FrameType.CONTRIBUTE, 1, 2) in seen
    assert {planes for _type, _plane, planes in seen} == {2}
    assert {workers[0].config.encoding for workers in state._transport._jobs.values()} == {TERNARY}
    state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3])
def test_encodings_do_not_disturb_each_other_in_a_bucket(run_ranks, world):
    run_ranks(__file__, "check_mixed_bucket", world)


@pytest.mark.distributed
def test_traffic_of_two_encodings_is_counted_as_it_is_sent(run_ranks):
    run_ranks(__file__, "check_mixed_traffic", 3)


@pytest.mark.distributed
def test_the_golden_reducer_counts_both_planes(run_ranks):
    run_ranks(__file__, "check_golden_ternary_frames", 2)


# ---- fallbacks -------------------------------------------------------------------------------------------------------


def check_failed_bucket(rank, world, route):
    """The golden reducer of one rank fails in mid-step: that bucket is redone in FP32, bit for bit, everywhere."""
    plain, _ = wrap(Given())
    ddp, state = wrap(Given(), Plan.low_bit(route=route, error_feedback=ErrorFeedback()), "golden")
    for step in range(4):
        given = gradients(rank, step)
        want = averaged(plain, given)
        broken = step == 2 and rank == world - 1
        if broken:
            receive = state._transport.reducer.receive

            def fail(frame):
                raise ReducerFailedError("injected")

            state._transport.reducer.receive = fail
        before = {name: residual.clone() for name, residual in state.residuals.items()}
        got = averaged(ddp, given)
        same_on_all_ranks(got)
        redone = [name for name in want if torch.equal(got[name], want[name])]
        if step == 2:
            assert set(redone) == set(want)
            assert all(torch.equal(state.residuals[name], before[name]) for name in before)
        elif world > 1:
            assert "matrix" not in redone
        if broken:
            state._transport.reducer.receive = receive
    assert state.fallbacks["reducer_failed"] >= 1
    assert state.traffic.buckets > state.fallbacks["reducer_failed"]
    assert state.traffic.up_bits > 3 * state.traffic.elements  # what was redone took 32 bits more
    state.close()


def check_sparse_leaves(rank, world):
    shapes = {"table": (100, 64), "matrix": (40, 50)}

    def nine_rows_of_ten_unused(g):
        return g * (torch.arange(100)[:, None] % 10 == rank % 10)

    for transport in TRANSPORTS:  # where zeros do not vote nothing has to leave
        ddp, state = wrap(Given(shapes), Plan.low_bit(route="ternary"), transport)
        for step in range(3):
            same_on_all_ranks(averaged(ddp, gradients(rank, step, shapes, table=nine_rows_of_ten_unused)))
        assert state.traffic.low_bit_elements == state.traffic.elements
        assert not state.fallbacks
        state.close()

    ddp, state = wrap(Given(shapes), Plan.low_bit())
    plain, _ = wrap(Given(shapes))
    for step in range(3):
        given = gradients(rank, step, shapes, table=nine_rows_of_ten_unused)
        got, want = averaged(ddp, given), averaged(plain, given)
        same_on_all_ranks(got)
        exact = torch.allclose(got["table"], want["table"], rtol=1e-6, atol=0)
        assert exact == (step > 0), step
        assert not torch.allclose(got["matrix"], want["matrix"])
    assert state.fallbacks == {"sparse": 1}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "route"), [(1, "binary"), (2, "binary"), (3, "binary"), (4, "binary"), (2, "ternary")]
)
def test_a_bucket_whose_reducer_failed_on_one_rank_is_redone_in_fp32(run_ranks, world, route):
    run_ranks(__file__, "check_failed_bucket", world, route=route)


@pytest.mark.distributed
def test_a_sparse_segment_leaves_the_binary_route_on_all_ranks_at_once(run_ranks):
    run_ranks(__file__, "check_sparse_leaves", 2)


# ---- what cannot work ------------------------------------------------------------------------------------------------


def check_different_plans(rank, world):
    ddp = DistributedDataParallel(Net())
    plan = Plan.low_bit(keep_fp32=["4.*"] if rank == 0 else ["2.*"])
    message = r"same plan and transport: entry 0 is .*'4\.\*'.* on rank 0 .*'2\.\*'.* on rank 1"
    with pytest.raises(ValueError, match=message):
        attach(ddp, plan)


def check_different_models(rank, world):
    class Other(nn.Module):
        def __init__(self, name):
            super().__init__()
            setattr(self, name, nn.Linear(3, 3))

        def forward(self, x):
            return x

    ddp = DistributedDataParallel(Other("left" if rank == 0 else "right"))  # the same shapes: DDP does not notice
    with pytest.raises(ValueError, match=r"same model: entry 0 is 'left\.weight .*rank 0 .*'right\.weight .* rank 1"):
        attach(ddp, Plan.fp32())


def check_a_rank_that_is_a_step_ahead(rank, world, transport):
    ddp, state = wrap(Given(), Plan.low_bit(), transport)
    state.step += rank
    with pytest.raises(Exception, match=r"sent step \d where this rank has \d") as caught:
        averaged(ddp, gradients(rank, 0))
    assert caught.type in (DisagreementError, RuntimeError)


def check_refusals(rank, world):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)

        def forward(self, x):
            return self.table(x)

    with pytest.raises(ValueError, match=r"layer 'table' \(Embedding\) makes sparse gradients"):
        attach(DistributedDataParallel(Sparse()), Plan.fp32())
    ddp = DistributedDataParallel(Net())
    with pytest.raises(ValueError, match=r"'kept': pattern 'head\.\*' matches no parameter; the model has 0\.weight"):
        attach(ddp, Plan.low_bit(keep_fp32=["head.*"]))
    with pytest.raises(ValueError, match="unknown transport 'carrier-pigeon'"):
        attach(ddp, Plan.fp32(), "carrier-pigeon")
    with pytest.raises(ValueError, match=r"'0\.weight' is torch\.bfloat16; the low-bit route takes torch\.float32"):
        attach(DistributedDataParallel(Net().bfloat16()), Plan.low_bit())
    attach(ddp, Plan.fp32())
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        attach(ddp, Plan.fp32())


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["check_different_plans", "check_different_models"])
def test_ranks_that_differ_are_told_the_first_difference(run_ranks, check):
    run_ranks(__file__, check, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_out_of_step_stop_with_the_reason(run_ranks, transport):
    run_ranks(__file__, "check_a_rank_that_is_a_step_ahead", 2, transport=transport)


@pytest.mark.distributed
def test_what_cannot_work_is_refused_by_name(run_ranks):
    run_ranks(__file__, "check_refusals", 1)


# ---- plans and traffic, without a group ------------------------------------------------------------------------------


def test_the_first_region_that_matches_has_the_parameter():
    plan = Plan((Region("head", ("4.*",), Route.FP32), Region("norms", ("*",), Route.FP32, max_ndim=1), Region("body")))
    bound = plan.bind(Net())
    assert {name: region and region.name for name, region in bound.items()} == {
        "0.weight": "body",
        "0.bias": None,
        "2.weight": "body",
        "2.bias": None,
        "4.weight": None,
        "4.bias": None,
    }


def test_wrappers_and_compilation_do_not_change_names():
    names = list(Plan.fp32().bind(Net()))
    partly = Net()
    partly[2] = torch.compile(partly[2])
    for wrapped in (nn.DataParallel(Net()), torch.compile(Net()), torch.compile(nn.DataParallel(Net())), partly):
        assert list(Plan.low_bit(keep_fp32=["4.*"]).bind(wrapped)) == names


def test_a_parameter_may_be_called_module():
    class Confusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5))
            self.module = nn.Linear(3, 5)

    assert list(Plan.low_bit().bind(Confusing())) == ["weight", "module.weight", "module.bias"]


def test_embeddings_go_fp32_unless_they_are_asked_for():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    bound = Plan.low_bit().bind(model)
    assert bound["0.weight"] is None
    assert bound["1.weight"] is not None
    assert Plan.low_bit(embeddings=True).bind(model)["0.weight"] is not None
    assert Plan.low_bit(route="ternary").bind(model)["0.weight"] is None
    assert Plan.low_bit(route="ternary", embeddings=True).bind(model)["0.weight"].route is Route.TERNARY


def test_a_model_without_one_dimensional_parameters():
    assert Plan.low_bit(one_d_fp32=True).bind(nn.Linear(3, 3, bias=False))["weight"] is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Region("a", "0.*"), "patterns is a sequence"),
        (lambda: Region("a", ()), "no patterns"),
        (lambda: Region("a", margin=-1), "margin must not be negative"),
        (lambda: Region("a", margin=1), "are for majority results"),
        (lambda: Region("a", unit_scale=True), "are for majority results"),
        (lambda: Region("a", route="fp32", unit_scale=True), "an fp32 region has no"),
        (lambda: Region("a", route="morse"), "'morse' is not a valid Route"),
        (
            lambda: Region("a", result_format="majority", unit_scale=True, error_feedback=ErrorFeedback()),
            "needs the segm",
        ),
        (lambda: ErrorFeedback(clip=-1.0), "clip must not be negative"),
        (lambda: ErrorFeedback(decay=1.5), "decay must be 0 to 1"),
        (lambda: Plan((Region("a"), Region("a"))), "'a' is declared twice"),
        (lambda: Plan((Region("a", ("x",)),)).bind(Net()), "pattern 'x' matches no parameter"),
        (lambda: Plan((Region("a", ("*",), max_ndim=0),)).bind(Net()), "no parameter of at most 0 dimension"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def check_traffic(rank, world):
    outcome = 2 * 2 * 8 * 4 // 3  # only where an outcome is agreed: three numbers and one bucket
    for transport in TRANSPORTS:
        shapes = {"matrix": (64, 64), "head": (10, 10)}
        ddp = DistributedDataParallel(Given(shapes))
        state = attach(ddp, Plan.low_bit(keep_fp32=["head"]), transport)
        averaged(ddp, gradients(rank, 0, shapes))
        traffic = state.traffic
        assert (traffic.steps, traffic.buckets, traffic.elements, traffic.low_bit_elements) == (1, 1, 4196, 4096)
        assert traffic.up_bits == 4096 + 3200
        assert traffic.down_bits == 4096 * 2 + 3200  # two tally planes for three workers
        assert traffic.ring_bytes == 2 * 2 * 4196 * 4 // 3
        envelope = traffic.envelope_bits // 8
        signs = {
            "allgather": 2 * (512 + envelope),
            # 8 lines in shards of 2, 3 and 3; each second stage is as long as the longest, with 8 bytes of status
            "collective": 2 * envelope + 512 - (128, 192, 192)[rank] + 2 * (2 * 192 + 8),
        }
        signs["golden"] = signs["collective"] + outcome
        assert traffic.sent_bytes == signs[transport] + 2 * 2 * 400 // 3
        assert set(traffic.as_dict()) >= {"up_bits", "sent_bytes"}
        state.close()


def check_traffic_of_a_majority(rank, world):
    shapes = {"matrix": (64, 64), "other": (64, 64)}
    for transport in TRANSPORTS:
        ddp = DistributedDataParallel(Given(shapes))
        state = attach(ddp, Plan.low_bit(result_format="majority"), transport)
        averaged(ddp, gradients(rank, 0, shapes))
        assert state.traffic.down_bits == 2 * 8192
        averaged(ddp, gradients(rank, 1, shapes, other=lambda g: g * (rank > 0)))
        assert state.traffic.down_bits == 2 * 8192 + 3 * 8192  # with an abstainer in the bucket the tally comes
        state.close()


@pytest.mark.distributed
def test_traffic_is_counted_as_it_is_sent(run_ranks):
    run_ranks(__file__, "check_traffic", 3)
    run_ranks(__file__, "check_traffic_of_a_majority", 4)


# ---- formats by the definition ---------------------------------------------------------------------------------------


def check_formats(rank, world):
    """Margin, unit scale, clip and decay against the plain formulas, from the ranks' own gradients."""
    shapes = {"matrix": (40, 50)}
    for transport in TRANSPORTS:
        for margin, unit in ((1, False), (2, False), (0, True)):
            plan = Plan.low_bit(result_format="majority", margin=margin, unit_scale=unit)
            ddp, state = wrap(Given(shapes), plan, transport)
            mine = gradients(rank, 0, shapes)["matrix"]
            votes, magnitude = torch.sign(mine), mine.double().abs().mean()
            dist.all_reduce(votes)
            dist.all_reduce(magnitude)
            want = torch.where(votes.abs() > margin, torch.sign(votes), 0.0)
            want *= 1.0 if unit else float(magnitude / world)
            got = averaged(ddp, {"matrix": mine})["matrix"]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
            state.close()

        feedback = ErrorFeedback(clip=0.75, decay=0.5)
        ddp, state = wrap(Given(shapes), Plan.low_bit(error_feedback=feedback), transport)
        residual = torch.zeros(shapes["matrix"])
        for step in range(4):
            mine = gradients(rank, step, shapes)["matrix"]
            p = mine + residual
            votes, magnitude = torch.sign(p), p.double().abs().mean()
            dist.all_reduce(magnitude)
            scale = float(magnitude / world)
            residual = 0.5 * (p - scale * votes).clamp(-0.75 * scale, 0.75 * scale)
            dist.all_reduce(votes)
            got = averaged(ddp, {"matrix": mine})["matrix"]
            torch.testing.assert_close(got, scale * votes / world, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(state.residuals["matrix"].view(40, 50), residual, rtol=1e-4, atol=1e-6)
        before = state.residuals["matrix"].clone()
        state.loss_scale = 8.0
        assert torch.equal(state.residuals["matrix"], 8 * before)
        with pytest.raises(ValueError, match="loss_scale must be positive"):
            state.loss_scale = 0.0
        state.close()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 3, 4])
def test_formats_and_error_feedback_are_the_plain_formulas(run_ranks, world):
    run_ranks(__file__, "check_formats", world)


# ---- how people use DDP ----------------------------------------------------------------------------------------------


def check_ways_of_ddp(rank, world):
    """static_graph, no_sync, bucket views, two models in one backward, join: no hang, the same bits on all ranks."""

    def same(ddp):
        same_on_all_ranks({name: p.grad for name, p in ddp.module.named_parameters()})

    for transport in TRANSPORTS:
        for feedback in (None, ErrorFeedback()):
            plan = Plan.low_bit(error_feedback=feedback)
            for option in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
                torch.manual_seed(rank)
                ddp, state = wrap(Net(), plan, transport, **{option: True})
                for step in range(3):
                    if option != "static_graph":  # with it plain DDP itself fails in a no_sync
                        with ddp.no_sync():
                            ddp(torch.randn(8, 50)).square().mean().backward()
                    ddp(torch.randn(8, 50)).square().mean().backward()
                    same(ddp)
                    ddp.zero_grad(set_to_none=step % 2 == 0)
                assert state.step == 3
                state.close()
            (a, state_a), (b, state_b) = wrap(Net(), plan, transport), wrap(Net(), plan, transport)
            for _ in range(3):
                x = torch.randn(8, 50)
                (a(x).square().mean() + b(x).square().mean()).backward()
                same(a)
                same(b)
                a.zero_grad()
                b.zero_grad()
            state_a.close()
            state_b.close()
            ddp, state = wrap(Net(), plan, transport)
            with ddp.join():
                for _ in range(2 + rank):
                    ddp(torch.randn(8, 50)).square().mean().backward()
            state.close()


def check_kept_gradients(rank, world):
    """With bucket views and gradients that are kept, plain DDP rounds the average in another place at three workers."""
    grads = []
    for plan in (None, Plan.fp32()):
        torch.manual_seed(0)
        ddp, _ = wrap(Net(), plan, gradient_as_bucket_view=True)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            ddp.zero_grad(set_to_none=False)
            ddp(torch.randn(8, 50, generator=generator)).square().mean().backward()
        grads.append(torch.cat([p.grad.reshape(-1) for p in ddp.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-8)


def check_subgroups(rank, world):
    """Two halves of the job, each with a model of its own, attach and train at the same time."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    for transport in TRANSPORTS:
        ddp = DistributedDataParallel(Given(), process_group=mine, bucket_cap_mb=0.01)
        state = attach(ddp, Plan.low_bit(error_feedback=ErrorFeedback()), transport)
        for step in range(2 + rank // 2):  # not even the same number of steps
            for tensor in averaged(ddp, gradients(rank, step)).values():
                everybody = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(everybody, tensor, group=mine)
                assert torch.equal(*everybody)
        state.close()


def check_closed(rank, world):
    """Nothing is left behind but groups that are used again; a backward pass says that the state was closed."""
    for transport in TRANSPORTS:
        for round_ in range(4):
            ddp, state = wrap(Given(), Plan.low_bit(), transport)
            averaged(ddp, gradients(rank, 0))
            state.close()
            state.close()
            if round_ == 0:
                threads = threading.active_count()
                groups = len(dist.distributed_c10d._world.pg_map)
        assert threading.active_count() <= threads
        assert len(dist.distributed_c10d._world.pg_map) == groups
        with pytest.raises(RuntimeError, match="takes no more buckets: it was closed"):
            averaged(ddp, gradients(rank, 1))


def check_counting_breaks_on_one_rank(rank, world):
    """Without anything held there is nothing to redo from: every rank stops, with the reason, and stays stopped."""
    # A group of its own, which is out of step afterwards.
    ddp, state = wrap(Given(), Plan.low_bit(), "collective", process_group=dist.new_group(list(range(world))))
    averaged(ddp, gradients(rank, 0))
    averaged(ddp, gradients(rank, 1))
    if rank == 0:

        def broken(*_arguments):
            raise MemoryError("injected")

        state._transport._count = broken
    with pytest.raises(Exception, match="the reducer of rank 0 failed for bucket 0 of step 2"):
        averaged(ddp, gradients(rank, 2))
    # After a failed backward pass DDP may refuse the next one by itself, before it calls the hook.
    with pytest.raises(Exception, match=r"takes no more buckets|INTERNAL ASSERT|[Rr]educ"):
        averaged(ddp, gradients(rank, 3))
    assert "the reducer of rank 0 failed" in str(state._stopped)
    state.close()


def check_one_rank_cannot_attach(rank, world):
    class Troubled(Plan):
        def bind(self, module):
            if rank == 1:
                raise ValueError("trouble on this rank only")
            return super().bind(module)

    with pytest.raises((ValueError, RuntimeError), match="trouble" if rank == 1 else "another rank cannot attach"):
        attach(DistributedDataParallel(Net()), Troubled())


def check_own_timeout(rank, world):
    group = borrow_group(dist.group.WORLD)
    assert timeout_of(group) == timeout_of(dist.group.WORLD)
    assert timeout_of(group).total_seconds() == 60
    give_back_group(dist.group.WORLD, group)
    assert borrow_group(dist.group.WORLD) is group
    other = borrow_group(dist.group.WORLD)
    assert other is not group
    if rank == 0:  # idle on one rank only: nobody may have it
        give_back_group(dist.group.WORLD, other)
    assert borrow_group(dist.group.WORLD) not in (group, other)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("check", "world"),
    [
        ("check_ways_of_ddp", 2),
        ("check_kept_gradients", 3),
        ("check_subgroups", 4),
        ("check_closed", 2),
        ("check_counting_breaks_on_one_rank", 2),
        ("check_one_rank_cannot_attach", 2),
        ("check_own_timeout", 2),
    ],
)
def test_ways_to_use_and_to_stop(run_ranks, check, world):
    run_ranks(__file__, check, world)
