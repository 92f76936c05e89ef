"""Redis as the store of shared windows, in a dict: TTLs by a clock that the test advances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakes.clock import FakeClock

from baton.cluster.redis_client import RedisAway
from baton.gateway.telemetry.window.redis_windows import STATE_TTL_S
from baton.gateway.telemetry.window.row_message import RowKey
from baton.gateway.telemetry.window.window import HOUR_ROW_S, HOUR_S, SPAN_S

_TTL_S = {1: SPAN_S + 30, HOUR_ROW_S: HOUR_S + 60}


class FakeWindowStore:
    """`ahead_s`: how far its clock is ahead of the test's. All gateways use the same store."""

    def __init__(self, clock: FakeClock, ahead_s: float = 1_000_000.3) -> None:
        self.ahead_s = ahead_s
        self.is_away = False
        self.rows: dict[RowKey, tuple[float, bytes]] = {}
        self.states: dict[str, tuple[float, bytes]] = {}
        self.gateways: dict[str, int] = {}
        self._clock = clock

    async def now_s(self) -> float:
        if self.is_away:
            raise RedisAway("away")
        return self._clock.monotonic_s() + self.ahead_s

    async def write(
        self, gateway: str, through: int, state: bytes, rows: Mapping[RowKey, bytes]
    ) -> dict[str, int]:
        now_s = await self.now_s()
        for key, packed in rows.items():
            self.rows[key] = (now_s + _TTL_S[key.row_s], packed)
        self.states[gateway] = (now_s + STATE_TTL_S, state)
        self.gateways[gateway] = through
        self.gateways = {g: s for g, s in self.gateways.items() if s > through - HOUR_S}
        return dict(sorted(self.gateways.items(), key=lambda item: -item[1]))

    async def read(
        self, gateways: Sequence[str], rows: Sequence[RowKey]
    ) -> tuple[list[bytes], list[bytes]]:
        now_s = await self.now_s()
        nothing = (0.0, b"")
        found = [self.states.get(gateway, nothing) for gateway in gateways]
        values = [*found, *(self.rows.get(key, nothing) for key in rows)]
        alive = [packed if until_s > now_s else b"" for until_s, packed in values]
        return alive[: len(gateways)], alive[len(gateways) :]

    async def close(self, gateway: str) -> None:
        self.states.pop(gateway, None)
