from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from ringserve.engine.sampling.penalties import PenalizedRow, PenaltyCounts, has_penalties, new_counts, penalize_
from ringserve.shm_transport.messages import AddRequest

VOCAB = 50
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=200)


def add(prompt: list[int], **params: Any) -> AddRequest:
    return AddRequest(handle=1, prompt_token_ids=np.array(prompt, np.int32), max_tokens=9, **params)


def penalized(logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> torch.Tensor:
    request = add(prompt, **params)
    counts = new_counts(request)
    counts.catch_up(output)
    result = logits.clone()[None]
    penalize_(result, [PenalizedRow(0, counts, request)])
    return result[0]


def by_the_book(
    logits: torch.Tensor, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> torch.Tensor:
    """Transformers' repetition penalty, then the formula of OpenAI's API."""
    seen = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    result = RepetitionPenaltyLogitsProcessor(repetition)(seen, logits[None].clone())[0]
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    return result - counts * np.float32(frequency) - (counts > 0) * np.float32(presence)


@settings(max_examples=200, deadline=None)
@given(
    prompt=token_lists,
    output=token_lists,
    seed=st.integers(0, 2**32 - 1),
    repetition=st.sampled_from([0.5, 1.0, 1.1, 2.0]),
    frequency=st.sampled_from([-0.5, 0.0, 0.1, 2.0]),
    presence=st.sampled_from([-1.0, 0.0, 0.3]),
)
def test_penalties_equal_the_reference(
    prompt: list[int], output: list[int], seed: int, repetition: float, frequency: float, presence: float
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    got = penalized(
        logits, prompt, output, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    torch.testing.assert_close(got, by_the_book(logits, prompt, output, repetition, frequency, presence))


@given(prompt=token_lists, output=token_lists, cuts=st.lists(st.integers(0, 200)))
def test_counts_taken_step_by_step_are_those_of_the_whole_output(
    prompt: list[int], output: list[int], cuts: list[int]
) -> None:
    stepwise, at_once = (PenaltyCounts(np.array(prompt, np.int32)) for _ in range(2))
    for end in sorted(min(cut, len(output)) for cut in cuts):
        stepwise.catch_up(output[:end])
    stepwise.catch_up(output)
    at_once.catch_up(output)
    for counts in (stepwise, at_once):
        found = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
        assert found == {token_id: output.count(token_id) for token_id in {*prompt, *output}}


def test_a_step_counts_its_new_token_alone() -> None:
    class Output(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("the whole output was read")

    counts = PenaltyCounts(np.empty(0, np.int32))
    output = Output([1, 2, 3])
    for token_id in range(4, 300):
        counts.catch_up(output)
        output.append(token_id)
    assert len(counts) == 298


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    logits = torch.ones(VOCAB)
    assert penalized(logits, [3], [], frequency_penalty=2.0, presence_penalty=2.0).tolist() == logits.tolist()
    assert penalized(logits, [3], [], repetition_penalty=2.0)[3] == 0.5


def test_rows_of_a_batch_are_penalized_as_alone_and_others_are_left() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, VOCAB, generator=generator)
    settings: list[dict[str, float]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.0},
    ]
    rows, expected = [], logits.clone()
    for row, params in zip((0, 1, 3), settings, strict=True):
        prompt, output = ([row, 5, 6], [row, 7, 7, 8])
        request = add(prompt, **params)
        rows.append(PenalizedRow(row, new_counts(request), request))
        rows[-1].counts.catch_up(output)
        expected[row] = penalized(logits[row], prompt, output, **params)
    penalize_(logits, rows)
    assert logits.equal(expected)


def test_masked_tokens_stay_masked() -> None:
    logits = torch.full((VOCAB,), float("-inf"))
    got = penalized(logits, [1], [2, 2], repetition_penalty=0.5, frequency_penalty=-2.0, presence_penalty=-1.0)
    assert got.equal(logits)


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_is_one(name: str) -> None:
    assert has_penalties(add([1], **{name: 0.25}))
    assert not has_penalties(add([1]))
