"""GEMMs with weights in int4, against an explicit dequantisation in float64.

On a GPU if there is one, else interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.layers import ops
from baton.kernels.layers.ops_triton import TritonOps
from baton.kernels.products.int4_product import (
    Dequantised,
    _can_load,
    choose,
    multiply_by,
    usual_tiling,
)
from baton.kernels.products.int4_triton import Int4Tiling, dequantised, int4_product
from baton.kernels.products.int4_weights import (
    GROUP_SIZES,
    Int4Weight,
    dequantise,
    quantise_groups,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
TILINGS = [Int4Tiling(64, 1, 3), Int4Tiling(64, 3, 3), Int4Tiling(128, 2, 3, 8)]
if HAS_GPU:
    TILINGS += [Int4Tiling(32, 2, 4), Int4Tiling(256, 4, 3, 8), Int4Tiling(64, 16, 6)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def numbers_of(
    outputs: int, inputs: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random int4 values and zeros, and scales of very different sizes that fit two bytes."""
    groups = (outputs, inputs // group_size)
    numbers = torch.randint(0, 16, (outputs, inputs), device=DEVICE, dtype=torch.uint8)
    zero = torch.randint(0, 17, groups, device=DEVICE, dtype=torch.uint8)
    scale = torch.exp(torch.randn(groups, device=DEVICE)).bfloat16()
    return numbers, scale, zero


def weight_of(outputs: int, inputs: int, group_size: int = 128) -> Int4Weight:
    weight = Int4Weight.empty(outputs, inputs, group_size, DEVICE)
    weight.fill(*numbers_of(outputs, inputs, group_size))
    return weight


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def product(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the dequantised operands, in float64."""
    found = torch.nn.functional.linear(x.double(), weight.dequantised(torch.float64))
    return found + (0 if bias is None else bias.double())


def close(found: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    if limit is None:
        limit = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[found.dtype]
    difference = (found.double() - expected).norm() / expected.norm()
    assert difference < limit, f"{difference:.2e}"


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_what_is_packed_is_what_was_given(group_size: int) -> None:
    numbers, scale, zero = numbers_of(48, 384, group_size)
    weight = Int4Weight.empty(48, 384, group_size, DEVICE)
    weight.fill(numbers, scale, zero)
    assert weight.shape == (48, 384) and len(weight) == 48 and weight.group_size == group_size
    assert weight.nbytes == 48 * 384 // 2 + 48 * 384 // group_size * 4
    assert torch.equal(weight.numbers(), numbers)
    wide = [one.repeat_interleave(group_size, 1).float() for one in (zero, scale)]
    expected = (numbers.float() - wide[0]) * wide[1]
    assert torch.equal(weight.dequantised(torch.float32), expected)
    assert torch.equal(weight.part(16, 8).dequantised(torch.float32), expected[16:24])


def test_words_have_their_documented_places() -> None:
    numbers = torch.zeros(1, 256, dtype=torch.uint8, device=DEVICE)
    for index, value in enumerate((1, 2, 3, 15)):
        numbers[0, 128 + 5 + 32 * index] = value
    weight = Int4Weight.empty(1, 256, 128, DEVICE)
    one = torch.ones(1, 2, device=DEVICE)
    weight.fill(numbers, 0.5 * one, 8 * one)
    assert int(weight.data[1, 0, 5]) & 0xFFFF == 0xF321
    assert weight.data.count_nonzero() == 1
    assert int(weight.groups[0, 0]) == 0x3F000008


def test_scales_keep_fifteen_bits() -> None:
    numbers, scale, zero = numbers_of(16, 128, 128)
    scale = scale.float() * 1.2345678
    weight = Int4Weight.empty(16, 128, 128, DEVICE)
    weight.fill(numbers, scale, zero)
    expected = dequantise(numbers, scale, zero, 128)
    torch.testing.assert_close(weight.dequantised(torch.float32), expected, rtol=2**-16, atol=0)


def test_quantised_to_the_nearest() -> None:
    weight = randn(20, 300)
    weight[3, :128] = 0
    numbers, scale, zero = quantise_groups(weight, 128)
    assert numbers.shape == weight.shape and scale.shape == zero.shape == (20, 3)
    found = dequantise(numbers, scale, zero, 128)
    each = scale[:, torch.arange(300, device=DEVICE) // 128]
    is_reached = weight.abs() <= 7.5 * each
    assert ((found - weight).abs() <= each * 0.5001)[is_reached].all()
    assert not found[3, :128].any()
    step = weight[:, :128].abs().amax(1, keepdim=True).clamp(min=1e-9) / 7.5
    plain = (weight[:, :128] / step).round().clamp(-8, 7) * step
    errors = [(one[:, :128] - weight[:, :128]).norm(dim=1) for one in (found, plain)]
    assert (errors[0] <= errors[1] * 1.001).all() and errors[0].sum() < 0.99 * errors[1].sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size", "has_bias"),
    [
        (1, 128, 384, 128, False),
        (3, 72, 256, 32, True),
        (17, 128, 384, 64, True),
        *([(64, 256, 1024, 128, True), (130, 192, 512, 128, False)] if HAS_GPU else []),
    ],
)
def test_int4_product(
    rows: int,
    outputs: int,
    inputs: int,
    group_size: int,
    has_bias: bool,
    tiling: Int4Tiling,
    dtype: torch.dtype,
) -> None:
    if rows > 64:  # six stages of as many float32 rows do not fit in shared memory
        tiling = replace(tiling, stages=3)
    weight, x = weight_of(outputs, inputs, group_size), randn(rows, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    expected = product(x, weight, bias)
    for _ in range(2):  # partial sums must leave no state behind
        close(int4_product(x, weight, bias, tiling), expected)
    assert not weight.turns.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "has_bias"), [(3, 256, False), (17, 152, True)])
def test_gated_product(
    rows: int, outputs: int, has_bias: bool, tiling: Int4Tiling, dtype: torch.dtype
) -> None:
    weight, x = weight_of(outputs, 384, 64), randn(rows, 384, dtype=dtype) / 100
    bias = randn(outputs, dtype=dtype) if has_bias else None
    expected = ops.silu_and_mul(product(x, weight, bias))
    found = int4_product(x, weight, bias, tiling, is_gated=True)
    assert found.shape == (rows, outputs // 2)
    close(found, expected, 1e-5 if dtype == torch.float32 else 1e-2)
    assert not weight.turns.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "group_size"), [(40, 128), (64, 32)])
def test_dequantised(outputs: int, group_size: int, dtype: torch.dtype) -> None:
    weight = weight_of(outputs, 256, group_size)
    assert torch.equal(dequantised(weight, dtype), weight.dequantised(dtype))


def test_more_rows_than_a_program_has() -> None:
    weight, x = weight_of(64, 128), randn(130, 128)
    close(int4_product(x, weight, None, Int4Tiling(64, 1, 3)), product(x, weight, None))


@pytest.mark.parametrize("shares", [1, 3])
def test_a_row_does_not_depend_on_the_others(shares: int) -> None:
    """A row depends neither on other rows' values nor, among counts that share a tile, on their
    number."""
    weight, x = weight_of(64, 384), randn(16, 384, dtype=DTYPES[-1])
    tiling = Int4Tiling(64, shares, 3)
    together = int4_product(x, weight, None, tiling)
    assert torch.equal(int4_product(x[:2], weight, None, tiling), together[:2])
    x[3] = torch.nan
    found = int4_product(x, weight, None, tiling)
    assert found[3].isnan().all()
    assert torch.equal(found[4:], together[4:]) and torch.equal(found[:3], together[:3])


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_operations_are_those_of_the_reference(rows: int, has_bias: bool) -> None:
    weight, x = weight_of(128, 128), randn(rows, 128) / 30
    bias = randn(128) if has_bias else None
    triton_ops, reference = TritonOps(), ops.Ops()
    close(triton_ops.linear(x, weight, bias), reference.linear(x, weight, bias).double(), 1e-5)
    gated, expected = (one.gated_linear(x, weight, bias) for one in (triton_ops, reference))
    assert isinstance(gated, torch.Tensor) and isinstance(expected, torch.Tensor)
    close(gated, expected.double(), 1e-5)


def test_many_rows_go_by_floats() -> None:
    weight = weight_of(64, 128)
    assert isinstance(choose(randn(4096, 128), weight), Dequantised)
    assert isinstance(choose(randn(64, 128), weight), Int4Tiling)
    x = randn(3, 128)
    close(multiply_by(Dequantised(), x, weight, None), product(x, weight, None), 1e-5)


@pytest.mark.parametrize("outputs", [1, 9, 12, 16, 1000, 1001])
def test_tma_loads_a_weight_if_rows_of_each_half_are_aligned(outputs: int) -> None:
    weight, x = weight_of(outputs, 256), torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    assert _can_load(x, weight) == (outputs % 8 == 0)


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28_672, 4096), (4096, 14_336)])
def test_the_usual_tiling_keeps_a_card_busy(rows: int, outputs: int, inputs: int) -> None:
    tiling = usual_tiling(rows, outputs, inputs)
    assert 128 <= -(-outputs // tiling.outputs) * tiling.shares <= 528
    assert inputs // 128 // tiling.shares >= 8


KERNELS = ("int4", "int4_dequantised", "int4_streamed", "int4_row")


@pytest.mark.parametrize("options", [("--first",), pytest.param((), marks=pytest.mark.slow)])
def test_the_kernels_compile_without_a_gpu(options: tuple[str, ...]) -> None:
    program = Path(__file__).with_name("compile_quantised.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(program), *KERNELS, *options]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"compiled {KERNELS[-1]}" in ended.stdout
