"""One request's sampling parameters, validated: what the model's vocabulary and context say comes in InputProcessor."""

import random
from collections.abc import Sized
from dataclasses import dataclass

from ringserve.server.errors import RequestError, check_field
from ringserve.server.generation.param_types import check_types
from ringserve.shm_transport.records import MAX_LOGPROBS

MAX_N = 128
MAX_STOP_STRINGS = 64  # OpenAI's 4 is its own; editors and code benchmarks send 5 to 12
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_REPETITION_PENALTY = 100.0  # and one over it the least
MAX_BIASED_TOKENS = 1024  # ids in logit_bias, allowed_token_ids or bad_token_ids
_GREEDY_BELOW = 1e-5
_SEEDS = random.Random()  # begun by the system; asking that for each seed gives the GIL away each time
_INT64 = 2**63
_N_RULE = f"must be from 1 to {MAX_N}"  # rules are made once: a request is checked against all of them
_PENALTY_RULE = f"must be from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
_LOGPROBS_RULE = f"must be from 0 to {MAX_LOGPROBS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to end.

    `max_tokens` None means: to the end of the context; 0: nothing but the prompt is computed. `seed` None draws one.
    Temperature 0 is greedy.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: frozenset[str] = frozenset()  # not skipped with the others: markers that a parser must see
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and output become less likely
    frequency_penalty: float = 0.0  # subtracted for each time that a token is in the output
    presence_penalty: float = 0.0  # subtracted once for each token that is in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # none: all
    bad_token_ids: tuple[int, ...] = ()  # never sampled
    bad_words: tuple[str, ...] = ()  # of one token each, never sampled
    logprobs: int | None = None  # most likely tokens to report beside the sampled one; None: no logprobs at all
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    grammar: str = ""  # what the output has to follow, in llguidance's notation; structured_output.py makes them
    stream_interval: int = 1  # tokens in a delta, the first and the last aside; the server may ask for more

    def __post_init__(self) -> None:
        """Raise RequestError for a value out of its range, or of a type that has none."""
        try:
            self._check_ranges()
        except TypeError:
            check_types(self)
            raise

    def _check_ranges(self) -> None:
        check_field(1 <= self.n <= MAX_N, "n", self.n, _N_RULE)
        check_field(
            self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "must be at least 0"
        )
        check_field(self.stream_interval >= 1, "stream_interval", self.stream_interval, "must be at least 1")
        check_field(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must be at least 0")
        # `not (a <= x <= b)` and not `x < a`, which NaN passes
        check_field(0 <= self.temperature <= 2, "temperature", self.temperature, "must be from 0 to 2")
        check_field(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        check_field(-1 <= self.top_k < 2**31, "top_k", self.top_k, "must be at least 1, or 0 or -1 to switch it off")
        check_field(0 <= self.min_p <= 1, "min_p", self.min_p, "must be from 0 to 1")
        check_field(self.seed is None or -_INT64 <= self.seed < _INT64, "seed", self.seed, "must be a 64-bit integer")
        check_field(
            self.n == 1 or not self.is_greedy, "n", self.n, "must be 1 with temperature 0: all would be the same"
        )
        self._check_stops()
        self._check_penalties()
        self._check_logprobs("logprobs", self.logprobs)
        self._check_logprobs("prompt_logprobs", self.prompt_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW

    def seeds(self) -> list[int]:
        """Return a 64-bit seed for each of the n sequences: seed, seed + 1, ..., or fresh ones."""
        first = _SEEDS.getrandbits(64) if self.seed is None or self.seed == -1 else self.seed
        return [(first + i) % 2**64 for i in range(self.n)]

    def _check_penalties(self) -> None:
        # Logits are divided by it: far smaller ones would leave the numbers that a float has.
        penalty, largest = self.repetition_penalty, MAX_REPETITION_PENALTY
        check_field(1 / largest <= penalty <= largest, "repetition_penalty", penalty, _PENALTY_RULE)
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            check_field(-2 <= value <= 2, name, value, "must be from -2 to 2")
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids", "bad_words"):
            _check_count(getattr(self, name), MAX_BIASED_TOKENS, name, "entries")
        for token_id, bias in self.logit_bias:
            check_field(-100 <= bias <= 100, f"logit_bias.{token_id}", bias, "must be from -100 to 100")

    def _check_logprobs(self, name: str, value: int | None) -> None:
        check_field(value is None or 0 <= value <= MAX_LOGPROBS, name, value, _LOGPROBS_RULE)

    def _check_stops(self) -> None:
        _check_count(self.stop, MAX_STOP_STRINGS, "stop", "strings")
        for stop in self.stop:
            check_field(stop != "", "stop", stop, "must not hold an empty string: it is in every text")
            if len(stop) > MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"stop is or holds a string of {len(stop)} characters: at most {MAX_STOP_STRING_CHARS}",
                    param="stop",
                )
        _check_count(self.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids", "ids")


def _check_count(values: Sized, most: int, name: str, kind: str) -> None:
    if len(values) > most:
        raise RequestError(f"{name} is a list of {len(values)} {kind}: at most {most}", param=name)
