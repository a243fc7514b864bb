"""What the server answers is what its own /openapi.json says."""

import json

import jsonschema
import openapi_spec_validator
import pytest

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2, "return_token_ids": True}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 5}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/embeddings", {"input": [3, 4], "dimensions": 64, "truncate_prompt_tokens": -1, "timeout_s": 9.5}),
    ("/v1/embeddings", {"input": [[3], [4, 5]], "request_id": "a", "priority": -1, "truncation_side": None}),
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("/tokenize", {"prompt": "a", "messages": None, "tools": []}),
    ("/tokenize", {"messages": CHAT["messages"], "prompt": None, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": []}),
    ("/detokenize", {"tokens": [1, 2]}),
]


@pytest.fixture(scope="module")
def document(shared_server):
    document = shared_server("--engine", "synthetic", "--max-model-len", "2048").client.get("/openapi.json").json()
    openapi_spec_validator.validate(document)
    return document


def check(value, schema, document) -> None:
    """Validate against a schema of the document; its objects may have no other keys than it names."""
    jsonschema.validate(value, {**schema, "components": document["components"]})


def closed(document):
    """Return the document with objects that refuse keys which they do not name."""
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return document


def response_of(document, path, method, status="200"):
    return document["paths"][path][method]["responses"][status]["content"]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_real_request_and_its_answer_fit_the_description(synthetic, document, path, body) -> None:
    request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check(body, request, closed(document))
    response = synthetic.post(path, **body)
    assert response.status_code == 200, response.text
    check(response.json(), response_of(document, path, "post")["application/json"]["schema"], closed(document))


COMPLETION, RESPONSE = {"prompt": "a", "max_tokens": 2}, {"input": "a", "max_output_tokens": 2}
BOUNDS: list[tuple[str, list[object], list[object]]] = [  # of a completion: values that are in, and out
    ("allowed_token_ids", [[0], [3] * 1024], [[], [3] * 1025, [-1]]),
    ("best_of", [1, None], [2]),
    ("cache_salt", ["a", "a" * 128], ["", "a" * 129, "a/b", "a\0"]),
    ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ("kv_transfer_params", [{}, None], [{"a": 1}]),
    ("logit_bias", [{"3": 100}, {"3": -100}], [{"3": 101}, {"3": -101}, {"x": 1}, {"-1": 1}, {"": 1}]),
    ("logprobs", [0, 20], [-1, 21]),
    ("max_tokens", [1], [-1]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("min_tokens", [0], [-1]),
    ("n", [1, 128], [0, 129]),
    ("presence_penalty", [-2, 2], [-2.01, 2.01]),
    ("priority", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
    ("prompt", ["a", ["a"], [3], [[3]]], [[], None, [[]], ["a", 3], [-1], [[3], "a"]]),
    ("prompt_logprobs", [0, 20], [-1, 21]),
    ("repetition_penalty", [0.01, 100], [0.009, 101]),
    ("request_id", ["a" * 128, "a_.:@/-9"], ["", "a" * 129, "a b"]),
    ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    ("stop", ["a" * 1024, ["a"] * 64, []], ["", [""], "a" * 1025, ["a"] * 65]),
    ("stop_token_ids", [[0], [3] * 1024], [[-1], [3] * 1025]),
    ("stream_interval", [1], [0]),
    ("temperature", [0, 2], [-0.1, 2.1]),
    ("timeout_s", [0.5, 1e6], [0, 1000001]),
    ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31]),
    ("top_p", [0.01, 1], [0, 1.01]),
    ("truncate_prompt_tokens", [-1, 1], [-2, 0]),
    ("truncation_side", ["left", "right", None], ["", "up"]),
    ("use_beam_search", [False, None], [True]),
]


@pytest.mark.parametrize(("name", "within", "beyond"), BOUNDS, ids=[name for name, *_ in BOUNDS])
def test_a_field_has_the_bounds_that_are_described(synthetic, document, name, within, beyond) -> None:
    path = "/v1/completions"
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for value in within:
        check({**COMPLETION, name: value}, schema, document)
        assert synthetic.post(path, **{**COMPLETION, name: value}).status_code == 200, value
    for value in beyond:
        with pytest.raises(jsonschema.ValidationError):
            check({**COMPLETION, name: value}, schema, document)
        assert synthetic.post(path, **{**COMPLETION, name: value}).status_code == 400, value


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/completions", {"max_tokens": 2}, {}),
        ("/v1/chat/completions", CHAT, {"messages": []}),
        ("/v1/chat/completions", CHAT, {"max_completion_tokens": 0}),
        ("/v1/chat/completions", CHAT, {"logprobs": True, "top_logprobs": 21}),
        ("/v1/chat/completions", CHAT, {"tools": []}),
        ("/v1/chat/completions", CHAT, {"chat_template": "x"}),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "", "content": "a"}]}),
        ("/v1/responses", {"max_output_tokens": 2}, {}),
        ("/v1/responses", RESPONSE, {"input": []}),
        ("/v1/responses", RESPONSE, {"max_output_tokens": 0}),
        ("/v1/responses", RESPONSE, {"n": 2}),
        *(
            ("/v1/embeddings", {"input": "a"}, {name: value})
            for name, value in (
                ("input", []),
                ("input", ["a", 3]),
                ("input", ["a"] * 2049),
                ("input", [-1]),
                ("input", [[]]),
                ("input", None),
                ("dimensions", 0),
                ("request_id", "a b"),
                ("timeout_s", 0),
                ("truncate_prompt_tokens", 0),
                ("truncate_prompt_tokens", -2),
                ("truncation_side", "up"),
                ("priority", 2**31),
                ("encoding_format", "hex"),
                ("pooling", "cls"),
            )
        ),
        ("/v1/responses/input_tokens", {"input": "a"}, {"timeout_s": 0}),
        ("/v1/responses/input_tokens", {"input": "a"}, {"request_id": ""}),
        ("/tokenize", {}, {}),
        ("/tokenize", {"prompt": "a"}, {"messages": CHAT["messages"]}),
        ("/tokenize", {"prompt": None}, {"messages": []}),
        ("/tokenize", {"messages": CHAT["messages"]}, {"tools": []}),
        ("/tokenize", {"messages": CHAT["messages"]}, {"chat_template": "x"}),
        ("/detokenize", {"tokens": [-1]}, {}),
        ("/detokenize", {"tokens": [1.5]}, {}),
    ],
)
def test_what_an_endpoint_refuses_does_not_fit_its_description(synthetic, document, path, body, fields) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    with pytest.raises(jsonschema.ValidationError):
        check({**body, **fields}, schema, document)
    assert synthetic.post(path, **{**body, **fields}).status_code == 400


def test_fields_that_are_never_taken_are_not_described(document) -> None:
    properties = document["components"]["schemas"]["ResponseRequest"]["properties"]
    assert {"audio", "max_tokens", "prompt_embeds", "conversation"}.isdisjoint(properties)


@pytest.mark.parametrize("path", ["/v1/models", "/load", "/version", "/openapi.json"])
def test_what_is_got_fits_the_description(synthetic, document, path) -> None:
    answer = synthetic.client.get(path).json()
    check(answer, response_of(document, path, "get")["application/json"]["schema"], closed(document))


@pytest.mark.parametrize(("path", "body"), [each for each in REQUESTS if each[0].endswith("completions")])
def test_every_event_fits_the_description(synthetic, document, path, body) -> None:
    schema = response_of(document, path, "post")["text/event-stream"]["schema"]["contentSchema"]
    *events, last = synthetic.stream(path, **body, stream_options={"include_usage": True})
    assert last == "[DONE]"
    for event in events:
        check(event, schema, closed(document))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize", "/nowhere"])
def test_an_error_fits_the_description(synthetic, document, path) -> None:
    response = synthetic.post(path, input=3)
    assert response.status_code in (400, 404)
    schema = response_of(document, "/tokenize", "post", "default")["application/json"]["schema"]
    check(response.json(), schema, closed(document))


TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object"}}]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CONVERSATION = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
    {"type": "function_call", "call_id": "x", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "x", "output": "noon"},
]


def response_events(server, **body) -> list:
    with server.client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True, **body}) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def check_response(events, document) -> set[str]:
    """Check a stream's events, and the response that the last one has; return the kinds."""
    content = response_of(document, "/v1/responses", "post")
    for event in events:
        check(event, content["text/event-stream"]["schema"]["contentSchema"], closed(document))
    check(events[-1]["response"], content["application/json"]["schema"], closed(document))
    return {event["type"].removeprefix("response.") for event in events}


def test_responses_of_text_and_their_events_fit_the_description(synthetic, shared_server, document) -> None:
    kinds = check_response(response_events(synthetic, max_output_tokens=5, **LOGPROBS), document)
    assert {"created", "in_progress", "output_text.delta", "output_text.done", "incomplete"} <= kinds
    failing = shared_server("--engine", "synthetic", "--fail-after", "3")
    assert {"error", "failed"} <= check_response(response_events(failing), document)


def test_thoughts_and_calls_of_a_response_fit_the_description(scripted, document) -> None:
    text = '<think>Hm.</think>Wait.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    server = scripted(text, "--reasoning-parser", "think")
    events = response_events(server, tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": TOOLS})
    wanted = {"reasoning_text.delta", "reasoning_text.done", "function_call_arguments.delta", "completed"}
    assert wanted < check_response(events, document)


def test_a_stored_response_its_items_and_its_deletion_fit_the_description(synthetic, document) -> None:
    made = synthetic.post("/v1/responses", input=CONVERSATION, max_output_tokens=2).json()
    for path, method in (("", "get"), ("/input_items", "get"), ("", "delete")):
        answer = getattr(synthetic.client, method)(f"/v1/responses/{made['id']}{path}").json()
        schema = response_of(document, f"/v1/responses/{{id}}{path}", method)["application/json"]["schema"]
        check(answer, schema, closed(document))
