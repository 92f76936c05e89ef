"""What an engine loop reports about its queue in heartbeats, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.node.node_world import BLOCK_SIZE, Node, NodeWorld, request

from baton.core.request.request import Ticket
from baton.node.engine_process.heartbeat import MAX_CALLERS, RECOUNT_S
from baton.proto.v1 import node_pb2


@pytest.fixture
def world() -> NodeWorld:
    return NodeWorld(prefill_blocks=200)


def listen(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[node_pb2.Heartbeat]:
    """The heartbeat counts that the loop reports from this call on."""
    beats: list[node_pb2.Heartbeat] = []
    monkeypatch.setattr(node.loop._heartbeats, "count", beats.append)
    return beats


def local(world: NodeWorld, node: Node, number: int, num_tokens: int, caller_id: int) -> None:
    one = replace(request(number, num_tokens, max_tokens=2), caller_id=caller_id)
    world.dispatch(one, node, None, 60.0)


def test_the_end_of_the_queue_is_told_in_the_turn_that_it_comes(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = listen(world.prefill, monkeypatch)
    local(world, world.prefill, 1, 20, caller_id=7)
    world.turn(world.prefill)
    assert [beat.waiting_tokens for beat in beats] == [12]
    assert beats[0].waiting_by_caller == [node_pb2.CallerTokens(caller_id=7, num_tokens=12)]
    world.turn(world.prefill)
    assert len(beats) == 1, "no time has passed, and the prompt is not done"
    world.turn(world.prefill)
    assert [beat.waiting_tokens for beat in beats] == [12, 0], "without waiting for the next count"
    world.settle()
    assert len(beats) == 2, "nothing more to say before its time"


def test_a_prompt_where_none_waited_is_told_in_the_turn_that_it_comes(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waiting prompt is reported in the turn in which it arrives; else other gateways
    would send theirs to the same engine."""
    beats = listen(world.prefill, monkeypatch)
    world.turn(world.prefill)
    for number in (1, 2):
        local(world, world.prefill, number, 20, caller_id=7)
        world.turn(world.prefill)
    assert [beat.waiting_tokens for beat in beats] == [0, 12], "the second prompt has time"


def test_a_prompt_that_came_between_two_steps_is_told_during_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = NodeWorld(prefill_blocks=200, counts_steps=True)
    engine = world.prefill
    world.dispatch(request(1, 4, max_tokens=20), engine, None, 60.0)
    for _ in range(4):
        world.turn(engine)
    beats = listen(engine, monkeypatch)
    num_beats: list[int] = []  # the number of reports at the end of each step
    execute = engine.runner._execute
    monkeypatch.setattr(
        engine.runner, "_execute", lambda step: num_beats.append(len(beats)) or execute(step)
    )
    local(world, engine, 2, 20, caller_id=7)
    world.turn(engine)
    assert num_beats == [1] and beats[0].waiting_tokens == 20


def test_a_queue_that_is_cancelled_away_is_told_at_once(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = listen(world.prefill, monkeypatch)
    one = request(1, 60)
    world.dispatch(one, world.prefill, None, 60.0)
    world.turn(world.prefill)
    world.cancel(one)
    world.turn(world.prefill)
    assert [beat.waiting_tokens > 0 for beat in beats] == [True, False]
    assert beats[-1].num_requests == 0


def test_what_the_prefix_cache_holds_does_not_count_but_for_prompt_logprobs(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = listen(world.prefill, monkeypatch)
    for number in (1, 2):
        local(world, world.prefill, number, 40, caller_id=number)
        world.settle()
    again = replace(request(1, 40, attempt=1), caller_id=1)
    scored = replace(again, attempt=2, sampling=replace(again.sampling, prompt_logprobs=0))
    for one, expected in ((again, 4), (scored, 40)):
        world.clock.advance(RECOUNT_S)
        for number in (8, 9):  # the step computes 8 of their tokens
            local(world, world.prefill, number + 10 * one.attempt, 30, caller_id=1)
        world.dispatch(one, world.prefill, None, 60.0)
        beats.clear()
        world.turn(world.prefill)
        assert beats[-1].waiting_tokens == 2 * 30 - 8 + expected
        world.settle()


def test_the_largest_callers_are_told_of(world: NodeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = listen(world.prefill, monkeypatch)
    for caller_id in range(1, MAX_CALLERS + 11):
        local(world, world.prefill, caller_id, 20 + caller_id, caller_id)
    world.turn(world.prefill)
    (beat,) = beats
    assert [one.caller_id for one in beat.waiting_by_caller] == [*range(74, 10, -1)]
    assert beat.waiting_tokens == sum(20 + one for one in range(1, 75)) - 8
    assert beat.num_requests == 74 and beat.num_waiting == 73 and beat.num_stages == 1


def test_room_is_what_pending_and_reserved_requests_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    world = NodeWorld(decode_blocks=12)
    beats = listen(world.decode, monkeypatch)
    capacity = world.decode.engine.limits.capacity
    one = replace(request(1, 4 * BLOCK_SIZE, max_tokens=BLOCK_SIZE), fork_ids=("f" * 32,))
    ticket = Ticket(one.request_id, world.prefill.incarnation, world.decode.incarnation)
    world.dispatch(one, world.decode, ticket, 60.0)
    world.turn(world.decode)
    # The whole prompt and one block of outputs; the fork shares the prompt.
    assert beats[-1].room_blocks == capacity - 5 - 1
    assert beats[-1].num_requests == 2 and beats[-1].num_waiting == 2
    world.dispatch(one, world.prefill, ticket, 60.0)
    world.link()
    rooms = set()
    while len(world.decode.received) < 2:
        world.clock.advance(RECOUNT_S)
        world.turn(world.prefill)
        world.turn(world.decode)
        world.pull()
        rooms.add(beats[-1].room_blocks)
    assert rooms == {capacity - 6}, "the same, whether pending, reserved or running"
    world.settle()
    world.clock.advance(RECOUNT_S)
    world.turn(world.decode)
    assert beats[-1].room_blocks == capacity and beats[-1].num_requests == 0


def test_prompts_for_others_to_decode_take_no_places(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts to be decoded elsewhere do not count as requests: not while they wait and are
    computed, nor until they are pulled."""
    beats = listen(world.prefill, monkeypatch)
    local(world, world.prefill, 1, 20, caller_id=7)
    handed = replace(request(2, 20, max_tokens=2), fork_ids=("f" * 32,))
    ticket = Ticket(handed.request_id, world.prefill.incarnation, world.decode.incarnation)
    world.dispatch(handed, world.prefill, ticket, 60.0)
    world.turn(world.prefill)
    assert beats[-1].num_requests == 1
    world.settle()
    world.clock.advance(RECOUNT_S)
    world.turn(world.prefill)
    assert beats[-1].num_requests == 0 and beats[-1].held_blocks


def test_a_draining_engine_ends_what_waits_of_all_callers(world: NodeWorld) -> None:
    for number in range(1, 9):
        local(world, world.prefill, number, 30, caller_id=number % 3)
    world.turn(world.prefill)
    world.prefill.tell(drain=True)
    world.settle()
    ended = [one for one in world.prefill.received.values() if one.finish_reason is not None]
    assert len(ended) == 8 and world.prefill.is_clean()
    assert world.prefill.loop._is_over
