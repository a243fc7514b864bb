"""Requests that broke public servers, with the right answers, and others of their kind; on the real HTTP server."""

import json
import re
import socket
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from ringserve.server.errors import ErrorCode

CASES = json.loads(Path(__file__).with_name("http_cases.json").read_text())
MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [{"role": "user", "content": "a"}]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def body_of(case: dict[str, Any]) -> bytes:
    if "body_hex" in case:
        return bytes.fromhex(case["body_hex"])
    if "body_raw" in case:
        return case["body_raw"].replace("$MODEL", MODEL).encode()
    if "body_python" in case:
        return eval(case["body_python"], {"json": json, "MODEL": MODEL}).encode()  # ours, from the file beside this one
    return json.dumps(case["body"]).replace("$MODEL", MODEL).encode()


def post(server, case: dict[str, Any]) -> httpx.Response:
    headers = {"Content-Type": "application/json", **case.get("headers", {})}
    return server.client.post(case["path"], content=body_of(case), headers=headers)


def events_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event[6:] if event == "data: [DONE]" else strict_json(event[6:]) for event in events]


def check_error(response: httpx.Response) -> None:
    assert response.headers["content-type"] == "application/json"
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] in (None, *get_args(ErrorCode))


def check_alive(server) -> None:
    started = time.monotonic()
    assert server.client.get("/health").status_code == 200
    assert time.monotonic() - started < 5
    assert server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in events[:-1] for choice in event["choices"]]


def entries_of(response: httpx.Response, events: list[Any]) -> list[dict[str, Any]]:
    """Return a chat's logprobs, one entry a token."""
    choices = choices_of(events) if events else response.json()["choices"]
    return [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]


def text_of(response: httpx.Response, events: list[Any]) -> str:
    if not events:
        return response.json()["choices"][0]["message"]["content"]
    return "".join(choice["delta"].get("content", "") for choice in choices_of(events))


def check(server, case: dict[str, Any], name: str, response: httpx.Response) -> None:
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response) if is_stream else []
    match name:
        case "openai_error_envelope":
            check_error(response)
        case "alive_after":
            check_alive(server)
        case "strict_json" if not is_stream:
            strict_json(response.text)
        case "valid_utf8":
            response.content.decode()
        case "sse" | "strict_json":
            assert is_stream
        case "sse_terminates" | "done_last":
            assert not is_stream or [event for event in events if event == "[DONE]"] == events[-1:]
        case "no_usage_chunk":
            assert not any(event.get("usage") or not event["choices"] for event in events[:-1])
        case "usage_chunk_last":
            assert [bool(event.get("usage")) for event in events[:-1]] == [False] * (len(events) - 2) + [True]
            assert events[-2]["choices"] == []
        case "usage_is_sum_over_choices":
            alone = [server.complete(prompt=p, max_tokens=8)["usage"] for p in ("One:", "Two, a longer one:")]
            assert events[-2]["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in alone)
        case "finish_reason_key_always_present":
            assert all("finish_reason" in choice for choice in choices_of(events))
        case "one_finish_per_index:1":
            assert [c["finish_reason"] is not None for c in choices_of(events)][-1]
            assert sum(c["finish_reason"] is not None for c in choices_of(events)) == 1
        case "same_id_and_created":
            assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
        case "sse_headers":
            assert "no-cache" in response.headers["cache-control"]
            assert response.headers["x-accel-buffering"] == "no"
            assert "content-encoding" not in response.headers
        case "text_not_empty" | "if_200_text_not_empty":
            assert response.status_code != 200 or response.json()["choices"][0].get("message", {}).get(
                "content", "text"
            )
        case "text_starts_with_prompt":
            assert response.json()["choices"][0]["text"].startswith(case["body"]["prompt"])
        case "logprobs_len_equals_tokens":
            assert len(entries_of(response, events)) == case["body"]["max_tokens"]
        case "logprob_bytes_join_equals_text":
            joined = b"".join(bytes(entry["bytes"]) for entry in entries_of(response, events))
            assert joined.decode() == text_of(response, events)
        case "stream_logprobs_equal_nonstream":
            whole = post(server, {**case, "body": {**case["body"], "stream": False}})
            assert entries_of(response, events) == entries_of(whole, [])
        case _ if name.startswith("prompt_tokens_equal:"):
            other = next(case for case in CASES if case["id"] == name.partition(":")[2])
            assert response.json()["usage"]["prompt_tokens"] == post(server, other).json()["usage"]["prompt_tokens"]
        case _:
            raise AssertionError(f"unknown check {name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_public_case_is_answered_rightly(synthetic, case) -> None:
    started = time.monotonic()
    response = post(synthetic, case)
    assert response.status_code in case["expect"]["status_any_of"], response.text
    assert time.monotonic() - started < 10
    for name in case["expect"].get("checks", []):
        check(synthetic, case, name, response)


BAD_FIELDS = [
    ("temperature", "-0.1"), ("temperature", "2.01"), ("temperature", '"1"'), ("temperature", "[]"),
    ("temperature", "-Infinity"), ("temperature", "1e400"), ("top_p", "0"), ("top_p", "1.1"), ("top_p", "true"),
    ("top_k", "-2"), ("top_k", "1.5"), ("top_k", "99999999999"), ("min_p", "-1"), ("min_p", "2"), ("seed", "1.5"),
    ("seed", "9223372036854775808"), ("n", "-1"), ("n", "129"), ("n", "null1"), ("n", '"2"'), ("max_tokens", "0"),
    ("max_tokens", "-5"), ("max_tokens", "1.5"), ("max_tokens", "true"), ("max_tokens", "99999999"),
    ("min_tokens", "-1"), ("min_tokens", "100"), ("stop", json.dumps(["a"] * 65)), ("stop", '[["a"]]'),
    ("stop", "{}"), ("stop", '[null]'), ("stop", '""'), ("stop", '["a", ""]'), ("stop", '"\\udc00"'),
    ("stop_token_ids", "[-1]"), ("stop_token_ids", "[49152]"), ("stop_token_ids", "[1.5]"), ("stop_token_ids", "5"),
    ("stop_token_ids", '["a"]'), ("stream", '"true"'), ("stream", "1"), ("stream_options", "{}"),
    ("stream_options", "[]"), ("ignore_eos", '"no"'), ("skip_special_tokens", "0"), ("model", "5"),
    ("model", '"another"'), ("logprobs", "21"), ("logprobs", "-1"), ("logprobs", "true"), ("logprobs", '"5"'),
    ("echo", '"yes"'), ("best_of", "3"), ("suffix", '"x"'), ("logit_bias", '{"x": 1}'), ("logit_bias", '{"5": 101}'),
    ("logit_bias", '{"49152": 1}'), ("logit_bias", "[]"), ("logit_bias", '{"5": NaN}'), ("presence_penalty", "2.5"),
    ("frequency_penalty", "-2.1"), ("repetition_penalty", "0"), ("repetition_penalty", "1e-45"),
    ("repetition_penalty", "1e400"),
    ("prompt_logprobs", "-1"), ("prompt_logprobs", "21"), ("allowed_token_ids", "[]"), ("allowed_token_ids", "[-1]"),
    ("bad_words", '["no such word as one token"]'), ("bad_words", '[""]'), ("bad_words", "5"), ("cache_salt", '"@"'),
    ("priority", "2147483648"), ("truncate_prompt_tokens", "-2"), ("truncate_prompt_tokens", "0"),
    ("truncate_prompt_tokens", "99999"), ("truncation_side", '"up"'), ("stream_interval", "0"),
    ("request_id", '"a b"'), ("request_id", '"\\n"'), ("request_id", "[]"),
]  # fmt: skip


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_bad_field_is_named_also_when_streaming(synthetic, name, value, stream) -> None:
    stream_field = "" if name in ("stream", "stream_options") else f'"stream":{stream},'
    raw = f'{{"prompt":"a",{stream_field}"max_tokens":4,"{name}":{value}}}'
    response = synthetic.client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404)
    check_error(response)
    is_json = not any(part in value for part in ("null1",))
    if is_json and "1e400" not in value:
        error = response.json()["error"]
        assert error["param"].startswith(name)
        assert name in error["message"]
    check_alive(synthetic)


@pytest.mark.parametrize(
    "prompt",
    ['""', '[""]', "[]", "[[]]", "[[], [1]]", '["a", ""]', "[49152]", "[-1]", "[1, 2.0]", "[true]", "[null]", '[["a"]]',
     "[[1], [[2]]]", "[[1], 2]", "null", "5", "{}", '"\\ud800"', "[18446744073709551615]", "[99999999999999999999999]",
     json.dumps(["a"] * 1025), json.dumps([5] * 2048)],
)  # fmt: skip
def test_a_bad_prompt_is_refused(synthetic, prompt) -> None:
    raw = f'{{"prompt":{prompt},"max_tokens":4}}'
    response = synthetic.client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    check_error(response)
    check_alive(synthetic)


@pytest.mark.parametrize("prompt", [[-1], [[5], [2**40]], [49152], [5, "b"], [True]], ids=str)
def test_a_prompt_that_is_echoed_is_checked_before(synthetic, prompt) -> None:
    response = synthetic.post("/v1/completions", prompt=prompt, max_tokens=2, echo=True)
    assert response.status_code == 400
    check_error(response)
    assert response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    ["null", "[]", "[5]", "{}", '[{"content":"a"}]', '[{"role":5,"content":"a"}]', '[{"role":"user","content":5}]',
     '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]',
     '[{"role":"user","content":["a"]}]', '[{"role":"user","content":[{"type":"text"}]}]',
     '[{"role":"user","content":"\\udfff"}]'],
)  # fmt: skip
def test_bad_messages_are_refused(synthetic, messages) -> None:
    raw = f'{{"messages":{messages},"max_tokens":4}}'
    response = synthetic.client.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    check_error(response)


def test_text_parts_are_a_text(synthetic) -> None:
    def prompt_tokens(content: object) -> int:
        messages = [{"role": "user", "content": content}]
        return synthetic.post("/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert prompt_tokens(parts) == prompt_tokens("Hello\nthere")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405),
     ("POST", "/health", 405), ("GET", "/v1/models/another", 404), ("GET", "/v1/models/", 404), ("PUT", "/", 404)],
)  # fmt: skip
def test_every_error_has_the_one_shape(synthetic, method, path, status) -> None:
    response = synthetic.client.request(method, path)
    assert response.status_code == status
    check_error(response)
    if status == 405:
        assert response.headers["allow"]


def test_head_is_answered_without_a_body(synthetic) -> None:
    assert synthetic.client.head("/health").status_code == 200
    response = synthetic.client.head("/v1/completions")
    assert response.status_code == 405
    assert response.content == b""


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_content_type_is_refused(synthetic, content_type) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    response = synthetic.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 400
    check_error(response)
    assert "application/json" in response.json()["error"]["message"]


def test_parameters_and_case_of_the_content_type_do_not_matter(synthetic) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = synthetic.client.post("/v1/completions", content=b'{"prompt":"a","max_tokens":1}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_beyond_the_limit_is_refused(start_server, chunked) -> None:
    server = start_server("--engine", "synthetic", "--max-body-mb", "1")
    body = json.dumps({"prompt": "a" * 2**20}).encode()
    content = iter([body]) if chunked else body
    response = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    check_error(response)


def test_a_prompt_too_long_for_the_context_is_refused_and_disturbs_nobody(synthetic) -> None:
    for text in ("a " * 3000, "a" * 10_000_000):
        response = synthetic.post("/v1/completions", prompt=text, max_tokens=4)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    check_alive(synthetic)


def raw_exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(data)
        received = b""
        while part := client.recv(65536):
            received += part
    return received


def test_errors_are_answered_without_a_thread(start_server) -> None:
    server = start_server("--engine", "synthetic")
    tasks = Path(f"/proc/{server.process.pid}/task")
    server.complete(prompt="a", max_tokens=2)
    num_threads = len([*tasks.iterdir()])
    for path in ("/v1/completions", "/health", "/nowhere"):
        assert 400 <= server.post(path).status_code < 500
    assert len([*tasks.iterdir()]) == num_threads


def test_what_is_no_http_gets_the_error_shape(synthetic) -> None:
    head, _, body = raw_exchange(synthetic.port, b"\x16\x03\x01 nonsense\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert strict_json(body.decode())["error"]["code"] is None


def request_bytes(version: str, *, close: bool) -> bytes:
    body = b'{"prompt":"a","max_tokens":3,"stream":true}'
    connection = "Connection: close\r\n" if close else ""
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{connection}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection(synthetic) -> None:
    head, _, body = raw_exchange(synthetic.port, request_bytes("1.0", close=False)).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_pipelined_streams_are_answered_in_order(synthetic) -> None:
    data = raw_exchange(synthetic.port, request_bytes("1.1", close=False) * 2 + request_bytes("1.1", close=True))
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.count(b"data: [DONE]") == 3
    assert data.count(b"\r\n0\r\n\r\n") == 3


def test_expect_100_continue_is_answered(synthetic) -> None:
    body = b'{"prompt":"a","max_tokens":2}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", synthetic.port), timeout=10) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)
        assert client.recv(100000).startswith(b"HTTP/1.1 200 ")


UPGRADES = [
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
    "UPGRADE: websocket\r\nConnection: keep-alive, upgrade\r\nSec-WebSocket-Version: 13\r\n",
]


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_client_that_offers_another_protocol_is_answered_in_http_1_1_and_keeps_its_connection(
    synthetic, upgrade, is_chunked
) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{upgrade}{framing}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    data = raw_exchange(synthetic.port, head.encode() + sent + request_bytes("1.1", close=True))
    assert data.count(b"HTTP/1.1 200 OK") == 2, data
    assert data.endswith(b"0\r\n\r\n")


HUMAN_EVAL = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stop", [HUMAN_EVAL, [f"stop {i}" for i in range(63)] + ["s"]], ids=["5", "64"])
def test_many_stop_strings_are_taken_and_each_of_them_counts(synthetic, path, stop) -> None:
    prompt = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}.get(path[4:], {"messages": MESSAGES})
    assert synthetic.post(path, **prompt, stop=stop).status_code == 200
    if path == "/v1/completions":
        whole = synthetic.complete(prompt="a", max_tokens=12)["choices"][0]["text"]
        choice = synthetic.complete(prompt="a", max_tokens=12, stop=[*stop[:4], whole[5:9]])["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (whole[:5], whole[5:9])


GATEWAYS = [
    "7e0f0e0a#42",
    "JKJaXmPLvHcESHA=",
    "a, b",
    "|abc.def.",
    "x" * 129,
    "\xe9",
    "a b",
    '"a"',
    "{a}",
    "a;b",
    "%7f",
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_s_odd_name_of_a_request_is_replaced(synthetic, path, name) -> None:
    headers = {"X-Request-Id": name.encode("latin-1")}
    body = {"prompt": "a", "input": "a", "messages": MESSAGES}
    response = synthetic.client.post(path, json=body if "resp" not in path else {"input": "a"}, headers=headers)
    assert response.status_code == 200, response.text
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    named = {"input": "a", "request_id": "good"} if "resp" in path else {**body, "request_id": "good"}
    assert synthetic.client.post(path, json=named, headers=headers).headers["x-request-id"] == "good"
    assert synthetic.client.post(path, json={**named, "request_id": "a b"}, headers=headers).status_code == 400
