"""Each attention backend against float64 softmax, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engines.steps import leading_decodes
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kernels.attention.attention import AttentionBackend, AttentionMetadata
from baton.kernels.attention.attention_torch import TorchAttention

BACKENDS: dict[str, Callable[[torch.Tensor], AttentionBackend]] = {"torch": TorchAttention}
BLOCK_SIZE, LAYERS, LAYER = 4, 2, 1


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


@dataclass
class Step:
    """Sequences in a pool full of NaN, and the new tokens of one step."""

    pool: torch.Tensor
    metadata: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]  # per sequence: all positions, [seq_len, kv_heads, dim]
    values: list[torch.Tensor]


def make_step(heads: Heads, lens: list[tuple[int, int]], seed: int, blocks: int = 200) -> Step:
    """`lens`: for each sequence its (earlier positions, new tokens)."""
    generator = torch.Generator().manual_seed(seed)
    ids = random.Random(seed).sample(range(blocks), blocks)
    pool = torch.full((blocks, LAYERS, 2, heads.kv, BLOCK_SIZE, heads.dim), math.nan)
    keys, values, tables, slots = [], [], [], []
    for start, new in lens:
        # One block more than needed, as a scheduler may reserve.
        table = [ids.pop() for _ in range(math.ceil((start + new) / BLOCK_SIZE) + 1)]
        both = torch.randn(2, start + new, heads.kv, heads.dim, generator=generator)
        for position in range(start):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            pool[block, LAYER, :, :, offset] = both[:, position]
        slots += [
            table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, start + new)
        ]
        tables.append(table)
        keys.append(both[0])
        values.append(both[1])
    metadata = AttentionMetadata(
        query_lens=[new for _, new in lens],
        seq_lens=[start + new for start, new in lens],
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        num_decodes=leading_decodes([new for _, new in lens]),
    )
    q = torch.randn(len(slots), heads.q, heads.dim, generator=generator)
    k = torch.cat([key[start:] for key, (start, _) in zip(keys, lens, strict=True)])
    v = torch.cat([value[start:] for value, (start, _) in zip(values, lens, strict=True)])
    return Step(pool, metadata, q, k, v, keys, values)


def attend(backend: AttentionBackend, step: Step, rows: slice = slice(None)) -> torch.Tensor:
    """Run the planned backend on q, k and v with a rotation by zero."""
    qkv = torch.cat((step.q, step.k, step.v), dim=1)[rows]
    cos = torch.ones(len(qkv), 1, qkv.shape[2])
    out = backend.run(LAYER, qkv, (cos, torch.zeros_like(cos)))
    assert isinstance(out, torch.Tensor)
    return out.unflatten(1, (-1, qkv.shape[2]))


def run(name: str, step: Step) -> torch.Tensor:
    backend = BACKENDS[name](step.pool)
    backend.plan(step.metadata)
    return attend(backend, step)


def reference(step: Step) -> np.ndarray:
    """Causal GQA in float64, one query and head at a time."""
    outputs, token = [], 0
    pairs = zip(step.metadata.query_lens, step.metadata.seq_lens, strict=True)
    for index, (query_len, seq_len) in enumerate(pairs):
        key, value = step.keys[index].double().numpy(), step.values[index].double().numpy()
        group = step.q.shape[1] // key.shape[1]
        for position in range(seq_len - query_len, seq_len):
            query = step.q[token].double().numpy()
            row = []
            for head in range(query.shape[0]):
                scores = key[: position + 1, head // group] @ query[head] / math.sqrt(len(query[0]))
                weights = np.exp(scores - scores.max())
                row.append(weights @ value[: position + 1, head // group] / weights.sum())
            outputs.append(row)
            token += 1
    return np.array(outputs)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(4, 1, 16), Heads(3, 3, 24)], ids=str)
@settings(max_examples=12, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_equals_plain_attention(
    name: str, heads: Heads, lens: list[tuple[int, int]], seed: int
) -> None:
    step = make_step(heads, lens, seed)
    np.testing.assert_allclose(run(name, step).numpy(), reference(step), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lens", [(0, 300), (70, 129), (3, 128), (500, 1), (511, 130)])
def test_long_chunks(name: str, lens: tuple[int, int]) -> None:
    step = make_step(Heads(2, 1, 16), [lens, (5, 1)], seed=3)
    np.testing.assert_allclose(run(name, step).numpy(), reference(step), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_slice_gives_the_same_bits_in_any_batch(name: str) -> None:
    lens = [(17, 1), (0, 9), (40, 1), (12, 5)]
    together = run(name, make_step(Heads(4, 2, 64), lens, seed=5)).split([new for _, new in lens])
    for index, part in enumerate(together):
        step = make_step(Heads(4, 2, 64), lens, seed=5)
        first = sum(new for _, new in lens[:index])
        mine = slice(first, first + lens[index][1])
        alone = AttentionMetadata(
            query_lens=step.metadata.query_lens[index : index + 1],
            seq_lens=step.metadata.seq_lens[index : index + 1],
            block_tables=step.metadata.block_tables[index : index + 1],
            slot_mapping=step.metadata.slot_mapping[mine],
            num_decodes=leading_decodes(lens[index][1:]),
        )
        backend = BACKENDS[name](step.pool)
        backend.plan(alone)
        assert torch.equal(attend(backend, step, mine), part)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_plans_steps_of_changing_shape(name: str) -> None:
    for lens in ([(0, 7)], [(0, 200), (3, 1)], [(90, 1)], [(2, 3)]):
        step = make_step(Heads(2, 1, 16), lens, seed=8)
        backend = BACKENDS[name](step.pool)
        for metadata in (make_step(Heads(2, 1, 16), [(4, 2)], seed=1).metadata, step.metadata):
            backend.plan(metadata)
        out = attend(backend, step)
        np.testing.assert_allclose(out.numpy(), reference(step), rtol=1e-4, atol=2e-6)
