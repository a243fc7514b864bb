"""/openapi.json: the route table's types as an OpenAPI 3.1 document."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ringserve.server.api.field_limits import OTHERS, describe, describe_other
from ringserve.server.api.generation_fields import GenerationFields
from ringserve.server.errors import ErrorCode
from ringserve.server.http.endpoint import Endpoint

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_NOT_A_WORD = re.compile(r"\W+")
_REFERENCES = "#/components/schemas/{name}"


class ErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: ErrorCode | None


class ErrorResponse(msgspec.Struct):
    """What every error looks like, in a stream too."""

    error: ErrorDetail


def make_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """Describe endpoints.

    Args:
        endpoints: Each path and method once.
        version: The server's.
    """
    types: dict[Any, None] = {ErrorResponse: None}  # a set that keeps its order
    for endpoint in endpoints:
        types |= {kind: None for kind in (endpoint.body, endpoint.answer, endpoint.event) if kind is not None}
    made, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    for kind in types:
        if isinstance(kind, type) and issubclass(kind, GenerationFields):
            describe(components[kind.__name__], kind.neutral, kind.needed)
    for name in components.keys() & OTHERS:
        describe_other(components[name], OTHERS[name])
    schemas = dict(zip(types, made, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", each.path), {}).update(_path(each, schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringserve", "version": version, "summary": "OpenAI-compatible serving of language models."},
        "paths": paths,
        "components": {"schemas": components},
    }


def _path(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    return {method.lower(): _operation(endpoint, method, schemas) for method in endpoint.methods}


def _operation(endpoint: Endpoint, method: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    error = {"description": "An error", "content": {"application/json": {"schema": schemas[ErrorResponse]}}}
    operation: dict[str, Any] = {
        "operationId": method.lower() + _NOT_A_WORD.sub("_", endpoint.path).rstrip("_"),
        "summary": endpoint.summary,
        "responses": {"200": _response(endpoint, schemas), "default": error},
    }
    if parameters := [*_path_parameters(endpoint), *_query_parameters(endpoint)]:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": schemas[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _path_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in _PATH_PARAMETER.findall(endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    if endpoint.query is not None:
        _, components = msgspec.json.schema_components([endpoint.query], ref_template=_REFERENCES)
        for name, schema in components[endpoint.query.__name__]["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}


def _response(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": "The answer"}
    if endpoint.answer is not None:
        response["content"] = {endpoint.media_type: {"schema": schemas[endpoint.answer]}}
    if endpoint.event is not None:
        # OpenAPI 3.1 has no word for a stream of JSON: a text whose `data:` lines hold it, and [DONE] as the last.
        stream = {"type": "string", "contentMediaType": "application/json", "contentSchema": schemas[endpoint.event]}
        response["content"]["text/event-stream"] = {"schema": stream}
    return response
