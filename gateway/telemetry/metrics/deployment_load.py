"""The whole deployment's load as three numbers, and its KV cache as two, for routers and
autoscalers in front of it.

Each engine has its own metrics, by role and name; a router that reads one value per server would
read that of an arbitrary engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...engines.linked_engine import LinkedEngine


@dataclass(frozen=True, slots=True)
class DeploymentLoad:
    """`num_running`: requests in engines' batches; `num_waiting`: at engines and at this gateway;
    `kv_usage`: the share of KV blocks in use, 0 to 1, of the role with the higher share."""

    num_running: int
    num_waiting: int
    kv_usage: float


def deployment_load(engines: Iterable[LinkedEngine], num_queued: int) -> DeploymentLoad:
    """The load by the last heartbeats; `num_queued`: requests that wait at this gateway."""
    engines = [*engines]
    used: dict[object, float] = {}
    for role in {engine.member.role for engine in engines}:
        of_role = [(e.pool_blocks, e.load.free_blocks) for e in engines if e.member.role is role]
        total, free = (sum(counts) for counts in zip(*of_role, strict=True))
        used[role] = max(0.0, 1 - free / max(1, total))
    return DeploymentLoad(
        sum(engine.load.num_running for engine in engines),
        sum(engine.load.num_waiting for engine in engines) + num_queued,
        max(used.values(), default=0.0),
    )


def prompt_blocks(engines: Iterable[LinkedEngine]) -> tuple[int, int] | None:
    """The tokens per KV block, and the number of blocks of the engines that compute prompts. None:
    there is no such engine."""
    blocks: Counter[int] = Counter()
    for engine in engines:
        if engine.takes_prompts:
            blocks[engine.member.block_size] += engine.pool_blocks
    return max(blocks.items(), key=lambda item: item[1]) if blocks else None
