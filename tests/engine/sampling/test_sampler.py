from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ringserve.engine.sampling.sampler import Filters, sample, shortlists
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest, Fork

CPU = torch.device("cpu")


def request(index: int = 0, handle: int = 1, **params: Any) -> Request:
    add = AddRequest(handle=handle, prompt_token_ids=np.ones(1, np.int32), max_tokens=10, **params)
    return Request(add, queued_ns=0, output_token_ids=[0] * index)


def draws(logits: np.ndarray, count: int, **params: Any) -> Counter[int]:
    """Sample `count` output indexes of one request, all in one batch."""
    rows = torch.from_numpy(np.tile(logits.astype(np.float32), (count, 1)))
    # Not request(index): lists of that length would be slow.
    requests = [request(seed=seed, **params) for seed in range(count)]
    return Counter(sample(rows, requests).token_ids.tolist())


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def naive_support(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[set[int], bool]:
    """Sort everything, filter by the book: temperature, min_p, top_k, top_p; and whether rounding decides top_p."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    order = np.argsort(-scaled, kind="stable")
    kept = [int(i) for i in order if min_p == 0 or scaled[i] >= np.log(np.float32(min_p))]
    kept = kept[:top_k] if top_k > 0 else kept
    weights = np.exp(scaled[kept]).astype(np.float64)
    before = np.cumsum(weights) - weights
    is_close = top_p < 1 and bool(np.abs(before / weights.sum() - top_p).min() < 1e-6)
    is_kept = (weights > 0) & ((before < top_p * weights.sum()) | (top_p >= 1))
    return set(np.array(kept)[is_kept].tolist()), is_close


def support(logits: np.ndarray, **params: Any) -> set[int]:
    filters = Filters.of([request(**params).params], len(logits), CPU)
    found: set[int] = set()
    for rows, token_ids, weights in shortlists(torch.from_numpy(logits)[None], filters):
        for row in range(len(rows)):
            found |= set(token_ids[row][weights[row] > 0].tolist())
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([2, 7, 128, 129, 300, 1500]),
    spread=st.sampled_from([0.0, 0.05, 1.0, 8.0]),
    steps=st.sampled_from([0.0, 0.25]),  # many equal logits
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 50, 127, 128, 129, 400, 5000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.03, 0.5, 1.0]),
)
def test_supports_equal_the_naive_reference(
    seed: int, size: int, spread: float, steps: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    if steps:
        logits = np.round(logits / np.float32(steps)) * np.float32(steps)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected, is_close = naive_support(logits, **params)
    assume(not is_close or top_p < 1e-6)  # a tiny top_p is close to the first one's 0, and keeps it alone
    assert support(logits, **params) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("size", [20, 500])
def test_draws_follow_the_filtered_distribution(params: dict[str, float], size: int) -> None:
    logits = np.random.default_rng(3).standard_normal(size).astype(np.float32) * 2
    kept = sorted(naive_support(logits, **params)[0])  # type: ignore[arg-type]
    expected = softmax(logits[kept].astype(np.float64) / params["temperature"])
    count = 4000
    counts = draws(logits, count, **params)
    assert set(counts) <= set(kept)
    observed = np.array([counts[token_id] for token_id in kept])
    common = expected * count >= 5
    chi_square = ((observed - expected * count)[common] ** 2 / (expected * count)[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([30, 500]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    top_k=st.sampled_from([0, 1, 7, 200]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
)
def test_candidates_and_their_weights_are_those_of_transformers_warpers(
    seed: int, size: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    warpers = [
        (min_p > 0, MinPLogitsWarper, min_p),
        (top_k > 0, TopKLogitsWarper, top_k),
        (top_p < 1, TopPLogitsWarper, top_p),
    ]
    for is_on, warper, value in warpers:
        expected = warper(value)(None, expected) if is_on else expected
    params = request(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p).params
    filters = Filters.of([params], size, CPU)
    got = torch.zeros(size, dtype=torch.float64)
    for rows, token_ids, weights in shortlists(logits[None], filters):
        if len(rows):
            got[token_ids[0]] = weights[0]
    torch.testing.assert_close(got / got.sum(), expected[0].double().softmax(0), atol=1e-6, rtol=1e-4)


def test_successive_output_indexes_of_one_request_draw_anew() -> None:
    logits = torch.zeros(200, 4)
    requests = [request(index, temperature=1.0, seed=5) for index in range(200)]
    counts = Counter(sample(logits, requests).token_ids.tolist())
    assert len(counts) == 4
    assert min(counts.values()) > 25


def test_a_draw_does_not_depend_on_batch_mates() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 200},
        {"temperature": 1.3, "top_p": 0.99},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.3, "top_k": 7},
    ]
    together = sample(logits.clone(), [request(row, seed=row, **p) for row, p in enumerate(params)]).token_ids
    for row, p in enumerate(params):
        assert sample(logits[row : row + 1].clone(), [request(row, seed=row, **p)]).token_ids[0] == together[row]


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((4, 9.0), (5, -9.0))},
    {"temperature": 1.0, "allowed_token_ids": (3, 4, 5, 900), "top_k": 3},
    {"temperature": 2.0, "bad_token_ids": tuple(range(500)), "top_p": 0.9},
    {"temperature": 1.0, "min_tokens": 9, "eos_token_id": 3, "stop_token_ids": (8,), "min_p": 0.1},
    {"temperature": 1.0, "num_logprobs": 3, "logit_bias": ((7, 3.0),), "repetition_penalty": 0.5},
]


@pytest.mark.parametrize("params", RULES)
def test_a_feature_and_mates_without_it_do_not_touch_each_other(params: dict[str, Any]) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(6))
    mates = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        params,
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
    ]
    together = sample(logits.clone(), [request(3, seed=row, **own) for row, own in enumerate(mates)])
    for row, own in enumerate(mates):
        alone = sample(logits[row : row + 1].clone(), [request(3, seed=row, **own)])
        assert alone.token_ids[0] == together.token_ids[row]
        if alone.logprobs is not None:
            assert together.logprobs is not None
            np.testing.assert_array_equal(alone.logprobs.token_ids, together.logprobs.token_ids)
            np.testing.assert_allclose(alone.logprobs.logprobs, together.logprobs.logprobs, rtol=1e-6)


def test_draws_follow_the_distribution_that_rules_leave() -> None:
    logits = np.random.default_rng(8).standard_normal(30).astype(np.float32)
    biased = logits.astype(np.float64)
    biased[2] += 2.0
    biased[0] = -np.inf
    expected = softmax(biased)
    count = 4000
    counts = draws(logits, count, logit_bias=((2, 2.0),), bad_token_ids=(0,))
    assert counts[0] == 0
    observed = np.array([counts[token_id] for token_id in range(30)])
    common = expected * count >= 5
    chi_square = ((observed - expected * count)[common] ** 2 / (expected * count)[common]).sum()
    freedom = common.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_row_that_is_not_finite_fails_alone(value: float, params: dict[str, float]) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    requests = [request(handle=row, seed=row, **params) for row in range(3)]
    expected = sample(logits.clone(), requests).token_ids
    logits[1, 77] = value
    samples = sample(logits, requests)
    assert samples.token_ids.tolist() == expected[[0, 2]].tolist()
    assert list(samples.failures) == [1]
    assert "not finite" in samples.failures[1]


def test_forks_draw_by_their_own_seeds() -> None:
    add = AddRequest(
        handle=0, prompt_token_ids=np.ones(1, np.int32), max_tokens=9, seed=10,
        forks=tuple(Fork(handle, 10 + handle) for handle in range(1, 9)),
    )  # fmt: skip
    first = Request(add, queued_ns=0)
    row = torch.randn(1, 500, generator=torch.Generator().manual_seed(3))
    together = sample(row.repeat(9, 1), [first, *first.forks]).token_ids
    alone = [sample(row.clone(), [request(seed=seed)]).token_ids[0] for seed in range(10, 19)]
    assert together.tolist() == alone
    assert len(set(alone)) > 5


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.999999}])
def test_no_token_without_probability_is_drawn(params: dict[str, Any]) -> None:
    logits = torch.full((300, 400), float("-inf"))
    logits[:, 150:153] = torch.tensor([1.0, 0.0, -1.0])
    token_ids = sample(logits, [request(temperature=1.0, seed=seed, **params) for seed in range(300)]).token_ids
    assert set(token_ids.tolist()) == {150, 151, 152}


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"temperature": 3.0}])
def test_the_last_bits_of_the_logits_change_no_draw(params: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(4)
    requests = [request(seed=seed, **{"temperature": 1.0, **params}) for seed in range(400)]
    logits = torch.randn(400, 20_000, generator=random) * 3
    roundings = torch.randn(400, 20_000, generator=random) * 1e-5  # of a running sum, they change some of 400 draws
    changed = sample(logits + roundings, requests).token_ids
    assert changed.tolist() == sample(logits, requests).token_ids.tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 50)
    logits[:, [7, 30]] = 2.0
    samples = sample(logits, [request(temperature=0.0), request(temperature=1e-6, top_p=0.5, top_k=9)])
    assert samples.token_ids.tolist() == [7, 7]


def test_a_tiny_temperature_is_the_greedy_choice() -> None:
    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(2)) * 30
    best = logits.argmax(1).tolist()
    for params in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
        requests = [request(temperature=1e-4, seed=row, **params) for row in range(5)]
        assert sample(logits.clone(), requests).token_ids.tolist() == best


def test_a_batch_of_nobody_is_fine() -> None:
    samples = sample(torch.empty(0, 10), [])
    assert samples.token_ids.tolist() == []
    assert samples.failures == {}
