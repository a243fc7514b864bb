"""Where a response's bytes go: straight to the connection's transport, or through plain ASGI where that is not offered.

The transport way is offered by http_protocol.py as the scope extension EXTENSION. Loop thread only.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

EXTENSION = "ringserve.sink"

Headers = list[tuple[bytes, bytes]]
FramedWriter = Callable[[bytes], bool]  # writes one event, or returns False: not now


class Sink(Protocol):
    """One response's way to its client. `open`, any number of `write`, `finish`; none of them suspends.

    Attributes:
        on_writable: Called when `is_writable` has become true again.
        on_idle: Called when nothing has been sent for a while; only by servers that look after their connections.
    """

    on_writable: Callable[[], None] | None
    on_idle: Callable[[], None] | None

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up: while it is False, hold output back and merge it."""

    def open(self, status: int, headers: Headers) -> None:
        """Send status and headers, together with the first write."""

    def write(self, data: bytes) -> None:
        """Send body bytes."""

    def framed(self, head: bytes, tail: bytes) -> FramedWriter:
        """Return a function that writes `head`, its argument and `tail`; it writes nothing while not `is_writable`."""

    def finish(self, data: bytes = b"") -> None:
        """Send the last body bytes, if any, and end the response."""

    async def wait_closed(self, receive: Receive) -> None:
        """Return when the response has ended or its client is gone."""


def open_sink(scope: Scope, send: Send) -> Sink:
    """Return the best way to the client that this server offers."""
    factory: Callable[[], Sink] | None = scope.get("extensions", {}).get(EXTENSION)
    return AsgiSink(send) if factory is None else factory()


class AsgiSink:
    """Plain ASGI `send` from the request's task, for other servers and for test clients."""

    def __init__(self, send: Send) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.on_idle: Callable[[], None] | None = None
        self._send = send
        self._messages: list[Message] = []  # the same list for ever: `framed` looks at it
        self._wake_up: asyncio.Future[None] | None = None
        self._is_finished = False

    @property
    def is_writable(self) -> bool:
        """Whether everything written before is sent."""
        return not self._messages

    def open(self, status: int, headers: Headers) -> None:
        """Queue the start of the response; the first write sends it."""
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        """Queue body bytes and wake the task."""
        self._messages.append({"type": "http.response.body", "body": data, "more_body": True})
        self._wake()

    def framed(self, head: bytes, tail: bytes) -> FramedWriter:
        """Return a function that writes between `head` and `tail`."""
        messages, write = self._messages, self.write

        def write_framed(middle: bytes) -> bool:
            if messages:
                return False
            write(head + middle + tail)
            return True

        return write_framed

    def finish(self, data: bytes = b"") -> None:
        """Queue the end and wake the task."""
        self._messages.append({"type": "http.response.body", "body": data, "more_body": False})
        self._is_finished = True
        self._wake()

    async def wait_closed(self, receive: Receive) -> None:
        """Send what is written, until it is finished or the client is gone."""
        tasks = [asyncio.ensure_future(self._send_all()), asyncio.ensure_future(until_disconnect(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            tasks[0].result()

    def _wake(self) -> None:
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    async def _send_all(self) -> None:
        send, messages, create_future = self._send, self._messages, asyncio.get_running_loop().create_future
        while True:
            if not messages:
                self._wake_up = create_future()
                await self._wake_up
            for message in messages:  # those that come meanwhile too
                await send(message)
            messages.clear()
            if self._is_finished:
                return
            if self.on_writable is not None:
                self.on_writable()


async def until_disconnect(receive: Receive) -> None:
    """Return once the client is gone or the response complete. Never polls `is_disconnected`."""
    while (await receive())["type"] != "http.disconnect":
        pass
