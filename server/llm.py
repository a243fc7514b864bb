"""LLM: prompts in, outputs out, from plain Python without asyncio, over the same engine process and rings.

A thread of its own runs the event loop with the AsyncLLM; the caller's thread waits for it.
"""

import asyncio
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import uvloop
from tqdm import tqdm

from ringserve.server.api.chat_request import ChatCompletionRequest
from ringserve.server.api.chat_settings import ChatSettings
from ringserve.server.errors import EngineDeadError, EngineGenerateError, RequestError, shown
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest, ProcessedRequest
from ringserve.server.generation.outputs import EmbeddingOutput, OutputKind, RequestOutput
from ringserve.server.generation.param_types import check_types
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.settings.config import ServeConfig
from ringserve.server.workers import run_all
from ringserve.shm_transport.records import Pooling

_ANY_NUMBER = 2**62

T = TypeVar("T")
Prompt = str | list[int]
Conversation = list[dict[str, Any]]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model for offline use; also a context manager, which shuts it down at its end.

    Works in scripts without a main guard and in notebooks. The engine ends with `shutdown`, with the last reference to
    this, or with the interpreter. Ctrl-C aborts what runs, and the LLM can be used again.

    Args:
        model: A directory or a hub id; None is the default model.
        config: Any other field of ServeConfig; those of HTTP mean nothing here.

    Raises:
        StartupError: If the model or an option is wrong, or the engine could not load.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self.config = ServeConfig(model=model, **{"max_num_queued_tokens": _ANY_NUMBER, **config})
        self._request_ids = map(str, itertools.count())
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="ringserve-llm", daemon=True)
        self._thread.start()
        try:
            self._llm = self._start_engine()
        except BaseException:
            _end(self._loop, self._thread)
            raise
        names = self.config.tool_call_parser, self.config.reasoning_parser
        self._chat = ChatSettings.of(self._llm.model.chat_template, *names)
        self._shutdown = weakref.finalize(self, _shut_down, self._llm, self._loop, self._thread)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete prompts; return their outputs in the same order.

        Args:
            prompts: Texts or lists of token ids, or one of them.
            params: For all, or one for each; None is the model's defaults and 16 tokens.
            use_tqdm: Whether to draw a progress bar on stderr.

        Raises:
            RequestError: If a prompt or its parameters are wrong, naming it; nothing has run then, unless the engine
                had to find it.
            EngineGenerateError: If the engine failed a prompt, naming it; the others are aborted.
            EngineDeadError: If the engine is gone.
        """
        default = SamplingParams(**self._defaults())
        return self._generate(_listed(prompts), params or default, "prompts", use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations; return the answers in the same order.

        Args:
            messages: Conversations, each a list of messages as OpenAI writes them, or one of them.
            params: As `generate`; None is the model's defaults and tokens up to the context's end.
            tools: What the model is told that it may call, as a chat completion request has them; its calls are text.
            documents: For the chat template, as the three that follow: fields of a chat completion request too.
            chat_template_kwargs: See `documents`.
            add_generation_prompt: See `documents`.
            continue_final_message: See `documents`.
            use_tqdm: As `generate`.

        Raises:
            ServerError: As `generate`.
        """
        default = SamplingParams(**self._defaults(), max_tokens=None)
        options = {
            "tools": tools, "documents": documents, "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
        }  # fmt: skip
        prompts = self._call(self._render_all(_conversations(messages), options))
        shown = self._chat.tool_format.markers if tools and self._chat.tool_format is not None else ()
        return self._generate(prompts, _showing(params or default, shown), "messages", use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return the prompts' embeddings in the same order.

        Args:
            prompts: As `generate`.
            pooling: "last" or "mean"; None is the model's own.
            normalize: Whether embeddings shall have length 1.
            use_tqdm: As `generate`.

        Raises:
            ServerError: As `generate`.
        """
        requests = [
            EncodeRequest(
                request_id=next(self._request_ids), prompt=prompt, name=f"prompts[{index}]",
                pooling=_pooling(pooling), is_normalized=normalize,
            )
            for index, prompt in enumerate(_listed(prompts))
        ]  # fmt: skip
        processed = self._call(self._llm.input_processor.process_encode(requests))
        return self._run_all(self._llm.embed, processed, "prompts", use_tqdm=use_tqdm)

    def shutdown(self) -> None:
        """End the engine. Safe to call twice."""
        self._shutdown()

    def _defaults(self) -> dict[str, Any]:
        return dict(self._llm.model.sampling_defaults)

    def _start_engine(self) -> AsyncLLM:
        """Start it from a thread that lives as long as this does: an engine ends with the thread that started it."""
        if threading.current_thread() is threading.main_thread():
            return AsyncLLM.from_config(self.config)  # here, where Ctrl-C ends it

        async def start() -> AsyncLLM:
            return AsyncLLM.from_config(self.config)

        return self._call(start())

    def _generate(self, prompts: Sequence[Prompt], params: Params, name: str, *, use_tqdm: bool) -> list[RequestOutput]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not (isinstance(each, Sequence) and all(isinstance(one, SamplingParams) for one in each)):
            raise RequestError(
                f"params are {shown(params)}: must be SamplingParams for all, or a list of one for each", param="params"
            )
        if len(each) != len(prompts):
            raise RequestError(
                f"params are {len(each)} for {len(prompts)} {name}: must be one for all, or one for each",
                param="params",
            )
        for one in {id(one): one for one in each}.values():
            check_types(one)
        requests = [
            GenerateRequest(
                request_id=next(self._request_ids), prompt=prompt, name=f"{name}[{index}]", params=each[index],
                kind=OutputKind.FINAL_ONLY, add_special_tokens=name == "prompts",
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        processed = self._call(self._llm.input_processor.process_all(requests))
        return self._run_all(self._llm.complete, processed, name, use_tqdm=use_tqdm)

    async def _render_all(self, conversations: Sequence[Conversation], options: dict[str, Any]) -> list[str]:
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                chat = msgspec.convert({"messages": conversation, **options}, ChatCompletionRequest)
                chat.check()
                prompt = self._chat.prompt(chat.chat_prompt(), chat.tool_use())
                prompts.append(await self._llm.input_processor.render_chat(prompt))
            except (RequestError, msgspec.ValidationError) as exc:
                raise RequestError(f"messages[{index}]: {exc}", param=f"messages[{index}]") from exc
        return prompts

    def _run_all(
        self,
        run: Callable[[ProcessedRequest], Awaitable[T]],
        requests: list[ProcessedRequest],
        name: str,
        *,
        use_tqdm: bool,
    ) -> list[T]:
        """Run requests, as many at once as the queue takes."""
        jobs = [functools.partial(_run_named, run, request, f"{name}[{i}]") for i, request in enumerate(requests)]
        num_sequences = max((request.params.n for request in requests), default=1)
        at_once = max(self.config.max_num_queued_reqs // num_sequences, 1)
        with tqdm(total=len(jobs), desc=name, disable=not use_tqdm) as bar:
            return self._call(run_all(jobs, at_once=at_once, on_done=bar.update))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread; whatever ends the waiting, Ctrl-C too, cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise EngineDeadError("this LLM is shut down: make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End engine and loop. Runs in any thread: the last reference may go in the loop's own, by a collection there."""
    if threading.current_thread() is thread:
        llm.kill()
    else:
        asyncio.run_coroutine_threadsafe(llm.leave_loop(), loop).result()
        llm.close()  # not `shutdown`: at the interpreter's end no thread can be started any more
    _end(loop, thread)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return several prompts, or the one, as a list."""
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is {shown(prompts)}: must be a text, token ids, or a list of either", param="prompts"
        )
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _showing(params: Params, special_tokens: Sequence[str]) -> Params:
    """Return parameters with which these special tokens are text: those between which a model writes its calls."""
    if isinstance(params, SamplingParams):
        return dataclasses.replace(params, shown_special_tokens=params.shown_special_tokens | {*special_tokens})
    return [_showing(each, special_tokens) for each in params]  # type: ignore[misc]


def _pooling(name: str | None) -> Pooling | None:
    if name not in (None, "last", "mean"):
        raise RequestError(f"pooling is {name!r}: last or mean", param="pooling")
    return None if name is None else Pooling[name.upper()]


def _conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """Return several conversations, or the one, as a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"messages is {shown(messages)}: must be a list of messages, or several", param="messages")
    return [messages] if messages and isinstance(messages[0], dict) else messages  # type: ignore[list-item,return-value]


async def _run_named(run: Callable[[ProcessedRequest], Awaitable[T]], request: ProcessedRequest, name: str) -> T:
    try:
        return await run(request)
    except EngineGenerateError as exc:
        raise EngineGenerateError(f"{name}: {exc}") from exc
    except RequestError as exc:  # what only the engine could see
        raise RequestError(f"{name}: {exc}", param=name) from exc
