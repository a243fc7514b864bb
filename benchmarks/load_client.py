"""The load client: N streams over raw asyncio protocols on uvloop, in a process of its own, ordered about by a pipe.

It does the least that gives a figure: stamp the read, count a marker in its bytes, note the count where a lockstep
engine or a floor looks. `Outcome.client_cpu_ns` shows that it is not what limits a run.
"""

import asyncio
import mmap
import multiprocessing
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
import posix_ipc
import uvloop

from benchmarks.processes import cores, cpu_ns, pin

END = b"0\r\n\r\n"  # of a chunked body
_TIMEOUT_S = 120  # of a load; then its streams and the engine wait for each other
# Of a client that stalls. With loopback's own buffers and 64 KiB segments the kernel takes megabytes of each stream
# before the server sees that nobody reads; over a network it does not.
_STALL_RCVBUF, _STALL_MSS = 4096, 1460
_SETTLE_S = 0.03  # for the server to finish what it does before the first and after the last byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """N equal requests at once, each on a connection of its own that is open before the clock starts.

    Attributes:
        request: Method, path and body, as they go over the wire.
        marker: Bytes that every event with a token has once, and no other event; None: the answer is no stream.
        num_events: Of all streams together, if no event is merged.
        counter: The lockstep engine's file.
        doorbell: A semaphore's name, posted when another N events are here and more must come: a floor's next tick.
        stall_s: Stop reading at the first byte, and stay so for this long, with buffers as over a network.
    """

    port: int
    pid: int
    request: bytes
    num_streams: int
    marker: bytes | None
    num_events: int = 0
    counter: Path | None = None
    doorbell: str | None = None
    stall_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the client saw.

    Attributes:
        error: The first answer that was not 200, or "".
        sent_ns: [num_streams], CLOCK_MONOTONIC.
        times_ns: Of each stream, the arrival of each event.
        wall_ns: From the first request to the last byte.
        server_cpu_ns: From before the first request until the server is at rest.
        num_bytes: Received, heads included.
        num_reads: Calls with data.
    """

    error: str
    sent_ns: np.ndarray
    times_ns: list[np.ndarray]
    wall_ns: int
    server_cpu_ns: int
    client_cpu_ns: int
    num_bytes: int
    num_reads: int

    @property
    def num_events(self) -> int:
        """Of all streams."""
        return sum(map(len, self.times_ns))


class LoadClient:
    """The process's handle. Make it before the caller has threads."""

    def __init__(self) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        pin(self._process.pid, cores()[1])

    def run(self, load: Load) -> Outcome:
        """Run a load to its end."""
        self.start(load)
        return self.result()

    def start(self, load: Load) -> None:
        """Begin a load; `result` must follow."""
        self._pipe.send(load)

    def is_done(self, timeout_s: float) -> bool:
        """Wait for so long at most; return whether `result` returns at once."""
        return self._pipe.poll(timeout_s)

    def result(self) -> Outcome:
        """Wait for the end of the load.

        Raises:
            RuntimeError: If the client has failed.
        """
        outcome: Outcome | Exception = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise RuntimeError(f"the load client failed: {outcome!r}") from outcome
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def http_request(path: str, body: bytes, *header_lines: bytes) -> bytes:
    """Return a POST as it goes over the wire."""
    last = b"".join(line + b"\r\n" for line in header_lines)
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    return head % (path.encode(), len(body), last) + body


def _serve(pipe: Connection) -> None:
    while True:
        load = pipe.recv()
        try:
            pipe.send(uvloop.run(_Run(load).run()))
        except Exception as exc:
            pipe.send(exc)


class _Run:
    """One load; what its streams share."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.marker = load.marker or b"\0"
        self.error = ""
        self.num_bytes = self.num_reads = 0
        self._num_arrived = 0
        self._counter, self._num_before = _open_counter(load.counter)
        self._doorbell = posix_ipc.Semaphore(load.doorbell) if load.doorbell else None
        self._next_tick = load.num_streams
        self._num_open = load.num_streams
        self._all_ended = asyncio.Event()

    async def run(self) -> Outcome:
        """Connect, ask, wait for the end."""
        streams = [_Stream(self) for _ in range(self.load.num_streams)]
        await asyncio.gather(*map(self._connect, streams))
        await asyncio.sleep(_SETTLE_S)
        cpu_before_ns, own_before_ns = cpu_ns(self.load.pid), time.process_time_ns()
        started_ns = time.monotonic_ns()
        for stream in streams:
            stream.ask(self.load.request)
        if self.load.stall_s:
            await asyncio.sleep(self.load.stall_s)
        else:
            await asyncio.wait_for(self._all_ended.wait(), _TIMEOUT_S)
        ended_ns, own_ns = time.monotonic_ns(), time.process_time_ns() - own_before_ns
        await asyncio.sleep(_SETTLE_S)
        outcome = Outcome(
            error=self.error,
            sent_ns=np.array([stream.sent_ns for stream in streams], np.int64),
            times_ns=[np.array(stream.times_ns, np.int64) for stream in streams],
            wall_ns=ended_ns - started_ns,
            server_cpu_ns=cpu_ns(self.load.pid) - cpu_before_ns,
            client_cpu_ns=own_ns,
            num_bytes=self.num_bytes,
            num_reads=self.num_reads,
        )
        for stream in streams:
            stream.close()
        return outcome

    async def _connect(self, stream: "_Stream") -> None:
        loop, connection = asyncio.get_running_loop(), socket.socket()
        connection.setblocking(False)
        if self.load.stall_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STALL_RCVBUF)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _STALL_MSS)
        await loop.sock_connect(connection, ("127.0.0.1", self.load.port))
        await loop.create_connection(lambda: stream, sock=connection)

    def arrived(self, num_events: int) -> None:
        """Count events, where the engine and the floor see it."""
        self._num_arrived += num_events
        self._counter[0] = self._num_before + self._num_arrived
        if self._doorbell is not None and self._num_arrived >= self._next_tick:
            self._next_tick += self.load.num_streams
            if self._num_arrived < self.load.num_events:
                self._doorbell.release()

    def ended(self) -> None:
        """Note the end of one stream."""
        self._num_open -= 1
        if self._num_open == 0:
            self._all_ended.set()


class _Stream(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, run: _Run) -> None:
        self.sent_ns = 0
        self.times_ns: list[int] = []
        self._run = run
        self._marker = run.marker
        self._carry = b""
        self._is_begun = False
        self._is_ended = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def ask(self, request: bytes) -> None:
        """Send the request."""
        assert self._transport is not None
        self.sent_ns = time.monotonic_ns()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        run = self._run
        run.num_reads += 1
        run.num_bytes += len(data)
        if not self._is_begun:
            self._begin(data)
        if self._carry:
            data, self._carry = self._carry + data, b""
        if not data.endswith(b"\n\r\n"):  # neither the end of an event's chunk nor of the body: an event is cut in two
            self._carry = data
            return
        num_events = data.count(self._marker)
        if num_events == 1:
            self.times_ns.append(now_ns)
            run.arrived(1)
        elif num_events:
            self.times_ns += [now_ns] * num_events
            run.arrived(num_events)
        if data.endswith(END):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's
        self._end()

    def close(self) -> None:
        """Close the connection, whatever it has not read."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self, data: bytes) -> None:
        self._is_begun = True
        if not data.startswith(b"HTTP/1.1 200"):
            self._run.error = self._run.error or data.decode(errors="replace")
            self._end()
        elif self._run.load.stall_s:
            assert self._transport is not None
            self._transport.pause_reading()

    def _end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._run.ended()


def _open_counter(path: Path | None) -> tuple[memoryview, int]:
    """Return the u64 that the engine reads, and its value now."""
    if path is None:
        return memoryview(bytearray(8)).cast("Q"), 0
    with path.open("r+b") as file:
        counter = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    return counter, counter[0]
