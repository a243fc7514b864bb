"""Work beside a loop's own: many jobs, a bounded number of them at once, and what may be long. Any loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_near(is_short: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what work returns: done here if it is short, else on a thread, where it holds nobody up."""
    return work(*args, **kwargs) if is_short else await asyncio.to_thread(work, *args, **kwargs)


async def run_all(
    jobs: Sequence[Callable[[], Awaitable[T]]], *, at_once: int, on_done: Callable[[], object] = lambda: None
) -> list[T]:
    """Run jobs, `at_once` of them at any time, begun in order; return their results in order.

    Args:
        jobs: Each makes what is awaited.
        at_once: At least 1.
        on_done: Called after each job.

    Raises:
        Exception: The first that a job raises; the others are cancelled.
    """
    waiting = iter(enumerate(jobs))
    results: dict[int, T] = {}

    async def work() -> None:
        for index, job in waiting:
            results[index] = await job()
            on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(jobs))):
                group.create_task(work())
    except ExceptionGroup as exc:
        raise exc.exceptions[0] from None
    return [results[index] for index in range(len(jobs))]
