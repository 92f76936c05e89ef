"""The gateway's parts that the HTTP front uses, as one value for every group of routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ....core.config import GatewayConfig
from ...admission.front_door import FrontDoor
from ...engines.cluster_view import ClusterView
from ...engines.engine_table import EngineTable
from ...security.caller import Caller
from ...telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class AppState:
    """`is_ready`: a linked pair of engines can serve, and the gateway is not draining. `scope`: the
    gateways whose calls the live page shows."""

    door: FrontDoor
    table: EngineTable
    view: ClusterView
    is_ready: Callable[[], bool]
    config: GatewayConfig
    started_unix_s: int
    telemetry: Telemetry
    scope: Callable[[], dict[str, Any]]


APP_STATE = web.AppKey("parts", AppState)
STREAM = web.RequestKey("stream", web.StreamResponse)  # set once a stream has begun
CALLER = web.RequestKey("caller", Caller)  # set by check_access
AT_DOOR = web.RequestKey("at_door", bool)  # the front door has the call and counts its end
