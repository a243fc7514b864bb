"""What the control plane asks of the real engine: take the blocks away, free the memory, go on with the same tokens."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringserve.engine.core.make import make_engine
from ringserve.engine.schedule.block_pool import BlockPool, Salt
from ringserve.shm_transport.messages import Fork
from tests.engine.conftest import Driver

TinyModels = Callable[[str], Any]
PROMPTS = ([5, 9, 2, 40, 7, 7, 31], [3], list(range(20, 45)), [11, 12, 13, 14])


def finish(driver: Driver) -> None:
    """Take what a step in flight gives, as the loop does before it touches blocks or memory."""
    core = driver.core
    played = SimpleNamespace(
        step=core.finish, idle_step=core.idle_step, take_data=core.take_data, take_failures=core.take_failures,
        after_step=core.after_step,
    )  # fmt: skip
    replace(driver, core=played).step()  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(("name", "runner"), [("llama", "fused"), ("gpt2", "hf")])
def test_requests_whose_blocks_and_model_were_taken_get_the_tokens_of_undisturbed_ones(
    name: str, runner: str, overlap: str, tiny_model: TinyModels, make_driver: Callable[..., Driver]
) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config(runner=runner, overlap=overlap, max_num_batched_tokens=16, block_size=4))
    core = driver.core
    expected = {}
    for handle, prompt in enumerate(PROMPTS):
        expected[handle] = expected[handle + 10] = tiny.generate(prompt, 12)
        driver.add(handle, prompt, max_tokens=12, forks=(Fork(handle + 10, 0),))
    driver.step()
    for num_steps in (1, 3):
        for _ in range(num_steps):
            driver.step()
        assert core.reset_prefix_cache(preempts=False) is False
        finish(driver)
        assert core.reset_prefix_cache(preempts=True) is True
        core.release("weights")
        core.release("kv_cache")
        core.restore("kv_cache")
        core.restore("weights")
    driver.run()
    assert driver.tokens == expected
    assert core.idle_step().num_preemptions > 2


@pytest.mark.parametrize("runner", ["fused", "hf"])
def test_nothing_of_a_released_model_is_left(runner: str, tiny_model: TinyModels) -> None:
    core = make_engine(tiny_model("llama").config(runner=runner))
    model, cache = weakref.ref(core._runner.model), weakref.ref(core._runner._cache)  # type: ignore[union-attr]
    gc.freeze()  # as the loop does
    try:
        core.release("weights")
        core.release("kv_cache")
    finally:
        gc.unfreeze()
    assert model() is None
    assert cache() is None


@pytest.mark.parametrize("runner", ["fused", "hf"])
def test_nothing_is_left_of_an_attempt_to_restore_that_failed(runner: str, tiny_model: TinyModels) -> None:
    loaded = make_engine(tiny_model("llama").config(runner=runner, runtime_adapters=True))._runner  # type: ignore[union-attr]
    num_sites, load = len(loaded.adapters._sites), loaded._load
    loaded.release("weights")

    def fail(adapters: Any) -> Any:
        load(adapters)
        raise OSError("the disk is gone")

    loaded._load = fail
    with pytest.raises(OSError, match="gone"):
        loaded.restore("weights")
    loaded._load = load
    loaded.restore("weights")
    assert len(loaded.adapters._sites) == num_sites > 0


def test_a_pool_forgets_everything_or_nothing() -> None:
    pool, salt, tokens = BlockPool(5, 2), Salt("", 0), np.arange(4, dtype=np.int32)
    held = pool.allocate(2)
    pool.register(held[0], salt, tokens[:2])
    pool.release(held[1:])
    assert not pool.try_reset()
    assert pool.find_prefix(tokens, salt).block_ids == held[:1]
    pool.release(held[:1])
    assert pool.try_reset()
    assert pool.find_prefix(tokens, salt).block_ids == []
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
