"""The cost of two pipeline stages on two hosts, beside the same two stages on one host.

python -m baton.bench.cpu_families.hosts [--delay-ms 1]

The second host is a network namespace (this needs root), connected by a pair of tun devices and a
process in between that delays every packet, each way. All hosts share the same cores, so only the
cost that the wire adds is meaningful.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from baton.cluster.secret import ClusterSecret
from baton.core.engine_config import EngineConfig
from baton.core.flags import to_argv
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.hosts.head import ClusterTrust
from baton.engine.local import LocalEngine
from baton.engine.parallel.rank_processes import start_ranks

from .small_model import prompt

_SECRET = "of the hosts of a benchmark"
_PORT = 29_811
_MTU = 9000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_REPEATS = 5
_WORKLOADS = {  # requests, prompt tokens, output tokens
    "one request, 64 tokens": (1, 16, 64),
    "32 x 64 tokens": (32, 16, 64),
    "16 prompts of 512": (16, 512, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    delay_ms = parser.parse_args().delay_ms
    with contextlib.ExitStack() as opened:
        alone = LocalEngine.load(_config(), _silent)
        opened.callback(alone.close)
        engines = {"two stages on one host": alone}
        for index, each_ms in enumerate((0.0, delay_ms)):
            here, inside = opened.enter_context(_second_host(index, each_ms / 1000))
            engine = opened.enter_context(_engine(here, inside))
            engines[f"on two hosts, {each_ms:g} ms each way"] = engine
        found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for _ in range(_REPEATS):  # in turns, so that other load on the machine affects all alike
            for name, engine in engines.items():
                for work, sizes in _WORKLOADS.items():
                    found[name, work].append(_time(engine, *sizes))
    print(f"{os.cpu_count()} cores, bundled model, best of {_REPEATS}")
    for name in engines:
        seconds = (f"{work} {min(found[name, work]):.2f} s" for work in _WORKLOADS)
        print(f"{name}: " + "; ".join(seconds))


def _silent(line: str) -> None:
    """Discards a log line of the engine."""


def _config(**fields: object) -> EngineConfig:
    return EngineConfig(
        device="cpu",
        cpu_kv_bytes=96 << 20,
        enable_prefix_caching=False,
        pipeline_parallel_size=2,
        **fields,  # type: ignore[arg-type]
    )


@contextlib.contextmanager
def _engine(here: str, inside: str) -> Iterator[LocalEngine]:
    """An engine with its first stage in this process and its second in the namespace `inside`."""
    config = _config(nnodes=2, master_addr=here, master_port=_PORT)
    program = "import sys; from baton.cli.launch import prefill as run; sys.exit(run())"
    flags = [*to_argv(config), "--node-rank", "1", "--insecure-bind"]
    other = subprocess.Popen(
        ["ip", "netns", "exec", inside, sys.executable, "-c", program, *flags],
        env=os.environ | {"BATON_CLUSTER_SECRET": _SECRET, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        keys = ClusterSecret(_SECRET).keys_by_id()
        trust = ClusterTrust("prefill", config, keys, None)
        ranks = start_ranks(config, "", lambda error: None, _silent, trust)
        runner = ModelRunner(ranks.config, None, ranks.communicator)
        engine = LocalEngine(config, runner, ranks)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        other.send_signal(signal.SIGTERM)
        other.wait()


def _time(engine: LocalEngine, num_requests: int, num_prompt_tokens: int, num_tokens: int) -> float:
    way = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"{i:032x}", 0, prompt(i, num_prompt_tokens), way) for i in range(num_requests)
    ]
    began_s = time.perf_counter()
    for _ in engine.generating(requests, {}):
        pass
    return time.perf_counter() - began_s


@contextlib.contextmanager
def _second_host(index: int, delay_s: float) -> Iterator[tuple[str, str]]:
    """(this host's address on the link, name of the namespace)."""
    name = f"bench-{os.getpid()}-{index}"
    near, far = (f"bn{os.getpid() % 10**6}{index}{end}" for end in "ab")
    here, there = f"10.233.{index}.1", f"10.233.{index}.2"
    _ip("netns", "add", name)
    try:
        ends = _tun(near), _tun(far)
        _ip("link", "set", far, "netns", name)
        for device, mine, theirs, where in (
            (near, here, there, ()),
            (far, there, here, ("-n", name)),
        ):
            _ip(*where, "addr", "add", mine, "peer", theirs, "dev", device)
            _ip(*where, "link", "set", device, "mtu", str(_MTU), "up")
        _ip("-n", name, "link", "set", "lo", "up")
        carrier = os.fork()
        if carrier == 0:
            _carry(*ends, delay_s)
        for end in ends:
            os.close(end)
        try:
            yield here, name
        finally:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _tun(name: str) -> int:
    """Create a tun device with this name; the descriptor carries the packets routed to it."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return end


def _carry(near: int, far: int, delay_s: float) -> None:
    """Forward packets both ways until killed."""
    for source, target in ((near, far), (far, near)):
        threading.Thread(target=_carry_one_way, args=(source, target, delay_s)).start()
    while True:
        signal.pause()


def _carry_one_way(source: int, target: int, delay_s: float) -> None:
    held: collections.deque[tuple[float, bytes]] = collections.deque()
    has_some = threading.Semaphore(0)

    def deliver() -> None:
        while True:
            has_some.acquire()
            due_s, packet = held.popleft()
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            with contextlib.suppress(OSError):
                os.write(target, packet)

    threading.Thread(target=deliver).start()
    while True:
        try:
            packet = os.read(source, 2 * _MTU)
        except OSError:  # the device is not up yet
            time.sleep(0.01)
            continue
        held.append((time.monotonic() + delay_s, packet))
        has_some.release()


if __name__ == "__main__":
    main()
