"""Engines that receive frames that no gateway or peer of ours sends: B81 to B86.

The sender has the cluster's secret, so such frames come from a bug or a foreign version. They may
only fail the sender: no exception, no leaked block, no wrong token of another request.
"""

from __future__ import annotations

import random

import pytest
from bad_input.cases.mutants import mutated_bytes
from fakes.node.channel_pairs import AnyChannel
from fakes.node.node_world import LEASE_S, PULLER, SOURCE, Node, NodeWorld, request
from fakes.runner import expected_tokens

from baton.core.errors import StaleBlocks
from baton.core.request.request import Ticket
from baton.core.request.token_ids import BlockHash
from baton.engine.kv.block_pool import BlockRefs
from baton.kv_transfer.protocol.messages import (
    Attach,
    HandoffState,
    Hello,
    Manifest,
    Release,
    Renew,
    Revoked,
    encode,
)
from baton.proto import codec
from baton.proto.v1 import node_pb2

_NUM_ROUNDS, _PER_ROUND = 12, 25
_IDS = ("", "0" * 32, "f" * 32, "../x", "é", "0" * 5000)


def _linked() -> NodeWorld:
    world = NodeWorld()
    world.link()
    world.settle()
    return world


def _gateway_frame(rng: random.Random, number: int) -> bytes:
    """A dispatch with mutated bytes, sometimes no valid protobuf at all."""
    one = request(number, rng.randrange(1, 40), max_tokens=rng.randrange(1, 9))
    pair = rng.choice(((SOURCE, PULLER), (SOURCE, PULLER), (PULLER, SOURCE), ("", ""), None))
    ticket = None if pair is None else Ticket(one.request_id, *pair)
    wire = codec.dispatch_to_wire(one, ticket, 60.0)
    return mutated_bytes(rng, node_pb2.GatewayMessage(dispatch=wire).SerializeToString())


def _peer_frame(rng: random.Random, number: int) -> bytes:
    transfer_id = rng.choice((f"{number:032x}", *_IDS))
    count = rng.choice((0, 1, 5, 500))
    num_full = min(count, rng.choice((count, max(0, count - 1), 0, 1)))
    blocks = BlockRefs.pack(
        [rng.choice((i, 0, 1, 2**31, 2**32 - 1)) for i in range(count)],
        [rng.choice((0, 1, 2**64 - 1)) for _ in range(count)],
        [BlockHash(rng.randbytes(16)) for _ in range(num_full)],
    )
    state = HandoffState(rng.choice((1, 2**32 - 1)))
    message = rng.choice(
        (
            Attach(transfer_id),
            Renew((transfer_id,) * 3),
            Release(transfer_id),
            Revoked(transfer_id, StaleBlocks("")),
            Hello(SOURCE, {}, protocol=999),
            Manifest(
                transfer_id, rng.choice((0, 1, 2**32 - 1)), blocks,
                rng.choice((0.0, 1.0)), state,
            ),
        )
    )  # fmt: skip
    data = encode(message)
    return data if rng.random() < 0.5 else mutated_bytes(rng, data)


def _assert_well(world: NodeWorld, number: int) -> None:
    """The state of the faulty gateway is gone, and a good request succeeds."""
    for node in (world.prefill, world.decode):
        node.lose_gateway("strange")
    world.clock.advance(LEASE_S + 1)
    world.settle()
    if not world.is_linked:
        world.link()
        world.settle()
    good = request(number, 19)
    world.hand_off(good)
    world.settle()
    assert world.tokens(good) == expected_tokens(good.prompt_token_ids, good.sampling.max_tokens)
    for node in (world.prefill, world.decode):
        node.lose_gateway()
    world.expire()
    assert world.prefill.is_clean(), world.prefill.loop.ledger()
    assert world.decode.is_clean(), world.decode.loop.ledger()


@pytest.mark.parametrize("seed", range(_NUM_ROUNDS))
def test_strange_dispatches(seed: int) -> None:
    rng, world = random.Random(seed), _linked()
    strange: dict[str, AnyChannel] = {}  # by the engine's incarnation
    for i in range(_PER_ROUND):
        node: Node = rng.choice((world.prefill, world.decode))
        channel = strange.get(node.incarnation)
        if channel is None or channel.is_cut:
            channel = strange[node.incarnation] = node.connect("strange")
        channel.send(_gateway_frame(rng, 1000 * seed + i))
        if rng.random() < 0.5:
            world.turn(node)
    world.settle()
    for channel in strange.values():
        channel.close()
    _assert_well(world, 900_000 + seed)


@pytest.mark.parametrize("seed", range(_NUM_ROUNDS))
def test_strange_peer_messages(seed: int) -> None:
    """With a strange message within a hand-off, it completes or ends with an error, and so does the
    pair."""
    rng, world = random.Random(seed), _linked()
    for i in range(_PER_ROUND):
        number = 1000 * seed + i
        if not world.is_linked:
            world.link()
            world.settle()
        one = request(number, 19)
        world.hand_off(one)
        for _ in range(rng.randrange(4)):
            world.turn(rng.choice((world.prefill, world.decode)))
        if world.is_linked:
            rng.choice(world.ends)._arrive(_peer_frame(rng, number))
        world.settle()
        tokens = world.tokens(one)
        assert tokens == expected_tokens(one.prompt_token_ids, 6)[: len(tokens)]
        world.cancel(one)
    world.expire()
    _assert_well(world, 900_000 + seed)
