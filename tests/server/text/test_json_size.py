import msgspec
import pytest

from ringserve.server.chat.messages import decode_arguments
from ringserve.server.errors import RequestError
from ringserve.server.text.json_size import MAX_CONTAINERS, check_json_size


@pytest.mark.parametrize(
    ("text", "what"),
    [(b"[" + b"[]," * 70_000 + b"1]", "70001 objects and lists"), (b"{" + b'"a":1,' * 140_000, "140000 members"),
     (b"[" + b"1," * 2_100_000, "2100000 values")],
)  # fmt: skip
def test_a_text_of_too_many_values_is_refused(text: bytes, what: str) -> None:
    with pytest.raises(RequestError, match=f"it has {what}"):
        check_json_size(text, "it")


def test_what_strings_hold_counts_for_nothing() -> None:
    text = '[{,:"\\' * MAX_CONTAINERS
    check_json_size(msgspec.json.encode([text, {"a": text}]), "it")


def test_arguments_of_millions_of_lists_are_not_decoded() -> None:
    with pytest.raises(RequestError, match="call has 70001 objects and lists") as caught:
        decode_arguments("[" + "[]," * 70_000 + "1]", "call", param="input")
    assert caught.value.param == "input"
