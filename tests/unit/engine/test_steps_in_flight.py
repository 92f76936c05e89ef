"""How a pipeline is filled: which steps are in flight at once, and their contents."""

from __future__ import annotations

import pytest
from engines.integrity import check_integrity
from fakes.clock import FakeClock
from fakes.runner import FakeRunner, expected_tokens

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_shape import StepShape
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits

BLOCK_SIZE, NUM_BLOCKS = 4, 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Rig:
    """An engine over a simulated pipeline."""

    def __init__(self, num_stages: int, budget: int = 64) -> None:
        self.runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, num_stages=num_stages, num_looks=20)
        limits = EngineLimits(
            NUM_BLOCKS,
            BLOCK_SIZE,
            max_model_len=400,
            max_num_batched_tokens=budget,
            num_stages=num_stages,
        )
        generations = Generations(NUM_BLOCKS)
        self.engine = Engine(
            EngineParts(self.runner, limits, generations, fingerprint="fake", eos_token_ids={7})
        )
        self.tokens: dict[int, list[int]] = {}

    def add(self, index: int, length: int) -> None:
        prompt = tuple(range(index, index + length))
        self.engine.add(Request(f"{index:032x}", 0, prompt, GREEDY))

    def run(self) -> None:
        while self.engine.has_work:
            for token in self.engine.step().tokens:
                index = int(token.key[:32], 16)
                self.tokens.setdefault(index, []).append(token.token_id)
        check_integrity(self.engine)


@pytest.mark.parametrize(("num_stages", "share"), [(2, 4), (3, 3), (4, 2)])
def test_decodes_are_dealt_out_over_the_steps(num_stages: int, share: int) -> None:
    rig = Rig(num_stages)
    for index in range(8):
        rig.add(index, 3)
    rig.run()
    sizes = [len(step) for step in rig.runner.batch_sizes if set(step) == {1}]
    assert max(sizes) == share
    assert rig.runner.most_in_flight == num_stages
    for index in range(8):
        expected = expected_tokens(range(index, index + 3), GREEDY.max_tokens)
        assert rig.tokens[index] == expected


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """The chunks of a prompt fill all stages without waiting, if no chunk gets too small."""
    rig = Rig(4, budget=64)
    rig.add(0, 120)
    rig.engine.step()
    assert rig.runner.most_in_flight == 5  # the next step is queued at the first stage
    rig.run()
    prompts = [step[0] for step in rig.runner.batch_sizes if step[0] > 1]
    assert sum(prompts) == 120
    assert prompts[0] == 30 and max(prompts) == 30 and min(prompts[:-1]) >= 64 // 8


@pytest.mark.parametrize(
    ("base_s", "token_s", "length", "size"),
    [
        (0.0, 1.0, 64, 8),  # short steps have no overhead: the smallest size
        (0.0, 1.0, 320, 8),
        (10.0, 1.0, 64, 32),  # (2 + 1) x 42 s; 16: (4 + 1) x 26, 8: (8 + 1) x 18
        (8.0, 1.0, 320, 64),  # (5 + 1) x 72; 32: (10 + 1) x 40 = 440
        (1e3, 1e-3, 64, 64),  # the time of a step does not depend on its size: one step
    ],
)
def test_the_size_of_steps_is_what_passes_through_soonest(
    base_s: float, token_s: float, length: int, size: int
) -> None:
    rig = Rig(2, budget=64)
    costs = rig.engine._step_costs
    for num_tokens in (8, 64):
        for _ in range(3):
            costs.observe(StepShape(num_prompt_tokens=num_tokens), base_s + token_s * num_tokens)
    rig.add(0, length)
    rig.engine.step()
    assert rig.runner.batch_sizes[0] == [size]


def test_steps_are_as_large_as_prompts_that_come_need_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a burst, the step size follows the size of the prompts that arrive."""
    rig = Rig(2, budget=64)
    costs = rig.engine._step_costs
    for num_tokens in (8, 64):
        for _ in range(3):
            costs.observe(StepShape(num_prompt_tokens=num_tokens), 2.0 + num_tokens)
    monkeypatch.setattr(costs, "observe", lambda *_: None)  # the runner is simulated
    rig.add(0, 330)
    index = 0
    while index < 20:
        rig.engine.step()
        if rig.engine.stats.load().waiting_tokens < 8:
            index += 1
            rig.add(index, 40)
    sizes = [sum(size for size in step if size > 1) for step in rig.runner.batch_sizes]
    rig.run()
    assert sizes[0] == 16
    assert max(sizes[-8:]) == 8


def test_what_was_never_measured_is_not_planned_by() -> None:
    """An engine that has only measured decodes splits prompts as without any measurement."""
    rig = Rig(2, budget=64)
    for num_decodes in (1, 3):
        for _ in range(3):
            rig.engine._step_costs.observe(StepShape(num_decodes=num_decodes, keys=8), 1.0)
    rig.add(0, 60)
    rig.engine.step()
    assert rig.runner.batch_sizes[0] == [30]


def test_what_comes_while_a_step_is_in_flight_fills_the_pipeline() -> None:
    rig = Rig(2)
    rig.add(0, 3)
    coming = [lambda: rig.add(1, 3)]

    def meanwhile() -> bool:
        if not coming:
            return False
        coming.pop()()
        return True

    rig.engine.step(meanwhile)
    assert rig.runner.most_in_flight == 2


@pytest.mark.parametrize(("num_requests", "step_s"), [(1, 0.5), (2, 1.0), (3, 1.0)])
def test_a_step_takes_what_a_stage_does(
    num_requests: int, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is measured from the end of the step before, or from its launch if it runs alone."""
    rig, clock, seen = Rig(2), FakeClock(), list[float]()
    monkeypatch.setattr(rig.engine, "_clock", clock)
    monkeypatch.setattr(
        rig.engine._step_costs, "observe", lambda shape, seconds, _: seen.append(seconds)
    )
    for index in range(num_requests):
        rig.add(index, 3)
    for _ in range(4):
        rig.engine.step()
    rig.runner.on_execute = lambda batch: clock.advance(1.0)
    seen.clear()
    for _ in range(4):
        rig.engine.step()
    assert seen == [pytest.approx(step_s)] * 4


def test_a_promise_counts_the_steps_of_all_stages() -> None:
    rig = Rig(4)
    rig.engine.promise.tbt_target_s = 0.02
    assert rig.engine.promise.target_s == pytest.approx(0.005)
