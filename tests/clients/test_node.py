"""The npm openai package under node, installed once into the user's cache."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.e2e.conftest import wait_until

VERSION = "6.49.0"
CACHE = Path.home() / ".cache" / "ringserve" / f"npm-openai-{VERSION}"
SCRIPT = Path(__file__).with_name("openai_node.mjs")


@pytest.fixture(scope="module")
def report(server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if not (CACHE / "node_modules" / "openai").is_dir():
        _install(tmp_path_factory.mktemp("npm"))
    script = CACHE / SCRIPT.name  # beside node_modules, where node looks for packages
    shutil.copyfile(SCRIPT, script)
    command = ["node", str(script), f"{server.url}/v1", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _install(directory: Path) -> None:
    """Install the package, then move it into its place, so that an interrupted run leaves nothing half done."""
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory), f"openai@{VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install openai {VERSION}: {done.stderr.strip().splitlines()[-1:]}")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(CACHE, ignore_errors=True)
    shutil.move(directory, CACHE)


def test_node_chats_streams_and_puts_streams_together(report: dict[str, object]) -> None:
    assert "Paris" in report["answer"]
    assert report["streamed"] == report["helper"] == report["answer"]
    assert report["finishReason"] == "stop"
    assert report["numChunks"] > 3
    assert report["usage"]["completion_tokens"] > 3


def test_node_aborts_a_stream_and_the_server_lets_it_go(report: dict[str, object], server) -> None:
    wait_until(lambda: server.load()["server_load"] == 0, 5.0)


def test_node_sees_errors_as_its_own(report: dict[str, object]) -> None:
    error = report["error"]
    assert (error["name"], error["status"], error["param"]) == ("NotFoundError", 404, "model")
    assert "gpt-4" in error["message"]
    assert report["models"] == [MODEL]
