"""The page, its files, and its data: a snapshot by GET, or a stream of server-sent events.

Everything here is read-only. The page may load and run nothing but these files: no inline script or
style, nothing from elsewhere. Who may come in at all is judged before (http/protocol/access.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Clock
from ....core.version import version
from ...telemetry.calls.call_record import SloTargets
from ..protocol.app_state import AppState
from ..protocol.errors import Refusal
from .roster import EngineRoster
from .snapshot import SnapshotFeed, Update
from .static_files import StaticFile, static_files

ROUTES = web.RouteTableDef()

MAX_VIEWERS = 32
PING_S = 15.0
_STREAM_S = 300.0  # then the page comes back, and whether it may is judged anew
_RETRY_MS = 1000
_SLOWEST_WRITE_S = 10.0
_LONGEST_TARGET_MS = 3_600_000.0

_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE_HEADERS = {
    **_HEADERS,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
}
_DATA_HEADERS = {**_HEADERS, "Cache-Control": "no-store"}


class Viewers:
    """The feed, and how many follow it."""

    def __init__(self, feed: SnapshotFeed, max_viewers: int = MAX_VIEWERS) -> None:
        self.feed = feed
        self.max_viewers = max_viewers
        self.num_viewers = 0


VIEWERS = web.AppKey("viewers", Viewers)


def feed_of(parts: AppState, clock: Clock) -> SnapshotFeed:
    """The feed of a whole gateway."""

    def about() -> dict[str, Any]:
        return {
            "model": parts.door.model.limits.model,
            "version": version(),
            "is_ready": parts.is_ready(),
            "is_draining": parts.door.is_draining,
        }

    roster = EngineRoster(parts.table, parts.view.members, clock)
    targets = SloTargets(parts.config.slo_ttft_s, parts.config.slo_tbt_s)
    return SnapshotFeed(parts.telemetry.window, roster, about, targets, clock)


def add_dashboard(app: web.Application, viewers: Viewers) -> None:
    """Give an application the page; the feed ticks for as long as the application runs."""

    async def ticking(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(viewers.feed.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app[VIEWERS] = viewers
    app.add_routes(ROUTES)
    app.cleanup_ctx.append(ticking)


@ROUTES.get("/dashboard")
async def page(request: web.Request) -> web.Response:
    """The live page."""
    return _file(request, static_files()["index.html"], _PAGE_HEADERS)


@ROUTES.get("/dashboard/")
async def page_with_slash(request: web.Request) -> web.Response:
    """The page's relative links want it without the slash."""
    return web.Response(status=308, headers={"Location": "../dashboard"})


@ROUTES.get("/dashboard/{path:.+}")
async def file(request: web.Request) -> web.Response:
    """One of the page's files."""
    found = static_files().get(request.match_info["path"])
    if found is None:
        raise web.HTTPNotFound
    return _file(request, found, _HEADERS)


@ROUTES.get("/api/snapshot")
async def snapshot(request: web.Request) -> web.Response:
    """The whole snapshot for the targets `ttft_ms` and `tbt_ms`, at most a second old."""
    data = request.app[VIEWERS].feed.whole(_targets(request))
    response = web.Response(body=data, content_type="application/json", headers=_DATA_HEADERS)
    response.enable_compression()
    return response


@ROUTES.get("/api/stream", allow_head=False)
async def stream(request: web.Request) -> web.StreamResponse:
    """Events `snapshot`, then `update` every second; ends after a while, and the page returns."""
    targets = _targets(request)
    viewers = request.app[VIEWERS]
    if viewers.num_viewers >= viewers.max_viewers:
        raise Refusal(
            503, "too_many_viewers", f"{viewers.max_viewers} others are watching this gateway"
        )
    viewers.num_viewers += 1
    try:
        return await _send(request, viewers.feed, targets)
    finally:
        viewers.num_viewers -= 1


async def _send(
    request: web.Request, feed: SnapshotFeed, targets: SloTargets
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_DATA_HEADERS | {"X-Accel-Buffering": "no"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + _STREAM_S
    pinged_s = loop.time()
    try:
        await response.write(b"retry: %d\n\n" % _RETRY_MS)
        async for update in feed.follow(targets):
            async with asyncio.timeout(_SLOWEST_WRITE_S):
                await response.write(_event(update))
                if loop.time() - pinged_s >= PING_S:
                    pinged_s = loop.time()
                    await response.write(b": ping\n\n")
            if loop.time() >= ends_s:
                break
    except ConnectionError:
        pass  # the viewer went away
    except TimeoutError:  # it reads nothing, not even that this is the end
        if request.transport is not None:
            request.transport.abort()
    return response


def _event(update: Update) -> bytes:
    head = f"id: {update.number}\nevent: {update.kind}\ndata: ".encode()
    return head + update.data + b"\n\n"


def _targets(request: web.Request) -> SloTargets:
    """The gateway's own, where the viewer names none; raises InvalidRequest."""
    targets = request.app[VIEWERS].feed.targets
    for name, field in (("ttft_ms", "ttft_slo_s"), ("tbt_ms", "tbt_slo_s")):
        if (text := request.query.get(name)) is not None:
            targets = replace(targets, **{field: target_s(text, name)})
    return targets


def target_s(text: str, name: str) -> float:
    """In seconds, of a text in milliseconds; raises InvalidRequest."""
    try:
        target_ms = float(text[:32])
    except ValueError:
        target_ms = math.nan
    if not 0 < target_ms <= _LONGEST_TARGET_MS:
        raise InvalidRequest(f"{name} is a number of milliseconds above 0", name)
    return target_ms / 1000


def _file(request: web.Request, found: StaticFile, headers: dict[str, str]) -> web.Response:
    headers = headers | {"Cache-Control": "no-cache", "ETag": f'"{found.etag}"'}
    if request.headers.get("If-None-Match") == f'"{found.etag}"':
        return web.Response(status=304, headers=headers)
    return web.Response(
        body=found.body, content_type=found.content_type, charset="utf-8", headers=headers
    )
