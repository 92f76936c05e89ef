"""Which orders about its promise an engine follows: those of the newest lease.

A gateway that has the cluster's lease (cluster/lease.py) decides which engines promise what, and
sends that with the lease's epoch. A gateway that lost the lease may not know it yet: its orders
have an older epoch, or the same one where Redis lost its data, and are refused.
"""

from __future__ import annotations

import logging
import math

from ...engine.scheduling.step_promise import StepPromise
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)


class PromiseOrders:
    """One engine's; on the loop's thread. Without a promise of its own it follows none.

    `epoch`, `leader`: of the newest order that was followed; 0: there was none.
    """

    def __init__(self, promise: StepPromise) -> None:
        self.epoch = 0
        self.leader = ""
        self._promise = promise
        self._can_promise = promise.tbt_target_s is not None

    def take(self, order: node_pb2.SetPromise) -> bool:
        """Whether it is followed: from the next step on, and for what comes from now on. What
        decodes was promised something, and the scheduler keeps to it until it ends."""
        is_known = (order.epoch, order.leader) == (self.epoch, self.leader)
        has_target = order.HasField("tbt_target_s")
        is_sound = not has_target or 0 < order.tbt_target_s < math.inf
        if not self._can_promise or not is_sound or not (is_known or order.epoch > self.epoch):
            log.info("refused the order of epoch %d about the promise", order.epoch)
            return False
        self.epoch, self.leader = order.epoch, order.leader
        if has_target:
            self._promise.tbt_target_s = order.tbt_target_s
        if has_target != self._promise.is_promising:
            log.info("the promise is %s", "made" if has_target else "withdrawn")
        self._promise.is_promising = has_target
        return True
