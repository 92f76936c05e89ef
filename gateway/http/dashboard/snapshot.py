"""The data that the page receives once a second: telemetry window, engines, the gateway itself.

    tick ──► whole snapshot   to viewers that are new, or have missed a tick
         └─► update           to all others: series, heat maps and recent calls since the last tick
All viewers of the same span with the same SLO targets are sent the same bytes. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core import metrics
from ....core.membership import Member
from ....core.ports import Clock
from ...engines.engine_table import EngineTable
from ...engines.linked_engine import LinkedEngine
from ...telemetry.calls.slo import SloTargets
from ...telemetry.window.snapshot import window_snapshot
from ...telemetry.window.window import TelemetryWindow
from .plan_rates import PlanRates

MAX_RECENT = 25  # recent calls in a snapshot; an open page gathers more
_ROWS_AGAIN = 4  # rows repeated in an update: another gateway's share of a second may be late
_TICK_AT_S = 0.25  # after each whole second: that second's row is complete by then
_TIMES_BEGIN_S = 1e6  # smaller values are durations, larger ones unix times


@dataclass(frozen=True, slots=True)
class Update:
    """One event for a viewer: `kind` is "snapshot" or "update", `data` JSON."""

    number: int
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class View:
    """What a viewer looks at: the last minutes or the last hour, with SLO targets."""

    targets: SloTargets
    of_hour: bool = False


@dataclass(eq=False)
class SnapshotFeed:
    """`run` ticks until cancelled; `_about` describes the gateway itself, `_scope` the gateways
    whose calls the window includes (`WindowShare.scope`).

    `targets`: the gateway's own, for viewers who set none. `num_viewers`: following now.
    """

    _window: TelemetryWindow
    _roster: EngineRoster
    _about: Callable[[], dict[str, Any]]
    targets: SloTargets
    _clock: Clock
    _scope: Callable[[], dict[str, Any]]
    num_viewers: int = 0
    _number: int = 0
    _previous_s: float = 0.0
    _now_s: float = field(init=False)
    _made: dict[tuple[View, bool], bytes] = field(default_factory=dict)
    _ticked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._now_s = self._window.now_s()

    async def run(self) -> None:
        """Tick once a second, even without viewers: the roster must not miss any engine."""
        while True:
            self.tick()
            now_s = self._clock.monotonic_s()
            await asyncio.sleep(math.floor(now_s + 1 - _TICK_AT_S) + _TICK_AT_S - now_s)

    def tick(self) -> None:
        """Update the roster, discard the snapshots made for the last tick, and wake the viewers."""
        self._previous_s, self._now_s = self._now_s, self._window.now_s()
        self._roster.look(self._window.to_unix_s(self._now_s))
        self._number += 1
        self._made.clear()
        self._ticked.set()
        self._ticked = asyncio.Event()

    async def follow(self, view: View) -> AsyncIterator[Update]:
        """A whole snapshot, then an update per tick, or a whole one again after a missed tick."""
        sent: int | None = None
        while True:
            is_whole = sent != self._number - 1
            kind = "snapshot" if is_whole else "update"
            sent, ticked = self._number, self._ticked
            yield Update(sent, kind, self.data(view, is_whole=is_whole))
            if sent == self._number:
                await ticked.wait()

    def data(self, view: View, *, is_whole: bool = True) -> bytes:
        """Everything of the window, at most a second old, or what came since the last tick."""
        made = self._made.get((view, is_whole))
        if made is None:
            made = json.dumps(self._snapshot(view, is_whole), separators=(",", ":")).encode()
            self._made[view, is_whole] = made
        return made

    def _snapshot(self, view: View, is_whole: bool) -> dict[str, Any]:
        snapshot = window_snapshot(
            self._window,
            view.targets,
            None if is_whole else self._previous_s,
            of_hour=view.of_hour,
            num_again=0 if view.of_hour else _ROWS_AGAIN,
        )
        series = snapshot["series"]
        snapshot["series"] = {name: _drawn(column) for name, column in series.items()}
        snapshot["recent"] = snapshot["recent"][:MAX_RECENT]
        snapshot |= {"gateway": self._about(), "engines": self._roster.rows()}
        snapshot |= {"plans": self._roster.plans.rows(), "scope": self._scope()}
        if is_whole:
            snapshot["definitions"] = definitions()
        compact: dict[str, Any] = _compact(snapshot)
        return compact


def definitions() -> list[tuple[str, str]]:
    """(term, meaning) from core/metrics.py: the two columns of its docstring."""
    table = (metrics.__doc__ or "").strip().split("\n\n")[-1]
    rows = (re.fullmatch(r"(.{12}) (.+)", line) for line in table.splitlines())
    return [(row[1].strip(), row[2]) for row in rows if row is not None]


def _drawn(column: list[Any]) -> list[Any]:
    """Round durations to three digits, which is finer than a pixel."""
    return [
        float(f"{value:.3g}") if isinstance(value, float) and value < _TIMES_BEGIN_S else value
        for value in column
    ]


def _compact(value: Any) -> Any:
    """Round durations to microseconds and unix times to milliseconds."""
    if isinstance(value, float):
        return round(value, 6 if value < _TIMES_BEGIN_S else 3)
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_compact(item) for item in value]
    return value


_FORGET_S = 3600.0
_MAX_GONE = 64
_OF_MEMBER = ("incarnation", "name", "address", "device", "block_size", "num_blocks")
_OF_LOAD = (
    *("free_blocks", "credit_blocks", "num_running", "num_waiting", "waiting_tokens"),
    *("host_blocks", "tbt_target_s", "is_promise_withdrawn"),
)
_KEPT_OVER = 30  # looks, one per second
_HITS_OVER = 301
_COUNTED = (
    *("num_promised_steps", "num_kept_steps", "num_drafts", "num_draft_tokens"),
    *("prefix_query_tokens", "prefix_hit_tokens", "host_hit_tokens", "fetched_blocks"),
)


@dataclass(slots=True)
class _Seen:
    """One incarnation of an engine; `restarts`: the number of earlier ones of the same name.
    `looks`: its counters at the last looks."""

    member: Member
    state: str
    since_unix_s: float
    restarts: int = 0
    looks: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=_HITS_OVER))

    def _growth(self, num_looks: int) -> Counter[str]:
        """By how much its counters grew over the last looks."""
        if not self.looks:
            return Counter()
        return self.looks[-1] - self.looks[-min(num_looks, len(self.looks))]

    @property
    def draft_means(self) -> tuple[float, float] | None:
        """Mean numbers of drafted and of accepted tokens in the last steps of sequences with
        drafts; None: there were no such steps."""
        grown = self._growth(_KEPT_OVER)
        if not (steps := grown["num_drafts"]):
            return None
        return grown["num_draft_tokens"] / steps, grown["accepted_drafts"] / steps

    @property
    def hit_tokens(self) -> dict[str, int] | None:
        """Tokens of the sequences that were lately allocated blocks, by the source of their KV. The
        engine counts fetched blocks as device hits once they are used; None: nothing is known."""
        if not self.looks:
            return None
        grown = self._growth(_HITS_OVER)
        hit, host = grown["prefix_hit_tokens"], grown["host_hit_tokens"]
        device = max(0, hit - host - grown["fetched_blocks"] * self.member.block_size)
        return {
            "device": device,
            "host": host,
            "fetched": hit - host - device,
            "missed": max(0, grown["prefix_query_tokens"] - hit),
        }

    @property
    def kept_share(self) -> float | None:
        """The share of the last steps with decodes and a promised step time that kept it; None:
        there were no such steps."""
        grown = self._growth(_KEPT_OVER)
        steps = grown["num_promised_steps"]
        return grown["num_kept_steps"] / steps if steps else None


@dataclass(eq=False)
class EngineRoster:
    """Every engine that this gateway has seen, with its state.

        starting ──heartbeat──► ready ◄──► draining
            ▲                     │ link down
            └──────link up── unlinked ──out of the directory──► gone
    An engine that is gone stays listed until one of its name is back, or for an hour: a page must
    not lose an engine silently. `_members`: every engine that is in the directory or linked;
    `_is_starting`: whether an engine has sent its Welcome, but no heartbeat yet. `plans`: those
    chosen lately.
    """

    _table: EngineTable
    _members: Callable[[], Sequence[Member]]
    _is_starting: Callable[[str], bool]
    _seen: dict[str, _Seen] = field(default_factory=dict)  # by incarnation
    plans: PlanRates = field(init=False)

    def __post_init__(self) -> None:
        self.plans = PlanRates(self._table.plans, self._table.mirror.clock)

    def look(self, now_unix_s: float) -> None:
        """Take over the state of the directory, the links and the chosen plans."""
        self.plans.look()
        present = {member.incarnation: member for member in self._members()}
        for incarnation, member in present.items():
            self._seen.setdefault(incarnation, _Seen(member, "", now_unix_s))
        for incarnation, seen in self._seen.items():
            state = self._state(incarnation) if incarnation in present else "gone"
            if state != seen.state:
                seen.state, seen.since_unix_s = state, now_unix_s
            engine = self._table.engines.get(incarnation)
            if engine is None:
                seen.looks.clear()  # its counters are not known
            else:
                counters = engine.load.counters
                look = Counter({name: getattr(counters, name) for name in _COUNTED})
                look["accepted_drafts"] = sum(counters.accepted_drafts)
                seen.looks.append(look)
        self._join_restarted()
        self._forget_old(now_unix_s)

    def rows(self) -> list[dict[str, Any]]:
        """Rows for JSON: prefill engines first, each role sorted by name."""
        order = sorted(
            self._seen.values(),
            key=lambda seen: (seen.member.role.value != "prefill", seen.member.name),
        )
        return [self._row(seen) for seen in order]

    def _state(self, incarnation: str) -> str:
        engine = self._table.engines.get(incarnation)
        if engine is None:
            return "starting" if self._is_starting(incarnation) else "unlinked"
        return "draining" if engine.load.is_draining else "ready"

    def _row(self, seen: _Seen) -> dict[str, Any]:
        member = seen.member
        engine = self._table.engines.get(member.incarnation)
        load = engine.load if engine is not None else None
        return {
            "role": member.role.value,
            **{name: getattr(member, name) for name in _OF_MEMBER},
            **{name: getattr(seen, name) for name in ("state", "since_unix_s", "restarts")},
            "pool_blocks": engine.pool_blocks if engine is not None else None,
            **{name: getattr(load, name, None) for name in _OF_LOAD},
            "kept_share": seen.kept_share,
            "draft_means": seen.draft_means,
            "cached": self._cached(engine),
            "hit_tokens": seen.hit_tokens,
            "step_p99_s": (load.decode_step_p99_s or None) if load is not None else None,
            "links": sorted(load.links) if load is not None else [],
        }

    def _cached(self, engine: LinkedEngine | None) -> dict[str, int] | None:
        """The blocks and bytes that the prefix index lists for an engine."""
        counts = None if engine is None else self._table.mirror.counts(engine.incarnation)
        if engine is None or counts is None:
            return None
        on_device, in_host = counts
        return {
            "device_blocks": on_device,
            "device_bytes": on_device * engine.welcome.block_bytes,
            "host_blocks": in_host,
            "host_bytes": in_host * engine.welcome.block_bytes,
        }

    def _join_restarted(self) -> None:
        """Replace engines that are gone by present ones of the same role and name."""
        alive = {
            (seen.member.role, seen.member.name): seen
            for seen in self._seen.values()
            if seen.state != "gone"
        }
        for incarnation, seen in list(self._seen.items()):
            successor = alive.get((seen.member.role, seen.member.name))
            if seen.state == "gone" and successor is not None:
                successor.restarts = max(successor.restarts, seen.restarts + 1)
                del self._seen[incarnation]

    def _forget_old(self, now_unix_s: float) -> None:
        gone = sorted(
            (seen for seen in self._seen.values() if seen.state == "gone"),
            key=lambda seen: -seen.since_unix_s,
        )
        for rank, seen in enumerate(gone):
            if rank >= _MAX_GONE or now_unix_s - seen.since_unix_s > _FORGET_S:
                del self._seen[seen.member.incarnation]
