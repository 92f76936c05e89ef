"""Hand-offs between two engine loops over a real channel, and the effect of broken and replaced
channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.node.node_world import PULLER, SOURCE, Node, NodeWorld, request, wired_world
from fakes.runner import expected_tokens

from baton.core.channels.frames import encode_payload
from baton.core.errors import HandoffFailed
from baton.core.request.request import Request
from baton.kv_transfer.protocol.messages import Refused
from baton.node.channels.links import Kind

NUM_MOMENTS = 24  # turns that a hand-off of `request(1, 19)` takes, with some to spare


@pytest.fixture
def world() -> Iterator[NodeWorld]:
    """Two linked engines."""
    with wired_world() as world:
        link(world)
        yield world


def link(world: NodeWorld) -> None:
    world.link()
    world.settle()
    assert world.decode.peers.windows.links()


def peers(node: Node) -> list[str]:
    links = node.channels.ledger()["links"]
    assert isinstance(links, dict)
    return [*links["puller"], *links["source"]]


def reference(one: Request) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def assert_clean(world: NodeWorld) -> None:
    assert world.prefill.is_clean(), world.prefill.loop.ledger()
    assert world.decode.is_clean(), world.decode.loop.ledger()


def assert_serves(world: NodeWorld, number: int) -> None:
    one = request(number, 19)
    world.hand_off(one)
    world.settle()
    assert world.tokens(one) == reference(one)
    assert_clean(world)


def test_many_hand_offs_pass(world: NodeWorld) -> None:
    requests = [request(n, 3 + 5 * n, max_tokens=1 + n) for n in range(1, 9)]
    for each in requests:
        world.hand_off(each)
    world.settle()
    for each in requests:
        assert world.tokens(each) == reference(each)
    assert_clean(world)


def begin(world: NodeWorld, one: Request, moment: int) -> None:
    world.hand_off(one)
    for _ in range(moment):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_break_at_any_moment_ends_the_link_and_all_of_it(world: NodeWorld, moment: int) -> None:
    one = request(1, 19)
    begin(world, one, moment)
    world.unlink()
    world.settle()
    assert not peers(world.prefill) and not peers(world.decode)
    world.expire()  # an intent that arrived after the break waits for a link until it expires
    assert world.decode.received[one.key].num_ends == 1
    assert world.tokens(one) == reference(one)[: len(world.tokens(one))]
    assert_clean(world)
    link(world)
    assert_serves(world, 2)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_a_newer_channel_at_any_moment_takes_the_older_s_place(
    world: NodeWorld, moment: int
) -> None:
    """A newer channel replaces the older one at any moment: the puller has found the older one
    closed and dials again before the source has noticed."""
    one = request(1, 19)
    begin(world, one, moment)
    older = world.ends
    world.link()
    world.settle()
    assert all(end.is_closed for end in older)
    assert peers(world.prefill) == [PULLER] and peers(world.decode) == [SOURCE]
    world.expire()
    assert world.decode.received[one.key].num_ends == 1
    assert world.tokens(one) == reference(one)[: len(world.tokens(one))]
    assert_clean(world)
    assert world.is_linked
    assert_serves(world, 2)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_garbage_ends_the_link_and_not_the_engine(world: NodeWorld, name: str) -> None:
    begin(world, request(1, 19), 1)
    world.ends[name == "prefill"].send(b"\xff\xff\xff")
    world.settle()
    assert not world.is_linked
    world.expire()
    assert_clean(world)
    link(world)
    assert_serves(world, 2)


def test_what_was_refused_on_an_older_channel_does_not_end_the_newer(world: NodeWorld) -> None:
    """A refusal queued for a channel is not sent on the newer one that replaces it."""
    world.decode.channels.to_peer(Kind.SOURCE, SOURCE, Refused(HandoffFailed("of another make")))
    world.link()
    world.settle()
    assert world.is_linked and peers(world.decode) == [SOURCE]
    assert_serves(world, 2)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_refused_peer_hears_why_and_ends_its_side(
    world: NodeWorld, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node: Node = getattr(world, name)
    kind, peer = (Kind.PULLER, PULLER) if node is world.prefill else (Kind.SOURCE, SOURCE)
    node.channels.to_peer(kind, peer, Refused(HandoffFailed("dtype: 'a' here, 'b' there")))
    world.settle()
    assert not peers(world.prefill) and not peers(world.decode)
    ended = [r.getMessage() for r in caplog.records if "ended" in r.getMessage()]
    assert len(ended) == 2 and all("dtype: 'a' here" in line for line in ended)
    link(world)
    assert_serves(world, 2)


def test_half_a_frame_is_waited_for(world: NodeWorld) -> None:
    """An incomplete frame does not block the engine."""
    raw = world.ends[0]._socket  # type: ignore[union-attr]
    raw.send(encode_payload(b"x" * 100_000)[:500])
    local = request(3, 19)
    begin(world, local, 3)
    assert world.is_linked
