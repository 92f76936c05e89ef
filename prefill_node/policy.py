"""How a prefill node sets up its engine: how much finished KV may wait to be pulled.

The rest of the pool is for prompts that are being computed and for the prefix cache. Over the limit
nothing more is admitted; the heartbeat says so, and gateways route around it.
"""

from __future__ import annotations

from ..core.config import NodeConfig


def max_held_blocks(config: NodeConfig, capacity: int) -> int:
    """The credit in blocks: `--credit-fraction` of the pool, at least one."""
    return max(1, int(capacity * config.credit_fraction))
