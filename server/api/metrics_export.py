"""GET /metrics: the counts as Prometheus families, made when they are asked for. docs/metrics.md defines each.

Families are formatted one by one, and the loop runs in between: a scrape delays no token by more than one family.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ringserve.server.generation.async_llm import AsyncLLM
from ringserve.server.telemetry.histogram import Histogram
from ringserve.server.telemetry.hop_clock import BUCKET_BOUNDS_US, HopTimes
from ringserve.server.telemetry.metrics import Metrics
from ringserve.server.telemetry.process_clock import ProcessClock

PREFIX = "ringserve:"


class MetricsCollector(Collector):
    """A collector in the sense of prometheus_client, over what the server has counted.

    Args:
        llm: Whose steps and sequences.
        process_clock: Of the process in which it runs.
        model_name: For the label.
    """

    def __init__(self, llm: AsyncLLM, process_clock: ProcessClock, model_name: str) -> None:
        self._llm = llm
        self._process_clock = process_clock
        self._labels = {"model_name": model_name, "engine": "0"}
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield every family, each with the figures of the moment in which it is taken."""
        metrics = self._llm.metrics
        yield from self._scheduler(metrics)
        yield from self._tokens(metrics)
        yield from self._sequences(metrics)
        yield from self._path()
        yield from self._process.collect()

    def _scheduler(self, metrics: Metrics) -> Iterator[Metric]:
        load, header = self._llm.load, metrics.header
        used, blocks = (header.num_blocks_used, header.num_blocks) if header else (0, 0)
        yield self._gauge("num_requests_running", "Sequences that hold a seat in the engine.", load.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for a seat in the engine.", load.num_waiting)
        yield self._gauge("num_requests_live", "Sequences that the server has not ended.", self._llm.num_live)
        yield self._gauge("kv_cache_usage_perc", "Blocks of the KV cache in use, 1 is all.", used / max(blocks, 1))
        num_preemptions = header.num_preemptions if header else 0
        yield self._counter("num_preemptions", "Times that a sequence gave its blocks up.", num_preemptions)
        yield self._histogram("iteration_tokens_total", "Tokens in a step.", metrics.iteration_tokens)
        yield self._histogram("iteration_prefill_tokens", "Prompt tokens in a step.", metrics.prefill_tokens)

    def _tokens(self, metrics: Metrics) -> Iterator[Metric]:
        cached, queried = metrics.num_cached_tokens, metrics.num_queried_tokens
        yield self._counter("prompt_tokens", "Tokens of prompts that are computed.", metrics.num_prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Those of them that the prefix cache had.", cached)
        yield self._counter("generation_tokens", "Tokens of output.", metrics.num_generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", queried)
        yield self._counter("prefix_cache_hits", "Prompt tokens found there.", cached)

    def _sequences(self, metrics: Metrics) -> Iterator[Metric]:
        reasons, rejections = metrics.finish_reasons, metrics.rejections
        yield self._counters("request_success", "Sequences that ended.", "finished_reason", reasons)
        yield self._counters("admission_rejections", "Requests refused for load.", "reason", rejections)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", metrics.ttft),
            ("inter_token_latency_seconds", "Between two tokens of a sequence, as published.", metrics.gap),
            ("request_time_per_output_token_seconds", "A sequence's mean of that.", metrics.gap_mean),
            ("e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", metrics.e2e),
            ("request_queue_time_seconds", "From the engine's inbox to a seat.", metrics.queue),
            ("request_prefill_time_seconds", "From a seat to the first token.", metrics.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", metrics.decode),
            ("request_inference_time_seconds", "From a seat to the last token.", metrics.inference),
            ("request_prompt_tokens", "Tokens of an ended sequence's prompt.", metrics.prompt_tokens),
            ("request_generation_tokens", "Tokens of an ended sequence's output.", metrics.generation_tokens),
            ("request_params_max_tokens", "Most output tokens that a prompt may have.", metrics.max_tokens),
            ("request_params_n", "Sequences that a prompt asks for.", metrics.n),
            ("abort_latency_seconds", "From the order to drop sequences until they are.", metrics.abort),
        ):
            yield self._histogram(name, text, histogram)

    def _path(self) -> Iterator[Metric]:
        counters = self._llm.ring_counters()
        for name, text, value in (
            ("ring_records", "Step records read.", counters.num_records),
            ("ring_tokens", "Tokens in them.", counters.num_tokens),
            ("ring_coalesced_records", "Records whose tokens left with later ones.", counters.num_coalesced_records),
            ("ring_late_rows", "Rows of sequences that had ended before.", counters.num_late_rows),
            ("ring_stalls", "Times that the engine found the ring full.", counters.num_stalls),
            ("ring_stall_seconds", "How long it waited then.", counters.stall_s),
            ("ring_wakes", "Times that a blocked server was woken for a record.", counters.num_wakes),
            ("ring_spins_hit", "Times that a spinning server met a record.", counters.num_spins_hit),
            ("ring_spins_missed", "Times that it spun in vain.", counters.num_spins_missed),
        ):  # fmt: skip
            yield self._counter(name, text, value)
        yield self._hops(self._llm.hop_times())
        yield self._histogram("event_loop_lag_seconds", "How late the loop calls back.", self._process_clock.lag)
        pauses = self._new_histogram("gc_pause_seconds", "How long a garbage collection took.", "generation")
        for generation, histogram in enumerate(self._process_clock.gc_pauses):
            pauses.add_metric([*self._labels.values(), str(generation)], histogram.buckets(), histogram.sum)
        yield pauses

    def _hops(self, times: dict[str, HopTimes]) -> Metric:
        family = self._new_histogram("step_hop_seconds", "A step's way to the sockets, hop by hop.", "hop")
        # A bucket holds whole microseconds up to its bound: times below the next one.
        bounds = [*(f"{(bound + 1) / 1e6:g}" for bound in BUCKET_BOUNDS_US), "+Inf"]
        for hop, hop_times in times.items():
            total, buckets = 0, []
            for bound, count in zip(bounds, hop_times.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric([*self._labels.values(), hop], buckets, hop_times.sum_s)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = self._new_histogram(name, text)
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
        return family

    def _new_histogram(self, name: str, text: str, *labels: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(PREFIX + name, text, labels=[*self._labels, *labels])


class _Families(Collector):
    """A collector of what it is given."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


async def render(collector: Collector, encode: Callable[[Collector], bytes]) -> bytes:
    """Return the whole exposition, letting the loop run after each family."""
    end = encode(_Families())  # of the OpenMetrics format; the text format has none
    parts = []
    for family in collector.collect():
        parts.append(encode(_Families(family)).removesuffix(end))
        await asyncio.sleep(0)
    return b"".join((*parts, end))


async def metrics(request: Request) -> ASGIApp:
    """GET /metrics: in the text format, or as OpenMetrics for a scraper that accepts it."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    if isinstance(encode, functools.partial):  # one that would write an underscore for the colon, which needs no escape
        encode = functools.partial(encode.func, **encode.keywords | {"escaping": ALLOWUTF8})
    content = await render(request.app.state.metrics_collector, encode)
    return Response(content, headers={"content-type": content_type})
