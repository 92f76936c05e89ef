"""Mixtures of experts: routing, order and GEMMs against plain float32 or float64."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from effort import half

pytest.importorskip("triton")

from baton.kernels.experts.experts import (
    ExpertLoads,
    ExpertWeights,
    Fp8Groups,
    Int4Experts,
    LayerLoads,
    Mixture,
    StackedWeights,
    choose_experts,
)
from baton.kernels.experts.experts_triton import compute_experts, sizes_of
from baton.kernels.experts.grouped_triton import down_products, gated_products
from baton.kernels.experts.router_logits_triton import router_logits
from baton.kernels.experts.routing_triton import choose_and_order, most_tiles
from baton.kernels.experts.tiles import (
    Cut,
    Few,
    Persistent,
    Plan,
    Sizes,
    Tiles,
    as_json,
    choose_plan,
    from_json,
)
from baton.kernels.layers.ops import Ops
from baton.kernels.layers.ops_triton import TritonOps
from baton.kernels.products.weights import (
    BlockScaled,
    Summands,
    quantise_activations,
    quantise_blocks,
    quantise_rows,
    spread,
)

HAS_GPU = torch.cuda.is_available()
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SMALL = Cut(16, 32, 2, 4)
TILES = Tiles(16, SMALL, dataclasses.replace(SMALL, group=2))
TURNED = Tiles(
    16,
    dataclasses.replace(SMALL, is_turned=True, group=4),
    dataclasses.replace(SMALL, is_turned=True),
)
BY_TMA = dataclasses.replace(SMALL, has_descriptor=True)
DESCRIBED = Tiles(16, BY_TMA, dataclasses.replace(BY_TMA, is_turned=True, group=2))
PLANS: list[Plan] = [Few(1, 1) if HAS_GPU else Few(8, 4), Few(4, 2), TILES, TURNED, DESCRIBED]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_mixture(
    num_experts: int = 6,
    num_chosen: int = 2,
    hidden: int = 40,
    inner: int = 24,
    *,
    is_normed: bool = True,
) -> Mixture:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    return Mixture(
        randn(num_experts, hidden),
        ExpertWeights(randn(num_experts, 2 * inner, hidden) * 0.2),
        ExpertWeights(randn(num_experts, hidden, inner) * 0.2),
        num_chosen,
        is_normed,
    )


def exact(weights: StackedWeights, expert: int) -> torch.Tensor:
    """An expert's dequantised weights, in float64."""
    if isinstance(weights, Int4Experts):
        return weights.of(expert).dequantised(torch.float64)
    values = weights.values[expert].double()
    if weights.scale is None:
        return values
    scale = weights.scale[expert].double()
    return values * (scale[:, None] if scale.ndim == 1 else spread(scale, values.shape))


def expected_of(x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """The reference in float64, one expert after the other."""
    x = x.double()
    weights, chosen = choose_experts(x @ mixture.router.double().t(), mixture)
    out = torch.zeros_like(x)
    for expert in range(mixture.num_local):
        tokens, places = torch.where(chosen == mixture.first + expert)
        gate, up = F.linear(x[tokens], exact(mixture.gate_up, expert)).chunk(2, dim=1)
        product = F.linear(F.silu(gate) * up, exact(mixture.down, expert))
        out.index_add_(0, tokens, product * weights[tokens, places, None].double())
    return out


def tokens_for(plan: Plan, mixture: Mixture, num_tokens: int) -> torch.Tensor:
    """`num_tokens` tokens, or the most that the plan supports: the interpreter computes one at a
    time."""
    return torch.randn(
        min(num_tokens, 3 if isinstance(plan, Few) else 40), mixture.hidden, device=DEVICE
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_norm_sums_up_what_experts_gave(num_tokens: int) -> None:
    mixture, ops = make_mixture(5, 3), TritonOps()
    x, residual = torch.randn(2, num_tokens, 40, device=DEVICE)
    weight = torch.randn(40, device=DEVICE)
    summand = ops.experts_summand(x, mixture, None)
    assert isinstance(summand, Summands)
    results = []
    for each in (summand, ops.experts(x, mixture, None)):
        added = residual.clone()
        results.append((ops.add_rms_norm(each, added, weight, 1e-5), added))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("inner", [40, 96])  # 3 and 6 steps of 16, 2 of which are prefetched
def test_few_tokens_whose_down_is_read_in_many_steps(inner: int) -> None:
    mixture = make_mixture(6, 3, 40, inner)
    x = torch.randn(2, 40, device=DEVICE)
    assert_close(compute_experts(x, mixture, None, Few(8, 64)), expected_of(x, mixture))


NUMBERS = [(6, 2, 1), (6, 1, 5), (3, 3, 3), (5, 3, 18)]  # of experts, experts per token, tokens


@pytest.mark.parametrize(("numbers", "plan"), half(NUMBERS, PLANS, is_whole=HAS_GPU), ids=str)
def test_outputs(numbers: tuple[int, int, int], plan: Plan) -> None:
    num_experts, num_chosen, num_tokens = numbers
    mixture = make_mixture(num_experts, num_chosen, is_normed=num_tokens % 2 == 0)
    x = tokens_for(plan, mixture, num_tokens)
    assert_close(compute_experts(x, mixture, None, plan), expected_of(x, mixture))


@pytest.mark.parametrize(
    ("sizes", "plan"), half([(64, 16), (24, 20)], PLANS, is_whole=HAS_GPU), ids=str
)
def test_sizes_that_tiles_divide_and_do_not(sizes: tuple[int, int], plan: Plan) -> None:
    mixture = make_mixture(4, 2, *sizes)
    x = tokens_for(plan, mixture, 9)
    assert_close(compute_experts(x, mixture, None, plan), expected_of(x, mixture))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_tokens_with_one_expert(plan: Plan) -> None:
    """Results are right if one expert has all tokens, in several tiles, and the others none."""
    mixture = make_mixture(5, 1)
    mixture.router[3] = mixture.router[3].abs() * 100
    x = tokens_for(plan, mixture, 35).abs()
    choice, _ = choose_and_order(router_logits(x, mixture.router), mixture, None, None)
    chosen = choice.chosen
    assert set(chosen.flatten().tolist()) == {3}
    assert_close(compute_experts(x, mixture, None, plan), expected_of(x, mixture))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_parts_of_ranks_with_some_experts_add_up(plan: Plan) -> None:
    whole = make_mixture(6, 3)
    x = tokens_for(plan, whole, 7)
    total = torch.zeros_like(x)
    for first, end in ((0, 2), (2, 3), (3, 6)):
        part = dataclasses.replace(
            whole,
            gate_up=ExpertWeights(whole.gate_up.values[first:end]),
            down=ExpertWeights(whole.down.values[first:end]),
            first=first,
        )
        found = compute_experts(x, part, None, plan)
        assert_close(found, expected_of(x, part))
        total += found
    assert_close(total, expected_of(x, whole))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_row_has_the_same_bits_whatever_the_others_hold(plan: Plan) -> None:
    mixture = make_mixture()
    x = tokens_for(plan, mixture, 9)
    other = torch.randn_like(x)
    other[1] = x[1]
    found = compute_experts(x, mixture, None, plan)
    assert torch.equal(found, compute_experts(x, mixture, None, plan))
    assert torch.equal(found[1], compute_experts(other, mixture, None, plan)[1])


SIZES_IN_FP8 = [("row", 144, 72), ("row", 128, 128), ("block", 144, 128), ("block", 128, 256)]
BY = {"row": quantise_rows, "block": quantise_blocks}
WIDE = Cut(128, 64, 2, 4)
WIDE_TURNED = dataclasses.replace(WIDE, inputs=128, is_turned=True, group=2)
FP8_PLANS: list[Plan] = [
    Few(1, 2) if HAS_GPU else Few(64, 64, inputs=128),
    TILES,
    TURNED,
    Tiles(16, WIDE, WIDE, has_fp8_rows=True),
    Tiles(32, WIDE_TURNED, dataclasses.replace(WIDE, is_turned=True), has_fp8_rows=True),
    Tiles(
        16,
        dataclasses.replace(WIDE, has_descriptor=True),
        dataclasses.replace(WIDE_TURNED, has_descriptor=True),
        has_fp8_rows=True,
    ),
]
# The weights are exact; activations are rounded to three bits twice, each within 2^-4. The
# interpreter halves a number that is rounded up to a power of two.
FP8_NOISE = 0.125 if HAS_GPU else 0.15
# Hopper's tensor cores keep 14 bits of a sum of FP8 products, in each of the four steps of 128.
FP8_SUMS = 2**-11 if HAS_GPU else 1e-6


def quantised(weights: ExpertWeights, by: str) -> ExpertWeights:
    """Weights in FP8; rows, columns and experts differ in magnitude, so that a misplaced scale
    shows."""
    made = []
    for matrix in weights.values:
        rows, columns = (torch.exp(torch.randn(n, device=DEVICE)) for n in matrix.shape)
        sized = matrix * rows[:, None] * columns
        made.append(BY[by](sized / sized.norm(dim=1).max() * (1 + rows[0])))
    values, scales = zip(*made, strict=True)
    return ExpertWeights(torch.stack(values), torch.stack(scales))


def make_fp8_mixture(by: str, hidden: int = 272, inner: int = 128) -> Mixture:
    mixture = make_mixture(5, 2, hidden, inner)
    parts = {name: quantised(getattr(mixture, name), by) for name in ("gate_up", "down")}
    return dataclasses.replace(mixture, **parts)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# Without a GPU each plan runs at one size by rows and one by blocks, those with FP8 rows at sizes
# that cross tile borders; the others are `slow`.
SIZES_AND_PLANS = [
    pytest.param(size, plan, marks=pytest.mark.slow if is_slow and not HAS_GPU else ())
    for number, size in enumerate(SIZES_IN_FP8)
    for place, plan in enumerate(FP8_PLANS)
    for is_slow in [number % 2 == 1 if place >= 3 else (number + place) % 2 == 1]
]


@pytest.mark.parametrize(("size", "plan"), SIZES_AND_PLANS, ids=str)
def test_weights_in_fp8(size: tuple[str, int, int], plan: Plan) -> None:
    by, hidden, inner = size
    mixture = make_fp8_mixture(by, hidden, inner)
    x = torch.randn(1 if isinstance(plan, Few) else 19, hidden, device=DEVICE)
    found, expected = compute_experts(x, mixture, None, plan), expected_of(x, mixture)
    has_fp8_rows = isinstance(plan, Tiles) and plan.has_fp8_rows
    assert difference(found, expected) < (FP8_NOISE if has_fp8_rows else 1e-5)


def groups_of(x: torch.Tensor) -> Fp8Groups:
    """Rows quantised by torch."""
    like = BlockScaled(torch.empty(1, x.shape[1]), torch.empty(0))
    made = quantise_activations(x, like)
    return Fp8Groups(made.data, made.scale.contiguous())


@pytest.mark.parametrize(("by", "plan"), half(BY, FP8_PLANS[3:], is_whole=HAS_GPU), ids=str)
def test_products_of_rows_in_fp8_are_those_of_what_they_mean(by: str, plan: Tiles) -> None:
    mixture = make_fp8_mixture(by, 272, 256)
    x = torch.randn(19, 272, device=DEVICE) * torch.exp(torch.randn(19, 1, device=DEVICE))
    choice, order = choose_and_order(router_logits(x, mixture.router), mixture, None, plan.rows)
    pairs = order.pairs.long()
    experts = choice.chosen.flatten()[pairs].tolist()
    groups, rows = groups_of(x), groups_of(torch.randn(38, 256, device=DEVICE))
    gated = gated_products(groups, mixture.gate_up, order, 2, plan.rows, plan.gated)
    assert isinstance(gated, Fp8Groups)
    down = down_products(rows, mixture.down, order, choice, plan.rows, plan.down, x.dtype)
    for row, (pair, expert) in enumerate(zip(pairs.tolist(), experts, strict=True)):
        terms = meant(rows)[row] * exact(mixture.down, expert)
        share = choice.weights.flatten()[pair].double()
        error = (down[pair].double() - terms.sum(1) * share).abs()
        assert bool((error <= FP8_SUMS * terms.abs().sum(1) * share).all())
        gate, up = (meant(groups)[pair // 2] @ exact(mixture.gate_up, expert).t()).chunk(2)
        assert difference(meant(gated)[row], F.silu(gate) * up) < FP8_NOISE
        largest = (F.silu(gate) * up).view(2, 128).abs().amax(1) / 448
        torch.testing.assert_close(gated.scale[row].double(), largest, atol=1e-6, rtol=2e-3)


PERSISTENT = [
    (Persistent(16, 6, 11), 2048, 768, torch.bfloat16),
    (Persistent(32, 4, 7), 2048, 768, torch.bfloat16),
    (Persistent(16, 2, 3), 384, 256, torch.float16),
    (Persistent(128, 4, 4), 2048, 768, torch.bfloat16),
    (Persistent(128, 2, 3), 512, 128, torch.float16),
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("by", [*BY, "floats"])
@pytest.mark.parametrize(("plan", "hidden", "inner", "dtype"), PERSISTENT, ids=str)
def test_persistent_programs_give_the_bits_of_tiles(
    by: str, plan: Persistent, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    whole = make_mixture(40, 3, hidden, inner)
    parts = {name: getattr(whole, name) for name in ("gate_up", "down")}
    if by == "floats":
        if not plan.is_wide:
            pytest.skip("is for weights in FP8")
        plan = dataclasses.replace(plan, has_fp8_rows=False)
        parts = {name: ExpertWeights(part.values.to(dtype)) for name, part in parts.items()}
    else:
        parts = {name: quantised(part, by) for name, part in parts.items()}
    mixture = dataclasses.replace(whole, router=whole.router.to(dtype), **parts)
    half_of_it = {
        name: ExpertWeights(part.values[10:30], None if part.scale is None else part.scale[10:30])
        for name, part in parts.items()
    }
    local = dataclasses.replace(mixture, first=10, **half_of_it)
    # Experts without rows, with some, and (of other programs) with several tiles.
    many = 3000 if plan.is_wide else 300
    for some, num_tokens in itertools.product((mixture, local), (1, 9, 64, many)):
        x = torch.randn(num_tokens, hidden, device=DEVICE, dtype=dtype)
        expected = compute_experts(x, some, None, plan.tiles)
        for _ in range(20):  # programs wait for each other's stages: races are rare
            assert torch.equal(compute_experts(x, some, None, plan), expected)


@pytest.mark.parametrize(("first", "num_local"), [(0, 5), (1, 3)])
@pytest.mark.parametrize("num_programs", [2, 7, 50])  # at 50 some have no block of an own tile
def test_persistent_programs_have_each_block_with_rows_once(
    num_programs: int, first: int, num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block with rows is computed once; besides, a program may compute its first block without
    rows, of an existing expert."""
    from baton.kernels.experts import fp8_experts_gluon as experts

    whole, per_tile = make_mixture(5, 2), 2
    values = whole.gate_up.values[first : first + num_local]
    mixture = dataclasses.replace(whole, gate_up=ExpertWeights(values), first=first)
    logits = torch.randn(1, 40, 5, device=DEVICE)
    logits[:, :, 1] += 9  # several tiles
    logits[:, :, 2] = -9  # no row
    _, order = choose_and_order(logits, mixture, None, 16, has_own_tiles=True)
    num_tiles, tiles = order.tiles.shape[1], order.tiles.flatten().tolist()
    found = []
    language = SimpleNamespace(
        num_programs=lambda _: num_programs,
        where=lambda condition, one, other: one if condition else other,
        minimum=min,
        load=tiles.__getitem__,
    )
    monkeypatch.setattr(experts, "gl", language)
    sizes = (num_local, num_tiles, per_tile)
    for program in range(num_programs):
        language.program_id = {0: program}.__getitem__
        start, count, whole_count = experts._share.fn(*sizes)
        done = 0
        while done < whole_count:
            at, expert, row, end, length, needed = experts._run.fn(done, start, count, 0, *sizes)
            assert not needed or expert < num_local
            assert row < end or needed == (done == 0 and count > 0)
            found += [(row, block) for block in range(at, at + needed) if row < end]
            done += length
        assert done == whole_count
    wanted = [row for row, end in zip(*order.tiles[1:].tolist(), strict=True) if row < end]
    assert sorted(found) == sorted(itertools.product(wanted, range(per_tile)))


INT4 = Cut(64, 128, 3, 4, is_turned=True)
INT4_WIDE = dataclasses.replace(INT4, outputs=512, group=2)
INT4_PLANS = [Tiles(16, INT4, dataclasses.replace(INT4, outputs=128, group=2))]
INT4_PLANS += [Tiles(16, INT4_WIDE, INT4_WIDE), Tiles(32, INT4, INT4)]
# GPUs multiply float32 as TF32 here; models in float32 have no packed weights.
INT4_LIMIT = 2e-3 if HAS_GPU else 2e-5


def make_int4_mixture(
    num_experts: int = 5,
    num_chosen: int = 2,
    hidden: int = 128,
    inner: int = 128,
    group_size: int = 64,
) -> Mixture:
    """Random int4 values and zeros, and scales of very different sizes that fit two bytes."""
    mixture, parts = make_mixture(num_experts, num_chosen, hidden, inner), []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        made = Int4Experts.empty(num_experts, outputs, inputs, group_size, DEVICE)
        groups = (outputs, inputs // group_size)
        for expert in range(num_experts):
            numbers = torch.randint(0, 16, (outputs, inputs), device=DEVICE, dtype=torch.uint8)
            zero = torch.randint(0, 17, groups, device=DEVICE, dtype=torch.uint8)
            scale = torch.exp(torch.randn(groups, device=DEVICE)).bfloat16() / 128
            made.of(expert).fill(numbers, scale, zero)
        parts.append(made)
    return dataclasses.replace(mixture, gate_up=parts[0], down=parts[1])


def part_of(
    weights: StackedWeights,
    experts: slice = slice(None),
    outputs: slice = slice(None),
    chunks: slice = slice(None),
) -> Int4Experts:
    assert isinstance(weights, Int4Experts)
    each = 128 // weights.group_size
    start, stop, _ = chunks.indices(weights.num_inputs // 128)
    groups = weights.groups[experts, start * each : stop * each, outputs]
    return Int4Experts(weights.data[experts, chunks, outputs].contiguous(), groups.contiguous())


INT4_SIZES = [(384, 128, 32), (128, 256, 64), (256, 128, 128)]  # hidden, inner, group size


@pytest.mark.parametrize(("sizes", "plan"), half(INT4_SIZES, INT4_PLANS, is_whole=HAS_GPU), ids=str)
def test_weights_in_int4(sizes: tuple[int, int, int], plan: Tiles) -> None:
    """Results are right for outputs that are and are not multiples of tiles, and rows that fill
    tiles or not."""
    hidden, inner, group_size = sizes
    mixture = make_int4_mixture(4, 2, hidden, inner, group_size)
    x = torch.randn(19, hidden, device=DEVICE)
    assert_close(compute_experts(x, mixture, None, plan), expected_of(x, mixture), INT4_LIMIT)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_usual_plan_of_few_tokens_in_int4(num_tokens: int) -> None:
    mixture = make_int4_mixture(6, 3)
    x = torch.randn(num_tokens, 128, device=DEVICE)
    assert sizes_of(mixture).weights == "int4"
    assert_close(compute_experts(x, mixture, None), expected_of(x, mixture), INT4_LIMIT)
    assert_close(Ops().experts(x.cpu(), on_cpu(mixture), None), expected_of(x, mixture).cpu())


def on_cpu(mixture: Mixture) -> Mixture:
    parts = {}
    for name in ("gate_up", "down"):
        weights = part_of(getattr(mixture, name))
        parts[name] = Int4Experts(weights.data.cpu(), weights.groups.cpu())
    return dataclasses.replace(mixture, router=mixture.router.cpu(), **parts)


def test_all_tokens_with_one_expert_in_int4() -> None:
    mixture = make_int4_mixture(4, 1)
    mixture.router[3] = mixture.router[3].abs() * 100
    x = torch.randn(35, 128, device=DEVICE).abs()
    assert_close(
        compute_experts(x, mixture, None, INT4_PLANS[0]), expected_of(x, mixture), INT4_LIMIT
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_parts_of_ranks_in_int4_add_up(is_whole: bool) -> None:
    """Ranks' results sum to the whole if each has some whole experts, or a part of every expert's
    inner dimension."""
    whole = make_int4_mixture(4, 2, 128, 256, 32)
    x = torch.randn(5, 128, device=DEVICE)
    total = torch.zeros_like(x)
    gate_up, down = whole.gate_up, whole.down
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        if is_whole:
            made = {"gate_up": part_of(gate_up, mine), "down": part_of(down, mine)}
            part = dataclasses.replace(whole, first=2 * rank, **made)
        else:
            halves = [
                part_of(gate_up, outputs=slice(first, first + 128))
                for first in (128 * rank, 256 + 128 * rank)
            ]
            both = Int4Experts(
                torch.cat([half.data for half in halves], dim=2),
                torch.cat([half.groups for half in halves], dim=2),
            )
            mine = slice(rank, rank + 1)
            part = dataclasses.replace(whole, gate_up=both, down=part_of(down, chunks=mine))
        total += compute_experts(x, part, None, INT4_PLANS[0])
    assert_close(total, expected_of(x, whole), INT4_LIMIT)


@pytest.mark.parametrize("plan", INT4_PLANS[:1], ids=str)
def test_a_row_in_int4_has_the_same_bits_whatever_the_others_hold(plan: Tiles) -> None:
    mixture = make_int4_mixture()
    x = torch.randn(9, 128, device=DEVICE)
    other = torch.randn_like(x)
    other[1] = x[1]
    found = compute_experts(x, mixture, None, plan)
    assert torch.equal(found, compute_experts(x, mixture, None, plan))
    assert torch.equal(found[1], compute_experts(other, mixture, None, plan)[1])


def meant(rows: Fp8Groups) -> torch.Tensor:
    scale = rows.scale.double().repeat_interleave(128, dim=1)
    return rows.data.double() * scale[:, : rows.data.shape[1]]


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("hidden", [128, 700])
def test_the_router_quantises_what_it_reads(num_tokens: int, hidden: int) -> None:
    mixture = make_mixture(20, 2, hidden)
    x = torch.randn(num_tokens, hidden, device=DEVICE)
    x[1] = 0
    found, expected = Fp8Groups.empty(num_tokens, hidden, x.device), groups_of(x)
    logits = router_logits(x, mixture.router, found).sum(0)
    torch.testing.assert_close(logits, x @ mixture.router.t(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)
    assert difference(meant(found), x.double()) < FP8_NOISE
    assert not meant(found)[1].any()


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 70])
def test_choices(num_tokens: int) -> None:
    for num_experts, num_chosen, hidden in ((7, 3, 50), (8, 8, 300)):
        mixture = make_mixture(num_experts, num_chosen, hidden, is_normed=num_chosen == 3)
        x = torch.randn(num_tokens, hidden, device=DEVICE)
        parts = router_logits(x, mixture.router)
        logits = parts.sum(0)
        torch.testing.assert_close(logits, x @ mixture.router.t(), atol=1e-4, rtol=1e-4)
        found, _ = choose_and_order(parts, mixture, None, None)
        weights, chosen = choose_experts(logits, mixture)
        assert torch.equal(found.chosen.long(), chosen)
        torch.testing.assert_close(found.weights, weights)


def test_whatever_the_logits_are_each_choice_is_an_expert_of_its_own() -> None:
    mixture = make_mixture(6, 4)
    logits = torch.full((3, 6), float("nan"), device=DEVICE)
    logits[1], logits[2] = float("-inf"), 0.0
    choice, _ = choose_and_order(logits[None], mixture, None, None)
    chosen = choice.chosen
    assert all(len({n for n in row if 0 <= n < 6}) == 4 for row in chosen.tolist())


@pytest.mark.parametrize("num_tokens", [1, 5, 33, 200])
@pytest.mark.parametrize("tile_rows", [4, 16])
@pytest.mark.parametrize("has_own_tiles", [False, True])
def test_order(num_tokens: int, tile_rows: int, has_own_tiles: bool) -> None:
    """Each pair occurs once, ordered by expert and token, in tiles that cover all pairs."""
    mixture = make_mixture(6, 2)
    logits = torch.randn(num_tokens, 6, device=DEVICE)
    logits[:, 2] = -9.0  # no token
    has_own = {"has_own_tiles": has_own_tiles}
    choice, order = choose_and_order(logits[None], mixture, None, tile_rows, **has_own)
    flat = choice.chosen.flatten().tolist()
    wanted = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert order.pairs.tolist() == wanted
    sizes = [flat.count(expert) for expert in range(6)]
    assert order.tiles.shape[1] == most_tiles(len(flat), 6, tile_rows, **has_own)
    rows = []
    tiles = order.tiles.t().tolist()
    if has_own_tiles:
        assert [expert for expert, _, _ in tiles[:6]] == list(range(6))
        assert all(first == end for expert, first, end in tiles if expert in (2, 8))
        # Tiles without an expert have no rows either.
        tiles = sorted(tile for tile in tiles if tile[1] < tile[2])
    for expert, first, end in tiles:
        if expert < 6:
            assert end == sum(sizes[: expert + 1]) and first < end
            rows += range(first, min(first + tile_rows, end))
            assert all(flat[wanted[row]] == expert for row in (first, end - 1))
    assert rows == list(range(len(flat)))


def test_loads_leave_padding_out() -> None:
    mixture = make_mixture(6, 2)
    logits = torch.randn(40, 6, device=DEVICE)
    for slots in (None, torch.arange(40, device=DEVICE)):
        whole = ExpertLoads(2, 6, 10, DEVICE)
        whole.slots, loads = slots, LayerLoads(whole, 1)
        choice, _ = choose_and_order(logits[None], mixture, loads, 16)
        choose_and_order(logits[None], mixture, loads, None)
        chosen = choice.chosen if slots is None else choice.chosen[10:]
        once = torch.bincount(chosen.flatten().long(), minlength=6)
        assert torch.equal(loads.tokens, 2 * once)
        loads.add(choice.chosen.long())
        assert torch.equal(loads.tokens, 3 * once)
        assert not whole.tokens[0].any()


def test_plans() -> None:
    sizes = sizes_of(make_mixture(128, 8, 32, 16))
    kinds = [type(choose_plan(sizes, n, 2)).__name__ for n in (1, 8, 64, 100_000)]
    assert kinds[0] == "Few" and set(kinds[1:]) == {"Tiles"}
    for plan in [*PLANS, *FP8_PLANS, *(plan for plan, *_ in PERSISTENT)]:
        assert from_json(as_json(plan)) == plan
    packed = Sizes(128, 8, 256, 128, "int4")
    plans = [choose_plan(packed, n, 2) for n in (1, 20, 300, 100_000)]
    assert all(isinstance(plan, Tiles) for plan in plans)
    for by in BY:
        sizes = dataclasses.replace(sizes_of(make_fp8_mixture(by)), num_experts=128, num_chosen=8)
        plans = [choose_plan(sizes, n, 2) for n in (1, 20, 100_000)]
        assert isinstance(plans[0], Few) and all(isinstance(plan, Tiles) for plan in plans[1:])
        assert plans[2].has_fp8_rows


MEASURED = Sizes(128, 8, 2048, 768)


@pytest.mark.parametrize("weights", ["", "fp8", "fp8-block"])
@pytest.mark.parametrize("sizes", [MEASURED, Sizes(64, 4, 512, 128)], ids=str)
def test_few_rows_an_expert_have_wide_tiles_by_persistent_programs_alone(
    sizes: Sizes, weights: str
) -> None:
    sizes = dataclasses.replace(sizes, weights=weights)
    for num_tokens, has_programs in itertools.product((200, 300, 900, 9999), (True, False)):
        plan = choose_plan(sizes, num_tokens, 2, has_programs=has_programs)
        is_wide = num_tokens > (256 if has_programs else 1024)
        assert not isinstance(plan, Few) and (plan.rows == 128) == is_wide
        assert isinstance(plan, Persistent) or not is_wide


@pytest.mark.parametrize("weights", ["", "fp8", "int4"])
def test_a_part_of_the_experts_has_the_plans_of_all(weights: str) -> None:
    """The plan depends on the rows per expert, wherever the other experts are."""
    router = torch.zeros(64, 512)
    whole = dataclasses.replace(make_mixture(64, 4, 512, 128), router=router)
    part = dataclasses.replace(make_mixture(8, 4, 512, 128), router=router, first=16)
    sizes = [dataclasses.replace(sizes_of(each), weights=weights) for each in (whole, part)]
    for num_tokens in (1, 4, 5, 30, 200, 300, 9999):
        of_whole, of_part = (choose_plan(each, num_tokens, 2) for each in sizes)
        assert of_whole == of_part


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_products_compile_without_a_gpu() -> None:
    """No plan of the table spills more than a few registers or exceeds the shared memory."""
    program = Path(__file__).with_name("compile_experts.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
