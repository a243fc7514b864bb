from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from ringserve.server.api.responses.items import normalize
from ringserve.server.api.responses.protocol import LOGPROBS, ResponseRequest, item_list
from ringserve.server.errors import RequestError
from ringserve.server.grammar import structured_output
from ringserve.server.http.request_body import decode

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
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
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
        prompt_cache_key="k", safety_identifier="s", some_new_field=1, stream=True,
        stream_options={"include_obfuscation": False},
        reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "medium"}, parallel_tool_calls=None,
    )  # fmt: skip


def test_the_response_repeats_the_request_as_the_sdk_types_it() -> None:
    schema = {"type": "object", "properties": {}}
    body = request(
        instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=7, metadata={"k": "v"}, tools=[CALLER],
        tool_choice={"type": "function", "name": "f"}, truncation="auto", user="me", top_logprobs=2, include=[LOGPROBS],
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )  # fmt: skip
    echo = body.repeated(body.params({}))
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
    params = request(top_p=0.5).params({"temperature": 0.25, "top_p": 0.75})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.5, None)
    assert request().params({}).temperature == 1


def test_tools_and_their_choice_become_those_of_chat_completions() -> None:
    both = [{**CALLER, "description": "d"}, {**CALLER, "name": "g"}]
    use = request(tools=both, parallel_tool_calls=False).tool_use()
    assert use is not None
    assert (use.mode, use.is_parallel, use.names) == ("auto", False, {"f", "g"})
    function = use.functions[0]
    assert (function.description, function.parameters, function.strict) == ("d", CALLER["parameters"], True)
    assert request(tools=both, tool_choice="required").tool_use().mode == "required"
    named = request(tools=both, tool_choice={"type": "function", "name": "g"}).tool_use()
    assert (named.mode, named.names) == ("named", {"g"})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    few = request(tools=both, tool_choice=allowed).tool_use()
    assert (few.mode, few.names) == ("required", {"g"})


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}])
def test_a_request_without_tools_wants_nothing_of_them(fields: dict[str, Any]) -> None:
    assert request(**fields).tool_use() is None


@pytest.mark.parametrize("name", ["missing", None])
def test_a_choice_of_a_tool_that_is_not_there_is_refused(name: str | None) -> None:
    tools = [CALLER] if name else None
    with pytest.raises(RequestError, match="tool_choice"):
        request(tools=tools, tool_choice={"type": "function", "name": name or "f"}).tool_use()


def test_a_format_is_a_grammar() -> None:
    assert not request().has_format
    assert not request(text={"format": {"type": "text"}}).has_format
    body = request(text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}})
    assert body.has_format
    assert body.format_grammar() == structured_output.from_json_schema({"type": "integer"})
    body = request(text={"format": {"type": "json_object"}})
    assert body.format_grammar() == structured_output.json_object()


def test_logprobs_are_included_on_demand() -> None:
    assert request(include=[LOGPROBS]).params({}).logprobs == 0
    assert request(include=[LOGPROBS], top_logprobs=3).params({}).logprobs == 3
    with pytest.raises(RequestError, match=r"top_logprobs is 2: name message\.output_text.logprobs in include"):
        request(top_logprobs=2).params({})


def test_templates_get_the_effort_and_the_requests_variables() -> None:
    body = request(reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False}, instructions="Think.")
    prompt = body.chat_prompt(normalize("Hi"))
    assert prompt.extra == {"enable_thinking": False, "reasoning_effort": "low"}
    assert prompt.messages == [{"role": "system", "content": "Think."}, {"role": "user", "content": "Hi"}]


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
