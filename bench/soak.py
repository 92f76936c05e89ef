"""Looks for memory growth: a deployment of the demo model under steady load, sampled each second.

python -m baton.bench.soak [--minutes M]      printed, and written to bench/results/soak.json

Sends streams over gRPC until the time is up; clients cancel some of them, and some are refused. The
slope is a least-squares line through resident memory after the warm-up: until then the gateway's
window of the last 300 s fills up, so that a shorter run shows that as growth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.deployment.deployment import Deployment
from baton.client import AsyncClient
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError

from .floors.figures import ROOT, command_line, commit, machine

_IN_FLIGHT = 6
_LONGEST_PROMPT, _MOST_TOKENS = 300, 24
_LEFT, _REFUSED = 0.1, 0.05  # shares of the requests
_POOL_BYTES = 24 << 20  # few blocks, so that all are touched soon
_WINDOW_S, _SETTLE_S = (
    300.0,
    30.0,
)  # the window of telemetry/window/window.py; until prompts of every length have been sent
_TARGET_MB_PER_MIN = 0.1


@dataclass
class Samples:
    """Resident memory of one process, in MB, by second."""

    pid: int
    at_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)

    def look(self, now_s: float) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.at_s.append(now_s)
        self.rss_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    def slope_mb_per_min(self, since_s: float) -> float | None:
        """None if fewer than ten seconds of samples are left."""
        begin = next((i for i, at_s in enumerate(self.at_s) if at_s >= since_s), len(self.at_s))
        if len(self.at_s) - begin < 10:
            return None
        line = statistics.linear_regression(self.at_s[begin:], self.rss_mb[begin:])
        return line.slope * 60

    def figures(self, warmup_s: float) -> dict[str, float | None]:
        return {
            "first_mb": self.rss_mb[0],
            "last_mb": self.rss_mb[-1],
            "most_mb": max(self.rss_mb),
            "mb_per_min_after_warmup": self.slope_mb_per_min(warmup_s),
            "mb_per_min_after_settling": self.slope_mb_per_min(_SETTLE_S),
        }


async def soak(minutes: float) -> dict[str, object]:
    """The figures of one run."""
    where, until_s = machine(), minutes * 60
    warmup_s = _WINDOW_S + _SETTLE_S
    deployment = Deployment(
        UpConfig(mode="disaggregated"),
        EngineConfig(device="cpu", cpu_kv_bytes=_POOL_BYTES),
        NodeConfig(),
        GatewayConfig(grpc_port=0, http_port=0),
        lambda name, line: None,
    )
    ended: Counter[str] = Counter()
    async with deployment, AsyncClient(deployment.address) as client:
        processes = {name: Samples(pid) for name, pid in _processes(os.getpid()).items()}
        began_s = time.monotonic()
        clients = [
            asyncio.create_task(_ask(client, began_s + until_s, random.Random(i), ended))
            for i in range(_IN_FLIGHT)
        ]
        while (now_s := time.monotonic() - began_s) < until_s:
            for samples in processes.values():
                samples.look(now_s)
            await asyncio.sleep(1.0)
        await asyncio.gather(*clients)
    found = {name: samples.figures(warmup_s) for name, samples in processes.items()}
    return {
        "commit": commit(),
        "command": command_line("soak", sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": where,
        "minutes": minutes,
        "warmup_s": warmup_s,
        "requests": dict(sorted(ended.items())),
        "target_mb_per_min": _TARGET_MB_PER_MIN,
        "processes": found,
        "rss_mb_by_10_s": {
            name: [round(mb, 2) for mb in samples.rss_mb[::10]]
            for name, samples in processes.items()
        },
    }


async def _ask(
    client: AsyncClient, until_s: float, chance: random.Random, ended: Counter[str]
) -> None:
    """Send one request after the other."""
    while time.monotonic() < until_s:
        prompt = chance.choices(range(256, 1024), k=chance.randint(1, _LONGEST_PROMPT))
        drawn = chance.random()
        max_tokens = -1 if drawn < _REFUSED else chance.randint(1, _MOST_TOKENS)
        leave_at = chance.randint(0, 8) if drawn > 1 - _LEFT else None
        try:
            stream = client.generate(
                prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True
            )
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                if num_chunks == leave_at:
                    stream.cancel()
            ended["finished"] += 1
        except BatonError as error:
            ended[error.code] += 1
            await asyncio.sleep(0.01)


def _processes(root: int) -> dict[str, int]:
    """The pids of all descendants of `root`, by role; an engine is its supervisor's child."""
    found: dict[str, int] = {}
    for pid in _children(root):
        line = Path(f"/proc/{pid}/cmdline").read_text()
        name = next(name for name in ("redis", "gateway", "prefill", "decode") if name in line)
        found[name] = pid
        found |= {f"{name} engine": child for child in _children(pid)}
    return found


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "soak.json")
    wanted = parser.parse_args()
    result = asyncio.run(soak(wanted.minutes))
    print(json.dumps(result, indent=1))
    wanted.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
