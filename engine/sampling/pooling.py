"""Embeddings: the final hidden states of a prompt, pooled to one vector as its chunks are computed."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from torch import Tensor

from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.records import DataContent


class Pooler:
    """One request's embedding in the making. What is fed to it is all tokens for MEAN, the last one alone for LAST."""

    def __init__(self, params: AddRequest) -> None:
        self._params = params
        self._sum: Tensor | None = None  # [hidden_size] fp32
        self._num_rows = 0

    def extend(self, hidden_states: Tensor) -> None:
        """Take in the next tokens' final hidden states, [n, hidden_size]."""
        part = hidden_states.sum(dim=0, dtype=torch.float32)
        self._sum = part if self._sum is None else self._sum + part
        self._num_rows += len(hidden_states)

    def messages(self, handle: int) -> list[Data]:
        """Return what the server is told; at least one token must have been taken in."""
        assert self._sum is not None
        embedding = self._sum / self._num_rows
        if self._params.is_normalized:
            embedding = F.normalize(embedding, dim=0)
        return [Data(handle=handle, content=DataContent.EMBEDDING, array=embedding.cpu().numpy())]
