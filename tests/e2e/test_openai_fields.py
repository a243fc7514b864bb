"""Fields of requests and what answers and streams show of them, on the synthetic engine."""

import json
from typing import Any

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = ["/v1/completions", "/v1/chat/completions"]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {**(CHAT if "chat" in path else {"prompt": "a b c"}), **fields}


def answer(server, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, **body_for(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, path: str, **fields: Any) -> list[dict[str, Any]]:
    *chunks, done = server.stream(path, **body_for(path, **fields))
    assert done == "[DONE]"
    return chunks


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))["content"]


def with_logprobs(path: str, count: int) -> dict[str, Any]:
    return {"logprobs": count} if path == PATHS[0] else {"logprobs": True, "top_logprobs": count}


def shown_tokens(logprobs: dict[str, Any]) -> list[str]:
    return logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]


def joined_logprobs(choices: list[dict[str, Any]]) -> Any:
    """Join a stream's logprobs as a client would."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    if "content" in parts[0]:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"stop": ["zzzz no such text"]}, {"stream_interval": 3}, {"n": 3}])
def test_a_stream_s_logprobs_are_the_answer_s_one_entry_a_token(synthetic, path, options) -> None:
    fields = {"max_tokens": 20, "return_token_ids": True, **with_logprobs(path, 2), **options}
    whole, chunks = answer(synthetic, path, **fields), stream(synthetic, path, **fields)
    for choice in whole["choices"]:
        parts = choices_of(chunks, choice["index"])
        assert joined_logprobs(parts) == choice["logprobs"]
        assert [token_id for part in parts for token_id in part.get("token_ids") or []] == choice["token_ids"]
        assert "".join(text_of(part) for part in parts) == text_of(choice)
        assert len(choice["token_ids"]) == len(shown_tokens(choice["logprobs"])) == 20


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_cuts_logprobs_and_token_ids_at_the_same_token(synthetic, path) -> None:
    [free] = answer(synthetic, path, max_tokens=40)["choices"]
    stop = text_of(free)[20:26]
    fields = {"max_tokens": 40, "stop": stop, "return_token_ids": True, **with_logprobs(path, 0)}
    [choice] = answer(synthetic, path, **fields)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(shown_tokens(choice["logprobs"])) == len(choice["token_ids"]) < 40
    assert joined_logprobs(choices_of(stream(synthetic, path, **fields))) == choice["logprobs"]


def test_chat_shows_k_alternatives_and_completions_the_sampled_token_beside_them(synthetic) -> None:
    [chat] = answer(synthetic, PATHS[1], max_tokens=4, logprobs=True, top_logprobs=2)["choices"]
    assert [len(entry["top_logprobs"]) for entry in chat["logprobs"]["content"]] == [2] * 4
    [bare] = answer(synthetic, PATHS[1], max_tokens=4, logprobs=True, top_logprobs=0)["choices"]
    assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[]] * 4
    [text] = answer(synthetic, PATHS[0], max_tokens=4, logprobs=2)["choices"]
    assert [len(top) for top in text["logprobs"]["top_logprobs"]] == [3] * 4
    [sampled] = answer(synthetic, PATHS[0], max_tokens=4, logprobs=0)["choices"]
    assert [list(top) for top in sampled["logprobs"]["top_logprobs"]] == [[t] for t in sampled["logprobs"]["tokens"]]


@pytest.mark.parametrize("path", PATHS)
def test_tokens_can_be_shown_by_id(synthetic, path) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, **with_logprobs(path, 0)}
    [choice] = answer(synthetic, path, max_tokens=4, **fields)["choices"]
    assert shown_tokens(choice["logprobs"]) == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


@pytest.mark.parametrize("path", PATHS)
def test_prompt_token_ids_come_once_with_the_first_chunk(synthetic, path) -> None:
    fields = {"max_tokens": 5, "return_token_ids": True, "n": 2}
    whole, chunks = answer(synthetic, path, **fields), stream(synthetic, path, **fields)
    is_chat = path == PATHS[1]
    ids = whole["prompt_token_ids"] if is_chat else whole["choices"][0]["prompt_token_ids"]
    assert len(ids) == whole["usage"]["prompt_tokens"]
    for index in range(2):
        places = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        shown = [(chunk if is_chat else chunk["choices"][0]).get("prompt_token_ids") for chunk in places]
        assert shown == [ids] + [None] * (len(places) - 1)
    [plain] = answer(synthetic, path, max_tokens=5)["choices"]
    assert plain["token_ids"] is None


PROMPTS: list[tuple[Any, list[str]]] = [
    ("One two", ["One two"]), (["One two", "Three"], ["One two", "Three"]), ([504, 3575], ["The capital"]),
    ([[504, 3575], [282]], ["The capital", " of"]),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "shown"), PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
def test_echo_puts_each_prompt_once_in_front_of_its_choices(synthetic, prompt, shown, n) -> None:
    fields = {"prompt": prompt, "max_tokens": 6, "n": n}
    plain, echoed = synthetic.complete(**fields), synthetic.complete(**fields, echo=True)
    chunks = stream(synthetic, PATHS[0], **fields, echo=True)
    assert echoed["usage"] == plain["usage"]
    assert len(plain["choices"]) == n * len(shown)
    for choice in plain["choices"]:
        expected = shown[choice["index"] // n] + choice["text"]
        assert echoed["choices"][choice["index"]]["text"] == expected
        assert "".join(part["text"] for part in choices_of(chunks, choice["index"])) == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_without_new_tokens_is_the_prompt_alone(synthetic, is_stream) -> None:
    body = {"prompt": "One two", "max_tokens": 0, "echo": True}
    if is_stream:
        *chunks, usage = stream(synthetic, PATHS[0], **body, stream_options={"include_usage": True})
        choice, counts = chunks[-1]["choices"][0], usage["usage"]
        text = "".join(part["text"] for part in choices_of(chunks))
    else:
        whole = synthetic.complete(**body)
        choice, counts = whole["choices"][0], whole["usage"]
        text = choice["text"]
    assert (text, choice["finish_reason"], counts["completion_tokens"]) == ("One two", "length", 0)
    assert counts["total_tokens"] == counts["prompt_tokens"] == 2


def test_chat_echo_repeats_the_last_message_only_if_it_is_the_assistant_s(synthetic) -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]
    options = {"max_tokens": 4, "echo": True, "add_generation_prompt": False}
    plain = text_of(answer(synthetic, PATHS[1], max_tokens=4)["choices"][0])
    assert text_of(answer(synthetic, PATHS[1], messages=begun, **options)["choices"][0]) == "Well, " + plain
    assert text_of(answer(synthetic, PATHS[1], **options)["choices"][0]) == plain
    chunks = stream(synthetic, PATHS[1], messages=begun, **options)
    assert "".join(text_of(part) for part in choices_of(chunks)) == "Well, " + plain


@pytest.mark.parametrize("path", PATHS)
def test_truncation_keeps_the_end_of_a_prompt_or_its_beginning(synthetic, path) -> None:
    def prompt_ids(**options: Any) -> list[int]:
        whole = answer(synthetic, path, **{"max_tokens": 1, "return_token_ids": True, **options})
        return whole["prompt_token_ids"] if path == PATHS[1] else whole["choices"][0]["prompt_token_ids"]

    full = prompt_ids()
    assert prompt_ids(truncate_prompt_tokens=2) == full[-2:]
    assert prompt_ids(truncate_prompt_tokens=2, truncation_side="right") == full[:2]
    assert prompt_ids(truncate_prompt_tokens=-1) == full
    text = "a " * 3000
    long: dict[str, Any] = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    assert synthetic.post(path, **body_for(path, **long, max_tokens=1)).status_code == 400
    assert len(prompt_ids(**long, truncate_prompt_tokens=-1)) == 2047


@pytest.mark.parametrize("path", PATHS)
def test_a_request_s_id_comes_back_in_the_answer_s_header_and_id(synthetic, path) -> None:
    for is_stream in (False, True):
        body = body_for(path, max_tokens=1, stream=is_stream)
        response = synthetic.client.post(path, json=body, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        first = response.text.partition("\n")[0].removeprefix("data: ")
        assert json.loads(first)["id"].endswith("-mine-1")
        own = synthetic.client.post(path, json=body)
        assert own.headers["x-request-id"] in own.text
    refused = synthetic.client.post(path, json={"n": 0}, headers={"X-Request-Id": "mine-2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-2")
    ill = synthetic.client.post(path, json={"n": 0}, headers={"X-Request-Id": "a b"})
    assert ill.status_code == 400
    assert "x-request-id" not in ill.headers


def test_usage_tells_how_much_of_the_prompt_was_cached(synthetic) -> None:
    assert answer(synthetic, PATHS[0], max_tokens=1)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_roles_come_first_and_each_of_n_choices_finishes_once(synthetic) -> None:
    chunks = stream(synthetic, PATHS[1], max_tokens=3, n=3, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:3]] == ["assistant"] * 3
    for index in range(3):
        reasons = [choice["finish_reason"] for choice in choices_of(chunks, index)]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) == {None}
    assert chunks[-1]["usage"]["completion_tokens"] == 9


def test_answers_have_every_field(synthetic) -> None:
    for path in PATHS:
        body = answer(synthetic, path, max_tokens=2)
        [choice] = body["choices"]
        common = {"index", "logprobs", "finish_reason", "stop_reason", "token_ids"}
        assert {"id", "object", "created", "model", "service_tier", "system_fingerprint", "usage"} <= set(body)
        if path == PATHS[0]:
            assert set(choice) == common | {"text", "prompt_logprobs", "prompt_token_ids"}
        else:
            assert set(choice) == common | {"message"}
            assert {"prompt_logprobs", "prompt_token_ids"} <= set(body)
            nothing = ("refusal", "annotations", "audio", "function_call")
            assert [choice["message"][name] for name in nothing] == [None] * 4
        assert [choice[name] for name in ("logprobs", "stop_reason", "token_ids")] == [None] * 3
