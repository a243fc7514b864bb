"""From a prompt and sampling parameters to engine requests: render, tokenize, validate. Knows no HTTP."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringserve.server.chat.template import ChatPrompt
from ringserve.server.errors import ContextLengthError, RequestError, check_field, shown
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.grammar.checker import GrammarChecker
from ringserve.server.key_number import current_key_number
from ringserve.server.telemetry.trace_headers import TraceHeaders, current_trace_headers
from ringserve.server.text.tokenizer import MAX_TEXT_BYTES, check_text_size
from ringserve.server.workers import run_near
from ringserve.shm_transport.messages import AddRequest, Fork
from ringserve.shm_transport.records import Pooling

_INLINE_ITEMS = 4096  # characters or token ids; more are processed on a thread: so many take about a millisecond
_MESSAGE_ITEMS = 64  # what rendering a message costs beside its text
_REQUEST_ITEMS = 16  # what a request costs beside its prompt
_BAD_WORD_ITEMS = 8
_BYTES_PER_TOKEN = 8  # of a prompt that fills a context beyond 262,144 tokens: twice those of ordinary text
_NO_SAMPLING = SamplingParams()  # of an embedding


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to complete: the argument of `EngineClient.generate`.

    `prompt` is a text or token ids. `request_id` is the name by which it can be aborted.
    """

    request_id: str
    prompt: str | list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    kind: OutputKind = OutputKind.DELTA
    add_special_tokens: bool = True
    first_index: int = 0  # index of the first of the n sequences, for several prompts in one response
    truncation: "Truncation | None" = None
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # prompts of different salts share no cached block
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    adapter: str = ""  # name of a LoRA adapter that the engine has; none: the model as it is
    deadline_s: float | None = None  # when it ends, done or not, on time.monotonic()'s clock
    name: str = "prompt"  # what errors call it
    limit_name: str = "max_tokens"  # what errors call params.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeRequest:
    """One text, or token ids, to embed: the argument of `EngineClient.encode`.

    `pooling` None is the model's own. `request_id` is the name by which it can be aborted.
    """

    request_id: str
    prompt: str | list[int]
    pooling: Pooling | None = None
    is_normalized: bool = True
    add_special_tokens: bool = True
    truncation: "Truncation | None" = None
    priority: int = 0  # lower runs earlier
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    name: str = "prompt"  # what errors call it
    adapter: str = ""  # as GenerateRequest's


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """How to shorten a prompt: to `max_tokens` tokens, -1 for what the context holds."""

    max_tokens: int
    keeps_end: bool = True  # else the beginning

    @classmethod
    def of(cls, max_tokens: int | None, side: str | None) -> "Truncation | None":
        """Return what `truncate_prompt_tokens` and `truncation_side` ask for; None: nothing."""
        return None if max_tokens is None else cls(max_tokens=max_tokens, keeps_end=side in (None, "left"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRequest:
    """A validated request: token ids, and parameters that fit the model."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: OutputKind
    max_tokens: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...]
    first_index: int
    bad_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    arrival_ns: int = field(default_factory=time.monotonic_ns)  # when all of the request had been read
    trace_headers: TraceHeaders | None = field(default_factory=current_trace_headers)
    adapter: str = ""
    deadline_s: float | None = None
    pooling: Pooling = Pooling.NONE
    is_normalized: bool = False
    key_number: int = field(default_factory=current_key_number)  # of its client's API key; 0: all clients are one
    num_sibling_tokens: int = field(init=False, default=0)  # prompt tokens of the other prompts of its call
    prompt_array: NDArray[np.int32] = field(init=False)  # prompt_token_ids for the engine, once for all n sequences

    def __post_init__(self) -> None:
        """Convert the prompt here, where it may be on a thread."""
        object.__setattr__(self, "prompt_array", np.array(self.prompt_token_ids, np.int32))

    def engine_request(self, handles: Sequence[int]) -> AddRequest:
        """Return the message to the engine for the n sequences, whose handles these are."""
        params = self.params
        first, *forks = map(Fork, handles, params.seeds())
        return AddRequest(
            handle=first.handle, seed=first.seed, forks=tuple(forks), prompt_token_ids=self.prompt_array,
            max_tokens=max(self.max_tokens, 1), min_tokens=params.min_tokens, temperature=params.temperature,
            top_p=params.top_p, top_k=max(params.top_k, 0), min_p=params.min_p, eos_token_id=self.eos_token_id,
            stop_token_ids=self.stop_token_ids, repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
            logit_bias=params.logit_bias, allowed_token_ids=params.allowed_token_ids, bad_token_ids=self.bad_token_ids,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            priority=self.priority, cache_salt=self.cache_salt, adapter=self.adapter, pooling=self.pooling,
            is_normalized=self.is_normalized, grammar=params.grammar, num_sibling_tokens=self.num_sibling_tokens,
            key_number=self.key_number,
        )  # fmt: skip


class InputProcessor:
    """Validates requests against one model."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self.grammars = GrammarChecker(model.tokenizer)

    async def render_chat(self, prompt: ChatPrompt) -> str:
        """Return the chat's prompt text.

        Raises:
            RequestError: If the model has no chat template, or it refuses the messages.
        """
        template = self._model.chat_template
        if template is None:
            raise RequestError("this model has no chat template: use /v1/completions, or start with --chat-template")
        is_small = sum(map(_message_items, prompt.messages)) <= _INLINE_ITEMS
        has_more = prompt.tools or prompt.documents or prompt.extra
        return await run_near(is_small and not has_more, template.render, prompt)

    async def process(self, request: GenerateRequest) -> ProcessedRequest:
        """Process one request; errors as process_all."""
        return (await self.process_all([request]))[0]

    async def process_all(self, requests: list[GenerateRequest]) -> list[ProcessedRequest]:
        """Tokenize and validate; on a thread if there is much of it, or a grammar to check.

        Raises:
            RequestError: Naming the field, its value and the remedy.
        """
        for request in requests:
            if request.params.grammar:
                await self.grammars.check(request.params.grammar)
        return _siblings(await _each(self._process, requests))

    async def process_encode(self, requests: list[EncodeRequest]) -> list[ProcessedRequest]:
        """Do what process_all does for requests that want an embedding.

        Raises:
            RequestError: As process_all; or if the engine embeds nothing.
        """
        if not self._model.embedding_size:
            raise RequestError("this engine makes no embeddings: use one that serves a model", param="model")
        return _siblings(await _each(self._process_encode, requests))

    def check_token_ids(self, field_name: str, token_ids: "list[int] | tuple[int, ...]") -> None:
        """Refuse what is no token id of the model.

        Raises:
            RequestError: Naming the field.
        """
        size = self._model.vocab_size
        if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < size):
            return
        wrong = next(token_id for token_id in token_ids if type(token_id) is not int or not 0 <= token_id < size)
        raise RequestError(
            f"{field_name} holds {shown(wrong)}: token ids are integers from 0 to {size - 1}", param=field_name
        )

    def _process(self, request: GenerateRequest) -> ProcessedRequest:
        return self._fit(request, self._token_ids(request, num_reserved=1))

    def _process_encode(self, request: EncodeRequest) -> ProcessedRequest:
        return ProcessedRequest(
            request_id=request.request_id,
            prompt_token_ids=self._token_ids(request, num_reserved=0),
            params=_NO_SAMPLING,
            kind=OutputKind.FINAL_ONLY,
            max_tokens=0,
            eos_token_id=-1,
            stop_token_ids=(),
            first_index=0,
            priority=request.priority,
            pooling=request.pooling or self._model.pooling,
            is_normalized=request.is_normalized,
            arrival_ns=request.arrival_ns,
            adapter=request.adapter,
        )

    def _token_ids(self, request: GenerateRequest | EncodeRequest, *, num_reserved: int) -> list[int]:
        """Return a prompt's valid token ids; `num_reserved` more must fit the context."""
        given = request.prompt
        token_ids = self._tokenize(given, request) if isinstance(given, str) else given
        most = self._model.max_model_len - num_reserved
        if request.truncation is not None:
            token_ids = _truncate(token_ids, request.truncation, self._model.max_model_len, most)
        self._check_length(token_ids, request.name, num_reserved)
        if not isinstance(given, str):
            self.check_token_ids(request.name, token_ids)
        return token_ids

    def _tokenize(self, text: str, request: GenerateRequest | EncodeRequest) -> list[int]:
        model, name = self._model, request.name
        if len(text) > model.max_model_len * model.tokenizer.longest_token and request.truncation is None:
            raise self._overflow(f"{name} has {len(text)} characters, more than these can hold: shorten it", name)
        self._check_text_size(text, name)
        try:
            return model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
        except TypeError as exc:  # the library's for a text that cannot be UTF-8
            raise RequestError(f"{name} holds a lone surrogate: texts must be valid Unicode", param=name) from exc

    def _check_text_size(self, text: str, name: str) -> None:
        """Refuse a text that takes too long to tokenize: all but oddities of that size have more tokens than fit."""
        try:
            check_text_size(text, name, max(MAX_TEXT_BYTES, _BYTES_PER_TOKEN * self._model.max_model_len))
        except RequestError as exc:
            raise self._overflow(f"{exc}: shorten it", name) from exc

    def _check_length(self, token_ids: list[int], name: str, num_reserved: int) -> None:
        if not token_ids:
            raise RequestError(f"{name} is empty: it must have at least one token", param=name)
        if len(token_ids) > self._model.max_model_len - num_reserved:
            output = f", and the output needs at least {num_reserved} more" if num_reserved else ""
            raise self._overflow(f"{name} has {len(token_ids)} tokens{output}: shorten it", name)

    def _overflow(self, problem: str, name: str) -> ContextLengthError:
        return ContextLengthError.of(self._model.max_model_len, problem, param=name)

    def _max_tokens(self, request: GenerateRequest, room: int) -> int:
        """Return how many tokens a request may get, of those that its prompt leaves room for."""
        params, name, context = request.params, request.limit_name, self._model.max_model_len
        limit = room if params.max_tokens is None else params.max_tokens
        if limit > context:
            raise self._overflow(f"{name} is {shown(limit)}: ask for at most {context}, or leave it out", name)
        rule = f"at most the {limit} tokens of {name}"
        check_field(params.max_tokens is None or params.min_tokens <= limit, "min_tokens", params.min_tokens, rule)
        if params.min_tokens > room:
            asked = f"min_tokens is {shown(params.min_tokens)} and {request.name} leaves room for {room}"
            raise self._overflow(f"{asked}: ask for fewer, or shorten {request.name}", "min_tokens")
        return min(limit, room)

    def _fit(self, request: GenerateRequest, token_ids: list[int]) -> ProcessedRequest:
        model, params = self._model, request.params
        max_tokens = self._max_tokens(request, model.max_model_len - len(token_ids))
        self.check_token_ids("stop_token_ids", params.stop_token_ids)
        self.check_token_ids("allowed_token_ids", params.allowed_token_ids)
        self.check_token_ids("bad_token_ids", params.bad_token_ids)
        self.check_token_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias))
        self._check_logprobs(params)
        bad_token_ids = params.bad_token_ids + tuple(map(self._bad_token_id, params.bad_words))
        eos_token_id = -1 if params.ignore_eos else model.eos_token_id
        extra_eos = () if params.ignore_eos else model.extra_eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*params.stop_token_ids, *extra_eos)))
        _check_allowed(params, bad_token_ids, (eos_token_id, *stop_token_ids))
        return ProcessedRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            params=params,
            kind=request.kind,
            max_tokens=max_tokens,
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            first_index=request.first_index,
            bad_token_ids=bad_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival_ns=request.arrival_ns,
            adapter=request.adapter,
            deadline_s=request.deadline_s,
        )

    def _bad_token_id(self, word: str) -> int:
        """Return the one token that a bad word is."""
        tokenizer = self._model.tokenizer
        if len(word) > tokenizer.longest_token:
            raise RequestError(
                f"bad_words holds a word of {len(word)} characters: the longest token has {tokenizer.longest_token}",
                param="bad_words",
            )
        token_ids = tokenizer.encode(word, add_special_tokens=False)
        if len(token_ids) != 1:
            raise RequestError(
                f"bad_words holds {shown(word)}, which is {len(token_ids)} tokens: only words of one token are "
                "supported; a word and the same after a space are different tokens",
                param="bad_words",
            )
        return token_ids[0]

    def _check_logprobs(self, params: SamplingParams) -> None:
        size = self._model.vocab_size
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            check_field(value is None or value <= size, name, value, f"the vocabulary has {size} tokens")


def _siblings(prompts: list[ProcessedRequest]) -> list[ProcessedRequest]:
    """Tell each prompt of a call how long the others are: the scheduler counts them as one."""
    num_tokens = sum(len(each.prompt_token_ids) for each in prompts)
    for each in prompts:
        object.__setattr__(each, "num_sibling_tokens", num_tokens - len(each.prompt_token_ids))
    return prompts


_Request = TypeVar("_Request", GenerateRequest, EncodeRequest)


async def _each(process: Callable[[_Request], ProcessedRequest], requests: list[_Request]) -> list[ProcessedRequest]:
    """Process requests, on a thread if there is much of them."""
    is_short = sum(map(_num_items, requests)) <= _INLINE_ITEMS
    return await run_near(is_short, lambda: [process(request) for request in requests])


def _num_items(request: GenerateRequest | EncodeRequest) -> int:
    """Return what a request costs, in characters or token ids.

    Raises:
        RequestError: If its prompt is neither.
    """
    if not isinstance(request.prompt, (str, list, tuple)):
        raise RequestError(
            f"{request.name} is {shown(request.prompt)}: must be a text or a list of token ids", param=request.name
        )
    params = request.params if isinstance(request, GenerateRequest) else _NO_SAMPLING
    listed = (params.stop_token_ids, params.allowed_token_ids, params.bad_token_ids, params.logit_bias)
    return len(request.prompt) + _REQUEST_ITEMS + sum(map(len, listed)) + _BAD_WORD_ITEMS * len(params.bad_words)


def _message_items(message: dict[str, Any]) -> int:
    """Return what rendering a message costs; calls hold decoded arguments, whose size is not known."""
    return len(message["content"]) + _MESSAGE_ITEMS + (_INLINE_ITEMS if "tool_calls" in message else 0)


def _truncate(token_ids: list[int], truncation: Truncation, context: int, most: int) -> list[int]:
    limit = truncation.max_tokens
    if limit != -1 and not 1 <= limit <= context:
        raise RequestError(
            f"truncate_prompt_tokens is {shown(limit)}: must be from 1 to the context of {context}, or -1",
            param="truncate_prompt_tokens",
        )
    limit = most if limit == -1 else limit
    return token_ids[max(len(token_ids) - limit, 0) :] if truncation.keeps_end else token_ids[:limit]


def _check_allowed(params: SamplingParams, bad_token_ids: tuple[int, ...], ends: tuple[int, ...]) -> None:
    """Refuse what leaves no token to begin with; what a grammar has to say to it shows in the engine."""
    allowed = set(params.allowed_token_ids)
    if allowed and allowed.issubset(bad_token_ids):
        raise RequestError(
            "allowed_token_ids holds only tokens that bad_words or bad_token_ids exclude: allow others too",
            param="allowed_token_ids",
        )
    if allowed and params.min_tokens and not params.grammar and allowed.issubset((*ends, *bad_token_ids)):
        raise RequestError(
            f"allowed_token_ids holds only tokens that end the output, and min_tokens is {params.min_tokens}: allow "
            "others too, or leave min_tokens out",
            param="allowed_token_ids",
        )
