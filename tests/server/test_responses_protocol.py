from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from server.errors import RequestError
from server.request_body import decode
from server.responses_protocol import ResponseRequest, item_list

CALLER = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}


def request(**fields: Any) -> ResponseRequest:
    body = decode(msgspec.json.encode({"input": "Hi", **fields}), ResponseRequest)
    body.check()
    return body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CALLER, {"type": "mcp"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [CALLER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [CALLER], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [CALLER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"truncation": "middle"}, "truncation"),
        ({"store": "yes"}, "store"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        request(**fields)
    assert raised.value.param == param


def test_what_changes_nothing_is_accepted() -> None:
    request(
        background=False, include=["reasoning.encrypted_content"], max_tool_calls=3, service_tier="auto", user="me",
        prompt_cache_key="k", safety_identifier="s", stream_options={"include_obfuscation": False}, some_new_field=1,
        reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "medium"}, parallel_tool_calls=None,
    )  # fmt: skip


def test_the_response_repeats_the_request_as_the_sdk_types_it() -> None:
    schema = {"type": "object", "properties": {}}
    body = request(
        instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=7, metadata={"k": "v"}, tools=[CALLER],
        tool_choice={"type": "function", "name": "f"}, truncation="auto", user="me", top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )  # fmt: skip
    echo = body.echo(body.sampling_params({}))
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": []}
    response = Response.model_validate_json(msgspec.json.encode({**head, **echo}))
    assert response.instructions == "Be brief."
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 7)
    assert response.metadata == {"k": "v"}
    assert response.tools[0].to_dict() == {**CALLER, "description": None}
    assert response.tool_choice.to_dict() == {"type": "function", "name": "f"}
    assert response.text.format.to_dict() == {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert (response.truncation, response.user, response.top_logprobs) == ("auto", "me", 2)


def test_values_that_the_request_leaves_out_are_the_models_then_openais() -> None:
    params = request(top_p=0.5).sampling_params({"temperature": 0.25, "top_p": 0.75})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.5, None)
    assert request().sampling_params({}).temperature == 1


def test_tools_and_their_choice_become_those_of_chat_completions() -> None:
    body = request(tools=[{**CALLER, "description": "d"}], tool_choice={"type": "function", "name": "f"})
    function = {"name": "f", "description": "d", "parameters": CALLER["parameters"], "strict": True}
    assert body.chat_tools() == [{"type": "function", "function": function}]
    assert body.chat_tool_choice() == {"type": "function", "function": {"name": "f"}}
    assert request(tools=[CALLER], tool_choice="required").chat_tool_choice() == "required"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert request(tools=[CALLER], tool_choice=allowed).chat_tool_choice() == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
    }


def test_items_are_listed_in_pages() -> None:
    items = [{"id": name} for name in "abcde"]
    first = item_list(items, limit=2, after=None, is_ascending=False)
    assert [item["id"] for item in first["data"]] == ["e", "d"]
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("e", "d", True)
    last = item_list(items, limit=2, after="b", is_ascending=False)
    assert [item["id"] for item in last["data"]] == ["a"]
    assert not last["has_more"]
    assert [item["id"] for item in item_list(items, limit=9, after="c", is_ascending=True)["data"]] == ["d", "e"]
    with pytest.raises(RequestError, match="after is 'z'"):
        item_list(items, limit=2, after="z", is_ascending=True)
