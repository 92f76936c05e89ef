"""The page, its files, and its data: a snapshot by GET, or a stream of server-sent events.

Everything here is read-only. The page's files are read once into a table, in which requested paths
are looked up: no path is joined. The page may load and run nothing but these files: no inline
script or style, nothing from other hosts. Access is checked before (http/protocol/access.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.ports import Clock
from ....core.process.event_loop import keep_running
from ....core.version import version
from ...telemetry.calls.slo import SloTargets
from ...telemetry.window.window import HOUR_S, SPAN_S
from ..protocol.app_state import AppState
from ..protocol.errors import Refusal
from .snapshot import EngineRoster, SnapshotFeed, Update, View

ROUTES = web.RouteTableDef()

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

MAX_VIEWERS = 32
PING_S = 15.0
_STREAM_S = 300.0  # then the page reconnects, and its access is checked anew
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


FEED = web.AppKey("feed", SnapshotFeed)


def feed_of(parts: AppState, clock: Clock) -> SnapshotFeed:

    def about() -> dict[str, Any]:
        return {
            "model": parts.door.model.limits.model,
            "version": version(),
            "is_ready": parts.is_ready(),
            "is_draining": parts.door.is_draining,
        }

    roster = EngineRoster(parts.table, parts.view.members, parts.view.is_starting)
    targets = SloTargets(parts.config.slo_ttft_s, parts.config.slo_tbt_s)
    return SnapshotFeed(parts.telemetry.window, roster, about, targets, clock, parts.scope)


def add_dashboard(app: web.Application, feed: SnapshotFeed) -> None:
    """Add the page to an application; the feed ticks for as long as the application runs."""

    async def ticking(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(keep_running("the live page", feed.run))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app[FEED] = feed
    app.add_routes(ROUTES)
    app.cleanup_ctx.append(ticking)


@ROUTES.get("/dashboard")
async def page(request: web.Request) -> web.Response:
    return _file(request, static_files()["index.html"], _PAGE_HEADERS)


@ROUTES.get("/dashboard/")
async def page_with_slash(request: web.Request) -> web.Response:
    """A redirect: the page's relative links need its path without the slash."""
    return web.Response(status=308, headers={"Location": "../dashboard"})


@ROUTES.get("/dashboard/{path:.+}")
async def file(request: web.Request) -> web.Response:
    found = static_files().get(request.match_info["path"])
    if found is None:
        raise web.HTTPNotFound
    return _file(request, found, _HEADERS)


@ROUTES.get("/api/snapshot")
async def snapshot(request: web.Request) -> web.Response:
    """The whole snapshot for the targets `ttft_ms` and `tbt_ms`, at most a second old; with
    `span_s=3600` of the last hour."""
    data = request.app[FEED].data(_view(request))
    response = web.Response(body=data, content_type="application/json", headers=_DATA_HEADERS)
    response.enable_compression()
    return response


@ROUTES.get("/api/stream", allow_head=False)
async def stream(request: web.Request) -> web.StreamResponse:
    """Events: `snapshot`, `update` every second; ends after a while, then the page reconnects."""
    view = _view(request)
    feed = request.app[FEED]
    if feed.num_viewers >= MAX_VIEWERS:
        raise Refusal(503, "too_many_viewers", f"{MAX_VIEWERS} others are watching this gateway")
    feed.num_viewers += 1
    try:
        return await _send(request, feed, view)
    finally:
        feed.num_viewers -= 1


async def _send(request: web.Request, feed: SnapshotFeed, view: View) -> web.StreamResponse:
    response = web.StreamResponse(headers=_DATA_HEADERS | {"X-Accel-Buffering": "no"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + _STREAM_S
    pinged_s = loop.time()
    try:
        await response.write(b"retry: %d\n\n" % _RETRY_MS)
        async for update in feed.follow(view):
            async with asyncio.timeout(_SLOWEST_WRITE_S):
                await response.write(_event(update))
                if loop.time() - pinged_s >= PING_S:
                    pinged_s = loop.time()
                    await response.write(b": ping\n\n")
            if loop.time() >= ends_s:
                break
    except ConnectionError:
        pass  # the viewer went away
    except TimeoutError:  # the viewer reads nothing, and would not read the stream's end
        if request.transport is not None:
            request.transport.abort()
    return response


def _event(update: Update) -> bytes:
    head = f"id: {update.number}\nevent: {update.kind}\ndata: ".encode()
    return head + update.data + b"\n\n"


def _view(request: web.Request) -> View:
    """The view that the query describes, by default with the gateway's own targets; raises
    InvalidRequest."""
    targets = request.app[FEED].targets
    for name, field in (("ttft_ms", "ttft_slo_s"), ("tbt_ms", "tbt_slo_s")):
        if (text := request.query.get(name)) is not None:
            targets = replace(targets, **{field: target_s(text, name)})
    span_s = request.query.get("span_s", str(SPAN_S))
    if span_s not in (str(SPAN_S), str(HOUR_S)):
        raise InvalidRequest(f"span_s is {SPAN_S} or {HOUR_S}", "span_s")
    return View(targets, of_hour=span_s == str(HOUR_S))


def target_s(text: str, name: str) -> float:
    """A target in seconds, from a text in milliseconds; raises InvalidRequest."""
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


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page. `etag` changes with the content."""

    body: bytes
    content_type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The page's files by their path below static/, with forward slashes."""
    return {
        path.relative_to(_FOLDER).as_posix(): _load(path)
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])
