"""Mixtures of experts in bf16 on a GPU: every plan against float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from baton.kernels.experts.experts import (
    ExpertLoads,
    ExpertWeights,
    LayerLoads,
    Mixture,
    choose_experts,
)
from baton.kernels.experts.experts_triton import compute_experts, sizes_of
from baton.kernels.experts.routing_triton import router_logits
from baton.kernels.experts.tiles import Cut, Few, Plan, Sizes, Tiles, choose_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TURNED = Tiles(16, Cut(64, 128, 3, 4, is_turned=True), Cut(128, 64, 4, 4, group=4, is_turned=True))
SIZES = [(128, 8, 2048, 768), (8, 2, 1024, 1792), (60, 4, 512, 352)]
CHOSEN = [choose_plan(Sizes(*sizes), 2**n, 2) for sizes in SIZES for n in range(15)]
PLANS: list[Plan] = list(dict.fromkeys([*CHOSEN, TURNED, Few(4, 2)]))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_mixture(num_experts: int, num_chosen: int, hidden: int, inner: int) -> Mixture:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up = torch.empty(num_experts, 2 * inner, hidden, **options).normal_(0, hidden**-0.5)
    down = torch.empty(num_experts, hidden, inner, **options).normal_(0, inner**-0.5)
    router = torch.randn(num_experts, hidden, **options)
    return Mixture(router, ExpertWeights(gate_up), ExpertWeights(down), num_chosen, True)


def tokens_of(mixture: Mixture, num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, mixture.hidden, device="cuda", dtype=torch.bfloat16)


def expected_of(x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """One expert after the other, in float32."""
    logits = router_logits(x, mixture.router)
    exact = x.double() @ mixture.router.double().t()
    torch.testing.assert_close(logits.double(), exact, atol=1e-2, rtol=1e-3)
    weights, chosen = choose_experts(logits, mixture)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(mixture.num_experts):
        tokens, places = torch.where(chosen == expert)
        gate, up = F.linear(x[tokens].float(), mixture.gate_up.of(expert).float()).chunk(2, dim=1)
        product = F.linear(F.silu(gate) * up, mixture.down.of(expert).float())
        out.index_add_(0, tokens, product * weights[tokens, places, None])
    return out


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 100, 700, 3000])
def test_every_plan(sizes: tuple[int, int, int, int], num_tokens: int) -> None:
    mixture = make_mixture(*sizes)
    x = tokens_of(mixture, num_tokens)
    expected = expected_of(x, mixture)
    for plan in PLANS:
        if isinstance(plan, Few) and num_tokens > 33:
            continue
        found = compute_experts(x, mixture, None, plan)
        assert error_of(found, expected) < 1e-2, plan
        assert torch.equal(found, compute_experts(x, mixture, None, plan)), plan


@pytest.mark.parametrize("num_tokens", [5, 200, 5000])
def test_all_tokens_with_the_same_experts(num_tokens: int) -> None:
    mixture = make_mixture(*SIZES[0])
    x = tokens_of(mixture, 1).expand(num_tokens, -1).contiguous()
    plan = choose_plan(sizes_of(mixture), num_tokens, 2)
    found = compute_experts(x, mixture, None, plan)
    assert error_of(found[:1], expected_of(x[:1], mixture)) < 1e-2
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64, 300])
def test_a_graph_follows_the_routing_of_each_replay(num_tokens: int) -> None:
    """And counts it, without what lies in the padding block."""
    mixture = make_mixture(*SIZES[0])
    whole = ExpertLoads(1, 128, 32, torch.device("cuda"))
    whole.slots = torch.arange(num_tokens, device="cuda") + 31
    loads = LayerLoads(whole, 0)
    x = tokens_of(mixture, num_tokens)
    compute_experts(x, mixture, loads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute_experts(x, mixture, loads)
    whole.tokens.zero_()
    for _ in range(3):
        x.copy_(tokens_of(mixture, num_tokens))
        graph.replay()
        assert torch.equal(out, compute_experts(x, mixture, None))
        assert error_of(out, expected_of(x, mixture)) < 1e-2
    assert int(whole.tokens.sum()) == 3 * 8 * (num_tokens - 1)


@pytest.mark.parametrize("num_tokens", [1, 40, 600])
def test_parts_of_ranks_add_up(num_tokens: int) -> None:
    """Some experts whole, and some of each one's inner dimension."""
    mixture = make_mixture(*SIZES[0])
    x = tokens_of(mixture, num_tokens)
    expected = expected_of(x, mixture)
    by_expert, by_inner = (torch.zeros_like(expected) for _ in range(2))
    gate_up, down = mixture.gate_up.values, mixture.down.values
    gate, up = gate_up.chunk(2, dim=1)
    for rank in range(4):
        mine = slice(32 * rank, 32 * rank + 32)
        parts = (ExpertWeights(gate_up[mine]), ExpertWeights(down[mine]))
        part = dataclasses.replace(mixture, gate_up=parts[0], down=parts[1], first=32 * rank)
        by_expert += compute_experts(x, part, None).float()
        mine = slice(192 * rank, 192 * rank + 192)
        parts = (
            ExpertWeights(torch.cat((gate[:, mine], up[:, mine]), dim=1)),
            ExpertWeights(down[:, :, mine].contiguous()),
        )
        part = dataclasses.replace(mixture, gate_up=parts[0], down=parts[1])
        by_inner += compute_experts(x, part, None).float()
    assert error_of(by_expert, expected) < 1e-2
    assert error_of(by_inner, expected) < 1e-2
