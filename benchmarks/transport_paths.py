"""The ways for an engine step to reach an asyncio task in another process, each as a producer and a consumer.

A producer stamps before it touches the step's arrays; a consumer stamps once the rows are Python values in the task
that handles them. Sampled token ids start as numpy arrays, as an engine has them.
"""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.records import RecordKind
from ringserve.shm_transport.ring import HEADER
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step import LogprobColumns, Step
from ringserve.shm_transport.step_ring import StepReader, StepRecord, StepWriter
from ringserve.shm_transport.strategies import make_waiter

RINGS = RingConfig()


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: rows of one token each, and logprob alternatives for each."""

    num_rows: int
    num_logprobs: int = 0


def make_step(cell: Cell) -> Step:
    """Return a step as the engine's sampler leaves it."""
    rng = np.random.default_rng(1)
    n, k = cell.num_rows, cell.num_logprobs
    logprobs = None
    if k:
        logprobs = LogprobColumns(
            num_entries=np.full(n, k + 1, np.uint8),
            token_ids=rng.integers(0, 49152, n * (k + 1)).astype(np.int32),
            logprobs=-rng.random(n * (k + 1)).astype(np.float32),
            sampled_ranks=np.ones(n, np.int32),
        )
    handles = np.arange(n, dtype=np.uint64) | np.uint64(1 << 32)
    return Step(handles=handles, token_ids=rng.integers(0, 49152, n).astype(np.int32), logprobs=logprobs, num_running=n)


class Producer(Protocol):
    """The engine's side."""

    def send(self, step: Step, stamp_ns: int) -> int:
        """Send one step with its stamp; return the bytes that travel."""


class Consumer(Protocol):
    """The server's side. `handled` gets (stamp, now, decode CPU in ns) of each record, in the handling task."""

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        """Take `num_records` records."""

    def close(self) -> None:
        """Give everything back."""


# --- the ring -----------------------------------------------------------------------------------------------------


def step_bytes(step: Step) -> int:
    """Return the bytes of one STEP record that are touched."""
    columns = [step.handles, step.token_ids]
    if step.logprobs is not None:
        columns += [
            step.logprobs.num_entries,
            step.logprobs.token_ids,
            step.logprobs.logprobs,
            step.logprobs.sampled_ranks,
        ]
    return HEADER.size + sum(column.nbytes for column in columns)


class RingProducer:
    """StepWriter, as the engine uses it."""

    def __init__(self, ring: Segment) -> None:
        self._writer = StepWriter(ring, on_full=lambda: None)

    def send(self, step: Step, stamp_ns: int) -> int:
        step.scheduled_ns = stamp_ns
        self._writer.publish(step)
        return step_bytes(step)


class RingConsumer:
    """StepReader behind one of the waiting strategies, as the reader task uses it."""

    def __init__(self, ring: Segment, strategy: str) -> None:
        self._reader = StepReader(ring)
        self._waiter = make_waiter(strategy, self._reader.consumer, os.getpid())

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        for _ in range(num_records):
            while not self._waiter.try_wait():
                await self._waiter.wait(timeout_s=1)
            started = time.thread_time_ns()
            record = self._reader.read()
            cpu_ns = time.thread_time_ns() - started
            assert isinstance(record, StepRecord)
            handled(record.header.scheduled_ns, time.monotonic_ns(), cpu_ns)
            self._waiter.note(record.header.published_ns)
            await asyncio.sleep(0)

    def close(self) -> None:
        self._waiter.close()


# --- the ring with an eventfd in place of the semaphore -----------------------------------------------------------


class Eventfd:
    """An eventfd that counts like a semaphore, with the two members of posix_ipc.Semaphore that a producer uses."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def release(self) -> None:
        os.eventfd_write(self.fd, 1)

    def try_wait(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True


class EventfdConsumer:
    """The loop watches the eventfd itself; no thread."""

    def __init__(self, ring: Segment, doorbell: Eventfd) -> None:
        self._reader = StepReader(ring)
        self._doorbell = doorbell

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._doorbell.fd, ready.set)
        for _ in range(num_records):
            while not self._doorbell.try_wait():
                ready.clear()
                await ready.wait()
            started = time.thread_time_ns()
            record = self._reader.read()
            cpu_ns = time.thread_time_ns() - started
            assert isinstance(record, StepRecord)
            handled(record.header.scheduled_ns, time.monotonic_ns(), cpu_ns)
            await asyncio.sleep(0)
        loop.remove_reader(self._doorbell.fd)

    def close(self) -> None:
        os.close(self._doorbell.fd)


# --- ZMQ in vLLM's shape ------------------------------------------------------------------------------------------


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request's output, the fields that a plain decode step fills."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: tuple[list[list[int]], list[list[float]], list[int]] | None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None


class EngineOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One step's outputs."""

    engine_index: int = 0
    outputs: list[EngineOutput] = []  # msgspec copies it
    num_running: int = 0
    timestamp: int = 0


class ZmqProducer:
    """An object for each output, msgpack into a reused buffer, PUSH over ipc."""

    def __init__(self, address: str, cell: Cell) -> None:
        self._socket = _push_socket(address)
        self._ids = [f"chatcmpl-{i:032x}"[:41] for i in range(cell.num_rows)]
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def send(self, step: Step, stamp_ns: int) -> int:
        tokens = step.token_ids.tolist()
        logprobs = _logprob_lists(step)
        outputs = [
            EngineOutput(request_id, [token], logprobs[i] if logprobs else None)
            for i, (request_id, token) in enumerate(zip(self._ids, tokens, strict=True))
        ]
        message = EngineOutputs(outputs=outputs, num_running=step.num_running, timestamp=stamp_ns)
        self._encoder.encode_into(message, self._buffer)
        self._socket.send(self._buffer, copy=False)
        size = len(self._buffer)
        self._buffer = bytearray(size)
        return size


def _push_socket(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def _logprob_lists(step: Step) -> list[tuple[list[list[int]], list[list[float]], list[int]]] | None:
    if step.logprobs is None:
        return None
    n = len(step.handles)
    ids = step.logprobs.token_ids.reshape(n, -1).tolist()
    values = step.logprobs.logprobs.reshape(n, -1).tolist()
    ranks = step.logprobs.sampled_ranks.tolist()
    return [([i], [v], [r]) for i, v, r in zip(ids, values, ranks, strict=True)]


class ZmqConsumer:
    """zmq.asyncio: a socket task decodes and puts into a queue, a handler task gets."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        decoder = msgspec.msgpack.Decoder(EngineOutputs)
        queue: asyncio.Queue[tuple[EngineOutputs, int]] = asyncio.Queue()

        async def receive() -> None:
            while True:
                (frame,) = await self._socket.recv_multipart(copy=False)
                started = time.thread_time_ns()
                outputs = decoder.decode(frame.buffer)
                queue.put_nowait((outputs, time.thread_time_ns() - started))

        task = asyncio.create_task(receive())
        for _ in range(num_records):
            outputs, cpu_ns = await queue.get()
            handled(outputs.timestamp, time.monotonic_ns(), cpu_ns)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def close(self) -> None:
        self._socket.close(0)


# --- ZMQ tuned: the ring's own bytes, no asyncio layer ------------------------------------------------------------


class TunedZmqProducer:
    """The fixed columns as one message."""

    def __init__(self, address: str) -> None:
        self._socket = _push_socket(address)

    def send(self, step: Step, stamp_ns: int) -> int:
        header = HEADER.pack(
            0, RecordKind.STEP, 0, 0, 0, len(step.handles), len(step.token_ids), 0, 0, stamp_ns, 0, 0, step.num_running,
            0, 0, 0, 0,
        )  # fmt: skip
        columns = [step.handles, step.token_ids]
        if step.logprobs is not None:
            columns += [step.logprobs.token_ids, step.logprobs.logprobs]
        data = b"".join((header, *(column.tobytes() for column in columns)))
        self._socket.send(data)
        return len(data)


class TunedZmqConsumer:
    """The loop watches ZMQ's descriptor; every message that is there is taken at once."""

    def __init__(self, address: str, cell: Cell) -> None:
        self._socket = zmq.Context().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._cell = cell

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        socket = self._socket
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(socket.getsockopt(zmq.FD), ready.set)
        num_taken = 0
        while num_taken < num_records:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                ready.clear()
                if not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    await ready.wait()
                continue
            started = time.thread_time_ns()
            stamp_ns = self._decode(data)
            cpu_ns = time.thread_time_ns() - started
            handled(stamp_ns, time.monotonic_ns(), cpu_ns)
            num_taken += 1
            await asyncio.sleep(0)
        loop.remove_reader(socket.getsockopt(zmq.FD))

    def close(self) -> None:
        self._socket.close(0)

    def _decode(self, data: bytes) -> int:
        n, offset = self._cell.num_rows, HEADER.size
        stamp_ns = HEADER.unpack_from(data)[9]
        counts = [(n, "<u8"), (n, "<i4")]
        if self._cell.num_logprobs:
            entries = n * (self._cell.num_logprobs + 1)
            counts += [(entries, "<i4"), (entries, "<f4")]
        for count, dtype in counts:
            np.frombuffer(data, dtype, count, offset).tolist()
            offset += count * np.dtype(dtype).itemsize
        return int(stamp_ns)


# --- multiprocessing.Queue ----------------------------------------------------------------------------------------


class QueueProducer:
    """Pickled lists through the standard library's queue."""

    def __init__(self, queue: "multiprocessing.Queue[Any]") -> None:
        self._queue = queue

    def send(self, step: Step, stamp_ns: int) -> int:
        self._queue.put((stamp_ns, step.handles.tolist(), step.token_ids.tolist(), _logprob_lists(step)))
        return 0


class QueueConsumer:
    """A thread gets, the loop is woken for each."""

    def __init__(self, queue: "multiprocessing.Queue[Any]") -> None:
        self._queue = queue

    async def run(self, num_records: int, handled: Callable[[int, int, int], None]) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[int] = asyncio.Queue()

        def get() -> None:
            for _ in range(num_records):
                loop.call_soon_threadsafe(inbox.put_nowait, self._queue.get()[0])

        task = asyncio.create_task(asyncio.to_thread(get))
        for _ in range(num_records):
            handled(await inbox.get(), time.monotonic_ns(), 0)
        await task

    def close(self) -> None:
        self._queue.close()
