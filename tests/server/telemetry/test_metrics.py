"""What the counts mean: on hand-made records, then on the synthetic engine with steps of a known time."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.server.errors import EngineGenerateError, OverloadedError, RequestError, ServerError
from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.generation.engine_process import EngineProcess
from ringserve.server.generation.input_processor import GenerateRequest
from ringserve.server.generation.model_info import ModelInfo
from ringserve.server.generation.outputs import OutputKind
from ringserve.server.generation.sampling_params import SamplingParams
from ringserve.server.settings import model_path
from ringserve.server.settings.config import ServeConfig
from ringserve.server.telemetry.finished_sequence import FinishedSequence
from ringserve.server.telemetry.histogram import SECONDS, Histogram
from ringserve.server.telemetry.metrics import GAP_S, Metrics
from ringserve.server.telemetry.process_clock import ProcessClock
from ringserve.shm_transport.config import RingConfig
from ringserve.shm_transport.records import RecordFlag
from ringserve.shm_transport.ring import RecordHeader
from ringserve.shm_transport.step_ring import StepRecord

MS = 1_000_000
ENDLESS = {"max_tokens": 5000, "ignore_eos": True}


def counts(histogram: Histogram) -> dict[str, int]:
    """Return the buckets that are not empty, not cumulated."""
    values, before = {}, 0.0
    for bound, total in histogram.buckets():
        if total > before:
            values[bound] = int(total - before)
        before = total
    return values


def finished(**fields: Any) -> FinishedSequence:
    return FinishedSequence(
        **{
            "request_id": "r", "index": 0, "num_siblings_left": 0, "finish_reason": "length", "prompt_token_ids": [1],
            "num_tokens": 1, "n": 1, "max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "arrival_ns": 0, "ended_ns": 0,
            "last_published_ns": 0, "first": None, **fields,
        }
    )  # fmt: skip


class Feed:
    """Feeds a Metrics with records as the reader makes them: the same list where the rows are the same."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._handles: list[int] = []
        self._seen: set[int] = set()
        self._ended: set[int] = set()

    def __call__(
        self,
        at_ns: int,
        handles: list[int],
        *,
        late: int = 0,
        num_tokens: int | None = None,
        flags: int = 0,
        num_prefill_tokens: int = 0,
    ) -> None:
        self._handles = self._handles if handles == self._handles else handles
        num_tokens = len(handles) if num_tokens is None else num_tokens
        header = RecordHeader(*[0] * 18)._replace(
            published_ns=at_ns,
            num_rows=len(handles),
            num_tokens=num_tokens,
            flags=flags,
            num_prefill_tokens=num_prefill_tokens,
        )
        record = StepRecord(header, self._handles, [5] * num_tokens)
        self.metrics.begin(record, lambda handle: handle not in self._ended)
        for handle in handles:
            if handle not in self._seen:
                self._seen.add(handle)
                self.metrics.note_first(MS)
        self.metrics.end(record, late, late)

    def end(self, *handles: int) -> None:
        self._ended.update(handles)
        for handle in handles:
            self.metrics.note_end(handle, finished())

    @property
    def gaps(self) -> dict[str, int]:
        return counts(self.metrics.gap)


def test_prompt_tokens_are_counted_once_a_step_that_computed_any() -> None:
    feed = Feed()
    for num_tokens in (0, 32, 0, 100):
        feed(0, [1], num_prefill_tokens=num_tokens)
    feed(0, [], num_prefill_tokens=7)
    feed(0, [1], num_prefill_tokens=500, flags=RecordFlag.MORE)
    feed(0, [2], num_prefill_tokens=500)
    assert counts(feed.metrics.prefill_tokens) == {"8": 1, "32": 1, "128": 1, "512": 1}
    assert feed.metrics.prefill_tokens.sum == 639


def test_an_observation_on_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram((0.001, 0.01), SECONDS)
    for value in (0, MS, MS + 1, 10 * MS, 10 * MS + 1):
        histogram.observe(value)
    assert histogram.buckets() == [("0.001", 2.0), ("0.01", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(0.022000002)


def test_rows_that_stay_have_one_gap_each_a_step() -> None:
    feed = Feed()
    for step in range(4):
        feed(step * 20 * MS, [1, 2, 3])
    assert feed.gaps == {"0.025": 9}
    assert feed.metrics.num_generation_tokens == 12


def test_a_gap_counts_from_the_sequences_own_last_token() -> None:
    feed = Feed()
    feed(0, [1, 2])
    feed(20 * MS, [1])
    feed(40 * MS, [1])
    feed(60 * MS, [1, 2])
    assert feed.gaps == {"0.025": 3, "0.075": 1}


def test_records_without_rows_part_no_gap() -> None:
    feed = Feed()
    feed(0, [1])
    feed(20 * MS, [])
    feed(90 * MS, [1])
    assert feed.gaps == {"0.1": 1}


def test_late_rows_are_no_tokens() -> None:
    feed = Feed()
    feed(0, [1, 2])
    feed.end(2)
    feed(20 * MS, [1, 2], late=1)
    feed(40 * MS, [1, 2], late=1)
    feed(60 * MS, [1])
    assert feed.gaps == {"0.025": 3}
    assert feed.metrics.num_generation_tokens == 5


def test_tokens_of_one_step_have_no_time_between_them() -> None:
    feed = Feed()
    feed(0, [1, 2], num_tokens=8)
    feed(20 * MS, [1, 2], num_tokens=6)
    assert feed.gaps == {"0.0005": 10, "0.025": 2}


def test_the_tokens_of_a_step_are_counted_once_for_all_its_records() -> None:
    feed = Feed()
    feed(0, list(range(10)), flags=1)  # RecordFlag.MORE
    feed(1, list(range(10, 18)))
    assert counts(feed.metrics.iteration_tokens) == {"32": 1}
    assert feed.metrics.iteration_tokens.sum == 18


def test_nothing_is_kept_of_sequences_that_have_ended() -> None:
    feed = Feed()
    for handle in range(0, 1000, 2):
        feed(handle * MS, [handle, handle + 1])
        feed.end(handle)
        feed(handle * MS, [handle + 1])
        feed(handle * MS, [])
        feed(handle * MS, [handle + 1_000_000, handle])  # a late row of one that has ended
        feed.end(handle + 1, handle + 1_000_000)
    feed(0, [5_000_000])
    feed.end(5_000_000)
    feed(0, [6_000_000])
    rows = feed.metrics._rows
    assert len(rows._absent) + len(rows._present) == 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 60), st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6))), max_size=30))
def test_the_gaps_are_those_that_a_look_at_each_row_gives(steps: list[tuple[int, set[int], set[int]]]) -> None:
    feed, expected, last_ns, ended = Feed(), Histogram(GAP_S, SECONDS), {}, set()
    at_ns, num_tokens = 0, 0
    for elapsed_ms, handles, ending in steps:
        at_ns += elapsed_ms * MS
        rows = sorted(handles)
        live = [handle for handle in rows if handle not in ended]
        feed._seen |= ended  # a late row is never a first one
        feed(at_ns, rows, late=len(rows) - len(live))
        for handle in live:
            if handle in last_ns:
                expected.observe(at_ns - last_ns[handle])
            last_ns[handle] = at_ns
        num_tokens += len(live)
        feed.end(*(ending & last_ns.keys() - ended))
        ended |= ending & last_ns.keys()
    assert feed.metrics.gap.buckets() == expected.buckets()
    assert feed.metrics.num_generation_tokens == num_tokens


def test_a_collection_of_garbage_is_one_pause() -> None:
    clock = ProcessClock()

    async def collect() -> None:
        import gc

        clock.start()
        gc.collect(2)
        gc.collect(0)
        clock.stop()
        gc.collect(0)

    asyncio.run(collect())
    assert [pauses.count for pauses in clock.gc_pauses] == [1, 0, 1]


async def test_a_loop_that_is_held_lags() -> None:
    clock = ProcessClock()
    clock.start()
    try:
        time.sleep(0.35)
        async with asyncio.timeout(30):
            while not clock.lag.count:
                await asyncio.sleep(0.01)
    finally:
        clock.stop()
    assert clock.lag.sum > 0.2


# On the synthetic engine


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    tokenizer = model_path.resolve(None) / "tokenizer.json"
    return ModelInfo.load(tokenizer, chat_template=None).with_limits(max_model_len=8192, vocab_size=0)


@pytest.fixture
def start(model: ModelInfo, tmp_path: Path) -> Iterator[Callable[..., AsyncLLM]]:
    engines: list[EngineProcess] = []
    script = tmp_path / "script.json"
    script.write_text(
        json.dumps(model.tokenizer.encode("Alice was beginning to get tired. ", add_special_tokens=False))
    )

    def start(*, max_num_queued_reqs: int = 2048, **options: Any) -> AsyncLLM:
        config = ServeConfig(engine="synthetic", script=str(script), **options).engine_config(script)
        engines.append(EngineProcess(config, RingConfig(), step_timeout_s=60))
        return AsyncLLM(engines[-1], model, max_num_queued_reqs=max_num_queued_reqs)

    yield start
    for engine in engines:
        engine.kill()


def request(name: str = "r", kind: OutputKind = OutputKind.DELTA, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 8, "ignore_eos": True, **params}
    return GenerateRequest(request_id=name, prompt=[1, 2, 3], params=SamplingParams(**params), kind=kind)


async def run(llm: AsyncLLM, *requests: GenerateRequest) -> None:
    async def one(each: GenerateRequest) -> None:
        try:
            async for _ in llm.generate(each):
                pass
        except ServerError:
            pass

    await asyncio.gather(*map(one, requests))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.FINAL_ONLY])
async def test_steps_of_100_ms_are_gaps_of_100_ms(start: Any, kind: OutputKind) -> None:
    llm = start(step_time_ms=100.0)
    await run(llm, *(request(f"r{i}", kind, max_tokens=3 + i) for i in range(8)))
    metrics, num_tokens = llm.metrics, sum(3 + i for i in range(8))
    assert metrics.gap.count == num_tokens - 8
    assert (
        sum(counts(metrics.gap).get(bound, 0) for bound in ("0.1", "0.15", "0.2", "0.3", "0.5"))
        > 0.5 * metrics.gap.count
    )
    assert metrics.gap.sum == pytest.approx(metrics.decode.sum)  # a sequence's gaps add up to its decode time
    assert metrics.ttft.count == metrics.queue.count == metrics.gap_mean.count == 8
    assert metrics.num_generation_tokens == metrics.generation_tokens.sum == num_tokens
    assert metrics.num_prompt_tokens == metrics.prompt_tokens.sum == 24
    assert metrics.max_tokens.sum == num_tokens
    assert metrics.inference.sum == pytest.approx(metrics.prefill.sum + metrics.decode.sum)
    assert metrics.e2e.sum > metrics.queue.sum + metrics.inference.sum
    assert metrics.iteration_tokens.sum == num_tokens + 24
    assert metrics.header.num_running == 0


async def test_several_tokens_a_step_are_counted_each(start: Any) -> None:
    llm = start(step_time_ms=5.0, tokens_per_step=4)
    await run(llm, request(max_tokens=18), request("s", max_tokens=7))
    assert llm.metrics.gap.count == 18 + 7 - 2
    assert llm.metrics.num_generation_tokens == 25


async def test_the_time_to_the_first_token_is_that_of_the_prefill(start: Any) -> None:
    llm = start(prefill_time_ms=150.0)
    await run(llm, request(), request("s", OutputKind.FINAL_ONLY))
    assert set(counts(llm.metrics.ttft)) <= {"0.25", "0.5", "0.75"}
    assert llm.metrics.prefill.sum == pytest.approx(0.3, rel=0.5)
    assert llm.metrics.queue.sum < 0.15


async def test_each_sequence_ends_for_one_reason(start: Any) -> None:
    llm = start(step_time_ms=2.0)
    await run(
        llm, request(), request("s", stop=("beginning",)), request("n", n=3), request("t", stop_token_ids=(30,), seed=1)
    )
    stream = llm.generate(request("gone", **ENDLESS, n=2))
    await anext(stream)
    await stream.aclose()
    aborted = asyncio.create_task(run(llm, request("aborted", **ENDLESS)))
    await until(lambda: llm.load.num_running == 1)
    await llm.abort("aborted")
    await aborted
    reasons = llm.metrics.finish_reasons
    assert sum(reasons.values()) == 1 + 1 + 3 + 1 + 2 + 1
    assert reasons["abort"] == 3
    assert reasons["stop"] >= 1
    assert reasons["error"] == 0
    assert counts(llm.metrics.n) == {"1": 4, "2": 1, "5": 1}
    assert llm.metrics.num_prompt_tokens == 6 * 3  # once a prompt, whatever its n


async def test_what_the_engine_fails_is_an_error(start: Any) -> None:
    llm = start(fail_after=3, prefill_time_ms=50.0)
    await run(llm, request(), request("s", max_tokens=2))
    assert llm.metrics.finish_reasons == Counter(error=1, length=1, stop=0, abort=0)
    running = asyncio.create_task(run(llm, request("t", n=2, max_tokens=2)))
    await until(lambda: llm.num_live == 2)
    llm.fail_all(EngineGenerateError("told to"))
    await running
    assert llm.metrics.finish_reasons["error"] == 3


async def test_an_abort_is_acknowledged_by_the_engine(start: Any) -> None:
    llm = start(step_time_ms=5.0)
    for others in (0, 1):  # an idle engine says so at once, a busy one with its next step
        tasks = [asyncio.create_task(run(llm, request(f"other{i}", max_tokens=60))) for i in range(others)]
        stream = llm.generate(request("gone", **ENDLESS, n=3))
        await anext(stream)
        before = llm.metrics.abort.count
        await stream.aclose()
        await until(lambda before=before: llm.metrics.abort.count == before + 1)
        assert llm.load.num_running == others
        await asyncio.gather(*tasks)
    assert 0 < llm.metrics.abort.sum < 30
    assert not llm.metrics._aborts


async def test_a_refused_request_is_counted_as_such_and_as_nothing_else(start: Any) -> None:
    llm = start(max_num_queued_reqs=2, step_time_ms=20.0)
    running = llm.submit(await llm.input_processor.process(request(n=1, max_tokens=100)))
    with pytest.raises(OverloadedError):
        llm.check_admission(2)
    with pytest.raises(RequestError):  # not for load: it would never be taken
        llm.check_admission(3)
    assert llm.metrics.rejections == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}
    assert sum(llm.metrics.finish_reasons.values()) == 0
    llm.release(running)


async def test_a_finished_sequence_says_what_it_took(start: Any) -> None:
    llm, ended = start(step_time_ms=2.0), []
    llm.metrics.on_finished.append(ended.append)
    await run(llm, request(n=2, max_tokens=6))
    assert [one.num_siblings_left for one in ended] == [1, 0]
    assert {one.index for one in ended} == {0, 1}
    assert all((one.num_tokens, one.finish_reason, one.max_tokens) == (6, "length", 6) for one in ended)
    for one in ended:
        stamps = (one.arrival_ns, one.first.queued_ns, one.first.scheduled_ns, one.first.published_ns,
                  one.first.taken_ns, one.last_published_ns, one.ended_ns)  # fmt: skip
        assert list(stamps) == sorted(stamps)
