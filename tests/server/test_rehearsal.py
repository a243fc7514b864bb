"""Rehearsals run before steps, reach the socket, stay bounded, and are seen in no figure."""

import asyncio
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from ringserve.server import rehearsal
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.input_processor import GenerateRequest
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.rehearsal import Rehearsal, connected_pair, rehearsals
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport.strategies import has_spare_core

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_config(ServeConfig(engine="synthetic", step_time_ms=20))
    yield llm
    llm.close()


async def received(end: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, 65_536), LIMIT_S)


async def test_a_rehearsal_sends_an_event(llm: AsyncLLM) -> None:
    near_end, far_end = connected_pair()
    with far_end:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near_end)
        made = Rehearsal(llm.model.tokenizer, transport, far_end)
        for _ in range(3):
            made.run()
            assert (await received(far_end)).count(b'"text":" the"') == 1
        transport.close()


async def test_what_a_rehearsal_keeps_is_bounded(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_MAX_TOKENS", 10)
    async with rehearsals(llm) as made:
        assert made is not None
        most = 0
        for _ in range(35):
            made.run()
            await asyncio.sleep(0)
            most = max(most, made._state.num_tokens)
        assert most == 10
        assert made._outputs.num_live == 1
        assert made.num_runs == 35


async def test_steps_are_rehearsed_and_no_figure_shows_it(llm: AsyncLLM) -> None:
    if not has_spare_core(llm._reader.engine.process.pid):
        pytest.skip("the reader waits awake only where it has a core to spare: this machine has one")
    async with rehearsals(llm) as made:
        assert made is not None
        deadline_s, num_tokens = time.monotonic() + LIMIT_S, 0
        while not made.num_runs and time.monotonic() < deadline_s:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            async for output in llm.generate(GenerateRequest(request_id="1", prompt="a", params=params)):
                num_tokens += len(output.outputs[0].token_ids)
        assert made.num_runs > 0
        assert llm.metrics.num_generation_tokens == num_tokens
        assert llm.ring_counters().num_tokens == num_tokens
        assert llm.num_live == 0


async def test_a_machine_without_loopback_serves_without_rehearsals(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(rehearsal, "connected_pair", refuse)
    async with rehearsals(llm) as made:
        assert made is None
    assert "no loopback" in caplog.text


async def test_a_stranger_who_connects_first_is_not_taken_for_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers: list[socket.socket] = []
    create_connection = socket.create_connection

    def create_second(address: tuple[str, int]) -> socket.socket:
        strangers.append(create_connection(address))
        return create_connection(address)

    monkeypatch.setattr(socket, "create_connection", create_second)
    near_end, far_end = connected_pair()
    assert far_end.getpeername() == near_end.getsockname()
    for each in (near_end, far_end, *strangers):
        each.close()
