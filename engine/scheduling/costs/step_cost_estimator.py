"""Estimates the cost of steps (core/step_cost.py) from measured ones.

    steps, by size of each part ─► median of the last ones of each size ─► fit of the cost
                                                                           (step_cost_fit.py)
A few steps that took far too long (the first one, a compilation, a paused process) change nothing,
and many steps of one kind do not displace the samples of others. Parts of the cost that the samples
cannot separate (in a decode engine that never had a prompt) are 0: plans are bounded by `max_rows`.

Steps that fit no CUDA graph are launched kernel by kernel, which may take the host longer than the
device needs for them: their launch time is estimated separately.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable

from ....core.step_cost import StepCost
from ....core.step_shape import StepShape
from .overruns import MIN_ERRORS, Overruns
from .step_cost_fit import fit_step_cost

MIN_SAMPLES = 3  # of a size, before it is used
_NUM_SAMPLES = 15
_MAX_SIZES = 256
_NUM_ERRORS = 512
_NUM_LAUNCHES = 15
_FIT_EVERY = 128  # samples: a fit takes a millisecond
_LEAST_S = 1e-9

_Size = tuple[int, int, int, int]
_Sample = tuple[StepShape, float]  # and its seconds


class StepCostEstimator:
    """The step costs of one engine. `relative_error`: the 90th percentile of the relative error of
    the last estimates, at the last fit; None: too few. `graph_prompt_tokens`: see EngineLimits."""

    def __init__(self, graph_prompt_tokens: int = 0) -> None:
        self._graph_prompt_tokens = graph_prompt_tokens
        self._launches_s: deque[float] = deque(maxlen=_NUM_LAUNCHES)  # of steps that fit no graph
        self.relative_error: float | None = None
        self.overruns = Overruns()
        self._sizes: OrderedDict[_Size, deque[_Sample]] = OrderedDict()  # the last of each
        self._estimate: StepCost | None = None
        self._num_unfitted = 0
        self._has_new_size = False
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    def observe(self, shape: StepShape, seconds: float, waited_s: float | None = None) -> None:
        """Record how long a step with at least one row took. `waited_s`: the time between the
        tokens of two steps, which a promise limits, if it is longer."""
        seconds = max(seconds, _LEAST_S)
        if self._estimate is not None:
            expected_s = self._estimate.seconds(shape)
            self._errors.append(abs(expected_s / seconds - 1))
            if shape.num_decodes and shape.num_prompt_tokens:
                self.overruns.observe(shape, max(seconds, waited_s or 0.0))
        size = _size_of(shape)
        alike = self._sizes.setdefault(size, deque(maxlen=_NUM_SAMPLES))
        alike.append((shape, seconds))
        self._num_unfitted += 1
        self._has_new_size |= len(alike) == MIN_SAMPLES
        self._sizes.move_to_end(size)
        if len(self._sizes) > _MAX_SIZES:
            self._sizes.popitem(last=False)

    def observe_launch(self, shape: StepShape, seconds: float) -> None:
        """Record how long the host took to launch a step."""
        if shape.num_prompt_tokens > self._graph_prompt_tokens:
            self._launches_s.append(seconds)

    @property
    def launch_s(self) -> float:
        """How long the host takes at most to launch a step that fits no graph: the second longest
        of the last launches; 0 before the first."""
        return sorted(self._launches_s)[-2:][0] if self._launches_s else 0.0

    def estimate(self) -> StepCost | None:
        """None until there are a few samples of each of two sizes, one with twice the rows. Fitted
        anew when there are many new samples, or enough of a new size."""
        if self._has_new_size or self._num_unfitted >= _FIT_EVERY:
            self._has_new_size, self._num_unfitted = False, 0
            known = [alike for alike in self._sizes.values() if len(alike) >= MIN_SAMPLES]
            self._estimate = fit_step_cost([*map(_middle_of, known)]) or self._estimate
            if len(self._errors) >= MIN_ERRORS:
                self.relative_error = statistics.quantiles(self._errors, n=10)[-1]
            if self._estimate is not None:
                self.overruns.fit(self._estimate)
        return self._estimate

    def expected_s(self, shape: StepShape) -> float | None:
        """How long a step of this shape takes; None if no similar one was measured."""
        if (cost := self.estimate()) is not None:
            return cost.seconds(shape)
        alike = self._sizes.get(_size_of(shape))
        if alike is None or len(alike) < MIN_SAMPLES:
            return None
        seen, seconds = _middle_of(alike)
        return shape.num_rows * seconds / seen.num_rows


def _middle_of(samples: Iterable[_Sample]) -> _Sample:
    """The sample with the median time per row."""
    ordered = sorted(samples, key=lambda sample: sample[1] / sample[0].num_rows)
    return ordered[len(ordered) // 2]


def _size_of(shape: StepShape) -> _Size:
    return (
        shape.num_prompt_tokens.bit_length(),
        shape.num_decodes.bit_length(),
        shape.pairs.bit_length() // 3,
        shape.keys.bit_length() // 2,
    )
