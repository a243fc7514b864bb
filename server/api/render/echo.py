"""`echo`: each choice begins with its prompt, and with the prompt's logprobs where logprobs are asked for."""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ringserve.server.api.render.chunks import ChunkFormat, DeltaFrame
from ringserve.server.api.render.logprob_format import PromptLogprobs
from ringserve.server.generation.outputs import CompletionOutput, RequestOutput
from ringserve.shm_transport.records import DataContent


class PromptSource(Protocol):
    """What knows a prompt and its logprobs, once the first token is there: a collector, or a RequestOutput."""

    prompt_token_ids: list[int]
    arrays: dict[DataContent, NDArray[Any]]


class Echo:
    """Puts the prompts in front of a response's choices, once each.

    Args:
        texts: Of each prompt, as it is shown.
        sources: Of each prompt.
        sequences_per_prompt: n; choice i belongs to prompt i // n.
    """

    def __init__(self, texts: list[str], sources: Sequence[PromptSource], sequences_per_prompt: int) -> None:
        self._texts = texts
        self._sources = sources
        self._per_prompt = sequences_per_prompt
        self._begun: set[int] = set()

    def prepend_all(self, outputs: list[RequestOutput]) -> None:
        """Put the prompts in front of whole answers."""
        for request_output in outputs:
            for output in request_output.outputs:
                self.prepend(output)

    def prepend(self, output: CompletionOutput) -> None:
        """Put its prompt in front of a choice's first output; leave later ones alone."""
        if output.index in self._begun:
            return
        self._begun.add(output.index)
        prompt = output.index // self._per_prompt
        output.text = self._texts[prompt] + output.text
        if output.logprobs is not None:
            source = self._sources[prompt]
            known = PromptLogprobs.of(source.arrays)
            if known is not None:
                own = known.as_output(source.prompt_token_ids[0], output.logprobs.width - 1)
                own.extend(output.logprobs)
                output.logprobs = own


class EchoChunks:
    """A ChunkFormat whose choices begin with their prompts."""

    def __init__(self, inner: ChunkFormat, echo: Echo) -> None:
        self._inner = inner
        self._echo = echo

    def opening(self, num_choices: int, usage: bytes) -> bytes:
        """Return what comes before all text."""
        return self._inner.opening(num_choices, usage)

    def delta_frame(self, index: int) -> DeltaFrame | None:
        """Return what comes before and after a delta's text. Asked for after a choice's first output only."""
        return self._inner.delta_frame(index)

    def delta(self, output: CompletionOutput, usage: bytes) -> bytes:
        """Return the chunk of a delta."""
        self._echo.prepend(output)
        return self._inner.delta(output, usage)

    def finish(self, output: CompletionOutput, usage: bytes, *, is_fingerprinted: bool) -> bytes:
        """Return the last chunk of one choice."""
        self._echo.prepend(output)
        return self._inner.finish(output, usage, is_fingerprinted=is_fingerprinted)

    def usage(self, usage: bytes) -> bytes:
        """Return the usage chunk."""
        return self._inner.usage(usage)
