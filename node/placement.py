"""Which engine runs on which device: one configuration per engine process.

Every process sees all GPUs and is told which one is its own: an engine that pulls must be able to
name the GPU that it pulls from.
"""

from __future__ import annotations

import dataclasses

from ..core.config import EngineConfig, NodeConfig
from ..core.errors import StartupFailed


def engine_configs(engine: EngineConfig, node: NodeConfig) -> list[EngineConfig]:
    """One engine for each of `--gpus`, or `--num-engines` on a CPU. Raises StartupFailed."""
    if node.gpus is None:
        num_engines = 1 if node.num_engines is None else node.num_engines
        if num_engines < 1:
            raise StartupFailed("--num-engines must be at least 1")
        return [engine] * num_engines
    gpus = [gpu.strip() for gpu in node.gpus.split(",")]
    if not all(gpu.isdecimal() for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise StartupFailed(f"--gpus {node.gpus}: not a list of different GPUs", hint="--gpus 0,1")
    if engine.device == "cpu":
        raise StartupFailed("--gpus and --device cpu exclude each other")
    return [dataclasses.replace(engine, device=f"cuda:{gpu}") for gpu in gpus]


def engine_environment(engine: EngineConfig) -> dict[str, str]:
    """What an engine process needs around it."""
    return {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(engine.num_threads or 1)}
