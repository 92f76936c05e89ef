"""Is this process alive, can it serve, which version is it?"""

from __future__ import annotations

from aiohttp import web

from ...core.version import version
from .protocol.answers import Status, Version, answer
from .protocol.app_state import APP_STATE, AppState

ROUTES = web.RouteTableDef()


@ROUTES.get("/live")
async def live(request: web.Request) -> web.Response:
    """This process answers."""
    return answer(Status("live"))


@ROUTES.get("/ready")
@ROUTES.get("/health")
async def ready(request: web.Request) -> web.Response:
    """503, and what is missing, until a linked pair of engines can serve."""
    parts = request.app[APP_STATE]
    if parts.is_ready():
        return answer(Status("ready"))
    return answer(Status("not ready", _reason(parts)), status=503)


def _reason(parts: AppState) -> str:
    if parts.door.is_draining:
        return "this gateway is shutting down"
    return parts.table.why_not_ready() or "a pair of engines has come this moment"


@ROUTES.get("/version")
async def tell_version(request: web.Request) -> web.Response:
    return answer(Version(version()))
