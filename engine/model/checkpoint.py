"""Weights from a Hugging Face directory into a model's tensors, or seeded random ones.

Reads safetensors only, mapped, each tensor once; sharded by its index or not. A pickle is never
opened. Knows no architecture: a model names the tensors it must have and where they go,
or which part of them; of a part no more than that is read. Quantised weights are dequantised, and
floats quantised, where the target asks for it: matrix by matrix, some rows at a time.
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
from torch import Tensor

from ...core.errors import StartupFailed
from ...kernels.products.int4_weights import Int4Weight, dequantise, quantise_groups
from ...kernels.products.weights import BLOCK, quantise_blocks, quantise_rows, spread
from .int4.int4_files import Read, check_scale, checks_of, module_of, read_int4
from .int4.int4_layout import Int4
from .layers import Cut, Quantised, Target
from .quantization import BLOCK_SCALED, ROW_SCALED
from .weight_files import weight_files

# Old checkpoints carry these; they follow from config.json.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
_DTYPES = {"F64", "F32", "F16", "BF16"}
_FP8 = "F8_E4M3"
_NUMBERS_AT_ONCE = 1 << 20  # that are quantised or dequantised, some times four bytes each
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

    `ignored` and the errors are those of `check_weights`, which is called first.
    """
    scales = check_weights(model_dir, targets, ignored=ignored)
    progress = _Progress(targets, on_progress)
    files, device = weight_files(model_dir), next(iter(targets.values())).tensor.device
    locations = {name: path for path in files for name in _tensor_names(path)}
    # By the tensors that have most of the bytes.
    read_from = {_first_tensor(name, target): name for name, target in targets.items()}
    for path in files:
        with _open(path, device) as file:
            for tensor in file.keys():  # noqa: SIM118 (a handle, not a dict)
                if (name := read_from.get(tensor)) is None:
                    continue
                target = targets[name]
                if name == tensor:
                    _copy(file, name, target, scales)
                elif target.int4 is not None:
                    read = _reader(file, path, locations, device)
                    _unpack(name, target, target.int4, read)
                progress.add(name)


def _first_tensor(name: str, target: Target) -> str:
    if target.int4 is None or target.int4.layout_name is None:
        return name
    return module_of(name) + target.int4.layout.numbers.suffix


def _reader(file: Any, path: Path, locations: Mapping[str, Path], device: torch.device) -> Read:
    """Reads a part of any tensor; `file` is the open one at `path`."""

    def read(name: str, wanted: tuple[slice, ...]) -> Tensor:
        if locations[name] == path:
            found: Tensor = file.get_slice(name)[wanted]
            return found
        with _open(locations[name], device) as other:
            found = other.get_slice(name)[wanted]
            return found

    return read


def check_weights(
    model_dir: Path, targets: Mapping[str, Target], *, ignored: frozenset[str] = frozenset()
) -> dict[str, Tensor]:
    """Whether the checkpoint can fill the targets, which may be on the device `meta`.

    Returns the scales of quantised weights, by name, in float32. `ignored` tensors may be there.
    Raises StartupFailed naming the first tensor that is missing, unexpected, mis-shaped or of
    another type than its target asks for, and a scale that is not above 0.
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
            raise StartupFailed(f"{model_dir} lacks the tensor {name}")
    for name in sorted(locations.keys() - known - ignored):
        if not name.endswith(_DERIVED_SUFFIXES):
            raise StartupFailed(
                f"{model_dir} has the tensor {name}, which its architecture does not know",
                hint="config.json and the weights are not of one model",
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
        shape = target.tensor.shape
        if len(shape) == 2 and shape.numel():
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            device = target.tensor.device
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
            whole = torch.randn(target.full_shape, generator=generator, device=device)
            if target.quantised is None:
                for part, wanted in target.parts():
                    part.copy_(whole[wanted])
                target.floats.mul_(stds.get(name, std))
            elif target.int4 is not None:
                _quantise_groups(target, target.int4, whole.mul_(std)[_wanted_rows(target)])
            else:
                is_blocked = target.quantised.scaling == BLOCK_SCALED
                data, scale = (quantise_blocks if is_blocked else quantise_rows)(whole.mul_(std))
                scaling = BLOCK_SCALED if is_blocked else ROW_SCALED
                _store(target, target.quantised, data[_wanted(target)], scale, scaling)
        else:
            target.floats.fill_(0.0 if name.endswith(".bias") else 1.0)
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
        self._sizes = {name: target.nbytes for name, target in targets.items()}
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


def _check(path: Path, file: Any, name: str, target: Target) -> None:
    source = file.get_slice(name)
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != target.full_shape:
        raise StartupFailed(
            f"{name} in {path} has shape {list(shape)}, "
            f"config.json asks for {list(target.full_shape)}"
        )
    if target.quantised is not None and target.quantised.scale_name is not None:
        if dtype != _FP8:
            raise StartupFailed(f"{name} in {path} is of type {dtype}, config.json says {_FP8}")
    elif dtype not in _DTYPES:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not a plain float")


def _read_scale(
    path: Path, file: Any, name: str, weight: str, scaling: str, full_shape: tuple[int, ...]
) -> Tensor:
    """In float32, on the CPU: [1] for the whole weight, [outputs], or [blocks, blocks]."""
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
            f"{scaling} asks for {' or '.join(str(list(one)) for one in shapes)}"
        )
    if dtype not in _DTYPES:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not a plain float")
    scale: Tensor = file.get_tensor(name).float()
    check_scale(path, name, scale)
    return scale if scaling == BLOCK_SCALED else scale.flatten()


def _copy(file: Any, name: str, target: Target, scales: Mapping[str, Tensor]) -> None:
    """What is one tensor in the file, with scales or without."""
    if not target.tensor.numel():
        return
    quantised = target.quantised
    is_whole = target.cut is None or tuple(target.tensor.shape) == target.full_shape
    source = file.get_slice(name)
    if quantised is None and is_whole:
        target.floats.copy_(file.get_tensor(name))
    elif quantised is None:
        for part, wanted in target.parts():
            part.copy_(source[wanted])
    elif len(target.tensor.shape) == 3:
        _quantise_experts(target, quantised, source)
    elif quantised.scale_name is None:
        # An output's scales are made of all its inputs, on whichever rank.
        rows = _wanted_rows(target)
        _quantise(target, quantised, file.get_tensor(name) if is_whole else source[rows])
    else:
        read = file.get_tensor(name) if is_whole else source[_wanted(target)]
        scale = scales[quantised.scale_name].to(target.tensor.device)
        _store(target, quantised, read, scale, quantised.scaling)


def _quantise(target: Target, quantised: Quantised, floats: Tensor) -> None:
    """`floats` [outputs, inputs]: all inputs of the target's outputs."""
    if quantised.int4 is not None:
        _quantise_groups(target, quantised.int4, floats)
        return
    num_rows, width = target.tensor.shape
    columns = slice(target.first[1], target.first[1] + width)
    for rows in _rows_at_once(num_rows, floats.shape[1]):
        data, scale = quantise_rows(floats[rows])
        part = None if quantised.scale is None else quantised.scale[rows]
        chunk = Quantised(ROW_SCALED, None, part)
        _store(Target(target.floats[rows]), chunk, data[:, columns], scale, ROW_SCALED)


def _quantise_groups(target: Target, int4: Int4, floats: Tensor) -> None:
    """The same in four bits."""
    (num_rows, width), first = target.tensor.shape, target.first[1]
    columns, size = slice(first, first + width), int4.group_size or floats.shape[1]
    for rows in _rows_at_once(num_rows, floats.shape[1]):
        numbers, scale, zero = quantise_groups(floats[rows], size)
        if isinstance(target.tensor, Int4Weight):
            groups = slice(first // size, -(-(first + width) // size))
            part = target.tensor.part(rows.start, rows.stop - rows.start)
            part.fill(numbers[:, columns], scale[:, groups], zero[:, groups])
        else:
            target.tensor[rows].copy_(dequantise(numbers, scale, zero, size)[:, columns])


def _unpack(name: str, target: Target, int4: Int4, read: Read) -> None:
    """Fill a target from a checkpoint's weight of four bits."""
    if not target.tensor.numel():
        return
    num_rows, width = target.tensor.shape
    wanted = tuple(
        slice(first, first + size)
        for first, size in zip(target.first, (num_rows, width), strict=True)
    )
    numbers, scale, zero = read_int4(read, module_of(name), int4, *wanted)
    if isinstance(target.tensor, Int4Weight):
        target.tensor.fill(numbers, scale, zero)
        return
    for rows in _rows_at_once(num_rows, width):
        floats = dequantise(numbers[rows], scale[rows], zero[rows], int4.group_size or width)
        target.tensor[rows].copy_(floats)


def _rows_at_once(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // width)
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _quantise_experts(target: Target, quantised: Quantised, source: Any) -> None:
    """`source` [experts, outputs, inputs] of floats, one expert after the other."""
    cut = target.cut or Cut(0, 0, len(target.floats))
    first = cut.start if cut.dim == 0 else 0
    columns = Cut(1, cut.start, cut.full) if cut.dim == 2 else None
    for expert, tensor in enumerate(target.floats):
        floats = source[first + expert : first + expert + 1][0]
        if cut.dim == 1:
            count, step = len(tensor) // cut.pieces, cut.full // cut.pieces
            starts = range(cut.start, cut.full, step)
            floats = torch.cat([floats[start : start + count] for start in starts])
        scale = None if quantised.scale is None else quantised.scale[expert]
        _quantise(Target(tensor, columns), Quantised(ROW_SCALED, None, scale), floats)


def _store(target: Target, quantised: Quantised, data: Tensor, scale: Tensor, scaling: str) -> None:
    """Fill the target with `data` [outputs, inputs], e4m3: its part of a weight with `scale`."""
    (num_rows, width), (first_row, first_column) = data.shape, target.first

    def of_rows(first: int, count: int) -> Tensor:
        """The scale of each weight of some rows of the part."""
        start = first_row + first
        if scaling == BLOCK_SCALED:
            return spread(scale, (count, width), (start, first_column))
        return (scale[start : start + count] if scaling == ROW_SCALED else scale)[:, None]

    if quantised.scale is None:
        for rows in _rows_at_once(num_rows, width):
            some = data[rows].float()
            target.floats[rows].copy_(some * of_rows(rows.start, len(some)))
        return
    target.floats.copy_(data)
    if scaling == BLOCK_SCALED:
        rows, columns = (
            slice(start // BLOCK, -(-(start + size) // BLOCK))
            for start, size in zip(target.first, data.shape, strict=True)
        )
        quantised.scale.copy_(scale[rows, columns])
    else:
        quantised.scale.copy_(of_rows(0, num_rows)[:, 0])


def _wanted_rows(target: Target) -> tuple[slice, ...]:
    """All inputs of the target's outputs."""
    return _wanted(target)[:1] if target.cut is not None and target.cut.dim == 0 else (slice(None),)


def _wanted(target: Target) -> tuple[slice, ...]:
    """Which part of the checkpoint's tensor the target is."""
    if target.cut is None:
        return (slice(None),)
    stop = target.cut.start + target.tensor.shape[target.cut.dim]
    return (*[slice(None)] * target.cut.dim, slice(target.cut.start, stop))
