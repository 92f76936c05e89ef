"""The cost of telemetry on the gateway's event loop: per delivered chunk, call and snapshot,
and per second of data that gateways share.

Calls are reported as the front door reports them: one chunk a step for each of many streams. Times
are CPU time, since that is what the event loop loses regardless of other load.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence

from baton.core.ports import Clock
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event, Stamp
from baton.core.request.token_ids import column
from baton.gateway.request.engine_link import TransferSummary
from baton.gateway.request.output_chunk import OutputChunk, RequestResult
from baton.gateway.security.caller import anyone
from baton.gateway.telemetry.call_counts import CallCounts
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.call_record import CallRecord
from baton.gateway.telemetry.calls.ended_call import STAGES
from baton.gateway.telemetry.calls.slo import SloTargets
from baton.gateway.telemetry.metrics import metric_table as table
from baton.gateway.telemetry.metrics.metric_store import MetricStore
from baton.gateway.telemetry.metrics.tally import Tally
from baton.gateway.telemetry.window.row_message import RowKey, pack_row, unpack_row
from baton.gateway.telemetry.window.snapshot import window_snapshot
from baton.gateway.telemetry.window.window import HOUR_S, LATENCIES, TelemetryWindow
from baton.gateway.validation.validation import ValidatedRequest

from ..floors.figures import Figure, repeat_s

NUM_STREAMS = 64
NUM_STEPS = 400
_REPEATS = 5
_GAP_S = 0.14
_KEY = RowKey("0" * 32, 1, 1)


class _Clock(Clock):
    """Advances by one token gap per step, so that minutes of traffic need no real time.

    The gaps are long: all repeats together fill the window.
    """

    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


def measure() -> list[Figure]:
    """Microseconds of the event loop per chunk and per end of a call; milliseconds per snapshot."""
    clock = _Clock()
    window, targets = TelemetryWindow(clock), SloTargets(ttft_slo_s=0.5, tbt_slo_s=0.05)
    window.outbox = {}
    feed = CallFeed(clock, CallCounts(targets), window, MetricStore("baton_", "demo"))
    bare = [_play(clock, []) for _ in range(_REPEATS)]
    rounds = [_play(clock, [feed]) for _ in range(_REPEATS)]
    chunk_us = tuple(chunk_s * 1e6 for chunk_s, _ in rounds)
    floor_us = min(chunk_s for chunk_s, _ in bare) * 1e6
    call_us = tuple(call_s * 1e6 for _, call_s in rounds)
    floor_is = "noting when it was delivered"
    shape = f"{NUM_STEPS} tokens of {NUM_STREAMS} streams"

    def ask(since_s: float | None) -> None:
        window_snapshot(window, targets, since_s)

    first_ms = tuple(s * 1e3 for s in repeat_s(lambda: ask(None), _REPEATS))
    next_ms = tuple(s * 1e3 for s in repeat_s(lambda: ask(clock.now_s - 1), _REPEATS))
    own = max(window.outbox.values(), key=lambda each: len(each.histograms))
    packed = pack_row(_KEY, 0.0, own)
    elsewhere = TelemetryWindow(clock)

    def merge() -> None:
        _, row = unpack_row(packed, _KEY)
        elsewhere.merge(int(clock.now_s), 1, row)

    out_ms = tuple(s * 1e3 for s in repeat_s(lambda: pack_row(_KEY, 0.0, own), _REPEATS))
    in_ms = tuple(s * 1e3 for s in repeat_s(merge, _REPEATS))
    return [
        Figure(f"a second in which {NUM_STREAMS} calls end, packed for others", "ms", out_ms),
        Figure("the same from another gateway, unpacked and added", "ms", in_ms),
        Figure("its size", "kB", (len(packed) / 1000,)),
        Figure("memory of the window after an hour of 20 calls/s", "MB", (_hour_mb(),)),
        Figure(f"a delivered chunk, {shape}", "us", chunk_us, floor_us, floor_is, target=5.0),
        Figure(f"the end of a call, {shape}", "us", call_us),
        Figure("a page's first snapshot, all of the window", "ms", first_ms),
        Figure("a page's next snapshot, one second", "ms", next_ms),
    ]


def _play(clock: _Clock, feeds: Sequence[CallFeed]) -> tuple[float, float]:
    """Seconds per chunk, and per end of a call."""
    rng = random.Random(0)
    records = [_begin(clock, feeds) for _ in range(NUM_STREAMS)]
    chunk, bare = OutputChunk("x", (5,), 0), list[tuple[float, int]]()
    spent_s = 0.0
    for _ in range(NUM_STEPS):
        clock.now_s += _GAP_S * rng.lognormvariate(0, 0.3)
        began_s = time.thread_time()
        for record in records:
            if not feeds:
                bare.append((clock.now_s, 1))
            for feed in feeds:
                feed.chunk_delivered(record, chunk)
        spent_s += time.thread_time() - began_s
    began_s = time.thread_time()
    for record in records:
        record.results[0] = _result(record)
        for feed in feeds:
            feed.call_ended(record)
    for feed in feeds:
        feed.settle()
    ended_s = time.thread_time() - began_s
    return spent_s / NUM_STEPS / NUM_STREAMS, ended_s / NUM_STREAMS


def _hour_mb() -> float:
    """MB of an hour's window: each second has 20 calls of 100 tokens, with latencies over two
    decades."""
    rng, clock = random.Random(0), _Clock()
    seconds = [_second(rng) for _ in range(20)]
    tracemalloc.start()
    window = TelemetryWindow(clock)
    for number in range(HOUR_S):
        clock.now_s += 1.0
        window.take(seconds[number % len(seconds)], int(clock.now_s))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1e6


def _second(rng: random.Random) -> Tally:
    tally = Tally()
    for metric in LATENCIES.values():
        for _ in range(2000 if metric is table.INTER_TOKEN else 20):
            tally.observe(metric, rng.lognormvariate(-3, 0.8))
    for stage in STAGES:
        for _ in range(20):
            tally.observe(table.STAGE, rng.lognormvariate(-4, 1), stage)
    for _ in range(20):
        tally.judged.add((True, rng.random(), rng.random()))
    return tally


def _begin(clock: _Clock, feeds: Sequence[CallFeed]) -> CallRecord:
    record = CallRecord(
        call_id="0" * 32,
        request=ValidatedRequest(column(range(1000)), SamplingParams(), ""),
        caller=anyone("grpc"),
        model="demo",
        arrived_s=clock.now_s,
        arrived_unix_ns=clock.unix_ns(),
    )
    for feed in feeds:
        feed.call_began(record)
    return record


def _result(record: CallRecord) -> RequestResult:
    return RequestResult(
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=NUM_STEPS,
        cached_tokens=0,
        prefill_node="prefill-0",
        decode_node="decode-0",
        transfer=TransferSummary(1 << 20, 0, "shm"),
        attempts=1,
        seed=0,
        timeline=tuple(Stamp(event, record.arrived_unix_ns, "node") for event in Event),
    )
