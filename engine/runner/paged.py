"""A model and its paged KV cache, as the core drives them: the Runner, whichever the model is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.choose import Backend, choose_backend
from ringserve.engine.attention.kv_cache import KVCache, LayerShape, choose_num_blocks
from ringserve.engine.attention.model_inputs import ModelInputs, PagedInputs, upload
from ringserve.engine.attention.step import StepAttention
from ringserve.engine.attention.tiled import TiledAttention
from ringserve.engine.config import EngineConfig
from ringserve.engine.interface import MemoryPart
from ringserve.engine.runner.graphs import DecodeGraphs, try_record
from ringserve.engine.runner.released_memory import give_memory_back
from ringserve.engine.schedule.batch import Batch
from ringserve.engine.weights.adapters import Adapters


class Model(Protocol):
    """Weights and a forward; knows no cache beyond the attention that it is handed."""

    architecture: str  # the model's class, for messages
    vocab_size: int
    hidden_size: int  # of the final hidden states
    dtype: torch.dtype
    shapes: Mapping[int, LayerShape]  # by layer
    adapters: Adapters

    def compute(self, inputs: ModelInputs, attention: Attention) -> tuple[Tensor, Tensor]:
        """Run a batch.

        Returns:
            Logits of the first of `inputs.rows`, [num_logits, vocab_size] fp32, and the final hidden states of the
            others, [num_hidden, hidden_size].
        """


class PagedRunner:
    """An `engine.runner.base.Runner`. It has no cache until `make_cache` or `make_cache_for` makes one.

    Args:
        model: What it runs.
        load: Loads the same model again.
    """

    def __init__(
        self,
        model: Model,
        *,
        load: Callable[[Adapters], Model],
        max_model_len: int,
        device: torch.device,
        is_deterministic: bool = False,
    ) -> None:
        self.model, self.device, self.max_model_len = model, device, max_model_len
        self.vocab_size, self.hidden_size, self.dtype = model.vocab_size, model.hidden_size, model.dtype
        self.adapters = model.adapters
        self._load, self._shapes = load, model.shapes
        self.num_blocks = self.block_size = 0
        self.last_tokens = torch.zeros(0, dtype=torch.int64, device=device)  # of the rows of the step before
        self._is_deterministic = is_deterministic
        self._attention = TiledAttention if is_deterministic else StepAttention
        self._backend: Backend | None = None  # None: `_attention`, as on CPUs
        self._graphs: DecodeGraphs | None = None

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the cache, in the place of an earlier one, and on a GPU choose what attends over it."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._cache = KVCache(self._shapes, num_blocks, block_size, self.device)
        if self.device.type == "cuda" and not self._is_deterministic:
            self._backend = choose_backend(list(self._shapes.values()), block_size, self.device)

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
            token_bytes=sum(shape.num_bytes for shape in self._shapes.values()),
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            device=self.device,
        )
        self.make_cache(num_blocks, block_size)
        self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self._record()

    def release(self, part: MemoryPart) -> None:
        """Free the weights' memory or the KV cache's."""
        self._graphs = None
        if part == "weights":
            self.adapters = self.adapters.renew()
            del self.model
        else:
            self._backend = None
            del self._cache
        give_memory_back(self.device)

    def restore(self, part: MemoryPart) -> None:
        """Load the weights from disk, with the adapters of now, or make an empty cache of the size that it had.

        Raises:
            EngineError: If the weights cannot be loaded.
        """
        if part == "weights":
            self.model = self._load(self.adapters.renew())  # an attempt that fails leaves its layers' parts behind
            self.adapters = self.model.adapters
        else:
            self.make_cache(self.num_blocks, self.block_size)
        if hasattr(self, "model") and hasattr(self, "_cache"):
            self._record()

    def _record(self) -> None:
        if self._backend is not None and self._backend.is_recordable:
            self._graphs = self._try_record(len(self.last_tokens))

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
        if self.device.type == "cpu":
            inputs = ModelInputs.of(batch, self.device)
            return self.model.compute(inputs, self._attention(batch, self._cache, self.device))
        outputs = self.launch(batch)
        torch.cuda.synchronize(self.device)  # so that the step's forward-done stamp is true
        return outputs

    @torch.inference_mode()
    def launch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Do what `embed` does without waiting for the device; what is launched later runs later.

        Where `batch.sources` says so, the input comes from `last_tokens`. The logits are good until the next launch.
        """
        if self._graphs is not None:
            logits = self._graphs.try_replay(batch)
            if logits is not None:
                return logits, logits[:0]
        inputs, paged = upload(batch, self.device, self.last_tokens, max_length=self.max_model_len)
        return self._compute(inputs, paged)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole blocks, (source, destination) each; no destination is a source."""
        self._cache.copy_blocks(pairs)

    def _compute(self, inputs: ModelInputs, paged: PagedInputs) -> tuple[Tensor, Tensor]:
        if self._backend is not None:
            return self.model.compute(inputs, self._backend.make(paged, self._cache))
        assert paged.batch is not None
        return self.model.compute(inputs, self._attention(paged.batch, self._cache, self.device))

    @torch.inference_mode()
    def _try_record(self, max_num_seqs: int) -> DecodeGraphs | None:
        return try_record(
            self._compute, max_rows=max_num_seqs, num_blocks=-(-self.max_model_len // self.block_size),
            max_length=self.max_model_len, vocab_size=self.vocab_size, last_tokens=self.last_tokens,
        )  # fmt: skip
