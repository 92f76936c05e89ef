"""A LoRA adapter from a PEFT directory: its header is checked before memory is allocated.

    adapter_config.json ─► rank, scaling     adapter_model.safetensors ─► [rank, row size]

Only safetensors are read; a pickle is never opened. Each rank reads its part. May run on any
thread: nothing here is shared.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...core.errors import AdapterRefused
from .adapter_config import LoraConfig, read_lora_config
from .layout import AdapterLayout, Projection

FILE = "adapter_model.safetensors"
_DTYPES = {"F32", "F16", "BF16"}
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight\Z")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One rank's part of an adapter in host memory: `rows` [rank, row size], of the model's type.
    `order`: the order of the RankGroup by which other ranks, if any, have read their parts."""

    digest: str
    rows: Tensor
    order: int = 0

    @property
    def rank(self) -> int:
        return len(self.rows)


def empty_rows(
    layout: AdapterLayout, max_rank: int, dtype: torch.dtype, *, is_pinned: bool = False
) -> Tensor:
    """Uninitialised host memory for an adapter of any rank: [max rank, row size]."""
    return torch.empty((max_rank, layout.row_size), dtype=dtype, pin_memory=is_pinned)


def read_adapter(
    folder: Path,
    layout: AdapterLayout,
    max_rank: int,
    dtype: torch.dtype,
    *,
    is_pinned: bool = False,
) -> HostAdapter:
    """Read this rank's part. Raises AdapterRefused, naming the file, and the field or tensor."""
    path = folder / FILE
    with _open(path) as file:
        config = read_lora_config(folder, max_rank)
        tensors = _check(path, file, config, layout)
        rows = empty_rows(layout, max_rank, dtype, is_pinned=is_pinned)[: config.rank].zero_()
        for module, halves in tensors.items():
            projection = layout.projections[module]
            for half, name in halves.items():
                _read(path, file, name, rows, projection, config.scaling, is_a=half == "A")
        digest = _digest(path, config)
    return HostAdapter(digest, rows)


def _check(
    path: Path, file: Any, config: LoraConfig, layout: AdapterLayout
) -> Mapping[str, Mapping[str, str]]:
    """Names of tensors by module and half, checked against the model and the configuration."""
    found: dict[str, dict[str, str]] = {}
    is_elsewhere = False
    for name in sorted(file.keys()):
        match = _TENSOR.match(name.removeprefix(_PREFIX))
        if match is None:
            raise AdapterRefused(f"{path}: {name} is no lora_A.weight or lora_B.weight")
        module, half = match["module"], match["half"]
        if layout.is_elsewhere(module):
            is_elsewhere = True
            continue
        projection = layout.projections.get(module)
        if projection is None:
            raise AdapterRefused(f"{path}: {name}: {_unknown(module, layout)}")
        part = file.get_slice(name)
        if (dtype := part.get_dtype()) not in _DTYPES:
            raise AdapterRefused(f"{path}: {name} is in {dtype}; served are F32, F16, BF16")
        is_a = half == "A"
        wanted = [config.rank, projection.inputs.full]
        if not is_a:
            wanted = [projection.outputs.full, config.rank]
        if (shape := list(part.get_shape())) != wanted:
            raise AdapterRefused(f"{path}: {name} is {shape}, of this model and rank {wanted}")
        found.setdefault(module, {})[half] = name
    for module, halves in found.items():
        if missing := {"A", "B"} - halves.keys():
            raise AdapterRefused(f"{path} lacks {module}.lora_{missing.pop()}.weight")
    if not found and not is_elsewhere:
        raise AdapterRefused(f"{path} has no tensors")
    return found


def _unknown(module: str, layout: AdapterLayout) -> str:
    if layout.has_experts and ".mlp." in module:
        return "adapters of experts are not served, those of attention are"
    return f"this model has no {module} that adapters are served for"


def _read(
    path: Path,
    file: Any,
    name: str,
    rows: Tensor,
    projection: Projection,
    scaling: float,
    *,
    is_a: bool,
) -> None:
    """Copy this rank's part of a tensor into `rows`, with B scaled."""
    part = projection.inputs if is_a else projection.outputs
    tensor, wanted = file.get_slice(name), slice(part.first, part.first + part.count)
    value: Tensor = (tensor[:, wanted] if is_a else tensor[wanted]).float()
    target = rows[:, part.at : part.at + part.count]
    target.copy_(value if is_a else value.t() * scaling)
    if not bool(torch.isfinite(target).all()):
        raise AdapterRefused(f"{path}: {name} has numbers that are not finite")


def _digest(path: Path, config: LoraConfig) -> str:
    """32 hex digits over everything that affects the results."""
    digest = hashlib.blake2b(f"{config.rank} {config.scaling!r}".encode(), digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is no folder of this host"
    if any(folder.glob("adapter_model.bin")):
        return f"{folder}/adapter_model.bin is a pickle, which can run code and is never opened"
    return f"there is no {folder / FILE}"


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open the tensors; a file that changes while it is read is rejected."""
    try:
        if not path.is_file():
            raise AdapterRefused(_no_weights(path.parent))
        before = _stamp(path)
        with safe_open(path, framework="pt") as file:
            yield file
        if _stamp(path) != before:
            raise AdapterRefused(f"{path} has changed while it was read")
    except (OSError, SafetensorError) as error:
        raise AdapterRefused(f"cannot read {path}: {error}") from error


def _stamp(path: Path) -> tuple[int, ...]:
    """Identifies the file's current content. The file is opened because NFS may report stale
    attributes for a path."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
