"""The data of a mixture of experts: its stacked weights, and counters of the tokens per expert.

Also the reference of the choice of experts, in plain torch. Knows no layer and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..products.int4_weights import Int4Weight, PackedInt4
from ..products.weights import BLOCK, FP8, BlockScaled, RowScaled, Weight

BY_ROW, BY_BLOCK = 1, 2


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix of each of this rank's experts, stacked.

    `scale`: for weights in FP8, float32: [experts, outputs], or [experts, ceil(outputs / 128),
    ceil(inputs / 128)].
    """

    values: Tensor  # [experts, outputs, inputs], floats or e4m3
    scale: Tensor | None = None

    @property
    def scaling(self) -> int:
        """BY_ROW, BY_BLOCK, or 0 for floats."""
        return 0 if self.scale is None else self.scale.ndim - 1

    @property
    def num_experts(self) -> int:
        return self.values.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[2]

    def of(self, expert: int) -> Weight:
        """Views of one expert's weight [outputs, inputs]."""
        values = self.values[expert]
        if self.scale is None:
            return values
        kind = RowScaled if self.scaling == BY_ROW else BlockScaled
        return kind(values, self.scale[expert])


@dataclass(frozen=True, slots=True)
class Int4Experts(PackedInt4):
    """`ExpertWeights` in int4: [experts, outputs, inputs]."""

    @classmethod
    def empty(
        cls, count: int, num_outputs: int, num_inputs: int, group_size: int, device: torch.device
    ) -> Int4Experts:
        """Uninitialised."""
        one = Int4Weight.empty(num_outputs, num_inputs, group_size, torch.device("meta"))
        made = (
            torch.empty((count, *part.shape), dtype=part.dtype, device=device)
            for part in (one.data, one.groups)
        )
        return cls(*made)

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.shape[2]

    def of(self, expert: int) -> Int4Weight:
        """Views of one expert's weight [outputs, inputs]; without counters, so for no split-K."""
        return Int4Weight(self.data[expert], self.groups[expert], self.groups.new_empty(0))


StackedWeights: TypeAlias = ExpertWeights | Int4Experts


@dataclass(frozen=True, slots=True)
class Fp8Groups:
    """Activations for experts in FP8: data[row, input] * scale[row, input // 128].

    There is a scale for each 128 inputs even where the weight has one for each output: this is more
    exact, and a program that computes a tile of a row can quantise it without the rest of the row.
    """

    data: Tensor  # [rows, inputs], e4m3
    scale: Tensor  # [rows, ceil(inputs / 128)], float32

    @classmethod
    def empty(cls, num_rows: int, num_inputs: int, device: torch.device) -> Fp8Groups:
        """Uninitialised."""
        data = torch.empty((num_rows, num_inputs), dtype=FP8, device=device)
        groups = -(-num_inputs // BLOCK)
        return cls(data, torch.empty((num_rows, groups), dtype=torch.float32, device=device))


ExpertInputs: TypeAlias = Tensor | Fp8Groups


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer that this rank holds.

    `gate_up`: the gate's rows first. A rank with a part of the experts has `num_local` of them from
    `first` on, and its output is to be summed with the other ranks'.
    """

    router: Tensor  # [experts, hidden], of all experts
    gate_up: StackedWeights  # [local experts, 2 * inner, hidden]
    down: StackedWeights  # [local experts, hidden, inner]
    num_chosen: int  # experts per token
    has_normed_weights: bool  # the chosen experts' weights sum to one
    first: int = 0

    @property
    def num_experts(self) -> int:
        return self.router.shape[0]

    @property
    def num_local(self) -> int:
        return self.gate_up.num_experts

    @property
    def hidden(self) -> int:
        return self.router.shape[1]

    @property
    def inner(self) -> int:
        return self.down.num_inputs


class ExpertLoads:
    """How many tokens have chosen each expert of each layer, counted on the device.

    `tokens` [layers, experts] int64 only grows. `slots` are those of the step being computed or
    captured: tokens with a slot before `first_slot` are padding and are not counted.
    """

    def __init__(
        self, num_layers: int, num_experts: int, first_slot: int, device: torch.device
    ) -> None:
        self.tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.first_slot = first_slot
        self.slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """The counts of one layer: the `row`-th of the layers with experts."""

    whole: ExpertLoads
    row: int

    @property
    def tokens(self) -> Tensor:
        """[experts] int64."""
        return self.whole.tokens[self.row]

    def add(self, chosen: Tensor) -> None:
        """Count the step's `chosen` [tokens, experts per token]."""
        if self.whole.slots is not None:
            chosen = chosen[self.whole.slots >= self.whole.first_slot]
        self.tokens.add_(torch.bincount(chosen.flatten(), minlength=len(self.tokens)))


def choose_experts(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """logits [tokens, experts] -> weights, float32, and experts, int64: [tokens, num_chosen] each.

    Softmax over all experts, then top-k (Shazeer et al. 2017).
    """
    shares = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, chosen = shares.topk(mixture.num_chosen, dim=-1)
    if mixture.has_normed_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def tokens_by_expert(
    x: Tensor, mixture: Mixture, loads: LayerLoads | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert of this rank that a token of x [tokens, hidden] chose: its place on the rank, its
    tokens' indices [n], and its weights for them [n, 1] of the type of x."""
    # For few outputs, the order in which BLAS sums depends on the number of rows. Computed in
    # float64 and rounded, a row's logits do not.
    logits = F.linear(x.double(), mixture.router.double()).float()
    weights, chosen = choose_experts(logits, mixture)
    weights = weights.to(x.dtype)
    if loads is not None:
        loads.add(chosen)
    for index in torch.unique(chosen).tolist():
        local = index - mixture.first
        if 0 <= local < mixture.num_local:
            tokens, place = torch.where(chosen == index)
            yield local, tokens, weights[tokens, place, None]
