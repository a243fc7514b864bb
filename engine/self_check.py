"""At load: does the model say in the engine's way what it says by itself? Wrong tokens are worse than no start."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, pack
from engine.errors import UnsupportedModelError
from engine.request import Request
from engine.slot_pool import SlotPool
from shm_transport.messages import AddRequest

_LENGTHS = (24, 11)  # two sequences, so that one that sees the other is found out
NUM_CHECK_SLOTS = sum(_LENGTHS)  # the cache that the check needs
_NUM_DECODES = 4  # the last tokens of each go one by one, through the cache
# Root mean square of the difference, over the plain logits' own spread. Measured on SmolLM2-135M: rounding under 5e-5
# in fp32, 0.013 in fp16, 0.08 in bf16 (as much as between transformers' own eager and sdpa); one token too few in the
# context 0.6, another request's tokens in it 1.4, no context 1.9.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}


class CheckedRunner(Protocol):
    """What the check needs of the runner."""

    vocab_size: int
    max_model_len: int

    @property
    def architecture(self) -> str:
        """The model's class, for messages."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute in the engine's way."""

    def plain_forward(self, token_ids: list[int]) -> Tensor:
        """Compute one sequence in the model's own way."""


def check_against_plain_forward(runner: CheckedRunner) -> None:
    """Prefill two sequences in one batch, decode their ends, and compare every logit with the plain forward's.

    Raises:
        UnsupportedModelError: If they differ by more than rounding.
    """
    rng = np.random.default_rng(0)
    lengths = [max(_NUM_DECODES + 1, min(length, runner.max_model_len)) for length in _LENGTHS]
    sequences = [rng.integers(0, runner.vocab_size, length).tolist() for length in lengths]
    found = _forward_as_engine(runner, sequences)
    plain = torch.stack([runner.plain_forward(sequence)[-_NUM_DECODES - 1 :] for sequence in sequences], dim=1)
    error = _relative_error(found, plain)
    tolerance = _TOLERANCES.get(runner.dtype, max(_TOLERANCES.values()))
    if not error <= tolerance:  # a NaN fails too
        raise UnsupportedModelError(
            f"{runner.architecture} gives other logits in a batch than alone (relative error {error:.2g}, limit "
            f"{tolerance:g}): its attention does something that the engine does not know; serve another architecture"
        )


def _forward_as_engine(runner: CheckedRunner, sequences: list[list[int]]) -> Tensor:
    """Return the logits of each sequence's last tokens, [_NUM_DECODES + 1, num_sequences, vocab_size]."""
    pool = SlotPool(NUM_CHECK_SLOTS)
    prompts = [np.array(tokens[:-_NUM_DECODES], np.int32) for tokens in sequences]
    requests = [
        Request(AddRequest(handle=row, prompt_token_ids=prompt, max_tokens=_NUM_DECODES), queued_ns=0)
        for row, prompt in enumerate(prompts)
    ]
    for request, tokens in zip(requests, sequences, strict=True):
        pool.try_allocate(request.handle, len(tokens))
    logits = [runner.forward(pack([], requests, pool))]
    for index in range(-_NUM_DECODES, 0):
        for request, tokens in zip(requests, sequences, strict=True):
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(tokens[index])
        logits.append(runner.forward(pack(requests, [], pool)))
    return torch.stack(logits)


def _relative_error(found: Tensor, plain: Tensor) -> float:
    spread = plain - plain.mean(-1, keepdim=True)
    return float((found - plain).square().mean().sqrt() / spread.square().mean().sqrt())
