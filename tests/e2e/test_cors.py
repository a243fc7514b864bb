"""CORS over real sockets: every kind of response carries the headers, and none while it is off."""

import json

import httpx
import pytest

from ringserve.server.errors import StartupError
from ringserve.server.http.cors import Cors, CorsPolicy
from ringserve.server.http.protocol import RingserveProtocol, TransportSink
from ringserve.server.http.sink import AsgiSink, open_sink
from ringserve.server.settings.config import ServeConfig
from tests.e2e.conftest import RunningServer
from tests.server.http.test_sink import uvicorn_server

ORIGIN, OTHER = "https://app.example", "https://evil.example"
PROMPT = {"prompt": "a", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
REQUESTS = {
    "json": ("POST", "/v1/completions", PROMPT, 200),
    "stream": ("POST", "/v1/completions", PROMPT | {"stream": True}, 200),
    "chat stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True}, 200),
    "unknown route": ("POST", "/v1/nothing", {}, 404),
    "wrong method": ("GET", "/v1/completions", None, 405),
    "bad request": ("POST", "/v1/completions", {"prompt": 1}, 400),
    "bad stream": ("POST", "/v1/completions", {"prompt": "", "stream": True}, 400),
    "health": ("GET", "/health", None, 200),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    running = RunningServer("--engine", "synthetic", "--max-model-len", "512", "--allowed-origins", ORIGIN)
    yield running
    assert running.stop() == 0


def ask(server: RunningServer, kind: str, origin: str | None, *, is_allowed: bool = True) -> httpx.Response:
    method, path, body, status = REQUESTS[kind]
    if method == "POST" and not is_allowed:
        status = 403
    response = server.client.request(method, path, json=body, headers={"origin": origin} if origin else {})
    assert response.status_code == status, response.text
    return response


def preflight(server: RunningServer, origin: str, **headers: str) -> httpx.Response:
    given = {"origin": origin, "access-control-request-method": "POST", **headers}
    return server.client.options("/v1/chat/completions", headers=given)


def cors_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def streamed_text(response: httpx.Response) -> str:
    """Return a completion stream's text; how it is cut into events depends on the machine's load."""
    *chunks, _ = (json.loads(event[6:]) for event in response.text.replace("[DONE]", "0").split("\n\n") if event)
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_response_allows_the_origin_once(server: RunningServer, kind: str) -> None:
    response = ask(server, kind, ORIGIN)
    assert response.headers.get_list("access-control-allow-origin") == [ORIGIN]
    assert response.headers.get_list("vary") == ["Origin"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("origin", [OTHER, ORIGIN + ".evil.example", "null", None])
def test_other_origins_get_no_headers_but_caches_are_told(server: RunningServer, kind: str, origin: str | None) -> None:
    response = ask(server, kind, origin, is_allowed=origin is None)
    assert cors_headers(response) == {}
    assert response.headers.get_list("vary") == ["Origin"]


def test_a_stream_is_whole_and_its_connection_lives_on(server: RunningServer) -> None:
    plain, cross = ask(server, "stream", None), ask(server, "stream", ORIGIN)
    assert streamed_text(cross) == streamed_text(plain) != ""
    assert cross.text.endswith("data: [DONE]\n\n")
    assert set(cross.headers) - set(plain.headers) == set(cors_headers(cross))
    assert cross.extensions["network_stream"] is plain.extensions["network_stream"]


def test_a_preflight_is_answered_with_what_it_asks_for(server: RunningServer) -> None:
    response = preflight(server, ORIGIN, **{"access-control-request-headers": "Authorization,content-type"})
    assert response.status_code == 204
    assert response.content == b""
    headers = cors_headers(response)
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in headers["access-control-allow-methods"].split(", ")
    assert int(headers["access-control-max-age"]) > 0
    assert response.headers["vary"] == "Origin"


def test_a_preflight_of_another_origin_is_refused_in_the_one_error_shape(server: RunningServer) -> None:
    response = preflight(server, OTHER)
    assert response.status_code == 400
    assert cors_headers(response) == {}
    assert "evil.example" in response.json()["error"]["message"]


def test_options_that_is_no_preflight_goes_to_the_routes(server: RunningServer) -> None:
    response = server.client.options("/v1/chat/completions", headers={"origin": ORIGIN})
    assert response.status_code == 405
    assert response.headers["access-control-allow-origin"] == ORIGIN


def test_without_the_flag_nothing_is_added(synthetic: RunningServer) -> None:
    for kind in REQUESTS:
        response = ask(synthetic, kind, ORIGIN, is_allowed=False)
        assert cors_headers(response) == {}
        assert "vary" not in response.headers
    assert preflight(synthetic, ORIGIN).status_code == 405


def test_any_origin_is_a_star_for_which_caches_need_not_vary() -> None:
    policy = CorsPolicy(origins=frozenset("*"))
    assert cors_of(policy, OTHER) == {"allow-origin": "*"}
    assert policy.response_headers(None) == []


def test_credentials_are_allowed_to_named_origins() -> None:
    policy = CorsPolicy(origins=frozenset({ORIGIN}), allow_credentials=True)
    assert cors_of(policy, ORIGIN) == {"allow-origin": ORIGIN, "allow-credentials": "true"}


@pytest.mark.parametrize("origins", [("*",), ("*", ORIGIN), (ORIGIN, "*")])
def test_credentials_are_not_allowed_to_any_origin(origins: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match="--allow-credentials with --allowed-origins"):
        ServeConfig(allowed_origins=origins, allow_credentials=True)


def cors_of(policy: CorsPolicy, origin: str) -> dict[str, str]:
    prefix = b"access-control-"
    named = {name.removeprefix(prefix).decode(): value.decode() for name, value in policy.response_headers(origin)}
    return {name: value for name, value in named.items() if name.startswith("allow-")}


async def test_methods_and_headers_can_be_narrowed() -> None:
    config = ServeConfig(allowed_origins=(ORIGIN,), allowed_methods=("get", "POST"), allowed_headers=("X-A",))
    app = Cors(httpx.ASGITransport(app=None), CorsPolicy.of(config))  # type: ignore[arg-type]  # never reached
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as client:
        base = {"origin": ORIGIN, "access-control-request-method": "POST"}
        allowed = await client.options("/", headers=base | {"access-control-request-headers": "x-a"})
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-methods"] == "GET, POST"
        refused = await client.options("/", headers=base | {"access-control-request-method": "PUT"})
        assert (refused.status_code, cors_headers(refused)) == (400, {})
        refused = await client.options("/", headers=base | {"access-control-request-headers": "x-a, x-b"})
        assert (refused.status_code, cors_headers(refused)) == (400, {})


@pytest.mark.parametrize("origin", ["https://a.example/", "https://a.example/page", "a.example", "", "https://"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(StartupError, match="--allowed-origins"):
        ServeConfig(allowed_origins=(origin,))


async def test_a_token_passes_no_layer_on_the_transport_way() -> None:
    """ASGI `send` is never called for it; on other servers the layer's `send` is, and adds the headers there."""
    num_sent, kinds = 0, []

    async def app(scope, receive, send) -> None:
        async def counted(message) -> None:
            nonlocal num_sent
            num_sent += 1
            await send(message)

        sink = open_sink(scope, counted)
        kinds.append(type(sink))
        sink.open(200, [(b"x-own", b"1")])
        for _ in range(9):
            sink.write(b"a")
        sink.finish()
        await sink.wait_closed(receive)

    cors = Cors(app, CorsPolicy(origins=frozenset({ORIGIN})))
    async with uvicorn_server(RingserveProtocol, cors) as port, httpx.AsyncClient() as client:
        response = await client.get(f"http://127.0.0.1:{port}/", headers={"origin": ORIGIN})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=cors), base_url="http://a") as client:
        fallback = await client.get("/", headers={"origin": ORIGIN})
    assert kinds == [TransportSink, AsgiSink]
    assert num_sent == 11  # the fallback's alone
    for answer in (response, fallback):
        assert answer.text == "a" * 9
        assert answer.headers["x-own"] == "1"
        assert answer.headers["access-control-allow-origin"] == ORIGIN
