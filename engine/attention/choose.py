"""Which attention a GPU gets: the first of the candidates that says on this device what the reference says.

At load every candidate runs a small random batch, a few milliseconds and, for Triton, the kernels' compilation. On
CPUs there is nothing to choose, and nothing of this is run.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringserve.engine.attention.base import Attention
from ringserve.engine.attention.kernels import Options
from ringserve.engine.attention.kv_cache import KVCache, LayerShape
from ringserve.engine.attention.model_inputs import PagedInputs, upload
from ringserve.engine.attention.step import StepAttention
from ringserve.engine.attention.varlen import BLOCK_MULTIPLE, VarlenAttention, is_paged
from ringserve.engine.schedule.batch import Batch, ChunkSpan, pad_tables

logger = logging.getLogger(__name__)

Make = Callable[[PagedInputs, KVCache], Attention]

_LAYER = 0
_GROUP = 4  # query heads of a kv head; the self-check of the loaded model has its own
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of outputs of about 1
# Positions of decodes, and tokens and context of chunks: one token, a block's end and beginning, a long history.
_DECODES = (1, 2, 31, 32, 33, 256, 257, 700)
_CHUNKS = ((1, 0), (7, 0), (70, 0), (5, 31), (33, 256), (64, 300))


class Backend(NamedTuple):
    """One way to attend over the paged cache."""

    name: str
    make: Make
    is_recordable: bool  # whether a step with it waits for nothing and reads nothing of the batch on the host


def _make_reference(inputs: PagedInputs, cache: KVCache) -> Attention:
    assert inputs.batch is not None
    return StepAttention(inputs.batch, cache, inputs.slot_mapping.device)


REFERENCE = Backend("gather and SDPA", _make_reference, is_recordable=False)


def choose_backend(shapes: list[LayerShape], block_size: int, device: torch.device) -> Backend:
    """Return the first candidate that agrees with the reference, or the reference.

    Args:
        shapes: Those of the model's layers.
        block_size: The cache's.
        device: A GPU, or a CPU if Triton's interpreter is on.
    """
    distinct = list(dict.fromkeys(shapes))
    for backend in candidates(block_size):
        try:
            error = max(
                relative_error(backend, shape, _GROUP, options, block_size, device)
                for shape in distinct
                for options in options_to_check(shape.num_kv_heads * _GROUP, device)
            )
        except Exception as exc:  # a compiler's, a driver's, a missing kernel's
            logger.warning("attention by %s cannot be used: %s: %s", backend.name, type(exc).__name__, exc)
            continue
        if error <= 1:
            logger.info("attention by %s: it agrees with the reference", backend.name)
            return backend
        logger.warning("attention by %s is wrong here, by %.3g times the tolerance", backend.name, error)
    logger.info("attention by %s", REFERENCE.name)
    return REFERENCE


def candidates(block_size: int) -> Iterator[Backend]:
    """Yield what could be used, the fastest first."""
    if block_size % BLOCK_MULTIPLE == 0 and is_paged():
        yield Backend("torch's varlen_attn", VarlenAttention, is_recordable=True)
    if importlib.util.find_spec("triton") is not None:
        from ringserve.engine.attention.triton_paged import TritonAttention

        yield Backend("Triton", TritonAttention, is_recordable=True)


def options_to_check(num_heads: int, device: torch.device) -> Iterator[Options]:
    """Yield a plain layer's options, a window's, and all at once."""
    yield Options()
    yield Options(sliding_window=40)
    yield Options(0.3, 50, 5.0, torch.linspace(-2, 2, num_heads, device=device))


@torch.inference_mode()
def relative_error(
    backend: Backend, shape: LayerShape, group: int, options: Options, block_size: int, device: torch.device
) -> float:
    """Return how far the backend is from the reference in fp32, in tolerances: 1 is as much as rounding may do.

    What they leave in the cache must be equal.
    """
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = make_batch(block_size)
    cache, exact = (
        KVCache({_LAYER: LayerShape(*_dims(shape), dtype)}, num_blocks, block_size, device)
        for dtype in (shape.dtype, torch.float32)
    )
    for own, copied in zip(cache.layer(_LAYER), exact.layer(_LAYER), strict=True):
        own.copy_(torch.randn(own.shape, generator=generator))
        copied.copy_(own)
    heads = (shape.num_kv_heads * group, shape.num_kv_heads, shape.num_kv_heads)
    dims = (shape.key_dim, shape.key_dim, shape.value_dim)
    query, key, value = (
        torch.randn(len(batch.positions), count, dim, generator=generator).to(device, shape.dtype)
        for count, dim in zip(heads, dims, strict=True)
    )
    _, paged = upload(batch, device, torch.zeros(0, dtype=torch.int64, device=device), max_length=1024)
    found = backend.make(paged, cache).attend(_LAYER, query, key, value, options)
    wanted = REFERENCE.make(paged, exact).attend(_LAYER, query.float(), key.float(), value.float(), options)
    for own, copied in zip(cache.layer(_LAYER), exact.layer(_LAYER), strict=True):
        if not torch.equal(own.float(), copied):
            return float("inf")
    return _distance(found.float(), wanted) / _TOLERANCES.get(shape.dtype, 0.0)


def _distance(found: Tensor, wanted: Tensor) -> float:
    distance = float((found - wanted).abs().max())
    return distance if distance == distance else float("inf")  # NaN


def _dims(shape: LayerShape) -> tuple[int, int, int]:
    return shape.num_kv_heads, shape.key_dim, shape.value_dim


def make_batch(block_size: int) -> tuple[Batch, int]:
    """Return a batch of decodes and chunks over blocks in no order, and how many blocks there are."""
    ends = [*_DECODES, *(count + context for count, context in _CHUNKS)]
    sizes = [-(-end // block_size) for end in ends]
    blocks = np.random.default_rng(0).permutation(sum(sizes)) + 1
    tables = np.split(blocks.astype(np.int32), np.cumsum(sizes)[:-1])
    chunks, end = [], len(_DECODES)
    for (count, context), table in zip(_CHUNKS, tables[len(_DECODES) :], strict=True):
        chunks.append(ChunkSpan(end, end + count, context, table))
        end += count
    positions = [np.array(_DECODES) - 1, *(context + np.arange(count) for count, context in _CHUNKS)]
    counts = [1] * len(_DECODES) + [count for count, _ in _CHUNKS]
    flat = np.concatenate(positions)
    owners = np.repeat(np.arange(len(ends)), counts)
    slots = [
        int(tables[owner][at // block_size]) * block_size + at % block_size
        for owner, at in zip(owners, flat, strict=True)
    ]
    batch = Batch(
        token_ids=np.zeros(end, np.int64), positions=flat, slot_mapping=np.array(slots, np.int64),
        block_tables=pad_tables(tables[: len(_DECODES)]), decode_lengths=np.array(_DECODES),
        last_rows=np.empty(0, np.int64), chunks=chunks,
    )  # fmt: skip
    return batch, 1 + sum(sizes)
