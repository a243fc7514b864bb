"""langchain-openai's ChatOpenAI: whole, streamed, in batches, async."""

import pytest

from tests.clients.conftest import MODEL, QUESTION

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
TEXT = QUESTION["content"]


@pytest.fixture(scope="module")
def chat(server):
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, stream_usage=True
    )


@pytest.fixture(scope="module")
def answer(chat) -> str:
    return chat.invoke(TEXT).content


def test_invoke_answers_with_usage_and_the_finish_reason(chat) -> None:
    message = chat.invoke(TEXT)
    assert "Paris" in message.content
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata["output_tokens"] > 3
    assert message.usage_metadata["total_tokens"] == (
        message.usage_metadata["input_tokens"] + message.usage_metadata["output_tokens"]
    )


def test_chunks_add_up_to_the_message(chat, answer: str) -> None:
    chunks = list(chat.stream(TEXT))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == answer
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    assert total.usage_metadata["output_tokens"] > 3


async def test_the_async_ways_give_the_same(chat, answer: str) -> None:
    assert (await chat.ainvoke(TEXT)).content == answer
    assert "".join([chunk.content async for chunk in chat.astream(TEXT)]) == answer


def test_a_batch_is_answered_in_order(chat) -> None:
    chat = chat.bind(max_tokens=10)
    texts = [TEXT, "Count from one to five.", "Say hello."]
    assert [answer.content for answer in chat.batch(texts)] == [chat.invoke(text).content for text in texts]


def test_system_and_several_turns_are_understood(chat) -> None:
    turns = [("system", "You are brief."), ("human", TEXT), ("ai", "Paris."), ("human", "And of Italy?")]
    assert "Rome" in chat.invoke(turns).content


def test_stop_and_max_tokens_reach_the_model(chat) -> None:
    assert chat.bind(max_tokens=2).invoke(TEXT).response_metadata["finish_reason"] == "length"
    assert "Paris" not in chat.bind(stop=["Paris"]).invoke(TEXT).content


def test_logprobs_arrive(chat) -> None:
    content = chat.bind(logprobs=True, top_logprobs=1).invoke(TEXT).response_metadata["logprobs"]["content"]
    assert all(entry["logprob"] <= 0 for entry in content)
