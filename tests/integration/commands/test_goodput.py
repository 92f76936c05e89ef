"""`python -m baton.bench.goodput` at small rates: every mode starts, every rate has a result."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.bench.floors.gpu_shapes import Shape
from baton.bench.goodput.__main__ import main, write_model

pytestmark = pytest.mark.slow

# A completions server that sends one token every 5 ms, started like vLLM.
_PEER = """
import asyncio, json, sys
from aiohttp import web

async def completions(request):
    body = await request.json()
    assert body["model"] == "m" and "tbt_target_ms" not in body
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for count in range(1, body["max_tokens"] + 1):
        event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": count}}
        await response.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        await asyncio.sleep(0.005)
    await response.write(b"data: [DONE]\\n\\n")
    return response

async def health(request):
    return web.Response()

arguments = sys.argv[1:]
assert arguments[0] == "serve" and "--max-num-batched-tokens" in arguments
app = web.Application()
app.add_routes([web.get("/health", health), web.post("/v1/completions", completions)])
web.run_app(app, port=int(arguments[arguments.index("--port") + 1]), print=None)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model small enough for a CPU, with its tokenizer of words."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(Shape("tiny", 2, 32, 4, 2, 8, 64, 300), folder)
    return folder


def measured(tmp_path: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "goodput.json"
    load = ["--cells", "24/4", "--count-s", "2", "--warm-lifetimes", "0.5", "--clients", "1"]
    where = ["--model", str(model), "--load-format", "dummy", "--device", "cpu"]
    argv = [*load, *where, "--max-model-len", "4096", "--out", str(path), *arguments]
    assert main(argv) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    for row in rows:
        assert row["num_counted"] and not row["groups"]["probe"]["num_failed"], row
    return rows


def test_every_mode_is_measured_on_a_cpu(tmp_path: Path, model: Path) -> None:
    rows = measured(tmp_path, model, "--rates", "4", "--y", "400", "800")
    assert [(row["mode"], row["y_ms"]) for row in rows] == [
        ("disaggregated", None),
        *((mode, y_ms) for mode in ("aggregated", "auto") for y_ms in (800, 400)),
    ]
    assert all(set(row["attained"]) == {"400", "800"} for row in rows)


def test_a_peer_is_measured_and_what_is_left_is_resumed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "peer.py"
    program.write_text(_PEER)
    peer = ["--vllm", shlex.join([sys.executable, str(program)]), "--vllm-start-s", "0"]
    argv = ["--modes", "vllm-256", "--gpus", "0,1", "--y", "50", *peer]
    rows = measured(tmp_path, model, *argv, "--rates", "8")
    assert [row["rate_per_s"] for row in rows] == [8]
    capsys.readouterr()
    measured(tmp_path, model, *argv, "--rates", "16", "--budget-s", "15")
    assert "not begun, 15 s are left" in capsys.readouterr().out
    rows = measured(tmp_path, model, *argv, "--rates", "8", "16", "--resume")
    assert "at 8/s" not in capsys.readouterr().out
    assert [row["rate_per_s"] for row in rows] == [8, 16]
    assert all(4 < row["groups"]["probe"]["tpot_ms"]["p50"] < 20 for row in rows)
