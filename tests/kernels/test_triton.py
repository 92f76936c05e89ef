"""Each Triton kernel against its torch reference: on a GPU if there is one, else interpreted."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from engines.steps import leading_decodes

from baton.core.request.sampling_params import SamplingParams
from baton.kernels.attention import decode_attention_triton, prefill_tiles
from baton.kernels.attention.attention import AttentionBackend, AttentionMetadata
from baton.kernels.attention.attention_gpu import GpuAttention, make_gpu_attention
from baton.kernels.attention.attention_torch import TorchAttention
from baton.kernels.attention.decode_shares import divide, max_shares
from baton.kernels.kv import kv_blocks
from baton.kernels.kv.kv_blocks import HeadNorms
from baton.kernels.kv.kv_blocks_triton import rotate_and_store
from baton.kernels.layers import ops
from baton.kernels.layers.ops_triton import TritonOps, silu_and_mul
from baton.kernels.layers.quantise_triton import quantise
from baton.kernels.products.fp8_product import takes_groups
from baton.kernels.products.gemv_triton import (
    MAX_FEW_ROWS,
    Tiling,
    few_rows_product,
    few_rows_tiling,
    gemv,
)
from baton.kernels.products.weights import (
    FP8,
    Activations,
    BlockScaled,
    Fp8Rows,
    Fp8Weight,
    RowScaled,
)
from baton.kernels.results_triton import fill_in, write_results
from baton.kernels.sampling import sampling
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.sampling_triton import VocabularyPart, sample_unfiltered

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
HEADS = [(4, 4), (4, 2), (8, 1)] + ([(32, 8), (24, 8), (16, 2)] if HAS_GPU else [])
DIMS = [64, 80] + ([96, 128, 256] if HAS_GPU else [])
NUM_DRAWN = 10 if HAS_GPU else 3  # rows: the interpreter runs one at a time


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Equal up to the rounding of the type, relative in the norm, so that the magnitude of values
    does not matter."""
    limit = (2e-6 if expected.dtype == torch.float32 else 1e-2) * scale
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert difference < limit, f"{difference:.2e}"


def close_to_float32(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` is computed on the CPU in float32; only the rounding of `actual`'s type
    remains."""
    close(actual.cpu(), expected.to(actual.dtype), scale=2)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 96), (5, 4096), (3, 1000)])
def test_norms(tokens: int, dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(n, dim, dtype=dtype) for n in (tokens, tokens, 1))
    weight = weight[0]
    close(TritonOps().rms_norm(x, weight, 1e-5), ops.Ops().rms_norm(x, weight, 1e-5))
    summed = x + residual
    normed = TritonOps().add_rms_norm(x, residual, weight, 1e-5)
    close(normed, ops.Ops().rms_norm(summed, weight, 1e-5))
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 160), (7, 1500)])
def test_silu_and_mul(tokens: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = randn(tokens, 2 * dim, dtype=dtype) * 3
    close(silu_and_mul(gate_up), ops.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(96, 100), (40, 4096), (9000 if HAS_GPU else 300, 48)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemv(outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(1, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double())
    expected = expected + (0 if bias is None else bias.double())
    close(gemv(x, weight, bias), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 16, 33, MAX_FEW_ROWS])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 130), (65, 257), (64, 256), (32, 640)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows(outputs: int, inputs: int, rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if has_bias else None
    tiling = Tiling(outputs=32, inputs=128 // dtype.itemsize * 2, stages=3)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    expected = expected + (0 if bias is None else bias.double())
    together = few_rows_product(x, weight, bias, tiling)
    close(together, expected.to(dtype))
    close(few_rows_product(x[1:2], weight, bias, tiling)[0], together[1])


@pytest.mark.parametrize("rows", [2, 16, 17, 32, 33, MAX_FEW_ROWS])
@pytest.mark.parametrize("outputs", [14_336, 64_128])
def test_tilings_of_few_rows(outputs: int, rows: int) -> None:
    x, weight = (randn(n, 256, dtype=torch.bfloat16) for n in (rows, outputs))
    tiling = few_rows_tiling(x, weight)
    assert (tiling is not None) == (outputs > 32_000)
    if tiling is not None:
        padded = max(16, 1 << (rows - 1).bit_length())
        stage = (tiling.outputs + padded) * tiling.inputs * 2
        assert stage * tiling.stages <= 227 << 10, "a program's shared memory"
        if HAS_GPU:
            expected = torch.nn.functional.linear(x.double(), weight.double())
            close(few_rows_product(x, weight, None, tiling), expected.to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_store(
    has_norms: bool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    tokens, blocks, block_size = 9, 8, 4
    qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    positions = torch.randint(0, 100_000, (tokens,), device=DEVICE)
    angles = kv_blocks.rope_angles(positions, torch.rand(dim // 2, device=DEVICE))
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens]
    pool = torch.full((blocks, 3, 2, kv_heads, block_size, dim), math.nan, device=DEVICE).to(dtype)
    expected_pool = pool.clone()
    q_and_k, norms = qkv[:, : heads + kv_heads], None
    if has_norms:
        norms = HeadNorms(randn(dim, dtype=dtype), randn(dim, dtype=dtype), 1e-5)
        q_and_k = kv_blocks.norm_heads(q_and_k, kv_heads, norms)
    rotated = kv_blocks.apply_rope(q_and_k, *angles)
    k, v = rotated[:, heads:], qkv[:, heads + kv_heads :]
    kv_blocks.store_kv(expected_pool, 1, k, v, slots // block_size, slots % block_size)
    values = qkv[:, heads + kv_heads :].clone()
    rotate_and_store(qkv, angles, norms, pool[:, 1], slots)
    close(qkv[:, : heads + kv_heads], rotated)
    assert torch.equal(qkv[:, heads + kv_heads :], values)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    close(pool.nan_to_num(), expected_pool.nan_to_num())


def drawn(temperature: float, key: int) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature=temperature), key)


def sampled(
    logits: torch.Tensor, rows: list[SampleSpec], part: VocabularyPart | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    temperatures = torch.tensor([row.params.temperature for row in rows], device=DEVICE)
    keys = torch.tensor([sampling.as_signed(row.key) for row in rows], device=DEVICE)
    token_ids = torch.full((len(rows),), -7, device=DEVICE)
    logprobs = torch.full((len(rows),), math.nan, device=DEVICE)
    sample_unfiltered(logits, temperatures, keys, token_ids, logprobs, part)
    return token_ids, logprobs


def sampled_by_ranks(
    logits: torch.Tensor, rows: list[SampleSpec], num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of all ranks, run one after the other: first to collect each rank's summand, then
    with the sum.

    The padding of the last rank is larger than any logit.
    """
    vocab_size = logits.shape[1]
    width = -(-vocab_size // num_ranks)
    padded = torch.nn.functional.pad(logits, (0, num_ranks * width - vocab_size), value=1e3)
    parts = padded.split(width, dim=1)
    summands: list[torch.Tensor] = []

    def add_up(summand: torch.Tensor) -> torch.Tensor:
        summands.append(summand.clone())
        return torch.stack(summands[:num_ranks]).sum(0)

    for _ in range(2):
        found = [
            sampled(part, rows, VocabularyPart(rank, num_ranks, vocab_size, add_up))
            for rank, part in enumerate(parts)
        ]
    token_ids, logprobs = found[0]
    for other_ids, other_logprobs in found[1:]:
        assert torch.equal(token_ids, other_ids)
        torch.testing.assert_close(logprobs, other_logprobs, rtol=0, atol=0, equal_nan=True)
    return token_ids, logprobs


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # a rank with padding only
@pytest.mark.parametrize(
    ("vocab_size", "num_ranks"),
    [(9, 4), (4099, 2), (4100, 3), pytest.param(9, 8, marks=pytest.mark.slow)],
)
def test_ranks_that_share_the_vocabulary_sample_as_one_does(
    vocab_size: int, num_ranks: int
) -> None:
    """Ranks with parts of the vocabulary sample one rank's tokens; log-probabilities are summed
    over other chunks."""
    generator = random.Random(vocab_size)
    rows = [
        drawn(generator.choice([0.0, 0.3, 1.0, 2.0]), key)
        for key in [0, (1 << 64) - 1, *(generator.getrandbits(64) for _ in range(NUM_DRAWN))]
    ]
    logits = randn(len(rows), vocab_size, dtype=torch.bfloat16).float() * 4
    ids, logprobs = sampled_by_ranks(logits, rows, num_ranks)
    alone_ids, _ = sampled(logits, rows)
    expected_ids, expected_logprobs = sampling.sample(logits, rows)
    assert ids.tolist() == alone_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


def test_of_equals_on_several_ranks_the_lowest_is_taken() -> None:
    logits = torch.full((3, 9000), -1.0, device=DEVICE)
    logits[0, [2999, 3000, 8999]] = 1.0
    logits[1, [6000, 8999]] = 0.0
    ids, _ = sampled_by_ranks(logits, [drawn(0.0, 0)] * 3, 3)
    assert ids.tolist() == [2999, 6000, 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
def test_what_is_no_number_on_one_rank_is_none_on_all() -> None:
    logits = randn(3, 90) * 4
    logits[0, 80], logits[1, 3] = math.nan, math.inf
    ids, logprobs = sampled_by_ranks(logits, [drawn(0.0, 0)] * 3, 3)
    assert logprobs.isnan().tolist() == [True, True, False]
    assert all(0 <= token_id < 90 for token_id in ids.tolist())


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered")  # by numpy
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_where_all_tokens_of_a_chunk_are_impossible_the_others_have_probabilities(
    num_ranks: int,
) -> None:
    logits = randn(4, 4099) * 4
    logits[0, 2048:] = logits[1, :2100] = logits[2, 1:] = logits[3] = -math.inf
    rows = [drawn(0.0, 0), drawn(1.0, 5), drawn(2.0, 7), drawn(0.0, 0)]
    found = sampled(logits, rows) if num_ranks == 1 else sampled_by_ranks(logits, rows, num_ranks)
    expected_ids, expected_logprobs = sampling.sample(logits, rows)
    assert found[0][:3].tolist() == expected_ids[:3].tolist()
    torch.testing.assert_close(found[1], expected_logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert expected_logprobs.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("vocab_size", [50, 4096, 10_000 if HAS_GPU else 5000])
def test_samples_as_the_reference_does(vocab_size: int) -> None:
    generator = random.Random(vocab_size)
    rows = [
        drawn(generator.choice([0.0, 0.3, 1.0, 2.0]), key)
        for key in [0, 1, (1 << 64) - 1, *(generator.getrandbits(64) for _ in range(13))]
    ]
    logits = randn(len(rows), vocab_size, dtype=torch.bfloat16) * 4
    ids, logprobs = sampled(logits.float() if not HAS_GPU else logits, rows)
    expected_ids, expected_logprobs = sampling.sample(logits, rows)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [5000, 8999]] = 1.0
    ids, _ = sampled(logits, [drawn(0.0, 0)] * 2)
    assert ids.tolist() == [5000, 0]


# -- attention ------------------------------------------------------------------------------------


class Batch:
    """Sequences in a pool of random KV, and the new tokens of one step."""

    def __init__(
        self, heads: tuple[int, int], dim: int, lens: list[tuple[int, int]], dtype: torch.dtype
    ) -> None:
        """`lens`: for each sequence its (earlier positions, new tokens)."""
        block_size, num_heads, kv_heads = 16, *heads
        counts = [-(-sum(pair) // block_size) for pair in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.pool = randn(sum(counts) + 1, 2, 2, kv_heads, block_size, dim, dtype=dtype)
        slots = [
            table[p // block_size] * block_size + p % block_size
            for table, (start, new) in zip(tables, lens, strict=True)
            for p in range(start, start + new)
        ]
        self.metadata = AttentionMetadata(
            query_lens=[new for _, new in lens],
            seq_lens=[start + new for start, new in lens],
            block_tables=tables,
            slot_mapping=torch.tensor(slots, device=DEVICE),
            num_decodes=leading_decodes([new for _, new in lens]),
        )
        self.qkv = randn(len(slots), num_heads + 2 * kv_heads, dim, dtype=dtype)
        positions = torch.tensor([p for s, n in lens for p in range(s, s + n)], device=DEVICE)
        self.rope = kv_blocks.rope_angles(positions, torch.rand(dim // 2, device=DEVICE))

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        backend.plan(self.metadata)
        return self.by_head(backend.run(1, self.qkv.clone(), self.rope))

    def by_head(self, out: Activations) -> torch.Tensor:
        """[tokens, heads, dim]"""
        assert isinstance(out, torch.Tensor)
        return out.unflatten(1, (-1, self.qkv.shape[2]))

    def reference(self, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, pool after the step) on the CPU, in float32 from the same inputs."""
        pool = self.pool.cpu().float()
        backend = TorchAttention(pool, [None, window])
        slots = self.metadata.slot_mapping.cpu()
        backend.plan(dataclasses.replace(self.metadata, slot_mapping=slots))
        cos, sin = self.rope
        out = backend.run(1, self.qkv.cpu().float(), (cos.cpu(), sin.cpu()))
        return self.by_head(out), pool


def triton_attention(
    batch: Batch, prefill: str = "triton", window: int | None = None, rows_each: int = 1
) -> GpuAttention:
    heads = batch.qkv.shape[1] - 2 * batch.pool.shape[3]
    return make_gpu_attention(
        batch.pool,
        heads,
        8,
        16_384,
        batch.qkv.dtype,
        prefill=prefill,
        windows=[None, window],
        rows_each=rows_each,
    )


LENS = {
    "decodes": [(0, 1), (15, 1), (16, 1), (90, 1), (63, 1)],
    "prefill": [(0, 5), (0, 65)],
    "mixed": [(40, 1), (7, 1), (30, 40 if HAS_GPU else 18), (0, 1), (70, 2)],
    "fresh": [(0, 128), (0, 40)],
} | ({"long": [(9000, 1), (5000, 300), (1, 1), (0, 1025)]} if HAS_GPU else {})


INTERPRETED = [((4, 2), 64, "mixed"), ((8, 1), 80, "decodes"), ((4, 4), 64, "prefill")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("lens", LENS)
def test_attention(heads: tuple[int, int], dim: int, lens: str, dtype: torch.dtype) -> None:
    if not HAS_GPU and (heads, dim, lens) not in INTERPRETED:
        pytest.skip("the interpreter is slow")
    batch = Batch(heads, dim, LENS[lens], dtype)
    expected, expected_pool = batch.reference()
    close_to_float32(batch.run(triton_attention(batch)), expected)
    close_to_float32(batch.pool, expected_pool)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 24])
def test_prefill_in_a_graph(window: int | None) -> None:
    batch = Batch((4, 2), 64, LENS["mixed"], torch.float32)
    expected, _ = batch.reference(window)
    num_decodes = batch.metadata.num_decodes
    batch.metadata = dataclasses.replace(batch.metadata, graph_decodes=num_decodes + 3)
    attention = triton_attention(batch, window=window)
    for _ in range(2):  # the second run finds the first one's data in the fixed buffers
        close_to_float32(batch.run(attention), expected)


@pytest.mark.parametrize("window", [1, 24, 70] + ([100, 1000, 20_000] if HAS_GPU else []))
@pytest.mark.parametrize("lens", LENS)
def test_sliding_windows(window: int, lens: str) -> None:
    if not HAS_GPU and (lens, window) not in [("decodes", 24), ("prefill", 24), ("mixed", 1)]:
        pytest.skip("the interpreter is slow")
    batch = Batch((4, 2), 64, LENS[lens], torch.float32)
    expected, _ = batch.reference(window)
    close_to_float32(batch.run(triton_attention(batch, window=window)), expected)


@pytest.mark.parametrize("has_many_heads", [False, True])
@pytest.mark.parametrize("window", [None, pytest.param(24, marks=pytest.mark.slow), 700])
def test_one_long_sequence_among_short_ones(
    window: int | None, has_many_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the long sequence is split into shares of its keys, more than are merged at once, some
    outside the window. With many heads fewer shares are merged at once, several heads together."""
    most = 0 if has_many_heads else 1 << 30
    monkeypatch.setattr(decode_attention_triton, "_MANY_HEADS", most)
    batch = Batch((2, 1), 64, [(1, 1), (2300, 1), (64, 1)], torch.float32)
    expected, _ = batch.reference(window)
    close_to_float32(batch.run(triton_attention(batch, window=window)), expected)


DRAFTS = {
    "drafts": ([(40, 1), (61, 4), (0, 2), (15, 3)], 4),
    "none": ([(40, 1), (16, 1)], 2),
    "beside a prompt": ([(63, 3), (7, 1), (30, 18)], 2),
    "several shares": ([(1, 1), (1400, 4)], 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), *([(32, 8), (16, 2), (4, 4)] if HAS_GPU else [])])
@pytest.mark.parametrize("lens", DRAFTS)
def test_rows_of_drafts(
    lens: str,
    heads: tuple[int, int],
    is_graph: bool,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row of a decode with drafts equals a separate decode, whatever else is in the batch."""
    if not HAS_GPU and is_graph == (window is None):
        pytest.skip("the interpreter is slow")
    pairs, num_decodes = DRAFTS[lens]
    batch = Batch(heads, 64, pairs, dtype)
    plain = batch.metadata
    expected, expected_pool = batch.reference(window)
    num_rows = sum(plain.query_lens[:num_decodes])
    has_prompt = num_decodes < len(pairs)
    batch.metadata = dataclasses.replace(
        plain,
        num_decodes=num_decodes,
        is_graph=is_graph and not has_prompt,
        graph_decodes=num_rows + 3 if is_graph and has_prompt else None,
    )
    monkeypatch.setattr(decode_attention_triton, "_MANY_HEADS", 0)
    attention = triton_attention(batch, window=window, rows_each=4)
    for _ in range(1 + is_graph):
        close_to_float32(batch.run(attention), expected)
    close_to_float32(batch.pool, expected_pool)


@pytest.mark.parametrize("kind", [BlockScaled, RowScaled])
@pytest.mark.parametrize("lens", ["drafts", "several shares", "beside a prompt"])
def test_decodes_quantise_as_if_behind(lens: str, kind: type[Fp8Weight]) -> None:
    """The output of the single kernel, or of the one that merges shares, is quantised as by a
    separate kernel. Beside prompts, or for a weight whose GEMM takes one scale per row, it stays in
    floats."""
    pairs, num_decodes = DRAFTS[lens]
    batch = Batch((4, 2), 128, pairs, torch.bfloat16)
    batch.metadata = dataclasses.replace(batch.metadata, num_decodes=num_decodes)
    weight = kind(randn(64, 4 * 128).to(FP8), torch.ones(1, 4, device=DEVICE))
    attention = triton_attention(batch, rows_each=4)
    attention.plan(batch.metadata)
    floats, found = (
        attention.run(1, batch.qkv.clone(), batch.rope, None, reader) for reader in (None, weight)
    )
    assert isinstance(floats, torch.Tensor)
    if num_decodes < len(pairs) or not takes_groups(batch.qkv, weight):
        assert isinstance(found, torch.Tensor) and torch.equal(found, floats)
        return
    expected = quantise(floats, weight)
    assert isinstance(found, Fp8Rows)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


@given(
    lens=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 200_000)), min_size=1, max_size=70),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    is_8bit=st.booleans(),
)
def test_keys_are_divided_evenly(lens: list[int], kv_heads: int, is_8bit: bool) -> None:
    shares, indptr = divide(lens, kv_heads, is_8bit=is_8bit)
    assert len(shares) <= max_shares(len(lens), kv_heads, is_8bit=is_8bit)
    sizes = []
    by_place = shares[np.argsort(shares[:, 0])]
    assert (by_place[:, 0] == np.arange(len(shares))).all()
    assert (np.diff(shares[:, 3] - shares[:, 2]) <= 0).all(), "the longest come first"
    for sequence, length in enumerate(lens):
        mine = by_place[indptr[sequence] : indptr[sequence + 1]].tolist()
        assert [row[1] for row in mine] == [sequence] * len(mine)
        assert [0, *(row[3] for row in mine)] == [*(row[2] for row in mine), length]
        sizes += [end - first for _, _, first, end in mine]
    even = sum(lens) / (1024 / kv_heads)
    assert min(sizes) >= 1
    assert max(sizes) <= max(even, 64) + 64


@pytest.mark.parametrize("is_8bit", [False, True])
def test_the_last_shares_are_short(is_8bit: bool) -> None:
    """If each sequence is one share, and all would end in the same late round, the last ones are
    split."""
    shares, indptr = divide([1040] * 256, 8, is_8bit=is_8bit)
    sizes = shares[:, 3] - shares[:, 2]
    assert len(shares) > max_shares(256, 8, is_8bit=is_8bit) - 4
    assert set(sizes[:200]) == {1040} and set(sizes[220:]) == {80, 320}
    assert set(np.diff(indptr)) == {1, 4}
    uneven = [500, 1200] * 128
    assert len(divide(uneven, 8, is_8bit=is_8bit)[0]) == 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), pytest.param((6, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_graph", [False, True])
def test_prompts_behind_long_contexts(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype, is_graph: bool
) -> None:
    """Prompts after long contexts have few tiles, which are split along the keys."""
    batch = Batch(heads, 64, [(1090, 5), (0, 3), (530, 40)], dtype)
    expected, _ = batch.reference(window)
    if is_graph:
        batch.metadata = dataclasses.replace(batch.metadata, graph_decodes=0)
    attention = triton_attention(batch, window=window)
    for _ in range(2):
        close_to_float32(batch.run(attention), expected)


@given(
    slices=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 20_000)), min_size=1, max_size=9),
    tile_queries=st.sampled_from([1, 9, 32, 64]),
    max_shares=st.sampled_from([264, 132, 66, 33, 16, 4]),
)
def test_each_query_sees_each_of_its_keys_once(
    slices: list[tuple[int, int]], tile_queries: int, max_shares: int
) -> None:
    """`slices`: (new tokens, earlier tokens)."""
    query_lens = [new for new, _ in slices]
    seq_lens = [sum(pair) for pair in slices]
    tiles, joined = prefill_tiles.divide(query_lens, seq_lens, tile_queries, max_shares)
    num_queries, num_slices = sum(query_lens), len(slices)
    assert len(tiles) <= prefill_tiles.max_tiles(num_queries, num_slices, tile_queries, max_shares)
    assert len(joined) <= prefill_tiles.max_joined(max_shares)
    by_tile: dict[tuple[int, int], list[list[int]]] = {}
    for of, first, *share in tiles.tolist():
        by_tile.setdefault((of, first), []).append(share)
    assert [*by_tile] == [
        (of, first)
        for of, new in enumerate(query_lens)
        for first in reversed(range(0, new, tile_queries))
    ]
    expected, place = [], 0
    for (of, first), shares in by_tile.items():
        begins, ends, places, counts = zip(*shares, strict=True)
        last = min(first + tile_queries, query_lens[of])
        assert [0, *ends] == [*begins, seq_lens[of] - query_lens[of] + last]
        assert set(counts) == {len(shares)}
        if len(shares) > 1:
            assert places == (*range(place, place + len(shares)),)
            expected.append([of, first, place, len(shares)])
            place += len(shares)
    assert joined.tolist() == expected
    assert not place or len(tiles) <= max_shares


def test_padding_rows_share_the_padding_block() -> None:
    batch = Batch((4, 2), 64, [(33, 1), (0, 1), (0, 1)], torch.float32)
    slots = batch.metadata.slot_mapping.clone()
    slots[1:] = 0
    batch.metadata = AttentionMetadata(
        [1] * 3, [34, 1, 1], [*batch.metadata.block_tables[:1], [0], [0]], slots, 3
    )
    expected, _ = batch.reference()
    close_to_float32(batch.run(triton_attention(batch))[:1], expected[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (8, 1)])
def test_flashinfer(heads: tuple[int, int], lens: str, is_graph: bool) -> None:
    pytest.importorskip("flashinfer")
    batch = Batch(heads, 128, LENS[lens], torch.bfloat16)
    expected, expected_pool = batch.reference()
    num_decodes = batch.metadata.num_decodes
    if is_graph and num_decodes < len(batch.metadata.query_lens) and lens != "long":
        batch.metadata = dataclasses.replace(batch.metadata, graph_decodes=num_decodes + 3)
    close_to_float32(batch.run(triton_attention(batch, "flashinfer")), expected)
    close_to_float32(batch.pool, expected_pool)


WIDE_LENS = {
    "mixed": LENS["mixed"],
    "fresh": LENS["fresh"],
    "behind contexts": [(40, 1), (3000, 1), (1090, 70), (0, 3), (2500, 33)],
    "many": [(300, 1), (0, 700), (8000, 257)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(32, 8), (4, 4), (14, 2), (16, 1)])
@pytest.mark.parametrize("lens", WIDE_LENS)
def test_prompts_in_tiles_of_hopper(
    lens: str, heads: tuple[int, int], dim: int, dtype: torch.dtype, is_graph: bool
) -> None:
    """The kernel in prefill_gluon.py is right, also beside decodes; values after a sequence's end
    are not read."""
    batch = Batch(heads, dim, WIDE_LENS[lens], dtype)
    lengths, tables = batch.metadata.seq_lens, batch.metadata.block_tables
    for length, table in zip(lengths, tables, strict=True):
        batch.pool[table[-1], :, :, :, (length - 1) % 16 + 1 :] = float("nan")
    expected, _ = batch.reference()
    if is_graph:
        num_decodes = batch.metadata.num_decodes
        batch.metadata = dataclasses.replace(batch.metadata, graph_decodes=num_decodes + 2)
    attention = triton_attention(batch)
    assert attention._graph_prefill._wide is not None
    for _ in range(2):
        close_to_float32(batch.run(attention), expected)


@pytest.mark.parametrize(("dim", "block_size"), [(128, 16), (64, 64)])
def test_the_prefill_of_hopper_compiles_without_a_gpu(dim: int, block_size: int) -> None:
    """The kernel compiles with the installed version of Triton, since Gluon's interface is not
    stable."""
    program = Path(__file__).with_name("compile_prefill.py")
    command = [sys.executable, str(program), str(dim), str(block_size)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "compiled\n"


@pytest.mark.gpu
def test_flashinfer_keeps_one_slices_nan_from_the_others() -> None:
    pytest.importorskip("flashinfer")
    from baton.kernels.attention.attention_flashinfer import has_own_keys

    for first, is_own in ((128, True), (129, False)):
        batch = Batch((32, 8), 128, [(0, first), (0, 200)], torch.bfloat16)
        lens = batch.metadata.query_lens
        assert has_own_keys(lens, batch.metadata.seq_lens) is is_own
        batch.qkv[first:] = math.nan
        out = batch.run(triton_attention(batch, "flashinfer"))
        assert out[first:].isnan().all() and not out[:first].isnan().any()


@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 300])
def test_results_of_the_first_rows_are_written_and_nothing_else(num_rows: int) -> None:
    token_ids = torch.randint(0, 2**40, (400,), device=DEVICE)
    logprobs = torch.randn(400, device=DEVICE)
    written = torch.full((400,), -1), torch.full((400,), 7.0)
    if HAS_GPU:
        written = written[0].pin_memory(), written[1].pin_memory()
    write_results(token_ids, logprobs, *(each[:num_rows] for each in written))
    if HAS_GPU:
        torch.cuda.synchronize()
    assert torch.equal(written[0][:num_rows], token_ids[:num_rows].cpu())
    assert torch.equal(written[1][:num_rows], logprobs[:num_rows].cpu())
    assert (written[0][num_rows:] == -1).all() and (written[1][num_rows:] == 7.0).all()


@pytest.mark.parametrize("num_tokens", [1, 128, 200])
def test_awaited_tokens_are_filled_in(num_tokens: int) -> None:
    numbers = torch.Generator().manual_seed(num_tokens)
    token_ids = torch.arange(1000, 1300)
    sampled = torch.arange(64) * 3
    places = torch.randint(-1, 64, (num_tokens,), generator=numbers)
    expected = token_ids.clone()
    for token, place in enumerate(places.tolist()):
        if place >= 0:
            expected[token] = sampled[place]
    token_ids, places, sampled = (each.to(DEVICE) for each in (token_ids, places, sampled))
    fill_in(token_ids[:num_tokens], places, sampled)
    assert token_ids.cpu().tolist() == expected.tolist()
