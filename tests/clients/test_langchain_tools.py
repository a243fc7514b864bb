"""langchain-openai's tools and structured output, which agents are made of."""

import json
from typing import Any, Literal

import pydantic
import pytest

from tests.clients.conftest import MODEL

pytestmark = pytest.mark.slow

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
TEXT = "How is the weather in Paris tomorrow?"


class Weather(pydantic.BaseModel):
    """Look the weather up."""

    city: Literal["Paris", "Zürich"]
    days: int = pydantic.Field(ge=1, le=9)


class Time(pydantic.BaseModel):
    """Tell the time."""

    zone: Literal["CET", "UTC"]


@pytest.fixture(scope="module")
def chat(server):
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, max_tokens=200
    )


@pytest.mark.parametrize("choice", ["any", "Time"])
def test_a_forced_call_arrives_parsed(chat, choice: str) -> None:
    message = chat.bind_tools([Weather, Time], tool_choice=choice, parallel_tool_calls=False).invoke(TEXT)
    (call,) = message.tool_calls
    assert message.invalid_tool_calls == []
    assert call["id"]
    assert call["name"] == "Time" if choice == "Time" else call["name"] in ("Time", "Weather")
    {"Time": Time, "Weather": Weather}[call["name"]].model_validate(call["args"])


def test_the_chunks_of_a_call_add_up(chat) -> None:
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    whole = bound.invoke(TEXT).tool_calls
    chunks = list(bound.stream(TEXT))
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert len([chunk for chunk in chunks if chunk.tool_call_chunks]) > 1
    assert [(call["name"], call["args"]) for call in total.tool_calls] == [
        (call["name"], call["args"]) for call in whole
    ]


def test_a_tools_answer_goes_back_to_the_model(chat) -> None:
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    message = bound.invoke(TEXT)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0]["id"], "content": json.dumps({"sky": "blue"})}
    assert chat.invoke([("human", TEXT), message, result]).content


@pytest.mark.parametrize("is_responses", [False, True])
def test_a_conversation_goes_on_after_a_call_that_was_cut(server, is_responses: bool) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, max_tokens=12,
        use_responses_api=is_responses,
    )  # fmt: skip
    message = chat.bind_tools([Weather], tool_choice="any").invoke(TEXT)
    (call,) = message.invalid_tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "error: bad arguments"}
    assert chat.invoke([("human", TEXT), message, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat, method: str) -> None:
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(TEXT), Weather)


def test_json_mode_is_json(chat) -> None:
    found = chat.bind(response_format={"type": "json_object"}, max_tokens=400, temperature=0.8, seed=1).invoke(
        "Answer in JSON: what is the capital of France?"
    )
    if found.response_metadata["finish_reason"] == "stop":
        assert isinstance(json.loads(found.content), dict)
    else:
        assert found.content.lstrip().startswith("{")
