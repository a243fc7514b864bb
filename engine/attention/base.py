"""What a model's forward needs of an attention backend, which is made anew for each step."""

from typing import Protocol

from torch import Tensor

from ringserve.engine.attention.kernels import Options


class Attention(Protocol):
    """One step's attention over the paged KV cache."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Keep one layer's keys and values, and let every token look at its own request.

        Args:
            layer: Its index.
            query: [num_tokens, heads, key_dim]; kv_heads divides heads.
            key: [num_tokens, kv_heads, key_dim].
            value: [num_tokens, kv_heads, value_dim].
            options: The layer's.

        Returns:
            [num_tokens, heads, value_dim].
        """
