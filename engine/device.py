"""Which device an engine computes on, and in which type."""

from __future__ import annotations

import torch

from ..core.config import EngineConfig
from ..core.errors import StartupFailed
from .layers import Placement

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_placement(config: EngineConfig) -> Placement:
    """The device and type that `--device` and `--dtype` mean here.

    Raises StartupFailed for a device or attention backend that this build does not have.
    """
    if config.device == "cuda":
        raise StartupFailed("this build computes on CPUs only", hint="--device cpu")
    if config.attention_backend not in ("auto", "torch"):
        raise StartupFailed(
            f"--attention-backend {config.attention_backend} needs a GPU",
            hint="--attention-backend torch",
        )
    if config.tensor_parallel_size > 1:
        raise StartupFailed("this build has no tensor parallelism", hint="--tp 1")
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return Placement(torch.device("cpu"), _DTYPES[dtype])
