"""The load generator: what it sends, when, what it records, and the figures from the records."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from baton.bench.serve import fifo, report
from baton.bench.serve.clients import arrivals, clocks, generator, record_files
from baton.bench.serve.clients.arrivals import Arrival, Background, Prompt
from baton.bench.serve.clients.driver_choice import connect
from baton.bench.serve.clients.worker import WorkerPlan
from baton.bench.serve.clients.workloads import MIXES, TRACE, LoadShape, make_workload
from baton.core.metrics import Slo
from baton.loadgen import plots
from baton.loadgen.driver import DriverError
from baton.loadgen.figures import ReportWindow
from baton.loadgen.records import Record

SLO = Slo(ttft_s=0.11, tbt_s=0.05)


def test_poisson_arrivals_have_the_rate_and_repeat_themselves() -> None:
    one = {"num_prompt_tokens": 10, "num_output_tokens": 2, "group": "g"}
    drawn = arrivals.poisson(50, 100, seed=3, **one)
    assert drawn == arrivals.poisson(50, 100, seed=3, **one)
    assert drawn != arrivals.poisson(50, 100, seed=4, **one)
    times = [arrival.at_s for arrival in drawn]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 100
    # In an exponential distribution, mean and deviation are both 1 / rate.
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)


def test_prompts_share_what_their_seeds_share() -> None:
    first, second = Prompt(1000, (7, 8), 512), Prompt(700, (7, 9), 512)
    a, b = first.token_ids(300), second.token_ids(300)
    assert (len(a), len(b)) == (1000, 700)
    assert a[:512] == b[:512] and a[512:700] != b[512:]
    assert all(3 <= token < 300 for token in a)


def test_the_trace_is_replayed_as_it_was() -> None:
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
    drawn = arrivals.from_trace(TRACE, 60, speed=2.0, max_tokens=20_000)
    kept = [e for e in lines if e["input_length"] + e["output_length"] <= 20_000]
    assert [a.at_s for a in drawn] == [
        e["timestamp"] / 2000 for e in kept if e["timestamp"] < 120e3
    ]
    assert drawn[3].prompt.num_tokens == lines[3]["input_length"]
    assert 512 * len(drawn[0].prompt.seeds) >= drawn[0].prompt.num_tokens


def test_every_named_mix_can_be_made() -> None:
    made = [make_workload(mix, LoadShape(duration_s=20)) for mix in MIXES if mix != "idle"]
    assert [workload.name for workload in made] == list(MIXES[1:])
    assert made[1].background and made[1].arrivals and not made[0].arrivals
    with pytest.raises(ValueError, match="idle"):
        make_workload("idle", LoadShape())


def test_arrivals_are_dealt_whole() -> None:
    drawn = [Arrival(i, Prompt.drawn(4, i), 1, "g") for i in range(7)]
    hands = arrivals.deal(drawn, 3)
    assert sorted((a for hand in hands for a in hand), key=lambda a: a.at_s) == drawn
    plan = WorkerPlan(
        "grpc://x", "", 99, 1, 3, 5.0, 1.0, tuple(hands[1]), Background(5, 10, 20), "f"
    )
    assert WorkerPlan.from_json(plan.to_json()) == plan
    assert list(plan.streams) == [1, 4]


def test_fifo_by_hand() -> None:
    # Arrivals at 0, 1, 5 with 2 s of service: the second waits 1 s, the third finds it idle.
    assert fifo.replay([0, 1, 5], [2, 2, 2]) == [2, 3, 2]
    assert fifo.replay([0, 1, 1], [2, 2, 2], num_servers=2) == [2, 2, 3]


def test_what_a_queued_request_took_by_hand() -> None:
    sent_s, first_s = [0.0, 1.0, 2.0, 9.5, 9.6, 9.7], [4.0, 7.0, 9.0, 13.0, 14.0, 17.5]
    is_ours = [True, True, True, True, False, True]
    # The fourth found an idle server; between it and the last came a request of another client.
    assert fifo.queued_spacing(sent_s, first_s, is_ours, 0) == [3.0, 2.0]
    assert fifo.queued_spacing(sent_s, first_s, is_ours, 1) == [4.5]


def test_clocks_of_a_cut_off_output() -> None:
    lines = ["0, 1980, 600.5, 50", "1, 1500, [N/A], 60", "0, 1960, 700.5, 52", "1, 1600, 30"]
    assert clocks.medians(lines) == {
        "0": {"clock_mhz": 1970.0, "power_w": 650.5, "temperature_c": 51.0},
        "1": {"clock_mhz": 1500.0, "temperature_c": 60.0},
    }


def test_records_survive_the_file(tmp_path: Path) -> None:
    kept = [
        Record("a", 0.5, 10, 2, 0.51, [0.6, 0.7]),
        Record("b", 1.5, 20, 3, 1.5, [], "the engine is gone"),
    ]
    record_files.save(tmp_path / "r.npz", kept)
    assert record_files.load(tmp_path / "r.npz") == kept
    record_files.save(tmp_path / "none.npz", [])
    assert record_files.load(tmp_path / "none.npz") == []
    assert record_files.merge([kept[1:], kept[:1]]) == kept


def test_figures_by_hand(tmp_path: Path) -> None:
    kept = [
        Record("probe", 1.0, 8, 3, 1.0, [1.1, 1.12, 1.15]),  # good
        Record("probe", 2.0, 8, 3, 2.01, [2.31, 2.33, 2.36]),  # TTFT too long
        Record("probe", 3.0, 8, 3, 3.0, [3.05, 3.25, 3.26]),  # one gap too long
        Record("probe", 4.0, 8, 3, 4.0, [], "unavailable: nobody"),
        Record("probe", 0.1, 8, 3, 0.1, [0.2, 0.3, 0.4]),  # before the window
    ]
    summary = report.summarise(kept, ReportWindow(1.0, 5.0), SLO, {"probe": 0.05})
    figures = summary["groups"]["probe"]
    assert (figures["num_sent"], figures["num_failed"]) == (4, 1)
    assert figures["ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["ttft_ms"]["max"] == pytest.approx(300)
    assert figures["handoff_gap_ms"]["max"] == pytest.approx(200)
    assert figures["tbt_ms"]["n"] == 6
    assert figures["goodput_rps"] == 1 / 4
    assert figures["ttft_fifo_floor_ms"]["p99"] == pytest.approx(50)
    assert summary["generator_lag_ms"]["max"] == pytest.approx(10)
    text = report.table(summary)
    assert "probe tbt" in text and "1 failed" in text
    plots.write(tmp_path / "p.html", "t", {"run": (kept, ReportWindow(1.0, 5.0))}, text)
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 4 and "http" not in page
    texts = re.findall(r'<text x="(\d+)"[^>]*>([^<]*)<', page)
    [width] = set(re.findall(r'<svg width="(\d+)"', page))
    assert all(int(x) + 6 * len(text) <= int(width) for x, text in texts), "some are cut off"


class SlowDriver:
    """Replies after a time that does not depend on the number of requests."""

    def __init__(self) -> None:
        self.num_cancelled = self.num_running = self.most_running = 0

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        is_over = False
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0.1)
            if len(prompt_ids) == 13:
                is_over = True
                raise DriverError("out of luck")
            for _ in range(num_tokens):
                await asyncio.sleep(0.01)
                yield 1
            is_over = True
        finally:
            self.num_running -= 1
            self.num_cancelled += not is_over


async def test_a_slow_system_is_sent_no_fewer() -> None:
    gc.collect()
    gc.freeze()  # else the collection before a run takes too long
    driver = SlowDriver()
    due = [Arrival(0.02 * i, Prompt.drawn(13 if i == 4 else 5, i), 2, "probe") for i in range(10)]
    kept = await generator.run(
        driver,
        due,
        range(2),
        Background(2, 6, 8),
        start_s=time.monotonic() + 0.05,
        duration_s=1.0,
        drain_s=1.0,
        vocab_size=50,
    )
    probes = [record for record in kept if record.group == "probe"]
    assert [record.due_s for record in probes] == pytest.approx([0.02 * i for i in range(10)])
    assert all(record.lag_s >= 0 for record in probes)
    assert driver.most_running >= 5, "two are in the background: the others wait for no answer"
    assert [record.error for record in probes if record.error] == ["out of luck"]
    assert all(
        len(r.token_s) == 2 and r.token_s[0] >= r.sent_s + 0.1 for r in probes if not r.error
    )
    running = [record for record in kept if record.group == "background"]
    assert len(running) > 2 and 1 <= driver.num_cancelled <= 2  # requests cut off at the end


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["prompt"] == [1]:
        return web.json_response({"error": {"message": "too short"}}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for n in (1, 3):
        event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": n}}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b': ping\n\ndata: {"choices": [{"text": "y"}]}\n\ndata: [DONE]\n\n')
    return response


async def test_a_server_of_openais_api_can_be_measured() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    try:
        async with connect(f"http://{address[0]}:{address[1]}", "m") as driver:
            assert [count async for count in driver.stream([5, 6], 4)] == [1, 2, 1]
            with pytest.raises(DriverError, match=r"400.*too short"):
                [count async for count in driver.stream([1], 4)]
    finally:
        await runner.cleanup()


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="ftp"):
        connect("ftp://x")
