"""What `generate` yields."""

import enum

import msgspec


class OutputKind(enum.Enum):
    """What each output holds."""

    DELTA = "delta"  # what is new since the last output
    CUMULATIVE = "cumulative"  # everything so far
    FINAL_ONLY = "final_only"  # everything, once


class CompletionOutput(msgspec.Struct, gc=False):
    """One of a request's n sequences: text and token ids by the request's OutputKind.

    Attributes:
        index: Which of the n sequences.
        finish_reason: stop, length or abort on the last output of the sequence, else None.
        stop_reason: The stop string or stop token id that ended it; None for EOS and every other reason.
        num_tokens: Tokens of the sequence so far, these included.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0


class RequestOutput(msgspec.Struct):
    """What has become of a request since the last output.

    Attributes:
        outputs: The sequences that have something new, by index.
        finished: Whether this is the request's last output.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
