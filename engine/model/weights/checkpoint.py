"""Weights from a Hugging Face directory, checked and read into a model's tensors.

Reads only safetensors, sharded or not, memory-mapped, each tensor once. A pickle is never opened.
Knows no architecture: a model gives the names of its tensors, where they go, and which part of each
it needs; only that part is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....core.errors import StartupFailed
from ....kernels.products.weights import BLOCK
from ..quantization import BLOCK_SCALED, ROW_SCALED
from .filling import LoadProgress, OnProgress, fill, unpack
from .int4_files import Read, check_scale, checks_of, module_of
from .targets import WeightTarget
from .weight_files import weight_files

# Old checkpoints contain these tensors, which follow from config.json.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = {"F64", "F32", "F16", "BF16"}
_FP8 = "F8_E4M3"
_NOT_OF_ONE_MODEL = (
    "config.json and the weights do not belong together: download the whole model again"
)


def load_weights(
    model_dir: Path,
    targets: Mapping[str, WeightTarget],
    *,
    ignored: frozenset[str] = frozenset(),
    on_progress: OnProgress | None = None,
) -> None:
    """Fill every target from the checkpoint, converting types.

    Calls `check_weights` first, for `ignored` and the errors see there.
    """
    scales = check_weights(model_dir, targets, ignored=ignored)
    progress = LoadProgress(targets, on_progress)
    files, device = weight_files(model_dir), next(iter(targets.values())).tensor.device
    locations = {name: path for path in files for name in _tensor_names(path)}
    # Each target is filled when the file with its largest tensor is open.
    read_from = {_first_tensor(name, target): name for name, target in targets.items()}
    for path in files:
        with _open(path, device) as file:
            for tensor in file.keys():  # noqa: SIM118 (a handle, not a dict)
                if (name := read_from.get(tensor)) is None:
                    continue
                target = targets[name]
                if name == tensor:
                    fill(file, name, target, scales)
                elif target.int4 is not None:
                    read = _reader(file, path, locations, device)
                    unpack(name, target, target.int4, read)
                progress.add(target)


def _first_tensor(name: str, target: WeightTarget) -> str:
    if target.int4 is None or target.int4.layout_name is None:
        return name
    return module_of(name) + target.int4.layout.numbers.suffix


def _reader(file: Any, path: Path, locations: Mapping[str, Path], device: torch.device) -> Read:
    """A function that reads a part of any tensor; `file`: the open file at `path`."""

    def read(name: str, wanted: tuple[slice, ...]) -> Tensor:
        there = locations[name]
        with nullcontext(file) if there == path else _open(there, device) as holder:
            found: Tensor = holder.get_slice(name)[wanted]
            return found

    return read


def check_weights(
    model_dir: Path, targets: Mapping[str, WeightTarget], *, ignored: frozenset[str] = frozenset()
) -> dict[str, Tensor]:
    """Check that the checkpoint can fill the targets, which may be on the device `meta`.

    Returns the scales of quantised weights, by name, in float32. `ignored` tensors may be present.
    Raises StartupFailed naming the first tensor that is missing, unexpected, of a wrong shape or
    type for its target, or has a scale that is not above 0.
    """
    scaled = {
        target.quantised.scale_name: (name, target.quantised.scaling)
        for name, target in targets.items()
        if target.quantised is not None
        and target.quantised.scale_name is not None
        and target.quantised.int4 is None
    }
    files = weight_files(model_dir)
    locations = {name: path for path in files for name in _tensor_names(path)}
    checks = checks_of(targets, locations)
    plain = {name for name, target in targets.items() if _first_tensor(name, target) == name}
    known = plain | scaled.keys() | checks.keys()
    for name in (*targets, *scaled, *checks):
        if name in known and name not in locations:
            message = f"{model_dir} lacks the tensor {name}"
            raise StartupFailed(message, hint=_NOT_OF_ONE_MODEL)
    for name in sorted(locations.keys() - known - ignored):
        if not name.endswith(_DERIVED_SUFFIXES):
            raise StartupFailed(
                f"{model_dir} has the tensor {name}, which its architecture does not have",
                hint=_NOT_OF_ONE_MODEL,
            )
    scales: dict[str, Tensor] = {}
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name in plain:
                    _check(path, file, name, targets[name])
                elif name in checks:
                    checks[name](path, file, name)
                elif name in scaled:
                    weight, scaling = scaled[name]
                    shape = targets[weight].full_shape
                    scales[name] = _read_scale(path, file, name, weight, scaling, shape)
    return scales


def tensor_names(model_dir: Path) -> frozenset[str]:
    """The names of all tensors of a checkpoint; raises StartupFailed."""
    return frozenset(name for path in weight_files(model_dir) for name in _tensor_names(path))


def read_integers(model_dir: Path, name: str, size: int, most: int) -> Tensor:
    """The tensor `name` [size] int64, absolute values below `most`. Raises StartupFailed."""
    for path in weight_files(model_dir):
        with _open(path) as file:
            if name not in file.keys():  # noqa: SIM118
                continue
            found: Tensor = file.get_tensor(name)
        if found.dtype not in (torch.int64, torch.int32) or found.shape != (size,):
            raise StartupFailed(
                f"{name} in {path} is of type {found.dtype} and shape {list(found.shape)}, not of "
                f"{size} integers"
            )
        if (found.abs() >= most).any():
            raise StartupFailed(f"{name} in {path} has numbers of {most} or more")
        return found.long()
    raise StartupFailed(f"{model_dir} lacks the tensor {name}")


@contextmanager
def _open(path: Path, device: torch.device | None = None) -> Iterator[Any]:
    """Map a safetensors file; errors become StartupFailed.

    Its tensors are read directly to `device`, without a copy in host memory.
    """
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            yield file
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise StartupFailed(
            f"{path} is no valid safetensors file: {error}",
            hint="it may be incomplete: download it again",
        ) from error


def _tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _check(path: Path, file: Any, name: str, target: WeightTarget) -> None:
    source = file.get_slice(name)
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != target.full_shape:
        raise StartupFailed(
            f"{name} in {path} has shape {list(shape)}, "
            f"config.json requires {list(target.full_shape)}",
            hint=_NOT_OF_ONE_MODEL,
        )
    if target.quantised is not None and target.quantised.scale_name is not None:
        if dtype != _FP8:
            raise StartupFailed(f"{name} in {path} is of type {dtype}, config.json says {_FP8}")
    elif dtype not in _DTYPES:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not a plain float")


def _read_scale(
    path: Path, file: Any, name: str, weight: str, scaling: str, full_shape: tuple[int, ...]
) -> Tensor:
    """A scale in float32 on the CPU: [1] for the whole weight, [outputs], or [blocks, blocks]."""
    source = file.get_slice(name)
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    outputs, inputs = full_shape
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
    if scaling == ROW_SCALED:
        shapes = ((outputs, 1), (outputs,))
    elif scaling == BLOCK_SCALED:
        shapes = ((-(-outputs // BLOCK), -(-inputs // BLOCK)),)
    if shape not in shapes:
        raise StartupFailed(
            f"{name} in {path} has shape {list(shape)}: {weight} with a scale for each "
            f"{scaling} requires {' or '.join(str(list(one)) for one in shapes)}"
        )
    if dtype not in _DTYPES:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not a plain float")
    scale: Tensor = file.get_tensor(name).float()
    check_scale(path, name, scale)
    return scale if scaling == BLOCK_SCALED else scale.flatten()
