"""The TTFT of a light caller beside bulk callers, on an engine with a simulated clock.

A step takes 8 ms and 45 us per prompt token, as for an 8B model on one GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from effort import half
from fakes.timed_device import TimedDevice

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.step_shape import StepShape
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SequenceSlice
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits

STEP_S, TOKEN_S = 0.008, 45e-6
LOOK_S = 0.001  # how often the engine looks while a step is on the device
BULK, LIGHT = range(10), 10


def cost_s(num_tokens: int) -> float:
    return STEP_S + num_tokens * TOKEN_S


@dataclass
class PlayedDevice(TimedDevice):
    batches: list[int] = field(default_factory=list)

    def cost_s(self, batch: Sequence[SequenceSlice]) -> float:
        self.batches.append(sum(len(one.token_ids) for one in batch))
        return cost_s(self.batches[-1])


class Played:
    """An engine on a simulated device: bulk prompts are queued at the start, light ones arrive over
    time; held KV is fetched at once."""

    def __init__(self, *, runs_ahead: bool, chunk: int) -> None:
        self.device = PlayedDevice(runs_ahead)
        limits = EngineLimits(40_000, 16, 32_000, prefill_chunk_tokens=chunk)
        self.engine = Engine(EngineParts(
            self.device, limits, Generations(40_000), fingerprint="m", eos_token_ids=(),
            enable_prefix_caching=False, clock=self.device,
        ))  # fmt: skip
        self.random = random.Random(7)
        self.came_s: dict[str, float] = {}
        self.ttft_s: dict[str, float] = {}

    def add(self, name: str, caller_id: int, num_tokens: int) -> None:
        request = Request(name, 0, (1,) * num_tokens, SamplingParams(max_tokens=9))
        self.engine.add(replace(request, caller_id=caller_id), hold=True)

    def run(self, coming: list[tuple[float, int]], num_bulk_left: int) -> None:
        """Run until few bulk prompts are left; `coming` has arrival times and lengths of light
        ones."""
        num_bulk = self.engine.stats.load().num_waiting
        coming.reverse()

        def meanwhile() -> bool:
            device = self.device
            due_s = device.next_look_s(LOOK_S)
            if coming and coming[-1][0] <= due_s:
                came_s, num_tokens = coming.pop()
                device.now_s = max(device.now_s, came_s)
                name = f"light{len(self.came_s)}"
                self.came_s[f"{name}/0"] = came_s
                self.add(name, LIGHT, num_tokens)
                return True
            device.now_s = max(device.now_s, due_s)
            return False

        while num_bulk > num_bulk_left:
            while not self.device.runs_ahead and meanwhile():
                pass
            output = self.engine.step(meanwhile)
            for token in output.tokens:
                if token.key in self.came_s:
                    self.ttft_s[token.key] = self.device.now_s - self.came_s[token.key]
                else:
                    num_bulk -= 1
                self.engine.abort(token.key)


def light_prompts(played: Played, rate: float, seconds: float) -> list[tuple[float, int]]:
    coming, now_s = [], 0.0
    while now_s < seconds:
        now_s += played.random.expovariate(rate)
        coming.append((now_s, played.random.randint(4, 64)))
    return coming


LOADS = [(0, 2000), (0, 9000), (8192, 9000), (8192, 20_000)]  # (prefill chunk, longest prompt)


@pytest.mark.parametrize(("load", "runs_ahead"), half(LOADS, [False, True]))
def test_a_light_caller_waits_for_little_more_than_the_step_in_flight(
    load: tuple[int, int], *, runs_ahead: bool
) -> None:
    chunk, longest = load
    played = Played(runs_ahead=runs_ahead, chunk=chunk)
    for index in range(64):
        for caller_id in BULK:
            num_tokens = played.random.randint(longest // 2, longest)
            played.add(f"bulk{caller_id}-{index}", caller_id, num_tokens)
    played.run(light_prompts(played, 5.0, 600.0), num_bulk_left=400)
    ttfts, idle_s = sorted(played.ttft_s.values()), cost_s(64)
    chunk_s = cost_s(max(played.device.batches))
    cost = played.engine.stats.step_cost()
    assert cost is not None
    for num_tokens in (64, 2000):
        shape = StepShape().with_prompt(num_tokens, 0)
        assert cost.seconds(shape) == pytest.approx(cost_s(num_tokens), rel=0.05)
    assert len(ttfts) > 60
    assert ttfts[int(0.99 * len(ttfts))] <= 3 * idle_s + chunk_s


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_light_caller_costs_the_others_little(*, runs_ahead: bool) -> None:
    """A light caller makes bulk callers at most 10 % slower than they are alone."""
    took_s: list[float] = []
    for is_alone in (True, False):
        played = Played(runs_ahead=runs_ahead, chunk=8192)
        for index in range(20):
            for caller_id in BULK:
                played.add(f"bulk{caller_id}-{index}", caller_id, 6000)
        coming = [] if is_alone else light_prompts(played, 5.0, 600.0)
        played.run(coming, num_bulk_left=0)
        took_s.append(played.device.now_s)
    assert took_s[1] <= took_s[0] * 1.10


def test_a_step_is_launched_before_the_one_in_front_of_it_ends() -> None:
    """The next step is launched before the running one ends, though the engine waits for late
    arrivals: the device has no idle gap."""
    played = Played(runs_ahead=True, chunk=8192)
    for index in range(20):
        for caller_id in BULK:
            played.add(f"bulk{caller_id}-{index}", caller_id, played.random.randint(3000, 9000))
    played.run([], num_bulk_left=0)
    assert played.device.now_s == pytest.approx(sum(map(cost_s, played.device.batches)))


def test_a_prompt_that_comes_beside_decodes_is_in_the_next_step() -> None:
    """A prompt that arrives during a decode step is in the next step, without an idle gap."""
    played = Played(runs_ahead=True, chunk=8192)
    engine, device = played.engine, played.device
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    for index in range(40):
        engine.add(Request(f"stream{index}", 0, (1,) * 200, endless))
        engine.step()
    coming: list[str] = []

    def meanwhile() -> bool:
        device.now_s = min(device.ends_s[-1], device.now_s + LOOK_S)
        if coming and device.now_s > device.ends_s[-1] - STEP_S / 2:
            played.add(coming.pop(), LIGHT, 100)
            return True
        return False

    for _ in range(100):
        engine.step(meanwhile)
    for index in range(20):
        coming.append(f"light{index}")
        keys = [[token.key for token in engine.step(meanwhile).tokens] for _ in range(3)]
        assert [f"light{index}/0" in each for each in keys].index(True) == 1
        engine.abort(f"light{index}/0")
    engine.step()
    assert device.free_s == pytest.approx(sum(map(cost_s, device.batches)))
