"""Which types sampling parameters must have: for those who make them in Python. Those of HTTP are checked as JSON."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringserve.server.errors import check_field

if TYPE_CHECKING:
    from ringserve.server.generation.sampling_params import SamplingParams

_Rule = tuple[Callable[[Any], bool], str]


def check_types(params: "SamplingParams") -> None:
    """Return if every parameter is of its type; values are SamplingParams' own to check.

    Raises:
        RequestError: Naming the first that is not.
    """
    for name, (is_valid, rule) in _RULES.items():
        value = getattr(params, name)
        check_field(is_valid(value), name, value, rule)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _tuple_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (tuple, list)) and all(map(is_item, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bias(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and _is_int(value[0]) and _is_number(value[1])


_INTEGER: _Rule = (_is_int, "must be an integer")
_OPTIONAL: _Rule = (lambda value: value is None or _is_int(value), "must be an integer or None")
_NUMBER: _Rule = (_is_number, "must be a number")
_FLAG: _Rule = (lambda value: isinstance(value, bool), "must be True or False")
_TEXTS: _Rule = (_tuple_of(_is_text), "must be a tuple of texts")
_IDS: _Rule = (_tuple_of(_is_int), "must be a tuple of token ids")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("n", "min_tokens", "top_k", "stream_interval"), _INTEGER),
    **dict.fromkeys(("max_tokens", "seed", "logprobs", "prompt_logprobs"), _OPTIONAL),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"), _NUMBER
    ),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), _FLAG),
    **dict.fromkeys(("stop", "bad_words"), _TEXTS),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "bad_token_ids"), _IDS),
    "logit_bias": (_tuple_of(_is_bias), "must be a tuple of pairs of token id and number"),
    "grammar": (_is_text, "must be a text, as ringserve.server.grammar.structured_output makes it"),
}
