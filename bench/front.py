"""`python -m baton.bench.front [part ...]`: a gateway's fronts beside the libraries they use.

    generator ◄── gateway ◄── one process that simulates prefill and decode
    generator ◄── bare server of the library           (the upper bound, measured alternately)
All run on this machine's cores; each is a process. Without arguments all parts are measured and
written to bench/results/front.json.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.cluster.redis_server import RedisServer
from baton.core.process.children import bound_to_us

from .floors.figures import ROOT, Figure, machine, table, write
from .played import fake_nodes
from .played.front_load import LoadPlan

FRONTS = {"grpc": "gRPC, against bare grpc.aio", "sse": "SSE, against bare aiohttp"}
NUM_STREAMS = 64
TARGET_SHARE = 0.6
TARGET_ADDED_MS = 5.0
NUM_STALLED = 100
TTFT_SLO_S, MAX_REFUSAL_MS = 0.5, 50.0
_CAPACITY_RPS, _PROMPT_TOKENS, _OVERLOAD_S = 50, 200, 8.0
MAX_GROWTH_MB = 32.0
_STALL_STEP_S, _STALL_TOKENS = 0.02, 1000
_REPEATS, _LATENCY_REPEATS = 7, 3
_LAUNCH = "import sys; from baton.cli.launch import {0}; sys.exit({0}())"
_MAX_WAIT = ("--max-queue-s", "0.4")
_READY_S = 30.0

Nodes = Callable[..., AbstractContextManager[None]]


def throughput() -> list[Figure]:
    """Messages and tokens per second, of the gateways and the bare server alternately."""
    figures = []
    for front, words in FRONTS.items():
        plan = LoadPlan(front, "", NUM_STREAMS, rounds=2)  # the first round warms up
        with (
            bare(front) as floor,
            gateway() as alone,
            gateway(options=("--num-gateways", "2")) as shared,
        ):
            servers = {
                "bare": {front: floor},
                f"{words}, {NUM_STREAMS} streams": alone,
                f"the same, 2 gateways, {front}": shared,
            }
            found: dict[str, list[Any]] = {name: [] for name in servers}
            for _ in range(_REPEATS):
                for name, through in servers.items():
                    found[name] += load(plan, through)[1:]
        most = statistics.median(_per_s(found.pop("bare"), "messages"))
        for name, rounds in found.items():
            for unit in ("messages", "tokens"):
                samples = tuple(_per_s(rounds, unit))
                figures.append(
                    Figure(name, f"{unit}/s", samples, most, "bare messages/s", most * TARGET_SHARE)
                )
    return figures


def _per_s(rounds: Sequence[Any], unit: str) -> list[float]:
    for found in rounds:
        if found["errors"]:
            raise RuntimeError(f"streams failed: {found['errors']}")
    return [found[unit] / found["seconds"] for found in rounds]


def latency() -> list[Figure]:
    """Time from an engine's step to the client, at half of the gateway's throughput."""
    figures = []
    for front, words in FRONTS.items():
        with gateway() as through:
            most = max(_per_s(load(LoadPlan(front, "", NUM_STREAMS, rounds=3), through), "tokens"))
        step_s = NUM_STREAMS / (most / 2)
        plan = LoadPlan(front, "", NUM_STREAMS, num_tokens=500, keeps_times=True)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "sent.json"
            pace = ("--step-s", str(step_s), "--log", str(log))
            floors_ms, p99s_ms = [], []
            for _ in range(_LATENCY_REPEATS):
                with bare(front, *pace) as floor:
                    there = load(plan, {front: floor})
                floors_ms.append(_quantile(_delays_ms(there, log), 0.99))
                with gateway(*pace) as through:
                    there = load(plan, through)
                p99s_ms.append(_quantile(_delays_ms(there, log), 0.99))
        name = f"{words}: p99 from step to client, a step each {step_s * 1e3:.1f} ms"
        floor_ms = statistics.median(floors_ms)
        figures.append(
            Figure(name, "ms", tuple(p99s_ms), floor_ms, "bare", floor_ms + TARGET_ADDED_MS)
        )
    return figures


def stalled() -> list[Figure]:
    """The effect of streams that no client reads on the other streams and on the gateway's
    memory."""
    figures = []
    pace = ("--step-s", str(_STALL_STEP_S))
    with gateway(*pace) as through:
        pid = int(through["pid"])
        gaps_ms, grown_mb = {}, {}
        for num_stalled in (0, NUM_STALLED):
            before_mb = _rss_mb(pid)
            plan = LoadPlan(
                "sse",
                "",
                2 * NUM_STALLED,
                num_tokens=_STALL_TOKENS,
                num_stalled=num_stalled,
                keeps_times=True,
            )
            gaps_ms[num_stalled] = _gaps_ms(load(plan, through))
            grown_mb[num_stalled] = _rss_mb(pid) - before_mb
    name = f"SSE, {NUM_STALLED} of {2 * NUM_STALLED} streams stalled"
    calm, stuck = (_quantile(gaps_ms[n], 0.99) for n in (0, NUM_STALLED))
    figures.append(
        Figure(f"{name}: TBT p99 of the others", "ms", (stuck,), calm, "none stalled", calm * 1.05)
    )
    figures.append(
        Figure(f"{name}: growth of memory", "MB", (grown_mb[NUM_STALLED],), None, "", MAX_GROWTH_MB)
    )
    return figures


def overload() -> list[Figure]:
    """Goodput of a prefill engine of fixed speed, at and far above its capacity."""
    pace = ("--prefill-tokens-per-s", str(_CAPACITY_RPS * _PROMPT_TOKENS), "--step-s", "0.01")
    figures = []
    for front in FRONTS:
        with gateway(*pace, options=_MAX_WAIT) as through:
            figures += _offered(f"played nodes, {front}", front, through, _CAPACITY_RPS)
    return figures


def overload_cluster() -> list[Figure]:
    """The same with real engines on these cores, whose capacity is measured first."""
    with gateway(options=_MAX_WAIT, nodes=_real_nodes) as through:
        plan = LoadPlan("sse", "", 8, num_tokens=20, rounds=4, prompt_tokens=_PROMPT_TOKENS)
        seconds = [found["seconds"] for found in load(plan, through)[1:]]
        capacity_rps = 8 / statistics.median(seconds)
        return _offered("CPU engines, sse", "sse", through, capacity_rps)


def _offered(
    what: str, front: str, through: Mapping[str, str], capacity_rps: float
) -> list[Figure]:
    """Goodput and refusals at multiples of the capacity."""
    good_rps, refused_ms = {}, {}
    for times in (0.8, 1.0, 2.0, 10.0):
        plan = LoadPlan(
            front,
            "",
            num_tokens=20,
            prompt_tokens=_PROMPT_TOKENS,
            rate_per_s=times * capacity_rps,
            duration_s=_OVERLOAD_S,
            keeps_times=True,
        )
        streams = load(plan, through)[0]["streams"]
        good_rps[times] = sum(map(_is_good, streams)) / _OVERLOAD_S
        refused = [stream for stream in streams if stream["error"]]
        refused_ms[times] = sorted((s["ended_s"] - s["sent_s"]) * 1e3 for s in refused)
    peak = max(good_rps.values())
    figures = []
    for times, share in ((2.0, 0.9), (10.0, 0.8)):
        name = f"{what}: goodput at {times:.0f}x of {capacity_rps:.0f} requests/s"
        figures.append(
            Figure(name, "requests/s", (good_rps[times],), peak, "the most seen", share * peak)
        )
        name = f"{what}: a refusal at {times:.0f}x, p99"
        took_ms = _quantile(refused_ms[times], 0.99)
        figures.append(Figure(name, "ms", (took_ms,), None, "", MAX_REFUSAL_MS))
    return figures


def _is_good(stream: Any) -> bool:
    """Whether the stream ended without an error and its TTFT met the SLO."""
    times_s = stream["times_s"]
    return not stream["error"] and times_s[0] - stream["sent_s"] <= TTFT_SLO_S


def _gaps_ms(rounds: Sequence[Any]) -> list[float]:
    found = []
    for stream in rounds[0]["streams"]:
        times_s = stream["times_s"]
        found += [(later - former) * 1e3 for former, later in pairwise(times_s)]
    return sorted(found)


def _rss_mb(pid: int) -> float:
    """The current resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _delays_ms(rounds: Sequence[Any], log: Path) -> list[float]:
    """For every token, the time from sending at the engine to arrival at the client."""
    sent = json.loads(log.read_text())
    found = []
    for stream in rounds[0]["streams"]:
        pairs = zip(sent[stream["request_id"]], stream["times_s"], strict=False)
        found += [(came_s - sent_s) * 1e3 for sent_s, came_s in pairs]
    return sorted(found)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- the processes --------------------------------------------------------------------------------


def load(plan: LoadPlan, server: Mapping[str, str]) -> list[Any]:
    """The streams that a generator with this plan recorded, round by round; `server` as yielded by
    `gateway`."""
    fields = asdict(plan) | {"address": server[plan.front], "taken": server.get("taken", "")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        subprocess.run(
            [sys.executable, "-m", "baton.bench.played.front_load", str(out)],
            input=json.dumps(fields) + "\n",
            text=True,
            check=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        return list(json.loads(out.read_text()))


@contextmanager
def bare(front: str, *options: str) -> Iterator[str]:
    """A bare server of the library; yields its address."""
    with child("-m", "baton.bench.played.front_floor", front, *options) as line:
        yield line.split()[-1]


@contextmanager
def _played_nodes(redis_url: str, *pace: str) -> Iterator[None]:
    with child("-m", "baton.bench.played.fake_nodes", redis_url, *pace):
        yield


@contextmanager
def _real_nodes(redis_url: str, *_: str) -> Iterator[None]:
    """A prefill and a decode node with the demo model."""
    here = ("--redis-url", redis_url, "--cluster", fake_nodes.CLUSTER, "--device", "cpu")
    with (
        child("-c", _LAUNCH.format("prefill"), *here),
        child("-c", _LAUNCH.format("decode"), *here),
    ):
        yield


@contextmanager
def gateway(
    *pace: str, options: Sequence[str] = (), nodes: Nodes = _played_nodes
) -> Iterator[dict[str, str]]:
    """A gateway with nodes of this pace, ready; yields its address by front, its pid, and the file
    in which its clients count the tokens that they have received."""
    ports = ("--grpc-port", "0", "--http-port", "0")
    with RedisServer.start() as redis, tempfile.TemporaryDirectory() as folder:
        taken = str(Path(folder) / "taken")
        here = ("--redis-url", redis.url, "--cluster", fake_nodes.CLUSTER)
        with (
            nodes(redis.url, "--taken", taken, *pace),
            child("-c", _LAUNCH.format("gateway"), *ports, *here, *options) as line,
        ):
            pid, *_, url, grpc_address = line.split()
            _wait_ready(f"{url}/ready")
            addresses = {"grpc": grpc_address, "sse": url.removeprefix("http://")}
            yield addresses | {"pid": pid, "taken": taken}


def _wait_ready(url: str) -> None:
    until_s = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


@contextmanager
def child(*arguments: str) -> Iterator[str]:
    """A Python process; yields its pid and its `ready:` line."""
    process = subprocess.Popen(
        bound_to_us([sys.executable, *arguments], signal.SIGTERM),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready: "):
                break
        else:
            raise RuntimeError(f"{arguments} ended with code {process.wait()}")
        yield f"{process.pid} {line.strip()}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


PARTS: dict[str, Callable[[], list[Figure]]] = {
    "throughput": throughput,
    "latency": latency,
    "stalled": stalled,
    "overload": overload,
    "overload_cluster": overload_cluster,
}


def main(wanted: Sequence[str]) -> int:
    """Measure; the results are written only if all parts ran."""
    where = machine()
    measured = {}
    for part in wanted or PARTS:
        measured[part] = PARTS[part]()
        print(f"{part}\n{table(measured[part])}\n", flush=True)
    if not wanted:
        write(ROOT / "bench" / "results" / "front.json", measured, where, "front")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
