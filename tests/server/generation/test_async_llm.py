"""AsyncLLM as a library, over the shared-memory rings of a real synthetic engine process."""

import asyncio
import gc
import json
import os
import signal
import struct
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringserve.server.errors import EngineDeadError, EngineGenerateError, OverloadedError, RequestError, ServerError
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.collector import RequestOutputCollector
from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.generation.input_processor import EncodeRequest, GenerateRequest, InputProcessor, ProcessedRequest
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.output_processor import CHUNK_ROWS, CHUNK_TOKENS, OutputProcessor
from ringserve.server.generation.outputs import CompletionOutput, OutputKind, RequestOutput
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.grammar.structured_output import regex
from ringserve.server.settings import model_path
from ringserve.server.settings.config import ServeConfig
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.messages import Data
from ringserve.shm_transport.records import DataContent, FinishReason, Pooling, RecordKind
from ringserve.shm_transport.ring import RecordHeader
from ringserve.shm_transport.step_ring import Message, StepRecord

LIMIT_S = 30.0
KINDS = list(OutputKind)
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
SLOW = {"step_time_ms": 2.0}


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    tokenizer = model_path.resolve(None) / "tokenizer.json"
    return ModelInfo.load(tokenizer, chat_template=None).with_limits(
        max_model_len=8192, vocab_size=0, embedding_size=64
    )


class Starter:
    """Starts engines, each with an AsyncLLM that only the test holds."""

    def __init__(self, model: ModelInfo, script: Path) -> None:
        self.engines: list[EngineProcess] = []
        self._model = model
        self._script = script

    def __call__(
        self, *, max_num_queued_reqs: int = 2048, text: str = "", stream_interval: int = 1, **options: Any
    ) -> AsyncLLM:
        token_ids = self._model.tokenizer.encode(
            text or "Alice was beginning to get very tired. ", add_special_tokens=False
        )
        self._script.write_text(json.dumps(token_ids))
        config = ServeConfig(engine="synthetic", script=str(self._script), **options).engine_config(self._script)
        self.engines.append(EngineProcess(config, RingConfig(), step_timeout_s=60))
        return AsyncLLM(
            self.engines[-1], self._model, max_num_queued_reqs=max_num_queued_reqs, stream_interval=stream_interval
        )


@pytest.fixture
def start(model: ModelInfo, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(model, tmp_path / "script.json")
    yield starter
    for engine in starter.engines:
        engine.kill()


@pytest.mark.parametrize("at", ["StepReader", "make_waiter", "Outbox", "PulseReader"])
def test_ctrl_c_at_any_moment_of_a_start_leaves_no_name_and_no_engine(
    start: Starter, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    launched: list[Any] = []
    launch = EngineProcess._launch

    def noted(self: EngineProcess, config: dict[str, Any]) -> Any:
        launched.append(launch(self, config))
        return launched[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineProcess, "_launch", noted)
    monkeypatch.setattr(f"ringserve.server.generation.engine_process.{at}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert launched[0].returncode == -signal.SIGKILL
    assert [path for path in Path("/dev/shm").iterdir() if f"ringserve-{os.getpid()}-" in path.name] == []


def request(
    request_id: str = "r", kind: OutputKind = OutputKind.DELTA, prompt: Any = (1, 2), **params: Any
) -> GenerateRequest:
    params = {"max_tokens": 30, **params}
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    return GenerateRequest(request_id=request_id, prompt=prompt, params=SamplingParams(**params), kind=kind)


async def outputs_of(llm: AsyncLLM, one: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in llm.generate(one)]


async def text_of(llm: AsyncLLM, one: GenerateRequest) -> str:
    return "".join(part.text for output in await outputs_of(llm, one) for part in output.outputs)


async def drain(get: Callable[[], Awaitable[RequestOutput]]) -> tuple[int, Exception]:
    """Take outputs until there is an error; return the number of tokens before it, and it."""
    num_tokens = 0
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                output = await get()
            except ServerError as exc:
                return num_tokens, exc
            num_tokens += sum(len(part.token_ids) for part in output.outputs)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def block_until(condition: Callable[[], bool]) -> None:
    """Poll without letting the loop run."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_idle(llm: AsyncLLM) -> bool:
    return llm.num_live == 0 and llm.load.num_running == 0 and llm.load.num_waiting == 0


async def test_the_three_output_kinds_agree(start: Starter) -> None:
    llm = start()
    deltas, totals, finals = [await outputs_of(llm, request(kind=kind)) for kind in KINDS]
    text, token_ids = "", []
    for output in deltas:
        text += output.outputs[0].text
        token_ids += output.outputs[0].token_ids
    assert text.startswith("Alice was beginning")
    assert len(token_ids) == 30
    assert (totals[-1].outputs[0].text, totals[-1].outputs[0].token_ids) == (text, token_ids)
    assert all(text.startswith(output.outputs[0].text) for output in totals)
    assert len(finals) == 1
    assert finals[0] == totals[-1]
    for outputs in (deltas, totals, finals):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert {output.request_id for output in outputs} == {"r"}
        assert outputs[0].prompt_token_ids == [1, 2]
    await until(lambda: is_idle(llm))


@pytest.mark.parametrize("stop", [(), ("no such text",)])
@pytest.mark.parametrize(("server", "asked", "counts"), [(3, 1, [1, 3, 3, 3]), (2, 4, [1, 4, 4, 1]), (1, 50, [1, 9])])
async def test_a_stream_interval_holds_tokens_back_but_the_first_and_the_last(
    start: Starter, server: int, asked: int, counts: list[int], stop: tuple[str, ...]
) -> None:
    llm = start(stream_interval=server, step_time_ms=5.0)
    outputs = await outputs_of(llm, request(max_tokens=10, stream_interval=asked, stop=stop))
    parts = [part for output in outputs for part in output.outputs]
    assert [len(part.token_ids) for part in parts] == counts
    assert [part.num_tokens for part in parts] == [sum(counts[: n + 1]) for n in range(len(counts))]
    whole = await outputs_of(llm, request("whole", OutputKind.FINAL_ONLY, max_tokens=10))
    assert "".join(part.text for part in parts) == whole[0].outputs[0].text
    assert [token_id for part in parts for token_id in part.token_ids] == whole[0].outputs[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
async def test_n_sequences_come_under_their_own_indexes(start: Starter, kind: OutputKind) -> None:
    llm = start()
    expected = await text_of(llm, request())
    outputs = await outputs_of(llm, request(kind=kind, n=2))
    parts = [part for output in outputs for part in output.outputs]
    for index in range(2):
        texts = [part.text for part in parts if part.index == index]
        assert ("".join(texts) if kind is OutputKind.DELTA else texts[-1]) == expected
        assert sum(part.finish_reason is not None for part in parts if part.index == index) == 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is OutputKind.FINAL_ONLY:
        assert [[part.index for part in output.outputs] for output in outputs] == [[0, 1]]


def test_one_that_was_built_outside_a_loop_is_used_inside_one(start: Starter) -> None:
    llm = start()
    assert llm.is_running
    assert asyncio.run(text_of(llm, request())).startswith("Alice was")


def test_it_serves_a_second_loop_after_the_first_has_closed(start: Starter) -> None:
    llm = start()

    async def main() -> str:
        async with asyncio.timeout(LIMIT_S):
            return await text_of(llm, request())

    assert asyncio.run(main()) == asyncio.run(main())


async def test_an_invalid_request_is_refused_and_leaves_nothing(start: Starter) -> None:
    llm = start()
    with pytest.raises(RequestError):
        await outputs_of(llm, request(prompt=[]))
    assert llm.num_live == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_ends_the_request_with_the_text_that_was_held_back(start: Starter, kind: OutputKind) -> None:
    llm = start(text="Alice", **SLOW)
    stop = "Alice" * 200 + "x"  # all text begins it, so that all is held back
    seen: list[RequestOutput] = []

    async def consume() -> None:
        async for output in llm.generate(request(kind=kind, stop=(stop,), **ENDLESS)):
            seen.append(output)

    task = asyncio.create_task(consume())
    other = asyncio.create_task(outputs_of(llm, request("other")))
    await until(lambda: llm.load.num_running == 1 and other.done())
    assert all(part.text == "" for output in seen for part in output.outputs)
    await llm.abort("r")
    await task
    parts = [part for output in seen for part in output.outputs]
    num_tokens = sum(len(part.token_ids) for part in (parts if kind is OutputKind.DELTA else parts[-1:]))
    assert num_tokens >= 30
    whole = "Alice" * (num_tokens // (len(llm.model.tokenizer.encode("Alice", add_special_tokens=False))))
    assert "".join(part.text for part in parts) == whole
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == ("abort", None)
    assert seen[-1].finished
    assert other.result()[-1].outputs[0].finish_reason == "length"
    await until(lambda: is_idle(llm))


async def test_several_ids_are_aborted_at_once_and_unknown_ones_ignored(start: Starter) -> None:
    llm = start(**SLOW)
    tasks = [
        asyncio.create_task(outputs_of(llm, request(name, OutputKind.FINAL_ONLY, **ENDLESS, n=2))) for name in "abcd"
    ]
    await until(lambda: llm.load.num_running == 8)
    await llm.abort(name for name in ("a", "nobody", "c"))
    for task in (tasks[0], tasks[2]):
        (final,) = await task
        assert [part.finish_reason for part in final.outputs] == ["abort", "abort"]
    await until(lambda: llm.load.num_running == 4)
    assert not tasks[1].done()
    assert not tasks[3].done()
    await llm.abort(["b", "d"])
    await asyncio.gather(*tasks)
    await until(lambda: is_idle(llm))


async def test_closing_the_generator_aborts_in_the_engine(start: Starter) -> None:
    llm = start(**SLOW)
    generator = llm.generate(request(n=2, **ENDLESS))
    await anext(generator)
    await until(lambda: llm.load.num_running == 2)
    await generator.aclose()
    assert llm.num_live == 0
    await until(lambda: is_idle(llm))


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_the_consumer_aborts_in_the_engine(start: Starter, kind: OutputKind) -> None:
    llm = start(**SLOW)
    task = asyncio.create_task(outputs_of(llm, request(kind=kind, **ENDLESS)))
    await until(lambda: llm.load.num_running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert llm.num_live == 0
    await until(lambda: is_idle(llm))


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_request_whose_send_failed_is_aborted_whole(
    start: Starter, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    llm = start(**SLOW)
    outbox = start.engines[0].outbox
    add, abort, added, aborted = outbox.add, outbox.abort, [], []

    def add_and_fail(message: Any) -> None:
        assert llm.num_live == 3  # all are registered before they are sent
        added.extend((message.handle, *(fork.handle for fork in message.forks)))
        if is_sent:
            add(message)
            outbox.flush()
        raise RuntimeError("the send failed")

    def note_abort(handles: list[int]) -> None:
        aborted.extend(handles)
        abort(handles)

    monkeypatch.setattr(outbox, "add", add_and_fail)
    monkeypatch.setattr(outbox, "abort", note_abort)
    with pytest.raises(RuntimeError, match="the send failed"):
        await outputs_of(llm, request(n=3, **ENDLESS))
    assert llm.num_live == 0
    assert len(added) == 3
    assert set(added) == set(aborted)
    monkeypatch.undo()
    assert (await outputs_of(llm, request("next")))[-1].finished
    await until(lambda: is_idle(llm) and outbox.is_empty)


async def test_the_n_sequences_of_a_prompt_are_one_message_with_seeds_in_a_row(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start()
    added = []
    monkeypatch.setattr(start.engines[0].outbox, "add", added.append)
    llm.release(llm.submit(await llm.input_processor.process(request(n=3, seed=2**63 - 2))))
    (message,) = added
    handles = [message.handle, *(fork.handle for fork in message.forks)]
    seeds = [message.seed, *(fork.seed for fork in message.forks)]
    assert len(set(handles)) == 3
    assert seeds == [2**63 - 2, 2**63 - 1, 2**63]


async def test_what_the_ring_has_no_room_for_is_not_tried_again_with_each_prompt(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(**SLOW)
    prompts = [await llm.input_processor.process(request(f"request-{i}", max_tokens=1)) for i in range(600)]
    (engine,) = start.engines
    flush, num_flushes = engine.outbox.flush, 0

    def count_flush() -> None:
        nonlocal num_flushes
        num_flushes += 1
        flush()

    monkeypatch.setattr(engine.outbox, "flush", count_flush)
    os.kill(engine.process.pid, signal.SIGSTOP)
    collectors = [llm.submit(prompt) for prompt in prompts]
    os.kill(engine.process.pid, signal.SIGCONT)
    assert num_flushes <= RingConfig().num_request_slots + 1
    for collector in collectors:
        assert (await collector.get()).finished
        llm.release(collector)


class BrokenDetokenizer:
    def decode(self, _: int) -> str:
        raise ZeroDivisionError("broken")


async def test_a_failure_in_one_output_ends_that_request_alone(
    start: Starter, model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    detokenizer = model.tokenizer.detokenizer

    def broken_for_666(prompt: list[int], **options: Any) -> Any:
        return BrokenDetokenizer() if 666 in prompt else detokenizer(prompt, **options)

    monkeypatch.setattr(model.tokenizer, "detokenizer", broken_for_666)
    llm = start(**SLOW)
    others = [asyncio.create_task(text_of(llm, request(f"other {n}"))) for n in range(3)]
    with pytest.raises(EngineGenerateError, match="broken"):
        await outputs_of(llm, request("bad", prompt=[666], n=2, **ENDLESS))
    texts = await asyncio.gather(*others)
    assert texts[0].startswith("Alice was")
    assert len(set(texts)) == 1
    assert llm.is_running
    await until(lambda: is_idle(llm))


async def test_a_request_that_the_engine_fails_leaves_the_others(start: Starter) -> None:
    llm = start(fail_after=10, **SLOW)
    short = asyncio.create_task(outputs_of(llm, request("short", max_tokens=9)))
    num_tokens, error = await drain(aiter(llm.generate(request(n=2, **ENDLESS))).__anext__)
    assert isinstance(error, EngineGenerateError)
    assert "after 10 tokens" in str(error)
    assert num_tokens == 20
    assert (await short)[-1].outputs[0].finish_reason == "length"
    await until(lambda: is_idle(llm))


async def test_the_siblings_of_a_sequence_that_failed_leave_the_engine(start: Starter) -> None:
    llm = start(**SLOW)
    collector = llm.submit(await llm.input_processor.process(request(n=3, **ENDLESS)))
    await until(lambda: llm.load.num_running == 3)
    handle = next(state.handle for state in llm._reader.outputs._states if state is not None)
    llm._reader._take_message(Message(RecordKind.ERROR, struct.pack("<Q", handle) + b"it failed"))
    _, error = await drain(collector.get)
    assert str(error) == "it failed"
    assert llm.num_live == 0
    await until(lambda: llm.load.num_running == 1)  # the one that the engine says it has dropped itself


@pytest.mark.parametrize(
    ("grammar", "field"), [(regex("a+", field="guided_regex"), "guided_regex"), ('start: "a"', "grammar")]
)
async def test_a_grammar_that_the_engine_refuses_is_the_requests_fault_and_named_by_its_field(
    start: Starter, grammar: str, field: str
) -> None:
    llm = start(**SLOW)
    _, error = await drain(aiter(llm.generate(request(n=2, grammar=grammar, **ENDLESS))).__anext__)
    assert isinstance(error, RequestError)
    assert (error.status, error.param) == (400, field)
    assert str(error).startswith(f"{field}: the synthetic engine's text follows no grammar")
    assert llm.num_live == 0


async def test_other_refusals_name_no_field_and_late_ones_nobody(start: Starter) -> None:
    llm = start(**SLOW)
    collector = llm.submit(await llm.input_processor.process(request(**ENDLESS)))
    (handle,) = [state.handle for state in llm._reader.outputs._states if state is not None]
    refusal = Message(RecordKind.REFUSAL, struct.pack("<Q", handle) + b"there is no such adapter")
    llm._reader._take_message(refusal)
    _, error = await drain(collector.get)
    assert isinstance(error, RequestError)
    assert (str(error), error.param) == ("there is no such adapter", None)
    llm._reader._take_message(refusal)
    assert llm.is_running


async def test_data_of_the_engine_is_kept_with_its_request_and_dropped_once_that_is_gone(start: Starter) -> None:
    llm = start(**SLOW)
    collector = llm.submit(await llm.input_processor.process(request(**ENDLESS)))
    (handle,) = [state.handle for state in llm._reader.outputs._states if state is not None]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = Data(handle=handle, content=DataContent.PROMPT_LOGPROBS, array=array).encode()
    llm._reader._take_message(Message(RecordKind.DATA, body))
    np.testing.assert_array_equal(collector.arrays[DataContent.PROMPT_LOGPROBS], array)
    llm.release(collector)
    llm._reader._take_message(Message(RecordKind.DATA, body))
    assert llm.is_running


async def test_a_killed_engine_is_told_to_everyone(start: Starter) -> None:
    llm = start(**SLOW)
    await llm.check_health()
    assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
    tasks = [asyncio.create_task(outputs_of(llm, request(kind.value, kind, **ENDLESS))) for kind in KINDS]
    await until(lambda: llm.load.num_running == 3)
    num_live_at_death: list[int] = []
    llm.call_on_death(lambda: num_live_at_death.append(llm.num_live))
    os.kill(start.engines[0].process.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert all("SIGKILL" in str(result) for result in results)
    assert num_live_at_death == [0]
    assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
    assert isinstance(llm.dead_error, EngineDeadError)
    assert "SIGKILL" in str(llm.dead_error)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await anext(llm.generate(request("new")))
    assert num_live_at_death == [0]


async def test_a_death_before_the_first_request_is_noticed(start: Starter) -> None:
    llm = start()
    start.engines[0].process.kill()
    start.engines[0].process.wait()
    assert llm.errored
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    with pytest.raises(EngineDeadError):
        await outputs_of(llm, request())


async def test_what_was_posted_before_the_death_is_delivered_before_its_error(start: Starter) -> None:
    llm = start()
    engine = start.engines[0]
    await outputs_of(llm, request("warm up"))
    short = llm.submit(await llm.input_processor.process(request("short", OutputKind.FINAL_ONLY, max_tokens=5)))
    long = llm.submit(await llm.input_processor.process(request("long", **ENDLESS)))
    block_until(lambda: engine.reader.consumer.num_pending > 20)
    engine.process.kill()
    engine.process.wait()
    (final,) = (await short.get()).outputs
    assert (final.finish_reason, len(final.token_ids)) == ("length", 5)
    num_tokens, error = await drain(long.get)
    assert isinstance(error, EngineDeadError)
    assert "SIGKILL" in str(error)
    assert num_tokens > 15
    assert engine.reader.consumer.num_pending == 0


async def test_a_ring_that_cannot_be_read_is_told_as_a_death(
    start: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start(**SLOW)
    task = asyncio.create_task(outputs_of(llm, request(**ENDLESS)))
    await until(lambda: llm.load.num_running == 1)

    def read() -> None:
        raise ValueError("a torn record")

    monkeypatch.setattr(start.engines[0].reader, "read", read)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDeadError, match="a torn record"):
            await task
    assert llm.errored
    assert "the reader task failed" in caplog.text


async def test_a_dropped_one_is_freed_and_ends_its_engine(start: Starter) -> None:
    llm = start(**SLOW)
    await outputs_of(llm, request())
    running = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task.get_name() for task in running] == ["ringserve-reader"]
    reference, process = weakref.ref(llm), start.engines[0].process
    del llm
    gc.collect()
    assert reference() is None
    block_until(lambda: process.poll() is not None)
    await until(lambda: all(task.done() for task in running))


async def test_a_shutdown_fails_what_runs_and_may_be_called_twice(start: Starter) -> None:
    llm = start(**SLOW)
    task = asyncio.create_task(outputs_of(llm, request(**ENDLESS)))
    await until(lambda: llm.load.num_running == 1)
    others = asyncio.all_tasks() - {asyncio.current_task(), task}
    await llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    assert start.engines[0].process.poll() == 0  # it obeyed
    assert all(task.done() for task in others)
    assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, False)
    with pytest.raises(EngineDeadError, match="shut down"):
        await outputs_of(llm, request())
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.check_health()
    await llm.shutdown()


async def test_a_shutdown_touches_the_loop_from_its_own_thread_alone(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start()
    await outputs_of(llm, request())
    loop, threads = asyncio.get_running_loop(), []
    remove_reader = loop.remove_reader

    def note(*arguments: Any) -> bool:
        threads.append(threading.current_thread())
        return remove_reader(*arguments)

    monkeypatch.setattr(loop, "remove_reader", note)
    await llm.shutdown()
    monkeypatch.undo()
    assert threads == [threading.main_thread()]


async def test_one_that_was_never_used_shuts_down(start: Starter) -> None:
    llm = start()
    await llm.shutdown()
    assert start.engines[0].process.poll() == 0


async def test_a_full_queue_refuses_more_until_there_is_room(start: Starter) -> None:
    llm = start(max_num_queued_reqs=3, **SLOW)
    tasks = [asyncio.create_task(outputs_of(llm, request(str(n), **ENDLESS))) for n in range(2)]
    await until(lambda: llm.num_live == 2)
    with pytest.raises(OverloadedError, match=r"limit of 3 \(--max-num-queued-reqs\)"):
        await outputs_of(llm, request(n=2))
    assert llm.num_live == 2
    assert (await outputs_of(llm, request("third")))[-1].finished
    await llm.abort("0")
    assert (await outputs_of(llm, request(n=2)))[-1].finished
    await llm.abort("1")
    await asyncio.gather(*tasks)


async def test_the_ring_counters_are_a_snapshot_of_what_was_carried(start: Starter) -> None:
    llm = start(wait_strategy="block")
    before = llm.ring_counters()
    assert (before.num_records, before.num_tokens) == (0, 0)
    await asyncio.gather(*(outputs_of(llm, request(f"r{i}", max_tokens=20)) for i in range(3)))
    after = llm.ring_counters()
    assert after.num_tokens == 60
    assert after.num_records >= 20
    assert 0 <= after.num_coalesced_records < after.num_records
    assert (after.num_late_rows, after.num_spins_hit, after.num_spins_missed) == (0, 0, 0)
    assert before.num_records == 0
    with pytest.raises(AttributeError):
        after.num_records = 0  # type: ignore[misc]


async def test_every_step_passes_every_hop_of_the_clock(start: Starter) -> None:
    llm = start()
    await outputs_of(llm, request(max_tokens=20))
    await until(lambda: all(sum(times.counts) >= 20 for times in llm.hop_times().values()))


async def test_plain_tokens_take_the_short_way_and_the_others_do_not(model: ModelInfo) -> None:
    class Writer:
        is_writable = True

        def __init__(self) -> None:
            self.whole: list[str] = []
            self.ready: list[bytes] = []

        def write(self, output: CompletionOutput) -> None:
            self.whole.append(output.text)

        def delta_writer(self, index: int) -> Callable[[bytes], bool]:
            assert index == 0

            def write(text: bytes) -> bool:
                self.ready.append(text)
                return True

            return write

        def fail(self, error: Exception) -> None:
            raise error

    processor, writer = OutputProcessor(model.tokenizer, lambda _: None), Writer()
    one = await InputProcessor(model.with_limits(max_model_len=8192, vocab_size=49152)).process(request(max_tokens=9))
    collector = RequestOutputCollector("r", [1], 1, OutputKind.DELTA)
    collector.attach(writer)
    state = processor.add(one, 0, collector)
    tokens = model.tokenizer.encode("one two three four", add_special_tokens=False)
    for token in tokens[:-1]:
        await processor.process(StepRecord(RecordHeader(*[0] * 18), [state.handle], [token]), is_behind=False)
    last = StepRecord(RecordHeader(*[0] * 18), [state.handle], tokens[-1:], finish_reasons=[2], stop_token_ids=[-1])
    await processor.process(last, is_behind=False)
    assert writer.ready == [json.dumps(f" {word}").encode() for word in ("two", "three")]
    assert writer.whole == ["one", " four"]


async def test_a_reader_that_is_late_counts_stalls_and_coalesced_records(start: Starter) -> None:
    llm = start()
    collector = llm.submit(await llm.input_processor.process(request(max_tokens=2000)))
    block_until(lambda: llm.ring_counters().num_stalls > 0)  # the loop does not run: the ring fills up
    while not (await collector.get()).finished:
        pass
    counters = llm.ring_counters()
    assert counters.num_tokens == 2000
    assert counters.num_coalesced_records > 0
    assert counters.stall_s > 0


async def embedding_of(llm: AsyncLLM, **options: Any) -> np.ndarray[Any, Any]:
    (output,) = [output async for output in llm.encode(EncodeRequest(request_id="e", **options))]
    assert output.request_id == "e"
    return output.embedding


async def test_encode_yields_one_embedding_and_leaves_nothing(start: Starter) -> None:
    llm = start(embedding_size=48)
    last, mean = [await embedding_of(llm, prompt=[3, 9], pooling=pooling) for pooling in (Pooling.LAST, Pooling.MEAN)]
    assert last.shape == mean.shape == (48,)
    assert last.dtype == np.float32
    assert np.linalg.norm(last) == pytest.approx(1, abs=1e-6)
    assert not np.array_equal(last, mean)
    np.testing.assert_array_equal(last, await embedding_of(llm, prompt=[9]))  # LAST is this model's default
    raw = await embedding_of(llm, prompt=[9], is_normalized=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), last, atol=1e-6)
    await until(lambda: is_idle(llm))


async def test_embeddings_and_texts_share_the_engine(start: Starter) -> None:
    llm = start(**SLOW)
    text, embeddings = await asyncio.gather(
        text_of(llm, request()), asyncio.gather(*[embedding_of(llm, prompt=[i + 1]) for i in range(20)])
    )
    assert text.startswith("Alice")
    assert len(np.unique(embeddings, axis=0)) == 20
    await until(lambda: is_idle(llm))


async def test_an_aborted_or_abandoned_encode_leaves_the_engine(start: Starter) -> None:
    llm = start(prefill_time_ms=60_000)
    aborted, abandoned = [asyncio.ensure_future(embedding_of(llm, prompt=[1])) for _ in range(2)]
    await until(lambda: llm.load.num_running == 2)
    abandoned.cancel()
    await until(lambda: llm.num_live == 1)
    await llm.abort("e")
    with pytest.raises(EngineGenerateError, match="aborted"):
        await aborted
    await until(lambda: is_idle(llm))


async def test_an_invalid_encode_is_refused(start: Starter) -> None:
    llm = start()
    for prompt in ("", [], [-1], [10**7], [1] * 8193):
        with pytest.raises(RequestError, match="prompt"):
            await embedding_of(llm, prompt=prompt)
    assert (await embedding_of(llm, prompt=[1] * 8192)).shape == (64,)


def test_from_config_starts_an_engine_that_ends_with_it() -> None:
    llm = AsyncLLM.from_config(ServeConfig(engine="synthetic", max_model_len=500, pooling="mean"))
    pid = llm._reader.engine.process.pid
    assert (llm.model.max_model_len, llm.model.pooling, llm.model.embedding_size) == (500, Pooling.MEAN, 64)
    assert asyncio.run(text_of(llm, request())).startswith("Alice")
    llm.close()
    assert not Path(f"/proc/{pid}").exists()


class Turns:
    """Counts the loop's turns, and the rows that are processed within each."""

    def __init__(self, processor: OutputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = 0
        self.num_rows: dict[int, int] = {}
        process_row = processor._process_row

        def count(*arguments: Any) -> None:
            self.num_rows[self.turn] = self.num_rows.get(self.turn, 0) + 1
            process_row(*arguments)

        monkeypatch.setattr(processor, "_process_row", count)

    async def beat(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_a_heartbeat_runs_at_least_every_128_rows_across_records(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = OutputProcessor(model.tokenizer, lambda _: None)
    turns = Turns(processor, monkeypatch)
    one = ProcessedRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(), kind=OutputKind.DELTA, max_tokens=9,
        eos_token_id=-1, stop_token_ids=(), first_index=0,
    )  # fmt: skip
    collector = RequestOutputCollector("r", [1], 300, OutputKind.DELTA)
    handles = [processor.add(one, index, collector).handle for index in range(300)]
    heart = asyncio.create_task(turns.beat())
    for rows in (handles, handles[:100], handles[:100], handles[:100]):
        await processor.process(record(rows), is_behind=True)
    heart.cancel()
    assert sum(turns.num_rows.values()) == 600
    assert max(turns.num_rows.values()) == CHUNK_ROWS <= 128
    assert len(turns.num_rows) == -(-600 // CHUNK_ROWS)


async def test_answers_that_end_together_are_decoded_in_turns(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = OutputProcessor(model.tokenizer, lambda _: None)
    one = ProcessedRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(n=20), kind=OutputKind.FINAL_ONLY,
        max_tokens=CHUNK_TOKENS, eos_token_id=-1, stop_token_ids=(), first_index=0,
    )  # fmt: skip
    collector = RequestOutputCollector("r", [1], 20, OutputKind.FINAL_ONLY)
    handles = [processor.add(one, index, collector).handle for index in range(20)]
    for _ in range(CHUNK_TOKENS // 2):
        await processor.process(record(handles), is_behind=False)
    turns = Turns(processor, monkeypatch)
    heart = asyncio.create_task(turns.beat())
    ends = {"finish_reasons": [int(FinishReason.LENGTH)] * 20, "stop_token_ids": [-1] * 20}
    await processor.process(record(handles, **ends), is_behind=False)
    heart.cancel()
    assert [*turns.num_rows.values()] == [2] * 10
    assert {output.num_tokens for output in (await collector.get()).outputs} == {CHUNK_TOKENS // 2 + 1}


def record(handles: list[int], **columns: list[int]) -> StepRecord:
    return StepRecord(RecordHeader(*[0] * 18), handles, [5] * len(handles), **columns)


async def test_every_step_ends_with_a_turn_of_the_others(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start()
    llm.start()
    collector = llm.submit(await llm.input_processor.process(request(max_tokens=20)))
    block_until(lambda: start.engines[0].reader.consumer.num_pending >= 20)
    turns = Turns(llm._reader.outputs, monkeypatch)
    heart = asyncio.create_task(turns.beat())
    while not (await collector.get()).finished:
        pass
    heart.cancel()
    assert list(turns.num_rows.values()) == [1] * 20


async def test_300_requests_at_once_do_not_starve_the_others(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start()
    turns = Turns(llm._reader.outputs, monkeypatch)
    heart = asyncio.create_task(turns.beat())
    results = await asyncio.gather(*(text_of(llm, request(str(n), max_tokens=20)) for n in range(300)))
    heart.cancel()
    assert len(set(results)) == 1
    assert sum(turns.num_rows.values()) == 300 * 20
    assert max(turns.num_rows.values()) <= CHUNK_ROWS
    assert np.mean(list(turns.num_rows.values())) > 1
