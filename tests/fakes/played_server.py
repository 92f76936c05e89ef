"""A scripted server of OpenAI's API, with the behaviour that `baton bench` may meet in practice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class PlayedServer:
    """`usage`: in every event (each), in the last (last) or not at all (none).

    `piece`: tokens per event; `refuses`: field names that get a 400; `breaks_after`: number of
    requests served before it responds with 500; `hangs_after`: before it stops responding, or sends
    only a first token (`hangs_late`); `token_s`: seconds before each event; `odd`: an event that
    begins each response after the first one.
    """

    models: tuple[str, ...] = ("played",)
    key: str | None = None
    usage: str = "each"
    piece: int = 1
    token_s: float = 0.0
    refuses: tuple[str, ...] = ()
    breaks_after: int | None = None
    content_type: str = "text/event-stream"
    odd: Any = None
    hangs_after: int | None = None
    hangs_late: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "no such key")
        if body["model"] not in self.models:
            return _error(404, f"the model {body['model']!r} does not exist")
        for name in self.refuses:
            if name in json.dumps(body):
                return _error(400, f"unknown parameter: stream_options.{name}")
        self.bodies.append(body)
        if self.breaks_after is not None and len(self.bodies) > self.breaks_after:
            return _error(500, "broken")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._stream(request, body)
        finally:
            self.num_running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        hangs = self.hangs_after is not None and len(self.bodies) > self.hangs_after
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        if self.odd is not None and len(self.bodies) > 1:
            await response.write(f"data: {json.dumps(self.odd)}\n\n".encode())
        num_tokens, is_chat = body["max_tokens"], "messages" in body
        for start in range(0, num_tokens, self.piece):
            await asyncio.sleep(self.token_s)
            if hangs and start == self.piece * self.hangs_late:
                await asyncio.sleep(1000)
            num_now = min(num_tokens, start + self.piece)
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            event: dict[str, Any] = {"choices": [choice]}
            if self.usage == "each":
                event["usage"] = {"prompt_tokens": 7, "completion_tokens": num_now}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self.usage != "none":
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            event = {"choices": [], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


@asynccontextmanager
async def played(server: PlayedServer) -> AsyncIterator[str]:
    """Yields its URL while it runs on this loop."""
    app = web.Application()
    app.router.add_get("/v1/models", server.list)
    app.router.add_post("/v1/completions", server.generate)
    app.router.add_post("/v1/chat/completions", server.generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
