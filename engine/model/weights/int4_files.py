"""Checks and unpacks the int4 weights of checkpoints: see int4_layout.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.errors import StartupFailed
from .int4_layout import NUMBERS_OF_WORD, Int4, Piece
from .targets import WeightTarget

_BITS = 4
_ZERO = 8
_SCALE_DTYPES = ("F16", "BF16", "F32")
_WHOLE_DTYPES = ("I32", "I64")

Check = Callable[[Path, Any, str], None]  # check a tensor of a file: path, open file, name
Read = Callable[[str, tuple[slice, ...]], Tensor]  # read a part of a tensor: name, slices


def module_of(name: str) -> str:
    """The name of the projection of a target."""
    return name.removesuffix(".weight")


def checks_of(targets: Mapping[str, WeightTarget], names: Iterable[str]) -> dict[str, Check]:
    """The checks of the tensors that int4 targets are read from, by tensor name.

    `names`: all tensors of the checkpoint. Raises StartupFailed for sizes that cannot be packed.
    """
    there, found = frozenset(names), dict[str, Check]()
    for name, target in targets.items():
        if (int4 := _int4_of(target)) is not None:
            for tensor, check, is_needed in _checks(module_of(name), target.full_shape, int4):
                if (is_needed or tensor in there) and tensor not in targets:
                    found[tensor] = check
    return found


def _int4_of(target: WeightTarget) -> Int4 | None:
    """The quantisation of a target that is read from int4 weights, else None."""
    quantised = target.quantised
    return quantised.int4 if quantised is not None and quantised.scale_name else None


def _checks(module: str, shape: tuple[int, ...], int4: Int4) -> Iterator[tuple[str, Check, bool]]:
    """The tensors of a projection: name, check, and whether the tensor is required."""
    outputs, inputs = shape
    for unit, count, what in (
        (int4.unit, inputs, "inputs"),
        (NUMBERS_OF_WORD, inputs, "inputs"),
        (NUMBERS_OF_WORD, outputs, "outputs"),
    ):
        if count % unit:
            raise StartupFailed(
                f"{module} has {count} {what}: no multiple of {unit}, as its format needs"
            )
    layout = int4.layout
    for piece in int4.pieces:
        wanted, is_scale = piece.shape(outputs, inputs, int4.group_size), piece is layout.scales
        yield module + piece.suffix, partial(_check_matrix, wanted, is_scale), True
    if layout.order is not None:
        yield module + layout.order, partial(_check_order, inputs, int4), int4.is_ordered
    if layout.shape is not None:
        yield module + layout.shape, partial(_check_shape, shape), True
    if layout.has_spare_biases:
        yield f"{module}.bias", _check_spare_bias, False


def _check_matrix(
    wanted: tuple[int, int], is_scale: bool, path: Path, file: Any, name: str
) -> None:
    _check_kind(path, file, name, wanted, _SCALE_DTYPES if is_scale else ("I32",))
    if is_scale:
        check_scale(path, name, file.get_tensor(name))


def check_scale(path: Path, name: str, scale: Tensor) -> None:
    """Raise StartupFailed unless all scales are finite and above 0."""
    wrong = scale[~(scale.isfinite() & (scale > 0))]
    if len(wrong):
        raise StartupFailed(
            f"{name} in {path} has {len(wrong)} scales that are no finite numbers above 0, such as "
            f"{wrong[0].item()}",
            hint="download the file again",
        )


def _check_order(inputs: int, int4: Int4, path: Path, file: Any, name: str) -> None:
    _check_kind(path, file, name, (inputs,), _WHOLE_DTYPES)
    found: Tensor = file.get_tensor(name)
    if not torch.equal(found.long(), torch.arange(inputs) // (int4.group_size or inputs)):
        raise StartupFailed(
            f"{name} in {path} has groups of inputs in another order, which is not supported",
            hint="a checkpoint that was made with desc_act false (actorder null or weight)",
        )


def _check_shape(shape: tuple[int, ...], path: Path, file: Any, name: str) -> None:
    _check_kind(path, file, name, (2,), _WHOLE_DTYPES)
    found = tuple(file.get_tensor(name).tolist())
    if found != shape:
        raise StartupFailed(
            f"{name} in {path} is {list(found)}, config.json requires {list(shape)}"
        )


def _check_spare_bias(path: Path, file: Any, name: str) -> None:
    if file.get_tensor(name).any():
        raise StartupFailed(
            f"{name} in {path} is not all zeros, and its architecture has no such bias"
        )


def _check_kind(
    path: Path, file: Any, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    source = file.get_slice(name)
    found, dtype = tuple(source.get_shape()), source.get_dtype()
    if found != shape:
        raise StartupFailed(
            f"{name} in {path} has shape {list(found)}, config.json requires {list(shape)}"
        )
    if dtype not in dtypes:
        raise StartupFailed(f"{name} in {path} is of type {dtype}, not {' or '.join(dtypes)}")


def read_int4(
    read: Read, module: str, int4: Int4, outputs: slice, inputs: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """A part of a weight: numbers [outputs, inputs] uint8; scales, zeros [outputs, groups]."""
    layout = int4.layout

    def part(piece: Piece) -> Tensor:
        found = read(module + piece.suffix, piece.part(outputs, inputs, int4.group_size))
        first = outputs.start % piece.outputs  # outputs before the part in its first word
        return _unpacked(found, piece)[first : first + outputs.stop - outputs.start]

    scale, numbers = part(layout.scales), part(layout.numbers)
    if int4.has_zeros:
        zero = part(layout.zeros).add_(int4.zero_offset)
    else:
        zero = torch.full_like(scale, _ZERO, dtype=torch.uint8)
    return numbers, scale, zero


def _unpacked(packed: Tensor, piece: Piece) -> Tensor:
    """`packed` as [outputs, inputs]: unpacked to uint8 if it is packed in words, else unchanged."""
    by_outputs = packed if piece.has_outputs_first else packed.t()
    if NUMBERS_OF_WORD not in (piece.inputs, piece.outputs):
        return by_outputs
    is_of_inputs = piece.inputs == NUMBERS_OF_WORD
    outputs, inputs = by_outputs.shape
    eight = NUMBERS_OF_WORD
    sizes = (outputs, inputs, eight) if is_of_inputs else (outputs, eight, inputs)
    numbers = torch.empty(sizes, dtype=torch.uint8, device=packed.device)
    for index, place in enumerate(piece.order):
        of_word = numbers[..., index] if is_of_inputs else numbers[:, index]
        of_word.copy_((by_outputs >> _BITS * place).bitwise_and_(0xF))
    return numbers.flatten(1) if is_of_inputs else numbers.flatten(0, 1)
