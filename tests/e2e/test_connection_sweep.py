"""Idle streams get comments, clients that stop reading or sending are let go; nobody else notices."""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.conftest import post_bytes, send_unread

PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}
OFF = ("--sse-keep-alive-interval", "0", "--write-timeout", "0", "--receive-timeout", "0")


def is_open_at_server(server, client: socket.socket) -> bool:
    """Whether the server still holds its end of a connection: Linux lists sockets by address and inode."""
    port, inodes = f":{client.getsockname()[1]:04X}", set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[2].endswith(port):  # the server's side: the client is remote
            inodes.add(f"socket:[{fields[9]}]")
    links = Path(f"/proc/{server.process.pid}/fd").iterdir()
    return any(str(link.readlink()) in inodes for link in links if link.is_symlink())


def test_an_idle_stream_gets_comment_lines_before_its_first_token_and_between_tokens(start_server) -> None:
    server = start_server(
        "--engine", "synthetic", "--prefill-time-ms", "700", "--step-time-ms", "700", "--sse-keep-alive-interval", "0.2"
    )
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 3}) as response:
        raw = response.read().decode()
    assert response.status_code == 200
    lines = raw.split("\n")
    comments = [line for line in lines if line.startswith(":")]
    print(f"{len(comments)} comments in 3 steps of 700 ms")
    assert len(comments) >= 3
    assert set(comments) == {": keep-alive"}
    assert lines[0] == ": keep-alive"  # before any event
    assert "\n\n\n" not in raw
    assert ": keep-alive\n\n" not in raw
    bare = "\n".join(line for line in lines if not line.startswith(":"))
    events = [event.removeprefix("data: ") for event in bare.rstrip("\n").split("\n\n")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_openai_client_does_not_see_comments(start_server) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "500", "--sse-keep-alive-interval", "0.1")
    quiet = start_server("--engine", "synthetic", *OFF)
    texts = []
    for url in (server.url, quiet.url):
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = client.completions.create(
                model=client.models.list().data[0].id, prompt="a", stream=True, max_tokens=3
            )
            texts.append("".join(chunk.choices[0].text for chunk in stream))
    assert texts[0] == texts[1] != ""


def test_a_busy_stream_gets_none(start_server) -> None:
    server = start_server("--engine", "synthetic", "--step-time-ms", "10", "--sse-keep-alive-interval", "0.3")
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 100}) as response:
        assert ": keep-alive" not in response.read().decode()


def test_an_error_after_a_comment_is_an_event(start_server) -> None:
    options = ("--prefill-time-ms", "600", "--fail-after", "1", "--sse-keep-alive-interval", "0.2")
    server = start_server("--engine", "synthetic", *options)
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 3}) as response:
        raw = response.read().decode()
    assert response.status_code == 200
    events = [line for line in raw.split("\n") if line.startswith("data: ")]
    assert "error" in json.loads(events[-2][6:])
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_is_cut_off_and_freed(shared_server, wait, stream) -> None:
    server = shared_server("--engine", "synthetic", "--max-model-len", "1000000", "--write-timeout", "1")
    num_tokens = 990_000 if stream else 12_000  # the answers are longer than what kernels hold
    body = {"stream": stream, "max_tokens": num_tokens, "logprobs": True, "top_logprobs": 0 if stream else 4}
    with send_unread(server.port, PATH, **CHAT | body) as slow:
        assert slow.recv(1000).startswith(b"HTTP/1.1 200 ")
        elapsed_s = wait(lambda: not is_open_at_server(server, slow), 60)
        print(f"cut off {elapsed_s:.1f} s after the last read, with a write timeout of 1 s")
        assert server.load()["server_load"] == 0
    assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_client_that_reads_slowly_but_reads_stays(start_server) -> None:
    server = start_server("--engine", "synthetic", "--write-timeout", "1", "--max-model-len", "20000")
    slow = send_unread(server.port, PATH, **CHAT, max_tokens=15_000)
    data, started = bytearray(), time.monotonic()
    while b"[DONE]" not in data[-100:]:
        part = slow.recv(8192 if time.monotonic() - started < 4 else 1 << 20)
        assert part, "cut off"
        data += part
        if time.monotonic() - started < 4:
            time.sleep(0.2)
    slow.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHos"], ids=["nothing", "half a head"])
def test_a_connection_without_a_whole_head_is_closed(shared_server, sent: bytes) -> None:
    server = shared_server("--engine", "synthetic", "--receive-timeout", "1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(sent)
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"BadRequestError" in answer


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(shared_server) -> None:
    server = shared_server("--engine", "synthetic", "--receive-timeout", "1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.settimeout(0.1)
        started, answer = time.monotonic(), b""
        client.sendall(b"GET /version HTTP/1.1\r\nX-Long: ")
        while not answer and time.monotonic() - started < 8:
            client.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_pauses_is_not_waited_for_and_one_that_trickles_is(shared_server) -> None:
    server = shared_server("--engine", "synthetic", "--receive-timeout", "1")
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    head = post_bytes("/v1/completions", body).removesuffix(body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + body[:5])
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head)
        for i in range(0, len(body), 6):
            time.sleep(0.4)
            client.sendall(body[i : i + 6])
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
