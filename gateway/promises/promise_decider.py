"""Decides from heartbeats which engines should promise a TBT to their decodes now.

    heartbeats' counters ─► LoadMeter: the mix of the last seconds ─► promises.py ─► PromiseDecider:
                                                                                     orders
Every gateway measures, so that a new leader knows the load of the last seconds; heartbeats count
the requests of all gateways. Knows no lease and sends nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import add
from statistics import fmean

from ...core.membership import Role
from ...core.ports import Clock
from ...core.step_cost import StepCost
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import MEASURED_ROWS, LinkedEngine
from ..engines.reported_load import STEP_TOKENS, ReportedLoad
from .promises import EnginePromise, Mix, PromiseTarget, choose_num_pure, plan_moves

SPAN_S = 4.0  # over which the load is averaged, at least
_LONGER_SPANS_S = (16.0, 8.0)  # used where the load of the last SPAN_S is consistent with theirs
_CHANCE = 2.5  # standard deviations from the expected load: beyond them, the load has changed
_LEAST_SPAN_S = 1.5  # for which an engine must be known before it counts
_DRAIN_S = 5.0  # in which prompts that wait too long should be computed
_CONFIRM_S = 2.0  # for which more (or fewer) must be wanted before an order is sent

_BESIDE_DECODES = ("key_s", "mixed_s", "mixed_pair_s")  # step costs that prompts alone do not show

_Counts = tuple[int, int, int, int]  # prompts, prompt tokens, decode tokens; waiting tokens


@dataclass(frozen=True, slots=True)
class _Rates:
    """Per second, what a group of engines computed, and the growth of their waiting prompt tokens.
    `num_prompts`: the number of prompts over the whole span."""

    num_prompts: int
    prompts: float
    prompt_tokens: float
    decode_tokens: float
    waiting_tokens: float

    @property
    def mean_size(self) -> float:
        """Tokens per prompt; 0 without prompts."""
        return self.prompt_tokens / self.prompts if self.prompts else 0.0

    def may_go_on_as(self, longer: _Rates, seconds: float) -> bool:
        """Whether these rates, of the last `seconds`, differ from `longer` only by chance: Poisson
        arrivals, prompts of similar mean size, and outputs in proportion."""
        expected = max(longer.prompts * seconds, 1.0)
        of_chance = _CHANCE / math.sqrt(expected)
        pairs = (
            (self.prompts, longer.prompts),
            (self.prompt_tokens, longer.prompt_tokens),
            (self.decode_tokens, longer.decode_tokens),
            (self.mean_size, longer.mean_size),
        )
        return all(abs(last - rate) <= of_chance * rate for last, rate in pairs)


class LoadMeter:
    """Measures the load of engines over the last seconds, by repeated calls of `look`. Prompts
    arrive at random, so a steady load is averaged over many seconds; decodes count as of now."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, _Counts]]] = {}

    def look(self, engines: Iterable[LinkedEngine], now_s: float) -> None:
        """Record the engines' counters; drop engines that are gone."""
        before, self._seen = self._seen, {}
        for engine in engines:
            of = engine.load.counters
            seen = before.get(engine.incarnation, deque())
            counts = (of.num_prompts, of.num_prompt_tokens, of.num_decode_tokens)
            seen.append((now_s, (*counts, engine.load.waiting_tokens)))
            while len(seen) > 2 and now_s - seen[1][0] >= _LONGER_SPANS_S[0]:
                seen.popleft()
            self._seen[engine.incarnation] = seen

    def mix(self, engines: Sequence[LinkedEngine], queued_tokens: int, ttft_s: float) -> Mix | None:
        """The load of these engines together; None: no prompts, or not known for long enough.
        `queued_tokens`: of prompts that wait at the gateway. Tokens that would wait for longer than
        `ttft_s` are added to the arriving ones, over _DRAIN_S."""
        last = rates = self._rates(engines, SPAN_S)
        for span_s in _LONGER_SPANS_S:
            longer = self._rates(engines, span_s)
            if rates.may_go_on_as(longer, SPAN_S):
                rates = longer
                break
        prompts, prompt_tokens = rates.prompts, rates.prompt_tokens
        if not prompts or not prompt_tokens:
            return None
        loads = [engine.load for engine in engines]
        waiting = queued_tokens + sum(load.waiting_tokens for load in loads)
        late = max(0.0, waiting - ttft_s * prompt_tokens)
        decodes = sum(load.decodes.num_decodes for load in loads)
        keys = sum(load.decodes.keys for load in loads)
        size = prompt_tokens / prompts
        known = [load.mean_output_tokens for load in loads if load.mean_output_tokens]
        to_come = prompts * fmean(known) if known else 0.0  # when their decodes run
        return Mix(
            prompt_tokens=size,
            prompt_tokens_per_s=max(0.0, prompt_tokens + rates.waiting_tokens) + late / _DRAIN_S,
            output_tokens_per_s=max(last.decode_tokens, to_come),
            context=keys / decodes if decodes else size,
            num_prompts=rates.num_prompts,
        )

    def _rates(self, engines: Sequence[LinkedEngine], span_s: float) -> _Rates:
        """Over the last `span_s` seconds, of the engines that are known for long enough."""
        per_s, num_prompts = [0.0] * 4, 0
        for engine in engines:
            seen = self._seen.get(engine.incarnation)
            if not seen or seen[-1][0] - seen[0][0] < _LEAST_SPAN_S:
                continue
            ended_s, last = seen[-1]
            behind = islice(seen, 1, None)
            starts = zip(seen, behind, strict=False)
            began_s, first = next(one for one, after in starts if ended_s - after[0] < span_s)
            more = [(b - a) / (ended_s - began_s) for a, b in zip(first, last, strict=True)]
            per_s = [*map(add, per_s, more)]
            num_prompts += last[0] - first[0]
        return _Rates(num_prompts, *per_s)


@dataclass(eq=False)
class PromiseDecider:
    """Call `look` periodically, and `orders` while this gateway is the leader. `ttft_s`: the TTFT
    target. `queued_tokens`: tokens of prompts that wait at this gateway."""

    table: EngineTable
    clock: Clock
    ttft_s: float
    queued_tokens: Callable[[], int] = lambda: 0
    _meter: LoadMeter = field(default_factory=LoadMeter)
    _since: dict[str, tuple[bool, float]] = field(default_factory=dict)  # by incarnation
    _wanted: dict[str, tuple[bool, float]] = field(default_factory=dict)  # more or fewer, since

    def least_epoch(self, leader: str) -> int:
        """The least epoch at which all engines follow an order of `leader`: above the epochs of
        other leaders that they have followed, since Redis may have issued an epoch twice."""
        loads = [e.load for e in self.table.engines.values()]
        epochs = (load.promise_epoch + (load.promise_leader != leader) for load in loads)
        return max(epochs, default=0)

    def look(self) -> None:
        """Record the counters and promises of the last heartbeats."""
        now_s = self.clock.monotonic_s()
        self._meter.look(self.table.engines.values(), now_s)
        before, self._since = self._since, {}
        for incarnation, engine in self.table.engines.items():
            is_promising = not engine.load.is_promise_withdrawn
            known = before.get(incarnation)
            is_same = known is not None and known[0] == is_promising
            self._since[incarnation] = known if is_same and known else (is_promising, now_s)

    def orders(self) -> dict[str, float | None]:
        """By incarnation, the TBT targets of the engines to change; None: no promise."""
        found: dict[str, float | None] = {}
        ready = [e for e in self.table.engines.values() if e.is_ready]
        fingerprints = {engine.fingerprint for engine in ready}
        for fingerprint in fingerprints:
            found |= self._orders_of([e for e in ready if e.fingerprint == fingerprint])
        self._wanted = {f: wanted for f, wanted in self._wanted.items() if f in fingerprints}
        return found

    def _orders_of(self, engines: list[LinkedEngine]) -> dict[str, float | None]:
        """The orders for the ready engines of one model."""
        own = {e.incarnation: e.welcome.tbt_target_s for e in engines if e.welcome.tbt_target_s > 0}
        found: dict[str, float | None] = {}
        movable: list[EnginePromise] = []
        num_others = 0
        for engine in engines:
            is_promising, since_s = self._since.get(engine.incarnation, (True, 0.0))
            if engine.member.role is Role.DECODE:
                num_others += 1
                if not is_promising and engine.incarnation in own:
                    found[engine.incarnation] = own[engine.incarnation]
            elif engine.incarnation in own:
                num_decodes = engine.load.decodes.num_decodes
                movable.append(
                    EnginePromise(engine.incarnation, is_promising, since_s, num_decodes)
                )
        if not movable:
            return found
        num_pure = self._num_pure(engines, movable, num_others)
        now_s = self.clock.monotonic_s()
        moves = plan_moves(movable, num_pure, now_s, must_serve=not num_others)
        return found | {name: own[name] if promises else None for name, promises in moves.items()}

    def _num_pure(
        self, engines: list[LinkedEngine], movable: list[EnginePromise], num_others: int
    ) -> int:
        """How many should promise nothing; the current number, where the load is not clear."""
        now = sum(not engine.is_promising for engine in movable)
        if not num_others:
            return 0
        mix = self._meter.mix(engines, self.queued_tokens(), self.ttft_s)
        cost = _cost_of([engine.load for engine in engines])
        if cost is None or mix is None:
            return now
        names = {engine.incarnation for engine in movable}
        movers = [e for e in engines if e.incarnation in names]
        chunk = max((e.load.step_tokens for e in movers), default=0)
        target_s = min(engine.welcome.tbt_target_s for engine in movers)
        target = PromiseTarget(target_s, self.ttft_s, chunk or STEP_TOKENS)
        wanted = choose_num_pure(cost, mix, target, len(movable), num_others, now)
        return wanted if self._is_confirmed(engines[0].fingerprint, wanted - now) else now

    def _is_confirmed(self, fingerprint: str, change: int) -> bool:
        """Whether more (or fewer) have been wanted for _CONFIRM_S, whatever the number."""
        now_s = self.clock.monotonic_s()
        before, since_s = self._wanted.pop(fingerprint, (False, now_s))
        if not change:
            return False
        is_more = change > 0
        self._wanted[fingerprint] = is_more, since_s if is_more == before else now_s
        return now_s - self._wanted[fingerprint][1] >= _CONFIRM_S


def _cost_of(loads: Sequence[ReportedLoad]) -> StepCost | None:
    """The step cost measured on the largest steps, with decode costs from the engines that had
    decodes. None: no engine had steps large enough to show the cost of prompts."""
    costs = [load.step_cost for load in loads if load.step_cost is not None]
    best = max(costs, key=lambda cost: cost.max_rows, default=None)
    if best is None or best.max_rows < MEASURED_ROWS:
        return None
    seen = {name: max(getattr(cost, name) for cost in costs) for name in _BESIDE_DECODES}
    return replace(best, **seen)
