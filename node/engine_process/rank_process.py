"""`python -m baton.node.engine_process.rank_process FD`: a rank other than 0 of a node's engine.

Besides steps it executes orders about pools: it exports its own, and pulls from those of peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ...core.process.children import end_waits_on_time
from ...engine.execution.runner import ModelRunner
from ...engine.hosts.joining import HostSettings
from ...engine.kv.generations import SharedGenerations
from ...engine.parallel.rank_channel import MessageKind, RankChannel, RankMessage
from ...engine.parallel.rank_worker import Handlers, main
from ...kv_transfer.device_transports import transports
from ...kv_transfer.ranks.mirrored_generations import unpack_generations
from ...kv_transfer.ranks.ranked import RankPulls
from .pools import ExportOrder, Offer


class PoolOrders:
    """This rank's KV pool, and its windows onto others, available once the pool is exported."""

    def __init__(
        self, runner: ModelRunner, channel: RankChannel, here: HostSettings | None
    ) -> None:
        """`here`: this host's settings, if the engine is on several hosts."""
        self._here = here
        self._runner = runner
        self._channel = channel
        self._offer: Offer | None = None
        self._pulls: RankPulls | None = None
        self._mirror: SharedGenerations | None = None  # of a rank on another host than rank 0

    def export(self, message: RankMessage) -> None:
        order = msgspec.msgpack.decode(message.payload, type=ExportOrder)
        node, tls, num_blocks = order.node, order.tls, self._runner.kv.num_blocks
        if message.fds:
            page = os.dup(message.fds[0])
        else:  # rank 0 is on another host
            assert self._here is not None
            host = self._here.host
            node = replace(node, host=host, advertise=None, advertise_engine=None)
            tls = self._here.tls
            self._mirror = SharedGenerations(num_blocks, order.parts[0].pool)
            page = self._mirror.fd
        is_spread = self._here is not None
        self._offer = Offer(self._runner, node, tls, order.key, is_spread=is_spread)
        self._offer.begin(order.pool, page, order.parts)
        ways = transports(self._runner.kv, node, tls, is_spread=is_spread)
        self._pulls = RankPulls(ways, self._channel)
        self._channel.answer(message.order, str(self._offer.port).encode())

    def mirror(self, message: RankMessage) -> None:
        """Copy generations that rank 0 has drawn, before a step overwrites these blocks here."""
        if self._mirror is not None:
            self._mirror.take_over(*unpack_generations(message.payload))

    def handlers(self) -> Handlers:
        def through(act: Callable[[RankPulls, RankMessage], None]) -> Callable[[RankMessage], None]:
            def handle(message: RankMessage) -> None:
                assert self._pulls is not None, "an order about windows before the export"
                act(self._pulls, message)

            return handle

        return {
            MessageKind.EXPORT_POOL: self.export,
            MessageKind.GENERATIONS: self.mirror,
            MessageKind.OPEN_WINDOW: through(RankPulls.open),
            MessageKind.PULL: through(RankPulls.pull),
            MessageKind.CANCEL_PULL: through(RankPulls.cancel),
            MessageKind.CLOSE_WINDOW: through(RankPulls.close),
        }


def build_handlers(
    runner: ModelRunner, channel: RankChannel, here: HostSettings | None
) -> Handlers:
    return PoolOrders(runner, channel, here).handlers()


if __name__ == "__main__":
    end_waits_on_time()
    os._exit(main(build_handlers))
