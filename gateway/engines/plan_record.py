"""Which plans were chosen in the last seconds, and what they and the next best were estimated to
take: for people who look. Decides nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...core.membership import Role
from ...core.ports import Clock
from .routing import REQUEST_S, EngineState

SPAN_S = 10
_ESTIMATE_EVERY_S = 0.05  # to estimate the next best takes about as long as to choose
PAIR, ALONE, MOVE = "pair", "alone", "move"
_MOVED = "moved"


@dataclass(slots=True)
class _Sums:
    """Of one kind of plan in one second. `next_s`: where there was another plan."""

    num: int = 0
    num_estimated: int = 0
    chosen_s: float = 0.0
    num_next: int = 0
    next_s: float = 0.0
    prefixes_from: Counter[str] = field(default_factory=Counter)  # by the source's name
    moves: Counter[str] = field(default_factory=Counter)  # by the target's name, or why it failed


@dataclass(eq=False)
class PlanRecord:
    """One gateway's."""

    clock: Clock
    _seconds: deque[tuple[int, dict[str, _Sums]]] = field(default_factory=deque)
    _estimated_s: float = -1.0

    def note(
        self,
        engines: Sequence[EngineState],
        num_tokens: int,
        prefill: str,
        decode: str,
        prefix_from: str = "",
    ) -> None:
        """A request of so many tokens goes to these, of those engines, after it got a prefix from
        the engine of that name, if any."""
        now_s = self.clock.monotonic_s()
        sums = self._sums(ALONE if prefill == decode else PAIR, now_s)
        sums.num += 1
        if prefix_from:
            sums.prefixes_from[prefix_from] += 1
        if now_s >= self._estimated_s + _ESTIMATE_EVERY_S:
            self._estimated_s = now_s
            chosen_s, next_s = estimates(engines, num_tokens, prefill, decode)
            sums.num_estimated, sums.chosen_s = sums.num_estimated + 1, sums.chosen_s + chosen_s
            if next_s is not None:
                sums.num_next, sums.next_s = sums.num_next + 1, sums.next_s + next_s

    def note_move(self, to: str, how: str) -> None:
        """A running request went to the engine of that name, or did not, and why not."""
        sums = self._sums(MOVE, self.clock.monotonic_s())
        sums.num += how == _MOVED
        sums.moves[to if how == _MOVED else how] += 1

    def _sums(self, kind: str, now_s: float) -> _Sums:
        """Of this second."""
        if not self._seconds or self._seconds[-1][0] != int(now_s):
            self._seconds.append((int(now_s), {PAIR: _Sums(), ALONE: _Sums(), MOVE: _Sums()}))
            self._forget(now_s)
        return self._seconds[-1][1][kind]

    def rows(self) -> list[dict[str, object]]:
        """For JSON, one a kind: how many a second, means of the estimates in seconds, and how many
        a second got their prefix from which engine. Of moves: how many a second went to which
        engine, or failed for what."""
        now_s = self.clock.monotonic_s()
        self._forget(now_s)
        span_s = max(SPAN_S, now_s - self._seconds[0][0] if self._seconds else 0.0)
        found: list[dict[str, object]] = []
        for kind in (PAIR, ALONE, MOVE):
            sums = [second[kind] for _, second in self._seconds]
            num_estimated, num_next = (
                sum(one.num_estimated for one in sums),
                sum(one.num_next for one in sums),
            )
            found.append(
                {
                    "plan": kind,
                    "per_s": sum(one.num for one in sums) / span_s,
                    "chosen_s": sum(one.chosen_s for one in sums) / num_estimated
                    if num_estimated
                    else None,
                    "next_s": sum(one.next_s for one in sums) / num_next if num_next else None,
                    "prefixes_from": _per_s((one.prefixes_from for one in sums), span_s),
                    "moves": _per_s((one.moves for one in sums), span_s),
                }
            )
        return found

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - SPAN_S - 1:
            self._seconds.popleft()


def _per_s(counts: Iterable[Counter[str]], span_s: float) -> dict[str, float]:
    return {name: num / span_s for name, num in sum(counts, Counter()).items()}


def estimates(
    engines: Sequence[EngineState], num_tokens: int, prefill: str, decode: str
) -> tuple[float, float | None]:
    """Seconds of the plan that was chosen, and of the best other one that could have been; None:
    there is none."""
    plans: dict[tuple[str, str], float] = {}
    sources: list[tuple[float, EngineState]] = []
    pullers: list[tuple[float, EngineState]] = []
    for engine in engines:
        is_chosen = engine.incarnation in (prefill, decode)
        if engine.is_draining and not is_chosen:
            continue
        prompt_s = engine.prompt_seconds(num_tokens)
        if engine.role is Role.PREFILL and (engine.takes_prompt or is_chosen):
            sources.append((prompt_s, engine))
        if engine.role is Role.DECODE and (engine.has_place or is_chosen):
            pullers.append((engine.decode_seconds(num_tokens), engine))
        may_both = engine.keeps_promise and engine.takes_prompt and engine.has_place
        if may_both or prefill == decode == engine.incarnation:
            alone_s = prompt_s + engine.num_requests * REQUEST_S
            plans[engine.incarnation, engine.incarnation] = alone_s
    for source_s, source in _best(sources, prefill):
        for puller_s, puller in _best(pullers, decode):
            if source.incarnation in puller.links:
                plans[source.incarnation, puller.incarnation] = source_s + puller_s
    chosen_s = plans.pop((prefill, decode), 0.0)
    return chosen_s, min(plans.values(), default=None)


def _best(parts: list[tuple[float, EngineState]], chosen: str) -> list[tuple[float, EngineState]]:
    """The two best, and the one that was chosen: the next best plan has one of them on each
    side, wherever the links are all there."""
    ordered = sorted(parts, key=lambda part: part[0])
    return ordered[:2] + [part for part in ordered[2:] if part[1].incarnation == chosen]
