"""/v1/responses with the default model, through the openai SDK as its users call it."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic
import pytest

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


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
    assert final.usage.total_tokens == whole.usage.total_tokens
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
    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
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
        max_completion_tokens=12,
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
            model=MODEL,
            input="Tell me a story.",
            max_output_tokens=12,
            temperature=1,
            top_p=1,
            extra_body={"seed": seed},
        )
        return response.output_text

    with ThreadPoolExecutor(4) as pool:
        one, again, *others = pool.map(text, (1, 1, 2, 3))
    assert one == again
    assert len({one, *others}) > 1


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def test_a_parsed_response_is_an_object_of_its_class(sdk) -> None:
    response = sdk.responses.parse(model=MODEL, input="Tell me of a person.", text_format=Person, temperature=0)
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Person)
    with sdk.responses.stream(model=MODEL, input="Tell me of a person.", text_format=Person, temperature=0) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_a_json_object_is_one(sdk) -> None:
    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    response = sdk.responses.create(input="Hi", text={"format": {"type": "json_object"}}, **settings)
    assert response.output_text.lstrip().startswith("{")
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str = pydantic.Field(max_length=20)


def test_a_required_tool_is_called_and_its_result_goes_back(sdk) -> None:
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 100, "tools": tools}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = sdk.responses.create(input=question, tool_choice="required", parallel_tool_calls=False, **settings)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "Weather", "completed")
    assert isinstance(json.loads(call.arguments)["city"], str)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 25 degrees"}
    settings |= {"max_output_tokens": 16, "tool_choice": "none"}
    chained = sdk.responses.create(input=[result], previous_response_id=first.id, **settings)
    whole = sdk.responses.create(input=[*question, *first.output, result], **settings)
    assert chained.output_text == whole.output_text != ""
    assert chained.usage.input_tokens == whole.usage.input_tokens


def test_the_stream_helper_accumulates_a_named_call(sdk) -> None:
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    choice = {"type": "function", "name": "Weather"}
    settings = {"model": MODEL, "temperature": 0, "input": "Weather in Oslo?", "tools": tools, "tool_choice": choice}
    whole = sdk.responses.create(**settings)
    with sdk.responses.stream(**settings) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    assert (call.name, call.arguments) == ("Weather", whole.output[0].arguments)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas[-1].snapshot == call.arguments
    assert len(deltas) > 1


def test_logprobs_are_those_of_a_chat(sdk) -> None:
    include, settings = ["message.output_text.logprobs"], {"model": MODEL, "temperature": 0}
    response = sdk.responses.create(input=QUESTION, include=include, top_logprobs=2, **settings)
    message = {"role": "user", "content": QUESTION}
    chat = sdk.chat.completions.create(messages=[message], logprobs=True, top_logprobs=2, **settings)
    entries = response.output[0].content[0].logprobs
    expected = chat.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [(entry.token, entry.bytes) for entry in expected]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    stream = sdk.responses.create(input=QUESTION, include=include, top_logprobs=2, stream=True, **settings)
    deltas = [event for event in stream if event.type == "response.output_text.delta"]
    told = [entry.token for event in deltas for entry in event.logprobs]
    assert told == [entry.token for entry in entries]


def test_cached_prompt_tokens_are_counted_in_both_modes(sdk) -> None:
    text = "Tell me about rivers. " * 30
    settings = {"model": MODEL, "input": text, "max_output_tokens": 2, "temperature": 0}
    sdk.responses.create(**settings)
    whole = sdk.responses.create(**settings)
    *_, last = sdk.responses.create(stream=True, **settings)
    assert whole.usage.input_tokens_details.cached_tokens > 0
    assert last.response.usage == whole.usage


def test_the_sdk_sees_errors_as_its_own(sdk) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        sdk.responses.create(model=MODEL, input=QUESTION, temperature=3)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        sdk.responses.create(model=MODEL, input=QUESTION, previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        sdk.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "web_search"}])
