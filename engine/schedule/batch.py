"""A plan as flat arrays: what one forward needs to know. Numpy only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringserve.engine.schedule.request import Request
from ringserve.engine.schedule.scheduler import Chunk, Plan, PromptRows


class ChunkSpan(NamedTuple):
    """Where one request's chunk of prompt stands in the batch, and what stands before it in the cache."""

    start: int  # first row
    end: int  # row behind the last
    num_context: int  # the request's tokens before the chunk, computed already
    block_table: NDArray[np.int32]  # [num_blocks], the blocks of context and chunk, in order


def _no_rows() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(slots=True, frozen=True)
class Batch:
    """All requests' tokens in one row: first one token of each decode, then each chunk's tokens."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens], in the token's own request
    slot_mapping: NDArray[np.int64]  # [num_tokens], block_id * block_size + offset: where its keys and values go
    block_tables: NDArray[np.int32]  # [num_decodes, most blocks], the decodes' blocks in order; block 0 behind the end
    decode_lengths: NDArray[np.int64]  # [num_decodes], positions that count, the token itself included
    last_rows: NDArray[np.int64]  # [num_logits], the rows whose logits are wanted, one may be named several times
    chunks: list[ChunkSpan] = field(default_factory=list)
    hidden_rows: NDArray[np.int64] = field(default_factory=_no_rows)  # whose final hidden states are wanted
    adapters: NDArray[np.int64] | None = None  # [num_tokens], each row's adapter, 0: none; None: nobody has any
    # [num_decodes], which row of the step before samples the decode's input, -1: token_ids has it. None: it has all.
    sources: NDArray[np.int64] | None = None

    @property
    def num_decodes(self) -> int:
        """Rows before the first chunk."""
        return len(self.decode_lengths)


class _Rows(NamedTuple):
    """Some of a batch's rows."""

    token_ids: NDArray[np.integer[Any]]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]


def pack(plan: Plan, block_size: int) -> Batch:
    """Lay out one step; every request holds the blocks for its tokens already.

    The logits' rows are those of `plan.sampled`, then all of `plan.scored`; the hidden states' those of `plan.pooled`.
    """
    parts = [_decode_rows(plan.decodes, block_size)]
    chunks = []
    end = len(plan.decodes)
    for chunk in plan.chunks:
        start, end = end, end + chunk.num_tokens
        first = chunk.request.num_computed_tokens
        block_table = _block_table(chunk.request, first + chunk.num_tokens, block_size)
        chunks.append(ChunkSpan(start, end, first, block_table))
        parts.append(_chunk_rows(chunk, block_table, block_size))
    return Batch(
        token_ids=np.concatenate([part.token_ids for part in parts], dtype=np.int64),
        positions=np.concatenate([part.positions for part in parts]),
        slot_mapping=np.concatenate([part.slots for part in parts]),
        block_tables=pad_tables(
            [_block_table(each, each.num_computed_tokens + 1, block_size) for each in plan.decodes]
        ),
        decode_lengths=parts[0].positions + 1,
        last_rows=np.array([*plan.sampled_rows, *_rows_of(plan.scored)], np.int64),
        chunks=chunks,
        hidden_rows=np.array(_rows_of(plan.pooled), np.int64),
        adapters=_adapters(plan),
    )


def _decode_rows(requests: Sequence[Request], block_size: int) -> _Rows:
    token_ids, slots = [], []
    for request in requests:
        token_ids.append(request.output_token_ids[-1])
        block, offset = divmod(request.num_computed_tokens, block_size)
        slots.append(request.block_ids[block] * block_size + offset)
    positions = [request.num_computed_tokens for request in requests]
    return _Rows(np.array(token_ids, np.int64), np.array(positions, np.int64), np.array(slots, np.int64))


def _chunk_rows(chunk: Chunk, block_table: NDArray[np.int32], block_size: int) -> _Rows:
    first = chunk.request.num_computed_tokens
    token_ids = chunk.request.token_ids_between(first, first + chunk.num_tokens)
    positions = np.arange(first, first + chunk.num_tokens)
    blocks, offsets = np.divmod(positions, block_size)
    return _Rows(token_ids, positions, block_table[blocks].astype(np.int64) * block_size + offsets)


def _rows_of(wanted: Sequence[PromptRows]) -> list[int]:
    return [row for rows in wanted for row in range(rows.start, rows.end)]


def _adapters(plan: Plan) -> NDArray[np.int64] | None:
    adapters = [request.adapter for request in plan.decodes] + [chunk.request.adapter for chunk in plan.chunks]
    if not any(adapters):
        return None
    counts = [1] * len(plan.decodes) + [chunk.num_tokens for chunk in plan.chunks]
    return np.repeat(np.array(adapters, np.int64), counts)


def _block_table(request: Request, num_tokens: int, block_size: int) -> NDArray[np.int32]:
    return np.array(request.block_ids[: -(-num_tokens // block_size)], np.int32)


def pad_tables(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Put block tables one below the other, [len(tables), longest], block 0 behind the ends of shorter ones."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
