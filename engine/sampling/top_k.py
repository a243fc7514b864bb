"""The k largest of each row, for few k and long rows: torch's own looks at every item several times."""

import torch
from torch import Tensor

_BLOCK = 64  # columns; of 32 to 256 the best for 5 and 20 of 49,152, and as good as any for 128


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `values.topk(k, dim=1)` does, which among equals may be others.

    The k largest lie in the k blocks whose maxima are the largest, or in the columns behind the last whole block.
    The fewer k are of the columns, the more is gained.

    Args:
        values: [num_rows, num_columns].
        k: At most num_columns.

    Returns:
        Values and columns, [num_rows, k] each, falling.
    """
    num_rows, num_columns = values.shape
    num_blocks = num_columns // _BLOCK
    if k * 4 > num_blocks or k == 0:
        found = values.topk(k, dim=1)
        return found.values, found.indices
    blocks = values[:, : num_blocks * _BLOCK].view(num_rows, num_blocks, _BLOCK)
    chosen = blocks.amax(dim=2).topk(k, dim=1).indices
    columns = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    rest = torch.arange(num_blocks * _BLOCK, num_columns, device=values.device).expand(num_rows, -1)
    columns = torch.cat((columns, rest), dim=1)
    found = values.gather(1, columns).topk(k, dim=1)
    return found.values, columns.gather(1, found.indices)
