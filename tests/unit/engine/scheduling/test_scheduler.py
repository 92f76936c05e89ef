"""The scheduler's policy, step by step: order, budget, preemption, credit. No runner."""

from __future__ import annotations

import pytest
from fakes.scheduler_bench import BLOCK_SIZE, Bench
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PromptTooLarge
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.schedule import Schedule
from baton.engine.scheduling.sequence import Sequence, SequenceState


def test_decodes_then_chunks_then_admissions_share_the_budget() -> None:
    bench = Bench(budget=16)
    bench.add(3, first_id=100)
    assert bench.step() == {"a": 3}
    bench.add(20, first_id=200)
    assert bench.step() == {"a": 1, "b": 15}
    bench.add(20, first_id=300)
    assert bench.step() == {"a": 1, "b": 5, "c": 10}
    assert bench.step() == {"a": 1, "b": 1, "c": 10}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}


def test_a_prompt_ends_a_little_over_the_budget_rather_than_a_step_later() -> None:
    bench = Bench(budget=32)
    bench.add(1, first_id=100)
    bench.add(64, first_id=200)
    assert bench.step() == {"a": 1, "b": 31}
    bench.scheduler.remove(bench.sequences[0])
    assert bench.step() == {"b": 33}
    bench.scheduler.remove(bench.sequences[1])
    bench.add(2, first_id=300)
    bench.add(64, first_id=400)
    assert bench.step() == {"c": 2, "d": 30}
    bench.scheduler.remove(bench.sequences[2])
    assert bench.step() == {"d": 34}, "a sixteenth over"


def test_a_prompt_that_only_makes_others_wait_begins_in_the_next_step() -> None:
    bench = Bench(budget=32)
    bench.add(18, first_id=100)
    bench.add(40, first_id=200)
    bench.add(10, first_id=300)
    assert bench.step() == {"a": 18}, "b would not end here, and nobody overtakes it"
    bench.scheduler.remove(bench.sequences[0])
    assert bench.step() == {"b": 32}
    assert bench.step() == {"b": 8, "c": 10}


def test_a_few_tokens_do_not_keep_a_long_prompt_from_beginning() -> None:
    bench = Bench(budget=32)
    bench.add(4, first_id=100)
    bench.add(40, first_id=200)
    assert bench.step() == {"a": 4, "b": 28}


def test_prompts_that_end_in_the_step_share_it() -> None:
    bench = Bench(budget=32)
    for first_id in (100, 200, 300, 400):
        bench.add(8, first_id=first_id)
    assert bench.step() == {"a": 8, "b": 8, "c": 8, "d": 8}


def test_a_long_prompt_is_computed_in_large_chunks_but_for_the_last() -> None:
    bench = Bench(budget=16, chunk=64)
    bench.add(100, first_id=100)
    assert [bench.step() for _ in range(3)] == [{"a": 64}, {"a": 28}, {"a": 8}]
    bench.scheduler.remove(bench.sequences[0])
    bench.add(20, first_id=300)
    assert bench.step() == {"b": 12}
    assert bench.step() == {"b": 8}


def test_while_others_wait_a_prompt_has_no_short_last_chunk() -> None:
    bench = Bench(budget=16, chunk=64)
    for length, first_id in ((100, 100), (64, 300), (65, 400), (8, 500)):
        bench.add(length, first_id=first_id)
    steps = [bench.step() for _ in range(2)]
    assert steps == [{"a": 64}, {"a": 36}]
    bench.scheduler.remove(bench.sequences[0])
    assert bench.step() == {"b": 64}
    bench.scheduler.remove(bench.sequences[1])
    assert bench.step() == {"c": 57}, "two steps, whoever waits"
    assert bench.step() == {"c": 8, "d": 8}


@pytest.mark.parametrize("num_computed", [0, 24, 32])
def test_behind_a_prompt_on_the_device_one_has_no_short_last_chunk(num_computed: int) -> None:
    """While a prompt runs on the device, the next one is not planned with a short last chunk, even
    if no other request waits: the engine is busy."""
    bench = Bench(budget=16, chunk=64)
    a = bench.add(32, first_id=100)
    assert bench.step() == {"a": 24}
    a.num_launched_tokens = 32
    a.num_computed_tokens = num_computed
    bench.add(60, first_id=300)
    assert bench.step() == {"b": 52 if num_computed == 32 else 60}


def test_its_own_chunk_on_the_device_is_no_queue() -> None:
    bench = Bench(budget=16, chunk=64)
    a = bench.add(100, first_id=100)
    assert bench.step() == {"a": 64}
    a.num_computed_tokens = 0
    assert bench.step() == {"a": 28}


def test_a_decode_on_the_device_is_no_queue() -> None:
    bench = Bench(budget=16, chunk=64)
    a = bench.add(4, first_id=100)
    assert bench.step() == {"a": 4}
    a.num_awaited_tokens, a.num_launched_tokens = 1, 5
    bench.add(60, first_id=300)
    assert bench.step() == {"a": 1, "b": 52}


def test_a_large_chunk_and_the_decodes_have_no_more_tokens_than_it_alone() -> None:
    bench = Bench(budget=16, chunk=64)
    bench.add(1, first_id=50)
    bench.add(2, first_id=60)
    assert bench.step() == {"a": 1, "b": 2}
    bench.add(100, first_id=100)
    assert bench.step() == {"a": 1, "b": 1, "c": 62}


@given(
    budget=st.integers(1, 40),
    chunk=st.integers(0, 160),
    num_decodes=st.integers(0, 39),
    num_tokens=st.integers(1, 400),
    is_in_queue=st.booleans(),
)
def test_a_prompt_gets_on_in_a_step_that_is_not_too_large(
    budget: int, chunk: int, num_decodes: int, num_tokens: int, *, is_in_queue: bool
) -> None:
    limits = EngineLimits(9, BLOCK_SIZE, 1000, 99, budget, None, chunk)
    spare, last = limits.num_spare_tokens, limits.last_chunk_tokens
    num_decodes = min(num_decodes, budget - 1)
    schedule = Schedule(budget - num_decodes, spare, max(0, chunk - num_decodes), last)
    prompt = Bench().new(num_tokens)
    prompt.num_prefill_tokens = num_tokens
    schedule.plan(prompt, is_in_queue=is_in_queue)
    (planned,) = schedule.others
    assert 1 <= planned.num_scheduled_tokens <= num_tokens
    assert num_decodes + planned.num_scheduled_tokens <= max(budget + spare, chunk)


def test_a_large_chunk_has_no_other_prompt_beside_it() -> None:
    bench = Bench(budget=16, chunk=64)
    bench.add(2, first_id=100)
    bench.add(100, first_id=200)
    assert bench.step() == {"a": 2}, "and does not make it wait"
    bench.scheduler.remove(bench.sequences[0])
    assert bench.step() == {"b": 64}


def test_known_tokens_of_a_decode_are_scheduled_together_and_can_be_rolled_back() -> None:
    """Several known tokens of a decode are computed in one step, and can be rolled back."""
    bench = Bench()
    a = bench.add(3)
    bench.step()
    a.token_ids.extend((5, 5, 5))
    assert bench.step() == {"a": 4}
    del a.token_ids[5:]
    a.num_computed_tokens = a.num_launched_tokens = 4
    assert bench.step() == {"a": 1}
    assert len(a.block_ids) == 2


def test_at_most_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(2)
    assert bench.step() == {"a": 2, "b": 2}
    assert bench.step() == {"a": 1, "b": 1}
    bench.scheduler.remove(bench.sequences[0])
    assert bench.step() == {"b": 1, "c": 2}


def test_no_overtaking() -> None:
    """A request that would fit (c) does not overtake an earlier one that does not (b)."""
    bench = Bench(capacity=6)
    a = bench.add(16, first_id=100)
    bench.add(16, first_id=200)
    bench.add(1, first_id=300)
    assert bench.step() == {"a": 16}
    assert bench.step() == {"a": 1}
    bench.scheduler.remove(a)
    assert bench.step() == {"b": 16}
    assert bench.step() == {"b": 1, "c": 1}


def test_a_prefill_computes_at_least_one_token() -> None:
    bench = Bench()
    for num_tokens, num_left in [(8, 8), (8, 4), (9, 1)]:
        sequence = bench.add(num_tokens)
        assert list(bench.step().values()) == [num_left]
        bench.scheduler.remove(sequence)


def test_the_latest_are_preempted_and_the_earlier_comes_back_first() -> None:
    bench = Bench(capacity=3)
    a = bench.add(4, first_id=100)
    for first_id in (200, 300):
        bench.add(4, first_id=first_id)
    assert bench.step() == {"a": 4, "b": 4, "c": 4}
    assert bench.step() == {"a": 1}  # in c's block; b can then only preempt itself
    assert bench.scheduler.preemption.num_preemptions == 2
    assert [s.request.request_id for s in bench.scheduler.queues.waiting] == ["b", "c"]
    bench.scheduler.remove(a)
    assert bench.step() == {"b": 1}


def test_a_half_computed_prompt_is_preempted_first_and_once() -> None:
    bench = Bench(capacity=8, budget=6)
    a = bench.add(4, first_id=100)
    assert bench.step() == {"a": 4}
    prompt = bench.add(16, first_id=200)
    assert bench.step() == {"a": 1, "b": 5}
    c = bench.add(3, first_id=300)
    bench.scheduler.queues.waiting.remove(c)  # its decode begins here, after the prompt arrived
    c.num_computed_tokens = c.num_launched_tokens = c.num_prefill_tokens = 3
    assert bench.scheduler._tables.grow(c)
    bench.scheduler.queues.run(c)
    assert bench.scheduler.preemption.next_victim() is prompt, "nobody's stream waits for it"
    bench.scheduler.preemption.preempt(prompt)
    assert bench.scheduler.preemption.next_victim() is c
    bench.step()
    assert prompt.state is SequenceState.RUNNING and prompt.is_prefilling
    assert bench.scheduler.preemption.next_victim() is c, "it has aged"
    bench.scheduler.remove(c)
    assert bench.scheduler.preemption.next_victim() is prompt
    bench.scheduler.remove(prompt)
    assert bench.scheduler.preemption.next_victim() is None and a.state is SequenceState.RUNNING


def test_a_preempted_sequence_finds_its_blocks_in_the_cache() -> None:
    bench = Bench(capacity=5)
    a = bench.add(8, first_id=100)
    b = bench.add(8, first_id=200)
    bench.step()
    assert bench.step() == {"a": 1}  # it took the last block; b can only preempt itself
    assert b.state is SequenceState.WAITING and b.num_tokens - b.num_computed_tokens == 9
    bench.scheduler.remove(a)
    assert bench.step() == {"b": 1}
    assert b.num_cached_tokens == 8


def test_the_oldest_waits_for_held_blocks_and_is_not_preempted() -> None:
    bench = Bench(capacity=3)
    a = bench.add(4, first_id=100)
    held = bench.add(8, is_held=True, first_id=200)
    assert bench.step() == {"a": 4, "b": 8}
    assert held.state is SequenceState.HELD
    assert bench.step() == {}
    assert a.state is SequenceState.RUNNING and bench.scheduler.preemption.num_preemptions == 0
    bench.scheduler.remove(held)
    assert bench.step() == {"a": 1}


def test_a_held_sequence_is_never_preempted() -> None:
    bench = Bench(capacity=5, budget=17)
    bench.add(4, first_id=100)
    b = bench.add(4, first_id=200)
    held = bench.add(12, is_held=True, first_id=300)
    assert bench.step() == {"a": 4, "b": 4, "c": 9}
    assert bench.step() == {"a": 1, "c": 3}
    assert b.state is SequenceState.WAITING
    assert held.state is SequenceState.HELD


def test_what_was_pulled_outlives_a_preemption_before_the_first_step() -> None:
    bench = Bench(capacity=5, guess=0)
    a = bench.add(2, first_id=100)
    assert bench.step() == {"a": 2}
    b = bench.new(12, first_id=200)
    b.state = SequenceState.COMING
    bench.scheduler.add(b)
    assert bench.scheduler.reserve() is b
    assert [bench.step() for _ in range(2)] == [{"a": 1}, {"a": 1}]  # a's block is full
    b.token_ids.append(9)
    bench.scheduler.start(b)
    assert bench.step() == {"a": 1} and b.state is SequenceState.WAITING
    bench.scheduler.remove(a)
    assert bench.step() == {"b": 1}, "the rest is cached"


def test_a_sequence_that_outgrows_the_pool_fails() -> None:
    bench = Bench(capacity=2)
    a = bench.add(7)
    assert [bench.step() for _ in range(2)] == [{"a": 7}, {"a": 1}]
    assert bench.step() == {}
    [(sequence, error)] = bench.failed
    assert sequence is a and isinstance(error, PromptTooLarge)
    assert bench.pool.counts.held == 0


def test_a_waiting_sequence_that_has_outgrown_the_pool_does_not_block_the_queue() -> None:
    bench = Bench(capacity=2)
    a = bench.add(7)
    bench.add(3, first_id=100)
    a.token_ids.extend((9, 9))
    assert bench.step() == {"b": 3}
    assert [(sequence, type(error)) for sequence, error in bench.failed] == [(a, PromptTooLarge)]


def test_what_did_not_fit_is_not_judged_again_before_something_is_released() -> None:
    bench = Bench(capacity=5, guess=9)
    a = bench.add(8, first_id=100)
    bench.add(8, first_id=200)
    bench.step()
    num_guesses = bench.estimator.num_guesses
    for _ in range(5):
        assert bench.step() == {"a": 1}
    assert bench.estimator.num_guesses == num_guesses
    bench.scheduler.remove(a)
    assert bench.step() == {"b": 8}


def test_whether_a_prompt_may_be_in_the_next_step() -> None:
    bench = Bench(budget=8, capacity=5, max_num_seqs=2, guess=9)
    queues = bench.scheduler.queues
    assert not queues.has_prompts_to_launch
    a = bench.add(12, first_id=100)
    assert queues.has_prompts_to_launch
    assert bench.step() == {"a": 8}
    assert queues.has_prompts_to_launch
    assert bench.step() == {"a": 4}
    assert not queues.has_prompts_to_launch
    bench.add(8, first_id=200)
    assert queues.has_prompts_to_launch
    assert bench.step() == {"a": 1}
    assert not queues.has_prompts_to_launch, "it does not fit, and nothing was released"
    bench.scheduler.remove(a)
    assert queues.has_prompts_to_launch


def test_credit_stops_held_admissions() -> None:
    bench = Bench(max_held_blocks=5, budget=18)
    first = bench.add(8, is_held=True, first_id=100)
    bench.add(12, is_held=True, first_id=200)
    bench.add(4, is_held=True, first_id=300)
    assert bench.step() == {"a": 8, "b": 10}
    assert bench.step() == {"b": 2}
    assert bench.step() == {}
    bench.scheduler.remove(first)
    assert bench.step() == {"c": 4}


def test_the_estimate_keeps_out_what_would_not_fit_later() -> None:
    """A request is not admitted if the estimated growth does not fit: two sequences of 8 tokens
    that grow by 8 fill 8 blocks at their end."""
    for capacity, expected in [(8, {"a": 8, "b": 8}), (7, {"a": 8})]:
        bench = Bench(capacity=capacity, guess=9)
        bench.add(8, first_id=100)
        bench.add(8, first_id=200)
        assert bench.step() == expected


def test_a_reservation_leaves_room_for_the_head_of_the_queue() -> None:
    bench = Bench(capacity=4)
    head = bench.add(8, first_id=100)
    late = bench.new(8, first_id=200)
    late.state = SequenceState.COMING
    bench.scheduler.add(late)
    assert bench.scheduler.reserve() is None  # 2 blocks and 3, one too many
    bench.scheduler.remove(head)
    assert bench.scheduler.reserve() is late
    assert len(late.block_ids) == 3


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_reservation_needs_a_slot(max_num_seqs: int) -> None:
    bench = Bench(max_num_seqs=max_num_seqs)
    bench.add(4, first_id=100)
    bench.step()
    late = bench.new(8, first_id=200)
    late.state = SequenceState.COMING
    bench.scheduler.add(late)
    assert bench.scheduler.reserve() is (late if max_num_seqs == 2 else None)
    bench.add(4, first_id=300)
    assert bench.step() == {"a": 1}


def test_a_started_reservation_runs_by_its_arrival() -> None:
    bench = Bench(capacity=5)
    early = bench.new(8, first_id=100)
    early.state = SequenceState.COMING
    bench.scheduler.add(early)
    assert bench.scheduler.reserve() is early
    b = bench.add(8, first_id=200)
    assert bench.step() == {"b": 8}
    early.token_ids.append(9)
    bench.scheduler.start(early)
    assert bench.scheduler.queues.running == [early, b]
    assert bench.step() == {"a": 1}
    assert b.state is SequenceState.WAITING


def test_those_that_are_coming_take_turns_between_callers_but_for_their_head() -> None:
    bench = Bench(capacity=6, guess=1)

    def coming(num_tokens: int, caller_id: int) -> Sequence:
        one = bench.new(num_tokens, first_id=100 * len(bench.sequences), caller_id=caller_id)
        one.state = SequenceState.COMING
        bench.scheduler.add(one)
        return one

    other = coming(8, 0)
    assert bench.scheduler.reserve() is other
    a, b, c = (coming(12, 1) for _ in range(3))
    assert bench.scheduler.reserve() is None, "3 blocks and 4, one too many"
    light = coming(4, 2)
    assert bench.scheduler.reserve() is None, "whoever did not fit is passed by nobody"
    bench.scheduler.remove(a)
    assert bench.scheduler.reserve() is light
    assert bench.scheduler.reserve() is None
    bench.scheduler.remove(other)
    assert bench.scheduler.reserve() is b
    assert bench.scheduler.reserve() is None and [*bench.scheduler.queues.coming] == [c]
    for one in (b, c, light):
        bench.scheduler.remove(one)
    assert bench.pool.counts.held == 0


def test_a_clear_decode_is_looked_at_when_it_needs_a_block_and_at_its_end() -> None:
    bench = Bench()
    a = bench.add(3)
    bench.step()
    a.most_tokens = 11
    looked_at = []
    while bench.step():
        if a.num_clear_tokens <= a.num_launched_tokens:
            looked_at.append(a.num_tokens)
        assert a.num_launched_tokens <= len(a.block_ids) * BLOCK_SIZE
    assert looked_at == [5, 9, 10, 11] and a.num_tokens == 11


def test_a_clear_decode_that_is_preempted_begins_anew() -> None:
    bench = Bench()
    a, b = bench.add(3), bench.add(3, first_id=100)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1} and b.num_clear_tokens
    bench.scheduler.preemption.preempt(b)
    assert not b.num_clear_tokens and a.num_clear_tokens
    assert bench.step() == {"a": 1, "b": 1}, "the other tokens are cached"
    assert b.num_launched_tokens == b.num_prefill_tokens and not b.num_clear_tokens
