"""At load: does the model say in the engine's way what transformers says? Wrong tokens are worse than no start.

Two sequences are prefilled, one of them in two chunks, and their ends decoded, all in shared batches over blocks that
lie criss-cross; each of their last logits is compared with those of the plain forward of transformers' own model.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ringserve.engine.errors import UnsupportedModelError
from ringserve.engine.schedule.batch import Batch, pack
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Chunk, Plan
from ringserve.shm_transport.messages import AddRequest

_LENGTHS = (24, 11)  # two sequences, so that one that sees the other is found out
_NUM_DECODES = 4  # the last tokens of each go one by one, through the cache
NUM_CHECKED = _NUM_DECODES + 1  # logits of each sequence: its last ones
BLOCK_SIZE = 4  # short, so that every history has several blocks
_MAX_COPIES = 4
NUM_BLOCKS = 1 + _MAX_COPIES * len(_LENGTHS) * -(-max(_LENGTHS) // BLOCK_SIZE)
# Root mean square of the difference, over the plain logits' own spread. Measured on SmolLM2-135M: rounding under 5e-5
# in fp32, 0.013 in fp16, 0.08 in bf16 (as much as between transformers' own eager and sdpa); one token too few in the
# context 0.6, another request's tokens in it 1.4, no context 1.9.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}


class CheckedRunner(Protocol):
    """What the check needs of the runner: a cache of NUM_BLOCKS blocks of BLOCK_SIZE."""

    dtype: torch.dtype

    def forward(self, batch: Batch) -> Tensor:
        """Compute in the engine's way."""


def check_sequences(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Return the token ids that the check runs."""
    rng = np.random.default_rng(0)
    lengths = [max(_NUM_DECODES + 1, min(length, max_model_len)) for length in _LENGTHS]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def check(
    runner: CheckedRunner, architecture: str, sequences: Sequence[list[int]], reference: Tensor, *, copies: int = 1
) -> None:
    """Compare the runner's logits with transformers'.

    Args:
        runner: Whose.
        architecture: The model's class, for the message.
        sequences: From `check_sequences`.
        reference: The plain forward's last logits of each, [num_sequences, NUM_CHECKED, vocab_size] fp32.
        copies: How often each sequence is in the batch, at most _MAX_COPIES: more rows can mean another kernel.

    Raises:
        UnsupportedModelError: If they differ by more than rounding, or the model cannot be run so.
    """
    try:
        found = _forward_as_engine(runner, list(sequences) * copies)
    except Exception as exc:  # whatever a model raises when it is called in a way that it was not made for
        raise UnsupportedModelError(
            f"{architecture} cannot be run in the engine's way ({exc!r}): serve another architecture"
        ) from exc
    error = _relative_error(found, reference.repeat(copies, 1, 1))
    tolerance = _TOLERANCES.get(runner.dtype, max(_TOLERANCES.values()))
    if not error <= tolerance:  # a NaN fails too
        raise UnsupportedModelError(
            f"{architecture} gives other logits in a batch than alone (relative error {error:.2g}, limit "
            f"{tolerance:g}): its attention does something that the engine does not know; serve another architecture"
        )


def _forward_as_engine(runner: CheckedRunner, sequences: list[list[int]]) -> Tensor:
    """Return the logits of each sequence's last tokens, [num_sequences, NUM_CHECKED, vocab_size]."""
    requests = [
        Request(AddRequest(handle=row, prompt_token_ids=np.array(tokens[:-_NUM_DECODES], np.int32), max_tokens=9), 0)
        for row, tokens in enumerate(sequences)
    ]
    for row, request in enumerate(requests):
        request.block_ids = list(range(NUM_BLOCKS - 1 - row, 0, -len(requests)))
    first_chunks = [Chunk(request, request.num_tokens // 2, is_last=False) for request in requests[::2]]
    if all(chunk.num_tokens for chunk in first_chunks):
        runner.forward(pack(Plan(chunks=first_chunks), BLOCK_SIZE))
        for chunk in first_chunks:
            chunk.request.num_computed_tokens = chunk.num_tokens
    chunks = [Chunk(request, request.num_tokens - request.num_computed_tokens, is_last=True) for request in requests]
    rows = (np.cumsum([chunk.num_tokens for chunk in chunks]) - 1).tolist()
    logits = [runner.forward(pack(Plan(chunks=chunks, sampled=requests, sampled_rows=rows), BLOCK_SIZE))]
    for index in range(-_NUM_DECODES, 0):
        for request, tokens in zip(requests, sequences, strict=True):
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(tokens[index])
        rows = list(range(len(requests)))
        logits.append(runner.forward(pack(Plan(decodes=requests, sampled=requests, sampled_rows=rows), BLOCK_SIZE)))
    return torch.stack(logits, dim=1)


def _relative_error(found: Tensor, plain: Tensor) -> float:
    spread = plain - plain.mean(-1, keepdim=True)
    return float((found - plain).square().mean().sqrt() / spread.square().mean().sqrt())
