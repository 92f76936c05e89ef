"""Measured steps in; out: their cost as a function of what is in them (core/step_cost.py), and a
record of what they had in them, how long those with decodes were, and how many of these kept what
was promised.

    steps, by size of each part ─► median of the last ones of each size ─► fit of the cost
                                                                           (step_cost_fit.py)
A few steps that took far too long (the first one, a compilation, a paused process) change nothing,
and steps of one kind, however many, do not displace what was seen of others. What is not told apart
by what was seen (a decode engine that never had a prompt) is 0: `max_rows` bounds what may be
planned by it.

Steps that no graph has room for are launched kernel by kernel, which may take the host longer than
they take the device: how long is known by itself.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from ....core.step_cost import StepCost, StepShape
from .overruns import MIN_ERRORS, Overruns
from .step_cost_fit import fit_step_cost

MIN_SAMPLES = 3  # of a size, before it counts
_NUM_SAMPLES = 15
_MAX_SIZES = 256
_NUM_ERRORS = 512
_NUM_RECORDED = 512  # steps that the percentile is of
_NUM_LAUNCHES = 15
_FIT_EVERY = 128  # samples: to fit takes a millisecond
_LEAST_S = 1e-9

_Size = tuple[int, int, int, int]


@dataclass(slots=True)
class _Alike:
    """The last samples of one size. `middle`: the one with the median time a row."""

    samples: deque[tuple[StepShape, float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_SAMPLES)
    )
    middle: tuple[StepShape, float] | None = None

    def find_middle(self) -> tuple[StepShape, float]:
        if self.middle is None:
            ordered = sorted(self.samples, key=lambda sample: sample[1] / sample[0].num_rows)
            self.middle = ordered[len(ordered) // 2]
        return self.middle


class StepCostEstimator:
    """One engine's. `relative_error`: the 90th percentile of how far the last steps were from what
    was expected of them, when that was last fitted; None: too few. `graph_prompt_tokens`: see
    EngineLimits."""

    def __init__(self, graph_prompt_tokens: int = 0) -> None:
        self._graph_prompt_tokens = graph_prompt_tokens
        self._launches_s: deque[float] = deque(maxlen=_NUM_LAUNCHES)  # of what is in no graph
        self.relative_error: float | None = None
        self.overruns = Overruns()
        self._sizes: OrderedDict[_Size, _Alike] = OrderedDict()
        self._estimate: StepCost | None = None
        self._num_unfitted = 0
        self._has_new_size = False
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    def observe(self, shape: StepShape, seconds: float, waited_s: float | None = None) -> None:
        """A step of this shape, of one row at least, took so long. `waited_s`: what passed between
        two steps' tokens, which is what a promise is about, where that is more."""
        seconds = max(seconds, _LEAST_S)
        if self._estimate is not None:
            expected_s = self._estimate.seconds(shape)
            self._errors.append(abs(expected_s / seconds - 1))
            if shape.num_decodes and shape.num_prompt_tokens:
                self.overruns.observe(shape, max(seconds, waited_s or 0.0))
        size = _size_of(shape)
        alike = self._sizes.setdefault(size, _Alike())
        alike.samples.append((shape, seconds))
        alike.middle = None
        self._num_unfitted += 1
        self._has_new_size |= len(alike.samples) == MIN_SAMPLES
        self._sizes.move_to_end(size)
        if len(self._sizes) > _MAX_SIZES:
            self._sizes.popitem(last=False)

    def observe_launch(self, shape: StepShape, seconds: float) -> None:
        """To launch a step of this shape took the host so long."""
        if shape.num_prompt_tokens > self._graph_prompt_tokens:
            self._launches_s.append(seconds)

    @property
    def launch_s(self) -> float:
        """What the host takes at most for a step that is in no graph, but for the slowest of the
        last ones; 0 where none was seen."""
        return sorted(self._launches_s)[-2:][0] if self._launches_s else 0.0

    def estimate(self) -> StepCost | None:
        """None until there are a few samples of each of two sizes, one with twice the rows. Takes
        the last samples into account when there are many, or some of a new size."""
        if self._has_new_size or self._num_unfitted >= _FIT_EVERY:
            self._has_new_size, self._num_unfitted = False, 0
            self._estimate = self._fit() or self._estimate
            if len(self._errors) >= MIN_ERRORS:
                self.relative_error = statistics.quantiles(self._errors, n=10)[-1]
            if self._estimate is not None:
                self.overruns.fit(self._estimate)
        return self._estimate

    def expected_s(self, shape: StepShape) -> float | None:
        """How long a step of this shape takes; None where nothing like it was seen."""
        if (cost := self.estimate()) is not None:
            return cost.seconds(shape)
        alike = self._sizes.get(_size_of(shape))
        if alike is None or len(alike.samples) < MIN_SAMPLES:
            return None
        seen, seconds = alike.find_middle()
        return shape.num_rows * seconds / seen.num_rows

    def _fit(self) -> StepCost | None:
        known = [alike for alike in self._sizes.values() if len(alike.samples) >= MIN_SAMPLES]
        return fit_step_cost([alike.find_middle() for alike in known])


class StepRecord:
    """One engine's, since it was made. `num_prompts`: those that came to be computed here."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self.num_prompt_tokens = 0
        self.num_decode_tokens = 0
        self.num_promised_steps = 0
        self.num_kept_steps = 0
        self._last_s: deque[float] = deque(maxlen=_NUM_RECORDED)

    def observe(self, shape: StepShape, seconds: float, promise_s: float | None) -> None:
        """A step took so long; `promise_s`: what its decodes, if it had any, were promised."""
        self.num_prompt_tokens += shape.num_prompt_tokens
        if not shape.num_decodes:
            return
        self.num_decode_tokens += shape.num_decodes
        self._last_s.append(seconds)
        if promise_s is not None:
            self.num_promised_steps += 1
            self.num_kept_steps += seconds <= promise_s

    @property
    def p99_s(self) -> float | None:
        """Of the last steps with decodes, nearest rank; None: there were none."""
        if not self._last_s:
            return None
        ordered = sorted(self._last_s)
        return ordered[(99 * len(ordered) - 1) // 100]


def _size_of(shape: StepShape) -> _Size:
    return (
        shape.num_prompt_tokens.bit_length(),
        shape.num_decodes.bit_length(),
        shape.pairs.bit_length() // 3,
        shape.keys.bit_length() // 2,
    )
