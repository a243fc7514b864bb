import asyncio
from collections.abc import Callable

import pytest

from ringserve.server.kept_memory import KeptMemory

MB = 2**20


class FakeProcess:
    """Has a size, and keeps some of it until it is trimmed."""

    def __init__(self) -> None:
        self.used, self.kept, self.num_trims = 100 * MB, 0, 0

    def size(self) -> int:
        return self.used + self.kept

    def trim(self) -> None:
        self.kept = 0
        self.num_trims += 1


@pytest.fixture
async def process() -> FakeProcess:
    return FakeProcess()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def looks(memory: KeptMemory, process: FakeProcess, num: int) -> None:
    """Wait until a memory has looked so many times more."""
    seen, size = 0, process.size

    def counted() -> int:
        nonlocal seen
        seen += 1
        return size()

    memory._size = counted
    await until(lambda: seen >= num)
    memory._size = size


async def test_what_a_process_keeps_is_given_back_once_it_has_grown_and_then_it_rests(process: FakeProcess) -> None:
    memory = KeptMemory(process.size, process.trim, period_s=0)
    memory.start()
    process.kept = 60 * MB
    await looks(memory, process, 3)
    assert process.num_trims == 0
    process.kept = 70 * MB
    await until(lambda: process.kept == 0)
    await until(lambda: process.num_trims == 4)  # what was in use at the first may be free by now
    await looks(memory, process, 3)
    assert process.num_trims == 4
    memory.stop()


async def test_what_is_in_use_when_it_grows_is_given_back_when_it_is_free(process: FakeProcess) -> None:
    memory = KeptMemory(process.size, process.trim, period_s=0)
    memory.start()
    process.used += 500 * MB
    await until(lambda: process.num_trims == 1)
    process.used, process.kept = process.used - 500 * MB, 500 * MB
    await until(lambda: process.kept == 0)
    memory.stop()
