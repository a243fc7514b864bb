"""What requests leave is freed as they end: collecting it would stop every stream, for the longer the more there is."""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ringserve.server.api.chat_settings import ChatSettings
from ringserve.server.api.render.sse import EventStream
from ringserve.server.api.serving import Serving
from ringserve.server.app import build_app
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.output_processor import RequestState
from ringserve.server.http.protocol import RingserveProtocol, TransportSink
from ringserve.server.http.request_body import BodyReader
from ringserve.server.settings.config import ServeConfig
from tests.server.http.test_sink import until, uvicorn_server

KINDS = (EventStream, RequestOutputCollector, RequestResponseCycle, RequestState, RingserveProtocol, TransportSink)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
TOOL = {"type": "function", "function": {"name": "f"}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True}),
    "whole": ("/v1/completions", {"prompt": "a", "max_tokens": 5}),
    "echo, n, logprobs": (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 5, "stream": True, "n": 2, "echo": True, "logprobs": 2},
    ),
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "tools": ("/v1/chat/completions", {**CHAT, "stream": True, "tools": [TOOL]}),
    "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "stream": True}),
    "embedding": ("/v1/embeddings", {"input": ["hi"]}),
    "refused": ("/v1/completions", {"prompt": "a", "n": 0}),
    "no JSON": ("/v1/completions", {"prompt": 5}),
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS)


async def test_requests_leave_nothing_for_the_garbage_collector(no_collection: None) -> None:
    # A free-running engine, so that tokens are held too.
    llm = AsyncLLM.from_config(ServeConfig(engine="synthetic", max_model_len=200_000))
    serving = Serving(
        llm=llm, model_names=("m",), version="0", bodies=BodyReader(2**20),
        chat=ChatSettings.of(llm.model.chat_template, "hermes", "none"),
    )  # fmt: skip
    before = alive()
    async with uvicorn_server(RingserveProtocol, build_app(serving)) as port:
        for path, body in REQUESTS.values():
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for _ in range(3):
                    (await client.post(path, json=body)).read()
        for _ in range(10):
            await leave_a_stream(port)
        await until(lambda: llm.num_live == 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while alive() - before:
                    await asyncio.sleep(0.01)
        assert not alive() - before
    await llm.shutdown()


async def leave_a_stream(port: int) -> None:
    """Read the beginning of a stream and close the connection."""
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
    body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    async with client, client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_raw())
