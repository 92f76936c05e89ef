"""The stages of a pipeline: which layers each has, as arithmetic, and a rank's place among them.

    stage 0                   stage 1          stage 2
    embedding, layers 0..11   layers 12..22    layers 23..31, norm, LM head

A pipeline is as fast as its slowest stage. Where an engine decodes, a stage costs the number of
weights that a step reads: those of its layers and, on the last, of the LM head, which is as many as
those of several layers where a vocabulary is large. Where it computes prompts alone, it costs the
number of weights that each token is multiplied by: of a mixture those of the experts that it
chooses, and not the head's, which only the last token needs. Among divisions of the same
cost the one is chosen whose largest stage holds the fewest weights; that counts the embedding too.
Knows no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from torch import Tensor

from ...core.errors import StartupFailed
from .model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [first, end) of the model's `num_layers`."""

    first: int
    end: int
    num_layers: int

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers


class Stages:
    """One rank's place in a pipeline, between the same rank of the stage before and of the one
    behind; this one is the only stage. Tensors pass in the order of the calls."""

    stage: int = 0
    num_stages: int = 1
    can_be_captured = True  # whether a CUDA graph may hold `receive` and `send`

    def connect(self) -> None:
        """Before the first operation."""

    def begin(self) -> None:
        """All is loaded and captured: from now on `receive` and `send` alone. Until then stages may
        pass nothing on by these two: what is computed is looked at by nobody."""

    def receive(self, x: Tensor) -> None:
        """Overwrite x by what the stage before sends, of the same shape and type."""
        raise AssertionError("the first stage has nobody to receive from")

    def send(self, x: Tensor) -> None:
        """To the stage behind; x must not be written to any more, on a GPU but in the order of the
        stream."""
        raise AssertionError("the last stage has nobody to send to")

    def least(self, value: int) -> int:
        """Of the values of all stages."""
        return value

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x by that of the first stage."""

    def close(self) -> None:
        """Once nothing is in flight; another stage's operation then fails."""


def layer_ranges(config: ModelConfig, num_stages: int, *, decodes: bool = True) -> list[LayerRange]:
    """The layers of each of `num_stages` stages, of an engine that decodes or computes prompts
    alone. Raises StartupFailed if there are too few layers."""
    num_layers = config.num_layers
    if num_stages > num_layers:
        raise StartupFailed(
            f"--pipeline-parallel-size {num_stages}: the model has {num_layers} layers",
            hint=f"--pipeline-parallel-size {num_layers}",
        )
    layers = range(num_layers)
    before = [0, *accumulate(_layer_weights(config, index) for index in layers)]
    used = [0, *accumulate(_layer_weights(config, index, of_a_token=True) for index in layers)]
    embedding = config.vocab_size * config.hidden_size

    def cost(first: int, end: int) -> int:
        if not decodes:
            return used[end] - used[first]
        return before[end] - before[first] + (embedding if end == num_layers else 0)

    def held(first: int, end: int) -> int:
        num_ends = (first == 0) + (end == num_layers)
        return before[end] - before[first] + num_ends * embedding

    most, _ = _divide(num_layers, num_stages, cost, lambda first, end: True)
    _, ends = _divide(num_layers, num_stages, held, lambda first, end: cost(first, end) <= most)
    firsts = [0, *ends[:-1]]
    return [LayerRange(*each, num_layers) for each in zip(firsts, ends, strict=True)]


def _divide(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int], int],
    is_allowed: Callable[[int, int], bool],
) -> tuple[int, list[int]]:
    """The least that the dearest of the stages can cost, and where each stage ends; the earlier
    stages of two equal divisions are the longer ones."""

    @cache
    def best(first: int, stages: int) -> tuple[int, list[int]] | None:
        if stages == 1:
            is_possible = is_allowed(first, num_layers)
            return (cost(first, num_layers), [num_layers]) if is_possible else None
        found: tuple[int, list[int]] | None = None
        for end in range(num_layers - stages + 1, first, -1):
            rest = best(end, stages - 1) if is_allowed(first, end) else None
            if rest is not None:
                dearest = max(cost(first, end), rest[0])
                if found is None or dearest < found[0]:
                    found = (dearest, [end, *rest[1]])
        return found

    found = best(0, num_stages)
    assert found is not None, "a division that was found before"
    return found


def _layer_weights(config: ModelConfig, index: int, *, of_a_token: bool = False) -> int:
    """Numbers in the matrices of a layer; or in those that one token is multiplied by."""
    width, experts = config.hidden_size, config.experts
    attention = 2 * width * config.head_dim * (config.num_heads + config.num_kv_heads)
    if experts is None or index not in experts.layers:
        return attention + 3 * width * config.intermediate_size
    num_experts = experts.num_experts_per_token if of_a_token else experts.num_experts
    inner = num_experts * experts.intermediate_size
    inner += experts.shared_intermediate_size or 0
    return attention + width * (3 * inner + experts.num_experts)
