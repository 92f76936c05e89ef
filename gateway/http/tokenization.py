"""POST /tokenize and /detokenize: text to token ids and back, as the served model reads it."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from ...core.errors import InvalidRequest
from .body import read_object
from .chat import CHAT_MODEL, prepare
from .fields import read_fields, require
from .kinds import BOOLEAN, STRING, Kind
from .messages import MESSAGES
from .parts import PARTS, caller_of
from .prompts import TOKEN_IDS
from .tools import TOOLS

ROUTES = web.RouteTableDef()

TOKENIZE_FIELDS: Mapping[str, Kind] = {
    "model": STRING,
    "prompt": STRING,
    "messages": MESSAGES,
    "tools": TOOLS,
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
DETOKENIZE_FIELDS: Mapping[str, Kind] = {"model": STRING, "tokens": TOKEN_IDS}


@ROUTES.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """A prompt's text or a chat's messages as token ids."""
    found = read_fields(await read_object(request), TOKENIZE_FIELDS)
    door = request.app[PARTS].door
    if "messages" in found:
        if "prompt" in found:
            raise InvalidRequest("give a prompt or messages", param="prompt", code="invalid_value")
        refusal = request.app[PARTS].door.constraint_refusal
        text = (await prepare(request.app[CHAT_MODEL], found, refusal)).text
    else:
        text = require(found, "prompt")
    ids = await door.tokenize(
        found.get("model", ""),
        text,
        caller_of(request),
        adds_special_tokens=found.get("add_special_tokens", "messages" not in found),
    )
    body = {"count": len(ids), "max_model_len": door.limits.max_model_len, "tokens": list(ids)}
    if found.get("return_token_strs"):
        body["token_strs"] = [door.model.tokenizer.token(token_id).text for token_id in ids]
    return web.json_response(body)


@ROUTES.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Token ids as text, special tokens left out."""
    found = read_fields(await read_object(request), DETOKENIZE_FIELDS)
    ids = require(found, "tokens")
    text = await request.app[PARTS].door.detokenize(
        found.get("model", ""), ids, caller_of(request), param="tokens"
    )
    return web.json_response({"prompt": text})
