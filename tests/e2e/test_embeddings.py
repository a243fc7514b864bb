"""/v1/embeddings: against transformers' hidden states, the openai SDK, and with inputs of every kind."""

import base64
import os
import signal
import threading

import numpy as np
import pytest

from ringserve.server.settings.model_path import resolve
from tests.e2e.conftest import RunningServer, post_beside_health_checks, send

# The last is longer than a step of this file's server.
TEXTS = ["What is the capital of France?", "Paris", "こんにちは", "One, two, three. " * 20]
SIZE = 64  # of the synthetic engine's embeddings


@pytest.fixture(scope="module")
def server():
    running = RunningServer("--dtype", "float32", "--max-num-batched-tokens", "64")
    yield running
    assert running.stop() == 0
    assert running.leftovers() == []


@pytest.fixture(scope="module")
def hidden_states():
    """Transformers' final hidden states of each text, [num_tokens, hidden_size]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [
            model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-1][0].numpy()
            for text in TEXTS
        ]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def embed(server, **body) -> np.ndarray:
    response = server.post("/v1/embeddings", **body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    if body.get("encoding_format") == "base64":
        return np.array([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
    return np.array([item["embedding"] for item in data])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers_hidden_states(server, hidden_states, pooling) -> None:
    expected = np.array([rows.mean(0) if pooling == "mean" else rows[-1] for rows in hidden_states])
    body = {"input": TEXTS, "pooling": pooling}
    np.testing.assert_allclose(embed(server, **body), unit(expected), atol=1e-5, rtol=0)
    error = np.abs(embed(server, **body, normalize=False) - expected).max() / np.abs(expected).max()
    assert error < 1e-5
    shortened = embed(server, **body, dimensions=100)
    np.testing.assert_allclose(shortened, unit(expected[:, :100]), atol=1e-5, rtol=0)
    cut = embed(server, **body, dimensions=100, normalize=False)
    assert np.abs(cut - expected[:, :100]).max() / np.abs(expected).max() < 1e-5


def test_without_a_pooling_an_embedding_is_the_last_token_s_and_in_base64_it_has_the_same_numbers(
    server, hidden_states
) -> None:
    plain = embed(server, input=TEXTS, normalize=False)
    expected = np.array([rows[-1] for rows in hidden_states])
    assert np.abs(plain - expected).max() / np.abs(expected).max() < 1e-5
    encoded = embed(server, input=TEXTS, normalize=False, encoding_format="base64")
    np.testing.assert_allclose(encoded, plain, atol=1e-5, rtol=1e-6)


def test_the_sdk_gets_the_same_by_its_default_and_as_floats(server, hidden_states) -> None:
    with server.sdk() as client:
        answer = client.embeddings.create(model="SmolLM2-135M-Instruct", input=TEXTS)  # base64 on the wire
        floats = client.embeddings.create(model="SmolLM2-135M-Instruct", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="SmolLM2-135M-Instruct", input=TEXTS[0], dimensions=10)
    rows = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(rows, unit(np.array([rows[-1] for rows in hidden_states])), atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows, np.array([item.embedding for item in floats.data]), atol=1e-6, rtol=0)
    num_tokens = sum(len(rows) for rows in hidden_states)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert answer.object == "list"
    assert len(short.data[0].embedding) == 10


def test_texts_and_their_token_ids_are_the_same_inputs(synthetic) -> None:
    tokens = [synthetic.post("/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    by_text = embed(synthetic, input=TEXTS)
    assert len(np.unique(by_text.round(6), axis=0)) == len(TEXTS)
    np.testing.assert_array_equal(embed(synthetic, input=tokens), by_text)
    np.testing.assert_array_equal(embed(synthetic, input=TEXTS, encoding_format="base64"), by_text)
    for text, token_ids, row in zip(TEXTS, tokens, by_text, strict=True):
        np.testing.assert_array_equal(embed(synthetic, input=text)[0], row)
        np.testing.assert_array_equal(embed(synthetic, input=token_ids)[0], row)


def test_an_input_may_fill_the_context_and_no_more(synthetic) -> None:
    assert embed(synthetic, input=[7] * 2048).shape == (1, SIZE)
    response = synthetic.post("/v1/embeddings", input=[[7], [7] * 2049])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1]")
    assert "length is 2048 tokens. However, input[1] has 2049 tokens: " in response.json()["error"]["message"]


@pytest.mark.parametrize(("side", "kept"), [(None, [3, 4]), ("left", [3, 4]), ("right", [1, 2])])
def test_a_truncated_input_is_what_is_left_of_it(synthetic, side, kept) -> None:
    body = {"input": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "pooling": "mean"}
    body |= {"truncation_side": side} if side else {}
    np.testing.assert_array_equal(embed(synthetic, **body), embed(synthetic, input=kept, pooling="mean"))
    long = {"input": [5] * 3000 + [6], "truncate_prompt_tokens": -1}
    np.testing.assert_array_equal(embed(synthetic, **long), embed(synthetic, input=[5] * 2047 + [6]))


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a", 1]}, "input", "mixed"),
        ({"input": [[1], 1]}, "input", "mixed"),
        ({"input": [-1]}, "input", "-1"),
        ({"input": [[1], [10**9]]}, "input[1]", "1000000000"),
        ({"input": [1.5]}, "input[0]", "1.5"),
        ({"input": [True]}, "input[0]", "true"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "0"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions", "64"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "pooling": "cls"}, "pooling", "cls"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
        ({"input": "a", "priority": 2**31}, "priority", "2147483648"),
        ({"input": "a", "request_id": "ä"}, "request_id", "request_id"),
    ],
)
def test_a_wrong_request_is_refused_by_name(synthetic, body, param, part) -> None:
    response = synthetic.post("/v1/embeddings", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert part in error["message"]
    assert synthetic.load()["server_load"] == 0


def test_a_model_that_is_not_served_is_not_found(synthetic) -> None:
    response = synthetic.post("/v1/embeddings", input="a", model="text-embedding-3-small")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_the_request_id_comes_back(synthetic) -> None:
    response = synthetic.client.post("/v1/embeddings", json={"input": "a"}, headers={"X-Request-Id": "mine"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("mine", "embd-mine")


def test_user_and_unknown_fields_are_ignored(synthetic) -> None:
    assert embed(synthetic, input="a", user="someone", no_such_field=1).shape == (1, SIZE)


def test_a_client_that_leaves_takes_its_inputs_out_of_the_engine(shared_server, wait) -> None:
    server = shared_server("--engine", "synthetic", "--prefill-time-ms", "60000")
    client = send(server.port, "/v1/embeddings", input=["a"] * 300)
    wait(lambda: server.load()["num_requests_running"] == 256, 30)
    client.close()
    elapsed_s = wait(lambda: not any(server.load().values()), 5)
    print(f"free {elapsed_s * 1000:.0f} ms after the close")
    assert server.client.get("/health").status_code == 200


def test_an_engine_that_dies_fails_the_whole_request(start_server, wait) -> None:
    server = start_server("--engine", "synthetic", "--prefill-time-ms", "60000")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", input=["a", "b"])))
    thread.start()
    wait(lambda: server.load()["num_requests_running"] == 2, 30)
    os.kill(server.engine_pid, signal.SIGKILL)
    thread.join(30)
    assert answers[0].status_code == 503
    assert server.wait(30) == 1


def test_2048_inputs_never_hold_the_loop(start_server) -> None:
    """As large as an answer gets: 2048 rows of 1024 numbers. Health checks go on in between."""
    server = start_server("--engine", "synthetic", "--embedding-size", "1024")
    body = {"input": [f"text number {i}" for i in range(2048)], "encoding_format": "float"}
    response, num_checks = post_beside_health_checks(server, "/v1/embeddings", body)
    print(f"{len(response.content) / 1e6:.0f} MB")
    assert response.status_code == 200
    assert len(response.content) > 2048 * 1024 * 10
    assert num_checks > 3
