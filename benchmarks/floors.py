"""What streaming costs without a server's work: ready bytes, ticked in-process. benchmarks/output_path.py runs it.

    python -m benchmarks.floors raw|asgi DOORBELL STEP_LOG

`raw` is a uvloop protocol that writes a chunk to each transport, tick by tick; `asgi` an application under uvicorn with
one task a stream and one `send` an event. Both answer POST /STREAMS/EVENTS: the body is the payload of every event.
The streams start together when STREAMS of them are here, and a tick waits until the client, which posts the semaphore
DOORBELL, has all events of the one before: the lockstep that the server is measured in. `raw` answers
/STREAMS/EVENTS/MS too: a tick each MS milliseconds, logged as the synthetic engine logs its steps.
"""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import cast

import posix_ipc
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from benchmarks.load_client import END
from ringserve.shm_transport import process

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DOORBELL_TIMEOUT_S = 10


class RawFloor(asyncio.Protocol):
    """One connection; `group` collects those that stream together."""

    def __init__(self, group: "RawGroup") -> None:
        self._group = group
        self.transport: asyncio.Transport | None = None
        self.chunk = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        head, payload = data.split(b"\r\n\r\n", 1)
        self.chunk = b"%x\r\n%b\r\n" % (len(payload), payload)
        self.transport.write(_HEAD)
        num_streams, num_events, step_ms = _shape(head.split(b" ", 2)[1].decode())
        self._group.join(self, num_streams, num_events, step_ms / 1e3)


class RawGroup:
    """Streams that get their events in one tick."""

    def __init__(self, doorbell: posix_ipc.Semaphore, step_log: Path) -> None:
        self._doorbell = doorbell
        self._step_log = step_log.open("w", buffering=1)
        self._streams: list[RawFloor] = []
        self._num_left = 0
        self._step_s = 0.0

    def join(self, stream: RawFloor, num_streams: int, num_events: int, step_s: float) -> None:
        """Add one; the last one starts all."""
        self._streams.append(stream)
        if len(self._streams) == num_streams:
            self._num_left, self._step_s = num_events, step_s
            self._tick()

    def _tick(self) -> None:
        if self._step_s:
            self._step_log.write(f"{time.monotonic_ns()} {len(self._streams)} {len(self._streams)}\n")
        for stream in self._streams:
            stream.transport.write(stream.chunk)
        self._num_left -= 1
        if self._num_left:
            asyncio.get_running_loop().call_soon(self._wait)  # uvloop sends what is written at the end of this turn
            return
        for stream in self._streams:
            stream.transport.write(END)
        self._streams.clear()

    def _wait(self) -> None:
        """Block the loop, which has nothing else to do."""
        if self._step_s:
            time.sleep(self._step_s)
        else:
            self._doorbell.acquire(_DOORBELL_TIMEOUT_S)
        self._tick()


class AsgiFloor:
    """The application: a stream's task waits for its event, and sends it."""

    def __init__(self, doorbell: posix_ipc.Semaphore) -> None:
        self._doorbell = doorbell
        self._events: list[asyncio.Future[None]] = []
        self._ticker: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        payload = (await receive())["body"]
        num_streams, num_events, _ = _shape(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for n in range(num_events):
            event = asyncio.get_running_loop().create_future()
            self._events.append(event)
            if n == 0 and len(self._events) == num_streams:
                self._ticker = asyncio.get_running_loop().create_task(self._tick(num_events))
            await event
            await send({"type": "http.response.body", "body": payload, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tick(self, num_events: int) -> None:
        for n in range(num_events):
            if n:
                self._doorbell.acquire(_DOORBELL_TIMEOUT_S)
            events, self._events = self._events, []
            for event in events:
                event.set_result(None)
            await asyncio.sleep(0)  # the tasks send
            await asyncio.sleep(0)  # uvloop writes


def _shape(path: str) -> tuple[int, int, float]:
    """Return streams, events of each, and milliseconds between two ticks, 0 for lockstep."""
    _, num_streams, num_events, *step_ms = path.split("/")
    return int(num_streams), int(num_events), float(step_ms[0]) if step_ms else 0.0


async def _serve_raw(listener: socket.socket, group: RawGroup) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: RawFloor(group), sock=listener, backlog=2048)
    await server.serve_forever()


def main() -> None:
    """Serve until the parent ends."""
    kind, doorbell, step_log = sys.argv[1], posix_ipc.Semaphore(sys.argv[2]), Path(sys.argv[3])
    process.die_with_parent(os.getppid())
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    if kind == "raw":
        uvloop.run(_serve_raw(listener, RawGroup(doorbell, step_log)))
        return
    config = uvicorn.Config(
        AsgiFloor(doorbell), loop="uvloop", http="httptools", ws="none", lifespan="off", log_level="warning",
        access_log=False, server_header=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
