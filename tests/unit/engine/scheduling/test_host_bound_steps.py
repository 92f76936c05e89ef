"""Steps whose launch on the host takes longer than their computation on the device, on a simulated
clock: the learned step costs are right, and a promise is kept.

A step with more than GRAPH_TOKENS of prompts is launched kernel by kernel. Meanwhile the previous
step ends, and no poll sees it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from fakes.timed_device import TimedDevice, TimedStep

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape, pairs_of
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits

COST = StepCost(0.007, (*(4e-6,) * 7, *(20e-6,) * 3), 0.0, 1e-7)
GRAPH_ROWS, GRAPH_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1152, 1280), 1024
GRAPH_S, KERNELS_S, LOOK_S = 0.002, 0.046, 0.0005
PROMISE_S, RATE, SECONDS = 0.048, 10.0, 12.0


def shape_of(batch: Sequence[SequenceSlice]) -> StepShape:
    shape = StepShape()
    for one in batch:
        if len(one.token_ids) > 1:
            shape = shape.with_prompt(len(one.token_ids), one.start)
        else:
            num_decodes, keys = shape.num_decodes + 1, shape.keys + one.start + 1
            shape = replace(shape, num_decodes=num_decodes, keys=keys)
    return shape


@dataclass
class Device(TimedDevice):
    kernels_s: float = 0.0

    def cost_s(self, batch: Sequence[SequenceSlice]) -> float:
        return COST.seconds(shape_of(batch))

    def launch_s(self, batch: Sequence[SequenceSlice]) -> float:
        return GRAPH_S if shape_of(batch).num_prompt_tokens <= GRAPH_TOKENS else self.kernels_s


def engine_on(device: Device) -> Engine:
    limits = EngineLimits(
        60_000, 16, 4096, 256, graph_rows=GRAPH_ROWS, graph_prompt_tokens=GRAPH_TOKENS
    )
    return Engine(EngineParts(
        device, limits, Generations(60_000), fingerprint="m", eos_token_ids=(),
        enable_prefix_caching=False, clock=device,
    ))  # fmt: skip


def run(kernels_s: float, *, promise_s: float | None) -> tuple[Engine, list[float]]:
    """Serve requests for SECONDS; returns the engine and the times between steps with tokens."""
    chance, device = random.Random(1), Device(kernels_s=kernels_s)
    engine = engine_on(device)
    engine.promise.tbt_target_s = promise_s
    due_s, coming = 0.0, deque[tuple[float, Request]]()
    while due_s < SECONDS:
        due_s += chance.expovariate(RATE)
        num_tokens = min(2000, int(chance.lognormvariate(5.5, 1.2)) + 4)
        params = SamplingParams(max_tokens=chance.randint(20, 400), temperature=0.0)
        coming.append((due_s, Request(f"{len(coming)}", 0, (1,) * num_tokens, params)))

    def take() -> bool:
        came = False
        while coming and coming[0][0] <= device.now_s:
            engine.add(coming.popleft()[1])
            came = True
        return came

    def meanwhile() -> bool:
        device.now_s = device.next_look_s(LOOK_S)
        return take()

    gaps_s, last_s = [], 0.0
    while coming or engine.has_work:
        if not engine.has_work:
            device.now_s, last_s = max(device.now_s, coming[0][0]), 0.0
            take()
        output = engine.step(meanwhile)
        if output.tokens:
            if last_s:
                gaps_s.append(device.now_s - last_s)
            last_s = device.now_s
    return engine, gaps_s


@pytest.mark.parametrize("promise_s", [None, PROMISE_S])
@pytest.mark.parametrize("kernels_s", [0.010, KERNELS_S])
def test_what_is_learned_of_steps_is_what_they_take(
    kernels_s: float, promise_s: float | None
) -> None:
    engine, _ = run(kernels_s, promise_s=promise_s)
    cost = engine.stats.step_cost()
    assert cost is not None
    for num_tokens in (0, 200, 700):
        shape = StepShape(num_tokens, pairs_of(num_tokens, 0), 20, 20 * 700)
        assert cost.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.15)


def test_steps_that_each_hide_the_end_of_the_one_before_are_learned_too() -> None:
    """Step costs are learned even if each launch hides the end of the step before: here from long
    prompts alone, which take longer to launch than to compute."""
    device = Device(kernels_s=0.07)
    engine = engine_on(device)

    def meanwhile() -> bool:
        device.now_s = device.next_look_s(LOOK_S)
        return False

    for name, num_prompts, num_tokens, max_tokens in (("a", 8, 100, 40), ("b", 40, 2048, 1)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for index in range(num_prompts):
            engine.add(Request(f"{name}{index}", 0, (1,) * num_tokens, params))
        while engine.has_work:
            engine.step(meanwhile)
    cost = engine.stats.step_cost()
    assert cost is not None
    shape = StepShape(2048, pairs_of(2048, 0))
    assert COST.seconds(shape) < 0.05
    assert cost.seconds(shape) == pytest.approx(0.07, rel=0.1)


@pytest.mark.parametrize("kernels_s", [0.02, 0.028, 0.034, 0.040, KERNELS_S, 0.07])
def test_a_promise_is_kept(kernels_s: float) -> None:
    _, gaps_s = run(kernels_s, promise_s=PROMISE_S)
    assert sum(gap_s > PROMISE_S for gap_s in gaps_s) <= 0.005 * len(gaps_s)


@dataclass
class Behind(Device):
    """A device that starts a step once it is launched; prompts take longer to launch."""

    idle_s: float = 0.0

    def launch_s(self, batch: Sequence[SequenceSlice]) -> float:
        return 0.0043 if shape_of(batch).num_prompt_tokens else 0.0014

    def launch(self, batch: Sequence[SequenceSlice]) -> TimedStep:
        self.now_s += self.launch_s(batch)
        self.idle_s += max(0.0, self.now_s - self.free_s)
        begin_s = max(self.free_s, self.now_s)
        self.free_s = begin_s + self.cost_s(batch)
        self.ends_s.append(self.free_s)
        return TimedStep(self, batch, self.free_s, self.cost_s(batch))


def test_a_prompt_that_joins_decodes_is_launched_before_they_end() -> None:
    chance, device = random.Random(2), Behind()
    engine = engine_on(device)

    def add(num_tokens: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        engine.add(Request(f"{chance.random()}", 0, (1,) * num_tokens, params))

    due_s = [0.2 * number + 0.02 * chance.random() for number in range(3, 60)]

    def meanwhile() -> bool:
        device.now_s = device.next_look_s(LOOK_S)
        if not due_s or device.now_s < due_s[0]:
            return False
        del due_s[0]
        add(300, 1)
        return True

    for _ in range(16):
        add(100, 2000)
    while len(due_s) > 40:
        engine.step(meanwhile)
    device.idle_s, num_prompts = 0.0, len(due_s)
    while due_s:
        engine.step(meanwhile)
    assert device.idle_s <= 0.0001 * num_prompts


def test_what_an_idle_device_waits_for_is_no_part_of_a_step() -> None:
    """The wait of an idle device for a launch is not part of a step's cost: requests come one by
    one, so nothing hides the launch of their prompts."""
    device = Behind()
    engine = engine_on(device)

    def meanwhile() -> bool:
        device.now_s = device.next_look_s(LOOK_S)
        return False

    for number in range(24):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        engine.add(Request(f"{number}", 0, (1,) * (16, 400)[number % 2], params))
        while engine.has_work:
            engine.step(meanwhile)
        device.now_s += 0.1
    cost = engine.stats.step_cost()
    assert cost is not None
    for num_tokens in (16, 400):
        shape = StepShape(num_tokens, pairs_of(num_tokens, 0))
        assert cost.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.03)
