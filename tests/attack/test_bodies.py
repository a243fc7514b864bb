"""Bodies that hypothesis draws for every POST route: JSON, and what looks like it. No answer is an error of ours."""

import http.client
import json
import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.attack.conftest import SCALE

NUM_EXAMPLES = 250 * SCALE  # of each route and kind
LIMIT_S = 10.0  # for one answer

MESSAGES = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "tools": [TOOL], "n": 2, "temperature": 1},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "stop": ["zz"], "echo": True},
    "/v1/responses": {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2, "instructions": "b"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 3},
    "/tokenize": {"messages": MESSAGES, "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

# What json.dumps writes as it stands: no JSON, or JSON that few parsers take.
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "0x10", "01", "9" * 5000, '"\\ud800"',
       '"\\u0000"', "[" * 5000, '{"a":' * 5000, "'a'", "undefined", "", '"' + "é" * 3000 + '"')  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 128, 129, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, 2**64 - 1, 2**64, 10**30, -0.0]),
    st.integers(-10, 10), st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(["", "a", " ", "\x00", "\n", "null", "user", "assistant", "system", "tool", "auto", "required",
                     "text", "json_object", "json_schema", "function", "input_text", "message", "function_call"]),
    st.text(max_size=20),
)  # fmt: skip
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return any JSON value, its objects with keys that mean something somewhere."""
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
    )


class Raw(str):
    """Text that stands in a body as it is."""

    __slots__ = ()


def encode(value: Any) -> str:
    """Return a value as JSON with whatever Raw parts it has."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_body_makes_the_server_fail_or_hang(target) -> None:
    document = target.server.client.get("/openapi.json").json()
    posts = {path for path, item in document["paths"].items() if "post" in item}
    assert {path for path in posts if "{" not in path and path != "/ping"} == VALID.keys(), "a route is not attacked"
    names = st.sampled_from(sorted(names_in(document)))
    before = target.footprint()
    with target.watch():
        client = Client(target)
        for path, valid in VALID.items():
            fields = sorted(properties_of(document, path))
            client.attack(path, "fields", with_fields(valid, fields, values(names)))
            client.attack(path, "deep", changed_deeply(valid, values(names)))
            client.attack(path, "bytes", st.builds(damaged, st.just(encode(valid).encode()), st.randoms()))
            client.attack(path, "any", values(names).map(lambda value: encode(value).encode()))
        client.connection.close()
    target.check_unchanged(before)


def names_in(document: dict[str, Any]) -> set[str]:
    """Return the names of all properties in the description."""
    schemas = document["components"]["schemas"].values()
    return {name for schema in schemas for name in schema.get("properties", {})}


def properties_of(document: dict[str, Any], path: str) -> set[str]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = document["components"]["schemas"]
    parts = schema.get("anyOf", [schema])
    found = {name for part in parts for name in schemas[part["$ref"].rpartition("/")[2]]["properties"]}
    return found - {"model"}


def with_fields(valid: dict[str, Any], fields: list[str], value: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Return the valid body with a few fields of the route set to anything."""
    odd = value | st.sampled_from(RAW).map(Raw)
    return st.dictionaries(st.sampled_from(fields), odd, min_size=1, max_size=3).map(
        lambda some: encode({**valid, **some}).encode()
    )


def changed_deeply(valid: dict[str, Any], value: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Return the valid body with one value somewhere in it replaced, or a key added there."""
    odd = value | st.sampled_from(RAW).map(Raw)
    return st.builds(lambda new, rng: encode(replaced(valid, new, rng)).encode(), odd, st.randoms())


def replaced(value: Any, new: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {**value, rng.choice(["type", "content", "name", "role", "a"]): new}
        return {**value, key: replaced(value[key], new, rng)}
    if isinstance(value, list) and value:
        i = rng.randrange(len(value))
        return [*value[:i], replaced(value[i], new, rng), *value[i + 1 :]]
    return new


def damaged(body: bytes, rng: random.Random) -> bytes:
    """Return a body that was cut, doubled, or has some bytes changed."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.choices(range(len(data) + 1), k=2))
        match rng.randrange(5):
            case 0:
                data = data[:i]
            case 1:
                data[i:i] = data[i:j]
            case 2:
                del data[i:j]
            case 3:
                data[i:i] = rng.choice(
                    [b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"{", b"]", b"\\u", b",", b"9" * 400]
                )
            case _:
                data[i : i + 1] = bytes([rng.randrange(256)])
    return bytes(data)


class Client:
    """Sends bodies over one connection, and looks at the answers."""

    def __init__(self, target: Any) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=LIMIT_S)
        self._target = target

    def attack(self, path: str, kind: str, bodies: st.SearchStrategy[bytes]) -> None:
        """Send as many as NUM_EXAMPLES."""

        @seed(7)
        @settings(
            max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=[*HealthCheck],
            phases=[Phase.generate],
        )  # fmt: skip
        @given(body=bodies, is_stream=st.booleans())
        def run(body: bytes, is_stream: bool) -> None:
            if is_stream and path in STREAMED:
                body = body.replace(b"{", b'{"stream":true,', 1)
            self.send(path, kind, body)

        run()

    def send(self, path: str, kind: str, body: bytes) -> None:
        try:
            self.connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = self.connection.getresponse()
            content = response.read()
        except BaseException:
            self.connection.close()
            raise
        self._target.statuses[f"POST {path} {kind}", response.status] += 1
        if response.status >= 500:
            self.connection.close()
            pytest.fail(f"{response.status} {content!r} for {body[:2000]!r}")
        if response.getheader("content-type") == "application/json":
            answer = json.loads(content.decode(), parse_constant=lambda _: math.nan)
            assert response.status < 400 or set(answer["error"]) == {"message", "type", "param", "code"}
