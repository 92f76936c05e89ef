"""How the engine processes of prefill and decode nodes differ, and what they are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.config import NodeConfig
from ...core.engine_config import EngineConfig
from ...core.membership import Role as RoleName
from ...core.ports import Clock
from ...engine.engine import Engine
from ..channels.mailboxes import Outbox
from ..peers.puller_side import PullerSide
from ..peers.source_side import SourceSide
from ..requests.request_io import RequestIO
from ..requests.request_role import EngineRole


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a role is built from: everything that its engine process has made.

    `block_bytes`: of all ranks.
    """

    engine: Engine
    requests: RequestIO
    outbox: Outbox
    source: SourceSide
    puller: PullerSide
    clock: Clock
    fingerprint: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class RolePlan:
    """How one kind of node differs: its name, its limits, its role."""

    name: RoleName
    adjust: Callable[[EngineConfig], EngineConfig]
    max_held_blocks: Callable[[NodeConfig, int], int | None]
    build: Callable[[EngineParts], EngineRole]
