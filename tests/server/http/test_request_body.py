import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.api.completion_request import CompletionRequest
from ringserve.server.api.embeddings import EmbeddingRequest
from ringserve.server.api.responses.protocol import ResponseRequest
from ringserve.server.errors import BodyTooLargeError, RequestError
from ringserve.server.http.request_body import BodyReader, decode

JSON = {"content-type": "application/json"}


class Inner(msgspec.Struct):
    number: int


class Body(msgspec.Struct):
    inner: list[Inner]
    name: str | None = None


def read(body: bytes, headers: dict[str, str], max_bytes: int = 100, part_bytes: int = 10) -> Any:
    """Read a body that arrives in parts."""
    parts = [body[start : start + part_bytes] for start in range(0, len(body), part_bytes)] or [b""]
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False
    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}

    async def receive() -> Message:
        return messages.pop(0)

    return asyncio.run(BodyReader(max_bytes).read(Request(scope, receive), Body)), len(messages)


def test_a_body_in_parts_is_whole() -> None:
    body, _ = read(b'{"inner": [{"number": 1}, {"number": 2}], "unknown": 5}', JSON)
    assert body == Body(inner=[Inner(1), Inner(2)])


@pytest.mark.parametrize("content_type", ["application/json", "APPLICATION/JSON ; charset=utf-8"])
def test_json_is_the_content_type(content_type: str) -> None:
    assert read(b'{"inner":[]}', {"content-type": content_type})[0] == Body(inner=[])


@pytest.mark.parametrize("content_type", ["", "text/json", "application/jsonl", "json"])
def test_another_content_type_is_refused_and_shown(content_type: str) -> None:
    with pytest.raises(RequestError, match=f"Content-Type is '{content_type}': must be application/json"):
        read(b'{"inner":[]}', {"content-type": content_type})


def test_a_body_that_says_that_it_is_too_large_is_not_read() -> None:
    with pytest.raises(BodyTooLargeError, match="101 bytes: at most 100"):
        read(b"", {**JSON, "content-length": "101"})


def test_a_length_with_more_digits_than_python_takes_is_a_length() -> None:
    assert read(b'{"inner":[]}', {**JSON, "content-length": "0" * 5000 + "12"})[0] == Body(inner=[])


def test_a_body_that_grows_too_large_is_refused_whatever_it_says() -> None:
    for headers in (JSON, {**JSON, "content-length": "5"}, {**JSON, "content-length": "-1"}):
        with pytest.raises(BodyTooLargeError, match="limit of 100"):
            read(b" " * 101, headers)
    assert read(b'{"inner":[]}' + b" " * 88, JSON)[0] == Body(inner=[])


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [(b'{"inner":[{"number":1},{"number":"x"}]}', 'inner[1].number is "x": ', "inner[1].number"),
     (b'{"inner":{"a":1}}', 'inner is {"a":1}: ', "inner"),
     (b'{"inner":[{}]}', "inner[0].number is missing: ", "inner[0].number"),
     (b'{"inner":[],"name":7}', "name is 7: ", "name"),
     (b'{"inner":[{"number":1.5}]}', "inner[0].number is 1.5: ", "inner[0].number"),
     (b"[]", "the body is wrong: ", None), (b"{}", "inner is missing: ", "inner")],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        decode(body, Body)
    assert str(caught.value).startswith(message)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("value", "message"),
    [("NaN", "temperature is NaN: must be a finite number, as a double holds it"),
     ("-Infinity", "temperature is -Infinity: must be a finite number, as a double holds it"),
     ("1e999", "temperature is 1e999: must be a finite number, as a double holds it"),
     ('0,"logit_bias":{"3":NaN}', "logit_bias.3 is NaN: must be a finite number, as a double holds it"),
     ('0,"seed":' + "9" * 5000, f"seed is {'9' * 100}...: must be a finite number, as a double holds it"),
     ('0,"stop":["a","b\\udc00"]', "stop[1] is 'b\\udc00': it holds half of a surrogate pair, send whole characters"),
     ('0,"messages":[{"content":"a\\ud83d b"}]',
      "messages[0].content is 'a\\ud83d b': it holds half of a surrogate pair, send whole characters"),
     ('0,"logit_bias":{"\\ud800":1}',
      "logit_bias has the key '\\ud800': it holds half of a surrogate pair, send whole characters"),
     ('0,"\\ud800":1', "the body has the key '\\ud800': it holds half of a surrogate pair, send whole characters")],
)  # fmt: skip
def test_what_other_readers_take_for_json_is_named_with_its_place(value: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(f'{{"prompt":"a","temperature":{value}}}'.encode(), CompletionRequest)
    assert str(caught.value) == message
    name = message.partition(" ")[0]
    assert caught.value.param == (None if name == "the" else name)


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [(EmbeddingRequest, '"encoding_format":"hex"', 'encoding_format is "hex": must be base64 or float'),
     (ResponseRequest, '"text":{"format":{"type":"xml"}}',
      'text.format.type is "xml": must be json_object, json_schema or text'),
     (ChatCompletionRequest, '"tool_choice":"any"', 'tool_choice is "any": must be auto, none or required'),
     (ChatCompletionRequest, '"tool_choice":{"type":"tool"}',
      'tool_choice.type is "tool": must be function or allowed_tools'),
     (ChatCompletionRequest, '"tools":[{"type":"web","function":{"name":"a"}}]',
      'tools[0].type is "web": must be function')],
)  # fmt: skip
def test_a_wrong_choice_is_told_what_there_is(kind: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(f'{{"input":"a","messages":[],{field}}}'.encode(), kind)
    assert str(caught.value) == message


@pytest.mark.parametrize("number", ["16.0", "16e0", "1.6e1", "160E-1"])
def test_a_whole_number_is_an_integer_however_it_is_written(number: str) -> None:
    body = f'{{"prompt":"a","max_tokens":{number},"stop_token_ids":[{number}],"temperature":1.5}}'.encode()
    request = decode(body, CompletionRequest)
    assert (request.max_tokens, request.stop_token_ids, request.temperature) == (16, [16], 1.5)


@pytest.mark.parametrize("wrong", ["16.5", "true", '"16"', "1e999"])
def test_what_is_no_whole_number_is_no_integer_also_beside_one(wrong: str) -> None:
    with pytest.raises(RequestError, match=r"^max_tokens is ") as caught:
        decode(f'{{"prompt":"a","n":1.0,"max_tokens":{wrong}}}'.encode(), CompletionRequest)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("encoding", ["gzip", "br", "x"])
def test_a_packed_body_is_refused_by_its_header(encoding: str) -> None:
    with pytest.raises(RequestError, match=f"Content-Encoding is '{encoding}'"):
        read(b'{"inner":[]}', {**JSON, "content-encoding": encoding})
    for none in ("", "Identity"):
        assert read(b'{"inner":[]}', {**JSON, "content-encoding": none})[0] == Body(inner=[])


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as caught:
        decode(b'{"inner":"' + b"x" * 10**6 + b'"}', Body)
    assert len(str(caught.value)) < 200
    assert 'inner is "xxx' in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b'{"inner":[]} x', b"\xff", b'{"name":"\xff","inner":[]}', b'{"inner":[],"x":\\ud800}',
     b'{"inner":[],"x":NaN', b"NaN", b'"\\ud800"', b"{'inner':[]}", b"\xef\xbb\xbf{}", b"null", b"5",
     '{"inner":[]}'.encode("utf-16"), '{"inner":[]}'.encode("utf-16-le"), '{"inner":[]}'.encode("utf-32-be")],
)  # fmt: skip
def test_what_is_no_json_of_the_kind_is_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body is"):
        decode(body, Body)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("field", ["prompt", "messages", "logit_bias", "unknown"])
@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_deeply_nested_body_is_at_worst_a_request_error(kind: Any, field: str, depth: int) -> None:
    body = b'{"messages":[],"%b":%b%b}' % (field.encode(), b"[" * depth, b"]" * depth)
    message = ""
    try:
        decode(body, kind)
    except RequestError as exc:
        message = str(exc)
    assert len(message) < 300


@pytest.mark.parametrize(("wrong", "shown"), [('"x"', '"x"'), ("null", "null"), ("[]", "[]"), ("true", "true")])
def test_a_wrong_value_of_an_object_is_named_by_its_key(wrong: str, shown: str) -> None:
    with pytest.raises(RequestError, match=r"^logit_bias\.17 is ") as caught:
        decode(b'{"logit_bias":{"3":1,"4":2.5,"17":%b,"18":{}}}' % wrong.encode(), CompletionRequest)
    assert f"is {shown}: Expected `float`" in str(caught.value)
    assert caught.value.param == "logit_bias.17"


def test_an_enum_s_value_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as caught:
        decode(b'{"messages":[],"tool_choice":"' + b"x" * 5000 + b'"}', ChatCompletionRequest)
    assert len(str(caught.value)) < 500


def test_a_body_of_many_small_values_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match="the body has 70002 objects and lists"):
        read(b'{"inner":[' + b"[]," * 70_000 + b"1]}", JSON, max_bytes=10**6, part_bytes=10**6)


def test_large_bodies_that_are_there_at_once_are_decoded_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, decoded_in, data = 0, [], b'{"inner":[],"name":"%b"}' % (b"x" * 100_000)

    def noted(body: bytes, kind: type[Body]) -> Body:
        decoded_in.append(turn)
        return decode(body, kind)

    async def run() -> None:
        nonlocal turn
        reader, scope = BodyReader(10**6), {"type": "http", "headers": [(b"content-type", b"application/json")]}

        async def receive() -> Message:
            return {"type": "http.request", "body": data, "more_body": False}

        reads = [asyncio.create_task(reader.read(Request(scope, receive), Body)) for _ in range(6)]
        while not all(read.done() for read in reads):
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("ringserve.server.http.request_body.decode", noted)
    asyncio.run(run())
    assert len(set(decoded_in)) == 6
