"""`baton bench` against a server that simulates good and bad behaviour."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes.played_server import PlayedServer, played

from baton.cli.bench_flags import plan_of
from baton.cli.main import build_parser
from baton.core.errors import StartupFailed
from baton.core.metrics import Slo, TokenTimes
from baton.loadgen import benchmark
from baton.loadgen.benchmark import INTERRUPTED, SOME_FAILED
from baton.loadgen.driver import TokenUsage
from baton.loadgen.generator import Load, PlannedRequest
from baton.loadgen.records import Record

SHORT = ("--num-requests", "6", "--input-len", "4", "--output-len", "5")


async def bench(url: str, *argv: str, folder: Path) -> tuple[int, dict[str, Any]]:
    result = folder / "r.json"
    given = ["bench", "--base-url", url, *SHORT, "--result", str(result), *argv]
    code = await benchmark.run(plan_of(build_parser().parse_args(given)))
    return code, json.loads(result.read_text())


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_closed_loop(tmp_path: Path, endpoint: str, capsys: Any) -> None:
    server = PlayedServer(token_s=0.002)
    async with played(server) as url:
        page = tmp_path / "p.html"
        code, found = await bench(
            f"{url}/v1/", "--endpoint", endpoint, "--concurrency", "3", "--num-warmups", "2",
            "--slo", "ttft_ms=5000", "e2e_ms=0.001", "--plot", str(page), folder=tmp_path,
        )  # fmt: skip
    assert code == 0 and len(server.bodies) == 1 + 2 + 6 and server.most_running == 3
    assert (found["model"], found["num_completed"], found["num_failed"]) == ("played", 6, 0)
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (6 * 7, 6 * 5)
    assert found["tokens_counted_by"] == "usage"
    assert [found[name]["n"] for name in ("ttft_ms", "tbt_ms", "tpot_ms", "e2e_ms")] == [
        6, 24, 6, 6,
    ]  # fmt: skip
    assert found["slo_attainment"] == {"ttft": 1.0, "e2e": 0.0, "all": 0.0}
    assert found["goodput_rps"] == 0 and found["ttft_ms"]["mean"] > 2
    assert found["output_tokens_per_s"] == pytest.approx(30 / found["duration_s"])
    assert page.read_text().count("<svg") == 4
    assert "6 completed, 0 failed" in capsys.readouterr().out


async def test_an_open_loop_waits_for_nobody(tmp_path: Path) -> None:
    server = PlayedServer(token_s=0.05)
    async with played(server) as url:
        code, found = await bench(url, "--request-rate", "200", folder=tmp_path)
    assert code == 0 and server.most_running >= 5
    assert found["load"]["rate_per_s"] == 200


async def test_a_rate_is_of_the_whole_time_that_was_given(tmp_path: Path) -> None:
    """The rate is over the whole duration, although the next request would come after its end."""
    async with played(PlayedServer()) as url:
        given = ("--request-rate", "0.01", "--duration-s", "0.5")
        _, found = await bench(url, *given, folder=tmp_path)
        assert (found["num_sent"], found["duration_s"], found["requests_per_s"]) == (1, 0.5, 2.0)
        given = ("--request-rate", "1000", "--duration-s", "60")
        _, found = await bench(url, *given, folder=tmp_path)
    assert found["num_sent"] == 6 and found["duration_s"] < 10


async def test_a_duration_ends_the_load(tmp_path: Path) -> None:
    """Requests still running after the drain time are cut off and do not count as failed."""
    lines = tmp_path / "lines"
    lines.write_text('{"prompt": "a", "max_tokens": 12}')
    result = tmp_path / "r.json"
    async with played(PlayedServer(token_s=0.02)) as url:
        given = ["bench", "--base-url", url, "--dataset", "jsonl", "--dataset-path", str(lines)]
        given += ["--duration-s", "0.1", "--result", str(result)]
        found = []
        for drain_s in ("0", "60"):
            plan = plan_of(build_parser().parse_args([*given, "--drain-s", drain_s]))
            assert await benchmark.run(plan) == 0
            found.append(json.loads(result.read_text()))
    assert [one["num_cut_off"] for one in found] == [1, 0]
    assert [one["num_completed"] for one in found] == [0, 1]
    assert 0 < found[0]["num_output_tokens"] < 12 == found[1]["num_output_tokens"]


@pytest.mark.parametrize(
    ("usage", "piece", "counted"), [("each", 2, 5), ("last", 2, 5), ("none", 1, 5), ("none", 2, 3)]
)
async def test_however_tokens_are_counted(
    tmp_path: Path, usage: str, piece: int, counted: int, capsys: Any
) -> None:
    server = PlayedServer(usage=usage, piece=piece)
    async with played(server) as url:
        more = ("--no-ignore-eos",) if usage == "none" else ()
        code, found = await bench(url, *more, folder=tmp_path)
    assert (code, found["num_output_tokens"]) == (0, 6 * counted)
    assert ("counts no tokens" in capsys.readouterr().err) == (usage == "none")
    assert ("ignore_eos" in server.bodies[0]) == (usage != "none")


async def test_a_server_that_refuses_fields_is_sent_fewer(tmp_path: Path) -> None:
    for refuses, usage in ((("continuous_usage_stats",), "last"), (("include_usage",), "none")):
        server = PlayedServer(refuses=refuses, usage=usage)
        async with played(server) as url:
            code, found = await bench(url, folder=tmp_path)
        assert (code, found["num_completed"]) == (0, 6)


async def test_some_fail(tmp_path: Path, capsys: Any) -> None:
    async with played(PlayedServer(breaks_after=4)) as url:
        code, found = await bench(url, "--slo", "ttft_ms=9999", folder=tmp_path)
    assert (code, found["num_completed"], found["num_failed"]) == (SOME_FAILED, 3, 3)
    assert found["errors"] == {"HTTP 500: broken": 3}
    assert found["slo_attainment"]["all"] == 0.5
    assert "failed, 3 times: HTTP 500: broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"text": "x"}], "usage": {"completion_tokens": None}},
        {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 7}},
        {"choices": [{"text": "x"}], "usage": "many"},
        {"choices": ["x"]},
        {"choices": 5},
        {"choices": [], "usage": {"completion_tokens": "5"}},
    ],
)
async def test_a_request_with_an_odd_answer_has_failed(tmp_path: Path, odd: Any) -> None:
    async with played(PlayedServer(odd=odd)) as url:
        code, found = await bench(url, "--concurrency", "2", folder=tmp_path)
    assert (code, found["num_completed"], found["num_failed"]) == (SOME_FAILED, 0, 6)


@pytest.mark.parametrize(
    ("slo", "hangs_late", "share"),
    [
        ("ttft_ms=600", False, 0.5), ("tbt_ms=600", True, 0.5), ("e2e_ms=700", True, 0.5),
        ("ttft_ms=600", True, 1.0), ("ttft_ms=9999", False, 1.0), ("tpot_ms=9999", False, 0.5),
    ],
)  # fmt: skip
async def test_what_hangs_keeps_no_target(
    tmp_path: Path, slo: str, hangs_late: bool, share: float
) -> None:
    """Half of the requests are cut off: they meet the target only if they were not late by then."""
    server = PlayedServer(hangs_after=4, hangs_late=hangs_late)
    async with played(server) as url:
        given = ("--request-rate", "1000", "--drain-s", "1", "--slo", slo)
        _, found = await bench(url, *given, folder=tmp_path)
    assert (found["num_completed"], found["num_cut_off"]) == (3, 3)
    assert found["slo_attainment"]["all"] == share
    assert found["goodput_rps"] == pytest.approx(3 / found["duration_s"])


async def test_gaps_of_what_is_cut_off_are_counted(tmp_path: Path) -> None:
    async with played(PlayedServer(token_s=0.02)) as url:
        given = ("--num-requests", "1", "--output-len", "12", "--duration-s", "0.1")
        _, found = await bench(url, *given, "--drain-s", "0", folder=tmp_path)
    assert found["num_cut_off"] == 1 and found["num_output_tokens"] > 1
    assert found["tbt_ms"]["n"] == found["num_output_tokens"] - 1
    assert 15 < found["tbt_ms"]["mean"] < 60


@pytest.mark.parametrize("loop", [("--concurrency", "3"), ("--request-rate", "500")])
async def test_a_load_that_fails_itself_says_so(tmp_path: Path, loop: tuple[str, ...]) -> None:
    lines = tmp_path / "lines"
    chat = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    lines.write_text("\n".join(['{"prompt": "a"}'] * 3 + [chat]))
    async with played(PlayedServer(token_s=0.01)) as url:
        with pytest.raises(StartupFailed, match="messages are no prompt"):
            await bench(
                url, "--dataset", "jsonl", "--dataset-path", str(lines), *loop, folder=tmp_path
            )


async def test_a_request_that_fails_by_our_own_fault_ends_the_load() -> None:
    class Broken:
        async def stream(
            self, content: Any, num_tokens: int
        ) -> AsyncGenerator[int | TokenUsage, None]:
            yield 1
            raise RuntimeError("broken")

    requests = [PlannedRequest("x", 1, 5)] * 4
    for work in (
        Load(Broken(), time.monotonic()).closed_loop(iter(requests), 2, math.inf, math.inf, "g"),
        Load(Broken(), time.monotonic()).open_loop(iter(requests), iter([0.0] * 4), math.inf, "g"),
    ):
        with pytest.raises(RuntimeError, match="broken"):
            await work


async def test_what_is_wrong_with_a_target_is_said(tmp_path: Path) -> None:
    async with played(PlayedServer(key="k", models=("a", "b"))) as url:
        for argv, words, hint in (
            ((), "serves 2 models: a, b", "--model"),
            (("--model", "a"), "401: no such key", "BATON_API_KEY"),
        ):
            with pytest.raises(StartupFailed, match=words) as error:
                await bench(url, *argv, folder=tmp_path)
            assert hint in error.value.hint
    async with played(PlayedServer()) as url:
        for argv, words in (
            (("--model", "wat"), "404: the model 'wat' does not exist"),
            (("--dataset", "token-ids", "--vocab-size", "99", "--endpoint", "chat"), "no chat"),
        ):
            with pytest.raises(StartupFailed, match=words):
                await bench(url, *argv, folder=tmp_path)
        with pytest.raises(StartupFailed, match="answered HTTP 404"):
            await bench(f"{url}/elsewhere", folder=tmp_path)
    with pytest.raises(StartupFailed, match="cannot be reached: Connect call"):  # no server
        await bench(url, folder=tmp_path)
    with pytest.raises(StartupFailed, match="http://"):
        await bench("localhost:8000", folder=tmp_path)
    async with played(PlayedServer(content_type="text/html")) as url:
        with pytest.raises(StartupFailed, match="no stream of events"):
            await bench(url, folder=tmp_path)


@pytest.mark.parametrize(
    "argv",
    [
        ("--concurrency", "0"), ("--request-rate", "-1"), ("--request-rate", "inf"),
        ("--num-requests", "0"), ("--duration-s", "nan"), ("--input-len", "0"),
        ("--range-ratio", "1"), ("--num-warmups", "-1"), ("--drain-s", "nan"),
        ("--dataset", "jsonl"), ("--dataset-path", "x"), ("--dataset", "token-ids"),
        ("--slo", "ttft=5"), ("--slo", "ttft_ms=0"), ("--slo", "ttft_ms=nan"), ("--slo", "x"),
        ("--extra-body", "{"), ("--extra-body", "[]"), ("--result", "/nowhere/x.json"),
        ("--tokenizer", "/nowhere"),
    ],
)  # fmt: skip
def test_bad_flags(argv: tuple[str, ...]) -> None:
    with pytest.raises(StartupFailed):
        plan_of(build_parser().parse_args(["bench", *argv]))


async def test_ctrl_c_reports_what_was_measured(tmp_path: Path, capsys: Any) -> None:
    server = PlayedServer(token_s=0.01)
    async with played(server) as url:
        running = asyncio.create_task(
            bench(url, "--num-requests", "1000", "--concurrency", "2", folder=tmp_path)
        )
        while len(server.bodies) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        code, found = await running
    assert code == INTERRUPTED and found["is_interrupted"]
    assert found["num_completed"] >= 3 and 0 < found["num_cut_off"] <= 2
    assert "requests/s" in capsys.readouterr().out


def test_tokens_are_spread_over_pieces() -> None:
    for num_tokens, wanted in ((6, [1, 1, 2, 2, 3, 3]), (4, [1, 1, 2, 3]), (2, [1, 3])):
        record = Record("g", 0.0, 1, 9, 0.0, [1.0, 2.0, 3.0])
        record.count_as(5, num_tokens)
        assert (record.token_s, record.num_prompt_tokens) == (wanted, 5)


def test_targets_by_hand() -> None:
    times = TokenTimes(0.0, (1.0, 1.5, 3.0))  # TPOT 1
    good = Slo(ttft_s=1.0, tbt_s=1.5, tpot_s=1.0, e2e_s=3.0)
    assert good.is_met_by(times) and Slo().is_met_by(times)
    for bad in (Slo(ttft_s=0.9), Slo(tbt_s=1.4), Slo(tpot_s=0.9), Slo(e2e_s=2.9)):
        assert not bad.is_met_by(times)
    assert not Slo().is_met_by(TokenTimes(0.0, ()))
    assert Slo(tpot_s=0.1, tbt_s=0.1).is_met_by(TokenTimes(0.0, (1.0,)))
