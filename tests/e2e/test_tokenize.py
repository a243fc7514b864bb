"""/tokenize, /detokenize and /v1/models, with vLLM's bodies."""

import pytest

from tests.e2e.conftest import post_beside_health_checks

MESSAGES = [{"role": "user", "content": "Hello, world!"}]
TEXTS = ["Hello, world!", " two  spaces", "こんにちは 🧭", "<|im_start|>user\nhi<|im_end|>", "a" * 10_000]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    from ringserve.server.settings.model_path import resolve

    return Tokenizer.from_file(str(resolve(None) / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_tokenized_as_the_tokenizer_does_and_comes_back(synthetic, tokenizer, text) -> None:
    response = synthetic.post("/tokenize", prompt=text)
    assert response.status_code == 200
    expected = tokenizer.encode(text)
    assert response.json() == {
        "count": len(expected.ids), "max_model_len": 2048, "tokens": expected.ids, "token_strs": None,
    }  # fmt: skip
    named = synthetic.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert named["token_strs"] == expected.tokens
    assert synthetic.post("/detokenize", tokens=expected.ids).json() == {"prompt": text}


def test_a_chat_is_tokenized_as_it_would_be_answered(synthetic, tokenizer) -> None:
    tokens = synthetic.post("/tokenize", messages=MESSAGES).json()["tokens"]
    usage = synthetic.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()["usage"]
    assert len(tokens) == usage["prompt_tokens"]
    text = synthetic.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n")
    bare = synthetic.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert tokens[: len(bare)] == bare
    assert len(bare) < len(tokens)
    begun = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    open_ended = synthetic.post("/tokenize", messages=begun, continue_final_message=True).json()["tokens"]
    assert synthetic.post("/detokenize", tokens=open_ended).json()["prompt"].endswith("Well,")


def test_content_as_parts_is_text(synthetic) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello, world!"}]}]
    assert synthetic.post("/tokenize", messages=parts).json() == synthetic.post("/tokenize", messages=MESSAGES).json()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * (2**21 + 1)}, "prompt"),
        ("/tokenize", {"prompt": "\U0001f600" * (2**19 + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_wrong_request_is_refused_by_name(synthetic, path, body, param) -> None:
    response = synthetic.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"tokens": [1]}])
def test_a_model_that_is_not_served_is_not_found(synthetic, body) -> None:
    path = "/tokenize" if "prompt" in body else "/detokenize"
    assert synthetic.post(path, model="nope", **body).status_code == 404


def test_nothing_is_a_text_too(synthetic) -> None:
    assert synthetic.post("/tokenize", prompt="").json()["tokens"] == []
    assert synthetic.post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/embeddings"])
def test_a_long_text_never_holds_the_loop(synthetic, path) -> None:
    """A text that takes the tokenizer a second; health checks go on in between."""
    field = "input" if path == "/v1/embeddings" else "prompt"
    body = {field: "a1 b2! " * (150_000 if path == "/tokenize" else 15_000)}  # the others refuse longer ones unread
    response, _ = post_beside_health_checks(synthetic, path, body)
    assert response.status_code == (200 if path == "/tokenize" else 400)


def test_the_models_card_says_what_vllms_says(synthetic) -> None:
    (card,) = synthetic.client.get("/v1/models").json()["data"]
    assert card == synthetic.client.get(f"/v1/models/{card['id']}").json()
    assert (card["object"], card["parent"], card["root"], card["max_model_len"]) == ("model", None, card["id"], 2048)
    (permission,) = card["permission"]
    assert permission.keys() == {
        "id", "object", "created", "allow_create_engine", "allow_sampling", "allow_logprobs", "allow_search_indices",
        "allow_view", "allow_fine_tuning", "organization", "group", "is_blocking",
    }  # fmt: skip


def test_the_sdk_lists_the_model(synthetic) -> None:
    with synthetic.sdk() as client:
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
