"""A device that computes nothing but takes time, and the clock that it advances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.request.request import TokenLogprobs
from baton.engine.execution.batch import SampledToken, SequenceSlice


@dataclass
class TimedStep:
    device: TimedDevice
    batch: Sequence[SequenceSlice]
    end_s: float
    device_s: float
    number: int = 0

    def has_completed(self) -> bool:
        return self.device.now_s >= self.end_s

    def collect(self) -> list[SampledToken | None]:
        self.device.now_s = max(self.device.now_s, self.end_s)
        return [None if one.sample is None else SampledToken(5, -1.0) for one in self.batch]

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {}


@dataclass
class TimedDevice(ABC):
    """A Runner and a `Clock`; a test defines how long steps take."""

    runs_ahead: bool = True
    now_s: float = 0.0
    free_s: float = 0.0
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=2))

    @abstractmethod
    def cost_s(self, batch: Sequence[SequenceSlice]) -> float:
        """Seconds of the step on the device."""

    def launch_s(self, batch: Sequence[SequenceSlice]) -> float:
        """Seconds of the launch on the host; the device starts meanwhile."""
        return 0.0

    def launch(self, batch: Sequence[SequenceSlice]) -> TimedStep:
        begin_s = max(self.free_s, self.now_s)
        self.now_s += self.launch_s(batch)
        self.free_s = max(begin_s + self.cost_s(batch), self.now_s)
        self.ends_s.append(self.free_s)
        return TimedStep(self, batch, self.free_s, self.free_s - begin_s)

    def next_look_s(self, look_s: float) -> float:
        """The next time at which a host that polls every `look_s` polls, or at which a step ends;
        now, if no step is on the device."""
        ends_s = [end_s for end_s in self.ends_s if end_s > self.now_s]
        return min([*ends_s, self.now_s + look_s] if ends_s else [self.now_s])

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("nothing is forked")
