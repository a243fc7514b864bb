from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.sampling.logprobs import PromptLogprobs
from ringserve.engine.sampling.sampler import sample
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest
from ringserve.shm_transport.records import DataContent


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


def _prompt_logprobs(
    logits: torch.Tensor, prompt: np.ndarray[Any, Any], num_top: int, cuts: list[int]
) -> PromptLogprobs:
    add = AddRequest(handle=1, prompt_token_ids=prompt, max_tokens=9, num_prompt_logprobs=num_top)
    found = PromptLogprobs(add)
    for start, end in zip([0, *cuts], [*cuts, len(prompt) - 1], strict=True):
        found.extend(logits[start:end])
    assert found.num_rows == len(prompt) - 1
    return found


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 100, 180], [64, 128]])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_prompt_logprobs_are_those_of_a_log_softmax_however_the_prompt_is_cut(cuts: list[int], num_top: int) -> None:
    prompt = np.random.default_rng(2).integers(0, 60, 200).astype(np.int32)
    logits = torch.randn(199, 60, generator=torch.Generator().manual_seed(2)) * 3
    found = _prompt_logprobs(logits, prompt, num_top, cuts)
    expected = logits.double().log_softmax(1)
    order = expected.argsort(dim=1, descending=True)
    own = torch.from_numpy(prompt[1:].astype(np.int64))
    assert found.token_ids[:, 0].tolist() == prompt[1:].tolist()
    assert found.token_ids[:, 1:].tolist() == order[:, :num_top].tolist()
    assert found.ranks.tolist() == ((order == own[:, None]).nonzero()[:, 1] + 1).tolist()
    picked = expected.gather(1, torch.from_numpy(found.token_ids.astype(np.int64)))
    np.testing.assert_allclose(found.logprobs, picked.numpy(), rtol=1e-5, atol=1e-5)


def test_prompt_logprobs_travel_as_three_arrays() -> None:
    prompt = np.arange(4, dtype=np.int32)
    found = _prompt_logprobs(torch.zeros(3, 60), prompt, 2, [])
    messages = found.messages(7)
    assert [message.content for message in messages] == [
        DataContent.PROMPT_TOKEN_IDS, DataContent.PROMPT_LOGPROBS, DataContent.PROMPT_RANKS
    ]  # fmt: skip
    assert [message.array.shape for message in messages] == [(3, 3), (3, 3), (3,)]
    assert [str(message.array.dtype) for message in messages] == ["int32", "float32", "int32"]
    assert {message.handle for message in messages} == {7}
