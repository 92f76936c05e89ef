"""The time of a request outside its steps with engines on two hosts, with and without TLS.

python -m baton.bench.serve.two_hosts [--trees NAME=IMPORT_ROOT ...] [--requests 300]

The second host is a network namespace (this needs root), connected by a pair of devices. All hosts
share the same cores. Each of the `--trees` has a deployment, in processes that import `baton` from
there, and each in turn gets a request: with the tree of another commit this shows what the commits
in between changed, on a machine whose speed varies too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import baton

_END_S = 30.0  # for a deployment
_PAUSE_S = 0.03  # between requests
_SUBNET = "10.234.0"
_HERE, _THERE = f"{_SUBNET}.1", f"{_SUBNET}.2"
_WARMUPS = 8
_PROMPT_TOKENS, _NUM_TOKENS = 128, 24

Figures: TypeAlias = dict[str, float]  # of a request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    this = f"this={Path(str(baton.__file__)).parents[1]}"
    parser.add_argument("--trees", nargs="+", default=[this], metavar="NAME=IMPORT_ROOT")
    parser.add_argument("--requests", type=int, default=300, help="of each tree, plain and TLS")
    arguments = parser.parse_args()
    trees = dict(one.split("=", 1) for one in arguments.trees)
    with tempfile.TemporaryDirectory() as folder, _second_host() as inside:
        _make_certificates(next(iter(trees.values())), folder)
        for certs in ("", folder):
            _print(_measure(trees, inside, certs, arguments.requests), bool(certs))


def _print(found: dict[str, list[Figures]], has_tls: bool) -> None:
    """Medians, and those of the differences to the first tree's request of the same turn."""
    first = next(iter(found.values()))
    for name, rows in found.items():
        words = []
        for key in first[0]:
            median = statistics.median(row[key] for row in rows)
            more = statistics.median(b[key] - a[key] for a, b in zip(first, rows, strict=True))
            words.append(f"{key} {median:.2f}" + (f" ({more:+.2f})" if rows is not first else ""))
        print(f"{name}, {'TLS' if has_tls else 'plain'} (ms): {', '.join(words)}", flush=True)


def _measure(
    trees: dict[str, str], inside: str, certs: str, num_requests: int
) -> dict[str, list[Figures]]:
    """The figures of each request, by tree."""
    turns = random.Random(0)
    with contextlib.ExitStack() as stack:
        deployments = {
            name: stack.enter_context(_deployed(root, inside, certs))
            for name, root in trees.items()
        }
        found: dict[str, list[Figures]] = {name: [] for name in trees}
        for number in range(_WARMUPS + num_requests):
            for name in turns.sample([*trees], len(trees)):
                figures = _ask(deployments[name], number)
                if number >= _WARMUPS:
                    found[name].append(figures)
                time.sleep(_PAUSE_S)
    return found


@contextlib.contextmanager
def _deployed(root: str, inside: str, certs: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a deployment of the tree, which sends a request for each line."""
    environment = os.environ | {
        "PYTHONPATH": root,
        "PYTHONSAFEPATH": "1",
        "BATON_CLUSTER_SECRET": secrets.token_hex(16),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", _PROGRAM, inside, certs]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    try:
        _read(process)
        yield process
    finally:
        process.terminate()  # it ends its children
        process.wait(_END_S)


def _ask(deployment: subprocess.Popen[str], number: int) -> Figures:
    assert deployment.stdin is not None
    deployment.stdin.write(f"{number}\n")
    deployment.stdin.flush()
    figures: Figures = json.loads(_read(deployment))
    return figures


def _read(deployment: subprocess.Popen[str]) -> str:
    """The next line. Raises RuntimeError if the process has ended."""
    assert deployment.stdout is not None
    if not (line := deployment.stdout.readline()):
        raise RuntimeError("a deployment has ended: see its errors")
    return line


# Runs with the tree to be measured, whose commit may lack this file.
_PROGRAM = f"""
import contextlib, json, signal, statistics, subprocess, sys, time
from baton.cluster.redis_server import RedisServer
from baton.client import Client
inside, certs = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
started = []
def secured(role):
    files = (("ca", "ca.crt"), ("cert", role + ".crt"), ("key", role + ".key"))
    return [f"--cluster-{{flag}}={{certs}}/{{name}}" for flag, name in files] if certs else []
def launch(role, redis, *flags, prefix=()):
    program = f"import sys; from baton.cli.launch import {{role}} as run; sys.exit(run())"
    argv = [*prefix, sys.executable, "-c", program, "--redis-url", redis, *flags, *secured(role)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started.append(process)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("ready: "):
            return line.split()[-1]
    raise SystemExit("".join(said))
def end():
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
with contextlib.ExitStack() as stack:
    redis = stack.enter_context(RedisServer.start()).url
    node = ("--cpu-kv-bytes", "100000000", "--insecure-bind")
    stack.callback(end)
    launch("prefill", redis, *node, "--host", "{_HERE}")
    netns = ("ip", "netns", "exec", inside)
    launch("decode", redis, *node, "--host", "{_THERE}", prefix=netns)
    with Client(launch("gateway", redis, "--grpc-port", "0", "--http-port", "0")) as client:
        print("ready", flush=True)
        offset_ms = (time.time_ns() - time.monotonic_ns()) / 1e6
        for line in sys.stdin:
            prompt = [(7 * i * i + 31 * int(line)) % 250 + 3 for i in range({_PROMPT_TOKENS})]
            result = client.generate(prompt_token_ids=prompt, max_tokens={_NUM_TOKENS},
                                     temperature=0.0, ignore_eos=True).result
            at = {{stamp.event.value: stamp.unix_ns / 1e6 for stamp in result.timeline}}
            times = result.times
            sent, got = (1e3 * s + offset_ms for s in (times.sent_s, times.token_s[0]))
            print(json.dumps({{
                "TTFT outside the prefill step":
                    at["prefill_started"] - sent + got - at["first_token"],
                "first token to transfer ended": at["transfer_ended"] - at["first_token"],
                "first gap": times.handoff_gap_s * 1e3,
                "TBT": statistics.median(1e3 * gap for gap in times.gaps_s[1:]),
            }}), flush=True)
"""


def _make_certificates(root: str, folder: str) -> None:
    program = (
        "import sys; from pathlib import Path; from baton.cli.host.certs import make_certificates;"
        f" make_certificates(Path({folder!r}), [{_HERE!r}, {_THERE!r}])"
    )
    environment = os.environ | {"PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@contextlib.contextmanager
def _second_host() -> Iterator[str]:
    """Create a network namespace at `_THERE`, linked to `_HERE`; yields its name."""
    name = f"bench-{os.getpid()}"
    near, far = f"bn{os.getpid() % 10**6}a", f"bn{os.getpid() % 10**6}b"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{_HERE}/30", "dev", near)
        _ip("link", "set", near, "up")
        for device in (far, "lo"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "addr", "add", f"{_THERE}/30", "dev", far)
        yield name
    finally:
        _ip("netns", "del", name)  # deletes both ends of the link


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
