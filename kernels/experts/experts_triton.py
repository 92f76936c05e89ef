"""A mixture of experts on a GPU: routing, then the products with the kernels of the plan.

Nothing waits for the device and no size depends on the routing, so CUDA graphs can capture it.
"""

from __future__ import annotations

from torch import Tensor

from ..gluon_kernels import gluon_kernels
from ..products.weights import Summands
from .experts import Fp8Groups, Int4Experts, LayerLoads, Mixture
from .few_tokens_triton import experts_of_few
from .grouped_triton import down_products, gated_products, sum_pairs
from .router_logits_triton import router_logits
from .routing_triton import Choice, choose_and_order
from .tiles import WIDE_ROWS, Few, Persistent, Plan, Sizes, choose_plan


def compute_experts(
    x: Tensor, mixture: Mixture, loads: LayerLoads | None, plan: Plan | None = None
) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of each token's experts on this rank, like x.

    A token's result depends on the plan, hence on the number of tokens, but not on other tokens.
    """
    products, choice = _products(x, mixture, loads, plan)
    if choice is None:
        return products
    return sum_pairs(products, choice, mixture.first, mixture.num_local)


def experts_summand(x: Tensor, mixture: Mixture, loads: LayerLoads | None) -> Tensor | Summands:
    """`compute_experts` for `add_rms_norm`, which sums pairs; this rank must have all experts."""
    products, choice = _products(x, mixture, loads, None)
    return products if choice is None else Summands(products, mixture.num_chosen)


def _products(
    x: Tensor, mixture: Mixture, loads: LayerLoads | None, plan: Plan | None
) -> tuple[Tensor, Choice | None]:
    """(The products of each pair, the choice); or (their sums by token, None)."""
    has_programs = gluon_kernels("experts.wide_tiles_gluon", x.device) is not None
    sizes = sizes_of(mixture)
    plan = plan or choose_plan(sizes, len(x), x.itemsize, has_programs=has_programs)
    if isinstance(plan, Few):
        logits = router_logits(x, mixture.router)
        choice, _ = choose_and_order(logits, mixture, loads, None)
        return experts_of_few(x, mixture, choice, plan), None
    kernels = None
    if isinstance(plan, Persistent):
        name = "wide_tiles_gluon" if plan.is_wide else "fp8_experts_gluon"
        kernels = gluon_kernels(f"experts.{name}", x.device)
        tiles = plan.tiles
    else:
        tiles = plan
    quantised = Fp8Groups.empty(len(x), mixture.hidden, x.device) if tiles.has_fp8_rows else None
    logits = router_logits(x, mixture.router, quantised)
    k, rows = mixture.num_chosen, tiles.rows
    has_own_tiles = kernels is not None and rows < WIDE_ROWS
    choice, order = choose_and_order(logits, mixture, loads, rows, has_own_tiles=has_own_tiles)
    gate_up, down = mixture.gate_up, mixture.down
    if kernels is None:
        gated = gated_products(quantised or x, gate_up, order, k, rows, tiles.gated)
        products = down_products(gated, down, order, choice, rows, tiles.down, x.dtype)
    else:
        gated = kernels.gated_products(quantised or x, gate_up, order, k, plan)
        products = kernels.down_products(gated, down, order, choice, plan, x.dtype)
    return products, choice


def sizes_of(mixture: Mixture) -> Sizes:
    weights = "int4"
    if not isinstance(mixture.gate_up, Int4Experts):
        weights = ("", "fp8", "fp8-block")[mixture.gate_up.scaling]
    num_local, num_ranks = mixture.num_local, mixture.num_experts // mixture.num_local
    return Sizes(num_local, mixture.num_chosen, mixture.hidden, mixture.inner, weights, num_ranks)
