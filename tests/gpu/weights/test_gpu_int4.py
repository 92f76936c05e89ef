"""Models with weights in int4 on a GPU, and their GEMMs at the shapes of Llama-3.1-8B.

The oracle of models is transformers in float32 with explicitly dequantised weights; that of GEMMs
is an explicit dequantisation in float64.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import mean

import pytest
import torch
from checkpoints import write_checkpoint
from int4_checkpoints import FORMATS, write_int4_checkpoint
from near_ties import engine_of, gaps

from baton.kernels.experts.experts import Int4Experts, Mixture, choose_experts
from baton.kernels.experts.experts_triton import compute_experts, sizes_of
from baton.kernels.experts.router_logits_triton import router_logits
from baton.kernels.experts.tiles import Cut, Tiles, choose_plan
from baton.kernels.products.int4_product import (
    Dequantised,
    Way,
    choose,
    multiply_by,
    usual_tiling,
)
from baton.kernels.products.int4_triton import Int4Row, Int4Stages, Int4Tiling, dequantised
from baton.kernels.products.int4_weights import Int4Weight
from baton.kernels.row_room import empty_rows, room_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 320}
NEAR_TIE, NEAR_TIE_IN_FLOATS = 0.02, 0.01  # relative to the spread of a position's logits
NEAR_TIE_OF_EXPERTS = 0.1  # rounding decides between experts of nearly equal scores
SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
}


STREAMED = [
    Int4Stages(64, 1, 1, 6, 4),
    Int4Stages(64, 4, 2, 4, 4),
    Int4Stages(64, 8, 2, 4, 3),
    Int4Stages(64, 2, 4, 2, 1),
    Int4Stages(128, 2, 2, 3, 2, 8),
    Int4Stages(256, 4, 1, 4, 3, 8),
]
OF_A_ROW = [
    Int4Row(64, 2, 4, 3, 2, 4, 2),
    Int4Row(64, 2, 1, 8, 3, 4, 3),
    Int4Row(64, 4, 2, 6, 4, 4, 2),
    Int4Row(128, 2, 2, 4, 3, 4, 2),
    Int4Row(128, 4, 4, 3, 2, 8, 1),
]


def rows_of(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows, padded to the kernels' row count with NaN."""
    x = empty_rows((rows, inputs), torch.empty(0, device="cuda", dtype=dtype))
    torch.as_strided(x, (room_of(rows), inputs), x.stride()).fill_(torch.nan)
    return x.normal_()


def weight_of(outputs: int, inputs: int, group_size: int = 128) -> Int4Weight:
    weight = Int4Weight.empty(outputs, inputs, group_size, torch.device("cuda"))
    groups = (outputs, inputs // group_size)
    numbers = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
    zero = torch.randint(0, 17, groups, device="cuda", dtype=torch.uint8)
    weight.fill(numbers, torch.rand(groups, device="cuda").bfloat16() + 0.1, zero)
    return weight


def products(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: the product, and SiLU(gate) * up of its halves."""
    product = x.double() @ weight.dequantised(torch.float64).t()
    if bias is not None:
        product += bias.double()
    gate, up = product.chunk(2, dim=-1)
    return product, torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 128, 200, 512])
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_an_8b_model(name: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outputs, inputs = SHAPES[name]
    weight = weight_of(outputs, inputs)
    x = rows_of(rows, inputs, dtype)
    floats = weight.dequantised(torch.float64)
    expected = x.double() @ floats.t()
    ways: set[Way] = {choose(x, weight), usual_tiling(rows, outputs, inputs), Dequantised()}
    if rows <= 64:
        ways |= {Int4Tiling(64, 16, 6), Int4Tiling(256, 4, 3, 8), Int4Tiling(128, 2, 4, 8)}
        ways |= set(STREAMED)
    if rows == 1:
        ways |= set(OF_A_ROW)
    for way in ways:
        for _ in range(3):  # partial sums must leave no state behind
            found = multiply_by(way, x, weight, None).double()
            difference = (found - expected).norm() / expected.norm()
            assert difference < 4e-3, f"{way}: {difference:.1e}"
    assert torch.equal(dequantised(weight, dtype), floats.to(dtype))
    assert not weight.turns.any()


@pytest.mark.parametrize("count", [3, 4])
def test_stages_are_kept_until_they_were_read(count: int) -> None:
    """With few stages, in programs that fill the multiprocessors, no stage is refilled before it
    was read."""
    torch.manual_seed(0)
    weight, x = weight_of(4096, 14_336), rows_of(17, 14_336, torch.bfloat16)
    way = Int4Stages(64, 8, 1, count, 2)
    expected = multiply_by(Int4Stages(64, 8, 1, 6, 4), x, weight, None)
    for _ in range(200):
        assert torch.equal(multiply_by(way, x, weight, None), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 31, 33, 64])
@pytest.mark.parametrize("way", STREAMED, ids=str)
def test_streamed_products(way: Int4Stages, rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Products are right, gated and not, with outputs that do not fill a tile, and chunks that do
    not fill a stage."""
    torch.manual_seed(0)
    outputs, inputs = 1000, 128 * 9
    weight, x = weight_of(outputs, inputs), rows_of(rows, inputs, dtype).div_(30)
    bias = torch.randn(outputs, device="cuda", dtype=dtype) if has_bias else None
    expected, gated = products(x, weight, bias)
    for _ in range(3):
        for is_gated, of in ((False, expected), (True, gated)):
            found = multiply_by(way, x, weight, bias, is_gated=is_gated)
            assert found.shape == of.shape
            difference = (found.double() - of).norm() / of.norm()
            assert difference < (1e-2 if is_gated else 4e-3), f"gated {is_gated}: {difference:.1e}"
    assert not weight.turns.any()
    few = rows_of(max(1, rows - 1), inputs, dtype).copy_(x[: max(1, rows - 1)])
    if room_of(len(few)) == room_of(rows):  # a row does not depend on others
        whole = multiply_by(way, x, weight, bias)
        assert torch.equal(multiply_by(way, few, weight, bias), whole[: len(few)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("way", OF_A_ROW, ids=str)
def test_products_of_a_row(way: Int4Row, has_bias: bool, dtype: torch.dtype) -> None:
    """Products are right, gated and not, with outputs that do not fill a tile, shares that do not
    fill stages, and inputs of very different sizes: splitting the vector into parts loses less than
    rounding does."""
    torch.manual_seed(0)
    outputs = 1000
    large = 9 if dtype == torch.bfloat16 else 2  # sums stay below float16's maximum
    for num_chunks, exponent in ((2, 0), (10, large), (28, -7), (32, -12)):
        inputs = 128 * num_chunks
        weight, x = weight_of(outputs, inputs), rows_of(1, inputs, dtype).mul_(2.0**exponent)
        x.mul_(torch.exp2(torch.randint(-6, 2, x.shape, device="cuda")).to(dtype))
        bias = torch.randn(outputs, device="cuda", dtype=dtype) if has_bias else None
        expected, gated = products(x, weight, bias)
        first = {}
        for _ in range(50):  # programs do not wait for each other: results must repeat
            for is_gated, of in ((False, expected), (True, gated)):
                found = multiply_by(way, x, weight, bias, is_gated=is_gated)
                again = first.setdefault(is_gated, found)
                assert torch.equal(again.view(torch.int16), found.view(torch.int16))
                if of.abs().max() > torch.finfo(dtype).max or (is_gated and exponent < -7):
                    continue  # overflow, or products so small that float16 has few bits
                difference = (found.double() - of).norm() / of.norm()
                assert difference < (1e-2 if is_gated else 4e-3), f"{num_chunks}: {difference:.1e}"


@pytest.mark.parametrize("way", OF_A_ROW, ids=str)
def test_a_row_of_one_sign(way: Int4Row) -> None:
    """Inputs of one sign stay precise, although the weights' zero cancels most of each group's sum,
    of which 14 bits are kept."""
    torch.manual_seed(0)
    weight, x = weight_of(1024, 4096), rows_of(1, 4096, torch.bfloat16).abs_()
    expected = x.double() @ weight.dequantised(torch.float64).t()
    found = multiply_by(way, x, weight, None).double()
    assert (found - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_row_that_is_no_number_is_seen(broken: float) -> None:
    weight, x = weight_of(256, 512), rows_of(1, 512, torch.bfloat16)
    x[0, 300] = broken
    for way in OF_A_ROW:
        assert not multiply_by(way, x, weight, None).isfinite().any()


@pytest.mark.parametrize(
    "way", [Int4Tiling(64, 8, 6), Int4Tiling(128, 4, 4, 8), *STREAMED, Dequantised()], ids=str
)
def test_products_replay_in_a_graph(way: Way) -> None:
    """GEMMs in sequence, with weights and without workspaces of their own, give the same bits."""
    torch.manual_seed(0)
    weights = [weight_of(4096, 4096) for _ in range(4)]
    x = rows_of(16, 4096, torch.bfloat16).div_(300)
    multiply_by(way, x, weights[0], None)
    torch.cuda.synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        outputs = [multiply_by(way, x, weight, None) for weight in weights]
    graph.replay()
    before = [one.clone() for one in outputs]
    for _ in range(50):
        graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(before, outputs, strict=True))
    for found, weight in zip(outputs, weights, strict=True):
        expected = x.double() @ weight.dequantised(torch.float64).t()
        assert (found.double() - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_are_those_of_the_dequantised_model(
    tmp_path: Path, name: str, dtype: str
) -> None:
    theirs = write_int4_checkpoint(tmp_path, name, seed=4, **SIZES)
    engine = engine_of(tmp_path, dtype=dtype)
    assert isinstance(engine.runner.model.layers[0].attention.qkv.weight, Int4Weight)
    found = gaps(engine, theirs)
    same = sum(gap == 0 for gap in found) / len(found)
    print(f"{name}: {same:.0%} of tokens equal, gaps of {mean(found):.4f}, most {max(found):.3f}")
    assert mean(found) < NEAR_TIE
    assert same > 0.9


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed, zeros"])
def test_an_engine_in_float32_dequantises(tmp_path: Path, name: str) -> None:
    theirs = write_int4_checkpoint(tmp_path, name, seed=4, **SIZES)
    engine = engine_of(tmp_path, dtype="float32")
    assert isinstance(engine.runner.model.layers[0].attention.qkv.weight, torch.Tensor)
    assert max(gaps(engine, theirs)) < NEAR_TIE_IN_FLOATS


def test_quantised_at_load_as_on_a_cpu(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=4, **SIZES)
    weights = []
    for device in ("cuda", "cpu"):
        engine = engine_of(tmp_path, quantization="int4", device=device, dtype="bfloat16")
        weight = engine.runner.model.layers[1].mlp.down.weight
        is_packed = isinstance(weight, Int4Weight)
        assert is_packed == (device == "cuda")
        weights.append(weight.dequantised(torch.bfloat16).cpu() if is_packed else weight)
        engine.runner.close()
    torch.testing.assert_close(weights[0], weights[1], rtol=2**-7, atol=0)


def test_biases_and_sizes_that_are_no_multiples(tmp_path: Path) -> None:
    """Models work with outputs that do not fill a tile, and with inputs that no kernel's layout
    supports, whose weights are dequantised."""
    sizes = SIZES | {"head_dim": 64, "num_key_value_heads": 1, "intermediate_size": 160}
    variant = {"architecture": "Qwen2ForCausalLM", "has_varied_vectors": True}
    name = "compressed, zeros"
    theirs = write_int4_checkpoint(tmp_path, name, seed=4, **(sizes | variant))
    engine = engine_of(tmp_path)
    mlp = engine.runner.model.layers[0].mlp
    assert isinstance(mlp.gate_up.weight, Int4Weight)
    assert isinstance(mlp.down.weight, torch.Tensor)
    assert mean(gaps(engine, theirs)) < NEAR_TIE


def test_a_zero_in_the_wrong_place_is_seen(tmp_path: Path) -> None:
    theirs = write_int4_checkpoint(tmp_path, "awq", seed=4, **SIZES)
    engine = engine_of(tmp_path)
    groups = engine.runner.model.layers[0].mlp.down.weight.groups
    groups.add_((torch.rand(groups.shape, device="cuda") < 0.5).int())
    assert mean(gaps(engine, theirs)) > 2 * NEAR_TIE


EXPERTS = [(128, 8, 2048, 768), (8, 2, 1024, 1792), (60, 4, 640, 384)]
INT4 = Cut(64, 128, 4, 4, is_turned=True)
WIDE = Cut(128, 128, 3, 8, group=4, is_turned=True)
PLANS = [
    Tiles(16, INT4, WIDE),
    Tiles(32, WIDE, INT4),
    Tiles(64, WIDE, WIDE),
    Tiles(128, INT4, WIDE),
]


def make_mixture(sizes: tuple[int, int, int, int], dtype: torch.dtype, group_size: int) -> Mixture:
    count, num_chosen, hidden, inner = sizes
    router, parts = torch.randn(count, hidden, device="cuda", dtype=dtype), []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        parts.append(Int4Experts.empty(count, outputs, inputs, group_size, router.device))
        groups = (outputs, inputs // group_size)
        for expert in range(count):
            numbers = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
            zero = torch.randint(6, 10, groups, device="cuda", dtype=torch.uint8)
            scale = (torch.rand(groups, device="cuda").bfloat16() + 0.1) * inputs**-0.5 / 8
            parts[-1].of(expert).fill(numbers, scale, zero)
    return Mixture(router, *parts, num_chosen, True)


def expected_of(x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """The reference in float32, one expert after the other."""
    weights, chosen = choose_experts(router_logits(x, mixture.router).sum(0), mixture)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(mixture.num_local):
        tokens, places = torch.where(chosen == mixture.first + expert)
        gate_up, down = (
            one.of(expert).dequantised(torch.float32) for one in (mixture.gate_up, mixture.down)
        )
        gate, up = (x[tokens].float() @ gate_up.t()).chunk(2, dim=1)
        product = (torch.nn.functional.silu(gate) * up) @ down.t()
        out.index_add_(0, tokens, product * weights[tokens, places, None])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [128, 32])
@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
def test_experts(sizes: tuple[int, int, int, int], group_size: int, dtype: torch.dtype) -> None:
    """Every plan is right, with few rows and with many, for all experts and for ranks that have
    some of them."""
    torch.manual_seed(0)
    mixture = make_mixture(sizes, dtype, group_size)
    chosen = [choose_plan(sizes_of(mixture), 2**n, 2) for n in range(15)]
    half = sizes[0] // 2
    ranks = [
        dataclasses.replace(
            mixture,
            gate_up=Int4Experts(mixture.gate_up.data[mine], mixture.gate_up.groups[mine]),
            down=Int4Experts(mixture.down.data[mine], mixture.down.groups[mine]),
            first=mine.start,
        )
        for mine in (slice(0, half), slice(half, sizes[0]))
    ]
    for num_tokens in (1, 3, 16, 33, 100, 700, 3000):
        x = torch.randn(num_tokens, mixture.hidden, device="cuda", dtype=dtype)
        expected = expected_of(x, mixture)
        for plan in dict.fromkeys([*chosen, *PLANS]):
            found = compute_experts(x, mixture, None, plan)
            difference = (found.float() - expected).norm() / expected.norm()
            assert difference < 1e-2, f"{plan}: {difference:.1e}"
            assert torch.equal(found, compute_experts(x, mixture, None, plan)), plan
        total = sum(compute_experts(x, rank, None).float() for rank in ranks)
        assert (total - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 300])
def test_a_graph_of_experts(num_tokens: int) -> None:
    torch.manual_seed(0)
    mixture = make_mixture(EXPERTS[0], torch.bfloat16, 128)
    x = torch.randn(num_tokens, mixture.hidden, device="cuda", dtype=torch.bfloat16)
    compute_experts(x, mixture, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute_experts(x, mixture, None)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, compute_experts(x, mixture, None))


MODEL = SIZES | {
    "architecture": "Qwen3MoeForCausalLM",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 384,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_experts_are_those_of_the_dequantised_model(
    tmp_path: Path, name: str, dtype: str
) -> None:
    theirs = write_int4_checkpoint(tmp_path, name, seed=4, **MODEL)
    engine = engine_of(tmp_path, dtype=dtype)
    mixture = engine.runner.model.layers[0].mlp.mixture
    assert isinstance(mixture.gate_up, Int4Experts) and isinstance(mixture.down, Int4Experts)
    found = gaps(engine, theirs)
    same = sum(gap == 0 for gap in found) / len(found)
    print(f"{name}: {same:.0%} of tokens equal, gaps of {mean(found):.4f}, most {max(found):.3f}")
    assert mean(found) < NEAR_TIE_OF_EXPERTS


@pytest.mark.parametrize("is_merged", [False, True])
def test_experts_quantised_at_load_as_on_a_cpu(tmp_path: Path, is_merged: bool) -> None:
    write_checkpoint(tmp_path, seed=4, save_original_format=not is_merged, **MODEL)
    weights = []
    for device in ("cuda", "cpu"):
        engine = engine_of(tmp_path, quantization="int4", device=device, dtype="bfloat16")
        down = engine.runner.model.layers[1].mlp.mixture.down
        is_packed = isinstance(down, Int4Experts)
        assert is_packed == (device == "cuda")
        weight = down.of(5)
        weights.append(weight.dequantised(torch.bfloat16).cpu() if is_packed else weight)
        engine.runner.close()
    torch.testing.assert_close(weights[0], weights[1], rtol=2**-7, atol=0)
