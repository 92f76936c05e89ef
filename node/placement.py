"""Which engine runs on which GPUs: one environment per engine process."""

from __future__ import annotations

from ..core.config import EngineConfig, NodeConfig
from ..core.errors import StartupFailed


def engine_environments(engine: EngineConfig, node: NodeConfig) -> list[dict[str, str]]:
    """One engine per `--tp` GPUs of `--gpus`, or `--num-engines` on a CPU. Raises StartupFailed."""
    common = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(engine.num_threads or 1)}
    if node.gpus is None:
        num_engines = 1 if node.num_engines is None else node.num_engines
        if num_engines < 1:
            raise StartupFailed("--num-engines must be at least 1")
        return [dict(common) for _ in range(num_engines)]
    gpus = [gpu.strip() for gpu in node.gpus.split(",")]
    if not all(gpu.isdecimal() for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise StartupFailed(f"--gpus {node.gpus}: not a list of different GPUs", hint="--gpus 0,1")
    size = engine.tensor_parallel_size
    if len(gpus) % size:
        raise StartupFailed(f"--gpus names {len(gpus)} GPUs, which --tp {size} does not divide")
    return [
        common | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + size])}
        for first in range(0, len(gpus), size)
    ]
