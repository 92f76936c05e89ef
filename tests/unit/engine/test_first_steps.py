"""Steps measured before the first request, on runners with known step times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines.integrity import check_integrity
from fakes.clock import FakeClock
from fakes.gateway.step_costs import linear_cost, mixture_s
from fakes.runner import FakeRunner

from baton.core.step_shape import StepShape, pairs_of
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits

BLOCK_SIZE = 16
LINEAR_S = linear_cost(0.004, 20e-6).seconds


class TimedRunner(FakeRunner):
    """Its steps take `seconds`, on a clock that they advance; it records their shapes."""

    def __init__(
        self, num_blocks: int, clock: FakeClock, seconds: Callable[[StepShape], float]
    ) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, vocab_size=50)
        self.clock, self.seconds = clock, seconds
        self.shapes: list[StepShape] = []
        self.most_slices = 0
        self.blocks: set[int] = set()

    def launch(self, batch: list[SequenceSlice]) -> _Done:  # type: ignore[override]
        ones = [part for part in batch if len(part.token_ids) == 1]
        prompts = [part for part in batch if len(part.token_ids) > 1]
        shape = StepShape(
            sum(len(part.token_ids) for part in prompts),
            sum(pairs_of(len(part.token_ids), part.start) for part in prompts),
            len(ones),
            sum(part.start + 1 for part in ones),
        )
        for part in batch:
            num_slots = part.start + len(part.token_ids)
            assert num_slots <= len(part.block_table) * BLOCK_SIZE
            self.blocks.update(part.block_table)
        self.shapes.append(shape)
        self.most_slices = max(self.most_slices, len(batch))
        self.clock.advance(self.seconds(shape))
        return _Done()


class _Done:
    device_s = None

    def collect(self) -> list[None]:
        return []


def measured(
    budget_s: float,
    seconds: Callable[[StepShape], float] = LINEAR_S,
    **options: int,
) -> tuple[Engine, TimedRunner, float]:
    clock = FakeClock()
    num_blocks = options.pop("num_blocks", 8000)
    runner = TimedRunner(num_blocks, clock, seconds)
    limits = EngineLimits(num_blocks, BLOCK_SIZE, **({"max_model_len": 8192} | options))
    generations = Generations(num_blocks)
    engine = Engine(EngineParts(
        runner, limits, generations, fingerprint="f", eos_token_ids=(), clock=clock
    ))  # fmt: skip
    return engine, runner, engine.measure_first_steps(budget_s)


@pytest.mark.parametrize("seconds", [LINEAR_S, mixture_s])
def test_the_first_heartbeat_has_what_steps_take(seconds: Callable[[StepShape], float]) -> None:
    engine, runner, took_s = measured(10.0, seconds)
    cost = engine.stats.step_cost()
    assert cost is not None and cost.max_rows == 2048 and took_s < 10.0
    decodes = [StepShape(num_decodes=n, keys=n * 1000) for n in (1, 2, 6, 12, 20, 40, 200)]
    for shape in (StepShape(1000, pairs_of(1000, 0)), *decodes):
        assert cost.seconds(shape) == pytest.approx(seconds(shape), rel=0.05)
    assert min(runner.blocks) == NUM_RESERVED_BLOCKS
    check_integrity(engine)
    assert engine.pool.num_available == engine.limits.capacity, "no block was taken"
    assert engine.stats.totals().num_prompt_tokens == 0


@pytest.mark.parametrize("budget_s", [0.25, 1.5])
@pytest.mark.parametrize("token_s", [2e-5, 2e-3, 2e-1])
def test_it_takes_no_longer_than_it_may(budget_s: float, token_s: float) -> None:
    """The measurement keeps within its budget, except for the first step of a size."""
    _, runner, took_s = measured(budget_s, linear_cost(0.004, token_s).seconds)
    assert took_s <= budget_s or len(set(runner.shapes)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 4},
        {"max_model_len": 64},
        {"max_num_seqs": 1, "max_num_batched_tokens": 16},
        {"max_num_seqs": 16},
        {"prefill_chunk_tokens": 8192},
    ],
)
def test_small_engines_run_what_fits(options: dict[str, int]) -> None:
    engine, runner, _ = measured(10.0, **options)
    limits = engine.limits
    assert runner.most_slices <= limits.max_num_seqs
    for shape in runner.shapes:
        assert shape.num_prompt_tokens <= limits.prompt_step_tokens
    assert not runner.blocks or max(runner.blocks) < limits.num_blocks
