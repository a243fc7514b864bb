"""The openai package: sync, async, and its streaming helper, which puts the deltas together itself."""

import asyncio

import openai
import pytest

from tests.clients.conftest import MODEL, QUESTION
from tests.e2e.conftest import wait_until


@pytest.fixture(scope="module")
def sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(sdk) -> str:
    """What the model says, not streamed."""
    text = sdk.chat.completions.create(model=MODEL, messages=[QUESTION], temperature=0).choices[0].message.content
    assert "Paris" in text
    return text


def test_the_streaming_helper_sees_every_event_and_the_whole_answer(sdk, answer: str) -> None:
    deltas, kinds = [], []
    with sdk.chat.completions.stream(
        model=MODEL, messages=[QUESTION], temperature=0, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content.delta":
                deltas.append(event.delta)
                assert event.snapshot == "".join(deltas)
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == answer
    assert kinds.count("content.done") == 1
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens >= len(list(filter(None, deltas))) > 3
    assert final.usage.total_tokens == final.usage.prompt_tokens + final.usage.completion_tokens


def test_the_streaming_helper_collects_logprobs(sdk) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=[QUESTION], temperature=0, logprobs=True, top_logprobs=2
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    entries = final.choices[0].logprobs.content
    assert {"logprobs.content.delta", "logprobs.content.done"} <= kinds
    assert (
        b"".join(bytes(entry.bytes) for entry in entries if entry.bytes)
        .decode()
        .startswith(final.choices[0].message.content[:20])
    )
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy


def test_n_choices_are_kept_apart_by_the_helper(sdk) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=[QUESTION], n=3, seed=5, temperature=1.5, max_tokens=12
    ) as stream:
        texts = ["", "", ""]
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                snapshot = event.snapshot
    assert [choice.message.content for choice in snapshot.choices] == texts
    assert len(set(texts)) > 1


async def test_the_async_client_streams_many_at_once(server, answer: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert await asyncio.gather(*(ask(client) for _ in range(8))) == [answer] * 8


async def test_the_async_streaming_helper_can_be_left_early(server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        async with client.chat.completions.stream(
            model=MODEL, messages=[QUESTION], extra_body={"ignore_eos": True}
        ) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    break
        wait_until(lambda: server.load()["server_load"] == 0, 5.0)


async def test_completions_stream_to_the_async_client(server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        plain = await client.completions.create(model=MODEL, prompt="One, two,", temperature=0, max_tokens=8)
        stream = await client.completions.create(
            model=MODEL, prompt="One, two,", temperature=0, max_tokens=8, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == plain.choices[0].text


def test_the_raw_response_has_its_headers(sdk) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model=MODEL, messages=[QUESTION], max_tokens=1)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage.completion_tokens == 1
