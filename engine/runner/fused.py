"""The Llama family's forward, written for few and large operations. No transformers: its import alone takes a second.

Queries, keys and values come from one product; what follows a product is done in its kernel where that can (Linear);
the last layer computes only the rows that are wanted behind its attention. Rotary pairs, which checkpoints keep half a
head apart, lie side by side here, so that the rotation is one complex product: the projections' rows are reordered at
load, which changes no score, since queries and keys are reordered alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import LayerShape
from ringserve.engine.attention.model_inputs import ModelInputs
from ringserve.engine.runner.llama_config import LlamaConfig
from ringserve.engine.weights.adapters import Adapters, Piece
from ringserve.engine.weights.checkpoint import Checkpoint
from ringserve.engine.weights.linear import Linear, LinearFactory


@dataclass(slots=True, frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear  # queries, keys, values
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    has_rope: bool
    options: Options


class FusedModel:
    """A model of the Llama family.

    Raises:
        ModelLoadError: If a weight is missing, damaged or of another shape.
    """

    def __init__(
        self,
        config: LlamaConfig,
        checkpoint: Checkpoint,
        factory: LinearFactory,
        adapters: Adapters,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.architecture, self.dtype = config.architecture, dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim, dtype)
        self.shapes: Mapping[int, LayerShape] = dict.fromkeys(range(config.num_layers), shape)
        self._config, self._device = config, device
        self._frequencies = config.inverse_frequencies.to(device)
        self.adapters = adapters
        weights = _Weights(config, checkpoint, factory, adapters)
        self._embedding = weights.embedding()
        self._layers = [weights.layer(index) for index in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", config.hidden_size)
        self._head = weights.head(self._embedding)

    def compute(self, inputs: ModelInputs, attention: Attention) -> tuple[Tensor, Tensor]:
        """Return logits, fp32, and final hidden states, as `engine.runner.paged.Model` says."""
        self.adapters.rows.set(inputs.adapters)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        rotation = self._rotation(inputs.positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, rotation, attention)
            if index == last:
                attended, hidden = attended.index_select(0, inputs.rows), hidden.index_select(0, inputs.rows)
                self.adapters.rows.set(inputs.adapters_of_rows)
            hidden = layer.out.add(attended, hidden)
            x = self._rms_norm(hidden, layer.mlp_norm)
            hidden = layer.down.add(layer.up.mul(x, layer.gate.silu(x)), hidden)
        hidden = self._rms_norm(hidden, self._norm)
        num_logits = inputs.num_logits
        if not num_logits:
            return torch.empty(0, self.vocab_size, device=self._device), hidden
        return self._head(hidden[:num_logits]).float(), hidden[num_logits:]

    def _attend(self, index: int, layer: _Layer, hidden: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        """Return [num_tokens, num_heads * head_dim]."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = layer.qkv(self._rms_norm(hidden, layer.input_norm)).view(len(hidden), -1, self._config.head_dim)
        qk, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._rms_norm(qk[:, :num_heads], layer.query_norm)
            qk = torch.cat((query, self._rms_norm(qk[:, num_heads:], layer.key_norm)), dim=1)
        if layer.has_rope:
            pairs = torch.view_as_complex(qk.float().view(*qk.shape[:-1], -1, 2))
            qk = torch.view_as_real(pairs * rotation).flatten(-2).to(self.dtype)
        attended = attention.attend(index, qk[:, :num_heads], qk[:, num_heads:], value, layer.options)
        return attended.flatten(1)

    def _rotation(self, positions: Tensor) -> Tensor:
        """[num_tokens, 1, head_dim / 2] complex: each pair's turn at each position."""
        angles = positions.float()[:, None, None] * self._frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.norm_eps)


class _Weights:
    """Takes a model's weights from its checkpoint, layer by layer."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, factory: LinearFactory, adapters: Adapters) -> None:
        self._config, self._checkpoint, self._factory, self._adapters = config, checkpoint, factory, adapters

    def embedding(self) -> Tensor:
        return self._checkpoint.take("model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size)

    def head(self, embedding: Tensor) -> Linear:
        """Return the product that makes logits: never 4-bit, which would change many of its first choices."""
        name = "lm_head.weight"
        if not self._config.ties_embeddings and name in self._checkpoint:
            embedding = self._checkpoint.take(name, self._config.vocab_size, self._config.hidden_size)
        return self._factory.make(embedding, can_quantize=False)

    def layer(self, index: int) -> _Layer:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        return _Layer(
            input_norm=self._checkpoint.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._qkv(f"{prefix}.self_attn"),
            query_norm=self._head_norm(f"{prefix}.self_attn.q_norm.weight"),
            key_norm=self._head_norm(f"{prefix}.self_attn.k_norm.weight"),
            out=self._linear(f"{prefix}.self_attn.o_proj", hidden, config.num_heads * config.head_dim),
            mlp_norm=self._checkpoint.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate=self._linear(f"{prefix}.mlp.gate_proj", inner, hidden),
            up=self._linear(f"{prefix}.mlp.up_proj", inner, hidden),
            down=self._linear(f"{prefix}.mlp.down_proj", hidden, inner),
            has_rope=config.has_rope[index],
            options=Options(sliding_window=config.sliding_windows[index]),
        )

    def _linear(self, name: str, num_out: int, num_in: int) -> Linear:
        weight = self._checkpoint.take(f"{name}.weight", num_out, num_in)
        linear = self._factory.make(weight, self._checkpoint.find(f"{name}.bias", num_out))
        return self._adapters.wrap(linear, [Piece(name, num_out, num_in)])

    def _qkv(self, name: str) -> Linear:
        heads = {"q": self._config.num_heads, "k": self._config.num_kv_heads, "v": self._config.num_kv_heads}
        sizes = {kind: count * self._config.head_dim for kind, count in heads.items()}
        weights = [
            self._reorder(kind, self._checkpoint.take(f"{name}.{kind}_proj.weight", size, self._config.hidden_size))
            for kind, size in sizes.items()
        ]
        bias = None
        if f"{name}.q_proj.bias" in self._checkpoint:
            biases = {kind: self._checkpoint.take(f"{name}.{kind}_proj.bias", size) for kind, size in sizes.items()}
            bias = torch.cat([self._reorder(kind, each) for kind, each in biases.items()])
        pieces = [
            Piece(f"{name}.{kind}_proj", size, self._config.hidden_size, self._reorder(kind, torch.arange(size)))
            for kind, size in sizes.items()
        ]
        return self._adapters.wrap(self._factory.make(torch.cat(weights), bias), pieces)

    def _head_norm(self, name: str) -> Tensor | None:
        return (
            self._reorder("q", self._checkpoint.take(name, self._config.head_dim)) if self._config.has_qk_norm else None
        )

    def _reorder(self, kind: str, rows: Tensor) -> Tensor:
        """Put rotary pairs side by side in a query's or key's rows, [num_heads * head_dim, ...]."""
        if kind == "v":
            return rows
        halves = rows.view(-1, 2, self._config.head_dim // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)
