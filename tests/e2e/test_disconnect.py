"""A client that goes away: its requests leave the engine, as the running count of the next step record shows."""

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APITimeoutError, OpenAI

from tests.e2e.conftest import post_bytes, send, send_unread

PREFILL = ("--engine", "synthetic", "--prefill-time-ms", "60000")
DECODE = ("--engine", "synthetic", "--step-time-ms", "10")


def reset(client: socket.socket) -> None:
    """Close with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["fin", "rst"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("engine", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_closed_socket_frees_its_requests_in_the_engine(shared_server, wait, engine, stream, n, close) -> None:
    server = shared_server(*engine)
    prompts = ["a", "b"]
    client = send(server.port, "/v1/completions", prompt=prompts, n=n, max_tokens=4000, stream=stream)
    in_engine = {"server_load": 2 * n, "num_requests_running": 2 * n, "num_requests_waiting": 0}
    wait(lambda: server.load() == in_engine, 30)
    if stream and engine is DECODE:
        assert client.recv(100)
    close(client)
    elapsed_s = wait(lambda: not any(server.load().values()), 5)
    print(f"free {elapsed_s * 1000:.0f} ms after the close")
    assert server.client.get("/health").status_code == 200


def test_closed_clients_do_not_disturb_the_others(shared_server, wait) -> None:
    server = shared_server(*DECODE)
    expected = server.complete(prompt="a", max_tokens=100)["choices"][0]["text"]
    leaving = [send(server.port, "/v1/completions", prompt="a", max_tokens=4000, stream=True) for _ in range(20)]
    staying = [send(server.port, "/v1/completions", prompt="a", max_tokens=100, stream=True) for _ in range(5)]
    wait(lambda: server.load()["num_requests_running"] == 25, 30)
    for client in leaving:
        client.close()
    for client in staying:
        data = b""
        while b"[DONE]" not in data:
            data += client.recv(65536)
        client.close()
        lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
    wait(lambda: not any(server.load().values()), 5)


def test_queued_requests_whose_clients_left_are_never_run(start_server, wait, tmp_path) -> None:
    log = tmp_path / "steps"
    server = start_server(*DECODE, "--max-num-seqs", "1", "--step-log", str(log))
    running = send(server.port, "/v1/completions", prompt="a", max_tokens=4000, stream=True)
    assert running.recv(100)
    queued = [send(server.port, "/v1/completions", prompt="a", max_tokens=4000, stream=True) for _ in range(10)]
    wait(lambda: server.load()["num_requests_waiting"] == 10, 30)
    for client in queued:
        client.close()
    wait(lambda: server.load() == {"server_load": 1, "num_requests_running": 1, "num_requests_waiting": 0}, 5)
    running.close()
    wait(lambda: not any(server.load().values()), 5)
    assert server.complete(prompt="a", max_tokens=3)["usage"]["completion_tokens"] == 3
    num_tokens = sum(int(line.split()[2]) for line in log.read_text().splitlines())
    assert num_tokens < 1000  # the first one's and the last one's: none of the ten got to its 4,000


def test_a_full_queue_answers_503_with_retry_after_before_any_byte(start_server, wait) -> None:
    server = start_server(*DECODE, "--max-num-queued-reqs", "2")
    clients = [send(server.port, "/v1/completions", prompt="a", max_tokens=4000, stream=True) for _ in range(2)]
    wait(lambda: server.load()["server_load"] == 2, 30)
    for stream in (True, False):
        response = server.post("/v1/completions", prompt="a", stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "--max-num-queued-reqs" in response.json()["error"]["message"]
    for client in clients:
        client.close()
    wait(lambda: server.load()["server_load"] == 0, 5)
    assert server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_client_that_stops_reading_gets_every_token_when_it_reads_again(start_server, wait) -> None:
    server = start_server("--engine", "synthetic", "--max-model-len", "200000")
    expected = server.complete(prompt="a", max_tokens=8000)["choices"][0]["text"]
    client = send_unread(server.port, "/v1/completions", prompt="a", max_tokens=8000, stream=True)
    wait(lambda: server.load()["server_load"] == 0, 60)  # all tokens are there, the client has read none
    data = b""
    while b"[DONE]" not in data[-100:]:
        data += client.recv(1 << 20)
    client.close()
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
    print(f"8,000 tokens in {len(lines)} events")
    assert len(lines) < 8000


def test_refused_and_aborted_requests_leave_their_id_free(start_server, wait) -> None:
    server = start_server(*DECODE, "--max-model-len", "300", "--max-num-seqs", "1")
    headers = {"X-Request-Id": "same"}
    for _ in range(1000):
        response = server.client.post("/v1/completions", json={"prompt": [5] * 301}, headers=headers)
        assert response.status_code == 400
    bodies = [{"prompt": "a", "max_tokens": 200, "stream": stream, "request_id": "same"} for stream in (True, False)]
    queued = [send(server.port, "/v1/completions", **body) for body in bodies * 50]
    wait(lambda: server.load()["server_load"] == 100, 30)
    for client in queued:
        client.close()
    wait(lambda: not any(server.load().values()), 5)
    again = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers=headers)
    assert (again.json()["id"], again.json()["usage"]["completion_tokens"]) == ("cmpl-same", 3)


def test_rows_that_come_too_late_are_counted_and_not_logged(start_server, wait) -> None:
    server = start_server("--engine", "synthetic", "--tokens-per-step", "4", "--max-model-len", "100000")
    for _ in range(50):
        client = send(server.port, "/v1/completions", prompt="a", max_tokens=50_000, stream=True)
        assert client.recv(100)
        client.close()
    wait(lambda: not any(server.load().values()), 5)
    lines = server.client.get("/metrics").text.splitlines()
    (late,) = [line for line in lines if line.startswith("ringserve:ring_late_rows_total")]
    print(late)
    assert server.stop() == 0
    assert len(server.stderr.splitlines()) < 10, server.stderr


def test_a_client_that_times_out_and_tries_again_leaves_no_attempt_running(start_server, wait) -> None:
    server = start_server(*PREFILL)
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    patience = {"timeout": 0.3, "max_retries": 2}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", **patience) as client, pytest.raises(APITimeoutError):
        client.completions.create(model=model, prompt="a")
    wait(lambda: not any(server.load().values()), 5)
    lines = server.client.get("/metrics").text.splitlines()
    (aborted,) = [line for line in lines if line.startswith("ringserve:request_success") and '"abort"' in line]
    assert float(aborted.split()[-1]) == 3


def test_two_live_requests_of_one_id_keep_their_own_outputs(shared_server, wait) -> None:
    server = shared_server(*DECODE)
    bodies = [
        server.client.build_request(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": n}, headers={"X-Request-Id": "same"}
        )
        for n in (5, 7)
    ]
    for body, n in zip(bodies, (5, 7), strict=True):
        response = server.client.send(body)
        assert response.json()["id"] == "cmpl-same"
        assert response.json()["usage"]["completion_tokens"] == n
    first = send(server.port, "/v1/completions", prompt="a", max_tokens=4000, stream=True, request_id="same")
    second = send(server.port, "/v1/completions", prompt="a", max_tokens=50, stream=True, request_id="same")
    wait(lambda: server.load()["num_requests_running"] == 2, 30)
    first.close()
    data = b""
    while b"[DONE]" not in data:
        data += second.recv(65536)
    second.close()
    assert b'"finish_reason":"length"' in data


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
def test_a_client_that_leaves_a_pipeline_behind_is_aborted_whole(start_server, wait, stream) -> None:
    server = start_server(*DECODE, "--drain-timeout", "20")
    request = post_bytes("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": stream})
    for behind in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", request * 10):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        client.sendall(request + behind)
        wait(lambda: server.load()["num_requests_running"] == 1, 30)
        client.close()
        wait(lambda: not any(server.load().values()), 5)
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 10  # no task waits for a disconnect that never comes
    assert all(line.startswith("INFO ") for line in server.stderr.splitlines())


def test_half_a_body_and_then_silence_is_no_error_of_the_server(start_server, wait) -> None:
    server = start_server(*DECODE)
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        client.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
        client.close()
    assert server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
    assert server.stop() == 0
    assert all(line.startswith("INFO ") for line in server.stderr.splitlines())


def test_a_client_that_asks_without_end_and_never_reads_is_dropped(shared_server) -> None:
    server = shared_server(*DECODE)
    questions = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.sendall(questions)
    client.close()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("line", [b"X-Long: " + b"a" * 200_000, b"X-Many: b\r\n" * 20_000], ids=["long", "many"])
def test_a_head_without_end_is_refused(shared_server, line) -> None:
    server = shared_server(*DECODE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line)
        answer = client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] is None


def test_nonsense_behind_a_running_stream_closes_the_connection_without_an_answer_in_the_stream(
    shared_server, wait
) -> None:
    server = shared_server(*DECODE)
    client = send(server.port, "/v1/completions", prompt="a", max_tokens=200, stream=True)
    received = client.recv(1000)
    client.sendall(b"\x16\x03 nonsense\r\n\r\n")
    while part := client.recv(65536):
        received += part
    client.close()
    assert received.count(b"HTTP/1.1 ") == 1
    wait(lambda: not any(server.load().values()), 5)


LARGE = {
    "messages": {"messages": [{"role": "u"}] * 400_000},
    "texts": {"prompt": ["a " * 1000] * 1000},
    "lists of ids": {"prompt": [[5] * 4000] * 500},
    "ids": {"prompt": [5] * 3_000_000},
    "refused field": {"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}},
    "45,000 messages": {"messages": [{"role": "user", "content": "x" * 300}] * 45_000},
    "a text": {"prompt": "hello world " * 1_250_000},
    "escapes": {"prompt": "\u00e9\n" * 1_800_000},
    "unknown field": {"prompt": "a", "unknown": ["a"] * 1_000_000},
    "wrong type": {"prompt": "a", "max_tokens": "z" * 15_000_000},
}


def large_request(body: dict[str, object], *, is_cut: bool) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return post_bytes(path, json.dumps({**body, "max_tokens": 1} | body).encode()[: -9 if is_cut else None])


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_do_not_hold_the_others_up(shared_server, name, is_cut) -> None:
    server = shared_server(*DECODE)
    data, gaps = large_request(LARGE[name], is_cut=is_cut), []
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(answer_to, server.port, data) for _ in range(4)]
        while not all(answer.done() for answer in answers):
            started = time.monotonic()
            assert server.client.get("/health").status_code == 200
            gaps.append(time.monotonic() - started)
    print(f"worst gap of /health {max(gaps) * 1000:.0f} ms; {answers[0].result()[:60]!r}")
    assert all(answer.result().startswith(b"HTTP/1.1 ") for answer in answers)
    assert max(gaps) < 10 * 0.1


def answer_to(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        return client.recv(1000)


def test_a_server_gives_back_what_large_bodies_took(start_server, wait) -> None:
    server = start_server(*DECODE)

    def resident_mb(field: str = "VmRSS") -> int:
        line = next(x for x in Path(f"/proc/{server.process.pid}/status").read_text().splitlines() if field in x)
        return int(line.split()[1]) // 1024

    before = resident_mb()
    for data in [json.dumps({"prompt": "hello world " * 174_000}).encode()] * 4:
        assert server.client.post("/tokenize", content=data, headers={"content-type": "application/json"}).is_success
    peak = resident_mb("VmHWM")
    assert peak > before + 100
    elapsed_s = wait(lambda: resident_mb() < before + 64, 5 * 10)
    print(f"{before} MB, {peak} MB after large bodies, {resident_mb()} MB {elapsed_s:.1f} s later")
