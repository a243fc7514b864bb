from typing import Any

import msgspec
import pytest

from ringserve.server.api.completion_request import CompletionRequest
from ringserve.server.errors import RequestError
from ringserve.server.generation.sampling_params import SamplingParams

MODEL_DEFAULTS = {"temperature": 0.6, "top_k": 40, "top_p": 0.9}


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)


def test_the_request_s_own_value_wins_then_the_model_s_then_openai_s() -> None:
    params = completion(temperature=0.0, top_k=0).sampling_params(5, MODEL_DEFAULTS)
    assert (params.temperature, params.top_k) == (0.0, 0)
    assert params.top_p == 0.9
    assert (params.min_p, params.n, params.max_tokens) == (0.0, 1, 5)
    assert completion().sampling_params(None, {}) == SamplingParams(max_tokens=None)
    assert completion().sampling_params(None, {}).temperature == 1.0


def test_null_is_as_good_as_left_out() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    body = completion(**dict.fromkeys(names))
    body.check()
    assert body.sampling_params(7, MODEL_DEFAULTS) == completion().sampling_params(7, MODEL_DEFAULTS)


def test_every_sampling_field_reaches_the_parameters() -> None:
    fields = {
        "n": 2, "min_tokens": 1, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 9,
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False, "stream_interval": 4,
        "repetition_penalty": 1.5, "frequency_penalty": -1.0, "presence_penalty": 2.0, "prompt_logprobs": 3,
    }  # fmt: skip
    lists: dict[str, Any] = {"stop_token_ids": [4], "allowed_token_ids": [5, 6], "bad_words": ["w"]}
    body = completion(**fields, **lists, stop=["x", "y"], logit_bias={"17": -2})
    params = body.sampling_params(8, MODEL_DEFAULTS, logprobs=2)
    assert params == SamplingParams(
        **fields, max_tokens=8, stop=("x", "y"), stop_token_ids=(4,), allowed_token_ids=(5, 6), bad_words=("w",),
        logit_bias=((17, -2.0),), logprobs=2,
    )  # fmt: skip


def test_a_single_stop_is_a_list_of_one() -> None:
    assert completion(stop="abc").sampling_params(1, {}).stop == ("abc",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", False), ("frequency_penalty", 0), ("frequency_penalty", 0.0), ("presence_penalty", -0.0),
     ("repetition_penalty", 1.0), ("best_of", 1), ("logit_bias", {}), ("tools", []), ("bad_words", []),
     ("tool_choice", "auto"), ("response_format", {"type": "text"}), ("suffix", ""), ("vllm_xargs", {})],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    completion(**{name: value}).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", True), ("best_of", 2), ("audio", {}), ("prompt_embeds", "x"), ("tools", [{}]),
     ("length_penalty", 2.0), ("thinking_token_budget", 5), ("web_search_options", {}), ("vllm_xargs", {"a": 1}),
     ("moderation", {}), ("verbosity", "high"), ("modalities", ["audio"]), ("functions", [{}]),
     ("function_call", {"name": "f"}), ("logprob_token_ids", [1]), ("repetition_detection", {}),
     ("kv_transfer_params", {"a": 1}),
     ("tool_choice", "required"), ("structural_tag", {"x": 1}), ("suffix", "x"),
     ("guided_whitespace_pattern", "x"), ("use_beam_search", True)],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is .* does not support") as caught:
        completion(**{name: value}).check()
    assert caught.value.param == name


def test_a_huge_value_that_is_not_supported_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as caught:
        completion(suffix="x" * 10**6).check()
    assert len(str(caught.value)) < 250


def test_stream_options_are_for_streams() -> None:
    completion(stream=True, stream_options={"include_usage": True}).check()
    with pytest.raises(RequestError, match="stream_options is set without stream"):
        completion(stream_options={"include_usage": True}).check()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [("logit_bias", {"x": 1}, "has the key 'x'"), ("logit_bias", {"-1": 1}, "key"), ("logit_bias", {"٣": 1}, "key"),
     ("logit_bias", {"1" * 5000: 1}, "key"), ("logit_bias", {"1": 1, "01": 2}, "key '01'"),
     ("logit_bias.3", {"3": 101}, "from -100 to 100"),
     ("logit_bias.3", {"3": float("nan")}, "from -100"), ("logit_bias", {str(i): 1 for i in range(1025)}, "1025"),
     ("allowed_token_ids", [], "is empty"), ("frequency_penalty", 2.1, "from -2 to 2"),
     ("presence_penalty", float("nan"), "from -2 to 2"), ("repetition_penalty", 0, "0.01 to 100"),
     ("repetition_penalty", 1e-45, "0.01 to 100"),
     ("repetition_penalty", float("inf"), "0.01 to 100"), ("prompt_logprobs", -1, "from 0 to 20"),
     ("prompt_logprobs", 21, "from 0 to 20")],
)  # fmt: skip
def test_a_value_out_of_its_range_is_refused_by_name(name: str, value: Any, problem: str) -> None:
    body = completion(**{name.partition(".")[0]: value})
    body.check()
    with pytest.raises(RequestError, match=problem) as caught:
        body.sampling_params(5, {})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_salt", ""), ("cache_salt", "a@b"), ("cache_salt", "x" * 129), ("cache_salt", "a/b"), ("cache_salt", "\0"),
     ("priority", 2**31), ("priority", -(2**31) - 1), ("truncation_side", "middle")],
)  # fmt: skip
def test_scheduling_fields_out_of_their_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} is ") as caught:
        completion(**{name: value}).check()
    assert caught.value.param == name


def test_prompt_logprobs_are_for_whole_answers() -> None:
    completion(prompt_logprobs=0, stream=True).check()
    with pytest.raises(RequestError, match="prompt_logprobs is 1: not with stream"):
        completion(prompt_logprobs=1, stream=True).check()
