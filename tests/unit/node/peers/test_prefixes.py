"""A prompt whose prefix is cached on another engine: pulled from there, and computed if
that fails.
"""

from __future__ import annotations

import dataclasses

import pytest
from effort import examples
from fakes.node.node_world import (
    BLOCK_SIZE,
    LEASE_S,
    PULLER,
    SOURCE,
    Node,
    NodeWorld,
    Received,
    request,
)
from fakes.runner import expected_tokens
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import FinishReason, PrefixSource, Request, Ticket
from baton.proto.v1 import node_pb2

LIMIT_S = 2.0
LENGTH = 19
NUM_BLOCKS = (LENGTH - 1) // BLOCK_SIZE


def linked_world(**blocks: int) -> NodeWorld:
    world = NodeWorld(**blocks)
    world.link()
    world.link_back()
    world.settle()
    return world


@pytest.fixture
def world() -> NodeWorld:
    return linked_world()


def reference(one: Request) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def other(world: NodeWorld, node: Node) -> Node:
    return world.decode if node is world.prefill else world.prefill


def compute_at(world: NodeWorld, node: Node, one: Request) -> None:
    """Run the request on `node` without a prefix source, so that its blocks are cached there."""
    first = dataclasses.replace(one, request_id="c" + one.request_id[1:], prefix_source=None)
    world.dispatch(first, node, None, 60.0)
    world.settle()


def from_peer(one: Request, node: Node, num_blocks: int = NUM_BLOCKS) -> Request:
    source = PrefixSource(node.incarnation, num_blocks, LIMIT_S)
    return dataclasses.replace(one, prefix_source=source)


def counts(node: Node) -> node_pb2.Counters:
    return node.peers.prefixes.counts


def output_of(node: Node, one: Request) -> Received:
    return node.received[one.key]


def assert_clean(world: NodeWorld) -> None:
    for node in (world.prefill, world.decode):
        assert node.is_clean(), node.loop.ledger()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_prefix_comes_from_either_engine(world: NodeWorld, name: str) -> None:
    node: Node = getattr(world, name)
    one = from_peer(request(1, LENGTH), other(world, node))
    compute_at(world, other(world, node), one)
    num_before = sum(map(sum, node.runner.batch_sizes))
    world.dispatch(one, node, None, 60.0)
    world.settle()
    assert list(output_of(node, one).tokens.values()) == reference(one)
    assert output_of(node, one).cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert output_of(node, one).finish_reason is FinishReason.LENGTH
    num_computed = sum(map(sum, node.runner.batch_sizes)) - num_before
    assert num_computed == LENGTH - NUM_BLOCKS * BLOCK_SIZE + one.sampling.max_tokens - 1
    found = counts(node)
    assert (found.num_fetches, found.fetched_blocks) == (1, NUM_BLOCKS)
    assert found.fetched_bytes == NUM_BLOCKS * node.pool.block_bytes
    assert not found.failed_fetches
    assert_clean(world)


def test_a_handed_off_prompt_takes_its_prefix_from_the_engine_that_will_decode_it(
    world: NodeWorld,
) -> None:
    """In a chat's next turn, the prefill engine pulls the prefix from the decode engine."""
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    world.hand_off(one)
    world.settle()
    assert world.tokens(one) == reference(one)
    assert output_of(world.prefill, one).cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    transfer = output_of(world.decode, one).transfer
    assert transfer is not None and transfer.cached_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert counts(world.prefill).num_fetches == 1 and not counts(world.decode).num_fetches
    assert_clean(world)


@pytest.mark.parametrize("is_handed_off", [False, True])
def test_that_blocks_lack_a_draft_models_kv_goes_with_them(
    world: NodeWorld, is_handed_off: bool
) -> None:
    """The mark that blocks lack the draft model's KV is handed over, with a cached prefix and with
    a prompt computed behind one."""
    source, puller = world.decode, world.prefill
    if is_handed_off:
        source, puller = puller, source
    one = from_peer(request(1, LENGTH), source)
    for node in (source, puller):
        node.engine._tables.has_draft_model = True
    compute_at(world, source, one)
    hashes = source.engine.block_hashes(one)
    caches = [node.engine._tables._cache for node in (source, puller)]
    caches[0].note_drafted(caches[0].match(hashes)[2:], 0)
    if is_handed_off:
        world.hand_off(dataclasses.replace(one, prefix_source=None))
    else:
        world.dispatch(one, puller, None, 60.0)
    world.settle()
    found = caches[1].match(hashes)
    assert len(found) == NUM_BLOCKS and caches[1].first_undrafted(found) == 2
    assert_clean(world)


def test_only_what_is_missing_is_pulled(world: NodeWorld) -> None:
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    short = dataclasses.replace(one, prompt_token_ids=one.prompt_token_ids[: 2 * BLOCK_SIZE + 1])
    compute_at(world, world.prefill, short)
    world.dispatch(one, world.prefill, None, 60.0)
    world.settle()
    assert counts(world.prefill).fetched_blocks == NUM_BLOCKS - 2
    world.dispatch(dataclasses.replace(one, attempt=1), world.prefill, None, 60.0)
    world.settle()
    assert counts(world.prefill).num_fetches == 1, "all of it was there"
    assert_clean(world)


def test_both_engines_may_pull_from_each_other_at_once(world: NodeWorld) -> None:
    one, two = request(1, LENGTH), request(2, LENGTH)
    compute_at(world, world.decode, one)
    compute_at(world, world.prefill, two)
    one, two = from_peer(one, world.decode), from_peer(two, world.prefill)
    world.dispatch(one, world.prefill, None, 60.0)
    world.dispatch(two, world.decode, None, 60.0)
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert list(output_of(world.decode, two).tokens.values()) == reference(two)
    assert counts(world.prefill).num_fetches == counts(world.decode).num_fetches == 1
    assert_clean(world)


def test_a_source_that_lacks_a_block_lends_none(world: NodeWorld) -> None:
    one = from_peer(request(1, LENGTH), world.decode)
    short = dataclasses.replace(one, prompt_token_ids=one.prompt_token_ids[: 2 * BLOCK_SIZE + 1])
    compute_at(world, world.decode, short)
    world.dispatch(one, world.prefill, None, 60.0)
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert output_of(world.prefill, one).cached_tokens == 0
    assert counts(world.prefill).failed_fetches == {"stale_blocks": 1}
    assert_clean(world)


def test_another_salt_s_blocks_are_never_fetched(world: NodeWorld) -> None:
    one = dataclasses.replace(from_peer(request(1, LENGTH), world.decode), cache_salt="mine")
    compute_at(world, world.decode, dataclasses.replace(one, cache_salt="yours"))
    world.dispatch(one, world.prefill, None, 60.0)
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert output_of(world.prefill, one).cached_tokens == 0
    assert counts(world.prefill).failed_fetches == {"stale_blocks": 1}
    assert_clean(world)


def test_a_source_that_hangs_is_waited_for_no_longer_than_the_limit(world: NodeWorld) -> None:
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    world.dispatch(one, world.prefill, None, 60.0)
    for _ in range(20):
        world.turn(world.prefill)  # this engine alone
    assert one.key not in world.prefill.received
    world.clock.advance(LIMIT_S)
    for _ in range(20):
        world.turn(world.prefill)
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert counts(world.prefill).failed_fetches == {"deadline_exceeded": 1}
    world.settle()
    assert_clean(world)


def test_a_copy_that_hangs_keeps_its_room_until_it_has_ended(world: NodeWorld) -> None:
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    world.dispatch(one, world.prefill, None, 60.0)
    for _ in range(20):
        world.turn(world.prefill)
        world.turn(world.decode)  # but nothing is copied
    assert world.num_pulls() == 1
    world.clock.advance(LIMIT_S)
    for _ in range(20):
        world.turn(world.prefill)
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert world.prefill.engine.pool.counts.held == NUM_BLOCKS
    world.settle()
    assert_clean(world)


@pytest.mark.parametrize("moment", range(8))
def test_a_source_that_dies_costs_no_attempt(moment: int) -> None:
    world = linked_world()
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    world.dispatch(one, world.prefill, None, 60.0)
    for _ in range(moment):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
    world.unlink()
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert output_of(world.prefill, one).error is None
    assert_clean(world)


def test_a_source_that_is_not_linked_is_not_waited_for(world: NodeWorld) -> None:
    one = dataclasses.replace(
        request(1, LENGTH), prefix_source=PrefixSource("d" * 32, NUM_BLOCKS, LIMIT_S)
    )
    world.dispatch(one, world.prefill, None, 60.0)
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert counts(world.prefill).failed_fetches == {"node_lost": 1}
    assert_clean(world)


def test_blocks_that_are_rewritten_under_a_copy_are_not_used(world: NodeWorld) -> None:
    """Blocks rewritten during a copy are not used: the source says it holds them, but
    reuses them."""
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    world.dispatch(one, world.prefill, None, 60.0)
    while not world.num_pulls():
        world.turn(world.prefill)
        world.turn(world.decode)
    pairs = next(window.pulls[0]._pairs for window in world.windows if window.pulls)
    ids = [pair.source.block_id for pair in pairs]
    world.decode.pool.generations.bump(ids)
    for block_id in ids:
        world.decode.pool.block(block_id)[:] = b"\xee" * world.decode.pool.block_bytes
    world.settle()
    assert list(output_of(world.prefill, one).tokens.values()) == reference(one)
    assert output_of(world.prefill, one).cached_tokens == 0
    assert counts(world.prefill).failed_fetches == {"stale_blocks": 1}
    assert_clean(world)


def test_what_runs_here_needs_its_memory_more() -> None:
    world = linked_world(prefill_blocks=2 + 8)
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    running = request(3, 15, max_tokens=8)
    world.dispatch(running, world.prefill, None, 60.0)
    world.turn(world.prefill)
    world.dispatch(one, world.prefill, None, 60.0)
    world.settle()
    for each in (running, one):
        assert list(output_of(world.prefill, each).tokens.values()) == reference(each)
    found = counts(world.prefill)
    assert not found.num_fetches and not found.failed_fetches and not found.num_preemptions
    assert_clean(world)


def test_samples_share_a_fetched_prefix_and_one_may_be_cancelled(world: NodeWorld) -> None:
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    params = dataclasses.replace(one.sampling, temperature=1.0, seed=3)
    one = dataclasses.replace(one, fork_ids=("e" * 32, "f" * 32), sampling=params)
    world.hand_off(one)
    world.turn(world.prefill)
    world.cancel(dataclasses.replace(one, fork_ids=()))
    world.settle()
    for sample in one.forks:
        expected = expected_tokens(
            sample.prompt_token_ids, 6, params=params, sample_index=sample.sample_index
        )
        assert world.tokens(sample) == expected
    assert counts(world.prefill).num_fetches == 1
    assert_clean(world)


ACTIONS = st.lists(
    st.sampled_from(
        [
            *("prefill", "decode", "pull", "there", "back", "fill", "fill"),
            *("cancel", "unlink", "link", "wait", "stall"),
        ]
    ),
    min_size=30,
    max_size=80,
)


@examples(30, 400)
@given(actions=ACTIONS)
def test_whatever_is_evicted_and_reused_meanwhile_no_token_is_wrong(actions: list[str]) -> None:
    """No token is wrong whatever is evicted and reused meanwhile: in small pools, blocks are
    evicted before they are pinned or pulled both ways at once; some prefixes are shared, and the
    gateway's hints are old."""
    world = linked_world(prefill_blocks=2 + 12, decode_blocks=2 + 12)
    sent: list[tuple[Node, Request]] = []
    cancelled: set[str] = set()
    for number, action in enumerate(actions):
        prompt = request(number % 3, 9 + number % 9).prompt_token_ids
        one = dataclasses.replace(request(1000 + number, 1), prompt_token_ids=prompt)
        match action:
            case "prefill" | "decode":
                world.turn(getattr(world, action))
            case "pull":
                world.pull()
            case "there" | "back" | "fill":
                node = world.prefill if (number + (action == "back")) % 2 else world.decode
                if action != "fill":
                    one = from_peer(one, other(world, node))
                sent.append((node, one))
                world.dispatch(one, node, None, 60.0)
            case "cancel" if sent:
                cancelled.add(sent[number % len(sent)][1].key)
                world.cancel(sent[number % len(sent)][1])
            case "unlink" if world.is_linked:
                world.unlink()
            case "link" if not world.is_linked:
                world.link()
                world.link_back()
            case "wait":
                world.clock.advance(1.0)
            case "stall":
                world.clock.advance(LEASE_S + 1)
    world.settle()
    for _ in range(3):
        world.expire()
    for node, one in sent:
        tokens = list(node.received.get(one.key, Received()).tokens.values())
        assert tokens == reference(one)[: len(tokens)]
        if one.key not in cancelled:
            assert tokens == reference(one) or node.received[one.key].error == "deadline_exceeded"
    assert_clean(world)


def test_a_ticketed_prompt_waits_for_its_prefix_and_its_puller_for_both(world: NodeWorld) -> None:
    """While a ticketed prompt waits for its prefix, its deadline counts, and nothing is left."""
    one = from_peer(request(1, LENGTH), world.decode)
    compute_at(world, world.decode, one)
    ticket = Ticket(one.request_id, SOURCE, PULLER)
    world.dispatch(one, world.prefill, ticket, 1.0)
    world.dispatch(one, world.decode, ticket, 1.0)
    world.turn(world.prefill)
    world.turn(world.decode)
    assert world.prefill.role.num_coming == 1
    world.clock.advance(1.5)
    world.settle()
    assert (
        output_of(world.prefill, one).error
        == output_of(world.decode, one).error
        == "deadline_exceeded"
    )
    assert not counts(world.prefill).num_fetches
    world.expire()
    assert_clean(world)


def test_a_prefix_with_a_long_limit_costs_no_hand_off(world: NodeWorld) -> None:
    """A slow prefix fetch with a long limit ends before the hand-off fails: the decode engine waits
    for the prompt for one lease."""
    one = from_peer(request(1, LENGTH), world.decode)
    assert one.prefix_source is not None
    slow = dataclasses.replace(one.prefix_source, limit_s=3 * LEASE_S)
    one = dataclasses.replace(one, prefix_source=slow)
    compute_at(world, world.decode, one)
    ticket = Ticket(one.request_id, SOURCE, PULLER)
    world.dispatch(one, world.prefill, ticket, 60.0)
    world.dispatch(one, world.decode, ticket, 60.0)
    for _ in range(int(LEASE_S) + 1):
        for _ in range(20):
            world.turn(world.prefill)
            world.turn(world.decode)  # but nothing is copied
        world.clock.advance(1.0)
    world.settle()
    assert not output_of(world.decode, one).error
    tokens = output_of(world.prefill, one).tokens | output_of(world.decode, one).tokens
    assert [tokens[index] for index in sorted(tokens)] == reference(one)
    assert counts(world.prefill).failed_fetches == {"deadline_exceeded": 1}
    assert_clean(world)
