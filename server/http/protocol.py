"""uvicorn's httptools protocol with a way for a stream's bytes straight to the transport.

A task wake-up and an ASGI send for each token cost twice what the whole push path costs. The names of uvicorn that this
file touches are held by tests/server/http/test_protocol.py; pyproject.toml bounds uvicorn's version.
"""

import asyncio
import fcntl
import functools
import json
import re
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from ringserve.server.errors import RequestError, ServerError, ShuttingDownError
from ringserve.server.http.sink import EXTENSION, FramedWriter, Headers, until_disconnect
from ringserve.server.http.turns import Turns

_MAX_HEAD_BYTES = 65_536
_MAX_HEADERS = 100  # as Apache's and http.client's; a request with a browser's and three proxies' has half as many
_MAX_PIPELINED = 64
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
_TOO_LARGE = f"the request's head exceeds {_MAX_HEAD_BYTES} bytes"


class TransportSink:
    """A Sink (server/http/sink.py) that writes HTTP/1.1 chunks to the transport, in the caller's own call."""

    def __init__(self, protocol: "RingserveProtocol", cycle: RequestResponseCycle, *added: Headers) -> None:
        """Make the sink of one response; each layer around the application may have headers `added` to its head."""
        self.on_writable: Callable[[], None] | None = None
        self.on_idle: Callable[[], None] | None = None
        self.opened_s = protocol.loop.time()
        self.next_look_s = 0.0  # connection_sweep.py's own
        self._added = [header for headers in added for header in headers]
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._head = b""
        self._is_chunked = cycle.scope["http_version"] != "1.0"  # HTTP/1.0 knows no chunks: the end of the connection
        protocol.sink = self

    @property
    def is_writable(self) -> bool:
        """Whether the transport's buffer is below its high-water mark, and the client there."""
        return not self._flow.write_paused and not self._transport.is_closing()

    def open(self, status: int, headers: Headers) -> None:
        """Format the head; it leaves with the first write, in one system call."""
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers, *self._added)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self._head = b"".join((*lines, b"\r\n"))

    def write(self, data: bytes) -> None:
        """Write one chunk; nothing once the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(self._take_head() + self._chunk(data))

    def framed(self, head: bytes, tail: bytes) -> FramedWriter:
        """Return a function that writes one chunk; everything that it needs is at hand: it runs once a token."""
        cycle, flow, is_closing, write = self._cycle, self._flow, self._transport.is_closing, self._transport.write
        num_framing = len(head) + len(tail)
        form = b"%x\r\n" + head.replace(b"%", b"%%") + b"%b" + tail.replace(b"%", b"%%") + b"\r\n"

        def write_chunk(middle: bytes) -> bool:
            if flow.write_paused or cycle.response_complete or is_closing():
                return False
            write(form % (num_framing + len(middle), middle))
            return True

        def write_plain(middle: bytes) -> bool:
            if not self.is_writable or cycle.response_complete:
                return False
            self.write(head + middle + tail)
            return True

        return write_chunk if self._is_chunked else write_plain

    def finish(self, data: bytes = b"") -> None:
        """Write the rest in one system call, and hand the connection back to uvicorn for the next request."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if not self._transport.is_closing():
            last = self._chunk(data) if data else b""
            self._transport.write(self._take_head() + last + (b"0\r\n\r\n" if self._is_chunked else b""))
        cycle.response_complete = True
        cycle.message_event.set()  # ends wait_closed
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    async def wait_closed(self, receive: Receive) -> None:
        """Return when `finish` was called or the client is gone: uvicorn reports both as a disconnect."""
        await until_disconnect(receive)


def _num_in_kernel(transport: asyncio.Transport) -> int:
    """Return the bytes that the kernel holds for the client; 0 once the socket is closed."""
    connection = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:  # TLS tells the protocol one turn of the loop later
        return 0


def _unbind(cycle: RequestResponseCycle) -> None:
    """Take the maker of the sink, which knows the cycle, out of its scope: else only the garbage collector frees them.

    What 12,000 requests had left took it 0.65 s, in which no stream went on.
    """
    cycle.scope["extensions"].clear()


def _without_upgrade(data: bytes) -> bytes:
    """Rename the header by which Java's own client offers HTTP/2: the parser reads no body after it."""
    end = data.find(b"\r\n\r\n")
    found = _UPGRADE.search(data, 0, len(data) if end < 0 else end)
    return data if found is None else b"%b\r\nx-upgrade:%b" % (data[: found.start()], data[found.end() :])


class _RefusedError(Exception):
    """Stops the parser; never seen outside: uvicorn calls send_400_response for it."""


class RingserveProtocol(HttpToolsProtocol):
    """One connection; bounds what uvicorn does not: a request's head and trailers, and requests in a pipeline.

    Args:
        turns: Shared by all connections of a server; None for one alone.
    """

    def __init__(self, *args: Any, turns: Turns | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns or Turns()
        self.sink: TransportSink | None = None  # of the response in progress
        self._open_cycles: deque[RequestResponseCycle] = deque()  # the running one, then the pipeline
        self._is_in_head = True  # or before it
        self._num_head_bytes = self._num_headers = 0  # of one request, its trailers included
        self._num_unused_bytes = 0  # received since there was the last head or part of a body
        self._refusal = ""  # why the parser was stopped
        self._receiving_since_s: float | None = self.loop.time()  # of a request that is not all there
        self._stall = (-1, 0.0)  # bytes that wait for the client, and since when so many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own too
        """Do as uvicorn, less the two addresses, which nothing here asks for: they are half of what it costs."""
        self._turns.note_newcomer()
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.scheme = "https" if is_ssl(transport) else "http"

    def data_received(self, data: bytes) -> None:
        """Take it up now or, where many send at once, soon: until then nothing more is read. A GET is cheap."""
        if data.startswith(b"GET ") or self._turns.try_take():
            self._take_up(data)
        else:
            self.transport.pause_reading()
            self._turns.wait(functools.partial(self._take_up_late, data))

    def _take_up_late(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._take_up(data)

    def _take_up(self, data: bytes) -> None:
        """Parse; refuse a head that never ends, drop a client that asks without reading."""
        self._num_unused_bytes += len(data)
        super().data_received(_without_upgrade(data) if self._is_in_head else data)
        self._note_arrival()
        if self.transport.is_closing():
            return
        if self._num_unused_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
        elif len(self.pipeline) > _MAX_PIPELINED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection; uvicorn tells the newest only, which may wait in the pipeline."""
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            _unbind(cycle)
        super().connection_lost(exc)

    def stalled_s(self, now_s: float) -> float:
        """Return for how long the client, for whom output waits, has read nothing. As seen by those who ask."""
        num_bytes = self.num_unsent()
        if num_bytes != self._stall[0]:  # while writing is paused only the client's reading changes it
            self._stall = (num_bytes, now_s)
        return now_s - self._stall[1]

    def num_unsent(self) -> int:
        """Return the bytes that wait for the client, here and in the kernel."""
        return self.transport.get_write_buffer_size() + _num_in_kernel(self.transport)

    def receiving_s(self, now_s: float) -> float:
        """Return how long the head has been on its way, or the body has paused; 0 if nothing is missing."""
        if self._receiving_since_s is None or self.flow.read_paused:
            return 0.0
        return now_s - self._receiving_since_s

    def refuse_slow_request(self, limit_s: float) -> None:
        """Close a connection whose request does not come."""
        self._refuse(408, f"the request was not complete within {limit_s:g} s")

    def refuse_at_end(self, message: str) -> None:
        """Close the connection of a server that ends; what its client does not take has to be cut off."""
        if not self.transport.is_closing():
            self._close(503, ShuttingDownError(message))

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._num_head_bytes = self._num_headers = 0
        self._receiving_since_s = self.loop.time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the URL's bytes, which the parser gives in parts."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count headers; what arrives in one piece is never waited for."""
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Offer the sink to the application; its task was created, and has not run yet."""
        self._is_in_head = False
        self._num_unused_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None:
            self._open_cycles.append(cycle)
            extensions: dict[str, Any] = {EXTENSION: functools.partial(TransportSink, self, cycle)}
            cycle.scope["extensions"] = extensions
            if self.parser.should_upgrade():  # the parser reads nothing after it, so no other request would be answered
                cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Note that the body goes on."""
        self._num_unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that nothing of the request is missing."""
        self._receiving_since_s = None
        self._is_in_head = True
        self._num_unused_bytes = 0
        super().on_message_complete()

    def resume_writing(self) -> None:
        """Tell the response in progress that its client keeps up again."""
        super().resume_writing()
        if self.sink is not None and self.sink.on_writable is not None:
            self.sink.on_writable()

    def on_response_complete(self) -> None:
        """Forget the response that has ended."""
        self.sink = None
        _unbind(self._open_cycles.popleft())
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP at all, or what stopped the parser, in the one error shape."""
        self._refuse(431 if self._refusal else 400, self._refusal or msg)

    def _note_arrival(self) -> None:
        """Say since when the request that is not all there is on its way; bytes before its head begin it too."""
        if self._receiving_since_s is not None:
            if not self._is_in_head:
                self._receiving_since_s = self.loop.time()
        elif not self._open_cycles:
            self._receiving_since_s = self.loop.time()

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_headers > _MAX_HEADERS:
            self._refusal = f"the request has more than {_MAX_HEADERS} headers"
        elif self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refusal = _TOO_LARGE
        if self._refusal:
            raise _RefusedError

    def _refuse(self, status: int, message: str) -> None:
        """Refuse what comes in; requests that are all there are answered first, and then the connection is closed."""
        whole = [cycle for cycle in self._open_cycles if not cycle.more_body]
        if whole:
            whole[-1].keep_alive = False
        else:
            self._close(status, RequestError(message))

    def _close(self, status: int, error: ServerError) -> None:
        """Close the connection; with an error, unless that would stand in, or for, the response to another request."""
        if self._is_first_unanswered():
            body = json.dumps(error.body()).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        for cycle in self._open_cycles:
            cycle.disconnected = True  # whoever answers it writes nothing more
        self.transport.close()

    def _is_first_unanswered(self) -> bool:
        """Whether the request that comes in is the only one, and nothing of its response has left."""
        if not self._open_cycles:
            return True
        cycle = self._open_cycles[0]
        return len(self._open_cycles) == 1 and cycle.more_body and not cycle.response_started
