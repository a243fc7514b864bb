"""One request's state inside the engine. No torch; owned by the engine's loop thread."""

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringserve.shm_transport.messages import AddRequest, Data, Fork

if TYPE_CHECKING:
    from torch import Tensor


class Matcher(Protocol):
    """Where one sequence stands in the grammar that it has to follow."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that may come where the grammar may end; they end the request."""

    @property
    def num_mask_bytes(self) -> int:
        """Of the masks that it fills; the same for all of one tokenizer."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is satisfied and admits no further token."""

    @property
    def may_stop(self) -> bool:
        """Whether the output could end at the last token: it satisfies the grammar with it and without it."""

    def fill(self, mask: NDArray[np.uint8]) -> None:
        """Write which tokens may come next: [num_mask_bytes], a bit for each token, the lowest first."""

    def consume(self, token_id: int) -> None:
        """Go on by a token that `fill` has allowed."""


class Collector(Protocol):
    """What is wanted of one prompt, in the making while its chunks are computed."""

    def extend(self, rows: "Tensor") -> None:
        """Take in the next rows, [n, size]: logits for logprobs, final hidden states for an embedding."""

    def messages(self, handle: int) -> list[Data]:
        """Return what the server is told of the whole prompt."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from its ADD to its last token; each fork of an ADD becomes a Request of its own, in `forks`."""

    params: AddRequest  # shared with the forks
    queued_ns: int  # CLOCK_MONOTONIC
    fork: InitVar[Fork | None] = None  # which of the ADD's forks it is; None: the first sequence
    handle: int = field(init=False)  # the server's name for it
    seed: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    adapter: int = 0  # its number among the engine's; 0: none
    arrival: int = 0  # its place among all that ever came, by which those of equal priority are served
    first_scheduled_ns: int = 0  # 0: not yet
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # whose keys and values are in the cache; while it waits: that were found there last
    num_passed_tokens: int = 0  # of prompts that were admitted while this one was the oldest and had no room
    block_ids: list[int] = field(default_factory=list)  # where those are, in order of the tokens
    num_registered_blocks: int = 0  # the first of `block_ids`, which the pool can find by their content
    content_id: int = 0  # the pool's name for the content of the last of those
    num_cached_tokens: int = 0  # of the prompt, that the pool had when this was first given a seat
    num_preemptions: int = 0
    num_collected_tokens: int = 0  # of the prompt, that `collector` has taken in; of a fork's all, for it wants none
    forks: list["Request"] = field(default_factory=list)  # wait until this one's prompt has been computed
    logit_rules: Any = None  # the sampler's LogitRules, made at the first token
    matcher: Matcher | None = None  # of a grammar: made before the request may run, moved on at each commit
    collector: Collector | None = None  # the core's, of what is wanted of the prompt

    def __post_init__(self, fork: Fork | None) -> None:
        own = fork or self.params
        self.handle, self.seed = own.handle, own.seed
        self.num_prompt_tokens = len(self.params.prompt_token_ids)
        if fork is None:
            others = self.params.forks
            self.forks = [Request(self.params, self.queued_ns, other, adapter=self.adapter) for other in others]

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return self.params.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, which is also the index of the next one."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_sibling_tokens(self) -> int:
        """Prompt tokens of the other prompts of its call."""
        return self.params.num_sibling_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its newest token, which it has sampled, is the only one that is not computed yet."""
        return bool(self.output_token_ids) and self.num_computed_tokens == self.num_tokens - 1

    def token_ids_between(self, start: int, end: int) -> NDArray[np.int32]:
        """Return the tokens at indexes start to end - 1 of prompt and output together, [end - start]."""
        length = self.num_prompt_tokens
        prompt = self.params.prompt_token_ids[start:end]
        if end <= length:
            return prompt
        output = self.output_token_ids[max(start - length, 0) : end - length]
        return np.concatenate((prompt, np.array(output, np.int32)))
