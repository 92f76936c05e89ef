"""The time of a request outside its steps with engines on two hosts, with and without TLS.

python -m baton.bench.serve.two_hosts [--trees NAME=IMPORT_ROOT ...] [--rounds 7]

The second host is a network namespace (this needs root), connected by a pair of devices. All hosts
share the same cores. The `--trees` are measured in turns, in processes that import `baton` from
there: with the tree of another commit this shows what the commits in between changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import baton

_MOST_S = 120.0  # for a deployment and its requests
_SUBNET = "10.234.0"
_HERE, _THERE = f"{_SUBNET}.1", f"{_SUBNET}.2"
_REQUESTS, _WARMUPS = 40, 8
_PROMPT_TOKENS, _NUM_TOKENS = 128, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    this = f"this={Path(str(baton.__file__)).parents[1]}"
    parser.add_argument("--trees", nargs="+", default=[this], help="NAME=IMPORT_ROOT")
    parser.add_argument("--rounds", type=int, default=7, help="of all trees, plain and over TLS")
    arguments = parser.parse_args()
    trees = dict(one.split("=", 1) for one in arguments.trees)
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, _second_host() as inside:
        _make_certificates(next(iter(trees.values())), folder)
        for _ in range(arguments.rounds):
            for has_tls in (False, True):
                for name, root in trees.items():
                    part = _measure(root, inside, folder if has_tls else "")
                    found.setdefault((name, has_tls), []).append(part)
    for (name, has_tls), runs in found.items():
        parts = {key: [run[key] for run in runs] for key in runs[0]}
        words = (f"{key} {statistics.median(of):.2f}" for key, of in parts.items())
        print(f"{name}, {'TLS' if has_tls else 'plain'} (ms): {', '.join(words)}", flush=True)


def _measure(root: str, inside: str, certs: str) -> dict[str, float]:
    """Medians of one deployment's requests, one at a time."""
    secret = secrets.token_hex(16)
    environment = os.environ | {
        "PYTHONPATH": root,
        "PYTHONSAFEPATH": "1",
        "BATON_CLUSTER_SECRET": secret,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", _PROGRAM, inside, certs]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        output, errors = process.communicate(timeout=_MOST_S)
    except BaseException:
        process.terminate()  # it ends its children
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(output[-2000:] + errors[-2000:])
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


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
        rows = []
        for number in range({_REQUESTS}):
            prompt = [(7 * i * i + 31 * number) % 250 + 3 for i in range({_PROMPT_TOKENS})]
            result = client.generate(prompt_token_ids=prompt, max_tokens={_NUM_TOKENS},
                                     temperature=0.0, ignore_eos=True).result
            at = {{stamp.event.value: stamp.unix_ns / 1e6 for stamp in result.timeline}}
            rows.append((result, at))
            time.sleep(0.02)
    offset_ms = (time.time_ns() - time.monotonic_ns()) / 1e6
    def outside(result, at):
        sent, got = (s * 1e3 + offset_ms for s in (result.times.sent_s, result.times.token_s[0]))
        return at["prefill_started"] - sent + got - at["first_token"]
    rows = rows[{_WARMUPS}:]
    median = lambda values: statistics.median(list(values))
    print(json.dumps({{
        "TTFT outside the prefill step": median(outside(*row) for row in rows),
        "first token to transfer ended": median(
            at["transfer_ended"] - at["first_token"] for _, at in rows),
        "first gap": median(result.times.handoff_gap_s * 1e3 for result, _ in rows),
        "TBT p50": median(1e3 * gap for result, _ in rows for gap in result.times.gaps_s[1:]),
    }}))
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
