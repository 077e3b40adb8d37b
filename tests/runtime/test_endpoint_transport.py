"""The hook through a reducer behind a URL: the same bits as any other transport, and FP32 whenever the reducer fails.

The reducer is the emulator, in a thread of the test or, where it is to die, of one rank.
"""

import contextlib
import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neuron_fabric.runtime import ErrorFeedback, Plan, Region, Route, attach
from neuron_fabric.runtime.emulator.datagrams import UdpAddress
from neuron_fabric.runtime.emulator.engine import engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan
from neuron_fabric.runtime.emulator.server import EmulatorServer
from neuron_fabric.runtime.loop import train_run
from neuron_fabric.runtime.reducer import AbsentError, FailedError, ReducerUrl
from neuron_fabric.runtime.transports.endpoint import REASONS, ReducerEndpoint, _reason_number
from neuron_fabric.runtime.workloads.digits import DigitsWorkload

SEED = int(os.environ.get("NEURON_FABRIC_SEED", "1"))

# Buckets take parameters from the last on, up to 20 kB: so "gated" and "vote" have one of their own.
SHAPES = {"binary": (33, 65), "fed": (9, 100), "kept": (11,), "chunks": (3, 9000), "ternary": (70, 50)}
SHAPES |= {"vote": (90, 90), "gated": (90, 80)}
PLAN = Plan(
    (
        Region("ternary", ("ternary",), Route.TERNARY),
        Region("gated", ("gated",), Route.TERNARY, result_format="majority", margin=1),
        Region("vote", ("vote",), result_format="majority"),
        Region("fed", ("fed",), error_feedback=ErrorFeedback(clip=1.0)),
        Region("kept", ("kept",), Route.FP32),
        Region("rest", ("*",)),
    )
)
QUICK = "timeout=20&open_timeout=20&lines=4&slots=8"


class Given(nn.Module):
    """A model whose gradient is whatever it is given."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, coefficients):
        return sum((getattr(self, name) * value).sum() for name, value in coefficients.items())


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if step % 3 == 1 and rank == 0:  # somebody has nothing to say
        for name in ("chunks", "vote", "gated"):
            made[name].zero_()
    return made


class Run:
    """Steps of one model, one by one."""

    def __init__(self, rank, transport, plan=PLAN):
        self.rank, self.step = rank, 0
        self.ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.02)
        self.state = attach(self.ddp, plan, transport)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.state.close()

    def next(self):
        """One backward pass; all gradients in one."""
        self.ddp.zero_grad(set_to_none=True)
        self.ddp(gradients(self.rank, self.step)).backward()
        self.step += 1
        return torch.cat([p.grad.reshape(-1) for p in self.ddp.parameters()])


class Emulator:
    """The emulator in a thread. When it ends its jobs are gone and nobody is told, as when it is killed."""

    def __init__(self, port, *, workers=8, slots=64, jobs=8, faults="", crash=0):
        plan = replace(FaultPlan.parse(faults), crash=crash)
        self.server = EmulatorServer(
            UdpAddress.parse(f"udp://127.0.0.1:{port}"),
            engine_params(workers=workers, slots=slots, lines=16, jobs=jobs),
            faults=plan,
            fault_seed=SEED,
            crash=self.die,
        )
        self.server.__enter__()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def die(self):
        self.server.stop()

    def end(self):
        self.server.__exit__(None, None, None)


@pytest.fixture
def port():
    """A UDP port that nobody has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def same_on_all_ranks(tensor):
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor)
    assert all(torch.equal(other, tensor) for other in everybody)


def low_bit(state):
    return state.traffic.low_bit_elements


# ---- the same bits -------------------------------------------------------------------------------------------------


def check_equals_allgather(rank, world, url):
    with Run(rank, "allgather") as reference, Run(rank, url) as tested:
        for _ in range(7):
            assert torch.equal(tested.next(), reference.next())
        assert not tested.state.fallbacks
        assert low_bit(tested.state) == low_bit(reference.state) > 0
        jobs = [(*key[:1], *key[2:]) for key in tested.state._transport.jobs]
        assert sorted(jobs) == [
            ("binary", False, 0),
            ("binary", False, 0),
            ("binary", True, 0),
            ("ternary", False, 0),
            ("ternary", True, 1),
        ]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits_as_allgather(run_ranks, port, world):
    with Emulator(port):
        run_ranks(__file__, "check_equals_allgather", world, url=f"udp://127.0.0.1:{port}?{QUICK}")


@pytest.mark.distributed
def test_the_same_bits_over_a_bad_network(run_ranks, port):
    faults = "loss=0.02,duplicate=0.02,reorder=0.02,corrupt=0.02"
    print(f"NEURON_FABRIC_SEED={SEED}")
    with Emulator(port, faults=faults):
        run_ranks(__file__, "check_equals_allgather", 2, url=f"udp://127.0.0.1:{port}?{QUICK}")


def check_training(rank, world, url):
    workload = DigitsWorkload(width=4, epochs=1)
    models = {}
    for transport in ("allgather", url):

        def keep(ddp, transport=transport):
            models[transport] = ddp.module
            return attach(ddp, Plan.low_bit(keep_fp32=workload.head, one_d_fp32=True), transport)

        run = train_run(workload, 1, keep, steps=12)
        assert not run.fallbacks
    parameters = [list(model.parameters()) for model in models.values()]
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


@pytest.mark.distributed
def test_training_over_a_bad_network_gives_the_same_model(run_ranks, port):
    print(f"NEURON_FABRIC_SEED={SEED}")
    with Emulator(port, faults="loss=0.01,duplicate=0.01,reorder=0.01,corrupt=0.01"):
        run_ranks(__file__, "check_training", 2, url=f"udp://127.0.0.1:{port}?timeout=60&open_timeout=20&lines=1")


def check_golden(rank, world):
    with Run(rank, "allgather") as reference, Run(rank, "golden:alone") as tested:
        for _ in range(3):
            assert torch.equal(tested.next(), reference.next())
        assert not tested.state.fallbacks


@pytest.mark.distributed
def test_the_golden_model_in_process(run_ranks):
    run_ranks(__file__, "check_golden", 1)


def check_environment(rank, world, url):
    os.environ["NEURON_FABRIC_REDUCER"] = url
    try:
        with Run(rank, "endpoint") as run:
            run.next()
            assert not run.state.fallbacks
    finally:
        del os.environ["NEURON_FABRIC_REDUCER"]
    with pytest.raises(ValueError, match="set NEURON_FABRIC_REDUCER"):
        Run(rank, "endpoint")
    with pytest.raises(ValueError, match="unknown kind 'cxl'"):
        Run(rank, "cxl:///dev/dax0.0")


@pytest.mark.distributed
def test_the_url_may_come_from_the_environment(run_ranks, port):
    with Emulator(port):
        run_ranks(__file__, "check_environment", 1, url=f"udp://127.0.0.1:{port}?{QUICK}")


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def fp32_steps(rank, steps):
    """What plain FP32 makes of the same steps."""
    with Run(rank, "allgather", Plan.fp32()) as plain:
        return [plain.next() for _ in range(steps)]


def until_low_bit(run, most=200):
    """Steps until one goes without a failure; how many there were. Each is FP32's, bit for bit, until then."""
    for count in range(most):
        before = run.state.fallbacks["reducer_failed"]
        same_on_all_ranks(run.next())
        if run.state.fallbacks["reducer_failed"] == before:
            return count
        dist.barrier()  # the reducer is asked in the background; without a pause for that, steps take no time
        torch.randn(300, 300) @ torch.randn(300, 300)
    raise AssertionError(f"no step in {most} was low-bit again: {run.state.fallbacks}")


def check_absent_at_first(rank, world, port):
    url = f"udp://127.0.0.1:{port}?timeout=20&open_timeout=0.2"
    plain = fp32_steps(rank, 3)
    with Run(rank, url) as run:
        for wanted in plain:
            assert torch.equal(run.next(), wanted)
        assert low_bit(run.state) == 0
        buckets = run.state.fallbacks["reducer_failed"]
        assert buckets > 0
        assert run.state.fallbacks["reducer_absent"] == 3
        emulator = Emulator(port) if rank == 0 else contextlib.nullcontext()
        with emulator:
            dist.barrier()
            until_low_bit(run, 2000)
            assert low_bit(run.state) > 0


@pytest.mark.distributed
def test_absent_at_first(run_ranks, port):
    run_ranks(__file__, "check_absent_at_first", 2, port=port)


def check_refused(rank, world, url):
    plain = fp32_steps(rank, 2)
    with Run(rank, url) as run:
        for wanted in plain:
            assert torch.equal(run.next(), wanted)
        assert run.state.fallbacks["reducer_refused_no_capacity"] == 2


@pytest.mark.distributed
def test_refused(run_ranks, port):
    with Emulator(port, workers=1):
        run_ranks(__file__, "check_refused", 2, url=f"udp://127.0.0.1:{port}?{QUICK}")


def check_restart(rank, world, port):
    emulator = Emulator(port) if rank == 0 else None
    dist.barrier()
    with Run(rank, "allgather") as reference, Run(rank, f"udp://127.0.0.1:{port}?{QUICK}") as run:
        for _ in range(3):
            assert torch.equal(run.next(), reference.next())
        if emulator is not None:
            emulator.end()
        dist.barrier()
        for _ in range(3):
            same_on_all_ranks(run.next())
        assert run.state.fallbacks["reducer_absent"] == 3
        if rank == 0:
            emulator = Emulator(port)
        dist.barrier()
        until_low_bit(run, 2000)
        assert {job.epoch for job in run.state._transport.jobs.values()} == {2}
        failed = run.state.fallbacks["reducer_failed"]
        for _ in range(3):
            same_on_all_ranks(run.next())
        assert run.state.fallbacks["reducer_failed"] == failed
    dist.barrier()
    if emulator is not None:
        emulator.end()


@pytest.mark.distributed
def test_killed_and_restarted(run_ranks, port):
    run_ranks(__file__, "check_restart", 2, port=port)


def check_crash_in_a_bucket(rank, world, port):
    emulator = Emulator(port, crash=60) if rank == 0 else None
    dist.barrier()
    with Run(rank, f"udp://127.0.0.1:{port}?timeout=20&open_timeout=2&lines=4&slots=8") as run:
        for _ in range(8):
            same_on_all_ranks(run.next())
        assert run.state.fallbacks["reducer_absent"] > 0
    if emulator is not None:
        emulator.end()


@pytest.mark.distributed
def test_it_dies_in_the_middle_of_a_bucket(run_ranks, port):
    run_ranks(__file__, "check_crash_in_a_bucket", 2, port=port)


def check_one_rank_fails(rank, world, url):
    with Run(rank, "allgather") as reference, Run(rank, url) as run:
        assert torch.equal(run.next(), reference.next())
        transport = run.state._transport
        if rank == 1:
            job = next(iter(transport.jobs.values()))
            collect = job.reducer.collect

            def fails(ticket, timeout):
                job.reducer.collect = collect
                raise FailedError("told to", "nack_stale")

            job.reducer.collect = fails
        same_on_all_ranks(run.next())
        assert run.state.fallbacks["reducer_failed"] > 0
        assert run.state.fallbacks["reducer_nack_stale"] == 1
        reference.next()
        failed = run.state.fallbacks["reducer_failed"]
        for _ in range(3):  # the very next step is low-bit again
            before = low_bit(run.state)
            same_on_all_ranks(run.next())
            assert low_bit(run.state) > before
        assert run.state.fallbacks["reducer_failed"] == failed
        assert {job.epoch for job in transport.jobs.values()} == {1}


@pytest.mark.distributed
def test_a_bucket_that_fails_on_one_rank(run_ranks, port):
    """No time limit is waited out: the others hear of it."""
    with Emulator(port):
        url = f"udp://127.0.0.1:{port}?timeout=3000&open_timeout=20"
        run_ranks(__file__, "check_one_rank_fails", 2, url=url, deadline=60)


def check_two_runs_at_once(rank, world, url):
    with Run(rank, "allgather") as reference, Run(rank, url) as one, Run(rank, url) as two:
        for _ in range(3):
            wanted = reference.next()
            assert torch.equal(one.next(), wanted)
            assert torch.equal(two.next(), wanted)
        assert not one.state.fallbacks
        assert not two.state.fallbacks


@pytest.mark.distributed
def test_two_runs_share_a_reducer(run_ranks, port):
    with Emulator(port, jobs=16, slots=128):
        run_ranks(__file__, "check_two_runs_at_once", 2, url=f"udp://127.0.0.1:{port}?{QUICK}")


def test_reasons():
    assert [_reason_number(reason) for reason in REASONS] == list(range(len(REASONS)))
    assert REASONS[_reason_number("refused_bad_value")] == "refused"
    assert REASONS[_reason_number("driver")] == "failed"


def test_a_host_that_nobody_knows():
    with pytest.raises(AbsentError, match=r"no\.such\.host"):
        ReducerEndpoint(ReducerUrl.parse("udp://no.such.host.invalid:9000"))
