"""Weights of four bits in groups with a scale and a zero, in the layout that kernels read.

    weight = (number - zero) * scale          numbers 0 to 15, zeros 0 to 16

Numbers are packed in words of 16 bits, by chunks of 128 inputs; an output's 32 words of a chunk are
contiguous:

    word j of a chunk     inputs j │ 32 + j │ 64 + j │ 96 + j, from the lowest four bits on

A group's scale is a float32 whose lowest byte holds the zero: 16-bit scales stay exact.
This file is plain torch, the reference of the kernels. Knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 128  # inputs; a group has 128, 64 or 32
PER_WORD = 4
ZERO = 8  # of symmetric groups
_LEAST_MAXIMUM = 1e-10  # lower bound of the maximum that a scale is made from: zeros stay zeros
_OF_LARGEST = (1.0, 0.92, 0.84)  # scales that are tried, as shares of the largest
GROUP_SIZES = (32, 64, 128)
_WORDS = CHUNK // PER_WORD
_LEAST_OUTPUTS = 16  # of a kernel's program
_SHIFTS = tuple(4 * number for number in range(PER_WORD))


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """One packed weight, or a stack of weights of one shape; inputs are a multiple of 128."""

    data: Tensor  # [..., chunks, outputs, 32] int16
    groups: Tensor  # [..., groups, outputs] int32: scales and zeros

    @property
    def shape(self) -> torch.Size:
        """[..., outputs, inputs]"""
        *others, chunks, outputs, _ = self.data.shape
        return torch.Size((*others, outputs, chunks * CHUNK))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.groups.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.groups.shape[-2]


@dataclass(frozen=True, slots=True)
class Int4Weight(PackedInt4):
    """One packed weight [outputs, inputs]."""

    turns: Tensor  # int32 zeros: counters of split-K programs, enough for the smallest tiles

    @classmethod
    def empty(
        cls, num_outputs: int, num_inputs: int, group_size: int, device: torch.device
    ) -> Int4Weight:
        """Uninitialised."""
        assert num_inputs % CHUNK == 0 and group_size in GROUP_SIZES
        data = (num_inputs // CHUNK, num_outputs, _WORDS)
        groups = (num_inputs // group_size, num_outputs)
        return cls(
            torch.empty(data, dtype=torch.int16, device=device),
            torch.empty(groups, dtype=torch.int32, device=device),
            torch.zeros(-(-num_outputs // _LEAST_OUTPUTS), dtype=torch.int32, device=device),
        )

    def __len__(self) -> int:
        return self.data.shape[1]

    def part(self, first: int, count: int) -> Int4Weight:
        """A view of outputs [first, first + count)."""
        data, groups = (one.narrow(1, first, count) for one in (self.data, self.groups))
        return Int4Weight(data, groups, self.turns)

    def fill(self, numbers: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Pack numbers [outputs, inputs] uint8, with scale and zero [outputs, groups or 1]."""
        each = numbers.view(len(self), -1, PER_WORD, _WORDS)
        words = each[:, :, 0].short()
        for index, shift in enumerate(_SHIFTS[1:], start=1):
            words |= each[:, :, index].short() << shift
        self.data.copy_(words.transpose(0, 1))
        self.groups.copy_(_joined(scale, zero).t().expand_as(self.groups))

    def numbers(self) -> Tensor:
        """The unpacked numbers [outputs, inputs], uint8."""
        words = self.data.transpose(0, 1)[:, :, None].int()  # [outputs, chunks, 1, 32]
        shifts = torch.tensor(_SHIFTS, device=words.device)[:, None]
        return ((words >> shifts) & 0xF).to(torch.uint8).reshape(self.shape)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] in floats."""
        groups = self.groups.t()
        scale = (groups & ~0xFF).contiguous().view(torch.float32)
        return dequantise(self.numbers(), scale, groups & 0xFF, self.group_size).to(dtype)


def _joined(scale: Tensor, zero: Tensor) -> Tensor:
    """Scales rounded to 15 mantissa bits (to nearest), with zeros in their lowest byte."""
    bits = scale.float().contiguous().view(torch.int32)
    return ((bits + 0x80) & ~0xFF) | zero.int()


def dequantise(numbers: Tensor, scale: Tensor, zero: Tensor, group_size: int) -> Tensor:
    """numbers [outputs, inputs], scale and zero [outputs, groups] -> float32 [outputs, inputs]."""
    each = torch.arange(numbers.shape[1], device=numbers.device) // group_size
    return (numbers.float() - zero.float()[:, each]) * scale.float()[:, each]


def quantise_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Floats [outputs, inputs] -> numbers (to nearest), scales and zeros of symmetric groups.

    Each group gets, out of a few scales, the one with the least squared error: its largest number
    may be clamped. The last group may have fewer inputs.
    """
    outputs, inputs = weight.shape
    floats = torch.nn.functional.pad(weight.float(), (0, -inputs % group_size))
    grouped = floats.view(outputs, -1, group_size)
    largest = grouped.abs().amax(dim=2, keepdim=True).clamp_(min=_LEAST_MAXIMUM)
    # As GPUs divide by constants, so that a group's largest, a tie at 7.5 scales, rounds as there.
    largest.mul_(1 / 7.5)
    scale, least = largest, torch.full_like(largest, torch.inf)
    for share in _OF_LARGEST:
        error = _rounded(grouped, largest * share).mul_(largest * share).sub_(grouped)
        error = error.square_().sum(dim=2, keepdim=True)
        scale, least = torch.where(error < least, largest * share, scale), least.minimum(error)
    numbers = _rounded(grouped, scale).add_(ZERO).to(torch.uint8).view(outputs, -1)[:, :inputs]
    return numbers, scale[:, :, 0], torch.full_like(scale[:, :, 0], ZERO, dtype=torch.uint8)


def _rounded(grouped: Tensor, scale: Tensor) -> Tensor:
    return (grouped / scale).round_().clamp_(-ZERO, 15 - ZERO)
