"""Exchanges the windows of all gateways: writes own rows and reads the others' once a second.

    window.outbox ──► rows of 1 s, of 30 s ──► Redis ──► other gateways' rows ──► window.merge
A gateway that starts, or that was without Redis, reads the others' last five minutes in rows of one
second, and older time in rows of 30 s. The rows of ended gateways stay for an hour. If Redis is
slow or away, only this loop waits, and the window has only this gateway's calls. Seconds are
numbered by Redis' clock, so that clocks of two hosts are never compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import asdict

from ....cluster.redis_client import RedisAway
from ....core.ports import Clock
from ..metrics import metric_table as table
from ..metrics.tally import Tally
from .redis_windows import MAX_GATEWAYS, STATE_TTL_S, RedisWindows
from .row_message import (
    BadRow,
    GatewayState,
    RowKey,
    pack_row,
    pack_state,
    unpack_row,
    unpack_state,
)
from .rows import Rows
from .window import HOUR_ROW_S, HOUR_S, KEPT, SPAN_S, TelemetryWindow

log = logging.getLogger(__name__)

LAG_S = 2  # a second is written after its end, and read during the next one
_TURN_AT_S = 0.05  # after each whole second
_MAX_WRITTEN = 64  # seconds in one turn, after a time without Redis
_MAX_READ = 512  # rows in one turn
_MAX_OTHERS = 4 * MAX_GATEWAYS  # other gateways that are kept in memory
_MERGED_AT_ONCE = 16  # rows between two yields to the event loop
_RATES_OVER_S = 10
_RATED = (table.BEGAN.name, table.OUTPUT_TOKENS.name)
_OUT_OF_STEP_S = 0.75  # how far Redis' clock may drift from ours before seconds are numbered anew


@dataclass(slots=True)
class _Other:
    """Another gateway. `read_through`: the last second whose rows are in our window."""

    read_through: int
    state: GatewayState | None = None
    read_s: float = -math.inf  # when `state` was last read


@dataclass(eq=False)
class WindowShare:
    """The exchange of one gateway. `_gateway`: its random id; `_about`: its description, the fields
    `name`, `version`, `is_ready` and `is_draining` of its state.

    `_longer`: rows of HOUR_ROW_S, by their first second. `_last_seconds`: own ones up to `_noted`.
    `_shift`: seconds by which Redis' clock is ahead of ours.
    """

    _window: TelemetryWindow
    _store: RedisWindows
    _gateway: str
    _about: Callable[[], dict[str, Any]]
    _clock: Clock
    _others: dict[str, _Other] = field(default_factory=dict)
    _longer: dict[int, Tally] = field(default_factory=dict)
    _last_seconds: Rows = field(default_factory=lambda: Rows(1, _RATES_OVER_S, _RATED))
    _shift: int | None = None

    def __post_init__(self) -> None:
        self._outbox = self._window.outbox = {}
        self._began_s = self._clock.monotonic_s()
        self._noted = int(self._began_s) - 1
        self._away_since_s: float | None = self._began_s

    async def run(self) -> None:
        """Run until cancelled. Raises what a turn raises; `scope` then shows nothing as shared."""
        while True:
            try:
                await self.turn()
            except Exception:
                self._note_away("a bug")
                raise
            now_s = self._clock.monotonic_s()
            await asyncio.sleep(math.floor(now_s + 1) + _TURN_AT_S - now_s)

    async def turn(self) -> None:
        """Write own rows that have ended; read the rows of other gateways."""
        now = self._collect()
        try:
            await self._keep_in_step()
            gateways = await self._write(now)
            await self._read(gateways)
        except RedisAway as error:
            self._note_away(str(error))
        else:
            self._note_back()
        self._forget()

    async def close(self) -> None:
        """Delete own state. Not to be called from `run`'s task, which is cancelled."""
        await self._store.close(self._gateway)

    def scope(self) -> dict[str, Any]:
        """For the page: the gateways whose calls its figures include."""
        since_s = self._away_since_s
        states = [other.state for other in self._others.values() if other.state is not None]
        return {
            "is_shared": since_s is None,
            "alone_since_unix_s": None if since_s is None else self._window.to_unix_s(since_s),
            "gateways": [
                asdict(self._state()) | {"is_own": True},
                *(asdict(s) | {"is_own": False} for s in sorted(states, key=lambda s: s.name)),
            ],
        }

    # --- our own ----------------------------------------------------------------------------------

    def _collect(self) -> int:
        """Settle the outbox up to the last ended second and note the rates; return the current
        second."""
        self._window.settle()
        now = int(self._clock.monotonic_s())
        for number in range(self._noted + 1, now):
            if number in self._outbox:
                self._last_seconds.add(number, self._outbox[number])
        self._noted = now - 1
        self._last_seconds.expire(now)
        return now

    async def _keep_in_step(self) -> None:
        """Compare with Redis' clock. After a jump of it, only later rows are read."""
        ahead_s = await self._store.now_s() - self._clock.monotonic_s()
        if self._shift is None or abs(ahead_s - self._shift) > _OUT_OF_STEP_S:
            leap_s = 0.0 if self._shift is None else abs(ahead_s - self._shift)
            self._shift = round(ahead_s)
            if leap_s > LAG_S:
                self._longer.clear()
                for other in self._others.values():
                    other.read_through = int(self._clock.monotonic_s()) + self._shift

    async def _write(self, now: int) -> dict[str, int]:
        """Write the seconds before `now`. Returns the gateways, with the last second that each has
        written."""
        shift = self._shifted
        ended = [number for number in self._outbox if number < now]
        written = {number: self._outbox[number] for number in ended[:_MAX_WRITTEN]}
        through = (now - 1 if len(written) == len(ended) else max(written)) + shift
        key_of = partial(RowKey, self._gateway)
        rows = {key_of(1, number + shift): row for number, row in written.items()}
        whole = min(written, default=now) + shift  # all earlier seconds are in `_longer`
        longer = [begin for begin in self._longer if begin + HOUR_ROW_S <= whole]
        rows |= {key_of(HOUR_ROW_S, begin): self._longer[begin] for begin in longer}
        packed = {key: pack_row(key, self._began_unix_s(key), row) for key, row in rows.items()}
        state = pack_state(self._state())
        gateways = await self._store.write(self._gateway, through, state, packed)
        for begin in longer:
            del self._longer[begin]
        for number, row in written.items():
            self._outbox.pop(number, None)
            begin = (number + shift) // HOUR_ROW_S * HOUR_ROW_S
            self._longer.setdefault(begin, Tally()).join(row, KEPT)
        return gateways

    def _began_unix_s(self, key: RowKey) -> float:
        """The start of a row by this gateway's clock."""
        return self._window.to_unix_s(key.second - self._shifted)

    def _state(self) -> GatewayState:
        over_s = min(_RATES_OVER_S, max(1.0, self._clock.monotonic_s() - self._began_s))
        counts = self._last_seconds.total.counts
        return GatewayState(
            gateway=self._gateway,
            num_running=self._window.num_running,
            began_per_s=counts[table.BEGAN.name,] / over_s,
            output_tokens_per_s=counts[table.OUTPUT_TOKENS.name,] / over_s,
            **self._about(),
        )

    @property
    def _shifted(self) -> int:
        assert self._shift is not None, "kept in step before"
        return self._shift

    # --- the others' ------------------------------------------------------------------------------

    async def _read(self, gateways: dict[str, int]) -> None:
        """Read rows of others into the window: at most _MAX_READ, oldest first per gateway."""
        gateways.pop(self._gateway, None)
        now = int(self._clock.monotonic_s()) + self._shifted
        wanted: list[RowKey] = []
        for gateway, through in gateways.items():
            if gateway not in self._others and len(self._others) >= _MAX_OTHERS:
                continue
            other = self._others.setdefault(gateway, _Other(now - HOUR_S))
            wanted += _missing(gateway, other.read_through, min(through, now + LAG_S))
            if len(wanted) >= _MAX_READ:
                break
        wanted = wanted[:_MAX_READ]
        alive = [gateway for gateway in gateways if gateway in self._others]
        states, rows = await self._store.read(alive, wanted)
        for gateway, packed in zip(alive, states, strict=True):
            self._take_state(gateway, packed)
        for index, (key, packed) in enumerate(zip(wanted, rows, strict=True)):
            self._take_row(key, packed)
            if index % _MERGED_AT_ONCE == _MERGED_AT_ONCE - 1:
                await asyncio.sleep(0)
        for gateway, other in list(self._others.items()):
            if gateway not in gateways and other.read_through < now - HOUR_S:
                del self._others[gateway]  # not earlier: its rows must not be read twice

    def _take_state(self, gateway: str, packed: bytes) -> None:
        if not packed:
            return
        try:
            state = unpack_state(packed, gateway)
        except BadRow as error:
            self._note_bad(gateway, error)
        else:
            other = self._others[gateway]
            other.state, other.read_s = state, self._clock.monotonic_s()

    def _take_row(self, key: RowKey, packed: bytes) -> None:
        self._others[key.gateway].read_through = key.second + key.row_s - 1
        if not packed:
            return  # no events, or the row has expired
        number = key.second - self._shifted
        try:
            unix_s, row = unpack_row(packed, key)
        except BadRow as error:
            self._note_bad(key.gateway, error)
        else:
            ahead_s = self._began_unix_s(key) - unix_s
            row.ended = [call.moved(ahead_s) for call in row.ended]
            self._window.merge(number, key.row_s, row)

    def _forget(self) -> None:
        """Drop expired states: the load of these gateways is not known any more."""
        now_s = self._clock.monotonic_s()
        for other in self._others.values():
            if now_s - other.read_s > STATE_TTL_S:
                other.state = None
        states = [other.state for other in self._others.values() if other.state is not None]
        self._window.num_running_elsewhere = sum(state.num_running for state in states)
        self._window.lag_s = LAG_S if states else 0

    # --- notes ------------------------------------------------------------------------------------

    def _note_bad(self, gateway: str, error: BadRow) -> None:
        log.debug("skipped the shared counts of gateway %s: %s", gateway, error)

    def _note_away(self, reason: str) -> None:
        if self._away_since_s is None:
            log.warning("the live page shows only this gateway, Redis is unreachable: %s", reason)
            self._away_since_s = self._clock.monotonic_s()

    def _note_back(self) -> None:
        if self._away_since_s is not None:
            log.info("the live page shows all gateways")
        self._away_since_s = None


def _missing(gateway: str, after: int, through: int) -> list[RowKey]:
    """The keys of the rows after the second `after` up to `through`, oldest first."""
    begin = after + 1
    keys: list[RowKey] = []
    fine = -(-(through - SPAN_S + HOUR_ROW_S) // HOUR_ROW_S) * HOUR_ROW_S
    if begin < fine:
        first = -(-begin // HOUR_ROW_S) * HOUR_ROW_S
        keys = [RowKey(gateway, HOUR_ROW_S, s) for s in range(first, fine, HOUR_ROW_S)]
        begin = fine
    return keys + [RowKey(gateway, 1, second) for second in range(begin, through + 1)]
