"""What does not fit the context is told, by each route and for each form of it, as clients know it."""

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

CONTEXT = 2048  # of the server
WORDS = f"This model's maximum context length is {CONTEXT} tokens. However, "
LONG = "word " * 3000  # too many tokens
HUGE = "a" * 3_000_000  # too many characters, whatever their tokens


def chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CASES = [
    ("/v1/chat/completions", chat(LONG), "messages"),
    ("/v1/chat/completions", chat(HUGE), "messages"),
    ("/v1/chat/completions", chat(LONG, stream=True), "messages"),
    ("/v1/chat/completions", chat("a", max_tokens=2049), "max_tokens"),
    ("/v1/chat/completions", chat("a", max_completion_tokens=10**9), "max_completion_tokens"),
    ("/v1/chat/completions", chat("a", max_completion_tokens=32_000, max_tokens=5), "max_completion_tokens"),
    ("/v1/chat/completions", chat("a", min_tokens=2040), "min_tokens"),
    ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": LONG}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": HUGE}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 2048}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG], "stream": True}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 2048, "truncate_prompt_tokens": 2048}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4096}, "max_tokens"),
    ("/v1/completions", {"prompt": [5] * 2000, "max_tokens": 100, "min_tokens": 100}, "min_tokens"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": HUGE}, "input"),
    ("/v1/responses", {"input": LONG, "stream": True}, "input"),
    ("/v1/responses", {"input": "a", "instructions": LONG}, "input"),
    ("/v1/responses", {"input": LONG, "truncation": "auto"}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": LONG}], "truncation": "disabled"}, "input"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2049}, "max_output_tokens"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2049, "truncation": "auto"}, "max_output_tokens"),
    ("/v1/responses/input_tokens", {"input": LONG}, "input"),
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/v1/embeddings", {"input": ["a", HUGE]}, "input[1]"),
    ("/v1/embeddings", {"input": [5] * 2049}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"), CASES, ids=[f"{i}-{path}-{param}" for i, (path, _, param) in enumerate(CASES)]
)
def test_what_does_not_fit_is_told_with_the_code_and_words_that_clients_look_for(synthetic, path, body, param) -> None:
    response = synthetic.post(path, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("context_length_exceeded", "BadRequestError", param)
    assert error["message"].startswith(f"{WORDS}{param} ")
    assert len(error["message"]) < 300


def test_what_is_wrong_beside_the_context_is_another_error(synthetic) -> None:
    for body in ({"prompt": "a", "max_tokens": -1}, {"prompt": ""}, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}):
        error = synthetic.post("/v1/completions", add_special_tokens=False, **body).json()["error"]
        assert error["code"] is None
        assert not error["message"].startswith("This model's")


def test_the_openai_client_knows_it_by_its_code(synthetic) -> None:
    client = openai.OpenAI(base_url=f"{synthetic.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="SmolLM2-135M-Instruct", **chat(LONG))
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("is_responses", [False, True])
def test_langchain_raises_its_own_overflow(synthetic, is_responses: bool) -> None:
    model = ChatOpenAI(
        base_url=f"{synthetic.url}/v1", api_key="none", model="SmolLM2-135M-Instruct", max_retries=0,
        use_responses_api=is_responses,
    )  # fmt: skip
    with pytest.raises(ContextOverflowError):
        model.invoke(LONG)
