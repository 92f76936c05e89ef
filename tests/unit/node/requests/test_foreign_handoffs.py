"""Two linked engines where one side, or a gateway, violates the protocol: one request fails, and
the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from fakes.node.node_world import (
    BLOCK_SIZE,
    GATEWAY,
    PULLER,
    SOURCE,
    VOCAB_SIZE,
    NodeWorld,
    request,
)
from fakes.runner import expected_tokens
from msgspec import structs

from baton.core.errors import HandoffFailed, InvalidRequest
from baton.core.request.request import Request, Ticket
from baton.core.request.token_ids import block_hashes, root_hash
from baton.kv_transfer.protocol.messages import Attach, HandoffState, Manifest, Message
from baton.node.engine_process.dispatch_gate import Gated
from baton.proto import codec
from baton.proto.v1 import node_pb2

FORK = "f" * 32


@pytest.fixture
def world() -> NodeWorld:
    world = NodeWorld()
    world.link()
    world.settle()
    return world


def reference(one: Request) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def ticket(one: Request) -> Ticket:
    return Ticket(one.request_id, SOURCE, PULLER)


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_prefix_that_is_asked_for_under_a_ticket_s_name(
    world: NodeWorld, max_tokens: int
) -> None:
    """A peer's prefix request under a ticket's name takes that name: the ticket's prompt fails
    at once and is not computed."""
    one, two = request(1, 16), request(2, 16, max_tokens=max_tokens)
    world.hand_off(one)
    world.settle()
    hashes = block_hashes(root_hash("toy", "", ""), one.known_token_ids, BLOCK_SIZE)[:2]
    world.hear_peer(world.prefill, Attach(two.request_id, False, tuple(hashes)))
    world.settle()
    world.dispatch(two, world.prefill, ticket(two), 60.0)
    world.settle()
    assert world.prefill.received[two.key].error is not None
    world.expire()
    assert world.prefill.is_clean() and world.tokens(one) == reference(one)


def test_a_ticket_that_is_used_twice(world: NodeWorld) -> None:
    one, two = request(1, 16), request(2, 16)
    world.hand_off(one)
    while not world.num_pulls():
        world.turn(world.prefill)
        world.turn(world.decode)
    world.dispatch(two, world.decode, ticket(one), 60.0)
    world.settle()
    assert world.tokens(one) == reference(one) and world.decode.received[two.key].error is not None
    assert world.prefill.is_clean() and world.decode.is_clean()


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**32 - 1])
def test_tokens_outside_the_vocabulary(world: NodeWorld, token_id: int) -> None:
    to_peer = world.prefill.channels.to_peer

    def lie(kind: Any, incarnation: str, message: Message) -> None:
        if isinstance(message, Manifest) and message.state is not None:
            message = structs.replace(message, state=HandoffState(token_id))
        to_peer(kind, incarnation, message)

    world.prefill.channels.to_peer = lie  # type: ignore[method-assign]
    one = request(1, 16)
    world.hand_off(one)
    world.settle()
    assert world.decode.received[one.key].error == HandoffFailed.code
    world.expire()
    assert world.prefill.is_clean() and world.decode.is_clean()


@pytest.mark.parametrize("is_over", ["first", "fork"])
def test_a_sample_that_was_over_before_its_dispatch_came(world: NodeWorld, is_over: str) -> None:
    """A dispatch waited for its grammar while the prefill engine ended one of its samples: the
    other sample still runs to its end."""
    one = replace(request(1, 9), fork_ids=(FORK,))
    gone, other = (one.request_id, FORK) if is_over == "first" else (FORK, one.request_id)
    world.decode.hear_gateway(cancel("e" * 32))  # so that the gateway is known
    world.dispatch(one, world.prefill, ticket(one), 600.0)
    world.settle()
    world.decode.hear_gateway(cancel(gone))
    world.settle()
    dispatch = codec.dispatch_to_wire(one, ticket(one), 600.0)
    world.decode.inbox.put(Gated(GATEWAY, dispatch, False, HandoffFailed(""), 0.0))
    world.settle()
    received = world.decode.received[f"{other}/0"]
    assert received.error is None and received.finish_reason is not None
    assert world.decode.is_clean()


def test_a_fork_that_was_cancelled_first_is_not_filed(world: NodeWorld) -> None:
    one = replace(request(1, 9), fork_ids=(FORK,))
    world.decode.hear_gateway(cancel(FORK))
    world.dispatch(one, world.decode, None, 600.0)
    world.settle()
    assert world.decode.received[one.key].finish_reason is not None
    assert world.decode.role.is_idle() and world.decode.is_clean()


def test_two_samples_of_one_name(world: NodeWorld) -> None:
    one = replace(request(1, 9), fork_ids=(FORK, FORK))
    world.dispatch(one, world.decode, None, 60.0)
    world.settle()
    for key in keys_of(one):
        assert world.decode.received[key].error == InvalidRequest.code
    assert world.decode.is_clean()


def keys_of(one: Request) -> Iterable[str]:
    return (f"{request_id}/{one.attempt}" for request_id in (one.request_id, *one.fork_ids))


def cancel(request_id: str) -> node_pb2.GatewayMessage:
    return node_pb2.GatewayMessage(cancel=node_pb2.Cancel(request_id=request_id, attempt=0))


def test_a_dispatch_again_while_a_sample_of_the_first_waits(world: NodeWorld) -> None:
    """A second dispatch is refused while a sample of the first waits: its own sample is over, and
    it has a fork of another name."""
    one = replace(request(1, 9), fork_ids=(FORK,))
    world.dispatch(one, world.decode, ticket(one), 60.0)
    world.settle()
    world.decode.hear_gateway(cancel(one.request_id))
    world.settle()
    again, other = replace(one, fork_ids=("e" * 32,)), Ticket("d" * 32, SOURCE, PULLER)
    world.dispatch(again, world.decode, other, 60.0)
    world.settle()
    assert world.decode.received[f"{'e' * 32}/0"].error == InvalidRequest.code
    for request_id in (FORK, "e" * 32):
        world.decode.hear_gateway(cancel(request_id))
        world.settle()
    world.expire()
    assert world.decode.is_clean()
