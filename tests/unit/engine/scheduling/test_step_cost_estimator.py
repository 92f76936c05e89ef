"""The measured cost of steps, against simulated devices with noise and outliers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fakes.gateway.step_costs import mixture_s
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.engine.scheduling.costs.step_cost_estimator import StepCostEstimator

STEP_S, TOKEN_S = 0.008, 45e-6


def prompt(num_tokens: int, context: int = 0) -> StepShape:
    return StepShape().with_prompt(num_tokens, context)


def _beside(num_tokens: int) -> StepShape:
    """A chunk of a prompt beside eight decodes."""
    return StepShape(num_decodes=8, keys=8000).with_prompt(num_tokens, 1000)


def linear_s(shape: StepShape) -> float:
    return STEP_S + shape.num_rows * TOKEN_S


def gpu_s(shape: StepShape) -> float:
    """Roughly an 8B model: bound by reading weights (4.2 ms) or by arithmetic."""
    products_s = max(4.2e-3, 21e-6 * shape.num_rows)
    return 0.3e-3 + products_s + 9.5e-10 * shape.pairs + 3.1e-8 * shape.keys


def dear_s(shape: StepShape) -> float:
    is_mixed = shape.num_decodes and shape.num_prompt_tokens
    return mixture_s(shape) + (0.0025 if is_mixed else 0.0)


def any_shape(chance: random.Random, kinds: str) -> StepShape:
    kind, decodes = chance.choice(kinds), StepShape()
    if kind != "p":
        num_decodes = chance.randint(1, 256)
        decodes = StepShape(num_decodes=num_decodes, keys=num_decodes * chance.randint(100, 4000))
    if kind == "d":
        return decodes
    largest = 13 if kind == "p" else 10
    return decodes.with_prompt(int(2 ** chance.uniform(3, largest)), chance.randint(0, 8192))


def played(
    shapes: list[StepShape],
    device: Callable[[StepShape], float] = linear_s,
    *,
    noise: float = 0.0,
    outliers: float = 0.0,
) -> StepCostEstimator:
    chance, estimator = random.Random(3), StepCostEstimator()
    estimator.observe(shapes[0], 9.0)  # the first step compiles
    for shape in shapes:
        seconds = device(shape) * (1 + noise * chance.uniform(-1, 1))
        estimator.observe(shape, seconds + (chance.random() < outliers) * 2.0)
        estimator.estimate()
    return estimator


def p90_error(
    cost: StepCost | None, device: Callable[[StepShape], float], shapes: list[StepShape]
) -> float:
    assert cost is not None
    return sorted(abs(cost.seconds(s) / device(s) - 1) for s in shapes)[len(shapes) * 9 // 10]


@pytest.mark.parametrize("device", [gpu_s, mixture_s])
@pytest.mark.parametrize("kinds", ["p", "d", "pd", "pdm"])
def test_what_was_seen_is_predicted_within_a_tenth(
    kinds: str, device: Callable[[StepShape], float]
) -> None:
    chance = random.Random(1)
    seen = [any_shape(chance, kinds) for _ in range(2000)]
    estimator = played(seen, device, noise=0.05, outliers=0.03)
    others = [any_shape(chance, kinds) for _ in range(500)]
    assert p90_error(estimator.estimate(), device, others) < 0.1
    assert estimator.relative_error is not None and estimator.relative_error < 0.15


def test_prompts_alone_and_decodes_alone_say_what_both_take_together() -> None:
    chance = random.Random(2)
    estimator = played([any_shape(chance, "pd") for _ in range(2000)], gpu_s, noise=0.05)
    mixed = [any_shape(chance, "m") for _ in range(500)]
    assert p90_error(estimator.estimate(), gpu_s, mixed) < 0.1


def test_what_lies_between_two_sizes_is_on_the_line_between_them() -> None:
    cost = played([StepShape(num_decodes=n) for n in (8, 64)] * 4).estimate()
    assert cost is not None
    for shape in (StepShape(num_decodes=n) for n in (1, 16, 32, 48)):
        assert cost.seconds(shape) == pytest.approx(linear_s(shape))


def test_a_few_rows_behind_a_knot_say_nothing_of_the_slope_there() -> None:
    """The shapes of an engine's first steps: mixed steps take longer than the sum of their parts,
    and the largest, of 528 rows, is mixed; it must not set the slope beyond 512 rows."""
    decodes = [StepShape(num_decodes=n, keys=n * 256) for n in (1, 16, 64, 128, 256)]
    beside = [StepShape(num_decodes=16, keys=16_384).with_prompt(n, 0) for n in (64, 256, 512)]
    shapes = [*decodes, *map(prompt, (16, 64, 128, 256, 512)), prompt(512, 4096), *beside]
    cost = played(shapes * 5, dear_s).estimate()
    assert cost is not None
    assert cost.seconds(prompt(2048)) == pytest.approx(dear_s(prompt(2048)), rel=0.2)


@pytest.mark.parametrize(("step_s", "pair_s"), [(0.0025, 0.0), (0.0, 1e-9), (0.001, 1e-9)])
def test_what_both_kinds_take_in_one_step_is_told_apart(step_s: float, pair_s: float) -> None:
    """The extra cost of mixed steps is estimated apart from that of their decodes and prompts."""

    def device(shape: StepShape) -> float:
        is_mixed = bool(shape.num_decodes and shape.num_prompt_tokens)
        return mixture_s(shape) + is_mixed * (step_s + pair_s * shape.pairs)

    chance = random.Random(5)
    seen = [any_shape(chance, "pdm") for _ in range(2000)]
    cost = played(seen, device, noise=0.03).estimate()
    for kind in "pdm":
        others = [any_shape(chance, kind) for _ in range(300)]
        assert p90_error(cost, device, others) < 0.05


@pytest.mark.parametrize("device", [gpu_s, mixture_s])
def test_prompts_seen_beside_decodes_alone_say_what_they_take_without(
    device: Callable[[StepShape], float],
) -> None:
    """The cost of prompts alone is estimated even if all were seen beside decodes, as in an engine
    that serves whole requests: pair costs are not attributed to mixing just because no prompt was
    alone."""
    chance = random.Random(1)
    seen = [any_shape(chance, "dm") for _ in range(2000)]
    others = [any_shape(chance, "p") for _ in range(300)]
    cost = played(seen, device, noise=0.05).estimate()
    assert p90_error(cost, device, others) < 0.08


def test_it_is_absent_before_there_are_samples_of_two_sizes() -> None:
    assert StepCostEstimator().estimate() is None
    large, small = prompt(2048), prompt(16)
    assert played([large] * 100).estimate() is None
    assert played([prompt(n) for n in (2000, 2048, 2200)] * 30).estimate() is None
    assert played([large] * 100 + [small]).estimate() is None, "one is no sample"
    assert played([large] * 100 + [small] * 3).estimate() is not None


def test_without_an_estimate_steps_like_those_seen_are_known() -> None:
    estimator = played([prompt(2048)] * 3)
    assert estimator.estimate() is None
    assert estimator.expected_s(prompt(2048)) == pytest.approx(linear_s(prompt(2048)))
    assert estimator.expected_s(prompt(16)) is None


def test_bulk_prompts_of_one_size_do_not_displace_the_others() -> None:
    cost = played([prompt(16)] * 5 + [prompt(2048)] * 1000).estimate()
    for num_tokens in (16, 2048):
        shape = prompt(num_tokens)
        assert cost is not None and cost.seconds(shape) == pytest.approx(linear_s(shape), rel=0.02)


def test_it_follows_a_device_that_becomes_slower() -> None:
    estimator, shapes = StepCostEstimator(), [prompt(n) for n in (16, 500, 2048)]
    for factor in (1, 2):
        for shape in shapes * 60:
            estimator.observe(shape, factor * linear_s(shape))
            estimator.estimate()
    assert p90_error(estimator.estimate(), lambda s: 2 * linear_s(s), shapes) < 0.05


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9000), st.integers(0, 300), st.integers(0, 9000), st.floats(0, 10)
        ),
        max_size=60,
    )
)
def test_it_is_never_negative(samples: list[tuple[int, int, int, float]]) -> None:
    estimator = StepCostEstimator()
    for num_tokens, num_decodes, context, seconds in samples:
        decodes = StepShape(num_decodes=num_decodes, keys=num_decodes * context)
        if num_tokens + num_decodes:
            estimator.observe(decodes.with_prompt(num_tokens, context), seconds)
    cost = estimator.estimate()
    if cost is not None:
        parts = (cost.base_s, *cost.row_s, cost.pair_s, cost.key_s)
        assert min(*parts, cost.mixed_s, cost.mixed_pair_s) >= 0


def test_how_much_longer_mixed_steps_take_than_expected_is_known() -> None:
    chance = random.Random(5)
    shapes = [any_shape(chance, "pdm") for _ in range(600)]

    def device(shape: StepShape) -> float:
        """A third of the mixed steps takes a fifth longer."""
        is_longer = shape.num_decodes and shape.num_prompt_tokens and shape.pairs % 3 == 0
        return linear_s(shape) * (1.2 if is_longer else 1.0)

    assert 1.1 < played(shapes, device).overruns.factor() < 1.35
    assert played(shapes, linear_s).overruns.factor() < 1.03
    assert played(shapes, linear_s, outliers=0.03).overruns.factor() < 1.03, (
        "to plan less avoids no pause"
    )


@pytest.mark.parametrize("num_mixed", [12, 40, 256])
def test_one_pause_is_none_of_few_steps_either(num_mixed: int) -> None:
    """One pause among few steps raises no overrun factor, neither the general one nor that of its
    size, and neither does a first step that compiles."""
    estimator = StepCostEstimator()
    shapes = [prompt(16), prompt(2048)] * 70 + [_beside(n) for n in (64, 256, 512, 700)] * 64
    num_before = 140
    estimator.observe(_beside(64), 9.0)
    for number, shape in enumerate(shapes[: num_before + num_mixed]):
        pause_s = 0.05 if number == num_before + num_mixed // 2 else 0.0
        estimator.observe(shape, linear_s(shape) + pause_s)
        estimator.estimate()
    for shape in [prompt(16)] * 130:
        estimator.observe(shape, linear_s(shape))
        estimator.estimate()
    assert estimator.overruns.factor() < 1.02
    assert all(estimator.overruns.factor(n + 8) < 1.02 for n in (64, 256, 512, 700))


def test_what_many_steps_have_is_no_pause() -> None:
    chance = random.Random(6)
    shapes = [any_shape(chance, "pdm") for _ in range(600)]
    assert played(shapes, linear_s, outliers=0.3).overruns.factor() == 1.5


def test_an_overrun_is_of_what_is_expected_now() -> None:
    """A device that becomes slower has overruns only until its new costs are learned."""
    chance = random.Random(7)
    shapes = [_beside(n) for n in (64, 256, 512)] * 90
    estimator = StepCostEstimator()
    for factor in (1, 1.4):
        for shape in shapes:
            estimator.observe(shape, factor * linear_s(shape) * (1 + chance.uniform(0, 0.01)))
            estimator.estimate()
    assert estimator.overruns.factor() < 1.05


def test_steps_of_one_size_have_their_own() -> None:
    """Each step size has its own overrun factor: steps of 520 rows take a tenth less than a smooth
    estimate, the others do not."""
    chance = random.Random(8)
    shapes = [_beside(chance.choice((100, 300, 512, 700, 900))) for _ in range(800)]
    estimator = played(shapes, lambda s: linear_s(s) * (0.9 if s.num_rows == 520 else 1.0))
    assert estimator.overruns.factor(520) < 0.97
    assert estimator.overruns.factor(708) > 0.97
    assert estimator.overruns.factor(33) == estimator.overruns.factor() >= 1.0, (
        "nothing of that size was seen"
    )
