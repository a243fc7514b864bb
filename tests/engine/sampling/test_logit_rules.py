from typing import Any

import numpy as np
import pytest
import torch

from ringserve.engine.sampling.logit_rules import NO_RULES, apply_rules_
from ringserve.engine.sampling.sampler import sample
from ringserve.engine.schedule.request import Request
from ringserve.shm_transport.messages import AddRequest, Fork

VOCAB = 40
INF = float("inf")


def request(output: list[int] | None = None, handle: int = 1, **params: Any) -> Request:
    settings = {"temperature": 0.0, **params}
    add = AddRequest(handle=handle, prompt_token_ids=np.array([3, 4], np.int32), max_tokens=10, **settings)
    return Request(add, queued_ns=0, output_token_ids=output or [])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5))


def edited(row: torch.Tensor, of: Request) -> torch.Tensor:
    result = row.clone()[None]
    apply_rules_(result, [of])
    return result[0]


def test_a_row_without_rules_is_left_as_it_is_and_looked_at_once(logits: torch.Tensor) -> None:
    plain = request(eos_token_id=3, stop_token_ids=(4,), top_k=5)
    assert edited(logits[0], plain).equal(logits[0])
    assert plain.logit_rules is NO_RULES


def test_only_allowed_tokens_are_left(logits: torch.Tensor) -> None:
    got = edited(logits[0], request(allowed_token_ids=(5, 7, 7, VOCAB, -1)))
    assert got.isfinite().nonzero().flatten().tolist() == [5, 7]
    assert got[[5, 7]].equal(logits[0, [5, 7]])


def test_bad_tokens_are_forbidden(logits: torch.Tensor) -> None:
    got = edited(logits[0], request(bad_token_ids=(0, 9, VOCAB + 3)))
    assert got.isinf().nonzero().flatten().tolist() == [0, 9]


def test_the_ends_are_forbidden_until_min_tokens_are_there(logits: torch.Tensor) -> None:
    params: dict[str, Any] = {"min_tokens": 2, "eos_token_id": 1, "stop_token_ids": (6, VOCAB)}
    one = request([8], **params)
    assert edited(logits[0], one).isinf().nonzero().flatten().tolist() == [1, 6]
    one.output_token_ids.append(9)
    assert edited(logits[0], one).equal(logits[0])


def test_biases_are_added_to_the_logits(logits: torch.Tensor) -> None:
    got = edited(logits[0], request(logit_bias=((2, 1.5), (VOCAB - 1, -100.0), (VOCAB, 3.0))))
    expected = logits[0].clone()
    expected[2] += 1.5
    expected[VOCAB - 1] -= 100.0
    assert got.equal(expected)


def test_a_bias_does_not_bring_back_what_is_forbidden(logits: torch.Tensor) -> None:
    got = edited(logits[0], request(logit_bias=((2, 50.0),), bad_token_ids=(2,)))
    assert got[2] == -INF


def test_penalties_see_the_biased_logit() -> None:
    got = edited(torch.zeros(VOCAB), request([5], logit_bias=((5, 4.0),), repetition_penalty=2.0, presence_penalty=0.5))
    assert got[5] == 4.0 / 2.0 - 0.5


def test_penalties_follow_the_output_from_step_to_step() -> None:
    one = request(frequency_penalty=1.0)
    for step in range(3):
        assert edited(torch.zeros(VOCAB), one)[7] == -step
        one.output_token_ids.append(7)


def test_penalties_survive_a_preemption() -> None:
    one = request([7, 7], frequency_penalty=1.0)
    edited(torch.zeros(VOCAB), one)
    one.num_computed_tokens, one.block_ids = 0, []  # what a preemption takes away
    assert edited(torch.zeros(VOCAB), one)[7] == -2


def test_forks_are_penalized_for_their_own_output_alone() -> None:
    first = request(frequency_penalty=1.0, repetition_penalty=2.0, forks=(Fork(2, 0),))
    (second,) = first.forks
    first.output_token_ids.append(7)
    second.output_token_ids.append(8)
    logits = torch.ones(2, VOCAB)
    apply_rules_(logits, [first, second])
    assert logits[:, [3, 7, 8]].tolist() == [[0.5, -0.5, 1.0], [0.5, 1.0, -0.5]]


def test_rows_are_edited_as_alone_and_mates_without_rules_are_left(logits: torch.Tensor) -> None:
    params: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": (1, 2, 9), "logit_bias": ((2, -1.0),)},
        {"bad_token_ids": (0, 1)},
        {"min_tokens": 9, "eos_token_id": 4},
        {"logit_bias": ((3, 1.0), (8, 2.0)), "repetition_penalty": 1.5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    ]
    expected = torch.stack([edited(logits[row], request([9, 9, 3], **own)) for row, own in enumerate(params)])
    apply_rules_(logits, [request([9, 9, 3], **own) for own in params])
    assert logits.equal(expected)


def test_a_row_that_forbids_all_tokens_fails_alone_and_says_why(logits: torch.Tensor) -> None:
    requests = [request(handle=1), request(handle=2, allowed_token_ids=(5,), bad_token_ids=(5,)), request(handle=3)]
    samples = sample(logits[:3].clone(), requests)
    assert [kept.handle for kept in samples.requests] == [1, 3]
    assert samples.token_ids.tolist() == logits[[0, 2]].argmax(1).tolist()
    assert list(samples.failures) == [2]
    assert "no token is left" in samples.failures[2]


@pytest.mark.parametrize("bias", [INF, float("nan")])
def test_a_bias_that_is_no_number_fails_its_row_alone(bias: float, logits: torch.Tensor) -> None:
    samples = sample(logits[:2].clone(), [request(handle=1, logit_bias=((3, bias),)), request(handle=2)])
    assert list(samples.failures) == [1]
    assert samples.token_ids.tolist() == [int(logits[1].argmax())]
