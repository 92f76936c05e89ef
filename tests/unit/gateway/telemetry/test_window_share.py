"""The windows that gateways share, against one window with all their calls."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import zlib
from typing import Any

import msgspec
import pytest
from fakes.clock import FakeClock
from fakes.gateway.calls import PlayedCall, feed_of
from fakes.gateway.window_store import FakeWindowStore
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import EngineFailed
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.slo import MAX_JUDGED, Judged, SloTargets
from baton.gateway.telemetry.metrics.metric_table import TTFT
from baton.gateway.telemetry.metrics.tally import Tally
from baton.gateway.telemetry.window.row_message import (
    BadRow,
    RowKey,
    pack_row,
    unpack_row,
    unpack_state,
)
from baton.gateway.telemetry.window.snapshot import window_snapshot
from baton.gateway.telemetry.window.window import TelemetryWindow, counts_of
from baton.gateway.telemetry.window.window_share import LAG_S, WindowShare

TARGETS = SloTargets(0.2, 0.05)
KEY = RowKey("a" * 32, 1, 7)
LIKE_ALL = ("counts", "errors", "refusals", "latency", "stages", "prefix", "transfers")


class ShiftedClock(FakeClock):
    """The test's clock as seen on another host, with an offset."""

    def __init__(self, clock: FakeClock, ahead_s: float) -> None:
        super().__init__()
        self._clock, self._ahead_s = clock, ahead_s

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s() + self._ahead_s

    def unix_ns(self) -> int:
        return self._clock.unix_ns() + round(self._ahead_s * 1e9)


class PlayedGateway:
    """A window, its feed, and its share."""

    def __init__(self, cluster: PlayedCluster, number: int) -> None:
        clock = ShiftedClock(cluster.clock, 777.0 * number)
        self.clock = clock
        self.window = TelemetryWindow(clock)
        self.feed: CallFeed = feed_of(clock, window=self.window)
        about = {"version": "1", "is_ready": True, "is_draining": False, "name": f"host-{number}"}
        self.share = WindowShare(self.window, cluster.store, f"{number:032x}", lambda: about, clock)

    def snapshot(self, **options: Any) -> dict[str, Any]:
        return window_snapshot(self.window, TARGETS, **options)


class PlayedCluster:
    """Gateways with clocks of their own, and one window with the calls of all."""

    def __init__(self, num_gateways: int) -> None:
        self.clock = FakeClock()
        self.store = FakeWindowStore(self.clock)
        self.random = random.Random(3)
        self.all = TelemetryWindow(self.clock)
        self.feed_of_all = feed_of(self.clock, window=self.all)
        self.gateways = [PlayedGateway(self, number) for number in range(num_gateways)]

    def call(self, gateway: PlayedGateway) -> None:
        """One call of random length, counted in both windows; it takes a fraction of a second."""
        calls = [
            PlayedCall(gateway.clock, gateway.feed),
            PlayedCall(self.clock, self.feed_of_all),
        ]
        is_good = self.random.random() < 0.9
        for _ in range(self.random.randrange(1, 6)):
            self.clock.advance(self.random.expovariate(20))
            for call in calls:
                call.deliver(1)
        for call in calls:
            call.finish(cached_tokens=2) if is_good else call.end(EngineFailed("broke"))

    async def pass_s(self, seconds: int) -> None:
        """Advance the clock; each gateway runs once a second."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            for gateway in self.gateways:
                await gateway.share.turn()

    async def work(self, seconds: int) -> None:
        for _ in range(seconds):
            self.call(self.random.choice(self.gateways))
            await self.pass_s(1)

    def assert_alike(self, gateway: PlayedGateway, **options: Any) -> None:
        """Assert that the gateway's page equals that of one window with all calls."""
        shown = gateway.snapshot(**options)
        expected = window_snapshot(self.all, TARGETS, **options)
        for name in LIKE_ALL:
            assert_close(shown[name], expected[name], name)
        for name in ("num_judged", "num_good"):
            assert shown["slo"][name] == expected["slo"][name]


def assert_close(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, where)
    elif isinstance(expected, float):
        # Clocks with an offset round gaps differently: by one bucket at most.
        assert found == pytest.approx(expected, rel=0.021, abs=1e-6), where
    else:
        assert found == expected, where


async def test_every_gateway_shows_all_calls() -> None:
    cluster = PlayedCluster(3)
    await cluster.work(40)
    await cluster.pass_s(LAG_S)
    for gateway in cluster.gateways:
        cluster.assert_alike(gateway)
        cluster.assert_alike(gateway, of_hour=True)
        snapshot = gateway.snapshot()
        json.dumps(snapshot, allow_nan=False)
        assert sum(snapshot["series"]["began"]) == 40
        assert len(snapshot["recent"]) == 40
        ended = [call["ended_unix_s"] for call in snapshot["recent"]]
        assert ended == sorted(ended, reverse=True)
        scope = gateway.share.scope()
        assert scope["is_shared"] and len(scope["gateways"]) == 3
        assert [row["is_own"] for row in scope["gateways"]] == [True, False, False]
    counts = [counts_of(g.window.rows().total) for g in cluster.gateways]
    assert counts[0] == counts[1] == counts[2]


async def test_times_of_other_hosts_are_on_the_readers_clock() -> None:
    cluster = PlayedCluster(2)
    first, second = cluster.gateways
    cluster.call(second)
    await cluster.pass_s(3)
    [listed], [own] = first.snapshot()["recent"], second.snapshot()["recent"]
    # Gateway 1's clock is 777 s ahead of gateway 0's; times are whole seconds, hence within one.
    assert own["arrived_unix_s"] - listed["arrived_unix_s"] == pytest.approx(777, abs=1)
    assert listed["timeline"] == own["timeline"]


async def test_running_calls_of_others_count_while_they_are_there() -> None:
    cluster = PlayedCluster(2)
    first, second = cluster.gateways
    PlayedCall(second.clock, second.feed)
    await cluster.pass_s(2)
    assert first.snapshot()["num_running"] == 1
    assert first.window.num_running == 0
    cluster.gateways.remove(second)  # it dies: its state expires, its calls remain
    await cluster.pass_s(15)
    snapshot = first.snapshot()
    assert (snapshot["num_running"], snapshot["counts"]["began"]) == (0, 1)
    assert len(first.share.scope()["gateways"]) == 1


async def test_a_gateway_that_starts_later_has_the_hour() -> None:
    cluster = PlayedCluster(2)
    for _ in range(90):
        cluster.call(cluster.random.choice(cluster.gateways))
        await cluster.pass_s(10)
    gone = cluster.gateways.pop()
    await gone.share.close()
    late = PlayedGateway(cluster, 7)
    cluster.gateways.append(late)
    await cluster.pass_s(10)  # some hundred rows each time
    cluster.assert_alike(late, of_hour=True)
    assert late.snapshot()["covered_s"] == 300
    snapshot = late.snapshot(of_hour=True)
    assert snapshot["covered_s"] == pytest.approx(cluster.clock.monotonic_s(), abs=15)
    assert sum(snapshot["series"]["began"]) == 90


async def test_without_redis_it_shows_its_own_and_afterwards_all_again() -> None:
    cluster = PlayedCluster(2)
    first, second = cluster.gateways
    assert not first.share.scope()["is_shared"]
    await cluster.work(5)
    cluster.store.is_away = True
    for _ in range(4):
        cluster.call(second)
        await cluster.pass_s(1)
    cluster.call(first)
    await cluster.pass_s(8)
    scope = first.share.scope()
    assert not scope["is_shared"] and len(scope["gateways"]) == 1
    away_s = first.window.to_unix_s(first.window.now_s()) - scope["alone_since_unix_s"]
    assert away_s == pytest.approx(12, abs=1.5)
    assert first.snapshot()["counts"]["began"] == 6
    cluster.store.is_away = False
    await cluster.pass_s(3)
    for gateway in cluster.gateways:
        cluster.assert_alike(gateway)
        assert gateway.share.scope()["is_shared"]


async def test_a_long_time_without_redis_is_bounded_and_not_counted_twice() -> None:
    cluster = PlayedCluster(2)
    first, second = cluster.gateways
    await cluster.work(5)
    cluster.store.is_away = True
    for _ in range(400):
        cluster.call(second)
        await cluster.pass_s(1)
    assert len(second.share._outbox) == 300
    cluster.store.is_away = False
    await cluster.pass_s(12)
    began = first.snapshot()["counts"]["began"]
    # Rows older than five minutes were dropped; calls take a fraction of a second each.
    assert 0.6 * 300 < began <= second.snapshot()["counts"]["began"]
    hour = [g.snapshot(of_hour=True)["counts"]["began"] for g in cluster.gateways]
    assert began <= hour[0] <= hour[1] == 405


async def test_a_leap_of_redis_clock_doubles_nothing() -> None:
    cluster = PlayedCluster(2)
    await cluster.work(10)
    await cluster.pass_s(3)
    for leap_s in (-1800.0, 1800.0, 0.9):
        cluster.store.ahead_s += leap_s
        await cluster.pass_s(3)
        await cluster.work(3)
        await cluster.pass_s(3)
    for gateway in cluster.gateways:
        assert gateway.snapshot()["counts"]["began"] <= 19
        assert gateway.snapshot()["counts"]["began"] >= 17


async def test_junk_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "baton.gateway.telemetry.window.window_share")
    cluster = PlayedCluster(2)
    first = cluster.gateways[0]
    await cluster.work(3)
    packed = next(p for key, (_, p) in cluster.store.rows.items() if key.row_s == 1)
    now = int(await cluster.store.now_s())
    for offset, junk in enumerate((packed, b"junk", packed[:-5], bytes(99))):
        key = RowKey(f"{9:032x}", 1, now - 5 + offset)
        cluster.store.rows[key] = (now + 100.0, junk)
    cluster.store.states[f"{9:032x}"] = (now + 100.0, cluster.store.states[f"{1:032x}"][1])
    cluster.store.gateways[f"{9:032x}"] = now
    await cluster.pass_s(4)
    assert sum("skipped" in line for line in caplog.messages) >= 5
    cluster.assert_alike(first)
    assert len(first.share.scope()["gateways"]) == 2


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    with pytest.raises(BadRow):
        unpack_state(raw, "0" * 32)
    with pytest.raises(BadRow):
        unpack_row(raw, RowKey("0" * 32, 1, 1))


def test_a_row_comes_back_as_it_was() -> None:
    own = Tally()
    for seconds in (0.001, 0.5, 0.5, 1e9):
        own.observe(TTFT, seconds)
    own.judged = Judged(3, [(True, 0.5, 0.25), (False, float("inf"), 0.0)])
    packed = pack_row(KEY, 0.0, own)
    _, row = unpack_row(packed, KEY)
    assert row.histogram(TTFT) == own.histogram(TTFT)
    assert row.judged == own.judged
    assert len(packed) < 300
    for other in (("b" * 32, 1, 7), ("a" * 32, 30, 7), ("a" * 32, 1, 8)):
        with pytest.raises(BadRow, match="another"):
            unpack_row(packed, RowKey(*other))


@pytest.mark.parametrize("unix_s", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("where", ["unix_s", "arrived_unix_s", "ended_unix_s"])
def test_a_row_of_no_time_is_no_row(where: str, unix_s: float) -> None:
    """A row with a time that is not finite is rejected: it would not be valid JSON for the page."""
    clock = FakeClock()
    window = TelemetryWindow(clock)
    window.outbox = {}
    PlayedCall(clock, feed_of(clock, window=window)).end(EngineFailed("broke"))
    window.settle()
    [own] = window.outbox.values()
    assert unpack_row(pack_row(KEY, 1.8e9, own), KEY)[1].ended
    if where != "unix_s":
        own.ended = [msgspec.structs.replace(call, **{where: unix_s}) for call in own.ended]
    packed = pack_row(KEY, unix_s if where == "unix_s" else 1.8e9, own)
    with pytest.raises(BadRow, match="Expected `float`"):
        unpack_row(packed, KEY)


def test_a_packed_bomb_is_not_unpacked() -> None:
    with pytest.raises(BadRow, match="too large"):
        unpack_row(zlib.compress(bytes(50 << 20)), KEY)


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1)), min_size=1, max_size=6))
def test_a_sample_of_calls_stands_for_all(parts: list[tuple[int, float]]) -> None:
    joined = Judged()
    for number, share in parts:
        num_good = round(number * share)
        calls = [(True, 0.1 if index < num_good else 0.9, 0.0) for index in range(number)]
        random.Random(number).shuffle(calls)
        joined = joined.joined(Judged(number, calls), MAX_JUDGED)
    total = sum(number for number, _ in parts)
    good = sum(round(number * share) for number, share in parts)
    assert joined.number == total
    assert len(joined.calls) <= MAX_JUDGED
    if total <= MAX_JUDGED:
        assert joined.num_good(TARGETS) == good
    assert joined.num_good(TARGETS) == pytest.approx(good, abs=0.2 * total)  # 5 sigma


async def test_a_second_that_ends_while_redis_is_asked_is_no_written_one() -> None:
    cluster = PlayedCluster(2)
    first, second = cluster.gateways
    await cluster.pass_s(2)
    ask = cluster.store.now_s

    async def now_s() -> float:
        cluster.store.now_s = ask  # type: ignore[method-assign]
        cluster.clock.advance(0.9)
        PlayedCall(second.clock, second.feed)
        cluster.clock.advance(0.2)
        return await ask()

    cluster.store.now_s = now_s  # type: ignore[method-assign]
    await second.share.turn()
    await first.share.turn()
    await cluster.pass_s(4)
    assert second.snapshot()["counts"]["began"] == 1
    assert first.snapshot()["counts"]["began"] == 1


async def test_a_store_that_hangs_holds_up_no_call() -> None:
    cluster = PlayedCluster(1)
    [gateway] = cluster.gateways
    hanging = asyncio.Event()

    async def now_s() -> float:
        await hanging.wait()
        return 0.0

    cluster.store.now_s = now_s  # type: ignore[method-assign]
    turn = asyncio.create_task(gateway.share.turn())
    await asyncio.sleep(0)
    cluster.call(gateway)
    assert gateway.snapshot()["counts"]["began"] == 1
    assert not turn.done()
    turn.cancel()
