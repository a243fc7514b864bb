"""OpenTelemetry traces: a span for each request that has ended, sent to a collector over OTLP/HTTP.

Imported only with --otlp-traces-endpoint, for it needs the extra `otel`. A span is made in the loop, at its request's
end, from the record that the metrics are made from; a thread of OpenTelemetry's sends spans in batches. A collector
that does not answer costs its spans and one line in the log. Sampling, batches, headers and the resource are set by
OpenTelemetry's own environment variables (docs/deploy.md).
"""

import logging
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ringserve.server.telemetry.finished_sequence import FinishedSequence
from ringserve.server.telemetry.siblings import Siblings

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0  # for the last spans to leave when the server ends
_PATH = "/v1/traces"  # OTLP's, where the endpoint names none


class Tracer:
    """Called with each sequence that has ended; makes one span of all those of a prompt.

    Args:
        endpoint: The collector's URL; without a path, OTLP's own is added.
        version: The server's.
    """

    def __init__(self, endpoint: str, version: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it has a line or two for each batch that fails
        ours = Resource.create({"service.name": "ringserve", "service.version": version})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(_with_path(endpoint))))
        self._tracer = self._provider.get_tracer("ringserve", version)
        self._propagator = TraceContextTextMapPropagator()
        self._siblings = Siblings()

    def __call__(self, sequence: FinishedSequence) -> None:
        """Take a sequence in."""
        if sequences := self._siblings.add(sequence):
            self._record(sequences)

    def close(self) -> None:
        """Send what is left, or give up after two seconds. The threads are daemons, which the process's end ends."""
        thread = threading.Thread(target=self._provider.shutdown, name="ringserve-last-spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _record(self, sequences: list[FinishedSequence]) -> None:
        last = sequences[-1]
        to_epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(last.trace_headers or {}, Context()),
            kind=SpanKind.SERVER,
            start_time=last.arrival_ns + to_epoch_ns,
        )
        if span.is_recording():  # the client's trace, or OTEL_TRACES_SAMPLER, may say that it is not to be
            _describe(span, sequences)
        span.end(last.ended_ns + to_epoch_ns)


class _Exporter(SpanExporter):
    """Tells, once, that spans are lost, and once that they are not any more. Runs on OpenTelemetry's thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; tries again for ten seconds, or OTEL_EXPORTER_OTLP_TRACES_TIMEOUT."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                logger.warning("spans are lost: %s does not take them; the next line says when it does", self._endpoint)
            self._num_lost += len(spans)
        elif self._num_lost:
            logger.warning("%s takes spans again: %d were lost", self._endpoint, self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """Give up what is being tried."""
        self._exporter.shutdown()


def _describe(span: Span, sequences: list[FinishedSequence]) -> None:
    """Set the attributes: vLLM's names, and the reasons in OpenTelemetry's."""
    last = sequences[-1]
    reasons = [sequence.finish_reason for sequence in sorted(sequences, key=lambda sequence: sequence.index)]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.id": last.request_id,
        "gen_ai.usage.prompt_tokens": len(last.prompt_token_ids),
        "gen_ai.usage.completion_tokens": sum(sequence.num_tokens for sequence in sequences),
        "gen_ai.latency.e2e": last.e2e_ns / 1e9,
        "gen_ai.response.finish_reasons": reasons,
    }
    asked = {"top_p": last.top_p, "max_tokens": last.max_tokens, "temperature": last.temperature, "n": last.n}
    attributes |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value}
    span.set_attributes(attributes | _latencies(sequences))
    if "error" in reasons:
        span.set_status(StatusCode.ERROR, "the request failed: the response and the server's log say why")


def _latencies(sequences: list[FinishedSequence]) -> dict[str, AttributeValue]:
    """Return the times up to the first token of any of the sequences, and from it to the last of any; in seconds."""
    firsts = [sequence.first for sequence in sequences if sequence.first is not None]
    if not firsts:
        return {}
    first = min(firsts, key=lambda first: first.published_ns)
    last_ns = max(sequence.last_published_ns for sequence in sequences if sequence.first is not None)
    times_ns = {
        "time_to_first_token": first.taken_ns - sequences[0].arrival_ns,
        "time_in_queue": first.scheduled_ns - first.queued_ns,
        "time_in_model_prefill": first.published_ns - first.scheduled_ns,
        "time_in_model_decode": last_ns - first.published_ns,
        "time_in_model_inference": last_ns - first.scheduled_ns,
    }
    return {f"gen_ai.latency.{name}": time_ns / 1e9 for name, time_ns in times_ns.items()}


def _with_path(endpoint: str) -> str:
    url = urlsplit(endpoint)
    return urlunsplit(url._replace(path=_PATH)) if url.path in ("", "/") else endpoint
