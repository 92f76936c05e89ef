"""The sliding window against brute force over all events."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from effort import examples
from fakes.clock import FakeClock
from fakes.gateway.calls import PlayedCall, feed_of
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import Cancelled, EngineFailed, InvalidRequest
from baton.core.metrics import Slo, TokenTimes, percentile
from baton.gateway.security.caller import anyone
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.metrics.tally import MAX_ERROR, Histogram
from baton.gateway.telemetry.window.snapshot import window_snapshot
from baton.gateway.telemetry.window.window import LATENCIES, TelemetryWindow, counts_of

SPAN_S = 4


@pytest.mark.parametrize("step_s", [-3600, -2, 2, 3600])
def test_a_page_gets_every_call_though_the_wall_clock_is_set(step_s: int) -> None:
    class WallClock(FakeClock):
        step_s = 0

        def unix_ns(self) -> int:
            return super().unix_ns() + self.step_s * 10**9

    clock = WallClock()
    window, feed = watched(clock)
    clock.advance(10)
    since_s = window.now_s()
    clock.step_s = step_s
    call = PlayedCall(clock, feed)
    clock.advance(0.5)
    call.finish()
    clock.advance(0.5)
    assert len(window_snapshot(window, SloTargets(1, 1), since_s)["recent"]) == 1


@given(st.lists(st.floats(1e-6, 80_000), min_size=1, max_size=60), st.floats(0.1, 100))
def test_percentiles_are_nearest_ranks_within_one_percent(samples: list[float], q: float) -> None:
    histogram = Histogram()
    for sample in samples:
        histogram.observe(sample)
    [found] = histogram.percentiles(q)
    assert found == pytest.approx(percentile(samples, q), rel=MAX_ERROR + 1e-9)
    assert MAX_ERROR < 0.01


@given(st.lists(st.lists(st.floats(0, 100), max_size=8), min_size=1, max_size=8))
def test_what_is_subtracted_was_never_there(seconds: list[list[float]]) -> None:
    total, rest = Histogram(), Histogram()
    parts = []
    for samples in seconds:
        part = Histogram()
        for sample in samples:
            for histogram in (part, total):
                histogram.observe(sample)
        parts.append(part)
    for sample in seconds[-1]:
        rest.observe(sample)
    for part in parts[:-1]:
        total.subtract(part)
    assert (total.counts, total.num_samples) == (rest.counts, rest.num_samples)
    assert total.total == pytest.approx(rest.total, abs=1e-9)


# Events: time passes, a call begins, a stream receives tokens, a call ends, one is refused.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.003, 0.05, 0.4, 1.3, 9.0])),
        st.tuples(st.just("begin"), st.integers(1, 2)),
        st.tuples(st.just("deliver"), st.tuples(st.integers(0, 9), st.integers(0, 3))),
        st.tuples(st.just("end"), st.tuples(st.integers(0, 9), st.sampled_from("fxc"))),
        st.tuples(st.just("refuse"), st.just(None)),
    ),
    max_size=60,
)


class Oracle:
    """Stores every event with its time, and evaluates the window only on request."""

    def __init__(self) -> None:
        self.counts: list[tuple[float, str, int]] = []
        self.samples: list[tuple[float, str, float]] = []
        self.calls: list[tuple[float, bool, list[TokenTimes]]] = []

    def begins(self, now_s: float) -> float:
        return math.floor(now_s) - SPAN_S

    def count(self, now_s: float) -> Counter[str]:
        found: Counter[str] = Counter()
        for at_s, name, number in self.counts:
            if at_s >= self.begins(now_s):
                found[name] += number
        return +found

    def latency(self, now_s: float, name: str) -> list[float]:
        return [v for at_s, of, v in self.samples if of == name and at_s >= self.begins(now_s)]

    def slo(self, now_s: float, ttft_s: float, tbt_s: float) -> tuple[int, int]:
        judged = [call for call in self.calls if call[0] >= self.begins(now_s)]
        good = [
            finished and bool(streams) and all(Slo(ttft_s, tbt_s).is_met_by(t) for t in streams)
            for _, finished, streams in judged
        ]
        return len(judged), sum(good)


def watched(clock: FakeClock, **limits: int) -> tuple[TelemetryWindow, CallFeed]:
    """A window, and the feed that counts calls into it."""
    window = TelemetryWindow(clock, **limits)
    return window, feed_of(clock, window=window)


def play(feed: CallFeed, clock: FakeClock, oracle: Oracle, happenings: list[object]) -> None:
    calls: list[PlayedCall] = []
    for what, how in happenings:  # type: ignore[misc]
        now_s = clock.monotonic_s()
        match what:
            case "wait":
                clock.advance(how)
            case "begin":
                calls.append(PlayedCall(clock, feed, num_samples=how))
                oracle.counts += [(now_s, "began", 1), (now_s, "prompt_tokens", 7)]
            case "refuse":
                feed.call_refused(anyone("grpc"), InvalidRequest("no"))
                oracle.counts.append((now_s, "refused", 1))
            case "deliver" if calls:
                call = calls[how[0] % len(calls)]
                sample = how[0] % len(call.record.token_times)
                call.deliver(how[1], sample)
                note_delivery(oracle, call, sample, now_s, how[1])
            case "end" if calls:
                end(oracle, calls.pop(how[0] % len(calls)), now_s, how[1])


def note_delivery(oracle: Oracle, call: PlayedCall, sample: int, now_s: float, num: int) -> None:
    if not num:
        return
    record = call.record
    oracle.counts += [(now_s, "output_tokens", num), (now_s, "coalesced_tokens", num - 1)]
    times = record.token_times[sample]
    if len(times) > 1:
        gap_s = now_s - times[-2][0]
        oracle.samples.append((now_s, "tbt", gap_s))
        if len(times) == 2 and times[0][1] == 1:
            oracle.samples.append((now_s, "handoff_gap", gap_s))
    elif sum(len(t) for t in record.token_times) == sum(map(bool, record.token_times)) == 1:
        oracle.samples.append((now_s, "ttft", now_s - record.arrived_s))


def end(oracle: Oracle, call: PlayedCall, now_s: float, how: str) -> None:
    record = call.record
    streams = [
        TokenTimes(record.arrived_s, tuple(t for t, num in times for _ in range(num)))
        for times in record.token_times
    ]
    if how == "f" and all(record.token_times):
        call.finish(cached_tokens=3)
        oracle.counts += [
            (now_s, "finished", 1),
            (now_s, "finished_prompt_tokens", 7),
            (now_s, "cached_tokens", 3),
        ]
        oracle.samples.append((now_s, "e2e", now_s - record.arrived_s))
    else:
        call.end(Cancelled("gone") if how == "c" else EngineFailed("broke"))
        oracle.counts.append((now_s, "cancelled" if how == "c" else "failed", 1))
    oracle.samples += [(now_s, "tpot", t.tpot_s) for t in streams if t.tpot_s is not None]
    if not (how == "c" and record.error is not None):
        oracle.calls.append((now_s, record.error is None, streams))


@examples(60, 150)
@given(steps, st.sampled_from([0.01, 0.1, 0.5, 2.0]), st.sampled_from([0.01, 0.1, 0.5]))
def test_window_equals_brute_force(
    happenings: list[object], ttft_slo_s: float, tbt_slo_s: float
) -> None:
    clock, oracle = FakeClock(), Oracle()
    window, feed = watched(clock, span_s=SPAN_S)
    play(feed, clock, oracle, happenings)
    now_s = clock.monotonic_s()
    snapshot = window_snapshot(window, SloTargets(ttft_slo_s, tbt_slo_s))
    assert +Counter(counts_of(window.rows().total)) == oracle.count(now_s)
    for name in ("ttft", "tbt", "handoff_gap", "tpot", "e2e"):
        samples, found = oracle.latency(now_s, name), snapshot["latency"][name]
        assert found["num_samples"] == len(samples), name
        for q in (50, 90, 99):
            if samples:
                expected = max(1e-6, percentile(samples, q) or 0)
                assert found[f"p{q}_s"] == pytest.approx(expected, rel=0.01), name
    slo = snapshot["slo"]
    assert (slo["num_judged"], slo["num_good"]) == oracle.slo(now_s, ttft_slo_s, tbt_slo_s)
    json.dumps(snapshot, allow_nan=False)
    assert len({len(column) for column in snapshot["series"].values()}) == 1


def test_gaps_and_coalesced_tokens_add_up_to_all_tokens() -> None:
    clock = FakeClock()
    window, feed = watched(clock)
    rng = random.Random(0)
    calls = [PlayedCall(clock, feed) for _ in range(5)]
    for _ in range(300):
        clock.advance(rng.random() / 100)
        rng.choice(calls).deliver(rng.randint(1, 3))
    counts = counts_of(window.rows().total)
    num_streams = sum(1 for call in calls if call.record.token_times[0])
    gaps = window.rows().total.histogram(LATENCIES["tbt"]).num_samples
    assert gaps + counts["coalesced_tokens"] + num_streams == counts["output_tokens"]


def test_a_page_that_asks_again_gets_every_second_once() -> None:
    clock = FakeClock()
    window, feed = watched(clock, span_s=20)
    seconds: list[float] = []
    tokens = 0
    since_s = None
    recent: list[str] = []
    for _ in range(60):
        call = PlayedCall(clock, feed)
        clock.advance(0.1)
        call.deliver(1)
        clock.advance(0.13)
        call.deliver(2)
        call.finish()
        new = window_snapshot(window, SloTargets(1, 1), since_s)
        since_s = window.now_s()
        seconds += new["series"]["t_unix_s"]
        tokens += sum(new["series"]["output_tokens"])
        recent += [call["call_id"] for call in new["recent"]]
    assert [b - a for a, b in pairwise(seconds)] == pytest.approx([1.0] * (len(seconds) - 1))
    assert len(seconds) == int(clock.monotonic_s())
    assert len(recent) == 60
    whole = window_snapshot(window, SloTargets(1, 1))
    assert tokens == sum(whole["series"]["output_tokens"])
    heat = sum(sum(column[2::2]) for column in whole["heatmaps"]["tbt"])
    rows, offset_s = window.rows().rows, window.to_unix_s(0)
    numbers = {round(t_unix_s - offset_s) for t_unix_s in whole["series"]["t_unix_s"]}
    coalesced = sum(counts_of(rows[n])["coalesced_tokens"] for n in numbers & rows.keys())
    assert coalesced
    assert heat == tokens - sum(whole["series"]["began"]) - coalesced


def test_stages_and_transfers_of_a_call() -> None:
    clock = FakeClock()
    window, feed = watched(clock)
    call = PlayedCall(clock, feed)
    clock.advance(0.112)
    call.deliver(1)
    clock.advance(0.012)
    call.deliver(1)
    call.finish(cached_tokens=4)
    snapshot = window_snapshot(window, SloTargets(0.5, 0.05))
    [recent] = snapshot["recent"]
    assert recent["stages"] == pytest.approx(
        {
            "gateway_queue": 0.001,
            "prefill_queue": 0.010,
            "prefill": 0.1,
            "kv_transfer": 0.004,
            "decode_queue": 0.001,
            "first_decode": 0.124 - 0.116,
        }
    )
    assert sum(recent["stages"].values()) == pytest.approx(0.124)
    assert snapshot["transfers"] == [
        {
            "source": "p",
            "puller": "d",
            "transport": "shm",
            "num_transfers": 1,
            "bytes": 1000,
            "seconds": pytest.approx(0.095),
            "gbytes_per_s": pytest.approx(1000 / 0.095 / 1e9),
        }
    ]
    assert snapshot["prefix"]["hit_rate"] == pytest.approx(4 / 7)
    assert snapshot["prefix"]["puller_cached_tokens"] == 16
    assert snapshot["slo"]["attainment"] == 1.0
    assert recent["timeline"][0] == ("arrived", 0.0, "gateway")


@pytest.mark.parametrize(("attempts", "prefill_queue_s"), [(1, 0.010), (2, 0.003)])
def test_time_between_two_routings_of_one_attempt_is_in_its_stages(
    attempts: int, prefill_queue_s: float
) -> None:
    """The stages include the time between two routings of one attempt: an engine's refusal for its
    promise makes the gateway choose again, and does not count as an attempt."""
    clock = FakeClock()
    window, feed = watched(clock)
    call = PlayedCall(clock, feed)
    clock.advance(0.112)
    call.deliver(1)
    result = call.result(0, 0, attempts)
    arrived, routed, *rest = result.timeline
    again = replace(routed, unix_ns=arrived.unix_ns + 8_000_000)
    stamps = (arrived, routed, again, *rest)
    call.deliver(0, result=replace(result, timeline=stamps))
    call.end(None)
    [recent] = window_snapshot(window, SloTargets(0.5, 0.05))["recent"]
    assert recent["stages"]["gateway_queue"] == pytest.approx(0.001)
    assert recent["stages"]["prefill_queue"] == pytest.approx(prefill_queue_s)


def test_memory_does_not_grow_with_load() -> None:
    clock = FakeClock()
    window, feed = watched(clock, span_s=2, max_recent=5)
    for _ in range(2000):
        PlayedCall(clock, feed).end(EngineFailed("x"))
        assert len(feed._counts.noted.ended) <= 8
    for _ in range(10):
        clock.advance(1)
        PlayedCall(clock, feed).end(EngineFailed("x"))
    assert len(window.rows().rows) <= 3
    assert len(window.recent) == 5
    assert window.num_running == 0
    clock.advance(100)
    empty = window.rows().total
    assert not empty.counts and not empty.histograms
