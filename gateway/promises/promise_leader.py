"""The gateway that decides which engines promise what: whoever has the lease on Redis.

    every PERIOD_S   look at the heartbeats ─► renew the lease ─► orders, with its epoch
Without the lease it sends nothing, and without Redis nobody does: promises stay as they are. What
it decides by is in promise_decider.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from .promise_decider import PromiseDecider

log = logging.getLogger(__name__)

PERIOD_S = 0.5
LEASE_S = 3.0


class Lease(Protocol):
    """`cluster.lease.RedisLease`. `epoch`: while it is held for sure, else None."""

    @property
    def epoch(self) -> int | None: ...

    async def take(self, least_epoch: int) -> int | None: ...

    async def close(self) -> None: ...


class PromiseLeader:
    """One gateway's part. `name`: drawn at random for its life."""

    def __init__(self, decider: PromiseDecider, lease: Lease, name: str) -> None:
        self._decider = decider
        self._lease = lease
        self._name = name
        self._is_leading = False

    async def run(self) -> None:
        """Until cancelled. Raises what a turn fails by: then another gateway may decide."""
        try:
            while True:
                await self.turn()
                await asyncio.sleep(PERIOD_S)
        except Exception:
            await self._lease.close()
            raise

    async def close(self) -> None:
        """Leave the lease to others. Not from `run`'s task: it is cancelled."""
        await self._lease.close()

    async def turn(self) -> None:
        """Look once, and order what is to change if it is ours to do."""
        self._decider.look()
        engines = self._decider.table.engines
        if not any(engine.own_target_s for engine in engines.values()):
            return  # nobody could be ordered anything
        epoch = await self._lease.take(self._decider.least_epoch(self._name))
        if self._is_leading != (epoch is not None):
            self._is_leading = epoch is not None
            log.info(
                "%s what engines promise", "decides" if self._is_leading else "does not decide"
            )
        if epoch is None:
            return
        for incarnation, target_s in self._decider.orders().items():
            engine = engines[incarnation]
            log.info("engine %s: %s", engine.name, "promise" if target_s else "no promise")
            engine.outbox.set_promise(epoch, self._name, target_s)
