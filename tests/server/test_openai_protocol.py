from typing import Any

import msgspec
import pytest

from server.errors import RequestError
from server.openai_protocol import ChatCompletionRequest, ChatMessage, CompletionRequest
from server.sampling_params import SamplingParams

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
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    params = completion(**fields, stop=["x", "y"], stop_token_ids=[4]).sampling_params(8, MODEL_DEFAULTS)
    assert params == SamplingParams(**fields, max_tokens=8, stop=("x", "y"), stop_token_ids=(4,))


def test_a_single_stop_is_a_list_of_one() -> None:
    assert completion(stop="abc").sampling_params(1, {}).stop == ("abc",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", False), ("frequency_penalty", 0), ("frequency_penalty", 0.0), ("presence_penalty", -0.0),
     ("repetition_penalty", 1.0), ("best_of", 1), ("logprobs", False), ("logit_bias", {}), ("tools", []),
     ("tool_choice", "auto"), ("response_format", {"type": "text"}), ("suffix", ""), ("top_logprobs", 0)],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    completion(**{name: value}).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", True), ("echo", 0), ("frequency_penalty", 0.1), ("frequency_penalty", False), ("best_of", True),
     ("best_of", 2), ("logprobs", 0), ("logprobs", True), ("logit_bias", {"1": 2}), ("tools", [{}]),
     ("tool_choice", "required"), ("response_format", {"type": "json_object"}), ("suffix", "x"),
     ("guided_json", {}), ("use_beam_search", True), ("structured_outputs", "")],
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


def test_a_message_s_parts_are_joined_and_its_extra_fields_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatMessage(role="user", content=parts, name="Bo", tool_call_id="7")
    assert message.to_template() == {"role": "user", "content": "a\nb", "name": "Bo", "tool_call_id": "7"}
    assert ChatMessage(role="assistant").to_template() == {"role": "assistant", "content": ""}


def test_a_chat_takes_unknown_fields_of_messages_and_of_itself() -> None:
    body = {"messages": [{"role": "user", "content": "a", "refusal": None, "x": 1}], "user": "u", "store": False}
    request = msgspec.convert(body, ChatCompletionRequest)
    request.check()
    assert request.template_messages() == [{"role": "user", "content": "a"}]
