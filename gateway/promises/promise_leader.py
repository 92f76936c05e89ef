"""Sends orders to change promises, from the one gateway that holds the lease on Redis.

    every PERIOD_S   look at the heartbeats ─► renew the lease ─► orders, with the lease's epoch
A gateway without the lease sends nothing. Without Redis no gateway does, and promises stay as they
are. promise_decider.py makes the decisions.
"""

from __future__ import annotations

import asyncio
import logging

from ...cluster.lease import RedisLease
from .promise_decider import PromiseDecider

log = logging.getLogger(__name__)

PERIOD_S = 0.5
LEASE_S = 3.0


class PromiseLeader:
    """The leader election of one gateway. `name`: a random id for the life of the process."""

    def __init__(self, decider: PromiseDecider, lease: RedisLease, name: str) -> None:
        self._decider = decider
        self._lease = lease
        self._name = name
        self._is_leading = False

    async def run(self) -> None:
        """Run until cancelled. Raises what a turn raises, after releasing the lease."""
        try:
            while True:
                await self.turn()
                await asyncio.sleep(PERIOD_S)
        except Exception:
            await self._lease.close()
            raise

    async def close(self) -> None:
        """Release the lease. Not to be called from `run`'s task, which is cancelled."""
        await self._lease.close()

    async def turn(self) -> None:
        """Look once, and send the orders if this gateway holds the lease."""
        self._decider.look()
        engines = self._decider.table.engines
        if not any(engine.welcome.tbt_target_s for engine in engines.values()):
            return  # no engine can promise anything
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
