"""What the engine loop (engine/loop.py) drives: the real EngineCore and the synthetic engine are both an Engine."""

from collections.abc import Iterable
from typing import Protocol

from shm_transport.messages import AddRequest, Data
from shm_transport.step import Step


class RequestFailedError(Exception):
    """One request cannot go on; the others do. Raised by `Engine.add`, or collected in `Engine.take_failures`."""

    def __init__(self, handle: int, message: str) -> None:
        super().__init__(message)
        self.handle = handle


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

    def idle_step(self) -> Step:
        """Return a Step without rows, only with the figures of now: published after an abort that left no work."""

    def take_failures(self) -> list[RequestFailedError]:
        """Return and forget the requests that failed in the last `step`; they are already dropped."""

    def take_data(self) -> list[Data]:
        """Return and forget the arrays that the last `step` has completed: prompt logprobs, embeddings."""

    def limits(self) -> dict[str, int]:
        """Return what READY tells the server: max_model_len, vocab_size, embedding_size, num_blocks."""

    def stats(self) -> dict[str, int]:
        """Return counters since the start, by name: what steps have cost, what the prefix cache has found."""
