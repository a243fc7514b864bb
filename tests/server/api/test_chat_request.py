from typing import Any

import msgspec
import pytest

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.chat.messages import ChatMessage
from ringserve.server.errors import RequestError
from ringserve.server.http.request_body import decode

USER = {"role": "user", "content": "a"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [USER], **fields}, ChatCompletionRequest)


def template(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return chat(messages=list(messages)).chat_prompt().messages


def test_a_message_s_parts_are_joined_and_its_extra_fields_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    message = ChatMessage(role="user", content=parts, name="Bo", tool_call_id="7")
    assert message.to_template(0) == {"role": "user", "content": "a\nb\nc", "name": "Bo", "tool_call_id": "7"}
    assert ChatMessage(role="assistant").to_template(0) == {"role": "assistant", "content": ""}


def test_a_role_is_whatever_the_template_may_know_but_has_a_name() -> None:
    assert template({"role": "critic", "content": "a"}) == [{"role": "critic", "content": "a"}]
    with pytest.raises(RequestError, match=r'^messages\[1\].role is "": Expected `str` of length >= 1') as caught:
        decode(b'{"messages":[{"role":"user","content":"a"},{"role":"","content":"a"}]}', ChatCompletionRequest)
    assert caught.value.param == "messages[1].role"


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 1}, "text", None, 7,
     {"type": ["text"], "text": "a"}, {"text": "a"}, {"type": "refusal", "text": "a"}],
)  # fmt: skip
def test_a_part_that_is_not_text_is_refused_with_its_place(part: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages\[1\] has a content part .* is supported") as caught:
        template(USER, {"role": "user", "content": [part]})
    assert caught.value.param == "messages"


def test_tool_calls_reach_the_template_with_their_arguments_decoded() -> None:
    function = {"name": "f", "arguments": '{"a": [1, "é"]}'}
    call = {"id": "c1", "type": "function", "function": function}
    [message, answer] = template(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    )
    assert message["content"] == ""
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"a": [1, "é"]}}}]
    assert answer == {"role": "tool", "content": "5", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"function": None},
        {"function": {"name": 1, "arguments": "{}"}},
        *({"id": wrong, "function": {"name": "f", "arguments": "{}"}} for wrong in (5, True, [], {})),
        *({"type": wrong, "function": {"name": "f", "arguments": "{}"}} for wrong in (5, "custom", "", {})),
        *({"function": {"name": "f", "arguments": wrong}} for wrong in (0, 5, False, [], [1])),
    ],
)
def test_a_broken_tool_call_is_refused_with_its_place(call: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.tool_calls\[0\]") as caught:
        template({"role": "assistant", "tool_calls": [call]})
    assert caught.value.param == "messages"


NO_OBJECTS = [
    '{"a": ', "[1,2]", '"x"', "3", '{"a":1}{"b":2}', '{"a": NaN}', '{"path": "C:\\x"}', "false", "{'a': 1}", "not JSON",
    "<arg>1</arg>", '{"a": "\n', "[" * 20_000, '{"a": 1e999}', "\ufeff{}", "}", " ",
]  # fmt: skip


@pytest.mark.parametrize("written", NO_OBJECTS, ids=lambda text: text[:12])
def test_a_call_of_any_text_stays_in_the_history_without_arguments(written: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    answer = {"role": "tool", "tool_call_id": "c", "content": "error: bad arguments"}
    told = template(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer)
    assert told[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {}}}]
    assert told[2] == answer


@pytest.mark.parametrize("none", [None, "", "null", "{}", {}])
def test_a_tool_call_without_arguments_has_an_empty_object(none: object) -> None:
    call = {"function": {"name": "f", "arguments": none}}
    (message,) = template({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_chat_takes_unknown_fields_of_messages_and_of_itself() -> None:
    body = {"messages": [{**USER, "refusal": None, "x": 1}], "user": "u", "store": False}
    request = msgspec.convert(body, ChatCompletionRequest)
    request.check()
    assert request.chat_prompt().messages == [USER]


def test_max_completion_tokens_wins_over_its_older_name_and_neither_may_be_0() -> None:
    assert chat().token_limit() is None
    assert chat(max_tokens=5).token_limit() == 5
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit() == 7
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1):
            with pytest.raises(RequestError, match=f"^{name} is {value}: must be at least 1") as caught:
                chat(**{name: value, "echo": True}).token_limit()
            assert caught.value.param == name


def test_top_logprobs_need_logprobs() -> None:
    assert chat().num_logprobs() is None
    assert chat(logprobs=False, top_logprobs=0).num_logprobs() is None
    assert chat(logprobs=True).num_logprobs() == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs() == 3
    with pytest.raises(RequestError, match="top_logprobs is 2 without logprobs") as caught:
        chat(top_logprobs=2).num_logprobs()
    assert caught.value.param == "top_logprobs"


def test_options_of_the_template_reach_it() -> None:
    prompt = chat(
        documents=[{"d": 1}], chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low",
        add_generation_prompt=False,
    ).chat_prompt()  # fmt: skip
    assert (prompt.documents, prompt.add_generation_prompt) == ([{"d": 1}], False)
    assert prompt.extra == {"enable_thinking": False, "reasoning_effort": "low"}
    assert chat().chat_prompt().add_generation_prompt


def test_a_continued_message_gets_no_generation_prompt() -> None:
    prompt = chat(continue_final_message=True).chat_prompt()
    assert prompt.continues_final_message
    assert not prompt.add_generation_prompt
    with pytest.raises(RequestError, match="both true") as caught:
        chat(continue_final_message=True, add_generation_prompt=True).chat_prompt()
    assert caught.value.param == "continue_final_message"


def test_a_request_s_own_template_is_not_trusted() -> None:
    with pytest.raises(RequestError, match=r"chat_template is set: .* --chat-template") as caught:
        chat(chat_template="{{ messages }}").chat_prompt()
    assert caught.value.param == "chat_template"


def test_echo_shows_the_last_message_if_it_is_the_assistant_s() -> None:
    request = chat(messages=[USER, {"role": "assistant", "content": "b"}], echo=True)
    assert request.echoed_text(request.chat_prompt()) == "b"
    assert chat(echo=True).echoed_text(chat().chat_prompt()) == ""


def test_the_limit_is_called_what_the_client_called_it() -> None:
    assert chat(max_tokens=5).limit_name == "max_tokens"
    assert chat(max_completion_tokens=7).limit_name == "max_completion_tokens"
