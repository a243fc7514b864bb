"""Vercel's AI SDK under node: conversations over /v1/responses, whose second turn names what the server has stored."""

from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, run_node

PACKAGES = ("ai@6.0.326", "@ai-sdk/openai@3.0.141")
SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.fixture(scope="module")
def report(server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run_node(SCRIPT, PACKAGES, f"{server.url}/v1", MODEL, scratch=tmp_path_factory.mktemp("npm"))


def test_the_second_turn_refers_to_the_first_answer_and_is_answered(report: dict[str, object]) -> None:
    assert report["sent"] == ["user", "item_reference", "user"]
    assert report["second"]
    assert report["streamed"] == report["second"]


def test_an_overflow_has_its_code_on_both_apis(report: dict[str, object]) -> None:
    assert report["errors"] == [["AI_APICallError", 400, "context_length_exceeded"]] * 2
