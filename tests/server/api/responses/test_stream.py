import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ringserve.server.api.render.logprob_format import ChatLogprobs
from ringserve.server.api.responses.protocol import ResponseRequest
from ringserve.server.api.responses.stream import PlainParser, ResponseEvents, TextParser
from ringserve.server.chat.parser import ChatDelta, ChatParsing
from ringserve.server.chat.tool_formats import FORMATS
from ringserve.server.chat.tool_parser import ToolCallDelta
from ringserve.server.errors import EngineGenerateError
from ringserve.server.generation.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.text.token_names import TokenNames

HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "store": True}
EVENT = TypeAdapter(ResponseStreamEvent)
NOTHING = ChatDelta("", ())


class ScriptedParser:
    """Answers each push with the next of its deltas."""

    def __init__(self, *deltas: ChatDelta, last: ChatDelta = NOTHING) -> None:
        self._deltas = list(deltas)
        self._last = last

    def push(self, text: str) -> ChatDelta:
        return self._deltas.pop(0) if text else NOTHING

    def finish(self) -> ChatDelta:
        return self._last


def response_events(
    parser: TextParser | None = None, logprobs: ChatLogprobs | None = None
) -> tuple[ResponseEvents, list[bytes]]:
    ended: list[bytes] = []
    base = {**HEAD, **ResponseRequest(input="Hi").repeated(SamplingParams())}
    events = ResponseEvents(
        base, parser or PlainParser(), num_prompt_tokens=5, count_tokens=len, on_end=ended.append, logprobs=logprobs
    )
    return events, ended


def output(text: str, num_tokens: int, finish_reason: str | None = None) -> CompletionOutput:
    return CompletionOutput(0, text, [1], finish_reason, None, num_tokens)


def parse(raw: bytes) -> list[dict[str, Any]]:
    """Return the events; the name of each is its type, their numbers count up, and the SDK's types hold them."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode()[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def accumulate(events: list[dict[str, Any]]) -> ResponseStreamState[None]:
    """Feed the events to the accumulator of the SDK's stream helper."""
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    return state


def stream(texts: list[str], finish_reason: str = "stop", parser: TextParser | None = None) -> list[dict[str, Any]]:
    events, ended = response_events(parser)
    raw = events.opening(1, b"")
    for i, text in enumerate(texts[:-1]):
        raw += events.delta(output(text, i + 1), b"")
    raw += events.finish(output(texts[-1], len(texts), finish_reason), b"", is_fingerprinted=True)
    parsed = parse(raw)
    assert [json.loads(response) for response in ended] == [parsed[-1]["response"]]
    return parsed


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_is_told_from_created_to_completed() -> None:
    events = stream(["Hel", "lo", "!"])
    assert types(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo", "!"]
    response = Response.model_validate(events[-1]["response"])
    assert response.output_text == events[7]["text"] == "Hello!"
    assert response.status == response.output[0].status == "completed"
    assert response.completed_at is not None
    assert response.usage.to_dict() == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 8,
    }  # fmt: skip
    assert accumulate(events)._completed_response.output_text == "Hello!"


def test_an_item_has_one_id_in_all_its_events() -> None:
    events = stream(["a", "b"])
    ids = {event["item_id"] for event in events if "item_id" in event}
    ids |= {event["item"]["id"] for event in events if "item" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}


@pytest.mark.parametrize(("finish_reason", "details"), [("length", {"reason": "max_output_tokens"}), ("abort", None)])
def test_what_did_not_stop_by_itself_is_incomplete(finish_reason: str, details: dict[str, str] | None) -> None:
    events = stream(["Hel", "lo"], finish_reason)
    assert types(events)[-1] == "incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", details)
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None
    accumulate(events)


def test_an_answer_without_text_is_an_empty_message() -> None:
    events = stream([""])
    assert "output_text.delta" not in types(events)
    assert Response.model_validate(events[-1]["response"]).output_text == ""
    assert events[-1]["response"]["output"][0]["type"] == "message"
    accumulate(events)


def test_text_that_is_held_back_sends_no_event() -> None:
    events, _ = response_events()
    events.opening(1, b"")
    assert events.delta(output("", 1), b"") == b""


def test_line_ends_in_a_text_do_not_end_the_events_line() -> None:
    text = "a\nb\r\u2028\u0085\u2029\x0b\x0cé\U0001f600"
    events, _ = response_events()
    raw = events.opening(1, b"") + events.finish(output(text, 1, "stop"), b"", is_fingerprinted=True)
    lines = raw.decode().splitlines()
    assert all(line == "" or line.startswith(("event: ", "data: ")) for line in lines)
    assert Response.model_validate(parse(raw)[-1]["response"]).output_text == text


def test_calls_are_items_with_their_arguments_as_they_come() -> None:
    parser = ScriptedParser(
        ChatDelta("", ("I look. ",)),
        ChatDelta("", (ToolCallDelta(0, "call_a", "weather", ""),)),
        ChatDelta("", (ToolCallDelta(0, None, None, '{"city":'),)),
        ChatDelta("", (ToolCallDelta(0, None, None, ' "Paris"}'), ToolCallDelta(1, "call_b", "time", "{}"))),
    )
    events = stream(["1", "2", "3", "4", ""], parser=parser)
    assert types(events)[2:] == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = Response.model_validate(events[-1]["response"])
    message, first, second = response.output
    assert (message.type, response.output_text) == ("message", "I look. ")
    assert (first.call_id, first.name, first.arguments) == ("call_a", "weather", '{"city": "Paris"}')
    assert (second.call_id, second.name, second.arguments) == ("call_b", "time", "{}")
    assert [event["output_index"] for event in events if "item" in event] == [0, 0, 1, 1, 2, 2]
    accumulated = accumulate(events)._completed_response.output
    assert [item.id for item in accumulated] == [item.id for item in response.output]


def test_text_and_calls_are_items_in_the_order_of_the_text_however_they_come() -> None:
    text = (
        'Wait.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> So, <tool_call>{"name": "g"}</tool_call> end'
    )
    for size in (1, 3, 30, 40, 55, 1000):
        parser = ChatParsing(tools=FORMATS["hermes"], names=frozenset("fg")).parser()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        events = stream(pieces, parser=parser)
        found = [
            (item["name"], item["arguments"]) if item["type"] == "function_call" else item["content"][0]["text"]
            for item in events[-1]["response"]["output"]
        ]
        assert found == ["Wait.", ("f", '{"a": 1}'), " So, ", ("g", "{}"), " end"], size


def test_a_call_alone_has_no_message_beside_it() -> None:
    parser = ScriptedParser(last=ChatDelta("", (ToolCallDelta(0, None, "now", "{}"),)))
    (item,) = stream([""], parser=parser)[-1]["response"]["output"]
    assert item["type"] == "function_call"
    assert item["call_id"].startswith("call_")


def test_reasoning_is_an_item_before_the_message() -> None:
    parser = ScriptedParser(ChatDelta("Hm", ()), ChatDelta(", yes", ()), ChatDelta(".", ("Yes",)))
    events = stream(["1", "2", "3", ""], parser=parser)
    assert types(events)[2:10] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    response = Response.model_validate(events[-1]["response"])
    assert response.output[0].type == "reasoning"
    assert response.output[0].content[0].text == "Hm, yes."
    assert response.output_text == "Yes"
    accumulate(events)


def test_the_last_item_alone_is_incomplete_when_tokens_ran_out() -> None:
    parser = ScriptedParser(
        ChatDelta("", (ToolCallDelta(0, "a", "f", "{}"),)), ChatDelta("", (ToolCallDelta(1, "b", "g", '{"x'),))
    )
    response = stream(["1", "2"], "length", parser)[-1]["response"]
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_a_failure_ends_the_response_with_what_there_is() -> None:
    events, ended = response_events()
    raw = events.opening(1, b"") + events.delta(output("Hel", 1), b"")
    raw += events.failure(EngineGenerateError("the engine failed this request"))
    parsed = parse(raw)
    assert types(parsed)[-2:] == ["error", "failed"]
    assert parsed[-2]["message"] == "the engine failed this request"
    response = parsed[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine failed this request"}
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert [json.loads(one) for one in ended] == [response]
    accumulate(parsed)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_whole_response_is_the_one_that_a_stream_ends_with(finish_reason: str) -> None:
    streamed = stream(["Hel", "lo"], finish_reason)[-1]["response"]
    events, ended = response_events()
    whole = json.loads(events.whole(output("Hello", 2, finish_reason)))
    assert [json.loads(one) for one in ended] == [whole]
    for response in (streamed, whole):
        response["output"][0].pop("id")
        response.pop("completed_at")
    assert whole == streamed


def test_each_token_has_its_logprobs_also_where_its_text_is_held_back() -> None:
    logprobs = ChatLogprobs(TokenNames({7: b"He", 8: b"\xc3", 9: b"\xa9", 0: b"<end>"}.__getitem__))
    tokens = [("He", 7), ("", 8), ("\u00e9", 9), ("", 0)]
    outputs = [
        CompletionOutput(0, text, [token_id], None, None, n, TokenLogprobs(2, [token_id, 7], [-0.5, -0.25], [1]))
        for n, (text, token_id) in enumerate(tokens, 1)
    ]
    outputs[-1].finish_reason = "stop"
    events, _ = response_events(logprobs=logprobs)
    raw = events.opening(1, b"") + b"".join(events.delta(output, b"") for output in outputs[:-1])
    parsed = parse(raw + events.finish(outputs[-1], b"", is_fingerprinted=True))
    sent = [[entry["bytes"] for entry in event["logprobs"]] for event in parsed if "delta" in event]
    assert sent == [[[72, 101]], [[0xC3], [0xA9]], [list(b"<end>")]]
    assert [event["delta"] for event in parsed if "delta" in event] == ["He", "\u00e9", ""]
    (message,) = Response.model_validate(parsed[-1]["response"]).output
    entries = message.content[0].logprobs
    assert [entry.bytes for entry in entries] == [[72, 101], [0xC3], [0xA9], list(b"<end>")]
    assert [entry.logprob for entry in entries] == [-0.5] * 4
    assert [(top.token, top.logprob) for top in entries[1].top_logprobs] == [("He", -0.25)]
    whole = CompletionOutput(0, "He\u00e9", [7, 8, 9, 0], "stop", None, 4, outputs[0].logprobs)
    for output in outputs[1:]:
        whole.logprobs.extend(output.logprobs)
    events, _ = response_events(logprobs=logprobs)
    content = json.loads(events.whole(whole))["output"][0]["content"]
    assert content == parsed[-1]["response"]["output"][0]["content"]


def test_usage_counts_cached_and_reasoning_tokens() -> None:
    parser = ScriptedParser(ChatDelta("Hm", ()), ChatDelta(", yes", ()), ChatDelta("", ("Yes",)))
    events, _ = response_events(parser)
    source = RequestOutput("r", [1], [], True, num_cached_tokens=3)
    raw = events.reading([source]).opening(1, b"")
    for n in (1, 2, 3):
        raw += events.delta(output("x", n), b"")
    usage = parse(raw + events.finish(output("", 4, "stop"), b"", is_fingerprinted=True))[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("Hm, yes")
    assert usage["output_tokens"] == 4
