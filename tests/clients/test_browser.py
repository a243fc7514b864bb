"""A page of another origin that streams with fetch(), in headless Chromium."""

import contextlib
import json
import queue
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PageServer
from tests.e2e.conftest import RunningServer

LIMIT_S = 60.0
PAGE = Path(__file__).with_name("page.html")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def browser(url: str, profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Show a page; Debian's package is `chromium`."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip("Chromium is not installed")
    command = [
        binary, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={profile}", url,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def report_of(page_server: PageServer, server: RunningServer, host: str, profile: Path) -> dict[str, Any]:
    page_server.page = PAGE.read_bytes().replace(b"SERVER", server.url.encode())
    with browser(f"http://{host}:{page_server.server_port}/", profile):
        try:
            return json.loads(page_server.reports.get(timeout=LIMIT_S))
        except queue.Empty:
            raise AssertionError(f"the page reported nothing within {LIMIT_S} s") from None


def test_a_page_of_an_allowed_origin_streams(page_server: PageServer, server: RunningServer, tmp_path: Path) -> None:
    report = report_of(page_server, server, "127.0.0.1", tmp_path)
    print(report)
    assert report["status"] == 200
    assert report["type"].startswith("text/event-stream")
    assert "Paris" in report["text"]
    assert report["text"] == report["whole"]
    assert report["isDone"]
    assert report["numReads"] > 3  # it came in pieces, not at the end
    assert report["refused"]["status"] == 404  # a page reads errors too
    assert "gpt-4" in report["refused"]["error"]["message"]


def test_a_page_of_another_origin_reads_nothing(page_server: PageServer, server: RunningServer, tmp_path: Path) -> None:
    report = report_of(page_server, server, "localhost", tmp_path)
    assert report == {"failed": "TypeError: Failed to fetch"}
