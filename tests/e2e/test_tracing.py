"""Spans of the real server, as a collector gets them: a stub that reads OTLP's protobuf."""

import http.server
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.e2e.conftest import RunningServer, post_bytes, send

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
BODY = {"prompt": "hello you", "max_tokens": 10, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP; answers `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.status = 200
        self.num_posts = 0
        self.resource: dict[str, Any] = {}
        self.spans: list[Span] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.num_posts += 1
        if self.path == "/v1/traces" and self.server.status == 200:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resource = values(of_resource.resource.attributes)
                self.server.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        self.send_response(self.server.status if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    """Return OTLP attributes as plain values."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        return [value(v) for v in any_value.array_value.values] if kind == "array_value" else getattr(any_value, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


@pytest.fixture(scope="module")
def module_collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def collector(module_collector: Collector) -> Iterator[Collector]:
    """The collector, empty: a test waits for all spans that it causes."""
    assert module_collector.spans == []
    yield module_collector
    module_collector.spans.clear()
    module_collector.num_posts, module_collector.status = 0, 200


@pytest.fixture(scope="module")
def traced(module_collector: Collector) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        endpoint = ("--otlp-traces-endpoint", module_collector.url)
        server = RunningServer("--engine", "synthetic", "--step-time-ms", "5", *endpoint)
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_server_span_with_the_attributes_of_vllm(traced, collector, wait, stream) -> None:
    before_ns = time.time_ns()
    answer = traced.client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    after_ns = time.time_ns()
    wait(lambda: collector.spans, 30)
    (span,) = collector.spans
    assert (span.name, span.kind, span.status.code) == ("llm_request", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert before_ns <= span.start_time_unix_nano < span.end_time_unix_nano <= after_ns
    assert not span.parent_span_id
    found = values(span.attributes)
    times = {name.removeprefix("gen_ai.latency."): found.pop(name) for name in [*found] if ".latency." in name}
    assert found == {
        "gen_ai.request.id": "cmpl-mine", "gen_ai.request.n": 1, "gen_ai.request.max_tokens": 10,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 10, "gen_ai.response.finish_reasons": ["length"],
    }  # fmt: skip
    assert set(times) == {
        "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    }  # fmt: skip
    assert times["time_in_model_decode"] >= 9 * 0.005 * 0.9
    assert times["time_in_model_inference"] == pytest.approx(
        times["time_in_model_prefill"] + times["time_in_model_decode"], abs=1e-6
    )
    assert 0 < times["time_to_first_token"] < times["e2e"]
    assert times["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-6)
    assert collector.resource["service.name"] == "ringserve"
    assert collector.resource["deployment.environment"] == "test"


def test_a_trace_goes_on_where_the_client_began_it(traced, collector, wait) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=value"}
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/completions", {**BODY, "prompt": ["hello you"] * 400}),  # so many are processed on a thread
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "stream": True}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": "hello"}),
    ):
        assert traced.client.post(path, json=body, headers=headers).status_code == 200
        count = 400 if path == "/v1/completions" else 1
        wait(lambda count=count: len(collector.spans) == count, 60)
        for span in collector.spans:
            assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
            assert span.trace_state == "vendor=value"
        collector.spans.clear()
    traced.complete(**BODY)
    wait(lambda: collector.spans, 30)
    assert collector.spans[0].trace_id.hex() != TRACE_ID
    assert not collector.spans[0].parent_span_id


def test_a_pipelined_request_does_not_inherit_the_trace_of_the_one_before_it(traced, collector, wait) -> None:
    parent = f"traceparent: 00-{TRACE_ID}-{PARENT_ID}-01"
    with socket.create_connection(("127.0.0.1", traced.port)) as client:
        client.sendall(post_bytes("/v1/completions", BODY, parent) + post_bytes("/v1/completions", BODY))
        wait(lambda: len(collector.spans) == 2, 30)
    assert sorted(span.parent_span_id.hex() for span in collector.spans) == ["", PARENT_ID]


def test_a_client_that_does_not_sample_gets_no_span(traced, collector, wait) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    assert traced.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    traced.complete(**BODY)
    wait(lambda: collector.spans, 30)
    assert [span.trace_id.hex() == TRACE_ID for span in collector.spans] == [False]


def test_n_sequences_are_one_span(traced, collector, wait) -> None:
    traced.complete(**BODY, n=2)
    wait(lambda: collector.spans, 30)
    traced.complete(**BODY)
    wait(lambda: len(collector.spans) == 2, 30)
    found = values(collector.spans[0].attributes)
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.usage.completion_tokens"] == 20
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_an_abort_and_no_error(traced, collector, wait, stream) -> None:
    with send(traced.port, "/v1/completions", **BODY | {"max_tokens": 2000, "stream": stream}):
        wait(lambda: traced.load()["num_requests_running"] == 1, 30)
    wait(lambda: collector.spans, 30)
    found = values(collector.spans[0].attributes)
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert found["gen_ai.usage.completion_tokens"] < 2000
    assert collector.spans[0].status.code == Status.STATUS_CODE_UNSET


def test_a_request_that_fails_is_an_error(start_server, collector, wait) -> None:
    server = start_server("--engine", "synthetic", "--fail-after", "3", "--otlp-traces-endpoint", collector.url)
    assert server.post("/v1/completions", **BODY).status_code == 500
    assert server.stop() == 0  # the last spans leave before the server does
    (span,) = collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert values(span.attributes)["gen_ai.response.finish_reasons"] == ["error"]


def test_a_collector_that_is_down_costs_two_lines_and_nothing_else(start_server, collector, wait, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    collector.status = 503
    server = start_server("--engine", "synthetic", "--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    num_posts = 0
    for _ in range(3):
        server.complete(**BODY)
        wait(lambda before=num_posts: collector.num_posts > before, 30)
        num_posts = collector.num_posts
    assert server.client.get("/health").status_code == 200
    collector.status = 200
    wait(lambda: server.complete(**BODY) and collector.spans, 30)
    assert server.stop() == 0
    lines = [line for line in server.stderr.splitlines() if "configuration:" not in line]
    assert len(lines) == 2, lines
    assert "spans are lost" in lines[0]
    assert "takes spans again" in lines[1]


def test_a_server_ends_in_time_when_nobody_listens_there(start_server, collector) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        port = unused.getsockname()[1]
        server = start_server("--engine", "synthetic", "--otlp-traces-endpoint", f"http://127.0.0.1:{port}")
        server.complete(**BODY)
        started_s = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        took_s = time.monotonic() - started_s
    print(f"ended in {took_s:.2f} s")
    assert took_s < 5 * 2.5
    assert "Traceback" not in server.stderr
