"""What a client sees of streams and answers, on the synthetic engine: shapes, order, usage, errors in mid-stream."""

import asyncio
import json
import os
import struct
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def texts(events: list, index: int = 0) -> str:
    choices = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_completion_chunks_have_the_known_key_sets(synthetic) -> None:
    *chunks, done = synthetic.stream("/v1/completions", prompt="a", max_tokens=8)
    assert done == "[DONE]"
    keys = {"id", "object", "created", "model", "choices"}
    assert all(set(chunk) == keys for chunk in chunks[:-1])
    assert set(chunks[-1]) == keys | {"system_fingerprint"}
    choice_keys = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
    assert all(set(chunk["choices"][0]) == choice_keys for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "text_completion"


def test_chat_chunks_have_the_known_key_sets(synthetic) -> None:
    role, *chunks, done = synthetic.stream("/v1/chat/completions", **CHAT, max_tokens=8)
    assert done == "[DONE]"
    keys = {"id", "object", "created", "model", "choices"}
    assert set(role) == keys | {"prompt_token_ids", "prompt_text"}
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    choice_keys = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert all(set(chunk["choices"][0]) == choice_keys for chunk in chunks[:-1])
    assert set(chunks[-1]["choices"][0]) == choice_keys | {"stop_reason"}
    assert set(chunks[-1]) == keys | {"system_fingerprint"}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_once_before_done_and_only_when_asked(synthetic, path) -> None:
    prompt = CHAT if "chat" in path else {"prompt": "a"}
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        events = synthetic.stream(path, **prompt, max_tokens=4, stream_options=options)
        assert not any("usage" in event or not event["choices"] for event in events[:-1])
    *chunks, usage, done = synthetic.stream(path, **prompt, max_tokens=4, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4
    assert "system_fingerprint" in usage
    assert not any("usage" in chunk or "system_fingerprint" in chunk for chunk in chunks)


def test_continuous_usage_grows_in_every_chunk(synthetic) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = synthetic.stream("/v1/chat/completions", **CHAT, max_tokens=6, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize("stop", [None, "tired", ["zzz", "sister"], "sitting by her sis"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stream_joins_to_the_answer_without_one(synthetic, stop, include) -> None:
    body = {"prompt": "a", "max_tokens": 40, "stop": stop, "include_stop_str_in_output": include}
    answer = synthetic.complete(**body)
    events = synthetic.stream("/v1/completions", **body, stream_options={"include_usage": True})
    choice = answer["choices"][0]
    assert texts(events) == choice["text"]
    assert events[-3]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert events[-3]["choices"][0]["stop_reason"] == choice["stop_reason"]
    assert events[-2]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    if stop is not None:
        assert choice["finish_reason"] == "stop"
        assert (choice["stop_reason"] in choice["text"]) == include


def test_several_prompts_and_sequences_have_their_own_indexes(synthetic) -> None:
    body = {"prompt": ["a", "b c", "d"], "n": 2, "max_tokens": 5, "temperature": 1}
    answer = synthetic.complete(**body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    events = synthetic.stream("/v1/completions", **body, stream_options={"include_usage": True})
    for index in range(6):
        assert texts(events, index) == answer["choices"][index]["text"]
        finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert finishes[-1] == "length"
        assert not any(finishes[:-1])
    assert events[-2]["usage"] == {k: answer["usage"][k] for k in events[-2]["usage"]}


def test_chat_with_n_sends_all_roles_first(synthetic) -> None:
    events = synthetic.stream("/v1/chat/completions", **CHAT, n=3, max_tokens=3)
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    assert all(event["choices"][0]["delta"].get("role") == "assistant" for event in events[:3])
    assert not any("role" in event["choices"][0]["delta"] for event in events[3:-1])


def test_token_ids_are_a_prompt(synthetic) -> None:
    assert synthetic.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["prompt_tokens"] == 3
    assert synthetic.complete(prompt=[[1, 2], [3]], max_tokens=2)["usage"]["prompt_tokens"] == 3


def test_max_tokens_is_clamped_to_the_context(synthetic) -> None:
    answer = synthetic.complete(prompt=[5] * 2040, max_tokens=2000)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_min_tokens_and_stop_token_ids(synthetic, tmp_path) -> None:
    ids = synthetic.complete(prompt="a", max_tokens=12)
    assert ids["usage"]["completion_tokens"] == 12
    early = synthetic.complete(prompt="a", max_tokens=12, stop="Alice")
    assert early["usage"]["completion_tokens"] <= 2
    late = synthetic.complete(prompt="a", max_tokens=200, stop="Alice", min_tokens=10)
    assert late["usage"]["completion_tokens"] > 10


def test_stream_headers_let_no_proxy_buffer(synthetic) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    with synthetic.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in response.headers
        response.read()


def test_a_connection_serves_one_request_after_the_other(synthetic) -> None:
    with httpx.Client(base_url=synthetic.url) as client:
        for _ in range(3):
            assert (
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True}).status_code == 200
            )
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_engine_error_before_the_first_token_is_a_500(shared_server, path, stream) -> None:
    server = shared_server("--engine", "synthetic", "--fail-after", "0")
    prompt = CHAT if "chat" in path else {"prompt": "a"}
    response = server.post(path, **prompt, stream=stream, max_tokens=10)
    assert response.status_code == 500
    assert "after 0 tokens" in response.json()["error"]["message"]
    assert server.load()["server_load"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_engine_error_in_mid_stream_is_an_event_after_the_tokens(shared_server, path) -> None:
    server = shared_server("--engine", "synthetic", "--fail-after", "3")
    prompt = CHAT if "chat" in path else {"prompt": ["a", "b"], "n": 2, "temperature": 1}
    *chunks, error, done = server.stream(path, **prompt, max_tokens=10)
    assert done == "[DONE]"
    assert (error["error"]["type"], error["error"]["code"]) == ("InternalServerError", "server_error")
    assert texts([*chunks, done]).startswith("Alice was")
    assert server.post(path, **prompt, max_tokens=10).status_code == 500
    assert server.post(path, **prompt, max_tokens=3).status_code == 200
    assert server.load()["server_load"] == 0
    assert server.client.get("/health").status_code == 200


def test_a_request_that_ends_before_the_fault_is_untouched(start_server) -> None:
    server = start_server("--engine", "synthetic", "--fail-after", "5", "--step-time-ms", "5")
    results: list[int] = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(server.post("/v1/completions", prompt="a", max_tokens=n).status_code)
        )
        for n in (3, 4, 9, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [200, 200, 500, 500]


def test_in_lockstep_every_event_is_one_token(start_server, tmp_path) -> None:
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    server = start_server("--engine", "synthetic", "--lockstep", str(counter))
    arrived = 0
    with (
        counter.open("r+b", buffering=0) as file,
        server.client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": True}
        ) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrived += 1
                file.seek(0)
                file.write(struct.pack("<Q", arrived))
    assert arrived == 50


def test_a_script_and_the_step_log(start_server, wait, tmp_path) -> None:
    script, log = tmp_path / "script.json", tmp_path / "steps"
    script.write_text(json.dumps([504, 276, 2, 504]))
    server = start_server("--engine", "synthetic", "--script", str(script), "--step-log", str(log))
    answer = server.complete(prompt="a", max_tokens=10)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 3
    assert server.complete(prompt="a", max_tokens=10, ignore_eos=True)["usage"]["completion_tokens"] == 10
    answer = server.complete(prompt="a", max_tokens=10, stop_token_ids=[276])
    assert (answer["choices"][0]["stop_reason"], answer["usage"]["completion_tokens"]) == (276, 2)
    wait(lambda: len(log.read_text().splitlines()) >= 3 + 10 + 2, 10)  # a row is written after its step is out
    rows = [list(map(int, line.split())) for line in log.read_text().splitlines()]
    assert len(rows) == 3 + 10 + 2
    assert all(row[1:] == [1, 1] for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_steps_come_at_the_step_time(start_server, tmp_path) -> None:
    log = tmp_path / "steps"
    server = start_server("--engine", "synthetic", "--step-time-ms", "30", "--step-log", str(log))
    events = server.stream("/v1/completions", prompt="a", max_tokens=12)
    assert len(events) == 13  # an event a token, and [DONE]
    stamps = [int(line.split()[0]) for line in log.read_text().splitlines()]
    gaps_ms = [(b - a) / 1e6 for a, b in pairwise(stamps)]
    assert min(gaps_ms) > 15
    assert sorted(gaps_ms)[len(gaps_ms) // 2] < 10 * 30


@pytest.mark.parametrize("tokens_per_step", ["2", "7"])
def test_several_tokens_a_step_give_the_same_text(start_server, synthetic, tokens_per_step) -> None:
    server = start_server("--engine", "synthetic", "--tokens-per-step", tokens_per_step)
    for body in (
        {"max_tokens": 30},
        {"max_tokens": 60, "stop": ["pictures"]},
        {"max_tokens": 31, "n": 2, "temperature": 1},
    ):
        expected = synthetic.complete(prompt="a", **body)
        answer = server.complete(prompt="a", **body)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
        assert texts(server.stream("/v1/completions", prompt="a", **body)) == expected["choices"][0]["text"]


def test_the_fallback_that_is_measured_serves_the_same_events(start_server, synthetic) -> None:
    server = start_server(
        "--engine", "synthetic", "--max-model-len", "2048", command=[sys.executable, "-m", "benchmarks.asgi_fallback"]
    )
    body = {"prompt": "a", "max_tokens": 50, "temperature": 0}
    texts = [
        "".join(event["choices"][0]["text"] for event in each.stream("/v1/completions", **body)[:-1])
        for each in (server, synthetic)
    ]
    assert texts[0] == texts[1]
    assert server.stop() == 0


def test_the_running_loop_is_uvloop_and_the_parser_httptools(start_server, tmp_path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        """
import asyncio, sys
from starlette.responses import JSONResponse
from starlette.routing import Route
from ringserve.server import cli, launcher
from ringserve.server.http import protocol as http_protocol

protocols = []
build_app, made = launcher.build_app, http_protocol.RingserveProtocol.connection_made

async def types(request):
    loop, protocol = asyncio.get_running_loop(), protocols[-1]
    return JSONResponse([type(loop).__module__, type(protocol.parser).__module__, type(protocol.transport).__module__])

def connection_made(self, transport):
    protocols.append(self)
    made(self, transport)

def with_route(serving, **options):
    app = build_app(serving, **options)
    app.router.routes.append(Route("/types", types))
    return app

http_protocol.RingserveProtocol.connection_made = connection_made
launcher.build_app = with_route
sys.exit(cli.main())
"""
    )
    server = start_server("--engine", "synthetic", command=[sys.executable, str(main)])
    loop, parser, transport = server.client.get("/types").json()
    assert loop == "uvloop"
    assert parser.startswith("httptools.")
    assert transport.startswith("uvloop.")


def test_an_idle_server_uses_under_a_hundredth_of_a_core(start_server) -> None:
    server = start_server("--engine", "synthetic")
    server.complete(prompt="a", max_tokens=5)

    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s(server.process.pid), cpu_s(server.engine_pid)
    time.sleep(3)
    used = [(cpu_s(pid) - b) / 3 for pid, b in zip((server.process.pid, server.engine_pid), before, strict=True)]
    print(f"idle: server {used[0]:.2%} of a core, engine {used[1]:.2%}")
    assert max(used) < 0.05


@pytest.mark.parametrize("num_streams", [8, 64])
def test_while_the_server_keeps_up_every_event_is_one_token(start_server, num_streams: int) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "200")
    streams = asyncio.run(stream_all(server.port, num_streams, num_tokens=10))
    assert all(raw.count('"finish_reason":"length"') == 1 for raw in streams)  # so each has all its tokens
    num_events = sum(raw.count('data: {"id"') for raw in streams)
    print(f"{num_streams} streams: {10 * num_streams / num_events:.4f} tokens/event")
    assert 10 * num_streams <= 1.02 * num_events
    assert server.stop() == 0


async def stream_all(port: int, num_streams: int, num_tokens: int) -> list[str]:
    """Open all streams at once; return the raw answers."""
    body = json.dumps({"prompt": "a", "max_tokens": num_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    async def read_all() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()

    return await asyncio.gather(*(read_all() for _ in range(num_streams)))
