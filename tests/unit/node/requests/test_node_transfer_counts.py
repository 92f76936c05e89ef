"""A puller's transfer counts reach the gateway; cancelled hand-offs are not counted."""

from __future__ import annotations

from fakes.node.node_world import NodeWorld, request

from baton.gateway.engines.reported_load import ReportedLoad, load_from_wire
from baton.proto.v1 import node_pb2


def begin(world: NodeWorld, number: int) -> None:
    """Run a hand-off until its copy has begun."""
    world.hand_off(request(number, 19))
    while not world.num_pulls():
        world.turn(world.prefill)
        world.turn(world.decode)


def load(world: NodeWorld) -> ReportedLoad:
    beat = node_pb2.Heartbeat(held_blocks=7, counters=world.decode.role.counts)
    return load_from_wire(node_pb2.Heartbeat.FromString(beat.SerializeToString()))


def test_counts_reach_the_gateway() -> None:
    world = NodeWorld()
    world.link()
    world.settle()
    for number, seconds in ((1, 0.25), (2, 0.5)):
        begin(world, number)
        world.clock.advance(seconds)
        world.settle()
    begin(world, 3)
    world.prefill.pool.generations.bump(range(2, 60))
    world.settle()
    begin(world, 4)
    world.cancel(request(4, 19))
    world.settle()
    world.unlink()
    world.hand_off(request(5, 19))  # it fails before its transfer begins
    world.settle()
    world.expire()
    found = load(world)
    assert found.held_blocks == 7
    assert found.counters.num_transfers == 2
    assert found.counters.transfer_bytes == 2 * 5 * world.decode.pool.block_bytes
    assert found.counters.transfer_s == 0.75
    assert found.counters.failed_transfers == {"stale_blocks": 1, "node_lost": 1}
