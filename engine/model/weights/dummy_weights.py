"""Seeded random weights, for tests and for benches without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from ....kernels.products.weights import quantise_blocks, quantise_rows
from ..quantization import BLOCK_SCALED, ROW_SCALED
from .filling import LoadProgress, OnProgress, fill_groups, store
from .targets import WeightTarget


def fill_dummy_weights(
    targets: Mapping[str, WeightTarget],
    *,
    std: float,
    seed: int,
    stds: Mapping[str, float] = MappingProxyType({}),
    on_progress: OnProgress | None = None,
) -> None:
    """Random weights: norms 1, biases 0, matrices normal(0, std), or `stds` by name.

    A tensor depends only on the seed and its name, not on the order of loading; a rank's part is
    the same part of the whole tensor.
    """
    progress = LoadProgress(targets, on_progress)
    for name, target in targets.items():
        shape = target.tensor.shape
        if not shape.numel():  # on another rank
            pass
        elif len(shape) == 2:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            device = target.tensor.device
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
            whole = torch.randn(target.full_shape, generator=generator, device=device)
            if target.quantised is None:
                for part, wanted in target.parts():
                    part.copy_(whole[wanted])
                target.floats.mul_(stds.get(name, std))
            elif target.int4 is not None:
                fill_groups(target, target.int4, whole.mul_(std)[target.wanted[0]])
            else:
                is_blocked = target.quantised.scaling == BLOCK_SCALED
                data, scale = (quantise_blocks if is_blocked else quantise_rows)(whole.mul_(std))
                scaling = BLOCK_SCALED if is_blocked else ROW_SCALED
                store(target, target.quantised, data[target.wanted], scale, scaling)
        else:
            target.floats.fill_(0.0 if name.endswith(".bias") else 1.0)
        progress.add(target)
