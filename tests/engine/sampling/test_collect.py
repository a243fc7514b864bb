"""Prompt logprobs and embeddings, through the step loop."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.config import EngineConfig
from ringserve.engine.interface import RequestFailedError
from ringserve.shm_transport.messages import Fork
from ringserve.shm_transport.records import DataContent, Pooling

TinyModels = Callable[[str], Any]
MakeDriver = Callable[..., Any]
PROMPTS = {1: [5, 9, 2, 40, 7, 7, 31], 2: [3, 8], 3: list(range(10, 50)), 4: [44, 43, 42]}
SETTINGS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 2}]


def arrays(driver: Any, handle: int) -> dict[DataContent, np.ndarray[Any, Any]]:
    found = [data for data in driver.data if data.handle == handle]
    assert len({data.content for data in found}) == len(found)
    return {data.content: data.array for data in found}


def check_prompt_logprobs(tiny: Any, prompt: list[int], num_top: int, found: dict[DataContent, Any]) -> None:
    with torch.inference_mode():
        expected = tiny.model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(1)
    ids, logprobs, ranks = (found[content] for content in list(DataContent)[:3])
    assert ids.shape == logprobs.shape == (len(prompt) - 1, 1 + num_top)
    assert ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(logprobs, expected.gather(1, torch.from_numpy(ids).long()), atol=1e-4)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    assert ranks.tolist() == ((expected > own).sum(1) + 1).tolist()
    np.testing.assert_allclose(logprobs[:, 1:], expected.topk(num_top, dim=1).values, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("name", "runner"), [("llama", "fused"), ("llama", "hf"), ("gemma2", "hf")])
def test_prompt_logprobs_are_transformers_with_mates_and_in_chunks(
    name: str, runner: str, settings: dict[str, Any], tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config(runner=runner, **settings))
    wanted = {1: 0, 2: 5, 3: 3, 4: -1}
    for handle, prompt in PROMPTS.items():
        driver.add(handle, prompt, num_prompt_logprobs=wanted[handle], max_tokens=5)
    driver.run()
    for handle, prompt in PROMPTS.items():
        assert driver.tokens[handle] == tiny.generate(prompt, 5)
        if wanted[handle] >= 0:
            check_prompt_logprobs(tiny, prompt, wanted[handle], arrays(driver, handle))
    assert arrays(driver, 4) == {}
    assert driver.is_idle_and_empty()


def test_prompt_logprobs_are_complete_though_the_prompt_is_in_the_cache(
    tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    driver = make_driver(tiny.config(block_size=4))
    for handle in (1, 2):
        driver.add(handle, PROMPTS[3], num_prompt_logprobs=2, max_tokens=1)
        driver.run()
        check_prompt_logprobs(tiny, PROMPTS[3], 2, arrays(driver, handle))


def test_prompt_logprobs_come_once_and_before_the_first_token_though_the_request_is_preempted(
    make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    runner = make_hashing_runner(num_blocks=9, block_size=4)
    driver = make_driver(runner=runner)
    for handle in (1, 2, 3):
        driver.add(handle, [handle, 7, 8, 9], num_prompt_logprobs=2, max_tokens=12)
    while driver.core.has_work:
        step = driver.step()
        assert set(driver.tokens) == {data.handle for data in driver.data}
    assert step.num_preemptions > 0
    for handle in (1, 2, 3):
        assert len(driver.tokens[handle]) == 12
        assert len(arrays(driver, handle)) == 3


def test_a_prompt_of_one_token_has_none(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(1, [5], num_prompt_logprobs=2, max_tokens=2)
    driver.run()
    assert driver.data == []
    assert driver.tokens[1] == [6, 7]


def test_forks_get_their_tokens_and_the_first_sequence_the_prompt_logprobs(
    make_driver: MakeDriver, fake_runner: Any
) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(1, [5, 6], num_prompt_logprobs=0, max_tokens=2, forks=(Fork(2, 0), Fork(3, 0)))
    driver.run()
    assert driver.tokens == {handle: [7, 8] for handle in (1, 2, 3)}
    assert {data.handle for data in driver.data} == {1}


@pytest.mark.parametrize("num_steps", range(5))  # of prefill: 8, 8, 8 (all logprobs are there), and the last token
def test_prompt_logprobs_reach_the_heir_of_a_first_sequence_that_is_aborted_mid_prompt(
    num_steps: int, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny, prompt = tiny_model("llama"), PROMPTS[3][:25]
    driver = make_driver(tiny.config(max_num_batched_tokens=8, block_size=4))
    driver.add(1, prompt, num_prompt_logprobs=2, max_tokens=3, forks=(Fork(2, 0), Fork(3, 0)))
    for _ in range(num_steps):
        driver.step()
    driver.core.abort([1])
    driver.run()
    teller = 1 if num_steps == 4 else 2  # aborted too late for that
    assert {data.handle for data in driver.data} == {teller}
    check_prompt_logprobs(tiny, prompt, 2, arrays(driver, teller))
    assert driver.tokens[2] == driver.tokens[3] == tiny.generate(prompt, 3)
    assert driver.is_idle_and_empty()


def test_forks_that_run_their_prompt_again_tell_nothing_of_it(
    make_driver: MakeDriver, make_hashing_runner: Any, hashed_tokens: Any
) -> None:
    runner, prompt = make_hashing_runner(num_blocks=10, block_size=4), list(range(9))
    driver = make_driver(EngineConfig(model="none", max_num_seqs=3), runner)
    forks = tuple(Fork(handle, 0) for handle in (2, 3, 4, 5))  # some without a seat, some without blocks later
    driver.add(1, prompt, num_prompt_logprobs=1, max_tokens=14, forks=forks)
    driver.run()
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.tokens == {handle: hashed_tokens(prompt, 14) for handle in range(1, 6)}
    assert len(driver.data) == len(arrays(driver, 1)) == 3
    assert driver.core.stats()["num_hit_tokens"] > 0  # nothing more is wanted of their prompt


def expected_embedding(tiny: Any, prompt: list[int], pooling: Pooling, is_normalized: bool) -> torch.Tensor:
    with torch.inference_mode():
        hidden = tiny.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    pooled = hidden[-1] if pooling == Pooling.LAST else hidden.mean(0)
    return torch.nn.functional.normalize(pooled, dim=0) if is_normalized else pooled


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("name", "runner"),
    [("llama", "fused"), ("qwen3", "fused"), ("llama", "hf"), ("gpt2", "hf"), ("gemma2", "hf"), ("opt", "hf")],
)
def test_embeddings_are_transformers_hidden_states_with_mates_that_decode(
    name: str, runner: str, settings: dict[str, Any], tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config(runner=runner, **settings))
    driver.add(9, PROMPTS[1], max_tokens=8)
    driver.step()
    cases = {}
    for handle, prompt in PROMPTS.items():
        for pooling in (Pooling.LAST, Pooling.MEAN):
            for is_normalized in (False, True):
                key = 100 * handle + 10 * pooling + is_normalized
                cases[key] = (prompt, pooling, is_normalized)
                driver.add(key, prompt, pooling=pooling, is_normalized=is_normalized, max_tokens=0)
    driver.run()
    for key, case in cases.items():
        (embedding,) = arrays(driver, key).values()
        np.testing.assert_allclose(embedding, expected_embedding(tiny, *case), atol=1e-5, rtol=0)
    assert driver.tokens == {9: tiny.generate(PROMPTS[1], 8)}
    assert driver.is_idle_and_empty()


def test_an_embedding_needs_no_token_and_ends_with_its_array(tiny_model: TinyModels, make_driver: MakeDriver) -> None:
    driver = make_driver(tiny_model("llama").config())
    driver.add(1, [1, 2, 3], pooling=Pooling.LAST, max_tokens=0)
    step = driver.step()
    assert len(step.handles) == 0
    assert [data.content for data in driver.data] == [DataContent.EMBEDDING]
    assert not driver.core.has_work


@pytest.mark.parametrize("params", [{"forks": (Fork(2, 0),)}, {"num_prompt_logprobs": 1}])
def test_an_embedding_with_forks_or_prompt_logprobs_is_refused(
    params: dict[str, Any], make_driver: MakeDriver, fake_runner: Any
) -> None:
    driver = make_driver(runner=fake_runner)
    with pytest.raises(RequestFailedError, match="an embedding has no forks and no prompt logprobs"):
        driver.add(1, [1, 2], pooling=Pooling.MEAN, **params)
