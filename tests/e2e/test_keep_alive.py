"""Connections between two requests: how long they stay open, and that none is closed under a request."""

import socket
import time

import httpx
import pytest

from ringserve.server.errors import StartupError
from ringserve.server.launcher import _uvicorn_config
from ringserve.server.settings.config import ServeConfig
from tests.e2e.conftest import post_bytes

PROXIES_S = {"nginx, ALB, APISIX": 60, "Go": 90, "Azure": 120, "Google": 600}  # their idle time-outs towards a server
BODY = {"prompt": "a", "max_tokens": 1}
REQUESTS = {
    "get": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "post": post_bytes("/v1/completions", BODY),
    "stream": post_bytes("/v1/completions", BODY | {"stream": True}),
    "refused": post_bytes("/v1/completions", {"prompt": 1}),
    "unknown route": post_bytes("/v1/nothing", {}),
}


async def app(scope, receive, send) -> None:
    raise AssertionError


def idle_connection(server, request: bytes) -> socket.socket:
    """Return a connection whose one request has been answered."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(request)
    answer = b""
    while not answer.endswith((b"}", b"0\r\n\r\n", b"length: 0\r\n\r\n")):
        answer += client.recv(65536)
    return client


def test_the_default_outlives_the_idle_connections_of_common_proxies() -> None:
    default_s = ServeConfig().keep_alive_timeout
    assert default_s > max(PROXIES_S.values())
    assert _uvicorn_config(ServeConfig(), app, None).timeout_keep_alive == default_s


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_idle_connection_is_closed_after_the_flags_time_and_not_before(shared_server, kind: str) -> None:
    server = shared_server("--engine", "synthetic", "--keep-alive-timeout", "0.7")
    with idle_connection(server, REQUESTS[kind]) as client:
        started = time.monotonic()
        assert client.recv(1) == b""
        elapsed_s = time.monotonic() - started
    print(f"closed after {elapsed_s:.2f} s")
    assert 0.6 <= elapsed_s < 10 * 0.7


def test_each_request_begins_the_time_anew_and_a_long_one_takes_none(shared_server) -> None:
    server = shared_server("--engine", "synthetic", "--step-time-ms", "300", "--keep-alive-timeout", "0.7")
    with httpx.Client(base_url=server.url, timeout=30) as client:
        answers = [client.post("/v1/completions", json=BODY | {"max_tokens": n}) for n in (4, 1, 4)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({id(answer.extensions["network_stream"]) for answer in answers}) == 1


def test_zero_closes_none(shared_server) -> None:
    closing = shared_server("--engine", "synthetic", "--keep-alive-timeout", "0.7")
    keeping = shared_server("--engine", "synthetic", "--keep-alive-timeout", "0")
    with idle_connection(keeping, REQUESTS["post"]) as kept, idle_connection(closing, REQUESTS["post"]) as closed:
        assert closed.recv(1) == b""
        kept.sendall(REQUESTS["get"])
        assert kept.recv(65536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 2.0**63])
def test_a_time_that_is_none_is_refused_at_start(seconds: float) -> None:
    with pytest.raises(StartupError, match="--keep-alive-timeout"):
        ServeConfig(keep_alive_timeout=seconds)
