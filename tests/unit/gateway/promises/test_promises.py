"""How many engines make no promise, and which: with known loads and costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.promises import promises
from baton.gateway.promises.promise_decider import SPAN_S
from baton.gateway.promises.promises import (
    HEAVIER,
    HOLD_S,
    LEAST_GAIN,
    LEAST_PROMPTS,
    MARGIN,
    EnginePromise,
    GoodShares,
    Mix,
    PromiseTarget,
    choose_num_pure,
    plan_moves,
)

# An 8B model on a GPU: 41,000 prompt tokens/s in full steps, 524 decodes within 24 ms; and a model
# whose weights take half of a step that keeps the promise.
COST = StepCost(0.0046, (*(0.0,) * 6, 7.2e-6, *(20.6e-6,) * 3), 9e-10, 3.2e-8, max_rows=8192)
LARGE = replace(COST, base_s=0.012)
TARGET = PromiseTarget(0.024, 1.0, 8192)


def mix(prompt_tokens: float, output_tokens: float, per_s: float, num: float | None = None) -> Mix:
    """A load with that many prompts in the window, by default those that arrive within SPAN_S."""
    context = prompt_tokens + output_tokens / 2
    num = SPAN_S * per_s if num is None else num
    return Mix(prompt_tokens, per_s * prompt_tokens, per_s * output_tokens, context, num)


def test_all_promise_where_prompts_are_few() -> None:
    for wanted in (mix(8192, 256, 2, LEAST_PROMPTS), mix(256, 1024, 12), mix(1024, 512, 10)):
        for now in range(3):
            assert choose_num_pure(COST, wanted, TARGET, 2, 2, now) == 0


def test_full_steps_where_prompts_fill_the_engines() -> None:
    assert choose_num_pure(LARGE, mix(8192, 256, 10), TARGET, 2, 2, 0) == 2


@pytest.mark.parametrize("promise_s", [0.0144, 0.024, 0.048])
def test_a_load_that_steps_beside_decodes_can_take_as_well_moves_nothing(promise_s: float) -> None:
    """No promise moves at any load that two engines serve well with prompts beside decodes."""
    target = replace(TARGET, tbt_s=promise_s, chunk=2048)
    served_well = 0
    for per_s in range(2, 40):
        load = mix(8192, 256, per_s / 2)
        if GoodShares(COST, load, target, 2).expected_share(0) > 0.9:
            served_well += 1
            assert choose_num_pure(COST, load, target, 1, 1, 0) == 0
    assert served_well >= 5


def test_a_load_that_stays_keeps_what_it_chose_though_chance_brings_less() -> None:
    """The decodes fit on one engine, and full steps give first tokens sooner: the choice survives
    random dips of the prompt rate."""
    cost = replace(COST, base_s=0.0041, key_s=3.5e-8, mixed_s=0.7e-3, mixed_pair_s=1e-9)
    target = PromiseTarget(0.0125, 0.5, 2048)
    streams = Mix(5000, 33_000, 6700, 2200, 100)
    assert choose_num_pure(cost, streams, target, 1, 1, 0) == 1
    for part in (1.2, 1.0, 0.9, 0.8):
        fewer = replace(streams, prompt_tokens_per_s=part * 33_000)
        assert choose_num_pure(cost, fewer, target, 1, 1, 1) == 1
    assert choose_num_pure(cost, replace(streams, prompt_tokens_per_s=3000), target, 1, 1, 1) == 0
    assert choose_num_pure(cost, streams, replace(target, ttft_s=5.0), 1, 1, 1) == 0


@given(st.floats(1, 3000))
def test_decodes_between_two_rates_take_what_is_between(outputs_per_s: float) -> None:
    """Rates between two tabulated ones are interpolated without jumps."""
    shares = GoodShares(COST, mix(1024, outputs_per_s, 1.0), TARGET, 1)
    few, more = (shares._mixed_engines(1, times) for times in (1.0, 1.001))
    assert few[0] <= more[0] * 1.0001 and few[1] >= more[1] * 0.9999
    assert more[0] <= few[0] * 1.1 and more[1] >= few[1] * 0.9


def test_decodes_get_all_engines_where_they_fill_them() -> None:
    """Decodes that need all engines get them: 22 requests/s of 1024 tokens are 540 decodes in steps
    of 24 ms."""
    for per_s in (22, 26, 32):
        assert choose_num_pure(COST, mix(256, 1024, per_s), TARGET, 1, 1, 1) == 0


def test_chance_in_what_arrives_moves_nothing_to_and_fro() -> None:
    """Hysteresis: a move persists down to half of the change that would reverse it."""
    entered = next(
        per_s / 10
        for per_s in range(10, 200)
        if choose_num_pure(LARGE, mix(8192, 256, per_s / 10), TARGET, 2, 2, 0)
    )
    for share in (1.0, 0.95, 0.9):
        assert choose_num_pure(LARGE, mix(8192, 256, share * entered), TARGET, 2, 2, 2) > 0
    assert choose_num_pure(LARGE, mix(8192, 256, 0.85 * entered / HEAVIER), TARGET, 2, 2, 2) == 0


def test_a_heavier_load_has_more_decodes_too() -> None:
    """One engine could decode the measured load, but not one that is a tenth heavier."""
    cost = replace(COST, mixed_s=2.5e-3, mixed_pair_s=1e-9)
    load = mix(1024, 512, 31.0)
    shares = GoodShares(cost, load, replace(TARGET, chunk=2048), 2)
    assert shares.share(1) > 0.99 and shares.share(1, 1.1) < 0.5
    assert shares.expected_share(1) < 0.9
    assert choose_num_pure(cost, load, replace(TARGET, chunk=2048), 1, 1, 0) == 0


def test_fewer_prompts_tell_less() -> None:
    """Fewer observed prompts give a less certain estimate of the same load."""
    few, many = (GoodShares(LARGE, mix(8192, 256, 4.0, num), TARGET, 2) for num in (4, 10_000))
    assert many.expected_share(1) == pytest.approx(many.share(1), abs=0.01)
    assert few.expected_share(1) < many.expected_share(1) - 0.02


@pytest.mark.parametrize("prompt_tokens", [512, 2048, 8192])
def test_full_steps_are_those_of_whole_prompts(prompt_tokens: int) -> None:
    """The throughput in full steps is that of whole prompts: one over several steps, or several in
    one."""
    chunk, seconds = 2048, 0.0
    for context in range(0, prompt_tokens, chunk):
        step = StepShape()
        for _ in range(max(1, chunk // prompt_tokens)):
            step = step.with_prompt(min(chunk, prompt_tokens), context)
        seconds += COST.seconds(step)
    wanted = mix(prompt_tokens, 256, 4)
    per_s = promises._pure_tokens_per_s(COST, wanted, PromiseTarget(0.024, 1.0, chunk))
    assert per_s == pytest.approx(max(prompt_tokens, chunk) / seconds, rel=0.01)


def test_nobody_to_decode_for_or_nobody_to_move() -> None:
    heavy = mix(8192, 256, 14)
    assert choose_num_pure(COST, heavy, TARGET, 3, 0, 2) == 0
    assert choose_num_pure(COST, heavy, TARGET, 0, 3, 0) == 0


loads = st.builds(
    mix, st.floats(1, 100_000), st.floats(1, 4000), st.floats(0.01, 1000), st.floats(1, 1000)
)  # fmt: skip
costs = st.sampled_from([COST, LARGE])
targets = st.builds(
    PromiseTarget,
    st.sampled_from([0.0144, 0.024, 0.048]),
    st.sampled_from([0.5, 2.0]),
    st.just(2048),
)
_FEW = Mix(8192, 2.5 * 8192, 2.5 * 16, 8200, num_prompts=2)


@given(costs, targets, loads, st.integers(1, 6), st.integers(1, 6), st.integers(0, 6))
@example(LARGE, PromiseTarget(0.0144, 2.0, 2048), _FEW, 1, 1, 0)
@example(LARGE, PromiseTarget(0.0144, 2.0, 2048), mix(8192, 64, 7.0), 2, 2, 0)
def test_the_same_load_moves_nothing_to_and_fro(
    cost: StepCost, target: PromiseTarget, load: Mix, num_movable: int, num_others: int, now: int
) -> None:
    share = GoodShares(cost, load, target, num_movable + num_others).share(min(now, num_movable))
    assert 0 <= share <= 1
    seen = [min(now, num_movable)]
    while len(seen) < 2 or seen[-1] != seen[-2]:
        seen.append(choose_num_pure(cost, load, target, num_movable, num_others, seen[-1]))
        assert 0 <= seen[-1] <= num_movable
        assert len(seen) <= 3 + num_movable
    ups = [before < after for before, after in pairwise(seen)]
    assert sum(ups) <= 1, "it goes on to fewer, or once to more"


def test_all_promise_again_where_nothing_helps() -> None:
    """All engines promise again if prompts take longer than the wanted TTFT under any choice."""
    rare = mix(32_768, 256, 0.02, LEAST_PROMPTS)
    assert choose_num_pure(COST, rare, replace(TARGET, chunk=2048), 1, 1, 1) == 0


def test_the_first_prompts_after_a_pause_change_nothing() -> None:
    """Few prompts after a pause would be served by engines that all promise: they change
    nothing."""
    for num_prompts, wanted in ((3, 1), (8, 1), (LEAST_PROMPTS, 0)):
        first = mix(8192, 256, num_prompts / SPAN_S)
        assert choose_num_pure(COST, first, TARGET, 1, 1, 1) == wanted


@given(loads, st.integers(1, 4))
def test_more_engines_are_no_worse(load: Mix, num_mixed: int) -> None:
    fewer = GoodShares(COST, load, TARGET, num_mixed).share(0)
    assert GoodShares(COST, load, TARGET, num_mixed + 1).share(0) >= fewer - 0.01


many_loads = st.builds(
    mix, st.floats(64, 20_000), st.floats(16, 2000), st.floats(1, 4000)
)  # fmt: skip


@given(costs, many_loads, st.integers(24, 80), st.integers(1, 80), st.integers(0, 80))
@example(COST, mix(8192, 256, 448.0), 64, 64, 0)
@example(LARGE, mix(8192, 256, 330.0), 64, 64, 0)
def test_of_many_engines_not_all_numbers_are_tried(
    cost: StepCost, load: Mix, num_movable: int, num_others: int, now: int
) -> None:
    shares, now = GoodShares(cost, load, TARGET, num_movable + num_others), min(now, num_movable)
    best = max(shares.expected_share(count, MARGIN) for count in range(num_movable + 1))
    chosen = choose_num_pure(cost, load, TARGET, num_movable, num_others, now)
    if best >= shares.expected_share(now) + LEAST_GAIN + 0.01:
        assert shares.expected_share(chosen, MARGIN) >= best - 0.01


def test_many_engines_follow_a_load_that_few_would() -> None:
    assert choose_num_pure(LARGE, mix(8192, 256, 330.0), TARGET, 64, 64, 0) > 32


def promise(name: str, *, promises: bool, age_s: float = 60.0, decodes: int = 0) -> EnginePromise:
    return EnginePromise(name, promises, 100.0 - age_s, decodes)


def test_the_fewest_decodes_go_first() -> None:
    engines = [promise(n, promises=True, decodes=d) for n, d in (("a", 5), ("b", 0), ("c", 2))]
    assert plan_moves(engines, 2, 100.0) == {"b": False, "c": False}
    assert plan_moves(engines, 0, 100.0) == {}


@pytest.mark.parametrize("must_serve", [False, True])
def test_a_promise_stays_a_while_unless_nobody_else_decodes(must_serve: bool) -> None:
    engines = [promise("a", promises=False, age_s=HOLD_S - 0.1), promise("b", promises=True)]
    moves = plan_moves(engines, 0, 100.0, must_serve=must_serve)
    assert moves == ({"a": True} if must_serve else {})
    assert plan_moves(engines, 0, 100.2) == {"a": True}
