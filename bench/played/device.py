"""A simulated device whose steps take as long as a `StepCost` predicts, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.ports import Clock
from baton.core.request.request import TokenLogprobs
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape, pairs_of
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.runner_protocols import Runner

_TOKEN_ID = 97


class VirtualClock(Clock):
    """Advanced by the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.now_s * 1e9)


class Device(Runner, Protocol):
    """A Runner that advances its own clock; `now_s` is set to the time at which a step begins."""

    now_s: float

    def monotonic_s(self) -> float: ...

    def unix_ns(self) -> int: ...


class PlayedDevice(Clock):
    """A device that computes nothing and only advances its clock by each step's cost."""

    runs_ahead = False

    def __init__(self, cost: StepCost) -> None:
        self.now_s = 0.0
        self._cost = cost

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.now_s * 1e9)

    def launch(self, batch: Sequence[SequenceSlice]) -> PlayedStep:
        num_prompt_tokens = pairs = num_decodes = keys = 0
        for part in batch:
            num_tokens = len(part.token_ids)
            if num_tokens == 1:
                num_decodes += 1
                keys += part.start + 1
            else:
                num_prompt_tokens += num_tokens
                pairs += pairs_of(num_tokens, part.start)
        self.now_s += self._cost.seconds(StepShape(num_prompt_tokens, pairs, num_decodes, keys))
        return PlayedStep(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("nothing is forked")


@dataclass(frozen=True, slots=True)
class PlayedStep:
    batch: Sequence[SequenceSlice]
    number: int = 0
    device_s = None

    def has_completed(self) -> bool:
        return True

    def collect(self) -> list[SampledToken | None]:
        token = SampledToken(_TOKEN_ID, -1.0)
        return [None if part.sample is None else token for part in self.batch]

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {}
