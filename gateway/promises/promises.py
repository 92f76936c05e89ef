"""How many engines should promise nothing to decodes: a pure function of what the steps take and of
the load of the last seconds.

Engines of the prefill role that began with a promise may have it or not. With one, an engine takes
whole requests, and prompts a little a step beside their decodes; without one it computes prompts
alone, in whole steps, for the others to decode. For each number of those without:

    prompts   what all engines can compute, those with a promise beside their share of the decodes,
              against what comes: the share whose wait stays within the TTFT that is wanted
    decodes   as many as the promise leaves place for, against as many as run at once

Their product is about the share of good requests. What came in a few seconds tells the load to
within chance: near what the engines can take, a few prompts more would speak for one number and a
few less for another. So shares are means over the loads that may be behind what came. Of all
numbers, the one counts that would be best with MARGIN times the requests, and is taken where it is
better by LEAST_GAIN with places for MORE_DECODES: the longer their steps, the more of them run, and
what steps take beside more prompts is known to within some. That all promise is the rule: as many
do again as would serve what comes as well, and HEAVIER prompts, and would not be left for that
number. So what is chosen stays while the load does, and some longer; the first prompts after a
pause say nothing of the load that begins with them, and as many stay without a promise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...core.step_cost import LEAST_PROMPT_TOKENS, StepCost, StepShape
from ..engines.reported_load import prompt_speed

LEAST_GAIN = 0.05  # of the share of good requests, for another number of engines
MARGIN = 1.1
MORE_DECODES = 1.1  # that another number has places for
HEAVIER = 1.3  # beside the same decodes
LEAST_PROMPTS = 12  # that came, or all do not promise again
_LEAST_LOSS = 0.01  # what is as good
HOLD_S = 5.0  # a promise stays at least so long
_MANY_DECODES = 1 << 16
_MANY_COUNTS = 12  # of engines: more are not all tried
_LATE = 0.2  # what a request counts that is served, but too late
_RATE_STEP = 0.04  # of a rate of decode tokens, whose logarithm it divides
_DEVIATIONS = (-1.28, -0.52, 0.0, 0.52, 1.28)  # of a normal distribution, a fifth each


@dataclass(frozen=True, slots=True)
class Mix:
    """What came in the last seconds, of all gateways, and what it brings. Tokens of prompts are
    those that no cache had; `prompt_tokens`: of one, on average. `context`: of a decode that runs,
    on average. `num_prompts`: that came, and by which the rest is known."""

    prompt_tokens: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    context: float
    num_prompts: float


@dataclass(frozen=True, slots=True)
class Target:
    """`tbt_s`: the promise; `ttft_s`: within which first tokens are to come. `chunk`: most prompt
    tokens of a step."""

    tbt_s: float
    ttft_s: float
    chunk: int


class GoodShares:
    """The estimated share of good requests of `num_engines`, by how many compute prompts alone."""

    def __init__(self, cost: StepCost, mix: Mix, target: Target, num_engines: int) -> None:
        self._cost, self._mix, self._target = cost, mix, target
        self._num_engines = num_engines
        self._decodes_each = _decodes_within(cost, mix.context, target.tbt_s)
        self._pure_each_per_s = _pure_tokens_per_s(cost, mix, target)
        speed = prompt_speed(cost, target.chunk, StepShape(), None)
        self._alone_s = speed.prompt_seconds(max(1, int(mix.prompt_tokens)), 0)
        self._mixed: dict[int, tuple[float, float]] = {}  # by the rate of decode tokens, in steps

    def share(self, num_pure: int, times: float = 1.0, decode_times: float = 1.0) -> float:
        """With so many `times` the requests, and places for `decode_times` their decodes. Those
        that are served too late count a little."""
        num_mixed = self._num_engines - num_pure
        running, mixed_per_s = self._mixed_engines(num_mixed, times)
        if decode_times != 1.0:
            running, _ = self._mixed_engines(num_mixed, times * decode_times)
        most = num_mixed * self._decodes_each
        spread = math.sqrt(max(running, 1.0))  # arrivals are not even
        decodes_share = 0.5 * (1 + math.erf((most - running) / spread / math.sqrt(2)))
        pure_per_s = num_pure * self._pure_each_per_s
        wanted_per_s = times * self._mix.prompt_tokens_per_s
        prompts_share = self._within_ttft(pure_per_s, mixed_per_s, wanted_per_s)
        served = min(1.0, (pure_per_s + mixed_per_s) / max(wanted_per_s, 1.0))
        served = min(served, most / max(running, 1.0))
        return (1 - _LATE) * decodes_share * prompts_share + _LATE * served

    def expected_share(self, num_pure: int, times: float = 1.0, decode_times: float = 1.0) -> float:
        """The mean over the loads that may be behind the requests that came (Poisson arrivals)."""
        deviation = 1 / math.sqrt(max(1.0, self._mix.num_prompts))
        loads = [max(0.0, 1 + number * deviation) for number in _DEVIATIONS]
        return sum(self.share(num_pure, times * load, decode_times) for load in loads) / len(loads)

    def _mixed_engines(self, num: int, times: float) -> tuple[float, float]:
        """Decodes that run on so many, and prompt tokens that these compute in a second."""
        each_per_s = times * self._mix.output_tokens_per_s / num
        step = math.log(max(each_per_s, 1.0)) / _RATE_STEP
        below, part = math.floor(step), step % 1
        (decode_s, tokens_per_s), (longer_s, fewer_per_s) = map(
            self._mixed_engine, (below, below + 1)
        )
        decode_s += part * (longer_s - decode_s)
        tokens_per_s += part * (fewer_per_s - tokens_per_s)
        return num * each_per_s * decode_s, num * tokens_per_s

    def _mixed_engine(self, rate_step: int) -> tuple[float, float]:
        """How long a step of its decodes takes, and its prompt tokens in a second."""
        if (known := self._mixed.get(rate_step)) is None:
            of = self._cost, self._mix, self._target, math.exp(rate_step * _RATE_STEP)
            known = self._mixed[rate_step] = _decode_step_s(*of), _mixed_tokens_per_s(*of)
        return known

    def _within_ttft(self, pure_per_s: float, mixed_per_s: float, wanted_per_s: float) -> float:
        """The share of first tokens that come in time: a queue of Poisson arrivals in front of all
        engines, whose prompts take equally long (M/D/k: the tail of waits is exponential)."""
        total_per_s = pure_per_s + mixed_per_s
        load, alone_s = wanted_per_s / total_per_s, self._alone_s
        if load >= 1:
            return 0.0
        if not pure_per_s:  # beside decodes
            alone_s *= max(1.0, self._pure_each_per_s * self._num_engines / max(mixed_per_s, 1.0))
        left_s = self._target.ttft_s - alone_s
        if left_s <= 0:
            return 0.0
        prompts_per_s = total_per_s / max(self._mix.prompt_tokens, 1.0)
        return 1 - load * math.exp(-2 * (1 - load) * prompts_per_s * left_s)


def _decodes_within(cost: StepCost, context: float, seconds: float) -> int:
    """How many decodes a step of that length has, at most."""

    def takes_s(num: int) -> float:
        return cost.seconds(StepShape(num_decodes=num, keys=int(num * context)))

    return bisect_right(range(1, _MANY_DECODES), seconds, key=takes_s)


def _decode_step_s(cost: StepCost, mix: Mix, target: Target, outputs_per_s: float) -> float:
    """How long an engine's steps of decodes alone are, at as many as that makes run at once; at
    most the promise."""
    seconds = cost.base_s
    for _ in range(16):
        decodes = outputs_per_s * seconds
        shape = StepShape(num_decodes=math.ceil(decodes), keys=int(decodes * mix.context))
        longer = min(cost.seconds(shape), target.tbt_s)
        if longer <= seconds:
            break
        seconds = longer
    return seconds


def _pure_tokens_per_s(cost: StepCost, mix: Mix, target: Target) -> float:
    """Of one engine, in full steps; each token sees half of its prompt, whatever the step has."""
    size = max(1, target.chunk)
    pairs = int(size * mix.prompt_tokens / 2)
    return size / max(cost.seconds(StepShape(num_prompt_tokens=size, pairs=pairs)), 1e-9)


def _mixed_tokens_per_s(cost: StepCost, mix: Mix, target: Target, outputs_per_s: float) -> float:
    """Of one engine, in steps as long as the promise with its decodes."""
    decodes = outputs_per_s * target.tbt_s
    beside = StepShape(num_decodes=math.ceil(decodes), keys=int(decodes * mix.context))
    context = int(mix.prompt_tokens / 2)
    size = cost.prompt_tokens_within(target.tbt_s, beside, context, target.chunk)
    if size >= LEAST_PROMPT_TOKENS:
        return size / target.tbt_s
    return LEAST_PROMPT_TOKENS / cost.seconds(beside.with_prompt(LEAST_PROMPT_TOKENS, context))


def choose_num_pure(
    cost: StepCost, mix: Mix, target: Target, num_movable: int, num_others: int, now: int
) -> int:
    """Of `num_movable` engines, how many should promise nothing; `now` do. `num_others` decode, and
    always promise: where there are none, all do."""
    if not num_others or not num_movable:
        return 0
    now, num_engines = min(now, num_movable), num_movable + num_others
    shares = GoodShares(cost, mix, target, num_engines)
    best = _best_count(partial(shares.expected_share, times=MARGIN), num_movable)
    best_share = shares.expected_share(best, decode_times=MORE_DECODES)
    if best_share - shares.expected_share(now) >= LEAST_GAIN:
        return best
    if mix.num_prompts < LEAST_PROMPTS:
        return now
    more_prompts = replace(mix, prompt_tokens_per_s=HEAVIER * mix.prompt_tokens_per_s)
    loads = shares, GoodShares(cost, more_prompts, target, num_engines)

    def is_fine(count: int) -> bool:
        return all(
            of_load.expected_share(count) >= of_load.expected_share(now) - _LEAST_LOSS
            and of_load.expected_share(best) - of_load.expected_share(count) < LEAST_GAIN
            for of_load in loads
        )

    return next(filter(is_fine, _some_counts(now)), now)


def _best_count(share: Callable[[int], float], most: int) -> int:
    """0 to `most`: of some, and then of those around the best of them."""
    tried = _some_counts(most)
    best = max(tried, key=lambda count: (share(count), -count))
    step = tried[1] - tried[0] if most else 1
    while step > 1:
        step = -(-step // 2)
        around = (max(0, best - step), best, min(most, best + step))
        best = max(around, key=lambda count: (share(count), -count))
    return best


def _some_counts(most: int) -> list[int]:
    """0 to `most`, all of them if they are few."""
    return sorted({*range(0, most + 1, max(1, most // _MANY_COUNTS)), most})


@dataclass(frozen=True, slots=True)
class EnginePromise:
    """An engine that may be moved: whether it promises something now, since when (monotonic), and
    its decodes."""

    incarnation: str
    is_promising: bool
    since_s: float
    num_decodes: int = 0


def plan_moves(
    engines: Sequence[EnginePromise], num_pure: int, now_s: float, *, must_serve: bool = False
) -> dict[str, bool]:
    """Which of these engines are to promise something or nothing, so that `num_pure` promise
    nothing: as few changes as that takes, of those that have had theirs for HOLD_S, first those
    with the fewest decodes. `must_serve`: nobody else decodes, so that none waits."""
    pure = [engine for engine in engines if not engine.is_promising]
    change = num_pure - len(pure)
    candidates = [engine for engine in engines if engine.is_promising] if change > 0 else pure
    ready = [engine for engine in candidates if must_serve or now_s - engine.since_s >= HOLD_S]
    ready.sort(key=lambda engine: (engine.num_decodes, engine.incarnation))
    return {engine.incarnation: change < 0 for engine in ready[: abs(change)]}
