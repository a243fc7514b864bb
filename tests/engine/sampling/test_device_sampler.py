import random
from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.sampling.device_sampler import sample_on_device
from ringserve.engine.sampling.sampler import sample
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest


def draw_request(rng: random.Random, handle: int) -> Request:
    add = AddRequest(
        handle=handle, prompt_token_ids=np.zeros(1, np.int32), max_tokens=9, seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]), top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        top_k=rng.choice([0, 0, 1, 5, 50, 700]), min_p=rng.choice([0.0, 0.0, 0.05]),
    )  # fmt: skip
    return Request(add, queued_ns=0, output_token_ids=[0] * rng.randint(0, 5))


@pytest.mark.parametrize("vocab_size", [40, 3000, 49_152])
def test_tokens_are_those_of_the_sampler_that_looks_at_the_host(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    torch.manual_seed(0)
    for _ in range(8):
        requests = [draw_request(rng, handle) for handle in range(rng.randint(1, 9))]
        logits = (torch.randn(len(requests), vocab_size) * 3).bfloat16().float()  # coarse, so that there are equals
        found = sample_on_device(logits.clone(), requests)
        assert found.token_ids.tolist() == sample(logits.clone(), requests).token_ids.tolist()
        assert torch.equal(found.best, logits.amax(dim=1))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_everywhere", [False, True])
def test_a_row_that_is_not_finite_draws_a_token_of_the_vocabulary(
    params: dict[str, float], value: float, is_everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(
        "ringserve.engine.sampling.device_sampler._sample_each"
    )  # a GPU does not raise: it would fail for good
    logits = torch.randn(2, 300)
    logits[1, slice(None) if is_everywhere else 17] = value
    prompt: Any = {"prompt_token_ids": np.zeros(1, np.int32), "max_tokens": 9, "temperature": 1.0}
    requests = [Request(AddRequest(handle=n, **prompt, **params), queued_ns=0) for n in range(2)]
    wanted = sample(logits[:1].clone(), requests[:1]).token_ids[0]
    found = sample_on_device(logits, requests)
    assert found.token_ids[0] == wanted
    assert 0 <= found.token_ids[1] < 300  # the next step reads its embedding before anybody knows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_shows_and_leaves_its_mates_alone(value: float) -> None:
    requests = [draw_request(random.Random(n), n) for n in range(4)]
    logits = torch.randn(4, 300)
    wanted = sample(logits.clone(), requests).token_ids
    logits[2, 17] = value
    found = sample_on_device(logits, requests)
    assert found.best.isfinite().tolist() == [True, True, False, True]
    assert found.token_ids[[0, 1, 3]].tolist() == wanted[[0, 1, 3]].tolist()
