"""What the engine loop (loop/loop.py) drives: the real EngineCore and the synthetic engine are both an Engine."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from ringserve.shm_transport.messages import AddRequest, Data
from ringserve.shm_transport.step import Step


class Refusal(str):
    """Why a request cannot go on where that is no fault of the engine's: it asks for what cannot be had."""


class RequestFailedError(Exception):
    """One request cannot go on; the others do. Raised by `Engine.add`, or collected in `Engine.take_failures`."""

    def __init__(self, handle: int, message: str) -> None:
        super().__init__(message)
        self.handle = handle
        self.is_refusal = isinstance(message, Refusal)


MemoryPart = Literal["weights", "kv_cache"]
CallFault = Literal["invalid", "not_found", "conflict", "failed"]


class CallError(Exception):
    """A CALL cannot be carried out. `fault` tells the server whose fault that is: "failed" is the engine's own."""

    def __init__(self, message: str, *, fault: CallFault = "invalid") -> None:
        super().__init__(message)
        self.fault = fault


class AdapterStore(Protocol):
    """LoRA adapters that come and go while an engine runs."""

    def read(self, name: str, path: str) -> Any:
        """Return what `add` takes; the only method for any thread.

        Raises:
            CallError: If there is no adapter at `path`, or not one that is supported.
        """

    def __contains__(self, name: object) -> bool: ...

    def add(self, adapter: Any) -> None:
        """Let requests name an adapter from now on.

        Raises:
            CallError: If it is of another model, or the engine was not started for adapters that come later.
        """

    def remove(self, name: str) -> None:
        """Let no further request name an adapter; those that have it keep it. It must be there."""

    def try_free(self) -> bool:
        """Free what no live request needs of removed adapters; return whether nothing is left of them."""


class Engine(Protocol):
    """Token ids in, token ids out. Every method is called by the loop's thread alone, between steps."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def add(self, request: AddRequest) -> None:
        """Queue a request and its forks; each joins at the next step that has a seat for it.

        Raises:
            RequestFailedError: If it can never run (longer than the context, say). Nothing is kept of it or its forks.
        """

    def abort(self, handles: Iterable[int]) -> None:
        """Drop requests wherever they are and free what they hold; unknown handles are ignored. No row is emitted.

        Each fork has a handle of its own and goes by it alone.
        """

    def step(self) -> Step | None:
        """Run one step for every running request.

        Returns:
            The step, which may have no rows (only partial prefills, say); None if no step was due yet, so that the
            loop looks at its inbox and comes back.
        """

    def after_step(self) -> None:
        """Do what the step's record did not need; called after each `step`, once its record is out."""

    def finish(self) -> Step | None:
        """Finish a step that is in flight without beginning another; None if there is none."""

    def idle_step(self) -> Step:
        """Return a Step without rows, only with the figures of now: published after an abort that left no work."""

    def reset_prefix_cache(self, *, preempts: bool) -> bool:
        """Forget what blocks hold, with no step in flight; False if requests hold blocks.

        Args:
            preempts: Take the blocks from those who run first; they will compute again.
        """

    def release(self, part: MemoryPart) -> None:
        """Free what a part takes; called once, with no step in flight and no block held. No step until `restore`."""

    def restore(self, part: MemoryPart) -> None:
        """Undo `release`: the weights as they were, or as they are on disk by now; the KV cache empty.

        Raises:
            Exception: If it cannot be had; the part stays released.
        """

    @property
    def adapters(self) -> AdapterStore | None:
        """LoRA adapters; None if the engine knows none."""

    def take_failures(self) -> list[RequestFailedError]:
        """Return and forget the requests that failed in the last `step`; they are already dropped."""

    def take_data(self) -> list[Data]:
        """Return and forget the arrays that the last `step` has completed: prompt logprobs, embeddings."""

    def limits(self) -> dict[str, int]:
        """Return what READY tells the server: max_model_len, vocab_size, embedding_size, num_blocks."""

    def stats(self) -> dict[str, int]:
        """Return counters since the start, by name: what steps have cost, what the prefix cache has found."""
