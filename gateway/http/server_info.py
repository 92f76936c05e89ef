"""The server's own state: liveness and readiness, version, models, nodes, load, metrics."""

from __future__ import annotations

from aiohttp import web

from ...core.membership import Member
from ...core.version import version
from ..engines.cluster_view import why_not_ready
from .protocol.answers import (
    Model,
    ModelList,
    Node,
    ServerInfo,
    ServerLoad,
    Status,
    Version,
    answer,
)
from .protocol.app_state import APP_STATE, CALLER, AppState

ROUTES = web.RouteTableDef()


@ROUTES.get("/live")
async def live(request: web.Request) -> web.Response:
    """Liveness: this process responds."""
    return answer(Status("live"))


@ROUTES.get("/ready")
@ROUTES.get("/health")
async def ready(request: web.Request) -> web.Response:
    """Readiness: 503, with the reason, until a linked pair of engines can serve."""
    parts = request.app[APP_STATE]
    if parts.is_ready():
        return answer(Status("ready"))
    return answer(Status("not ready", _reason(parts)), status=503)


def _reason(parts: AppState) -> str:
    if parts.door.is_draining:
        return "this gateway is shutting down"
    return why_not_ready(parts.table) or "a pair of engines has just become available"


@ROUTES.get("/version")
async def show_version(request: web.Request) -> web.Response:
    return answer(Version(version()))


@ROUTES.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The model that this gateway serves and its LoRA adapters: those that the caller may use."""
    parts, caller = request.app[APP_STATE], request[CALLER]
    names = [parts.door.model.limits.model, *parts.door.adapters.adapters]
    return answer(ModelList([_model(parts, name) for name in names if caller.may_use(name)]))


@ROUTES.get("/v1/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    """The model, or an adapter of it, by its name."""
    parts, wanted = request.app[APP_STATE], request.match_info["model"]
    parts.door.check_model(request[CALLER], wanted)
    return answer(_model(parts, wanted))


def _model(parts: AppState, name: str) -> Model:
    """The entry of the model, or of one of its adapters, whose parent is the model."""
    limits = parts.door.limits
    return Model(
        id=name,
        created=parts.started_unix_s,
        root=name,
        parent=None if name == limits.model else limits.model,
        max_model_len=limits.max_model_len,
    )


@ROUTES.get("/server_info")
async def server_info(request: web.Request) -> web.Response:
    """The model's limits and the nodes that serve it."""
    parts = request.app[APP_STATE]
    limits = parts.door.limits
    return answer(
        ServerInfo(
            version=version(),
            model=limits.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=tuple(parts.door.model.eos_token_ids),
            nodes=[_node(parts, member) for member in parts.view.members()],
        )
    )


def _node(parts: AppState, member: Member) -> Node:
    engine = parts.table.engines.get(member.incarnation)
    return Node(
        name=member.name,
        role=member.role.value,
        incarnation=member.incarnation,
        is_ready=engine is not None and engine.is_ready,
        num_blocks=member.num_blocks,
        block_size=member.block_size,
    )


@ROUTES.get("/load")
async def load(request: web.Request) -> web.Response:
    """How busy the deployment is, in four numbers."""
    telemetry = request.app[APP_STATE].telemetry
    found = telemetry.exporter.load()
    return answer(
        ServerLoad(
            telemetry.window.num_running, found.num_running, found.num_waiting, found.kv_usage
        )
    )


@ROUTES.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """All metrics, as OpenMetrics or in the older text format, whichever the client accepts."""
    accept = request.headers.get("Accept", "")
    body, content_type = request.app[APP_STATE].telemetry.exporter.render(accept)
    return web.Response(
        body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"}
    )
