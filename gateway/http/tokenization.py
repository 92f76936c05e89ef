"""POST /tokenize and /detokenize: text to token ids and back, as the served model reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from ...core.errors import InvalidRequest
from ...core.request.json_fields import BOOLEAN, STRING, TOKEN_IDS, FieldKind
from .chat.chat import CHAT_MODEL, prepare
from .chat.messages import MESSAGES
from .chat.tools import TOOLS
from .generate.request_fields import read_fields, require
from .protocol.answers import Text, answer
from .protocol.app_state import APP_STATE, caller_of
from .protocol.body import read_object

ROUTES = web.RouteTableDef()

_WRITTEN_AT_ONCE = 4096

TOKENIZE_FIELDS: Mapping[str, FieldKind] = {
    "model": STRING,
    "prompt": STRING,
    "messages": MESSAGES,
    "tools": TOOLS,
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
DETOKENIZE_FIELDS: Mapping[str, FieldKind] = {"model": STRING, "tokens": TOKEN_IDS}


@ROUTES.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """A prompt's text or a chat's messages as token ids."""
    found = read_fields(await read_object(request), TOKENIZE_FIELDS)
    door = request.app[APP_STATE].door
    if "messages" in found:
        if "prompt" in found:
            raise InvalidRequest("give a prompt or messages", "prompt", "invalid_value")
        refusal = request.app[APP_STATE].door.constraint_refusal
        prompt = (await prepare(request.app[CHAT_MODEL], found, refusal)).prompt
        param, text, special_at = "messages", prompt.text, prompt.special_at
    else:
        param, text, special_at = "prompt", require(found, "prompt"), None
    ids = await door.tokenize(
        found.get("model", ""),
        text,
        caller_of(request),
        adds_special_tokens=found.get("add_special_tokens", "messages" not in found),
        special_at=special_at,
        param=param,
    )
    head = {"count": len(ids), "max_model_len": door.limits.max_model_len}
    columns: dict[str, Callable[[int], Any]] = {"tokens": int}
    if found.get("return_token_strs"):
        columns["token_strs"] = lambda token_id: door.model.tokenizer.token(token_id).text
    body = await written(head, ids, columns)
    return web.Response(body=body, content_type="application/json")


async def written(
    head: Mapping[str, int],
    ids: Sequence[int],
    columns: Mapping[str, Callable[[int], Any]],
    at_once: int = _WRITTEN_AT_ONCE,
) -> bytes:
    """JSON of the head and, of each column, one value for each id.

    Long ones are written on a thread, some at a time: others get their turns between them.
    """

    def write() -> bytes:
        pieces = [json.dumps(head)[:-1]]
        for name, value_of in columns.items():
            pieces.append(f', "{name}": [')
            for start in range(0, len(ids), at_once):
                values = [value_of(i) for i in ids[start : start + at_once]]
                pieces += (", " if start else "", json.dumps(values)[1:-1])
            pieces.append("]")
        return "".join((*pieces, "}")).encode()

    return write() if len(ids) <= at_once else await asyncio.to_thread(write)


@ROUTES.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Token ids as text, special tokens left out."""
    found = read_fields(await read_object(request), DETOKENIZE_FIELDS)
    ids = require(found, "tokens")
    text = await request.app[APP_STATE].door.detokenize(
        found.get("model", ""), ids, caller_of(request), param="tokens"
    )
    return answer(Text(text))
