"""The stages of a pipeline: which layers each computes, and a rank's place among the stages.

    stage 0                   stage 1          stage 2
    embedding, layers 0..11   layers 12..22    layers 23..31, norm, LM head

A pipeline is as fast as its slowest stage. If the engine decodes, a stage's cost is the number of
weights that a step reads: those of its layers and, on the last stage, of the LM head, which with a
large vocabulary has as many as several layers. If it computes only prompts, the cost is the number
of weights that each token is multiplied by: of experts only the chosen ones, and without the LM
head, which only the last token needs. Among divisions of equal cost the one is chosen whose largest
stage, embedding included, holds the fewest weights. Knows no process.
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
    """One rank's place in a pipeline, between the same rank of the previous and the next stage.
    This base class is for a single stage. Tensors are transferred in the order of the calls."""

    stage: int = 0
    num_stages: int = 1
    can_be_captured = True  # whether a CUDA graph may hold `receive` and `send`

    def connect(self) -> None:
        """Call before the first operation."""

    def begin(self) -> None:
        """Call once all is loaded and captured; only `receive` and `send` follow. Before this call
        these two need not transfer anything, since the results are not used."""

    def receive(self, x: Tensor) -> None:
        """Overwrite x with the previous stage's tensor, of the same shape and type."""
        raise AssertionError("the first stage has no stage to receive from")

    def send(self, x: Tensor) -> None:
        """Send x to the next stage. It must not be overwritten afterwards; on a GPU only in stream
        order."""
        raise AssertionError("the last stage has no stage to send to")

    def least(self, value: int) -> int:
        """The smallest of all stages' values."""
        return value

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with the first stage's."""

    def close(self) -> None:
        """Call when nothing is in flight. Other stages' operations then fail."""


def layer_ranges(config: ModelConfig, num_stages: int, *, decodes: bool = True) -> list[LayerRange]:
    """The layers of each of `num_stages` stages; `decodes`: else the engine computes only prompts.
    Raises StartupFailed if there are fewer layers than stages."""
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
    """The smallest possible cost of the most expensive stage, and the end of each stage. Among
    equal divisions, the one with longer earlier stages is chosen."""

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
    """The number of weights of a layer; `of_a_token`: of those that one token is multiplied by."""
    width, experts = config.hidden_size, config.experts
    attention = 2 * width * config.head_dim * (config.num_heads + config.num_kv_heads)
    if experts is None or index not in experts.layers:
        return attention + 3 * width * config.intermediate_size
    num_experts = experts.num_experts_per_token if of_a_token else experts.num_experts
    inner = num_experts * experts.intermediate_size
    inner += experts.shared_intermediate_size or 0
    return attention + width * (3 * inner + experts.num_experts)
