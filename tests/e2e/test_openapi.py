"""What the server answers is what its own /openapi.json says."""

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
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
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
