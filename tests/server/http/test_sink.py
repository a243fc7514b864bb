"""One suite of stream behaviour over each way to a client: the transport, ASGI under uvicorn, and ASGI alone."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ringserve.server.api.render.chunks import CompletionChunks, StreamIdentity
from ringserve.server.api.serving import StreamResponse
from ringserve.server.errors import EngineDeadError, OverloadedError
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.input_processor import ProcessedRequest
from ringserve.server.generation.outputs import CompletionOutput, OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.http.protocol import RingserveProtocol, TransportSink
from ringserve.server.http.sink import AsgiSink, open_sink

LIMIT_S = 30.0
WAYS = ["transport", "asgi-uvicorn", "asgi"]
PROTOCOLS = {"transport": RingserveProtocol, "asgi-uvicorn": HttpToolsProtocol}


class FakeLLM:
    """Submits to nobody: the test puts the outputs."""

    def __init__(self) -> None:
        self.collectors: list[RequestOutputCollector] = []
        self.released: list[RequestOutputCollector] = []
        self.refusal: Exception | None = None

    def check_admission_of(self, _: list[ProcessedRequest]) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: ProcessedRequest, *, is_admitted: bool) -> RequestOutputCollector:
        assert is_admitted
        self.collectors.append(RequestOutputCollector("r", request.prompt_token_ids, request.params.n, request.kind))
        return self.collectors[-1]

    def release(self, collector: RequestOutputCollector) -> None:
        self.released.append(collector)

    def put(self, text: str, finish_reason: str | None = None, index: int = 0) -> None:
        self.collectors[-1].put(CompletionOutput(index, text, [1], finish_reason))


class SocketClient:
    """One connection to a uvicorn server, read only when the test says so."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    async def send(self, version: bytes = b"1.1") -> None:
        head = b"POST / HTTP/%b\r\nHost: a\r\nContent-Length: 0\r\n\r\n" % version
        await asyncio.get_running_loop().sock_sendall(self._connection, head)

    async def read(self) -> tuple[int, str]:
        """Return one response's status and body."""
        head = (await self._read_until(b"\r\n\r\n")).decode()
        assert "transfer-encoding: chunked" in head.lower()
        body = b""
        while size := int(await self._read_until(b"\r\n"), 16):
            body += (await self._take(size + 2))[:-2]
        assert await self._take(2) == b"\r\n"
        return int(head.split()[1]), body.decode()

    async def read_to_end(self) -> bytes:
        while data := await self._receive():
            self._unread += data
        return self._unread

    def close(self) -> None:
        self._connection.close()

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._connection, 2**20)

    async def _read_until(self, end: bytes) -> bytes:
        while end not in self._unread:
            self._unread += await self._more()
        found, _, self._unread = self._unread.partition(end)
        return found

    async def _take(self, size: int) -> bytes:
        data = bytearray(self._unread)
        while len(data) < size:
            data += await self._more()
        self._unread = bytes(data[size:])
        return bytes(data[:size])

    async def _more(self) -> bytes:
        data = await self._receive()
        assert data, "the connection ended in the middle of a response"
        return data


class AsgiClient:
    """Calls the application itself; `send` waits while the client does not read."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._reads = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._messages: list[Message] = []

    async def send(self) -> None:
        self._messages, self._is_gone = [], asyncio.Event()
        self._reads.clear()
        scope = {"type": "http", "method": "POST", "path": "/", "http_version": "1.1", "headers": []}
        self._task = asyncio.create_task(self._app(scope, self._receive, self._send))

    async def read(self) -> tuple[int, str]:
        self._reads.set()
        await self._task
        start, *bodies = self._messages
        assert start["type"] == "http.response.start"
        assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
        return start["status"], b"".join(message["body"] for message in bodies).decode()

    def close(self) -> None:
        self._is_gone.set()

    async def _receive(self) -> Message:
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._reads.wait()
        self._messages.append(message)


class Bench:
    """An application that answers each request with one stream, and what a test wants to see of it."""

    def __init__(self, n: int = 1, num_prompts: int = 1) -> None:
        self.llm = FakeLLM()
        self.num_ended = 0
        self._requests = [
            ProcessedRequest(
                request_id="r", prompt_token_ids=[1], params=SamplingParams(n=n), kind=OutputKind.DELTA, max_tokens=9,
                eos_token_id=-1, stop_token_ids=(), first_index=i * n,
            )
            for i in range(num_prompts)
        ]  # fmt: skip

    @property
    def is_writable(self) -> bool:
        writer = self.llm.collectors[0]._writer
        assert writer is not None
        return writer.is_writable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = StreamIdentity(response_id="r", created=1, model="m", fingerprint="f")
        response = StreamResponse(self.llm, self._requests, lambda _: CompletionChunks(identity), None)
        try:
            await response(scope, receive, send)
        finally:
            self.num_ended += 1


@contextlib.asynccontextmanager
async def connected(way: str, app: Any) -> AsyncIterator[Any]:
    """Serve `app` one way; yield its client."""
    if way == "asgi":
        yield AsgiClient(app)
        return
    async with uvicorn_server(PROTOCOLS[way], app) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        client = SocketClient(connection)
        yield client
        client.close()


@contextlib.asynccontextmanager
async def uvicorn_server(protocol: type, app: Any) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main, LIMIT_S))


def events_of(body: str) -> list[Any]:
    assert body.endswith("\n\n")
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in body[:-2].split("\n\n")]


def texts_of(body: str, index: int = 0) -> list[str]:
    *chunks, done = events_of(body)
    assert done == "[DONE]"
    return [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


@pytest.mark.parametrize("way", WAYS)
def test_every_delta_arrives_in_order_and_the_end_is_told(way: str) -> None:
    async def main() -> None:
        bench = Bench(n=2)
        async with connected(way, bench) as client:
            await client.send()
            await until(lambda: bool(bench.llm.collectors))
            for n in range(50):
                bench.llm.put(f"{n} ", index=n % 2)
                await asyncio.sleep(0)
            for index in range(2):
                bench.llm.put("end\u2028", "stop", index)
            status, body = await client.read()
        assert status == 200
        for index in range(2):
            assert "".join(texts_of(body, index)) == "".join(f"{n} " for n in range(index, 50, 2)) + "end\u2028"
        assert len(body.splitlines()) == 2 * body.count("data: ")
        assert bench.num_ended == 1
        assert bench.llm.released == bench.llm.collectors

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_tokens_leave_at_once_while_the_client_keeps_up(way: str) -> None:
    async def main() -> None:
        bench = Bench()
        async with connected(way, bench) as client:
            await client.send()
            reading = asyncio.create_task(client.read())
            await until(lambda: bool(bench.llm.collectors))
            for n in range(20):
                bench.llm.put(str(n))
                await until(lambda: bench.is_writable)
            bench.llm.put("", "length")
            _, body = await reading
        assert texts_of(body) == [*map(str, range(20)), ""]

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_responses_follow_one_another_on_one_connection(way: str) -> None:
    async def main() -> None:
        bench = Bench()
        async with connected(way, bench) as client:
            for n in range(3):
                await client.send()
                await until(lambda n=n: len(bench.llm.collectors) == n + 1)
                bench.llm.put(f"a{n}")
                bench.llm.put("", "stop")
                _, body = await client.read()
                assert "".join(texts_of(body)) == f"a{n}"

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_is_a_status_with_the_error_alone(way: str) -> None:
    async def main() -> None:
        bench = Bench()
        bench.llm.refusal = OverloadedError("full")
        async with connected(way, bench) as client:
            await client.send()
            status, body = await client.read()
        assert status == 503
        assert json.loads(body)["error"]["message"] == "full"

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_mid_stream_is_the_last_event_before_done(way: str) -> None:
    async def main() -> None:
        bench = Bench(num_prompts=2)
        async with connected(way, bench) as client:
            await client.send()
            await until(lambda: len(bench.llm.collectors) == 2)
            first, second = bench.llm.collectors
            first.put(CompletionOutput(0, "a", [1]))
            first.put_error(EngineDeadError("gone"))
            second.put(CompletionOutput(1, "too late", [1]))  # before the request's task can end it
            status, body = await client.read()
            assert status == 200
            *chunks, error, done = events_of(body)
            assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"]
            assert error["error"]["message"] == "gone"
            assert done == "[DONE]"
            await until(lambda: bench.llm.released == [first, second])

    run(main())


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_goes_away_releases_its_requests(way: str, has_begun: bool) -> None:
    async def main() -> None:
        bench = Bench(num_prompts=2)
        async with connected(way, bench) as client:
            await client.send()
            await until(lambda: len(bench.llm.collectors) == 2)
            if has_begun:
                bench.llm.put("a")
            client.close()
            await until(lambda: bench.num_ended == 1)
            assert bench.llm.released == bench.llm.collectors
            for n in range(100):
                bench.llm.put(str(n))  # goes nowhere, and harms nobody

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_client_gets_everything_in_fewer_events(way: str) -> None:
    async def main() -> None:
        bench, num_puts = Bench(), 6000
        async with connected(way, bench) as client:
            await client.send()
            await until(lambda: bool(bench.llm.collectors))
            for n in range(num_puts):
                bench.llm.put(f"{n:04} " * 200)
                if n % 100 == 0:
                    await asyncio.sleep(0)
            assert not bench.is_writable
            bench.llm.put("end", "stop")
            _, body = await client.read()
        texts = texts_of(body)
        assert "".join(texts) == "".join(f"{n:04} " * 200 for n in range(num_puts)) + "end"
        assert len(texts) < num_puts

    run(main())


@pytest.mark.parametrize("way", ["transport", "asgi-uvicorn"])
def test_http_1_0_ends_with_the_connection(way: str) -> None:
    async def main() -> None:
        bench = Bench()
        async with connected(way, bench) as client:
            await client.send(b"1.0")
            await until(lambda: bool(bench.llm.collectors))
            bench.llm.put("a")
            bench.llm.put("end", "stop")
            raw = (await client.read_to_end()).decode()
        head, _, body = raw.partition("\r\n\r\n")
        assert "connection: close" in head
        if way == "transport":  # uvicorn itself sends chunks to HTTP/1.0 clients
            assert "chunked" not in head
            assert "".join(texts_of(body)) == "aend"

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_a_sink_is_the_way_that_the_server_offers(way: str) -> None:
    async def main() -> None:
        kinds = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            sink = open_sink(scope, send)
            kinds.append(type(sink))
            sink.open(200, [])
            sink.write(b"a")
            sink.finish()
            await sink.wait_closed(receive)

        async with connected(way, app) as client:
            await client.send()
            assert await client.read() == (200, "a")
        assert kinds == [TransportSink if way == "transport" else AsgiSink]

    run(main())


async def test_a_test_client_sees_the_same_stream() -> None:
    bench = Bench()

    async def feed() -> None:
        await until(lambda: bool(bench.llm.collectors))
        for text in ("a", "b"):
            bench.llm.put(text)
            await asyncio.sleep(0)
        bench.llm.put("c", "stop")

    feeding = asyncio.create_task(feed())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=bench), base_url="http://a") as client:
        response = await client.post("/")
    await feeding
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "".join(texts_of(response.text)) == "abc"
    assert bench.num_ended == 1


async def test_an_asgi_send_that_fails_ends_the_response() -> None:
    bench = Bench()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        raise OSError("the client is gone")

    task = asyncio.create_task(bench({"type": "http"}, receive, send))
    await until(lambda: bool(bench.llm.collectors))
    bench.llm.put("a")
    with pytest.raises(OSError, match="gone"):
        await task
    assert bench.llm.released == bench.llm.collectors


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_response_releases_its_requests(way: str) -> None:
    async def main() -> None:
        bench, tasks = Bench(), []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            tasks.append(asyncio.current_task())
            await bench(scope, receive, send)

        async with connected(way, app) as client:
            await client.send()
            await until(lambda: bool(bench.llm.collectors))
            tasks[0].cancel()
            await until(lambda: bench.num_ended == 1)
            assert bench.llm.released == bench.llm.collectors
            client.close()
            await until(lambda: tasks[0].done())

    run(main())
