"""Rebound names and foreign pages over real sockets: which servers check, and that what is shipped goes on working."""

import re
import socket
from pathlib import Path

import httpx
import pytest
import yaml

from ringserve.server.http.listener import bound, is_loopback
from ringserve.server.settings.config import ServeConfig
from tests.e2e.conftest import CLI, RunningServer

ROOT = Path(__file__).parents[2]
SMALL = ("--engine", "synthetic", "--max-model-len", "512")
PROMPT = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    running = RunningServer(*SMALL, "--enable-dev-routes")
    yield running
    assert running.stop() == 0


def ask(server: RunningServer, head: str, address: str = "127.0.0.1") -> str:
    """Return the status line of an answer to a head as it is, and an empty body."""
    with socket.create_connection((address, server.port), timeout=30) as client:
        client.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        return client.recv(65536).decode().partition("\r\n")[0].partition(" ")[2]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_rebound_page_gets_nothing(server: RunningServer, is_stream: bool) -> None:
    headers = {"host": "evil.example:8637", "origin": "http://evil.example:8637", "sec-fetch-site": "same-origin"}
    for method, path, body in (
        ("POST", "/v1/completions", PROMPT | {"stream": is_stream}),
        ("GET", "/v1/models", None),
    ):
        response = server.client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "PermissionDeniedError"


ORDERS = ("/pause?mode=abort", "/resume", "/sleep?level=2", "/wake_up", "/abort_requests", "/reset_prefix_cache")


@pytest.mark.parametrize("path", ORDERS)
def test_another_sites_simple_post_orders_nothing(server: RunningServer, path: str) -> None:
    page = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    assert server.client.post(path, headers=page).status_code == 403
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_connection_of_a_refused_request_lives_on(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        refused = client.post(
            "/v1/completions", json=PROMPT | {"prompt": "a" * 100_000}, headers={"host": "evil.example"}
        )
        answered = client.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, answered.status_code) == (403, 200)
    assert refused.extensions["network_stream"] is answered.extensions["network_stream"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.0\r\n", "200 OK"),
        ("GET /health HTTP/1.0\r\nHost: evil.example\r\n", "403 Forbidden"),
        ("GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", "200 OK"),  # sent to proxies alone
        ("GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", "403 Forbidden"),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", "403 Forbidden"),
        ("GET /health HTTP/1.1\r\nhOsT:\tLOCALHOST:1 \r\n", "200 OK"),
        ("GET /nowhere HTTP/1.1\r\nHost: evil.example\r\n", "403 Forbidden"),
    ],
)
def test_the_heads_corner_cases(server: RunningServer, head: str, status: str) -> None:
    assert ask(server, head) == status


def test_any_loopback_address_is_checked() -> None:
    running = RunningServer(*SMALL, "--host", "127.0.0.2")
    try:
        for host, status in (("evil.example", "403 Forbidden"), ("127.0.0.1:1", "200 OK"), ("[::1]:1", "200 OK")):
            assert ask(running, f"GET /health HTTP/1.1\r\nHost: {host}\r\n", "127.0.0.2") == status
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False), ("::", False),
    ],
)  # fmt: skip
def test_a_port_is_on_the_loopback_or_open_to_other_machines(host: str, expected: bool) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("the machine has no IPv6")
    with bound(ServeConfig(host=host, port=0)) as listener:
        assert is_loopback(listener) == expected


def test_a_unix_socket_which_no_browser_reaches_is_not_checked(tmp_path: Path) -> None:
    with bound(ServeConfig(uds=str(tmp_path / "socket"))) as listener:
        assert not is_loopback(listener)


def compose_server(**environment: str) -> RunningServer:
    """Start a server as the image does, with what Compose's file sets."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, *CLI]
    return RunningServer(*SMALL, "--host", "0.0.0.0", command=command)


def test_a_server_for_other_machines_answers_by_any_name_unless_it_has_allowed_hosts() -> None:
    for environment, status in (({}, 200), ({"RINGSERVE_ALLOWED_HOSTS": "llm,*.example.org"}, 403)):
        running = compose_server(**environment)
        try:
            assert running.client.get("/health", headers={"host": "evil.example"}).status_code == status
            for host in ("llm:8000", "a.example.org", "10.1.2.3:8000"):
                assert running.client.get("/health", headers={"host": host}).status_code == 200
            page = {"origin": "http://evil.example"}
            assert running.client.post("/v1/completions", json=PROMPT, headers=page).status_code == 403
        finally:
            assert running.stop() == 0


def test_prometheus_scrapes_what_composes_file_starts_and_a_rebound_page_does_not() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    running = compose_server(**compose["services"]["ringserve"]["environment"])
    try:
        assert running.client.get("/metrics", headers={"host": target}).status_code == 200
        assert running.client.get("/health", headers={"host": "127.0.0.1:8000"}).status_code == 200
        assert running.client.get("/metrics", headers={"host": "evil.example:8000"}).status_code == 403
    finally:
        assert running.stop() == 0


def test_nginx_as_documented_passes_requests_and_pages_of_its_own(server: RunningServer) -> None:
    block = (ROOT / "docs/deploy.md").read_text().partition("location / {")[2].partition("}")[0]
    (upstream,) = re.findall(r"proxy_pass http://([^;]+);", block)
    assert "Host" not in block  # then nginx sends the upstream's name as Host, and the browser's Origin as it is
    page = {"host": upstream, "origin": "https://chat.example", "sec-fetch-site": "same-origin"}
    for headers in ({"host": upstream}, page):
        assert server.client.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
    page["sec-fetch-site"] = "cross-site"
    assert server.client.post("/v1/completions", json=PROMPT, headers=page).status_code == 403


def test_a_page_that_cors_allows_sends_and_reads_and_others_do_not() -> None:
    app = "https://app.example"
    running = RunningServer(*SMALL, "--allowed-origins", app, "--api-key", "secret")
    try:
        page = {"origin": app, "sec-fetch-site": "cross-site", "authorization": "Bearer secret"}
        for stream in (False, True):
            answered = running.client.post("/v1/completions", json=PROMPT | {"stream": stream}, headers=page)
            assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, app)
        misnamed = running.client.post("/v1/completions", json=PROMPT, headers=page | {"host": "llm.example"})
        assert (misnamed.status_code, misnamed.headers["access-control-allow-origin"]) == (403, app)  # it can read why
        other = running.client.post("/v1/completions", json=PROMPT, headers=page | {"origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
    finally:
        assert running.stop() == 0
