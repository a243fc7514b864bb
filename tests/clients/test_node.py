"""The npm openai package under node, installed once into the user's cache."""

from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, run_node
from tests.e2e.conftest import wait_until

PACKAGES = ("openai@6.49.0",)
SCRIPT = Path(__file__).with_name("openai_node.mjs")


@pytest.fixture(scope="module")
def report(server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_node(SCRIPT, PACKAGES, f"{server.url}/v1", MODEL, scratch=tmp_path_factory.mktemp("npm"))


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
