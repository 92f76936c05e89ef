"""How many engines should compute prompts alone, without a TBT promise to decodes: a pure function
of step costs and of the load of the last seconds. GoodShares and choose_num_pure explain how.

Engines of the prefill role that start with a promise may lose and regain it. With a promise, an
engine serves whole requests, with small prompt chunks beside their decodes; without one ("pure") it
computes prompts in full steps, for other engines to decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...core.step_cost import LEAST_PROMPT_TOKENS, StepCost
from ...core.step_shape import StepShape
from ..engines.reported_load import decodes_within, prompt_speed

LEAST_GAIN = 0.05  # in the share of good requests, to change the number of engines
MARGIN = 1.1  # times the measured requests, for which the best number is chosen
MORE_DECODES = 1.1  # times the decodes, for which a new number must have places
HEAVIER = 1.3  # times the prompt tokens per second, with the same decodes
LEAST_PROMPTS = 12  # that must have arrived before engines promise again
_LEAST_LOSS = 0.01  # a smaller loss counts as none
HOLD_S = 5.0  # for which a promise stays at least
_MANY_COUNTS = 12  # about so many numbers of engines are tried first
_LATE = 0.2  # weight of a request that is served, but too late
_RATE_STEP = 0.04  # grid step of the logarithm of a rate of decode tokens
_DEVIATIONS = (-1.28, -0.52, 0.0, 0.52, 1.28)  # middles of the fifths of a normal distribution


@dataclass(frozen=True, slots=True)
class Mix:
    """The load of the last seconds, from all gateways. Prompt tokens exclude cached ones;
    `prompt_tokens`: mean of a prompt. `context`: mean of a running decode. `num_prompts`: size of
    the sample from which the means are."""

    prompt_tokens: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    context: float
    num_prompts: float


@dataclass(frozen=True, slots=True)
class PromiseTarget:
    """`tbt_s`: the promise; `ttft_s`: the TTFT target; `chunk`: most prompt tokens of a step."""

    tbt_s: float
    ttft_s: float
    chunk: int


class GoodShares:
    """The estimated share of good requests of `num_engines`, by the number of pure ones: about the
    product of

    prompts   share with a wait within the TTFT target: what all engines can compute (those with a
              promise: beside their share of the decodes), against the arriving tokens
    decodes   share that has a place: places within the promise, against concurrent decodes
    """

    def __init__(self, cost: StepCost, mix: Mix, target: PromiseTarget, num_engines: int) -> None:
        self._cost, self._mix, self._target = cost, mix, target
        self._num_engines = num_engines
        self._decodes_each = decodes_within(cost, mix.context, target.tbt_s)
        self._pure_each_per_s = _pure_tokens_per_s(cost, mix, target)
        speed = prompt_speed(cost, target.chunk, StepShape(), None)
        self._alone_s = speed.prompt_seconds(max(1, int(mix.prompt_tokens)), 0)
        self._mixed: dict[int, tuple[float, float]] = {}  # by log of the decode token rate

    def share(self, num_pure: int, times: float = 1.0, decode_times: float = 1.0) -> float:
        """The share with `times` the requests, whose decodes need `decode_times` the places.
        Requests that are served too late count _LATE."""
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
        """The mean share over the loads that the observed requests may stem from (Poisson
        arrivals): close to capacity, a few prompts more or less would change the best number."""
        deviation = 1 / math.sqrt(max(1.0, self._mix.num_prompts))
        loads = [max(0.0, 1 + number * deviation) for number in _DEVIATIONS]
        return sum(self.share(num_pure, times * load, decode_times) for load in loads) / len(loads)

    def _mixed_engines(self, num: int, times: float) -> tuple[float, float]:
        """The decodes that run on `num` engines, and the prompt tokens they compute per second."""
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
        """The duration of a step of an engine's decodes, and its prompt tokens per second."""
        if (known := self._mixed.get(rate_step)) is None:
            of = self._cost, self._mix, self._target, math.exp(rate_step * _RATE_STEP)
            known = self._mixed[rate_step] = _decode_step_s(*of), _mixed_tokens_per_s(*of)
        return known

    def _within_ttft(self, pure_per_s: float, mixed_per_s: float, wanted_per_s: float) -> float:
        """The share of first tokens within the TTFT target: one queue of Poisson arrivals for all
        engines, prompts of equal duration (M/D/k: the tail of waits is exponential)."""
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


def _decode_step_s(cost: StepCost, mix: Mix, target: PromiseTarget, outputs_per_s: float) -> float:
    """The duration of an engine's steps of decodes alone, at most the promise: a fixed point, since
    the number of concurrent decodes depends on the duration."""
    seconds = cost.base_s
    for _ in range(16):
        decodes = outputs_per_s * seconds
        shape = StepShape(num_decodes=math.ceil(decodes), keys=int(decodes * mix.context))
        longer = min(cost.seconds(shape), target.tbt_s)
        if longer <= seconds:
            break
        seconds = longer
    return seconds


def _pure_tokens_per_s(cost: StepCost, mix: Mix, target: PromiseTarget) -> float:
    """Prompt tokens per second of one pure engine: full steps, in which a token attends to half of
    its prompt on average."""
    size = max(1, target.chunk)
    pairs = int(size * mix.prompt_tokens / 2)
    return size / max(cost.seconds(StepShape(num_prompt_tokens=size, pairs=pairs)), 1e-9)


def _mixed_tokens_per_s(
    cost: StepCost, mix: Mix, target: PromiseTarget, outputs_per_s: float
) -> float:
    """Prompt tokens per second of one engine whose steps, with its decodes, last the promise."""
    decodes = outputs_per_s * target.tbt_s
    beside = StepShape(num_decodes=math.ceil(decodes), keys=int(decodes * mix.context))
    context = int(mix.prompt_tokens / 2)
    size = cost.prompt_tokens_within(target.tbt_s, beside, context, target.chunk)
    if size >= LEAST_PROMPT_TOKENS:
        return size / target.tbt_s
    return LEAST_PROMPT_TOKENS / cost.seconds(beside.with_prompt(LEAST_PROMPT_TOKENS, context))


def choose_num_pure(
    cost: StepCost, mix: Mix, target: PromiseTarget, num_movable: int, num_others: int, now: int
) -> int:
    """How many of `num_movable` engines should promise nothing; `now` is the current number.
    `num_others` always promise and decode: without any, all promise.

    The candidate is the best number at MARGIN times the requests. It is chosen if it gains
    LEAST_GAIN even with MORE_DECODES, since concurrent decodes grow with step times, which are
    estimates. Else promises are restored, down to the smallest number that serves this load and
    HEAVIER prompts as well as `now`, and at which the candidate would not be chosen. So a number
    stays while the load does. The first prompts after a pause do not show the new load: `now`
    stays.
    """
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
    """The best of 0 to `most`: on a coarse grid, then refined around its best."""
    tried = _some_counts(most)
    best = max(tried, key=lambda count: (share(count), -count))
    step = tried[1] - tried[0] if most else 1
    while step > 1:
        step = -(-step // 2)
        around = (max(0, best - step), best, min(most, best + step))
        best = max(around, key=lambda count: (share(count), -count))
    return best


def _some_counts(most: int) -> list[int]:
    """A grid over 0 to `most`; all of them if they are few."""
    return sorted({*range(0, most + 1, max(1, most // _MANY_COUNTS)), most})


@dataclass(frozen=True, slots=True)
class EnginePromise:
    """An engine whose promise may change. `since_s`: when it last did (monotonic); `num_decodes`:
    its running decodes."""

    incarnation: str
    is_promising: bool
    since_s: float
    num_decodes: int = 0


def plan_moves(
    engines: Sequence[EnginePromise], num_pure: int, now_s: float, *, must_serve: bool = False
) -> dict[str, bool]:
    """The engines to change (True: promise) so that `num_pure` promise nothing: the fewest changes,
    of engines unchanged for HOLD_S, those with the fewest decodes first. `must_serve`: no other
    engine decodes, so HOLD_S is ignored."""
    pure = [engine for engine in engines if not engine.is_promising]
    change = num_pure - len(pure)
    candidates = [engine for engine in engines if engine.is_promising] if change > 0 else pure
    ready = [engine for engine in candidates if must_serve or now_s - engine.since_s >= HOLD_S]
    ready.sort(key=lambda engine: (engine.num_decodes, engine.incarnation))
    return {engine.incarnation: change < 0 for engine in ready[: abs(change)]}
