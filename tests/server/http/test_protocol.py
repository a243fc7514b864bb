"""What server/http/protocol.py takes for granted of uvicorn, and its flow control on a real socket.

A test of the first kind that fails after an upgrade says which assumption no longer holds: mend http_protocol.py, then
raise the bound in pyproject.toml.
"""

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from ringserve.server.http.protocol import RingserveProtocol, TransportSink
from ringserve.server.http.sink import EXTENSION, open_sink, until_disconnect
from ringserve.server.http.turns import Turns

LIMIT_S = 30.0
GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
UNSET = object()
UPGRADE = "uvicorn changed: see server/http/protocol.py"


class FakeTransport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = self.is_aborted = False
        self.is_reading = True

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.data += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, _: str) -> None:
        return None


class Connection:
    """A protocol with a fake transport, and an application that hands its calls to the test."""

    def __init__(self, kind: Callable[..., Any] = RingserveProtocol) -> None:
        self.calls: list[tuple[Scope, Receive]] = []
        self.may_end = asyncio.Event()
        self.transport = FakeTransport()
        config = uvicorn.Config(self._app, interface="asgi3", lifespan="off", log_config=None, access_log=False)
        self.state = ServerState()
        self.protocol: Any = kind(config=config, server_state=self.state, app_state={})
        self.protocol.connection_made(self.transport)

    async def _app(self, scope: Scope, receive: Receive, _: Send) -> None:
        self.calls.append((scope, receive))
        await self.may_end.wait()

    async def request(self, data: bytes = GET % 0) -> "TransportSink":
        num_calls = len(self.calls)
        self.protocol.data_received(data)
        await until(lambda: len(self.calls) > num_calls)
        return self.sink(-1)

    def sink(self, call: int) -> "TransportSink":
        sink: TransportSink = self.calls[call][0]["extensions"][EXTENSION]()
        return sink

    async def end(self) -> None:
        """Let the application's tasks end; whatever the test left of the connection is closed."""
        self.may_end.set()
        if not self.transport.is_closed:
            self.transport.close()
        self.protocol.connection_lost(None)
        await until(lambda: not self.state.tasks)


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    made = Connection()
    yield made
    await made.end()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_new_connection_has_what_uvicorn_gives_it_but_for_the_addresses() -> None:
    transport, given = FakeTransport(), list[dict[str, Any]]()
    for kind in (httptools_impl.HttpToolsProtocol, RingserveProtocol):
        connection = Connection(kind)
        protocol = connection.protocol
        assert connection.state.connections == {protocol}
        before = dict.fromkeys(vars(protocol))
        for name in before:
            setattr(protocol, name, UNSET)
        protocol.connections, protocol.logger, protocol._turns = set(), logging.getLogger("a"), Turns()
        kept = dict(vars(protocol))
        protocol.connection_made(transport)
        given.append({name: value for name, value in vars(protocol).items() if value is not kept.get(name)})
    theirs, ours = given
    assert set(theirs) - set(ours) == {"server", "client"}, UPGRADE
    assert {name: type(value) for name, value in ours.items()} == {name: type(theirs[name]) for name in ours}, UPGRADE
    assert ours["scheme"] == theirs["scheme"], UPGRADE


async def test_uvicorn_has_the_names_that_are_touched(connection: Connection) -> None:
    protocol = connection.protocol
    protocol.data_received(GET % 0)
    cycle = protocol.cycle
    assert isinstance(protocol, httptools_impl.HttpToolsProtocol), UPGRADE
    assert type(cycle) is httptools_impl.RequestResponseCycle, UPGRADE
    assert type(cycle.flow) is FlowControl, UPGRADE
    assert cycle.transport is protocol.transport is connection.transport, UPGRADE
    touched = {
        "scope": dict, "default_headers": list, "response_started": bool, "response_complete": bool,
        "waiting_for_100_continue": bool, "keep_alive": bool, "disconnected": bool, "message_event": asyncio.Event,
        "more_body": bool,
    }  # fmt: skip
    for name, kind in touched.items():
        assert isinstance(getattr(cycle, name, None), kind), f"RequestResponseCycle.{name}: {UPGRADE}"
    assert cycle.on_response == protocol.on_response_complete, UPGRADE
    assert cycle.flow.write_paused is False, UPGRADE
    for name in (
        "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete",
        "resume_writing", "on_response_complete", "send_400_response",
    ):  # fmt: skip
        assert callable(getattr(httptools_impl.HttpToolsProtocol, name, None)), f"{name}: {UPGRADE}"


@pytest.mark.parametrize(
    ("status", "line"), [(200, b"HTTP/1.1 200 OK\r\n"), (503, b"HTTP/1.1 503 Service Unavailable\r\n")]
)
def test_a_status_line_is_a_whole_line(status: int, line: bytes) -> None:
    assert httptools_impl.STATUS_LINE[status] == line, UPGRADE


async def test_a_request_s_task_has_not_run_when_its_headers_are_complete() -> None:
    class Protocol(httptools_impl.HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            seen.append(len(made.calls))
            self.cycle.scope["marked"] = True

    seen: list[int] = []
    made = Connection(Protocol)
    made.protocol.data_received(GET % 0)
    assert seen == [0], f"the task runs before the extension is offered: {UPGRADE}"
    await until(lambda: len(made.calls) == 1)
    assert made.calls[0][0]["marked"], f"the application gets another scope than the cycle's: {UPGRADE}"
    await made.end()


async def test_the_application_is_offered_the_sink(connection: Connection) -> None:
    assert isinstance(await connection.request(), TransportSink)


async def test_receive_tells_a_disconnect_after_finish(connection: Connection) -> None:
    sink = await connection.request()
    receive = connection.calls[0][1]
    assert (await receive())["type"] == "http.request", UPGRADE
    waiting = asyncio.create_task(receive())
    await asyncio.sleep(0)
    assert not waiting.done(), f"receive() does not wait for the response's end: {UPGRADE}"
    sink.open(200, [])
    sink.finish()
    async with asyncio.timeout(LIMIT_S):
        assert await waiting == {"type": "http.disconnect"}, UPGRADE
        assert await receive() == {"type": "http.disconnect"}, UPGRADE


async def test_receive_tells_a_disconnect_after_the_connection_is_lost(connection: Connection) -> None:
    sink = await connection.request()
    waiting = asyncio.create_task(until_disconnect(connection.calls[0][1]))
    sink.open(200, [])
    sink.write(b"a")
    connection.protocol.connection_lost(None)
    async with asyncio.timeout(LIMIT_S):
        await waiting
    assert connection.protocol.cycle.disconnected, UPGRADE
    assert not sink.is_writable
    num_bytes = len(connection.transport.data)
    sink.write(b"b")
    sink.finish()
    assert len(connection.transport.data) == num_bytes
    assert connection.state.total_requests == 0


async def test_the_head_leaves_with_the_first_chunk_in_one_write(connection: Connection) -> None:
    connection.state.default_headers = [(b"date", b"today")]
    sink = await connection.request()
    sink.open(200, [(b"content-type", b"text/plain")])
    assert connection.transport.data == b""
    sink.write(b"a" * 17)
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    assert connection.transport.data == head + b"11\r\n" + b"a" * 17 + b"\r\n"
    sink.write(b"b")
    sink.finish()
    assert connection.transport.data.endswith(b"\r\n1\r\nb\r\n0\r\n\r\n")


async def test_a_response_without_a_body_has_a_head(connection: Connection) -> None:
    sink = await connection.request()
    sink.open(200, [])
    sink.finish()
    assert connection.transport.data == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


async def test_a_finished_response_keeps_the_connection_for_the_next(connection: Connection) -> None:
    for n in range(2):
        sink = await connection.request(GET % n)
        sink.open(200, [])
        sink.write(b"a")
        sink.finish()
        sink.finish()
        assert not connection.transport.is_closed
        assert connection.protocol.sink is None
        assert connection.protocol.timeout_keep_alive_task is not None, f"keep-alive is not timed: {UPGRADE}"
    assert connection.state.total_requests == 2, f"on_response counts no requests: {UPGRADE}"
    assert connection.transport.data.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("request_head", "is_chunked"),
    [(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", True), (b"GET / HTTP/1.0\r\nHost: a\r\n\r\n", False)],
)
async def test_a_connection_that_is_not_kept_is_said_to_close_and_closed(
    connection: Connection, request_head: bytes, is_chunked: bool
) -> None:
    sink = await connection.request(request_head)
    sink.open(200, [])
    sink.write(b"body")
    sink.finish()
    head, _, body = connection.transport.data.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert (b"transfer-encoding: chunked" in head) == is_chunked
    assert body == (b"4\r\nbody\r\n0\r\n\r\n" if is_chunked else b"body")
    assert connection.transport.is_closed


async def test_pipelined_requests_are_answered_one_after_the_other(connection: Connection) -> None:
    connection.protocol.data_received(GET % 0 + GET % 1 + GET % 2)
    for n in range(3):
        await until(lambda n=n: len(connection.calls) == n + 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(connection.calls) == n + 1, f"a pipelined request runs before its turn: {UPGRADE}"
        assert connection.calls[n][0]["path"] == f"/{n}"
        sink = connection.sink(n)
        sink.open(200, [])
        sink.write(b"body%d" % n)
        sink.finish()
    bodies = [part.partition(b"\r\n\r\n")[2] for part in connection.transport.data.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"5\r\nbody%d\r\n0\r\n\r\n" % n for n in range(3)]
    assert connection.transport.is_reading


async def test_a_client_with_more_than_64_requests_in_its_pipeline_is_cut_off(connection: Connection) -> None:
    connection.protocol.data_received(GET % 0 + b"".join(GET % n for n in range(64)))
    assert not connection.transport.is_aborted
    connection.protocol.data_received(GET % 64)
    assert connection.transport.is_aborted
    assert connection.transport.data == b""


class CrowdedConnection(Connection):
    """One of many: what it receives in this turn has to wait."""

    def __init__(self) -> None:
        self._turns = Turns()
        super().__init__(functools.partial(RingserveProtocol, turns=self._turns))

    def receive(self, data: bytes) -> None:
        while self._turns.try_take():
            pass
        self.protocol.data_received(data)


@pytest.fixture
async def late() -> AsyncIterator[CrowdedConnection]:
    made = CrowdedConnection()
    yield made
    await made.end()


async def test_where_many_send_at_once_a_request_waits_for_a_turn_and_nothing_more_is_read(
    late: CrowdedConnection,
) -> None:
    late.receive(POST)
    assert not late.transport.is_reading
    assert not late.state.tasks
    await until(lambda: len(late.calls) == 1)
    assert late.transport.is_reading


async def test_a_get_waits_for_no_turn(late: CrowdedConnection) -> None:
    late.receive(GET % 0)
    assert len(late.state.tasks) == 1
    assert late.transport.is_reading


async def test_a_client_that_leaves_before_its_turn_has_asked_for_nothing(late: CrowdedConnection) -> None:
    late.receive(POST)
    late.transport.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not late.state.tasks
    assert not late.transport.is_reading


async def test_a_body_that_must_not_be_read_on_is_not_read_on_after_its_turn(late: CrowdedConnection) -> None:
    late.receive(POST)
    late.protocol.flow.pause_reading()
    await until(lambda: len(late.calls) == 1)
    assert not late.transport.is_reading


async def test_a_waiting_100_continue_is_not_sent_into_the_response(connection: Connection) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    sink = await connection.request(head)
    sink.open(200, [])
    sink.write(b"a")
    receiving = asyncio.create_task(connection.calls[0][1]())
    await asyncio.sleep(0)
    assert b"100 Continue" not in connection.transport.data, UPGRADE
    sink.finish()
    await receiving


async def test_flow_control_drives_the_sink_of_the_response_in_progress(connection: Connection) -> None:
    sink, calls = await connection.request(), []
    sink.on_writable = lambda: calls.append(sink.is_writable)
    assert sink.is_writable
    connection.protocol.pause_writing()
    assert not sink.is_writable, f"FlowControl.write_paused: {UPGRADE}"
    assert calls == []
    connection.protocol.resume_writing()
    assert sink.is_writable
    assert calls == [True]
    sink.open(200, [])
    sink.finish()
    connection.protocol.pause_writing()
    connection.protocol.resume_writing()
    assert calls == [True]


async def test_what_is_no_http_gets_the_one_error_shape() -> None:
    made = Connection()
    made.protocol.data_received(b"\x16\x03\x01 no HTTP\r\n\r\n")
    head, _, body = made.transport.data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["code"] is None
    assert made.transport.is_closed
    await made.end()


async def feed(connection: Connection, data: bytes, part_bytes: int) -> None:
    """Receive data in parts, each in a turn of its own, until the connection is closed."""
    for start in range(0, len(data), part_bytes):
        if not connection.transport.is_closed:
            connection.protocol.data_received(data[start : start + part_bytes])
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def answer_of(connection: Connection) -> tuple[int, str]:
    """Return the status and the message of the error with which a connection was closed."""
    assert connection.transport.is_closed
    head, _, body = connection.transport.data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


async def test_a_hundred_headers_are_taken_and_one_more_is_not(connection: Connection) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100
    await connection.request(head + b"\r\n")
    assert not connection.transport.is_closed
    refused = Connection()
    refused.protocol.data_received(head + b"A: b\r\n\r\n")
    assert answer_of(refused) == (431, "the request has more than 100 headers")
    assert refused.calls == []


@pytest.mark.parametrize("line", [b"GET /%b HTTP/1.1\r\nA: b", b"GET / HTTP/1.1\r\nA: %b", b"GET / HTTP/1.1\r\n%b: a"])
@pytest.mark.parametrize("part_bytes", [1000, 10**6], ids=["in parts", "in one piece"])
async def test_a_head_beyond_64_kib_is_refused_however_it_comes(line: bytes, part_bytes: int) -> None:
    made = Connection()
    data = line % (b"a" * 65_600) + b"\r\n\r\n"
    await feed(made, data, part_bytes)
    assert answer_of(made) == (431, "the request's head exceeds 65536 bytes")
    assert made.calls == []


@pytest.mark.parametrize(
    ("trailers", "message"),
    [(b"A: b\r\n" * 200, "more than 100 headers"), (b"A: " + b"b" * 200_000, "exceeds 65536 bytes")],
    ids=["many", "long"],
)
async def test_trailers_without_end_are_refused(connection: Connection, trailers: bytes, message: str) -> None:
    await connection.request(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
    await feed(connection, trailers, 1000)
    status, shown = answer_of(connection)
    assert status == 431
    assert message in shown


async def test_a_long_body_is_no_head(connection: Connection) -> None:
    await connection.request(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n")
    await feed(connection, b"a" * 300_000, 1000)
    assert not connection.transport.is_closed


async def test_the_next_request_on_a_connection_has_a_head_of_its_own(connection: Connection) -> None:
    for n in range(3):
        sink = await connection.request(GET.replace(b"Host", b"A: b\r\n" * 60 + b"A: %b\r\nHost" % (b"a" * 40_000)) % n)
        sink.open(200, [])
        sink.finish()
    assert not connection.transport.is_closed


async def test_nonsense_in_the_body_of_a_request_that_waits_for_it_is_told(connection: Connection) -> None:
    await connection.request(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.protocol.data_received(b"zz\r\n")
    assert answer_of(connection)[0] == 400
    sink = connection.sink(0)
    assert not sink.is_writable
    assert connection.protocol.cycle.disconnected


@pytest.mark.parametrize("request_bytes", [GET % 0, POST + b"123456789", GET % 0 + GET % 1])
@pytest.mark.parametrize("is_one_packet", [True, False])
async def test_what_came_whole_before_nonsense_is_answered_and_then_the_connection_is_closed(
    connection: Connection, request_bytes: bytes, is_one_packet: bool
) -> None:
    nonsense, num_requests = b"\x16\x03\r\n", request_bytes.count(b"HTTP/1.1")
    await connection.request(request_bytes + nonsense * is_one_packet)
    connection.protocol.data_received(nonsense)
    for call in range(num_requests):
        assert not connection.transport.is_closed
        await until(lambda call=call: len(connection.calls) > call)
        sink = connection.sink(call)
        sink.open(200, [])
        sink.finish(b"done")
    assert connection.transport.is_closed
    assert connection.transport.data.count(b"HTTP/1.1 ") == connection.transport.data.count(b"done") == num_requests


async def test_a_request_for_another_protocol_that_comes_in_pieces_is_the_last_of_its_connection(
    connection: Connection,
) -> None:
    connection.protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUp")
    sink = await connection.request(b"grade: h2c\r\n\r\n")
    sink.open(200, [])
    sink.finish()
    assert b"connection: close\r\n" in connection.transport.data
    assert connection.transport.is_closed


async def test_blank_lines_between_requests_do_not_keep_a_connection(connection: Connection) -> None:
    sink = await connection.request()
    sink.open(200, [])
    sink.finish()
    protocol, now_s = connection.protocol, asyncio.get_running_loop().time()
    assert protocol.receiving_s(now_s + 5) == 0
    for _ in range(3):  # each takes uvicorn's own timer away
        protocol.data_received(b"\r\n")
        await asyncio.sleep(0)
    assert protocol.receiving_s(now_s + 5) == pytest.approx(5, abs=1)
    await connection.request(GET % 1)
    assert protocol.receiving_s(now_s + 5) == 0


def test_a_socket_that_does_not_read_pauses_the_sink_and_one_that_reads_again_resumes_it() -> None:
    chunk, num_chunks = b"x" * 65536, 200
    writes, wakes, sinks = [0], [0], []

    def write_on(sink: TransportSink) -> None:
        while sink.is_writable and writes[0] < num_chunks:
            sink.write(chunk)
            writes[0] += 1
        if writes[0] == num_chunks:
            sink.finish()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sink = open_sink(scope, send)
        assert isinstance(sink, TransportSink)

        def resumed() -> None:
            wakes[0] += 1
            write_on(sink)

        sink.on_writable = resumed
        sink.open(200, [])
        sinks.append(sink)
        write_on(sink)
        await sink.wait_closed(receive)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with served(app) as client:
            await loop.sock_sendall(client, GET % 0)
            await until(lambda: bool(sinks))
            assert not sinks[0].is_writable
            held = writes[0]
            assert 0 < held < num_chunks
            data = bytearray()
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += await loop.sock_recv(client, 2**20)
            assert wakes[0] > 0
            assert writes[0] == num_chunks
            assert data.count(b"x") == num_chunks * len(chunk)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), LIMIT_S))


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[socket.socket]:
    """Serve `app`; yield a client's socket, which reads only when the test does."""
    listener, client = socket.create_server(("127.0.0.1", 0)), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    config = uvicorn.Config(app, http=RingserveProtocol, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
        yield client
    finally:
        client.close()
        server.should_exit = True
        await task
        listener.close()


async def test_stock_uvicorn_offers_no_sink() -> None:
    made = Connection(httptools_impl.HttpToolsProtocol)
    made.protocol.data_received(GET % 0)
    await until(lambda: len(made.calls) == 1)
    assert EXTENSION not in made.calls[0][0].get("extensions", {})
    await made.end()
