from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import KVCache, LayerShape
from ringserve.engine.attention.step import StepAttention, _split
from ringserve.engine.attention.tiled import TiledAttention
from ringserve.engine.schedule.batch import pack
from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Chunk, Plan
from ringserve.shm_transport.messages import AddRequest

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
CPU = torch.device("cpu")
OPTIONS = {
    "plain": Options(),
    "scaled": Options(0.1),
    "window": Options(sliding_window=3),
    "softcap": Options(softcap=2.0),
    "sinks": Options(0.3, sinks=torch.linspace(-2, 2, HEADS)),
    "all": Options(0.5, 4, 3.0, torch.linspace(-2, 2, HEADS)),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def naive(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """One request, token by token and head by head: all [num_tokens, heads or kv_heads, head_dim]."""
    out = torch.zeros(query.shape)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        for token in range(len(query)):
            first = 0 if options.sliding_window is None else max(0, token + 1 - options.sliding_window)
            keys, values = key[first : token + 1, kv_head], value[first : token + 1, kv_head]
            scores = keys @ query[token, head] * (options.scaling or HEAD_DIM**-0.5)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat((scores, options.sinks[head : head + 1]))
            out[token, head] = scores.softmax(0)[: len(keys)] @ values
    return out


class Sequences:
    """Some requests with random queries, keys and values, and the cache that steps put them into."""

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, backend: type[StepAttention | TiledAttention]
    ) -> None:
        torch.manual_seed(0)
        self.tensors = [
            [torch.randn(n, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths
        ]
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        blocks = (np.random.default_rng(0).permutation(num_blocks) + 1).tolist()
        self.requests = []
        for handle, length in enumerate(lengths):
            add = AddRequest(handle=handle, prompt_token_ids=np.zeros(length, np.int32), max_tokens=2)
            own, blocks = blocks[: -(-length // BLOCK_SIZE)], blocks[-(-length // BLOCK_SIZE) :]
            self.requests.append(Request(add, queued_ns=0, block_ids=own))
        shape = LayerShape(KV_HEADS, HEAD_DIM, HEAD_DIM, dtype)
        self._cache = KVCache({0: shape}, num_blocks + 1, BLOCK_SIZE, CPU)
        self._backend = backend

    def step(self, options: Options, decodes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Run a token of each decode, and as many of each chunk as it says; returns each one's output."""
        rows = [(self.requests[n], 1) for n in decodes] + [(self.requests[n], count) for n, count in chunks]
        for request, _ in rows[: len(decodes)]:
            request.output_token_ids = [0]
        plan = Plan([request for request, _ in rows[: len(decodes)]])
        plan.chunks = [Chunk(request, count, is_last=False) for request, count in rows[len(decodes) :]]
        attention: Attention = self._backend(pack(plan, BLOCK_SIZE), self._cache, CPU)
        flat = [
            torch.cat(
                [self.tensors[r.handle][kind][r.num_computed_tokens : r.num_computed_tokens + n] for r, n in rows]
            )
            for kind in range(3)
        ]
        out = attention.attend(0, *flat, options)
        for request, count in rows:
            request.num_computed_tokens += count
        return list(out.split([count for _, count in rows]))


@pytest.mark.parametrize("backend", [StepAttention, TiledAttention])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_flat_batch_equals_each_request_alone_token_by_token(
    name: str, dtype: torch.dtype, backend: type[StepAttention | TiledAttention]
) -> None:
    options = OPTIONS[name]
    sequences = Sequences((9, 14, 5), dtype, backend)
    wanted = [naive(*(tensor.float() for tensor in tensors), options) for tensors in sequences.tensors]
    found: list[list[Tensor]] = [[], [], []]
    for decodes, chunks in (
        ([], [(0, 7), (1, 3)]),
        ([0], [(1, 6), (2, 4)]),  # a chunk with context beside one without
        ([0], [(1, 1)]),
        ([2], [(1, 3)]),
        ([1], []),
    ):
        for row, out in zip((*decodes, *(n for n, _ in chunks)), sequences.step(options, decodes, chunks), strict=True):
            found[row].append(out)
    for parts, tensor in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts).float(), tensor, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_chunks_and_many_decodes_of_very_different_lengths_agree_too(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    lengths = [301, *range(2, 70, 3)]
    sequences = Sequences(lengths, dtype, StepAttention)
    wanted = [naive(*(tensor.float() for tensor in tensors), options)[-1] for tensors in sequences.tensors]
    sequences.step(options, [], [(n, length - 1) for n, length in enumerate(lengths)])
    found = sequences.step(options, range(len(lengths)), [])
    torch.testing.assert_close(torch.cat(found).float(), torch.stack(wanted), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tiled_attention_gives_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    def last_outputs(cuts: Sequence[int], mates: Sequence[int]) -> Tensor:
        sequences = Sequences((11, 6, 3), dtype, TiledAttention)
        outputs = [sequences.step(Options(), [], [(0, cut), *((n, 1) for n in mates)])[0] for cut in cuts]
        return torch.cat([*outputs, sequences.step(Options(), [0], [(n, 1) for n in mates])[0]])

    alone = last_outputs((10,), ())
    assert torch.equal(alone, last_outputs((1, 5, 4), (1,)))
    assert torch.equal(alone, last_outputs((3, 7), (2, 1)))


def test_decodes_are_split_only_where_padding_would_be_much_more_than_they_are() -> None:
    def groups(sizes: list[int]) -> list[list[int]]:
        return [part.tolist() for part in _split(np.arange(len(sizes)), np.array(sizes))]

    assert groups([4, 5, 8, 3]) == [[0, 1, 2, 3]]
    assert groups([1, 250, 2, 240]) == [[0, 2], [1, 3]]
    assert groups([200, 100, 100, 99, 1, 1]) == [[4, 5], [1, 2, 3], [0]]
