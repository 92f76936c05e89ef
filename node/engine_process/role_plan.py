"""The differences between the engine processes of prefill and decode nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.config import NodeConfig
from ...core.engine_config import EngineConfig
from ...core.membership import Role as RoleName
from ...core.ports import Clock
from ...engine.engine import Engine
from ..peers.peers import Peers
from ..requests.request_io import RequestIO
from ..requests.request_role import EngineRole


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One kind of node: its name, its configuration, its limits, its role."""

    name: RoleName
    adjust: Callable[[EngineConfig], EngineConfig]
    max_held_blocks: Callable[[NodeConfig, int], int | None]
    build: Callable[[Engine, RequestIO, Peers, Clock], EngineRole]
