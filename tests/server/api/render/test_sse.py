import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.server.api.render.chunks import ChatChunks, CompletionChunks, StreamIdentity
from ringserve.server.api.render.sse import EventStream
from ringserve.server.errors import EngineDeadError, EngineGenerateError, OverloadedError
from ringserve.server.generation.outputs import CompletionOutput
from ringserve.server.http.sink import Headers
from ringserve.server.text.json_string import json_string

IDENTITY = StreamIdentity(response_id="cmpl-1", created=17, model="a/model", fingerprint="ringserve-0")
FORMS = [ChatChunks, CompletionChunks]


class FakeSink:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.is_writable = True
        self.calls: list[tuple[Any, ...]] = []

    def open(self, status: int, headers: Headers) -> None:
        self.calls.append(("open", status, dict(headers)))

    def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    def finish(self, data: bytes = b"") -> None:
        self.calls.append(("finish", data))

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def events(self) -> list[Any]:
        """What was written, parsed; each event is one line that starts with data:, and a blank one."""
        raw = b"".join(call[1] for call in self.calls if call[0] in ("write", "finish")).decode()
        assert raw.endswith("\n\n")
        blocks = raw[:-2].split("\n\n")
        assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks)
        return [block[6:] if block == "data: [DONE]" else strict_json(block[6:]) for block in blocks]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def make(form: Any = CompletionChunks, **options: Any) -> tuple[EventStream, FakeSink]:
    sink = FakeSink()
    given = {"num_choices": 1, "num_prompt_tokens": [3], **options}
    return EventStream(sink, form(IDENTITY), **given), sink


def delta(text: str, index: int = 0, num_tokens: int = 1) -> CompletionOutput:
    return CompletionOutput(index, text, [5], num_tokens=num_tokens)


def last(
    text: str = "", index: int = 0, reason: str = "length", stop: str | int | None = None, num_tokens: int = 1
) -> CompletionOutput:
    return CompletionOutput(index, text, [5], reason, stop, num_tokens)


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"]["content"]


@pytest.mark.parametrize(
    "text",
    ["", "plain", 'quo"te\\', "\u2028", "a\u2029b", "\u0085", "\u2028\u2029\u0085" * 3, "\n\r\t\v\f\0\x1c\x1d\x1e\x1f",
     "\x7f", "😀 👩‍👩‍👧", "\ufffd\ufeff", "\U0010ffff", "ÂÅâ\u0080\u0084", "data: [DONE]\n\n"],
)  # fmt: skip
def test_a_string_is_strict_json_on_one_line(text: str) -> None:
    data = json_string(text)
    assert len(data.decode().splitlines()) == 1
    assert strict_json(data.decode()) == text


@settings(deadline=None, derandomize=True, database=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_without_surrogates_is_strict_json_on_one_line(text: str) -> None:
    data = json_string(text)
    assert len(data.decode().splitlines()) == 1
    assert strict_json(data.decode()) == text


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_every_kind_stay_one_event_a_delta(form: Any) -> None:
    stream, sink = make(form)
    texts = ["\u2028", "a\nb\r\n\r\n", "\u0085", "😀"]
    for text in texts:
        stream.write(delta(text))
    stream.write(last("\u2029", reason="stop", stop="\u2028"))
    *chunks, done = sink.events
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if "role" not in chunk["choices"][0].get("delta", {})]
    assert [text_of(choice) for choice in choices] == [*texts, "\u2029"]
    assert choices[-1]["stop_reason"] == "\u2028"


@pytest.mark.parametrize("form", FORMS)
def test_headers_leave_with_the_first_event_not_before(form: Any) -> None:
    stream, sink = make(form)
    assert sink.calls == []
    stream.write(delta("a"))
    assert sink.names == ["open", "write"]
    _, status, headers = sink.calls[0]
    assert status == 200
    assert headers == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert b'"a"' in sink.calls[1][1]


def test_roles_of_all_choices_come_in_the_write_of_the_first_token() -> None:
    stream, sink = make(ChatChunks, num_choices=2)
    stream.write(delta("a", index=1))
    assert sink.names == ["open", "write"]
    assert [event["choices"][0]["index"] for event in sink.events] == [0, 1, 1]
    assert [event["choices"][0]["delta"].get("role") for event in sink.events] == ["assistant", "assistant", None]


def test_an_error_before_the_first_byte_has_a_status_of_its_own() -> None:
    stream, sink = make()
    stream.fail(EngineDeadError("the engine is gone"))
    assert sink.names == ["open", "finish"]
    _, status, headers = sink.calls[0]
    assert status == 503
    assert headers == {b"content-type": b"application/json"}
    error = {"message": "the engine is gone", "type": "EngineDeadError", "param": None, "code": "server_error"}
    assert strict_json(sink.calls[1][1].decode()) == {"error": error}


def test_an_error_that_may_be_tried_again_says_when() -> None:
    stream, sink = make()
    stream.fail(OverloadedError("full"))
    assert sink.calls[0][1:] == (503, {b"content-type": b"application/json", b"retry-after": b"1"})


def test_an_error_after_the_first_byte_is_an_event_and_done() -> None:
    stream, sink = make()
    stream.write(delta("a"))
    stream.fail(EngineGenerateError("broken"))
    assert sink.names == ["open", "write", "finish"]
    assert sink.events[1:] == [EngineGenerateError("broken").body(), "[DONE]"]


def test_a_foreign_error_is_a_500_with_its_message() -> None:
    stream, sink = make()
    stream.fail(ValueError("odd"))
    assert sink.calls[0][1] == 500
    assert strict_json(sink.calls[1][1].decode())["error"]["message"] == "odd"


def test_an_error_event_is_one_line_whatever_its_message() -> None:
    stream, sink = make()
    stream.write(delta("a"))
    stream.fail(EngineGenerateError("no\u2028such\u0085token\n"))
    assert sink.events[1]["error"]["message"] == "no\u2028such\u0085token\n"


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_sent_for_a_token_without_text(form: Any) -> None:
    stream, sink = make(form)
    stream.write(delta("a"))
    num_calls = len(sink.calls)
    stream.write(delta(""))
    assert len(sink.calls) == num_calls
    stream.write(last())
    assert sink.names[num_calls:] == ["finish"]


def test_an_error_after_a_token_without_text_still_has_a_status_of_its_own() -> None:
    stream, sink = make(CompletionChunks)
    stream.write(delta(""))
    stream.write(delta(""))
    assert sink.calls == []
    stream.fail(EngineGenerateError("broken"))
    assert sink.names == ["open", "finish"]
    assert sink.calls[0][1] == 500


def test_a_response_of_one_empty_event_has_headers_too() -> None:
    stream, sink = make(CompletionChunks)
    stream.write(last())
    assert sink.names == ["open", "finish"]
    assert sink.calls[0][1] == 200


@pytest.mark.parametrize("form", FORMS)
def test_the_usage_chunk_sums_prompts_and_tokens_also_those_without_text(form: Any) -> None:
    stream, sink = make(form, num_choices=4, num_prompt_tokens=[3, 10], include_usage=True)
    for index in range(4):
        stream.write(delta("a", index, num_tokens=2))
        stream.write(delta("", index, num_tokens=3))
        stream.write(last(index=index, num_tokens=4))
    assert sink.names.count("open") == 1
    *chunks, usage, done = sink.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 13, "total_tokens": 29, "completion_tokens": 16}
    assert usage["system_fingerprint"] == "ringserve-0"
    assert not any("usage" in chunk or "system_fingerprint" in chunk for chunk in chunks)


def test_without_usage_the_last_chunks_carry_the_fingerprint() -> None:
    stream, sink = make(num_choices=2)
    stream.write(delta("a"))
    stream.write(last(index=0))
    stream.write(last(index=1))
    assert [event.get("system_fingerprint") for event in sink.events[:-1]] == [None, "ringserve-0", "ringserve-0"]
    assert not any("usage" in event for event in sink.events[:-1])


def test_continuous_usage_counts_each_choice_and_its_own_prompt() -> None:
    stream, sink = make(num_choices=4, num_prompt_tokens=[3, 10], include_usage=True, continuous_usage=True)
    for index, num_tokens in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2)):
        stream.write(delta("a" if index else "", index, num_tokens))
    counts = [(event["choices"][0]["index"], event["usage"]) for event in sink.events]
    assert [(i, u["prompt_tokens"], u["completion_tokens"]) for i, u in counts] == [
        (0, 3, 1), (1, 3, 1), (2, 10, 1), (3, 10, 1), (3, 10, 2),
    ]  # fmt: skip
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for _, u in counts)


def test_continuous_usage_starts_at_no_token_in_a_chat() -> None:
    stream, sink = make(ChatChunks, include_usage=True, continuous_usage=True)
    stream.write(delta("a"))
    assert [event["usage"]["completion_tokens"] for event in sink.events] == [0, 1]


def test_continuous_usage_alone_asks_for_nothing() -> None:
    stream, sink = make(continuous_usage=True)
    stream.write(delta("a"))
    stream.write(last())
    assert not any("usage" in event for event in sink.events[:-1])


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_finishes_once_with_its_last_choice(form: Any) -> None:
    stream, sink = make(form, num_choices=2)
    stream.write(last("a", index=1, reason="stop", stop=7))
    assert "finish" not in sink.names
    stream.write(last("b", index=0, reason="abort"))
    assert sink.names.count("finish") == 1
    assert sink.names[-1] == "finish"
    *chunks, done = sink.events
    assert done == "[DONE]"
    finished = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [(c["index"], text_of(c), c["finish_reason"], c["stop_reason"]) for c in finished] == [
        (1, "a", "stop", 7), (0, "b", "abort", None),
    ]  # fmt: skip
    stream.fail(EngineDeadError("too late"))
    assert sink.names.count("finish") == 1


def test_nothing_is_sent_after_an_error() -> None:
    stream, sink = make(num_choices=2, num_prompt_tokens=[3, 3])
    stream.write(delta("a", 0))
    stream.fail(EngineGenerateError("the first prompt's request failed"))
    num_calls = len(sink.calls)
    stream.write(delta("b", 1))
    stream.write(last("c", 1))
    stream.fail(EngineGenerateError("and the second's"))
    assert len(sink.calls) == num_calls


def test_a_stream_is_writable_as_its_sink_is() -> None:
    stream, sink = make()
    assert stream.is_writable
    sink.is_writable = False
    assert not stream.is_writable


def test_names_of_the_response_are_escaped() -> None:
    identity = StreamIdentity(response_id='a"\u2028', created=1, model='m\\"', fingerprint='f"')
    sink = FakeSink()
    stream = EventStream(sink, CompletionChunks(identity), num_choices=1, num_prompt_tokens=[1])
    stream.write(last("a"))
    chunk = sink.events[0]
    assert (chunk["id"], chunk["model"], chunk["system_fingerprint"]) == ('a"\u2028', 'm\\"', 'f"')


@pytest.mark.parametrize("form", FORMS)
def test_a_comment_before_the_first_event_opens_the_response_and_changes_no_event(form: Any) -> None:
    plain, plain_sink = make(form)
    commented, sink = make(form)
    commented.keep_alive()
    assert sink.calls == [("open", 200, sink.calls[0][2]), ("write", b": keep-alive\n")]
    assert commented.delta_writer(0) is None  # its events would come before the opening one
    for stream in (plain, commented):
        stream.write(CompletionOutput(0, "a", [1], num_tokens=1))
        stream.write(CompletionOutput(0, "b", [2], "stop", num_tokens=2))
    assert sink.names.count("open") == 1
    written = b"".join(call[1] for call in sink.calls if call[0] != "open")
    assert written.removeprefix(b": keep-alive\n") == b"".join(
        call[1] for call in plain_sink.calls if call[0] != "open"
    )


def test_no_comment_is_written_to_a_client_that_does_not_keep_up_nor_after_the_end() -> None:
    stream, sink = make()
    sink.is_writable = False
    stream.keep_alive()
    assert sink.calls == []
    sink.is_writable = True
    stream.write(CompletionOutput(0, "b", [2], "stop", num_tokens=1))
    num_calls = len(sink.calls)
    stream.keep_alive()
    assert len(sink.calls) == num_calls


def test_an_error_after_a_comment_is_an_event() -> None:
    stream, sink = make()
    stream.keep_alive()
    stream.fail(OverloadedError("full"))
    assert sink.names == ["open", "write", "finish"]
    assert sink.calls[2][1].startswith(b'data: {"error":')
