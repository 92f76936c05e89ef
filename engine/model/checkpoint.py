"""Weights from a Hugging Face directory into a model's tensors, or seeded random ones.

Reads safetensors only, mapped, each tensor once; sharded by its index or not. A pickle is never
opened. Knows no architecture: a model names the tensors it must have and where they go,
or which part of them; of a part no more than that is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...core.errors import StartupFailed
from .layers import Target
from .weight_files import weight_files

# Old checkpoints carry these; they follow from config.json.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = {"F64", "F32", "F16", "BF16"}
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


OnProgress = Callable[[int, int], None]  # bytes loaded, as they are in the model's memory, of all


def load_weights(
    model_dir: Path,
    targets: Mapping[str, Target],
    *,
    ignored: frozenset[str] = frozenset(),
    on_progress: OnProgress | None = None,
) -> None:
    """Fill every target from the checkpoint, converting its type.

    `ignored` tensors may be there and are not read. Raises StartupFailed naming the first tensor
    that is missing, unexpected, mis-shaped or of a type that is no plain float.
    """
    files = weight_files(model_dir)
    locations = {name: path for path in files for name in _tensor_names(path)}
    for name in targets:
        if name not in locations:
            raise StartupFailed(f"{model_dir} lacks the tensor {name}")
    for name in sorted(locations.keys() - targets.keys() - ignored):
        if not name.endswith(_DERIVED_SUFFIXES):
            raise StartupFailed(
                f"{model_dir} has the tensor {name}, which its architecture does not know",
                hint="config.json and the weights are not of one model",
            )
    progress = _Progress(targets, on_progress)
    for path in files:
        with _open(path, next(iter(targets.values())).tensor.device) as file:
            for name in file.keys():  # noqa: SIM118 (a handle, not a dict)
                if name in targets:
                    _copy(path, file, name, targets[name])
                    progress.add(name)


def fill_dummy_weights(
    targets: Mapping[str, Target],
    *,
    std: float,
    seed: int,
    stds: Mapping[str, float] = MappingProxyType({}),
    on_progress: OnProgress | None = None,
) -> None:
    """Random weights: norms 1, biases 0, matrices normal(0, std), or what `stds` has by name.

    Each tensor depends on the seed and its name alone, not on the order of loading; a part of one
    is that part of the whole.
    """
    progress = _Progress(targets, on_progress)
    for name, target in targets.items():
        tensor = target.tensor
        if tensor.ndim == 2 and tensor.numel():
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest))
            whole = torch.randn(target.full_shape, generator=generator, device=tensor.device)
            for part, wanted in target.parts():
                part.copy_(whole[wanted])
            tensor.mul_(stds.get(name, std))
        else:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        progress.add(name)


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Of all tensors of a checkpoint; raises StartupFailed."""
    return frozenset(name for path in weight_files(model_dir) for name in _tensor_names(path))


def weights_identity(model_dir: Path) -> str:
    """A hex digest that distinguishes checkpoints without reading them whole.

    Of each file: name, size, header (names, types, shapes, offsets) and evenly spread samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            digest.update(prefix + file.read(min(header_bytes, size)))
            first = file.tell()
            for i in range(_NUM_SAMPLES):
                file.seek(first + max(0, size - first - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class _Progress:
    """Counts loaded targets and reports each."""

    def __init__(self, targets: Mapping[str, Target], on_progress: OnProgress | None) -> None:
        self._sizes = {name: target.tensor.nbytes for name, target in targets.items()}
        self._total_bytes = sum(self._sizes.values())
        self._num_bytes = 0
        self._on_progress = on_progress

    def add(self, name: str) -> None:
        self._num_bytes += self._sizes[name]
        if self._on_progress is not None:
            self._on_progress(self._num_bytes, self._total_bytes)


@contextmanager
def _open(path: Path, device: torch.device | None = None) -> Iterator[Any]:
    """Map a safetensors file; what is wrong with it becomes StartupFailed.

    Its tensors come straight to `device`, without a copy in host memory.
    """
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            yield file
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise StartupFailed(f"{path} is no valid safetensors file: {error}") from error


def _tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _copy(path: Path, file: Any, name: str, target: Target) -> None:
    source = file.get_slice(name)
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != target.full_shape:
        raise StartupFailed(
            f"{name} in {path} has shape {list(shape)}, "
            f"config.json asks for {list(target.full_shape)}"
        )
    if dtype not in _DTYPES:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not a plain float")
    if target.cut is None or target.tensor.shape == shape:
        target.tensor.copy_(file.get_tensor(name))
    elif target.tensor.numel():
        for part, wanted in target.parts():
            part.copy_(source[wanted])
