"""`python -m baton.node.engine_process.rank_process FD`: a rank other than 0 of a node's engine.

Beside steps it takes orders about pools: it exports its own, and pulls from those of its peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from ...core.process.children import end_waits_on_time
from ...engine.execution.runner import ModelRunner
from ...engine.parallel.rank_channel import MessageKind, RankChannel, RankMessage
from ...engine.parallel.rank_worker import Handlers, main
from ...kv_transfer.device_transports import transports
from ...kv_transfer.ranks.ranked import RankPulls
from .pools import ExportOrder, Offer


class PoolOrders:
    """This rank's pool, and its windows onto others: there once the pool was exported."""

    def __init__(self, runner: ModelRunner, channel: RankChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._offer: Offer | None = None
        self._pulls: RankPulls | None = None

    def export(self, message: RankMessage) -> None:
        order = msgspec.msgpack.decode(message.payload, type=ExportOrder)
        self._offer = Offer(self._runner, order.node, order.tls, order.key)
        self._offer.begin(order.pool, os.dup(message.fds[0]), order.parts)
        port = self._offer.port
        self._pulls = RankPulls(transports(self._runner.kv, order.node, order.tls), self._channel)
        self._channel.send(MessageKind.ANSWER, str(port).encode(), order=message.order)

    def handlers(self) -> Handlers:
        def through(act: Callable[[RankPulls, RankMessage], None]) -> Callable[[RankMessage], None]:
            def handle(message: RankMessage) -> None:
                assert self._pulls is not None, "an order about windows before the export"
                act(self._pulls, message)

            return handle

        return {
            MessageKind.EXPORT_POOL: self.export,
            MessageKind.OPEN_WINDOW: through(RankPulls.open),
            MessageKind.PULL: through(RankPulls.pull),
            MessageKind.CANCEL_PULL: through(RankPulls.cancel),
            MessageKind.CLOSE_WINDOW: through(RankPulls.close),
        }


def build_handlers(runner: ModelRunner, channel: RankChannel) -> Handlers:
    return PoolOrders(runner, channel).handlers()


if __name__ == "__main__":
    end_waits_on_time()
    os._exit(main(build_handlers))
