from typing import Any

import numpy as np
import pytest
import torch

from engine.request import Request
from engine.sampler import sample
from shm_transport.messages import AddRequest


def _request(num_logprobs: int, **params: Any) -> Request:
    add = AddRequest(handle=1, prompt_token_ids=np.ones(1, np.int32), max_tokens=9, num_logprobs=num_logprobs, **params)
    return Request(add, queued_ns=0)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, 60, generator=torch.Generator().manual_seed(9)) * 3


def test_nobody_wants_any_then_there_are_none(logits: torch.Tensor) -> None:
    assert sample(logits, [_request(-1) for _ in range(4)]).logprobs is None


def test_columns_hold_the_sampled_token_then_the_most_likely_ones(logits: torch.Tensor) -> None:
    requests = [
        _request(3, temperature=5.0, seed=1),
        _request(-1, temperature=0.0),
        _request(0, temperature=0.0),
        _request(20, temperature=2.0, top_k=2, min_p=0.01, seed=4),
    ]
    expected = logits.log_softmax(1)
    samples = sample(logits.clone(), requests)
    columns = samples.logprobs
    assert columns is not None
    assert columns.num_entries.tolist() == [4, 0, 1, 21]
    assert (columns.num_entries.dtype, columns.token_ids.dtype) == (np.uint8, np.int32)
    assert (columns.logprobs.dtype, columns.sampled_ranks.dtype) == (np.float32, np.int32)
    offset = 0
    for row, length in enumerate(columns.num_entries.tolist()):
        ids = columns.token_ids[offset : offset + length].tolist()
        if length:
            order = expected[row].argsort(descending=True).tolist()
            assert ids == [samples.token_ids[row], *order[: length - 1]]
            assert columns.sampled_ranks[row] == order.index(samples.token_ids[row]) + 1
            np.testing.assert_allclose(
                columns.logprobs[offset : offset + length], expected[row, ids].numpy(), rtol=1e-5, atol=1e-5
            )
        offset += length
    assert offset == len(columns.token_ids) == len(columns.logprobs)


def test_logprobs_are_those_of_the_unmasked_logits(logits: torch.Tensor) -> None:
    best = int(logits[0].argmax())
    request = _request(1, temperature=0.0, eos_token_id=best, min_tokens=1)
    expected = logits[:1].log_softmax(1)
    samples = sample(logits[:1].clone(), [request])
    assert samples.token_ids[0] != best
    assert samples.logprobs is not None
    assert samples.logprobs.token_ids.tolist() == [samples.token_ids[0], best]
    assert samples.logprobs.sampled_ranks.tolist() == [2]
    np.testing.assert_allclose(samples.logprobs.logprobs[1], expected[0, best], rtol=1e-5)
