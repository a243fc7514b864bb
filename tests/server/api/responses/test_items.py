from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from ringserve.server.api.responses.items import chat_messages, made_ids, normalize, references, turn_starts
from ringserve.server.errors import RequestError
from tests.server.api.test_chat_request import NO_OBJECTS

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}


def messages(given: "str | list[Any]", instructions: str | None = None) -> list[dict[str, Any]]:
    found = chat_messages(instructions, normalize(given))
    return [message.to_template(place) for place, message in enumerate(found)]


def test_a_text_is_one_message_of_the_user() -> None:
    assert messages("Hi") == messages([USER]) == [{"role": "user", "content": "Hi"}]


def test_instructions_come_first_as_a_system_message() -> None:
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert messages("Hi", "Be brief.") == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "Hi"},
        {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []},
        {"type": "text", "text": "Hi"},
        {"type": "refusal", "refusal": "Hi"},
    ],
    ids=lambda part: part["type"],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_parts_are_text_whatever_their_kind(part: dict[str, Any], role: str) -> None:
    assert messages([{"type": "message", "role": role, "content": [part]}])[0]["content"] == "Hi"


def test_a_call_joins_the_models_text_before_it_and_its_result_is_a_tools_message() -> None:
    answer = {"role": "assistant", "content": "I look."}
    second = {**CALL, "call_id": "call_2"}
    rendered = messages([USER, answer, CALL, second, RESULT])
    assert [message["role"] for message in rendered] == ["user", "assistant", "tool"]
    assert rendered[1]["content"] == "I look."
    assert [call["id"] for call in rendered[1]["tool_calls"]] == ["call_1", "call_2"]
    assert rendered[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert rendered[2] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


def test_a_call_without_text_before_it_is_a_message_of_its_own() -> None:
    rendered = messages([USER, CALL, RESULT, CALL, RESULT])
    assert [message["role"] for message in rendered] == ["user", "assistant", "tool", "assistant", "tool"]
    assert all(len(message["tool_calls"]) == 1 for message in rendered if message["role"] == "assistant")


def test_reasoning_is_accepted_and_left_out_of_the_prompt() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    assert messages([USER, reasoning]) == messages([USER])


def test_items_are_listed_as_the_sdk_types_them() -> None:
    given = [USER, {"role": "assistant", "content": "Yes?"}, CALL, RESULT, {"type": "reasoning", "summary": []}]
    items = normalize(given)
    TypeAdapter(list[ResponseItem]).validate_python(items)
    prefixes = [item["id"].partition("_")[0] for item in items]
    assert prefixes == ["msg", "msg", "fc", "fco", "rs"]
    assert normalize(items) == items  # what was listed can be sent again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "input is missing or empty"),
        (["Hi"], r"input\[0\] is 'Hi'"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "only text is supported"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 3}]}], "only text is supported"),
        ([{"type": "computer_call", "id": "x"}], "'computer_call'"),
        ([{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}], "only text"),
        ([{"content": "x"}], r"input\[0\]\.type is None"),
    ],
)
def test_what_is_no_supported_item_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        normalize(given)
    assert raised.value.param == "input"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "cat", "content": "x"}, 'input[1].role is "cat": must be assistant, developer, system or user'),
        ({"role": "user"}, "input[1].content is missing: it is required"),
        ({"type": "function_call", "name": "x", "arguments": "{}"}, "input[1].call_id is missing: it is required"),
        ({**CALL, "arguments": {"a": 1}}, 'input[1].arguments is {"a":1}: Expected `str`, got `object`'),
        ({**CALL, "status": "done"}, 'input[1].status is "done": must be completed, in_progress or incomplete'),
    ],
)
def test_a_wrong_field_of_an_item_is_named_with_its_place(item: Any, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        normalize([USER, item])
    assert str(raised.value).startswith(message)
    assert raised.value.param == message.partition(" ")[0]


def test_turns_start_at_the_users_messages_but_the_first() -> None:
    answer = {"role": "assistant", "content": "Yes?"}
    assert turn_starts(normalize([USER, answer, USER, CALL, RESULT, answer, USER])) == [2, 6]
    assert turn_starts(normalize("Hi")) == []


@pytest.mark.parametrize("status", ["completed", "incomplete", None])
@pytest.mark.parametrize("written", NO_OBJECTS, ids=lambda text: text[:12])
def test_a_call_of_any_text_stays_in_the_conversation_without_arguments(written: str, status: str | None) -> None:
    told = messages([USER, {**CALL, "arguments": written, "status": status}, RESULT, USER])
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "user"]
    assert told[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}
    assert told[2]["content"] == "sunny"


def test_content_and_summary_may_be_null() -> None:
    told = messages([USER, {"role": "assistant", "content": None}, CALL, RESULT])
    assert told == messages([USER, CALL, RESULT])
    for reasoning in ({"summary": None}, {"summary": None, "content": None, "encrypted_content": None}):
        (item,) = normalize([{"type": "reasoning", "id": "rs_1", **reasoning}])
        assert item == {"id": "rs_1", "type": "reasoning", "summary": [], "content": []}


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "msg_1"}]
)
def test_an_item_of_an_id_alone_is_a_reference(item: dict[str, Any]) -> None:
    assert references(normalize([USER, item])) == {"msg_1": 1}


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {"type": "item_reference", "id": 5}, {"id": None}, {}])
def test_a_reference_needs_an_id(item: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^input\[0\]"):
        normalize([item])


def test_an_item_is_referred_to_once() -> None:
    with pytest.raises(RequestError, match=r"^input\[2\]\.id is 'msg_1' for the second time"):
        references(normalize([{"id": "msg_1"}, USER, {"id": "msg_1"}]))


def test_ids_that_clients_chose_are_not_made_here() -> None:
    given = [USER, {**USER, "id": "mine"}, {"id": "msg_1"}, {**CALL, "id": None}]
    items = normalize(given)
    assert made_ids(given, items) == (items[0]["id"], items[3]["id"])
    assert made_ids("Hi", normalize("Hi"))[0].startswith("msg_")
