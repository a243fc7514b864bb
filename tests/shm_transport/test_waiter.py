import asyncio
import time
from dataclasses import replace

import numpy as np

from ringserve.shm_transport.segment import Segment
from ringserve.shm_transport.step import Step
from ringserve.shm_transport.step_ring import StepReader, StepRecord, StepWriter
from ringserve.shm_transport.waiter import BlockWaiter


def step(token: int) -> Step:
    return Step(handles=np.zeros(1, np.uint64), token_ids=np.array([token], np.int32))


async def read_one(reader: StepReader, waiter: BlockWaiter) -> int:
    while not waiter.try_wait():
        await waiter.wait(timeout_s=5)
    record = reader.read()
    assert isinstance(record, StepRecord)
    return record.token_ids[0]


def make(segment: Segment) -> tuple[StepWriter, StepReader, BlockWaiter]:
    reader = StepReader(segment)
    return StepWriter(segment, on_full=lambda: None), reader, BlockWaiter(reader.consumer)


async def test_a_record_wakes_the_waiting_reader(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment)
    task = asyncio.create_task(read_one(reader, waiter))
    await asyncio.sleep(0)
    writer.publish(step(5))
    assert await task == 5
    waiter.close()


async def test_records_that_are_there_are_taken_without_the_thread(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment)
    for n in range(3):
        writer.publish(step(n))
    assert [await read_one(reader, waiter) for _ in range(3)] == [0, 1, 2]
    assert waiter.num_wakes == 0
    waiter.close()


async def test_a_lost_wake_up_costs_a_time_out_not_a_record(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment)
    waiter.wake = lambda: None  # type: ignore[method-assign]  # the thread's call goes nowhere
    task = asyncio.create_task(waiter.wait(timeout_s=60))
    await asyncio.sleep(0)
    writer.publish(step(9))
    while waiter.num_wakes == 0:
        await asyncio.sleep(0.001)
    task.cancel()
    assert waiter.try_wait()
    record = reader.read()
    assert isinstance(record, StepRecord)
    assert record.token_ids == [9]
    del waiter.wake
    waiter.close()


async def test_an_idle_wait_burns_no_cpu(step_segment: Segment) -> None:
    _, _, waiter = make(step_segment)
    before = time.process_time()
    await waiter.wait(timeout_s=1.5)
    assert time.process_time() - before < 0.05
    waiter.close()


async def test_a_step_published_before_the_first_wait_is_found(step_segment: Segment) -> None:
    writer, reader, waiter = make(step_segment)
    writer.publish(replace(step(3), num_running=1))
    assert await read_one(reader, waiter) == 3
    waiter.close()
