"""What every error tells its client: a status, a type, and a code that is a string of a short list or nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import openai
import pytest

from ringserve.server.api.openapi import ErrorResponse
from ringserve.server.errors import ErrorCode, ServerError

CONFORMANCE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"


def kinds(base: type[ServerError]) -> Iterator[type[ServerError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("kind", [*kinds(ServerError)], ids=lambda kind: kind.__name__)
def test_a_code_is_a_string_of_the_list_or_null(kind: type[ServerError]) -> None:
    error = msgspec.convert(kind("message", param="field").body(), ErrorResponse, strict=True).error
    assert (error.message, error.type, error.param) == ("message", kind.type, "field")
    assert error.code in (None, *get_args(ErrorCode))
    assert openai.types.shared.ErrorObject.model_validate(kind("message").body()["error"], strict=True)


def test_every_code_has_an_error_and_a_row_in_the_documentation() -> None:
    assert {kind.code for kind in kinds(ServerError)} - {None} == set(get_args(ErrorCode))
    page = CONFORMANCE.read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(get_args(ErrorCode))
