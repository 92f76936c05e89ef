"""What is known of the server itself: is it alive and ready, its version, model, nodes, metrics."""

from __future__ import annotations

from aiohttp import web

from ...core.errors import ModelNotFound
from ...core.membership import Member
from ...core.version import version
from .protocol.answers import Load, Model, ModelList, Node, ServerInfo, Status, Version, answer
from .protocol.app_state import APP_STATE, AppState, caller_of

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
async def show_version(request: web.Request) -> web.Response:
    return answer(Version(version()))


@ROUTES.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The one model that this gateway serves; none for a caller who may not use it."""
    parts = request.app[APP_STATE]
    is_allowed = caller_of(request).may_use(parts.door.model.limits.model)
    return answer(ModelList([_model(parts)] if is_allowed else []))


@ROUTES.get("/v1/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    """The model by its name."""
    parts = request.app[APP_STATE]
    wanted, served = request.match_info["model"], parts.door.model.limits.model
    if wanted != served or not caller_of(request).may_use(served):
        raise ModelNotFound(f"The model `{wanted[:64]}` does not exist.", param="model")
    return answer(_model(parts))


def _model(parts: AppState) -> Model:
    limits = parts.door.limits
    return Model(
        id=limits.model,
        created=parts.started_unix_s,
        root=limits.model,
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
        Load(telemetry.window.num_running, found.num_running, found.num_waiting, found.kv_usage)
    )


@ROUTES.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """All metrics, as OpenMetrics or in the older text format, whichever the client accepts."""
    accept = request.headers.get("Accept", "")
    body, content_type = request.app[APP_STATE].telemetry.exporter.render(accept)
    return web.Response(
        body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"}
    )
