"""What a puller counts of its hand-offs reaches the gateway; what was called off is not counted."""

from __future__ import annotations

from fakes.clock import FakeClock

from baton.core.errors import Cancelled, NodeLost, StaleBlocks
from baton.decode_node.role import TransferCounts
from baton.gateway.engines.wire import load_from_wire
from baton.proto.v1 import node_pb2


def test_counts_reach_the_gateway() -> None:
    clock = FakeClock()
    counts = TransferCounts(clock)
    for name, seconds in (("a", 0.25), ("b", 0.5)):
        counts.began(name)
        clock.advance(seconds)
        counts.completed(name, 1000)
        counts.dropped(name)
    counts.began("c")
    counts.failed("c", StaleBlocks("moved"))
    counts.dropped("c")
    counts.failed("d", NodeLost("gone"))  # before it began
    counts.began("e")
    counts.failed("e", Cancelled("no more"))
    beat = node_pb2.Heartbeat(held_blocks=7, counters=counts.wire)
    load = load_from_wire(node_pb2.Heartbeat.FromString(beat.SerializeToString()))
    assert load.held_blocks == 7
    assert load.counters.num_transfers == 2
    assert load.counters.transfer_bytes == 2000
    assert load.counters.transfer_s == 0.75
    assert load.counters.failed_transfers == {"stale_blocks": 1, "node_lost": 1}
