"""A plan as flat arrays: what one forward needs to know. Numpy only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import Request
from engine.slot_pool import PADDING_SLOT, SlotPool


@dataclass(slots=True, frozen=True)
class Batch:
    """All requests' tokens in one row: first one token of each decode, then each prefill's tokens."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens], in the token's own request
    slot_mapping: NDArray[np.int64]  # [num_tokens], where the token's keys and values go
    decode_slots: NDArray[np.int64]  # [num_decodes, longest], slots of positions 0, 1, ...; PADDING_SLOT behind the end
    decode_lengths: NDArray[np.int64]  # [num_decodes], positions that count, the token itself included
    prefill_bounds: list[tuple[int, int]]  # first token and end of each prefill
    last_rows: NDArray[np.int64]  # [num_sampled], the tokens whose logits are wanted


def pack(decodes: Sequence[Request], prefills: Sequence[Request], pool: SlotPool) -> Batch:
    """Lay out one step; both groups hold their slots in `pool` already."""
    pending = [request.pending_token_ids() for request in (*decodes, *prefills)]
    starts = [request.num_computed_tokens for request in (*decodes, *prefills)]
    slots = [pool.slots_of(request.handle) for request in (*decodes, *prefills)]
    ends = [start + len(tokens) for start, tokens in zip(starts, pending, strict=True)]
    rows = np.cumsum([0, *map(len, pending)])
    num_decodes = len(decodes)
    return Batch(
        token_ids=_concatenate(pending),
        positions=_concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)]),
        slot_mapping=_concatenate([held[start:end] for held, start, end in zip(slots, starts, ends, strict=True)]),
        decode_slots=_pad(slots[:num_decodes], ends[:num_decodes]),
        decode_lengths=np.array(ends[:num_decodes], np.int64),
        prefill_bounds=[(int(rows[row]), int(rows[row + 1])) for row in range(num_decodes, len(pending))],
        last_rows=rows[1:] - 1,
    )


def _concatenate(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)


def _pad(slots: Sequence[NDArray[np.int64]], lengths: Sequence[int]) -> NDArray[np.int64]:
    padded = np.full((len(slots), max(lengths, default=0)), PADDING_SLOT, np.int64)
    for row, (held, length) in enumerate(zip(slots, lengths, strict=True)):
        padded[row, :length] = held[:length]
    return padded
