import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ringserve.engine.config import EngineConfig
from ringserve.engine.interface import RequestFailedError
from ringserve.engine.sampling import penalties
from ringserve.engine.sampling.penalties import PenaltyCounts
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.records import FinishReason, Pooling

TinyModels = Callable[[str], Any]
MakeDriver = Callable[..., Any]
ARCHITECTURES = ("llama", "qwen2", "gpt2", "gemma2", "mistral", "gpt_oss")


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate_in_a_batch_of_mixed_lengths(
    name: str, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config())
    wanted = {}
    for handle, prompt in enumerate(prompts(1, (5, 23, 1, 40))):
        wanted[handle] = tiny.generate(prompt, 8 + 6 * handle)  # they end at different steps
        driver.add(handle, prompt, max_tokens=8 + 6 * handle)
    driver.run()
    assert driver.tokens == wanted
    assert len(set().union(*wanted.values())) > 10  # the models are not stuck on a token
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate_alone(name: str, tiny_model: TinyModels, make_driver: MakeDriver) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config(max_num_seqs=1))
    for handle, prompt in enumerate(prompts(2, (3, 30))):  # one seat: the second runs after the first
        driver.add(handle, prompt)
        assert driver.core.limits()["max_model_len"] == 96
    driver.run()
    assert driver.tokens == {n: tiny.generate(prompt, 16) for n, prompt in enumerate(prompts(2, (3, 30)))}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate_in_chunks_from_the_prefix_cache_and_after_preemption(
    name: str, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model(name)
    driver = make_driver(tiny.config(block_size=4, kv_cache_tokens=96, max_num_batched_tokens=16))
    (beginning,) = prompts(7, (21,))
    for handle, end in enumerate(prompts(8, (1, 15, 19, 6))):
        driver.add(handle, [*beginning, *end], max_tokens=30)
        for _ in range(4):
            driver.step()
    driver.run()
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.core.stats()["num_hit_tokens"] >= 3 * 20
    ends = prompts(8, (1, 15, 19, 6))
    assert driver.tokens == {n: tiny.generate([*beginning, *end], 30) for n, end in enumerate(ends)}
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("settings", [{"runner": "fused"}, {"runner": "hf"}, {"deterministic": True}])
@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_a_failed_request_has_left_in_its_blocks_reaches_nobody(
    left: float, settings: dict[str, Any], tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    driver = make_driver(tiny.config(block_size=4, kv_cache_tokens=120, max_num_batched_tokens=16, **settings))
    cache = driver.core._runner._cache
    for tensor in (*cache._keys.values(), *cache._values.values()):
        tensor[:, 1:] = left  # all but the padding block, which is nobody's
    wanted = {}
    for handle, prompt in enumerate(prompts(5, (5, 23, 1, 20, 8))):
        wanted[handle] = tiny.generate(prompt, 14)
        driver.add(handle, prompt, max_tokens=14, forks=(Fork(handle + 10, 0),) if handle in (0, 4) else ())
        driver.step()
    driver.run()
    assert driver.failures == {}
    assert driver.tokens == wanted | {10: wanted[0], 14: wanted[4]}
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("join_after", [0, 1, 2, 5, 9])
def test_a_late_joiner_and_those_it_joins_get_what_they_get_alone(
    join_after: int, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    driver = make_driver(tiny.config())
    first, second, late = prompts(3, (12, 4, 19))
    driver.add(0, first, max_tokens=20)
    driver.add(1, second, max_tokens=7)  # gone before the latest joiner comes
    for _ in range(join_after):
        driver.step()
    driver.add(2, late, max_tokens=11)
    driver.step()
    assert driver.core.idle_step().num_running == 3 - (join_after > 7)  # it joins at the very next step
    driver.run()
    assert driver.tokens == {
        0: tiny.generate(first, 20),
        1: tiny.generate(second, 7),
        2: tiny.generate(late, 11),
    }


@pytest.mark.parametrize("seed", range(3))
def test_random_joins_and_aborts_over_reused_cache_slots_change_nobodys_tokens(
    seed: int, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    driver = make_driver(tiny.config(max_num_seqs=4, max_num_batched_tokens=20, kv_cache_tokens=150))
    rng = random.Random(seed)
    added: dict[int, tuple[list[int], int]] = {}
    for handle in range(60):
        if rng.random() < 0.4:
            prompt = [rng.randrange(300) for _ in range(rng.randint(1, 30))]
            added[handle] = prompt, rng.randint(1, 20)
            driver.add(handle, prompt, max_tokens=added[handle][1])
        elif rng.random() < 0.1 and added:
            driver.core.abort([rng.choice(list(added))])
        driver.step()
    driver.run()
    assert driver.is_idle_and_empty()
    for handle, got in driver.tokens.items():
        prompt, max_tokens = added[handle]
        assert got == tiny.generate(prompt, max_tokens)[: len(got)]
        assert (handle in driver.finishes) == (len(got) == max_tokens)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 3.0, "seed": 11},
    {"temperature": 3.0, "seed": 12, "top_k": 40},
    {"temperature": 2.5, "seed": 13, "top_p": 0.9},
    {"temperature": 3.0, "seed": 2**64 - 1, "min_p": 0.01},
    {"temperature": 2.0, "seed": 14, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_seeded_requests_get_the_same_tokens_alone_and_in_a_batch_and_after_preemption(
    is_preempted: bool, tiny_model: TinyModels, make_driver: MakeDriver
) -> None:
    tiny = tiny_model("llama")
    small = {"block_size": 4, "kv_cache_tokens": 48, "max_model_len": 48, "max_num_batched_tokens": 16}
    batch = make_driver(tiny.config(**(small if is_preempted else {})))
    requests = list(zip(prompts(4, (6, 9, 2, 14, 7, 7)), SAMPLINGS, strict=True))
    for handle, (prompt, chosen) in enumerate(requests):
        batch.add(handle, prompt, **chosen)
    batch.run()
    assert (batch.core.idle_step().num_preemptions > 0) == is_preempted
    for handle, (prompt, chosen) in enumerate(requests):
        alone = make_driver(tiny.config(max_num_seqs=1))
        alone.add(handle, prompt, **chosen)
        alone.run()
        assert alone.tokens[handle] == batch.tokens[handle]


def test_default_model_in_fp32_equals_generate(make_driver: MakeDriver) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ringserve.engine.weights.default_model import default_model_directory

    path = default_model_directory()
    if not path.is_dir():
        pytest.skip("the default model is not in the cache: run `ringserve pull`")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = ("The capital of France is", "Once upon a time", "def add(a, b):\n    return")
    driver = make_driver(EngineConfig(model=str(path), dtype="float32", device="cpu", max_model_len=256, num_threads=1))
    wanted = {}
    for handle, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted[handle] = out[0, ids["input_ids"].shape[1] :].tolist()
        driver.add(handle, ids["input_ids"][0].tolist(), max_tokens=6)
        driver.step()  # each joins one step later
    driver.run()
    assert driver.tokens == wanted


def test_eos_ends_with_stop_and_no_token_id(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(7, [1], eos_token_id=5, stop_token_ids=(5,))
    driver.run()
    assert driver.tokens[7] == [2, 3, 4, 5]
    assert driver.finishes[7] == (FinishReason.STOP, -1)


def test_stop_token_ends_with_stop_and_its_id(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(7, [1], eos_token_id=9, stop_token_ids=(8, 4), max_tokens=3)  # the length is reached at the same token
    driver.run()
    assert driver.tokens[7] == [2, 3, 4]
    assert driver.finishes[7] == (FinishReason.STOP, 4)


def test_without_an_eos_only_the_length_ends(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(7, [1], eos_token_id=-1, max_tokens=6)
    driver.run()
    assert driver.tokens[7] == [2, 3, 4, 5, 6, 7]
    assert driver.finishes[7] == (FinishReason.LENGTH, -1)


def test_a_full_context_ends_with_length(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(7, [1] * 60, max_tokens=1000)
    driver.run()
    assert len(driver.tokens[7]) == 4
    assert driver.finishes[7] == (FinishReason.LENGTH, -1)


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_min_tokens_keeps_eos_and_stop_tokens_from_being_sampled(
    temperature: float, make_driver: MakeDriver, fake_runner: Any
) -> None:
    driver = make_driver(runner=fake_runner)
    ends = {"eos_token_id": 4, "stop_token_ids": (3, 99)}  # 99 is outside of the vocabulary: no matter
    driver.add(7, [1], **ends, min_tokens=3, temperature=temperature)
    driver.run()
    # After 2 comes 3, which is masked: 2 is as likely as 4, which is masked too. Then the mask is off.
    assert driver.tokens[7][:3] == [2, 2, 2]
    assert driver.tokens[7][3:] == [3]
    assert driver.finishes[7] == (FinishReason.STOP, 3)


def test_first_rows_carry_stamps_once(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(1, [1])
    first = driver.step()
    driver.add(2, [1])
    second = driver.step()
    third = driver.step()
    assert first.first is not None
    assert 0 < first.first.queued_ns[0] <= first.first.first_scheduled_ns[0] == first.scheduled_ns
    assert second.first is not None
    assert second.first.queued_ns[second.handles.tolist().index(1)] == 0
    assert second.first.first_scheduled_ns[second.handles.tolist().index(2)] == second.scheduled_ns
    assert third.first is None
    assert third.finish_reasons is None
    assert first.scheduled_ns <= first.forward_done_ns


def test_figures_count_those_who_hold_seats_after_the_step(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    for handle in range(5):  # four seats
        driver.add(handle, [1, 2], max_tokens=2)
    step = driver.step()
    assert (step.num_running, step.num_waiting, step.num_blocks_used, step.num_blocks) == (4, 1, 4, 256)
    step = driver.step()
    assert (step.num_running, step.num_waiting) == (0, 1)
    assert driver.core.idle_step().num_blocks_used == 0  # they were freed once the record was out
    driver.step()
    step = driver.step()
    assert (step.num_running, step.num_waiting, step.num_blocks_used) == (0, 0, 0)  # the last record says so
    assert driver.is_idle_and_empty()


def test_abort_frees_cache_and_seat_and_lets_a_waiting_one_in(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    for handle in range(6):
        driver.add(handle, [1], max_tokens=30)
    driver.step()
    driver.core.abort([1, 4, 999])  # one running, one waiting, one unknown
    figures = driver.core.idle_step()
    assert (figures.num_running, figures.num_waiting, figures.num_blocks_used) == (3, 1, 3)
    assert sorted(driver.step().handles.tolist()) == [0, 2, 3, 5]
    driver.run()
    assert len(driver.tokens[1]) == 1
    assert 4 not in driver.tokens
    assert driver.is_idle_and_empty()


def test_a_full_cache_makes_requests_wait_and_never_fail(
    make_driver: MakeDriver, make_hashing_runner: Any, hashed_tokens: Any
) -> None:
    driver = make_driver(runner=make_hashing_runner(num_blocks=17))  # 64 tokens
    for handle in range(4):
        driver.add(handle, [handle] * 10, max_tokens=20)
    driver.run()
    assert driver.core.idle_step().num_preemptions > 0
    assert driver.tokens == {handle: hashed_tokens([handle] * 10, 20) for handle in range(4)}
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_one_request_alone(
    params: dict[str, float], value: float, make_driver: MakeDriver, fake_runner: Any
) -> None:
    good_forward = fake_runner.forward

    def forward(batch: Any) -> Any:
        logits = good_forward(batch)
        logits[batch.token_ids[batch.last_rows] == 3, 17] = value
        return logits

    fake_runner.forward = forward
    driver = make_driver(runner=fake_runner)
    driver.add(1, [10])
    driver.add(2, [3], num_logprobs=1, **params)
    driver.add(3, [15], num_logprobs=1)
    step = driver.step()
    assert step.handles.tolist() == [1, 3]
    assert step.logprobs is not None
    assert step.logprobs.num_entries.tolist() == [0, 2]
    assert list(driver.failures) == [2]
    assert "not finite" in driver.failures[2]
    driver.run()
    assert len(driver.tokens[1]) == len(driver.tokens[3]) == 16
    assert driver.is_idle_and_empty()


class Broken(PenaltyCounts):
    """Counts that raise once the output has two tokens, in the middle of the batch's rules."""

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        super().catch_up(output_token_ids)
        if len(output_token_ids) >= 2:
            raise ArithmeticError("counts are gone")


def break_counts_of(frequency_penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: AddRequest) -> PenaltyCounts:
        is_broken = params.frequency_penalty == frequency_penalty
        return Broken(params.prompt_token_ids[:0]) if is_broken else penalties.new_counts(params)

    monkeypatch.setattr("ringserve.engine.sampling.logit_rules.new_counts", make)


@pytest.mark.parametrize("mates_also_embed", [False, True])
def test_a_row_whose_sampling_raises_fails_alone_and_its_mates_get_the_tokens_they_get_without_it(
    mates_also_embed: bool,
    make_driver: MakeDriver,
    tiny_model: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mates: list[dict[str, Any]] = [
        {"temperature": 0.0, "num_logprobs": 3},
        {"temperature": 3.0, "seed": 5},
        {"temperature": 3.0, "seed": 6, "top_p": 0.9, "frequency_penalty": 2.0, "logit_bias": ((7, 30.0), (9, 30.0))},
        {"temperature": 3.0, "seed": 7, "presence_penalty": 1.5, "num_logprobs": 1, "forks": (Fork(13, 8),)},
    ]
    tiny = tiny_model("llama")
    alone, together = make_driver(tiny.config()), make_driver(tiny.config())
    for driver in (alone, together):
        for handle, params in enumerate(mates):
            driver.add(handle, [handle + 1] * 5, max_tokens=12, **params)
    break_counts_of(0.25, monkeypatch)
    together.add(20, [3], frequency_penalty=0.25, num_logprobs=2)
    if mates_also_embed:
        for _ in range(2):
            together.step()
        together.add(21, [4, 5], pooling=Pooling.MEAN, max_tokens=0)
    alone.run()
    steps = []
    while together.core.has_work:
        steps.append(together.step())
    assert together.failures == {20: "sampling failed: counts are gone"}
    assert len(together.tokens.pop(20)) == 2
    assert together.tokens == alone.tokens
    assert together.finishes == alone.finishes
    assert len(together.data) == mates_also_embed
    assert together.is_idle_and_empty()
    retried = steps[0 if mates_also_embed else 2]
    assert retried.handles.tolist() == [0, 1, 2, 3, 13]
    assert retried.logprobs is not None
    assert retried.logprobs.num_entries.tolist() == [4, 0, 0, 2, 2]
    assert len(retried.logprobs.token_ids) == len(retried.logprobs.logprobs) == 8
    assert (retried.logprobs.sampled_ranks > 0).tolist() == [True, False, False, True, True]


def test_sampling_that_fails_for_the_whole_batch_alone_fails_nobody(
    make_driver: MakeDriver, make_hashing_runner: Any, hashed_tokens: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def sample_few(logits: Any, requests: Sequence[Any]) -> Any:
        logits[:, 3] = 1e9  # spoils them
        raise MemoryError(f"{len(requests)} rows are too many")

    monkeypatch.setattr("ringserve.engine.core.core.sample", sample_few)
    driver = make_driver(runner=make_hashing_runner())
    for handle in range(3):
        driver.add(handle, [handle, 5], max_tokens=6)
    driver.run()
    assert driver.tokens == {handle: hashed_tokens([handle, 5], 6) for handle in range(3)}
    assert driver.failures == {}
    assert "3 rows are too many" in caplog.text


def test_a_forward_that_raises_fails_its_batch_and_the_engine_lives(
    make_driver: MakeDriver, fake_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(runner=fake_runner)
    for handle in range(5):
        driver.add(handle, [1])
    fake_runner.raises = RuntimeError("device lost")
    step = driver.step()
    assert step.handles.size == 0
    assert (step.num_running, step.num_waiting, step.num_blocks_used) == (0, 1, 0)
    assert sorted(driver.failures) == [0, 1, 2, 3]
    assert "device lost" in driver.failures[0]
    fake_runner.raises = None
    driver.run()
    assert driver.tokens[4] == list(range(2, 18))
    assert driver.core.take_failures() == []
    assert driver.is_idle_and_empty()


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens, max_model_len is 64"),
        ([1, 32], {}, "vocabulary from 0 to 31"),
        ([-1], {}, "vocabulary"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"num_logprobs": 21}, "num_logprobs is 21"),
        ([1], {"temperature": float("nan")}, "temperature nan"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(
    prompt: list[int], params: dict[str, Any], match: str, make_driver: MakeDriver, fake_runner: Any
) -> None:
    driver = make_driver(runner=fake_runner)
    with pytest.raises(RequestFailedError, match=match) as caught:
        driver.add(5, prompt, **params)
    assert caught.value.handle == 5
    assert driver.is_idle_and_empty()


def test_a_live_handle_is_refused_a_second_time(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(5, [1])
    with pytest.raises(RequestFailedError, match="in use"):
        driver.add(5, [1])
    driver.run()
    assert len(driver.tokens[5]) == 16


def test_first_rows_tell_of_cached_tokens_and_preemptions(make_driver: MakeDriver, make_hashing_runner: Any) -> None:
    driver = make_driver(runner=make_hashing_runner(num_blocks=17))
    prompt = list(range(20))
    driver.add(1, prompt)
    driver.step()
    driver.add(2, [*prompt, 1, 2])
    step = driver.step()
    assert step.first is not None
    row = step.handles.tolist().index(2)
    assert step.first.num_cached_tokens.tolist()[row] == 20
    assert step.first.num_cached_tokens.tolist()[1 - row] == 0
    assert step.first.num_preemptions.tolist() == [0, 0]


def test_bookkeeping_costs_are_counted_by_phase(make_driver: MakeDriver, fake_runner: Any) -> None:
    driver = make_driver(runner=fake_runner)
    driver.add(1, [1], max_tokens=5)
    before = driver.core.costs
    driver.run()
    costs = driver.core.costs
    assert (before.num_steps, costs.num_steps) == (0, 5)
    phases = (costs.schedule_ns, costs.pack_ns, costs.commit_ns, costs.publish_ns)
    assert min(phases) > 0
    assert costs.bookkeeping_ns == sum(phases)
    assert min(costs.forward_ns, costs.sample_ns, costs.settle_ns) > 0


def test_a_step_that_only_begins_a_prompt_has_no_rows(make_driver: MakeDriver, make_hashing_runner: Any) -> None:
    config = EngineConfig(model="none", max_num_seqs=4, max_num_batched_tokens=8)
    driver = make_driver(config, make_hashing_runner())
    driver.add(1, [1] * 20)
    sizes = [len(driver.step().handles) for _ in range(3)]
    assert sizes == [0, 0, 1]


def test_a_step_says_how_many_prompt_tokens_it_has_computed(make_driver: MakeDriver, make_hashing_runner: Any) -> None:
    driver = make_driver(EngineConfig(model="none", max_num_batched_tokens=8), make_hashing_runner())
    driver.add(1, [1] * 20, max_tokens=3)
    assert [driver.step().num_prefill_tokens for _ in range(5)] == [8, 8, 4, 0, 0]


def test_the_goals_of_the_configuration_set_what_prompts_get_of_a_step(
    make_driver: MakeDriver, make_hashing_runner: Any
) -> None:
    config = EngineConfig(model="none", target_gap_s=0.1, min_prefill_share=0.25)
    budget = make_driver(config, make_hashing_runner()).core.budget
    assert budget.tokens(num_decodes=1, num_prompts=1) == 16
    budget.note(num_decodes=0, num_tokens=200, elapsed_ns=100_000_000)
    assert budget.tokens(num_decodes=0, num_prompts=1) == 200


def test_forks_get_what_each_would_get_alone(make_driver: MakeDriver, make_hashing_runner: Any) -> None:
    prompt, sampling = list(range(10)), {"temperature": 1.0, "max_tokens": 12}
    together = make_driver(runner=make_hashing_runner())
    together.add(0, prompt, seed=40, forks=tuple(Fork(n, 40 + n) for n in (1, 2, 3)), **sampling)
    together.run()
    assert together.core.costs.num_steps == 12  # one prefill, then all at once
    for handle in range(4):
        alone = make_driver(runner=make_hashing_runner())
        alone.add(handle, prompt, seed=40 + handle, **sampling)
        alone.run()
        assert together.tokens[handle] == alone.tokens[handle]
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == 4
    assert together.is_idle_and_empty()


def test_a_failed_forward_ends_the_forks_that_wait_for_their_prompt_too(
    make_driver: MakeDriver, make_hashing_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_hashing_runner()
    driver = make_driver(EngineConfig(model="none", max_num_batched_tokens=4), runner)
    driver.add(1, [1] * 10, forks=(Fork(2, 1),))
    driver.step()
    runner.raises = RuntimeError("device lost")
    driver.step()
    assert sorted(driver.failures) == [1, 2]
    assert driver.is_idle_and_empty()
