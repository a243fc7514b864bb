"""Calls that tool_choice forces, by the default model, which has never seen a tool: the grammar makes them valid."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from ringserve.engine.weights.default_model import ensure_default_model
from tests.e2e.conftest import SharedServers
from tests.e2e.test_tools import calls_of, create, streamed


class Weather(pydantic.BaseModel):
    city: Literal["Paris", 'New "York"', "Zürich"]
    days: int = pydantic.Field(ge=1, le=14)
    parts: list[Literal["rain", "wind"]] = pydantic.Field(max_length=2)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12, pattern="^[A-Za-z ]+$")
    weather: Weather | None


MODELS: dict[str, type[pydantic.BaseModel]] = {"get_weather": Weather, "add_person": Person}
TOOLS: list[Any] = [openai.pydantic_function_tool(model, name=name) for name, model in MODELS.items()]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
SEEDS = range(1, 3)


@pytest.fixture
def client(shared_server: SharedServers) -> Iterator[openai.OpenAI]:
    server = shared_server("--max-model-len", "2048")
    with server.sdk() as client:
        yield client


def check(choice: Any, finish: str) -> list[str]:
    """Assert that a choice is valid calls and nothing else; return their names."""
    calls = calls_of(choice)
    assert calls
    assert not choice.message.content
    assert choice.finish_reason == finish
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        MODELS[name].model_validate_json(arguments)
    return [name for name, _ in calls]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    question = [{"role": "user", "content": "How is the weather in Paris?"}]
    return create(client, **{"messages": question, "tools": TOOLS, "max_tokens": 1200, "temperature": 1.0} | options)


def ask_all(client: openai.OpenAI, **options: Any) -> list[Any]:
    """Ask with each seed, all at once; return the choices."""
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        return list(pool.map(lambda seed: ask(client, seed=seed, **options).choices[0], SEEDS))


def test_required_gives_valid_calls_whatever_the_seed(client: openai.OpenAI) -> None:
    names = [check(choice, "tool_calls") for choice in ask_all(client, tool_choice="required")]
    assert len(names) == len(SEEDS)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_named_function_is_called_with_valid_arguments_whatever_the_seed(client: openai.OpenAI, name: str) -> None:
    for choice in ask_all(client, tool_choice={"type": "function", "function": {"name": name}}):
        assert check(choice, "stop") == [name]


def test_every_choice_has_calls_of_its_own_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice="required", n=2, seed=3)
    assert len(whole.choices) == 2
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 1200, "temperature": 1.0, "n": 2, "seed": 3}
    question: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    stream = streamed(client, messages=question, tool_choice="required", **options)
    for choice, again in zip(whole.choices, stream.choices, strict=True):
        check(choice, "tool_calls")
        assert calls_of(choice) == calls_of(again)
        for call in again.message.tool_calls:
            assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])


def test_one_call_alone_where_parallel_calls_are_off_and_allowed_tools_where_they_are_named(
    client: openai.OpenAI,
) -> None:
    named = [{"type": "function", "function": {"name": "get_weather"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    for choice in ask_all(client, tool_choice="required", parallel_tool_calls=False):
        assert len(check(choice, "tool_calls")) == 1
    for choice in ask_all(client, tool_choice=allowed, parallel_tool_calls=False):
        assert check(choice, "tool_calls") == ["get_weather"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_no_stop_of_the_request_cuts_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    options: dict[str, Any] = {"tool_choice": choice, "seed": 1, "parallel_tool_calls": False}
    whole = ask(client, **options).choices[0]
    finish = "tool_calls" if choice == "required" else "stop"
    assert check(whole, finish) == ["get_weather"] or choice == "required"
    tokenizer = Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))
    ids = [token_id for text in ("{", '"', "[", ":", '":') for token_id in tokenizer.encode(text).ids]
    question: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    for stops in ({"stop": ["{", '"', "city", "}"]}, {"extra_body": {"stop_token_ids": ids, "min_tokens": 3}}):
        stopped: Any = {**options, **stops}
        again = ask(client, **stopped).choices[0]
        check(again, finish)
        assert calls_of(again) == calls_of(whole)
        extra = {"tools": TOOLS, "max_tokens": 1200, "temperature": 1.0}
        streamed_again = streamed(client, messages=question, **extra, **stopped).choices[0]
        assert calls_of(streamed_again) == calls_of(whole)


FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMAS["get_weather"], "strict": True}}


def bias_for(start: str) -> dict[str, int]:
    """Return the bias with which an answer begins with a text wherever its grammar lets it."""
    tokenizer = Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))
    return {str(tokenizer.encode(start, add_special_tokens=False).ids[0]): 100}


@pytest.mark.parametrize("start", ["<tool_call>", "{"])
def test_beside_a_form_the_model_calls_or_answers_in_it(client: openai.OpenAI, start: str) -> None:
    options: dict[str, Any] = {
        "tools": TOOLS[:1], "response_format": FORM, "logit_bias": bias_for(start), "seed": 1,
        "parallel_tool_calls": False,
    }  # fmt: skip
    (choice,) = ask(client, **options).choices
    question: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    again = streamed(client, messages=question, max_tokens=1200, temperature=1.0, **options).choices[0]
    assert (choice.message.content or None, calls_of(choice)) == (again.message.content or None, calls_of(again))
    if start == "{":
        Weather.model_validate_json(choice.message.content)
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    else:
        assert check(choice, "tool_calls") == ["get_weather"]


@pytest.mark.parametrize("start", ["<tool_call>", "{"])
def test_a_response_is_calls_or_in_the_form_of_its_text(client: openai.OpenAI, start: str) -> None:
    response = client.responses.create(
        model="SmolLM2-135M-Instruct", input="How is the weather in Paris?", parallel_tool_calls=False,
        tools=[{"type": "function", **TOOLS[0]["function"]}], extra_body={"logit_bias": bias_for(start), "seed": 1},
        text={"format": {"type": "json_schema", "name": "weather", "schema": SCHEMAS["get_weather"], "strict": True}},
    )  # fmt: skip
    assert response.status == "completed"
    (item,) = response.output
    assert item.type == ("message" if start == "{" else "function_call")
    Weather.model_validate_json(response.output_text if item.type == "message" else item.arguments)


def test_whichever_the_model_takes_beside_a_form_it_can_be_read(client: openai.OpenAI) -> None:
    for choice in ask_all(client, response_format=FORM, parallel_tool_calls=False):
        if choice.message.tool_calls:
            check(choice, "tool_calls")
        else:
            Weather.model_validate_json(choice.message.content)


def test_a_grammar_beside_tools_is_refused_by_name(client: openai.OpenAI) -> None:
    grammar = {"guided_grammar": 'start: "<" /[a-z]+/'}
    with pytest.raises(openai.BadRequestError, match="beside tools") as caught:
        ask(client, extra_body=grammar)
    assert caught.value.param == "guided_grammar"
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    with pytest.raises(openai.BadRequestError, match="beside tools") as caught:
        client.responses.create(model="SmolLM2-135M-Instruct", input="Hi", tools=tools, extra_body=grammar)
    assert caught.value.param == "guided_grammar"
    assert ask(client, extra_body=grammar, tool_choice="none", max_tokens=4).choices[0].message.content[0] == "<"


def test_a_schema_that_cannot_be_followed_is_refused_when_the_call_is_forced(client: openai.OpenAI) -> None:
    wrong = {"divisibleBy": {"type": "integer", "divisibleBy": 2}, "the type cat": {"type": "cat"}}
    for what, schema in wrong.items():
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        tools = [TOOLS[0], {"type": "function", "function": function}]
        with pytest.raises(openai.BadRequestError, match=what) as caught:
            ask(client, tools=tools, tool_choice="required")
        assert caught.value.param == "tools[1].function.parameters"
    assert ask(client, tools=tools, max_tokens=2).choices[0].message


def test_with_tool_choice_auto_the_answer_may_be_text(client: openai.OpenAI) -> None:
    for completion in (ask(client, max_tokens=20, temperature=0), ask(client, max_tokens=20, tool_choice="none")):
        assert completion.choices[0].message.content
