"""The attention function that every transformers model is run through.

transformers calls it once a layer with the tokens of all requests in one row, [1, heads, num_tokens, head_dim]. What
the model cannot pass on, the batch and the cache, stands in a context variable for the length of one forward.
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.kernels import Options

ATTENTION_NAME = "ringserve"

step_attention: ContextVar[Attention] = ContextVar("step_attention")  # of the forward that this thread is in


def _registered_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls.

    Raises:
        ValueError: If there is a mask: no mask function goes by our name, so the model has made it by itself.
    """
    if attention_mask is not None:
        raise ValueError("it makes attention masks of its own")
    options = Options(*(kwargs.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux")))
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attended = step_attention.get().attend(layer, query, key, value, options)
    return attended.contiguous()[None], None  # some models take a view of it, the others would copy it


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _registered_attention)
