"""Step costs for simulated engines."""

from __future__ import annotations

from baton.core.step_cost import KNOTS, StepCost
from baton.core.step_shape import StepShape
from baton.proto.v1 import node_pb2


def linear_cost(step_s: float, token_s: float) -> StepCost:
    """A fixed time per step and per token, reduced by the rounding error of sums, so that a step
    may be exactly as long as a promise."""
    step_s -= 1e-12 if step_s > 0 else 0.0
    return StepCost(step_s, (token_s,) * len(KNOTS), max_rows=1 << 20)


def linear_cost_message(step_s: float, token_s: float) -> node_pb2.StepCost:
    cost = linear_cost(step_s, token_s)
    return node_pb2.StepCost(base_s=cost.base_s, row_s=cost.row_s, max_rows=cost.max_rows)


def mixture_s(shape: StepShape) -> float:
    """Seconds of a step, roughly those of Qwen3-30B-A3B on an H200: 13.5 ms for all experts, of
    which a row activates 8 of 128."""
    touched = 1 - (1 - 8 / 128) ** shape.num_rows
    rows_s = 1.6e-3 + 13.5e-3 * touched + 10.5e-6 * shape.num_rows
    return rows_s + 1.4e-9 * shape.pairs + 2.4e-8 * shape.keys
