"""Do the token tests detect one bad block? Each block of a hand-off is corrupted in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from e2e.handing_over import hand_over
from engines.generation import outputs_of

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NUM_TOKENS = 24
PROMPT, OTHER_PROMPT = (
    tuple(random.Random(seed).choices(range(3, 320), k=90)) for seed in (11, 12)
)  # 6 blocks each, the last one partial

Spoil = Callable[[torch.Tensor, list[int], int], None]


def zero(pool: torch.Tensor, ids: list[int], index: int) -> None:
    pool[ids[index]].zero_()


def swap(pool: torch.Tensor, ids: list[int], index: int) -> None:
    """The block is swapped with another request's. (A swap of two full blocks of one request has no
    effect: keys carry their positions, and attention sums over them in any order.)"""
    a, b = ids[index], pool.shape[0] - 1 - index
    pool[[a, b]] = pool[[b, a]]


def shift(pool: torch.Tensor, ids: list[int], index: int) -> None:
    """All data is shifted by one slot: each head's last slot becomes the next head's first."""
    block = pool[ids[index]]  # [layers, 2, kv_heads, block_size, head_dim]
    block.copy_(block.flatten().roll(block.shape[-1]).view(block.shape))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalEngine, ...]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, seed=3)
    config = EngineConfig(
        model=str(folder), device="cpu", cpu_kv_bytes=4 << 20, enable_prefix_caching=False
    )
    source, puller = (LocalEngine(config, ModelRunner(config)) for _ in range(2))
    other = Request("b" * 32, 0, OTHER_PROMPT, SamplingParams(max_tokens=2))
    source.engine.add(other, hold=True)
    while not source.engine.step().tokens:
        pass
    refs = source.engine.block_refs(other.key, 0, 6)
    puller.runner.kv.tensor[-6:] = source.runner.kv.tensor[refs.block_ids.tolist()]
    source.engine.abort(other.key)
    return source, puller


def tokens_of(pair: tuple[LocalEngine, ...], spoil: Spoil | None, index: int) -> list[int]:
    """Prefill on one engine, copy the blocks, corrupt one, decode on the other."""
    source, puller = pair
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    request = Request(f"{random.getrandbits(128):032x}", 0, PROMPT, sampling)

    def spoil_one(pool: torch.Tensor, ids: list[int]) -> None:
        if spoil is not None:
            spoil(pool, ids, index)

    return hand_over(source, puller, request, spoil_one)


def test_a_faithful_copy_gives_the_same_tokens(pair: tuple[LocalEngine, ...]) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    request = Request("a" * 32, 0, PROMPT, sampling)
    assert tokens_of(pair, None, 0) == outputs_of(pair[0], [request])[request.key]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("spoil", [zero, swap, shift])
def test_one_bad_block_changes_the_tokens(
    pair: tuple[LocalEngine, ...], spoil: Spoil, index: int
) -> None:
    assert tokens_of(pair, spoil, index) != tokens_of(pair, None, 0)
