"""One real server with the default model for every client of the field; those that are not installed are skipped."""

import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringserve.server.settings.model_path import resolve
from tests.e2e.conftest import RunningServer

MODEL = "SmolLM2-135M-Instruct"
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def run_node(script: Path, packages: tuple[str, ...], *arguments: str, scratch: Path) -> dict[str, object]:
    """Run a script under node, with npm packages (NAME@VERSION) from the user's cache; return the JSON it prints."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = Path.home() / ".cache" / "ringserve" / "-".join(("npm", *packages)).replace("/", "_")
    if not (folder / "node_modules").is_dir():
        _install(packages, scratch, folder)
    shutil.copyfile(script, folder / script.name)  # beside node_modules, where node looks for packages
    command = ["node", str(folder / script.name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _install(packages: tuple[str, ...], scratch: Path, folder: Path) -> None:
    """Install packages, then move them into their place, so that an interrupted run leaves nothing half done."""
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(scratch), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {packages}: {done.stderr.strip().splitlines()[-1:]}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(scratch, folder)


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
