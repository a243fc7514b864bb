"""The real server as a user starts it: its command line, its own process, its engine as a third."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from ringserve.engine.weights.default_model import ensure_default_model
from ringserve.shm_transport import process

_URL = re.compile(r"http://[\d.]+:(\d+)/v1")
# Whatever starts a server takes it along when it dies, also by a signal that no fixture sees.
LEASH = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
CLI = [*LEASH, sys.executable, "-P", "-m", "ringserve.server.cli"]


class RunningServer:
    """A `ringserve serve` process that is ready."""

    def __init__(self, *arguments: str, command: list[str] = CLI) -> None:
        self.process = subprocess.Popen(
            [*command, "serve", "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = _URL.search(line)
        if match is None:
            _, stderr = self.process.communicate(timeout=30)
            raise AssertionError(f"the server did not start: {line}{stderr}")
        self.port = int(match[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine_pid = self._find_engine()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return a stream's events, parsed, [DONE] as a string; each event is one data line and a blank one."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            raw = response.read().decode()
            assert response.status_code == 200, raw
        assert raw.endswith("\n\n")
        events = raw[:-2].split("\n\n")
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]

    def sdk(self) -> openai.OpenAI:
        """Return an SDK that asks once, to be closed by the caller."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def load(self) -> dict[str, int]:
        return self.client.get("/load").json()

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        """End the server; return its exit status. Whatever happens, nothing is left."""
        self.client.close()
        self.process.send_signal(sig)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        try:
            _, self.stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode

    def leftovers(self) -> list[str]:
        """Return what is still there of this server: its engine, its names in /dev/shm."""
        names = [path.name for path in Path("/dev/shm").iterdir() if f"ringserve-{self.process.pid}-" in path.name]
        return names + ([f"engine {self.engine_pid}"] if process.start_time(self.engine_pid) is not None else [])

    def _find_engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (engine,) = [pid for pid in children if b"ringserve.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(engine)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Poll a condition; return the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - started


def post_bytes(path: str, body: object, *header_lines: str) -> bytes:
    """Return a POST as it goes over the wire; its body is JSON unless it is bytes already."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = f"Content-Length: {len(data)}"
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *header_lines,
        length,
        "",
        "",
    )
    return "\r\n".join(lines).encode() + data


def send(port: int, path: str, **body: object) -> socket.socket:
    """Post on a connection of its own, whose answer is left to the caller."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(post_bytes(path, body))
    return client


def send_unread(port: int, path: str, **body: object) -> socket.socket:
    """Post on a connection whose own end keeps little of what nobody reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    client.sendall(post_bytes(path, body))
    return client


def post_beside_health_checks(server: RunningServer, path: str, body: object) -> tuple[httpx.Response, int]:
    """Post, and check the server's health until the answer is there: no check may take a second.

    Return the answer and the number of checks.
    """
    content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    slowest_s, num_checks = 0.0, 0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url) as client:
        client.get("/health")  # connects
        asking = pool.submit(server.client.post, path, content=content, headers=headers)
        while not asking.done() or num_checks == 0:
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest_s, num_checks = max(slowest_s, time.monotonic() - started), num_checks + 1
            time.sleep(0.002)
    print(f"slowest of {num_checks} health checks {slowest_s * 1000:.0f} ms")
    assert slowest_s < 10 * 0.1
    return asking.result(), num_checks


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start servers; those that still run at the test's end are killed."""
    servers: list[RunningServer] = []

    def start(*arguments: str, **options: Any) -> RunningServer:
        servers.append(RunningServer(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.engine_pid, signal.SIGKILL)


class SharedServers:
    """Servers for tests that leave them as they were: one for each command line, for the whole session."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], RunningServer] = {}

    def __call__(self, *arguments: str) -> RunningServer:
        """Return the server of a command line, idle."""
        if arguments not in self._servers:
            self._servers[arguments] = RunningServer(*arguments)
        server = self._servers[arguments]
        wait_until(lambda: not any(server.load().values()), 30)
        return server

    def stop(self) -> None:
        """End them all at once; each has to end well, and leave nothing."""
        servers = self._servers.values()
        for server in servers:
            server.client.close()
            server.process.send_signal(signal.SIGTERM)
        assert [server.wait(60) for server in servers] == [0] * len(servers)
        assert [server.leftovers() for server in servers] == [[]] * len(servers)


class ScriptedServers:
    """Servers whose every answer is a text and the end of the turn, written with the default model's tokens."""

    def __init__(self, directory: Path, servers: SharedServers) -> None:
        self._directory = directory
        self._servers = servers

    def __call__(self, text: str, *arguments: str, special: tuple[str, ...] = ()) -> RunningServer:
        """Return the server of a text, idle; `special` are special tokens that the tokenizer is to have besides."""
        model, folder = ensure_default_model(), self._directory
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        if special:
            folder = self._directory / hashlib.sha256(repr(special).encode()).hexdigest()
            folder.mkdir(exist_ok=True)
            tokenizer.add_special_tokens(list(special))
            tokenizer.save(str(folder / "tokenizer.json"))
            shutil.copy(model / "tokenizer_config.json", folder)
        token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]
        script = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        script.write_text(json.dumps(token_ids))
        served = folder / "tokenizer.json" if special else model
        return self._servers(str(served), "--engine", "synthetic", "--script", str(script), *arguments)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServers]:
    """Servers that say what a test wants; tests of a module that want the same have the same one."""
    servers = SharedServers()
    yield ScriptedServers(tmp_path_factory.mktemp("scripts"), servers)
    servers.stop()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServers]:
    """Return servers that other tests use too."""
    servers = SharedServers()
    yield servers
    servers.stop()


@pytest.fixture
def synthetic(shared_server: SharedServers) -> RunningServer:
    """The free-running server with the synthetic engine."""
    return shared_server("--engine", "synthetic", "--max-model-len", "2048")


@pytest.fixture
def default_model(shared_server: SharedServers) -> RunningServer:
    """The default model in fp32, where greedy output does not depend on batch mates."""
    return shared_server("--dtype", "float32")


@pytest.fixture
def server(default_model: RunningServer) -> RunningServer:
    """The server of the modules that name no other."""
    return default_model


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The openai SDK of the module's server."""
    with server.sdk() as client:
        yield client


@pytest.fixture(scope="session")
def wait() -> Callable[[Callable[[], bool], float], float]:
    """wait_until, for test modules."""
    return wait_until
