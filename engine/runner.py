"""Runs the model: a packed batch in, logits out. Owns the weights and the KV cache; knows no request and no queue."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import StepAttention, step_attention
from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.kv_cache import KVCache, LayerShape, choose_num_slots
from engine.model_loader import architecture, choose_device, choose_max_model_len, load_config, load_model
from engine.self_check import NUM_CHECK_SLOTS, check_against_plain_forward

_PROBE_TOKENS = 4


class ModelRunner:
    """Any Hugging Face decoder whose attention goes through transformers' attention interface.

    Raises:
        EngineError: If the model cannot be loaded, does not fit, or fails the check against its own plain forward.
    """

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.resolve_num_threads())
        self.device = choose_device(config.device)
        model_config = load_config(config.model)
        self.max_model_len = choose_max_model_len(config.max_model_len, model_config)
        self.vocab_size = int(model_config.get_text_config().vocab_size)
        self._architecture = architecture(model_config)
        self._num_layers = int(model_config.get_text_config().num_hidden_layers)
        self._model = load_model(config, model_config, self.device)
        shapes = self._probe_layers()
        self._cache = KVCache(shapes, NUM_CHECK_SLOTS, self.device)
        check_against_plain_forward(self)
        self.num_slots = choose_num_slots(
            config.kv_cache_tokens,
            token_bytes=sum(shape.num_bytes for shape in shapes.values()),
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            device=self.device,
        )
        self._cache = KVCache(shapes, self.num_slots, self.device)

    @property
    def architecture(self) -> str:
        """The model's class, for messages."""
        return self._architecture

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self._model.dtype  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch and keep its keys and values.

        Returns:
            Logits of `batch.last_rows`, [num_sampled, vocab_size] fp32 on the runner's device, ready when it returns.
        """
        logits = self._run(batch, StepAttention(batch, self._cache, self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the step's forward-done stamp is true
        return logits

    @torch.inference_mode()
    def plain_forward(self, token_ids: list[int]) -> Tensor:
        """Return one sequence's logits by the model's own eager attention, [num_tokens, vocab_size] fp32."""
        name = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")
        try:
            input_ids = torch.tensor([token_ids], device=self.device)
            return self._model(input_ids=input_ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
        finally:
            self._model.set_attn_implementation(name)

    def _run(self, batch: Batch, attention: StepAttention) -> Tensor:
        token = step_attention.set(attention)
        try:
            # No cache is ever passed: its argument changed names between transformers' versions, and ours is elsewhere.
            output: Any = self._model(
                input_ids=self._to_row(batch.token_ids),
                position_ids=self._to_row(batch.positions),
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.last_rows).to(self.device),
            )
        finally:
            step_attention.reset(token)
        return output.logits[0].float()  # type: ignore[no-any-return]

    def _to_row(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)[None]

    @torch.inference_mode()
    def _probe_layers(self) -> dict[int, LayerShape]:
        """Run a few tokens to see what each layer keeps: configs do not say it reliably."""
        positions = np.arange(_PROBE_TOKENS)
        empty = np.empty(0, np.int64)
        bounds = [(0, _PROBE_TOKENS)]
        batch = Batch(positions, positions, empty, empty.reshape(0, 0), empty, bounds, positions[-1:])
        attention = StepAttention(batch, None, self.device)
        try:
            self._run(batch, attention)
        except Exception as exc:  # whatever a model raises when it is called in a way that it was not made for
            raise UnsupportedModelError(f"{self._architecture} cannot run a flat batch ({exc}): {_REMEDY}") from exc
        if sorted(attention.shapes) != list(range(self._num_layers)):
            raise UnsupportedModelError(
                f"{self._architecture} has {self._num_layers} layers, {len(attention.shapes)} of them go through "
                f"transformers' attention interface: {_REMEDY}"
            )
        return attention.shapes


_REMEDY = "serve a decoder whose every layer uses it, such as Llama, Qwen, Mistral, Gemma, Phi or GPT-2"
