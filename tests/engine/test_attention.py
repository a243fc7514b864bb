import numpy as np
import pytest
import torch

from engine.attention import Options, StepAttention, attention
from engine.batch import pack
from engine.kv_cache import KVCache, LayerShape
from engine.request import Request
from engine.slot_pool import SlotPool
from shm_transport.messages import AddRequest

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
PLAIN = Options(None, None, None, None)
OPTIONS = {
    "plain": PLAIN,
    "scaled": Options(0.1, None, None, None),
    "window": Options(None, 3, None, None),
    "softcap": Options(None, None, 2.0, None),
    "sinks": Options(0.3, None, None, torch.linspace(-2, 2, HEADS)),
    "all": Options(0.5, 4, 3.0, torch.linspace(-2, 2, HEADS)),
}


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """One request, token by token and head by head: [heads, num_tokens, head_dim]."""
    out = torch.zeros(query.shape)
    for head in range(query.shape[0]):
        kv_head = head // (query.shape[0] // key.shape[0])
        for token in range(query.shape[1]):
            first = 0 if options.sliding_window is None else max(0, token + 1 - options.sliding_window)
            keys, values = key[kv_head, first : token + 1], value[kv_head, first : token + 1]
            scores = keys @ query[head, token] * (options.scaling or HEAD_DIM**-0.5)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks[head : head + 1]))
            out[head, token] = scores.softmax(0)[: len(keys)] @ values
    return out


@pytest.mark.parametrize("name", OPTIONS)
def test_a_flat_batch_equals_each_request_alone_token_by_token(name: str) -> None:
    options = OPTIONS[name]
    torch.manual_seed(0)
    lengths = (9, 2, 5)
    whole = [[torch.randn(heads, n, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]
    expected = [naive(*tensors, options) for tensors in whole]
    pool = SlotPool(40)
    shape = LayerShape((KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), torch.float32)
    cache = KVCache({0: shape}, 40, torch.device("cpu"))
    cache._keys[0][1:] = float("nan")  # what nobody wrote must never be seen
    cache._values[0][1:] = float("nan")
    prompts = [np.zeros(n - 1, np.int32) for n in lengths]
    requests = [
        Request(AddRequest(handle=n, prompt_token_ids=prompt, max_tokens=2), queued_ns=0)
        for n, prompt in enumerate(prompts)
    ]
    for request in requests:
        pool.try_allocate(request.handle, 12)

    def flat(slices: list[tuple[int, slice]]) -> list[torch.Tensor]:
        return [torch.cat([whole[n][kind][:, own] for n, own in slices], dim=1)[None] for kind in range(3)]

    def run(decodes: list[Request], prefills: list[Request], slices: list[tuple[int, slice]]) -> torch.Tensor:
        step = StepAttention(pack(decodes, prefills, pool), cache, torch.device("cpu"))
        return step.attend(0, *flat(slices), options)[0].transpose(0, 1)

    # Two prompts, then a step that mixes their last tokens with a third prompt.
    first = run([], requests[:2], [(0, slice(0, 8)), (1, slice(0, 1))])
    torch.testing.assert_close(first, torch.cat([expected[0][:, :8], expected[1][:, :1]], dim=1))
    for request in requests[:2]:
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids.append(0)
    mixed = run(requests[:2], requests[2:], [(0, slice(8, 9)), (1, slice(1, 2)), (2, slice(0, 4))])
    wanted = torch.cat([expected[0][:, 8:], expected[1][:, 1:], expected[2][:, :4]], dim=1)
    torch.testing.assert_close(mixed, wanted)


@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_without_a_mask_the_last_query_stands_at_the_last_position(name: str) -> None:
    query, key, value = (torch.randn(1, heads, 5, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = attention(query, key, value, None, OPTIONS[name])
    last = attention(query[:, :, -1:], key, value, None, OPTIONS[name])
    torch.testing.assert_close(out[:, :, -1:], last)
    torch.testing.assert_close(out[0], naive(query[0], key[0], value[0], OPTIONS[name]))
