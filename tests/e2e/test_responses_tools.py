"""Tool calls and reasoning of /v1/responses, from text that the synthetic engine is told to emit."""

import json
from typing import Any

import openai

from tests.e2e.conftest import ScriptedServers
from tests.e2e.test_tools import PACED

TOOLS: list[Any] = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "why": "é\\n"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def settings(client: openai.OpenAI, **more: Any) -> dict[str, Any]:
    return {"model": client.models.list().data[0].id, "input": "2+2?", **more}


def test_the_models_own_calls_are_items_in_both_modes(scripted: ScriptedServers) -> None:
    with scripted(CALLS, *PACED).sdk() as client:
        whole = client.responses.create(**settings(client, tools=TOOLS))
        with client.responses.stream(**settings(client, tools=TOOLS)) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert response.status == "completed"
        message, add, now = response.output
        assert message.content[0].text == response.output_text == "Let me see.\n"
        assert (add.type, add.name) == ("function_call", "add")
        assert json.loads(add.arguments) == {"a": 2, "why": "é\n"}
        assert (now.name, json.loads(now.arguments)) == ("now", {})
        assert add.call_id != now.call_id
    assert len([event for event in events if event.type == "response.function_call_arguments.delta"]) > 2


def test_one_call_is_enough_where_they_may_not_be_parallel(scripted: ScriptedServers) -> None:
    with scripted(CALLS, *PACED).sdk() as client:
        response = client.responses.create(**settings(client, tools=TOOLS, parallel_tool_calls=False))
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.parallel_tool_calls is False


def test_a_conversation_goes_on_after_a_call_whose_arguments_are_no_json(scripted: ScriptedServers) -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": nope}}</tool_call>'
    with scripted(broken, *PACED).sdk() as client:
        first = client.responses.create(**settings(client, tools=TOOLS))
        (call,) = first.output
        assert (call.type, call.arguments) == ("function_call", '{"a": nope}')
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "no JSON"}]
        more = {"input": result, "previous_response_id": first.id}
        again = client.responses.create(**settings(client, tools=TOOLS, **more))
        assert again.output[0].type == "function_call"
        items = client.responses.input_items.list(again.id, order="asc")
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        sent = [{"role": "user", "content": "2+2?"}, call.model_dump(), *result]  # as those do who store nothing
        whole = client.responses.create(**settings(client, tools=TOOLS) | {"input": sent})
        assert whole.usage.input_tokens == again.usage.input_tokens
        chat: Any = [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "tool_calls": [{
                "id": call.call_id, "type": "function", "function": {"name": "add", "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "no JSON"},
        ]  # fmt: skip
        assert client.chat.completions.create(model=first.model, messages=chat).choices[0].message.content


def test_calls_are_text_where_none_are_wanted(scripted: ScriptedServers) -> None:
    with scripted(CALLS, *PACED).sdk() as client:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            response = client.responses.create(**settings(client, **more))
            assert response.output_text == CALLS


def test_reasoning_is_an_item_of_its_own_in_both_modes(scripted: ScriptedServers) -> None:
    with scripted("<think>Hm, four.</think>Four.", "--reasoning-parser", "think").sdk() as client:
        whole = client.responses.create(**settings(client))
        *_, last = client.responses.create(**settings(client, stream=True))
        for response in (whole, last.response):
            reasoning, _ = response.output
            assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm, four.")
            assert response.output_text == "Four."
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        chained = client.responses.create(**settings(client, previous_response_id=whole.id))
        listed = client.responses.input_items.list(chained.id, order="asc").data
        assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]
        hidden = client.responses.create(**settings(client, extra_body={"include_reasoning": False}))
        assert [item.type for item in hidden.output] == ["message"]
