"""The CPU cost of unauthenticated connections to an engine: 1,000 a second at each of its sockets.

    python -m baton.bench.strangers [--seconds 4] [--out bench/results/strangers.json]

Figures are CPU time of the prefill engine's process without other work, in per cent of a second:
on a busy engine its event loop may lose as much. The floor is the same without these connections.
The first burst, which the rate limit admits, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from baton.cli.deployment.deployment import Deployment, running_in_background
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig

from .floors.figures import commit, machine

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PER_S = 1000
_REPEATS = 5
_BURST = 600

Knock = Callable[[], None]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _cpu_percent(pid: int, seconds: float, knock: Knock | None) -> float:
    """CPU usage of the process while `knock` opens `_PER_S` connections per second."""
    if knock is not None:
        for _ in range(_BURST):
            knock()
            time.sleep(1 / _PER_S)
    begin_s, began, num = time.monotonic(), _cpu_s(pid), 0
    while (now_s := time.monotonic()) < begin_s + seconds:
        if knock is None:
            time.sleep(0.1)
            continue
        while num < (now_s - begin_s) * _PER_S:
            num += 1
            knock()
        time.sleep(0.001)
    return 100 * (_cpu_s(pid) - began) / (time.monotonic() - begin_s)


def _doors(pid: int) -> dict[str, Knock]:
    """The listening sockets of the engine's process: unix sockets and TCP ports."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    doors: dict[str, Knock] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and len(fields) > 7 and fields[7].startswith("@baton-"):
            kind = socket.SOCK_SEQPACKET if fields[4] == "0005" else socket.SOCK_STREAM
            address = ("\0" + fields[7][1:]).encode()
            doors[fields[7][1:].rsplit("-", 2)[0]] = _knocking(socket.AF_UNIX, kind, address)
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            port = int(fields[1].partition(":")[2], 16)
            doors["data port"] = _knocking(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port))
    return doors


def _knocking(family: int, kind: int, address: object) -> Knock:
    def knock() -> None:
        with socket.socket(family, kind) as stranger:
            stranger.setblocking(False)
            try:
                stranger.connect(address)
                stranger.send(b"let me in, I am nobody")
            except OSError:
                return  # the queue is full: the kernel refuses, which costs the engine nothing

    return knock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("bench/results/strangers.json"))
    wanted = parser.parse_args()
    engine = EngineConfig(device="cpu", cpu_kv_bytes=32 << 20)
    gateway = GatewayConfig(grpc_port=0, http_port=0)
    found: dict[str, dict[str, float]] = {}
    for transport in ("auto", "tcp"):
        node = NodeConfig(kv_transport=transport)
        deployment = Deployment(
            UpConfig(mode="disaggregated"), engine, node, gateway, lambda *_: None
        )
        with running_in_background(deployment):
            (supervisor,) = (c.process.pid for c in deployment.children if c.name == "prefill-0")
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            pid = int(children[0])
            time.sleep(3)  # until the start-up work of the deployment is over
            for name, knock in _doors(pid).items():
                pairs = [
                    (
                        _cpu_percent(pid, wanted.seconds, None),
                        _cpu_percent(pid, wanted.seconds, knock),
                    )
                    for _ in range(_REPEATS)
                ]
                alone, beside = (statistics.median(each) for each in zip(*pairs, strict=True))
                found[name] = {"alone_percent": alone, "strangers_percent": beside}
                print(f"{name:16} {alone:6.2f} % alone, {beside:6.2f} % with {_PER_S}/s")
    result = {"commit": commit(), "machine": machine(), "per_s": _PER_S, "doors": found}
    wanted.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
