"""The interface between the HTTP side and whatever generates: the server knows an engine only as this."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from ringserve.server.errors import RequestError, shown
from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest
from ringserve.server.generation.outputs import EmbeddingOutput, RequestOutput

_PAUSE_MODES = ("abort", "wait", "keep")


class EngineClient(ABC):
    """What the server asks of an engine. The orders at the end are all made of `call` and `abort_requests`."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether requests can be served."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether it has been shut down, or has failed."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether it has failed for good."""

    @property
    @abstractmethod
    def dead_error(self) -> Exception:
        """The error that every request gets once `is_stopped`."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs by its OutputKind; closing or cancelling the generator aborts the request.

        Raises:
            RequestError: If the request is not valid for the model.
            EngineGenerateError: If the engine failed this request; others go on.
            EngineDeadError: If the engine is gone.
        """

    @abstractmethod
    def encode(self, request: EncodeRequest) -> AsyncGenerator[EmbeddingOutput, None]:
        """Yield a prompt's embedding, once; closing or cancelling the generator aborts the request.

        Raises:
            RequestError, EngineGenerateError, EngineDeadError: As `generate`; RequestError too if the engine embeds
                nothing.
        """

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of these ids with finish reason abort; unknown ids are ignored. Never suspends."""

    @abstractmethod
    async def check_health(self) -> None:
        """Return if all is well; never waits for the engine.

        Raises:
            EngineDeadError: If the engine is gone, or stuck.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests with finish reason abort; return how many. Never suspends.

        Args:
            request_ids: As responses or X-Request-Id name them; unknown ones are ignored. None for all.
        """

    @abstractmethod
    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Have the engine carry out a method of its fixed table (engine/loop/control.py); return its JSON result.

        Raises:
            RequestError: If there is no such method, or not for these arguments; NotFoundError as one of these.
            ConflictError: If the engine's state does not allow it now.
            EngineCallError: If it failed.
            EngineDeadError, ShuttingDownError: If the engine is gone, or goes before it answers.
        """

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Make no further tokens; returns once that is so. New requests wait for `resume_generation`.

        Args:
            mode: What becomes of the requests that are there. "abort": they end with finish reason abort; "wait": they
                run to their end first; "keep": they stay as they are and go on later.
            clear_cache: Whether the prefix cache is reset; who is kept computes its keys and values again.

        Raises:
            RequestError, ConflictError, EngineDeadError: As `call`; ConflictError if generation is resumed meanwhile.
        """
        await self.call("pause", self._begin_pause(mode), clear_cache)

    async def resume_generation(self) -> None:
        """Go on. Errors as `call`; ConflictError while asleep."""
        await self.call("resume")

    async def is_paused(self) -> bool:
        """Return whether generation is paused, which it is while the engine sleeps too. Errors as `call`."""
        return bool(await self.call("is_paused"))

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget what the prefix cache holds. Errors as `call`.

        Args:
            reset_running_requests: Take the blocks of running requests too; these compute them again.

        Returns:
            Whether that was done: not while running requests hold blocks.
        """
        return bool(await self.call("reset_prefix_cache", reset_running_requests))

    async def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
        """Pause, then free memory; returns once that is done. Requests that come meanwhile wait. Errors as `call`.

        Args:
            level: 0 frees nothing; 1 and 2 free the weights and the KV cache.
            mode: As `pause_generation`.
        """
        if level not in (0, 1, 2):
            raise RequestError(f"level is {shown(level)}: one of 0, 1, 2", param="level")
        await self.call("sleep", level, self._begin_pause(mode))

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Restore what sleeps: the weights from disk, an empty KV cache. Errors as `call`.

        Args:
            tags: Of "weights", "kv_cache" and, for level 0, "scheduling"; None for all.

        Returns:
            Whether all is awake; generation goes on then.
        """
        return bool(await self.call("wake_up", None if tags is None else list(tags)))

    async def is_sleeping(self) -> bool:
        """Return whether anything sleeps. Errors as `call`."""
        return bool(await self.call("is_sleeping"))

    async def load_lora_adapter(self, lora_name: str, lora_path: str, *, load_inplace: bool = False) -> None:
        """Let requests name a further adapter. Errors as `call`; NotFoundError if there is none at `lora_path`.

        Args:
            lora_name: What requests call it.
            lora_path: A PEFT directory.
            load_inplace: Whether it may take the place of one of that name, for requests to come.
        """
        await self.call("load_lora_adapter", lora_name, lora_path, load_inplace)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Refuse further requests for an adapter; running ones keep it. Errors as `call`; NotFoundError if unknown."""
        await self.call("unload_lora_adapter", lora_name)

    def _begin_pause(self, mode: str) -> str:
        """Abort what is there if that is asked for; return the mode that the engine knows. Never suspends."""
        if mode not in _PAUSE_MODES:
            raise RequestError(f"mode is {shown(mode)}: one of {', '.join(_PAUSE_MODES)}", param="mode")
        if mode == "abort":
            self.abort_requests()
            return "wait"
        return mode
