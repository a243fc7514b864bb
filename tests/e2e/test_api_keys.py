"""API keys over real sockets: every route but three, in every form that a response has."""

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from ringserve.server.app import ENDPOINTS
from tests.e2e.conftest import RunningServer

KEYS = ("sk-first", "sk-second")
OPEN = {"/health", "/ready", "/ping"}
GUARDED = [
    (method, endpoint.path) for endpoint in ENDPOINTS for method in endpoint.methods if endpoint.path not in OPEN
]  # fmt: skip
UNSERVED = [
    *((method, "/v1/models") for method in ("OPTIONS", "DELETE", "TRACE")),
    *(
        (method, path)
        for method in ("GET", "OPTIONS")
        for path in ("/", "/docs", "/no/such/route", "/health/", "//ping")
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# the second\n{KEYS[1]}\n")
    running = RunningServer(
        "--engine", "synthetic", "--max-model-len", "512", "--api-key", KEYS[0], "--api-key-file", str(file)
    )
    yield running
    assert running.stop() == 0
    assert not any(key in running.stderr for key in KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def check_401(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "AuthenticationError"
    assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize(("method", "path"), [*GUARDED, *UNSERVED])
def test_every_other_route_asks_for_a_key(server: RunningServer, method: str, path: str) -> None:
    check_401(server.client.request(method, path, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", sorted(OPEN))
def test_health_routes_ask_for_none(server: RunningServer, path: str) -> None:
    assert server.client.get(path).status_code != 401


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer sk-firs", "Bearer sk-firstt", "Bearer SK-FIRST", "Basic sk-first", "sk-first",
     "Bearer sk-first sk-second", "Bearer \xff"],
)  # fmt: skip
def test_what_is_no_key_is_refused(server: RunningServer, given: str) -> None:
    headers = {"authorization": given.encode("latin-1")}
    check_401(server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_key_opens_streams_and_answers(server: RunningServer, key: str, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": stream}
    response = server.client.post("/v1/completions", json=body, headers=bearer(key))
    assert response.status_code == 200
    assert ("data: [DONE]" in response.text) == stream
    assert server.client.get("/v1/models", headers={"Authorization": f"bearer  {key}"}).status_code == 200


def test_a_refused_request_leaves_its_connection_usable(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        check_401(client.post("/v1/completions", json={"prompt": "a" * 100_000}))
        assert client.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200


def test_the_openai_client_understands_the_refusal(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1]) as client:
        assert len(client.models.list().data) == 1


def test_a_keys_places_are_free_again_when_its_clients_leave(start_server, wait) -> None:
    options = ("--engine", "synthetic", "--step-time-ms", "10", "--api-key", *KEYS, "--max-concurrency-per-key", "2")
    server = start_server(*options)
    body = {"prompt": "a", "max_tokens": 2000, "stream": True}

    def status(key: str) -> int:
        return server.client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(key)).status_code

    with httpx.Client(base_url=server.url) as leaving:
        streams = [leaving.stream("POST", "/v1/completions", json=body, headers=bearer(KEYS[0])) for _ in range(2)]
        reading = [stream.__enter__().iter_raw() for stream in streams]
        assert all(map(next, reading))
        refused = server.client.post("/v1/completions", json=body, headers=bearer(KEYS[0]))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert status(KEYS[1]) == 200
    print(f"free after {wait(lambda: status(KEYS[0]) == 200, 10) * 1000:.0f} ms")
    assert server.stop() == 0


def test_a_file_that_is_missing_is_known_before_the_model_loads() -> None:
    with pytest.raises(AssertionError, match="--api-key-file: cannot read /no/such"):
        RunningServer("--engine", "synthetic", "--api-key-file", "/no/such")


def test_a_page_of_another_origin_can_read_the_refusal_and_ask_beforehand_without_a_key(start_server) -> None:
    origin = {"origin": "https://app.example"}
    server = start_server("--engine", "synthetic", "--api-key", "k", "--allowed-origins", origin["origin"])
    refused = server.client.post("/v1/completions", json={"prompt": "a"}, headers=origin)
    check_401(refused)
    assert refused.headers["access-control-allow-origin"] == origin["origin"]
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = server.client.options("/v1/completions", headers=origin | wanted)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    allowed = server.client.post("/v1/completions", json={"prompt": "a"}, headers=origin | bearer("k"))
    assert allowed.status_code == 200


def test_a_refusal_names_its_request(server: RunningServer) -> None:
    response = server.client.get("/v1/models", headers={"x-request-id": "mine"})
    check_401(response)
    assert response.headers["x-request-id"] == "mine"


def test_the_log_shows_no_key_even_with_the_whole_configuration(start_server) -> None:
    server = start_server("--engine", "synthetic", "--api-key", "sk-secret")
    assert server.stop() == 0
    assert "configuration: " in server.stderr
    assert "sk-secret" not in server.stderr
