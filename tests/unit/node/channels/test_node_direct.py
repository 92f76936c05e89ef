"""Hand-offs between two engine loops that speak directly, and what a break does to them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fakes.node.node_world import NodeWorld, direct_world, request
from fakes.runner import expected_tokens

from baton.core.request.request import Request

NUM_MOMENTS = 24  # turns that a hand-off of `request(1, 19)` takes, with some to spare


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeWorld]:
    """Linked."""
    with direct_world(monkeypatch) as (world, direct):
        direct[world.prefill.incarnation][0].listen()
        link(world)
        yield world


def link(world: NodeWorld) -> None:
    world.link()
    world.settle()
    assert world.decode.role.vitals().links
    assert ways(world) == ["direct", "direct"]


def ways(world: NodeWorld) -> list[str]:
    nodes = (world.prefill, world.decode)
    return [way for node in nodes if node.direct for way in node.direct.peers.ledger().values()]


def reference(one: Request) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def assert_clean(world: NodeWorld) -> None:
    assert world.prefill.is_clean(), world.prefill.role.ledger()
    assert world.decode.is_clean(), world.decode.role.ledger()


def test_only_greetings_pass_over_the_link(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry(*_: object) -> None:
        raise AssertionError("over the link")

    monkeypatch.setattr(world, "_carry", carry)
    requests = [request(n, 3 + 5 * n, max_tokens=1 + n) for n in range(1, 9)]
    for each in requests:
        world.hand_off(each)
    world.settle()
    for each in requests:
        assert world.tokens(each) == reference(each)
    assert_clean(world)


@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_break_at_any_moment_ends_the_link_and_all_of_it(
    world: NodeWorld, moment: int, name: str
) -> None:
    one = request(1, 19)
    world.hand_off(one)
    for _ in range(moment):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
    break_channel(world, name)
    world.settle()
    assert not world.is_linked and not ways(world)
    world.expire()  # an intent that came behind the break waits for a link, and in vain
    assert world.decode.received[one.key].num_ends == 1
    assert world.tokens(one) == reference(one)[: len(world.tokens(one))]
    assert_clean(world)
    link(world)
    again = request(2, 19)
    world.hand_off(again)
    world.settle()
    assert world.tokens(again) == reference(again)
    assert_clean(world)


def break_channel(world: NodeWorld, name: str) -> None:
    """As if one side had hung up; both find it over."""
    direct = getattr(world, name).direct
    (peer,) = direct.peers._peers.values()
    peer.channel._channel._socket.shutdown(socket.SHUT_RDWR)


def test_garbage_ends_the_link_and_not_the_engine(world: NodeWorld) -> None:
    one = request(1, 19)
    world.hand_off(one)
    world.turn(world.prefill)
    assert world.decode.direct is not None
    (peer,) = world.decode.direct.peers._peers.values()
    assert peer.channel is not None
    peer.channel.send(b"\xff\xff\xff")
    world.settle()
    assert not world.is_linked
    world.expire()
    assert_clean(world)
    link(world)
