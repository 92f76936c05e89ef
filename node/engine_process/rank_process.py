"""`python -m baton.node.engine_process.rank_process FD`: a rank other than 0 of a node's engine.

Besides steps it executes orders about pools: it exports its own, and pulls from those of peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

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


@dataclass(eq=False)
class PoolOrders:
    """This rank's KV pool, and its windows onto others, available once the pool is exported.

    `_here`: this host's settings, if the engine is on several hosts; `_mirror`: of a rank on
    another host than rank 0.
    """

    _runner: ModelRunner
    _channel: RankChannel
    _here: HostSettings | None
    _offer: Offer | None = None
    _pulls: RankPulls | None = None
    _mirror: SharedGenerations | None = None

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
        def with_pulls(act: Callable[[RankPulls, RankMessage], None], message: RankMessage) -> None:
            assert self._pulls is not None, "an order about windows before the export"
            act(self._pulls, message)

        return {
            MessageKind.EXPORT_POOL: self.export,
            MessageKind.GENERATIONS: self.mirror,
            MessageKind.OPEN_WINDOW: partial(with_pulls, RankPulls.open),
            MessageKind.PULL: partial(with_pulls, RankPulls.pull),
            MessageKind.CANCEL_PULL: partial(with_pulls, RankPulls.cancel),
            MessageKind.CLOSE_WINDOW: partial(with_pulls, RankPulls.close),
        }


def build_handlers(
    runner: ModelRunner, channel: RankChannel, here: HostSettings | None
) -> Handlers:
    return PoolOrders(runner, channel, here).handlers()


if __name__ == "__main__":
    end_waits_on_time()
    os._exit(main(build_handlers))
