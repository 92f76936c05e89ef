"""GEMMs that prefetch their weight: the choice on any machine, the kernel on Hopper GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.layers import ops, ops_triton
from baton.kernels.peer_reduce_triton import (
    EXCHANGE_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    MAX_ROW_BYTES,
    SLOTS_AT,
    Exchange,
    prepare_exchange,
)
from baton.kernels.products.streamed_product import StreamTiling, choose_stages
from baton.kernels.products.weights import Summands
from baton.kernels.row_room import empty_rows, has_room, room_of

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
STAGES = [
    StreamTiling(32, 128, 9, 3),
    StreamTiling(64, 128, 6, 4),
    StreamTiling(128, 128, 4, 3),
    StreamTiling(64, 64, 4, 0),
]
STAGES_OF_GATED = [
    StreamTiling(64, 128, 4, 2),
    StreamTiling(64, 64, 6, 6),
    StreamTiling(32, 64, 3, 1),
]
STAGES_OF_MANY = [
    StreamTiling(32, 128, 5, 3),
    StreamTiling(64, 128, 4, 4),
    StreamTiling(128, 64, 7, 0),
    StreamTiling(256, 64, 4, 3),
]
GATED_STAGES_OF_MANY = [
    StreamTiling(128, 64, 4, 3),
    StreamTiling(64, 64, 7, 4),
    StreamTiling(128, 32, 9, 5),
]
WITH_SHARES = [
    (64, StreamTiling(64, 128, 6, 4, shares=2)),
    (64, StreamTiling(128, 128, 4, 3, shares=4)),
    (128, StreamTiling(64, 128, 4, 3, shares=2)),
    (128, StreamTiling(128, 64, 7, 3, shares=4)),
    (128, StreamTiling(128, 64, 7, 3, shares=3)),
    (128, StreamTiling(256, 64, 4, 2, shares=8)),
]
SHAPES = [(128, 128), (200, 640), (4096, 4104)]


def streamed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stages: StreamTiling,
    is_gated: bool = False,
) -> torch.Tensor:
    from baton.kernels.products.streamed_product_gluon import streamed_product

    return streamed_product(x, weight, bias, stages, is_gated=is_gated)


def vectors(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    like = torch.empty(0, dtype=dtype, device="cuda" if IS_HOPPER else "cpu")
    return empty_rows((num_rows, num_inputs), like).normal_()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found.double() - expected).norm() / expected.norm()
    assert difference < 1e-2, f"{difference:.2e}"


@pytest.mark.parametrize(
    ("num_rows", "room"),
    [
        *((1, 8), (8, 8), (9, 16), (17, 32), (32, 32), (33, 64), (40, 64), (64, 64)),
        *((65, 128), (96, 128), (128, 128), (129, 129), (192, 192)),
    ],
)
def test_few_rows_have_room_for_more(num_rows: int, room: int) -> None:
    x = empty_rows((num_rows, 3, 8), torch.empty(0))
    assert x.shape == (num_rows, 3, 8) and x.is_contiguous()
    assert room_of(num_rows) == room and x.untyped_storage().nbytes() == room * 3 * 8 * 4
    assert has_room(x.view(num_rows, -1))
    assert not has_room(empty_rows((64, 8), x)[1:63])
    assert has_room(empty_rows((64, 8), x)[1:33])
    assert not has_room(empty_rows((128, 8), x)[1:66])
    assert has_room(empty_rows((128, 8), x)[1:65])


@pytest.mark.parametrize("num_outputs", [1024, 2560, 4096, 6144, 14_336, 28_672])
@pytest.mark.parametrize("is_gated", [False, True])
def test_what_is_chosen_fits(num_outputs: int, is_gated: bool) -> None:
    weight = torch.empty(num_outputs, 256, dtype=torch.bfloat16)
    stages = choose_stages(vectors(40, 256), weight, is_gated=is_gated)
    assert (stages is not None) == (num_outputs >= (12_288 if is_gated else 2304))
    assert_fits(stages, 64, is_gated)
    for x in (vectors(32, 256), vectors(129, 256), vectors(64, 256)[:40].clone()):
        assert choose_stages(x, weight, is_gated=is_gated) is None
    assert choose_stages(vectors(40, 250), weight[:, :250], is_gated=is_gated) is None
    assert choose_stages(vectors(40, 256).float(), weight, is_gated=is_gated) is None
    assert choose_stages(vectors(64, 512)[:, :256], weight, is_gated=is_gated) is None
    for num_rows in (65, 96, 128):
        x = vectors(num_rows, 256)
        of_many = choose_stages(x, weight, is_gated=is_gated)
        assert_fits(of_many, 128, is_gated)
        assert choose_stages(x.clone(), weight, is_gated=is_gated) is None or num_rows == 128


def assert_fits(
    stages: StreamTiling | None, room: int, is_gated: bool, *, has_shares: bool = False
) -> None:
    if stages is not None:
        outputs = stages.outputs * (2 if is_gated else 1)
        stage_bytes = (room + outputs) * stages.inputs * 2
        assert stage_bytes * stages.count <= 226 << 10, "a program's shared memory"
        assert stages.early <= stages.count
        assert has_shares or stages.shares == 1


@pytest.mark.parametrize("num_rows", [40, 64, 65, 128])
@pytest.mark.parametrize("num_outputs", [1024, 2560, 4096, 5120, 6144, 8192, 14_336])
def test_only_summands_have_shares(num_outputs: int, num_rows: int) -> None:
    weight = torch.empty(num_outputs, 256, dtype=torch.bfloat16)
    x = vectors(num_rows, 256)
    product = choose_stages(x, weight, is_gated=False)
    summand = choose_stages(x, weight, is_gated=False, is_summand=True)
    assert product is None or product.shares == 1
    if summand is None or summand.shares == 1:
        assert summand == product
    assert_fits(summand, room_of(num_rows), is_gated=False, has_shares=True)


def test_what_the_bench_tries_fits() -> None:
    from baton.bench.kernels.products import cuts

    for num_rows in (96, 128):
        for kind in ("product", "summand", "gated"):
            found = cuts(num_rows, kind)
            assert 0 < len(found) <= 12 and len(set(found)) == len(found)
            for cut in found:
                assert isinstance(cut, StreamTiling)
                assert_fits(cut, 128, kind == "gated", has_shares=kind == "summand")
    assert not cuts(192, "product")


def test_other_processors_go_without() -> None:
    x, weight = vectors(40, 256).cpu(), torch.randn(4096, 256, dtype=torch.bfloat16)
    assert ops_triton._streamed(torch.device("cpu")) is None
    x = empty_rows(x.shape, x).copy_(x)
    found = ops_triton.TritonOps().linear(x, weight, None)
    assert torch.equal(found, torch.nn.functional.linear(x, weight))


ALL_CASES = tuple(str(number) for number in range(11))


@pytest.mark.parametrize(
    "cases", [("3", "4", "7", "9"), pytest.param(ALL_CASES, marks=pytest.mark.slow)]
)
def test_the_kernel_compiles_without_a_gpu(cases: tuple[str, ...]) -> None:
    """The kernel compiles with the installed version of Triton, since Gluon's interface is not
    stable."""
    program = Path(__file__).with_name("compile_streamed_product.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(program), *cases]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"compiled {len(cases)}" in ended.stdout


def operands(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Vectors, weight, bias and the product, in float64."""
    torch.manual_seed(num_rows)
    x, weight = (vectors(n, num_inputs, dtype) for n in (num_rows, num_outputs))
    weight /= num_inputs**0.5
    whole = torch.as_strided(x, (room_of(num_rows), num_inputs), x.stride())
    whole[num_rows:] = torch.nan  # the padding
    bias = vectors(1, num_outputs, dtype)[0] if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double())
    return x, weight, bias, expected + (0 if bias is None else bias.double())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("num_rows", [33, 40, 63, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    stages: StreamTiling,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    x, weight, bias, expected = operands(num_rows, num_outputs, num_inputs, dtype, has_bias)
    together = streamed(x, weight, bias, stages)
    close(together, expected)
    others = vectors(33, num_inputs, dtype)
    others[7] = x[0]
    assert torch.equal(streamed(others, weight, bias, stages)[7], together[0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("stages", STAGES_OF_GATED, ids=str)
@pytest.mark.parametrize("num_rows", [33, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products(
    num_outputs: int, num_inputs: int, num_rows: int, stages: StreamTiling, has_bias: bool
) -> None:
    dtype = torch.bfloat16
    x, weight, bias, expected = operands(num_rows, num_outputs, num_inputs, dtype, has_bias)
    gated = streamed(x, weight, bias, stages, is_gated=True)
    close(gated, ops.silu_and_mul(expected))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stages", STAGES_OF_MANY, ids=str)
@pytest.mark.parametrize("num_rows", [65, 96, 128])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_of_many_rows(
    num_outputs: int, num_inputs: int, num_rows: int, stages: StreamTiling, dtype: torch.dtype
) -> None:
    has_bias = num_rows == 96
    x, weight, bias, expected = operands(num_rows, num_outputs, num_inputs, dtype, has_bias)
    together = streamed(x, weight, bias, stages)
    close(together, expected)
    others = vectors(65, num_inputs, dtype)
    others[7], others[64] = x[-1], x[0]
    found = streamed(others, weight, bias, stages)
    assert torch.equal(found[7], together[-1]) and torch.equal(found[64], together[0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("stages", GATED_STAGES_OF_MANY, ids=str)
@pytest.mark.parametrize("num_rows", [65, 128])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products_of_many_rows(
    num_outputs: int, num_inputs: int, num_rows: int, stages: StreamTiling, has_bias: bool
) -> None:
    dtype = torch.bfloat16
    x, weight, bias, expected = operands(num_rows, num_outputs, num_inputs, dtype, has_bias)
    gated = streamed(x, weight, bias, stages, is_gated=True)
    close(gated, ops.silu_and_mul(expected))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("room", "stages"), WITH_SHARES, ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [*SHAPES, (4096, 14_336)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_shares_add_up_to_the_product(
    num_outputs: int, num_inputs: int, room: int, stages: StreamTiling, has_bias: bool
) -> None:
    """The shares sum to the product, also with fewer steps than shares, and a row's sum is the same
    alone."""
    from baton.kernels.products.streamed_product_gluon import streamed_summands

    for num_rows in (room - 27, room):
        x, weight, bias, expected = operands(
            num_rows, num_outputs, num_inputs, torch.bfloat16, has_bias
        )
        found = streamed_summands(x, weight, bias, stages)
        assert found.shape == (num_rows, stages.shares, num_outputs)
        close(found.float().sum(dim=1), expected)
    others = vectors(room - 1, num_inputs)
    others[room // 2 + 3] = x[1]
    assert torch.equal(streamed_summands(others, weight, bias, stages)[room // 2 + 3], found[1])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_rows", [64, 65, 96, 128])
@pytest.mark.parametrize("num_outputs", [2560, 4096, 6144])
def test_the_norm_adds_up_what_models_take(num_outputs: int, num_rows: int) -> None:
    x, weight, bias, expected = operands(num_rows, num_outputs, 4096, torch.bfloat16, True)
    residual = vectors(num_rows, num_outputs)
    scales = vectors(1, num_outputs)[0]
    added = residual.double() + expected
    summand = ops_triton.TritonOps().summand(x, weight, bias)
    stages = choose_stages(x, weight, is_gated=False, is_summand=True)
    assert isinstance(summand, Summands) == (stages is not None and stages.shares > 1)
    normed = ops_triton.TritonOps().add_rms_norm(summand, residual, scales, 1e-5)
    assert isinstance(normed, torch.Tensor)
    close(residual, added)
    close(normed, torch.nn.functional.rms_norm(added, (num_outputs,), scales.double(), 1e-5))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [33, 64, 65, 128])
@pytest.mark.parametrize("num_outputs", [2600, 4096, 5120, 8192])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_is_sent_lies_where_it_is_added_up(
    num_ranks: int, in_parts: bool, num_outputs: int, num_rows: int, dtype: torch.dtype
) -> None:
    """All words of all ranks' slots are written, and no others; one GPU plays all ranks."""
    from baton.kernels.products.streamed_product_gluon import send_streamed_product

    memories = [
        torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(num_ranks)
    ]
    bases = torch.tensor([memory.data_ptr() for memory in memories], device="cuda")
    turns = torch.arange(MAX_PROGRAMS, device="cuda") % 3
    for memory in memories:
        prepare_exchange(memory)
        memory[:SLOTS_AT].view(torch.int32).view(MAX_PROGRAMS, -1)[:, 0] = turns
    shape = (3, MAX_PROGRAMS, MAX_RANKS, MAX_ROW_BYTES // 2)
    end = SLOTS_AT + 2 * torch.Size(shape).numel()
    found = [memory[SLOTS_AT:end].view(torch.int16).view(shape) for memory in memories]
    expected = [torch.full_like(slots, -32768) for slots in found]
    pitch = max(1024, 1 << (num_outputs - 1).bit_length()) // num_ranks
    rows = torch.arange(num_rows, device="cuda")
    for rank in range(num_ranks):
        x, weight, bias, _ = operands(num_rows, num_outputs, 256, dtype, has_bias=rank == 0)
        x.abs_().mul_(1e-3)
        weight[5] = -6e-8  # rounds to -0 in float16, which must not be sent
        stages = choose_stages(x, weight, is_gated=False) or StreamTiling(64, 128, 4, 3)
        assert num_rows > 64 or stages == choose_stages(x, weight, is_gated=False)
        send_streamed_product(x, weight, bias, stages, Exchange(bases, rank), in_parts=in_parts)
        words = streamed(x, weight, bias, stages).view(torch.int16)
        assert bool((words[:, 5] == -32768).any()) == (dtype == torch.float16 and rank > 0)
        words = torch.where(words == -32768, 0, words)
        parts = words.split(pitch, dim=1) if in_parts else [words] * num_ranks
        for slots, part in zip(expected, parts, strict=False):
            slots[turns[:num_rows], rows, rank, : part.shape[1]] = part
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("num_rows", "stages"), [(48, StreamTiling(32, 128, 9, 3)), (112, StreamTiling(64, 128, 4, 4))]
)
def test_chains_of_products_follow_their_inputs(num_rows: int, stages: StreamTiling) -> None:
    """In a replayed graph of norms and GEMMs no input is read before it is written."""
    torch.manual_seed(0)
    weights = [vectors(4096, 4096) for _ in range(6)]
    scales = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    x = vectors(num_rows, 4096)

    def run(product) -> torch.Tensor:  # type: ignore[no-untyped-def]
        y = x
        for index, weight in enumerate(weights):
            y = product(
                ops_triton.TritonOps().rms_norm(y, scales, 1e-5) if index % 3 else y, weight
            )
        return y

    def multiply(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return streamed(y, weight, None, stages)

    run(multiply)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(multiply)
    for seed in range(20):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        expected = run(torch.nn.functional.linear).double()
        difference = (found.double() - expected).norm() / expected.norm()
        assert difference < 2e-2
