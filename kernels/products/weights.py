"""Weights in FP8 (e4m3) with their scales, and activations in FP8.

    RowScaled      a scale for each output          activations: a scale for each token, or for few
                                                    tokens as with BlockScaled
    BlockScaled    a scale for 128 x 128 weights    activations: a scale for 128 inputs of a token

A weight in the model's type is a plain tensor. This file is plain torch, the reference of the
kernels. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .int4_weights import Int4Weight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
LEAST_MAXIMUM = 1e-10  # lower bound of the maximum that a scale is made from: zeros stay zeros


@dataclass(frozen=True, slots=True)
class _Scaled:
    data: Tensor  # [outputs, inputs], e4m3
    scale: Tensor  # [outputs], or [ceil(outputs / 128), ceil(inputs / 128)], float32

    def __len__(self) -> int:
        return len(self.data)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class RowScaled(_Scaled):
    """data[output] * scale[output]."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] in floats."""
        return (self.data.float() * self.scale[:, None]).to(dtype)


@dataclass(frozen=True, slots=True)
class BlockScaled(_Scaled):
    """data[output, input] * scale[output // 128, input // 128]."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] in floats."""
        return (self.data.float() * spread(self.scale, self.data.shape)).to(dtype)


Fp8Weight: TypeAlias = RowScaled | BlockScaled
Weight: TypeAlias = Tensor | Fp8Weight | Int4Weight


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations: data[row, input] * scale[row, input // (inputs / groups)].

    For a BlockScaled weight there are ceil(inputs / 128) groups; for a RowScaled weight one group,
    or, for few rows, also ceil(inputs / 128).
    """

    data: Tensor  # [rows, inputs], e4m3
    scale: Tensor  # [rows, groups], float32, column-major: strides (1, room)
    dtype: torch.dtype  # of the activations before quantising, and of the products

    @classmethod
    def empty(
        cls, num_rows: int, weight: Fp8Weight, like: Tensor, *, in_groups: bool = False
    ) -> Fp8Rows:
        """Uninitialised, for the product with `weight`; type and device as `like`.

        `in_groups`: a scale for each 128 inputs, whatever scales the weight has. The memory has
        room for more rows, which kernels may read, see `room`.
        """
        num_inputs = weight.shape[1]
        room = -(-num_rows // 16) * 16
        if num_rows <= 2 * BLOCK:
            room = max(16, 1 << (num_rows - 1).bit_length())
        in_groups = in_groups or isinstance(weight, BlockScaled)
        groups = -(-num_inputs // BLOCK) if in_groups else 1
        data = torch.empty((room, num_inputs), dtype=FP8, device=like.device)
        scale = torch.empty((groups, room), dtype=torch.float32, device=like.device).t()
        return cls(data[:num_rows], scale[:num_rows], like.dtype)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def room(self) -> int:
        """Number of rows with memory; from `empty`: 16, 32, 64, 128, 256, then multiples of 16."""
        return self.scale.stride(1)

    @property
    def with_room(self) -> tuple[Tensor, Tensor]:
        """`data` and `scale` with all `room` rows."""
        (_, inputs), (_, groups) = self.data.shape, self.scale.shape
        return (
            self.data.as_strided((self.room, inputs), self.data.stride()),
            self.scale.as_strided((self.room, groups), self.scale.stride()),
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The activations [rows, inputs] in floats."""
        groups, inputs = self.scale.shape[1], self.data.shape[1]
        scale = self.scale
        if groups > 1:
            scale = scale.repeat_interleave(BLOCK, dim=1)[:, :inputs]
        return (self.data.float() * scale).to(dtype)


Activations: TypeAlias = Tensor | Fp8Rows


@dataclass(frozen=True, slots=True)
class Unscaled:
    """A product of Fp8Rows with a RowScaled weight before scaling. Its value is
    data[row, output] * of_rows[row] * of_outputs[output]."""

    data: Tensor  # [rows, outputs], in the model's type
    of_rows: Tensor  # [rows], float32
    of_outputs: Tensor  # [outputs], float32


@dataclass(frozen=True, slots=True)
class Summands:
    """Rows to be summed, `count` consecutive ones for each result row: the weighted outputs of a
    token's experts, or split-K partial products."""

    data: Tensor  # [rows * count, outputs], in the model's type
    count: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's summand that has already been written to where the ranks add it up."""


# The result of a product whose only reader is `Ops.add_rms_norm`.
Summand: TypeAlias = Tensor | Unscaled | Summands | Sent


def spread(scale: Tensor, shape: Sequence[int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """The block scale of each weight in a part of `shape` that begins at `first`."""
    rows, columns = (
        torch.arange(start, start + size, device=scale.device) // BLOCK
        for start, size in zip(first, shape, strict=True)
    )
    return scale[rows][:, columns]


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [outputs, inputs] -> e4m3 of the same shape, and a scale for each output."""
    scale = weight.float().abs().amax(dim=1).clamp_(min=LEAST_MAXIMUM) / FP8_MAX
    return (weight.float() / scale[:, None]).to(FP8), scale


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [outputs, inputs] -> e4m3 of the same shape, and a scale for each block."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=LEAST_MAXIMUM) / FP8_MAX
    return (weight.float() / spread(scale, weight.shape)).to(FP8), scale


def quantise_activations(x: Tensor, weight: Fp8Weight) -> Fp8Rows:
    """x [rows, inputs] quantised for products with `weight`."""
    if isinstance(weight, RowScaled):
        data, scale = quantise_rows(x)
        return Fp8Rows(data, scale[None].t(), x.dtype)
    inputs = x.shape[1]
    grouped = torch.nn.functional.pad(x.float(), (0, -inputs % BLOCK)).view(len(x), -1, BLOCK)
    scale = grouped.abs().amax(dim=2).clamp_(min=LEAST_MAXIMUM) / FP8_MAX
    data = (grouped / scale[:, :, None]).view(len(x), -1)[:, :inputs]
    return Fp8Rows(data.to(FP8), scale.t().contiguous().t(), x.dtype)
