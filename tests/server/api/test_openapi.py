"""/openapi.json: valid, complete, and true of what the endpoints answer."""

from types import SimpleNamespace

import msgspec
import openapi_spec_validator
import pytest
from starlette.routing import Route

from ringserve.server import app
from ringserve.server.api import control_routes
from ringserve.server.api.openapi import ErrorResponse, make_document
from ringserve.server.app import build_app
from ringserve.server.errors import RequestError
from ringserve.server.http.endpoint import Endpoint


@pytest.fixture(scope="module")
def document():
    return msgspec.json.decode(msgspec.json.encode(make_document(app.ENDPOINTS, "1.2.3")))


def test_it_is_valid_openapi_3_1(document) -> None:
    assert document["openapi"] == "3.1.0"
    openapi_spec_validator.validate(document)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)


def test_every_route_of_the_application_is_in_it_and_nothing_else(document) -> None:
    serving = SimpleNamespace(llm=None, model_names=("m",))  # routes look at nothing of it before they are asked
    routes = build_app(serving).routes  # type: ignore[arg-type]
    assert all(isinstance(route, Route) for route in routes)
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes
        for method in route.methods - ({"HEAD"} if "GET" in route.methods else set())
    }
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == served


def test_whoever_takes_a_body_says_its_type_and_whoever_streams_says_so(document) -> None:
    for endpoint in app.ENDPOINTS:
        is_without_body = endpoint.path.endswith("/cancel")
        assert endpoint.methods != ("POST",) or is_without_body or endpoint.body is not None, endpoint.path
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert chat.keys() == {"application/json", "text/event-stream"}
    reference = chat["text/event-stream"]["schema"]["contentSchema"]["$ref"]
    assert document["components"]["schemas"][reference.rpartition("/")[2]]["title"] == "ChatCompletionChunk"


def test_developer_routes_are_described_with_their_query_and_served_only_when_asked_for() -> None:
    endpoints = (*app.ENDPOINTS, *control_routes.ENDPOINTS)
    document = msgspec.json.decode(msgspec.json.encode(make_document(endpoints, "1")))
    openapi_spec_validator.validate(document)
    parameters = {each["name"]: each["schema"] for each in document["paths"]["/pause"]["post"]["parameters"]}
    assert parameters["mode"]["enum"] == ["abort", "keep", "wait"]
    assert parameters["clear_cache"] == {"type": "boolean", "default": True}
    paths = {endpoint.path for endpoint in control_routes.ENDPOINTS}
    serving = SimpleNamespace(llm=None, model_names=("m",))
    served = [
        {route.path for route in build_app(serving, has_dev_routes=has).routes}  # type: ignore[arg-type]
        for has in (False, True)
    ]
    assert served[0].isdisjoint(paths)
    assert paths < served[1]


def test_the_error_type_is_the_shape_of_every_error() -> None:
    error = RequestError("n is 0", param="n")
    assert msgspec.to_builtins(msgspec.convert(error.body(), ErrorResponse)) == error.body()


def test_a_path_parameter_is_declared() -> None:
    async def handler(request):
        raise NotImplementedError

    document = make_document([Endpoint(path="/a/{name:path}/b", handler=handler, summary="A")], "1")
    (parameter,) = document["paths"]["/a/{name}/b"]["post"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("name", "path", True)
    openapi_spec_validator.validate(document)
