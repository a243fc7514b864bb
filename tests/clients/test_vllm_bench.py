"""What `vllm bench serve` sends, byte for byte where it matters, and what it reads of the answers.

vLLM itself is not installed: it is several gigabytes.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import RunningServer

MODEL = "SmolLM2-135M-Instruct"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NUM_TOKENS = 20


@dataclass
class Answer:
    """Its figures: a chunk with choices counts as a token, a chunk without them may hold the usage."""

    status: int
    reason: str | None
    text: str = ""
    num_token_chunks: int = 0
    output_tokens: int | None = None
    prompt_len: int | None = None
    order: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "synthetic", "--max-model-len", "1024", "--step-time-ms", "2")
    yield running
    assert running.stop() == 0


def chat(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    return "/v1/chat/completions", {
        "model": MODEL, "messages": messages, "max_completion_tokens": NUM_TOKENS, **STREAM, **more,
    }  # fmt: skip


def completion(prompt: str | list[int], **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "model": MODEL, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None,
        **STREAM, **more,
    }  # fmt: skip


async def ask(session: aiohttp.ClientSession, url: str, path: str, payload: dict[str, Any]) -> Answer:
    headers = {"Authorization": "Bearer key", "x-request-id": "benchmark-serving-7"}
    async with session.post(url + path, json=payload, headers=headers) as response:
        answer = Answer(response.status, response.reason)
        if response.status != 200:
            return answer
        unread = ""
        async for data in response.content.iter_any():
            *messages, unread = (unread + data.decode()).split("\n\n")
            for message in messages:
                _take(answer, message.strip())
        assert unread == ""
    return answer


def _take(answer: Answer, message: str) -> None:
    if message.startswith(":"):
        return
    assert message.startswith("data: ")
    data = message.removeprefix("data: ")
    if data == "[DONE]":
        answer.order.append("done")
        return
    chunk = json.loads(data)
    if chunk.get("choices"):
        choice = chunk["choices"][0]
        answer.text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
        answer.num_token_chunks += 1
        answer.order.append("token")
    elif chunk.get("usage"):
        answer.output_tokens = chunk["usage"]["completion_tokens"]
        answer.prompt_len = chunk["usage"]["prompt_tokens"]
        answer.order.append("usage")


@pytest.mark.parametrize(
    ("path", "payload", "num_others"),
    [
        (*chat("What is the capital of France?", ignore_eos=True), 1),  # the role chunk
        (*chat("What is the capital of France?", ignore_eos=True, temperature=0.0), 1),
        (*completion("What is the capital of France?", ignore_eos=True), 0),
        (*completion("One", ignore_eos=True, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0), 0),
        (*completion([1, 2, 3, 4], ignore_eos=True), 0),
        (*completion("One", ignore_eos=True, logprobs=2), 0),
    ],
)
async def test_a_request_streams_tokens_then_the_usage_alone_then_done(
    server: RunningServer, path: str, payload: dict[str, Any], num_others: int
) -> None:
    async with aiohttp.ClientSession() as session:
        answer = await ask(session, server.url, path, payload)
    assert answer.status == 200
    assert answer.text
    assert answer.order[-2:] == ["usage", "done"]
    assert answer.order.count("usage") == answer.order.count("done") == 1
    assert answer.output_tokens == NUM_TOKENS
    assert answer.num_token_chunks <= NUM_TOKENS + num_others
    assert answer.prompt_len is not None
    assert answer.prompt_len > 0


async def test_many_at_once_with_its_ids_all_succeed(server: RunningServer) -> None:
    """A request id may repeat among live requests: two benchmarks may run at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = [ask(session, server.url, *chat(f"prompt {n}", ignore_eos=True)) for n in range(32)]
        answers = await asyncio.gather(*calls)
    assert [answer.output_tokens for answer in answers] == [NUM_TOKENS] * 32


async def test_an_error_is_a_status_with_a_reason_that_it_prints(server: RunningServer) -> None:
    async with aiohttp.ClientSession() as session:
        answer = await ask(session, server.url, *completion("a" * 100_000))
    assert (answer.status, answer.reason) == (400, "Bad Request")


async def test_what_it_looks_at_beside_is_there(server: RunningServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/v1/models") as response:
            card = (await response.json())["data"][0]
            assert (card["id"], card["root"]) == (MODEL, MODEL)
        async with session.get(f"{server.url}/metrics") as response:
            assert response.status == 200
            assert "ringserve:num_requests_running" in await response.text()
        body = {"model": MODEL, "prompt": "Hello world"}
        async with session.post(f"{server.url}/tokenize", json=body) as response:
            assert response.status in (200, 404)
            if response.status == 200:
                tokenized = await response.json()
                assert set(tokenized) == {"count", "max_model_len", "tokens", "token_strs"}
                assert tokenized["count"] == len(tokenized["tokens"]) > 0
