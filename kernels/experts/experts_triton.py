"""A mixture of experts on a GPU: routing, then the products as their plan says.

Nothing waits for the device and no size depends on what was chosen: a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import LayerLoads, Mixture
from .few_tokens_triton import experts_of_few
from .grouped_triton import down_products, gated_products, sum_pairs
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
            products = _by_tiles(x, mixture, choice, order, plan)
        case Library():
            choice, order = choose_and_order(logits, mixture, loads, _ANY_TILE)
            products = by_library(x, mixture, choice, order)
    return sum_pairs(products, choice, mixture.first, mixture.num_local)


def sizes_of(mixture: Mixture) -> Sizes:
    return Sizes(mixture.num_local, mixture.num_chosen, mixture.hidden, mixture.inner)


_ANY_TILE = 128


def _by_tiles(x: Tensor, mixture: Mixture, choice: Choice, order: Order, plan: Tiles) -> Tensor:
    k, rows = mixture.num_chosen, plan.rows
    gated = gated_products(x, mixture.gate_up, order, k, rows, plan.gated)
    return down_products(gated, mixture.down, order, choice, rows, plan.down)


def by_library(x: Tensor, mixture: Mixture, choice: Choice, order: Order) -> Tensor:
    """[pairs, hidden], weighted: torch's grouped products, which are fast for thousands of rows.

    Only where this rank has all experts: rows of others are in no group.
    """
    pairs = order.pairs.long()
    rows = x.index_select(0, pairs // mixture.num_chosen)
    gate_up = torch._grouped_mm(rows, mixture.gate_up.values.transpose(1, 2), offs=order.ends)
    gate, up = gate_up.chunk(2, dim=1)
    gated = F.silu(gate).mul_(up)
    products = torch._grouped_mm(gated, mixture.down.values.transpose(1, 2), offs=order.ends)
    products *= choice.weights.flatten().index_select(0, pairs)[:, None].to(x.dtype)
    return torch.empty_like(products).index_copy_(0, pairs, products)
