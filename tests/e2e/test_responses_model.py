"""/v1/responses with the default model, through the openai SDK as its users call it."""

import asyncio

import openai
import pytest

from tests.e2e.conftest import RunningServer

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def server():
    """The default model in fp32, where greedy output does not depend on batch mates."""
    running = RunningServer("--dtype", "float32")
    yield running
    assert running.stop() == 0
    assert running.leftovers() == []


@pytest.fixture(scope="module")
def sdk(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_creates_a_response(sdk) -> None:
    response = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert "Paris" in response.output_text
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 30
    assert sdk.responses.retrieve(response.id) == response


def test_the_stream_helper_accumulates_the_same_response(sdk) -> None:
    whole = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    with sdk.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == whole.output_text
    assert len(deltas) > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_raw_stream_ends_with_its_last_event(sdk) -> None:
    events = list(sdk.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, temperature=0, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.usage.output_tokens == 3


def test_the_async_sdk_creates_and_streams(server) -> None:
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.responses.create(model=MODEL, input=QUESTION, temperature=0)
            async with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
                final = await stream.get_final_response()
            return whole.output_text, final.output_text

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert "Paris" in whole


def test_a_chain_answers_as_the_whole_conversation_does(sdk) -> None:
    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 30}
    first = sdk.responses.create(input="Name a city in Italy.", instructions="You know Europe.", **settings)
    second = sdk.responses.create(
        input="And one in Spain?", instructions="You know Europe.", previous_response_id=first.id, **settings
    )
    conversation = [
        {"role": "user", "content": "Name a city in Italy."},
        *first.output,  # as the SDK's users pass it on
        {"role": "user", "content": "And one in Spain?"},
    ]
    whole = sdk.responses.create(input=conversation, instructions="You know Europe.", **settings)
    chat = sdk.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_completion_tokens=30,
        messages=[
            {"role": "system", "content": "You know Europe."},
            {"role": "user", "content": "Name a city in Italy."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And one in Spain?"},
        ],
    )
    assert second.output_text == whole.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == whole.usage.input_tokens == chat.usage.prompt_tokens


def test_a_seed_gives_the_same_response_again(sdk) -> None:
    def text(seed: int) -> str:
        response = sdk.responses.create(
            model=MODEL, input="Tell me a story.", max_output_tokens=12, extra_body={"seed": seed}
        )
        return response.output_text

    assert text(1) == text(1)
    assert len({text(seed) for seed in (1, 2, 3)}) > 1


def test_the_sdk_sees_errors_as_its_own(sdk) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        sdk.responses.create(model=MODEL, input=QUESTION, temperature=3)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        sdk.responses.create(model=MODEL, input=QUESTION, previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        sdk.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "web_search"}])
