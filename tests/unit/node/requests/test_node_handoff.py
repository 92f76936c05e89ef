"""Two linked engines with their roles and loops: whole hand-offs and all their possible ends."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
from effort import examples
from fakes.gateway.step_outputs import outputs_of
from fakes.node.node_world import BLOCK_SIZE, LEASE_S, PULLER, SOURCE, NodeWorld, Received, request
from fakes.runner import expected_tokens
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import EngineFailed
from baton.core.request.request import FinishReason, Request, Ticket
from baton.engine.kv.block_pool import BlockRefs
from baton.kv_transfer.protocol.events import PeerMessage
from baton.kv_transfer.protocol.messages import Manifest, Message, Refused, Release, Revoked
from baton.node.channels.links import Kind
from baton.proto.v1 import node_pb2

NUM_MOMENTS = 24  # turns that a hand-off of `request(1, 19)` takes, with some to spare


def linked_world(
    *, prefill_blocks: int = 66, decode_blocks: int = 66, counts_steps: bool = False
) -> NodeWorld:
    world = NodeWorld(
        prefill_blocks=prefill_blocks, decode_blocks=decode_blocks, counts_steps=counts_steps
    )
    world.link()
    world.settle()
    assert world.decode.peers.windows.links()
    return world


@pytest.fixture(params=[False, True], ids=["told when computed", "told when launched"])
def world(request: pytest.FixtureRequest) -> NodeWorld:
    return linked_world(counts_steps=request.param)


def reference(one: Request) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.sampling.max_tokens)


def assert_clean(world: NodeWorld) -> None:
    assert world.prefill.is_clean(), world.prefill.loop.ledger()
    assert world.decode.is_clean(), world.decode.loop.ledger()


def test_handoff_gives_the_reference_tokens(world: NodeWorld) -> None:
    one = request(1, 19)
    world.hand_off(one)
    world.settle()
    assert world.tokens(one) == reference(one)
    source, puller = world.prefill.received[one.key], world.decode.received[one.key]
    assert source.tokens.keys() == {0} and source.num_ends == 0
    assert puller.finish_reason is FinishReason.LENGTH
    assert source.events == ["prefill_queued", "prefill_started", "first_token"]
    assert puller.events == [
        "handoff_queued",
        "transfer_started",
        "transfer_ended",
        "decode_started",
        "first_decode_ended",
    ]
    assert source.cached_tokens == 0
    assert puller.transfer is not None
    assert puller.transfer.bytes == 5 * world.decode.pool.block_bytes  # ceil(19 / 4)
    assert puller.transfer.cached_tokens == 0
    assert puller.transfer.transport == "memory"
    assert_clean(world)


def test_an_engine_with_a_promise_tells_of_a_decode_before_its_token() -> None:
    world, one = linked_world(), request(1, 19)
    world.decode.runner.runs_ahead = True
    world.decode.engine.promise.tbt_target_s = 0.02
    world.hand_off(one)
    reported = world.decode.received[one.key] = Received()
    while "decode_started" not in reported.events:
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
    assert not reported.tokens and reported.transfer is not None
    world.settle()
    assert world.tokens(one) == reference(one)
    assert reported.events[-2:] == ["decode_started", "first_decode_ended"]


def test_cached_blocks_do_not_move_again(world: NodeWorld) -> None:
    one, again = request(1, 19), dataclasses.replace(request(1, 19), request_id="f" * 32)
    for each in (one, again):
        world.hand_off(each)
        world.settle()
    puller = world.decode.received[again.key]
    assert world.tokens(again) == reference(one)
    assert puller.transfer is not None
    assert puller.transfer.cached_tokens == 4 * BLOCK_SIZE
    assert puller.transfer.bytes == world.decode.pool.block_bytes
    assert world.prefill.received[again.key].cached_tokens == 4 * BLOCK_SIZE


def test_many_at_once(world: NodeWorld) -> None:
    requests = [request(n, 3 + 5 * n, max_tokens=1 + n) for n in range(1, 9)]
    for each in requests:
        world.hand_off(each)
    world.settle()
    for each in requests:
        assert world.tokens(each) == reference(each)
    assert_clean(world)


def test_resumed_request_continues_at_its_position(world: NodeWorld) -> None:
    whole = request(1, 10, max_tokens=9)
    resumed = dataclasses.replace(whole, attempt=1, output_token_ids=tuple(reference(whole)[:4]))
    world.hand_off(resumed)
    world.settle()
    assert world.tokens(resumed) == reference(whole)[4:]
    assert_clean(world)


def test_first_token_that_ends_the_request_needs_no_handoff(world: NodeWorld) -> None:
    one = request(1, 19, max_tokens=1)
    world.hand_off(one)
    world.settle()
    assert world.prefill.received[one.key].finish_reason is FinishReason.LENGTH
    assert world.tokens(one) == reference(one)
    assert world.decode.received[one.key].error == "cancelled"
    assert_clean(world)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_local_work_runs_on_either_node(world: NodeWorld, name: str) -> None:
    one, node = request(1, 19), getattr(world, name)
    world.dispatch(one, node, None, 60.0)
    world.settle()
    assert world.tokens(one) == reference(one)
    assert node.received[one.key].events == ["prefill_queued", "prefill_started", "first_token"]
    assert_clean(world)


def test_first_token_is_sent_before_the_manifest_that_follows_from_it() -> None:
    world = linked_world()
    world.hand_off(request(1, 3))
    world.turn(world.decode)
    world.prefill.sent.clear()
    world.prefill.loop.turn(0.0)
    outputs, manifest = world.prefill.sent
    assert isinstance(outputs, node_pb2.NodeMessage) and outputs.HasField("outputs")
    assert isinstance(manifest, Manifest)


def test_first_token_that_is_the_last_is_sent_before_the_hand_off_is_called_off() -> None:
    """The output is sent before the revocation; else the gateway might first learn from the decode
    engine that no hand-off comes."""
    world = linked_world()
    world.hand_off(request(1, 3, max_tokens=1))
    world.turn(world.decode)
    world.prefill.sent.clear()
    world.prefill.loop.turn(0.0)
    outputs, revoked = world.prefill.sent
    assert isinstance(outputs, node_pb2.NodeMessage) and outputs.HasField("outputs")
    assert isinstance(revoked, Revoked)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_gateway_hears_first_from_the_engine_at_which_a_hand_off_fails(name: str) -> None:
    """The failing engine reports its error first; the other one reports what it receives: a
    revocation or the same error."""
    world = linked_world()
    one, node = request(1, 19), getattr(world, name)
    world.hand_off(one)
    for each in (world.decode, world.prefill, world.decode):
        world.turn(each)
    assert world.prefill.engine.has_work and one.key not in world.prefill.received
    node.sent.clear()
    if name == "prefill":
        node.role.end(one.key, EngineFailed("a kernel"))
    else:
        world.hear_peer(node, Manifest(one.request_id, 99, BlockRefs(), LEASE_S))  # behind a gap
        node.loop.turn(0.0)
    outputs, reported = node.sent
    assert isinstance(outputs, node_pb2.NodeMessage) and outputs.HasField("outputs")
    assert isinstance(reported, Revoked if name == "prefill" else Release)


def test_outputs_of_a_step_travel_in_one_message(world: NodeWorld) -> None:
    for n in range(3):
        world.dispatch(request(n, 3), world.decode, None, 60.0)
    world.decode.loop.turn(0.0)
    sent = [each for each in world.decode.sent if isinstance(each, node_pb2.NodeMessage)]
    (last,) = (each for each in sent if each.HasField("outputs"))
    assert last is sent[-1] and len(outputs_of(last.outputs)) == 3


def interrupt(world: NodeWorld, one: Request, moment: int, happen: Callable[[], None]) -> None:
    """Begin a hand-off, call `happen` after `moment` turns, and run to the end."""
    world.hand_off(one)
    for _ in range(moment):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
    happen()
    world.settle()


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_cancel_at_any_moment_frees_everything(world: NodeWorld, moment: int) -> None:
    one = request(1, 19)
    interrupt(world, one, moment, lambda: world.cancel(one))
    received = [node.received.get(one.key) for node in (world.prefill, world.decode)]
    assert all(r is None or r.error is None for r in received), "a cancel is not answered"
    assert world.tokens(one) == reference(one)[: len(world.tokens(one))]
    assert_clean(world)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_loss_of_the_gateway_frees_everything(world: NodeWorld, moment: int) -> None:
    def lose() -> None:
        world.prefill.lose_gateway()
        world.decode.lose_gateway()

    interrupt(world, request(1, 19), moment, lose)
    assert_clean(world)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_loss_of_the_peer_is_an_error_or_harmless(world: NodeWorld, moment: int) -> None:
    one = request(1, 19)
    interrupt(world, one, moment, world.unlink)
    world.expire()
    assert world.tokens(one) == reference(one)[: len(world.tokens(one))]
    puller = world.decode.received[one.key]
    assert puller.num_ends == 1
    if puller.finish_reason is None:
        assert puller.error == "node_lost"
    else:
        assert world.tokens(one) == reference(one)
    assert_clean(world)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_deadline_ends_a_request_at_any_moment(world: NodeWorld, moment: int) -> None:
    one = request(1, 19)
    interrupt(world, one, moment, lambda: world.clock.advance(61.0))
    puller = world.decode.received[one.key]
    assert puller.num_ends == 1
    assert puller.error in (None, "deadline_exceeded")
    assert_clean(world)


@pytest.mark.parametrize("first", ["cancel", "revoked", "unlink"])
def test_cancel_of_what_is_over_leaves_the_blocks_that_a_copy_still_writes_to(
    world: NodeWorld, first: str
) -> None:
    """The gateway's cancel crosses the source's report, or arrives twice."""
    one = request(1, 19)
    world.hand_off(one)
    while not world.num_pulls():
        world.turn(world.prefill)
        world.turn(world.decode)
    if first == "cancel":
        world.cancel(one)
    elif first == "revoked":
        world.hear_peer(world.decode, Revoked(one.request_id, EngineFailed("a kernel")))
    else:
        world.unlink()
    world.turn(world.decode)
    assert world.num_pulls() and world.decode.engine.pool.counts.held == 5
    world.cancel(one)
    world.turn(world.decode)
    assert world.num_pulls() and world.decode.engine.pool.counts.held == 5
    other = request(2, 200)  # needs nearly all other blocks
    world.dispatch(other, world.decode, None, 60.0)
    world.settle()
    assert world.tokens(other) == reference(other)
    world.expire()
    assert_clean(world)


def test_dispatch_behind_its_cancel_is_refused(world: NodeWorld) -> None:
    one = request(1, 19)
    world.cancel(one)
    world.hand_off(one)
    world.settle()
    assert world.prefill.received[one.key].error == "cancelled"
    assert world.decode.received[one.key].error == "cancelled"
    assert_clean(world)


def test_puller_without_a_source_dispatch_gives_up(world: NodeWorld) -> None:
    one = request(1, 19)
    world.hand_off(one)
    world.prefill.inbox.receive(0)  # the dispatch never arrives
    world.settle()
    assert one.key not in world.decode.received
    world.expire()
    assert world.decode.received[one.key].error == "unknown_transfer"
    assert_clean(world)


def test_source_without_a_puller_frees_its_blocks_after_the_lease(world: NodeWorld) -> None:
    one = request(1, 19)
    world.hand_off(one)
    world.decode.inbox.receive(0)
    world.settle()
    assert world.prefill.engine.pool.counts.held == 5
    world.clock.advance(LEASE_S - 1)
    world.settle()
    assert world.prefill.engine.pool.counts.held == 5
    world.expire()
    assert_clean(world)


def test_renewals_keep_the_lease_while_a_pull_is_slow(world: NodeWorld) -> None:
    one = request(1, 19)
    world.hand_off(one)
    for _ in range(40):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.clock.advance(LEASE_S / 4)
        if world.clock.monotonic_s() > 2.5 * LEASE_S:
            break
    assert world.prefill.engine.pool.counts.held == 5
    world.settle()
    assert world.tokens(one) == reference(one)
    assert_clean(world)


def test_requests_wait_for_memory_in_order_of_arrival() -> None:
    world = linked_world(decode_blocks=2 + 8)
    requests = [request(n, 19, max_tokens=8) for n in range(1, 5)]  # 5 blocks, growing to 7
    for each in requests:
        world.hand_off(each)
    world.settle()
    for each in requests:
        assert world.tokens(each) == reference(each)
    assert list(world.decode.received) == [each.key for each in requests]
    assert_clean(world)


def lose_last_manifest(world: NodeWorld, stuck: Request) -> None:
    """Let the request keep its reserved blocks, since its last manifest never arrives."""
    to_peer = world.prefill.channels.to_peer

    def lose_last(kind: Kind, incarnation: str, message: Message | Refused) -> None:
        is_last = isinstance(message, Manifest) and message.state is not None
        if not (is_last and message.transfer_id == stuck.request_id):
            to_peer(kind, incarnation, message)

    world.prefill.channels.to_peer = lose_last  # type: ignore[method-assign]


def test_what_a_deadline_frees_is_given_to_the_next_at_once() -> None:
    """Blocks freed by a deadline are given to the next request in the same turn: nothing else would
    wake the loop, as the engine has no work and no message arrives."""
    world = linked_world(decode_blocks=2 + 9)
    stuck, waiting = request(1, 19), request(2, 19)
    lose_last_manifest(world, stuck)
    world.hand_off(stuck, deadline_s=5.0)
    world.hand_off(waiting)
    world.settle()
    world.clock.advance(LEASE_S / 3 + 0.1)
    world.settle()  # leases have just been renewed
    assert waiting.key not in world.decode.received
    world.clock.advance(5.0 - LEASE_S / 3)
    world.turn(world.decode)
    assert world.decode.received[stuck.key].error == "deadline_exceeded"
    assert world.num_pulls()
    world.settle()
    assert world.tokens(waiting) == reference(waiting)
    world.expire()
    assert_clean(world)


def test_many_that_get_memory_at_once_take_no_more_stack_than_one() -> None:
    num_requests = 200
    world = linked_world(prefill_blocks=2 + 2 * num_requests, decode_blocks=2 + 2 * num_requests)
    pool = world.decode.engine.pool
    fence = pool.open_fence(taken := pool.allocate(pool.capacity) or [])
    pool.release(taken)
    requests = [request(n, 3, max_tokens=2) for n in range(1, 1 + num_requests)]
    for each in requests:
        world.hand_off(each)
    world.settle()
    assert world.decode.engine.pool.num_available == 0
    fence.close()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        world.settle()
    finally:
        sys.setrecursionlimit(limit)
    for each in requests:
        assert world.tokens(each) == reference(each)
    assert_clean(world)


def test_prompt_larger_than_a_pool_is_refused_by_that_node() -> None:
    world = linked_world(decode_blocks=2 + 4)
    one = request(1, 19)
    world.hand_off(one)
    world.settle()
    assert world.decode.received[one.key].error == "prompt_too_large_for_deployment"
    world.cancel(one)  # as the gateway does
    world.settle()
    assert_clean(world)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_work_of_the_other_role_is_refused(world: NodeWorld, name: str) -> None:
    one, node = request(1, 19), getattr(world, name)
    world.dispatch(one, node, Ticket(one.request_id, PULLER, SOURCE), 60.0)
    world.settle()
    assert node.received[one.key].error == "unknown_transfer"
    assert not node.received[one.key].tokens
    assert_clean(world)


def test_token_id_outside_the_vocabulary_is_refused(world: NodeWorld) -> None:
    one = dataclasses.replace(request(1, 3), prompt_token_ids=(1, 2**32 - 1))
    world.hand_off(one)
    world.settle()
    assert world.prefill.received[one.key].error == "invalid_request"
    assert world.decode.received[one.key].error == "invalid_request"
    assert_clean(world)


def test_draining_node_refuses_and_ends_when_it_holds_nothing(world: NodeWorld) -> None:
    one, late = request(1, 19), request(2, 19)
    world.hand_off(one)
    world.turn(world.prefill)
    world.prefill.tell(drain=True)
    world.dispatch(late, world.prefill, None, 60.0)
    world.settle()
    assert world.tokens(one) == reference(one)
    assert world.prefill.received[late.key].error == "unavailable"
    world.prefill.loop.run()  # returns at once


def test_strange_peer_message_costs_the_pair_and_nothing_else(world: NodeWorld) -> None:
    world.ends[0]._arrive(b"\x78\x01")  # type: ignore[union-attr]
    local = request(2, 19)
    world.dispatch(local, world.prefill, None, 60.0)
    world.settle()
    assert not world.is_linked
    assert world.tokens(local) == reference(local)


def test_fault_of_one_request_leaves_the_others(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = request(1, 19), request(2, 19)
    add = world.prefill.engine.add

    def faulty_add(one: Request, *, hold: bool = False) -> None:
        add(one, hold=hold)
        if one.key == bad.key:
            raise ZeroDivisionError

    monkeypatch.setattr(world.prefill.engine, "add", faulty_add)
    world.hand_off(bad)
    world.hand_off(good)
    world.settle()
    assert world.prefill.received[bad.key].error == "internal"
    assert world.tokens(good) == reference(good)
    world.cancel(bad)
    world.settle()
    assert_clean(world)


def test_fault_of_one_peer_message_costs_the_pair_and_nothing_else(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: Any = world.decode.peers.feeds
    feed = feeds[Kind.SOURCE]

    def faulty(event: object) -> None:
        if isinstance(event, PeerMessage):
            raise ZeroDivisionError
        feed(event)

    monkeypatch.setitem(feeds, Kind.SOURCE, faulty)
    one, local = request(1, 19), request(2, 19)
    world.hand_off(one)
    world.settle()
    assert not world.is_linked and world.decode.received[one.key].error
    world.dispatch(local, world.decode, None, 60.0)
    world.settle()
    assert world.tokens(local) == reference(local)


ACTIONS = st.lists(
    st.sampled_from(
        ["prefill", "decode", "pull", "hand_off", "cancel", "unlink", "link", "wait", "stall"]
    ),
    min_size=30,
    max_size=80,
)


@examples(60, 150)
@given(actions=ACTIONS)
def test_any_course_of_events_ends_cleanly(actions: list[str]) -> None:
    world = linked_world(prefill_blocks=2 + 12, decode_blocks=2 + 10)
    requests: list[Request] = []
    cancelled: set[str] = set()
    for number, action in enumerate(actions):
        match action:
            case "prefill" | "decode":
                world.turn(getattr(world, action))
            case "pull":
                world.pull()
            case "hand_off":
                requests.append(request(number, 5 + number % 17))
                world.hand_off(requests[-1])
            case "cancel" if requests:
                chosen = requests[number % len(requests)]
                cancelled.add(chosen.key)
                world.cancel(chosen)
            case "unlink" if world.is_linked:
                world.unlink()
            case "link" if not world.is_linked:
                world.link()
            case "wait":
                world.clock.advance(1.0)
            case "stall":
                world.clock.advance(LEASE_S + 1)
    world.settle()
    for _ in range(6):
        world.expire()  # until every request's deadline has passed
    for each in requests:
        tokens = world.tokens(each)
        assert tokens == reference(each)[: len(tokens)]
        puller = world.decode.received.get(each.key)
        if each.key not in cancelled:
            assert puller is not None and puller.num_ends == 1
            assert puller.error is not None or tokens == reference(each)
    assert_clean(world)


# -- several samples of one prompt, and data sent with tokens -------------------------------------


def samples(number: int, num_prompt_tokens: int, n: int, **sampling: object) -> Request:
    """A request for `n` samples with different outputs."""
    one = request(number, num_prompt_tokens)
    fork_ids = tuple(f"{number:x}{i}".rjust(32, "e") for i in range(1, n))
    params = dataclasses.replace(one.sampling, temperature=1.0, seed=number, **sampling)
    return dataclasses.replace(one, sampling=params, fork_ids=fork_ids)


def reference_of(sample: Request) -> list[int]:
    params = sample.sampling
    return expected_tokens(
        sample.prompt_token_ids, params.max_tokens, params=params, sample_index=sample.sample_index
    )


@pytest.mark.parametrize("num_prompt_tokens", [3, 16, 19])
def test_samples_share_one_handoff(world: NodeWorld, num_prompt_tokens: int) -> None:
    one = samples(1, num_prompt_tokens, 4)
    world.hand_off(one)
    world.settle()
    for sample in (one, *one.forks):
        assert world.tokens(sample) == reference_of(sample)
        source, puller = (node.received[sample.key] for node in (world.prefill, world.decode))
        assert source.events == ["prefill_queued", "prefill_started", "first_token"]
        assert source.cached_tokens == 0
        assert puller.finish_reason is FinishReason.LENGTH
        assert puller.events == [
            "handoff_queued",
            "transfer_started",
            "transfer_ended",
            "decode_started",
            "first_decode_ended",
        ]
    assert len({tuple(reference_of(sample)) for sample in (one, *one.forks)}) == 4
    assert world.prefill.runner.batch_sizes == [[8]] * (num_prompt_tokens // 8) + (
        [[num_prompt_tokens % 8]] if num_prompt_tokens % 8 else []
    )
    assert_clean(world)


def test_a_small_pool_lets_samples_wait() -> None:
    world = linked_world(decode_blocks=2 + 7)
    one = samples(1, 19, 8)
    world.hand_off(one)
    world.settle()
    for sample in (one, *one.forks):
        assert world.tokens(sample) == reference_of(sample)
    assert_clean(world)


@examples(20, 40)
@given(st.integers(0, NUM_MOMENTS), st.sets(st.integers(0, 2), min_size=1))
def test_cancelled_samples_leave_the_others_at_any_moment(moment: int, cancelled: set[int]) -> None:
    world = linked_world()
    one = samples(1, 19, 3)
    group = (one, *one.forks)
    world.hand_off(one)
    for _ in range(moment):
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
    for index in cancelled:
        world.cancel(group[index])
    world.settle()
    for index, sample in enumerate(group):
        if index not in cancelled:
            assert world.tokens(sample) == reference_of(sample)
    assert_clean(world)


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
@pytest.mark.parametrize("waits", [False, True], ids=["blocks are free", "it waits for blocks"])
def test_a_cancelled_beam_search_frees_everything_at_any_moment(moment: int, waits: bool) -> None:
    """A cancelled search leaves no request behind, and keeps blocks that a copy still writes to."""
    world = linked_world(decode_blocks=2 + 9)
    if waits:
        lose_last_manifest(world, stuck := request(2, 19))
        world.hand_off(stuck)
        world.settle()
    one = samples(1, 19, 2)
    search = {"temperature": 0.0, "seed": 0, "use_beam_search": True, "best_of": 4}
    one = dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **search))

    def cancel() -> None:
        for each in (one, *one.forks):
            world.cancel(each)

    interrupt(world, one, moment, cancel)
    if waits:
        world.cancel(stuck)
        world.settle()
    assert_clean(world)


@pytest.mark.parametrize("ending", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_samples_may_end_with_their_first_token(world: NodeWorld, ending: set[int]) -> None:
    one = samples(1, 19, 3)
    firsts = [reference_of(sample)[0] for sample in (one, *one.forks)]
    stops = tuple(firsts[index] for index in ending)
    one = samples(1, 19, 3, stop_token_ids=stops)
    world.hand_off(one)
    world.settle()
    for index, sample in enumerate((one, *one.forks)):
        if index in ending:
            assert world.prefill.received[sample.key].finish_reason is FinishReason.STOP
            assert world.tokens(sample) == firsts[index : index + 1]
            assert world.decode.received[sample.key].error == "cancelled"
        else:
            assert world.tokens(sample) == reference_of(sample)
    assert_clean(world)


def test_a_lost_link_fails_every_sample_once(world: NodeWorld) -> None:
    one = samples(1, 19, 3)
    world.hand_off(one)
    for _ in range(4):
        world.turn(world.prefill)
        world.turn(world.decode)
    world.unlink()
    world.settle()
    world.expire()
    for sample in (one, *one.forks):
        assert world.decode.received[sample.key].num_ends == 1
    assert_clean(world)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_samples_as_local_work(world: NodeWorld, name: str) -> None:
    one, node = samples(1, 19, 3), getattr(world, name)
    world.dispatch(one, node, None, 60.0)
    world.settle()
    for sample in (one, *one.forks):
        assert world.tokens(sample) == reference_of(sample)
    assert_clean(world)


def test_logprobs_come_with_each_token_the_first_included(world: NodeWorld) -> None:
    one = samples(1, 19, 2, logprobs=1, prompt_logprobs=1)
    world.hand_off(one)
    world.settle()
    for sample in (one, *one.forks):
        for node in (world.prefill, world.decode):
            received = node.received[sample.key]
            assert received.logprobs == {i: -token for i, token in received.tokens.items()}
    source, puller = world.prefill.received, world.decode.received
    prompt = enumerate(one.prompt_token_ids)
    assert source[one.key].prompt_logprobs == {i: -token for i, token in prompt if i}
    assert not source[one.forks[0].key].prompt_logprobs
    assert not puller[one.key].prompt_logprobs
