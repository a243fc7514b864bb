"""What the checks of requests' fields allow, as JSON Schema for /openapi.json. It decides nothing itself."""

from typing import Any

from ringserve.server.api.embeddings import MAX_INPUTS
from ringserve.server.chat.tools import MAX_TOOLS
from ringserve.server.generation.sampling_params import (
    MAX_BIASED_TOKENS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from ringserve.server.http.deadline import MAX_S
from ringserve.shm_transport.records import MAX_LOGPROBS


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_COUNT = {"minimum": 1}
_SHARE = {"minimum": 0, "maximum": 1}
_PENALTY = {"minimum": -2, "maximum": 2}
_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
_STOP = {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_TOKEN_ID = {"type": "integer", "minimum": 0}

LIMITS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"minItems": 1, "maxItems": MAX_BIASED_TOKENS, "items": _TOKEN_ID},
    "bad_words": {"maxItems": MAX_BIASED_TOKENS},
    "cache_salt": {"minLength": 1, "maxLength": 128, "pattern": r"^[^@/\\\x00]*$"},
    "chat_template": {"not": {"type": "string"}},
    "frequency_penalty": _PENALTY,
    "input": {"minItems": 1},
    "logit_bias": {
        "maxProperties": MAX_BIASED_TOKENS, "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "logprobs": _LOGPROBS,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "max_tokens": {"minimum": 0},  # 0: completions with echo
    "messages": {"minItems": 1},
    "min_p": _SHARE,
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": MAX_N},
    "presence_penalty": _PENALTY,
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "prompt": {
        "anyOf": [{"type": "string"}, _list({"type": "string"}), _list(_TOKEN_ID), _list(_list(_TOKEN_ID))],
    },
    "prompt_logprobs": _LOGPROBS,
    "repetition_penalty": {"minimum": 1 / MAX_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "request_id": {"pattern": "^[A-Za-z0-9_.:@/-]{1,128}$"},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": {**_STOP, "maxItems": MAX_STOP_STRINGS, "items": {"type": "string", **_STOP}},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": _TOKEN_ID},
    "stream_interval": _COUNT,
    "temperature": {"minimum": 0, "maximum": 2},
    "timeout_s": {"exclusiveMinimum": 0, "maximum": MAX_S},
    "tools": {"minItems": 1, "maxItems": MAX_TOOLS},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "top_logprobs": _LOGPROBS,
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
    "truncation_side": {"enum": [None, "left", "right"]},
}  # fmt: skip


_EMBEDDED = {
    "input": {
        "anyOf": [
            {"type": "string"},
            {**_list({"type": "string"}), "maxItems": MAX_INPUTS},
            _list(_TOKEN_ID),
            {**_list(_list(_TOKEN_ID)), "maxItems": MAX_INPUTS},
        ]
    },
    "dimensions": _COUNT,
    **{name: LIMITS[name] for name in ("request_id", "timeout_s", "truncate_prompt_tokens")},
}
_TOKENIZED = [  # either, and the other left out
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
    {
        "required": ["messages"],
        "properties": {
            "messages": {"type": "array", "minItems": 1},
            "prompt": {"type": "null"},
            **{name: LIMITS[name] for name in ("chat_template", "tools")},
        },
    },
]

OTHERS: dict[str, dict[str, Any]] = {  # of requests that generate nothing, by the names of their types
    "EmbeddingRequest": {"properties": _EMBEDDED},
    "TokenizeRequest": {"properties": {}, "anyOf": _TOKENIZED},
    "DetokenizeRequest": {"properties": {"tokens": {"items": _TOKEN_ID}}},
}


def describe_other(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Complete the schema of one of OTHERS, in place."""
    properties = schema["properties"]
    for name, limit in limits["properties"].items():
        properties[name] |= limit
    schema |= {**limits, "properties": properties}


def describe(schema: dict[str, Any], neutral: dict[str, tuple[object, ...]], needed: str | None) -> None:
    """Complete the schema that msgspec has made of a request type.

    Args:
        schema: An object's; changed in place.
        neutral: Fields that are not supported, with the values that ask for nothing.
        needed: A field that is optional to msgspec alone, so that its absence gets the endpoint's own error.
    """
    properties = schema["properties"]
    for name in properties.keys() & LIMITS:
        properties[name] |= LIMITS[name]
    for name in properties.keys() & neutral:
        if neutral[name]:
            properties[name] = {"enum": [None, *neutral[name]]}
        else:
            del properties[name]
    if needed is not None:
        schema["required"] = [*schema.get("required", ()), needed]
        properties[needed]["anyOf"] = [each for each in properties[needed]["anyOf"] if each != {"type": "null"}]
        del properties[needed]["default"]
