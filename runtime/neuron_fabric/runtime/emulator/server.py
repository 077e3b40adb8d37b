"""The emulator: an engine and its controller behind a UDP socket, in one thread.

    with EmulatorServer(UdpAddress.parse("udp://127.0.0.1:0")) as server:
        ...  # server.url

A turn of its loop reads what has arrived into one buffer, hands all of it to the engine as one table, and sends what
became due in as few system calls as the kernel allows. Memory is taken at the start; whatever comes in can only be
counted and dropped.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from neuron_fabric.model.params import ReducerParams
from neuron_fabric.runtime.emulator import kernels
from neuron_fabric.runtime.emulator.controller import Controller, ControllerLimits
from neuron_fabric.runtime.emulator.datagrams import DatagramSocket, UdpAddress, is_loopback
from neuron_fabric.runtime.emulator.engine import Engine, engine_params
from neuron_fabric.runtime.emulator.faults import FaultPlan, Faults
from neuron_fabric.runtime.emulator.kernels import I64, Bytes, Frame, Message
from neuron_fabric.runtime.emulator.metrics import Metrics

__all__ = ["EmulatorServer"]

_FRAMES = 8192  # of one turn; what is more came in fragments that no worker sends
_TICK_SECONDS = 0.25
_NOTHING = np.zeros(0, np.uint8), np.zeros((0, len(Frame)), np.int64)


def _crash() -> None:
    os._exit(70)


class EmulatorServer:
    """A reducer at a UDP address.

    Parameters
    ----------
    listen : UdpAddress
        Port 0 takes any that is free.
    params : ReducerParams, optional
        Its sizes, by default those of :func:`~neuron_fabric.runtime.emulator.engine.engine_params`.
    limits : ControllerLimits, optional
    faults : FaultPlan, optional
    fault_seed : int
    metrics : Path, optional
        A file that is written once a second and at the end, in the text format of Prometheus.
    allow_remote : bool
        Whether ``listen`` may be reached from other machines. Nothing here is encrypted or authenticated.
    offload : bool
        Whether UDP_SEGMENT and UDP_GRO are used where the kernel has them.
    crash : callable
        What the fault of this name does; by default the process ends without a word.

    Raises
    ------
    ValueError
        A remote address without ``allow_remote``.
    OSError
        The address cannot be bound.
    """

    def __init__(
        self,
        listen: UdpAddress,
        params: ReducerParams | None = None,
        *,
        limits: ControllerLimits | None = None,
        faults: FaultPlan | None = None,
        fault_seed: int = 1,
        metrics: Path | None = None,
        allow_remote: bool = False,
        offload: bool = True,
        crash: Callable[[], None] = _crash,
    ) -> None:
        if not listen.host.is_loopback and not allow_remote:
            raise ValueError(
                f"{listen} can be reached from other machines, and whoever reaches it can use it; listen on 127.0.0.1 "
                "or allow it (--allow-remote)"
            )
        plan = faults or FaultPlan()
        self.engine = Engine(params or engine_params())
        self.controller = Controller(self.engine, trusted=_trusted, limits=limits)
        self.counters: Counter[str] = Counter()
        self.inbound = Faults(plan, fault_seed, inbound=True)
        self.outbound = Faults(plan, fault_seed, inbound=False)
        self._crash_after = plan.crash
        self._crash = crash
        self._frames = np.zeros((_FRAMES, len(Frame)), np.int64)
        self._messages = np.zeros((0, len(Message)), np.int64)
        self._unsent: tuple[memoryview, I64] | None = None
        self._metrics = Metrics(metrics) if metrics is not None else None
        self._next_tick = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._socket = DatagramSocket(listen, offload=offload)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)

    @property
    def address(self) -> UdpAddress:
        """Where it listens."""
        return self._socket.address

    @property
    def url(self) -> str:
        """The same as a URL."""
        return str(self.address)

    @property
    def offload(self) -> dict[str, bool]:
        """What the kernel does for many datagrams at once."""
        return {"UDP_SEGMENT": self._socket.segments, "UDP_GRO": self._socket.groups}

    # ---- life --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let :meth:`serve` return soon; from any thread or a signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):  # it has gone already
            self._wake.send(b"\0")

    def serve(self) -> None:
        """Serve until :meth:`stop`; then close all jobs, write the metrics and close the socket."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                key = selector.register(self._socket.socket, selectors.EVENT_READ)
                while not self._stopping:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                    if key.events != wanted:
                        key = selector.modify(self._socket.socket, wanted)
                    events = selector.select(self._timeout())
                    self._turn(any(found.fd == key.fd and mask & selectors.EVENT_READ for found, mask in events))
        finally:
            self.controller.close_all()
            self._report()
            self._socket.close()
            self._woken.close()
            self._wake.close()

    def __enter__(self) -> Self:
        """Serve in a thread."""

        def run() -> None:
            try:
                self.serve()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="emulator", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and raise what the thread ended with."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and value is None:
            raise self._error

    # ---- one turn ----------------------------------------------------------------------------------------------

    def _timeout(self) -> float:
        wakes = [wake for wake in (self.inbound.wake, self.outbound.wake, self._next_tick) if wake is not None]
        return max(0.0, min(wakes) - time.monotonic())

    def _turn(self, readable: bool) -> None:
        now = time.monotonic()
        self._flush()
        if readable or (self.inbound.wake is not None and self.inbound.wake <= now):
            self._take(*self._arrived(readable, now), now)
        if self.outbound.wake is not None and self.outbound.wake <= now:
            self._send(*_NOTHING, now)
        # Rule 8: input never waits for output. What is due stays due while the socket takes no more.
        while self._unsent is None and self.engine.due:
            self._send(*self.engine.emit(), now)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self.controller.tick(now)
            if self._metrics is not None and self._metrics.due(now):
                self._report()

    def _arrived(self, readable: bool, now: float) -> tuple[Bytes, I64]:
        frames = self._frames[:0]
        if readable:
            datagrams = self._socket.receive()
            number, lost = kernels.split(datagrams, self._frames)
            frames = self._frames[:number]
            self.counters["received_calls"] += len(datagrams)
            self.counters["received_frames"] += number
            self.counters["received_bytes"] += int(frames[:, Frame.LENGTH].sum())
            self.counters["received_dropped"] += lost
            if self._crash_after and self.counters["received_frames"] >= self._crash_after:
                self._crash()
        return self.inbound.apply(self._socket.data, frames, now)

    def _take(self, data: Bytes, frames: I64, now: float) -> None:
        if not len(frames):
            return
        for row in self.engine.receive(data, frames):
            at, size, peer = frames[row, : Frame.GOOD].tolist()
            for payload, address in self.controller.receive(data[at : at + size].tobytes(), peer, now):
                self._reply(payload, address, now)

    def _reply(self, payload: bytes, address: object, now: float) -> None:
        """Send a control frame. If the socket takes no more it is lost: it will be asked for again."""
        row = np.array([[0, len(payload), address, 1]], np.int64)
        data, frames = self.outbound.apply(np.frombuffer(payload, np.uint8), row, now)
        done, failed = self._socket.send(data.data, self._coalesced(frames))
        self.counters["sent_frames"] += len(frames)
        self.counters["sent_failed"] += len(frames) - done + failed

    def _send(self, data: Bytes, frames: I64, now: float) -> None:
        data, frames = self.outbound.apply(data, frames, now)
        self.counters["sent_frames"] += len(frames)
        self.counters["sent_bytes"] += int(frames[:, Frame.LENGTH].sum())
        if self._unsent is None:
            self._unsent = data.data, self._coalesced(frames)
            self._flush()
        else:
            self.counters["sent_failed"] += len(frames)

    def _flush(self) -> None:
        if self._unsent is None:
            return
        data, messages = self._unsent
        done, failed = self._socket.send(data, messages)
        self.counters["sent_calls"] += done
        self.counters["sent_failed"] += failed
        self._unsent = (data, messages[done:]) if done < len(messages) else None

    def _coalesced(self, frames: I64) -> I64:
        if len(self._messages) < len(frames):
            self._messages = np.zeros((2 * len(frames), len(Message)), np.int64)
        return self._messages[: kernels.coalesce(frames, self._messages)].copy()

    def _report(self) -> None:
        if self._metrics is not None:
            self._metrics.write(self)


def _trusted(address: object) -> bool:
    return isinstance(address, int) and is_loopback(address)
