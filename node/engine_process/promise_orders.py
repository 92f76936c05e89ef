"""Orders to change an engine's step-time promise: only those of the newest lease are followed.

The gateway that has the cluster's lease (cluster/lease.py) decides what each engine promises, and
sends it with the lease's epoch. A gateway that has lost the lease may not know it yet: its orders
have an older epoch, or the same one if Redis lost its data, and are refused.
"""

from __future__ import annotations

import logging
import math

from ...engine.scheduling.step_promise import StepPromise
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)


class PromiseOrders:
    """The orders to one engine; on the loop's thread. An engine that started without a promise
    follows none.

    `epoch`, `leader`: of the newest order that was followed; epoch 0: none yet.
    """

    def __init__(self, promise: StepPromise) -> None:
        self.epoch = 0
        self.leader = ""
        self._promise = promise
        self._can_promise = promise.tbt_target_s is not None

    def take(self, order: node_pb2.SetPromise) -> bool:
        """Follow the order, unless it is refused; returns whether it is followed. It holds from the
        next step on, and for requests that arrive from now on. Decodes that an earlier promise was
        made to: see StepPromise."""
        is_known = (order.epoch, order.leader) == (self.epoch, self.leader)
        has_target = order.HasField("tbt_target_s")
        is_sound = not has_target or 0 < order.tbt_target_s < math.inf
        if not self._can_promise or not is_sound or not (is_known or order.epoch > self.epoch):
            log.info("rejected SetPromise of epoch %d", order.epoch)
            return False
        self.epoch, self.leader = order.epoch, order.leader
        if has_target:
            self._promise.tbt_target_s = order.tbt_target_s
        if has_target != self._promise.is_promising:
            log.info("the promise is %s", "made" if has_target else "withdrawn")
        self._promise.is_promising = has_target
        return True
