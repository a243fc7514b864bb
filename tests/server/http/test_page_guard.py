"""The layer alone: which Host, Origin and Sec-Fetch-Site get through; over sockets: tests/e2e/test_page_guard.py."""

import json

import pytest
from starlette.types import Message

from ringserve.server.errors import StartupError
from ringserve.server.http.cors import CorsPolicy
from ringserve.server.http.page_guard import PageGuard
from ringserve.server.settings.config import ServeConfig

APP = "https://app.example"


async def status_of(guard: PageGuard, *headers: tuple[str, str], method: str = "POST", kind: str = "http") -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await guard({"type": kind, "method": method, "path": "/pause", "headers": raw}, receive, send)
    return sent[0]["status"]


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def guard(*allowed_hosts: str, origins: tuple[str, ...] = ()) -> PageGuard:
    return PageGuard(app, allowed_hosts, CorsPolicy(origins=frozenset(origins)))


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LocalHost:8000", "localhost.", "localhost.:8000", "app.localhost:8000",
        "a.b.localhost", "host.docker.internal:8000", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1.", "0.0.0.0:8000",
        "192.168.1.7:80", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:1", "[fe80::1%25eth0]:8000", "", " localhost:1 ",
        "localhost:",
    ],
)  # fmt: skip
async def test_this_machines_names_and_addresses_are_answered(host: str) -> None:
    for method in ("GET", "POST"):
        assert await status_of(guard(), ("host", host), method=method) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "EVIL.example.", "localhost.evil.example", "127.0.0.1.evil.example",
        "evillocalhost", "localhost..", "localhost:80:80", "localhost:8000@evil.example", "evil@localhost", "[::1",
        "::1", "[localhost]", "[127.0.0.1]", "[::1].evil.example", "127.0.0.1, evil.example", "localhost/evil", ":8000",
        "docker.internal", "host.docker.internal.evil.example", "x", "1.2.3", "127.0.0.01.example", "localhost\u00e9",
        "http://localhost",
    ],
)  # fmt: skip
async def test_other_names_are_refused_whatever_the_method(host: str) -> None:
    for method in ("GET", "HEAD", "OPTIONS", "POST"):
        assert await status_of(guard(), ("host", host), method=method) == 403


async def test_a_request_without_host_is_no_browsers() -> None:
    assert await status_of(guard()) == 200


async def test_each_of_several_hosts_counts() -> None:
    assert await status_of(guard(), ("host", "localhost"), ("host", "127.0.0.1")) == 200
    assert await status_of(guard(), ("host", "localhost"), ("host", "evil.example")) == 403
    assert await status_of(guard(), ("host", "evil.example"), ("host", "localhost")) == 403


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("llm.example", "LLM.Example:8000", 200), ("LLM.example.", "llm.example", 200),
        ("ringserve", "ringserve:80", 200),
        ("llm.example", "localhost:1", 200), ("llm.example", "10.0.0.1", 200), ("llm.example", "a.llm.example", 403),
        ("llm.example", "evil-llm.example", 403), ("*.example", "a.example:1", 200), ("*.example", "a.b.example.", 200),
        ("*.example", "example", 403), ("*.example", "aexample", 403), ("*.example", "example.evil", 403),
        ("*", "evil.example", 200), ("*", "no host at all:::", 200),
    ],
)  # fmt: skip
async def test_allowed_hosts_are_answered_beside_this_machine(allowed: str, host: str, status: int) -> None:
    assert await status_of(guard(allowed), ("host", host)) == status


@pytest.mark.parametrize(
    "name",
    [
        "",
        "https://llm.example",
        "llm.example:8000",
        "llm.example/v1",
        "a b",
        "*.",
        "**",
        "a.*",
        "[::1]",
        "é.example",
        "a,b",
    ],
)
def test_what_is_no_hosts_name_is_refused_at_start(name: str) -> None:
    with pytest.raises(StartupError, match="--allowed-hosts has"):
        ServeConfig(allowed_hosts=("localhost", name))


HOST = ("host", "localhost:8000")
OWN = [
    [], [("origin", "http://localhost:8000")], [("origin", "HTTP://LocalHost:8000")], [("sec-fetch-site", "none")],
    [("sec-fetch-site", "same-origin"), ("origin", "http://localhost:8000")],
    [("sec-fetch-site", "same-origin"), ("origin", "null")],  # a page whose referrer policy hides its origin
    [("sec-fetch-site", "same-origin"), ("origin", "https://chat.example")],  # a proxy in front has changed Host
    [("sec-fetch-mode", "cors")],  # Node's fetch() sends no more
]  # fmt: skip
FOREIGN = [
    [("sec-fetch-site", "cross-site")], [("sec-fetch-site", "same-site")], [("sec-fetch-site", "")],
    [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")],
    [("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site")],  # another program's page on this machine
    [("origin", "http://evil.example")], [("origin", "null")], [("origin", "")], [("origin", "http://localhost")],
    [("origin", "http://localhost:3000")], [("origin", "http://evil.example/localhost:8000")],
    [("origin", "http://localhost:8000"), ("origin", "http://evil.example")],
    [("origin", "http://localhost:8000"), ("sec-fetch-site", "cross-site")],
    [("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
    [("origin", "chrome-extension://abcdefgh")], [("origin", "file://")],
]  # fmt: skip


@pytest.mark.parametrize("headers", OWN)
async def test_own_pages_and_programs_may_send_anything(headers: list[tuple[str, str]]) -> None:
    assert await status_of(guard(), HOST, *headers) == 200


@pytest.mark.parametrize("headers", FOREIGN)
async def test_foreign_pages_may_read_alone(headers: list[tuple[str, str]]) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "post", "BREW"):
        assert await status_of(guard(), HOST, *headers, method=method) == 403
        assert await status_of(guard("*"), HOST, *headers, method=method) == 403
    for method in ("GET", "HEAD", "OPTIONS"):
        assert await status_of(guard(), HOST, *headers, method=method) == 200


@pytest.mark.parametrize("headers", FOREIGN)
async def test_pages_of_any_origin_may_where_cors_says_so(headers: list[tuple[str, str]]) -> None:
    assert await status_of(guard(origins=("*",)), HOST, *headers) == 200


async def test_pages_of_the_origins_that_cors_names_may_and_no_others() -> None:
    named = guard(origins=(APP, "null"))
    for site in ([("sec-fetch-site", "cross-site")], []):
        assert await status_of(named, HOST, ("origin", APP), *site) == 200
        assert await status_of(named, HOST, ("origin", "null"), *site) == 200
        assert await status_of(named, HOST, ("origin", APP + ".evil.example"), *site) == 403
        assert await status_of(named, HOST, ("origin", APP), ("origin", "http://evil.example"), *site) == 403
    assert await status_of(named, HOST, ("sec-fetch-site", "cross-site")) == 403
    assert await status_of(named, ("host", "evil.example"), ("origin", APP)) == 403


async def test_an_origin_without_a_host_to_compare_is_foreign() -> None:
    assert await status_of(guard(), ("origin", "http://localhost:8000")) == 403
    assert await status_of(guard(), ("host", ""), ("origin", "file://")) == 403


async def test_the_refusal_says_what_was_sent_and_what_to_do() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"evil.example:8637"), (b"x-request-id", b"mine")]
    await guard()({"type": "http", "method": "GET", "path": "/", "headers": headers}, None, send)  # type: ignore[arg-type]
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "PermissionDeniedError"
    assert "'evil.example:8637'" in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert (b"x-request-id", b"mine") in sent[0]["headers"]


async def test_what_is_no_request_passes() -> None:
    assert await status_of(guard(), ("host", "evil.example"), kind="lifespan") == 200
