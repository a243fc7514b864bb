"""Many jobs, a bounded number at once."""

import asyncio
import functools
import threading

import pytest

from ringserve.server.workers import run_all, run_near


async def test_results_are_in_order_and_no_more_jobs_run_than_may() -> None:
    running = most = num_done = 0

    async def job(index: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(index % 3):
            await asyncio.sleep(0)
        running -= 1
        return index

    def count() -> None:
        nonlocal num_done
        num_done += 1

    jobs = [functools.partial(job, index) for index in range(20)]
    assert await run_all(jobs, at_once=4, on_done=count) == list(range(20))
    assert (most, num_done) == (4, 20)
    assert await run_all([], at_once=4) == []


async def test_what_is_short_is_done_here_and_the_rest_on_a_thread() -> None:
    here = threading.get_ident()
    assert await run_near(True, threading.get_ident) == here
    assert await run_near(False, threading.get_ident) != here
    assert await run_near(False, int, "11", base=2) == 3


async def test_the_first_error_cancels_the_others_and_comes_as_it_is() -> None:
    cancelled: list[int] = []

    async def job(index: int) -> None:
        if index == 3:
            raise KeyError(index)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    with pytest.raises(KeyError):
        await run_all([functools.partial(job, index) for index in range(10)], at_once=5)
    assert sorted(cancelled) == [0, 1, 2, 4]


async def test_cancelling_it_cancels_what_runs() -> None:
    cancelled: list[int] = []

    async def job(index: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    task = asyncio.ensure_future(run_all([functools.partial(job, index) for index in range(3)], at_once=2))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1]
