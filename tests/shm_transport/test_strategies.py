import asyncio
import os
import time

import numpy as np
import pytest

from ringserve.shm_transport import strategies
from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import StepReader, StepRecord, StepWriter
from ringserve.shm_transport.strategies import STRATEGIES, AdaptiveWaiter, Waiter, has_spare_core, make_waiter


def step(token: int) -> Step:
    return Step(handles=np.zeros(1, np.uint64), token_ids=np.array([token], np.int32))


def make(segment: Segment, strategy: str) -> tuple[StepWriter, StepReader, Waiter]:
    reader = StepReader(segment)
    return StepWriter(segment, on_full=lambda: None), reader, make_waiter(strategy, reader.consumer, os.getpid())


async def read_one(reader: StepReader, waiter: Waiter) -> int:
    while not waiter.try_wait():
        await waiter.wait(timeout_s=5)
    record = reader.read()
    assert isinstance(record, StepRecord)
    waiter.note(record.header.published_ns)
    return record.token_ids[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_record_of_a_steady_engine_is_read_once(step_segment: Segment, strategy: str) -> None:
    writer, reader, waiter = make(step_segment, strategy)

    async def produce() -> None:
        for n in range(60):
            await asyncio.sleep(0.004)
            writer.publish(step(n))

    task = asyncio.create_task(produce())
    assert [await read_one(reader, waiter) for _ in range(60)] == list(range(60))
    await task
    waiter.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_cancelled_reader_loses_no_record(step_segment: Segment, strategy: str) -> None:
    writer, reader, waiter = make(step_segment, strategy)
    for n in range(20):
        task = asyncio.create_task(read_one(reader, waiter))
        await asyncio.sleep(0)
        writer.publish(step(n))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await read_one(reader, waiter) == n
    waiter.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_waiting_ends_at_the_time_out_and_at_a_wake(step_segment: Segment, strategy: str) -> None:
    _, _, waiter = make(step_segment, strategy)
    started = time.monotonic()
    await waiter.wait(timeout_s=0.02)
    assert 0.01 < time.monotonic() - started < 5
    task = asyncio.create_task(waiter.wait(timeout_s=60))
    await asyncio.sleep(0)
    waiter.wake()
    await asyncio.wait_for(task, timeout=5)
    waiter.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_other_tasks_run_while_the_reader_waits(step_segment: Segment, strategy: str) -> None:
    _, reader, waiter = make(step_segment, strategy)
    task = asyncio.create_task(read_one(reader, waiter))
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    waiter.close()


class StubClock:
    """Says that the next record is due from now on, for 0.2 s."""

    def note(self, published_ns: int) -> None:
        pass

    def window(self, more_lead_ns: int = 0) -> strategies.Window:  # noqa: ARG002  # the real clock's
        now_ns = time.monotonic_ns()
        return strategies.Window(now_ns - 1, now_ns, now_ns + 200_000_000)


async def test_a_record_inside_the_window_is_met_spinning(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment, "adaptive")
    assert isinstance(waiter, AdaptiveWaiter)
    waiter._clock = StubClock()  # type: ignore[assignment]
    task = asyncio.create_task(read_one(reader, waiter))
    await asyncio.sleep(0.01)
    writer.publish(step(4))
    assert await task == 4
    assert waiter.num_spins_hit == 1
    waiter.close()


async def test_a_window_that_closes_without_a_record_ends_in_blocking(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment, "adaptive")
    assert isinstance(waiter, AdaptiveWaiter)
    windows = iter([StubClock().window()])
    waiter._clock.window = lambda _: next(windows, None)  # type: ignore[method-assign]
    task = asyncio.create_task(read_one(reader, waiter))
    while not waiter.num_spins_missed:
        await asyncio.sleep(0.01)
    before = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - before < 0.1
    writer.publish(step(8))
    assert await task == 8
    waiter.close()


@pytest.mark.parametrize(("left_ns", "expected"), [(50_000_000, 1), (1_000, 0)], ids=["time enough", "too late"])
async def test_a_window_begins_with_a_rehearsal_if_the_record_is_not_near(
    step_segment: Segment, left_ns: int, expected: int
) -> None:
    writer, reader, _ = make(step_segment, "block")
    waiter = AdaptiveWaiter(reader.consumer, has_spare_core=lambda: True)
    now_ns = time.monotonic_ns()
    windows = iter([strategies.Window(now_ns, now_ns + left_ns, now_ns + 10_000_000_000)])
    waiter._clock.window = lambda _: next(windows, None)  # type: ignore[method-assign]
    rehearsals: list[int] = []
    waiter.rehearse = lambda: rehearsals.append(reader.consumer.num_pending)
    task = asyncio.create_task(read_one(reader, waiter))
    await asyncio.sleep(0.01)
    writer.publish(step(4))
    assert await task == 4
    assert rehearsals == [0] * expected
    waiter.close()


async def test_windows_open_earlier_only_where_there_is_a_rehearsal(step_segment: Segment) -> None:
    _, reader, _ = make(step_segment, "block")
    waiter = AdaptiveWaiter(reader.consumer, has_spare_core=lambda: True)
    leads: list[int] = []
    waiter._clock.window = leads.append  # type: ignore[method-assign,assignment]
    for waiter.rehearse in (None, lambda: None):
        await waiter.wait(timeout_s=0.001)
    assert leads[0] == 0 < leads[1]
    waiter.close()


async def test_without_a_spare_core_adaptive_never_spins(step_segment: Segment) -> None:
    writer, reader, _ = make(step_segment, "block")
    waiter = AdaptiveWaiter(reader.consumer, has_spare_core=lambda: False)
    waiter._clock = StubClock()  # type: ignore[assignment]
    task = asyncio.create_task(read_one(reader, waiter))
    await asyncio.sleep(0.05)
    writer.publish(step(1))
    await task
    assert (waiter.num_spins_hit, waiter.num_spins_missed) == (0, 0)
    waiter.close()


def test_a_spare_core_is_seen_by_affinity_and_by_quota(monkeypatch, tmp_path) -> None:
    pid = os.getpid()
    monkeypatch.setattr(strategies, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert has_spare_core(pid)
    for quota, expected in (("max 100000", True), ("150000 100000", False), ("200000 100000", True)):
        (tmp_path / "cpu.max").write_text(quota)
        assert has_spare_core(pid) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert not has_spare_core(pid)
