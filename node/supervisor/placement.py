"""The assignment of devices to engines: one configuration per engine.

    --gpus 0,1,2,3 --tp 2     engine 0 on GPUs 0 and 1, engine 1 on GPUs 2 and 3

Every process sees all GPUs and is given the index of its own: a pulling engine must be able to
address the GPU that it pulls from.
"""

from __future__ import annotations

import dataclasses

from ...cluster.tls import GATEWAY, ClusterTls, role_name
from ...core.channels.engine_tls import EngineTls
from ...core.config import NodeConfig
from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...core.membership import Role


def engine_configs(engine: EngineConfig, node: NodeConfig) -> list[EngineConfig]:
    """One engine for each `--tp` x `--pp` of the `--gpus`, or `--num-engines` on a CPU.

    Raises StartupFailed.
    """
    if node.gpus is None:
        num_engines = 1 if node.num_engines is None else node.num_engines
        if num_engines < 1:
            raise StartupFailed("--num-engines must be at least 1")
        return _one_of([engine] * num_engines)
    words = [word.strip() for word in node.gpus.split(",")]
    gpus = [str(int(word)) for word in words if word.isdecimal()]  # 00 is 0
    if len(set(gpus)) < len(words):
        raise StartupFailed(f"--gpus {node.gpus}: not a list of different GPUs", hint="--gpus 0,1")
    if engine.device == "cpu":
        raise StartupFailed("--gpus and --device cpu exclude each other")
    size = engine.ranks_per_host
    if len(gpus) % size:
        raise StartupFailed(
            f"--gpus {node.gpus} are {len(gpus)}, which {engine.size_flags} does not divide"
        )
    groups = [gpus[first : first + size] for first in range(0, len(gpus), size)]
    return _one_of(
        [dataclasses.replace(engine, device=f"cuda:{','.join(group)}") for group in groups]
    )


def _one_of(engines: list[EngineConfig]) -> list[EngineConfig]:
    """Raises StartupFailed if an engine on several hosts is not its node's only one."""
    if len(engines) > 1 and engines[0].nnodes > 1:
        raise StartupFailed(
            f"--nnodes with {len(engines)} engines on this host",
            hint="a node for each, at a --master-port of its own",
        )
    return engines


def engine_environment(engine: EngineConfig) -> dict[str, str]:
    """The environment variables of an engine process."""
    return {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(engine.num_threads or 1)}


def engine_tls(tls: ClusterTls) -> EngineTls:
    """The names that each role's certificate must have, and this process's own certificate."""
    names = map(role_name, (GATEWAY, Role.PREFILL.value, Role.DECODE.value))
    return EngineTls(str(tls.ca), str(tls.chain), str(tls.key), *names)
