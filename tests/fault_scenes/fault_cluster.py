"""Redis, gateways and nodes as named processes, to be killed, paused and restarted.

Knows processes and their flags, and nothing of requests.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import write_byte_tokenizer
from node_driver import NodeProcess, launch_program

from baton.cluster.redis_server import RedisServer

CHUNK_TOKENS = 64  # a step of about 10 ms: long enough to poll in between
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "eos_token_id": 2,  # constraints end with it; other streams ignore it
}


def write_model(folder: Path) -> Path:
    """A model directory for dummy weights, which are the same in every process."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_byte_tokenizer(folder)
    return folder


@dataclass
class Cluster:
    """The processes. Names are `gateway-0`, `prefill-0`, `decode-1` and so on.

    `flags`: flags by role, `incarnations`: all engines ever seen. Processes named `...-1` run under
    `python -O`: no fault may rely on our asserts to end well.
    """

    redis: RedisServer
    model_dir: Path
    flags: dict[str, tuple[str, ...]]
    processes: dict[str, NodeProcess] = field(default_factory=dict)
    incarnations: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)  # of processes started later
    fds: dict[int, int] = field(default_factory=dict)  # descriptors at the first check

    def launch(self, name: str, *flags: str) -> NodeProcess:
        """Start a process of the cluster without waiting for it."""
        role = name.partition("-")[0]
        own = ["--model", str(self.model_dir), *self.flags.get(name, ())]
        if role == "gateway":
            own += ["--grpc-port", "0", "--http-port", "0"]
        else:
            own += ["--load-format", "dummy", "--name", name]
            own += ["--max-num-batched-tokens", str(CHUNK_TOKENS), *self.flags.get("node", ())]
        optimized = {"PYTHONOPTIMIZE": "1"} if name.endswith("-1") else {}
        return launch_program(
            role, self.redis.url, *own, *flags, environment=optimized | self.environment
        )

    def start(self, name: str) -> None:
        """Start, or restart, one process; it is not ready yet."""
        self.processes[name] = self.launch(name)

    def nodes(self, role: str = "") -> list[str]:
        """The names of the nodes of one role, or of all nodes."""
        return [n for n in self.processes if not n.startswith("gateway") and n.startswith(role)]

    def engine_pid(self, name: str) -> int:
        (pid,) = self.processes[name].engine_pids()
        return pid

    def kill(self, name: str, part: str = "node") -> None:
        """kill -9 of a node's engine, or of its supervisor, which takes the engine with it.

        A supervisor is dead on return, since `restart_dead` would otherwise take it for alive.
        """
        if part == "engine":
            os.kill(self.engine_pid(name), signal.SIGKILL)
        else:
            self.processes[name].process.kill()
            self.processes[name].process.wait(timeout=20)

    @contextmanager
    def stopped(self, name: str, part: str = "node") -> Iterator[None]:
        """The process is paused: SIGSTOP, and SIGCONT afterwards."""
        pids = self.processes[name].engine_pids()
        if part == "node":
            pids.append(self.processes[name].process.pid)
        self._signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(pids, signal.SIGCONT)

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def restart_dead(self) -> None:
        """Restart dead processes, as an operator's service manager does."""
        for name, process in list(self.processes.items()):
            if process.process.poll() is not None:
                process.wait()
                self.start(name)

    def end(self) -> None:
        for process in self.processes.values():
            if process.process.poll() is None:
                process.process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


@contextmanager
def cluster(model_dir: Path, *names: str, **flags: tuple[str, ...]) -> Iterator[Cluster]:
    """Processes with these names; `flags` by a process's name, or `node` for all nodes."""
    with RedisServer.start() as redis:
        by_name = {name.replace("_", "-"): value for name, value in flags.items()}
        running = Cluster(redis, model_dir, by_name)
        try:
            for name in names:
                running.start(name)
            for process in running.processes.values():
                assert process.address
            yield running
        finally:
            running.end()
