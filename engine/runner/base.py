"""What the core needs of whatever runs the model. The implementations stand beside it: hf.py, fused.py."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ringserve.engine.interface import MemoryPart
from ringserve.engine.schedule.batch import Batch
from ringserve.engine.weights.adapters import Adapters


class Runner(Protocol):
    """Owns the weights and the keys and values; knows no request and no queue. Called by the loop's thread alone."""

    max_model_len: int  # tokens of a request, prompt and output together
    vocab_size: int
    hidden_size: int  # of the final hidden states
    num_blocks: int  # of the KV cache, block 0 included, which is nobody's: padding reads and writes it
    block_size: int  # tokens of a block
    dtype: torch.dtype
    device: torch.device

    @property
    def adapters(self) -> Adapters:
        """Whose numbers `batch.adapters` has."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch and keep its keys and values.

        Returns:
            Logits of `batch.last_rows`, [num_logits, vocab_size] fp32 on `device`, ready when it returns.
        """

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Do what `forward` does for a batch with `hidden_rows`.

        Returns:
            The logits, and the final hidden states of `batch.hidden_rows`, [num_hidden, hidden_size] in `dtype`.
        """

    def release(self, part: MemoryPart) -> None:
        """Free the weights' memory or the KV cache's."""

    def restore(self, part: MemoryPart) -> None:
        """Undo `release`; the cache is empty then.

        Raises:
            EngineError: If the part cannot be had; it stays released.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole blocks, (source, destination) each; no destination is a source."""
