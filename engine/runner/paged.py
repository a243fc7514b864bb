"""A model and its paged KV cache, as the core drives them: the Runner, whichever the model is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.adapters import Adapters
from engine.attention.base import Attention
from engine.attention.step import StepAttention
from engine.attention.tiled import TiledAttention
from engine.batch import Batch
from engine.config import EngineConfig
from engine.kv_cache import KVCache, LayerShape, choose_num_blocks


class Model(Protocol):
    """Weights and a forward; knows no cache beyond the attention that it is handed."""

    architecture: str  # the model's class, for messages
    vocab_size: int
    dtype: torch.dtype
    shapes: Mapping[int, LayerShape]  # by layer
    adapters: Adapters

    def compute(self, batch: Batch, attention: Attention) -> tuple[Tensor, Tensor]:
        """Run the batch.

        Returns:
            Logits of `batch.last_rows`, [num_logits, vocab_size] fp32, and the final hidden states of
            `batch.hidden_rows`, [num_hidden, hidden_size].
        """


class PagedRunner:
    """An `engine.runner.base.Runner`. It has no cache until `make_cache` or `make_cache_for` makes one."""

    def __init__(
        self, model: Model, *, max_model_len: int, device: torch.device, is_deterministic: bool = False
    ) -> None:
        self.model, self.device, self.max_model_len = model, device, max_model_len
        self.vocab_size, self.dtype = model.vocab_size, model.dtype
        self.adapter_names = model.adapters.names
        self.num_blocks = self.block_size = 0
        self._attention = TiledAttention if is_deterministic else StepAttention

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the cache, in the place of an earlier one."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._cache = KVCache(self.model.shapes, num_blocks, block_size, self.device)

    def make_cache_for(self, config: EngineConfig) -> None:
        """Make a cache of the configured size.

        Raises:
            EngineConfigError: If that has no room for one request.
            NotEnoughMemoryError: If the free memory has none.
        """
        block_size = config.block_size
        num_blocks = choose_num_blocks(
            config.kv_cache_tokens,
            block_size=block_size,
            token_bytes=sum(shape.num_bytes for shape in self.model.shapes.values()),
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            device=self.device,
        )
        self.make_cache(num_blocks, block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch and keep its keys and values.

        Returns:
            Logits of `batch.last_rows`, [num_logits, vocab_size] fp32 on the runner's device, ready when it returns.
        """
        return self.embed(batch)[0]

    @torch.inference_mode()
    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Do what `forward` does; return also the final hidden states of `batch.hidden_rows`."""
        outputs = self.model.compute(batch, self._attention(batch, self._cache, self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the step's forward-done stamp is true
        return outputs

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole blocks, (source, destination) each; no destination is a source."""
        self._cache.copy_blocks(pairs)
