"""The scheduler between callers: who goes first, who waits, and that nobody starves."""

from __future__ import annotations

import pytest
from fakes.scheduler_bench import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.scheduling.sequence import Sequence, SequenceState


class CallerBench(Bench):
    """Requests have callers; different requests have different tokens."""

    def of(self, caller_id: int, num_tokens: int, *, is_held: bool = False) -> Sequence:
        first_id = 1000 * len(self.sequences)
        sequence = self.new(num_tokens, is_held=is_held, first_id=first_id, caller_id=caller_id)
        self.scheduler.add(sequence)
        return sequence

    def prefill_step(self) -> dict[str, int]:
        """A step as on a prefill node: sequences with their first token are removed."""
        planned = self.step()
        for sequence in [*self.scheduler.queues.held]:
            self.scheduler.remove(sequence)
        return planned


def test_within_a_caller_nobody_overtakes_and_between_callers_the_least_served_is_next() -> None:
    bench = CallerBench(budget=16)
    for caller_id, num_tokens in [(1, 12), (1, 12), (1, 2), (2, 14), (2, 4)]:
        bench.of(caller_id, num_tokens, is_held=True)
    steps = [bench.prefill_step() for _ in range(5)]
    assert [next(iter(step)) for step in steps[:2]] == ["a", "d"]
    order = [name for step in steps for name in step]
    assert [name for name in order if name in "abc"] == ["a", "b", "c"]
    assert [name for name in order if name in "de"] == ["d", "e"]


def test_a_small_prompt_of_another_caller_goes_before_the_next_chunk() -> None:
    bench = CallerBench(budget=32, capacity=200)
    bench.of(1, 200, is_held=True)
    bench.of(1, 100, is_held=True)
    assert bench.prefill_step() == {"a": 32}
    bench.of(2, 3, is_held=True)
    assert bench.prefill_step() == {"c": 3}, "alone: the chunk would make it wait"
    bench.of(2, 3, is_held=True)
    assert bench.prefill_step() == {"a": 32}, "every other step is the long prompt's"
    assert bench.prefill_step() == {"d": 3}
    assert bench.prefill_step() == {"a": 32}


def test_a_prompt_that_is_not_small_shares_its_step_with_the_chunk() -> None:
    bench = CallerBench(budget=32, capacity=200)
    bench.of(1, 200, is_held=True)
    assert bench.prefill_step() == {"a": 32}
    bench.of(2, 20, is_held=True)
    assert bench.prefill_step() == {"b": 20, "a": 12}


def test_prompts_that_fill_the_step_leave_the_long_one_the_next() -> None:
    bench = CallerBench(budget=32, capacity=200)
    bench.of(1, 200, is_held=True)
    assert bench.prefill_step() == {"a": 32}
    for caller_id in (2, 3, 4):
        bench.of(caller_id, 32, is_held=True)
    assert bench.prefill_step() == {"b": 32}
    assert bench.prefill_step() == {"a": 32}
    assert bench.prefill_step() == {"c": 32}


def test_one_of_several_steps_goes_before_a_much_longer_one() -> None:
    bench = CallerBench(budget=32, capacity=400)
    bench.of(1, 400, is_held=True)
    assert bench.prefill_step() == {"a": 32}
    bench.of(2, 93, is_held=True)
    assert bench.prefill_step() == {"a": 32}, "it has 368 left, less than four times as many"
    bench.of(3, 80, is_held=True)
    assert [bench.prefill_step() for _ in range(5)] == [
        *({"c": 32}, {"a": 32}, {"c": 32}, {"a": 32}),
        {"c": 16, "a": 16},
    ]
    bench.of(4, 40, is_held=True)
    bench.of(5, 20, is_held=True)
    assert bench.prefill_step() == {"e": 20, "a": 12}, "what ends is not begun beside others"


def test_one_that_passes_is_passed_by_what_ends_in_a_step() -> None:
    bench = CallerBench(budget=32, capacity=400)
    bench.of(1, 400, is_held=True)
    bench.prefill_step()
    bench.of(2, 80, is_held=True)
    assert [bench.prefill_step() for _ in range(2)] == [{"b": 32}, {"a": 32}]
    bench.of(3, 20, is_held=True)
    assert bench.prefill_step() == {"c": 20, "b": 12}
    assert bench.prefill_step() == {"a": 32}


def test_a_caller_that_has_had_as_much_waits_for_the_long_prompt() -> None:
    bench = CallerBench(budget=32, capacity=200)
    for caller_id in (1, 2, 2, 2):
        bench.of(caller_id, 60, is_held=True)
    order = [next(iter(bench.prefill_step())) for _ in range(6)]
    assert order == ["a", "a", "b", "b", "c", "c"], "b cannot end in a step: it passes nothing"
    bench.of(1, 90, is_held=True)
    assert bench.prefill_step() == {"e": 32}
    bench.of(2, 20, is_held=True)
    assert bench.prefill_step() == {"e": 32}, "the second caller has had more, and one waits"


def test_one_that_ends_sooner_than_a_light_caller_s_prompt_goes_first() -> None:
    bench = CallerBench(budget=32, capacity=200)
    bench.of(1, 36, is_held=True)
    assert bench.prefill_step() == {"a": 32}
    bench.of(2, 8, is_held=True)
    assert bench.prefill_step() == {"a": 4, "b": 8}, "nor do they wait for each other"


def test_a_small_prompt_does_not_share_its_step_with_a_long_one_that_waits() -> None:
    bench = CallerBench(budget=32, capacity=200)
    bench.of(1, 30, is_held=True)
    bench.of(2, 2, is_held=True)
    bench.of(3, 2, is_held=True)
    assert bench.prefill_step() == {"b": 2, "c": 2}
    bench.of(2, 2, is_held=True)
    assert bench.prefill_step() == {"d": 2, "a": 30}, "it waited for a step"


def test_what_did_not_fit_is_passed_by_no_other_caller() -> None:
    bench = CallerBench(capacity=6)
    first = bench.of(1, 16)
    assert bench.step() == {"a": 16}
    bench.of(1, 16)
    assert bench.step() == {"a": 1}
    bench.of(2, 1)
    bench.of(3, 1)
    assert bench.step() == {"a": 1}, "b waits for memory, and they for b"
    bench.scheduler.remove(first)
    assert list(bench.step()) == ["b"], "c would have fitted all the time"


def test_an_aborted_head_no_longer_keeps_others_back() -> None:
    bench = CallerBench(capacity=6)
    bench.of(1, 16)
    bench.step()
    refused = bench.of(1, 16)
    bench.step()
    bench.of(2, 1)
    bench.scheduler.remove(refused)
    assert refused.state is SequenceState.ENDED
    assert bench.step() == {"a": 1, "c": 1}


def test_a_waiting_request_can_be_aborted_in_the_middle() -> None:
    bench = CallerBench(budget=16)
    _, middle, _ = (bench.of(1, 16, is_held=True) for _ in range(3))
    bench.scheduler.remove(middle)
    assert [bench.prefill_step() for _ in range(3)] == [{"a": 16}, {"c": 16}, {}]
    assert not bench.scheduler.queues.waiting


def test_a_preempted_sequence_comes_before_all_callers() -> None:
    bench = CallerBench(capacity=3, guess=0)
    first = bench.of(1, 4)
    bench.of(1, 4)
    assert bench.step() == {"a": 4, "b": 4}
    bench.of(2, 1)
    assert bench.step() == {"a": 1}
    assert [s.request.request_id for s in bench.scheduler.queues.waiting] == ["b", "c"]
    bench.scheduler.remove(first)
    assert next(iter(bench.step())) == "b"


def test_a_fork_without_room_comes_before_all_callers() -> None:
    bench = CallerBench(max_num_seqs=1)
    parent = bench.of(1, 8)
    bench.step()
    bench.of(2, 1)
    child = bench.new(8, first_id=0)
    child.token_ids.append(7)
    assert bench.scheduler.forks.fork(parent, child) == []
    assert bench.scheduler.queues.waiting.head is child
    bench.scheduler.remove(parent)
    assert bench.step() == {"c": 1}, "the prompt was in the cache"


def test_one_caller_s_service_is_what_was_computed_for_it() -> None:
    bench = CallerBench(budget=64)
    bench.of(1, 24, is_held=True)
    bench.prefill_step()
    bench.scheduler.add(bench.new(28, first_id=0, caller_id=1))
    served = bench.scheduler.queues.waiting.served(1)
    assert bench.scheduler.queues.waiting.total_tokens == 4, "24 are in the cache"
    bench.step()
    assert bench.scheduler.queues.waiting.served(1) == served + 4


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(0, 6)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([0, 64]),
)
@settings(max_examples=60, deadline=None)
def test_every_prompt_ends_and_its_caller_s_prompts_end_in_order(
    arrivals: list[tuple[int, int, int]], chunk: int
) -> None:
    bench = CallerBench(budget=32, capacity=400, chunk=chunk)
    ended: list[Sequence] = []
    num_steps, num_tokens = 0, 0
    for caller_id, length, num_steps_before in arrivals:
        for _ in range(num_steps_before):
            bench.step()
        bench.of(caller_id, length, is_held=True)
        num_tokens += length
    while bench.scheduler.queues.running or bench.scheduler.queues.waiting:
        assert bench.step(), "a step without anything, while something waits"
        ended += [one for one in bench.scheduler.queues.held if one not in ended]
        num_steps += 1
        assert num_steps <= 2 * (num_tokens // 16 + len(arrivals)) + 2
    by_caller: dict[int, list[int]] = {}
    for sequence in ended:
        by_caller.setdefault(sequence.request.caller_id, []).append(sequence.arrival)
    assert all(arrivals == sorted(arrivals) for arrivals in by_caller.values())


@pytest.mark.parametrize("chunk", [0, 64])
def test_endless_small_prompts_leave_a_long_one_every_other_step(chunk: int) -> None:
    bench = CallerBench(budget=32, capacity=400, chunk=chunk)
    a = bench.of(0, 300, is_held=True)
    num_steps = 0
    while a.state is not SequenceState.HELD:
        bench.sequences.clear()
        bench.of(1 + num_steps, 3, is_held=True)
        bench.step()
        num_steps += 1
    assert num_steps <= 2 * -(-300 // 29) + 2
