"""POST /tokenize and /detokenize: text to token ids and back, with the served model's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web
from msgspec import UNSET

from ...core.errors import InvalidRequest
from ...core.request.json_fields import BOOLEAN, STRING, TOKEN_IDS, FieldKind
from ..admission import text_calls
from .chat.chat_model import prepare
from .chat.chat_template import ENDINGS, VARIABLES
from .chat.messages import MESSAGES
from .chat.tools import TOOLS
from .generate.request_fields import Body, require
from .protocol.answers import Text, Tokens, answer, json_text
from .protocol.app_state import APP_STATE, CALLER

ROUTES = web.RouteTableDef()

_WRITTEN_AT_ONCE = 4096  # more ids are written on a thread, so as not to delay other calls

_TOKENIZE: Mapping[str, FieldKind] = {
    "model": STRING,
    "prompt": STRING,
    "messages": MESSAGES,
    "tools": TOOLS,
    "chat_template_kwargs": VARIABLES,
    **ENDINGS,
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
TOKENIZE_BODY = Body(_TOKENIZE)
DETOKENIZE_BODY = Body({"model": STRING, "tokens": TOKEN_IDS}, ("tokens",))


@ROUTES.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """A prompt's text or a chat's messages as token ids."""
    found = await TOKENIZE_BODY.read(request)
    door = request.app[APP_STATE].door
    if "messages" in found:
        if "prompt" in found:
            raise InvalidRequest("give a prompt or messages", "prompt", "invalid_value")
        prompt = (await prepare(request, found)).prompt
        param, text, special_at = "messages", prompt.text, prompt.special_at
    else:
        param, text, special_at = "prompt", require(found, "prompt"), None
    ids = await text_calls.tokenize(
        door,
        found.get("model", ""),
        text,
        request[CALLER],
        adds_special_tokens=found.get("add_special_tokens", "messages" not in found),
        special_at=special_at,
        param=param,
    )

    def body() -> str:
        token = door.model.tokenizer.token
        wants_texts = found.get("return_token_strs", False)
        texts = [token(i).text for i in ids] if wants_texts else UNSET
        return json_text(Tokens(len(ids), door.limits.max_model_len, ids, texts))

    written = body() if len(ids) <= _WRITTEN_AT_ONCE else await asyncio.to_thread(body)
    return web.Response(body=written.encode(), content_type="application/json")


@ROUTES.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Token ids as text, special tokens left out."""
    found = await DETOKENIZE_BODY.read(request)
    door, model = request.app[APP_STATE].door, found.get("model", "")
    ids, caller = found["tokens"], request[CALLER]
    text = await text_calls.detokenize(door, model, ids, caller, param="tokens")
    return answer(Text(text))
