"""A batch as tensors where the model runs.

Two ways from numpy there: `ModelInputs.of`, plain, for CPUs and for attention that reads the batch itself; and
`upload`, which sends a whole batch to a GPU in one copy that nobody waits for: a copy from memory that is not pinned
would wait for everything that the device was told before, and so for the step in progress.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringserve.engine.schedule.batch import Batch, pad_tables
from ringserve.engine.transfer import send


@dataclass(slots=True, frozen=True)
class ModelInputs:
    """What a model's layers read of a batch."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    rows: Tensor  # [num_logits + num_hidden] int64: whose logits are wanted, then whose final hidden states
    num_logits: int
    adapters: NDArray[np.int64] | None  # [num_tokens], as the batch's
    adapters_of_rows: NDArray[np.int64] | None  # those of `rows`

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "ModelInputs":
        """Copy what is needed to `device`; on a GPU this waits for it."""
        rows = np.concatenate((batch.last_rows, batch.hidden_rows))
        return cls(
            token_ids=torch.from_numpy(batch.token_ids).to(device),
            positions=torch.from_numpy(batch.positions).to(device),
            rows=torch.from_numpy(rows).to(device),
            num_logits=len(batch.last_rows),
            adapters=batch.adapters,
            adapters_of_rows=None if batch.adapters is None else batch.adapters[rows],
        )


@dataclass(slots=True, frozen=True)
class PagedInputs:
    """What attention over the paged cache reads of a batch; int32 but for the slots."""

    slot_mapping: Tensor  # [num_tokens] int64
    block_tables: Tensor  # [num_decodes, most blocks]
    decode_lengths: Tensor  # [num_decodes]
    chunk_spans: Tensor  # [num_chunks, 3]: first row in the batch, number of rows, tokens before the chunk
    chunk_tables: Tensor  # [num_chunks, most blocks]
    max_length: int  # no request has more positions
    batch: Batch | None  # the same on the host; None where it changes under a recorded step

    @property
    def num_decodes(self) -> int:
        """Rows before the first chunk."""
        return len(self.decode_lengths)


def upload(
    batch: Batch, device: torch.device, last_tokens: Tensor, *, max_length: int
) -> tuple[ModelInputs, PagedInputs]:
    """Send a batch to `device` in one piece, and fill in the tokens that only the device knows.

    Args:
        batch: What to compute.
        device: Where.
        last_tokens: [rows] int64 on `device`, what the rows of the step before have sampled; read for `batch.sources`.
        max_length: No request has more positions.
    """
    rows = np.concatenate((batch.last_rows, batch.hidden_rows))
    chunk_tables = pad_tables([chunk.block_table for chunk in batch.chunks])
    spans = [(chunk.start, chunk.end - chunk.start, chunk.num_context) for chunk in batch.chunks]
    sources = np.empty(0, np.int64) if batch.sources is None else batch.sources
    arrays = (
        batch.token_ids, batch.positions, rows, batch.slot_mapping, batch.block_tables, batch.decode_lengths,
        np.array(spans, np.int32).reshape(-1, 3), chunk_tables, sources,
    )  # fmt: skip
    ids, positions, wanted, slots, block_tables, lengths, sent_spans, tables_of_chunks, decode_sources = send(
        arrays, device
    )
    token_ids = ids.long()
    if batch.sources is not None:
        fill_in(token_ids[: batch.num_decodes], decode_sources.long(), last_tokens)
    adapters_of_rows = None if batch.adapters is None else batch.adapters[rows]
    model = ModelInputs(
        token_ids, positions.long(), wanted.long(), len(batch.last_rows), batch.adapters, adapters_of_rows
    )
    paged = PagedInputs(slots.long(), block_tables, lengths, sent_spans, tables_of_chunks, max_length, batch)
    return model, paged


def fill_in(token_ids: Tensor, sources: Tensor, last_tokens: Tensor) -> None:
    """Put `last_tokens[source]` where a source is not -1, in place; [n] int64 each, all on one device."""
    torch.where(sources >= 0, last_tokens[sources.clamp(min=0)], token_ids, out=token_ids)
