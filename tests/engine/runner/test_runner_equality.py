"""In fp32, greedy: every architecture gives what transformers' generate() gives, however its requests are batched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

TinyModels = Callable[[str], Any]
MakeDriver = Callable[..., Any]
FUSED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
BY_TRANSFORMERS = (
    "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "granite", "gpt_oss", "afmoe", "jetmoe",
)  # fmt: skip
PROMPT_LENGTHS = (5, 37, 1, 20)


def prompts(seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 300, length).tolist() for length in lengths]


CASES = [(name, runner) for name in FUSED for runner in ("fused", "hf")] + [(name, "hf") for name in BY_TRANSFORMERS]


@pytest.mark.parametrize(("name", "runner"), CASES)
def test_tokens_are_those_of_generate(name: str, runner: str, tiny_model: TinyModels, make_driver: MakeDriver) -> None:
    tiny = tiny_model(name)
    requests = prompts(1)
    wanted = {handle: tiny.generate(prompt, 12) for handle, prompt in enumerate(requests)}
    assert len(set().union(*wanted.values())) > 10  # the model is not stuck on a token
    settings = {"runner": runner, "block_size": 4, "max_model_len": 52}

    driver = make_driver(tiny.config(max_num_batched_tokens=16, **settings))
    for handle, prompt in enumerate(requests):  # alone
        driver.add(handle, prompt, max_tokens=12)
        driver.run()
    assert driver.tokens == wanted

    driver = make_driver(tiny.config(max_num_batched_tokens=16, **settings))
    for handle, prompt in enumerate(requests):  # each joins while others decode, the long ones in chunks of 16
        driver.add(handle, prompt, max_tokens=12)
        driver.step()
        driver.step()
    driver.run()
    assert driver.tokens == wanted

    driver.tokens, driver.finishes = {}, {}
    for handle, prompt in enumerate(requests):  # the cache has their beginnings now
        driver.add(handle, prompt, max_tokens=12)
    driver.run()
    assert driver.tokens == wanted
    assert driver.core.stats()["num_hit_tokens"] > 40

    driver = make_driver(tiny.config(kv_cache_tokens=52, **settings))
    for handle, prompt in enumerate(requests):  # three fit at first, and not when they grow
        driver.add(handle, prompt, max_tokens=12)
    driver.run()
    assert driver.tokens == wanted
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.is_idle_and_empty()


def test_tokens_of_a_deterministic_engine_do_not_depend_on_batch_mates_in_bf16(
    tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    settings = {"dtype": "bfloat16", "deterministic": True, "block_size": 4}
    requests = prompts(2)
    together = make_driver(tiny_model("llama").config(max_num_batched_tokens=16, **settings))
    for handle, prompt in enumerate(requests):
        together.add(handle, prompt, max_tokens=20, temperature=1.0, seed=handle)
        together.step()
    together.run()
    alone = make_driver(tiny_model("llama").config(max_num_seqs=1, **settings))
    for handle, prompt in enumerate(requests):
        alone.add(handle, prompt, max_tokens=20, temperature=1.0, seed=handle)
    alone.run()
    assert alone.tokens == together.tokens
