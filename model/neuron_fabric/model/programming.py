"""What a driver writes to the registers: an endpoint's addresses, a job that is opened, a job that is closed.

Every function gives the writes in their order, as data, so that benches, drivers and a controller do the same with
whatever reaches the registers. The order is that of ``docs/registers.md``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from neuron_fabric.model.endpoint import member_endpoints
from neuron_fabric.model.net import Endpoint
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, check_job
from neuron_fabric.model.registers import Word, encoding_values, pack, words

__all__ = ["RegisterWrite", "close_job", "open_job", "set_addresses"]

_MASK = (1 << 32) - 1


class RegisterWrite(NamedTuple):
    """One 32-bit write."""

    address: int
    value: int


def set_addresses(
    params: ReducerParams, local: Endpoint, *, group: Endpoint | None = None, listen: Endpoint | None = None
) -> list[RegisterWrite]:
    """Where an in-network endpoint is, where it sends results to all, and the group whose frames it takes as well.

    The arguments are those of :class:`~neuron_fabric.model.endpoint.NetworkEndpoint`. To be written while no job is
    open.
    """
    values = _endpoint("LOCAL", local)
    for name, endpoint in (("GROUP", group), ("LISTEN", listen)):
        values |= _endpoint(name, endpoint or Endpoint(0, 0, 0))
        values[f"{name}_PORT"] |= pack(f"{name}_PORT", enable=int(endpoint is not None))
    return _writes(params, values)


def open_job(
    params: ReducerParams, config: JobConfig, bank: int = 0, *, lines: int = 0, first_chunk: int = 0
) -> list[RegisterWrite]:
    """Open a job in a bank; one that is open there is closed first.

    Where members have addresses, all of them and that of the parent go to the address table. ``lines`` and
    ``first_chunk`` are for the CXL endpoint.

    Raises
    ------
    ValueError
        Names what does not fit this reducer (see :func:`~neuron_fabric.model.reducer.check_job`; what else is open is
        not known here), or a worker without an address while others have one.
    """
    _check_bank(params, bank)
    check_job(config, params)
    for name, value, limit in (("lines", lines, params.lines_per_chunk), ("first_chunk", first_chunk, _MASK)):
        if not 0 <= operator.index(value) <= limit:
            raise ValueError(f"job {config.job}: {name} must be 0 to {limit}, not {value}")
    values = _bank_values(config, params) | {
        "JOB_LINES": pack("JOB_LINES", lines=lines),
        "JOB_FIRST_CHUNK": first_chunk,
    }
    return [
        *close_job(params, bank),
        *_writes(params, values, bank),
        *_address_table(params, config, bank),
        *_writes(params, {"JOB_CONTROL": pack("JOB_CONTROL", open=1, job=config.job)}, bank),
    ]


def close_job(params: ReducerParams, bank: int = 0) -> list[RegisterWrite]:
    """Close a bank; its slots are free when any further write has been answered."""
    _check_bank(params, bank)
    return _writes(params, {"JOB_CONTROL": 0}, bank)


def _bank_values(config: JobConfig, params: ReducerParams) -> dict[str, int]:
    """A job's bank without JOB_CONTROL and what only the CXL endpoint has."""
    majority = config.result_format == "majority"
    members = sum(1 << worker for worker in config.members)
    straggler, parent = config.straggler, config.parent
    values = {
        "JOB_EPOCH": config.epoch,
        "JOB_SLOTS": pack("JOB_SLOTS", base=config.base, log2_count=config.slot_count(params).bit_length() - 1),
        "JOB_MEMBERS0": members & _MASK,
        "JOB_MEMBERS1": members >> 32,
        **encoding_values(config.encoding),
        "JOB_RESULT": pack(
            "JOB_RESULT",
            majority=int(majority),
            multicast=int(config.multicast),
            child=int(parent is not None),
            planes=config.result_planes,
            margin=config.margin if majority else 0,
        ),
        "JOB_TIMEOUT": straggler.timeout if straggler is not None else 0,
        "JOB_QUORUM": straggler.quorum if straggler is not None else 0,
        "JOB_PARENT": 0,
        "JOB_PARENT_WORKER": 0,
    }
    if parent is not None:
        values["JOB_PARENT"] = pack("JOB_PARENT", job=parent.job, epoch=parent.epoch)
        values["JOB_PARENT_WORKER"] = parent.worker
    return values


def _address_table(params: ReducerParams, config: JobConfig, bank: int) -> Iterator[RegisterWrite]:
    addresses = list(config.members.values()) if isinstance(config.members, dict) else []
    parent = config.parent
    if not any(isinstance(address, Endpoint) for address in addresses):
        return
    entries = [(pack("ENTRY_SELECT", bank=bank, worker=worker), at) for worker, at in member_endpoints(config).items()]
    if parent is not None and isinstance(parent.address, Endpoint):
        entries.append((pack("ENTRY_SELECT", bank=bank, parent=1), parent.address))
    for select, endpoint in entries:
        values = _endpoint("ENTRY", endpoint) | {"ENTRY_SELECT": select, "ENTRY_WRITE": pack("ENTRY_WRITE", write=1)}
        yield from _writes(params, values)


def _endpoint(prefix: str, endpoint: Endpoint) -> dict[str, int]:
    return {
        f"{prefix}_MAC_LO": endpoint.mac & _MASK,
        f"{prefix}_MAC_HI": endpoint.mac >> 32,
        f"{prefix}_IP": endpoint.ip,
        f"{prefix}_PORT": pack(f"{prefix}_PORT", port=endpoint.port),
    }


def _check_bank(params: ReducerParams, bank: int) -> None:
    if not 0 <= operator.index(bank) < params.jobs:
        raise ValueError(f"bank {bank} is out of range; this reducer has {params.jobs}")


def _writes(params: ReducerParams, values: dict[str, int], bank: int = 0) -> list[RegisterWrite]:
    """Writes of the registers of these names, without those of which this reducer hasn't a bit."""
    table = _table(params.jobs)
    result = []
    for name, value in values.items():
        word = table[f"JOB{bank}{name[3:]}" if name.startswith("JOB_") else name]
        mask = word.writable(params)
        if value & ~mask:
            raise ValueError(f"{word.name}: {value:#x} has bits that this reducer hasn't")
        if mask:
            result.append(RegisterWrite(word.address, value))
    return result


@cache
def _table(jobs: int) -> dict[str, Word]:
    return {word.name: word for word in words(jobs)}
