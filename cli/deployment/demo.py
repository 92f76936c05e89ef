"""`baton demo`: a real deployment on this CPU, several prompts at once, and a table of them."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from ...client import AsyncClient, Result
from ...core.config import GatewayConfig, NodeConfig, UpConfig
from ...core.engine_config import EngineConfig
from ...core.metrics import percentile
from ...core.request.sampling_params import SAMPLING
from .deployment import Deployment

_SHARED = '"""Small tools for reading and writing text files."""\n\nimport os\nimport sys\n\n\n'
PROMPTS = (
    "def read_file(path):\n",
    "class Queue:\n    def __init__(self",
    _SHARED + "def read_lines(path):\n",
    _SHARED + "def write_lines(path, lines):\n",
    "import unittest\n\nclass TestSort(unittest.TestCase):\n",
    "def main():\n    parser = argparse.ArgumentParser(",
)
_HEADER = (
    *("#", "prefill", "decode", "prompt", "cached", "KV moved", "out"),
    *("TTFT ms", "hand-off ms", "TBT p50", "TBT p99", "tokens/s"),
)


class _Screen:
    """Several streams on one terminal: whole lines, each after its request's number."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty()
        self._pending: dict[int, str] = {}

    def add(self, number: int, text: str) -> None:
        *lines, rest = (self._pending.get(number, "") + text).split("\n")
        for line in lines:
            self._print(number, line)
        self._pending[number] = rest

    def end(self, number: int) -> None:
        if rest := self._pending.pop(number, ""):
            self._print(number, rest)

    def _print(self, number: int, line: str) -> None:
        label = f"[{number}]"
        if self._colour:
            label = f"\x1b[3{number % 6 + 1}m{label}\x1b[0m"
        print(label, line, flush=True)


async def run(max_tokens: int, *, verbose: bool) -> int:
    """Start a deployment, stream, print, stop. Returns the exit code. Raises InvalidRequest."""
    SAMPLING["max_tokens"].kind.check(max_tokens, "max_tokens", 0)
    began_s = time.monotonic()
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    print("starting Redis, a gateway, one prefill node and two decode nodes on the CPU", flush=True)

    def report(name: str, line: str) -> None:
        if verbose or "ready: " in line or "KV blocks" in line:
            print(f"{name:>10} | {line}", flush=True)

    deployment = Deployment(
        UpConfig(mode="disaggregated", num_decode_nodes=2),
        EngineConfig(device="cpu", cpu_kv_bytes=96 << 20),
        NodeConfig(),
        GatewayConfig(grpc_port=0, http_port=0),
        report,
    )
    async with deployment:
        print(f"ready in {time.monotonic() - began_s:.1f} s; while it runs:")
        print(*deployment.startup_lines[:1], "", sep="\n", flush=True)
        results = await _stream_all(deployment.address, max_tokens)
    print_table(results)
    return 0


async def _stream_all(address: str, max_tokens: int) -> list[Result]:
    screen = _Screen()
    async with AsyncClient(address) as client:

        async def one(number: int, prompt: str) -> Result:
            screen.add(number, prompt)
            stream = client.generate(prompt, max_tokens=max_tokens, temperature=0.0)
            async for chunk in stream:
                screen.add(number, chunk.text)
            screen.end(number)
            return stream.result

        # The third prompt is sent before the fourth, which then finds their prefix cached.
        third = await one(3, PROMPTS[2])
        others = [(i, p) for i, p in enumerate(PROMPTS, 1) if i != 3]
        first, second, *rest = await asyncio.gather(*(one(i, p) for i, p in others))
        return [first, second, third, *rest]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def print_table(results: list[Result]) -> None:
    """Print a row per request: its nodes, its transferred KV, its times."""
    rows = [_HEADER]
    for number, result in enumerate(results, 1):
        times = result.times
        e2e_s = times.e2e_s
        rows.append(
            (
                str(number),
                result.prefill_node,
                result.decode_node or "-",
                str(result.prompt_tokens),
                str(result.cached_tokens),
                f"{result.transfer_bytes / 1024:.0f} KiB",
                str(result.completion_tokens),
                _ms(times.ttft_s),
                _ms(times.handoff_gap_s),
                _ms(percentile(times.gaps_s, 50)),
                _ms(percentile(times.gaps_s, 99)),
                f"{result.completion_tokens / e2e_s:.0f}" if e2e_s else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
