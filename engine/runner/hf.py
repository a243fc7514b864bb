"""Any Hugging Face decoder whose attention goes through transformers' attention interface, as a Model to be paged."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.hook import step_attention
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import LayerShape
from ringserve.engine.attention.model_inputs import ModelInputs
from ringserve.engine.attention.step import StepAttention
from ringserve.engine.errors import UnsupportedModelError
from ringserve.engine.runner.model_loader import architecture
from ringserve.engine.schedule.batch import Batch, ChunkSpan
from ringserve.engine.weights.adapters import Adapters, Piece
from ringserve.engine.weights.linear import Linear, LinearFactory

_PROBE_TOKENS = 4
_REMEDY = "serve a decoder whose every layer uses it, such as Llama, Qwen, Mistral, Gemma, Phi or GPT-2"


class HfModel:
    """A loaded transformers model, fed flat: all requests' tokens in one row, no cache argument, logits of few rows.

    Attributes:
        hidden_window: A sliding window that stands in the masks alone, which are never made here: requests that are
            longer would come out wrong. None: there is none.

    Raises:
        UnsupportedModelError: If it cannot be run so, or some layer does not call the attention function.
    """

    def __init__(self, model: Any, adapters: Adapters, device: torch.device) -> None:
        self._model, self.adapters, self._device = model, adapters, device
        text_config = model.config.get_text_config()
        self.architecture = architecture(model.config)
        self.vocab_size = int(text_config.vocab_size)
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self.dtype: torch.dtype = model.dtype
        layers = self._probe_layers(int(text_config.num_hidden_layers))
        self.shapes: Mapping[int, LayerShape] = layers.shapes
        self.hidden_window = None if layers.have_window else _window(text_config)

    def compute(self, inputs: ModelInputs, attention: Attention) -> tuple[Tensor, Tensor]:
        """Return logits, fp32, and final hidden states, as `engine.runner.paged.Model` says."""
        head = _HeadInput(inputs.num_logits)
        hook = self._model.get_output_embeddings().register_forward_pre_hook(head)
        self.adapters.rows.set(inputs.adapters)
        token = step_attention.set(attention)
        try:
            # No cache is ever passed: its argument changed names between transformers' versions, and ours is elsewhere.
            output: Any = self._model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.rows,
            )
        finally:
            step_attention.reset(token)
            hook.remove()
        return output.logits[0].float(), head.hidden_states

    def plain_logits(self, token_ids: list[int]) -> Tensor:
        """Return one sequence's logits by the model's own eager attention, [num_tokens, vocab_size] fp32."""
        return plain_logits(self._model, token_ids)

    def swap_linears(self, factory: LinearFactory) -> None:
        """Replace the model's linear layers by the factory's."""
        output_head = self._model.get_output_embeddings()
        for prefix, parent in list(self._model.named_modules()):
            for name, module in list(parent.named_children()):
                if type(module) is nn.Linear:
                    weight = module.weight.detach()
                elif type(module) is Conv1D:  # GPT-2's, whose weight stands on its side
                    weight = module.weight.detach().T.contiguous()
                else:
                    continue
                num_out, num_in = weight.shape
                linear = factory.make(weight, _detached(module.bias), can_quantize=module is not output_head)
                path = f"{prefix}.{name}".lstrip(".")
                # Only those of numbered blocks: others may see the wanted rows alone.
                if any(part.isdigit() for part in path.split(".")):
                    linear = self.adapters.wrap(linear, [Piece(path, num_out, num_in)])
                setattr(parent, name, _SwappedLinear(linear, num_in, num_out))

    @property
    def has_experts(self) -> bool:
        """Whether rows share products with those that chose the same expert: that is no linear layer to be replaced."""
        return any(weight.dim() == 3 and "expert" in name for name, weight in self._model.named_parameters())

    @torch.inference_mode()
    def _probe_layers(self, num_layers: int) -> "_Layers":
        """Run a few tokens to see what each layer keeps and wants: configs do not say it reliably."""
        positions = np.arange(_PROBE_TOKENS)
        empty = np.empty(0, np.int64)
        chunk = ChunkSpan(0, _PROBE_TOKENS, 0, np.empty(0, np.int32))
        batch = Batch(positions, positions, empty, np.empty((0, 0), np.int32), empty, positions[-1:], [chunk])
        attention = _Layers(StepAttention(batch, None, self._device))
        try:
            self.compute(ModelInputs.of(batch, self._device), attention)
        except Exception as exc:  # whatever a model raises when it is called in a way that it was not made for
            raise UnsupportedModelError(f"{self.architecture} cannot run a flat batch ({exc}): {_REMEDY}") from exc
        if sorted(attention.shapes) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"{self.architecture} has {num_layers} layers, {len(attention.shapes)} of them go through "
                f"transformers' attention interface: {_REMEDY}"
            )
        return attention


class _Layers:
    """An `engine.attention.base.Attention` that keeps what it is told of each layer."""

    def __init__(self, attention: StepAttention) -> None:
        self._attention, self.shapes = attention, attention.shapes
        self.have_window = False  # any of them

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attend as `engine.attention.base.Attention` says."""
        self.have_window |= options.sliding_window is not None
        return self._attention.attend(layer, query, key, value, options)


def _window(text_config: Any) -> int | None:
    """Return the sliding window that a config names and some layers have."""
    kinds = getattr(text_config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(text_config, "sliding_window", None) or None


class _HeadInput:
    """A hook that takes the hidden states beyond the first `num_logits` rows away from the head that makes logits."""

    def __init__(self, num_logits: int) -> None:
        self._num_logits = num_logits
        self.hidden_states = torch.empty(0)

    def __call__(self, _head: nn.Module, args: tuple[Tensor]) -> Tensor:
        """Return what the head shall see of its input, [1, num_rows, hidden_size]."""
        (hidden,) = args
        self.hidden_states = hidden[0, self._num_logits :]
        return hidden[:, : self._num_logits]


class _SwappedLinear(nn.Module):
    """One of ours in the place of an nn.Linear or a Conv1D."""

    def __init__(self, linear: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in_features]."""
        return self._linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


@torch.inference_mode()
def plain_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Return one sequence's logits by a transformers model's own eager attention, [num_tokens, vocab_size] fp32."""
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        input_ids = torch.tensor([token_ids], device=model.device)
        return model(input_ids=input_ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
    finally:
        model.set_attn_implementation(name)
