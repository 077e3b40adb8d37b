"""A reducer behind a UDP socket for tests: the golden model and as little of a controller as a driver needs.

    with StandIn(members=2, slots=4) as reducer:
        driver = UdpReducer("127.0.0.1", reducer.port)

It loses, doubles, swaps and damages frames if told to, from a seed; and it can be silent, forget its jobs, or die. What
it does is a few lines on purpose: the emulator has tests of its own.
"""

import random
import socket
import threading
from collections import Counter

from neuron_fabric.model import control
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, SignCountReducer
from neuron_fabric.model.wire import HEADER_BYTES, FrameType, Header, HeaderError, Reason


class StandIn:
    """One reducer and its thread."""

    def __init__(
        self, members, *, slots=8, lines=16, jobs=4, loss=0.0, duplicate=0.0, reorder=0.0, corrupt=0.0, seed=1, port=0
    ):
        self.params = ReducerParams(
            workers=max(members, 2), acc_bits=8, slots=slots * jobs, jobs=jobs, lines_per_chunk=lines
        )
        self.members, self.slots, self.lines = members, slots, lines
        self.loss, self.duplicate, self.reorder, self.corrupt = loss, duplicate, reorder, corrupt
        self.reducer = SignCountReducer(self.params)
        self.random = random.Random(seed)
        self.refuse = None  # a reason
        self.deaf = False  # takes nothing
        self.mute = False  # answers only control frames
        self.frames = Counter()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.socket.bind(("127.0.0.1", port))
        self.socket.settimeout(0.02)
        self.port = self.socket.getsockname()[1]
        self.nonce = self.random.getrandbits(64)
        self.asked = {}  # job -> worker -> (header, open, address)
        self.jobs = {}  # job -> (config, grants by worker)
        self.bases = {}
        self.held = []
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.stopped.set()
        self.thread.join(10)
        self.socket.close()

    def forget(self):
        """As after a restart."""
        with self.lock:
            self.reducer = SignCountReducer(self.params)
            self.asked.clear()
            self.jobs.clear()
            self.nonce = self.random.getrandbits(64)

    def run(self):
        while not self.stopped.is_set():
            try:
                data, address = self.socket.recvfrom(65536)
            except TimeoutError:
                self.flush()
                continue
            if self.deaf:
                continue
            with self.lock:
                for frame, sender in self.through((data, address)):
                    self.take(frame, sender)
                for outgoing in self.reducer.poll():
                    self.answer(outgoing)

    def through(self, frame):
        """What the network makes of a frame."""
        if self.random.random() < self.loss:
            return
        if self.random.random() < self.corrupt:
            data = bytearray(frame[0])
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            self.frames["corrupt"] += 1
            return  # the checksum does not hold: nobody gets to see it
        if self.random.random() < self.reorder:
            self.held.append(frame)
            return
        yield frame
        if self.random.random() < self.duplicate:
            yield frame
        held, self.held = self.held, []
        yield from held

    def flush(self):
        with self.lock:
            held, self.held = self.held, []
            for frame, sender in held:
                self.take(frame, sender)
            for outgoing in self.reducer.poll():
                self.answer(outgoing)

    def answer(self, outgoing):
        if self.mute:
            return
        for _ in range(0 if self.random.random() < self.loss else 1 + (self.random.random() < self.duplicate)):
            self.socket.sendto(outgoing.payload, outgoing.address)

    def take(self, frame, sender):
        try:
            header = Header.unpack(frame)
        except HeaderError:
            return
        self.frames[header.type.name] += 1
        if header.type is FrameType.OPEN:
            self.open(header, control.Open.unpack(frame[HEADER_BYTES:]), sender)
        elif header.type is FrameType.STATUS:
            self.tell(header, control.StatusRequest.unpack(frame[HEADER_BYTES:]), sender)
        elif header.type is FrameType.CLOSE:
            self.socket.sendto(frame, sender)
        else:
            self.reducer.receive(frame, sender)

    def reply(self, header, payload, sender, epoch=0, reason=0):
        frame = control.control_frame(payload, job=header.job, worker=header.worker, epoch=epoch, reason=reason)
        self.socket.sendto(frame, sender)

    def open(self, header, wanted, sender):
        limits = {"max_workers": 64, "acc_bits": self.params.acc_bits, "encodings": 3}
        if self.refuse is not None:
            self.reply(header, control.Grant(wanted.nonce, **limits), sender, reason=self.refuse)
            return
        job = header.job
        config, nonces = self.jobs.get(job, (None, {}))
        asked = self.asked.setdefault(job, {})
        asked[header.worker] = (header, wanted, sender)
        if nonces.get(header.worker) != wanted.nonce:
            new = {worker: each for worker, each in asked.items() if nonces.get(worker) != each[1].nonce}
            if len(new) < wanted.members:
                grant = control.Grant(wanted.nonce, members=wanted.members, present=len(new), **limits)
                self.reply(header, grant, sender, reason=Reason.NOT_READY)
                return
            epochs = [each[0].epoch for each in new.values()] + ([config.epoch] if config else [])
            config = JobConfig(
                job,
                1 + max(epochs),
                {worker: each[2] for worker, each in new.items()},
                control.ENCODINGS[wanted.encoding],
                control.RESULT_FORMATS[wanted.result_format],
                wanted.margin,
                multicast=False,
                base=self.slots * self.bases.setdefault(job, len(self.bases)),
                slots=self.slots,
            )
            self.reducer.open(config)
            self.jobs[job] = config, {worker: each[1].nonce for worker, each in new.items()}
            self.first = max(each[1].next_chunk for each in new.values())
        grant = control.Grant(
            wanted.nonce,
            slots=self.slots,
            first_chunk=self.first,
            members=wanted.members,
            present=wanted.members,
            lines_per_chunk=self.lines,
            result_planes=config.result_planes,
            **limits,
        )
        self.reply(header, grant, sender, epoch=config.epoch)

    def tell(self, header, request, sender):
        config = self.jobs.get(header.job, (None, {}))[0]
        state = control.JobState.NONE if config is None else control.JobState.OPEN
        reply = control.StatusReply(
            request.cookie, self.nonce, self.params.slots, 8, self.slots, 1, state, {"frames": 7}
        )
        self.reply(header, reply, sender, epoch=0 if config is None else config.epoch)
