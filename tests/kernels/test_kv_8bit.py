"""KV in 8 bits: the stored values, attention over them, and that no key is lost among many."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from engines.steps import leading_decodes

from baton.kernels.attention.attention import AttentionBackend, AttentionMetadata
from baton.kernels.attention.attention_torch import TorchAttention
from baton.kernels.kv import kv_blocks
from baton.kernels.kv.kv_8bit import (
    SMALLEST,
    dequantize,
    is_8bit,
    quantize,
    store_kv_8bit,
    values_and_scales,
)

TYPES = [torch.float8_e4m3fn, pytest.param(torch.int8, marks=pytest.mark.slow)]
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def new_pool(blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool of two layers full of stale data: NaN as values and as scales."""
    shape = (blocks, 2, 2, kv_heads, BLOCK_SIZE, dim + 4)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE).view(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_error_is_that_of_the_type(dtype: torch.dtype) -> None:
    x = torch.randn(300, 64) * torch.logspace(-9, 9, 300)[:, None]
    values, scales = quantize(x, dtype)
    most = x.abs().amax(-1)
    error = (values.float() * scales[:, None] - x).abs()
    # e4m3 has three bits after the leading one; int8's step is uniform.
    limit = x.abs() / 16 + most[:, None] * 2e-5 if dtype != torch.int8 else most[:, None] / 253
    assert (error <= limit).all()
    assert torch.equal(values.float().abs().amax(-1) * scales, most) or (
        (values.float().abs().amax(-1) * scales / most - 1).abs().max() < 1e-6
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(wrong: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8)
    x[1, 5] = wrong
    values, scales = quantize(x, dtype)
    assert scales.isnan().tolist() == [False, True, False]
    assert torch.equal(values[::2].float(), quantize(x[::2], dtype)[0].float())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    values, scales = quantize(torch.tensor([[0.0, -0.0], [SMALLEST / 1e6, 0.0]]), dtype)
    assert (values.float() == 0).all()
    assert (scales > 0).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_block_holds_what_was_stored_and_is_copied_with_its_scales(dtype: torch.dtype) -> None:
    pool = new_pool(4, 3, 12, dtype)
    before = pool.view(torch.uint8).clone()
    k, v = torch.randn(2, 5, 3, 12, device=DEVICE)
    blocks = torch.tensor([2, 2, 0, 2, 1], device=DEVICE)
    offsets = torch.tensor([0, 15, 7, 3, 3], device=DEVICE)
    store_kv_8bit(pool, 1, k, v, blocks, offsets)
    assert torch.equal(pool.view(torch.uint8)[:, 0], before[:, 0])
    stored = dequantize(pool.view(-1, *pool.shape[4:]), torch.float32).view(4, 2, 2, 3, 16, 12)
    for token in range(5):
        for which, x in enumerate((k, v)):
            values, scales = quantize(x[token], dtype)
            there = stored[blocks[token], 1, which, :, offsets[token]]
            assert torch.equal(there, values.float() * scales[:, None])
    assert int(stored.isnan().logical_not().sum()) == 2 * 5 * 3 * 12, "nothing else"
    kv_blocks.copy_blocks(pool, torch.tensor([2], device=DEVICE), torch.tensor([3], device=DEVICE))
    assert torch.equal(pool[3].view(torch.uint8), pool[2].view(torch.uint8))


# -- attention ------------------------------------------------------------------------------------


class Step:
    """Sequences with their KV in a pool, and the new tokens of one step.

    `lens`: for each sequence its (earlier positions, new tokens). Unused slots hold NaN.
    """

    def __init__(
        self,
        heads: tuple[int, int],
        dim: int,
        lens: list[tuple[int, int]],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        num_heads, kv_heads = heads
        counts = [-(-sum(pair) // BLOCK_SIZE) for pair in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.pool = new_pool(sum(counts) + 1, kv_heads, dim, kv_dtype)
        for table, (start, _) in zip(tables, lens, strict=True):
            places = torch.arange(start, device=DEVICE)
            blocks = torch.tensor(table, device=DEVICE)[places // BLOCK_SIZE]
            # Some tokens' K and V are many times those of others, as in real models.
            k, v = torch.randn(2, start, kv_heads, dim, device=DEVICE)
            v *= torch.logspace(-4, 2, start, device=DEVICE)[:, None, None]
            store_kv_8bit(self.pool, 1, k, v, blocks, places % BLOCK_SIZE)
        slots = [
            table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
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
        self.num_heads = num_heads
        self.qkv = torch.randn(len(slots), num_heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
        positions = torch.tensor([p for s, n in lens for p in range(s, s + n)], device=DEVICE)
        self.rope = kv_blocks.rope_angles(positions, torch.rand(dim // 2, device=DEVICE))

    def run(
        self, prefill: str = "triton", window: int | None = None, rows_each: int = 1
    ) -> torch.Tensor:
        pytest.importorskip("triton")
        from baton.kernels.attention.attention_gpu import make_gpu_attention

        attention = make_gpu_attention(
            self.pool,
            self.num_heads,
            8,
            16_384,
            self.qkv.dtype,
            prefill=prefill,
            windows=[None, window],
            rows_each=rows_each,
        )
        attention.plan(self.metadata)
        result: torch.Tensor = attention.run(1, self.qkv.clone(), self.rope)
        return result.unflatten(1, (-1, self.qkv.shape[2]))

    def by_torch(self) -> torch.Tensor:
        """The CPU backend's result, over a copy of the pool; float32."""
        backend = TorchAttention(self.pool.cpu().clone())
        slots = self.metadata.slot_mapping.cpu()
        backend.plan(dataclasses.replace(self.metadata, slot_mapping=slots))
        cos, sin = self.rope
        out = backend.run(1, self.qkv.cpu().float(), (cos.cpu(), sin.cpu()))
        return out.unflatten(1, (-1, self.qkv.shape[2]))

    def expected(self, window: int | None = None) -> torch.Tensor:
        """The reference in float64, token by token, from the pool's current content."""
        pool = self.pool.cpu()
        stored = dequantize(pool.reshape(-1, *pool.shape[4:]), torch.float64)
        stored = stored.view(*pool.shape[:4], BLOCK_SIZE, -1)[:, 1].transpose(2, 3)
        cos, sin = (angle.cpu() for angle in self.rope)
        q = kv_blocks.apply_rope(self.qkv[:, : self.num_heads].cpu(), cos, sin).double()
        group = self.num_heads // pool.shape[3]
        rows = []
        for table, seq_len, new in zip(
            self.metadata.block_tables,
            self.metadata.seq_lens,
            self.metadata.query_lens,
            strict=True,
        ):
            k, v = stored[table].transpose(0, 1).flatten(1, 2).repeat_interleave(group, dim=2)
            for place in range(seq_len - new, seq_len):
                seen = slice(0 if window is None else max(0, place + 1 - window), place + 1)
                scores = torch.einsum("hd,khd->hk", q[len(rows)], k[seen]) / math.sqrt(q.shape[2])
                rows.append(torch.einsum("hk,khd->hd", torch.softmax(scores, -1), v[seen]))
        return torch.stack(rows)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative difference in the norm."""
    return float((actual.cpu().double() - expected.double()).norm() / expected.double().norm())


LENS = {
    "decodes": [(0, 1), (15, 1), (16, 1), (90, 1), (63, 1)],
    "prefill": [(0, 5), (0, 65)],
    "mixed": [(40, 1), (7, 1), (30, 40 if HAS_GPU else 18), (0, 1), (70, 2)],
} | ({"long": [(9000, 1), (2000, 100), (1, 1), (0, 300)]} if HAS_GPU else {})
FLOAT32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
# Heads, dimensions, type, sequences. The interpreter is slow, and numpy has no bfloat16.
CASES = [
    ((4, 2), 64, FLOAT32, "mixed"),
    ((4, 2), 64, FLOAT32, "prefill"),
    ((4, 2), 64, HALF, "mixed"),
]
if HAS_GPU:
    of_gpus = [((32, 8), 128, BF16), ((32, 8), 128, HALF), ((8, 1), 80, BF16), ((4, 4), 256, BF16)]
    CASES += [(*each, lens) for each in of_gpus for lens in LENS]
else:
    CASES += [((8, 1), 80, FLOAT32, "decodes")]


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "dtype", "lens"), CASES, ids=str)
def test_triton_computes_what_torch_does(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, lens: str, kv_dtype: torch.dtype
) -> None:
    step = Step(heads, dim, LENS[lens], dtype, kv_dtype)
    out = step.run()
    assert difference(out, step.expected()) < (4e-6 if dtype == FLOAT32 else 1e-2)


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("lens", LENS)
def test_torch_computes_what_is_stored(lens: str, kv_dtype: torch.dtype) -> None:
    step = Step((4, 2), 64, LENS[lens], torch.float32, kv_dtype)
    if HAS_GPU:
        step.run()  # stores the new KV
    else:
        backend = TorchAttention(step.pool)
        backend.plan(step.metadata)
        backend.run(1, step.qkv, step.rope)
    # Triton stores on a GPU, and may round midpoints the other way.
    assert difference(step.by_torch(), step.expected()) < (5e-5 if HAS_GPU else 4e-6)


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triton_stores_what_torch_does(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Stored values are equal except midpoints between two values, which another rotation may round
    either way."""
    pytest.importorskip("triton")
    from baton.kernels.kv.kv_blocks_triton import rotate_and_store

    if not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    heads, kv_heads, dim = 4, 10, 96
    pool, expected = (new_pool(3, kv_heads, dim, kv_dtype) for _ in range(2))
    qkv = (torch.randn(9, heads + 2 * kv_heads, dim, device=DEVICE) * 30).to(dtype)
    qkv[3, 7] = 0
    rope = kv_blocks.rope_angles(
        torch.arange(9, device=DEVICE), torch.rand(dim // 2, device=DEVICE)
    )
    slots = torch.randperm(3 * BLOCK_SIZE, device=DEVICE)[:9]
    k = kv_blocks.apply_rope(qkv[:, heads : heads + kv_heads], *rope)
    v = qkv[:, heads + kv_heads :].clone()
    store_kv_8bit(expected, 1, k, v, slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    rotate_and_store(qkv, rope, None, pool[:, 1], slots)
    (values, scales), (wanted, wanted_scales) = map(values_and_scales, (pool, expected))
    assert torch.equal(scales.isnan(), wanted_scales.isnan())
    torch.testing.assert_close(scales, wanted_scales, rtol=4e-3, atol=0, equal_nan=True)
    stored, torchs = (each.view(kv_dtype).float() for each in (values, wanted))
    differing = (stored != torchs) & ~(stored.isnan() & torchs.isnan())
    if not HAS_GPU:  # the interpreter halves numbers rounded up to a power of two
        differing &= torchs != 2 * stored
    num_k, num_v = differing[:, 1].flatten(2).sum((0, 2)).tolist()
    assert num_k < 0.01 * k.numel()
    assert num_v < 0.01 * v.numel()


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [24, 70])
@pytest.mark.parametrize("lens", LENS)
def test_sliding_windows(window: int, lens: str, kv_dtype: torch.dtype) -> None:
    if not HAS_GPU and (lens, window) not in [("decodes", 24), ("mixed", 24)]:
        pytest.skip("the interpreter is slow")
    step = Step((4, 2), 64, LENS[lens], torch.float32, kv_dtype)
    out = step.run(window=window)
    assert difference(out, step.expected(window)) < 4e-6


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
def test_the_prefill_of_graphs(kv_dtype: torch.dtype) -> None:
    step = Step((4, 2), 64, LENS["mixed"], torch.float32, kv_dtype)
    num_decodes = step.metadata.num_decodes
    step.metadata = dataclasses.replace(step.metadata, graph_decodes=num_decodes + 3)
    out = step.run()
    assert difference(out, step.expected()) < 4e-6


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, *([24] if HAS_GPU else [])])
def test_rows_of_drafts(window: int | None, kv_dtype: torch.dtype) -> None:
    step = Step((4, 2), 64, [(40, 1), (1400, 3), (15, 2)], torch.float32, kv_dtype)
    step.metadata = dataclasses.replace(step.metadata, num_decodes=3)
    assert difference(step.run(window=window, rows_each=3), step.expected(window)) < 4e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("lens", [[(0, 128), (0, 40)], [(30, 100), (7, 1), (300, 300)]], ids=str)
def test_flashinfer(lens: list[tuple[int, int]], kv_dtype: torch.dtype) -> None:
    """Without earlier positions FlashInfer reads K and V as computed, before quantisation."""
    pytest.importorskip("flashinfer")
    step = Step((32, 8), 128, lens, torch.bfloat16, kv_dtype)
    out = step.run("flashinfer")
    assert difference(out, step.expected()) < (0.05 if lens[0][0] == 0 else 0.01)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
def test_what_is_not_finite_reaches_its_own_sequence_alone(
    backend: str, kv_dtype: torch.dtype, wrong: float
) -> None:
    step = Step((4, 2), 64, [(20, 1), (5, 1), (0, 3)], torch.float32, kv_dtype)
    step.qkv[1, -1, 7] = wrong  # V of the second sequence's new token
    out = step.run() if backend == "triton" else step.by_torch()
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False, False, False]


# -- many keys ------------------------------------------------------------------------------------


def sum_in_14_bits(products: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, 32 products at once, as Hopper's tensor cores accumulate
    products of 8-bit floats: with 13 bits after the leading one of the largest term, which may be
    the sum so far; lower bits are truncated."""
    total = torch.zeros(products.shape[:-1], dtype=torch.float64)
    for part in products.double().split(32, dim=-1):
        parts = torch.cat([total[..., None], part], -1)
        most = parts.abs().amax(-1, keepdim=True).clamp(min=1e-300)
        last_bit = torch.exp2(most.log2().floor() - 13)
        total = ((parts / last_bit).trunc() * last_bit).sum(-1)
    return total


def attend_in_e4m3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with both products in e4m3, and no second sum: q [dim], k, v [keys, dim]."""
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
        quantize(x, torch.float8_e4m3fn) for x in (q, k, v)
    )
    scores = sum_in_14_bits(k8.double() * q8.double()) * k_scale * q_scale / math.sqrt(len(q))
    weights = torch.exp(scores - scores.amax())
    of_values, unit = quantize((weights * v_scale)[None], torch.float8_e4m3fn)
    return sum_in_14_bits(of_values.double() * v8.double().T) * unit / weights.sum()


class Haystack:
    """Keys of noise, and late ones of 16 kinds, each kind 1 / 64 of all, that a query for a kind
    weighs only some times as much as others: each alone has next to no weight.

    All V have a common part, and those of a kind its code. A query finds its kind if the output
    points to that code more than to any other.
    """

    def __init__(self, num_keys: int, num_queries: int, dim: int) -> None:
        num_kinds, num_planted = 16, num_keys // 4
        kinds = torch.nn.functional.normalize(torch.randn(num_kinds, dim), dim=-1)
        codes = torch.randn(num_kinds, dim).sign()
        self.k, self.v = torch.randn(2, num_keys, dim)
        kind_of_key = torch.randint(num_kinds, (num_planted,))
        self.k[-num_planted:] = kinds[kind_of_key] * math.sqrt(dim)
        self.v[-num_planted:] += codes[kind_of_key]
        self.common = 4.0
        self.v += self.common
        self.wanted = torch.arange(num_queries) % num_kinds
        self.q = kinds[self.wanted] * 1.5 + torch.randn(num_queries, dim) * 0.1
        self.codes = codes - codes.mean(0)

    def expected(self) -> torch.Tensor:
        """The reference in float64, [queries, dim]."""
        scores = self.q.double() @ self.k.double().T / math.sqrt(self.q.shape[1])
        return torch.softmax(scores, -1) @ self.v.double()

    def share_found(self, out: torch.Tensor) -> float:
        found = ((out.cpu().double() - self.common) @ self.codes.double().T).argmax(-1)
        return float((found == self.wanted).float().mean())


def attend(hay: Haystack, kv_dtype: torch.dtype, prefill: str | None = None) -> torch.Tensor:
    """Attention in bfloat16; each query is a head of one token of a sequence: a decode, or with
    `prefill` the last of two tokens."""
    num_keys, dim = hay.k.shape
    heads, dtype = len(hay.q), torch.bfloat16
    num_blocks = -(-num_keys // BLOCK_SIZE)
    if kv_dtype.itemsize == 1:
        pool = new_pool(num_blocks, 1, dim, kv_dtype)
    else:
        shape = (num_blocks, 2, 2, 1, BLOCK_SIZE, dim)
        pool = torch.zeros(shape, dtype=kv_dtype, device=DEVICE)
    places = torch.arange(num_keys, device=DEVICE)
    k, v = (x.to(DEVICE, dtype)[:, None] for x in (hay.k, hay.v))
    store = store_kv_8bit if is_8bit(pool) else kv_blocks.store_kv
    store(pool, 1, k, v, places // BLOCK_SIZE, places % BLOCK_SIZE)
    new = 1 if prefill is None else 2  # their K and V are written again, not rotated
    metadata = AttentionMetadata(
        [new], [num_keys], [range(num_blocks)], places[-new:], int(prefill is None)
    )
    q = hay.q.to(DEVICE, dtype).expand(new, -1, -1)
    qkv = torch.cat([q, k[-new:], v[-new:]], dim=1).contiguous()
    rope = kv_blocks.rope_angles(places[:new] * 0, torch.zeros(dim // 2, device=DEVICE))
    backend: AttentionBackend
    if HAS_GPU:
        from baton.kernels.attention.attention_gpu import make_gpu_attention

        name = prefill or "triton"
        backend = make_gpu_attention(pool, heads, 1, num_keys, dtype, prefill=name)
    else:
        backend = TorchAttention(pool, dtype=dtype)
    backend.plan(metadata)
    out = backend.run(1, qkv, rope)
    assert isinstance(out, torch.Tensor)
    return out[-1].unflatten(0, (-1, dim))


@pytest.mark.parametrize("kv_dtype", TYPES, ids=str)
@pytest.mark.parametrize("prefill", [None, "triton"])
@pytest.mark.parametrize("num_keys", [32_768, *([131_072] if HAS_GPU else [])])
def test_a_kind_of_keys_is_found_as_in_16_bits(
    num_keys: int, prefill: str | None, kv_dtype: torch.dtype
) -> None:
    hay = Haystack(num_keys, 16, 64) if not HAS_GPU else Haystack(num_keys, 32, 128)
    assert hay.share_found(hay.expected()) == 1
    in_16, in_8 = attend(hay, torch.bfloat16, prefill), attend(hay, kv_dtype, prefill)
    assert hay.share_found(in_8) >= hay.share_found(in_16) - 0.01
    assert difference(in_8, hay.expected()) < 0.02


def test_products_of_e4m3_would_not_find_it() -> None:
    """The test above detects products of values that are not converted before they are
    multiplied."""
    hay = Haystack(32_768, 5, 64)
    out = torch.stack([attend_in_e4m3(q, hay.k, hay.v) for q in hay.q])
    assert hay.share_found(out) < 0.5
    assert difference(out, hay.expected()) > 0.2
