"""Steps that keep a promise to their decodes, with known costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fakes.gateway.step_costs import linear_cost
from fakes.scheduler_bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import KNOTS, LEAST_PROMPT_TOKENS, StepCost
from baton.core.step_shape import StepShape
from baton.engine.scheduling.step_promise import OUTLASTING, promised_tokens

STEP_S, TOKEN_S = 0.004, 20e-6
COST = linear_cost(STEP_S, TOKEN_S)
slopes = st.floats(0, 1e-4, allow_subnormal=False)
costs = st.builds(
    StepCost,
    base_s=slopes,
    row_s=st.tuples(*[slopes] * len(KNOTS)),
    key_s=slopes,
    max_rows=st.integers(0, 9000),
)
shapes = st.builds(StepShape, num_decodes=st.integers(0, 300), keys=st.integers(0, 100_000))


def bench(monkeypatch: pytest.MonkeyPatch, target_s: float | None, **fields: Any) -> Bench:
    made = Bench(**({"capacity": 2000, "budget": 512} | fields))
    made.scheduler.promise.tbt_target_s = target_s
    monkeypatch.setattr(made.scheduler.promise._step_costs, "estimate", lambda: COST)
    return made


def step_s(planned: dict[str, int]) -> float:
    return COST.seconds(StepShape(sum(planned.values())))


@pytest.mark.parametrize("num_decodes", [1, 4])
@pytest.mark.parametrize("target_s", [0.005, 0.008, 0.012])
def test_prompts_take_what_the_promise_leaves(
    monkeypatch: pytest.MonkeyPatch, num_decodes: int, target_s: float
) -> None:
    made = bench(monkeypatch, target_s)
    for index in range(num_decodes):
        made.add(4, first_id=100 * index)
    made.step()
    made.add(900, first_id=5000)
    made.add(300, first_id=9000)
    num_steps = 0
    while any(sequence.is_prefilling or not sequence.block_ids for sequence in made.sequences):
        planned = made.step()
        assert step_s(planned) <= target_s + 1e-9
        num_steps += 1
    room = int((target_s - STEP_S) / TOKEN_S)
    fewest = -(-1200 // min(512, room))
    assert fewest <= num_steps <= fewest + 4, "and all of it"


def test_the_strictest_request_that_decodes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(monkeypatch, 0.012)
    strict = made.add(4)
    made.step()
    made.add(900, first_id=5000)
    for target_ms, promise_s in [(0.001, 0.006), (8.0, 0.008), (5.0, 0.006)]:
        sampling = dataclasses.replace(strict.request.sampling, tbt_target_ms=target_ms)
        strict.request = dataclasses.replace(strict.request, sampling=sampling)
        assert made.scheduler.promise.target_s == promise_s, "half of the engine's own at least"
    assert step_s(made.step()) == pytest.approx(0.006)
    made.scheduler.remove(strict)
    assert made.scheduler.promise.target_s == 0.012
    strict = made.new(900, is_held=True, first_id=9000)
    strict.request = dataclasses.replace(strict.request, sampling=sampling)
    made.scheduler.add(strict)
    for _ in range(3):
        made.step()
    assert strict in made.scheduler.queues.running
    assert made.scheduler.promise.target_s == 0.012, "it decodes elsewhere"


def test_without_decodes_there_is_no_promise_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(monkeypatch, 0.005)
    made.add(900)
    assert made.step() == {"a": 512}


def test_without_a_promise_steps_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(monkeypatch, None)
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert made.step() == {"a": 1, "b": 511}


def test_a_promise_that_cannot_be_kept_lets_prompts_get_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = bench(monkeypatch, 0.001)
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert made.step() == {"a": 1, "b": LEAST_PROMPT_TOKENS}


def test_nothing_is_taken_for_granted_before_steps_were_measured() -> None:
    made = Bench(capacity=2000, budget=512)
    made.scheduler.promise.tbt_target_s = 10.0
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert made.step() == {"a": 1, "b": LEAST_PROMPT_TOKENS}


def test_steps_of_decodes_that_outlast_the_promise_are_a_bounded_time_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = bench(monkeypatch, 0.005)
    decoding = made.add(4)
    made.step()
    made.scheduler.promise.is_promising = False
    made.add(1500, first_id=5000)
    promise = made.scheduler.promise
    assert promise.promised_s == promise.target_s == 0.005, "they have it until most are moved"
    promise.observe(0.7)
    assert step_s(made.step()) == pytest.approx(0.005)
    promise.observe(0.1)
    assert (promise.promised_s, promise.target_s) == (0.005, 0.005 * OUTLASTING)
    assert step_s(made.step()) == pytest.approx(0.005 * OUTLASTING)
    made.scheduler.remove(decoding)
    assert made.scheduler.promise.target_s is not None, "the other will decode here too"
    assert sum(made.step().values()) == 512, "and prompts alone are computed in full steps"
    promise.is_promising = True
    promise.observe(0.01)
    promise.is_promising = False
    assert promise.target_s == 0.005, "and so after each withdrawal"


def test_a_step_of_all_that_will_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(monkeypatch, 0.008)
    for index in range(3):
        made.add(10, first_id=100 * index)
    made.step()
    waiting = made.add(40, first_id=1000)
    shape = made.scheduler.promise.step_with(waiting.request, 2)
    known = sum(one.num_tokens for one in made.sequences)
    assert shape == StepShape(num_decodes=7, keys=known + 3 * 40)


@pytest.mark.parametrize(("target_s", "rows"), [(0.012, 384), (0.0064, 120), (0.006, 64)])
def test_a_step_fills_the_graph_that_it_is_padded_to(
    monkeypatch: pytest.MonkeyPatch, target_s: float, rows: int
) -> None:
    """The promise allows 400, 120 or 100 rows: a step takes the largest graph size within that. A
    step above the largest graph uses none, and one below the smallest is padded to it."""
    sizes = (128, 256, 384, 512) if rows == 120 else (64, 128, 256, 384, 512)
    made = bench(monkeypatch, target_s, graph_rows=sizes)
    for index in range(4):
        made.add(4, first_id=100 * index)
    made.step()
    made.add(900, first_id=5000)
    assert sum(made.step().values()) == rows


def test_a_step_beyond_the_largest_graph_is_as_large_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = bench(monkeypatch, 0.012, graph_rows=(64, 128))
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert sum(made.step().values()) == 400


@pytest.mark.parametrize(("launch_s", "rows"), [(0.004, 400), (0.009, 256), (0.1, 256)])
def test_a_step_is_in_a_graph_where_its_launch_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, launch_s: float, rows: int
) -> None:
    """A step whose launch takes too long is limited to a graph: there are graphs with more rows,
    but none with more prompt tokens."""
    made = bench(monkeypatch, 0.012, graph_rows=(64, 128, 256, 384, 512), graph_prompt_tokens=300)
    costs = made.scheduler.promise._step_costs
    costs.observe_launch(StepShape(num_prompt_tokens=500), launch_s)
    made.scheduler.promise.in_front_s = 0.0044
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert sum(made.step().values()) == rows


@pytest.mark.parametrize(
    ("overruns", "rows"),
    [
        ({512: 1.0}, 384),
        ({512: 0.8}, 512),
        ({512: 0.9}, 384),
        ({384: 1.2}, 256),
        ({384: 1.2, 256: 1.6, 128: 9.0, 64: 9.0}, 64),  # the smallest size of a step with a prompt
    ],
)
def test_what_steps_of_a_graph_took_decides_about_it(
    monkeypatch: pytest.MonkeyPatch, overruns: dict[int, float], rows: int
) -> None:
    """The estimate allows 400 rows; known overruns of some graph sizes change the choice."""
    made = bench(monkeypatch, 0.012, graph_rows=(64, 128, 256, 384, 512))
    costs = made.scheduler.promise._step_costs
    monkeypatch.setattr(costs.overruns, "_by_rows", overruns)
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert sum(made.step().values()) == rows


def test_what_steps_take_longer_than_expected_is_kept_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = bench(monkeypatch, 0.012)
    monkeypatch.setattr(made.scheduler.promise._step_costs.overruns, "_factor", 1.2)
    made.add(4)
    made.step()
    made.add(900, first_id=5000)
    assert step_s(made.step()) == pytest.approx(0.010, abs=TOKEN_S)


@pytest.mark.parametrize("graph_rows", [(), (16, 32, 64, 96, 128, 256)])
@pytest.mark.parametrize("num_before", [0, 20])
def test_a_prompt_is_cut_by_what_it_sees_of_its_cached_prefix(
    monkeypatch: pytest.MonkeyPatch, num_before: int, graph_rows: tuple[int, ...]
) -> None:
    """A prompt behind a cached prefix gets fewer tokens, as each attends to the prefix; another
    prompt in the same step has no prefix yet."""
    target_s = 0.012
    made = bench(monkeypatch, target_s, graph_rows=graph_rows)
    cost = dataclasses.replace(COST, pair_s=1e-7)
    monkeypatch.setattr(made.scheduler.promise._step_costs, "estimate", lambda: cost)
    cached = made.add(601, first_id=5000)
    made.step()
    made.step()
    made.scheduler.remove(cached)
    made.add(4)
    made.step()
    if num_before:
        made.add(num_before, first_id=100)
    made.add(900, first_id=5000)
    planned = made.step()
    shape = StepShape(num_decodes=1, keys=5)
    if num_before:
        shape = shape.with_prompt(num_before, 0)
        assert planned["c"] == num_before
    num_tokens = planned["cd"[num_before > 0]]
    assert cost.seconds(shape.with_prompt(num_tokens, 600)) <= target_s
    if graph_rows:
        assert sum(planned.values()) == (96 if num_before else 64), "the next takes too long"
    else:
        assert cost.seconds(shape.with_prompt(num_tokens + 1, 600)) > target_s


def test_a_long_prompt_has_what_one_that_passes_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    target_s = 0.02
    made = bench(monkeypatch, target_s)
    cost = dataclasses.replace(COST, pair_s=1e-7)
    monkeypatch.setattr(made.scheduler.promise._step_costs, "estimate", lambda: cost)
    cached = made.add(601, first_id=5000)
    made.step()
    made.step()
    made.scheduler.remove(cached)
    made.add(4)
    made.step()
    made.scheduler.add(made.new(900, first_id=9000, caller_id=1))
    made.step()
    long = made.sequences[-1]
    made.scheduler.add(made.new(720, first_id=5000, caller_id=2))
    context = long.num_computed_tokens
    planned = made.step()
    assert planned["d"] == 120, "it passes"
    shape = StepShape(num_decodes=1, keys=6).with_prompt(120, 600)
    shape = shape.with_prompt(planned.get("c", 0), context)
    assert cost.seconds(shape) <= target_s
    assert made.step()["c"] > 100


@given(costs, shapes, st.floats(0, 0.2), st.integers(1, 3000))
def test_a_promise_never_stops_prompts_nor_takes_many_more_than_were_measured(
    cost: StepCost, beside: StepShape, promise_s: float, most: int
) -> None:
    found = promised_tokens(cost, promise_s, beside, 0, most)
    assert min(LEAST_PROMPT_TOKENS, most) <= found <= max(LEAST_PROMPT_TOKENS, 2 * cost.max_rows)
    if found > LEAST_PROMPT_TOKENS:
        assert cost.seconds(beside.with_prompt(found, 0)) <= promise_s
