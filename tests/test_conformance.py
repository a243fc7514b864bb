"""docs/conformance.md is true: its tests exist, and nothing of the SDK's types is left out."""

import ast
import re
from pathlib import Path

import pytest
from openai.types import Completion, CompletionUsage, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat import completion_create_params as chat
from openai.types.chat.chat_completion import Choice

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "conformance.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| | ", "| field"))]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def first_cells() -> str:
    return "\n".join(row.split(" | ")[0] for row in ROWS)


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_a_test_or_says_why_not() -> None:
    assert len(ROWS) > 120
    reasons = ("not ours |", "not counted |", "not yet |")
    assert [row for row in ROWS if "`tests/" not in row and not row.endswith(reasons)] == []


def test_each_of_vllm_s_behaviours_has_a_row() -> None:
    assert re.findall(r"^\| (T\d\d) \|", PAGE, re.MULTILINE) == [f"T{n:02}" for n in range(1, 79)]


REQUESTS = [chat.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsBase]
ANSWERS = [ChatCompletion, ChatCompletionChunk, Completion, ChatCompletionMessage, Choice, CompletionUsage]


@pytest.mark.parametrize("fields", [set(kind.__annotations__) for kind in REQUESTS], ids=["chat", "completions"])
def test_every_field_of_openai_s_requests_has_a_row(fields: set[str]) -> None:
    assert {name for name in fields if f"`{name}`" not in first_cells()} == set()


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
def test_every_field_of_openai_s_answers_has_a_row(kind) -> None:
    assert {name for name in kind.model_fields if f"`{name}`" not in PAGE} == set()
