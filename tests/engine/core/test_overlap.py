"""Two steps in flight, over a fake device that computes as late as it may, and over the real one on a CPU."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringserve.engine.config import EngineConfig
from ringserve.engine.core.overlap import OverlappingCore, Tokens
from ringserve.engine.sampling import rng as engine_rng
from ringserve.engine.sampling.sampler import sample, sample_each
from ringserve.engine.schedule.batch import Batch
from ringserve.shm_transport.messages import Fork
from ringserve.shm_transport.records import FinishReason

MakeDriver = Callable[..., Any]
CROWDED = EngineConfig(model="none", max_num_seqs=6, max_num_batched_tokens=12)  # for `draw_requests`


@dataclass
class Launch:
    """A step of the fake device: what it was given, copied, until it is computed."""

    device: "LazyDevice"
    batch: Batch
    rows: list[Any]
    copies: list[tuple[int, int]]
    result: Tokens | Exception | None = None

    def tokens(self) -> Tokens:
        self.device.compute_up_to(self)
        assert self.result is not None
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@dataclass
class LazyDevice:
    """Computes steps in order, by a fake runner: when somebody waits for them, or at random before."""

    runner: Any
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    launches: list[Launch] = field(default_factory=list)
    waiting: list[Launch] = field(default_factory=list)
    most_waiting: int = 0
    refuses: Exception | None = None
    last_tokens: np.ndarray[Any, Any] = field(default_factory=lambda: np.full(64, -1, np.int64))

    def launch(self, batch: Batch, requests: Sequence[Any], copies: Sequence[tuple[int, int]]) -> Launch:
        if self.refuses is not None:
            raise self.refuses
        rows = [
            SimpleNamespace(
                handle=request.handle, params=request.params, seed=request.seed, logit_rules=None, matcher=None,
                num_output_tokens=request.num_output_tokens, output_token_ids=[],
            )
            for request in requests
        ]  # fmt: skip
        step = Launch(self, batch, rows, list(copies))
        self.launches.append(step)
        self.waiting.append(step)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        while self.waiting and self.rng.random() < 0.2:
            self._compute(self.waiting.pop(0))
        return step

    def compute_up_to(self, step: Launch) -> None:
        while step.result is None:
            self._compute(self.waiting.pop(0))

    def _compute(self, step: Launch) -> None:
        if step.copies:
            self.runner.copy_blocks(step.copies)
        batch = step.batch
        if batch.sources is not None:
            token_ids = batch.token_ids.copy()
            is_known = batch.sources < 0
            token_ids[: batch.num_decodes] = np.where(
                is_known, token_ids[: batch.num_decodes], self.last_tokens[batch.sources]
            )
            batch = replace(batch, token_ids=token_ids)
        try:
            logits = self.runner.forward(batch)
        except RuntimeError as exc:  # as on a GPU, it is the end of what has been launched
            for each in (step, *self.waiting):
                each.result = exc
            self.waiting.clear()
            return
        best = logits.amax(dim=1).numpy() if step.rows else np.empty(0, np.float32)
        try:
            chosen = sample(logits.clone(), step.rows)
        except ArithmeticError:
            chosen = sample_each(logits, step.rows)
        token_ids = np.zeros(len(step.rows), np.int64)
        kept = [step.rows.index(row) for row in chosen.requests]
        token_ids[kept] = chosen.token_ids
        self.last_tokens[: len(token_ids)] = token_ids
        failures = {row: chosen.failures[each.handle] for row, each in enumerate(step.rows) if row not in kept}
        step.result = Tokens(token_ids, best, failures)


@pytest.fixture
def make_overlapping(make_driver: MakeDriver, make_hashing_runner: Any) -> Callable[..., tuple[Any, LazyDevice]]:
    """Build a driver over an overlapping core, and the fake device under it."""

    def make(config: EngineConfig | None = None, runner: Any = None) -> tuple[Any, LazyDevice]:
        runner = runner or make_hashing_runner()
        driver = make_driver(config, runner)
        device = LazyDevice(runner)
        driver.core = OverlappingCore(driver.core, device, runner.block_size)
        return driver, device

    return make


def draw_request(rng: random.Random, handle: int, beginnings: list[list[int]]) -> tuple[list[int], dict[str, Any]]:
    """Return a random prompt and its parameters; handles up to 3 above are its forks'."""
    prompt = [rng.randrange(32) for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.5:
        prompt = rng.choice(beginnings)[: rng.randint(1, 20)] + prompt[:10]
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 12, 24]),
        "temperature": rng.choice([0.0, 0.0, 1.0]),
        "top_p": rng.choice([1.0, 0.8]),
        "seed": handle,
        "stop_token_ids": tuple(rng.randrange(32) for _ in range(2)) if rng.random() < 0.6 else (),
        "forks": tuple(Fork(handle + n, handle + n) for n in range(1, rng.choice([1, 1, 2, 4]))),
        "priority": rng.choice([0, 0, 0, 1]),
    }
    if rng.random() < 0.04:
        params |= rng.choice([{"num_logprobs": 2}, {"min_tokens": 1}, {"frequency_penalty": 0.5}])
    return prompt, params


def draw_requests(rng: random.Random) -> dict[int, tuple[list[int], dict[str, Any]]]:
    """Return 40 random requests, by handle, many of which begin alike."""
    beginnings = [[rng.randrange(32) for _ in range(20)] for _ in range(3)]
    return {handle: draw_request(rng, handle, beginnings) for handle in range(0, 160, 4)}


def test_a_step_says_how_many_prompt_tokens_it_has_computed_once_its_tokens_are_known(make_overlapping: Any) -> None:
    driver, _ = make_overlapping(EngineConfig(model="none", max_num_batched_tokens=8))
    driver.add(1, [1] * 20, max_tokens=3)
    assert [driver.step().num_prefill_tokens for _ in range(6)] == [0, 8, 8, 4, 0, 0]


@pytest.mark.parametrize("seed", range(25))
def test_random_requests_get_the_synchronous_cores_tokens(
    seed: int, make_driver: MakeDriver, make_hashing_runner: Any, make_overlapping: Any
) -> None:
    rng = random.Random(seed)
    requests = draw_requests(rng)
    plain = make_driver(CROWDED, make_hashing_runner())
    for handle, (prompt, params) in requests.items():
        plain.add(handle, prompt, **params)
    plain.run()

    driver, device = make_overlapping(CROWDED, make_hashing_runner(num_blocks=20))
    device.rng = rng
    aborted: set[int] = set()
    for handle, (prompt, params) in requests.items():
        driver.add(handle, prompt, **params)
        for _ in range(rng.choice([0, 1, 1, 3])):
            driver.step()
            if rng.random() < 0.1:
                victims = set(rng.sample(range(handle + 4), 2))
                driver.core.abort(victims)
                aborted |= victims - set(driver.finishes)
    driver.run()

    assert driver.is_idle_and_empty()
    assert driver.failures == {}
    assert set(driver.finishes) | aborted >= set(plain.finishes)
    for handle, tokens in plain.tokens.items():
        if handle in aborted:
            assert driver.tokens.get(handle, []) == tokens[: len(driver.tokens.get(handle, []))]
            assert handle not in driver.finishes
        else:
            assert driver.tokens[handle] == tokens
            assert driver.finishes[handle] == plain.finishes[handle]
    assert device.most_waiting == 2
    assert driver.core.idle_step().num_preemptions > 0


def fail_some_rows(runner: Any, modulus: int) -> Any:
    """Make some logits NaN, the same ones in whichever step and batch they come."""
    good_forward = runner.forward

    def forward(batch: Batch) -> Any:
        logits, rows = good_forward(batch), batch.last_rows
        logits[(batch.token_ids[rows] * 7 + batch.positions[rows]) % modulus == 0] = float("nan")
        return logits

    runner.forward = forward
    return runner


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_fail_at_random_fail_as_in_the_synchronous_core_and_nobody_else_notices(
    seed: int, make_driver: MakeDriver, make_hashing_runner: Any, make_overlapping: Any
) -> None:
    rng = random.Random(seed)
    requests = draw_requests(rng)
    plain = make_driver(CROWDED, fail_some_rows(make_hashing_runner(), 61))
    driver, device = make_overlapping(CROWDED, fail_some_rows(make_hashing_runner(num_blocks=20), 61))
    device.rng = rng
    for each in (plain, driver):
        for handle, (prompt, params) in requests.items():
            each.add(handle, prompt, **params)
            each.step()
        each.run()
    assert driver.tokens == plain.tokens
    assert driver.finishes == plain.finishes
    assert driver.failures == plain.failures
    assert driver.failures
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.is_idle_and_empty()


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(make_overlapping: Any) -> None:
    driver, device = make_overlapping()
    driver.add(1, [1], max_tokens=3)
    assert driver.core.step() is None
    driver.core.after_step()
    (first,) = device.launches
    step = driver.core.step()
    assert len(device.launches) == 2
    assert step is not None
    assert step.handles.tolist() == [1]
    assert device.launches[1].batch.sources.tolist() == [0]  # its input is the first step's first row's
    assert first.result is not None


def test_a_known_end_wastes_nothing_and_a_stop_one_row_whose_token_nobody_sees(
    make_overlapping: Any, fake_runner: Any
) -> None:
    driver, device = make_overlapping(runner=fake_runner)
    driver.add(1, [1], max_tokens=5)
    driver.run()
    assert driver.tokens[1] == [2, 3, 4, 5, 6]
    assert len(device.launches) == 5
    driver.add(2, [1], max_tokens=50, stop_token_ids=(4,))
    driver.run()
    assert driver.tokens[2] == [2, 3, 4]
    assert driver.finishes[2] == (FinishReason.STOP, 4)
    assert len(device.launches) == 5 + 3 + 1
    assert driver.is_idle_and_empty()


def test_what_a_thrown_away_row_computes_is_not_registered(make_overlapping: Any, fake_runner: Any) -> None:
    driver, _ = make_overlapping(runner=fake_runner)  # blocks of 4
    driver.add(1, [1], max_tokens=50, stop_token_ids=(4,))  # 1 2 3 | 4: the row thrown away would fill the block
    driver.run()
    driver.add(2, [1, 2, 3, 4, 5], max_tokens=1)
    driver.run()
    assert driver.core.idle_step().num_blocks_used == 0
    assert driver.core.stats()["num_hit_tokens"] == 0


def test_an_aborted_requests_row_in_flight_is_thrown_away(make_overlapping: Any) -> None:
    driver, _ = make_overlapping()
    driver.add(1, [1], max_tokens=9)
    driver.add(2, [2], max_tokens=9)
    driver.step()
    driver.step()
    driver.core.abort([1])
    driver.run()
    assert len(driver.tokens[1]) == 1
    assert len(driver.tokens[2]) == 9
    assert driver.is_idle_and_empty()


def test_an_abort_of_all_leaves_a_step_to_finish_and_then_nothing(make_overlapping: Any) -> None:
    driver, _ = make_overlapping()
    driver.add(1, [1])
    driver.step()
    driver.core.abort([1])
    assert driver.core.has_work
    assert driver.step().handles.size == 0
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("params", [{"num_logprobs": 1}, {"presence_penalty": 1.0}, {"allowed_token_ids": (1, 2)}])
def test_a_request_that_needs_the_host_makes_every_step_wait_while_it_lives(
    params: dict[str, Any], make_overlapping: Any
) -> None:
    driver, device = make_overlapping()
    driver.add(1, [1], max_tokens=20)
    for _ in range(3):
        driver.step()
    num_launched = len(device.launches)
    driver.add(2, [2], max_tokens=4, **params)
    while 2 not in driver.finishes:
        driver.step()
    assert len(device.launches) == num_launched
    driver.run()
    assert len(device.launches) > num_launched
    assert len(driver.tokens[1]) == 20


def test_a_fork_needs_the_host_though_its_first_sequence_is_gone(make_overlapping: Any) -> None:
    driver, device = make_overlapping()
    driver.add(1, [1], max_tokens=4, presence_penalty=1.0, forks=(Fork(2, 0),))
    driver.step()
    driver.core.abort([1])
    driver.run()
    assert len(driver.tokens[2]) == 4
    assert device.launches == []


def test_time_in_which_two_steps_are_in_flight_is_counted_once(
    make_overlapping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("ringserve.engine.core.overlap.time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    driver, _ = make_overlapping()
    driver.add(1, [1], max_tokens=20)
    driver.run()
    assert 0 < driver.core.stats()["forward_ns"] < next(clock)


def test_a_step_that_cannot_be_launched_fails_its_requests_and_the_engine_lives(
    make_overlapping: Any, hashed_tokens: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver, device = make_overlapping()
    driver.add(1, [1])
    driver.step()
    device.refuses = RuntimeError("no memory")
    driver.step()
    assert driver.failures == {1: "the forward failed: no memory"}
    device.refuses = None
    driver.add(2, [2], max_tokens=4)
    driver.run()
    assert driver.tokens[2] == hashed_tokens([2], 4)
    assert driver.is_idle_and_empty()


def test_a_step_that_fails_in_flight_takes_the_next_one_with_it(
    make_overlapping: Any, make_hashing_runner: Any, hashed_tokens: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_hashing_runner()
    driver, device = make_overlapping(runner=runner)
    device.rng = random.Random(1)
    device.rng.random = lambda: 1.0  # type: ignore[method-assign]  # only when it is waited for
    driver.add(1, [1])
    driver.step()
    driver.add(2, [2])  # joins the step after
    runner.raises = RuntimeError("device lost")
    driver.step()
    assert sorted(driver.failures) == [1, 2]
    runner.raises = None
    driver.add(3, [3], max_tokens=4)
    driver.run()
    assert driver.tokens[3] == hashed_tokens([3], 4)
    assert driver.is_idle_and_empty()


def test_a_row_without_a_token_fails_alone(make_overlapping: Any, fake_runner: Any) -> None:
    good_forward = fake_runner.forward

    def forward(batch: Batch) -> Any:
        logits = good_forward(batch)
        logits[batch.token_ids[batch.last_rows] == 5, 17] = float("nan")
        return logits

    fake_runner.forward = forward
    driver, _ = make_overlapping(runner=fake_runner)
    driver.add(1, [1], max_tokens=8)
    driver.add(2, [10], max_tokens=8)
    driver.run()
    assert driver.tokens == {1: [2, 3, 4, 5], 2: [11, 12, 13, 14, 15, 16, 17, 18]}
    assert "not finite" in driver.failures[1]
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("is_real", [False, True])
def test_a_row_whose_sampling_raises_fails_alone_and_nobody_else_notices(
    is_real: bool,
    tiny_model: Callable[[str], Any],
    make_driver: MakeDriver,
    make_overlapping: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = tiny_model("llama")
    plain = make_driver(tiny.config()) if is_real else make_overlapping()[0]
    driver = make_driver(tiny.config(overlap="on")) if is_real else make_overlapping()[0]
    for each in (plain, driver):
        each.add(1, [1, 2], max_tokens=9, temperature=1.5, seed=1)
        each.add(2, [3], max_tokens=9, temperature=1.5, seed=2, top_p=0.9)
        each.add(3, [4], max_tokens=9)
    plain.run()

    def draw_keys(seeds: Any, indexes: Any) -> Any:
        if ((seeds == 66) & (indexes == 3)).any():
            raise ArithmeticError("no luck")
        return engine_rng.draw_keys(seeds, indexes)

    monkeypatch.setattr("ringserve.engine.sampling.sampler.draw_keys", draw_keys)
    driver.add(4, [5], max_tokens=9, temperature=1.5, seed=66, forks=(Fork(5, 67),))
    driver.run()
    assert driver.failures == {4: "sampling failed: no luck"}
    assert len(driver.tokens.pop(4)) == 3
    assert len(driver.tokens.pop(5)) == 9
    assert driver.tokens == plain.tokens
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_real_model_on_the_real_device_gives_the_synchronous_cores_tokens(
    name: str, tiny_model: Callable[[str], Any], make_driver: MakeDriver
) -> None:
    tiny, small = tiny_model(name), {"block_size": 4, "kv_cache_tokens": 96, "max_num_batched_tokens": 16}
    rng = np.random.default_rng(3)
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 1, "forks": (Fork(11, 5),)},
        {"temperature": 2.0, "seed": 2, "top_p": 0.9},
        {"temperature": 2.0, "seed": 3, "top_k": 7, "min_p": 0.01},
    ]
    requests = [(rng.integers(0, 300, 3 + 5 * n).tolist(), params) for n, params in enumerate(samplings)]
    plain, driver = make_driver(tiny.config(**small)), make_driver(tiny.config(overlap="on", **small))
    assert isinstance(driver.core, OverlappingCore)
    for each in (plain, driver):
        for handle, (prompt, params) in enumerate(requests):
            each.add(handle, prompt, max_tokens=30, **params)
            each.step()
        each.run()
    assert driver.tokens == plain.tokens
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.is_idle_and_empty()
