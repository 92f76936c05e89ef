"""Costs of steps for engines that are played."""

from __future__ import annotations

from baton.core.step_cost import KNOTS, StepCost
from baton.proto.v1 import node_pb2


def linear_cost(step_s: float, token_s: float) -> StepCost:
    """So much for a step and for each of its tokens."""
    return StepCost(step_s, (token_s, *[0.0] * (len(KNOTS) - 1)), max_rows=1 << 20)


def linear_cost_message(step_s: float, token_s: float) -> node_pb2.StepCost:
    cost = linear_cost(step_s, token_s)
    return node_pb2.StepCost(base_s=cost.base_s, row_s=cost.row_s, max_rows=cost.max_rows)
