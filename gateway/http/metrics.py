"""GET /metrics: what Prometheus reads. Who may is judged before (http/protocol/access.py)."""

from __future__ import annotations

from aiohttp import web

from .protocol.app_state import APP_STATE

ROUTES = web.RouteTableDef()


@ROUTES.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """All metrics, as OpenMetrics or in the older text format, whichever is asked for."""
    accept = request.headers.get("Accept", "")
    body, content_type = request.app[APP_STATE].telemetry.exporter.render(accept)
    return web.Response(
        body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"}
    )
