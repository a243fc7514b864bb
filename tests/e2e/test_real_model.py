"""The default model through the real server: curl, the openai SDK, and exactness under load."""

import asyncio
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringserve.server.settings.model_path import resolve

NUM_CLIENTS = 12
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_curl_streams_a_chat(server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": [QUESTION], "stream": True, "temperature": 0})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line[6:] for line in out.splitlines() if line]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    print(text)
    assert "Paris" in text


def test_the_sdk_chats_with_and_without_streaming(sdk) -> None:
    answer = sdk.chat.completions.create(model="SmolLM2-135M-Instruct", messages=[QUESTION], temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 3
    stream = sdk.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=[QUESTION], temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage or chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_the_sdk_completes_a_prompt(sdk) -> None:
    answer = sdk.completions.create(
        model="SmolLM2-135M-Instruct", prompt="One, two, three,", temperature=0, max_tokens=6
    )
    print(answer.choices[0].text)
    assert "four" in answer.choices[0].text


def test_the_sdk_sees_errors_as_its_own(sdk) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        sdk.chat.completions.create(model="SmolLM2-135M-Instruct", messages=[QUESTION], temperature=3)
    with pytest.raises(openai.NotFoundError, match="gpt-4") as raised:
        sdk.chat.completions.create(model="gpt-4", messages=[QUESTION])
    assert raised.value.code == "model_not_found"
    assert [model.id for model in sdk.models.list()] == ["SmolLM2-135M-Instruct"]


def test_a_seed_gives_the_same_text_again(sdk) -> None:
    def text(seed: int) -> str:
        answer = sdk.completions.create(
            model="SmolLM2-135M-Instruct", prompt="Once upon a time", temperature=1, seed=seed, max_tokens=12
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(5) as pool:
        one, again, *others = pool.map(text, (1, 1, 0, 2, 3))
    assert one == again
    assert len({one, *others}) > 1


async def test_12_sdk_clients_at_once_get_what_each_gets_alone(server) -> None:
    topics = ["the sea", "a mountain", "seven cats", "bread", "the moon", "a very old train", "rain", "glass"]
    prompts = ["Say something about " + " and ".join(topics[: 1 + i % 8]) + "." * (i // 8) for i in range(NUM_CLIENTS)]

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def ask(prompt: str, max_tokens: int) -> str:
            stream = await client.chat.completions.create(
                model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": prompt}], temperature=0,
                max_tokens=max_tokens, stream=True,
            )  # fmt: skip
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        lengths = [5 + i % 6 for i in range(NUM_CLIENTS)]
        together = await asyncio.gather(*map(ask, prompts, lengths))
        alone = [await ask(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert together == alone
    assert len(set(together)) > 6


def log_softmax_of(text: str, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' log probabilities after each token of a prompt and its continuation, [num_tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(resolve(None), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(resolve(None))
    ids = tokenizer(text, add_special_tokens=False).input_ids + token_ids
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)


def test_logprobs_of_prompt_and_output_are_those_of_transformers(sdk) -> None:
    prompt = "The capital of France is"
    answer = sdk.completions.create(
        model="SmolLM2-135M-Instruct", prompt=prompt, temperature=0, max_tokens=4, logprobs=3, echo=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    [choice] = answer.choices
    expected = log_softmax_of(prompt, choice.token_ids)
    ids = choice.prompt_token_ids + choice.token_ids
    assert choice.logprobs.token_logprobs[0] is None
    ours = torch.tensor(choice.logprobs.token_logprobs[1:])
    theirs = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    for shown, row in zip(choice.logprobs.top_logprobs[1:], expected, strict=False):
        assert max(shown.values()) == pytest.approx(float(row.max()), abs=1e-3)
    assert "".join(choice.logprobs.tokens) == choice.text


def test_logprob_bytes_of_characters_made_of_several_tokens_join_to_the_text(sdk) -> None:
    answer = sdk.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": "Reply with five rare emoji."}],
        temperature=0, max_tokens=40, logprobs=True, top_logprobs=3,
        logit_bias={10813: 4},  # the first half of many emoji
    )  # fmt: skip
    [choice] = answer.choices
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    joined = b"".join(bytes(entry.bytes) for entry in entries if not entry.token.startswith("<|"))
    assert joined.decode(errors="ignore") == choice.message.content
    assert any(entry.token.startswith("bytes:") for entry in entries)
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in entries)


def test_biases_lists_and_penalties_change_what_is_said(server) -> None:
    def said(**fields: object) -> list[int]:
        body = {"prompt": "One, two, three,", "max_tokens": 6, "temperature": 0, "return_token_ids": True, **fields}
        return server.complete(**body)["choices"][0]["token_ids"]

    free = said()
    assert said(logit_bias={"260": 100}) == [260] * 6
    assert free[0] not in said(logit_bias={str(free[0]): -100})
    assert set(said(allowed_token_ids=[300, 301])) <= {300, 301}
    assert " four" not in server.complete(prompt="One, two, three,", max_tokens=6, temperature=0,
                                          bad_words=[" four"])["choices"][0]["text"]  # fmt: skip
    penalties = ({}, {"repetition_penalty": 1.5}, {"frequency_penalty": 2}, {"presence_penalty": 2})
    with ThreadPoolExecutor(len(penalties)) as pool:
        repeating, *others = pool.map(lambda penalty: len(set(said(max_tokens=24, **penalty))), penalties)
    assert all(num_different > repeating for num_different in others)


def test_a_prompt_seen_before_comes_from_the_cache_unless_its_salt_is_another(server) -> None:
    prompt = "A long story about a cat. " * 20

    def cached(**fields: object) -> int:
        return server.complete(prompt=prompt, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = cached(cache_salt="mine")
    assert first == 0
    assert cached(cache_salt="mine") > 64
    assert cached(cache_salt="yours") == 0
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "mine", "stream_options": {"include_usage": True}}
    usage = server.stream("/v1/completions", **body)[-2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached(cache_salt="mine")


def test_a_closed_socket_frees_its_request_in_the_real_engine(server, wait) -> None:
    body = {"messages": [QUESTION], "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        events = response.iter_bytes()  # closes the connection when it goes
        next(events)
        wait(lambda: server.load()["num_requests_running"] == 1, 30)
    elapsed_s = wait(lambda: not any(server.load().values()), 10)
    print(f"free {elapsed_s:.3f} s after the close")


def test_a_local_directory_is_served_under_the_names_given(start_server) -> None:
    directory = resolve(None)
    local = start_server(str(directory), "--served-model-name", "one", "two", "--max-model-len", "256")
    cards = local.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("one", 256), ("two", 256)]
    answer = local.post("/v1/chat/completions", model="two", messages=[QUESTION], max_tokens=10, temperature=0).json()
    assert answer["model"] == "one"
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert local.post("/v1/chat/completions", model="three", messages=[QUESTION]).status_code == 404


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "neither a directory nor a hub id"),
        (["--dtype", "float32", "--max-model-len", "100000"], "max_model_len"),
        (["--port", "70000"], "--port is 70000: at most 65535"),
        (["--port", "x"], "invalid int value: 'x'"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template '/nowhere.jinja'"),
        (["--chat-template", "{% if %}"], "chat template is not valid Jinja"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0: at least 1"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_start_is_a_readable_error_and_exit_code_2(arguments, message) -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "serve", *arguments]
    if "--port" not in arguments:
        command += ["--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_known_at_once(server) -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "serve", "--port", str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert f"cannot bind 127.0.0.1:{server.port}: Address already in use" in result.stderr


def test_a_directory_that_is_no_model_is_named(tmp_path) -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "serve", "--port", "0", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_every_option() -> None:
    command = [sys.executable, "-P", "-m", "ringserve.server.cli", "serve", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in (
        "MODEL",
        "--host",
        "--port",
        "--dtype",
        "--device",
        "--max-model-len",
        "--drain-timeout",
        "--engine",
    ):
        assert option in out
