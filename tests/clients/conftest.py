"""One real server with the default model for every client of the field; those that are not installed are skipped."""

import functools
import http.server
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringserve.server.settings.model_path import resolve
from tests.e2e.conftest import RunningServer

MODEL = "SmolLM2-135M-Instruct"
QUESTION = {"role": "user", "content": "What is the capital of France?"}


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one page to a browser and takes what the page reports."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _PageHandler)
        self.page = b""
        self.reports: queue.Queue[bytes] = queue.Queue()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _PageHandler(http.server.BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self._answer(self.server.page if self.path == "/" else b"")

    def do_POST(self) -> None:
        self.server.reports.put(self.rfile.read(int(self.headers["content-length"])))
        self._answer(b"")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="session")
def page_server() -> Iterator[PageServer]:
    with PageServer() as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.05))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def server(page_server: PageServer) -> Iterator[RunningServer]:
    """The default model in fp32; pages of one other origin may use it."""
    running = RunningServer("--dtype", "float32", "--allowed-origins", page_server.origin)
    yield running
    assert running.stop() == 0
    assert running.leftovers() == []


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return resolve(None)
