"""What `generate` yields."""

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.records import DataContent


class OutputKind(enum.Enum):
    """What each output holds."""

    DELTA = "delta"  # what is new since the last output
    CUMULATIVE = "cumulative"  # everything so far
    FINAL_ONLY = "final_only"  # everything, once


class TokenLogprobs(msgspec.Struct, gc=False):
    """Natural logarithms of the probabilities of a run of tokens, before temperature and every other rule.

    Attributes:
        width: Entries for each token: the sampled one first, then the most likely ones.
        token_ids: Of the entries, token after token.
        logprobs: Like `token_ids`; None for the first token of a prompt.
        ranks: Of each sampled token; 1: the most likely.
    """

    width: int
    token_ids: list[int]
    logprobs: list[float | None]
    ranks: list[int]

    def extend(self, newer: "TokenLogprobs") -> None:
        """Append later tokens of the same request."""
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.ranks += newer.ranks

    def first(self, num_tokens: int) -> "TokenLogprobs":
        """Return a copy of the first tokens."""
        end = num_tokens * self.width
        return TokenLogprobs(self.width, self.token_ids[:end], self.logprobs[:end], self.ranks[:num_tokens])


class CompletionOutput(msgspec.Struct, gc=False):
    """One of a request's n sequences: text and token ids by the request's OutputKind.

    Attributes:
        index: Which of the n sequences.
        finish_reason: stop, length or abort on the last output of the sequence, else None.
        stop_reason: The stop string or stop token id that ended it; None for EOS and every other reason.
        num_tokens: Tokens of the sequence so far, these included.
        logprobs: Of `token_ids`, if the request asked for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    logprobs: TokenLogprobs | None = None


class RequestOutput(msgspec.Struct):
    """What has become of a request since the last output.

    Attributes:
        outputs: The sequences that have something new, by index.
        finished: Whether this is the request's last output.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        arrays: What the engine sent of the request beside tokens: logprobs of its prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    arrays: dict[DataContent, NDArray[Any]] = {}  # msgspec copies it


class EmbeddingOutput(msgspec.Struct):
    """A prompt's embedding: what `encode` yields.

    Attributes:
        embedding: [embedding_size] f4.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32]
