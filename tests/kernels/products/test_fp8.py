"""GEMMs with weights in FP8, and the quantisation of their inputs, against references in float32.

On a GPU if there is one, else interpreted. Triton's interpreter loses the carry when a number is
rounded up to a power of two, and halves it: quantisation there is compared with a larger tolerance.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


from fp8_checkpoints import write_fp8_checkpoint

from baton.engine.model.construction.decoder import make_decoder
from baton.engine.model.model_config import read_model_config
from baton.engine.model.weights.checkpoint import load_weights
from baton.engine.model.weights.placement import Placement
from baton.kernels.attention.attention import AttentionMetadata
from baton.kernels.attention.attention_torch import TorchAttention
from baton.kernels.layers import ops
from baton.kernels.layers.ops_triton import TritonOps
from baton.kernels.layers.quantise_triton import quantise, silu_and_mul_quantised
from baton.kernels.products import fp8_product, way_table
from baton.kernels.products.fp8_product import (
    ScaledMm,
    can_scale,
    choose,
    multiply,
    multiply_by,
    scaled_mm,
    summand,
    summands,
    takes_groups,
)
from baton.kernels.products.fp8_triton import Fp8Stages, Fp8Tiling, fp8_few_rows
from baton.kernels.products.weights import (
    FP8,
    BlockScaled,
    Fp8Rows,
    Fp8Weight,
    RowScaled,
    Summands,
    Unscaled,
    quantise_activations,
    quantise_blocks,
    quantise_rows,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
KINDS = [RowScaled, BlockScaled]
# With both operands quantised: half a unit in the last of three bits is at most 1/16 of a number.
FP8_NOISE = 0.045
KERNEL_NOISE = FP8_NOISE if HAS_GPU else 0.1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def weight_of(kind: type[Fp8Weight], outputs: int, inputs: int) -> Fp8Weight:
    """A weight whose rows and columns differ in magnitude, so that a misplaced scale shows."""
    sizes = torch.exp(randn(outputs, 1)) * torch.exp(randn(1, inputs))
    weight = randn(outputs, inputs) * sizes
    make = quantise_blocks if kind is BlockScaled else quantise_rows
    return kind(*make(weight))


def activations(kind: type[Fp8Weight], rows: int, inputs: int, dtype: torch.dtype) -> Fp8Rows:
    """Rows quantised by torch, padded like those of kernels."""
    weight = kind(torch.empty(1, inputs, dtype=FP8, device=DEVICE), torch.empty(0))
    x = (randn(rows, inputs) * torch.exp(randn(rows, 1))).to(dtype)
    made, out = quantise_activations(x, weight), Fp8Rows.empty(rows, weight, x)
    data, scale = out.with_room
    data.copy_(torch.full(data.shape, torch.nan))  # the padding
    scale.fill_(torch.nan)
    out.data.copy_(made.data)
    out.scale.copy_(made.scale)
    return out


def quantised(x: torch.Tensor, weight: Fp8Weight) -> Fp8Rows:
    """x quantised by torch, with the kind of scales that the GEMM with `weight` takes."""
    like = BlockScaled(weight.data, weight.scale) if takes_groups(x, weight) else weight
    return quantise_activations(x, like)


def product(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of the dequantised operands, in float64."""
    found = torch.nn.functional.linear(x.double(), weight.dequantised(torch.float64))
    return found + (0 if bias is None else bias.double())


def close(found: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    if limit is None:
        limit = 3e-6 if found.dtype == torch.float32 else 4e-3
    difference = (found.double() - expected).norm() / expected.norm()
    assert difference < limit, f"{difference:.2e}"


@pytest.mark.parametrize("kind", KINDS)
def test_references_mean_what_they_quantise(kind: type[Fp8Weight]) -> None:
    weight = randn(200, 300)
    made = kind(*(quantise_blocks if kind is BlockScaled else quantise_rows)(weight))
    close(made.dequantised(torch.float32), weight.double(), FP8_NOISE)
    assert made.data.float().abs().max() == 448
    x = randn(5, 300)
    x[2] = 0
    close(quantise_activations(x, made).dequantised(torch.float32), x.double(), FP8_NOISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 70, *((2, 33, 64, 130) if HAS_GPU else ())])
@pytest.mark.parametrize(("outputs", "inputs", "has_bias"), [(128, 256, False), (65, 200, True)])
def test_few_rows(
    outputs: int,
    inputs: int,
    rows: int,
    kind: type[Fp8Weight],
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    weight, x = weight_of(kind, outputs, inputs), activations(kind, rows, inputs, dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    found = fp8_few_rows(x, weight, bias, Fp8Tiling(64, 3))
    assert found.dtype == dtype
    # Tensor cores sum 128 inputs with fewer bits than float32.
    limit = 1e-3 if HAS_GPU and dtype == torch.float32 else None
    close(found, product(x.dequantised(torch.float64), weight, bias), limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inputs"), [(2, 384), (5, 100), (3, 1500), (66, 128)])
def test_quantise(rows: int, inputs: int, kind: type[Fp8Weight], dtype: torch.dtype) -> None:
    weight, x = weight_of(kind, 128, inputs), randn(rows, inputs, dtype=dtype)
    x[1] = 0
    expected = quantised(x, weight)
    found = quantise(x, weight)
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)
    close(found.dequantised(torch.float32), x.double(), KERNEL_NOISE)
    assert not found.data[1].float().any()
    assert found.room in (16, 32, 64, 128)
    gate_up = randn(rows, 2 * inputs, dtype=dtype)
    gated = silu_and_mul_quantised(gate_up, weight)
    close(gated.dequantised(torch.float32), ops.silu_and_mul(gate_up).double(), KERNEL_NOISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [96, 640])
def test_norms_quantise_as_if_behind(dim: int, kind: type[Fp8Weight], dtype: torch.dtype) -> None:
    x, residual, scales = (randn(7, dim, dtype=dtype) for _ in range(3))
    reader, triton_ops = weight_of(kind, 128, dim), TritonOps()
    summed = x + residual
    plain = triton_ops.add_rms_norm(x, residual.clone(), scales[0], 1e-5)
    assert isinstance(plain, torch.Tensor)
    apart = quantise(plain, reader)
    fused = triton_ops.add_rms_norm(x, residual, scales[0], 1e-5, reader)
    assert isinstance(fused, Fp8Rows)
    assert torch.equal(residual, summed)
    assert torch.equal(fused.data.view(torch.uint8), apart.data.view(torch.uint8))
    assert torch.equal(fused.scale, apart.scale)
    one = triton_ops.rms_norm(summed[:1], scales[0], 1e-5, reader)
    assert isinstance(one, Fp8Rows) and torch.equal(one.scale, apart.scale[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reader", [None, *KINDS])
def test_norms_scale_what_they_add(reader: type[Fp8Weight] | None, dtype: torch.dtype) -> None:
    x, residual, scales = (randn(7, 320, dtype=dtype) for _ in range(3))
    # Powers of 2: scaled values are rounded like the original ones.
    of_rows, of_outputs = (torch.exp2(torch.randint(-3, 4, (n,))).to(DEVICE) for n in (7, 320))
    scaled = (x * of_rows[:, None] * of_outputs).to(dtype)
    weight = None if reader is None else weight_of(reader, 128, 320)
    sums, found = (residual.clone() for _ in range(2))
    expected = TritonOps().add_rms_norm(scaled, sums, scales[0], 1e-5, weight)
    normed = TritonOps().add_rms_norm(
        Unscaled(x, of_rows, of_outputs), found, scales[0], 1e-5, weight
    )
    assert torch.equal(found, sums)
    if isinstance(normed, Fp8Rows):
        assert isinstance(expected, Fp8Rows)
        assert torch.equal(normed.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(normed.scale, expected.scale)
    else:
        assert torch.equal(normed, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_no_number_stays_in_its_row(kind: type[Fp8Weight], rows: int) -> None:
    """A NaN or inf shows in the results of its row, and in no other row."""
    weight, x = weight_of(kind, 128, 256), randn(rows, 256)
    # The interpreter turns NaN into a number.
    for broken in (torch.inf, torch.nan) if HAS_GPU else (torch.inf,):
        x[rows - 1, 130] = broken
        found = TritonOps().linear(x, weight, None)
        assert not found[rows - 1].isfinite().any()
        assert found[: rows - 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 40, 65])
def test_operations_are_those_of_the_reference(
    rows: int, kind: type[Fp8Weight], dtype: torch.dtype
) -> None:
    """From floats to floats, operations equal the reference's, including intermediate
    quantisation."""
    x, triton_ops, reference = randn(rows, 256, dtype=dtype), TritonOps(), ops.Ops()
    gate_up, down = weight_of(kind, 256, 256), weight_of(kind, 96, 128)
    limit = 1e-2 if HAS_GPU else KERNEL_NOISE if rows > 1 else 0.4  # one halved number
    found = triton_ops.linear(x, gate_up, None)
    close(found, reference.linear(quantised(x, gate_up), gate_up, None).double(), limit)
    x = x / 50
    gated = triton_ops.gated_linear(x, gate_up, None, down)
    assert isinstance(gated, Fp8Rows)
    expected = reference.gated_linear(quantised(x, gate_up), gate_up, None)
    assert isinstance(expected, torch.Tensor)
    # Where sums are rounded differently, so may be the nearest FP8 numbers.
    floats = quantised(expected, down).dequantised(torch.float64)
    close(gated.dequantised(torch.float64), floats, max(limit, FP8_NOISE))
    expected = reference.linear(gated, down, None)
    close(triton_ops.linear(gated, down, None), expected.double(), limit)


@pytest.mark.parametrize(
    "name", [pytest.param("compressed, channel", marks=pytest.mark.slow), "block"]
)
def test_a_model_computes_what_its_reference_does(tmp_path: Path, name: str) -> None:
    """All of a decoder's layers, from one checkpoint, give the same results with both sets of
    operations."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "vocab_size": 60}
    write_fp8_checkpoint(tmp_path, name, num_attention_heads=2, **sizes)
    config = read_model_config(tmp_path)
    tokens = torch.tensor([7, 3, 50, 11], device=DEVICE)
    for ids in (tokens, tokens[:1]):
        outputs = []
        for operations in (ops.Ops(), TritonOps()):
            placement = Placement(
                DEVICE,
                torch.float32,
                operations,
                quantization=config.quantization,
                stays_quantised=True,
            )
            model = make_decoder(config, placement)
            load_weights(tmp_path, model.targets)
            assert model.layers[0].mlp.down.fp8_weight is not None
            pool = torch.zeros(4, 2, 2, 2, 16, 64, device=DEVICE)
            attention = TorchAttention(pool, [None, None])
            positions = torch.arange(len(ids), device=DEVICE)
            attention.plan(AttentionMetadata([len(ids)], [len(ids)], [[1]], 16 + positions, 0))
            hidden = model.forward(ids, positions, 16 + positions, attention)
            outputs.append(torch.nn.functional.linear(hidden, model.lm_head.weight))
        limit = 0.05 if HAS_GPU else 0.3  # errors would be above 1
        close(outputs[1], outputs[0].double(), limit)


@pytest.fixture
def no_table_is_kept() -> Iterator[None]:
    kept = (way_table.measured, way_table.look_up)
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()


@pytest.mark.usefixtures("no_table_is_kept")
def test_what_was_measured_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is the fastest measured way for the nearest shape, with at least as many rows."""

    def row(size: int, rows: int, kind: str, us: float, **way: int) -> dict[str, object]:
        shape = {"weight": "row", "rows": rows, "outputs": size, "inputs": 4096}
        return {**shape, "kind": kind, "way": way, "us": us}

    stages = {"outputs": 32, "chunks": 2, "count": 6, "early": 3}
    rows = [
        row(4096, 16, "scaled_mm", 9.0),
        row(4096, 16, "streamed", 7.0, **stages),
        row(28_672, 16, "scaled_mm", 20.0),
        row(28_672, 16, "streamed", 21.0, **stages),
        row(4096, 64, "scaled_mm", 10.0),
    ]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(rows))
    monkeypatch.setattr(way_table, "TABLE", table)
    every = ("triton", "streamed", "scaled_mm")

    def look_up(
        weight: str, rows: int, outputs: int, inputs: int, kinds: tuple[str, ...]
    ) -> object:
        found = way_table.look_up(weight, rows, outputs, inputs, kinds)
        return found and fp8_product.WAYS[found.kind](**found.way)

    assert look_up("row", 9, 5000, 4096, every) == Fp8Stages(**stages)
    assert look_up("row", 16, 20_000, 4096, every) == ScaledMm()
    assert look_up("row", 16, 20_000, 4096, ("streamed",)) == Fp8Stages(**stages)
    assert look_up("row", 17, 20_000, 4096, every) == ScaledMm()
    assert look_up("row", 500, 20_000, 4096, every) == ScaledMm()
    assert look_up("block", 9, 4096, 4096, every) is None


KERNELS = ("streamed", "turned", "few_rows", "quantise", "norm", "experts", "wide_tiles")


@pytest.mark.parametrize("options", [("--first",), pytest.param((), marks=pytest.mark.slow)])
def test_the_kernels_compile_without_a_gpu(options: tuple[str, ...]) -> None:
    """The kernels compile with the installed version of Triton, since Gluon's interface is not
    stable."""
    program = Path(__file__).with_name("compile_quantised.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(program), *KERNELS, *options]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"compiled {KERNELS[-1]}" in ended.stdout


def test_stages_fit_into_shared_memory() -> None:
    """Stages fit into shared memory beside the input scales of large models."""
    fitting = importlib.import_module("baton.kernels.products.fp8_streamed_gluon").fitting
    for stages in (Fp8Stages(32, 2, 8, 6), Fp8Stages(128, 2, 3, 3, is_turned=True)):
        for room, groups in itertools.product((16, 32, 64), (0, 32, 128, 256, 512)):
            found = fitting(stages, room, groups)
            assert 0 < found.early <= found.count <= stages.count
            x_rows = room if stages.is_turned else 64
            num_bytes = found.count * 2 * 128 * (x_rows + stages.outputs) + 4 * groups * x_rows
            assert num_bytes < 227 << 10
    assert fitting(Fp8Stages(32, 2, 8, 6), 64, 128) == Fp8Stages(32, 2, 8, 6)


STAGES = [Fp8Stages(32, 2, 4, 3), Fp8Stages(64, 1, 6, 6), Fp8Stages(64, 2, 3, 0)]
STAGES += [dataclasses.replace(one, is_turned=True) for one in STAGES]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("kind", "in_groups"), [(RowScaled, False), (RowScaled, True), (BlockScaled, True)]
)
@pytest.mark.parametrize("stages", [*STAGES, Fp8Stages(128, 1, 4, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (160, 640), (4096, 4096)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_streamed(
    outputs: int,
    inputs: int,
    rows: int,
    stages: Fp8Stages,
    kind: type[Fp8Weight],
    has_bias: bool,
    in_groups: bool,
) -> None:
    weight = weight_of(kind, outputs, inputs)
    x = activations(BlockScaled if in_groups else kind, rows, inputs, torch.bfloat16)
    bias = randn(outputs, dtype=torch.bfloat16) if has_bias else None
    together = multiply_by(stages, x, weight, bias)
    close(together, product(x.dequantised(torch.float64), weight, bias))
    alone = Fp8Rows.empty(1, weight, together, in_groups=in_groups)
    alone.data.copy_(x.data[:1])
    alone.scale.copy_(x.scale[:1])
    assert torch.equal(multiply_by(stages, alone, weight, bias), together[:1])


WIDE_STAGES = [
    Fp8Stages(64, 2, 3, 2, is_turned=True),
    Fp8Stages(64, 1, 6, 4, is_turned=True, shares=2),
    Fp8Stages(128, 2, 3, 2, is_turned=True, shares=4, warps=8),
    Fp8Stages(128, 1, 6, 0, is_turned=True, shares=3, warps=8),
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("stages", WIDE_STAGES, ids=str)
@pytest.mark.parametrize("rows", [65, 96, 128, 130, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (160, 640), (1024, 4096)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_streamed_tiles_of_rows(
    outputs: int, inputs: int, rows: int, stages: Fp8Stages, has_bias: bool
) -> None:
    """Products of more than 64 rows are right, whole or split over the inputs."""
    weight = weight_of(BlockScaled, outputs, inputs)
    x = activations(BlockScaled, rows, inputs, torch.bfloat16)
    bias = randn(outputs, dtype=torch.bfloat16) if has_bias else None
    expected = product(x.dequantised(torch.float64), weight, bias)
    close(multiply_by(stages, x, weight, bias), expected)
    found = summands(x, weight, bias, stages)
    assert found.count == min(stages.shares, -(-inputs // 128 // stages.chunks))
    close(found.data.view(rows, found.count, outputs).double().sum(dim=1), expected, 6e-3)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [64, 65, 200, 256, 257])
@pytest.mark.parametrize("has_bias", [False, True])
def test_blocks_products_are_summed_up_by_their_norm(rows: int, has_bias: bool) -> None:
    weight, triton_ops = weight_of(BlockScaled, 4096, 14_336), TritonOps()
    x, residual = (randn(rows, size, dtype=torch.bfloat16) for size in (14_336, 4096))
    bias = randn(4096, dtype=torch.bfloat16) if has_bias else None
    summand = triton_ops.summand(x, weight, bias)
    assert isinstance(summand, Summands) == (64 < rows <= 256)
    sums, expected = residual.clone(), residual.clone()
    scales = torch.rand(4096, device=DEVICE, dtype=torch.bfloat16)
    normed = triton_ops.add_rms_norm(summand, sums, scales, 1e-5)
    plain = triton_ops.add_rms_norm(triton_ops.linear(x, weight, bias), expected, scales, 1e-5)
    assert isinstance(normed, torch.Tensor) and isinstance(plain, torch.Tensor)
    close(sums, expected.double(), 6e-3)
    close(normed, plain.double(), 6e-3)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 48, 100])
def test_chains_in_a_graph_follow_their_inputs(kind: type[Fp8Weight], rows: int) -> None:
    """In a replayed graph of norms and GEMMs no input is read before it is written."""
    triton_ops = TritonOps()
    weights = [
        kind(*(quantise_blocks if kind is BlockScaled else quantise_rows)(randn(1024, 1024)))
        for _ in range(6)
    ]
    scales, x = torch.rand(1024, device=DEVICE, dtype=torch.bfloat16), randn(rows, 1024).bfloat16()

    def run(triton_ops: TritonOps) -> torch.Tensor:
        y = x
        for weight in weights:
            y = triton_ops.linear(triton_ops.rms_norm(y, scales, 1e-5, weight), weight, None)
        return y

    def by_torch() -> torch.Tensor:
        y, reference = x, ops.Ops()
        for weight in weights:
            normed = reference.rms_norm(y, scales, 1e-5)
            assert isinstance(normed, torch.Tensor)
            y = reference.linear(quantised(normed, weight), weight, None)
        return y

    run(triton_ops)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(triton_ops)
    for seed in range(20):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(found, run(triton_ops))
        close(found, by_torch().double(), 0.1)  # rounding of bfloat16, quantised six times


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 127, 256, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 384), (4096, 4096), (6144, 4096)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_ways_on_a_gpu(
    outputs: int, inputs: int, rows: int, kind: type[Fp8Weight], has_bias: bool
) -> None:
    weight, x = weight_of(kind, outputs, inputs), activations(kind, rows, inputs, torch.bfloat16)
    bias = randn(outputs, dtype=torch.bfloat16) if has_bias else None
    expected = product(x.dequantised(torch.float64), weight, bias)
    limit = 3e-2  # torch accumulates products of rows in 14 bits
    if can_scale(x, weight):
        close(scaled_mm(x, weight, bias), expected, limit)
    close(multiply(x, weight, bias), expected, limit)
    assert choose(x, weight) is not None
    if isinstance(weight, RowScaled) and can_scale(x, weight):
        product_of = summand(x, weight, None)
        assert isinstance(product_of, Unscaled) == (rows > 64)
        if isinstance(product_of, Unscaled):
            scaled = product_of.data.double() * product_of.of_rows[:, None] * weight.scale
            close(scaled, product(x.dequantised(torch.float64), weight, None), limit)


@pytest.mark.gpu
@needs_hopper
def test_what_is_added_to_the_residual_is_scaled_by_its_norm() -> None:
    weight, triton_ops = weight_of(RowScaled, 1024, 512), TritonOps()
    x, residual = (randn(130, size, dtype=torch.bfloat16) for size in (512, 1024))
    summand = triton_ops.summand(x, weight, None)
    assert isinstance(summand, Unscaled)
    sums, expected = residual.clone(), residual.clone()
    normed = triton_ops.add_rms_norm(summand, sums, weight.scale.bfloat16(), 1e-5)
    plain = triton_ops.add_rms_norm(
        triton_ops.linear(x, weight, None), expected, weight.scale.bfloat16(), 1e-5
    )
    assert isinstance(normed, torch.Tensor) and isinstance(plain, torch.Tensor)
    close(sums, expected.double(), 1e-2)
    close(normed, plain.double(), 1e-2)
