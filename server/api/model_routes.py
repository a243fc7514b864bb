"""GET /v1/models and /v1/models/NAME."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ringserve.server.api.serving import Serving
from ringserve.server.http.endpoint import Endpoint
from ringserve.server.http.json_response import JsonResponse


class ModelPermission(msgspec.Struct, kw_only=True):
    """What may be done with a model: OpenAI's older clients look at it."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ringserve"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    """What /v1/models answers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def models(request: Request) -> ASGIApp:
    """GET /v1/models."""
    serving: Serving = request.app.state.serving
    names = (*serving.model_names, *serving.adapters)
    return JsonResponse(ModelList(data=[_card(serving, name) for name in names]))


async def model(request: Request) -> ASGIApp:
    """GET /v1/models/NAME."""
    serving: Serving = request.app.state.serving
    name = request.path_params["name"]
    serving.check_model(name)
    return JsonResponse(_card(serving, name))


def _card(serving: Serving, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=serving.created,
        root=serving.model_names[0],
        parent=serving.model_names[0] if name in serving.adapters else None,
        max_model_len=serving.llm.model.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=serving.created)],
    )


ENDPOINTS = (
    Endpoint(path="/v1/models", handler=models, summary="List the served names", methods=("GET",), answer=ModelList),
    Endpoint(
        path="/v1/models/{name:path}",
        handler=model,
        summary="Describe one served name",
        methods=("GET",),
        answer=ModelCard,
    ),
)
