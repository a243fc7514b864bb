from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.sampler import Filters, sample, scale_, shortlists
from shm_transport.messages import AddRequest

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
    for rows, token_ids, weights in shortlists(scale_(torch.from_numpy(logits.copy())[None], filters), filters):
        for row in range(len(rows)):
            found |= set(token_ids[row][weights[row] > 0].tolist())
    return found


@settings(max_examples=200, deadline=None)
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


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.999999}])
def test_no_number_selects_a_token_without_probability(
    number: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampler.uniforms", lambda seeds, _indexes: np.full(len(seeds), number))
    logits = torch.full((1, 400), float("-inf"))
    logits[0, 150:153] = torch.tensor([1.0, 0.0, -1.0])
    assert sample(logits, [request(temperature=1.0, **params)]).token_ids[0] in (150, 151, 152)


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
