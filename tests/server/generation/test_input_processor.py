import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, processors

from ringserve.server.chat.template import ChatPrompt, ChatTemplate
from ringserve.server.errors import ContextLengthError, RequestError
from ringserve.server.generation.input_processor import GenerateRequest, InputProcessor, ProcessedRequest, Truncation
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.key_number import set_key_number
from ringserve.shm_transport.messages import Fork

OVERFLOW = "This model's maximum context length is 16 tokens. However, "

VOCAB = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "longest": 4, "[UNK]": 5}


@pytest.fixture
def model(tmp_path: Path) -> ModelInfo:
    """A model of six tokens that begins each text with <s>; ids up to 9 are legal."""
    library = LibraryTokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7, 8], "temperature": 0.5, "top_k": 20}')
    info = ModelInfo.load(tmp_path / "tokenizer.json", chat_template="{{ bos_token }}{{ messages[0].content }}")
    return info.with_limits(max_model_len=16, vocab_size=10)


async def process(model: ModelInfo, prompt: Any = (2, 3), **options: Any) -> ProcessedRequest:
    add_special_tokens = options.pop("add_special_tokens", True)
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    request = GenerateRequest(
        request_id="r", prompt=prompt, params=SamplingParams(**options), add_special_tokens=add_special_tokens
    )
    return await InputProcessor(model).process(request)


async def refusal(model: ModelInfo, **options: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        await process(model, **options)
    return caught.value.param, str(caught.value)


async def test_a_text_begins_with_bos_unless_told_otherwise(model: ModelInfo) -> None:
    assert (await process(model, "a b")).prompt_token_ids == [0, 2, 3]
    assert (await process(model, "a b", add_special_tokens=False)).prompt_token_ids == [2, 3]
    assert (await process(model, [2, 3])).prompt_token_ids == [2, 3]


async def test_an_empty_text_is_a_prompt_only_with_bos(model: ModelInfo) -> None:
    assert (await process(model, "")).prompt_token_ids == [0]
    assert (await refusal(model, prompt="", add_special_tokens=False))[0] == "prompt"
    assert (await refusal(model, prompt=[]))[0] == "prompt"


async def test_max_tokens_is_clamped_to_what_the_context_leaves(model: ModelInfo) -> None:
    assert (await process(model, max_tokens=5)).max_tokens == 5
    assert (await process(model, max_tokens=16)).max_tokens == 14
    assert (await process(model, max_tokens=None)).max_tokens == 14
    assert (await process(model, [2] * 15, max_tokens=9)).max_tokens == 1


async def test_max_tokens_beyond_the_context_is_refused(model: ModelInfo) -> None:
    assert await refusal(model, max_tokens=17) == (
        "max_tokens",
        f"{OVERFLOW}max_tokens is 17: ask for at most 16, or leave it out (context_length_exceeded)",
    )
    for name in ("max_tokens", "min_tokens"):
        param, message = await refusal(model, **{name: 10**300})
        assert param == name
        assert len(message) < 200


async def test_a_prompt_that_leaves_no_room_is_refused(model: ModelInfo) -> None:
    for length in (16, 17):
        param, message = await refusal(model, prompt=[2] * length)
        assert param == "prompt"
        assert message.startswith(f"{OVERFLOW}prompt has {length} tokens, and the output needs at least 1 more: ")


async def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenized(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    param, message = await refusal(model, prompt="a" * (16 * len("longest") + 1))
    assert param == "prompt"
    assert "113 characters" in message


@pytest.mark.parametrize("text", ["a" * (2**21 + 1), "é" * (2**20 + 1), "\ud800" * 2**20], ids=["1", "2", "surrogates"])
async def test_a_text_with_too_many_bytes_is_refused_before_it_is_tokenized_even_to_be_truncated(
    model: ModelInfo, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    request = GenerateRequest(
        request_id="r", prompt=text, params=SamplingParams(), truncation=Truncation.of(4, None), add_special_tokens=True
    )
    with pytest.raises(ContextLengthError, match="at most 2097152: shorten it "):
        await InputProcessor(model).process(request)


async def test_min_tokens_beyond_what_is_left_is_refused(model: ModelInfo) -> None:
    assert (await process(model, min_tokens=5, max_tokens=5)).params.min_tokens == 5
    assert await refusal(model, min_tokens=6, max_tokens=5) == (
        "min_tokens",
        "min_tokens is 6: at most the 5 tokens of max_tokens",
    )
    for max_tokens in (16, None):
        param, message = await refusal(model, min_tokens=15, max_tokens=max_tokens)
        assert param == "min_tokens"
        assert message.startswith(f"{OVERFLOW}min_tokens is 15 and prompt leaves room for 14: ")


@pytest.mark.parametrize("token_id", [-1, 10, 2**31, True, 1.0, "a", None])
async def test_what_is_no_token_id_is_refused(model: ModelInfo, token_id: Any) -> None:
    param, message = await refusal(model, prompt=[2, token_id])
    assert param == "prompt"
    assert message == f"prompt holds {token_id!r}: token ids are integers from 0 to 9"
    assert (await refusal(model, stop_token_ids=(token_id,)))[0] == "stop_token_ids"


async def test_every_eos_of_the_model_ends_a_request_unless_it_ignores_them(model: ModelInfo) -> None:
    request = await process(model, stop_token_ids=(9, 7, 9))
    assert (request.eos_token_id, request.stop_token_ids) == (1, (9, 7, 8))
    request = await process(model, stop_token_ids=(9, 9), ignore_eos=True)
    assert (request.eos_token_id, request.stop_token_ids) == (-1, (9,))


async def test_each_prompt_of_a_call_knows_how_long_the_others_are(model: ModelInfo) -> None:
    requests = [
        GenerateRequest(request_id="r", prompt=[2] * length, params=SamplingParams(n=length)) for length in (1, 2, 4)
    ]
    processed = await InputProcessor(model).process_all(requests)
    assert [each.num_sibling_tokens for each in processed] == [6, 5, 3]
    told = [each.engine_request(range(each.params.n)) for each in processed]
    assert [each.num_sibling_tokens for each in told] == [6, 5, 3]
    assert (await process(model)).num_sibling_tokens == 0


@pytest.mark.parametrize("number", [0, 7])
async def test_a_prompt_knows_the_key_that_it_came_with(model: ModelInfo, number: int) -> None:
    set_key_number(number)
    assert (await process(model)).engine_request([1]).key_number == number


async def test_the_engine_is_told_every_parameter(model: ModelInfo) -> None:
    options = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "min_tokens": 2, "max_tokens": 4}
    request = (await process(model, "a b", **options, stop_token_ids=(9,), seed=5)).engine_request([77])
    assert {name: getattr(request, name) for name in options} == options
    assert (request.handle, request.seed, request.prompt_token_ids.tolist()) == (77, 5, [0, 2, 3])
    assert (request.eos_token_id, request.stop_token_ids, request.forks) == (1, (9, 7, 8), ())
    off = (await process(model, top_k=-1)).engine_request([1])
    assert off.top_k == 0


async def test_the_n_sequences_are_forks_of_the_first_with_seeds_in_a_row(model: ModelInfo) -> None:
    request = (await process(model, "a b", n=3, seed=5)).engine_request([77, 78, 90])
    assert (request.handle, request.seed, request.forks) == (77, 5, (Fork(78, 6), Fork(90, 7)))


async def test_long_texts_are_tokenized_and_rendered_off_the_loop(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode, render = model.tokenizer.encode, ChatTemplate.render

    def noted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(model.tokenizer, "encode", noted(encode))
    monkeypatch.setattr(ChatTemplate, "render", noted(render))
    large = replace(model, max_model_len=10_000)
    for text in ("a b", "a " * 3000):
        await process(large, text)
        await InputProcessor(large).render_chat(ChatPrompt(messages=[{"role": "user", "content": text}]))
    is_main = [thread is threading.main_thread() for thread in threads]
    assert is_main == [True, True, False, False]


async def test_a_chat_is_rendered_by_the_model_s_template(model: ModelInfo) -> None:
    assert await InputProcessor(model).render_chat(ChatPrompt(messages=[{"role": "user", "content": "a"}])) == "<s>a"
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        await InputProcessor(replace(model, chat_template=None)).render_chat(ChatPrompt(messages=[]))


async def test_a_bad_word_longer_than_any_token_is_refused_before_it_is_tokenized(model: ModelInfo) -> None:
    param, message = await refusal(model, bad_words=("a " * 2**20,))
    assert param == "bad_words"
    assert "the longest token has" in message


async def test_allowed_tokens_that_are_all_excluded_are_refused(model: ModelInfo) -> None:
    param, message = await refusal(model, allowed_token_ids=(2, 3), bad_words=("a",), bad_token_ids=(3, 4))
    assert param == "allowed_token_ids"
    assert "bad_words" in message
    assert (await process(model, allowed_token_ids=(2, 3), bad_words=("a",))).bad_token_ids == (2,)


async def test_a_prompt_of_a_wrong_kind_or_with_a_lone_surrogate_is_a_request_error(model: ModelInfo) -> None:
    for prompt in (5, None, "a\ud800"):
        with pytest.raises(RequestError, match=r"^prompt "):
            await InputProcessor(model).process(GenerateRequest(request_id="r", prompt=prompt))  # type: ignore[arg-type]
