from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringserve.engine.errors import UnsupportedModelError
from ringserve.engine.runner.self_check import BLOCK_SIZE, NUM_BLOCKS, NUM_CHECKED, check, check_sequences
from ringserve.engine.schedule.batch import Batch

VOCAB_SIZE = 40
SEQUENCES = check_sequences(VOCAB_SIZE, max_model_len=100)
_TABLE = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def logits_of(tokens: list[int]) -> Tensor:
    """Logits that every token of the context has a part in."""
    return _TABLE[tokens].sum(0)


REFERENCE = torch.stack(
    [torch.stack([logits_of(tokens[: len(tokens) - n]) for n in reversed(range(NUM_CHECKED))]) for tokens in SEQUENCES]
)


class Runner:
    """Keeps token ids in the place of keys and values; `forget` may spoil a context before it is used."""

    dtype = torch.float32

    def __init__(self, forget: Callable[[list[int]], list[int]] = lambda tokens: tokens) -> None:
        self._cache = torch.full((NUM_BLOCKS * BLOCK_SIZE,), -1)
        self._forget = forget
        self.largest_batch = 0

    def forward(self, batch: Batch) -> Tensor:
        self._cache[torch.from_numpy(batch.slot_mapping)] = torch.from_numpy(batch.token_ids)
        self.largest_batch = max(self.largest_batch, batch.num_decodes)
        contexts = [self._context(batch, row) for row in batch.last_rows.tolist()]
        return torch.stack([logits_of(self._forget(tokens)) for tokens in contexts]) if contexts else torch.empty(0)

    def _context(self, batch: Batch, row: int) -> list[int]:
        if row < batch.num_decodes:
            table: Any = batch.block_tables[row]
        else:
            table = next(chunk.block_table for chunk in batch.chunks if chunk.start <= row < chunk.end)
        blocks = self._cache.view(NUM_BLOCKS, BLOCK_SIZE)[torch.from_numpy(table).long()]
        return blocks.flatten()[: int(batch.positions[row]) + 1].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("copies", [1, 4])
def test_a_runner_that_sees_each_context_passes(copies: int) -> None:
    runner = Runner()
    check(runner, "Llama", SEQUENCES, REFERENCE, copies=copies)
    assert runner.largest_batch == copies * len(SEQUENCES)


@pytest.mark.parametrize(
    "forget",
    [
        lambda tokens: tokens[1:],
        lambda tokens: [*tokens[:-2], tokens[-1]],
        lambda tokens: tokens[-1:],
        lambda tokens: [*tokens, 0],
    ],
)
def test_a_runner_that_loses_or_adds_one_token_is_refused(forget: Callable[[list[int]], list[int]]) -> None:
    with pytest.raises(UnsupportedModelError, match="Llama gives other logits in a batch than alone"):
        check(Runner(forget), "Llama", SEQUENCES, REFERENCE)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="relative error nan"):
        check(Runner(), "Llama", SEQUENCES, REFERENCE * float("nan"))


def test_a_short_context_gives_short_sequences() -> None:
    assert max(map(len, check_sequences(VOCAB_SIZE, max_model_len=7))) == 7


def test_a_model_that_raises_is_refused_by_name() -> None:
    def forget(tokens: list[int]) -> list[int]:
        raise IndexError("no such row")

    with pytest.raises(UnsupportedModelError, match=r"Llama cannot be run .* \(IndexError\('no such row'\)\)"):
        check(Runner(forget), "Llama", SEQUENCES, REFERENCE)
