"""One request's state inside the engine. No torch; owned by the engine's loop thread."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shm_transport.messages import AddRequest


@dataclass(slots=True, eq=False)
class Request:
    """A request from its ADD to its last token."""

    params: AddRequest
    queued_ns: int  # CLOCK_MONOTONIC
    first_scheduled_ns: int = 0  # 0: not yet
    num_computed_tokens: int = 0  # whose keys and values are in the cache
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def handle(self) -> int:
        """The server's name for it."""
        return self.params.handle

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.params.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, which is also the index of the next one."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + self.num_output_tokens

    def pending_token_ids(self) -> NDArray[np.int32]:
        """Return the tokens that are not computed yet, which the next forward must take: the prompt, or one token."""
        if self.num_computed_tokens < self.num_prompt_tokens:
            return self.params.prompt_token_ids[self.num_computed_tokens :]
        return np.array(self.output_token_ids[self.num_computed_tokens - self.num_prompt_tokens :], np.int32)
