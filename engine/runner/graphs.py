"""Decode steps as CUDA graphs: a recorded step costs the host one copy and one call, whatever the model's depth.

A graph is for a fixed number of rows; a step takes the smallest that has room and pads it. Padding rows read and write
block 0, which is nobody's. The sizes, the padding and the buffer's layout are plain functions and tested; recording
and replaying have not been run on a GPU yet.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.attention.model_inputs import ModelInputs, PagedInputs, fill_in
from ringserve.engine.schedule.batch import Batch
from ringserve.engine.transfer import pinned

logger = logging.getLogger(__name__)

_MAX_ROWS = 256  # of the largest graph; more rows keep a GPU busy by themselves
_COLUMNS = 5  # numbers of a row before its block table: token id, position, slot, source, length

Compute = Callable[[ModelInputs, PagedInputs], tuple[Tensor, Tensor]]


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to record, rising, so that the last has room for `max_rows`, up to 256."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, _MAX_ROWS + 1, 16)]
    return [size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < max_rows]


def choose_bucket(sizes: list[int], num_rows: int) -> int | None:
    """Return the smallest size with room for `num_rows`, or None."""
    return next((size for size in sizes if size >= num_rows), None)


def is_plain_decode(batch: Batch) -> bool:
    """Whether a batch is what graphs are for: decodes alone, all sampled in order, nothing wanted beside."""
    has_more = batch.chunks or len(batch.hidden_rows) or batch.adapters is not None
    return not has_more and 0 < batch.num_decodes == len(batch.last_rows)


def lay_out(batch: Batch, num_rows: int, num_blocks: int) -> NDArray[np.int32]:
    """Put a plain decode batch into the form of a graph's input.

    Args:
        batch: At most `num_rows` decodes with tables of at most `num_blocks`.
        num_rows: The graph's.
        num_blocks: Width of the block tables.

    Returns:
        [num_rows * (5 + num_blocks)] for `Views`.
    """
    flat = np.zeros(num_rows * (_COLUMNS + num_blocks), np.int32)
    columns = flat[: _COLUMNS * num_rows].reshape(_COLUMNS, num_rows)
    columns[3], columns[4] = -1, 1
    own = columns[:, : batch.num_decodes]
    own[0], own[1], own[2], own[4] = batch.token_ids, batch.positions, batch.slot_mapping, batch.decode_lengths
    if batch.sources is not None:
        own[3] = batch.sources
    tables = flat[_COLUMNS * num_rows :].reshape(num_rows, num_blocks)
    tables[: batch.num_decodes, : batch.block_tables.shape[1]] = batch.block_tables
    return flat


@dataclass(slots=True, frozen=True)
class Views:
    """A graph's input, as laid out by `lay_out`; int32."""

    token_ids: Tensor  # [num_rows], as all but the tables
    positions: Tensor
    slot_mapping: Tensor
    sources: Tensor
    lengths: Tensor
    block_tables: Tensor  # [num_rows, num_blocks]

    @classmethod
    def of(cls, buffer: Tensor, num_rows: int, num_blocks: int) -> "Views":
        """Return views of the beginning of a flat buffer."""
        columns = buffer[: _COLUMNS * num_rows].view(_COLUMNS, num_rows)
        tables = buffer[_COLUMNS * num_rows : (_COLUMNS + num_blocks) * num_rows].view(num_rows, num_blocks)
        token_ids, positions, slots, sources, lengths = columns.unbind()
        return cls(token_ids, positions, slots, sources, lengths, tables)

    def inputs(self, last_tokens: Tensor, max_length: int) -> tuple[ModelInputs, PagedInputs]:
        """Return what a forward takes; the conversions are part of a graph, since they read what changes."""
        token_ids = self.token_ids.long()
        fill_in(token_ids, self.sources.long(), last_tokens)
        num_rows, device = len(token_ids), token_ids.device
        rows = torch.arange(num_rows, device=device)
        none = torch.empty(0, 3, dtype=torch.int32, device=device)
        model = ModelInputs(token_ids, self.positions.long(), rows, num_rows, None, None)
        paged = PagedInputs(
            self.slot_mapping.long(), self.block_tables, self.lengths, none, none[:, :0], max_length, None
        )
        return model, paged


class DecodeGraphs:
    """A model's recorded decode steps. They share one input buffer, one output and one pool of memory.

    Raises:
        Exception: Whatever recording raises, for a model whose forward waits for the device, say.
    """

    def __init__(
        self, compute: Compute, *, max_rows: int, num_blocks: int, max_length: int, vocab_size: int, last_tokens: Tensor
    ) -> None:
        self._num_blocks, self._device = num_blocks, last_tokens.device
        self._sizes = bucket_sizes(max_rows)
        largest = self._sizes[-1]
        self._buffer = torch.zeros(largest * (_COLUMNS + num_blocks), dtype=torch.int32, device=self._device)
        # Copied into at the end of each graph, so that the graphs need not all keep logits of their own.
        self._logits = torch.empty(largest, vocab_size, device=self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others find its memory in the pool
            views = Views.of(self._buffer, size, num_blocks)
            views.lengths.fill_(1)
            views.sources.fill_(-1)

            def run(views: Views = views, size: int = size) -> None:
                logits, _ = compute(*views.inputs(last_tokens, max_length))
                self._logits[:size].copy_(logits)

            run()  # compiles kernels and makes handles, which cannot be recorded
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run()
            pool = pool or graph.pool()
            self._graphs[size] = graph
            self._buffer.zero_()

    def try_replay(self, batch: Batch) -> Tensor | None:
        """Run a batch by its graph.

        Returns:
            Logits [num_decodes, vocab_size] fp32, good until the next call; None if there is no graph for the batch.
        """
        size = choose_bucket(self._sizes, batch.num_decodes)
        if size is None or not is_plain_decode(batch):
            return None
        flat = pinned(torch.from_numpy(lay_out(batch, size, self._num_blocks)), self._device)
        self._buffer[: len(flat)].copy_(flat, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[: batch.num_decodes]


def try_record(
    compute: Compute, *, max_rows: int, num_blocks: int, max_length: int, vocab_size: int, last_tokens: Tensor
) -> DecodeGraphs | None:
    """Record a model's decode steps, or say why not and return None: they are computed call by call then."""
    try:
        graphs = DecodeGraphs(
            compute, max_rows=max_rows, num_blocks=num_blocks, max_length=max_length, vocab_size=vocab_size,
            last_tokens=last_tokens,
        )  # fmt: skip
    except Exception as exc:  # whatever it is, the same step runs without a graph
        logger.warning("decode steps are not recorded as CUDA graphs: %s: %s", type(exc).__name__, exc)
        return None
    logger.info("decode steps are recorded as CUDA graphs for up to %d rows", bucket_sizes(max_rows)[-1])
    return graphs
