"""`baton bench` as a user's command, against a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from fakes.gateway.conversation_gateway import conversation_gateway, write_conversation_model

from baton.cluster.redis_server import RedisServer

BATON = "import sys; from baton.__main__ import main; sys.exit(main())"


async def start(*argv: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", BATON, "bench", *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "BATON_API_KEY"},
    )  # fmt: skip


async def test_a_gateway_is_measured_until_the_end_or_ctrl_c(tmp_path: Path) -> None:
    model_dir = write_conversation_model(tmp_path / "demo", 4096)
    result, page = tmp_path / "r.json", tmp_path / "p.html"
    with RedisServer.start() as redis:
        async with conversation_gateway(redis.url, model_dir, 4096) as gateway:
            at = ("--base-url", gateway.url, "--input-len", "20", "--output-len", "8")
            many = await start(
                *at, "--endpoint", "chat", "--num-requests", "12", "--concurrency", "4",
                "--slo", "ttft_ms=60000", "--result", str(result), "--plot", str(page),
            )  # fmt: skip
            out, err = await many.communicate()
            assert many.returncode == 0, err.decode()
            found = json.loads(result.read_text())
            assert (found["model"], found["num_completed"]) == ("demo", 12)
            assert (found["num_output_tokens"], found["tokens_counted_by"]) == (12 * 8, "usage")
            assert found["num_prompt_tokens"] > 12 * 20  # words of several bytes, each a token
            assert found["slo_attainment"]["all"] == 1 and "<svg" in page.read_text()
            assert b"12 completed, 0 failed" in out

            gateway.nodes[1].token_s = 0.02
            endless = await start(*at, "--duration-s", "600", "--concurrency", "4")
            num_before = len(gateway.nodes[0].dispatched)
            while len(gateway.nodes[0].dispatched) < num_before + 6:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            endless.send_signal(signal.SIGINT)
            out, err = await endless.communicate()
            assert endless.returncode == 130, err.decode()
            assert b"cut off at the end" in out and b"TTFT" in out

            absent = await start(*at, "--model", "other")
            _, err = await absent.communicate()
            assert absent.returncode == 1 and b"Traceback" not in err
            assert b"404" in err and b"try: --model" in err
