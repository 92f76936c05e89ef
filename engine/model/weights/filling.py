"""Fills a model's tensors, or a rank's parts of them, with a checkpoint's numbers.

Quantised weights are dequantised, and floats quantised, as the target requires: matrix by matrix,
some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....kernels.experts.experts import Int4Experts
from ....kernels.products.int4_weights import Int4Weight, dequantise, quantise_groups
from ....kernels.products.weights import BLOCK, quantise_rows, spread
from ..quantization import BLOCK_SCALED, ROW_SCALED
from .int4_files import Read, module_of, read_int4
from .int4_layout import Int4
from .targets import Quantised, TensorCut, WeightTarget

OnProgress = Callable[[int, int], None]  # bytes loaded and bytes in total, as in the model's memory
_NUMBERS_AT_ONCE = 1 << 20  # quantised or dequantised, each taking several times 4 bytes


class LoadProgress:
    """Counts loaded targets and reports each."""

    def __init__(self, targets: Mapping[str, WeightTarget], on_progress: OnProgress | None) -> None:
        self._total_bytes = sum(target.nbytes for target in targets.values())
        self._num_bytes = 0
        self._on_progress = on_progress

    def add(self, target: WeightTarget) -> None:
        self._num_bytes += target.nbytes
        if self._on_progress is not None:
            self._on_progress(self._num_bytes, self._total_bytes)


def fill(file: Any, name: str, target: WeightTarget, scales: Mapping[str, Tensor]) -> None:
    """Fill a target that is one tensor in the file, with scales or without."""
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
        # On every rank, an output's scales are computed from all its inputs.
        rows = target.wanted[0]
        _quantise(target, quantised, file.get_tensor(name) if is_whole else source[rows])
    else:
        read = file.get_tensor(name) if is_whole else source[target.wanted]
        scale = scales[quantised.scale_name].to(target.tensor.device)
        store(target, quantised, read, scale, quantised.scaling)


def _quantise(target: WeightTarget, quantised: Quantised, floats: Tensor) -> None:
    """Fill the target from `floats` [outputs, inputs]: all inputs of its outputs."""
    if quantised.int4 is not None:
        fill_groups(target, quantised.int4, floats)
        return
    columns = target.wanted[1]
    for rows in _rows_at_once(len(floats), floats.shape[1]):
        data, scale = quantise_rows(floats[rows])
        part = None if quantised.scale is None else quantised.scale[rows]
        chunk = Quantised(ROW_SCALED, None, part)
        store(WeightTarget(target.floats[rows]), chunk, data[:, columns], scale, ROW_SCALED)


def fill_groups(target: WeightTarget, int4: Int4, floats: Tensor) -> None:
    """Quantise `floats` to four bits, as `_quantise`, and fill the target."""
    columns, size = target.wanted[1], int4.group_size or floats.shape[1]
    for rows in _rows_at_once(len(floats), floats.shape[1]):
        numbers, scale, zero = quantise_groups(floats[rows], size)
        if isinstance(target.tensor, Int4Weight):
            groups = slice(columns.start // size, -(-columns.stop // size))
            part = target.tensor.part(rows.start, rows.stop - rows.start)
            part.fill(numbers[:, columns], scale[:, groups], zero[:, groups])
        else:
            target.floats[rows].copy_(dequantise(numbers, scale, zero, size)[:, columns])


def unpack(name: str, target: WeightTarget, int4: Int4, read: Read) -> None:
    """Fill a target from a checkpoint's int4 weight."""
    if not target.tensor.numel():
        return
    numbers, scale, zero = read_int4(read, module_of(name), int4, *target.wanted)
    if isinstance(target.tensor, Int4Weight):
        target.tensor.fill(numbers, scale, zero)
        return
    num_rows, width = target.tensor.shape
    for rows in _rows_at_once(num_rows, width):
        floats = dequantise(numbers[rows], scale[rows], zero[rows], int4.group_size or width)
        target.floats[rows].copy_(floats)


def _rows_at_once(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // width)
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _quantise_experts(target: WeightTarget, quantised: Quantised, source: Any) -> None:
    """Quantise `source` [experts, outputs, inputs], floats, expert by expert."""
    stacked, (count, _, _) = target.tensor, target.tensor.shape
    cut = target.cut or TensorCut(0, 0, count)
    first = cut.start if cut.dim == 0 else 0
    columns = TensorCut(1, cut.start, cut.full) if cut.dim == 2 else None
    for expert in range(count):
        tensor = stacked.of(expert) if isinstance(stacked, Int4Experts) else target.floats[expert]
        floats = source[first + expert : first + expert + 1][0]
        if cut.dim == 1:
            rows, step = len(tensor) // cut.pieces, cut.full // cut.pieces
            starts = range(cut.start, cut.full, step)
            floats = torch.cat([floats[start : start + rows] for start in starts])
        scale = None if quantised.scale is None else quantised.scale[expert]
        each = Quantised(quantised.scaling, None, scale, quantised.int4)
        _quantise(WeightTarget(tensor, columns), each, floats)


def store(
    target: WeightTarget, quantised: Quantised, data: Tensor, scale: Tensor, scaling: str
) -> None:
    """Fill the target with `data` [outputs, inputs], e4m3, its part of a weight with `scale`."""
    (num_rows, width), (of_target, columns) = data.shape, target.wanted

    def of_rows(first: int, count: int) -> Tensor:
        """The scales of `count` rows of the part from row `first` on."""
        start = of_target.start + first
        if scaling == BLOCK_SCALED:
            return spread(scale, (count, width), (start, columns.start))
        return (scale[start : start + count] if scaling == ROW_SCALED else scale)[:, None]

    if quantised.scale is None:
        for rows in _rows_at_once(num_rows, width):
            some = data[rows].float()
            target.floats[rows].copy_(some * of_rows(rows.start, len(some)))
        return
    target.floats.copy_(data)
    if scaling == BLOCK_SCALED:
        blocks = (slice(one.start // BLOCK, -(-one.stop // BLOCK)) for one in target.wanted)
        quantised.scale.copy_(scale[tuple(blocks)])
    else:
        quantised.scale.copy_(of_rows(0, num_rows)[:, 0])
