"""GET /openapi.json: all routes in OpenAPI 3.1.

OPERATIONS describes routes: schemas of requests are made from the tables with which they are read,
schemas of answers from their structs. Other routes are listed with their handlers' docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct

from ...core.request.json_fields import Schema, nullable
from ...core.version import version
from . import lora_adapters, tokenization
from .chat import chat
from .generate import completions
from .generate.request_fields import Body
from .protocol import answers
from .protocol.answers import json_text
from .protocol.app_state import APP_STATE
from .turns import message_blocks, message_input, response_input, response_items

ROUTES = web.RouteTableDef()

_STRING = {"type": "string"}
_REF = "#/components/schemas/{name}"

_READ_ERRORS = (401, 403, 404, 421)
_CALL_ERRORS = (400, 401, 403, 404, 413, 415, 421, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of a route. `answer` None: a line of text."""

    answer: type[Struct] | None
    body: Body | None = None
    event: type[Struct] | None = None
    statuses: Sequence[int] | None = None

    @property
    def errors(self) -> Sequence[int]:
        """`statuses`, or the defaults of routes with and without a body."""
        return self.statuses or (_READ_ERRORS if self.body is None else _CALL_ERRORS)


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation(answers.Completion, completions.BODY, answers.Completion),
    "/v1/chat/completions": Operation(
        answers.ChatCompletion, chat.BODY, answers.ChatCompletionChunk
    ),
    "/v1/responses": Operation(
        response_items.ResponseBody, response_input.BODY, response_items.StreamEvent
    ),
    "/v1/responses/{response_id}": Operation(
        response_items.ResponseBody, statuses=(400, *_READ_ERRORS)
    ),
    "DELETE /v1/responses/{response_id}": Operation(response_items.DeletedResponse),
    "/v1/messages": Operation(
        message_blocks.MessageBody, message_input.BODY, message_blocks.MessageEvent
    ),
    "/v1/messages/count_tokens": Operation(
        message_blocks.MessageTokens, message_input.COUNTED_BODY
    ),
    "/tokenize": Operation(answers.Tokens, tokenization.TOKENIZE_BODY),
    "/detokenize": Operation(answers.Text, tokenization.DETOKENIZE_BODY),
    "/v1/load_lora_adapter": Operation(None, lora_adapters.LOAD),
    "/v1/unload_lora_adapter": Operation(None, lora_adapters.UNLOAD),
    "/v1/models": Operation(answers.ModelList),
    "/v1/models/{model}": Operation(answers.Model),
    "/server_info": Operation(answers.ServerInfo),
    "/load": Operation(answers.ServerLoad),
    "/live": Operation(answers.Status, statuses=(421,)),
    "/ready": Operation(answers.Status, statuses=(421,)),
    "/health": Operation(answers.Status, statuses=(421,)),
    "/version": Operation(answers.Version, statuses=(421,)),
}
_NOT_READY = ("/ready", "/health")  # 503 is an answer there, not an error


@ROUTES.get("/openapi.json")
async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return web.json_response(document(request.app), dumps=json_text)


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of all routes of the application."""
    paths: dict[str, dict[str, Any]] = {}
    door = app[APP_STATE].door
    models = [door.model.limits.model, *door.adapters.adapters]
    for route in app.router.routes():
        if route.resource is None or route.method == "HEAD":
            continue
        path = route.resource.canonical
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, models)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version() or "0"},
        "paths": paths,
        "components": {"schemas": _components(), "securitySchemes": schemes},
        "security": [{}, {"key": []}],
    }


def _operation(route: web.AbstractRoute, path: str, models: Sequence[str]) -> dict[str, Any]:
    summary = (inspect.getdoc(route.handler) or route.handler.__name__).splitlines()[0]
    body: dict[str, Any] = {"summary": summary, "responses": {}}
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        body["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _STRING}]
    known = OPERATIONS.get(f"{route.method} {path}") or OPERATIONS.get(path)
    if known is None:
        body["responses"] = {"default": {"description": summary}}
        return body
    content: dict[str, Any] = {"text/plain": {"schema": _STRING}}
    if known.answer is not None:
        content = _json_content(_ref(known.answer))
    if known.event is not None:
        events = [_ref(known.event), _ref(answers.Error)]  # a failed stream ends with an error
        content["text/event-stream"] = {"schema": {"anyOf": events}}
    body["responses"]["200"] = {"description": "OK", "content": content}
    if path in _NOT_READY:
        body["responses"]["503"] = {"description": "Not ready", "content": content}
    for status in known.errors:
        body["responses"][str(status)] = _error(status)
    if known.body is not None:
        schema = _body_schema(known.body, models)
        body["requestBody"] = {"required": True, "content": _json_content(schema)}
    return body


def _components() -> dict[str, Any]:
    """The schemas of all answers. Fields that are never omitted are required."""
    named = (vars(module) for module in (answers, message_blocks, response_items))
    found = {one for names in named for one in names.values() if isinstance(one, type(Struct))}
    structs = sorted(found - {Struct}, key=lambda one: one.__name__)
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    for struct in structs:
        fields = msgspec.structs.fields(struct)
        always = [field.name for field in fields if field.default is not UNSET]
        schemas[struct.__name__]["required"] = always
    return schemas


def _ref(answer: type[Struct]) -> Schema:
    return {"$ref": _REF.format(name=answer.__name__)}


def _json_content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _error(status: int) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": _json_content(_ref(answers.Error))}


def _body_schema(body: Body, models: Sequence[str]) -> Schema:
    schemas = {name: kind.schema for name, kind in body.fields.items()}
    if "lora_name" not in schemas:
        schemas["model"] = {"enum": [*models]}
    properties = {
        name: schema if name in body.required else nullable(schema)
        for name, schema in schemas.items()
    }
    return {"type": "object", "properties": properties, "required": list(body.required)}
