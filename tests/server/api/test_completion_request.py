from typing import Any

import msgspec
import pytest

from ringserve.server.api.completion_request import CompletionRequest
from ringserve.server.errors import RequestError


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)


def test_max_tokens_is_16_unless_set_and_0_only_with_echo() -> None:
    assert completion().token_limit() == 16
    assert completion(max_tokens=3).token_limit() == 3
    assert completion(max_tokens=0, echo=True).token_limit() == 0
    with pytest.raises(RequestError, match="max_tokens is 0: must be at least 1, or 0 with echo"):
        completion(max_tokens=0).token_limit()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]),
     ([[]], [[]]), ([5] * 2000, [[5] * 2000])],
)  # fmt: skip
def test_a_prompt_is_a_text_ids_or_a_list_of_either(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [None, [], ["a", 1], ["a", [1]], [True], [1.0], [[1], 2], [None]])
def test_a_prompt_of_mixed_kinds_or_none_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt is") as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"
