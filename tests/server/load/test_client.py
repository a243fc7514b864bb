"""One request against servers that behave as real ones do, well and badly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from ringserve.server.errors import StartupError
from ringserve.server.load.client import Client, Record
from ringserve.server.load.config import BenchConfig

USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}}
MODELS = json.dumps({"data": [{"id": "m"}]}).encode()


class FakeServer:
    """Answers each request with ready bytes, then closes; keeps what it was asked."""

    def __init__(self) -> None:
        self.answer = b""
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            self.heads.append(head)
            if head.startswith("get"):
                writer.write(response(200, MODELS))
            else:
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                await self.may_answer.wait()
                writer.write(self.answer)
            await writer.drain()


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in ("connection: close", *headers))
    return f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def events(*chunks: object, done: bool = True) -> bytes:
    parts = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


def chat(content: str | None = None, finish_reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish_reason}]}


@contextlib.asynccontextmanager
async def fake_server() -> AsyncIterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    try:
        yield fake, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        fake.may_answer.set()
        server.close()
        await server.wait_closed()


async def send(answer: bytes, **options: object) -> Record:
    async with fake_server() as (fake, url):
        fake.answer = answer
        async with Client(BenchConfig(url=url, **options), None) as client:  # type: ignore[arg-type]
            return await client.send("hello")


async def test_tokens_are_counted_by_usage_and_events_by_their_text() -> None:
    first = chat("", role="assistant")
    record = await send(response(200, events(first, chat("a"), chat("bcd"), chat("", "length"), USAGE)))
    assert record.error == ""
    assert (record.prompt_tokens, record.completion_tokens) == (5, 6)
    assert len(record.event_s) == 3  # two with text, and the finish, as the server counts more tokens than that
    assert record.sent_s < record.event_s[0] <= record.event_s[-1] <= record.ended_s


@pytest.mark.parametrize("delta", [{"reasoning_content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}])
async def test_reasoning_and_tool_calls_are_parts_of_an_answer(delta: dict[str, object]) -> None:
    record = await send(response(200, events(chat(**delta), chat("b"), USAGE)))
    assert len(record.event_s) == 2


async def test_events_are_found_whatever_pieces_they_come_in_and_comments_are_skipped() -> None:
    body = (
        b": ping\n\n" + events(chat("a"), done=False).replace(b"\n", b"\r\n") + b"event: x\n" + events(chat("b"), USAGE)
    )
    cut = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    record = await send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + cut)
    assert (record.error, len(record.event_s), record.has_usage) == ("", 2, True)


async def test_what_is_sent_asks_for_usage_and_the_length() -> None:
    async with fake_server() as (fake, url):
        fake.answer = response(200, events(USAGE))
        config = {"output_len": 9, "ignore_eos": True, "extra_body": '{"temperature": 0}'}
        for endpoint in ("chat", "completions"):
            async with Client(BenchConfig(url=f"{url}/v1/", endpoint=endpoint, **config), "key") as client:  # type: ignore[arg-type]
                await client.send("hello")
    shared = {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    messages = [{"role": "user", "content": "hello"}]
    assert fake.bodies == [
        shared | {"messages": messages, "max_completion_tokens": 9},
        shared | {"prompt": "hello", "max_tokens": 9},
    ]
    assert all("authorization: bearer key\r\n" in head for head in fake.heads)
    assert [head.split()[1] for head in fake.heads if head.startswith("post")] == [
        "/v1/chat/completions",
        "/v1/completions",
    ]


ERROR = {"error": {"message": "too busy", "type": "t", "param": None, "code": 503}}


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (response(503, json.dumps(ERROR).encode(), "retry-after: 3"), "HTTP 503, refused", "too busy"),
        (response(404, b"<p>no</p>"), "HTTP 404", "<p>no</p>"),
        (response(500, b"{}"), "HTTP 500", "None"),
        (response(200, events(chat("a"), ERROR)), "error in the stream", "too busy"),
        (response(200, events(chat("a"), done=False)), "cut off", "without [DONE]"),
        (response(200, b"data: {nonsense}\n\n"), "no OpenAI stream", "JSON"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + events(chat("a"), done=False), "connection lost", ""),
        (b"", "connection lost", "ServerDisconnectedError"),
    ],
)
async def test_each_failure_has_its_kind_and_message(answer: bytes, kind: str, detail: str) -> None:
    record = await send(answer)
    assert record.error == kind
    assert detail in record.detail
    assert record.retry_after_s == (3 if "503" in kind else 0)


async def test_a_server_that_says_nothing_is_a_timeout() -> None:
    async with fake_server() as (fake, url):
        fake.may_answer.clear()
        async with Client(BenchConfig(url=url, timeout=0.05), None) as client:
            record = await client.send("hello")
    assert (record.error, record.detail) == ("timeout", "not within 0.05 s")


async def test_a_server_that_is_not_there_is_an_error_with_the_remedy() -> None:
    async with fake_server() as (_, url):
        pass
    with pytest.raises(StartupError, match=r"nothing answers at .*--model"):
        async with Client(BenchConfig(url=url), None):
            pass
    async with Client(BenchConfig(url=url, model="m"), None) as client:
        assert (await client.send("hello")).error == "cannot connect"
