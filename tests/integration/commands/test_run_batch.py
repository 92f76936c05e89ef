"""`baton run-batch` as a process: responses of a server, kills while it runs, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from baton import LLM, SamplingParams

NUM_LINES = 40
BUSY = (429, 500, 502, 503, 504)


def body(number: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": f"def function_{number}(",
        "max_tokens": 24,
        "seed": number,
        "temperature": number % 2,
        "ignore_eos": True,
    }


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(NUM_LINES):
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body(number)}) + "\n")
    return path


@pytest.fixture
def one_request(requests: Path) -> Path:
    requests.write_text(requests.read_text().splitlines()[0])
    return requests


def command(requests: Path, results: Path, *more: str) -> list[str]:
    flags = ["--cpu-kv-bytes", str(16 << 20), "--max-concurrent", "4", *more]
    files = ["-i", str(requests), "-o", str(results)]
    return [sys.executable, "-m", "baton", "run-batch", *files, *flags]


def results_of(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "a line was done twice"
    return by_id


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def cut_off(path: Path) -> bytes:
    """Append half a result, as a kill during a write does; returns the complete part."""
    with path.open("ab") as file:
        file.write(b'{"id": "batch_req_')
    data = path.read_bytes()
    return data[: data.rindex(b"\n") + 1]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, str]]:
    bodies = [body(number) for number in range(NUM_LINES)]
    with LLM(cpu_kv_bytes=16 << 20) as llm:
        params = [
            SamplingParams(**{k: v for k, v in b.items() if k not in ("model", "prompt")})
            for b in bodies
        ]
        outputs = llm.generate([b["prompt"] for b in bodies], params, use_tqdm=False)
    yield {f"r{number}": one.outputs[0].text for number, one in enumerate(outputs)}


Answer: TypeAlias = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def deployment(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server whose completions are handled by `answer`."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def run_against(url: str, requests: Path, results: Path) -> tuple[int, str]:
    """Exit code and errors of a run with a deployment."""
    process = await asyncio.create_subprocess_exec(
        *command(requests, results, "--url", url),
        env=os.environ | {"BATON_API_KEY": "secret"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_a_run_that_was_ended_goes_on(requests: Path) -> None:
    """A run that is killed, interrupted and terminated in turn resumes without repeating a line. It
    uses a deployment, so that each run starts quickly; a run with its own engine is tested
    below."""
    results = requests.with_name("out.jsonl")
    seen: list[str] = []
    may_answer = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        seen.append((await request.json())["prompt"])
        if len(seen) in (10, 20, 30):  # end the run here, with lines in progress
            may_answer.clear()
        await may_answer.wait()
        return web.json_response({"id": "x", "prompt": seen[-1]})

    async with deployment(answer) as url:
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            may_answer.set()
            num_seen, num_done = len(seen), len(lines_of(results))
            process = await asyncio.create_subprocess_exec(
                *command(requests, results, "--url", url), stderr=asyncio.subprocess.PIPE
            )
            while may_answer.is_set() or len(lines_of(results)) <= num_done:
                assert process.returncode is None
                await asyncio.sleep(0.01)
            process.send_signal(number)
            await process.communicate()
            assert process.returncode == (130 if number == signal.SIGINT else -number)
            assert num_seen < len(seen) <= num_seen + 14, "what was in work is done again"
            cut_off(results)
        may_answer.set()
        code, errors = await run_against(url, requests, results)
    assert code == 0, errors
    assert len(results_of(results)) == NUM_LINES


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_with_an_engine_of_its_own_goes_on(
    requests: Path, expected: dict[str, str], number: signal.Signals
) -> None:
    results = requests.with_name("out.jsonl")
    with requests.with_name("log").open("wb") as log:  # an unread pipe would block it
        process = subprocess.Popen(command(requests, results), stderr=log)
    while len(lines_of(results)) < 6:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    before = cut_off(results)
    done = subprocess.run(command(requests, results), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert results.read_bytes().startswith(before)
    found = results_of(results)
    texts = {name: one["response"]["body"]["choices"][0]["text"] for name, one in found.items()}
    assert texts == expected


def test_bad_lines_are_errors_and_the_exit_code_tells(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    turn = {"model": "demo", "input": "hi", "max_output_tokens": 3}
    other = chat | {"model": "other"}
    lines = [
        {"custom_id": "turn", "method": "POST", "url": "/v1/responses", "body": turn},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "no", "method": "POST", "url": "/v1/completions", "body": {"model": "demo"}},
        {"custom_id": "other", "method": "POST", "url": "/v1/chat/completions", "body": other},
    ]
    requests.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    done = subprocess.run(command(requests, results), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    found = results_of(results)
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["chat"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["turn"]["response"]["body"]["usage"]["output_tokens"] == 3
    refused = found["no"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "prompt")
    assert found["other"]["response"]["status_code"] == 404
    assert found[None]["error"]["code"] == "invalid_json"
    missing = command(tmp_path / "none.jsonl", results)
    done = subprocess.run(missing, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: cannot read")


async def test_a_deployment_that_is_busy_is_asked_again(requests: Path) -> None:
    """A run retries while a deployment, given by URL and key, is busy, and ends if it is gone."""
    results = requests.with_name("out.jsonl")
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        if len(seen) <= len(BUSY):
            return web.json_response({}, status=BUSY[len(seen) - 1], headers={"Retry-After": "0"})
        if len(seen) > 20:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"id": "x", "prompt": (await request.json())["prompt"]})

    async with deployment(answer) as url:
        code, errors = await run_against(url, requests, results)
    assert code == 1 and "error: no answer from http://" in errors
    assert set(seen) == {"Bearer secret"}
    found = results_of(results)
    assert 20 - len(BUSY) - 4 <= len(found) <= 20 - len(BUSY)
    assert all(one["response"]["body"]["id"] == "x" for one in found.values())


@pytest.mark.parametrize(("status", "num_calls"), [(503, 30), (401, 1), (403, 1)])
async def test_what_stays_refused_ends_the_run_and_names_the_line(
    one_request: Path, status: int, num_calls: int
) -> None:
    results, seen = one_request.with_name("out.jsonl"), 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        headers = {"Retry-After": "0"}
        return web.json_response({"why": "closed"}, status=status, headers=headers)

    async with deployment(answer) as url:
        code, errors = await run_against(url, one_request, results)
    assert code == 1 and f"error: id r0: /v1/completions was answered with {status}" in errors
    assert "closed" in errors and seen == num_calls
    assert not results_of(results)
