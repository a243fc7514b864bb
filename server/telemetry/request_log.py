"""One line in the log for each request that has ended. No text of prompts, unless that was asked for."""

import logging
from collections.abc import Callable

from ringserve.server.telemetry.finished_sequence import FinishedSequence
from ringserve.server.telemetry.siblings import Siblings

logger = logging.getLogger(__name__)

_MAX_PROMPT_TOKENS = 1024  # of a prompt that is shown: decoding more would hold the loop


class RequestLog:
    """Called with each sequence that has ended; writes once all of a prompt's have.

    Args:
        decode: Turns token ids into text, for prompts in the log; None: they stay out of it.
    """

    def __init__(self, decode: Callable[[list[int]], str] | None = None) -> None:
        self._decode = decode
        self._siblings = Siblings()

    def __call__(self, sequence: FinishedSequence) -> None:
        """Take a sequence in."""
        if sequences := self._siblings.add(sequence):
            self._write(sequences)

    def _write(self, sequences: list[FinishedSequence]) -> None:
        last = sequences[-1]
        ttfts_ns = [sequence.ttft_ns for sequence in sequences if sequence.ttft_ns is not None]
        logger.info(
            "request %s: prompt tokens %d, cached %d, output tokens %d, TTFT %s, total %.1f ms, finish %s%s",
            last.request_id,
            len(last.prompt_token_ids),
            max(sequence.num_cached_tokens for sequence in sequences),
            sum(sequence.num_tokens for sequence in sequences),
            f"{min(ttfts_ns) / 1e6:.1f} ms" if ttfts_ns else "-",
            last.e2e_ns / 1e6,
            ",".join(sequence.finish_reason for sequence in sequences),
            self._prompt(last.prompt_token_ids),
        )

    def _prompt(self, token_ids: list[int]) -> str:
        if self._decode is None:
            return ""
        cut = "..." if len(token_ids) > _MAX_PROMPT_TOKENS else ""
        return f", prompt {self._decode(token_ids[:_MAX_PROMPT_TOKENS])!r}{cut}"
