import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ringserve.shm_transport.heartbeat import ALIVE_LIMIT_S
from tests.e2e.conftest import CLI, post_bytes, send, send_unread

SYNTHETIC = ("--engine", "synthetic")
SLOW = (*SYNTHETIC, "--step-time-ms", "20")
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}


class StreamReader:
    """Reads one stream on a thread; keeps its events and when the last one came."""

    def __init__(self, url: str, **body: object) -> None:
        self.events: list[str] = []
        self.status = 0
        self.ended_s = 0.0
        self.is_cut = False
        self._arguments = (url, body)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except httpx.TransportError:
            self.is_cut = True
        self.ended_s = time.monotonic()

    def _read(self) -> None:
        url, body = self._arguments
        payload = {**CHAT, "stream": True, **body}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=payload, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))

    def join(self) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


def test_a_killed_engine_is_told_to_everyone_and_the_server_exits_with_1(start_server, wait) -> None:
    server = start_server(*SLOW)
    streams = [StreamReader(server.url, max_tokens=2000) for _ in range(5)]
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60))
    )
    waiting.start()
    wait(lambda: all(len(stream.events) > 3 for stream in streams) and server.load()["num_requests_running"] == 6, 30)

    os.kill(server.engine_pid, signal.SIGKILL)
    died_s = time.monotonic()
    for stream in streams:
        stream.join()
        assert stream.events[-1] == "[DONE]"
        error = json.loads(stream.events[-2])["error"]
        assert error["type"] == "EngineDeadError"
        assert "SIGKILL" in error["message"]
    waiting.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["type"] == "EngineDeadError"
    told_s = max(stream.ended_s for stream in streams)
    print(f"the last stream was told {told_s - died_s:.3f} s after the death")

    asked_s = time.monotonic()
    assert server.post("/v1/chat/completions", **CHAT, stream=True).status_code == 503
    assert time.monotonic() - asked_s < 1
    last_503_s = 0.0
    try:
        while True:
            assert server.client.get("/health").status_code == 503
            last_503_s = time.monotonic()
            time.sleep(0.02)
    except httpx.TransportError:
        pass
    assert server.wait(timeout_s=25) == 1
    print(f"/health answered 503 for {last_503_s - told_s:.2f} s more; exit after {time.monotonic() - died_s:.2f} s")
    assert last_503_s - told_s >= 1
    assert time.monotonic() - died_s < 5 * 5
    assert "killed by SIGKILL" in server.stderr
    assert server.leftovers() == []


def test_a_stream_without_a_first_token_gets_a_503_when_the_engine_dies(start_server, wait) -> None:
    server = start_server(*SYNTHETIC, "--prefill-time-ms", "60000")
    stream = StreamReader(server.url)
    wait(lambda: server.load()["server_load"] == 1, 30)
    os.kill(server.engine_pid, signal.SIGKILL)
    stream.join()
    assert stream.status == 503
    assert json.loads(stream.events[0])["error"]["type"] == "EngineDeadError"
    assert server.wait(timeout_s=25) == 1


def test_an_idle_server_notices_the_death_and_exits(start_server) -> None:
    server = start_server(*SYNTHETIC)
    os.kill(server.engine_pid, signal.SIGKILL)
    died_s = time.monotonic()
    assert server.wait(timeout_s=25) == 1
    print(f"exit {time.monotonic() - died_s:.2f} s after the death")


def test_keep_alive_on_engine_death_stays_at_503(start_server, wait) -> None:
    server = start_server(*SYNTHETIC, "--keep-alive-on-engine-death")
    os.kill(server.engine_pid, signal.SIGKILL)
    wait(lambda: server.client.get("/health").status_code == 503, 10)
    time.sleep(2)  # those without the flag are gone by then
    assert server.client.get("/health").status_code == 503
    assert server.post("/v1/completions", prompt="a").status_code == 503
    assert server.stop() == 0
    assert server.leftovers() == []


def test_a_stopped_engine_is_unhealthy_and_well_again_once_it_goes_on(start_server, wait) -> None:
    server = start_server(*SYNTHETIC)
    assert server.client.get("/health").status_code == 200
    os.kill(server.engine_pid, signal.SIGSTOP)
    print(f"unhealthy after {wait(lambda: server.client.get('/health').status_code == 503, 5 * 2):.2f} s")
    assert server.client.get("/ready").status_code == 503
    os.kill(server.engine_pid, signal.SIGCONT)
    wait(lambda: server.client.get("/health").status_code == 200, 10)
    assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("arguments", [SYNTHETIC, SLOW])
def test_a_killed_server_takes_its_engine_along(start_server, wait, arguments) -> None:
    server = start_server(*arguments)
    stream = StreamReader(server.url, max_tokens=2000) if arguments is SLOW else None
    if stream is not None:
        wait(lambda: len(stream.events) > 3, 30)
    server.process.kill()
    server.process.communicate()
    elapsed_s = wait(lambda: server.leftovers() == [], 10)
    print(f"nothing was left {elapsed_s:.3f} s after the server's death")


def test_sigterm_lets_running_streams_finish(start_server, wait) -> None:
    server = start_server(*SLOW)
    stream = StreamReader(server.url, max_tokens=40)
    wait(lambda: len(stream.events) > 3, 30)
    assert server.stop() == 0
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.leftovers() == []
    assert all(line.startswith("INFO ") for line in server.stderr.splitlines())


def test_sigterm_ends_streams_with_an_error_at_the_drain_timeout(start_server, wait) -> None:
    server = start_server(*SLOW, "--drain-timeout", "1")
    stream = StreamReader(server.url, max_tokens=2000)
    wait(lambda: len(stream.events) > 3, 30)
    started = time.monotonic()
    assert server.stop() == 0
    print(f"exit {time.monotonic() - started:.2f} s after SIGTERM with a drain timeout of 1 s")
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert "shutting down" in json.loads(stream.events[-2])["error"]["message"]
    assert server.leftovers() == []


def test_a_client_that_stops_reading_does_not_hold_the_drain(start_server) -> None:
    server = start_server(*SYNTHETIC, "--drain-timeout", "1", "--max-model-len", "1000000")
    with send(server.port, "/v1/chat/completions", **CHAT, stream=True, max_tokens=900000) as client:
        client.recv(1000)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 5 * 3
    assert server.leftovers() == []


def test_a_second_sigterm_ends_at_once(start_server, wait) -> None:
    server = start_server(*SLOW, "--drain-timeout", "600")
    stream = StreamReader(server.url, max_tokens=2000)
    wait(lambda: len(stream.events) > 3, 30)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 10
    assert server.leftovers() == []
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert "told twice" in stream.events[-2]
    assert all(line.startswith("INFO ") for line in server.stderr.splitlines())


@pytest.mark.parametrize("num_signals", [1, 2])
def test_clients_that_do_not_read_or_finish_asking_are_cut_off_at_the_end_and_the_log_is_silent(
    start_server, wait, num_signals: int
) -> None:
    server = start_server(*SYNTHETIC, "--drain-timeout", "1" if num_signals == 1 else "50", "--disable-log-stats")
    body = {"prompt": "a", "max_tokens": 8000, "stream": True, "logprobs": 5}
    stalled = [send_unread(server.port, "/v1/completions", **body) for _ in range(3)]
    wait(lambda: server.load()["num_requests_running"] == 0, 30)  # their output waits for them
    with send(server.port, "/v1/completions", prompt="a", max_tokens=1) as client:
        assert b" 200 OK" in client.recv(100)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as half:
        half.sendall(post_bytes("/v1/completions", {"prompt": "a"})[:-3])
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: refuses_connections(server.port), 10)
        if num_signals == 2:
            server.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: half.recv(10_000), b""))
    assert server.wait(10) == 0
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(content)["error"]["type"] == "ServiceUnavailableError"
    assert [line for line in server.stderr.splitlines() if "configuration" not in line] == []
    for client in stalled:
        client.close()


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_a_closed_terminal_drains_the_server(start_server, wait) -> None:
    server = start_server(*SLOW)
    stream = StreamReader(server.url, max_tokens=40)
    wait(lambda: len(stream.events) > 3, 30)
    os.kill(server.engine_pid, signal.SIGHUP)  # which the terminal's whole foreground gets
    assert server.stop(signal.SIGHUP) == 0
    stream.join()
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.leftovers() == []


def test_a_server_that_nohup_started_does_not_mind_a_closed_terminal(start_server) -> None:
    server = start_server(*SYNTHETIC, command=["nohup", *CLI])
    server.process.send_signal(signal.SIGHUP)
    assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.stop() == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_two_signals_during_start_up_leave_nothing(sig: signal.Signals, wait) -> None:
    server = subprocess.Popen([*CLI, "serve", *SYNTHETIC, "--port", "0"], stdout=subprocess.DEVNULL)
    names = Path("/dev/shm")
    wait(lambda: any(f"ringserve-{server.pid}-" in path.name for path in names.iterdir()) or has_ended(server), 30)
    server.send_signal(sig)
    server.send_signal(sig)
    assert server.wait(30) in (128 + sig, -sig, 0)
    wait(lambda: not any(f"ringserve-{server.pid}-" in path.name for path in names.iterdir()), 5)


@pytest.mark.parametrize("delay_ms", range(0, 60, 6))
def test_another_signal_while_start_up_is_undone_changes_nothing(delay_ms: int, tmp_path: Path, wait) -> None:
    path = tmp_path / "socket"
    command = [*CLI, "serve", *SYNTHETIC, "--uds", str(path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait(path.exists, 30)
    server.terminate()
    time.sleep(delay_ms / 1000)  # any moment is right
    server.send_signal(signal.SIGHUP)
    _, stderr = server.communicate(timeout=30)
    assert server.returncode in (128 + signal.SIGTERM, 128 + signal.SIGHUP)  # of two at once the lower comes first
    assert "Traceback" not in stderr
    assert not path.exists()


def test_signals_until_the_last_moment_leave_nothing(tmp_path: Path, wait) -> None:
    path = tmp_path / "socket"
    command = [*CLI, "serve", *SYNTHETIC, "--uds", str(path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    with server:
        assert server.stdout is not None
        server.stdout.readline()  # it is ready
        while not has_ended(server):
            server.terminate()
    assert server.returncode == 0  # drained, if not in peace
    assert not path.exists()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3, 0.5])
def test_sigterm_during_start_up_leaves_nothing(delay_s: float, wait) -> None:
    code = "import sys; from ringserve.server.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--engine", "synthetic", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(0.25 + delay_s)
    server.terminate()
    server.communicate(timeout=30)
    time.sleep(0.1)
    assert [path for path in Path("/dev/shm").iterdir() if f"ringserve-{server.pid}-" in path.name] == []


def test_while_it_drains_the_server_answers_that_it_is_not_ready_and_takes_nothing_new(start_server, wait) -> None:
    server = start_server(*SLOW)
    stream = StreamReader(server.url, max_tokens=60)
    wait(lambda: len(stream.events) > 3, 30)
    assert server.client.get("/ready").status_code == 200
    asked_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 10)  # on a connection of its own
    print(f"/ready is 503 {(time.monotonic() - asked_s) * 1000:.0f} ms after SIGTERM")
    for body in ({"max_tokens": 2}, {"max_tokens": 2, "stream": True}):
        refused = server.post("/v1/chat/completions", **CHAT, **body)  # on one that was open before
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert "shutting down" in refused.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200
    assert server.wait(timeout_s=30) == 0
    stream.join()
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.leftovers() == []


def test_an_answer_that_is_wanted_whole_may_end_while_the_server_drains(start_server, wait) -> None:
    server = start_server(*SLOW)
    answers: list[httpx.Response] = []
    ask = {**CHAT, "max_tokens": 50}
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=60))
    )
    waiting.start()
    wait(lambda: server.load()["num_requests_running"] == 1, 30)
    assert server.stop() == 0
    waiting.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 50


def test_an_idle_server_exits_at_once(start_server) -> None:
    server = start_server(*SYNTHETIC)
    idle = socket.create_connection(("127.0.0.1", server.port))
    started = time.monotonic()
    assert server.stop() == 0
    print(f"exit {time.monotonic() - started:.2f} s after SIGTERM, idle")
    assert time.monotonic() - started < 5 * 2
    idle.close()


@pytest.mark.parametrize("options", [("--step-time-ms", "2500"), ("--prefill-time-ms", "2500")])
def test_a_busy_engine_is_healthy(start_server, options) -> None:
    server = start_server(*SYNTHETIC, *options)
    stream = StreamReader(server.url, max_tokens=1)
    deadline = time.monotonic() + ALIVE_LIMIT_S + 0.9  # a sign of life may be so old, and the engine stays busy
    while time.monotonic() < deadline:
        started = time.monotonic()
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").status_code == 200
        assert time.monotonic() - started < 5 * 0.1
        time.sleep(0.05)
    stream.join()
    assert stream.events[-1] == "[DONE]"


def test_a_client_that_stops_reading_does_not_hold_the_exit_after_the_engines_death(start_server, wait) -> None:
    server = start_server(*SYNTHETIC, "--max-model-len", "1000000", "--write-timeout", "0")
    with send(server.port, "/v1/chat/completions", **CHAT, stream=True, max_tokens=900000) as client:
        client.recv(1000)
        os.kill(server.engine_pid, signal.SIGKILL)
        died_s = time.monotonic()
        assert server.wait(timeout_s=25) == 1
        print(f"exit {time.monotonic() - died_s:.2f} s after the death")
