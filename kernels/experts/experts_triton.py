"""A mixture of experts on a GPU: routing, then the products as their plan says.

Nothing waits for the device and no size depends on what was chosen: a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import LayerLoads, Mixture
from .few_tokens_triton import experts_of_few
from .grouped_triton import down_products, gate_rows, gated_products, sum_pairs
from .routing_triton import Choice, Order, choose, choose_and_order, router_logits
from .tiles import Few, Library, Plan, Sizes, Tiles, choose_plan


def compute_experts(
    x: Tensor, mixture: Mixture, loads: LayerLoads | None, plan: Plan | None = None
) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of each token's experts on this rank, like x.

    A token's result depends on the plan, hence on the number of tokens, and not on the others.
    """
    is_whole = mixture.num_local == mixture.num_experts
    plan = plan or choose_plan(sizes_of(mixture), len(x), x.itemsize, has_library=is_whole)
    logits = router_logits(x, mixture.router)
    match plan:
        case Few():
            return experts_of_few(x, mixture, choose(logits, mixture, loads), plan)
        case Tiles():
            choice, order = choose_and_order(logits, mixture, loads, plan.rows)
            return _by_tiles(x, mixture, choice, order, plan)
        case Library():
            choice, order = choose_and_order(logits, mixture, loads, _ANY_TILE)
            return by_library(x, mixture, choice, order)


def sizes_of(mixture: Mixture) -> Sizes:
    return Sizes(mixture.num_local, mixture.num_chosen, mixture.hidden, mixture.inner)


_ANY_TILE = 128


def _by_tiles(x: Tensor, mixture: Mixture, choice: Choice, order: Order, plan: Tiles) -> Tensor:
    k, rows = mixture.num_chosen, plan.rows
    gated = gated_products(x, mixture.gate_up, order, k, rows, plan.gated)
    products = down_products(gated, mixture.down, order, choice, rows, plan.down)
    return sum_pairs(products, choice, mixture.first, mixture.num_local)


def by_library(x: Tensor, mixture: Mixture, choice: Choice, order: Order) -> Tensor:
    """`compute_experts` by torch's grouped products, which are fast for thousands of rows.

    Only where this rank has all experts: rows of others are in no group.
    """
    pairs = order.pairs.long()
    rows = x.index_select(0, pairs // mixture.num_chosen)
    gate_up = torch._grouped_mm(rows, mixture.gate_up.values.transpose(1, 2), offs=order.ends)
    gated = gate_rows(gate_up, order, choice)
    products = torch._grouped_mm(gated, mixture.down.values.transpose(1, 2), offs=order.ends)
    places = torch.empty_like(order.pairs)
    places[pairs] = torch.arange(len(pairs), dtype=places.dtype, device=places.device)
    return sum_pairs(products, choice, 0, mixture.num_experts, places)
