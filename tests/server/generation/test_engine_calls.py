"""Calls to the engine by AsyncLLM: answered, refused, and never left pending, whatever becomes of the engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ringserve.server.errors import ConflictError, EngineDeadError, RequestError, ServerError
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.input_processor import GenerateRequest
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.settings.config import ServeConfig

LIMIT_S = 30.0


@pytest.fixture
def llm() -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM.from_config(ServeConfig(engine="synthetic", step_time_ms=2.0))
    yield llm  # type: ignore[misc]  # pytest's fixtures may yield
    llm.kill()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


async def finish_of(llm: AsyncLLM, request_id: str, max_tokens: int) -> tuple[str | None, int]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest(request_id=request_id, prompt=[1, 2], params=params, kind=OutputKind.FINAL_ONLY)
    async for output in llm.generate(request):
        return output.outputs[0].finish_reason, len(output.outputs[0].token_ids)
    raise AssertionError("no output")


async def until_running(llm: AsyncLLM, count: int) -> None:
    while llm.load.num_running != count:
        await asyncio.sleep(0.001)


def test_a_call_is_answered_beside_others_each_with_its_own_result(llm: AsyncLLM) -> None:
    async def test() -> None:
        results = await asyncio.gather(*(llm.call(name) for name in ("stats", "is_paused", "is_sleeping")))
        assert results == [{}, False, False]
        assert await llm.reset_prefix_cache() is True

    run(test)


def test_wrong_calls_are_request_errors_and_harm_nothing(llm: AsyncLLM) -> None:
    async def test() -> None:
        wrong: list[tuple[Any, ...]] = [("dance",), ("shutdown",), ("sleep", 7), ("stats", object())]
        for method, *args in wrong:
            with pytest.raises(RequestError, match="level" if method == "sleep" else method):
                await llm.call(method, *args)
        for order in (llm.pause_generation(mode="all"), llm.sleep(3), llm.load_lora_adapter("a", "/a")):
            with pytest.raises(RequestError):
                await order
        assert await finish_of(llm, "r", 5) == ("length", 5)

    run(test)


def test_pause_abort_ends_what_is_there_and_what_comes_waits_for_resume(llm: AsyncLLM) -> None:
    async def test() -> None:
        early = asyncio.ensure_future(finish_of(llm, "early", 5000))
        await until_running(llm, 1)
        await llm.pause_generation(mode="abort")
        finish, num_tokens = await early
        assert finish == "abort"
        assert num_tokens < 5000
        late = asyncio.ensure_future(finish_of(llm, "late", 5))
        while llm.load.num_waiting != 1:
            await asyncio.sleep(0.001)
        assert await llm.is_paused()
        await llm.check_health()
        assert not late.done()
        await llm.resume_generation()
        assert await late == ("length", 5)

    run(test)


def test_a_pause_that_is_resumed_first_is_a_conflict(llm: AsyncLLM) -> None:
    async def test() -> None:
        running = asyncio.ensure_future(finish_of(llm, "r", 300))
        await until_running(llm, 1)
        pausing = asyncio.ensure_future(llm.pause_generation(mode="wait"))
        while not await llm.is_paused():
            await asyncio.sleep(0)
        await llm.resume_generation()
        with pytest.raises(ConflictError):
            await pausing
        assert await running == ("length", 300)

    run(test)


def test_requests_are_aborted_by_their_name_with_or_without_its_prefix(llm: AsyncLLM) -> None:
    async def test() -> None:
        names = ("cmpl-a", "chatcmpl-b", "c", "cmpl-d")
        finishes = [asyncio.ensure_future(finish_of(llm, name, 400)) for name in names]
        await until_running(llm, 4)
        assert llm.abort_requests(["a", "chatcmpl-b", "unknown"]) == 2
        assert [(await finish)[0] for finish in finishes[:2]] == ["abort", "abort"]
        assert llm.abort_requests(["c"]) == 1
        assert (await finishes[3])[0] == "length"
        assert llm.abort_requests() == 0

    run(test)


@pytest.mark.parametrize("how", ["kill", "shutdown"])
def test_no_call_is_left_pending_when_the_engine_goes(llm: AsyncLLM, how: str) -> None:
    async def test() -> None:
        running = asyncio.ensure_future(finish_of(llm, "r", 8000))
        await until_running(llm, 1)
        orders = (llm.pause_generation(mode="wait"), llm.sleep(1, mode="wait"), llm.call("pause", "wait"))
        calls = [asyncio.ensure_future(order) for order in orders]
        while not await llm.is_paused():
            await asyncio.sleep(0)
        if how == "kill":
            os.kill(llm._reader.engine.process.pid, signal.SIGKILL)
        else:
            await llm.shutdown()
        for error in await asyncio.gather(*calls, running, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
        with pytest.raises(ServerError):
            await llm.is_paused()
        assert llm._reader.calls._pending == {}

    run(test)


def test_a_call_that_nobody_waits_for_any_more_is_carried_out_and_forgotten(llm: AsyncLLM) -> None:
    async def test() -> None:
        running = asyncio.ensure_future(finish_of(llm, "r", 100))
        await until_running(llm, 1)
        pausing = asyncio.ensure_future(llm.pause_generation(mode="wait"))
        while not await llm.is_paused():
            await asyncio.sleep(0)
        pausing.cancel()
        assert await running == ("length", 100)
        assert await llm.is_paused()
        assert llm._reader.calls._pending == {}

    run(test)
