"""What tracing costs where it is off, and what is said where it cannot be on."""

import subprocess
import sys

import pytest

from ringserve.server import cli
from ringserve.server.errors import StartupError
from ringserve.server.settings.config import ServeConfig
from ringserve.server.telemetry.trace_headers import TraceHeadersLayer, current_trace_headers


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys, ringserve.server.launcher; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_server_that_lacks_opentelemetry_says_how_to_install_it(monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "ringserve.server.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert cli.main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]) == 2
    assert "pip install 'ringserve[otel]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "grpc://a:4317", "http://", "", "http://[::1", "http://a:x", "http://:1"]
)
def test_an_endpoint_is_an_http_url(url: str) -> None:
    with pytest.raises(StartupError, match=r"--otlp-traces-endpoint is .*must be http://HOST:PORT"):
        ServeConfig(otlp_traces_endpoint=url)


async def test_the_layer_keeps_the_two_headers_of_one_request_and_no_others() -> None:
    seen = []

    async def app(*_: object) -> None:
        seen.append(current_trace_headers())

    async def nothing(*_: object) -> None:
        raise AssertionError

    layer = TraceHeadersLayer(app)
    headers = [(b"traceparent", b"00-1"), (b"tracestate", b"a=1"), (b"tracestate", b"b=2"), (b"cookie", b"c")]
    await layer({"type": "http", "headers": headers}, nothing, nothing)
    await layer({"type": "http", "headers": []}, nothing, nothing)
    assert seen == [{"traceparent": ["00-1"], "tracestate": ["a=1", "b=2"]}, {}]
